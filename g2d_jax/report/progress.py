"""How far the stages of a work directory are, from its files: what `g2d status` and the page of a
run under way show."""

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
"""File of a work directory in which a run tells what it is at: what its progress bar shows, and
its memory in bytes. It goes when the run ends; where it is left by one that was killed, no process
holds the work directory."""


class StageState(NamedTuple):
    """A stage of a run. state: "done", "waiting", "damaged", or "running" or "stopped" and how far.

    remark: on damage, or the error that is the last of its log. ended: that end. kind, steps: of its
    settings. seconds, peak_bytes (host memory): NaN where not known. note: the last metrics of a
    running stage, or which program compiles. sides: of a server that samples, how long it and the
    trainer waited for each other. Each "" for none.
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
    # A study's point: its stages lie elsewhere, each with its own metrics and its own process.
    is_point = (workdir / LINKS).exists()
    folders = stage_folders(workdir) if is_point else plan(config).folders(workdir)
    told = storage.read_informing(workdir / PROGRESS)[0] if owner else {}
    # Stages of a run share one log, which may be long.
    read_log = cache(log_in)
    # A run does its stages one after the other: its process is at the first that is not finished.
    is_next = True
    states = []
    for name, folder in folders.items():
        logged, running = workdir, bool(owner) and is_next
        if is_point:
            logged, running = folder, bool(holder(folder))
        state = describe(name, folder, partial(read_log, logged), running)
        is_next = is_next and state.state == "done"
        if told and state.state.startswith("running"):
            # of the stage, or of what it has begun with
            what = "" if told["stage"] == name else f"{told['stage']} "
            reached = f"running {what}{told['done']} of {told['total']}"
            reached = ", ".join(filter(None, [reached, told["left"]]))
            peak = told.get("peak_memory_bytes", math.nan)
            state = state._replace(state=reached, peak_bytes=peak, note=told["note"])
        stage = config.stages[name]
        steps = str(getattr(stage, "steps", ""))
        states.append(state._replace(kind=stage.kind, steps=steps))
    return states


def waits(figures: Mapping[str, Any]) -> str:
    """Say how long the trainer and the server that sampled for it waited for each other, by the
    numbers of a stage's sampling; "" without a server."""
    if "server_idle" not in figures:
        return ""
    trainer, server = (100 * number(figures, name) for name in ("share", "server_idle"))
    return (
        f"the trainer waited for the server {trainer:.0f} % of the time, and the server for "
        f"requests {server:.0f} %"
    )


Log: TypeAlias = Sequence[Mapping[str, Any]]
"""What was logged, in its order."""


def log_in(folder: epath.Path) -> Log:
    """Read the log of metrics in a folder, without what is damaged in it."""
    ignored: list[str] = []
    return storage.read_segments(folder / "metrics", ignored.append)


def describe(
    name: str, folder: epath.Path, read_log: Callable[[], Log], running: bool
) -> StageState:
    """Describe a stage by its record, else by the steps logged or the rollouts written.

    read_log: is called for a stage that is not finished. running: whether a process is at it.
    """
    result, damage = stage_result.read_lenient(folder)
    if damage:
        return StageState(name, "damaged", f"has a record that cannot be read: {damage}")
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
