"""Runs side by side, on the problems that all of them answered: compare.html, compare.md,
compare.csv, in a folder of their own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from string import ascii_uppercase
from typing import Any

import numpy as np
import pandas as pd
from etils import epath

from g2d_jax.config.io import differences as setting_differences
from g2d_jax.config.io import identity
from g2d_jax.report import curves, study
from g2d_jax.report import format as fmt
from g2d_jax.report.format import UNKNOWN, policy_name
from g2d_jax.report.frame import NO_POINT, Policy, frame_of
from g2d_jax.report.page import Note, Part, Report
from g2d_jax.report.paired_differences import compare
from g2d_jax.report.rows import Row
from g2d_jax.report.run import logged_metrics
from g2d_jax.report.runs import Run, read_run
from g2d_jax.report.samples import most_different
from g2d_jax.report.tables import Table, table
from g2d_jax.report.verdict import comparison_sentence, comparison_verdict
from g2d_jax.runtime.storage import PathLike, read_json
from g2d_jax.stage_result import Evaluation
from g2d_jax.workdir import FROM_PYTHON, absolute

FILES = ("compare.html", "compare.md", "compare.csv", "figures")

SAMPLING = ("temperature", "top_p", "top_k", "max_new_tokens", "stop", "num_generations")
"""Settings of an evaluation without which accuracies are not of the same thing."""

SHARED = "evaluated once for several of these runs, and listed with the first of them"
"""Why a policy of a run is left out."""

RESULT_NOTE = (
    "Costs are of all that led to a policy but supervised fine-tuning. K: steps of online training "
    "behind it. Intervals are 95 %, over problems only; another seed of training is not in them. "
    "Greedy accuracy, entropy, length and what was truncated are of all problems that a run "
    "evaluated."
)

DIFFERENCES = (
    "95 % interval: over another draw of problems. It is of these two policies: another seed of "
    "training is not in it, so that it does not tell which way of training is better; a study of "
    "five seeds or more (g2d sweep) may. Better, equal, worse: problems on which the second "
    "policy's accuracy is higher, the same, lower."
)

CURVES_NOTE = (
    "Stages that runs have under one name, over each other. Lines are of what a stage trained on; "
    "fresh samples are of the trained policy itself."
)


@dataclass(frozen=True, eq=False)
class Side:
    """A run that is compared. mark: A, B, … label: its folder's name, or its path where another has
    that. stage: the evaluation that takes part, with its result."""

    mark: str
    label: str
    run: Run
    stage: str
    evaluation: Evaluation

    @property
    def sampling(self) -> dict[str, Any]:
        """ "split" and `SAMPLING` of the evaluation, None where one is not known."""
        known = {
            **self.evaluation.sampling,
            "split": self.evaluation.split,
            "num_generations": self.evaluation.samples,
        }
        return {name: known.get(name) for name in ("split", *SAMPLING)}


@dataclass(frozen=True)
class Comparison:
    """Runs side by side. rows: their policies, on the common problems. last: those of them that are
    a run's last. left_out: policy -> why it has no row."""

    sides: Sequence[Side]
    rows: Sequence[Row]
    last: Sequence[Row]
    left_out: Mapping[str, str]

    @property
    def problems(self) -> list[str]:
        """The ids of the common problems, ascending."""
        return self.rows[0].ids


def read_comparison(workdirs: Sequence[PathLike], *, policies: str = "ends") -> Comparison:
    """Read runs, or points of a study, on the problems that all of them answered.

    Problems are those of the same id, which is a hash of their text.
    policies: "ends" for each run's first and last one, "all". Of each run a finished evaluation
    counts: of the first run the last on test, of the others the last on the first one's split; where
    there is none, the last on test, else the last. Raises ValueError for fewer than two runs, one
    given twice, a folder that is no run, a run without a finished evaluation, and where no problem
    is common.
    """
    if policies not in ("ends", "all"):
        raise ValueError(f"policies must be ends or all, got {policies!r}")
    sides = _sides(workdirs)
    chosen: list[tuple[Side, Policy]] = []
    left_out = {}
    files: set[epath.Path] = set()
    for side in sides:
        names = list(side.evaluation.by_name)
        last = names[-1]
        if policies == "ends":
            names = list(dict.fromkeys((names[0], last)))
        for name in names:
            file = side.run.rollouts_file(side.stage, side.evaluation.by_name[name])
            if file in files and name != last:
                left_out[f"{side.mark}: {name}"] = SHARED
            else:
                chosen.append((side, Policy(side.run, name)))
            files.add(file)
    common = sorted(set.intersection(*(set(side.evaluation.ids) for side in sides)))
    if not common:
        evaluated = []
        for side in sides:
            count = f"{len(side.evaluation.ids):,} of {side.evaluation.split}"
            evaluated.append(f"{side.mark} ({side.label}) {count}")
        raise ValueError(
            "the runs have no problem in common, they cannot be compared; evaluated are "
            f"{', '.join(evaluated)}"
        )
    rows = [_row(side, policy, common) for side, policy in chosen]
    is_last = [policy.name == [*side.evaluation.by_name][-1] for side, policy in chosen]
    last_rows = [row for row, last_one in zip(rows, is_last, strict=True) if last_one]
    return Comparison(sides, rows, last_rows, left_out)


