"""A run: a small graph of stages over one work directory. Read from the top; this is the order of execution.

    problems ─► sft ─► warm-up (online GRPO) ─► collect (rollouts ► verify ► pairs) ─► offline DPO ─► evaluate ─► report
                             └─► select (the best of its checkpoints)

Stages name their inputs; a stage is finished when its manifest says so; running the same command again continues.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import jax
from etils import epath
from ml_collections import ConfigDict

from g2d_jax import compilation, flags, processes, storage
from g2d_jax.accounting import POLICIES, TRAINING, goodput
from g2d_jax.canonical import check_choice, to_dict
from g2d_jax.compiling import compiling
from g2d_jax.config import is_scalar
from g2d_jax.data.problems import check_training
from g2d_jax.models import hf
from g2d_jax.models.decoder import Remat
from g2d_jax.models.kernels import DecodeKernel, Setting
from g2d_jax.records import SamplingParams
from g2d_jax.rewards.functions import RewardFailed, RewardFunction, load_reward
from g2d_jax.rewards.judge import check_judge
from g2d_jax.stages import collect, ending, evaluate, held_out, offline, online, profiles, select, sft, starting
from g2d_jax.stages.context import Context, check_elsewhere
from g2d_jax.stages.origin import lender
from g2d_jax.stages.programs.program import Program
from g2d_jax.tracking import Tracker
from g2d_jax.training.objectives import Compute, Objective
from g2d_jax.training.optimizer import make_optimizer
from g2d_jax.training.staging import check_processes
from g2d_jax.watcher import watched
from g2d_jax.workdir import PROGRAMS, absolute, check_token, claim, locked, packages

Stage = Callable[[Context, str, ConfigDict], dict[str, Any]]
_AT_LEAST = {
    **{"steps": 0, "batch_size": 1, "max_length": 2, "epochs": 1, "num_generations": 1, "prompts": 1, "part": 1},
    **{"pairs_per_prompt": 1, "max_pairs": 1},
}
"""Of a stage, where it has such a field and it is set."""

STAGE_PROGRAMS: Mapping[str, Callable[..., Iterator[Program]]] = {
    "sft": sft.programs,
    "online": online.programs,
    "collect": collect.programs,
    "offline": offline.programs,
    "select": held_out.programs,
    "evaluate": held_out.programs,
}
"""The programs of a stage by its kind, from (context, name, stage, response): see stages/programs."""

STAGES: Mapping[str, Stage] = {
    "sft": sft.run,
    "online": online.run,
    "collect": collect.run,
    "offline": offline.run,
    "select": select.run,
    "evaluate": evaluate.run,
}


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


def check(config: ConfigDict, until: str | None = None) -> Plan:
    """The plan, when every stage's settings can work: what is wrong should show now, not after hours of warm-up.

    until: the stage to stop after, None for all. Raises ValueError naming the stage. Looks at settings and at whether
    files are there; loads nothing.
    """
    order = plan(config)
    if until is not None and until not in order.order:
        raise ValueError(f"there is no stage {until!r} to stop after; the stages are {', '.join(order.order)}")
    _check_shared(config)
    profiles.check(config.logging.profile, config.stages)
    for name in order.order:
        stage = config.stages[name]
        try:
            for field, least in _AT_LEAST.items():
                if isinstance(stage.get(field), int) and stage[field] < least:
                    raise ValueError(f"{field} must be at least {least}, got {stage[field]}")
            if stage.kind in TRAINING:
                # The updates of an offline stage are known when its pairs are; a warm-up of 0 steps needs no schedule.
                total = stage.get("steps") or stage.optimizer.warmup_steps + 1
                make_optimizer(**stage.optimizer.to_dict(), total_steps=total)
            if "sampling" in stage:
                SamplingParams(**stage.sampling.to_dict())
            if stage.kind == "online":
                online.check(stage)
                online.check_tasks(stage, config.tasks)
                ending.check_plan(name, config)
            if stage.kind == "collect":
                collect.check(stage, config.stages)
            if stage.kind == "offline":
                offline.check(stage, config.stages)
            if stage.kind == "select":
                select.check(stage, config.stages)
            if stage.kind == "evaluate":
                evaluate.check(stage)
            for policy in stage.get("policies", ()) or [stage.policy]:
                check_elsewhere(policy)
        except ValueError as error:
            raise ValueError(f"stages.{name}: {error}") from error
    return order


def _check_shared(config: ConfigDict) -> None:
    """Raise ValueError for settings outside the stages that cannot work."""
    at_least = {
        "checkpoint.every": 1,
        "checkpoint.keep": 1,
        "logging.every": 1,
        "compute.microbatch_tokens": 1,
        "compute.max_num_seqs": 1,
        "compute.chunk": 1,
        "compute.prefill_rows": 1,
        "compute.sampling_tensor": 0,
        "data.max_prompt_length": 1,
        "faults.max_skipped": 1,
        "faults.peer_timeout": 5,
        "faults.hang_timeout": 5,
    }
    for path, least in at_least.items():
        section, _, field = path.partition(".")
        if config[section][field] is not None and config[section][field] < least:
            raise ValueError(f"{path} must be at least {least}, got {config[section][field]}")
    if config.faults.peer_timeout > 90:
        raise ValueError("faults.peer_timeout is at most 90: JAX itself ends all, without a name, after 100 seconds")
    starting.shape(config.model, 1, starting.adapters(config.lora))
    for name, dtype in (("dtype", config.dtype), ("lora.base_dtype", config.lora.base_dtype)):
        check_choice(name, dtype, ("float32", "bfloat16"))
    check_choice("compute.remat", config.compute.remat, get_args(Remat))
    check_choice("compute.flags", config.compute.flags, get_args(flags.Setting))
    _check_attention(config)
    tasks = {"data": config.data, **{f"tasks.{name}": task for name, task in config.tasks.items()}}
    weights = {name: task.weight for name, task in tasks.items()}
    for name, weight in weights.items():
        check_training(tasks[name].train.path, f"{name}.train.path")
        if not 0 <= weight < math.inf or not sum(weights.values()):
            raise ValueError(
                f"{name}.weight must be a number of at least 0, and one of the weights positive, got {weight}"
            )
    sections = {"": config, **{f"tasks.{name}.": task for name, task in config.tasks.items()}}
    for prefix, section in sections.items():
        try:
            _check_reward(section.reward)
        except ValueError as error:
            raise ValueError(f"{prefix}{error}") from error


def _check_attention(config: ConfigDict) -> None:
    """Raise ValueError for what is wrong with attention's kernels on any devices; models/kernels.py says the rest."""
    for field, known in (("attention", get_args(Setting)), ("decode_attention", get_args(DecodeKernel))):
        check_choice(f"compute.{field}", config.compute[field], known)
    chosen = config.compute.attention
    training = [name for name, stage in config.stages.items() if stage.kind in TRAINING]
    if chosen == "cudnn" and training:
        raise ValueError(
            f"compute.attention is 'cudnn', but stages.{training[0]} trains on packed rows whose responses share a "
            "prompt, which cuDNN's masks cannot say: set it to auto, which takes cuDNN for prompts alone"
        )
    if chosen == "cudnn" and config.dtype == "float32":
        raise ValueError(
            "compute.attention is 'cudnn', which computes in bfloat16 only: set dtype to bfloat16, or auto"
        )


