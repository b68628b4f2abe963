"""The stages of a run as a graph: their inputs, their order, and the checks between them.

problems ─► sft ─► warm-up (online GRPO) ─► collect (rollouts ► verify ► pairs) ─► offline DPO ─► evaluate ─► report
                         └─► the best of its checkpoints
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from etils import epath

from g2d_jax.config import places
from g2d_jax.config.policy_name import PolicyName
from g2d_jax.config.settings import RESERVED, Config, setting_of
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
        """Return the stages up to this one, with it; None or "": all."""
        return self.order[: self.order.index(last) + 1] if last else self.order


def plan(config: Config) -> Plan:
    """Order the stages by what they read. Raises ValueError for an unknown input, and for a
    circle."""
    stages = config.stages
    if not stages:
        raise ValueError(
            "the config has no stages: add some, for example config.stages.sft = "
            "g2d_jax.config.sft()"
        )
    inputs = {}
    for name, stage in stages.items():
        inputs[name] = tuple(dict.fromkeys(_inputs(name, stage, stages)))
    order: list[str] = []
    while len(order) < len(inputs):
        waiting = [name for name in inputs if name not in order]
        ready = [name for name in waiting if set(inputs[name]) <= set(order)]
        if not ready:
            raise ValueError(f"stages read each other in a circle: {', '.join(waiting)}")
        # Evaluations last: the policies they compare should exist before any time is spent on them.
        order.append(min(ready, key=lambda name: (stages[name].comes_last, name)))
    return Plan(tuple(order), inputs)


def _inputs(name: str, stage: Stage, stages: Stages) -> list[str]:
    inputs = []
    for policy in stage.policies_read():
        # A model's, or another run's, is there before this run begins: it orders nothing.
        parsed = PolicyName.parse(policy)
        if parsed.is_model or parsed.is_external:
            continue
        reading = f"stages.{name} reads policy {policy!r}"
        maker = stages.get(parsed.stage)
        if maker is None:
            others = [other for other in stages if stages[other].is_policy and other != name]
            raise ValueError(f"{reading}; there are: {', '.join(['init', *others])}")
        if not maker.is_policy:
            raise ValueError(f"{reading}, but a {maker.kind} stage trains none")
        if parsed.step is not None and (fault := maker.step_fault(parsed.step)):
            raise ValueError(f"stages.{name} reads {policy!r}, but {fault}")
        inputs.append(parsed.stage)
    # A kind of one's own may refuse what it is to read: see docs/extending/stage.md.
    try:
        return [*inputs, *stage.stages_read(stages)]
    except ValueError as error:
        raise ValueError(f"stages.{name}: {error}") from error


def dependents_of_final(config: Config) -> dict[str, list[str]]:
    """Return of each stage the stages made from the policy it ends with, or from what was made from
    it, in order."""
    order = plan(config)
    dependents: dict[str, list[str]] = {name: [] for name in order.order}
    for name, others in dependents.items():
        for other in order.order:
            if name in config.stages[other].policies_read() or set(order.inputs[other]) & set(
                others
            ):
                others.append(other)
    return dependents


_SOURCES = ", a file or hub:owner/name; in a config file with settings.source(…)"


def valid_plan(config: Config, until: str | None = None) -> Plan:
    """Return the plan of stages whose settings fit each other, and whose files are there.

    until: the stage to stop after, None for all. Raises ValueError for the first fault, naming the
    stage or the field.
    """
    for section, names in (("stages", config.stages), ("tasks", config.tasks)):
        for name in names:
            if name in RESERVED:
                raise ValueError(
                    f"{section}.{name}: {name!r} means something else where such a name could "
                    f"stand, as do {', '.join(word for word in RESERVED if word != name)}: choose "
                    f"another, {name}-1 say"
                )
    order = plan(config)
    if until is not None and until not in order.order:
        raise ValueError(
            f"there is no stage {until!r} to stop after; the stages are {', '.join(order.order)}"
        )
    for name in order.order:
        for error in _conflicts(name, config):
            raise ValueError(f"stages.{name}: {error}") from error
    if not _has_tokenizer(config):
        raise ValueError(
            "tokenizer.path is empty, and so is model.path: random parameters come without a "
            "tokenizer. Set model.path, or tokenizer.path to a folder or hub id; procedural:slips "
            "is that of the embedded arithmetic, which knows the characters of its problems only"
        )
    return order


def _conflicts(name: str, config: Config) -> Iterator[ValueError]:
    """Yield what is wrong with a stage among the others: problems or examples that no setting
    names, settings that do not fit, files that are not there."""
    stage = config.stages[name]
    for split in stage.splits_read():
        yield from _unnamed(split, config)
    if stage.examples_path() == "":
        yield ValueError(f"no setting names its examples: set stages.{name}.data.path{_SOURCES}")
    yield from stage.conflicts_among(name, config.stages)
    for needed in stage.files_read(config.stages):
        try:
            places.data_files(needed.path)
        except ValueError as error:
            shown = places.shown(needed.path)
            reason = str(error).replace(needed.path, shown, 1)
            yield ValueError(needed.refusal.format(place=shown, error=reason))


def _unnamed(split: str, config: Config) -> Iterator[ValueError]:
    """Refuse a split that no setting names, and a task of a mixed run without training problems.

    Held-out problems may be of some of the tasks only.
    """
    without = [name for name, task in config.all_tasks.items() if not getattr(task, split).path]
    if len(without) == len(config.all_tasks):
        named = " or ".join(f"{setting_of(name, split)}.path" for name in config.all_tasks)
        yield ValueError(
            f"it needs problems of {split}, and no setting names any: set {named}{_SOURCES}"
        )
    for name in without:
        if split == "train" and config.all_tasks[name].weight:
            yield ValueError(
                f"it draws problems of every task, and no setting names those of {name}: set "
                f"{setting_of(name, 'train')}.path{_SOURCES}, or {setting_of(name, 'weight')} to 0"
            )


def _has_tokenizer(config: Config) -> bool:
    """Return whether a setting names a tokenizer, or a model or an embedded task that has one."""
    if config.model.path or config.tokenizer.path:
        return True
    paths = [stage.examples_path() or "" for stage in config.stages.values()]
    for task in config.all_tasks.values():
        paths += [task.train.path, task.dev.path, task.test.path]
    return any(path.startswith("procedural:") for path in paths)
