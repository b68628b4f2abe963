"""The cost of a policy (tokens, FLOPs, device time, verifier time), from its stages' manifests."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from g2d_jax.config import STAGES
from g2d_jax.config.policy_name import PolicyName
from g2d_jax.config.section import Place

TOKENS = ("generated", "prefilled", "scored", "trained")
TIMES = ("seconds", "device_seconds", "verifier_cpu_seconds")
MEASURES = (*TOKENS, "tokens", "flops", *TIMES)
"""The measures of a cost. tokens: of the four kinds together. seconds: on the clock."""

ACTIVITIES = ("generation", "verification", "logprobs", "training", "checkpointing", "compilation")
"""The activities of a stage; a record has the seconds of each, "generation_seconds" and so on.

generation: sampling. verification: rewards. logprobs: log-probabilities outside updates, of a
reference for one.
training: updates. checkpointing: waiting for checkpoints to be written. compilation: of programs,
wherever it happens.
"""

TRAINING = tuple(name for name, kind in STAGES.items() if kind.trains)
"""The kinds of stages that make policies."""

POLICIES = tuple(name for name, kind in STAGES.items() if kind.is_policy)
"""The kinds of stages whose names are policies: those that make one, and those that choose one of
its steps."""

Stages = Mapping[str, Mapping[str, Any]]
Manifests = Mapping[str, Mapping[str, Any]]


def cost(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the cost in a manifest, or in an entry of a manifest's "at", by measure.

    Measures that a record lacks are NaN: manifests of version 0.1 have no device_seconds.
    """
    counts = record.get("tokens", {})
    tokens = {name: float(counts.get(name, math.nan)) for name in TOKENS}
    times = {name: float(record.get(name, math.nan)) for name in TIMES}
    whole = {"tokens": sum(tokens.values()), "flops": float(record.get("flops", math.nan))}
    return {**tokens, **whole, **times}


def shares(record: Mapping[str, Any]) -> dict[str, float]:
    """Compute each activity's share of the wall time in a manifest or other record of costs, and
    "other", the rest.

    The wall time is the record's `seconds`, which leave out writing checkpoints, plus that. {} for
    a record without any time.
    """
    spent = {activity: float(record.get(f"{activity}_seconds", 0.0)) for activity in ACTIVITIES}
    whole = float(record.get("seconds", 0.0)) + spent["checkpointing"]
    if not whole > 0:
        return {}
    fractions = {activity: seconds / whole for activity, seconds in spent.items()}
    return {**fractions, "other": max(0.0, 1 - sum(fractions.values()))}


def goodput(record: Mapping[str, Any]) -> dict[str, float]:
    """Return `shares` as metrics, "goodput/generation" and so on."""
    return {f"goodput/{activity}": share for activity, share in shares(record).items()}


def cost_of(policy: str, stages: Stages, manifests: Manifests) -> dict[str, float]:
    """Sum all that was spent to make a policy, by measure: its own stage and all behind it, each
    once.

    policy: "STAGE", "STAGE@K", "init", or a policy from outside the run ("run:…", "hf:…"), which
    costs nothing here.
    stages: the config's, by name; sft stages do not count. A trajectory reached at two steps counts
    up to the later one. A best_checkpoint stage's policy costs all that was spent to choose it: the
    trajectory up to the last step that was looked at, whichever was chosen, and the answers that
    were drawn. Raises ValueError for a policy that no stage makes, and naming a stage without a
    manifest, or a step whose cost was not kept.
    """
    total = dict.fromkeys(MEASURES, 0.0)
    for _, spent in costs_by_stage(policy, stages, manifests):
        for measure in total:
            total[measure] += spent[measure]
    return total


def costs_by_stage(
    policy: str, stages: Stages, manifests: Manifests
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the kind of each stage that `cost_of` sums, and what it cost by measure. Raises as
    that."""
    for name, step in behind(policy, stages).items():
        if (kind := stages[name]["kind"]) != "sft":
            yield kind, cost(_record(name, step, manifests))


def behind(policy: str, stages: Stages) -> dict[str, int | None]:
    """Map the stages that a policy was made from, its own first, to the step each was taken at;
    None is its end.

    policy, stages: as in `cost_of`. A trajectory taken at two steps has the later one. Raises
    ValueError for a policy that no stage makes.
    """
    reached: dict[str, int | None] = {}
    _reach_policy(policy, stages, reached)
    return reached


def _reach_policy(policy: str, stages: Stages, reached: dict[str, int | None]) -> None:
    """Record the stages behind a policy, with the step they were taken at; None is the end."""
    name = PolicyName.parse(policy)
    if name.is_model or name.is_external:
        return
    makers = [other for other, stage in stages.items() if stage["kind"] in POLICIES]
    if name.stage not in makers or (name.step is not None and not name.step.isdecimal()):
        raise ValueError(
            f"no stage makes {policy!r}: a policy is init, run:…, hf:…, or of {', '.join(makers)}"
        )
    _reach(name.stage, name.number, stages, reached)


def _reach(name: str, step: int | None, stages: Stages, reached: dict[str, int | None]) -> None:
    # A trajectory taken twice was paid for once, up to the later step; None, its end, is latest.
    if name in reached:
        before = reached[name]
        reached[name] = None if before is None or step is None else max(before, step)
        return
    reached[name] = step
    stage = stages[name]
    policy = stage["policy"]
    # A choice costs the trajectory up to the last step that was looked at; () is all steps.
    if stage["kind"] == "best_checkpoint" and stage["steps"]:
        policy = f"{policy}@{max(stage['steps'])}"
    _reach_policy(policy, stages, reached)
    for field, hint in STAGES[stage["kind"]].hints().items():
        if hint.place not in (Place("rollouts"), Place("preferences")):
            continue
        other = stage.get(field, "")
        if stages.get(other, {}).get("kind") == "collect":  # else a file, or "sample" or "archive"
            _reach(other, None, stages, reached)


def _record(name: str, step: int | None, manifests: Manifests) -> Mapping[str, Any]:
    if name not in manifests:
        raise ValueError(f"stage {name!r} has no manifest yet: its cost is not known")
    manifest = manifests[name]
    if step is None or step == manifest.get("counts", {}).get("steps"):
        return manifest
    if str(step) not in manifest.get("at", {}):
        raise ValueError(f"stage {name!r} kept no cost of step {step}: add the step to its keep")
    record: Mapping[str, Any] = manifest["at"][str(step)]
    return record
