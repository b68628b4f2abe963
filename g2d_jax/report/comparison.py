"""The report of a study whose arms are runs: compare.html, compare.md, compare.csv, in a folder of
their own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import combinations

from g2d_jax.report import curves, study
from g2d_jax.report import format as fmt
from g2d_jax.report.format import UNKNOWN, number
from g2d_jax.report.headlines import comparison_headline as headline
from g2d_jax.report.page import Note, Part, Report
from g2d_jax.report.paired_differences import compare
from g2d_jax.report.read import changed_settings
from g2d_jax.report.rows import SAMPLING, Side, Study
from g2d_jax.report.run import logged_metrics
from g2d_jax.report.samples import most_different
from g2d_jax.report.tables import Figures, Table, table

FILES = ("compare.html", "compare.md", "compare.csv", "figures")

RESULT_NOTE = (
    "Costs are of all that led to a policy but supervised fine-tuning. K: steps of online training "
    "behind it. Intervals are 95 %, over problems only; another seed of training is not in them. "
    "Greedy accuracy, entropy, length and what was truncated are of all problems that a run "
    "evaluated."
)

DIFFERENCES = (
    "± standard error, clustered by problem; 95 % interval: over another draw of problems. It is "
    "of these two policies: another seed of training is not in it, so that it does not tell which "
    "way of training is better; a study of five seeds or more (g2d sweep) may. Better, equal, "
    "worse: problems on which the second policy's accuracy is higher, the same, lower."
)

CURVES_NOTE = (
    "Stages that runs have under one name, over each other. Lines are of what a stage trained on; "
    "fresh samples are of the trained policy itself."
)


def report(runs: Study) -> Report:
    """Put together all that a study whose arms are runs shows. Raises ValueError for damaged
    completions."""
    labels = " · ".join(f"{side.mark}: {side.label}" for side in runs.sides)
    count = len(runs.sides)
    accuracies = study.accuracy_chart("Accuracy on the common problems, % (bars: 95 %)", runs.rows)
    notes_and_tables = [*map(Note, notes(runs)), results(runs), accuracies, evaluated(runs)]
    return Report(
        kind="comparison",
        name=labels if len(labels) <= 60 else f"{count} runs compared",
        eyebrow=f"G2D comparison · {count} runs",
        headline=headline(runs),
        warnings=runs.warnings,
        parts={
            "results": notes_and_tables,
            "differences": differences(runs),
            "frontier": [study.frontier_chart(runs, "flops")],
            "curves": training(runs),
            "problems": most_different(runs),
            "left-out": [study.left_out("Policies left out", "policy", runs)],
            "settings": settings(runs),
        },
        columns=study.COLUMNS,
        figures=partial(records, runs),
    )


def notes(runs: Study) -> list[str]:
    """Say how many problems are common, what costs leave out, and which runs have the same
    settings."""
    count = len(runs.problems)
    sides = runs.sides
    others = []
    for side in sides:
        own = len(side.stage.problems)
        if own > count:
            others.append(f"{own - count:,} of {side.mark}")
    left = ", all there are"
    if others:
        left = f"; {', '.join(others)} are not, and count nowhere here"
    texts = [f"{count:,} problems are common to all{left}.", RESULT_NOTE]
    for side in sides:
        start = next(row.first.external_start for row in runs.rows if row.first.run is side.run)
        if start:
            texts.append(
                f"{side.mark} starts from {start}: what was done there is in neither its costs "
                "nor its K."
            )
    same = [side.mark for side in sides[1:] if not changed_settings(sides[0].run, side.run)]
    if same:
        texts.append(f"{', '.join(same)}: all settings as those of {sides[0].mark}.")
    return texts


def results(runs: Study) -> Table:
    """Show policies with accuracy, pass@k, length, entropy, K and costs."""
    rows = []
    for row, own in zip(runs.rows, study.row_cells(runs.rows), strict=True):
        reached = {
            "policy": row.name,
            "K": fmt.count(row.steps),
            "accuracy % [95 %]": fmt.interval(row.accuracy),
        }
        rows.append({**reached, **own, **row.group.values})
    return table(f"Policies on the {fmt.count(len(runs.problems))} common problems", rows)


def evaluated(runs: Study) -> Table:
    """Show the runs, and how they were evaluated."""
    heads = {"num_generations": "answers each", "max_new_tokens": "max tokens"}
    rows = []
    for side in runs.sides:
        row = {
            "run": side.mark,
            "seed": str(side.run.seed),
            "evaluation": side.stage.name,
            "split": str(side.stage.split),
            "problems": fmt.count(len(side.stage.problems)),
        }
        for name in SAMPLING:
            row[heads.get(name, name)] = _sampling(side, name)
        row["config"] = str(side.run.config.get("name", UNKNOWN))
        row["folder"] = side.label
        rows.append(row)
    return table("Runs and how they were evaluated", rows)


def _sampling(side: Side, name: str) -> str:
    """Format a setting of an evaluation's sampling: a list of texts, or a number."""
    setting = side.sampling[name]
    if isinstance(setting, list):
        return fmt.setting(setting)
    return fmt.value(number(side.sampling, name))


def differences(runs: Study) -> list[Part | None]:
    """Compare every two policies, the second minus the first."""
    rows = []
    for before, after in combinations(runs.rows, 2):
        pair = compare(before, after)
        row = {"pair": f"{before.name} → {after.name}"}
        row["difference"] = fmt.change(pair.difference, pair.sem)
        row["95 % interval"] = UNKNOWN
        if not math.isnan(pair.low):
            row["95 % interval"] = f"[{100 * pair.low:+.1f}, {100 * pair.high:+.1f}]"
        for name in ("better", "equal", "worse"):
            row[name] = fmt.count(getattr(pair, name))
        rows.append(row)
    note = DIFFERENCES
    if len(rows) > 4:
        note += (
            f" Of {len(rows)} pairs without any difference about {0.05 * len(rows):.1f} would "
            "have an interval without zero."
        )
    title = "Paired differences in accuracy, points (second minus first)"
    return [Note(note), table(title, rows)]


def training(runs: Study) -> list[Part | None]:
    """Draw what the runs logged over each other, where stages have the same name."""
    logged = {}
    for side in runs.sides:
        logged[f"{side.mark}: {side.label}"] = logged_metrics(side.run)
    return [Note(CURVES_NOTE), *curves.compared(logged)]


def settings(runs: Study) -> list[Part | None]:
    """List the settings that differ from the first run's, a table for each other run that
    differs."""
    first, *others = runs.sides
    parts: list[Part | None] = []
    for side in others:
        rows = []
        for line in changed_settings(first.run, side.run):
            setting, change = line.split(": ", 1)
            rows.append({"setting": setting, "change": change})
        parts.append(table(f"{first.mark} ({first.label}) -> {side.mark} ({side.label})", rows))
    return parts


def records(runs: Study) -> Iterator[Figures]:
    """Yield all figures, columns `study.COLUMNS`: those of `study.records`, and the differences of
    every two policies.

    arm of a pair: "A: … → B: …", the second minus the first; measure: "paired/difference",
    "paired/sem", ….
    """
    yield from study.records(runs)
    for before, after in combinations(runs.rows, 2):
        arm = f"{before.name} → {after.name}"
        for measure, value in compare(before, after)._asdict().items():
            yield arm, "", "all", "", runs.split, f"paired/{measure}", float(value)
