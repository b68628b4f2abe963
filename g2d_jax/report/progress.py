"""How far the stages of a work directory are, from its files: what `g2d status` and the page of a
run under way show."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias

from etils import epath

from g2d_jax import stage_result
from g2d_jax.config import Config
from g2d_jax.config.graph import plan
from g2d_jax.records import Ended
from g2d_jax.report.format import number
from g2d_jax.runtime import storage
from g2d_jax.runtime.lock import holder
from g2d_jax.runtime.tracking import ended_by
from g2d_jax.stage_result import StageResult
from g2d_jax.workdir import LINKS, stage_folders

PROGRESS = "progress.json"
"""File of a work directory in which a run tells what it is at: what its progress bar shows, and
its memory in bytes. It goes when the run ends; where it is left by one that was killed, no process
holds the work directory."""


class StageState(NamedTuple):
    """A stage of a run. state: "done", "waiting", "damaged", or "running" or "stopped" and how far.

    steps: of a training stage, else "". seconds, peak_bytes (host memory): NaN where not known.
    note: the last metrics of a running stage, or which program compiles. remark: on damage, or the
    error that is the last of its log. ended: that end. sides: of a server that samples, how long it
    and the trainer waited for each other. Each "" for none.
    """

    name: str
    kind: str
    state: str
    steps: str
    seconds: float
    peak_bytes: float
    note: str
    remark: str
    sides: str = ""
    ended: Ended | None = None


def stage_states(workdir: epath.Path, config: Config, owner: str) -> list[StageState]:
    """Describe each stage of a run, or of a study's point, in order.

    owner: the process that works on the run, "" for none.
    """
    # A study's point: its stages lie elsewhere, each with its own metrics and its own process.
    is_point = (workdir / LINKS).exists()
    folders = stage_folders(workdir) if is_point else plan(config).folders(workdir)
    told = told_by(workdir) if owner else {}
    # Stages of a run share one log, which may be long.
    read_log = cache(log_in)
    # A run does its stages one after the other: its process is at the first that is not finished.
    is_next = True
    states = []
    for name, folder in folders.items():
        finished = stage_result.read_lenient(folder)
        result = finished[0]
        logged, running = workdir, bool(owner) and is_next and not result
        if is_point:
            logged, running = folder, bool(holder(folder))
        is_next = is_next and bool(result)
        state, remark, ended = describe(name, folder, finished, partial(read_log, logged), running)
        stage = config.stages[name]
        seconds, peak, note = math.nan, math.nan, ""
        if result:
            seconds, peak = result.cost.seconds, result.peak_memory_bytes
        if running and told:
            state = f"running {_reached(told, name)}"
            peak, note = number(told, "peak_memory_bytes"), str(told.get("note", ""))
        steps = str(getattr(stage, "steps", ""))
        sides = ""
        if config.engine.is_server:
            sides = waits(result.generation if result else {}) or _newest_waits(
                name, partial(read_log, logged)
            )
        states.append(
            StageState(name, stage.kind, state, steps, seconds, peak, note, remark, sides, ended)
        )
    return states


def _newest_waits(name: str, read_log: Callable[[], Log]) -> str:
    """Say the same of the newest window of a stage that is not finished."""
    said = ""
    for record in read_log():
        if record.get("stage") == name:
            figures = {}
            for metric, value in record.get("metrics", {}).items():
                figures[metric.removeprefix("generation/")] = value
            said = waits(figures) or said
    return said and f"in its newest window {said}"


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


def told_by(workdir: epath.Path) -> dict[str, Any]:
    """Read what a run tells of itself, {} where that is nothing, or damaged: it only informs."""
    told, _ = storage.read_informing(workdir / PROGRESS)
    if math.isnan(number(told, "done")) or math.isnan(number(told, "total")):
        return {}
    return told


def _reached(told: dict[str, Any], stage: str) -> str:
    """Say how far the bar is: that of the stage, or of what it has begun with."""
    done, total = number(told, "done"), number(told, "total")
    what = str(told.get("stage", ""))
    named = "" if what == stage else f"{what} "
    left = str(told.get("left", ""))
    return f"{named}{done:.0f} of {total:.0f}{', ' * bool(left)}{left}"


Log: TypeAlias = Sequence[Mapping[str, Any]]
"""What was logged, in its order."""


def log_in(folder: epath.Path) -> Log:
    """Read the log of metrics in a folder, without what is damaged in it."""
    ignored: list[str] = []
    return storage.read_segments(folder / "metrics", ignored.append)


def describe(
    name: str,
    folder: epath.Path,
    finished: tuple[StageResult | None, str],
    read_log: Callable[[], Log],
    running: bool,
) -> tuple[str, str, Ended | None]:
    """Describe a stage: done, waiting, damaged, or running or stopped and how far, by the steps
    logged or by the rollouts written. With a remark: on the damage, or the error that is the last
    of its log; "" for none, and that end.

    finished: what `stage_result.read_lenient` says of the folder. read_log: is called for a stage that
    is not finished. running: whether a process is at it.
    """
    result, damage = finished
    if damage:
        return "damaged", f"has a record that cannot be read: {damage}", None
    if result:
        return "done", "", None
    records = [
        record
        for record in read_log()
        if record.get("stage") == name and isinstance(record.get("step"), int)
    ]
    ended = ended_by(records[-1] if records else {})
    error = f"last stopped with: {ended.text}" if ended else ""
    step = max((record["step"] for record in records), default=0)
    files = len(list((folder / "rollouts").glob("*.parquet")))
    far = f"with {files} files of rollouts" if files else ""
    if step:
        far = f"at step {step}"
    if running:
        return f"running {far}".rstrip(), error, ended
    if not far and not folder.exists():
        return "waiting", error, ended
    return f"stopped {far or 'before its first step'}", error, ended