def _sides(workdirs: Sequence[PathLike]) -> list[Side]:
    roots = list(map(absolute, workdirs))
    if len(roots) < 2:
        raise ValueError(f"a comparison takes two runs or more, got {len(roots)}")
    names = [root.name for root in roots]
    sides: list[Side] = []
    for i, root in enumerate(roots):
        if root in roots[:i]:
            raise ValueError(f"{root} is given twice: compare runs that differ")
        run = read_run(root)
        found = [(stage, one) for stage, one in run.evaluated() if one.policies]
        if not found:
            raise ValueError(
                f"{run.workdir} has no finished evaluation: let its evaluate stage finish first"
            )
        tested = [(stage, one) for stage, one in found if one.split == "test"]
        split = sides[0].evaluation.split if sides else ""
        alike = [(stage, one) for stage, one in found if one.split == split]
        label = root.name if names.count(root.name) == 1 else str(root)
        sides.append(Side(_mark(i), label, run, *[*found, *tested, *alike][-1]))
    return sides


def _mark(number: int) -> str:
    """Return A … Z, AA … as spreadsheets count."""
    rest, letter = divmod(number, len(ascii_uppercase))
    return (_mark(rest - 1) if rest else "") + ascii_uppercase[letter]


def _row(side: Side, policy: Policy, common: Sequence[str]) -> Row:
    """Make a row of one policy of a run. Raises ValueError where none of its answers is right or
    wrong."""
    entry = side.evaluation.by_name[policy.name]
    title = f"{side.mark}: {policy_name(entry.name, entry.label)}"
    answers = pd.DataFrame(entry.correct, index=list(side.evaluation.ids)).loc[common]
    if answers.isna().to_numpy().all():
        raise ValueError(
            f"none of the {len(answers):,} common problems is scored for {title} as right or "
            "wrong: accuracies are compared, not rewards"
        )
    run = {"run": side.label}
    return Row(title, run, title, [policy], [answers], split=side.evaluation.split)


def changed_settings(first: Run, other: Run) -> list[str]:
    """List the settings that differ, as "field: there -> here", functions given from Python
    included."""
    identities = []
    for run in (first, other):
        own = read_json(run.workdir / "config.json").get("own", {})
        identities.append({**identity(run.config), FROM_PYTHON: own})
    return setting_differences(*identities)


def _incomparable(sides: Sequence[Side], common: Collection[str]) -> Iterator[str]:
    for name in ("split", *SAMPLING):
        values = {side.mark: fmt.setting(side.sampling[name]) for side in sides}
        if len(set(values.values())) > 1:
            listed = ", ".join(f"{mark} {value}" for mark, value in values.items())
            yield (
                f"The evaluations differ in {name}: {listed}. A difference in accuracy may come "
                "from this."
            )
    problems = [side.run.problems(side.stage) for side in sides]
    different = 0
    for problem in common:
        answers = {str(one[problem].get("answer")) for one in problems if problem in one}
        different += len(answers) > 1
    if different:
        yield (
            f"{different:,} of the common problems have other reference answers in one run than "
            "in another."
        )


