"""Runs compared on the problems that all of them answered: compare.html, compare.md, compare.csv,
in a folder of their own."""

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
"""Settings of an evaluation that must agree for comparable accuracies."""

NOTE = (
    "Accuracies, gains and pass@k are on the problems common to all runs, here and in the CSV. "
    "Gain: over the policy before its last training, which may not be listed. "
    "Intervals are 95 %, and reflect the choice of problems only. Greedy accuracy, rewards, "
    "entropy, length and truncation are over all problems that a run evaluated. K: steps of online "
    "training. K and costs exclude supervised fine-tuning and earlier training outside the run."
)

DIFFERENCES = (
    "The second policy's accuracy minus the first's. Intervals are 95 % and reflect the choice of "
    "problems only. To compare training methods, run a study of five seeds or more (g2d sweep). "
    "Of pairs without any difference, one in twenty has an interval that excludes zero. "
    "Better, equal, worse: problems where the second one's accuracy is higher, equal, lower."
)

CURVES_NOTE = (
    "Stages with the same name in several runs. Lines show the training prompts; fresh samples are "
    "from the trained policy itself."
)


LOOK = "Each point is a policy, each line a run. Bars are 95 % intervals."


@dataclass(frozen=True, eq=False)
class Side:
    """A compared run. mark: A to Z, AA, AB, … label: its folder's name, or its path if another run
    has that name. stage: its compared evaluation, with the result."""

    mark: str
    label: str
    run: Run
    stage: str
    evaluation: Evaluation


@dataclass(frozen=True)
class Comparison:
    """Compared runs. rows: their policies, on the common problems. last: the last policy of each
    run. files: name of a row -> its completions. frame: of the rows."""

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

    Problems are equal if their ids are, which are hashes of their text. policies: "ends" for each
    run's first and last one, or "all". Each run's evaluation is the last of `Run.widest_last`, on
    test if all runs have one. Raises ValueError for fewer than two
    runs, a run named twice, and a folder that is not a run. So it does for a run without a finished
    evaluation, and without a common problem.
    """
    sides = _sides(workdirs)
    common = set.intersection(*(set(side.evaluation.ids) for side in sides))
    if not common:
        evaluated = []
        for side in sides:
            count = f"{len(side.evaluation.ids):,} of {side.evaluation.split}"
            evaluated.append(f"{side.mark} ({side.label}) {count}")
        raise ValueError(
            "the runs have no problem in common, so you cannot compare them; evaluated are "
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
        raise ValueError("name at least two runs, each once")
    runs = list(map(read_run, roots))
    has_test = all(any(run.evaluated("test")) for run in runs)
    names = [root.name for root in roots]
    letters = string.ascii_uppercase
    marks = itertools.chain(letters, map("".join, itertools.product(letters, letters)))
    sides: list[Side] = []
    for mark, root, run in zip(marks, roots, runs, strict=False):
        found = run.widest_last("test" if has_test else None)
        if not found or not found[-1][1].policies:
            raise ValueError(f"{root} has no finished evaluation: finish its evaluate stage first")
        label = root.name if names.count(root.name) == 1 else str(root)
        sides.append(Side(mark, label, run, *found[-1]))
    return sides


def _cut(side: Side, problems: Collection[str]) -> Run:
    """Drop the run's answers to other problems."""
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
    """Build a row for one policy of a run. Raises ValueError if none of its answers is marked
    correct or incorrect."""
    correct = policy["correct"].iloc[0]
    if np.isnan(correct).all():
        raise ValueError(
            f"none of the {len(correct):,} common problems is scored for {title} as correct or "
            "incorrect: a comparison needs accuracies, not rewards"
        )
    # The seed does not matter in a comparison.
    return Row(mark, mark, title, policy.assign(seed=0))


def changed_settings(first: Run, other: Run) -> list[str]:
    """List the settings that differ, as "field: there -> here", including functions passed from
    Python."""
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
                f"The evaluations differ in {name}: {listed}. This alone may change the accuracy."
            )
    problems = [side.run.problems(side.stage) for side in runs.sides]
    different = 0
    for problem in runs.problems:
        answers = {str(one[problem].get("answer")) for one in problems if problem in one}
        different += len(answers) > 1
    if different:
        yield (
            f"{different:,} of the common problems have different reference answers in two runs."
        )


def _problems(sides: Sequence[Side]) -> dict[str, Mapping[str, Any]]:
    """Return the problems of all runs by id, from the first run that has each."""
    problems: dict[str, Mapping[str, Any]] = {}
    for side in reversed(sides):
        problems |= side.run.problems(side.stage)
    return problems


def report(runs: Comparison) -> Report:
    """Build the report of a comparison. Raises ValueError for damaged completions."""
    labels = " · ".join(f"{side.mark}: {side.label}" for side in runs.sides)
    count = len(runs.sides)
    groups = [[row for row in runs.rows if row.arm == side.mark] for side in runs.sides]
    shown = runs.rows
    if len(shown) > study.FEW:
        shown = runs.last
    title = f"Accuracy on {counted(len(runs.problems), 'common problem')}and its cost"
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
    """Show the runs, their evaluations, and how many settings differ from the first run's."""
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
    """Draw the logged metrics of the runs in one figure, for stages with the same name."""
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
