"""The result in plain text: one table for terminal, README, report.md and report.html, and the sentence above it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from g2d_jax.report import format as fmt
from g2d_jax.report.run import Run
from g2d_jax.report.table import Text, table

Manifest = Mapping[str, Any]
LABELS = {"sft": "cold", "warmup": "warm-up", "dpo": "G2D"}
"""What the stages of the shipped configs lead to, where a policy has no label of its own."""

TOKENS = ("generated", "prefilled", "scored", "trained")

_UNKNOWN = (math.nan, math.nan)
"""A difference and its error that nobody measured."""

FIGURES = (*(f"{name} tokens" for name in TOKENS), "FLOPs", "time", "device time", "verifier CPU", "price")
"""The columns of the compute table that are numbers."""


def policy_name(policy: Manifest) -> str:
    """A policy for readers: "cold (sft)"; its name alone if it has no other label."""
    name = str(policy.get("name", ""))
    label = str(policy.get("label") or name)
    label = LABELS.get(name.partition("@")[0], name) if label == name else label
    return label if label.replace("-", "") == name else f"{label} ({name})"


def policies(evaluation: Manifest) -> list[Manifest]:
    """The policies of a finished evaluate stage, in the order they were evaluated."""
    return list(evaluation.get("result", {}).get("policies", ()))


def differences(evaluation: Manifest, *kind: str) -> dict[tuple[str, str], tuple[float, float]]:
    """(before, after) -> paired difference in accuracy and its standard error clustered by problem.

    kind: "greedy" for greedy accuracy in place of sampled; "tasks" and a task's name for its scalar reward.
    """
    pairs = evaluation.get("result", {}).get("paired", ())
    return {(p["before"], p["after"]): (fmt.number(p, *kind, "difference"), fmt.number(p, *kind, "sem")) for p in pairs}


def steps(evaluation: Manifest, *kind: str) -> list[tuple[Manifest, Manifest, float, float]]:
    """Each policy but the first with the one before it: before, after, paired difference, standard error.

    kind: as in `differences`.
    """
    measured, ordered = differences(evaluation, *kind), policies(evaluation)
    return [(b, a, *measured.get((b["name"], a["name"]), _UNKNOWN)) for b, a in itertools.pairwise(ordered)]


def gains(evaluation: Manifest, *kind: str) -> dict[str, tuple[float, float]]:
    """Name of each policy but the first -> what it gained on the one before it, and the standard error; see `steps`."""
    return {after["name"]: (difference, error) for _, after, difference, error in steps(evaluation, *kind)}


def tasks(evaluation: Manifest | None) -> dict[str, bool]:
    """The tasks that an evaluation tells of, and whether their rewards are scalar; {} if it tells of accuracy alone."""
    entries = policies(evaluation)[:1] if evaluation else []
    return {name: one.get("accuracy") is None for entry in entries for name, one in entry.get("tasks", {}).items()}


def has_accuracy(evaluation: Manifest) -> bool:
    """Whether any of its problems has right and wrong answers."""
    return not tasks(evaluation) or not all(tasks(evaluation).values())


def summary_table(evaluation: Manifest | None, stage_manifests: Iterable[Manifest]) -> Text:
    """Title, columns and rows of the result: accuracy of each policy, what it gained, and what making it cost.

    Where tasks have scalar rewards their means stand beside, or in place of, the accuracy.
    evaluation: the manifest of a finished evaluate stage, None if there is none yet (no rows then). stage_manifests: of
    the finished stages in order; each stage's cost counts once, in the row of the policy it led to.
    """
    ordered = policies(evaluation) if evaluation else []
    largest = max((int(k) for policy in ordered for k in policy.get("pass_at", {})), default=1)
    sampled, greedy = gains(evaluation or {}), gains(evaluation or {}, "greedy")
    rows: list[dict[str, str]] = []
    for policy, makers in zip(ordered, _makers(ordered, stage_manifests), strict=True):
        accuracy = {
            "pass@1 %": fmt.spread(fmt.number(policy, "mean"), fmt.number(policy, "sem_clustered")),
            **{f"pass@{k} %": fmt.percent(fmt.number(policy, "pass_at", str(k))) for k in (largest,) if k > 1},
            "greedy %": fmt.percent(fmt.number(policy, "greedy")),
            "change": fmt.change(*sampled.get(policy["name"], _UNKNOWN)),
            "greedy change": fmt.change(*greedy.get(policy["name"], _UNKNOWN)),
        }
        shown = accuracy if has_accuracy(evaluation or {}) else {}
        rows.append({"policy": policy_name(policy), **shown, **_rewards(evaluation or {}, policy), **_cost(makers)})
    compared = any(not math.isnan(difference) for difference, _ in greedy.values())
    costs = set(_cost(())) if all(row["made by"] == fmt.UNKNOWN for row in rows) else set()
    return table(_title(evaluation), rows, hidden=costs if compared else {*costs, "greedy change"})


def _rewards(evaluation: Manifest, policy: Manifest) -> dict[str, str]:
    """A policy's mean reward in each scalar task, and what it gained."""
    cells = {}
    for task in [task for task, scalar in tasks(evaluation).items() if scalar]:
        name = "" if len(tasks(evaluation)) == 1 else f"{task} "
        cells[f"{name}reward"] = _reward(policy, task)
        gain = gains(evaluation, "tasks", task).get(policy["name"], _UNKNOWN)
        cells[f"{name}change"] = fmt.measured(*gain, signed=True)
    return cells


