"""The run of a study: all nodes of its graph that are not finished and that no other process runs,
inputs first.

    DIR/
      sweeps/NAME.json               a study of that name: its config, and its points by label
      points/NAME/LABEL/             config.json and stages.json: a point opens like a run (`g2d report`, `export`, …)
      stages/NAME-FINGERPRINT/       a node: what a run has in NN-NAME/, with its metrics, settings and environment
      NAME.html, NAME.md, NAME.csv   what the study measured, written when a process ends

Several workers, on one machine or on several that share the directory, may run the same command:
each runs the next free node. A worker may be several processes with one leader. lock.py describes
how nodes are locked: by `flock` on a file system (not every network file system supports it), by
leases on an object store. You may repeat the command with more points, and other studies may use
the directory: finished nodes are reused.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from g2d_jax import __version__, pipeline
from g2d_jax.config import Config, Online
from g2d_jax.config.graph import plan
from g2d_jax.config.io import begins_more, differences, identity, to_dict
from g2d_jax.runtime import precision, processes, program_cache, storage
from g2d_jax.runtime.heartbeat import watched
from g2d_jax.runtime.lock import LOCK, awaited, try_lock
from g2d_jax.runtime.terminal import counted
from g2d_jax.runtime.tracking import Tracker
from g2d_jax.session import inputs, stage_result
from g2d_jax.session.session import Loaded, Options, Run, StopRun, keep_micro, loaded, session_of
from g2d_jax.session.workdir import (
    LINKS,
    PLANS,
    absolute,
    environment,
    packages,
    read_settings,
    source_digest,
    write_settings,
)
from g2d_jax.stages import run_issues, run_stages
from g2d_jax.sweep.graph import ENDING, Graph, Node, build, node_folder
from g2d_jax.sweep.points import Point, points
from g2d_jax.training.checkpoint import Checkpoints

DONE, OPEN = "done", "open"
PAUSE = 2.0  # seconds between two checks of nodes that other processes run


def run(config: ConfigDict, workdir: storage.PathLike) -> dict[str, str]:
    """Run, or continue, all points of a config with a sweep section; return the nodes that failed
    with the reason.

    A stage that fails also fails all stages made from it; the rest of the study goes on. Raises
    ValueError for a config that cannot work, and for a directory that holds something else; OSError
    for a full disk.
    """
    run_stages.check_joined()
    root = absolute(workdir)
    studied = points(config)
    with (
        watched(**config.faults.to_dict()),
        program_cache.cached(),
    ):
        used = {
            **packages(),
            "g2d_jax": source_digest(),
            precision.NAME: precision.of(config.dtype),
        }
        processes.agreed("settings or packages", {**to_dict(config), "packages": used})
        processes.on_leader(lambda: len(_whole_graph(config.name, studied, root).nodes))
        with Tracker(root if processes.leader() else None, tensorboard=False) as tracker:
            processes.on_leader(lambda: _claim(config, studied, root, tracker.say))
            graph = build(studied, _requested_by_all(root))
            processes.agreed("problems, models or rewards", list(graph.nodes))
            _warn(tracker, graph)
            failed = _Worker(config.name, studied, graph, root, tracker).work()
            for name, reason in failed.items():
                tracker.say(f"{name} failed: {reason}")
            processes.on_leader(lambda: _report(config.name, root, tracker))
    return failed


def _report(name: str, root: epath.Path, tracker: Tracker) -> None:
    """Show and write the report of the study. An error is a warning."""
    with pipeline.only_warned(tracker, root):
        from g2d_jax.report.study import write_study  # here: it loads the plotting library
        from g2d_jax.report.tables import FIRST

        table = partial(tracker.table, first=FIRST, rest=f"{name}.html")
        page, *_ = write_study(root, name, show=table, say=tracker.say)
        tracker.say(f"report: {page}")


def show(config: ConfigDict, workdir: storage.PathLike) -> None:
    """Print the points, and which of their stages are finished. Raises as `run` does."""
    root = absolute(workdir)
    graph = _whole_graph(config.name, points(config), root)
    with TemporaryDirectory() as folder, Tracker(folder, tensorboard=False) as tracker:
        rows = []
        for point, settings, ids in graph.points:
            left = []
            for name in plan(settings).order:
                if stage_result.read(node_folder(root, ids[name])) is None:
                    left.append(name)
            rows.append([point.label, ", ".join(left) or "done"])
        _warn(tracker, graph)
        tracker.table(counted(len(rows), "point"), ["point", "left to do"], rows)
        done = 0
        for node in graph.nodes.values():
            done += _state(node, node_folder(root, node.id)) == DONE
        tracker.say(f"{len(graph.nodes)} stages after sharing, {done} of them done")


def _whole_graph(name: str, studied: Sequence[Point], root: epath.Path) -> Graph:
    """Build the graph of points, with the steps that other studies need. Raises ValueError for a
    config that cannot work, before anything is written."""
    graph = build(studied, _requested_steps(root))
    for _, settings, _ in graph.points:
        run_stages.require_packages(settings)
    _require_free(root)
    file = root / PLANS / f"{name}.json"
    if file.exists():
        _require_alike(root / "points" / name, _by_label(storage.read_json(file)), graph)
    return graph


def _warn(tracker: Tracker, graph: Graph) -> None:
    for text in dict.fromkeys(map(str, graph.warnings)):
        tracker.say(f"WARNING: {text}", "yellow")


def _by_label(content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the points of a study's plan by label."""
    return {point["label"]: point for point in content["points"]}


