"""The dry run: shows the settings, stages and problems of a run, and raises the errors of the
run."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from tempfile import TemporaryDirectory

from etils import epath
from ml_collections import ConfigDict

from g2d_jax.config import Issue, TrainingStage
from g2d_jax.config import io as config_io
from g2d_jax.config.graph import Plan, plan
from g2d_jax.config.policy_name import own_stage
from g2d_jax.models.decoder import count_params, count_trained
from g2d_jax.runtime import flags, precision, storage
from g2d_jax.runtime.tracking import Tracker
from g2d_jax.session import inputs
from g2d_jax.session.answers import (
    SHOWN,
    problems_of,
    show_problem,
)
from g2d_jax.session.problems import table
from g2d_jax.session.session import Options, Run, Session, loaded, session_of
from g2d_jax.session.training_memory import kept
from g2d_jax.session.workdir import absolute, has_begun, require_same_run
from g2d_jax.stages import host_memory, run_issues
from g2d_jax.stages.run_stages import require_packages
from g2d_jax.stages.trial import Trial


def show(
    config: ConfigDict,
    named: ConfigDict | None = None,
    workdir: storage.PathLike | None = None,
    until: str | None = None,
    known: Sequence[Issue] = (),
) -> None:
    """Print changed settings, stages, problems with their answers as parsed, and rewards of made-up
    responses.

    named: the config before changes on the command line, None without any. workdir: that of the
    run, None for a new folder. until: the stage to stop after. known: errors found earlier. Reads
    all inputs of the run except weights, and computes nothing on devices. Raises as the run would.
    """
    settings, warnings = run_issues.checked(config, until, known)
    order = plan(settings)
    require_packages(settings)
    flags.check_devices()
    with (
        TemporaryDirectory() as folder,
        Tracker(folder, tensorboard=False) as tracker,
        precision.used(settings.dtype),
    ):
        # The session writes into a temporary folder, but its messages name the run's own.
        place = epath.Path("WORKDIR") if workdir is None else absolute(workdir)
        _show_settings(tracker, config, config if named is None else named)
        run_issues.tell(tracker, warnings)
        read = inputs.digests(settings)
        if workdir is not None:
            require_same_run(settings, place, inputs=read)
        run = Run(
            config=settings,
            workdir=epath.Path(folder),
            folders=order.folders(place),
            tracker=tracker,
        )
        names = run_issues.unfinished(run.folders, order.until(until))
        follows = None if workdir is None else place
        begun = has_begun(place)
        with loaded(run, Options(names, follows=follows)) as shared:
            session = session_of(
                run,
                shared,
                settle=lambda _, devices: kept(place, devices.inputs) if begun else None,
            )
            found = run_issues.examine(session, names)
            for example in filter(None, [seen.example for seen in found.seen.values()]):
                tracker.say(example)
            server = session.sampling.server
            if server is not None:
                tracker.say(f"engine: {settings.engine.url} serves {server.model}")
            _show_stages(session, order, place)
            _show_problems(session, found.trials)


def _show_settings(tracker: Tracker, config: ConfigDict, named: ConfigDict) -> None:
    typed = config_io.changes(named, config)
    if typed:
        tracker.say("\n  ".join(["changed on the command line:", *typed]))
    own = config_io.changes(config_io.defaults(named), named)
    tracker.say(
        "\n  ".join([f"{named.name}, where it differs from the defaults of docs/config.md:", *own])
    )


def _show_problems(session: Session, trials: Sequence[Trial]) -> None:
    tracker, tokenizer = session.tracker, session.tokenizer
    for sentence in tokenizer.template.differences():
        tracker.say(f"the chat template, as it is used here and exported: {sentence}")
    tracker.say(f"tokens that end a response: {tokenizer.ends()}")
    host_memory.show(session)
    rows = table(session.config, session.problems.by_split)
    tracker.table("problems", ["task", "split", "source", "count"], rows)
    for task in session.config.all_tasks:
        for problem in problems_of(session, task)[:SHOWN]:
            show_problem(session, problem)
    for title, rows in trials:
        tracker.table(title, ["problem", "", "response", "reward", "verdict"], rows)
    chosen = [f"over {what}: {kernel}" for what, kernel in session.sampling.kernels.items()]
    tracker.say("\n  ".join(["kernels of attention:", *chosen]))


def _show_stages(session: Session, order: Plan, place: epath.Path) -> None:
    stages = session.config.stages
    rows = []
    for name in order.order:
        policies = stages[name].policies_read()
        others = {*order.inputs[name]} - {own_stage(policy) for policy in policies}
        rows.append([name, stages[name].kind, ", ".join([*policies, *sorted(others)])])
    session.tracker.table("stages", ["stage", "kind", "reads"], rows)
    if storage.is_local(place):
        parent = next(folder for folder in (place, *place.absolute().parents) if folder.exists())
        if not os.access(parent, os.W_OK):
            raise PermissionError(errno.EACCES, "cannot write in it", os.fspath(parent))
    trained, total = count_trained(session.model_config), count_params(session.model_config)
    parts = f", {trained:,} of them trained" if trained < total else ""
    session.tracker.say(f"model: {total:,} parameters{parts}; devices: {session.mesh.size}")
    if session.config.stages_of(TrainingStage):
        session.tracker.say(f"training: {session.micro}")
