"""A run: a small graph of stages over one work directory. Read from the top; this is the order of execution.

    problems ─► sft ─► warm-up (online GRPO) ─► collect (rollouts ► verify ► pairs) ─► offline DPO ─► evaluate ─► report

Stages name their inputs; a stage is finished when its manifest says so; running the same command again continues.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from etils import epath
from ml_collections import ConfigDict

from g2d_jax import __version__, storage
from g2d_jax.canonical import differences, to_dict
from g2d_jax.report.html import write_report
from g2d_jax.report.summary import summary_table, write_markdown
from g2d_jax.rewards.functions import RewardFunction
from g2d_jax.stages import collect, evaluate, offline, online, sft
from g2d_jax.stages.context import Context, check_elsewhere
from g2d_jax.tracking import Tracker
from g2d_jax.training.objectives import Compute, Objective
from g2d_jax.training.optimizer import make_optimizer

Stage = Callable[[Context, str, ConfigDict], dict[str, Any]]

STAGES: Mapping[str, Stage] = {
    "sft": sft.run,
    "online": online.run,
    "collect": collect.run,
    "offline": offline.run,
    "evaluate": evaluate.run,
}

TRAINING = ("sft", "online", "offline")
"""The kinds of stages that end with a policy."""


@dataclass(frozen=True)
class Plan:
    """The stages of a config in the order they run. inputs: stage -> stages it reads."""

    order: tuple[str, ...]
    inputs: Mapping[str, tuple[str, ...]]

    def folders(self, workdir: epath.Path) -> dict[str, epath.Path]:
        """Stage -> its folder, numbered in order."""
        return {name: workdir / f"{i:02d}-{name}" for i, name in enumerate(self.order, start=1)}


def plan(config: ConfigDict) -> Plan:
    """Order the stages by what they read. Raises ValueError for an unknown input or kind, and for a circle."""
    stages = config.stages
    if not len(stages):
        raise ValueError("the config has no stages: add some, for example config.stages.sft = g2d_jax.config.sft()")
    inputs = {}
    for name, stage in stages.items():
        if stage.kind not in STAGES:
            raise ValueError(f"stages.{name}.kind is {stage.kind!r}; choose one of {', '.join(STAGES)}")
        inputs[name] = tuple(dict.fromkeys(_inputs(name, stage, stages)))
    order: list[str] = []
    while len(order) < len(inputs):
        ready = [name for name in inputs if name not in order and all(needed in order for needed in inputs[name])]
        if not ready:
            raise ValueError(f"stages read each other in a circle: {', '.join(n for n in inputs if n not in order)}")
        # Evaluations last: what they compare should be there before the first minute is spent on it.
        order.append(min(ready, key=lambda name: (stages[name].kind == "evaluate", name)))
    return Plan(tuple(order), inputs)


def check(config: ConfigDict) -> Plan:
    """The plan, when every stage's settings can work: what is wrong should show now, not after hours of warm-up.

    Raises ValueError naming the stage. Looks at settings and at whether files are there; loads nothing.
    """
    order = plan(config)
    for name in order.order:
        stage = config.stages[name]
        try:
            if stage.kind in ("sft", "online"):
                make_optimizer(**stage.optimizer.to_dict(), total_steps=stage.steps)
            if stage.kind == "online":
                online.check(stage)
            if stage.kind == "collect":
                collect.check(stage, config.stages)
            if stage.kind == "offline":
                offline.check(stage, config.stages)
            if stage.kind == "evaluate":
                evaluate.check(stage)
            for policy in stage.get("policies", ()) or [stage.policy]:
                check_elsewhere(policy)
        except ValueError as error:
            raise ValueError(f"stages.{name}: {error}") from error
    return order


def _inputs(name: str, stage: ConfigDict, stages: ConfigDict) -> list[str]:
    references = list(stage.get("policies", ())) or [stage.policy]
    found = []
    for reference in references:
        base = reference.partition("@")[0]
        if base == "init" or reference.startswith(("run:", "hf:")):
            continue
        if base not in stages:
            known = ", ".join(["init", *(other for other in stages if stages[other].kind in TRAINING)])
            raise ValueError(f"stages.{name} reads policy {reference!r}; there are: {known}")
        if stages[base].kind not in TRAINING:
            raise ValueError(f"stages.{name} reads policy {reference!r}, but a {stages[base].kind} stage trains none")
        _check_step(name, reference, stages[base])
        found.append(base)
    if stage.kind == "offline" and stage.preferences in stages:
        found.append(stage.preferences)
    return found


def _check_step(name: str, reference: str, stage: ConfigDict) -> None:
    step = reference.partition("@")[2]
    if not step:
        return
    kept = {stage.get("steps"), *stage.get("keep", ())}
    if not step.isdecimal() or int(step) not in kept:
        listed = ", ".join(str(k) for k in sorted(k for k in kept if k is not None))
        raise ValueError(f"stages.{name} reads {reference!r}, but that stage keeps steps {listed}: add it to its keep")


def run(
    config: ConfigDict,
    workdir: storage.PathLike,
    *,
    reward: RewardFunction | None = None,
    objective: Callable[[Compute], Objective] | None = None,
    until: str | None = None,
) -> dict[str, Any]:
    """Run, or continue, every stage of a config in a work directory; returns the manifests by stage.

    reward: a function with TRL's signature in place of reward.function. objective: makes a training objective in place
    of the stages' own losses. until: stop after this stage. Raises ValueError when the work directory was made with
    other identity settings, and StopRun when a stage finds that going on is useless.
    """
    order = check(config)
    if until is not None and until not in order.order:
        raise ValueError(f"there is no stage {until!r}; the stages are {', '.join(order.order)}")
    folder = absolute(workdir)
    claim(config, folder)
    with Tracker(folder, tensorboard=config.logging.tensorboard, wandb=_wandb(config)) as tracker:
        context = Context(config, folder, tracker, order.folders(folder), reward, objective)
        try:
            manifests = {}
            for name in order.order:
                manifests[name] = run_stage(context, name, order)
                if name == until:
                    break
        finally:
            context.close()
        if until is None:
            conclude(folder, tracker, manifests)
    return manifests


def run_stage(context: Context, name: str, order: Plan) -> dict[str, Any]:
    """Run one stage unless its manifest is there; returns the manifest."""
    folder, stage = context.folders[name], context.config.stages[name]
    done = storage.finished(folder)
    if done is not None:
        context.tracker.say(f"{name}: done before, skipped")
        return done
    started = time.time()
    fields = STAGES[stage.kind](context, name, stage)
    inputs = {
        needed: (storage.finished(context.folders[needed]) or {}).get("fingerprint") for needed in order.inputs[name]
    }
    identity = [context.fingerprint(), stage.to_dict(), inputs]
    manifest = {
        "kind": stage.kind,
        "name": name,
        "inputs": inputs,
        "fingerprint": storage.fingerprint(identity),
        "started": started,
        **fields,
    }
    context.tracker.flush()
    storage.finish(folder, manifest)
    context.tracker.say(f"{name}: done in {manifest['seconds']:.0f} s")
    return storage.finished(folder) or manifest


def absolute(workdir: storage.PathLike) -> epath.Path:
    """A local path made absolute, as Orbax wants it; an object store's as it is."""
    return epath.Path(workdir).expanduser().resolve() if storage.is_local(workdir) else epath.Path(workdir)


