"""Tables of text for terminal, Markdown and pages, those of a run's records, and frames as CSV."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from g2d_jax.records import EQUAL, Verdict
from g2d_jax.report import format as fmt
from g2d_jax.report.format import UNKNOWN, Written, policy_name, words
from g2d_jax.runtime.memory import GIB
from g2d_jax.runtime.terminal import clean
from g2d_jax.stage_result import (
    NO_ACCURACY,
    NOT_COMPARED,
    TIMES,
    TOKENS,
    Change,
    Cost,
    Evaluated,
    Evaluation,
    Selection,
    StageResult,
    TaskResult,
)

if TYPE_CHECKING:
    import pandas as pd  # takes half a second, which `g2d status` need not wait for

FIRST = (
    *("K", "pass@1 %", "accuracy % [95 %]", "accuracy %", "reward"),
    *("difference", "95 % interval", "change", "gain"),
    *("FLOPs", "time", "price", "greedy %", "seed std"),
    *("better", "worse", "equal"),
    *("folder", "seed", "problems", "answers each"),
)
"""Heads of what a terminal shows first of a table: what came out, by how much, and its cost."""

COSTS: Mapping[str, tuple[str, Written]] = {
    **{name: (name, fmt.quantity) for name in TOKENS},
    "tokens": ("tokens of all kinds", fmt.quantity),
    "flops": ("FLOPs", fmt.quantity),
    "seconds": ("time", fmt.duration),
    "device_seconds": ("device time", fmt.duration),
    "verifier_cpu_seconds": ("verifier CPU", fmt.duration),
    "hours": ("time there", lambda hours: fmt.duration(3600 * hours)),
}
"""Measure of a cost -> head of its column, and its numbers as text."""


class Table(NamedTuple):
    """A table of text cells; without rows it is not shown."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __bool__(self) -> bool:
        """Whether it is shown."""
        return bool(self.rows)

    @property
    def numeric(self) -> list[bool]:
        """The columns but the first whose cells all start as numbers, True for each."""
        return [i > 0 and self._is_numeric(i) for i in range(len(self.columns))]

    def _is_numeric(self, column: int) -> bool:
        starts = {row[column][:1] for row in self.rows}
        return starts <= {"", UNKNOWN, *"+-0123456789"}


def table(title: str, rows: Iterable[Mapping[str, str]]) -> Table:
    """Make a table of rows that map heads to cells, without heads of which no row knows
    anything."""
    rows = list(rows)
    columns = {}
    for head in dict.fromkeys(itertools.chain.from_iterable(rows)):
        cells = [row.get(head, UNKNOWN) for row in rows]
        if set(cells) != {UNKNOWN}:
            columns[head] = cells
    return Table(title, list(columns), list(map(list, zip(*columns.values(), strict=True))))


def markdown(table: Table) -> str:
    """Write a table under its title; "" without rows."""
    if not table.rows:
        return ""
    lines = [f"{one_line(table.title)}:", ""]
    rule = ["---"] + ["---:"] * (len(table.columns) - 1)
    for cells in (table.columns, rule, *table.rows):
        lines.append(f"| {' | '.join(map(one_line, cells))} |")
    return "\n".join(lines)


def one_line(text: str) -> str:
    """Put a text on one line in which Markdown and HTML see no markup."""
    return re.sub(r"[\\|`*_<>\[\]#]", r"\\\g<0>", clean(text, newlines=False))


# the last four: their full-width forms, which some spreadsheets take too
_FORMULA = "=+-@\uff1d\uff0b\uff0d\uff20"


def sheet(frame: pd.DataFrame) -> str:
    """Write a frame as CSV, whose texts no spreadsheet takes for formulas, without its arrays; of
    folders the last part."""
    shown = frame.drop(columns=["ids", "correct", "gains"], errors="ignore")
    if "workdir" in shown:
        shown["workdir"] = shown["workdir"].map(os.path.basename)
    shown.columns = list(map(guarded, map(str, shown.columns)))
    texts = shown.select_dtypes(exclude="number")
    shown[texts.columns] = texts.map(lambda value: guarded(str(value)))
    return str(shown.to_csv(index=False, na_rep="NaN"))


def guarded(text: str) -> str:
    """Guard a text from being taken for a formula: on one line, an apostrophe before a leading = +
    - @."""
    line = clean(text, newlines=False)
    if line.lstrip().startswith(tuple(_FORMULA)):
        return f"'{line}"
    return line


def cost_cells(costs: Mapping[str, float], measures: Iterable[str]) -> dict[str, str]:
    """Format these measures of a cost, those it lacks as unknown; device time only where there were
    several devices."""
    if not costs.get("device_seconds", math.nan) > costs.get("seconds", math.nan):
        costs = {**costs, "device_seconds": math.nan}
    cells = {}
    for name in measures:
        head, written = COSTS[name]
        cells[head] = written(costs.get(name, math.nan))
    return cells


