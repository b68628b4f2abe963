"""A run: a small graph of stages over one work directory. Read from the top; this is the order of
execution.

    problems ─► sft ─► warm-up (online GRPO) ─► collect (rollouts ► verify ► pairs) ─► offline DPO ─► evaluate ─► report
                             └─► the best of its checkpoints

Stages name their inputs. A stage is finished when its manifest exists. The same command resumes a
run.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from etils import epath
from ml_collections import ConfigDict

from g2d_jax.config import Config
from g2d_jax.config.graph import plan
from g2d_jax.records import Ended
from g2d_jax.rewards.functions import RewardFunction
from g2d_jax.runtime import processes, storage
from g2d_jax.runtime.tracking import Tracker
from g2d_jax.session.workdir import absolute, has_begun
from g2d_jax.stages import host_memory, run_issues
from g2d_jax.stages.run_stages import (
    compile_ahead,
    open_session,
    require_packages,
    run_stage,
)

if TYPE_CHECKING:
    from g2d_jax.report.result import Result
    from g2d_jax.session.session import Objectives, Session


def run(
    config: ConfigDict | Config,
    workdir: storage.PathLike,
    *,
    reward: RewardFunction | None = None,
    objectives: Objectives | None = None,
    until: str | None = None,
) -> Result:
    """Run, or continue, every stage of a config in a work directory; return the records of its
    finished stages by name, with accuracies, policies and the report (report/result.py).

    config: relative paths are relative to the working directory; those of a Config must be
    absolute.
    reward: a function with TRL's signature in place of reward.function. objectives: stage -> the
    function that builds its loss (see training/objectives.py; its sums must count "tokens", or
    "pairs" in a stage that trains on pairs: offline, and online with a DPO loss).
    until: stop after this stage. Raises ValueError if the work directory has other identity
    settings, reward or losses, or is in use, and StopRun if a stage cannot usefully go on.
    """
    folder = absolute(workdir)
    settings, warnings = run_issues.checked(config, until)
    order = plan(settings)
    require_packages(settings)
    own = reward, objectives or {}
    with open_session(settings, order, folder, until or "", *own, warnings) as (session, found):
        names = order.until(until)
        compile_ahead(session, names)
        if not processes.on_leader(lambda: has_begun(folder)):
            host_memory.show(session)
        with _followed(session):
            for name in names:
                run_stage(session, name, order, found)
        if len(names) < len(order.order):
            session.tracker.end(Ended("until"))
        processes.on_leader(lambda: conclude(session.workdir, session.tracker))
        from g2d_jax.report.result import Result  # here: stages run without reports

        return Result(session.workdir)


def _followed(session: Session) -> contextlib.AbstractContextManager[None]:
    """Let the leader write a page that shows the progress of the run."""
    if not processes.leader():
        return contextlib.nullcontext()
    from g2d_jax.report.live import PAGE, followed  # here: it loads the plotting library

    command = f"g2d status {shlex.quote(str(session.workdir))} --watch"
    session.tracker.say(f"to watch it: {session.workdir / PAGE}, or {command}")
    return followed(session)


@contextlib.contextmanager
def only_warned(tracker: Tracker, workdir: epath.Path) -> Iterator[None]:
    """Run a block that reports on finished stages: an error is a warning, since all results are on
    disk."""
    try:
        yield
    except Exception as error:
        if os.environ.get("G2D_TRACEBACK"):
            raise
        tracker.say(
            f"WARNING: the report was not written: {type(error).__name__}: {error}. All results "
            f"are safe: fix the cause, then run g2d report {workdir}"
        )


def conclude(workdir: epath.Path, tracker: Tracker) -> None:
    """Show the final table and write report.html, report.md and report.csv. An error is a
    warning."""
    with only_warned(tracker, workdir):
        from g2d_jax.report.run import (
            summary_table,
            write_run,
        )  # here: it loads the plotting library
        from g2d_jax.report.runs import read_run
        from g2d_jax.report.tables import FIRST

        run = read_run(workdir, lenient=True, has_ended=True)
        for _, evaluation in run.evaluated():
            tracker.table(*summary_table(run, evaluation), first=FIRST, rest="report.html")
        page, *_ = write_run(run, figures=False, say=tracker.say)
        tracker.say(f"report: {page}")