def _requested_steps(root: epath.Path) -> dict[str, tuple[int, list[int]]]:
    """Map trajectory to the most steps, and the steps to keep, that any study of the directory
    needs.

    Steps that it has passed without keeping them are left out: only a study that needs them is
    refused.
    """
    requested: dict[str, tuple[int, list[int]]] = {}
    for path in (root / PLANS).glob("*.json"):
        for name, (most, pinned) in storage.read_json(path)["trajectories"].items():
            before, others = requested.get(name, (0, []))
            requested[name] = max(before, most), sorted({*others, *pinned})
    for name, (most, pinned) in requested.items():
        passed = _passed(node_folder(root, name), pinned)
        requested[name] = most, [step for step in pinned if step not in passed]
    return requested


def _requested_by_all(root: epath.Path) -> dict[str, tuple[int, list[int]]]:
    """Return the leader's `_requested_steps` on all processes."""
    found = processes.on_leader(lambda: _requested_steps(root))
    return {name: (most, steps) for name, (most, steps) in found.items()}


def _passed(folder: epath.Path, steps: Sequence[int]) -> list[int]:
    """List the steps that a finished trajectory has passed without keeping them."""
    result = stage_result.read(folder)
    if result is None:
        return []
    saved = {*Checkpoints(folder / "checkpoints").steps()} & set(map(int, result.costs))
    reached = result.counts["steps"]
    return [step for step in steps if step <= reached and step not in saved]


def _require_free(root: epath.Path) -> None:
    """Raise ValueError for a directory that holds something other than studies."""
    # Another process that started first may have written its points already.
    begun = {LOCK, PLANS, "points"}
    if not root.exists() or (root / PLANS).exists():
        return
    if any(child.name not in begun for child in root.iterdir()):
        raise ValueError(f"{root} is not empty and holds no study: choose another --workdir")


def _claim(
    config: ConfigDict, studied: Sequence[Point], root: epath.Path, say: Callable[[str], None]
) -> None:
    """Write this study's plan next to those of other studies. Prints which reward functions have
    changed.

    Only one process runs it at once: each reads the others' requests, and adds its own points and
    steps to those of the same name. Raises ValueError if a new point would be another seed of one
    with other settings.
    """
    with awaited(root / PLANS):
        graph = _whole_graph(
            config.name, studied, root
        )  # other studies may have requested more since
        file = root / PLANS / f"{config.name}.json"
        before: dict[str, Any] = {"points": [], "trajectories": {}}
        if file.exists():
            before = storage.read_json(file)
        listed = _by_label(before)
        changed: dict[str, None] = {}
        for point, settings, ids in graph.points:
            folder = root / "points" / config.name / point.label
            read = inputs.digests(settings)
            changed |= dict.fromkeys(inputs.changed_functions(folder, read))
            write_settings(settings, folder, inputs=read)
            links = []
            for name in plan(settings).order:
                steps = None
                if ids[name] in graph.trajectories:
                    steps = point.config.stages[name].steps
                links.append([name, f"../../../stages/{ids[name]}", steps])
            storage.write_json(folder / LINKS, links)
            own = {"label": point.label, "arm": point.arm, "seed": point.seed}
            listed[point.label] = {**own, "values": dict(point.values), "stages": dict(ids)}
        content = {
            "config": to_dict(config),
            "points": list(listed.values()),
            "trajectories": {**before["trajectories"], **graph.trajectories},
            "version": __version__,
        }
        storage.write_json(file, content)
    for name in changed:
        say(
            f"WARNING: {name} is in a file that has changed. Finished stages keep their rewards: "
            "choose another --workdir to score all responses by the new version"
        )


