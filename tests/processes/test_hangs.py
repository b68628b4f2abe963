"""A process that hangs, or is held, ends all of them within a bounded time, with a message that names it."""

import signal
import time
from collections.abc import Callable

import pytest
from launched import ENDS, HERE, Launched

Launch = Callable[..., Launched]

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]


def begun(launched: Launched) -> None:
    """Until both are where they wait for each other."""
    limit = time.monotonic() + ENDS
    while not all("scoring" in launched.output(index) for index in (0, 1)):
        assert time.monotonic() < limit and launched.alive(), launched.told()
        time.sleep(0.05)


def test_a_reward_function_that_never_returns_ends_both(launch: Launch) -> None:
    launched = launch(2, 1, HERE / "several.py", "score", "60", "8", env={"HANGS": "1"})
    begun(launched)
    statuses = launched.statuses(within=60)
    assert statuses[0] == 75 and statuses[1] in (75, -signal.SIGABRT), launched.told()  # it may go with the leader
    for index in [i for i in (0, 1) if statuses[i] == 75]:
        assert "no process got on for" in launched.errors(index)
        assert "the others wait for process 1 on " in launched.errors(index)
        assert "(scoring)" in launched.errors(index)


@pytest.mark.parametrize("held", [1, 0])
def test_a_process_that_is_held_is_lost(held: int, launch: Launch) -> None:
    launched = launch(2, 1, HERE / "several.py", "score", "5", "300", env={"SLOW": "3" if held else "1"})
    begun(launched)
    launched.send(held, signal.SIGSTOP)
    status = launched.running[1 - held].wait(90)
    assert status in ((75,) if held else (75, -signal.SIGABRT)), launched.told()
    if status == 75:  # else JAX ended it, with its own words
        assert launched.said(1 - held, f"process {held} on "), launched.told()
        assert launched.said(1 - held, "lost"), launched.told()
