"""The stages of all points as one graph, in which stages that would compute the same are one node.

A node's id is a fingerprint of all that decides its result: the settings outside the stages, its
own settings, the nodes it reads, and the content of the files, models and other runs that they
name. An online stage at a constant learning rate is the beginning of the same stage with more
steps. So points that differ only in its number of steps share one trajectory:

    steps=20, policy "warmup" ─► one node with the most steps of any point, which keeps 20;
    "warmup@20"

A best_checkpoint stage on a trajectory names the steps that its point keeps, and chooses only among
these. Each policy has one evaluation node, shared by all points that evaluate it; another node
compares the policies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from etils import epath

from g2d_jax.config import BestCheckpoint, Config, Evaluate, Issue, Online
from g2d_jax.config.graph import plan
from g2d_jax.config.io import begins_more, identity, to_dict
from g2d_jax.runtime import precision, storage
from g2d_jax.session.inputs import digests
from g2d_jax.stages import run_issues
from g2d_jax.sweep.points import Point

ENDING = ("steps", "keep", "budget")
"""Settings of an online stage that decide where it ends, not how it trains."""


Trajectories = Mapping[str, tuple[int, Sequence[int]]]
"""Node of an online stage -> the most steps that are needed of it, and the steps to keep."""


@dataclass(frozen=True)
class Node:
    """One stage to run. stages: name -> node id of all stages of the config, its own included.

    config: the stage with all it is made from. evaluated: policy -> node of its evaluation.
    inputs: the nodes that must be finished before this one.
    """

    id: str
    name: str
    config: Config
    stages: Mapping[str, str]
    evaluated: Mapping[str, str]
    inputs: Sequence[str]


@dataclass(frozen=True)
class Graph:
    """The stages of a study. nodes: by id, each after those it reads. points: each with its config
    and its stages' nodes. trajectories: those of its online stages that are shared. warnings: of
    the settings of any point.
    """

    nodes: Mapping[str, Node]
    points: Sequence[tuple[Point, Config, Mapping[str, str]]]
    trajectories: Trajectories
    warnings: Sequence[Issue]


def node_folder(root: epath.Path, name: str) -> epath.Path:
    """Return the folder of a node by id, "dpo-0123456789abcdef"."""
    return root / "stages" / name


def build(studied: Sequence[Point], requested: Trajectories = MappingProxyType({})) -> Graph:
    """Build the graph of these points. Raises ValueError, naming the point, for a config that
    cannot work.

    requested: steps that other studies need of trajectories.
    """
    trajectories: dict[str, tuple[int, Sequence[int]]] = {}
    configs = []
    warnings: list[Issue] = []
    for point in studied:
        try:
            config, found = run_issues.checked(point.config)
            configs.append(_explicit(config))
            ids = _ids(configs[-1])
        except ValueError as error:
            raise ValueError(f"point {point.label}: {error}") from error
        warnings += found
        for name, key in ids.items():
            stage = configs[-1].stages_of(Online).get(name)
            if stage is not None and begins_more(to_dict(stage)):
                most, pinned = trajectories.get(key) or requested.get(key, (0, ()))
                trajectories[key] = max(most, stage.steps), sorted({*pinned, *stage.kept_steps()})
    nodes: dict[str, Node] = {}
    points = []
    for point, config in zip(studied, configs, strict=True):
        ids, stages = _ids(config), dict(config.stages)
        for name, stage in config.stages_of(Online).items():
            if ids[name] in trajectories:
                most, pinned = trajectories[ids[name]]
                stages[name] = replace(stage, steps=most, keep=tuple(pinned))
        config = replace(config, stages=stages)
        for name in plan(config).order:
            for node in _nodes(config, ids, name):
                nodes.setdefault(node.id, node)
        points.append((point, config, ids))
    return Graph(nodes, points, trajectories, warnings)


def _explicit(config: Config) -> Config:
    """Return the config in which policies of shared trajectories are named with their step."""
    values, stages = to_dict(config)["stages"], dict(config.stages)

    def named(policy: str) -> str:
        stage = config.stages_of(Online).get(policy)
        if stage is None or not begins_more(values[policy]):
            return policy
        # 0 steps change nothing
        return f"{policy}@{stage.steps}" if stage.steps else named(stage.policy)

    for name, stage in config.stages.items():
        stages[name] = stage.with_policies(named)
    for name, selection in config.stages_of(BestCheckpoint).items():
        if not selection.steps and begins_more(values[selection.policy]):
            # A trajectory keeps steps for all points; these are this point's.
            stages[name] = replace(
                selection, steps=tuple(config.stages[selection.policy].kept_steps())
            )
    return replace(config, stages=stages)


def _ids(config: Config) -> dict[str, str]:
    """Map stage to node id, for a config made explicit."""
    shared = {**identity(config, digests(config)), precision.NAME: precision.of(config.dtype)}
    stages = shared.pop("stages")
    order = plan(config)
    ids: dict[str, str] = {}
    for name in order.order:
        own = dict(stages[name])
        if begins_more(own):
            for setting in ENDING:
                own.pop(setting, None)
        inputs = {needed: ids[needed] for needed in order.inputs[name]}
        ids[name] = f"{name}-{storage.fingerprint([shared, name, own, inputs])}"
    return ids


def _nodes(config: Config, ids: Mapping[str, str], name: str) -> list[Node]:
    """Return the node of a stage; an evaluation of several policies has one for each policy
    first."""
    stage = config.stages_of(Evaluate).get(name)
    if stage is None or len(stage.policies) < 2:
        return [_node(config, ids, name, {})]
    parts = []
    evaluated = {}
    for policy in stage.policies:
        alone = replace(config, stages={**config.stages, name: replace(stage, policies=(policy,))})
        part = _node(alone, {**ids, name: _ids(_restricted(alone, name))[name]}, name, {})
        parts.append(part)
        evaluated[policy] = part.id
    return [*parts, _node(config, ids, name, evaluated)]


def _node(config: Config, ids: Mapping[str, str], name: str, evaluated: Mapping[str, str]) -> Node:
    alone = _restricted(config, name)
    inputs = list(
        dict.fromkeys([*(ids[other] for other in plan(alone).inputs[name]), *evaluated.values()])
    )
    return Node(
        ids[name], name, alone, {stage: ids[stage] for stage in alone.stages}, evaluated, inputs
    )


def _restricted(config: Config, name: str) -> Config:
    """Restrict the config to this stage and those it is made from."""
    inputs = plan(config).inputs
    needed: set[str] = set()
    waiting = [name]
    while waiting:
        stage = waiting.pop()
        if stage not in needed:
            needed.add(stage)
            waiting += inputs[stage]
    return replace(
        config, stages={stage: own for stage, own in config.stages.items() if stage in needed}
    )