def _files(runs: Comparison) -> dict[str, epath.Path]:
    """Map the name of each row to the completions of its policy."""
    files = {}
    for row in runs.rows:
        side = next(side for side in runs.sides if side.run is row.first.run)
        policy = side.evaluation.by_name[row.first.name]
        files[row.name] = side.run.rollouts_file(side.stage, policy)
    return files


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
    accuracies = study.accuracy_chart("Accuracy on the common problems, % (bars: 95 %)", runs.rows)
    notes_and_tables = [*map(Note, notes(runs)), results(runs), accuracies, evaluated(runs)]
    note = "Bars are 95 % intervals over the common problems only: another seed is not in them."
    frontier = study.frontier_chart([[row] for row in runs.rows], "flops", note)
    return Report(
        kind="comparison",
        name=labels if len(labels) <= 60 else f"{count} runs compared",
        eyebrow=f"G2D comparison · {count} runs",
        verdict=comparison_sentence(comparison_verdict(runs.last)),
        warnings=list(_incomparable(runs.sides, runs.problems)),
        parts={
            "results": notes_and_tables,
            "differences": differences(runs),
            "frontier": [frontier],
            "curves": training(runs),
            "problems": most_different(runs.last, _files(runs), _problems(runs.sides)),
            "left-out": [study.left_out("Policies left out", "policy", runs.left_out)],
            "settings": settings(runs),
        },
        frame=lambda: _own_rows(runs),
    )


def _own_rows(runs: Comparison) -> pd.DataFrame:
    """Return the frame of the policies compared, on all problems that each answered."""
    shown = {(str(row.first.run.workdir), row.first.name) for row in runs.rows}
    frame = frame_of(({"run": side.mark, **NO_POINT}, side.run) for side in runs.sides)
    return frame[[pair in shown for pair in zip(frame["workdir"], frame["policy"], strict=True)]]


def notes(runs: Comparison) -> list[str]:
    """Say how many problems are common, what costs leave out, and which runs have the same
    settings."""
    count = len(runs.problems)
    sides = runs.sides
    others = []
    for side in sides:
        own = len(side.evaluation.ids)
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


def results(runs: Comparison) -> Table:
    """Show policies with accuracy, pass@k, length, entropy, K and costs."""
    rows = []
    for row, own in zip(runs.rows, study.row_cells(runs.rows), strict=True):
        reached = {
            "policy": row.name,
            "K": fmt.count(row.steps),
            "accuracy % [95 %]": fmt.interval(row.accuracy),
        }
        rows.append({**reached, **own, **row.values})
    return table(f"Policies on the {fmt.count(len(runs.problems))} common problems", rows)


def evaluated(runs: Comparison) -> Table:
    """Show the runs, and how they were evaluated."""
    heads = {"num_generations": "answers each", "max_new_tokens": "max tokens"}
    rows = []
    for side in runs.sides:
        row = {
            "run": side.mark,
            "seed": str(side.run.seed),
            "evaluation": side.stage,
            "split": side.evaluation.split,
            "problems": fmt.count(len(side.evaluation.ids)),
        }
        for name in SAMPLING:
            row[heads.get(name, name)] = fmt.setting(side.sampling[name])
        row["config"] = str(side.run.config.get("name", UNKNOWN))
        row["folder"] = side.label
        rows.append(row)
    return table("Runs and how they were evaluated", rows)


def differences(runs: Comparison) -> list[Part | None]:
    """Compare every two policies, the second minus the first."""
    rows = []
    for before, after in combinations(runs.rows, 2):
        row = {
            "pair": f"{before.name} → {after.name}",
            "difference [95 %]": fmt.interval(compare(before, after), "+"),
        }
        signs = np.sign(after.accuracies - before.accuracies)
        for name, sign in (("better", 1), ("equal", 0), ("worse", -1)):
            row[name] = fmt.count(np.sum(signs == sign))
        rows.append(row)
    note = DIFFERENCES
    if len(rows) > 4:
        note += (
            f" Of {len(rows)} pairs without any difference about {0.05 * len(rows):.1f} would "
            "have an interval without zero."
        )
    title = "Paired differences in accuracy, points (second minus first)"
    return [Note(note), table(title, rows)]


def training(runs: Comparison) -> list[Part | None]:
    """Draw what the runs logged over each other, where stages have the same name."""
    logged = {}
    for side in runs.sides:
        logged[f"{side.mark}: {side.label}"] = logged_metrics(side.run)
    return [Note(CURVES_NOTE), *curves.compared(logged)]


def settings(runs: Comparison) -> list[Part | None]:
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
