"""The report of a study whose arms are runs: compare.html, compare.md, compare.csv, in a folder of
their own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations

from g2d_jax.report import figures, study
from g2d_jax.report import format as fmt
from g2d_jax.report.format import UNKNOWN, number
from g2d_jax.report.page import Note, Part, Report, Section, write
from g2d_jax.report.paired_differences import compare
from g2d_jax.report.read import SAMPLING, Side, Study, changed_settings
from g2d_jax.report.samples import most_different
from g2d_jax.report.tables import Table, sheet, table

FILES = ("compare.html", "compare.md", "compare.csv", "figures")

RESULT_NOTE = (
    "Costs are of all that led to a policy but supervised fine-tuning. K: steps of online "
    "training behind it. "
    "Intervals are 95 %, over problems only; another seed of training is not in them. Greedy "
    "accuracy, entropy, "
    "length and what was truncated are of all problems that a run evaluated."
)

DIFFERENCES = (
    "± standard error, clustered by problem; 95 % interval: over another draw of problems. It is "
    "of "
    "these two policies: another seed of training is not in it, so that it does not tell which "
    "way of "
    "training is better; a study of five seeds or more (g2d sweep) may. Better, equal, worse: "
    "problems "
    "on which the second policy's accuracy is higher, the same, lower."
)


def write_comparison(runs: Study, content: Report) -> list[str]:
    """Write `FILES` into the study's folder, which is made if it is not there; return their paths.

    content: its `report`. The same runs give the same bytes. Raises OSError.
    """
    return write(content, sheet(study.COLUMNS, records(runs)), runs.workdir, runs.name)


def report(runs: Study) -> Report:
    """Put together all that a study whose arms are runs shows. Raises ValueError for damaged
    completions."""
    labels = " · ".join(f"{side.mark}: {side.label}" for side in runs.sides)
    count = math.comb(len(runs.rows), 2)
    chance = (
        f" Of {count} pairs without any difference about {0.05 * count:.1f} would have an "
        "interval without zero."
    )
    left_out = [{"policy": policy, "why": why} for policy, why in runs.left_out.items()]
    return Report(
        kind="comparison",
        name=labels if len(labels) <= 60 else f"{len(runs.sides)} runs compared",
        eyebrow=f"G2D comparison · {len(runs.sides)} runs",
        headline=headline(runs),
        warnings=runs.warnings,
        sections=[
            Section(
                "results",
                "Result",
                [*map(Note, notes(runs)), results(runs), accuracies(runs), evaluated(runs)],
            ),
            Section(
                "differences",
                "Differences",
                [Note(DIFFERENCES + chance * (count > 4)), differences(runs)],
            ),
            Section("frontier", "Accuracy against compute", [study.frontier_chart(runs, "flops")]),
            Section("problems", "Problems", most_different(runs)),
            Section("left-out", "Policies left out", [table("Policies left out", left_out)]),
            Section("settings", "Settings", settings(runs)),
        ],
    )


def headline(runs: Study) -> str:
    """Say in one sentence which of the runs' last policies is best, and by how much before the next
    on these problems.

    Never that one way of training is better: each policy is of one seed.
    """
    best, second = sorted(runs.last, key=lambda row: -row.accuracy.mean)[:2]
    pair = compare(second, best)
    count = len(runs.problems)
    over = f"{fmt.count(count)} common problem{'s' * (count != 1)}"
    reached = f"{best.name} answers {fmt.percent(best.accuracy.mean)} % of {over} correctly"
    reached += f", {second.name} {fmt.percent(second.accuracy.mean)} %"
    if math.isnan(pair.low):
        return (
            f"{reached}: {fmt.percent(pair.difference)} points apart, too few problems for an "
            "interval."
        )
    interval = f"[{100 * pair.low:.1f}, {100 * pair.high:.1f}]"
    return (
        f"{reached}: these two policies differ on them by {fmt.percent(pair.difference)} points "
        f"{interval} "
        "(95 %, over problems; another seed is not in it)."
    )


def notes(runs: Study) -> list[str]:
    """Say how many problems are common, what costs leave out, and which runs have the same
    settings."""
    count = len(runs.problems)
    sides = runs.sides
    others = [
        f"{n - count:,} of {side.mark}" for side in sides if (n := len(side.stage.problems)) > count
    ]
    left = ", all there are"
    if others:
        left = f"; {', '.join(others)} are not, and count nowhere here"
    texts = [f"{count:,} problems are common to all{left}.", RESULT_NOTE]
    for side in sides:
        start = next(
            row.policies[0].external_start for row in runs.rows if row.policies[0].run is side.run
        )
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
    for group, own in zip(runs.groups, study.row_cells(runs.rows), strict=True):
        row = group.rows[0]
        reached = {
            "policy": row.name,
            "K": fmt.count(row.steps),
            "accuracy % [95 %]": fmt.interval(row.accuracy),
        }
        rows.append({**reached, **own, **group.values})
    return table(f"Policies on the {fmt.count(len(runs.problems))} common problems", rows)


def accuracies(runs: Study) -> figures.Chart | None:
    """Draw every policy's accuracy with its interval."""
    return study.accuracy_chart("Accuracy on the common problems, % (bars: 95 %)", runs.rows)


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
        row |= {heads.get(name, name): _sampling(side, name) for name in SAMPLING}
        rows.append(
            {**row, "config": str(side.run.config.get("name", UNKNOWN)), "folder": side.label}
        )
    return table("Runs and how they were evaluated", rows)


def _sampling(side: Side, name: str) -> str:
    """Format a setting of an evaluation's sampling: a list of texts, or a number."""
    setting = side.sampling[name]
    return (
        fmt.setting(setting)
        if isinstance(setting, list)
        else fmt.value(number(side.sampling, name))
    )


def differences(runs: Study) -> Table:
    """Compare every two policies, the second minus the first."""
    rows = []
    for before, after in combinations(runs.rows, 2):
        pair = compare(before, after)
        ends = (
            UNKNOWN if math.isnan(pair.low) else f"[{100 * pair.low:+.1f}, {100 * pair.high:+.1f}]"
        )
        rows.append(
            {
                "pair": f"{before.name} → {after.name}",
                "difference": fmt.change(pair.difference, pair.sem),
                "95 % interval": ends,
                **{name: fmt.count(getattr(pair, name)) for name in ("better", "equal", "worse")},
            }
        )
    return table("Paired differences in accuracy, points (second minus first)", rows)


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


def records(runs: Study) -> Iterator[tuple[str, str, str, str, str, str, float]]:
    """Yield all figures, columns `study.COLUMNS`: those of `study.records`, and the differences of
    every two policies.

    arm of a pair: "A: … → B: …", the second minus the first; measure: "paired/difference",
    "paired/sem", ….
    """
    yield from study.records(runs)
    for before, after in combinations(runs.rows, 2):
        for measure, value in compare(before, after)._asdict().items():
            arm = f"{before.name} → {after.name}"
            yield arm, "", "all", "", runs.split, f"paired/{measure}", float(value)
