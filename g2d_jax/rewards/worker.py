"""A verifier worker: `python -m g2d_jax.rewards.worker CPU_SECONDS MEMORY_MB`, started by pool.py.

The worker imports math-verify once and then forks one grader per answer, so that nothing an answer does to the
interpreter (caches, memory, crashes) reaches the next one, and a killed grader costs milliseconds. The kernel limits a
grader: CPU seconds by ITIMER_PROF with the default action, memory by RLIMIT_AS. A verdict therefore depends on the
work an answer makes and not on how busy the machine is. A grader says nothing but its exit status, and cannot write
into files.

Lines of JSON on stdin and stdout. Request: [gold, answer], or [gold, null] to ask whether the gold can be read
(`verify.parses`). Reply: [verdict, CPU seconds]; TIMEOUT is the verdict of every grader that leaves without one. The
first reply is []: the worker is ready.
End of file on stdin ends the worker, so it does not outlive its parent. JAX is never imported.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import resource
import signal
import sys
from typing import NoReturn

from g2d_jax.records import Verdict
from g2d_jax.rewards.verify import grade, parses

_VERDICTS = {10: Verdict.CORRECT, 11: Verdict.INCORRECT, 12: Verdict.UNSCORABLE, 13: Verdict.NO_ANSWER}

# Graded once before the first fork: imports, parser tables and caches that every grader then inherits.
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
    for stream in (0, 1):  # whatever is printed from here on goes nowhere
        os.dup2(null, stream)
    logging.disable(logging.CRITICAL)  # math-verify warns that its alarms are off
    sys.set_int_max_str_digits(0)  # sympy prints and reads long integers; the CPU limit bounds them
    for gold, answer in _WARM_UP:
        grade(gold, answer)
    gc.freeze()
    replies.write(b"[]\n")
    os.dup2(null, 2)  # what went wrong before this point is shown
    for line in requests:
        gold, answer = json.loads(line)
        reply = _grade_apart(gold, answer, cpu_seconds, memory_mb)
        replies.write(json.dumps(reply).encode() + b"\n")


def _grade_apart(gold: str, answer: str | None, cpu_seconds: float, memory_mb: int) -> tuple[str, float]:
    """Grade one answer in a process of its own; return the reply."""
    grader = os.fork()
    if grader == 0:
        _run_grader(gold, answer, cpu_seconds, memory_mb)
    _, status, usage = os.wait4(grader, 0)
    verdict = _VERDICTS.get(os.waitstatus_to_exitcode(status), Verdict.TIMEOUT)
    return verdict.value, usage.ru_utime + usage.ru_stime


def _run_grader(gold: str, answer: str | None, cpu_seconds: float, memory_mb: int) -> NoReturn:
    """Grade under limits and leave with the verdict's exit status. No exception gets past this point."""
    status, status_of = 1, {verdict: code for code, verdict in _VERDICTS.items()}
    try:
        os.closerange(3, 1024)  # the pipe of the replies
        limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: 0}
        if sys.platform == "linux":  # other kernels do not enforce it
            limits[resource.RLIMIT_AS] = memory_mb << 20
        for limit, value in limits.items():
            resource.setrlimit(limit, (value, value))
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})  # both may come from the parent
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        status = status_of[parses(gold) if answer is None else grade(gold, answer)]
    except RecursionError:  # nested too deeply to be read
        status = status_of[Verdict.INCORRECT]
    finally:  # also of a MemoryError, and of math-verify's own TimeoutException, which is a BaseException
        os._exit(status)


if __name__ == "__main__":
    main()
