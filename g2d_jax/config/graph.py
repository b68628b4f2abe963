"""The stages of a run as a graph: their inputs, their order, and the checks between them.

problems ─► sft ─► warm-up (online GRPO) ─► collect (rollouts ► verify ► pairs) ─► offline DPO ─► evaluate ─► report
                         └─► the best of its checkpoints
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from etils import epath

from g2d_jax.config.policy_name import PolicyName
from g2d_jax.config.section import Invalid, Issue, error
from g2d_jax.config.settings import Config
from g2d_jax.config.stages.stage import Stage, Stages


@dataclass(frozen=True)
class Plan:
    """The stages of a config in the order they run. inputs: stage -> stages it reads."""

    order: tuple[str, ...]
    inputs: Mapping[str, tuple[str, ...]]

    def folders(self, workdir: epath.Path) -> dict[str, epath.Path]:
        """Return each stage's folder, numbered in order."""
        return {name: workdir / f"{i:02d}-{name}" for i, name in enumerate(self.order, start=1)}

    def until(self, last: str | None) -> tuple[str, ...]:
        """Return the stages up to and including this one; None or "": all."""
        return self.order[: self.order.index(last) + 1] if last else self.order


def plan(config: Config) -> Plan:
    """Order the stages by their inputs. Raises Invalid for unknown inputs and for a cycle."""
    stages = config.stages
    faults: list[Issue] = []
    inputs = {}
    for name, stage in stages.items():
        inputs[name] = tuple(dict.fromkeys(_inputs(name, stage, stages, faults)))
    if not stages:
        faults.append(
            error(
                "stages", "are empty", "add one, such as config.stages.sft = g2d_jax.config.sft()"
            )
        )
    order: list[str] = []
    while len(order) < len(inputs) and not faults:
        waiting = [name for name in inputs if name not in order]
        ready = [name for name in waiting if set(inputs[name]) <= set(order)]
        if ready:
            # Evaluations last: the policies they compare should exist before time is spent on them.
            order.append(min(ready, key=lambda name: (stages[name].comes_last, name)))
        else:
            faults.append(error("stages", f"depend on each other in a cycle: {', '.join(waiting)}"))
    if faults:
        raise Invalid(faults)
    return Plan(tuple(order), inputs)


def _inputs(name: str, stage: Stage, stages: Stages, faults: list[Issue]) -> list[str]:
    """Return the stages that a stage reads; add unreadable inputs to `faults`."""
    inputs = []
    for field, policies in stage.policies_by_field().items():
        for policy in policies:
            # A model, or another run's policy, exists before this run starts and orders nothing.
            parsed = PolicyName.parse(policy)
            if parsed.is_model or parsed.is_external:
                continue
            reading = f"names the policy {policy!r}"
            maker = stages.get(parsed.stage)
            if maker is None:
                others = [other for other in stages if stages[other].is_policy and other != name]
                reading += f"; there are: {', '.join(['init', *others])}"
            elif not maker.is_policy:
                reading += f", but a {maker.kind} stage trains no policy"
            elif parsed.step is not None and (fault := maker.step_fault(parsed.step)):
                reading += f", but {fault}"
            else:
                inputs.append(parsed.stage)
                continue
            faults.append(error(f"stages.{name}.{field}", reading))
    # Your own kind of stage may refuse its input: see docs/extending/stage.md.
    try:
        return [*inputs, *stage.stages_read(stages)]
    except ValueError as fault:
        faults.append(error(f"stages.{name}", str(fault)))
        return inputs


def dependents_of_final(config: Config) -> dict[str, list[str]]:
    """Return, for each stage, the stages that use its final policy, directly or through other
    stages, in order."""
    order = plan(config)
    dependents: dict[str, list[str]] = {name: [] for name in order.order}
    for name, others in dependents.items():
        for other in order.order:
            if name in config.stages[other].policies_read() or set(order.inputs[other]) & set(
                others
            ):
                others.append(other)
    return dependents
