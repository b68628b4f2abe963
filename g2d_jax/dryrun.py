"""The dry run: it shows the settings, stages and problems of a run, and refuses what the run would
refuse."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from tempfile import TemporaryDirectory

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from g2d_jax import host_memory
from g2d_jax import stages as stage_modules
from g2d_jax.config import Issue, Online, TrainingStage
from g2d_jax.config import io as config_io
from g2d_jax.config.graph import Plan, plan
from g2d_jax.config.policy_name import own_stage
from g2d_jax.data.tokenizer import THINKING
from g2d_jax.models.decoder import count_params, count_trained
from g2d_jax.records import Problem, Verdict
from g2d_jax.rewards.extract import in_form
from g2d_jax.rollouts.ahead import schedule
from g2d_jax.rollouts.generate import graded_texts, opening_thoughts
from g2d_jax.run_stages import check_models, checked, require_packages, warn
from g2d_jax.runtime import flags, precision, storage
from g2d_jax.runtime.tracking import Tracker
from g2d_jax.session import inputs
from g2d_jax.session.answers import (
    SHOWN,
    forms_asked_for,
    is_read_by_rule,
    problems_of,
    read_by_rule,
    show_problem,
    warn_of_answers,
)
from g2d_jax.session.problems import table
from g2d_jax.session.session import Session
from g2d_jax.session.training_memory import kept
from g2d_jax.stages import alerts
from g2d_jax.workdir import absolute, has_begun, require_same_run


def show(
    config: ConfigDict,
    named: ConfigDict | None = None,
    workdir: storage.PathLike | None = None,
    until: str | None = None,
    known: Sequence[Issue] = (),
) -> None:
    """Print changed settings, stages, problems with their answers as parsed, and rewards of made-up
    responses.

    named: the config before it was changed on the command line, None for no such changes. workdir:
    where the run would go, None for a new folder. until: the stage to stop after. known: errors
    found before. Everything that the run reads but weights is read, and nothing is computed on
    devices. Raises what the run would.
    """
    settings, warnings = checked(config, until, known)
    order = plan(settings)
    require_packages(settings)
    flags.check_devices()
    with TemporaryDirectory() as folder, Tracker(folder, tensorboard=False) as tracker:
        # The session writes into a folder that is gone afterwards, and speaks of the run's own.
        place = epath.Path("WORKDIR") if workdir is None else absolute(workdir)
        session = Session(settings, epath.Path(folder), tracker, order.folders(place))
        session.follows = None if workdir is None else place
        with closing(session), precision.used(settings.dtype):
            _show_settings(session, config, config if named is None else named)
            warn(tracker, warnings)
            if workdir is not None:
                require_same_run(settings, place, inputs=inputs.digests(settings))
            _look_ahead(session)
            _show_stages(session, order, place)
            for sentence in session.tokenizer.template.differences():
                tracker.say(f"the chat template, as it is used here and exported: {sentence}")
            tracker.say(f"tokens that end a response: {session.tokenizer.ends()}")
            host_memory.show(session)
            tracker.table(
                "problems",
                ["task", "split", "source", "count"],
                table(settings, session.problems.by_split),
            )
            for task in session.config.all_tasks:
                problems = problems_of(session, task)
                for problem in problems[:SHOWN]:
                    show_problem(session, problem)
                _try_reward(session, task, problems)
            warn_of_answers(session)
            chosen = [f"over {what}: {kernel}" for what, kernel in session.kernels.items()]
            tracker.say("\n  ".join(["kernels of attention:", *chosen]))


def _show_settings(session: Session, config: ConfigDict, named: ConfigDict) -> None:
    typed = config_io.changes(named, config)
    if typed:
        session.tracker.say("\n  ".join(["changed here:", *typed]))
    own = config_io.changes(config_io.defaults(named), named)
    session.tracker.say(
        "\n  ".join([f"{named.name}, where it differs from the defaults of docs/config.md:", *own])
    )


def _look_ahead(session: Session) -> None:
    """Raise ValueError for errors that the run would find after its settings: devices, weights,
    data, lengths."""
    _ = session.sampling.devices.for_sampling
    if session.sampling.server is not None:
        session.tracker.say(
            f"engine: {session.config.engine.url} serves {session.sampling.server.model}"
        )
    check_models(session)
    for name, stage in session.config.stages.items():
        found = stage_modules.of_kind(stage.kind).alerts_ahead(session, name, stage)
        alerts.say(session, name, 0, list(found), [])
        ahead = bool(session.config.engine.ahead)
        if ahead and isinstance(stage, Online) and stage.samples:
            session.tracker.say(schedule(name, stage))
        if stage.samplings():
            _ = session.sampling.sampler


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
        found = None
        if has_begun(place):
            found = kept(place, session.sampling.devices.told)
        session.tracker.say(f"training: {found or session.micro}")


def _trials(
    session: Session, task: str, problems: Sequence[Problem]
) -> tuple[list[tuple[Problem, str, str]], Callable[[str], str]]:
    """Return responses to try, each with its problem and kind ("right", …), and the form in which
    their answers are written."""
    reward = session.config.all_tasks[task].reward
    answers = [problem.answer for problem in problems if problem.answer is not None]
    # A function of one's own may have to do without the answers of some problems.
    holes = [problem for problem in problems[SHOWN:] if answers and problem.answer is None]
    problems = [*problems[:SHOWN], *holes[:1]]
    asked = forms_asked_for(session, problems[0])
    chosen = (read_by_rule(session, task, asked) if is_read_by_rule(session, task) else asked)[:1]
    form = chosen[0].write if chosen else partial(in_form, rule=reward.answers)
    opened = opening_thoughts(session, problems)

    def write(problem: Problem, answer: str) -> str:
        """Write a response in which a thought that the prompt opens is closed."""
        return THINKING[1] * (problem.id in opened) + form(answer)

    tried: list[tuple[Problem, str, str]] = []
    for problem in problems:
        # Another problem's answer is wrong in a way that the reward may well take for right.
        others = (answer for answer in answers if answer != problem.answer)
        wrong = next(others, f"{problem.answer}1")
        tried.append((problem, "right", write(problem, problem.answer or "")))
        tried.append((problem, "wrong", write(problem, wrong)))
        if asked and not chosen:
            tried.append((problem, "right, as asked", asked[0].write(problem.answer or "")))
    return tried, form


def _try_reward(session: Session, task: str, problems: Sequence[Problem]) -> None:
    """Score the reference answer, and that of another problem, as the prompt asks for answers.

    Where it asks for none, or for a form that the rule of reward.answers does not read, in the form
    of the rule; such a form is tried beside it, and warned of.
    """
    reward = session.config.all_tasks[task].reward
    why = ""
    if reward.function == "model":
        why = "a reward model is loaded by the run alone"
    elif not problems:
        why = "there is no problem"
    if why:
        session.tracker.say(f"the reward of {task} is not tried: {why}")
        return
    tried, form = _trials(session, task, problems)
    tried_problems, _, texts = zip(*tried, strict=True)
    graded = graded_texts(session, tried_problems, texts)
    ids = [np.zeros(1, np.int32)] * len(texts)
    scores = session.scorer.score_local(tried_problems, graded, ids)
    rows = []
    rewards: dict[tuple[str, str], float] = {}
    misjudged: list[str] = []
    for (problem, kind, text), score in zip(tried, scores, strict=True):
        shown = "" if problem.answer is None else kind
        rows.append([problem.id, shown, text, score.reward, score.verdict.value])
        rewards[problem.id, kind] = score.reward or 0.0
        unexpected = {"right": Verdict.INCORRECT, "wrong": Verdict.CORRECT}.get(shown)
        if score.verdict == unexpected:
            misjudged.append(f"a {kind} answer to {problem.id} ({score.reward:g})")
    title = f"the reward of {task}, tried; answers are read by the rule {reward.answers!r}"
    if reward.is_function and session.config.verifiable[task]:
        title += f"; correct, also in pairs, is what {reward.function} scores above "
        title += f"reward.correct_above={reward.correct_above:g}"
    session.tracker.table(title, ["problem", "", "response", "reward", "verdict"], rows)
    alike = [
        problem.id
        for problem, kind, _ in tried
        if kind == "right"
        and problem.answer is not None
        and not rewards[problem.id, "right"] > rewards[problem.id, "wrong"]
    ]
    if not session.config.verifiable[task]:
        return
    if misjudged and not alike:
        session.tracker.say(
            f"WARNING: correct is what gets more than {reward.correct_above} "
            f"(reward.correct_above), and so {', '.join(misjudged)} counts as the opposite of what "
            "it is: in accuracies, pass rates and pairs",
            "yellow",
        )
    _warn_of_short(session, [text for _, kind, text in tried if kind == "right"])
    if alike:
        session.tracker.say(
            f"WARNING: the reference answer of {' and '.join(alike)} gets no more, in "
            f"{form('').strip()}, "
            "than a wrong one: look at it as it was parsed, and at how the reward reads responses"
        )


def _warn_of_short(session: Session, texts: Sequence[str]) -> None:
    """Say which stages sample responses that are too short for any of these right ones."""
    lengths: list[int] = []
    for text in texts:
        with contextlib.suppress(ValueError):  # a form that this tokenizer cannot write
            lengths.append(len(session.tokenizer.encode_completion(text)))
    if not lengths:
        return
    least = min(lengths)
    for name, stage in session.config.stages.items():
        draws = getattr(stage, "samples", True) and getattr(stage, "steps", 1)
        for sampling in stage.samplings():
            if draws and sampling.max_new_tokens < least:
                session.tracker.say(
                    f"WARNING: {name}: max_new_tokens is {sampling.max_new_tokens}, and the shortest "
                    f"right response tried has {least} tokens",
                    "yellow",
                )