def _check_reward(reward: ConfigDict) -> None:
    """Raise ValueError for a reward section that cannot work; reward models and judges are not asked for anything."""
    if reward.workers < 1:
        raise ValueError(f"reward.workers must be at least 1, got {reward.workers}")
    known = {"verify": False, "model": True, "judge": True}.get(reward.function, is_scalar(reward))
    if is_scalar(reward) != known:
        kind = "knows better and worse only" if known else "knows right and wrong"
        raise ValueError(f"reward.scalar is {reward.scalar}, but {reward.function!r} {kind}: leave it unset")
    if reward.function == "model" and not reward.model.path:
        raise ValueError("reward.model.path is not set: give the folder or hub id of a model with a scalar head")
    if reward.function == "model" and reward.model.path.startswith((".", "/", "~")):
        hf.resolve(reward.model.path)
    if reward.function == "judge":
        check_judge(reward.judge)
    if reward.function not in ("verify", "model", "judge"):
        load_reward(reward.function, reward.folder)


def _inputs(name: str, stage: ConfigDict, stages: ConfigDict) -> list[str]:
    references = list(stage.get("policies", ())) or [stage.policy]
    found = []
    for reference in references:
        base = reference.partition("@")[0]
        if base == "init" or reference.startswith(("run:", "hf:")):
            continue
        if base not in stages:
            known = ", ".join(["init", *(s for s in stages if stages[s].kind in POLICIES and s != name)])
            raise ValueError(f"stages.{name} reads policy {reference!r}; there are: {known}")
        if stages[base].kind not in POLICIES:
            raise ValueError(f"stages.{name} reads policy {reference!r}, but a {stages[base].kind} stage trains none")
        _check_step(name, reference, stages[base])
        found.append(base)
    if stage.kind == "offline" and stage.preferences in stages:
        found.append(stage.preferences)
    if stage.kind == "collect" and (other := lender(stage, stages)):
        found.append(other)
    return found


