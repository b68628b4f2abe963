"""One of two processes is killed, stopped, held, or hangs: all end soon and name it; the same
command continues."""

import json
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from alike import differences
from launched import ENDS, Launch, Launched, command

from g2d_jax.training.checkpoint import Checkpoints

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

# by JAX, whose coordination service goes with the leader: it may be the first to tell
ABORTED = -signal.SIGABRT

# What for, who is killed, pattern of a file, and up to how many seconds after it appears.
KILLS = (
    ("while the first checkpoint is written", 0, "01-sft/checkpoints/2*", 0.0),
    ("while its rollouts are written, or gathered", 1, "02-warmup/rollouts/_parts/*", 0.05),
    ("in training", 0, "02-warmup/checkpoints/1", 0.5),
    ("between two stages", 1, "03-collect/manifest.json", 0.0),
)


def ends(launched: Launched, survivor: int, *words: str) -> None:
    """The other one ends to be started again, and names the one that is lost; or JAX ends it, with
    its own words."""
    status = launched.running[survivor].wait(90)
    assert status in ((75, ABORTED) if survivor else (75,)), launched.told()
    assert status == ABORTED or all(launched.said(survivor, word) for word in words), (
        launched.told()
    )


def test_a_run_that_loses_processes_ends_like_one_that_never_did(
    whole: Path, launch: Launch, tmp_path: Path
) -> None:
    workdir, rng = tmp_path / "broken", random.Random(0)
    for _, index, pattern, seconds in KILLS:
        launched = launch(2, 2, *command(workdir, "--config.faults.peer_timeout=5"))
        launched.wait_for(workdir, pattern, rng.random() * seconds)
        launched.send(index, signal.SIGKILL)
        ends(launched, 1 - index, f"process {index} on ", "lost")
    ends_like(whole, workdir, launch)


def ends_like(whole: Path, workdir: Path, launch: Launch) -> None:
    """The same command ends the run, to the bit like the one that was never disturbed."""
    launched = launch(2, 2, *command(workdir))
    assert launched.statuses() == [0, 0], launched.told()
    assert differences(whole, workdir) == []


def stop(launched: Launched, index: int, within: float = 30.0) -> None:
    launched.send(index, signal.SIGTERM)
    assert launched.statuses(within) == [75, 75], launched.told()
    assert "stopped by SIGTERM" in launched.running[0].stdout + launched.running[0].stderr


def test_a_run_that_is_stopped_ends_like_one_that_never_was(
    whole: Path, launch: Launch, tmp_path: Path
) -> None:
    workdir = tmp_path / "stopped"
    launched = launch(2, 2, *command(workdir))
    launched.wait_for(workdir, "01-sft/checkpoints/2")
    stop(launched, 1)
    saved = Checkpoints(workdir / "01-sft" / "checkpoints").steps()
    assert saved[-1] < 6
    assert (
        f"saved at step {saved[-1]} of 6" in launched.running[0].stdout + launched.running[0].stderr
    )
    # While the reward of the first rollouts is computed, which takes some seconds.
    launched = launch(2, 2, *command(workdir), env={"SLOW": "3"})
    launched.wait_for(workdir, "02-warmup/checkpoints")
    stop(launched, 0)
    ends_like(whole, workdir, launch)


def test_sigterm_before_the_run_has_begun_ends_both(launch: Launch, tmp_path: Path) -> None:
    """One process waits for the other to come, and, once it has, goes on to where both can be
    told."""
    launched = launch(2, 1, *command(tmp_path / "both"), env={"STOPPED": "1"})
    assert launched.statuses(120) == [75, 75], launched.told()
    assert not (tmp_path / "both" / "01-sft").exists()


def test_sigterm_while_the_others_have_not_come_ends_the_one_that_waits(
    launch: Launch, tmp_path: Path
) -> None:
    launched = launch(2, 1, *command(tmp_path / "alone"))
    launched.send(1, signal.SIGKILL)
    assert launched.said(0, "waiting for the others", within=100), launched.told()
    launched.send(0, signal.SIGTERM)
    assert launched.statuses(within=60) == [75, -signal.SIGKILL], launched.told()


@pytest.fixture
def scoring(launch: Launch) -> Launch:
    """Two processes that score some responses, when both are where they wait for each other."""

    def begin(peer_timeout: int, hang_timeout: int, **env: str) -> Launched:
        launched = launch(2, 1, "score", peer_timeout, hang_timeout, env=env)
        limit = time.monotonic() + ENDS
        while not all("scoring" in process.stdout for process in launched.running):
            assert time.monotonic() < limit and launched.alive(), launched.told()
            time.sleep(0.05)
        return launched

    return begin


def test_a_reward_function_that_never_returns_ends_both(scoring: Launch) -> None:
    launched = scoring(60, 8, HANGS="1")
    ends(
        launched,
        0,
        "no process made progress for",
        "the others wait for process 1 on ",
        "(scoring)",
        "Current thread",
    )
    # where it hangs
    ends(
        launched, 1, "no process made progress for", "the others wait for process 1 on ", "in even"
    )


def test_a_process_that_is_held_is_lost(scoring: Launch) -> None:
    launched = scoring(5, 300, SLOW="3")
    launched.send(1, signal.SIGSTOP)
    ends(launched, 0, "process 1 on ", "lost")


def test_a_process_that_compiles_or_works_longer_is_waited_for(launch: Launch) -> None:
    """Gloo gives up after 30 s: where devices talk for the first time, and in every
    reduce-scatter."""
    launched = launch(2, 2, "late", 40, env={"SKEW": "0:40:scattered"})
    assert launched.statuses(300) == [0, 0], launched.told()
    own = [json.loads(process.stdout.splitlines()[-1]) for process in launched.running]
    numbers = np.arange(32.0)
    expected = [2 * numbers.reshape(4, 8).sum(axis=0)] * 2 + [numbers + 1]
    for each, *parts in zip(expected, *own, strict=True):
        assert np.concatenate(parts).tolist() == each.tolist()
    assert launched.said(
        1, "waits for process 0, which may still compile, before jit(scattered)"
    ), launched.told()
