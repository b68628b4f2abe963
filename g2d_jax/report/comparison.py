"""The report of runs side by side: compare.html, compare.md, compare.csv, in a folder of their own."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple

from etils import epath

from g2d_jax import accounting
from g2d_jax.report import format as fmt
from g2d_jax.report.format import UNKNOWN, number
from g2d_jax.report.page import Note, Part, Report, Section, write
from g2d_jax.report.read import SAMPLING, Comparison, Row
from g2d_jax.report.samples import most_different
from g2d_jax.report.study import row_cells
from g2d_jax.report.tables import Table, sheet, table
from g2d_jax.runtime.storage import PathLike
from g2d_jax.study import elo, frontier, stats
from g2d_jax.workdir import absolute

FILES = ("compare.html", "compare.md", "compare.csv", "figures")
COLUMNS = ("run", "policy", "before_run", "before_policy", "measure", "value")
"""Of compare.csv. before_*: of a difference, what is subtracted; "" for a policy's own figures."""

RESULT_NOTE = (
    "Costs are of all that led to a policy but supervised fine-tuning. K: steps of online training behind it. "
    "Intervals are 95 %, over problems; they say nothing about another seed of training. Greedy accuracy, entropy, "
    "length and what was truncated are of all problems that a run evaluated."
)

ELO = (
    "A problem is a game between every two policies: the higher accuracy on it wins, equal ones draw, half a win each. "
    "Ratings are the maximum likelihood of the Bradley-Terry model and have the mean 1000; 100 points are 64 of 100 "
    "games. Intervals (95 %) are over another draw of problems."
)


class Pair(NamedTuple):
    """after - before over the common problems, with its interval over another draw of problems.

    better, equal, worse: on how many of them `after` is that.
    """

    before: Row
    after: Row
    paired: stats.Paired
    interval: frontier.Interval
    better: int
    equal: int
    worse: int

    @property
    def is_beyond_noise(self) -> bool | None:
        """Whether the interval leaves 0 out; None with fewer than two problems."""
        return None if math.isnan(self.paired.sem) else self.interval.low > 0 or self.interval.high < 0


@functools.lru_cache(maxsize=1024)  # page and CSV have the same ones
def compare(before: Row, after: Row) -> Pair:
    """Compare two policies problem by problem."""
    apart = after.accuracies - before.accuracies
    paired = stats.paired(before.correct[0], after.correct[0])
    counts = (int((apart > 0).sum()), int((apart == 0).sum()), int((apart < 0).sum()))
    return Pair(before, after, paired, frontier.bootstrap(apart), *counts)


def ratings(comparison: Comparison) -> list[elo.Rating]:
    """Compute the policies' Elo ratings in their order: a problem is won by the higher mean, equal ones are draws."""
    points = elo.outcomes([row.accuracies[0] for row in comparison.rows])
    return elo.elo([row.name for row in comparison.rows], points)


def check_output(output: PathLike) -> epath.Path:
    """Return the folder a comparison may be written to. Raises ValueError if it holds other files."""
    folder = absolute(output)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: give --output a folder")
    others = sorted(child.name for child in folder.iterdir() if child.name not in FILES) if folder.exists() else []
    if others:
        raise ValueError(f"{folder} holds other things than a comparison ({others[0]}): choose another --output")
    return folder


def write_comparison(comparison: Comparison, made: Report, output: PathLike) -> list[str]:
    """Write `FILES` into a folder, which is made if it is not there; returns their paths. made: its `report`.

    The same comparison gives the same bytes. Raises ValueError as `check_output`; OSError.
    """
    return write(made, sheet(COLUMNS, records(comparison)), check_output(output), "compare")


def report(comparison: Comparison) -> Report:
    """Put together all that a comparison shows. Raises ValueError for damaged completions."""
    labels = " · ".join(f"{side.mark}: {side.label}" for side in comparison.sides)
    return Report(
        kind="comparison",
        name=labels if len(labels) <= 60 else f"{len(comparison.sides)} runs compared",
        eyebrow=f"G2D comparison · {len(comparison.sides)} runs",
        headline=headline(comparison),
        warnings=comparison.warnings,
        sections=[
            Section("results", "Result", [*map(Note, notes(comparison)), results(comparison), _runs(comparison)]),
            Section("differences", "Differences", [Note(_differences_note(comparison)), differences(comparison)]),
            Section("elo", "Elo", [Note(ELO), _elo(comparison)]),
            Section("problems", "Problems", most_different(comparison)),
            Section("settings", "Settings", _settings(comparison)),
        ],
    )


def headline(comparison: Comparison) -> str:
    """Which of the runs' last policies is best, and by how much before the next, in one sentence."""
    best, second = sorted(comparison.last, key=lambda row: -row.accuracy.mean)[:2]
    pair, count = compare(second, best), len(comparison.problems)
    over = f"{fmt.count(count)} common problem{'s' * (count != 1)}"
    reached = f"{best.name} answers {fmt.percent(best.accuracy.mean)} % of {over} correctly"
    size = fmt.spread(pair.paired.difference, pair.paired.sem)
    noise = {True: "beyond noise", False: "within noise", None: "too few problems to tell"}[pair.is_beyond_noise]
    return f"{reached}, {second.name} {fmt.percent(second.accuracy.mean)} %: {size} points apart, {noise}."


