"""Tables of text for terminal, Markdown and pages, those of a run's manifests, and figures as
CSV."""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from g2d_jax.accounting import TIMES, TOKENS, cost, shares
from g2d_jax.config.policy_name import own_stage
from g2d_jax.records import EQUAL, Verdict
from g2d_jax.report import format as fmt
from g2d_jax.report.format import UNKNOWN, Written, number, policy_name, words
from g2d_jax.runtime.memory import GIB
from g2d_jax.runtime.terminal import clean

Manifest = Mapping[str, Any]
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


Figures: TypeAlias = tuple[*tuple[str, ...], float]
"""A row of a CSV: texts, and the number that they name."""


def sheet(columns: Sequence[str], rows: Iterable[Figures]) -> str:
    """Write rows of texts, which no spreadsheet takes for formulas, and of numbers that read back,
    as CSV."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    for *texts, value in rows:
        writer.writerow([*map(guarded, texts), _cell(value)])
    return buffer.getvalue()


def _cell(value: float) -> int | float | str:
    if math.isnan(value):
        return "NaN"
    if float(value).is_integer() and abs(value) < 2**53:
        return int(value)
    return float(value)


def guarded(text: str) -> str:
    """Guard a text from being taken for a formula: on one line, an apostrophe before a leading = +
    - @."""
    line = clean(text, newlines=False)
    if line.lstrip().startswith(tuple(_FORMULA)):
        return f"'{line}"
    return line


_NOT_FIGURES = {
    "done",
    "started",
    "inputs",
    "fingerprint",
    "kind",
    "name",
    "sampling",
    "policies",
    "paired",
}
_SPELLED = ("NaN", "Infinity", "-Infinity")  # as storage writes them


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield numbers by path, those in "result" without that name in front."""
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and key not in _NOT_FIGURES:
            yield from leaves(value, "" if path == "result" else f"{path}/")
        elif key not in _NOT_FIGURES and (value in _SPELLED or type(value) in (int, float)):
            yield path, float(value)


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


def total_cost(manifests: Iterable[Manifest]) -> dict[str, float]:
    """Add up what stages cost, by measure; {} for none."""
    total: dict[str, float] = {}
    for manifest in manifests:
        for measure, value in cost(manifest).items():
            total[measure] = total.get(measure, 0) + value
    return total


def policies(evaluation: Manifest | None) -> list[Manifest]:
    """Return the policies of a finished evaluate stage, in the order they were evaluated; [] for
    None."""
    return list((evaluation or {}).get("result", {}).get("policies", ()))


class Step(NamedTuple):
    """A policy after the one before it, and the paired difference of them with its standard error
    clustered by problem; NaN where it was not measured."""

    before: Manifest
    after: Manifest
    difference: float
    error: float
    problems: float


def paired(evaluation: Manifest) -> dict[tuple[str, str], Manifest]:
    """Map the names of two policies, before and after, to their paired differences."""
    pairs = evaluation.get("result", {}).get("paired", ())
    return {(pair["before"], pair["after"]): pair for pair in pairs}


def steps(evaluation: Manifest, *kind: str) -> list[Step]:
    """List each policy but the first with the one before it.

    kind: "greedy" for greedy accuracy in place of sampled; "tasks" and a task's name for its
    reward.
    """
    pairs = paired(evaluation)
    found = []
    for before, after in itertools.pairwise(policies(evaluation)):
        pair = pairs.get((before["name"], after["name"]), {})
        numbers = map(partial(number, pair, *kind), ("difference", "sem", "problems"))
        found.append(Step(before, after, *numbers))
    return found


def gains(evaluation: Manifest, *kind: str) -> dict[str, tuple[float, float]]:
    """Map each policy to its gain on the one before it, and the standard error; see `steps`."""
    measured = {policy["name"]: (math.nan, math.nan) for policy in policies(evaluation)}
    for step in steps(evaluation, *kind):
        measured[step.after["name"]] = step.difference, step.error
    return measured


def tasks(evaluation: Manifest | None) -> dict[str, bool]:
    """Return the tasks of an evaluation, and whether their rewards are verifiable; {} if it has
    accuracy alone."""
    results = next(iter(policies(evaluation)), {}).get("tasks", {})
    return {name: result.get("accuracy") is not None for name, result in results.items()}


def has_accuracy(evaluation: Manifest) -> bool:
    """Whether any of its problems has right and wrong answers."""
    return not tasks(evaluation) or any(tasks(evaluation).values())


