"""Runs side by side, on the problems that all of them answered: compare.html, compare.md,
compare.csv, in a folder of their own."""

from __future__ import annotations

import itertools
import string
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from etils import epath

from g2d_jax.config.io import differences as setting_differences
from g2d_jax.config.io import identity
from g2d_jax.report import curves, study
from g2d_jax.report import format as fmt
from g2d_jax.report.format import UNKNOWN, policy_name
from g2d_jax.report.frame import NO_POINT, frame_of
from g2d_jax.report.page import Note, Part, Report
from g2d_jax.report.paired_differences import difference
from g2d_jax.report.rows import Row
from g2d_jax.report.run import logged_metrics
from g2d_jax.report.runs import Run, read_run
from g2d_jax.report.samples import most_different
from g2d_jax.report.tables import Table, table
from g2d_jax.report.verdict import comparison_sentence
from g2d_jax.runtime.storage import PathLike, read_json
from g2d_jax.runtime.terminal import counted
from g2d_jax.session.stage_result import Evaluation
from g2d_jax.session.workdir import FROM_PYTHON, absolute
from g2d_jax.study import stats

FILES = ("compare.html", "compare.md", "compare.csv", "figures")

SAMPLING = ("temperature", "top_p", "top_k", "max_new_tokens", "stop", "num_generations")
"""Settings of an evaluation without which accuracies are not of the same thing."""

NOTE = (
    "Accuracies, gains and pass@k are on the problems common to all runs, here and in the CSV. "
    "Gain: over the policy its last training started from, which may not be listed. "
    "Intervals are 95 %, and reflect the choice of problems only. Greedy accuracy, rewards, "
    "entropy, length and what was truncated are of all problems that a run evaluated. K: steps of "
    "online training. K and costs leave out supervised fine-tuning, and what was done elsewhere "
    "before."
)

DIFFERENCES = (
    "The second policy's accuracy less the first's. Intervals are 95 % and reflect the choice of "
    "problems only: whether one way of training is better, a study of five seeds or more (g2d "
    "sweep) may tell. One in twenty pairs without any difference has an interval without zero. "
    "Better, equal, worse: problems on which the second one's accuracy is higher, the same, lower."
)

CURVES_NOTE = (
    "Stages that runs have under one name, over each other. Lines are of what a stage trained on; "
    "fresh samples are of the trained policy itself."
)


LOOK = "A point is a policy, a line a run. Bars are 95 % intervals."


@dataclass(frozen=True, eq=False)
class Side:
    """A run that is compared. mark: A to Z, AA, AB, … label: its folder's name, or its path where another has
    that. stage: the evaluation that takes part, with its result."""

    mark: str
    label: str
    run: Run
    stage: str
    evaluation: Evaluation


@dataclass(frozen=True)
class Comparison:
    """Runs side by side. rows: their policies, on the common problems. last: those of them that are
    a run's last. files: name of a row -> its completions. frame: of the rows."""

    sides: Sequence[Side]
    rows: Sequence[Row]
    last: Sequence[Row]
    files: Mapping[str, epath.Path]
    frame: pd.DataFrame

    @property
    def problems(self) -> list[str]:
        """The ids of the common problems, ascending."""
        return self.rows[0].ids


def read_comparison(workdirs: Sequence[PathLike], *, policies: str = "ends") -> Comparison:
    """Read runs, or points of a study, on the problems that all of them answered.

    Problems are those of the same id, which is a hash of their text.
    policies: "ends" for each run's first and last one, or "all". Of each run the last of
    `Run.widest_last` counts, on test where all runs have one. Raises ValueError for fewer than two
    runs, one given twice, a folder that is no run, a run without a finished evaluation, and where
    no problem is common.
    """
    sides = _sides(workdirs)
    common = set.intersection(*(set(side.evaluation.ids) for side in sides))
    if not common:
        evaluated = []
        for side in sides:
            count = f"{len(side.evaluation.ids):,} of {side.evaluation.split}"
            evaluated.append(f"{side.mark} ({side.label}) {count}")
        raise ValueError(
            "the runs have no problem in common, they cannot be compared; evaluated are "
            f"{', '.join(evaluated)}"
        )
    frame = frame_of(({"run": side.mark, **NO_POINT}, _cut(side, common)) for side in sides)
    frame = frame.set_index(["run", "split", "policy"], drop=False)
    rows = []
    files: dict[str, epath.Path] = {}
    for side in sides:
        names = [*side.evaluation.by_name]
        ends = names[:1] + names[-1:]
        for name in dict.fromkeys(names if policies == "all" else ends):
            entry = side.evaluation.by_name[name]
            title = f"{side.mark}: {policy_name(name, entry.label)}"
            files[title] = side.run.rollouts_file(side.stage, entry)
            policy = frame.loc[[(side.mark, side.evaluation.split, name)]]
            rows.append(_row(side.mark, title, policy))
    last = {row.arm: row for row in rows}
    shown = frame.loc[[row.policies.index[0] for row in rows]]
    return Comparison(sides, rows, [*last.values()], files, shown)