def made_from_ends(stages: ConfigDict, order: Plan) -> dict[str, list[str]]:
    """Stage -> stages that are made from the policy it ends with, or from what was made from it, in order."""
    found: dict[str, list[str]] = {name: [] for name in order.order}
    for name, others in found.items():
        for other in order.order:
            read = stages[other].get("policies", ()) or [stages[other].policy]
            if name in read or set(order.inputs[other]) & set(others):
                others.append(other)
    return found


def _check_step(name: str, reference: str, stage: ConfigDict) -> None:
    step = reference.partition("@")[2]
    if not step:
        return
    if stage.kind == "select":
        raise ValueError(f"stages.{name} reads {reference!r}, but a select stage chooses the step: leave out @{step}")
    kept = {k for k in stage.get("keep", ()) if k <= stage.steps} | {stage.get("steps")}
    if not step.isdecimal() or int(step) not in kept:
        listed = ", ".join(str(k) for k in sorted(k for k in kept if k is not None))
        raise ValueError(f"stages.{name} reads {reference!r}, but that stage keeps steps {listed}: add it to its keep")


def run(
    config: ConfigDict,
    workdir: storage.PathLike,
    *,
    reward: RewardFunction | None = None,
    objectives: Mapping[str, Callable[[Compute], Objective]] | None = None,
    until: str | None = None,
) -> dict[str, Any]:
    """Run, or continue, every stage of a config in a work directory; returns the manifests by stage.

    reward: a function with TRL's signature in place of reward.function. objectives: for a stage's name, what makes its
    loss (see training/objectives.py; its sums must count "tokens", or "pairs" in an offline stage). until: stop after
    this stage. Raises ValueError when the work directory was made with other identity settings, reward or losses, or is
    in use, and StopRun when a stage finds that going on is useless.
    """
    order = check(config, until)
    folder = absolute(workdir)
    flags.take_memory()
    flags.use(config.compute.flags)
    check_joined()
    check_processes(folder)
    limits = config.faults
    with (
        watched(peer_timeout=limits.peer_timeout, hang_timeout=limits.hang_timeout),
        _locked(folder),
        compilation.cached(config.compute.compilation_cache, folder / PROGRAMS),
    ):
        own_functions = _own(reward, objectives)
        mine = {"config": to_dict(config), "until": until or "", "own": own_functions, "packages": packages()}
        processes.agreed("settings or packages", mine)
        token = processes.once(lambda: claim(config, folder, own_functions, made_from_ends(config.stages, order)))
        with processes.together():
            check_token(folder, token)
        return _run_stages(config, folder, order, until, reward, objectives)


def check_joined() -> None:
    """Raise ValueError in a process of several that knows nothing of the others."""
    if jax.process_count() != processes.count():
        raise ValueError("there are several processes that do not know each other: call g2d_jax.processes.initialise()")


@contextlib.contextmanager
def _locked(folder: epath.Path) -> Iterator[None]:
    """The work directory kept to this run, by its leader. Raises Preempted for a run told to stop before it began."""
    processes.check_stop_together()
    with contextlib.ExitStack() as stack:
        processes.once(lambda: stack.enter_context(locked(folder)))
        yield