def has_accuracy(evaluation: Evaluation) -> bool:
    """Whether any of its problems has right and wrong answers."""
    tasks = _tasks(evaluation)
    return not tasks or any(result.verifiable for result in tasks.values())


def ranked(evaluation: Evaluation) -> list[str]:
    """List the tasks without right and wrong."""
    return [task for task, result in _tasks(evaluation).items() if not result.verifiable]


def _tasks(evaluation: Evaluation) -> Mapping[str, TaskResult]:
    """Return the results of the first policy by task; {} where there is accuracy alone."""
    return evaluation.policies[0].tasks if evaluation.policies else {}


def count_problems(evaluation: Evaluation, what: str) -> str:
    """Count the problems that the result is about: those with right and wrong answers, if there are
    any. what: their name where they are of test."""
    judged = [result for result in _tasks(evaluation).values() if result.verifiable]
    count = sum(result.problems for result in judged) if judged else evaluation.problems
    named = "dev problems" if evaluation.split == "dev" else what
    return f"{fmt.count(count)} {named}"


def summary_table(evaluation: Evaluation, costs: Mapping[str, Mapping[str, float]]) -> Table:
    """Build the result: accuracy of each policy, its gain on the one before it, and the cost of
    making it.

    Where tasks have other rewards, their means stand next to, or in place of, the accuracy. costs:
    policy -> its cost by measure.
    """
    judged = has_accuracy(evaluation)
    largest = max(pass_at_ks(evaluation), default=1)
    rows = []
    before = ""
    for policy in evaluation.policies:
        change = evaluation.change(before, policy.name)
        row = {"policy": policy_name(policy.name, policy.label)}
        if judged:
            accuracy = policy.accuracy
            row["pass@1 %"] = fmt.spread(accuracy.mean, accuracy.sem_clustered)
            if largest > 1:
                row[f"pass@{largest} %"] = fmt.percent(policy.pass_at.get(str(largest), math.nan))
            row["greedy %"] = fmt.percent(policy.greedy)
            row["change"] = fmt.change(change.sampled.difference, change.sampled.sem)
            row["greedy change"] = fmt.change(change.greedy.difference, change.greedy.sem)
        row |= _rewards(evaluation, policy, change)
        spent = costs.get(policy.name, {})
        rows.append(row | cost_cells(spent, ("generated", "trained", "flops", "seconds")))
        before = policy.name
    over = f"{count_problems(evaluation, 'problems')}, {fmt.count(evaluation.samples)} answers each"
    what, unit = ("Accuracy", ", in points") if judged else ("Reward", "")
    title = f"{what} on {over} (± standard error clustered by problem; changes are paired{unit})"
    return table(title + "; cost without SFT" * bool(costs), rows)


def _rewards(evaluation: Evaluation, policy: Evaluated, change: Change) -> dict[str, str]:
    """Build a policy's mean reward in each task without right and wrong, and its gain; that of a
    run with one task where it is no accuracy."""
    cells = {}
    pairs = [(one.reward, one.accuracy.mean) for one in evaluation.policies]
    if any(abs(reward - accuracy) > EQUAL for reward, accuracy in pairs):
        cells["reward"] = fmt.measured(policy.reward, math.nan)
    for task in ranked(evaluation):
        name = "" if len(policy.tasks) == 1 else f"{task} "
        result, gained = policy.tasks[task], change.tasks.get(task, NOT_COMPARED)
        cells[f"{name}reward"] = fmt.measured(result.reward, result.sem)
        cells[f"{name}change"] = fmt.measured(gained.difference, gained.sem, sign="+")
    return cells


def pass_at_ks(evaluation: Evaluation) -> list[int]:
    """List the k of the pass@k that policies were evaluated with, ascending."""
    ks = itertools.chain.from_iterable(policy.pass_at for policy in evaluation.policies)
    return sorted(set(map(int, ks)))


def tasks_table(evaluation: Evaluation) -> Table:
    """Show every task by policy; no rows where accuracy says it all."""
    rows = []
    for policy in evaluation.policies:
        for task, result in policy.tasks.items():
            quotient = fmt.measured(result.length_normalised, result.length_normalised_sem)
            rows.append(
                {
                    "policy": policy_name(policy.name, policy.label),
                    "task": task,
                    "accuracy %": fmt.percent(result.accuracy),
                    "reward": fmt.measured(result.reward, result.sem),
                    "runs' std": fmt.value(result.std_runs),
                    "reward / token": quotient,
                    "greedy": fmt.value(result.greedy),
                    "length": fmt.value(result.mean_length),
                    "problems": fmt.count(result.problems),
                    "unscorable %": fmt.percent(result.unscorable),
                }
            )
    return table("Each task (± standard error clustered by problem; lengths in tokens)", rows)


