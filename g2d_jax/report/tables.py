"""Tables of text for terminal, Markdown and pages, those of a run's records, and frames as CSV."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from g2d_jax.records import EQUAL, Verdict
from g2d_jax.report import format as fmt
from g2d_jax.report.format import UNKNOWN, Written, policy_name, words
from g2d_jax.runtime.memory import GIB
from g2d_jax.runtime.terminal import clean
from g2d_jax.session.stage_result import (
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
    import pandas as pd  # takes half a second, which `g2d status` saves

FIRST = (
    *("K", "accuracy %", "accuracy % [95 %]", "reward"),
    *("difference", "95 % interval", "gain"),
    *("FLOPs", "time", "price", "greedy %", "seed std"),
    *("better", "worse", "equal", "folder", "seed", "problems", "answers each"),
)
"""Columns that a terminal shows first: results, differences, cost."""

COSTS: Mapping[str, tuple[str, Written]] = {
    **{name: (name, fmt.quantity) for name in TOKENS},
    "tokens": ("tokens of all kinds", fmt.quantity),
    "flops": ("FLOPs", fmt.quantity),
    "seconds": ("time", fmt.duration),
    "device_seconds": ("device time", fmt.duration),
    "verifier_cpu_seconds": ("verifier CPU", fmt.duration),
    "hours": ("time on target", lambda hours: fmt.duration(3600 * hours)),
}
"""Measure of a cost -> its name for readers, and its format."""

MEASURES: Mapping[str, tuple[str, Written]] = {
    "pass_rate": ("pass rate %", fmt.percent),
    "reward_variance": ("variance", fmt.fixed(3)),
    "frac_mixed": ("mixed %", fmt.percent),
    "entropy": ("entropy", fmt.fixed(3)),
    "distinct_answers": ("distinct", fmt.fixed(2)),
    "confidence": ("confidence %", fmt.percent),
    "ece": ("ECE", fmt.fixed(3)),
    "mean_length": ("length", fmt.fixed(1)),
    "frac_truncated": ("truncated %", fmt.percent),
}
"""The same for a policy's rollouts: docs/metrics.md defines them."""

PAIRS: Mapping[str, tuple[str, Written]] = {
    "gap_mean": ("gap in log-prob, chosen − rejected, nats", fmt.fixed(2)),
    "gap_p10": ("10 % quantile of the gap", fmt.fixed(2)),
    "frac_ranked": ("pairs ranked correctly %", fmt.percent),
    "chosen_length": ("length, chosen", fmt.fixed(1)),
    "rejected_length": ("length, rejected", fmt.fixed(1)),
    "margin_mean": ("implicit margin", fmt.fixed(2)),
    "accuracy": ("margins correct %", fmt.percent),
}
"""The same for an offline stage's pairs."""


HIDDEN = 0.05
"""Share of answers with the right last number, beyond the correct ones, that the result table
shows."""


