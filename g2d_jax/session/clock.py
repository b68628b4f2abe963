"""A clock of a stage's activities.

    with clock.doing("generation"):          an inner block's seconds do not count for the outer one
        ...
    clock.launched("training", arrays)       devices work on it until the arrays are ready

Programs run while the host does something else or waits for the devices. Each second counts for the
first of these that applies:

    1. compilation, in any activity: JAX reports the start and end of its phases
    2. the current activity of the host
    3. the activity whose program is running on the devices
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
    """Seconds by activity since its creation, for one thread; compilation in others does not
    count."""

    def __init__(self) -> None:
        self._spent = dict.fromkeys(ACTIVITIES, 0.0)
        self._activity = ""
        # the activity of the last program, and its results
        self._running: tuple[str, Sequence[Any]] | None = None
        self._mark, self._compiled = time.perf_counter(), compiling.seconds()

    @contextmanager
    def doing(self, activity: str) -> Iterator[None]:
        """Count the time of a block as `activity`, one of `ACTIVITIES`."""
        around = self._switch(activity)
        try:
            yield
        finally:
            self._switch(around)

    def launched(self, activity: str, arrays: Sequence[jax.Array]) -> None:
        """Count the devices' time as this activity until the arrays are computed. No program may
        donate these arrays."""
        self._switch(self._activity)
        self._running = activity, arrays

    def settle(self) -> None:
        """Wait for the launched program and count that time as its activity. Call it before the
        host waits for a later program."""
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
        """Count the time so far for the current activity, and switch; return the earlier one."""
        now, compiled = time.perf_counter(), compiling.seconds()
        seconds = min(compiled - self._compiled, now - self._mark)
        self._spent["compilation"] += seconds
        if charged := self._activity or self._running_activity():
            self._spent[charged] += now - self._mark - seconds
        before, self._activity, self._mark, self._compiled = self._activity, activity, now, compiled
        return before

    def _running_activity(self) -> str:
        """Return the activity whose program runs on the devices; "" if none does."""
        if self._running is not None and all(array.is_ready() for array in self._running[1]):
            self._running = None
        return self._running[0] if self._running is not None else ""


jax.monitoring.register_scalar_listener(compiling.start)
jax.monitoring.register_event_duration_secs_listener(compiling.end)
