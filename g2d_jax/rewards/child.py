"""The parent's end of one worker process: start it, ask it one thing at a time, and end it without a trace."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from g2d_jax.rewards.frames import HEADER, write_frame

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
        with tempfile.TemporaryFile() as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                env=_environment(),
                cwd=os.sep,
                start_new_session=True,  # Ctrl-C is the parent's business
            )
            try:
                self.unconfined = str(self._receive(time.monotonic() + START_SECONDS)["unconfined"])
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
        assert self._process.stdin is not None
        try:
            write_frame(self._process.stdin.fileno(), {"gold": gold, "answer": answer})
        except OSError as error:
            raise WorkerDied from error
        return self._receive(time.monotonic() + wall_seconds)

    def kill(self) -> None:
        """Make the worker give up at once, from any thread; its owner then sees WorkerDied."""
        self._process.terminate()

    def stop(self, grace: float = 2.0) -> None:
        """End the worker and whatever it is grading, and reap it. Safe to call twice."""
        process = self._process
        for step in (self._close_input, process.terminate):
            step()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace)
                break
        else:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        assert process.stdout is not None
        process.stdout.close()

    def _close_input(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _receive(self, deadline: float) -> dict[str, Any]:
        (length,) = HEADER.unpack(self._read(HEADER.size, deadline))
        if length > 1 << 20:
            raise WorkerDied
        return dict(json.loads(self._read(length, deadline)))

    def _read(self, length: int, deadline: float) -> bytes:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        data = b""
        while len(data) < length:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise WorkerOverdue
            part = os.read(fd, length - len(data))
            if not part:
                raise WorkerDied
            data += part
        return data


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