def pass_at_ks(ordered: Iterable[Manifest]) -> list[int]:
    """List the k of the pass@k that policies were evaluated with, ascending."""
    ks = itertools.chain.from_iterable(policy.get("pass_at", ()) for policy in ordered)
    return sorted(set(map(int, ks)))


def summary_table(evaluation: Manifest | None, stage_manifests: Iterable[Manifest]) -> Table:
    """Build the result: accuracy of each policy, its gain, and the cost of making it.

    Where tasks have other rewards, their means stand beside, or in place of, the accuracy.
    evaluation: the manifest of a finished evaluate stage, None if there is none yet (no rows then).
    stage_manifests: of the finished stages in order; each stage's cost counts once, in the row of
    the policy it led to.
    """
    if not evaluation:
        return Table("No evaluation is finished yet", [], [])
    ordered = policies(evaluation)
    largest = max(pass_at_ks(ordered), default=1)
    sampled = gains(evaluation)
    greedy = gains(evaluation, "greedy")
    rows = []
    for policy, makers in zip(ordered, _makers(ordered, stage_manifests), strict=True):
        row = {"policy": policy_name(policy)}
        if has_accuracy(evaluation):
            row["pass@1 %"] = fmt.spread(number(policy, "mean"), number(policy, "sem_clustered"))
            if largest > 1:
                row[f"pass@{largest} %"] = fmt.percent(number(policy, "pass_at", str(largest)))
            row["greedy %"] = fmt.percent(number(policy, "greedy"))
            row["change"] = fmt.change(*sampled[policy["name"]])
            row["greedy change"] = fmt.change(*greedy[policy["name"]])
        row |= _rewards(evaluation, policy)
        row["made by"] = " + ".join(str(stage.get("name", "")) for stage in makers) or UNKNOWN
        costs = cost_cells(total_cost(makers), ("generated", "trained", "flops", "seconds"))
        rows.append(row | costs)
    samples = fmt.count(number(evaluation, "result", "samples"))
    over = f"{problems(evaluation, 'problems')}, {samples} answers each"
    what, unit = ("Accuracy", ", in points") if has_accuracy(evaluation) else ("Reward", "")
    title = f"{what} on {over} (± standard error clustered by problem; changes are paired{unit})"
    return table(title, rows)


def _rewards(evaluation: Manifest, policy: Manifest) -> dict[str, str]:
    """Build a policy's mean reward in each task without right and wrong, and its gain; that of a
    run with one task where it is no accuracy."""
    cells = {}
    ordered = policies(evaluation)
    if any(abs(number(one, "reward") - number(one, "mean")) > EQUAL for one in ordered):
        cells["reward"] = fmt.measured(number(policy, "reward"), math.nan)
    for task, verifiable in tasks(evaluation).items():
        if verifiable:
            continue
        name = "" if len(tasks(evaluation)) == 1 else f"{task} "
        cells[f"{name}reward"] = reward(policy, task)
        gain = gains(evaluation, "tasks", task)[policy["name"]]
        cells[f"{name}change"] = fmt.measured(*gain, sign="+")
    return cells


def reward(policy: Manifest, task: str) -> str:
    """Format a policy's mean reward in a task, with its standard error."""
    return _measured(policy.get("tasks", {}).get(task, {}), "reward", "sem")


def _measured(record: Manifest, value: str, error: str) -> str:
    """Format a number of a record with its error, from their names there."""
    return fmt.measured(number(record, value), number(record, error))


def problems(evaluation: Manifest, what: str) -> str:
    """Count the problems that the result is about: those with right and wrong answers, if there are
    any. what: their name where they are of test."""
    judged = [name for name, verifiable in tasks(evaluation).items() if verifiable]
    counted = number(evaluation, "result", "problems")
    if judged:
        counted = sum(number(policies(evaluation)[0], "tasks", name, "problems") for name in judged)
    split = evaluation.get("result", {}).get("split", "test")
    named = what if split == "test" else f"{split} problems"
    return f"{fmt.count(counted)} {named}"


def result_of(evaluations: Sequence[Manifest]) -> Manifest | None:
    """Return the evaluation that is a run's result: the last on test, else the last; None without
    any. On dev a checkpoint or a setting may have been chosen."""
    tested = [one for one in evaluations if one.get("result", {}).get("split", "test") == "test"]
    return next(reversed(tested or list(evaluations)), None)