class Table(NamedTuple):
    """A table of text cells; hidden without rows."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __bool__(self) -> bool:
        """Return whether it is shown."""
        return bool(self.rows)

    @property
    def numeric(self) -> list[bool]:
        """True for each column, except the first, whose cells all start with a number."""
        columns = zip(*self.rows, strict=True)
        return [i > 0 and all(map(_NUMBER.fullmatch, cells)) for i, cells in enumerate(columns)]


_NUMBER = re.compile(rf"([\d.,e+-]+( .*)?|{UNKNOWN})?")


def table(title: str, rows: Iterable[Mapping[str, str]]) -> Table:
    """Build a table from rows that map heads to cells, without heads that are unknown in all
    rows."""
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
    """Put a text on one line without Markdown or HTML markup."""
    return re.sub(r"[\\|`*_<>\[\]#]", r"\\\g<0>", clean(text, newlines=False))


# the last four: full-width forms, which some spreadsheets also accept
_FORMULA = "=+-@\uff1d\uff0b\uff0d\uff20"


def sheet(frame: pd.DataFrame) -> str:
    """Write a frame as CSV, without its arrays and with the last part of folders. No spreadsheet
    reads its texts as formulas."""
    shown = frame.drop(columns=["ids", "correct", "gains"], errors="ignore")
    if "workdir" in shown:
        shown["workdir"] = shown["workdir"].map(os.path.basename)
    shown.columns = list(map(guarded, map(str, shown.columns)))
    texts = shown.select_dtypes(exclude="number")
    shown[texts.columns] = texts.map(lambda value: guarded(str(value)))
    return str(shown.to_csv(index=False, na_rep="NaN"))


def guarded(text: str) -> str:
    """Guard a text against use as a formula: one line, with an apostrophe before a leading = + -
    @."""
    line = clean(text, newlines=False)
    if line.lstrip().startswith(tuple(_FORMULA)):
        return f"'{line}"
    return line


def cost_cells(costs: Mapping[str, float], measures: Iterable[str]) -> dict[str, str]:
    """Format these measures of a cost, missing ones as unknown; device time only for several
    devices."""
    if not costs.get("device_seconds", math.nan) > costs.get("seconds", math.nan):
        costs = {**costs, "device_seconds": math.nan}
    cells = {}
    for name in measures:
        head, written = COSTS[name]
        cells[head] = written(costs.get(name, math.nan))
    return cells


def has_accuracy(evaluation: Evaluation) -> bool:
    """Return whether any of its problems has correct and incorrect answers."""
    tasks = _tasks(evaluation)
    return not tasks or any(result.verifiable for result in tasks.values())


def ranked(evaluation: Evaluation) -> list[str]:
    """List the tasks whose rewards only rank."""
    return [task for task, result in _tasks(evaluation).items() if not result.verifiable]


def score_of(evaluation: Evaluation) -> str:
    """Return the task whose reward is the result, "" if accuracy is."""
    return "" if has_accuracy(evaluation) else ranked(evaluation)[0]


def _tasks(evaluation: Evaluation) -> Mapping[str, TaskResult]:
    """Return the results of the first policy by task; {} if there is only accuracy."""
    return evaluation.policies[0].tasks if evaluation.policies else {}


def count_problems(evaluation: Evaluation, what: str) -> str:
    """Count the problems of the result: those with correct and incorrect answers, if there are any.
    what: their name on test."""
    judged = [result for result in _tasks(evaluation).values() if result.verifiable]
    count = evaluation.problems
    if judged:
        count = sum(result.problems for result in judged)
    if evaluation.split == "dev":
        what = "dev problems"
    return f"{fmt.count(count)} {what}"


def summary_table(evaluation: Evaluation, costs: Mapping[str, Mapping[str, float]]) -> Table:
    """Build the result table: each policy's accuracy, its gain over the previous one, and its
    FLOPs.

    If all rewards only rank, it shows their task's reward instead. Where the required form hides
    skill, it shows the share of right last numbers too. costs: policy -> its cost by measure.
    """
    rows = []
    task = score_of(evaluation)
    hides = any(p.last_number > p.accuracy.mean + HIDDEN for p in evaluation.policies)
    for name, policy, change in _compared(evaluation):
        row = {"policy": name}
        if task:
            result, gained = policy.tasks[task], change.tasks.get(task, NOT_COMPARED)
            row["reward"] = fmt.measured(result.reward, result.sem)
            row["gain"] = fmt.measured(gained.difference, gained.sem, sign="+")
        else:
            row["accuracy %"] = fmt.spread(policy.accuracy.mean, policy.accuracy.sem_clustered)
            row["gain"] = fmt.change(change.sampled.difference, change.sampled.sem)
            if hides:
                row["last number right %"] = fmt.percent(policy.last_number)
        rows.append(row | cost_cells(costs.get(policy.name, {}), ["flops"]))
    over = f"{count_problems(evaluation, 'problems')}, {fmt.count(evaluation.samples)} answers each"
    errors = "± standard error; gain: paired, over the policy above"
    return table(f"{over} ({errors}{'; FLOPs: without SFT' * bool(costs)})", rows)


def _compared(evaluation: Evaluation) -> Iterator[tuple[str, Evaluated, Change]]:
    """Yield each policy's name for readers, its results, and its difference from the previous
    one."""
    before = ""
    for policy in evaluation.policies:
        yield policy_name(policy.name, policy.label), policy, evaluation.change(before, policy.name)
        before = policy.name


def answers_table(evaluation: Evaluation) -> Table:
    """Build a table of the other measures of each policy's answers, a column each."""
    columns: dict[str, dict[str, str]] = {}
    for name, policy, change in _compared(evaluation):
        gained = change.greedy
        columns[name] = cells = {"greedy %": fmt.percent(policy.greedy)}
        cells["greedy gain"] = fmt.change(gained.difference, gained.sem)
        for k in sorted(map(int, policy.pass_at))[1:]:
            cells[f"pass@{k} %"] = fmt.percent(policy.pass_at[str(k)])
        if abs(policy.reward - policy.accuracy.mean) > EQUAL:
            cells["reward"] = fmt.measured(policy.reward, math.nan)
        for task, result in policy.tasks.items():
            cells[f"accuracy %, {task}"] = fmt.percent(result.accuracy)
            cells[f"reward, {task}"] = fmt.measured(result.reward, result.sem)
        for subset, accuracy in policy.subsets.items():
            cells[f"accuracy %, {subset}"] = fmt.percent(accuracy.mean)
        total = sum(policy.verdicts.values())
        for verdict, count in policy.verdicts.items():
            if count and verdict not in (Verdict.CORRECT, Verdict.SCORED):
                cells[f"{words(verdict)} %"] = fmt.percent(count / total)
    return transposed("More about the answers", columns)


