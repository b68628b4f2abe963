"""Trials of rewards before a run: on the reference answers of a few problems, and on wrong ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from g2d_jax.config import Issue, prefix_of
from g2d_jax.config.section import warning
from g2d_jax.data.tokenizer import THINKING
from g2d_jax.records import Problem, Verdict
from g2d_jax.rewards.extract import in_form
from g2d_jax.rollouts.sample import graded_texts, opening_thoughts
from g2d_jax.session.answers import (
    SHOWN,
    forms_asked_for,
    is_read_by_rule,
    problems_of,
    read_by_rule,
)
from g2d_jax.session.session import Session

_UNEXPECTED = {"right": (Verdict.INCORRECT, Verdict.NO_ANSWER), "wrong": (Verdict.CORRECT,)}


Trial = tuple[str, list[list[Any]]]
"""A table: its title, and rows of problem, kind of response, response, reward and verdict."""


def try_reward(session: Session, task: str, trials: list[Trial], found: list[Issue]) -> None:
    """Score correct and wrong answers to a task's first problems; add the trial, and a warning of
    mistakes. Skips a reward model. Raises RewardFailed.

    Answers have the form that the prompt asks for. If it asks for none, or for one that
    reward.answers does not read, they have the rule's form, and the prompt's form is tried, too.
    """
    problems, reward = problems_of(session, task), session.config.all_tasks[task].reward
    if not problems or reward.function == "model":
        return
    tried = _responses(session, task, problems)
    tried_problems, _, texts = zip(*tried, strict=True)
    graded = graded_texts(session.tokenizer, tried_problems, texts)
    ids = [np.zeros(1, np.int32)] * len(texts)
    scores = session.scorer.score_local(tried_problems, graded, ids)
    title = (
        f"trial of the reward of {task}: answers are read by the rule {reward.answers!r}, and are "
        f"correct above reward.correct_above={reward.correct_above:g}"
    )
    rows: list[list[Any]] = []
    trials.append((title, rows))
    misjudged: list[str] = []
    for (problem, kind, text), score in zip(tried, scores, strict=True):
        shown = "" if problem.answer is None else kind
        rows.append([problem.id, shown, text, score.reward, score.verdict.value])
        if score.verdict in _UNEXPECTED.get(shown, ()):
            misjudged.append(f"{text!r:.60}, a {kind} answer to {problem.id} ({score.reward:g})")
    if misjudged and session.config.verifiable[task]:
        text = f"misjudges {'; '.join(misjudged)}"
        remedy = f"check how it reads responses, and correct_above={reward.correct_above:g}"
        found.append(warning(f"{prefix_of(task)}reward", text, remedy))


def _responses(
    session: Session, task: str, problems: Sequence[Problem]
) -> list[tuple[Problem, str, str]]:
    """Return responses to try, each with its problem and kind ("right", …)."""
    reward = session.config.all_tasks[task].reward
    answers = [problem.answer for problem in problems if problem.answer is not None]
    # A user's function may get no answer for some problems.
    holes = [problem for problem in problems[SHOWN:] if answers and problem.answer is None]
    problems = [*problems[:SHOWN], *holes[:1]]
    requested = forms_asked_for(session, problems[0])
    chosen = (
        read_by_rule(session, task, requested) if is_read_by_rule(session, task) else requested
    )[:1]
    form = chosen[0].write if chosen else partial(in_form, rule=reward.answers)
    opened = opening_thoughts(session.tokenizer, problems)

    def write(problem: Problem, answer: str) -> str:
        """Write a response in which a thought that the prompt opens is closed."""
        return THINKING[1] * (problem.id in opened) + form(answer)

    tried: list[tuple[Problem, str, str]] = []
    for problem in problems:
        # Another problem's answer is wrong, but looks correct to a faulty reward.
        others = (answer for answer in answers if answer != problem.answer)
        wrong = next(others, f"{problem.answer}1")
        tried.append((problem, "right", write(problem, problem.answer or "")))
        tried.append((problem, "wrong", write(problem, wrong)))
        if requested and not chosen:
            tried.append((problem, "right, as asked", requested[0].write(problem.answer or "")))
    return tried