def _makers(
    ordered: Sequence[Manifest], stage_manifests: Iterable[Manifest]
) -> list[list[Manifest]]:
    """List for each policy the stages that led to it and are not yet in a row above: its own, with
    those it reads."""
    waiting = {}
    for stage in stage_manifests:
        if stage.get("kind") != "evaluate":
            waiting[str(stage["name"])] = stage

    def claim(name: str) -> list[Manifest]:
        if (stage := waiting.pop(name, None)) is None:
            return []
        return [*itertools.chain.from_iterable(map(claim, stage.get("inputs", ()))), stage]

    stages = [own_stage(str(policy["name"])) for policy in ordered]
    makers: list[list[Manifest]] = []
    for i, name in enumerate(stages):
        made_by: list[Manifest] = []
        if name not in stages[i + 1 :]:
            made_by = claim(name)
        makers.append(made_by)
    return makers


def tasks_table(evaluation: Manifest) -> Table:
    """Show every task by policy; no rows where accuracy says it all."""
    rows = []
    for policy in policies(evaluation):
        for task, result in policy.get("tasks", {}).items():
            rows.append(
                {
                    "policy": policy_name(policy),
                    "task": task,
                    "accuracy %": fmt.percent(number(result, "accuracy")),
                    "reward": _measured(result, "reward", "sem"),
                    "runs' std": fmt.value(number(result, "std_runs")),
                    "reward / token": _measured(
                        result, "length_normalised", "length_normalised_sem"
                    ),
                    "greedy": fmt.value(number(result, "greedy")),
                    "length": fmt.value(number(result, "mean_length")),
                    "problems": fmt.count(number(result, "problems")),
                    "unscorable %": fmt.percent(number(result, "unscorable")),
                }
            )
    return table("Each task (± standard error clustered by problem; lengths in tokens)", rows)


def verdicts_table(evaluation: Manifest) -> Table:
    """Return the share of each policy's answers by verdict, of those that occur and that the result
    is not about."""
    ordered = policies(evaluation)
    by_policy = list(map(_verdicts, ordered))
    there = set[Verdict]().union(*by_policy) - {Verdict.CORRECT, Verdict.SCORED}
    shown = [verdict for verdict in Verdict if verdict in there]
    rows = []
    for policy, counts in zip(ordered, by_policy, strict=True):
        total = max(sum(counts.values()), 1)
        row = {"policy": policy_name(policy)}
        for verdict in shown:
            row[words(verdict.value)] = fmt.percent(counts.get(verdict, 0) / total)
        rows.append(row)
    return table("Answers that are not right, by verdict, %", rows if shown else [])


def _verdicts(policy: Manifest) -> dict[Verdict, float]:
    """Count a policy's answers by verdict, without verdicts that none of them has."""
    counts = {}
    for verdict in Verdict:
        count = number(policy, "verdicts", verdict.value)
        if count > 0:
            counts[verdict] = count
    return counts


def paired_table(evaluation: Manifest) -> Table:
    """Build the paired differences that the result lacks: those of policies that do not follow each
    other."""
    stepwise = {(step.before["name"], step.after["name"]) for step in steps(evaluation)}
    rows = []
    for kind in ((), ("greedy",)):
        for names, pair in paired(evaluation).items():
            difference, error = number(pair, *kind, "difference"), number(pair, *kind, "sem")
            if not math.isnan(difference) and names not in stepwise:
                name = ", ".join([" → ".join(names), *kind])
                rows.append({"pair": name, "change": fmt.change(difference, error)})
    title = "Other paired differences, points ± standard error clustered by problem"
    return table(title, rows if has_accuracy(evaluation) else [])


def subsets_table(evaluation: Manifest) -> Table:
    """Show accuracy by subset of the problems."""
    ordered = policies(evaluation)
    names = itertools.chain.from_iterable(policy.get("subsets", ()) for policy in ordered)
    rows = []
    for name in dict.fromkeys(names):
        size = max(number(policy, "subsets", name, "problems") for policy in ordered)
        row = {"subset": name, "problems": fmt.count(size)}
        for policy in ordered:
            row[policy_name(policy)] = fmt.percent(number(policy, "subsets", name, "mean"))
        rows.append(row)
    return table("Accuracy by subset, %", rows)


