"""The stages of all points as one graph, in which stages that would compute the same are one node.

A node is named by a fingerprint of everything that decides its result: the settings outside the stages, its own, the
nodes it reads, and what lies in the files and other runs that these name (of a hub data set: its name alone). An online
stage at a constant learning rate is the beginning of the same stage with more steps, so all points that differ in its
number of steps alone share one trajectory and branch off it:

    steps=20 and policy "warmup" ─► one node with the most steps any point asks for, which keeps 20, and "warmup@20"

A best_checkpoint stage on a trajectory names the steps that its point keeps, and chooses among these alone.
An evaluation is one node a policy, shared by all points that evaluate this policy, and one that compares them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from g2d_jax import pipeline
from g2d_jax.config import Config, Evaluate, Online
from g2d_jax.config_io import begins_more, from_dict, identity, to_dict
from g2d_jax.graph import followers, plan
from g2d_jax.runtime import storage
from g2d_jax.sweep.contents import contents
from g2d_jax.sweep.points import Point

ENDING = ("steps", "keep", "stop", "budget", "adaptive")
"""Settings of an online stage that say where it ends, not what it does."""


@dataclass(frozen=True)
class Node:
    """One stage to run. stages: name -> node id of all stages of the config, its own included.

    config: the stage with all it is made from. evaluated: policy -> node where its evaluation lies. inputs: the nodes
    that must be finished before this one.
    """

    id: str
    name: str
    config: Config
    stages: Mapping[str, str]
    evaluated: Mapping[str, str]
    inputs: Sequence[str]

    def folder(self, root: epath.Path) -> epath.Path:
        """Return the folder of the node's files."""
        return node_folder(root, self.id)


@dataclass(frozen=True)
class Graph:
    """The stages of a study. nodes: by id, each after those it reads. points: each with its config and its stages'
    nodes.

    trajectories: node -> the most steps of it, and the steps to keep.
    """

    nodes: Mapping[str, Node]
    points: Sequence[tuple[Point, Config, Mapping[str, str]]]
    trajectories: Mapping[str, tuple[int, list[int]]]


def node_folder(root: epath.Path, name: str) -> epath.Path:
    """Return the folder of a node by id, "dpo-0123456789abcdef"."""
    return root / "stages" / name


@dataclass
class _Steps:
    """The steps of one online trajectory that all points together need."""

    most: int = 0
    pinned: set[int] = field(default_factory=set)


def build(studied: Sequence[Point], requested: Mapping[str, tuple[int, Sequence[int]]] = MappingProxyType({})) -> Graph:
    """Build the graph of these points. Raises ValueError, naming the point, for a config that cannot work.

    requested: steps that other studies need of trajectories, as in `Graph.trajectories`.
    """
    trajectories: dict[str, _Steps] = {}
    explicit = []
    for point in studied:
        try:
            pipeline.check(Config.of(point.config))
        except ValueError as error:
            raise ValueError(f"point {point.label}: {error}") from error
        values = _explicit(point.config)
        explicit.append(values)
        for name, key in _ids(values).items():
            if begins_more(values["stages"][name]):
                most, pinned = requested.get(key, (0, ()))
                steps, stage = trajectories.setdefault(key, _Steps(most, set(pinned))), values["stages"][name]
                steps.most = max(steps.most, stage["steps"])
                steps.pinned |= {stage["steps"], *(k for k in stage["keep"] if k <= stage["steps"])}
    nodes: dict[str, Node] = {}
    points = []
    for point, values in zip(studied, explicit, strict=True):
        ids = _ids(values)
        for name, key in ids.items():
            if key in trajectories:
                steps = trajectories[key]
                values["stages"][name] |= {"steps": steps.most, "keep": tuple(sorted(steps.pinned))}
        config = Config.of(from_dict(values))
        for name in plan(config).order:
            for node in _nodes(config, ids, name):
                nodes.setdefault(node.id, node)
        points.append((point, config, ids))
    return Graph(nodes, points, {key: (steps.most, sorted(steps.pinned)) for key, steps in trajectories.items()})


