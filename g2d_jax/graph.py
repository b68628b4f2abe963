"""The stages of a run as a graph: their inputs, their order, and the checks between them.

problems ─► sft ─► warm-up (online GRPO) ─► collect (rollouts ► verify ► pairs) ─► offline DPO ─► evaluate ─► report
                         └─► the best of its checkpoints
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from etils import epath

from g2d_jax import places
from g2d_jax.accounting import POLICIES
from g2d_jax.config import RESERVED, BestCheckpoint, Collect, Config, Evaluate, Offline, Online, Stage, TrainingStage
from g2d_jax.data.dumps import dump_files
from g2d_jax.policy_name import PolicyName, own_stage

Stages = Mapping[str, Stage]


@dataclass(frozen=True)
class Plan:
    """The stages of a config in the order they run. inputs: stage -> stages it reads."""

    order: tuple[str, ...]
    inputs: Mapping[str, tuple[str, ...]]

    def folders(self, workdir: epath.Path) -> dict[str, epath.Path]:
        """Return each stage's folder, numbered in order."""
        return {name: workdir / f"{i:02d}-{name}" for i, name in enumerate(self.order, start=1)}


def plan(config: Config) -> Plan:
    """Order the stages by what they read. Raises ValueError for an unknown input, and for a circle."""
    stages = config.stages
    if not stages:
        raise ValueError("the config has no stages: add some, for example config.stages.sft = g2d_jax.config.sft()")
    inputs = {name: tuple(dict.fromkeys(_inputs(name, stage, stages))) for name, stage in stages.items()}
    order: list[str] = []
    while len(order) < len(inputs):
        ready = [name for name in inputs if name not in order and all(needed in order for needed in inputs[name])]
        if not ready:
            raise ValueError(f"stages read each other in a circle: {', '.join(n for n in inputs if n not in order)}")
        # Evaluations last: the policies they compare should exist before any time is spent on them.
        order.append(min(ready, key=lambda name: (isinstance(stages[name], Evaluate), name)))
    return Plan(tuple(order), inputs)


def policies_read(stage: Stage) -> tuple[str, ...]:
    """Return the policies that a stage reads, by name."""
    return stage.policies if isinstance(stage, Evaluate) else (stage.policy,)


def _inputs(name: str, stage: Stage, stages: Stages) -> list[str]:
    inputs = []
    for policy in policies_read(stage):
        named = PolicyName.parse(policy)
        if named.is_model or named.is_external:
            continue
        base = named.stage
        if base not in stages:
            names = ", ".join(["init", *(s for s in stages if stages[s].kind in POLICIES and s != name)])
            raise ValueError(f"stages.{name} reads policy {policy!r}; there are: {names}")
        if stages[base].kind not in POLICIES:
            raise ValueError(f"stages.{name} reads policy {policy!r}, but a {stages[base].kind} stage trains none")
        _check_step(name, policy, stages[base])
        inputs.append(base)
    if isinstance(stage, Offline) and stage.preferences in stages:
        inputs.append(stage.preferences)
    if isinstance(stage, Collect) and (other := rollout_source(stage, stages)):
        inputs.append(other)
    return inputs


def _check_step(name: str, policy: str, stage: Stage) -> None:
    step = PolicyName.parse(policy).step
    if step is None:
        return
    if isinstance(stage, BestCheckpoint):
        raise ValueError(
            f"stages.{name} reads {policy!r}, but a best_checkpoint stage chooses the step: leave out @{step}"
        )
    steps = kept_steps(stage)
    if not step.isdecimal() or int(step) not in steps:
        listed = ", ".join(map(str, steps)) or "of their end alone"
        raise ValueError(f"stages.{name} reads {policy!r}, but that stage keeps steps {listed}: add it to its keep")


def kept_steps(stage: Stage) -> list[int]:
    """Return the steps whose checkpoints a stage's settings keep, ascending; [] where its data decide its last one."""
    steps = getattr(stage, "steps", None)
    if not isinstance(steps, int):
        return []
    return sorted({*(step for step in getattr(stage, "keep", ()) if step <= steps), steps})


def made_from_ends(config: Config, order: Plan) -> dict[str, list[str]]:
    """Return of each stage the stages made from the policy it ends with, or from what was made from it, in order."""
    dependents: dict[str, list[str]] = {name: [] for name in order.order}
    for name, others in dependents.items():
        for other in order.order:
            if name in policies_read(config.stages[other]) or set(order.inputs[other]) & set(others):
                others.append(other)
    return dependents


