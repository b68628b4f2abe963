"""A clock of a stage's activities.

    with clock.doing("generation"):          what is entered inside takes its seconds from what is around it
        ...
    clock.launched("training", arrays)       devices are at it until the arrays are there, the host goes on

Programs run while the host does something else, or waits in the next line that needs the device. So
a second counts for

    1. compilation, wherever it happens: JAX reports when a phase of it begins and ends
    2. the activity that the host is in
    3. where it is in none: the one whose program was running all the time
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from g2d_jax.runtime.compile_times import compiling
from g2d_jax.session.stage_result import ACTIVITIES


class Clock:
    """Seconds by activity since the clock was made. For one thread; others that compile meanwhile
    do not count."""

    def __init__(self) -> None:
        self._spent = dict.fromkeys(ACTIVITIES, 0.0)
        self._activity = ""
        # the activity of the last program, and its results
        self._running: tuple[str, Sequence[Any]] | None = None
        self._mark, self._compiled = time.perf_counter(), compiling.seconds()

    @contextmanager
    def doing(self, activity: str) -> Iterator[None]:
        """Count the time of a block as this one of `ACTIVITIES`."""
        around = self._switch(activity)
        try:
            yield
        finally:
            self._switch(around)

    def launched(self, activity: str, arrays: Sequence[jax.Array]) -> None:
        """Count the devices' time as this activity until the arrays, which no program takes away,
        are computed."""
        self._switch(self._activity)
        self._running = activity, arrays

    def settle(self) -> None:
        """Wait for what was launched, on its own account: before the host waits for a program that
        comes behind it."""
        if self._running is not None:
            activity, arrays = self._running
            with self.doing(activity):
                jax.block_until_ready(arrays)
            self._running = None

    def read(self) -> dict[str, float]:
        """Return the seconds so far: {"generation_seconds": …} for each activity."""
        self._switch(self._activity)
        return {f"{activity}_seconds": seconds for activity, seconds in self._spent.items()}

    def since(self, before: Mapping[str, float]) -> dict[str, float]:
        """Return the seconds since an earlier `read`, by name."""
        return {name: seconds - before[name] for name, seconds in self.read().items()}

    def _switch(self, activity: str) -> str:
        """Close the account of the present activity; return that activity."""
        now, compiled = time.perf_counter(), compiling.seconds()
        seconds = min(compiled - self._compiled, now - self._mark)
        self._spent["compilation"] += seconds
        if charged := self._activity or self._under_way():
            self._spent[charged] += now - self._mark - seconds
        before, self._activity, self._mark, self._compiled = self._activity, activity, now, compiled
        return before

    def _under_way(self) -> str:
        """Return the activity whose program runs on the devices; "" if none does."""
        if self._running is not None and all(array.is_ready() for array in self._running[1]):
            self._running = None
        return self._running[0] if self._running is not None else ""


jax.monitoring.register_scalar_listener(compiling.start)
jax.monitoring.register_event_duration_secs_listener(compiling.end)
