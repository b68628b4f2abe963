"""Rollouts made elsewhere: JSON lines with prompt, completion, and reward or answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from g2d_jax.config import Reward
from g2d_jax.data.fields import BrokenRow, as_answer, as_prompt, as_text
from g2d_jax.data.problems import open_rows
from g2d_jax.data.splits import problem_id
from g2d_jax.records import Problem, Rollout, Score, ScoredRollout, Verdict
from g2d_jax.runtime import processes
from g2d_jax.runtime.tables import read_rollouts, safe_text, write_rollouts
from g2d_jax.stages.rollouts import Groups, graded_texts, on_disk
from g2d_jax.stages.runtime import Runtime

Row = tuple[str, str, Score | None]
"""The id of a row's problem, its completion, and its score if the row gives a reward."""


def external_groups(runtime: Runtime, path: str, shard: epath.Path) -> tuple[list[tuple[Problem, int]], Groups]:
    """Read, tokenise and score a file of responses, grouped by prompt; verdicts are kept like our own.

    A row's reward counts as given (null: unscorable). Without one the response is scored against the row's answer, or
    the answer of the same problem in data.train. Prompts of dev and test are refused. Log-probabilities are NaN.
    Raises ValueError naming file and line of a broken row.
    """
    problems, rows = read(runtime, path)
    if not on_disk(runtime, [shard]):
        scored = _score(runtime, problems, rows)
        processes.on_leader(lambda: write_rollouts(shard, scored))
    groups: dict[str, list[ScoredRollout]] = {}
    for row in read_rollouts(shard):
        if row.rollout.problem_id not in problems:
            raise ValueError(
                f"{path} has changed since {shard} was made of it: restore it, or choose another --workdir"
            )
        groups.setdefault(row.rollout.problem_id, []).append(row)
    return [(problems[identifier], 0) for identifier in groups], list(groups.values())


def read(runtime: Runtime, path: str) -> tuple[dict[str, Problem], list[Row]]:
    """Read problems by id, and the rows. Raises ValueError naming file and line of a broken row."""
    problems: dict[str, Problem] = {}
    rows: list[Row] = []
    for row in open_rows(path)[1]:
        try:
            if row.error is not None:
                raise BrokenRow(row.error)
            problem, completion = _problem(row.values, path, runtime.train)
            score = _given(row.values, runtime.tasks[problem.task].reward)
            if problem.id in runtime.held_out_ids:
                raise BrokenRow("its prompt is in data.dev or data.test, which nothing may be trained on")
            if score is None and problem.answer is None:
                raise BrokenRow("it has neither a reward nor an answer, and its prompt is not in data.train")
            runtime.tokenizer.encode_prompt(problem)  # raises ValueError, as for special tokens in the text
            runtime.tokenizer.encode_completion(completion)
        except ValueError as error:  # BrokenRow is one
            raise ValueError(f"{row.where}: {error}") from error
        problems.setdefault(problem.id, problem)
        rows.append((problem.id, completion, score))
    if not rows:
        raise ValueError(f"{path} holds no responses")
    return problems, rows


def _problem(values: Mapping[str, Any], path: str, train: Mapping[str, Problem]) -> tuple[Problem, str]:
    for name in ("prompt", "completion"):
        if name not in values:
            raise BrokenRow(f"it has no field {name!r}; a row needs prompt, completion, and reward or answer")
    prompt = as_prompt(values["prompt"], "prompt")
    identifier = problem_id(prompt)
    answer = as_answer(values["answer"], "answer") if values.get("answer") is not None else None
    completion = as_text(values["completion"], "completion")
    if answer is None and identifier in train:
        return train[identifier], completion
    return Problem(identifier, prompt, answer, source=path), completion


def _given(values: Mapping[str, Any], settings: Reward) -> Score | None:
    """Return the score of the reward that a row gives, None without one. settings: those of its problem's task."""
    if "reward" not in values:
        return None
    reward = values["reward"]
    if reward is None:
        return Score(None, Verdict.UNSCORABLE)
    try:
        number = float(reward)
    except (TypeError, ValueError, OverflowError) as error:
        raise BrokenRow(f"its reward {reward!r:.100} is not a number or null") from error
    if not np.isfinite(number):
        raise BrokenRow(f"its reward {reward!r:.100} is not finite")
    if not settings.is_verifiable:
        return Score(number, Verdict.SCORED)
    return Score(number, Verdict.CORRECT if number > settings.correct_above else Verdict.INCORRECT)


def _score(runtime: Runtime, problems: Mapping[str, Problem], rows: list[Row]) -> list[ScoredRollout]:
    tokenizer, counts = runtime.tokenizer, dict.fromkeys(problems, 0)
    rollouts: list[Rollout] = []
    for identifier, completion, _ in rows:
        ids = tokenizer.encode_completion(completion)
        unknown = np.full(len(ids), np.nan, np.float32)
        prompt = tokenizer.encode_prompt(problems[identifier])
        rollouts.append(Rollout(identifier, 0, counts[identifier], prompt, ids, unknown, unknown, "stop"))
        counts[identifier] += 1
    unscored = [i for i, (_, _, score) in enumerate(rows) if score is None]
    questions = [problems[rows[i][0]] for i in unscored]
    texts = graded_texts(runtime, questions, [rows[i][1] for i in unscored])
    computed = iter(runtime.scorer(questions, texts, [rollouts[i].token_ids for i in unscored]))
    return [
        ScoredRollout(rollout, safe_text(completion), next(computed) if score is None else score, "external")
        for rollout, (_, completion, score) in zip(rollouts, rows, strict=True)
    ]