def claim(config: ConfigDict, workdir: epath.Path) -> None:
    """Take a work directory for a config, or check that it is this config's. Writes config.json and environment.json.

    As long as no stage has begun, the settings may still change: a mistake in the first try costs nothing.
    """
    file = workdir / "config.json"
    if file.exists():
        content = storage.read_json(file)
        if not isinstance(content, dict) or not isinstance(content.get("config"), dict):
            raise ValueError(f"{workdir} holds a config.json that is not a run's: choose another --workdir")
        changed = differences(content["config"], config)
        if changed and any(re.match(r"\d+-", child.name) for child in workdir.iterdir()):
            listed = "\n  ".join(changed)
            raise ValueError(
                f"{workdir} was started with other settings:\n  {listed}\nChoose another --workdir, or undo the change. "
                "Only settings of mesh, compute, logging and checkpoint may change."
            )
    elif workdir.exists() and any(workdir.iterdir()):
        raise ValueError(f"{workdir} is not empty and holds no run: choose another --workdir")
    storage.write_json(file, {"config": to_dict(config), "version": __version__})
    storage.write_json(workdir / "environment.json", environment())


def environment() -> dict[str, Any]:
    """Versions, devices and the command, for provenance."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "math-verify", "grain", "numpy")
    return {
        "g2d_jax": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: importlib.metadata.version(name) for name in packages},
        "devices": [str(device) for device in jax.devices()],
        "processes": jax.process_count(),
        "command": sys.argv,
    }


def _wandb(config: ConfigDict) -> dict[str, Any] | None:
    project = config.logging.wandb
    return {"project": project, "name": config.name} if project else None


def conclude(workdir: epath.Path, tracker: Tracker, manifests: Mapping[str, Mapping[str, Any]]) -> None:
    """Show the final table and write report.html and report.md."""
    for manifest in manifests.values():
        if manifest["kind"] == "evaluate":
            tracker.table(*summary_table(manifest, list(manifests.values())))
    write_markdown(workdir)
    tracker.say(f"report: {write_report(workdir)}")
