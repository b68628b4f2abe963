"""The state of a run or of a study, from its files: what g2d status shows."""

from __future__ import annotations

from collections.abc import Mapping

from etils import epath

from g2d_jax.commands import read_config
from g2d_jax.config.graph import plan
from g2d_jax.report.read import studies
from g2d_jax.runtime import memory, processes, storage
from g2d_jax.runtime.lock import holder, holder_here
from g2d_jax.runtime.tracking import Screen
from g2d_jax.workdir import LINKS, PLANS, absolute, stage_folders


def show(place: storage.PathLike) -> None:
    """Show stages with what is done, or points with what is left, of the work directory of a run
    or of studies; needs neither the model nor a device."""
    workdir = absolute(place)
    names = studies(workdir)
    for name in names:
        _study_status(workdir, name)
    if not names:
        _run_status(workdir)


def _study_status(workdir: epath.Path, name: str) -> None:
    """Show a row for each point. Stages that points share are counted once."""
    states: dict[epath.Path, str] = {}
    remarks: dict[str, str] = {}
    rows: list[list[str]] = []
    for point in storage.read_json(workdir / PLANS / f"{name}.json")["points"]:
        label = str(point["label"])
        left = []
        for stage, folder in stage_folders(workdir / "points" / name / label).items():
            if folder not in states:
                running = bool(holder(folder))
                states[folder], remarks[folder.name] = _state(stage, folder, folder, running)
            if states[folder] == "waiting":
                left.append(stage)
            elif states[folder] != "done":
                left.append(f"{stage} ({states[folder]})")
        rows.append([label, ", ".join(left) or "done"])
    done = list(states.values()).count("done")
    whole = sum(text == "done" for _, text in rows)
    screen = Screen()
    screen.table(f"{name}: {len(rows)} points", ["point", "left to do"], rows)
    screen.say(
        f"{whole} of {len(rows)} points done; {len(states)} stages after sharing, {done} of them "
        "done"
    )
    _say_remarks(screen, remarks)


def _run_status(workdir: epath.Path) -> None:
    config = read_config(workdir)
    # A study's point: its stages lie elsewhere, each with its own metrics and its own process.
    is_point = (workdir / LINKS).exists()
    owner = ""
    folders = stage_folders(workdir)
    if not is_point:
        owner = holder(workdir)
        folders = plan(config).folders(workdir)
    # A run does its stages one after the other: its process is at the first that is not finished.
    is_next = True
    rows: list[list[str]] = []
    remarks: dict[str, str] = {}
    for name, folder in folders.items():
        manifest = storage.read_finished(folder)[0] or {}
        logged, running = workdir, bool(owner) and is_next and not manifest
        if is_point:
            logged, running = folder, bool(holder(folder))
        is_next = is_next and bool(manifest)
        state, remarks[name] = _state(name, folder, logged, running)
        seconds = f"{float(manifest['seconds']):.0f}" if manifest else ""
        # Manifests of earlier versions have no peak.
        peak = manifest.get("peak_memory_bytes")
        gib = f"{peak / memory.GIB:.1f}" if peak else ""
        stage = config.stages[name]
        rows.append([name, stage.kind, state, str(getattr(stage, "steps", "")), seconds, gib])
    screen = Screen()
    screen.table(
        str(workdir), ["stage", "kind", "state", "steps", "seconds", "host memory, GiB"], rows
    )
    _say_remarks(screen, remarks)
    if owner:
        process = holder_here(workdir)
        more = ""
        if process is not None and (held := memory.held(process)) is not None:
            more = f", with {held / memory.GIB:.1f} GiB of host memory, its children's too"
        screen.say(f"{owner} works on it now{more}")
    elif not is_point and any(row[2] != "done" for row in rows):
        screen.say(f"no process works on it: {processes.AGAIN}")


def _say_remarks(screen: Screen, remarks: Mapping[str, str]) -> None:
    for stage, remark in remarks.items():
        if remark:
            screen.say(f"{stage} {remark}", "yellow")


def _state(name: str, folder: epath.Path, logged: epath.Path, running: bool) -> tuple[str, str]:
    """Describe a stage: done, waiting, damaged, or running or stopped and how far, by the steps
    logged in `logged` or by the rollouts written. With a remark: on the damage, or the error that
    is the last of its log; "" for none.

    running: whether a process is at it.
    """
    manifest, damage = storage.read_finished(folder)
    if damage:
        return "damaged", f"has a damaged manifest: {damage}"
    if manifest:
        return "done", ""
    ignored: list[str] = []
    records = [
        record
        for record in storage.read_segments(logged / "metrics", ignored.append)
        if record.get("stage") == name and isinstance(record.get("step"), int)
    ]
    error = ""
    if records and records[-1].get("kind") == "error":
        error = f"last stopped with: {str(records[-1].get('text', '')).removeprefix(f'{name}: ')}"
    step = max((record["step"] for record in records), default=0)
    files = len(list((folder / "rollouts").glob("*.parquet")))
    far = f"with {files} files of rollouts" if files else ""
    if step:
        far = f"at step {step}"
    if running:
        return f"running {far}".rstrip(), error
    if not far and not folder.exists():
        return "waiting", error
    return f"stopped {far or 'before its first step'}", error
