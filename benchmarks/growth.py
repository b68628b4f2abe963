r"""Measure how this library's rates grow, and draw them.

    taskset -c 1 python benchmarks/growth.py --axis batch context group vocabulary devices --output
    growth.png

Every point is a GRPO step: tokens sampled per CPU-second of its sampling, and tokens trained on,
each response with its prompt, per CPU-second of its update; the median of the rounds, with the
lowest and highest. The rows are printed and, with --output, written to a CSV file and drawn beside
it, for which matplotlib is needed. Devices are simulated ones of this CPU: more of them do the same
work.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "drivers")]

from cases import Case, tiny  # noqa: E402
from peers import Driver, rounds  # noqa: E402

AXES = {
    "batch": {n: Case("grpo", n, 64, 64) for n in (8, 16, 32, 64, 128)},
    "context": {n: Case("grpo", 16, n, 64) for n in (64, 256, 512, 1024)},
    "group": {n: Case("grpo", 32 // n, 256, 64, samples=n) for n in (1, 2, 4, 8, 32)},
    "vocabulary": {n: Case("grpo", 8, 64, 32, vocabulary=n) for n in (2_048, 32_768, 151_936)},
    "devices": {n: Case("grpo", 32, 64, 64) for n in (1, 2, 4, 8)},
}
"""Axis -> size -> case."""
WORDS = {
    "batch": "prompts of a step, 64 + 64 tokens",
    "context": "tokens of each of 16 prompts, + 64",
    "group": "samples of a prompt, 32 in all, 256 + 64",
    "vocabulary": "words, 8 prompts, 64 + 32",
    "devices": "simulated devices, 32 prompts, 64 + 64",
}
KINDS = ("sampling", "training")
HEAD = ("axis", "size", "what", "median", "lowest", "highest", "CPU-s of the first two steps")


def measure(axis: str, number: int, small: bool) -> list[tuple]:
    """Let all sizes of an axis take so many steps, in turn; rows of HEAD."""
    cases = {size: tiny(case) if small else case for size, case in AXES[axis].items()}
    devices = {size: str(size if axis == "devices" else 1) for size in cases}
    drivers = {
        size: Driver("ours", sys.executable, case, number, JAX_NUM_CPU_DEVICES=devices[size])
        for size, case in cases.items()
    }
    rows = []
    for size, steps in rounds(drivers, number).items():
        more = cases[size].prompts * cases[size].samples * cases[size].prompt
        for kind, count in zip(KINDS, (0, more), strict=True):
            rates = [(step["tokens"] + count) / step["parts"][kind] for step in steps]
            figures = map(round, (statistics.median(rates), min(rates), max(rates)))
            rows.append((axis, size, kind, *figures, round(drivers[size].first, 1)))
    return rows


def draw(rows: list[tuple], path: Path) -> None:
    """Draw a panel for each axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    axes = list(dict.fromkeys(row[0] for row in rows))
    figure, panels = pyplot.subplots(1, len(axes), figsize=(2.9 * len(axes), 2.5), squeeze=False)
    for axis, panel in zip(axes, panels[0], strict=True):
        for kind in KINDS:
            some = [row[1:] for row in rows if (row[0], row[2]) == (axis, kind)]
            sizes, _, middle, low, high, _ = zip(*some, strict=True)
            panel.plot(sizes, middle, marker="o", label=kind)
            panel.fill_between(sizes, low, high, alpha=0.2)
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, [f"{size:,}" for size in sizes])
        panel.minorticks_off()
        panel.set_ylim(bottom=0)
        panel.set_xlabel(WORDS[axis], fontsize=8)
        panel.tick_params(labelsize=8)
    panels[0][0].set_ylabel("tokens per CPU-second")
    panels[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=70, pil_kwargs={"optimize": True})


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--axis", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument("--output", type=Path, metavar="PLOT.png")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="only show that it runs")
    arguments = parser.parse_args()
    print(*HEAD, sep=",")
    rows = []
    for axis in arguments.axis:
        rows += (some := measure(axis, arguments.rounds, arguments.tiny))
        for row in some:
            print(*row, sep=",", flush=True)
    if arguments.output:
        with arguments.output.with_suffix(".csv").open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([HEAD, *rows])
        draw(rows, arguments.output)


if __name__ == "__main__":
    main()
