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

import functools
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from etils import epath

from g2d_jax import pipeline
from g2d_jax.config import BestCheckpoint, Config, Evaluate, Online, Sft
from g2d_jax.config_io import begins_more, identity, to_dict
from g2d_jax.data.dumps import dump_files
from g2d_jax.graph import kept_steps, plan, policies_read
from g2d_jax.runtime import storage
from g2d_jax.stages.policies import stage_of_run
from g2d_jax.sweep.points import Point

ENDING = ("steps", "keep", "stop", "budget")
"""Settings of an online stage that say where it ends, not what it does."""


Trajectories = Mapping[str, tuple[int, Sequence[int]]]
"""Node of an online stage -> the most steps that are asked of it, and the steps to keep."""


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


@dataclass(frozen=True)
class Graph:
    """The stages of a study. nodes: by id, each after those it reads. points: each with its config and its stages'
    nodes. trajectories: those of its online stages that are shared.
    """

    nodes: Mapping[str, Node]
    points: Sequence[tuple[Point, Config, Mapping[str, str]]]
    trajectories: Trajectories


def node_folder(root: epath.Path, name: str) -> epath.Path:
    """Return the folder of a node by id, "dpo-0123456789abcdef"."""
    return root / "stages" / name


def build(studied: Sequence[Point], requested: Trajectories = MappingProxyType({})) -> Graph:
    """Build the graph of these points. Raises ValueError, naming the point, for a config that cannot work.

    requested: steps that other studies need of trajectories.
    """
    trajectories: dict[str, tuple[int, Sequence[int]]] = {}
    configs = []
    for point in studied:
        try:
            config = Config.of(point.config)
            pipeline.check(config)
        except ValueError as error:
            raise ValueError(f"point {point.label}: {error}") from error
        configs.append(_explicit(config))
        for name, key in _ids(configs[-1]).items():
            if isinstance(stage := configs[-1].stages[name], Online) and begins_more(to_dict(stage)):
                most, pinned = trajectories.get(key) or requested.get(key, (0, ()))
                trajectories[key] = max(most, stage.steps), sorted({*pinned, *kept_steps(stage)})
    nodes: dict[str, Node] = {}
    points = []
    for point, config in zip(studied, configs, strict=True):
        ids, stages = _ids(config), dict(config.stages)
        for name, stage in config.stages.items():
            if isinstance(stage, Online) and ids[name] in trajectories:
                most, pinned = trajectories[ids[name]]
                stages[name] = replace(stage, steps=most, keep=tuple(pinned))
        config = replace(config, stages=stages)
        for name in plan(config).order:
            nodes |= {node.id: node for node in _nodes(config, ids, name) if node.id not in nodes}
        points.append((point, config, ids))
    return Graph(nodes, points, trajectories)


def _explicit(config: Config) -> Config:
    """Return the config in which policies of shared trajectories are named with their step."""
    values, stages = to_dict(config)["stages"], dict(config.stages)

    def named(policy: str) -> str:
        stage = config.stages.get(policy)
        if not isinstance(stage, Online) or not begins_more(values[policy]):
            return policy
        return f"{policy}@{stage.steps}" if stage.steps else named(stage.policy)  # 0 steps change nothing

    for name, stage in stages.items():
        if isinstance(stage, Evaluate):
            stages[name] = replace(stage, policies=tuple(dict.fromkeys(map(named, stage.policies))))
        elif not isinstance(stage, BestCheckpoint):
            stages[name] = replace(stage, policy=named(stage.policy))
        elif not stage.steps and begins_more(values[stage.policy]):
            # A trajectory keeps steps for all points; these are this point's.
            stages[name] = replace(stage, steps=tuple(kept_steps(config.stages[stage.policy])))
    return replace(config, stages=stages)


def _ids(config: Config) -> dict[str, str]:
    """Map stage to node id, for a config made explicit."""
    stages = to_dict(config)["stages"]
    shared = {key: value for key, value in identity(config).items() if key != "stages"}
    order = plan(config)
    ids: dict[str, str] = {}
    for name in order.order:
        own = {k: v for k, v in stages[name].items() if k not in ENDING or not begins_more(stages[name])}
        inputs = {needed: ids[needed] for needed in order.inputs[name]}
        read = contents(config, name)
        ids[name] = f"{name}-{storage.fingerprint([shared, name, own, inputs, *([read] if read else [])])}"
    return ids


def _nodes(config: Config, ids: Mapping[str, str], name: str) -> list[Node]:
    """Return the node of a stage; before that of an evaluation of several policies, one for each policy."""
    stage = config.stages[name]
    if not isinstance(stage, Evaluate) or len(stage.policies) < 2:
        return [_node(config, ids, name, {})]
    parts = []
    for policy in stage.policies:
        alone = replace(config, stages={**config.stages, name: replace(stage, policies=(policy,))})
        parts.append(_node(alone, {**ids, name: _ids(_restricted(alone, name))[name]}, name, {}))
    evaluated = {policy: part.id for policy, part in zip(stage.policies, parts, strict=True)}
    return [*parts, _node(config, ids, name, evaluated)]


def _node(config: Config, ids: Mapping[str, str], name: str, evaluated: Mapping[str, str]) -> Node:
    alone = _restricted(config, name)
    inputs = list(dict.fromkeys([*(ids[other] for other in plan(alone).inputs[name]), *evaluated.values()]))
    return Node(ids[name], name, alone, {stage: ids[stage] for stage in alone.stages}, evaluated, inputs)


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
    return replace(config, stages={stage: own for stage, own in config.stages.items() if stage in needed})


def contents(config: Config, name: str) -> dict[str, str]:
    """Map path or policy to digest, for the local files and the other runs' stages that a stage of the config reads."""
    stage = config.stages[name]
    named = [source.path for source in (config.data.train, config.data.dev, config.data.test)]
    named += [stage.data.path] if isinstance(stage, Sft) else []
    inside = {"sample", "archive", *config.stages}
    read = [getattr(stage, field, "sample") for field in ("rollouts", "preferences")]
    named += [file for path in read if path not in inside for file in (dump_files(path) if "*" in path else [path])]
    digests = {path: digest for path in named if (digest := _file(path))}
    policies = [policy for policy in policies_read(stage) if policy.startswith("run:")]
    return digests | {policy: _run(policy) for policy in policies}


def _file(path: str) -> str:
    """Return the digest of a local file, or of a folder's files; "" if there is none. "math500:FILE" is the file."""
    for candidate in (path, path.partition(":")[2]):
        if candidate and storage.is_local(candidate) and epath.Path(candidate).expanduser().exists():
            place = epath.Path(candidate).expanduser()
            files = sorted(child for child in place.iterdir() if child.is_file()) if place.is_dir() else [place]
            return "-".join(_digest(os.fspath(file), file.stat().mtime, file.stat().length) for file in files)
    return ""


@functools.lru_cache(maxsize=256)
def _digest(path: str, changed: float, size: int) -> str:
    """Return the digest of a file's bytes; they are read again only when its time or size has changed."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8)).hexdigest()


def _run(policy: str) -> str:
    """Return the fingerprint of the stage that made a policy of another run, "" as long as it is not finished."""
    return str((storage.finished(stage_of_run(policy)) or {}).get("fingerprint", ""))