def selection_table(manifest: Manifest) -> Table:
    """Show the scores of a finished best_checkpoint stage at every step, and of each task if
    several."""
    result = manifest.get("result", {})
    measured: Mapping[str, Any] = result.get("steps", {})
    tasks = itertools.chain.from_iterable(scores.get("tasks", ()) for scores in measured.values())
    names = dict.fromkeys(tasks)
    if len(names) == 1:
        names.clear()  # its scores are the whole
    rows = []
    for step in sorted(measured, key=lambda step: (not step.isdecimal(), step.zfill(20))):
        is_chosen = str(result.get("policy")).endswith(f"@{step}")
        scores = measured[step]
        row = {"step": f"{step}{' (chosen)' * is_chosen}"}
        row["score"] = _measured(scores, "score", "sem")
        for name in names:
            row[name] = _measured(scores.get("tasks", {}).get(name, {}), "score", "score_sem")
        rows.append(row)
    by_score = f"{result.get('policy')} by its score on {result.get('split')}"
    return table(f"Selection {manifest.get('name')}: {by_score} (± standard error)", rows)


def compute_table(manifests: Sequence[Manifest]) -> Table:
    """Build each finished stage's cost; the last row is the total."""
    measures = (*TOKENS, "flops", *TIMES)
    rows = []

    def add(name: str, kind: str, stages: Sequence[Manifest]) -> None:
        costs = cost_cells(total_cost(stages), measures)
        rows.append({"stage": name, "kind": kind, **costs, "host memory": _peak_memory(stages)})

    for stage in manifests:
        add(str(stage.get("name", "")), str(stage.get("kind", "")), [stage])
    if len(manifests) > 1:
        add("all stages", "", manifests)
    return table("Compute of each finished stage (generated to trained: tokens)", rows)


def _peak_memory(manifests: Iterable[Manifest]) -> str:
    """Format the most memory that the processes of stages took at a time."""
    peaks = [number(manifest, "peak_memory_bytes") for manifest in manifests]
    if not peaks or any(map(math.isnan, peaks)):
        return UNKNOWN
    return gibibytes(max(peaks))


def gibibytes(size: float) -> str:
    """Format bytes, "4.6 GiB"."""
    return UNKNOWN if math.isnan(size) else f"{size / GIB:.1f} GiB"


def goodput_table(manifests: Iterable[Manifest]) -> Table:
    """Show where the time of each finished stage went, without a row of one that does not tell.

    The wall time has writing checkpoints in it, and no diagnoses, which are counted apart.
    """
    rows = []
    for manifest in manifests:
        spent = {activity: fmt.percent(share) for activity, share in shares(manifest).items()}
        if spent:
            seconds = number(manifest, "seconds") + number(manifest, "checkpointing_seconds")
            row = {"stage": str(manifest.get("name", "")), "wall time": fmt.duration(seconds)}
            rows.append(row | spent)
    return table("Where the time went, in % of the wall time", rows)


def compiled_table(manifests: Iterable[Manifest]) -> Table:
    """Build a row for the programs that took longest to compile, those of a name together, and the
    rest."""
    compiled = Counter[str]()
    seconds = defaultdict[str, float](float)
    for manifest in manifests:
        for name, program in (manifest.get("programs") or {}).items():
            compiled[name] += int(program["compiled"])
            seconds[name] += float(program["seconds"])

    longest = sorted(seconds, key=lambda name: -seconds[name])
    shown = longest[:8]
    if len(longest) > 8:
        shown.append("others")
    for name in longest[8:]:
        compiled["others"] += compiled[name]
        seconds["others"] += seconds[name]
    rows = []
    for name in shown:
        took = f"{seconds[name]:.1f} s"
        rows.append({"program": name, "times": str(compiled[name]), "took": took})
    return table("Programs compiled, or read from the cache", rows)


def counts_table(title: str, by_stage: Mapping[str, Mapping[str, Any]]) -> Table:
    """Build the counts of stages, a column each, without what is 0 everywhere."""
    counted = {stage: dict(leaves(values)) for stage, values in by_stage.items()}
    names: dict[str, None] = {}
    for values in counted.values():
        names |= dict.fromkeys(filter(values.get, values))
    rows = []
    for name in names:
        cells = {stage: _counted(values.get(name, math.nan)) for stage, values in counted.items()}
        rows.append({"count": words(name), **cells})
    return table(title, rows)


def _counted(value: float) -> str:
    return fmt.count(value) if value.is_integer() else fmt.quantity(value)