def _reward(policy: Manifest, task: str) -> str:
    return fmt.measured(*(fmt.number(policy, "tasks", task, key) for key in ("reward", "sem")))


def tasks_table(evaluation: Manifest | None) -> Text:
    """Title, columns and rows of every task by policy; no rows where accuracy says it all."""
    rows = [
        {
            "policy": policy_name(policy),
            "task": task,
            "accuracy %": fmt.percent(fmt.number(one, "accuracy")),
            "reward": _reward(policy, task),
            "runs' std": fmt.value(fmt.number(one, "std_runs")),
            "reward / token": fmt.measured(
                fmt.number(one, "length_normalised"), fmt.number(one, "length_normalised_sem")
            ),
            "greedy": fmt.value(fmt.number(one, "greedy")),
            "length": fmt.value(fmt.number(one, "mean_length")),
            "problems": fmt.count(fmt.number(one, "problems")),
            "unscorable %": fmt.percent(fmt.number(one, "unscorable")),
        }
        for policy in (policies(evaluation) if evaluation else [])
        for task, one in policy.get("tasks", {}).items()
    ]
    return table("Each task (± standard error clustered by problem; lengths in tokens)", rows)


def selection_table(manifest: Manifest) -> Text:
    """Title, columns and rows of a finished select stage: the score of every step, and of each task if several."""
    result = manifest.get("result", {})
    steps: Mapping[str, Any] = result.get("steps", {})
    names = list({name: None for found in steps.values() for name in found.get("tasks", {})})
    names = names if len(names) > 1 else []
    rows = [
        [
            f"{step} (chosen)" if str(result.get("policy")).endswith(f"@{step}") else step,
            fmt.measured(fmt.number(found, "score"), fmt.number(found, "sem")),
            *(fmt.measured(*(fmt.number(found, "tasks", n, key) for key in ("score", "score_sem"))) for n in names),
        ]
        for step, found in sorted(steps.items(), key=lambda one: _step_number(one[0]))
    ]
    title = f"Selection {manifest.get('name')}: {result.get('policy')} by its score on {result.get('split')}"
    return f"{title} (± standard error)", ["step", "score", *names], rows


def _step_number(step: str) -> tuple[float, str]:
    """What steps, which JSON has as text, are sorted by; what is no number comes last."""
    return (float(step) if step.isdecimal() else math.inf), step


def _title(evaluation: Manifest | None) -> str:
    if not evaluation:
        return "No evaluation is finished yet"
    over = f"{_problems(evaluation, 'problems')}, {fmt.count(fmt.number(evaluation, 'result', 'samples'))} answers each"
    what, unit = ("Accuracy", ", in points") if has_accuracy(evaluation) else ("Reward", "")
    return f"{what} on {over} (± standard error clustered by problem; changes are paired{unit})"


def _cost(made_by: Sequence[Manifest]) -> dict[str, str]:
    names = " + ".join(str(stage.get("name", "")) for stage in made_by)
    return {
        "made by": names or fmt.UNKNOWN,
        "generated": fmt.quantity(_sum(made_by, "tokens", "generated")),
        "trained": fmt.quantity(_sum(made_by, "tokens", "trained")),
        "FLOPs": fmt.quantity(_sum(made_by, "flops")),
        "time": fmt.duration(_sum(made_by, "seconds")),
    }


def _makers(ordered: Sequence[Manifest], stage_manifests: Iterable[Manifest]) -> list[list[Manifest]]:
    """For each policy the stages that led to it and are not yet in a row above: its own, with those it reads."""
    waiting = {str(stage["name"]): stage for stage in stage_manifests if stage.get("kind") != "evaluate"}

    def claim(name: str) -> list[Manifest]:
        if (stage := waiting.pop(name, None)) is None:
            return []
        return [*(one for needed in stage.get("inputs", {}) for one in claim(needed)), stage]

    stages = [str(policy["name"]).partition("@")[0] for policy in ordered]  # "warmup@20" is of the stage warmup
    return [[] if name in stages[i + 1 :] else claim(name) for i, name in enumerate(stages)]


def compute_table(stage_manifests: Iterable[Manifest], price_per_device_hour: float | None = None) -> Text:
    """Title, columns and rows of what each finished stage cost; the last row is the total.

    Device time, which is the time on the clock for each device, is shown where a run had several. A price adds what
    the device time cost.
    """
    stages = list(stage_manifests)
    several = any(fmt.number(stage, "device_seconds") > fmt.number(stage, "seconds") for stage in stages)
    hidden = {*([] if several else ["device time"]), *(["price"] if price_per_device_hour is None else [])}
    labels = [{"stage": str(stage.get("name", "")), "kind": str(stage.get("kind", ""))} for stage in stages]
    groups = [(label, [stage]) for label, stage in zip(labels, stages, strict=True)]
    groups += [({"stage": "all stages", "kind": ""}, stages)] if len(stages) > 1 else []
    rows = [{**label, **_figures(group, price_per_device_hour or 0.0)} for label, group in groups]
    return table("Compute of each finished stage", rows, hidden=hidden)