def _require_alike(folder: epath.Path, listed: Mapping[str, Any], graph: Graph) -> None:
    """Raise ValueError if a new and a listed point would share a row of the report, but differ in
    more than their seed.

    folder: of the study's points. listed: label -> point, of the plan. A repeated point replaces
    its old one.
    """
    new = {}
    for point, settings, _ in graph.points:
        new[point.arm, tuple(sorted(point.values.items()))] = settings
    given = {point.label for point, _, _ in graph.points}
    for label, point in listed.items():
        now = new.get((point["arm"], tuple(sorted(point["values"].items()))))
        if label in given or now is None:
            continue
        content = storage.read_json(folder / label / "config.json")
        before = read_settings(folder / label)
        multiplied = content.get(precision.NAME, precision.DEFAULT)
        then = _but_seed(before, content["inputs"], multiplied)
        is_now = _but_seed(now, inputs.digests(now), precision.of(now.dtype))
        if changed := differences(then, is_now):
            lines = "\n  ".join(changed)
            raise ValueError(
                f"the study has the point {label} with other settings, and its report would treat "
                f"both as seeds of one setting:\n  {lines}\nChoose another --workdir or "
                "config.name, or undo the change"
            )


def _but_seed(
    config: Config | ConfigDict, read: Mapping[str, str], multiplied: str
) -> dict[str, Any]:
    """Return a point's identity without its seed and the ends of its trajectories. read: content
    digests of its inputs. multiplied: the precision of its matrix products."""
    values = {**identity(config, read), precision.NAME: multiplied}
    del values["seed"]
    for stage in values["stages"].values():
        if begins_more(stage):
            for setting in ENDING:
                stage.pop(setting, None)
    return values