def _explicit(config: ConfigDict) -> dict[str, Any]:
    """Return the config as a dictionary in which policies of shared trajectories are named with their step."""
    values = to_dict(config)
    stages = values["stages"]

    def named(policy: str) -> str:
        stage = stages.get(policy)
        if stage is None or not begins_more(stage):
            return policy
        return f"{policy}@{stage['steps']}" if stage["steps"] else named(stage["policy"])  # 0 steps change nothing

    for stage in stages.values():
        if "policies" in stage:
            stage["policies"] = list(dict.fromkeys(named(policy) for policy in stage["policies"]))
        elif stage["kind"] == "best_checkpoint":  # a trajectory keeps steps for all points; these are this point's
            source = stages[stage["policy"]]
            saved_steps = sorted({*(k for k in source.get("keep", ()) if k <= source["steps"]), source["steps"]})
            stage["steps"] = stage["steps"] or (saved_steps if begins_more(source) else [])
        else:
            stage["policy"] = named(stage["policy"])
    return values


def _ids(values: Mapping[str, Any]) -> dict[str, str]:
    """Map stage to node id, for a config made explicit."""
    config = Config.of(from_dict(values))
    shared = {key: value for key, value in identity(config).items() if key != "stages"}
    order = plan(config)
    ids: dict[str, str] = {}
    for name in order.order:
        stage = values["stages"][name]
        own = {k: v for k, v in stage.items() if not (begins_more(stage) and k in ENDING)}
        weighed = {other: values["stages"][other] for other in _weighed(config, name)}
        inputs = {needed: ids[needed] for needed in order.inputs[name]}
        more = [part for part in (weighed, contents(config, name)) if part]
        ids[name] = f"{name}-{storage.fingerprint([shared, name, own, inputs, *more])}"
    return ids


def _weighed(config: Config, name: str) -> tuple[str, ...]:
    """Return the stages whose settings decide where an adaptive stage ends."""
    stage = config.stages[name]
    adaptive = isinstance(stage, Online) and stage.stop == "adaptive"
    return (followers(name, config.stages) or ()) if adaptive else ()


def _nodes(config: Config, ids: Mapping[str, str], name: str) -> list[Node]:
    """Return the node of a stage; before that of an evaluation of several policies, one for each policy."""
    stage = config.stages[name]
    if not isinstance(stage, Evaluate) or len(stage.policies) < 2:
        return [_node(config, ids, name, {})]
    parts = []
    for policy in stage.policies:
        alone = replace(config, stages={**config.stages, name: replace(stage, policies=(policy,))})
        parts.append(_node(alone, {**ids, name: _ids(to_dict(_restricted(alone, name)))[name]}, name, {}))
    evaluated = {policy: part.id for policy, part in zip(stage.policies, parts, strict=True)}
    return [*parts, _node(config, ids, name, evaluated)]


def _node(config: Config, ids: Mapping[str, str], name: str, evaluated: Mapping[str, str]) -> Node:
    alone = _restricted(config, name)
    needed = [ids[other] for other in plan(alone).inputs[name]]
    inputs = list(dict.fromkeys([*needed, *evaluated.values()]))
    return Node(ids[name], name, alone, {stage: ids[stage] for stage in alone.stages}, evaluated, inputs)


def _restricted(config: Config, name: str) -> Config:
    """Restrict the config to this stage and those it is made from, or weighed against."""
    inputs = plan(config).inputs
    needed: set[str] = set()
    waiting = [name]
    while waiting:
        stage = waiting.pop()
        if stage not in needed:
            needed.add(stage)
            waiting += [*inputs[stage], *_weighed(config, stage)]
    return replace(config, stages={stage: own for stage, own in config.stages.items() if stage in needed})
