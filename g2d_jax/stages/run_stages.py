"""From checked settings to finished stages: open a work directory, and run stages in it in order.

Nothing here uses reports, studies or plans; pipeline.py puts a run together.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
from etils import epath

from g2d_jax import stages as stage_modules
from g2d_jax.config import Config, Issue, Sft
from g2d_jax.config.graph import Plan
from g2d_jax.config.io import to_dict
from g2d_jax.config.section import warning
from g2d_jax.models.decoder import count_params, count_trained
from g2d_jax.records import Ended
from g2d_jax.rewards.functions import RewardFailed, RewardFunction
from g2d_jax.runtime import flags, memory, precision, processes, program_cache
from g2d_jax.runtime import mesh as meshes
from g2d_jax.runtime.compile_times import compiling
from g2d_jax.runtime.heartbeat import watched
from g2d_jax.runtime.lock import locked
from g2d_jax.runtime.tracking import Tracker, require_wandb
from g2d_jax.session import inputs, stage_result
from g2d_jax.session.accounting import TRAINING
from g2d_jax.session.problems import described, table
from g2d_jax.session.session import (
    Objectives,
    Options,
    Run,
    Session,
    StopRun,
    keep_micro,
    loaded,
    session_of,
)
from g2d_jax.session.stage_result import Compiled, Outcome, StageResult
from g2d_jax.session.workdir import (
    PROGRAMS,
    check_token,
    claim,
    has_begun,
    packages,
    source_digest,
    without_secrets,
)
from g2d_jax.stages import Seen, run_issues


def require_packages(config: Config) -> None:
    """Raise ImportError naming the extra for a missing package that a run needs, though not its
    plan."""
    if config.logging.wandb:
        require_wandb()


@contextlib.contextmanager
def open_session(
    config: Config,
    order: Plan,
    folder: epath.Path,
    until: str,
    reward: RewardFunction | None,
    objectives: Objectives,
    warnings: Sequence[Issue] = (),
) -> Iterator[tuple[Session, run_issues.Found]]:
    """Claim a work directory; yield the run's session, and the result of checking its unfinished
    stages. All processes enter it together. warnings: of the settings."""
    flags.set_up_gpus()
    check_joined()
    with (
        watched(**config.faults.to_dict()),
        _locked(folder),
        precision.used(config.dtype),
        program_cache.cached(folder / PROGRAMS),
    ):
        own_functions = _own(reward, objectives)
        with processes.barrier():
            found = inputs.digests(config)
        mine = {
            "config": to_dict(config),
            "until": until,
            "own": own_functions,
            "inputs": found,
            precision.NAME: precision.of(config.dtype),
            "packages": {**packages(), "g2d_jax": source_digest()},
        }
        processes.agreed("settings, files or packages", mine)
        changed = processes.on_leader(lambda: inputs.changed_functions(folder, found))
        token = processes.on_leader(lambda: claim(config, folder, own_functions, found))
        with processes.barrier():
            check_token(folder, token)
        shown = folder if processes.leader() else None
        logging = config.logging
        wandb = logging.wandb_options(name=config.name)
        with Tracker(shown, tensorboard=logging.tensorboard, wandb=wandb) as tracker:
            run = Run(
                config=config,
                workdir=folder,
                folders=order.folders(folder),
                tracker=tracker,
                reward=reward,
                objectives=objectives,
                inputs=found,
            )
            names = run_issues.unfinished(run.folders, order.until(until))
            with loaded(run, Options(names)) as shared:
                settle = functools.partial(keep_micro, begun=has_begun(folder))
                session = session_of(run, shared, settle=settle)
                known = [*warnings, *(warning(name, *_CHANGED) for name in changed)]
                seen = run_issues.examine(session, names, known)
                compiling.take_programs()  # those of an earlier run in this process
                _print_summary(session, order, until)
                problems = session.problems.train
                session.scorer.start(problems[:: -(-len(problems) // 256) or 1])
                yield session, seen


_CHANGED = (
    "is in a file that has changed since this run began",
    "choose another --workdir to score all responses by the new version",
)


def _print_summary(session: Session, order: Plan, until: str) -> None:
    """Print the stages, model, devices and problems of a run."""
    config, say = session.config, session.tracker.say
    stages: list[str] = []
    for name in order.until(until):
        stage = config.stages[name]
        about = [stage.kind] if stage.kind != name else []
        steps = getattr(stage, "steps", 0)
        if steps:
            about.append(f"{steps:,} steps")
        stages.append(f"{name} ({', '.join(about)})" if about else name)
    say(f"{config.name}: {', '.join(stages)}")

    total, trained = count_params(session.model_config), count_trained(session.model_config)
    parts = [config.model.path or "new, with random weights", f"{total:,} parameters"]
    if trained < total:
        parts.append(f"{trained:,} of them trained")
    say(f"model: {', '.join(parts)}; {meshes.describe(session.mesh)}, in {config.dtype}")

    several = len(config.all_tasks) > 1
    for task, split, source, count in table(config, session.problems.by_split):
        of_task = f"{task}, " if several else ""
        problems = "no problems" if source == "none" else f"{count:,} problems from {source}"
        say(f"{of_task}{split}: {problems}")
    for name, stage in config.stages_of(Sft).items():
        say(f"{name}: examples from {described(stage.data)}")


def check_joined() -> None:
    """Raise ValueError if several processes have not joined, or the requested devices are
    missing."""
    flags.check_devices()
    if jax.process_count() != processes.count():
        raise ValueError(
            "there are several processes that have not joined each other: call "
            "g2d_jax.runtime.processes.initialise()"
        )


@contextlib.contextmanager
def _locked(folder: epath.Path) -> Iterator[None]:
    """Let the leader lock the work directory. Raises Preempted on a request to stop before it."""
    processes.check_stop_together()
    with contextlib.ExitStack() as stack:
        processes.on_leader(lambda: stack.enter_context(locked(folder)))
        yield


def compile_ahead(session: Session, names: Sequence[str]) -> None:
    """Let other threads compile the programs of stages that are not finished, in order.

    Stages whose shapes depend on their data are left out: they compile at their own start.
    """
    for name in run_issues.unfinished(session.folders, names):
        if not session.config.stages[name].shapes_from_data:
            session.ahead.compile(stage_modules.programs(session, name))


def run_stage(
    session: Session,
    name: str,
    order: Plan,
    found: run_issues.Found | None = None,
    *,
    again: bool = False,
) -> StageResult:
    """Run one stage unless it is finished; return its record.

    found: the result of checking it, whose data is removed. again: go on with a finished stage, and
    replace its record at the end.
    """
    found = found or run_issues.Found()
    folder, kind = session.folders[name], session.config.stages[name].kind
    processes.note_progress(name)
    processes.check_interrupted()
    read = functools.cache(stage_result.read)  # a record may be long
    is_done = processes.on_leader(lambda: read(folder) is not None)
    if is_done and not again:
        done = read(folder)
        assert done is not None  # the leader has read it
        session.tracker.say(f"{name}: done before, skipped")
        return done
    started = time.time()
    memory.give_back()  # of the previous stage
    outcome, held = _run(session, name, found.seen.pop(name, None))
    made_from = {}
    for needed in order.inputs[name]:
        made = stage_result.read(session.folders[needed])
        made_from[needed] = made.fingerprint if made else None
    outcome = replace(outcome, warnings=[*found.warnings(name), *outcome.warnings])
    result = StageResult(
        **vars(outcome),
        kind=kind,
        name=name,
        fingerprint=inputs.stage_fingerprint(session, name, made_from),
        started=started,
        programs=_compiled_programs(),
        peak_memory_bytes=held,
    )
    if kind not in TRAINING:  # training stages log it with every update
        session.tracker.log(name, 0, result.cost.goodput, kind="goodput")
    session.tracker.flush()
    processes.on_leader(lambda: stage_result.write(folder, result))
    session.tracker.say(
        f"{name}: done in {result.cost.seconds:.0f} s; host memory: {held / memory.GIB:.1f} GiB "
        "at most"
    )
    return result


def _run(session: Session, name: str, seen: Seen | None) -> tuple[Outcome, float]:
    """Run a stage; return its outcome, and the peak of host memory in bytes, of any process.

    seen: the result of checking it. An error is logged as the run's end, and raised with a remedy.
    """
    stage = session.config.stages[name]
    data = [seen.data] if seen and seen.data is not None else []
    try:
        with session.tracker.measured() as peak:
            outcome = stage_modules.of_kind(stage.kind).run(session, name, stage, *data)
            session.writer.wait()
            return outcome, max(processes.gather(peak.read()))
    except Exception as error:
        text = without_secrets(str(error) or repr(error)).removeprefix(f"{name}: ")
        session.tracker.end(Ended("error", text, name, isinstance(error, StopRun)))
        if isinstance(error, RewardFailed):
            message = f"{name}: {error}. Fix it, and {processes.AGAIN}: your results are safe"
            raise RewardFailed(message) from error
        if isinstance(error, StopRun):
            raise StopRun(f"{error}. {processes.ANOTHER}") from error
        raise


def _compiled_programs() -> dict[str, Compiled]:
    """Return the programs that were compiled since the last call, by name."""
    programs = {}
    for name, times in compiling.take_programs().items():
        programs[name] = Compiled(int(times["compiled"]), times["seconds"])
    return programs


def _own(reward: RewardFunction | None, objectives: Objectives) -> dict[str, str]:
    """Return the names of a caller's own functions, which are part of the run's identity."""
    functions: dict[str, Any] = dict(objectives)
    if reward:
        functions = {"reward": reward, **functions}
    return {
        name: f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', type(function).__name__)}"
        for name, function in functions.items()
    }
