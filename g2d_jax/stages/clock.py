"""Where the time of a run goes: seconds on the clock by activity, each second counted once.

    with clock.doing("generation"):          what is entered inside takes its seconds from what is around it
        ...

Tracing and compiling is an activity of its own wherever it happens: JAX tells when a program was ready and what that
took, and these seconds are taken from the activity under way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax

from g2d_jax.accounting import ACTIVITIES


class Clock:
    """Seconds by activity since it was made. For one thread; others that compile meanwhile do not count."""

    def __init__(self) -> None:
        self._spent = dict.fromkeys(ACTIVITIES, 0.0)
        self._activity = ""
        self._mark, self._compiled = time.perf_counter(), _compiling.seconds()

    @contextmanager
    def doing(self, activity: str) -> Iterator[None]:
        """Count the time of a block as this one of `ACTIVITIES`."""
        around = self._switch(activity)
        try:
            yield
        finally:
            self._switch(around)

    def read(self) -> dict[str, float]:
        """Seconds so far: {"generation_seconds": …} for each activity."""
        self._switch(self._activity)
        return {f"{activity}_seconds": seconds for activity, seconds in self._spent.items()}

    def since(self, before: Mapping[str, float]) -> dict[str, float]:
        """Seconds since an earlier `read`, by name."""
        return {name: seconds - before[name] for name, seconds in self.read().items()}

    def _switch(self, activity: str) -> str:
        """Close the account of what was done until now; returns what that was."""
        now, compiled = time.perf_counter(), _compiling.seconds()
        compiling = min(compiled - self._compiled, now - self._mark)
        self._spent["compilation"] += compiling
        if self._activity:
            self._spent[self._activity] += now - self._mark - compiling
        before, self._activity, self._mark, self._compiled = self._activity, activity, now, compiled
        return before


class _Compiling(threading.local):
    """Seconds that this thread spent tracing, lowering and compiling, from JAX's events.

    An event comes at the end of what it measures, and one inside another, as the tracing of a function within a
    function, has come before it: of overlapping spans their union counts.
    """

    def __init__(self) -> None:
        self.whole, self.spans = 0.0, list[tuple[float, float]]()

    def heard(self, event: str, duration_secs: float, **_: Any) -> None:
        if not event.startswith("/jax/core/compile/"):
            return
        end = time.perf_counter()
        start = end - duration_secs
        while self.spans and self.spans[-1][0] >= start:
            first, last = self.spans.pop()
            self.whole -= last - first
        start = max(start, self.spans[-1][1]) if self.spans else start
        self.spans = [*self.spans[-64:], (start, end)]
        self.whole += end - start

    def seconds(self) -> float:
        return self.whole


_compiling = _Compiling()
jax.monitoring.register_event_duration_secs_listener(_compiling.heard)
