"""Rewards tried before a run: on the reference answers of a few problems, and on wrong ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from g2d_jax.config import Issue, prefix_of
from g2d_jax.config.section import warning
from g2d_jax.data.tokenizer import THINKING
from g2d_jax.records import Problem, Verdict
from g2d_jax.rewards.extract import in_form
from g2d_jax.rollouts.generate import graded_texts, opening_thoughts
from g2d_jax.session.answers import (
    SHOWN,
    forms_asked_for,
    is_read_by_rule,
    problems_of,
    read_by_rule,
)
from g2d_jax.session.session import Session


@dataclass
class Trial:
    """A task's reward on made-up responses, as a table. issues: warnings."""

    COLUMNS = ("problem", "", "response", "reward", "verdict")

    title: str
    rows: list[list[Any]] = field(default_factory=list)
    issues: list[Issue] = field(default_factory=list)


def try_reward(session: Session, task: str, trials: list[Trial]) -> None:
    """Score the reference answers of a task's first problems, and others, as the prompt asks for
    answers, and add this to the trials. Not of a reward model. Raises RewardFailed.

    Where it asks for none, or for a form that the rule of reward.answers does not read, in the form
    of the rule; such a form is tried beside it, and warned of.
    """
    problems = problems_of(session, task)
    if not problems or session.config.all_tasks[task].reward.function == "model":
        return
    reward = session.config.all_tasks[task].reward
    tried, form = _responses(session, task, problems)
    tried_problems, _, texts = zip(*tried, strict=True)
    graded = graded_texts(session, tried_problems, texts)
    ids = [np.zeros(1, np.int32)] * len(texts)
    scores = session.scorer.score_local(tried_problems, graded, ids)
    trial = Trial(f"the reward of {task}, tried; answers are read by the rule {reward.answers!r}")
    if reward.is_function and session.config.verifiable[task]:
        trial.title += f"; correct, also in pairs, is what {reward.function} scores above "
        trial.title += f"reward.correct_above={reward.correct_above:g}"
    trials.append(trial)
    rewards: dict[tuple[str, str], float] = {}
    misjudged: list[str] = []
    for (problem, kind, text), score in zip(tried, scores, strict=True):
        shown = "" if problem.answer is None else kind
        trial.rows.append([problem.id, shown, text, score.reward, score.verdict.value])
        rewards[problem.id, kind] = score.reward or 0.0
        unexpected = {"right": Verdict.INCORRECT, "wrong": Verdict.CORRECT}.get(shown)
        if score.verdict == unexpected:
            misjudged.append(f"a {kind} answer to {problem.id} ({score.reward:g})")
    if not session.config.verifiable[task]:
        return
    alike = []
    for problem, kind, _ in tried:
        has_answer = kind == "right" and problem.answer is not None
        if has_answer and not rewards[problem.id, "right"] > rewards[problem.id, "wrong"]:
            alike.append(problem.id)
    setting = f"{prefix_of(task)}reward"
    if alike:
        text = f"gives the reference answer of {' and '.join(alike)} no more, in "
        text += f"{form('').strip()}, than a wrong one"
        remedy = "look at it as --dry-run shows it, and at how the reward reads responses"
        trial.issues.append(warning(setting, text, remedy))
    elif misjudged:
        text = f"is {reward.correct_above:g}, and so {', '.join(misjudged)} counts as the opposite "
        text += "of what it is, in accuracies, pass rates and pairs"
        trial.issues.append(warning(f"{setting}.correct_above", text))
    trial.issues += _too_short(session, [text for _, kind, text in tried if kind == "right"])


def _too_short(session: Session, texts: Sequence[str]) -> Iterator[Issue]:
    """Yield the stages that sample responses that are too short for any of these right ones."""
    lengths: list[int] = []
    for text in texts:
        with contextlib.suppress(ValueError):  # a form that this tokenizer cannot write
            lengths.append(len(session.tokenizer.encode_completion(text)))
    least = min(lengths, default=0)
    for name, stage in session.config.stages.items():
        draws = getattr(stage, "rollouts", "sample") == "sample" and getattr(stage, "steps", 1)
        for sampling in stage.samplings():
            if draws and sampling.max_new_tokens < least:
                setting = f"stages.{name}.sampling.max_new_tokens"
                text = f"is {sampling.max_new_tokens}, and the shortest right response tried has "
                yield warning(setting, f"{text}{least} tokens")


def _responses(
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