def notes(comparison: Comparison) -> list[str]:
    """How many problems are common, what costs leave out, and which runs have the same settings."""
    count, sides = len(comparison.problems), comparison.sides
    others = [f"{n - count:,} of {side.mark}" for side in sides if (n := len(side.stage.problems)) > count]
    left = f"; {', '.join(others)} are not, and count nowhere here" if others else ", all there are"
    found = [f"{count:,} problems are common to all{left}.", RESULT_NOTE]
    if comparison.left_out:
        listed = ", ".join(f"{policy} of {mark}" for mark, policy in comparison.left_out)
        found.append(f"Evaluated once for several of these runs, and listed with the first of them: {listed}.")
    starts = [
        (side.mark, row.policies[0].outside) for row, (side, _) in zip(comparison.rows, comparison.files, strict=True)
    ]
    found += [
        f"{mark} starts from {start}: what was done there is in neither its costs nor its K."
        for mark, start in dict.fromkeys(starts)
        if start
    ]
    same = [side.mark for side, changes in comparison.settings if not changes]
    return [*found, *([f"{', '.join(same)}: all settings as those of {sides[0].mark}."] if same else [])]


def results(comparison: Comparison) -> Table:
    """Policies with accuracy, pass@k, length, entropy, K, seed and costs."""
    title = f"Policies on the {fmt.count(len(comparison.problems))} common problems"
    rows = [
        {"policy": row.name, "K": fmt.count(row.steps), **row_cells(row), "run": side.label}
        for row, (side, _) in zip(comparison.rows, comparison.files, strict=True)
    ]
    return table(title, rows)


def _runs(comparison: Comparison) -> Table:
    """Build the tables of the runs and of how they were evaluated."""
    names = {"num_generations": "answers each", "max_new_tokens": "max tokens"}
    rows = [
        {
            "run": side.mark,
            "seed": str(side.run.config.get("seed", UNKNOWN)),
            "evaluation": side.stage.name,
            "split": str(side.sampling["split"]),
            "problems": fmt.count(len(side.stage.problems)),
            **{names.get(name, name): fmt.value(number(side.sampling, name)) for name in SAMPLING},
            "config": str(side.run.config.get("name", UNKNOWN)),
            "folder": side.label,
        }
        for side in comparison.sides
    ]
    return table("Runs and how they were evaluated", rows)


def _pairs(comparison: Comparison) -> list[Pair]:
    return [compare(before, after) for before, after in combinations(comparison.rows, 2)]


def differences(comparison: Comparison) -> Table:
    """Every two policies, the second minus the first."""
    rows = [
        {
            "pair": f"{pair.before.name} → {pair.after.name}",
            "difference": fmt.change(pair.paired.difference, pair.paired.sem),
            "95 % interval": UNKNOWN if pair.is_beyond_noise is None else fmt.points(pair.interval).partition(" ")[2],
            **{name: fmt.count(getattr(pair, name)) for name in ("better", "equal", "worse")},
            "beyond noise": {True: "yes", False: "no", None: UNKNOWN}[pair.is_beyond_noise],
        }
        for pair in _pairs(comparison)
    ]
    return table("Paired differences in accuracy, points (second minus first)", rows)


def _differences_note(comparison: Comparison) -> str:
    note = (
        "± standard error, clustered by problem; 95 % interval: over another draw of problems. Beyond noise: the "
        "interval leaves zero out. Better, equal, worse: problems on which the second policy's accuracy is higher, the "
        "same, lower."
    )
    if (count := math.comb(len(comparison.rows), 2)) > 4:
        note += f" Of {count} pairs without any difference about {0.05 * count:.1f} would seem beyond noise by chance."
    return note


def _elo(comparison: Comparison) -> Table:
    """Elo ratings with intervals, best first."""
    rows = [
        {
            "policy": one.name,
            "rating": f"{one.rating:.0f}",
            "95 % interval": f"{one.low:.0f} to {one.high:.0f}",
            "games": fmt.count(one.games),
        }
        for one in sorted(ratings(comparison), key=lambda one: -one.rating)
    ]
    return table("Elo ratings over the common problems", rows)


def _settings(comparison: Comparison) -> list[Part | None]:
    """List the settings that differ from the first run's, a table for each other run that differs."""
    first, parts = comparison.sides[0], list[Part | None]()
    for side, changes in comparison.settings:
        rows = [dict(zip(("setting", "change"), line.split(": ", 1), strict=True)) for line in changes]
        parts.append(table(f"{first.mark} ({first.label}) -> {side.mark} ({side.label})", rows))
    return parts


def records(comparison: Comparison) -> Iterator[tuple[str, str, str, str, str, float]]:
    """All figures of compare.csv, columns `COLUMNS`: fractions, tokens, nats, seconds, Elo points."""
    names = {
        id(row): (side.label, row.policies[0].name)
        for row, (side, _) in zip(comparison.rows, comparison.files, strict=True)
    }
    for row, rating in zip(comparison.rows, ratings(comparison), strict=True):
        accuracy, k = stats.accuracy(row.correct[0]), row.correct[0].shape[1]
        figures = {name: getattr(accuracy, name) for name in ("mean", "sem_clustered", "problems")}
        figures |= {f"pass_at/{k}": stats.pass_at(row.correct[0], k), "steps": row.steps}
        figures |= {"mean_length": row.evaluated("mean_length"), "entropy": row.evaluated("entropy")}
        figures |= {f"cost/{name}": row.cost(name) for name in accounting.MEASURES if name in row.policies[0].costs}
        figures |= {f"elo/{name}": getattr(rating, name) for name in ("rating", "low", "high")}
        for measure, value in figures.items():
            yield *names[id(row)], "", "", measure, float(value)
    for pair in _pairs(comparison):
        found = {"difference": pair.paired.difference, "sem": pair.paired.sem, "low": pair.interval.low}
        found |= {"high": pair.interval.high, "better": pair.better, "equal": pair.equal, "worse": pair.worse}
        for measure, value in found.items():
            yield *names[id(pair.after)], *names[id(pair.before)], measure, float(value)