def rollout_source(stage: Stage, stages: Stages) -> str | None:
    """Return the collect stage whose rollouts a collect stage reads, None if it has its own. It wins over a file."""
    if not isinstance(stage, Collect) or stage.rollouts in ("sample", "archive"):
        return None
    return stage.rollouts if isinstance(stages.get(stage.rollouts), Collect) else None


def drawn_by(name: str, stages: Stages) -> str:
    """Return the collect stage that a stage's rollouts are from in the end: itself, if it reads those of no other."""
    while other := rollout_source(stages[name], stages):
        name = other
    return name


def check_names(config: Config) -> None:
    """Raise ValueError for a stage or a task whose name is a word of `config.RESERVED`."""
    for section, names in (("stages", config.stages), ("tasks", config.tasks)):
        for name in names:
            if name in RESERVED:
                raise ValueError(
                    f"{section}.{name}: {name!r} means something else where such a name could stand, as do "
                    f"{', '.join(word for word in RESERVED if word != name)}: choose another, {name}-1 say"
                )


def check_inputs(config: Config, order: Plan) -> None:
    """Raise ValueError naming the first stage whose settings do not fit those of the stages that it reads, or that
    needs problems, examples or a tokenizer which no setting names."""
    for name in order.order:
        stage = config.stages[name]
        try:
            for split in _splits_read(stage):
                _check_named(split, config)
            if examples_path(stage) == "":
                raise ValueError(f"no setting names its examples: set stages.{name}.data.path{_SOURCES}")
            if isinstance(stage, Online) and stage.rollouts != "sample":
                _check_dump(stage.rollouts, "sample")
            elif isinstance(stage, Collect):
                _check_rollouts(name, stage, config.stages)
            elif isinstance(stage, Offline):
                _check_preferences(stage, config.stages)
            elif isinstance(stage, BestCheckpoint):
                _check_selection(stage, config.stages)
            elif isinstance(stage, Evaluate):
                _check_pass_at(stage)
        except ValueError as error:
            raise ValueError(f"stages.{name}: {error}") from error
    _check_tokenizer(config)


_SOURCES = ", a file or hub:owner/name; in a config file with settings.source(…)"


def examples_path(stage: Stage) -> str | None:
    """Return where a stage's examples are from, "" where no setting says so; None for a stage that has none."""
    data = getattr(stage, "data", None)
    return None if data is None else str(data.path)


def _check_named(split: str, config: Config) -> None:
    """Raise ValueError for a split that no setting names, and for training problems that a task of a mixed run lacks.

    Held-out problems may be of some of the tasks only.
    """
    without = [name for name, task in config.all_tasks.items() if not getattr(task, split).path]
    if len(without) == len(config.all_tasks):
        places = [f"data.{split}.path", *(f"tasks.{name}.{split}.path" for name in config.tasks)]
        raise ValueError(f"it needs problems of {split}, and no setting names any: set {' or '.join(places)}{_SOURCES}")
    if split != "train":
        return
    for name in without:
        place = "data" if name == "main" else f"tasks.{name}"
        if config.all_tasks[name].weight:
            raise ValueError(
                f"it draws problems of every task, and no setting names those of {name}: set {place}.train.path"
                f"{_SOURCES}, or {place}.weight to 0"
            )


def _check_tokenizer(config: Config) -> None:
    """Raise ValueError for random parameters without a tokenizer named, but for a run on an embedded task."""
    if config.model.path or config.tokenizer.path:
        return
    tasks = config.all_tasks.values()
    paths = [source.path for task in tasks for source in (task.train, task.dev, task.test)]
    paths += [examples_path(stage) or "" for stage in config.stages.values()]
    if any(path.startswith("procedural:") for path in paths):
        return
    raise ValueError(
        "tokenizer.path is empty, and so is model.path: random parameters come without a tokenizer. Set model.path, or "
        "tokenizer.path to a folder or hub id; procedural:slips is that of the embedded tasks, which knows the "
        "characters of their problems only"
    )


def _splits_read(stage: Stage) -> Iterator[str]:
    """Yield the splits of whose problems a stage samples responses."""
    if isinstance(stage, Evaluate):
        yield stage.split
    elif isinstance(stage, BestCheckpoint):
        yield "dev"
    elif isinstance(stage, Online) or (isinstance(stage, Collect) and stage.rollouts == "sample"):
        yield "train"
    if isinstance(stage, Online | Offline) and stage.probe.every:
        yield stage.probe.split


