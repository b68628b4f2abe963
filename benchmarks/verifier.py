r"""Count verdicts a CPU-second, of equal answers and of other problems' answers, beside another
checkout's.

    python benchmarks/verifier.py math500.jsonl                       this checkout
    python benchmarks/verifier.py math500.jsonl --against ../before   and the package in that folder, in turns

The file has a JSON object a line with an `answer`, as MATH-500 has. "Equal" puts each answer to its
own problem, "other" to the problem seven lines before; of these what is paid is printed, but for
answers that are one by their text or as plain numbers. CPU-seconds are those of this process and of
what the workers grade, not of their start; each measurement is a process of its own, and the pool's
memory of verdicts is off. Rates are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SHIFT = 7
KINDS = ("equal", "other")
MEASURED = {"equal": 20, "other": 1}
"""How often the file is gone through in a measurement: equal answers take milliseconds."""


def golds(file: Path) -> list[str]:
    """The answers of a file of problems."""
    with file.open(encoding="utf-8") as lines:
        return [str(json.loads(line)["answer"]) for line in lines]


def measure(file: Path) -> dict[str, Any]:
    """Verdicts a CPU-second of each kind with the package that is imported, and the line numbers of
    what is paid."""
    import g2d_jax
    from g2d_jax.rewards.pool import VerifierPool

    expected, measured = golds(file), {"package": str(Path(g2d_jax.__file__).resolve())}
    given = {"equal": expected, "other": expected[SHIFT:] + expected[:SHIFT]}
    with VerifierPool(workers=2, cache_size=0) as pool:
        # workers start, and what is imported late is
        pool.score(["x+1"] * 2, [rf"\boxed{{{n}+x}}" for n in range(2)])
        if hasattr(pool, "read"):  # once a run, when problems load; earlier versions did not
            pool.read(expected)
        for kind in KINDS:
            texts = [rf"\boxed{{{answer}}}" for answer in given[kind]]
            before = time.process_time() + pool.cpu_seconds
            for _ in range(MEASURED[kind]):
                scores = pool.score(expected, texts)
            seconds = time.process_time() + pool.cpu_seconds - before
            paid = [line for line, score in enumerate(scores) if score.reward]
            measured[kind] = {"rate": len(texts) * MEASURED[kind] / seconds, "paid": paid}
    return measured


def measured_apart(file: Path, checkout: Path) -> dict[str, Any]:
    """`measure` with a checkout's package, in a process of its own. Raises RuntimeError if another
    one was imported."""
    command = [sys.executable, __file__, str(file), "--measure"]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    measured = json.loads(done.stdout)
    if not Path(measured["package"]).is_relative_to(checkout):
        raise RuntimeError(
            f"{checkout} has no package of its own: {measured['package']} was imported"
        )
    return measured


def is_one(answer: str, other: str) -> bool:
    """Tell whether two answers are the same without any reading: by their text or as plain
    numbers."""
    try:
        return Fraction(answer) == Fraction(other)
    except (ValueError, ZeroDivisionError):
        return answer == other


def main() -> None:
    """Measure in turns and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path, help="problems with answers, JSON lines")
    parser.add_argument("--against", type=Path, help="another checkout's folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.against and not (options.against / "g2d_jax").is_dir():
        parser.error(
            f"--against {options.against}: no checkout is there, which has a folder g2d_jax"
        )
    if options.measure:
        print(json.dumps(measure(options.file)))
        return
    file, answers = options.file.resolve(), golds(options.file)
    checkouts = [ROOT, *([options.against.resolve()] if options.against else [])]
    rounds: dict[Path, list[dict[str, Any]]] = {checkout: [] for checkout in checkouts}
    for number in range(options.rounds):
        for checkout in checkouts if number % 2 else checkouts[::-1]:
            rounds[checkout].append(measured_apart(file, checkout))
    print(f"{len(answers)} problems of {file.name}, {options.rounds} rounds; verdicts a CPU-second")
    for kind in KINDS:
        rates = [
            [measured[kind]["rate"] for measured in rounds[checkout]] for checkout in checkouts
        ]
        columns = [
            f"{statistics.median(of):,.0f} ({min(of):,.0f} to {max(of):,.0f})" for of in rates
        ]
        ratio = (
            f", ratio {statistics.median(rates[0]) / statistics.median(rates[1]):.2f}"
            if options.against
            else ""
        )
        print(f"{kind}: {', against '.join(columns)}{ratio}")
    for checkout in checkouts:
        measured = rounds[checkout][-1]
        pairs = [
            (answers[line], answers[(line + SHIFT) % len(answers)])
            for line in measured["other"]["paid"]
        ]
        wrong = [pair for pair in pairs if not is_one(*pair)]
        print(
            f"{checkout}: {len(measured['equal']['paid'])} of {len(answers)} equal answers are "
            "paid;",
            end=" ",
        )
        print(
            f"{len(wrong)} other problems' answers, beside {len(pairs) - len(wrong)} that are "
            "the same"
        )
        for gold, answer in wrong:
            print(f"  {gold}   is paid for   {answer}")


if __name__ == "__main__":
    main()
