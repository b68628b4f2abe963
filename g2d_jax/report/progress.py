"""The progress of the stages of a work directory, from its files, for `g2d status` and the live
page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias

from etils import epath

from g2d_jax.config import Config
from g2d_jax.config.graph import plan
from g2d_jax.records import Ended
from g2d_jax.report.format import number
from g2d_jax.runtime import storage
from g2d_jax.runtime.lock import holder
from g2d_jax.runtime.tracking import ended_by
from g2d_jax.session import stage_result
from g2d_jax.session.workdir import LINKS, stage_folders

PROGRESS = "progress.json"
"""A run's file for the state of its progress bar, and its memory in bytes. It is removed when the
run ends; if the run was killed, the file remains, but no process holds the work directory."""


class StageState(NamedTuple):
    """A stage of a run. state: "done", "waiting", "damaged", or "running" or "stopped" with
    progress.

    remark: a damage, or the last error in its log. ended: how it last ended. kind, steps: of its
    settings. seconds, peak_bytes (host memory): NaN if unknown. note: the last metrics of a running
    stage, or the program that compiles. sides: with a sampling server, how long it and the trainer
    waited for each other. Each is "" for none.
    """

    name: str
    state: str
    remark: str = ""
    ended: Ended | None = None
    kind: str = ""
    steps: str = ""
    seconds: float = math.nan
    peak_bytes: float = math.nan
    note: str = ""
    sides: str = ""


def stage_states(workdir: epath.Path, config: Config, owner: str) -> list[StageState]:
    """Describe each stage of a run, or of a study's point, in order.

    owner: the process that works on the run, "" for none.
    """
    # A study's point: its stages have other folders, each with its own metrics and process.
    is_point = (workdir / LINKS).exists()
    folders = stage_folders(workdir) if is_point else plan(config).folders(workdir)
    progress = storage.read_informing(workdir / PROGRESS)[0] if owner else {}
    # Stages of a run share one log, which may be long.
    read_log = cache(log_in)
    # A run works on one stage at a time: the first that is not finished.
    is_next = True
    states = []
    for name, folder in folders.items():
        logged, running = workdir, bool(owner) and is_next
        if is_point:
            logged, running = folder, bool(holder(folder))
        state = describe(name, folder, partial(read_log, logged), running)
        is_next = is_next and state.state == "done"
        if progress and state.state.startswith("running"):
            # of the stage, or of its current step
            what = "" if progress["stage"] == name else f"{progress['stage']} "
            reached = f"running {what}{progress['done']} of {progress['total']}"
            reached = ", ".join(filter(None, [reached, progress["left"]]))
            peak = progress.get("peak_memory_bytes", math.nan)
            state = state._replace(state=reached, peak_bytes=peak, note=progress["note"])
        stage = config.stages[name]
        steps = str(getattr(stage, "steps", ""))
        states.append(state._replace(kind=stage.kind, steps=steps))
    return states


def waits(measures: Mapping[str, Any]) -> str:
    """Return how long the trainer and its server waited for each other, from a stage's sampling
    metrics; "" without a server."""
    if "server_idle" not in measures:
        return ""
    trainer, server = (100 * number(measures, name) for name in ("share", "server_idle"))
    return (
        f"the trainer waited for the server {trainer:.0f} % of the time, and the server for "
        f"requests {server:.0f} %"
    )


Log: TypeAlias = Sequence[Mapping[str, Any]]
"""The logged records, in order."""


def log_in(folder: epath.Path) -> Log:
    """Read the log of metrics in a folder, without damaged lines."""
    ignored: list[str] = []
    return storage.read_segments(folder / "metrics", ignored.append)


def describe(
    name: str, folder: epath.Path, read_log: Callable[[], Log], running: bool
) -> StageState:
    """Describe a stage by its record, otherwise by the logged steps or the written rollouts.

    read_log: called if the stage is not finished. running: True if a process works on it.
    """
    result, damage = stage_result.read_lenient(folder)
    if damage:
        return StageState(name, "damaged", f"has a damaged record: {damage}")
    if result:
        seconds, sides = result.cost.seconds, waits(result.generation)
        done = StageState(name, "done", seconds=seconds, sides=sides)
        return done._replace(peak_bytes=result.peak_memory_bytes)
    last: Mapping[str, Any] = {}
    step = 0
    for record in read_log():
        if record.get("stage") == name and isinstance(record.get("step"), int):
            step, last = max(step, record["step"]), record
    ended = ended_by(last)
    files = len(list((folder / "rollouts").glob("*.parquet")))
    far = f"with {files} files of rollouts" if files else ""
    if step:
        far = f"at step {step}"
    state = f"stopped {far or 'before its first step'}"
    if running:
        state = f"running {far}".rstrip()
    elif not far and not folder.exists():
        state = "waiting"
    error = ""
    if ended:
        error = f"last stopped with: {ended.text}"
    return StageState(name, state, error, ended)
