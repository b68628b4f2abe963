"""SIGTERM to one of two processes: both save the same step and end with the status launchers restart on."""

import fcntl
import json
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import same
from launched import Launched, command

from g2d_jax.training.checkpoint import Checkpoints

Launch = Callable[..., Launched]

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]


def stop(launched: Launched, index: int) -> None:
    launched.send(index, signal.SIGTERM)
    started = time.monotonic()
    assert launched.statuses(within=60) == [75, 75], launched.told()
    assert time.monotonic() - started < 30
    assert "stopped by SIGTERM" in launched.output(0) + launched.errors(0)


def test_a_run_that_is_stopped_ends_like_one_that_never_was(whole: Path, launch: Launch, tmp_path: Path) -> None:
    workdir = tmp_path / "stopped"
    launched = launch(2, 2, *command(workdir))
    launched.wait_for(workdir, "01-sft/checkpoints/2")
    stop(launched, 1)
    saved = Checkpoints(workdir / "01-sft" / "checkpoints").steps()
    assert saved[-1] < 6
    assert f"saved at step {saved[-1]} of 6" in launched.output(0) + launched.errors(0)
    # While the reward of the first rollouts is computed, which takes some seconds.
    launched = launch(2, 2, *command(workdir), env={"SLOW": "3"})
    launched.wait_for(workdir, "02-warmup/checkpoints")
    stop(launched, 0)
    launched = launch(2, 2, *command(workdir, "--until", "warmup"))
    assert launched.statuses() == [0, 0], launched.told()
    reference = tmp_path / "whole"
    shutil.copytree(whole, reference, ignore=shutil.ignore_patterns("03-*", "04-*", "05-*"))
    same.bits(reference, workdir, ("sft", "warmup@1", "warmup"), tmp_path / "exports")


@pytest.mark.parametrize("index", [0, 1])
def test_sigterm_while_the_leader_waits_for_the_lock_ends_both(launch: Launch, tmp_path: Path, index: int) -> None:
    """A file server may hold on to the lock of another host: the leader waits for it, its peer for the leader."""
    workdir = tmp_path / "held"
    workdir.mkdir()
    with open(workdir / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        json.dump({"host": "elsewhere", "pid": 1}, lock)
        lock.flush()
        launched = launch(2, 1, *command(workdir))
        assert launched.said(0, "is locked by process 1 on 'elsewhere'", within=100), launched.told()
        launched.send(index, signal.SIGTERM)
        assert launched.statuses(within=60) == [75, 75], launched.told()
    assert not (workdir / "config.json").exists()


def test_sigterm_before_the_run_has_begun_ends_both(launch: Launch, tmp_path: Path) -> None:
    """One process waits for the other to come, and, once it has, goes on to where both can be told."""
    launched = launch(2, 1, "-m", "g2d_jax", *command(tmp_path / "both")[1:])
    for process in (0, 1):  # each imports JAX
        while "jaxlib" not in Path(f"/proc/{launched.running[process].pid}/maps").read_text():
            assert launched.alive()
            time.sleep(0.01)
    launched.send(1, signal.SIGTERM)
    assert launched.statuses(within=120) == [75, 75], launched.told()
    assert "stopped by SIGTERM" in launched.errors(0)
    assert not (tmp_path / "both" / "01-sft").exists()


def test_sigterm_while_the_others_have_not_come_ends_the_one_that_waits(launch: Launch, tmp_path: Path) -> None:
    launched = launch(2, 1, "-m", "g2d_jax", *command(tmp_path / "alone")[1:])
    launched.send(1, signal.SIGKILL)
    assert launched.said(0, "waiting for the others", within=100), launched.told()
    launched.send(0, signal.SIGTERM)
    assert launched.statuses(within=60) == [75, -signal.SIGKILL], launched.told()
