r"""Verify 10,000 answers, 5 % of them made to stall or fill the verifier, and print rate, memory
and what was given up.

    python benchmarks/verifier_bombs.py                  the limits of config.reward(), two workers
    python benchmarks/verifier_bombs.py --cpu-seconds 2

The ordinary answers are those of tests/rewards/answers.jsonl, over and over; the pool's memory of
verdicts is off, so that each is graded anew. Every bomb is another expression. Resident memory is
sampled from /proc (Linux): that of the workers and of the children that grade, added up; pages they
share are counted in each.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from collections import Counter
from pathlib import Path

from g2d_jax import config as settings
from g2d_jax.records import Verdict
from g2d_jax.rewards.pool import VerifierPool

ANSWERS = Path(__file__).resolve().parents[1] / "tests" / "rewards" / "answers.jsonl"
KNOWN_MISSES = ("natural_log",)  # see tests/rewards/test_grade.py


def bombs(n: int) -> list[tuple[str, str, str]]:
    """One of each kind, made different by n: (kind, gold, answer). None of the answers is right."""
    nested = 40 + n % 60
    return [
        ("10^10^n", "2", rf"10^{{10^{{{n + 10}}}}}"),
        ("tower", "2", rf"9^{{9^{{9^{{{n + 9}}}}}}}"),
        ("power", "2", rf"{n + 3}^{{2000000000}}"),
        ("factorial", "2", rf"({n + 1}00000000)!"),
        ("double factorial", "2", rf"(({n + 20})!)!"),
        ("binomial", "2", rf"\binom{{10^{{9}}+{n}}}{{10^{{8}}}}"),
        ("sum", "2", rf"\sum_{{k=1}}^{{1000000000}} \frac{{1}}{{k^2+{n + 1}}}"),
        ("product", "2", rf"\prod_{{k=1}}^{{50000000}} (k+{n + 1})"),
        ("expansion", "a", rf"(a+b+c+d+e+f+g)^{{{n + 60}}}"),
        ("integral", "2", rf"\int_0^{{{n + 1}}} \sin(x^x)^{{x^x}} dx"),
        ("long integer", "2", "7" * (9000 - n)),
        ("long word", "2", "z" * (9000 - n)),
        ("parentheses", "2", "(" * (4000 - n) + "2" + ")" * (4000 - n)),
        ("braces", "2", "{" * (4000 - n) + "3" + "}" * (4000 - n)),
        ("roots", "2", r"\sqrt{" * (1200 - n) + "2" + "}" * (1200 - n)),
        ("fractions", "2", r"\frac{1}{1+" * nested + "x" + "}" * nested),
        ("powers of x", "x", "x^{" * nested + "x" + "}" * nested),
        ("factors", "x", "".join(f"(x+{i})" for i in range(n + 100, n + 500))),
        ("sines", "x", r"\sin(" * nested + f"x+{n}" + ")" * nested),
        ("list", "2", ",".join(str(i) for i in range(n, n + 1500))),
    ]


def mixture(answers: int, share: float) -> list[tuple[str, str, str, bool | None]]:
    """(kind, gold, text, whether it is right, None where that is not known), shuffled alike each
    time."""
    with ANSWERS.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    ordinary = [
        row for row in rows if row["category"] != "adversarial" and row["id"] not in KNOWN_MISSES
    ]
    hostile = round(answers * share)
    kinds = len(bombs(0))
    made = [bomb for n in range(-(-hostile // kinds)) for bomb in bombs(n)][:hostile]
    mixed = [(kind, gold, rf"\boxed{{{answer}}}", False) for kind, gold, answer in made]
    mixed += [
        ("ordinary", row["gold"], row["response"], row["expected"])
        for row in (ordinary[i % len(ordinary)] for i in range(answers - hostile))
    ]
    random.Random(0).shuffle(mixed)
    return mixed


class Memory(threading.Thread):
    """Samples the resident memory of a pool's workers and their children until it is told to
    stop."""

    def __init__(self, pool: VerifierPool) -> None:
        super().__init__(daemon=True)
        self.peak_mb = self.peak_worker_mb = self.peak_child_mb = 0.0
        self._pool, self._done = pool, threading.Event()

    def run(self) -> None:
        """Twenty samples a second."""
        while not self._done.wait(0.05):
            workers = [worker.process.pid for worker in set(self._pool.workers)]
            children = [pid for worker in workers for pid in _children(worker)]
            sizes = [_resident_mb(pid) for pid in workers], [_resident_mb(pid) for pid in children]
            self.peak_mb = max(self.peak_mb, sum(map(sum, sizes)))
            self.peak_worker_mb = max(self.peak_worker_mb, *sizes[0], 0.0)
            self.peak_child_mb = max(self.peak_child_mb, *sizes[1], 0.0)

    def stop(self) -> None:
        """End the thread."""
        self._done.set()
        self.join()


def _children(pid: int) -> list[int]:
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except OSError:  # gone
        return []


def _resident_mb(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


def main() -> None:
    """Run and print."""
    default = settings.reward()
    parser = argparse.ArgumentParser()
    parser.add_argument("--answers", type=int, default=10_000)
    parser.add_argument("--bombs", type=float, default=0.05, help="share of the answers")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cpu-seconds", type=float, default=default.cpu_seconds)
    parser.add_argument("--memory-mb", type=int, default=2048)
    options = parser.parse_args()
    mixed = mixture(options.answers, options.bombs)
    with VerifierPool(
        options.workers, options.cpu_seconds, options.memory_mb, cache_size=0
    ) as pool:
        # workers start
        pool.score(["x+1"] * options.workers, [rf"\boxed{{{n}+x}}" for n in range(options.workers)])
        memory = Memory(pool)
        memory.start()
        started = time.perf_counter()
        scores = pool.score([gold for _, gold, _, _ in mixed], [text for _, _, text, _ in mixed])
        seconds = time.perf_counter() - started
        memory.stop()
        stats = pool
    right = [
        (score.verdict is Verdict.CORRECT) == known
        for score, (*_, known) in zip(scores, mixed, strict=True)
    ]
    given_up = [
        kind
        for score, (kind, *_) in zip(scores, mixed, strict=True)
        if score.verdict is Verdict.TIMEOUT
    ]
    hostile = sum(kind != "ordinary" for kind, *_ in mixed)
    print(
        f"limits: {options.cpu_seconds:g} CPU seconds and {options.memory_mb} MiB an answer, "
        f"{options.workers} workers"
    )
    print(
        f"{len(scores)} verdicts for {len(mixed)} answers, {hostile} of them bombs; {sum(right)} "
        "as expected"
    )
    print(
        f"{seconds:.1f} s, {len(scores) / seconds:.1f} answers/s; {stats.cpu_seconds:.0f} CPU s "
        "in children"
    )
    print(f"verdicts: {dict(Counter(score.verdict.value for score in scores))}")
    print(f"given up: {len(given_up)}, by kind {dict(Counter(given_up))}")
    sampled = (
        f"all processes {memory.peak_mb:.0f}, a worker {memory.peak_worker_mb:.0f}, a child "
        f"{memory.peak_child_mb:.0f}"
    )
    print(f"peak resident MiB: {sampled} (sampled)")


if __name__ == "__main__":
    main()
