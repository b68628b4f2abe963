"""What the tests of several processes run in each of them.

python several.py run ARGUMENTS                      the command `g2d run`
python several.py export ARGUMENTS                   the command `g2d export`; FULL: bytes a file of process 0 can have
python several.py stages CONFIG REFERENCE WORKDIR    each stage by itself, on what REFERENCE has of those before it
python several.py score PEER_TIMEOUT HANG_TIMEOUT    some responses, with the reward of small.py
python several.py agreement FOLDER                   every way to agree
python several.py alone FOLDER                       what a single process starts
"""

import contextlib
import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath
from unofficial import let_every_process_write_programs

from g2d_jax import cli, graph, pipeline, processes
from g2d_jax import config as settings
from g2d_jax.config import Config
from g2d_jax.mesh import make_mesh
from g2d_jax.records import Problem
from g2d_jax.resolve import resolve
from g2d_jax.stages.reward_manager import RewardManager
from g2d_jax.stages.runtime import Runtime
from g2d_jax.tracking import Tracker
from g2d_jax.watcher import watched
from g2d_jax.workdir import check_token, claim

let_every_process_write_programs()


def run(*arguments: str) -> int:
    return cli.main(["run", *arguments])


def export(*arguments: str) -> int:
    if "FULL" in os.environ and os.environ["JAX_PROCESS_ID"] == "0":
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(os.environ["FULL"]), resource.RLIM_INFINITY))
    return cli.main(["export", *arguments])


def stages(config_file: str, reference: str, workdir: str) -> int:
    """Every stage from the same artefacts, those of another run."""
    processes.initialise()
    config, own, other = resolve(config_file), epath.Path(workdir), epath.Path(reference)
    order = graph.plan(Config.of(config))
    jax.devices()  # all at once: each waits for the others here
    with (
        watched(peer_timeout=60, hang_timeout=300),
        Tracker(own if processes.leader() else None, tensorboard=False) as tracker,
    ):
        processes.once(lambda: claim(Config.of(config), own))
        first = Runtime(Config.of(config), own, tracker, {})
        with contextlib.closing(first):
            for name in order.order:
                folders = {**order.folders(other), name: order.folders(own)[name]}
                pipeline.run_stage(first.at(Config.of(config), folders, tracker), name, order)
    return 0


def score(peer_timeout: str, hang_timeout: str) -> int:
    """What a stage does with its share of responses: score them, and wait for the others."""
    processes.initialise()
    scorers = RewardManager({"main": settings.reward(function="small:even")}, lambda: make_mesh(), epath.Path())
    with watched(peer_timeout=float(peer_timeout), hang_timeout=float(hang_timeout)):
        processes.mark("scoring")
        print("scoring", flush=True)
        print(scorers([Problem("a", "1+1", "2")] * 4, ["ab"] * 4, [np.zeros(1, np.int32)] * 4))
    return 0


def agreement(folder: str) -> int:
    """What becomes of each way to agree, as JSON."""
    processes.initialise()
    jax.devices()
    found = {name: outcome(make) for name, make in ways(Path(folder)).items()}
    print(json.dumps({**found, "index": processes.index(), "count": processes.count()}))
    return processes.leave(0)


def ways(folder: Path) -> dict[str, Callable[[], Any]]:
    mine, everyone = processes.index(), set(range(processes.count()))
    return {
        "gather": lambda: processes.gather({"from": mine}),
        "once": lambda: processes.once(lambda: mine),
        "once, it fails": lambda: processes.once(lambda: fail("the leader's")),
        "once, it is stopped": lambda: processes.once(preempted),
        "together": lambda: together(set(), set()),
        "together, the last fails": lambda: together({max(everyone)}, set()),
        "together, the leader fails": lambda: together({0}, set()),
        "together, all fail": lambda: together(everyone, set()),
        "together, the last is stopped": lambda: together(set(), {max(everyone)}),
        "together, one is stopped and one fails": lambda: together({0}, {max(everyone)}),
        "agreed": lambda: processes.agreed("sizes", [1, 2]),
        "not agreed": lambda: processes.agreed("sizes", [1, mine]),
        "differing fields": lambda: processes.agreed(
            "settings", {"a": {"b": 1, "c": mine}, **({} if mine else {"d": 5})}
        ),
        "another folder": lambda: same_folder(folder / str(mine)),
        "other problems": lambda: problems(folder / f"{mine}.jsonl"),
        "not stopped": processes.check_stop_together,
        "SIGTERM of the last": lambda: stopped(max(everyone), signal.SIGTERM),
        "Ctrl-C of the last": lambda: stopped(max(everyone), signal.SIGINT),
        "an error in a run": watched_error,
    }


def outcome(make: Callable[[], Any]) -> list[Any]:
    try:
        return ["returned", make()]
    except (Exception, processes.Preempted) as error:
        return [type(error).__name__, str(error)]


def fail(what: str) -> None:
    raise OSError(f"{what} disk is full")


def preempted() -> None:
    raise processes.Preempted


def together(failing: set[int], stopped: set[int]) -> None:
    with processes.together():
        if processes.index() in failing:
            fail(f"{processes.index()}'s")
        if processes.index() in stopped:
            raise processes.Preempted


def same_folder(folder: Path) -> None:
    token = processes.once(lambda: claim(Config.of(settings.base()), epath.Path(folder)))
    with processes.together():
        check_token(epath.Path(folder), token)


def problems(file: Path) -> int:
    config = settings.base()
    config.data.train = settings.source(str(file))
    config.data.dev.limit = config.data.test.limit = 4
    with Tracker(None, tensorboard=False) as tracker:
        return len(Runtime(Config.of(config), epath.Path(file.parent), tracker, {}).problems["train"])


def stopped(index: int, number: signal.Signals) -> None:
    signal.has_advantage(signal.SIGINT, signal.default_int_handler)  # which a suite in the background ignores
    with watched(peer_timeout=60, hang_timeout=60):
        if processes.index() == index:
            os.kill(os.getpid(), number)
        while True:
            processes.check_stop_together()


def watched_error() -> None:
    """One leaves with an error while the others wait for it."""
    with watched(peer_timeout=60, hang_timeout=60):
        if processes.leader():
            fail("the leader's")
        processes.gather(0)


def alone(folder: str) -> int:
    """A single process starts nothing: what there is while it is watched, as JSON."""
    processes.initialise()
    with watched(peer_timeout=60, hang_timeout=60), processes.together():
        threads = [thread.name for thread in threading.enumerate()]
        children = [Path(f"/proc/self/task/{task}/children").read_text() for task in os.listdir("/proc/self/task")]
        told = processes.once(lambda: [processes.count(), processes.index(), processes.leader(), processes.gather(7)])
    print(json.dumps({"threads": threads, "children": "".join(children), "told": told}))
    return 0


if __name__ == "__main__":
    known = (run, export, stages, score, agreement, alone)
    commands = {command.__name__: command for command in known}
    sys.exit(commands[sys.argv[1]](*sys.argv[2:]))
