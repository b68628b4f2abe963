"""The program that this process compiles now, and the seconds spent on compiling.

JAX reports the start and the end of tracing, lowering and compiling each function (jax.monitoring),
nested if a function calls another. The importer of JAX passes these on (session/clock.py); this
module does not import it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_EVENTS = "/jax/core/compile/"
_COMPILED, _WAITING = f"{_EVENTS}backend_compile_duration", f"{_EVENTS}waiting"
_PAUSE = 1.0  # most seconds between two phases of one program: tracing, lowering, compiling


@dataclass
class _Thread:
    """The account of one thread. phases: start times of the current phases, outermost first.
    program: the outermost one's name; began, ended: start of its first phase and end of its last.
    seconds: of all finished phases."""

    phases: list[float] = field(default_factory=list)
    program: str = ""
    began: float = 0.0
    ended: float = -_PAUSE
    seconds: float = 0.0


class Compiling:
    """Seconds of compiling by thread, and the current program in any of them."""

    def __init__(self) -> None:
        self._threads: dict[int, _Thread] = {}
        self._programs: dict[str, dict[str, float]] = {}

    def start(self, event: str, value: float, **fields: str | int) -> None:
        """Listen to scalar events: a phase of the function fields["fun_name"] begins."""
        if not event.startswith(_EVENTS):
            return
        account, now = self._account(), time.perf_counter()
        if not account.phases:
            program = str(fields.get("fun_name", "")).removeprefix("jit(").removesuffix(")")
            if program != account.program or now - account.ended > _PAUSE:
                account.began = now
            account.program = program
        account.phases.append(now)

    def end(self, event: str, duration_secs: float, **fields: str | int) -> None:
        """Listen to durations: the last phase that began has ended."""
        account = self._account()
        if not event.startswith(_EVENTS) or not account.phases:
            return
        began, now = account.phases.pop(), time.perf_counter()
        if not account.phases:
            account.ended, account.seconds = now, account.seconds + now - began
            if event != _WAITING:
                program = self._programs.setdefault(
                    account.program, {"compiled": 0, "seconds": 0.0}
                )
                program["seconds"] += now - began
                program["compiled"] += event == _COMPILED

    @contextmanager
    def waiting(self, program: str) -> Iterator[None]:
        """Count a block, in which this thread waits for another one's compilation, as compiling."""
        self.start(_WAITING, 0.0, fun_name=program)
        try:
            yield
        finally:
            self.end(_WAITING, 0.0)

    def seconds(self) -> float:
        """Return this thread's seconds of finished phases; nested phases count once."""
        return self._account().seconds

    def take_programs(self) -> dict[str, dict[str, float]]:
        """Return, for every program since the last call, its compilations and their seconds of wall
        time in any thread, including tracing and lowering. A program read from a cache counts
        too."""
        taken, self._programs = self._programs, {}
        return {name: program for name, program in taken.items() if program["compiled"]}

    def under_way(self) -> tuple[str, float] | None:
        """Return the program that any thread compiles now, and the seconds so far; None if there is
        none."""
        now = time.perf_counter()
        busy = [
            (account.program, now - account.began)
            for account in list(self._threads.values())
            if account.phases
        ]
        return max(busy, key=lambda program: program[1], default=None)

    def _account(self) -> _Thread:
        return self._threads.setdefault(threading.get_ident(), _Thread())


compiling = Compiling()
"""The account of this process."""