def price(run: Run) -> float | None:
    """The run's compute.price_per_device_hour, None if it has none."""
    set_to = fmt.number(run.config, "compute", "price_per_device_hour")
    return None if math.isnan(set_to) else set_to


def _figures(stages: Sequence[Manifest], price_per_device_hour: float) -> dict[str, str]:
    amounts = [*(_sum(stages, "tokens", name) for name in TOKENS), _sum(stages, "flops")]
    times = [_sum(stages, name) for name in ("seconds", "device_seconds", "verifier_cpu_seconds")]
    paid = times[1] / 3600 * price_per_device_hour
    written = fmt.UNKNOWN if math.isnan(paid) else f"{paid:,.2f}"
    return dict(zip(FIGURES, [*map(fmt.quantity, amounts), *map(fmt.duration, times), written], strict=True))


def _sum(stages: Sequence[Manifest], *keys: str) -> float:
    """Their sum, NaN for no stages."""
    return sum(fmt.number(stage, *keys) for stage in stages) if stages else math.nan


def verdict(evaluation: Manifest | None) -> str:
    """What the run showed, in one sentence made of measured numbers; a change under two standard errors is none.

    Of accuracy, or where there are rewards only of the first task's.
    """
    ordered = policies(evaluation) if evaluation else []
    if not evaluation or not ordered:
        return "No policy has been evaluated yet."
    first, name = ordered[0], policy_name(ordered[0])
    if has_accuracy(evaluation):
        accuracy = fmt.spread(fmt.number(first, "mean"), fmt.number(first, "sem_clustered"))
        parts = [f"{name} answers {accuracy} % of {_problems(evaluation)} correctly"]
        for before, after, difference, error in steps(evaluation):
            reached, size = f"{fmt.percent(fmt.number(after, 'mean'))} %", f"{fmt.change(difference, error)} points"
            parts.append(_step(before, after, reached, difference, error, size))
    else:
        task = next(iter(tasks(evaluation)))
        parts = [f"{name} has a mean reward of {_reward(first, task)} on {_problems(evaluation)}"]
        for before, after, difference, error in steps(evaluation, "tasks", task):
            reached = fmt.measured(fmt.number(after, "tasks", task, "reward"), math.nan)
            size = fmt.measured(difference, error, signed=True)
            parts.append(_step(before, after, reached, difference, error, size))
    # Not capitalised where it begins with a path.
    sentence = "; ".join(parts) + "."
    sentence = f"The policy {sentence}" if any(c in name for c in ":/\\") else sentence[0].upper() + sentence[1:]
    return sentence + _greedily(evaluation)


def _greedily(evaluation: Manifest) -> str:
    """The same of greedy answers, which a lower temperature does not change; "" where they were not compared."""
    compared = steps(evaluation, "greedy")
    if not compared or any(math.isnan(difference) for _, _, difference, _ in compared):
        return ""
    reached = [f"{fmt.percent(fmt.number(policy, 'greedy'))} %" for policy in policies(evaluation)]
    changes = [fmt.change(difference, error) for _, _, difference, error in compared]
    later = (f", then {after} ({change})" for after, change in zip(reached[1:], changes, strict=True))
    return f" Decoded greedily: {reached[0]}{''.join(later)}."


def _problems(evaluation: Manifest, what: str = "held-out problems") -> str:
    """How many problems the headline is about: those with right and wrong answers, if there are any."""
    judged = [name for name, scalar in tasks(evaluation).items() if not scalar]
    first = (policies(evaluation) or [{}])[0]
    some = sum(fmt.number(first, "tasks", name, "problems") for name in judged)
    return f"{fmt.count(some if judged else fmt.number(evaluation, 'result', 'problems'))} {what}"


def _step(before: Manifest, after: Manifest, reached: str, difference: float, error: float, size: str) -> str:
    name = policy_name(after)
    if math.isnan(difference) or math.isnan(error):
        return f"{name} reaches {reached} (not compared pairwise with {policy_name(before)})"
    if abs(difference) <= 2 * error:
        return f"{name} at {reached} is within two standard errors of {policy_name(before)} ({size})"
    return f"{name} {'rises' if difference > 0 else 'falls'} to {reached} ({size})"


def state(run: Run) -> str:
    """What is missing of a run that is not finished, "" if nothing is."""
    lists = {"not finished": [stage.name for stage in run.stages if stage.manifest is None], "not begun": run.planned}
    missing = [f"{what}: {', '.join(names)}" for what, names in lists.items() if names]
    return f"This is the report of a run under way ({'; '.join(missing)})." if missing else ""