def _sides(workdirs: Sequence[PathLike]) -> list[Side]:
    roots = list(map(absolute, workdirs))
    if len(set(roots)) < max(2, len(roots)):
        raise ValueError("a comparison takes two runs or more, each once")
    runs = list(map(read_run, roots))
    has_test = all(any(run.evaluated("test")) for run in runs)
    names = [root.name for root in roots]
    letters = string.ascii_uppercase
    marks = itertools.chain(letters, map("".join, itertools.product(letters, letters)))
    sides: list[Side] = []
    for mark, root, run in zip(marks, roots, runs, strict=False):
        found = run.widest_last("test" if has_test else None)
        if not found or not found[-1][1].policies:
            raise ValueError(
                f"{root} has no finished evaluation: let its evaluate stage finish first"
            )
        label = root.name if names.count(root.name) == 1 else str(root)
        sides.append(Side(mark, label, run, *found[-1]))
    return sides


def _cut(side: Side, problems: Collection[str]) -> Run:
    """Leave out what its run answered to other problems."""
    kept = [i for i, problem in enumerate(side.evaluation.ids) if problem in problems]
    policies = []
    for entry in side.evaluation.policies:
        part = replace(entry, marks=[entry.marks[i] for i in kept])
        passed = {k: stats.pass_at(part.correct, int(k)) for k in entry.pass_at}
        accuracy = stats.accuracy(part.correct)
        policies.append(replace(part, accuracy=accuracy, pass_at=passed))
    ids = [side.evaluation.ids[i] for i in kept]
    evaluation = replace(side.evaluation, policies=policies, ids=ids)
    result = replace(side.run.results[side.stage], evaluation=evaluation)
    return replace(side.run, results={**side.run.results, side.stage: result})


def _row(mark: str, title: str, policy: pd.DataFrame) -> Row:
    """Make a row of one policy of a run. Raises ValueError where none of its answers is right or
    wrong."""
    correct = policy["correct"].iloc[0]
    if np.isnan(correct).all():
        raise ValueError(
            f"none of the {len(correct):,} common problems is scored for {title} as right or "
            "wrong: accuracies are compared, not rewards"
        )
    # Runs are compared whatever their seeds.
    return Row(mark, mark, title, policy.assign(seed=0))


def changed_settings(first: Run, other: Run) -> list[str]:
    """List the settings that differ, as "field: there -> here", functions given from Python
    included."""
    identities = []
    for run in (first, other):
        own = read_json(run.workdir / "config.json").get("own", {})
        identities.append({**identity(run.config), FROM_PYTHON: own})
    return setting_differences(*identities)


def _incomparable(runs: Comparison) -> Iterator[str]:
    sampled = {}
    for side in runs.sides:
        of_side = {"split": side.evaluation.split, "num_generations": side.evaluation.samples}
        sampled[side.mark] = {**side.evaluation.sampling, **of_side}
    for name in ("split", *SAMPLING):
        values = {mark: fmt.setting(own.get(name)) for mark, own in sampled.items()}
        if len(set(values.values())) > 1:
            listed = ", ".join(f"{mark} {value}" for mark, value in values.items())
            yield (
                f"The evaluations differ in {name}: {listed}. A difference in accuracy may come "
                "from this."
            )
    problems = [side.run.problems(side.stage) for side in runs.sides]
    different = 0
    for problem in runs.problems:
        answers = {str(one[problem].get("answer")) for one in problems if problem in one}
        different += len(answers) > 1
    if different:
        yield (
            f"{different:,} of the common problems have other reference answers in one run than "
            "in another."
        )


