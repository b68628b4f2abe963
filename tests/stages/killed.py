"""Runs of the tiny config that end as they are told, each in a process of its own: see `Runs`."""

import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import ExitStack, suppress
from fnmatch import fnmatch
from pathlib import Path
from types import FrameType
from typing import Any

from forks import Forks, die_with_parent

HERE = Path(__file__).parent
TIMEOUT = 240.0


class Runs:
    """Starts runs, one after the other."""

    def __init__(self, forks: Forks) -> None:
        self._forks = forks

    def __call__(self, workdir: Path, expected: int = 0, **job: Any) -> dict[str, Any]:
        """Run or continue the tiny config in a work directory; what became of it.

        expected: exit status, negative for a signal. until: as in pipeline.run. config: another
        one's file. overrides: of the config. devices: how many. How it ends before it is through:

            file [pattern, seconds]       SIGKILL so long after a file of the work directory appears
            change [pattern, n]           SIGKILL just before the n-th change (from 0) of a path that matches
            after [pattern]               SIGKILL just before the first change after such a path was changed
            call [signal, name, n]        the signal at the n-th call (from 0) of a function of this qualified name;
                                          "INT" is Ctrl-C of the g2d command
            keep [pattern, folder]        nothing: copies the work directory before every such change, to FOLDER/NNNN

        status, text (what was said), changes (how many matched), seconds (from the signal to the
        end).
        """
        code = (
            f"import sys; sys.path.append({str(HERE)!r}); import killed; killed.main(sys.argv[1])"
        )
        done = self._forks.run(
            json.dumps({"workdir": workdir, **job}, default=str), code=code, timeout=2 * TIMEOUT
        )
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        assert answer["status"] == expected, answer
        return answer


def main(job: str) -> None:
    """A process with everything imported, that forks the run and tells how it ended."""
    print(json.dumps(outcome(json.loads(job))), flush=True)


def outcome(job: dict[str, Any]) -> dict[str, Any]:
    """Fork, watch, and tell how it ended."""
    said = Path(f"{job['workdir']}.txt")
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        ours.close()
        work(job, said, theirs)
    theirs.close()
    overdue = threading.Timer(TIMEOUT, os.kill, (child, signal.SIGKILL))
    overdue.daemon = True
    overdue.start()
    with ours:
        changed = watch(job, child, ours) if {"change", "after", "keep"} & job.keys() else 0
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        ended = time.time()
        overdue.cancel()
        told = ours.recv(64)
    seconds = ended - float(told) if told else 0.0
    return {"status": status, "text": said.read_text(), "changes": changed, "seconds": seconds}


def watch(job: dict[str, Any], child: int, ours: socket.socket) -> int:
    """Stop it at each change of a file, and kill it at the one that was named; how many matched."""
    import syscalls

    _, (listener,), *_ = socket.recv_fds(ours, 1, 1)
    workdir, found, over = job["workdir"], 0, False
    with os.fdopen(listener):
        for _, path in syscalls.changes(listener, TIMEOUT):
            relative = os.path.relpath(path, workdir) if path.startswith(f"{workdir}/") else ""
            if not relative:
                continue
            if over:
                os.kill(child, signal.SIGKILL)
                break
            pattern, *rest = job.get("change") or job.get("after") or job["keep"]
            if not fnmatch(relative, pattern):
                continue
            if "keep" in job:
                shutil.copytree(workdir, f"{rest[0]}/{found:04d}", copy_function=copy_if_there)
            if "change" in job and found == rest[0]:
                os.kill(child, signal.SIGKILL)
                break
            over = "after" in job
            found += 1
    return found


def copy_if_there(source: str, target: str) -> None:
    """Another thread may be deleting the file: its call was let through before."""
    with suppress(FileNotFoundError):
        shutil.copy2(source, target)


def work(job: dict[str, Any], said: Path, server: socket.socket) -> None:
    """The child: runs, and never returns."""
    status = 1
    die_with_parent()
    try:
        with open(said, "wb") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        with ExitStack() as stack:
            status = run(job, server, stack)
    except SystemExit as error:
        status = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run(job: dict[str, Any], server: socket.socket, stack: ExitStack) -> int:
    workdir = Path(job["workdir"])
    if {"change", "after", "keep"} & job.keys():
        import syscalls

        listener = syscalls.install()
        socket.send_fds(server, [b"1"], [listener])
        os.close(listener)
    if "file" in job:
        threading.Thread(target=kill_after, args=(workdir, *job["file"]), daemon=True).start()
    if "call" in job:
        sys.settrace(at_call(*job["call"], server))
        stack.callback(sys.settrace, None)
    if "devices" in job:
        os.environ["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={job['devices']}"
    from g2d_jax import pipeline
    from g2d_jax.recipes.config_load import resolve
    from g2d_jax.runtime import processes

    signal.signal(signal.SIGINT, processes.on_interrupt)  # as the g2d command does
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a suite under nohup ignores it
    processes.initialise()
    config = resolve(job.get("config", str(HERE.parent / "tiny.py")), job.get("overrides", ()))
    pipeline.run(config, workdir, until=job.get("until"))
    return 0


def kill_after(workdir: Path, pattern: str, seconds: float) -> None:
    while not list(workdir.glob(pattern)):
        time.sleep(0.0005)
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def at_call(kind: str, name: str, number: int, server: socket.socket) -> Any:
    """A trace function that sends this process a signal at a call. kind: TERM, INT or KILL."""
    left = number

    def look(frame: FrameType, *_: object) -> None:
        nonlocal left
        if frame.f_code.co_qualname != name:
            return  # None: calls only, no lines
        left -= 1
        if left == -1:
            server.send(repr(time.time()).encode())
            os.kill(os.getpid(), signal.Signals[f"SIG{kind}"])

    return look
