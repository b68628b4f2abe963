"""The report of runs side by side: compare.html, compare.md, compare.csv, in a folder of their own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations

from etils import epath

from g2d_jax.report import format as fmt
from g2d_jax.report.contrasts import compare
from g2d_jax.report.format import UNKNOWN, number
from g2d_jax.report.page import Note, Part, Report, Section, write
from g2d_jax.report.read import SAMPLING, Comparison
from g2d_jax.report.samples import most_different
from g2d_jax.report.study import row_cells
from g2d_jax.report.tables import Table, sheet, table
from g2d_jax.runtime.storage import PathLike
from g2d_jax.study import stats
from g2d_jax.workdir import absolute

FILES = ("compare.html", "compare.md", "compare.csv", "figures")
COLUMNS = ("run", "policy", "before_run", "before_policy", "measure", "value")
"""Of compare.csv. before_*: of a difference, what is subtracted; "" for a policy's own figures."""

RESULT_NOTE = (
    "Costs are of all that led to a policy but supervised fine-tuning. K: steps of online training behind it. "
    "Intervals are 95 %, over problems; they say nothing about another seed of training. Greedy accuracy, entropy, "
    "length and what was truncated are of all problems that a run evaluated."
)

DIFFERENCES = (
    "± standard error, clustered by problem; 95 % interval: over another draw of problems. Beyond noise: the interval "
    "leaves zero out. Better, equal, worse: problems on which the second policy's accuracy is higher, the same, lower."
)


def check_output(output: PathLike, files: Sequence[str] = FILES, what: str = "a comparison") -> epath.Path:
    """Return the folder that these files may be written to. Raises ValueError if it holds others."""
    folder = absolute(output)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: give --output a folder")
    others = sorted(child.name for child in folder.iterdir() if child.name not in files) if folder.exists() else []
    if others:
        raise ValueError(f"{folder} holds other things than {what} ({others[0]}): choose another --output")
    return folder


def write_comparison(comparison: Comparison, content: Report, output: PathLike) -> list[str]:
    """Write `FILES` into a folder, which is made if it is not there; returns their paths. content: its `report`.

    The same comparison gives the same bytes. Raises ValueError as `check_output`; OSError.
    """
    return write(content, sheet(COLUMNS, records(comparison)), check_output(output), "compare")