def _check_rollouts(name: str, stage: Collect, stages: Stages) -> None:
    """Raise ValueError if stage.rollouts leads nowhere, to those of another policy, or to some without entropies."""
    if stage.rollouts == "sample" and stage.num_generations < 2:
        raise ValueError(
            f"num_generations is {stage.num_generations}, and a preference pair takes two responses to a prompt, one "
            "better than the other: set it to 2 or more, 8 say"
        )
    if stage.rollouts == "archive":
        source = PolicyName.parse(stage.policy)
        online = stages.get(source.own_stage)
        if not isinstance(online, Online):
            raise ValueError(
                f'rollouts="archive" needs a policy that is an online stage of this run, got {stage.policy!r}'
            )
        if (online.steps if source.number is None else source.number) == 0:
            raise ValueError(f'rollouts="archive" finds none before {stage.policy!r}, which is 0 steps on: use sample')
    elif other := stages.get(stage.rollouts):
        if not isinstance(other, Collect):
            raise ValueError(
                f"rollouts is {stage.rollouts!r}, a stage that is no collect stage; those of an online stage are "
                f'rollouts="archive" with policy={stage.rollouts!r}'
            )
        if other.policy != stage.policy:
            raise ValueError(
                f"rollouts of {stage.rollouts!r} are those of policy {other.policy!r}: policy must be the same, "
                f"got {stage.policy!r}"
            )
    elif stage.rollouts != "sample":
        _check_dump(stage.rollouts, "sample, archive, a collect stage")
    origin = stages[drawn_by(name, stages)]
    assert isinstance(origin, Collect)
    drawn = stages[own_stage(origin.policy)] if origin.rollouts == "archive" else origin
    assert isinstance(drawn, Collect | Online)
    if stage.select in ("uncertain", "confident") and drawn.rollouts != "sample":
        raise ValueError(
            f"select={stage.select!r} goes by token entropies, which the rollouts of {drawn.rollouts} lack: "
            "use all or random"
        )


def _check_dump(path: str, names: str) -> None:
    try:
        dump_files(path)
    except ValueError as error:
        place = places.shown(path)
        raise ValueError(f"rollouts is {place}: write {names}, or the path of a dump that exists: {error}") from error


def _check_preferences(stage: Offline, stages: Stages) -> None:
    if stage.preferences in stages:
        if not isinstance(stages[stage.preferences], Collect):
            raise ValueError(f"preferences is {stage.preferences!r}, a stage that collects none")
    elif not stage.preferences.startswith("hub:"):
        try:
            dump_files(stage.preferences)
        except ValueError as error:
            names = ", ".join(name for name, other in stages.items() if isinstance(other, Collect)) or "none"
            found = str(error).replace(stage.preferences, places.shown(stage.preferences), 1)
            raise ValueError(
                f"preferences is neither a collect stage ({names}) nor hub:owner/name, and {found}"
            ) from error


def _check_pass_at(stage: Evaluate) -> None:
    """Raise ValueError for a pass@k of fewer than one answer, or of more than are sampled.

    The default is nobody's wish: of it those are told that can be.
    """
    few = [k for k in stage.pass_at if k < 1]
    if few:
        raise ValueError(f"pass_at has {few[0]}: pass@k is told of at least 1 answer")
    many = [k for k in stage.pass_at if k not in stage.told_at]
    if many and stage.pass_at != Evaluate().pass_at:
        raise ValueError(
            f"pass_at has {many[0]}, and num_generations is {stage.num_generations}: pass@{many[0]} takes at least "
            f"{many[0]} answers to a problem. Set pass_at to {stage.told_at}, or num_generations to {max(many)} or more"
        )


def _check_selection(stage: BestCheckpoint, stages: Stages) -> None:
    source = stages.get(stage.policy)
    if not isinstance(source, TrainingStage):
        raise ValueError(
            f"policy is {stage.policy!r}: name a stage of this run that trains, without a step; `steps` says which"
        )
    if not stage.steps:
        return
    if isinstance(source, Online) and source.stop != "steps":
        raise ValueError(f"steps is {stage.steps}, but {stage.policy} may end before: leave it at () for all")
    steps = kept_steps(source) if isinstance(source, Online) else []
    if unknown := sorted(set(stage.steps) - set(steps)):
        listed = ", ".join(map(str, steps)) or "its last step alone: leave steps at ()"
        raise ValueError(f"steps has {unknown[0]}, but {stage.policy} keeps {listed}")
