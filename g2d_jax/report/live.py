"""Live progress of a run: progress.json, which `g2d status` reads, and report.html, which reloads
itself in the browser."""

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
"""Seconds between two updates of progress.json on a local disk."""

PAUSE_ON_STORE = 30.0
"""The same on an object store, where each update is a paid request."""

SHORTEST = 30.0
"""Least seconds between two pages."""

SHARE = 0.01
"""Largest share of one core's time for building pages."""

RENEWED = (
    "This page reloads itself while the run works. At its end it becomes the whole report, which "
    "g2d report can write at any time."
)


COLUMNS = {"prompt": 120, "completion": 400, "answer": 60, "reward": 20, "verdict": 20}
"""Columns of the last completions, and the most characters of each."""


@contextlib.contextmanager
def followed(session: Session) -> Iterator[None]:
    """Report the progress of a run, whose work directory this process holds, during the block.

    A thread writes progress.json and the page; an error in it is one warning. progress.json is
    removed when the block ends. After an error, a last page shows it, without the slower parts of
    the report, since little time may be left; the caller writes the page of a successful run.
    """
    follower = _Follower(session)
    pause = PAUSE if storage.is_local(session.workdir) else PAUSE_ON_STORE
    try:
        # Without retries: a late page must not overwrite the final one.
        with repeating((pause, follower.look)):
            follower.look()
            yield
    except BaseException as error:
        session.tracker.end(_ended_by(error))
        follower.end()
        raise
    finally:
        follower.remove_progress()


def _ended_by(error: BaseException) -> Ended:
    if isinstance(error, processes.Preempted):
        return Ended("signal", error.cause)
    if isinstance(error, KeyboardInterrupt):
        return Ended("signal", processes.CTRL_C)
    return Ended("error", without_secrets(str(error) or repr(error)))


class _Follower:
    """Writes the progress of a running run each time that `look` is called."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._next_page = 0.0
        self._warned: set[str] = set()

    def look(self) -> None:
        """Write progress.json, and the page when it is due."""
        with self._only_warned():
            self._write_progress()
        if time.monotonic() < self._next_page:
            return
        began, every = time.thread_time(), SHORTEST
        with self._only_warned():
            report = page_of(self._session)
            html(report)  # the time to render figures decides when the next page is due
            every = max(SHORTEST, (time.thread_time() - began) / SHARE)
            self._write(report._replace(live=Live(time.time(), every)))
        self._next_page = time.monotonic() + every

    def _write_progress(self) -> None:
        """Write the state of the progress bar, and the stage's peak host memory. Without a bar,
        remove the file, since it describes a finished activity."""
        at = self._session.tracker.screen.under_way
        if at is None:
            self.remove_progress()
            return
        progress = {"time": time.time(), **at._asdict()}
        if self._session.tracker.peak is not None:
            progress["peak_memory_bytes"] = self._session.tracker.peak.so_far
        storage.write_json(self._session.workdir / PROGRESS, progress)

    def remove_progress(self) -> None:
        """Remove progress.json, also one left by a killed run."""
        with self._only_warned():
            (self._session.workdir / PROGRESS).unlink(missing_ok=True)

    def end(self) -> None:
        """Write the page of a failed run."""
        with self._only_warned():
            run = read_run(self._session.workdir, lenient=True, has_ended=True)
            self._write(summary(run))

    def _write(self, report: Report) -> None:
        storage.write_bytes(self._session.workdir / PAGE, html(report).encode())

    @contextlib.contextmanager
    def _only_warned(self) -> Iterator[None]:
        """Run a block that only displays progress: an error becomes one warning, and the run
        continues."""
        try:
            yield
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if text not in self._warned:
                self._warned.add(text)
                self._session.tracker.say(f"WARNING: live progress is off: {text}", "yellow")


def page_of(session: Session) -> Report:
    """Build the live page of a run: its stages, the last completions, the evaluations and curves so
    far."""
    run = read_run(session.workdir, lenient=True)
    short = summary(run)
    states = stage_states(session.workdir, session.config, "this process")
    at = next((stage for stage in states if stage.state.startswith("running")), None)
    headline = "Running."
    if at:
        headline = f"Running: {at.name}, {at.state}."
    samples = samples_table(session.tracker.last_samples)
    now: list[Part | None] = [stages_table(states), Note(RENEWED), samples]
    parts = {"now": now, **short.parts}
    # A running run is no reason for a warning.
    return short._replace(headline=headline, warnings=run.warnings, parts=parts)


def stages_table(states: Sequence[StageState]) -> Table:
    """Show the progress of each stage."""
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
    """Show the latest completions that the run recorded."""
    if last is None:
        return table("", [])
    rows = []
    for sample in last.rows:
        shown = [name for name in COLUMNS if name in sample]
        rows.append({name: shorten(str(sample[name]).strip(), COLUMNS[name]) for name in shown})
    return table(f"Last completions: {last.stage}, step {last.step}", rows)
