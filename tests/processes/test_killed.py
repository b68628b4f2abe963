"""Kill one of two processes: the other ends soon and names it; the same command ends as if nothing had happened."""

import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import same
from launched import Launched, command

Launch = Callable[..., Launched]

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

# What for, who is killed, pattern of a file, and up to how many seconds after it appears.
KILLS = (
    ("while the first checkpoint is written", 0, "01-sft/checkpoints/2*", 0.0),
    ("while its rollouts are written, or gathered", 1, "02-warmup/rollouts/_parts/*", 0.05),
    ("in training", 0, "02-warmup/checkpoints/1", 0.5),
    ("between two stages", 1, "03-collect/manifest.json", 0.0),
)


def test_a_run_that_loses_processes_ends_like_one_that_never_did(whole: Path, launch: Launch, tmp_path: Path) -> None:
    workdir, rng = tmp_path / "broken", random.Random(0)
    for name, index, pattern, seconds in KILLS:
        launched = launch(2, 2, *command(workdir, "--config.faults.peer_timeout=5"))
        launched.wait_for(workdir, pattern, rng.random() * seconds)
        launched.send(index, signal.SIGKILL)
        statuses = launched.statuses(within=60)
        ended = {75, -signal.SIGABRT} if index == 0 else {75}  # JAX's coordination service goes with the leader
        assert statuses[index] == -signal.SIGKILL and statuses[1 - index] in ended, (name, launched.told())
        if statuses[1 - index] == 75:  # else JAX ended it, with its own words
            assert launched.said(1 - index, f"process {index} on "), (name, launched.told())
            assert launched.said(1 - index, "lost"), (name, launched.told())
    launched = launch(2, 2, *command(workdir))
    assert launched.statuses() == [0, 0], launched.told()
    same.bits(whole, workdir, ("sft", "warmup@1", "warmup", "dpo"), tmp_path / "exports")
