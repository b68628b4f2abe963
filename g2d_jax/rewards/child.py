"""The parent's end of one worker process: start it, ask it one thing at a time, and end it without a trace."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

START_SECONDS = 300.0
"""How long a worker may take to import math-verify on a machine that is busy compiling."""


class WorkerDied(Exception):
    """The worker process ended or broke the protocol."""


class WorkerOverdue(Exception):
    """No reply within the wall-clock limit."""


class Child:
    """A running worker process. Not thread-safe: one owner at a time. Raises RuntimeError if it cannot start.

    unconfined: why the worker has no sandbox (sandbox.py) on this system, "" with one.
    """

    def __init__(self, cpu_seconds: float, memory_mb: int) -> None:
        command = [sys.executable, "-P", "-m", "g2d_jax.rewards.worker"]
        command += ["--cpu-seconds", repr(cpu_seconds), "--memory-mb", str(memory_mb)]
        theirs, self._requests = Pipe(duplex=False)
        self._replies, answering = Pipe(duplex=False)
        with tempfile.TemporaryFile() as errors, theirs, answering:
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=answering.fileno(),
                stderr=errors,
                env=_environment(),
                cwd=os.sep,
                start_new_session=True,  # Ctrl-C is the parent's business
            )
            try:
                answering.close()  # now the end of the worker is that of its replies
                self.unconfined = str(self._receive(START_SECONDS)["unconfined"])
            except (WorkerDied, WorkerOverdue) as error:
                self.stop(grace=0.0)
                errors.seek(0)
                said = errors.read()[-2000:].decode(errors="replace").strip()
                raise RuntimeError(
                    "a verifier worker did not start; is math-verify installed (pip install math-verify)?\n" + said
                ) from error
            except BaseException:  # Ctrl-C while it starts
                self.stop(grace=0.0)
                raise

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._process.pid

    def ask(self, gold: str, answer: str, wall_seconds: float) -> dict[str, Any]:
        """Grade one answer. Raises WorkerDied or WorkerOverdue; after either, call stop and start another."""
        try:
            self._requests.send_bytes(json.dumps({"gold": gold, "answer": answer}).encode())
        except OSError as error:
            raise WorkerDied from error
        return self._receive(wall_seconds)

    def kill(self) -> None:
        """Make the worker give up at once, from any thread; its owner then sees WorkerDied."""
        self._process.terminate()

    def stop(self, grace: float = 2.0) -> None:
        """End the worker and whatever it is grading, and reap it. Safe to call twice."""
        process = self._process
        for step in (self._requests.close, process.terminate):
            step()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace)
                break
        else:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._replies.close()

    def _receive(self, seconds: float) -> dict[str, Any]:
        try:
            if self._replies.poll(seconds):
                return dict(json.loads(self._replies.recv_bytes(1 << 20)))
        except (OSError, EOFError) as error:
            raise WorkerDied from error
        raise WorkerOverdue


def _environment() -> dict[str, str]:
    """What a worker needs and no more: no credentials, no JAX or TPU settings, one thread."""
    root = str(Path(__file__).resolve().parents[2])
    inherited = [os.path.abspath(part) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    is_site = any(part in root for part in ("site-packages", "dist-packages"))  # found without help
    return {
        "PATH": os.defpath,
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",  # sympy's order of terms, and so its CPU time, must not vary
        "PYTHONPATH": os.pathsep.join(inherited + ([] if is_site else [root])),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
