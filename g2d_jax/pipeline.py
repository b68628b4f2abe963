"""A run: a small graph of stages over one work directory. Read from the top; this is the order of execution.

    problems ─► sft ─► warm-up (online GRPO) ─► collect (rollouts ► verify ► pairs) ─► offline DPO ─► evaluate ─► report
                             └─► the best of its checkpoints

Stages name their inputs; a stage is finished when its manifest says so; running the same command again continues.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
from etils import epath
from ml_collections import ConfigDict

from g2d_jax import places
from g2d_jax.accounting import TRAINING, goodput
from g2d_jax.config import Config, Reward
from g2d_jax.config_io import to_dict
from g2d_jax.data.problems import check_training
from g2d_jax.graph import Plan, check_inputs, check_names, made_from_ends, plan, policies_read
from g2d_jax.models import quantise
from g2d_jax.models.hf_folder import find_weights
from g2d_jax.report.result import Result
from g2d_jax.rewards.functions import RewardFailed, RewardFunction, load_reward
from g2d_jax.rewards.judge import check_judge
from g2d_jax.runtime import flags, memory, processes, program_cache, storage
from g2d_jax.runtime.compile_times import compiling
from g2d_jax.runtime.heartbeat import watched
from g2d_jax.runtime.lock import locked
from g2d_jax.runtime.tracking import Tracker, check_services
from g2d_jax.sampler import remote
from g2d_jax.scoring import reward_model
from g2d_jax.stages import (
    best_checkpoint,
    collect,
    evaluate,
    init_params,
    inputs,
    kept_inputs,
    offline,
    online,
    sft,
)
from g2d_jax.stages.policies import check_elsewhere
from g2d_jax.stages.problems import table
from g2d_jax.stages.runtime import Runtime
from g2d_jax.training.objectives import Compute, Objective
from g2d_jax.workdir import (
    PROGRAMS,
    absolute,
    check_claim,
    check_token,
    claim,
    mark_start,
    packages,
    without_secrets,
)

Objectives = Mapping[str, Callable[[Compute], Objective]]
"""Stage -> the function that makes its loss."""

STAGES: Mapping[str, ModuleType] = {
    **{"sft": sft, "online": online, "offline": offline},  # these train
    **{"collect": collect, "best_checkpoint": best_checkpoint, "evaluate": evaluate},
}
"""The module of each kind of stage: run(runtime, name, stage) returns its manifest's fields, and
programs(runtime, name, stage, response) yields its programs (see stages/programs)."""


def check(config: Config, until: str | None = None) -> Plan:
    """Return the plan if all settings can work: errors should show now, not after hours of warm-up.

    until: the stage to stop after, None for all. Raises ValueError naming the field or the stage. Looks at settings and
    at whether files exist; loads nothing.
    """
    check_names(config)
    order = plan(config)
    if until is not None and until not in order.order:
        raise ValueError(f"there is no stage {until!r} to stop after; the stages are {', '.join(order.order)}")
    check_inputs(config, order)
    init_params.shape(config.model, 1, init_params.adapters(config.lora))
    if config.engine.is_server:
        remote.check(config.engine)
    for name, task in config.all_tasks.items():
        prefix = "" if name == "main" else f"tasks.{name}."
        check_training(task.train.path, "data.train.path" if name == "main" else f"{prefix}train.path")
        try:
            _check_reward(task.reward)
        except ValueError as error:
            raise ValueError(f"{prefix}{error}") from error
    for name in order.order:
        stage = config.stages[name]
        try:
            quantise.check("sampling_weights", getattr(stage, "sampling_weights", ""), "int8")
            for policy in policies_read(stage):
                check_elsewhere(policy)
        except ValueError as error:
            raise ValueError(f"stages.{name}: {error}") from error
    return order


def check_packages(config: Config) -> None:
    """Raise ImportError naming the extra for a package that a run needs, though no plan of it, and that is missing."""
    check_services(config.logging.services())


def _check_reward(reward: Reward) -> None:
    """Raise ValueError for a reward whose files do not exist; reward models and judges are sent nothing."""
    if reward.function == "model" and (reason := places.missing(reward.model.path, "model")):
        raise ValueError(f"reward.model.path: {reason}")
    if reward.function == "judge":
        check_judge(reward.judge)
    if reward.function not in ("verify", "model", "judge"):
        load_reward(reward.function, reward.folder)


def run(
    config: ConfigDict | Config,
    workdir: storage.PathLike,
    *,
    reward: RewardFunction | None = None,
    objectives: Objectives | None = None,
    until: str | None = None,
) -> Result:
    """Run, or continue, every stage of a config in a work directory; return its finished stages' manifests by name,
    with accuracies, policies and the report (report/result.py).

    config: its relative paths are relative to the working directory; a Config, whose paths must be absolute, as it is.
    reward: a function with TRL's signature in place of reward.function. objectives: for a stage's name, the function
    that makes its loss (see training/objectives.py; its sums must count "tokens", or "pairs" in an offline stage).
    until: stop after this stage. Raises ValueError when the work directory was made with other identity settings,
    reward or losses, or is in use, and StopRun when a stage finds that going on is useless.
    """
    folder = absolute(workdir)
    if isinstance(config, ConfigDict):
        config = config.copy_and_resolve_references()
        places.decide(config, places.here())
        config = Config.of(config)
    settings = config
    order = check(settings, until)
    check_packages(settings)
    places.require(to_dict(settings))
    with _opened(settings, order, folder, until or "", reward, objectives or {}) as runtime:
        names = order.order[: order.order.index(until) + 1 if until else None]
        compile_ahead(runtime, names)
        manifests = {name: run_stage(runtime, name, order) for name in names}
        if until is None:
            processes.on_leader(lambda: conclude(runtime.workdir, runtime.tracker, manifests))
        return Result(runtime.workdir)


@contextlib.contextmanager
def _opened(
    config: Config, order: Plan, folder: epath.Path, until: str, reward: RewardFunction | None, objectives: Objectives
) -> Iterator[Runtime]:
    """Take a work directory for a run and yield what its stages work with; all processes enter it together."""
    flags.take_memory()
    check_joined()
    limits = config.faults
    with (
        watched(peer_timeout=limits.peer_timeout, hang_timeout=limits.hang_timeout),
        _locked(folder),
        program_cache.cached(config.compute.compilation_cache, folder / PROGRAMS),
    ):
        own_functions = _own(reward, objectives)
        mine = {"config": to_dict(config), "until": until, "own": own_functions, "packages": packages()}
        processes.agreed("settings or packages", mine)
        ends = made_from_ends(config, order)
        token = processes.on_leader(lambda: _take(config, folder, own_functions, ends))
        with processes.barrier():
            check_token(folder, token)
        shown = folder if processes.leader() else None
        services = config.logging.services(name=config.name)
        with Tracker(shown, tensorboard=config.logging.tensorboard, **services) as tracker:
            runtime = Runtime(config, folder, tracker, order.folders(folder), reward, objectives)
            with contextlib.closing(runtime):
                processes.on_leader(lambda: check_models(runtime))
                _ = runtime.problems  # by all processes, which agree on them
                runtime.contents = processes.on_leader(lambda: _compared(runtime))
                processes.on_leader(lambda: claim(config, folder, own_functions, ends))
                _ = runtime.sampling_mesh  # raises for an impossible mesh, before any work
                compiling.take_programs()  # those of an earlier run in this process
                for task, split, source, count in table(config, runtime.problems):
                    tracker.say(f"{task}, {split}: {count} problems; source: {source}")
                problems = runtime.problems["train"]
                runtime.scorer.start(problems[:: -(-len(problems) // 256) or 1])
                yield runtime


def check_models(runtime: Runtime) -> None:
    """Raise ValueError for a model or a reward model whose files cannot be loaded, by the headers of its weights."""
    if runtime.model_folder is not None:
        find_weights(runtime.model_folder, runtime.model_config.base)
    for name, task in runtime.tasks.items():
        is_own = name == "main" and runtime.reward is not None
        if task.reward.function == "model" and not is_own:
            reward_model.check(task.reward.model)


def _take(config: Config, folder: epath.Path, own: Mapping[str, str], ends: Mapping[str, Sequence[str]]) -> str:
    """Check a work directory, and take a new one; return the token of this start.

    One that holds a run is left as it is until what the run reads has been compared.
    """
    if not (folder / "config.json").exists():
        return claim(config, folder, own, ends)
    check_claim(config, folder, own, ends)
    return mark_start(folder)


def _compared(runtime: Runtime) -> dict[str, str]:
    """Compare what the run reads with what its work directory keeps of it; return the digests by setting."""
    found = inputs.contents_of(inputs.of_run(runtime))
    kept_inputs.check(runtime.workdir, found, runtime.tracker.say, runtime.config)
    return inputs.digests(found)


def check_joined() -> None:
    """Raise ValueError in a process of several that knows nothing of the others, and without the devices asked for."""
    flags.check_devices()
    if jax.process_count() != processes.count():
        raise ValueError(
            "there are several processes that do not know each other: call g2d_jax.runtime.processes.initialise()"
        )


@contextlib.contextmanager
def _locked(folder: epath.Path) -> Iterator[None]:
    """Lock the work directory for this run, by its leader. Raises Preempted for a run told to stop before it began."""
    processes.check_stop_together()
    with contextlib.ExitStack() as stack:
        processes.on_leader(lambda: stack.enter_context(locked(folder)))
        yield


def compile_ahead(runtime: Runtime, names: Sequence[str]) -> None:
    """Let other threads compile the programs of stages that are not finished, in order.

    Stages whose shapes depend on their examples or pairs are left out: they compile at their own start.
    """
    finished = processes.on_leader(lambda: [name for name in names if storage.finished(runtime.folders[name])])
    for name in names:
        stage = runtime.config.stages[name]
        if name not in finished and stage.kind not in ("sft", "offline"):
            runtime.compile_ahead(STAGES[stage.kind].programs(runtime, name, stage))


def run_stage(runtime: Runtime, name: str, order: Plan, *, again: bool = False) -> dict[str, Any]:
    """Run one stage unless its manifest exists; return the manifest.

    again: go on with a stage that is finished already, and replace its manifest at the end.
    """
    folder, stage = runtime.folders[name], runtime.config.stages[name]
    processes.mark(name)
    processes.check_interrupted()
    done = processes.on_leader(lambda: storage.finished(folder))
    if done is not None and not again:
        runtime.tracker.say(f"{name}: done before, skipped")
        return done
    started = time.time()
    memory.give_back()  # of the stage before
    try:
        with memory.measured() as peak:
            fields = STAGES[stage.kind].run(runtime, name, stage)
            runtime.writer.wait()
            held = max(processes.gather(peak.read()))
    except Exception as error:
        runtime.tracker.error(name, without_secrets(str(error) or repr(error)))
        if not isinstance(error, RewardFailed):
            raise
        raise RewardFailed(
            f"stages.{name}: {error}. Mend it, and {processes.AGAIN}: nothing that was written is lost"
        ) from error
    read = {needed: storage.finished(runtime.folders[needed]) or {} for needed in order.inputs[name]}
    made_from = {needed: manifest.get("fingerprint") for needed, manifest in read.items()}
    manifest = {
        "kind": stage.kind,
        "name": name,
        "inputs": made_from,
        "fingerprint": runtime.stage_fingerprint(name, made_from),
        "started": started,
        "programs": compiling.take_programs(),
        "peak_memory_bytes": held,
        **({"unreadable": runtime.unreadable} if runtime.unreadable else {}),
        **fields,
    }
    if stage.kind not in TRAINING:  # training stages log it with every update
        runtime.tracker.log(name, 0, goodput(fields), kind="goodput")
    runtime.tracker.flush()
    processes.on_leader(lambda: storage.finish(folder, manifest))
    runtime.tracker.say(
        f"{name}: done in {manifest['seconds']:.0f} s; host memory: {held / memory.GIB:.1f} GiB at most"
    )
    return storage.finished(folder) or manifest


def _own(reward: RewardFunction | None, objectives: Objectives) -> dict[str, str]:
    """Return the names of a caller's own functions, which are part of the run's identity."""
    functions = {**({"reward": reward} if reward else {}), **objectives}
    return {
        name: f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', type(function).__name__)}"
        for name, function in functions.items()
    }


@contextlib.contextmanager
def only_warned(tracker: Tracker, workdir: epath.Path) -> Iterator[None]:
    """Run a block that reports on finished stages: an error in it is a warning, for all results are on disk."""
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
    """Show the final table and write report.html, report.md and report.csv. An error is a warning."""
    with only_warned(tracker, workdir):
        from g2d_jax.report.run import write_run  # here: it loads what draws figures
        from g2d_jax.report.tables import summary_table

        for manifest in manifests.values():
            if manifest["kind"] == "evaluate":
                tracker.table(*summary_table(manifest, list(manifests.values())))
        page, *_ = write_run(workdir, figures=False)
        tracker.say(f"report: {page}")