def _run_stages(
    config: ConfigDict,
    folder: epath.Path,
    order: Plan,
    until: str | None,
    reward: RewardFunction | None,
    objectives: Mapping[str, Callable[[Compute], Objective]] | None,
) -> dict[str, Any]:
    shown = folder if processes.leader() else None
    with Tracker(shown, tensorboard=config.logging.tensorboard, wandb=_wandb(config)) as tracker:
        context = Context(config, folder, tracker, order.folders(folder), reward, objectives or {})
        _ = context.sampling_mesh  # raises for one that cannot be, before any work
        compiling.take_programs()  # of a run before, in this process
        try:
            manifests = {}
            problems = context.problems["train"]
            context.scorer.start(problems[:: -(-len(problems) // 256)])
            names = order.order[: order.order.index(until) + 1 if until else None]
            finished = processes.once(lambda: [name for name in names if storage.finished(context.folders[name])])
            compile_ahead(context, [name for name in names if name not in finished])
            for name in names:
                manifests[name] = run_stage(context, name, order)
        finally:
            context.close()
        if until is None:
            processes.once(lambda: conclude(folder, tracker, manifests))
    return manifests


def compile_ahead(context: Context, names: Sequence[str]) -> None:
    """Let other threads compile what stages will run, in order.

    But for those whose shapes their examples or pairs decide: they begin with it.
    """
    for name in names:
        stage = context.config.stages[name]
        if stage.kind not in ("sft", "offline"):
            context.compile_ahead(STAGE_PROGRAMS[stage.kind](context, name, stage))


def run_stage(context: Context, name: str, order: Plan, *, again: bool = False) -> dict[str, Any]:
    """Run one stage unless its manifest is there; returns the manifest.

    again: go on with a stage that is finished already, and replace its manifest at the end.
    """
    folder, stage = context.folders[name], context.config.stages[name]
    processes.mark(name)
    processes.check_interrupted()
    done = processes.once(lambda: storage.finished(folder))
    if done is not None and not again:
        context.tracker.say(f"{name}: done before, skipped")
        return done
    started = time.time()
    try:
        fields = STAGES[stage.kind](context, name, stage)
    except RewardFailed as error:
        raise RewardFailed(
            f"stages.{name}: {error}. Mend it, and {processes.AGAIN}: nothing that was written is lost"
        ) from error
    context.writer.wait()
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
        "programs": compiling.take_programs(),
        **fields,
    }
    if stage.kind not in TRAINING:  # these log it with every update
        context.tracker.log(name, 0, goodput(fields), kind="goodput")
    context.tracker.flush()
    processes.once(lambda: storage.finish(folder, manifest))
    context.tracker.say(f"{name}: done in {manifest['seconds']:.0f} s")
    return storage.finished(folder) or manifest


def _own(
    reward: RewardFunction | None, objectives: Mapping[str, Callable[[Compute], Objective]] | None
) -> dict[str, str]:
    """Names of a caller's own functions: part of what a run is."""
    functions = {**({"reward": reward} if reward else {}), **(objectives or {})}
    return {
        name: f"{getattr(made, '__module__', '')}:{getattr(made, '__qualname__', type(made).__name__)}"
        for name, made in functions.items()
    }


def _wandb(config: ConfigDict) -> dict[str, Any] | None:
    project = config.logging.wandb
    return {"project": project, "name": config.name} if project else None


@contextlib.contextmanager
def only_warned(tracker: Tracker, workdir: epath.Path) -> Iterator[None]:
    """A block that reports on what is finished: an error in it is a warning, for all results are on disk."""
    try:
        yield
    except Exception as error:
        if os.environ.get("G2D_TRACEBACK"):
            raise
        tracker.say(
            f"WARNING: the report was not written: {type(error).__name__}: {error}. All results are there; once the "
            f"cause is gone: g2d report {workdir}"
        )


def conclude(workdir: epath.Path, tracker: Tracker, manifests: Mapping[str, Mapping[str, Any]]) -> None:
    """Show the final table and write report.html, report.md and report.csv. What fails is a warning."""
    with only_warned(tracker, workdir):
        from g2d_jax.report.run import write_run  # here: it loads what draws figures
        from g2d_jax.report.tables import summary_table

        for manifest in manifests.values():
            if manifest["kind"] == "evaluate":
                tracker.table(*summary_table(manifest, list(manifests.values())))
        page, *_ = write_run(workdir, figures=False)
        tracker.say(f"report: {page}")
