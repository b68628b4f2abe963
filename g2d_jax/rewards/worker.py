"""A verifier worker: `python -m g2d_jax.rewards.worker CPU_SECONDS MEMORY_MB`, started by pool.py.

The worker imports math-verify once and then forks one grader per answer. No effect of an answer on
the interpreter (caches, memory, crashes) reaches the next one, and a killed grader costs
milliseconds. The kernel limits a grader: CPU seconds by ITIMER_PROF with the default action, memory
by RLIMIT_AS. A verdict therefore depends on the work for an answer, not on the machine's load. A
grader's only output is its exit status; it cannot write to files.

Reference answers come from the user, not from a policy, so one grader reads many. It marks each in
memory shared with the worker; the limits of one answer apply to all of them together. A grader that
exceeds these has marked the previous ones.

Lines of JSON on stdin and stdout. The first reply is []: the worker is ready.

    [gold, answer, places] ─► [verdict, CPU seconds]; a grader that leaves without a verdict means TIMEOUT
    [[gold, gold, …]]      ─► [[can it be read, …], CPU seconds] of the first golds, up to the one that ended the grader

End of file on stdin ends the worker, so it does not outlive its parent. JAX is never imported.
"""

from __future__ import annotations

import gc
import json
import logging
import mmap
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from g2d_jax.records import Verdict
from g2d_jax.rewards.grade import grade, parses

_STATUSES = {Verdict.CORRECT: 10, Verdict.INCORRECT: 11, Verdict.NO_ANSWER: 13}
"""The exit status of a grader by its verdict."""

# Graded once before the first fork: imports, parser tables and caches, which every grader then
# inherits.
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


def main() -> None:
    """Serve requests from stdin until it closes."""
    cpu_seconds, memory_mb = float(sys.argv[1]), int(sys.argv[2])
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):  # later output is discarded
        os.dup2(null, stream)
    logging.disable(logging.CRITICAL)  # math-verify warns that its alarms are off
    sys.set_int_max_str_digits(0)  # sympy prints and reads long integers; the CPU limit bounds them
    for gold, answer in _WARM_UP:
        grade(gold, answer)
    # A garbage collection in a grader would write to, and so copy, memory shared with the worker.
    gc.freeze()
    replies.write(b"[]\n")
    os.dup2(null, 2)  # errors until here are shown
    for line in requests:
        request = json.loads(line)
        is_of_golds = isinstance(request[0], list)
        job: Callable[..., tuple[object, float]] = _read_apart if is_of_golds else _grade_apart
        reply = job(*request, cpu_seconds, memory_mb)
        replies.write(json.dumps(reply).encode() + b"\n")


def _grade_apart(
    gold: str, answer: str, places: int, cpu_seconds: float, memory_mb: int
) -> tuple[str, float]:
    """Grade one answer in its own process; return the reply."""
    status, seconds = _apart(lambda: _graded(gold, answer, places), cpu_seconds, memory_mb)
    verdicts = {its: verdict for verdict, its in _STATUSES.items()}
    return verdicts.get(status, Verdict.TIMEOUT).value, seconds


def _graded(gold: str, answer: str, places: int) -> int:
    """Return the exit status of a verdict."""
    try:
        verdict = grade(gold, answer, places)
    except RecursionError:  # nested too deeply to be read
        verdict = Verdict.INCORRECT
    return _STATUSES[verdict]


def _read_apart(
    golds: Sequence[str], cpu_seconds: float, memory_mb: int
) -> tuple[list[bool], float]:
    """Read reference answers in their own process; return the reply."""
    marks = mmap.mmap(-1, len(golds))  # shared with the grader, and of no file
    status, seconds = _apart(lambda: _mark(golds, marks), cpu_seconds, memory_mb)
    if (
        status == -signal.SIGKILL
    ):  # the machine is out of memory, since no limit kills it so: no gold is at fault
        raise SystemExit(f"a grader was killed after {seconds:.1f} s")
    read = marks[:].rstrip(b"\0")
    return [mark == 2 for mark in read], seconds


def _mark(golds: Sequence[str], marks: mmap.mmap) -> int:
    """Mark each reference answer, in order: 2 for a readable one, 1 for another; 0 means that the
    grader did not reach it. Return an exit status."""
    for place, gold in enumerate(golds):
        marks[place] = 1 + parses(gold)
    return 0


def _apart(job: Callable[[], int], cpu_seconds: float, memory_mb: int) -> tuple[int, float]:
    """Do a job in its own process, under limits; return its exit status, minus a signal, and CPU
    seconds."""
    grader = os.fork()
    if grader == 0:
        _run_grader(job, cpu_seconds, memory_mb)
    _, status, usage = os.wait4(grader, 0)
    return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime


def _run_grader(job: Callable[[], int], cpu_seconds: float, memory_mb: int) -> NoReturn:
    """Do a job under limits and leave with its exit status. No exception gets past this point."""
    status = 1
    try:
        os.closerange(3, 1024)  # the pipe of the replies
        limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: 0}
        if sys.platform == "linux":  # other kernels do not enforce it
            limits[resource.RLIMIT_AS] = memory_mb << 20
        for limit, value in limits.items():
            resource.setrlimit(limit, (value, value))
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        # both may come from the parent
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        status = job()
    # also of a MemoryError, and of math-verify's own TimeoutException, which is a BaseException
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