class _Worker:
    """A worker of a study: one process, or several together. failed: node -> reason, for nodes that
    failed and all that read them."""

    def __init__(
        self, name: str, studied: Sequence[Point], graph: Graph, root: epath.Path, tracker: Tracker
    ) -> None:
        self.name = name
        self.studied = studied
        self.graph = graph
        self.root = root
        self.tracker = tracker
        self.done: set[str] = set()
        self.failed: dict[str, str] = {}
        self._loaded: Loaded | None = None
        self._open = ExitStack()
        self._shared: Any = None
        self._programs = program_cache.Programs()

    def work(self) -> dict[str, str]:
        """Run nodes until all are done or failed."""
        try:
            waiting_for: list[str] = []
            while open_nodes := self._open_nodes():
                processes.check_stop_together()
                self._blame(open_nodes)
                ready = [node for node in open_nodes if self.done.issuperset(node.inputs)]
                if not ready or any(self._take(node) for node in ready):
                    waiting_for = []
                    continue
                if waiting_for != (busy := [node.id for node in ready]):
                    self.tracker.say(f"waiting for {', '.join(busy)}, which another process runs")
                    waiting_for = busy
                time.sleep(PAUSE)
            return self.failed
        finally:
            self._close()

    def _open_nodes(self) -> list[Node]:
        ended = self.done | self.failed.keys()
        return [node for node in self.graph.nodes.values() if node.id not in ended]

    def _blame(self, nodes: list[Node]) -> None:
        """Mark the nodes that read a failed node as failed."""
        for node in nodes:
            for needed in node.inputs:
                if needed in self.failed:
                    self.failed[node.id] = f"it reads {needed}"
                    break

    def _take(self, node: Node) -> bool:
        """Run a node unless it is finished; return False if another process runs it."""
        folder = node_folder(self.root, node.id)
        state = processes.on_leader(lambda: _state(node, folder))
        if state == OPEN:
            with ExitStack() as stack:
                if not processes.on_leader(lambda: stack.enter_context(try_lock(folder))):
                    return False
                # Another worker may have run it meanwhile, or a newer study may need more of it.
                latest = self._latest(node)
                state = processes.on_leader(lambda: _state(latest, folder))
                if state == OPEN:
                    state = self._run(latest, folder)
        if state == DONE:
            self.done.add(node.id)
        else:
            self.failed[node.id] = state
        return True

    def _latest(self, node: Node) -> Node:
        """Return the node with the steps now requested of its trajectory, by newer studies, too."""
        mine, requested = self.graph.trajectories.get(node.id), _requested_by_all(self.root)
        if mine is not None and requested.get(node.id, mine) != mine:
            self.graph = build(self.studied, requested)
        return self.graph.nodes[node.id]

    def _run(self, node: Node, folder: epath.Path) -> str:
        """Run the stage; return DONE, or the reason of its failure."""
        number = list(self.graph.nodes).index(node.id) + 1
        self.tracker.say(f"[{number}/{len(self.graph.nodes)}] {node.id} ({self._users(node)})")
        described = {"config": to_dict(node.config), "stages": dict(node.stages)}
        processes.on_leader(lambda: storage.write_json(folder / "stage.json", described))
        processes.on_leader(lambda: storage.write_json(folder / "environment.json", environment()))
        folders = {name: node_folder(self.root, other) for name, other in node.stages.items()}
        evaluated = {
            policy: node_folder(self.root, other) for policy, other in node.evaluated.items()
        }
        logging = node.config.logging
        wandb = logging.wandb_options(name=node.id, group=self.name)
        tracker = Tracker(
            folder if processes.leader() else None,
            tensorboard=logging.tensorboard,
            screen=self.tracker.screen,
            wandb=wandb,
        )
        with tracker, precision.used(node.config.dtype):
            try:
                shared = self._common(node)
                run = Run(
                    config=node.config,
                    workdir=folder,
                    folders=folders,
                    tracker=tracker,
                    evaluated=evaluated,
                    inputs=inputs.digests(node.config),
                )
                session = session_of(run, shared, settle=keep_micro)
                found = run_issues.of_stages(session, [node.name])
                run_issues.tell(tracker, found.issues)
                run_stages.compile_ahead(session, [node.name])
                run_stages.run_stage(session, node.name, plan(node.config), found, again=True)
            except (
                ValueError,
                RuntimeError,
            ) as error:  # RuntimeError: XLA's, such as out of memory
                # If only one process raised it, the others may still compute.
                is_of_all = processes.count() == 1 or isinstance(error, StopRun)
                if os.environ.get("G2D_TRACEBACK") or not is_of_all:
                    raise
                return f"{error}"
        return DONE

    def _users(self, node: Node) -> str:
        """Name the points the node is for, the first few."""
        labels = []
        for point, _, ids in self.graph.points:
            whole = self.graph.nodes.get(ids.get(node.name, ""))
            if whole is not None and node.id in (whole.id, *whole.evaluated.values()):
                labels.append(point.label)
        if len(labels) > 2:
            labels[2:] = [f"{len(labels) - 2} more"]
        return ", ".join(labels)

    def _common(self, node: Node) -> Loaded:
        """Return the problems, tokenizer and programs that nodes with equal settings outside the
        stages share."""
        shared = to_dict(node.config)
        del shared["stages"], shared["name"]
        if self._loaded is None or shared != self._shared:
            self._close()
            run = Run(config=node.config, workdir=self.root, folders={}, tracker=self.tracker)
            made = loaded(run, Options(), self._programs)
            self._loaded, self._shared = self._open.enter_context(made), shared
        return self._loaded

    def _close(self) -> None:
        self._loaded = None
        self._open.close()


def _state(node: Node, folder: epath.Path) -> str:
    """Return DONE if the node has all the steps it needs, OPEN if it must run, or why it cannot."""
    result = stage_result.read(folder)
    if result is None:
        return OPEN
    stage = node.config.stages_of(Online).get(node.name)
    if stage is None or stage.budget.amount:
        return DONE
    reached = result.counts["steps"]
    if missing := _passed(folder, stage.keep):
        return (
            f"{folder} went on to {reached} without keeping step {min(missing)}: choose another "
            "--workdir for this step"
        )
    return DONE if reached >= stage.steps else OPEN
