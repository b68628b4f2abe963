"""The cost of a policy (tokens, FLOPs, device time, verifier time), from its stages' records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from g2d_jax.config import STAGES
from g2d_jax.config.policy_name import PolicyName
from g2d_jax.config.section import Place
from g2d_jax.session.stage_result import MEASURES, Cost, StageResult

TRAINING = tuple(name for name, kind in STAGES.items() if kind.trains)
"""Stage kinds that train a policy."""

POLICIES = tuple(name for name, kind in STAGES.items() if kind.is_policy)
"""Stage kinds whose names are policies: they train one, or choose one of its checkpoints."""

Stages = Mapping[str, Mapping[str, Any]]
Results = Mapping[str, StageResult]


def cost_of(policy: str, stages: Stages, results: Results) -> dict[str, float]:
    """Sum the cost of a policy by measure: of its own stage and all stages it was made from, each
    once.

    policy: "STAGE", "STAGE@K", "init", or a policy from outside the run ("run:…", "hf:…"), which
    costs nothing here.
    stages: the config's, by name; sft stages do not count. A trajectory read at two steps counts up
    to the later one. A best_checkpoint stage costs its trajectory up to the last step it scored,
    and the sampled answers. Raises ValueError for a policy that no stage trains, and for a stage
    without a record or without the cost of that step.
    """
    total = dict.fromkeys(MEASURES, 0.0)
    for _, spent in costs_by_stage(policy, stages, results):
        for measure in total:
            total[measure] += spent[measure]
    return total


def costs_by_stage(
    policy: str, stages: Stages, results: Results
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the kind and the cost by measure of each stage that `cost_of` sums. Raises as it
    does."""
    for name, step in behind(policy, stages).items():
        if (kind := stages[name]["kind"]) != "sft":
            yield kind, _cost(name, step, results).measures


def behind(policy: str, stages: Stages) -> dict[str, int | None]:
    """Map the stages that a policy was made from, its own first, to the step each was read at; None
    is its end.

    policy, stages: as in `cost_of`. A trajectory read at two steps has the later one. Raises
    ValueError for a policy that no stage trains.
    """
    reached: dict[str, int | None] = {}
    _reach_policy(policy, stages, reached)
    return reached


def _reach_policy(policy: str, stages: Stages, reached: dict[str, int | None]) -> None:
    """Record the stages that a policy was made from, and the step each was read at."""
    name = PolicyName.parse(policy)
    if name.is_model or name.is_external:
        return
    makers = [other for other, stage in stages.items() if stage["kind"] in POLICIES]
    if name.stage not in makers or (name.step is not None and not name.step.isdecimal()):
        raise ValueError(
            f"no stage trains {policy!r}: a policy is init, run:…, hf:…, or one of "
            f"{', '.join(makers)}"
        )
    _reach(name.stage, name.number, stages, reached)


def _reach(name: str, step: int | None, stages: Stages, reached: dict[str, int | None]) -> None:
    # A trajectory read at two steps was computed once, up to the later one; None is its end.
    if name in reached:
        before = reached[name]
        reached[name] = None if before is None or step is None else max(before, step)
        return
    reached[name] = step
    stage = stages[name]
    policy = stage["policy"]
    # A choice costs the trajectory up to the last step that it scored; () is all steps.
    if stage["kind"] == "best_checkpoint" and stage["steps"]:
        policy = f"{policy}@{max(stage['steps'])}"
    _reach_policy(policy, stages, reached)
    for field, hint in STAGES[stage["kind"]].hints().items():
        if hint.place not in (Place("rollouts"), Place("preferences")):
            continue
        other = stage.get(field, "")
        if stages.get(other, {}).get("kind") == "collect":  # else a file, or "sample" or "archive"
            _reach(other, None, stages, reached)


def _cost(name: str, step: int | None, results: Results) -> Cost:
    if name not in results:
        raise ValueError(f"stage {name!r} has not finished yet, so its cost is unknown")
    result = results[name]
    if step is None or step == result.counts.get("steps"):
        return result.cost
    if str(step) not in result.costs:
        raise ValueError(f"stage {name!r} has no cost for step {step}: add the step to its keep")
    return result.costs[str(step)]
