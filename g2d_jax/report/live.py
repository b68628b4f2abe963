"""Follow a run while it lives: progress.json, which `g2d status` reads, and report.html, which the
browser that shows it renews."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from g2d_jax.records import Ended
from g2d_jax.report import format as fmt
from g2d_jax.report.markup import shorten
from g2d_jax.report.page import Live, Note, Part, Report, html
from g2d_jax.report.progress import PROGRESS, StageState, stage_states
from g2d_jax.report.run import summary
from g2d_jax.report.runs import read_run
from g2d_jax.report.tables import Table, gibibytes, table
from g2d_jax.runtime import processes, storage
from g2d_jax.runtime.threads import repeating
from g2d_jax.runtime.tracking import Samples
from g2d_jax.session.session import Session
from g2d_jax.session.workdir import without_secrets

PAGE = "report.html"

PAUSE = 2.0
"""Seconds between two writings of progress.json on a local disk."""

PAUSE_ON_STORE = 30.0
"""The same on an object store, where each is a request that costs."""

SHORTEST = 30.0
"""Seconds between two pages, at least."""

SHARE = 0.01
"""The share of the time that making pages may take, of one core."""

RENEWED = (
    "This page renews itself while the run lives. At its end it is the whole report, as g2d report "
    "writes it at any time."
)


COLUMNS = {"prompt": 120, "completion": 400, "answer": 60, "reward": 20, "verdict": 20}
"""Columns of the last completions, and the characters that each shows at most."""


@contextlib.contextmanager
def followed(session: Session) -> Iterator[None]:
    """Follow a run, whose work directory this process holds, while the block runs.

    A thread writes progress.json and the page; an error in it is a warning, said once. However the
    block ends, progress.json goes. Where it ends badly a last page says how, without what only the
    whole report has, since little time may be left; the page of a good end is the caller's.
    """
    follower = _Follower(session)
    pause = PAUSE if storage.is_local(session.workdir) else PAUSE_ON_STORE
    try:
        # Without patience: a page of a run under way must not be written over that of its end.
        with repeating((pause, follower.look)):
            follower.look()
            yield
    except BaseException as error:
        session.tracker.end(_ended_by(error))
        follower.end()
        raise
    finally:
        follower.untell()


def _ended_by(error: BaseException) -> Ended:
    if isinstance(error, processes.Preempted):
        return Ended("signal", error.cause)
    if isinstance(error, KeyboardInterrupt):
        return Ended("signal", processes.CTRL_C)
    return Ended("error", without_secrets(str(error) or repr(error)))


class _Follower:
    """Writes what there is to see of a run under way, each time that it looks."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._next_page = 0.0
        self._warned: set[str] = set()

    def look(self) -> None:
        """Write progress.json, and the page where it is due."""
        with self._only_warned():
            self._tell()
        if time.monotonic() < self._next_page:
            return
        began, every = time.thread_time(), SHORTEST
        with self._only_warned():
            report = page_of(self._session)
            html(report)  # draws the figures: then it is known when the next page is due
            every = max(SHORTEST, (time.thread_time() - began) / SHARE)
            self._write(report._replace(live=Live(time.time(), every)))
        self._next_page = time.monotonic() + every

    def _tell(self) -> None:
        """Write what the bar shows, and the host memory that the stage took so far. Without a bar
        there is no such file: the last one's steps are not those of what goes on now."""
        at = self._session.tracker.screen.under_way
        if at is None:
            self.untell()
            return
        told = {"time": time.time(), **at._asdict()}
        if self._session.tracker.peak is not None:
            told["peak_memory_bytes"] = self._session.tracker.peak.so_far
        storage.write_json(self._session.workdir / PROGRESS, told)

    def untell(self) -> None:
        """Remove progress.json, also that of a run that was killed."""
        with self._only_warned():
            (self._session.workdir / PROGRESS).unlink(missing_ok=True)

    def end(self) -> None:
        """Write the page of a run that ended badly."""
        with self._only_warned():
            run = read_run(self._session.workdir, lenient=True, has_ended=True)
            self._write(summary(run))

    def _write(self, report: Report) -> None:
        storage.write_bytes(self._session.workdir / PAGE, html(report).encode())

    @contextlib.contextmanager
    def _only_warned(self) -> Iterator[None]:
        """Run a block that shows what is on disk: an error in it is a warning, said once, for the
        run goes on."""
        try:
            yield
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if text not in self._warned:
                self._warned.add(text)
                self._session.tracker.say(f"WARNING: the run is not followed: {text}", "yellow")


def page_of(session: Session) -> Report:
    """Put together what there is to see of a run under way: its stages, the last completions, the
    evaluations and curves so far."""
    run = read_run(session.workdir, lenient=True)
    short = summary(run)
    states = stage_states(session.workdir, session.config, "this process")
    at = next((stage for stage in states if stage.state.startswith("running")), None)
    headline = "Under way."
    if at:
        headline = f"Under way: {at.name}, {at.state}."
    samples = samples_table(session.tracker.last_samples)
    now: list[Part | None] = [stages_table(states), Note(RENEWED), samples]
    parts = {"now": now, **short.parts}
    # That it is under way is no warning.
    return short._replace(headline=headline, warnings=run.warnings, parts=parts)


def stages_table(states: Sequence[StageState]) -> Table:
    """Show how far each stage is."""
    rows = []
    for stage in states:
        rows.append(
            {
                "stage": stage.name,
                "kind": stage.kind,
                "state": stage.state,
                "now": stage.note or fmt.UNKNOWN,
                "time": fmt.duration(stage.seconds),
                "host memory": gibibytes(stage.peak_bytes),
            }
        )
    return table("Stages", rows)


def samples_table(last: Samples | None) -> Table:
    """Show the completions that the run kept last."""
    if last is None:
        return table("", [])
    rows = []
    for sample in last.rows:
        shown = [name for name in COLUMNS if name in sample]
        rows.append({name: shorten(str(sample[name]).strip(), COLUMNS[name]) for name in shown})
    return table(f"Last completions: {last.stage}, step {last.step}", rows)