def report(comparison: Comparison) -> Report:
    """Put together all that a comparison shows. Raises ValueError for damaged completions."""
    labels = " · ".join(f"{side.mark}: {side.label}" for side in comparison.sides)
    count = math.comb(len(comparison.rows), 2)
    chance = f" Of {count} pairs without any difference about {0.05 * count:.1f} would seem beyond noise by chance."
    return Report(
        kind="comparison",
        name=labels if len(labels) <= 60 else f"{len(comparison.sides)} runs compared",
        eyebrow=f"G2D comparison · {len(comparison.sides)} runs",
        headline=headline(comparison),
        warnings=comparison.warnings,
        sections=[
            Section("results", "Result", [*map(Note, notes(comparison)), results(comparison), _runs(comparison)]),
            Section("differences", "Differences", [Note(DIFFERENCES + chance * (count > 4)), differences(comparison)]),
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
    size = fmt.spread(pair.difference, pair.sem)
    noise = {True: "beyond noise", False: "within noise", None: "too few problems to tell"}[pair.is_beyond_noise]
    return f"{reached}, {second.name} {fmt.percent(second.accuracy.mean)} %: {size} points apart, {noise}."


def notes(comparison: Comparison) -> list[str]:
    """How many problems are common, what costs leave out, and which runs have the same settings."""
    count, sides = len(comparison.problems), comparison.sides
    others = [f"{n - count:,} of {side.mark}" for side in sides if (n := len(side.stage.problems)) > count]
    left = f"; {', '.join(others)} are not, and count nowhere here" if others else ", all there are"
    texts = [f"{count:,} problems are common to all{left}.", RESULT_NOTE]
    if comparison.left_out:
        listed = ", ".join(f"{policy} of {mark}" for mark, policy in comparison.left_out)
        texts.append(f"Evaluated once for several of these runs, and listed with the first of them: {listed}.")
    starts = dict.fromkeys((side.mark, row.policies[0].outside) for side, row in comparison.rows)
    texts += [
        f"{mark} starts from {start}: what was done there is in neither its costs nor its K."
        for mark, start in starts
        if start
    ]
    same = [side.mark for side, changes in comparison.settings if not changes]
    return [*texts, *([f"{', '.join(same)}: all settings as those of {sides[0].mark}."] if same else [])]


def results(comparison: Comparison) -> Table:
    """Policies with accuracy, pass@k, length, entropy, K, seed and costs."""
    cells = row_cells([row for _, row in comparison.rows])
    rows = []
    for (side, row), own in zip(comparison.rows, cells, strict=True):
        reached = {"policy": row.name, "K": fmt.count(row.steps), "accuracy % [95 %]": fmt.interval(row.accuracy)}
        rows.append({**reached, **own, "run": side.label})
    return table(f"Policies on the {fmt.count(len(comparison.problems))} common problems", rows)


def _runs(comparison: Comparison) -> Table:
    """Build the tables of the runs and of how they were evaluated."""
    heads = {"num_generations": "answers each", "max_new_tokens": "max tokens"}
    rows = [
        {
            "run": side.mark,
            "seed": str(side.run.config.get("seed", UNKNOWN)),
            "evaluation": side.stage.name,
            "split": str(side.stage.split),
            "problems": fmt.count(len(side.stage.problems)),
            **{heads.get(name, name): fmt.value(number(side.sampling, name)) for name in SAMPLING},
            "config": str(side.run.config.get("name", UNKNOWN)),
            "folder": side.label,
        }
        for side in comparison.sides
    ]
    return table("Runs and how they were evaluated", rows)


def differences(comparison: Comparison) -> Table:
    """Every two policies, the second minus the first."""
    rows = []
    for (_, before), (_, after) in combinations(comparison.rows, 2):
        pair = compare(before, after)
        is_known, ends = pair.is_beyond_noise is not None, f"[{100 * pair.low:+.1f}, {100 * pair.high:+.1f}]"
        rows.append(
            {
                "pair": f"{before.name} → {after.name}",
                "difference": fmt.change(pair.difference, pair.sem),
                "95 % interval": ends if is_known else UNKNOWN,
                **{name: fmt.count(getattr(pair, name)) for name in ("better", "equal", "worse")},
                "beyond noise": {True: "yes", False: "no", None: UNKNOWN}[pair.is_beyond_noise],
            }
        )
    return table("Paired differences in accuracy, points (second minus first)", rows)


def _settings(comparison: Comparison) -> list[Part | None]:
    """List the settings that differ from the first run's, a table for each other run that differs."""
    first, parts = comparison.sides[0], list[Part | None]()
    for side, changes in comparison.settings:
        rows = [dict(zip(("setting", "change"), line.split(": ", 1), strict=True)) for line in changes]
        parts.append(table(f"{first.mark} ({first.label}) -> {side.mark} ({side.label})", rows))
    return parts


def records(comparison: Comparison) -> Iterator[tuple[str, str, str, str, str, float]]:
    """All figures of compare.csv, columns `COLUMNS`: fractions, tokens, nats, seconds."""
    names = [(side.label, row.policies[0].name) for side, row in comparison.rows]
    for name, (_, row) in zip(names, comparison.rows, strict=True):
        accuracy, k = stats.accuracy(row.correct[0]), row.correct[0].shape[1]
        figures = {name: getattr(accuracy, name) for name in ("mean", "sem_clustered", "problems")}
        figures |= {f"pass_at/{k}": stats.pass_at(row.correct[0], k), "steps": row.steps}
        figures |= {measure: row.evaluated(row.split, measure) for measure in ("mean_length", "entropy")}
        figures |= {f"cost/{measure}": cost for measure, cost in row.costs.items()}
        for measure, value in figures.items():
            yield *name, "", "", measure, float(value)
    for (before, (_, row)), (after, (_, other)) in combinations(zip(names, comparison.rows, strict=True), 2):
        for measure, value in compare(row, other)._asdict().items():
            yield *after, *before, measure, float(value)
