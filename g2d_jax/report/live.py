"""Follow a run while it lives: progress.json, which `g2d status` reads, and report.html, which the
browser that shows it renews."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

from g2d_jax.report import format as fmt
from g2d_jax.report.markup import shorten
from g2d_jax.report.page import Live, Note, Part, Report, html
from g2d_jax.report.progress import PROGRESS, StageState, stage_states
from g2d_jax.report.read import read_run
from g2d_jax.report.run import state, summary, write_run
from g2d_jax.report.tables import Table, gibibytes, table
from g2d_jax.runtime import processes, storage
from g2d_jax.runtime.threads import repeating
from g2d_jax.runtime.tracking import Samples
from g2d_jax.session.session import Session
from g2d_jax.workdir import without_secrets

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
def followed(session: Session, *, is_reported: bool) -> Iterator[None]:
    """Follow a run, whose work directory this process holds, while the block runs.

    is_reported: whether the caller writes the page of a run that ends well. A thread writes
    progress.json and the page; an error in it is a warning, said once. However the block ends,
    progress.json goes, and the page of a run that ends badly, or that nobody else reports, says how
    it stands, and renews itself no more.
    """
    follower = _Follower(session)
    pause = PAUSE if storage.is_local(session.workdir) else PAUSE_ON_STORE
    ending = "as it was asked to"
    is_left = not is_reported
    try:
        # A page that cannot be written in time holds no end of the run back.
        with repeating((pause, follower.look), patience=SHORTEST):
            try:
                follower.look()
                yield
            finally:
                follower.stop()
    except processes.Preempted as stopped:
        ending, is_left = f"by {stopped.cause}", True
        raise
    except KeyboardInterrupt:
        ending, is_left = f"by {processes.CTRL_C}", True
        raise
    except BaseException as error:
        ending, is_left = f"by an error: {without_secrets(str(error) or repr(error))}", True
        raise
    finally:
        follower.end(ending if is_left else None)


class _Follower:
    """Writes what there is to see of a run under way, each time that it looks."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._next_page, self._every = 0.0, SHORTEST
        self._warned: set[str] = set()
        # One that was killed left its file, and this one's first bar may open late.
        self._is_told = True
        self._is_over = False
        self._writing = threading.Lock()

    def look(self) -> None:
        """Write progress.json, and the page where it is due."""
        with self._only_warned():
            self._tell()
        if self._is_over or time.monotonic() < self._next_page:
            return
        began = time.thread_time()
        with self._only_warned():
            page = html(page_of(self._session, Live(time.time(), self._every)))
            with self._writing:
                # The last page may be there by now.
                if not self._is_over:
                    storage.write_bytes(self._session.workdir / PAGE, page.encode())
        self._every = max(SHORTEST, (time.thread_time() - began) / SHARE)
        self._next_page = time.monotonic() + self._every

    def _tell(self) -> None:
        """Write what the bar shows, and the host memory that the stage took so far. Without a bar
        there is no such file: the last one's steps are not those of what goes on now."""
        at = self._session.tracker.screen.under_way
        with self._writing:
            if self._is_over:
                return
            if at is None:
                self._untell()
                return
            told = {"time": time.time(), **at._asdict()}
            if self._session.peak is not None:
                told["peak_memory_bytes"] = self._session.peak.so_far
            self._is_told = True
            storage.write_json(self._session.workdir / PROGRESS, told)

    def _untell(self) -> None:
        if self._is_told:
            (self._session.workdir / PROGRESS).unlink(missing_ok=True)
            self._is_told = False

    def stop(self) -> None:
        """Write nothing more from here on but the end."""
        self._is_over = True

    def end(self, ending: str | None) -> None:
        """Remove progress.json, and write the page of a run that is over. ending: how it stopped,
        None where others write the page."""
        # A write that hangs is not waited for without end.
        is_free = self._writing.acquire(timeout=SHORTEST)
        try:
            with self._only_warned():
                self._untell()
                if ending is not None:
                    write_run(self._session.workdir, figures=False, ending=ending)
        finally:
            if is_free:
                self._writing.release()

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


def page_of(session: Session, live: Live) -> Report:
    """Put together what there is to see of a run under way: its stages, the last completions, the
    evaluations and curves so far."""
    run = read_run(session.workdir, lenient=True)
    short = summary(run, every_metric=False)
    states = stage_states(session.workdir, session.config, "this process")
    at = next((stage for stage in states if stage.state.startswith("running")), None)
    headline = f"Under way: {at.name} is {at.state}." if at else "Under way."
    now: list[Part | None] = [
        stages_table(states),
        Note(RENEWED),
        samples_table(session.tracker.last_samples),
    ]
    # That it is under way is no warning.
    warnings = [warning for warning in short.warnings if warning != state(run)]
    parts = {"now": now, **short.parts}
    return short._replace(headline=headline, warnings=warnings, parts=parts, live=live)


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
        cells = {}
        for name, limit in COLUMNS.items():
            if name in sample:
                cells[name] = shorten(str(sample[name]).strip(), limit)
        rows.append(cells)
    return table(f"Last completions: {last.stage}, step {last.step}", rows)
