"""A verifier worker: `python -m g2d_jax.rewards.worker --cpu-seconds S --memory-mb M`, started by pool.py.

The worker imports math-verify once and then forks one child per answer, so that nothing an answer does to the
interpreter (caches, memory, crashes) reaches the next one, and a killed child costs milliseconds. The child's limits
are the kernel's: CPU seconds by ITIMER_PROF with the default action, memory by RLIMIT_AS. A verdict therefore depends
on the work an answer makes and not on how busy the machine is. The child can say nothing but its exit status, and on
Linux neither reach the network, start a program, change a file nor touch another process (sandbox.py).

JSON in the frames of multiprocessing.connection, which unpickles nothing, on stdin and stdout.
Ready: {"ready": true, "unconfined": text}, the text being why there is no sandbox, "" with one.
Request: {"gold": text, "answer": text}.
Reply: {"verdict": Verdict, "stopped": null | "cpu" | "memory" | "crash", "cpu_seconds": float, "peak_mb": float}.
End of file on stdin ends the worker, so it does not outlive its parent. JAX is never imported.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import os
import resource
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from g2d_jax.records import Verdict
from g2d_jax.rewards import sandbox
from g2d_jax.rewards.verify import grade

_EXIT_STATUS = {Verdict.CORRECT: 10, Verdict.INCORRECT: 11, Verdict.UNSCORABLE: 12, Verdict.NO_ANSWER: 14}
_OUT_OF_MEMORY = 13
_VERDICT_OF = {status: verdict for verdict, status in _EXIT_STATUS.items()}

# Graded once before the first fork: imports, parser tables and caches that every child then inherits.
_WARM_UP = (
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
    ("x^2+2x+1", "(x+1)^2"),
    (r"\left(3,\frac{\pi}{2}\right)", r"(3,\frac{\pi}{3})"),
    (r"(-\infty,-1)\cup(1,\infty)", r"(1,\infty)\cup(-\infty,-1)"),
    (r"\{1,2\}", "2,1,3"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\3\end{pmatrix}"),
    ("x>3", r"x \ge 3"),
    ("y=2x+3", "y=3x+2"),
)


class _Stop(BaseException):
    """SIGTERM: the parent gave up on the answer at hand."""


def main() -> None:
    """Serve requests from stdin until it closes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu-seconds", type=float, required=True)
    parser.add_argument("--memory-mb", type=int, required=True)
    options = parser.parse_args()
    requests = Connection(os.dup(0), writable=False)
    replies = Connection(os.dup(1), readable=False)  # whatever is printed from here on goes nowhere
    _to_devnull(1)
    logging.disable(logging.CRITICAL)  # math-verify warns that its alarms are off
    sys.set_int_max_str_digits(0)  # sympy prints and reads long integers; the CPU limit bounds them
    sys.dont_write_bytecode = True
    for gold, answer in _WARM_UP:
        grade(gold, answer)
    gc.freeze()
    signal.signal(signal.SIGTERM, _raise_stop)
    child_filter, unconfined = _confine()
    _reply(replies, {"ready": True, "unconfined": unconfined})
    os.dup2(1, 2)  # what went wrong before this point is shown
    limits = (options.cpu_seconds, options.memory_mb, child_filter)
    with contextlib.suppress(EOFError):
        while True:
            request = json.loads(requests.recv_bytes())
            _reply(replies, _grade_in_child(request["gold"], request["answer"], *limits))


def _reply(replies: Connection, message: dict[str, Any]) -> None:
    replies.send_bytes(json.dumps(message).encode())


def _confine() -> tuple[sandbox.Filter | None, str]:
    """Enter the sandbox: the filter of the children and "", or None and why there is no sandbox."""
    try:
        return sandbox.confine(), ""
    except OSError as error:
        return None, error.strerror or str(error)


def _grade_in_child(
    gold: str, answer: str, cpu_seconds: float, memory_mb: int, child_filter: sandbox.Filter | None = None
) -> dict[str, Any]:
    child = os.fork()
    if child == 0:
        _run_child(gold, answer, cpu_seconds, memory_mb, child_filter)
    try:
        _, status, usage = os.wait4(child, 0)
    except _Stop:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        sys.exit(1)
    code = os.waitstatus_to_exitcode(status)
    verdict = _VERDICT_OF.get(code, Verdict.TIMEOUT)
    stopped = None
    if verdict is Verdict.TIMEOUT:
        stopped = {-signal.SIGPROF: "cpu", _OUT_OF_MEMORY: "memory"}.get(code, "crash")
    peak_mb = usage.ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)  # bytes there, else KiB
    seconds = usage.ru_utime + usage.ru_stime
    return {"verdict": verdict.value, "stopped": stopped, "cpu_seconds": seconds, "peak_mb": peak_mb}


def _run_child(
    gold: str, answer: str, cpu_seconds: float, memory_mb: int, child_filter: sandbox.Filter | None
) -> NoReturn:
    """Grade one answer under limits and leave with its exit status. No exception gets past this point."""
    status = 1
    try:
        _to_devnull(0, os.O_RDONLY)
        os.closerange(3, 1024)  # the pipe of the replies
        _limit(cpu_seconds, memory_mb)
        if child_filter is not None:
            child_filter.install()
        status = _EXIT_STATUS[grade(gold, answer)]
    except RecursionError:  # nested too deeply to be read
        status = _EXIT_STATUS[Verdict.INCORRECT]
    except MemoryError:
        status = _OUT_OF_MEMORY
    except BaseException:  # math-verify's own TimeoutException is a BaseException; the reply says "crash"
        status = 1
    finally:
        os._exit(status)


def _limit(cpu_seconds: float, memory_mb: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    if sys.platform == "linux":  # other kernels do not enforce it
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)


def _raise_stop(signum: int, frame: object) -> None:
    raise _Stop


def _to_devnull(fd: int, flags: int = os.O_RDWR) -> None:
    devnull = os.open(os.devnull, flags)
    os.dup2(devnull, fd)
    os.close(devnull)


if __name__ == "__main__":
    main()