def transposed(title: str, columns: Mapping[str, Mapping[str, str]]) -> Table:
    """Build a table with a row a measure, for measures known in any column. columns: head -> its
    cells by measure."""
    rows = []
    for measure in dict.fromkeys(itertools.chain.from_iterable(columns.values())):
        cells = {head: column.get(measure, UNKNOWN) for head, column in columns.items()}
        if {*cells.values()} != {UNKNOWN}:
            rows.append({"measure": measure, **cells})
    return table(title, rows)


def selection_table(name: str, selection: Selection) -> Table:
    """Show the scores of a finished best_checkpoint stage at every step."""
    rows = []
    for step in sorted(selection.steps, key=int):
        is_chosen = selection.policy.endswith(f"@{step}")
        scored = selection.steps[step]
        score = fmt.measured(scored.score, scored.sem)
        rows.append({"step": f"{step}{' (chosen)' * is_chosen}", "score": score})
    return table(f"Selection {name}: score on {selection.split} (± standard error)", rows)


def stages_table(results: Mapping[str, StageResult]) -> Table:
    """Show the cost and time of each finished stage, a column each; the last is their sum."""
    costs = {name: result.cost for name, result in results.items()}
    peaks = {name: result.peak_memory_bytes for name, result in results.items()}
    if len(results) > 1:
        costs["all stages"] = Cost()
        for result in results.values():
            costs["all stages"].add(dataclasses.asdict(result.cost))
        peaks["all stages"] = max(peaks.values())
    columns = {}
    for name, cost in costs.items():
        cells = cost_cells(cost.measures, (*TOKENS, "flops", *TIMES))
        cells["host memory"] = gibibytes(peaks[name])
        for activity, share in cost.shares.items():
            cells[f"{activity}, % of the time"] = fmt.percent(share or math.nan)
        columns[name] = cells
    return transposed("Cost of each stage (generated to trained: tokens)", columns)


def gibibytes(size: float) -> str:
    """Format bytes, "4.6 GiB"."""
    return UNKNOWN if math.isnan(size) else f"{size / GIB:.1f} GiB"


def compiled(results: Iterable[StageResult]) -> str:
    """Name the programs with the longest compile times, summed by name, "" for none."""
    seconds: dict[str, float] = {}
    for result in results:
        for name, program in result.programs.items():
            seconds[name] = seconds.get(name, 0.0) + program.seconds
    longest = sorted(seconds, key=seconds.__getitem__, reverse=True)[:5]
    listed = ", ".join(f"{name} {seconds[name]:.1f} s" for name in longest)
    return listed and f"Slowest programs to compile, or to read from the cache: {listed}."


def counted(counts: Mapping[str, float]) -> str:
    """Write the counts of a stage as a sentence, without zeros."""
    return ", ".join(f"{fmt.count(n)} {words(name)}" for name, n in counts.items() if n) + "."