def verdicts_table(evaluation: Evaluation) -> Table:
    """Return the share of each policy's answers by verdict, of those that occur and that the result
    is not about."""
    total = Counter[str]()
    for policy in evaluation.policies:
        total.update(policy.verdicts)
    wrong = [verdict for verdict in Verdict if verdict not in (Verdict.CORRECT, Verdict.SCORED)]
    shown = [verdict for verdict in wrong if total[verdict.value]]
    rows = []
    for policy in evaluation.policies:
        count = max(sum(policy.verdicts.values()), 1)
        row = {"policy": policy_name(policy.name, policy.label)}
        for verdict in shown:
            row[words(verdict.value)] = fmt.percent(policy.verdicts.get(verdict.value, 0) / count)
        rows.append(row)
    return table("Answers that are not right, by verdict, %", rows if shown else [])


def subsets_table(evaluation: Evaluation) -> Table:
    """Show accuracy by subset of the problems."""
    sizes: dict[str, int] = {}
    for policy in evaluation.policies:
        for name, accuracy in policy.subsets.items():
            sizes[name] = max(accuracy.problems, sizes.get(name, 0))
    rows = []
    for name, size in sizes.items():
        row = {"subset": name, "problems": fmt.count(size)}
        for policy in evaluation.policies:
            mean = policy.subsets.get(name, NO_ACCURACY).mean
            row[policy_name(policy.name, policy.label)] = fmt.percent(mean)
        rows.append(row)
    return table("Accuracy by subset, %", rows)


def selection_table(name: str, selection: Selection) -> Table:
    """Show the scores of a finished best_checkpoint stage at every step, and of each task if
    several."""
    rows = []
    for step in sorted(selection.steps, key=int):
        is_chosen = selection.policy.endswith(f"@{step}")
        scored = selection.steps[step]
        row = {"step": f"{step}{' (chosen)' * is_chosen}"}
        row["score"] = fmt.measured(scored.score, scored.sem)
        if len(scored.tasks) > 1:  # else its score is the whole
            for task, result in scored.tasks.items():
                row[task] = fmt.measured(result.score, result.score_sem)
        rows.append(row)
    by_score = f"{selection.policy} by its score on {selection.split}"
    return table(f"Selection {name}: {by_score} (± standard error)", rows)


def compute_table(results: Mapping[str, StageResult]) -> Table:
    """Build each finished stage's cost; the last row is the total."""
    rows = []
    total = Cost()
    for name, result in results.items():
        total.add(dataclasses.asdict(result.cost))
        rows.append(_compute_row(name, result.kind, result.cost, result.peak_memory_bytes))
    if len(results) > 1:
        peak = max(result.peak_memory_bytes for result in results.values())
        rows.append(_compute_row("all stages", "", total, peak))
    return table("Compute of each finished stage (generated to trained: tokens)", rows)


def _compute_row(name: str, kind: str, cost: Cost, peak: float) -> dict[str, str]:
    costs = cost_cells(cost.measures, (*TOKENS, "flops", *TIMES))
    return {"stage": name, "kind": kind, **costs, "host memory": gibibytes(peak)}


def gibibytes(size: float) -> str:
    """Format bytes, "4.6 GiB"."""
    return UNKNOWN if math.isnan(size) else f"{size / GIB:.1f} GiB"


def goodput_table(results: Mapping[str, StageResult]) -> Table:
    """Show where the time of each finished stage went.

    The wall time has writing checkpoints in it, and no diagnoses, which are counted apart.
    """
    rows = []
    for name, result in results.items():
        spent = {activity: fmt.percent(share) for activity, share in result.cost.shares.items()}
        if spent:
            seconds = result.cost.seconds + result.cost.checkpointing_seconds
            rows.append({"stage": name, "wall time": fmt.duration(seconds), **spent})
    return table("Where the time went, in % of the wall time", rows)


def compiled_table(results: Iterable[StageResult]) -> Table:
    """Build a row for the programs that took longest to compile, those of a name together, and the
    rest."""
    compiled = Counter[str]()
    seconds = defaultdict[str, float](float)
    for result in results:
        for name, program in result.programs.items():
            compiled[name] += program.compiled
            seconds[name] += program.seconds
    longest = sorted(seconds, key=lambda name: -seconds[name])
    for name in longest[8:]:
        compiled["others"] += compiled[name]
        seconds["others"] += seconds[name]
    rows = []
    for name in [*longest[:8], *["others"] * (len(longest) > 8)]:
        took = f"{seconds[name]:.1f} s"
        rows.append({"program": name, "times": str(compiled[name]), "took": took})
    return table("Programs compiled, or read from the cache", rows)


def counts_table(title: str, by_stage: Mapping[str, Mapping[str, float]]) -> Table:
    """Build the counts of stages, a column each, without what is 0 everywhere."""
    names: dict[str, None] = {}
    for values in by_stage.values():
        names |= dict.fromkeys(filter(values.get, values))
    rows = []
    for name in names:
        cells = {stage: _counted(values.get(name, math.nan)) for stage, values in by_stage.items()}
        rows.append({"count": words(name), **cells})
    return table(title, rows)


def _counted(value: float) -> str:
    return fmt.count(value) if float(value).is_integer() else fmt.quantity(value)