def _problems(sides: Sequence[Side]) -> dict[str, Mapping[str, Any]]:
    """Return the problems of all runs by id, as the first that has one knows it."""
    problems: dict[str, Mapping[str, Any]] = {}
    for side in reversed(sides):
        problems |= side.run.problems(side.stage)
    return problems


def report(runs: Comparison) -> Report:
    """Put together all that a comparison shows. Raises ValueError for damaged completions."""
    labels = " · ".join(f"{side.mark}: {side.label}" for side in runs.sides)
    count = len(runs.sides)
    groups = [[row for row in runs.rows if row.arm == side.mark] for side in runs.sides]
    shown = runs.rows
    if len(shown) > study.FEW:
        shown = runs.last
    title = f"Accuracy on {counted(len(runs.problems), 'common problem')}, and what it cost"
    first = study.of_rows(title, shown, study.SHORT)
    return Report(
        kind="comparison",
        name=labels if len(labels) <= 60 else f"{count} runs compared",
        eyebrow=f"G2D comparison · {count} runs",
        verdict=comparison_sentence(runs.last),
        warnings=list(_incomparable(runs)),
        parts={
            "results": [study.frontier_chart(groups, "flops", LOOK, has_labels=False), first],
            "rows": [Note(NOTE), study.details(runs.rows), runs_table(runs)],
            "differences": differences(runs),
            "curves": training(runs),
            "problems": most_different(runs.last, runs.files, _problems(runs.sides)),
            "settings": settings(runs),
        },
        frame=lambda: runs.frame,
    )


def runs_table(runs: Comparison) -> Table:
    """Show the runs, how they were evaluated, and how many settings differ from the first one's."""
    starts = dict(zip(runs.frame["run"], runs.frame["start"], strict=True))
    lines = []
    for side in runs.sides:
        ids = side.evaluation.ids
        line = {
            "run": side.mark,
            "folder": side.label,
            "seed": str(side.run.seed),
            "problems": f"{len(ids):,} of {side.evaluation.split}",
            "not common": fmt.count(len(ids) - len(runs.problems)),
            "answers each": fmt.count(side.evaluation.samples),
            "starts from": starts[side.mark] or UNKNOWN,
            "other settings": str(len(changed_settings(runs.sides[0].run, side.run))),
        }
        lines.append(line)
    return table("The runs", lines)


def differences(runs: Comparison) -> list[Part | None]:
    """Compare the first and the last policy of each run, and the last ones of every two runs: the
    second minus the first."""
    firsts = {row.arm: row for row in reversed(runs.rows)}
    pairs = [(firsts[row.arm], row) for row in runs.last if firsts[row.arm] is not row]
    rows = []
    for before, after in (*pairs, *itertools.combinations(runs.last, 2)):
        row = {
            "pair": f"{before.name} → {after.name}",
            "difference [95 %]": fmt.interval(difference(after, before), "+"),
        }
        signs = np.sign(after.accuracies - before.accuracies)
        for name, sign in (("better", 1), ("equal", 0), ("worse", -1)):
            row[name] = fmt.count(np.sum(signs == sign))
        rows.append(row)
    return [Note(DIFFERENCES), table("Paired differences in accuracy, points", rows)]


def training(runs: Comparison) -> list[Part | None]:
    """Draw what the runs logged over each other, where stages have the same name."""
    logged = {}
    for side in runs.sides:
        logged[f"{side.mark}: {side.label}"] = logged_metrics(side.run)
    return [Note(CURVES_NOTE), *curves.compared(logged)]


def settings(runs: Comparison) -> list[Part | None]:
    """List the settings that differ from the first run's."""
    first, *others = runs.sides
    lines = []
    for side in others:
        for line in changed_settings(first.run, side.run):
            setting, change = line.split(": ", 1)
            lines.append(
                {"setting": setting, "run": side.mark, f"change from {first.mark}": change}
            )
    return [table("Settings that differ", lines)]
