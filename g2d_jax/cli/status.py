"""The state of a run or of a study, read from its files, for g2d status."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from functools import partial

from etils import epath

from g2d_jax.commands import read_config
from g2d_jax.report.format import fixed
from g2d_jax.report.progress import describe, log_in, stage_states
from g2d_jax.report.runs import studies
from g2d_jax.report.tables import gibibytes
from g2d_jax.runtime import memory, processes, storage
from g2d_jax.runtime.lock import holder, holder_here
from g2d_jax.runtime.terminal import counted
from g2d_jax.runtime.tracking import Screen
from g2d_jax.session.workdir import LINKS, PLANS, absolute, stage_folders

PAUSE = 2.0
"""Seconds between two updates of `watch`."""

QUIET = 60.0
"""Seconds without a process at any stage after which `watch` of a study ends. A stage may load its
model that long before it locks its folder."""


def watch(place: storage.PathLike) -> None:
    """Repeat `show` until no process works on the run; on studies until `QUIET` seconds without
    one, since no process locks their directory between two stages.

    Raises ValueError if standard output is not a terminal.
    """
    screen = Screen()
    if not screen.console.is_terminal:
        raise ValueError("--watch needs a terminal; remove it to show the state once")
    patience = QUIET if studies(place) else 0.0
    worked = -math.inf
    while True:
        screen.console.clear()
        now = time.monotonic()
        if show(place):
            worked = now
        elif now - worked >= patience:
            return
        time.sleep(PAUSE)


def show(place: storage.PathLike) -> bool:
    """Show the stages of a run, or the unfinished points of studies. Return whether a process works
    on it. Needs no model and no device."""
    workdir = absolute(place)
    names = studies(workdir)
    if not names:
        return _run_status(workdir)
    at_work = [_study_status(workdir, name) for name in names]
    return any(at_work)


def _study_status(workdir: epath.Path, name: str) -> bool:
    """Show a row for each point. Shared stages count once."""
    states: dict[epath.Path, str] = {}
    remarks: dict[str, str] = {}
    rows: list[list[str]] = []
    for point in storage.read_json(workdir / PLANS / f"{name}.json")["points"]:
        label = str(point["label"])
        left = []
        for stage, folder in stage_folders(workdir / "points" / name / label).items():
            if folder not in states:
                state = describe(stage, folder, partial(log_in, folder), bool(holder(folder)))
                states[folder], remarks[folder.name] = state.state, state.remark
            if states[folder] == "waiting":
                left.append(stage)
            elif states[folder] != "done":
                left.append(f"{stage} ({states[folder]})")
        rows.append([label, ", ".join(left) or "done"])
    done = list(states.values()).count("done")
    whole = sum(text == "done" for _, text in rows)
    screen = Screen()
    screen.table(f"{name}: {counted(len(rows), 'point')}", ["point", "left to do"], rows)
    screen.say(
        f"{whole} of {counted(len(rows), 'point')} done; {counted(len(states), 'stage')} after "
        f"sharing, {done} of them done"
    )
    _say_remarks(screen, remarks)
    return any(state.startswith("running") for state in states.values())


def _run_status(workdir: epath.Path) -> bool:
    config = read_config(workdir)
    owner = "" if (workdir / LINKS).exists() else holder(workdir)
    states = stage_states(workdir, config, owner)
    rows = []
    for stage in states:
        seconds = fixed(0)(stage.seconds) if stage.state == "done" else ""
        gib = "" if math.isnan(stage.peak_bytes) else fixed(1)(stage.peak_bytes / memory.GIB)
        rows.append([stage.name, stage.kind, stage.state, stage.steps, seconds, gib])
    screen = Screen()
    screen.table(
        str(workdir), ["stage", "kind", "state", "steps", "seconds", "host memory, GiB"], rows
    )
    for stage in states:
        for note in filter(None, (stage.note, stage.sides)):
            screen.say(f"{stage.name}: {note}")
    _say_remarks(screen, {stage.name: stage.remark for stage in states})
    if owner:
        process = holder_here(workdir)
        more = ""
        if process is not None and (held := memory.held(process)) is not None:
            more = f", with {gibibytes(held)} of host memory, including its children"
        screen.say(f"{owner} works on it now{more}")
    elif not (workdir / LINKS).exists() and any(stage.state != "done" for stage in states):
        ended = next((stage.ended for stage in states if stage.ended), None)
        screen.say(processes.how_to_continue(ended))
    return any(stage.state.startswith("running") for stage in states)


def _say_remarks(screen: Screen, remarks: Mapping[str, str]) -> None:
    for stage, remark in remarks.items():
        if remark:
            screen.say(f"{stage} {remark}", "yellow")
