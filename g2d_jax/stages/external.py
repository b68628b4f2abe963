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


def read(runtime: Runtime, path: str) -> tuple[dict[str, Problem], list[tuple[str, str, float | None, bool]]]:
    """Read problems by id, and of each row its problem's id, the completion, its reward, and whether that is given.

    Raises ValueError naming file and line of a broken row.
    """
    train = {problem.id: problem for problem in runtime.problems["train"]}
    held_out = {problem.id for split in ("dev", "test") for problem in runtime.problems[split]}
    problems: dict[str, Problem] = {}
    rows: list[tuple[str, str, float | None, bool]] = []  # problem id, completion, reward, whether it is given
    for row in open_rows(path)[1]:
        try:
            if row.error is not None:
                raise BrokenRow(row.error)
            problem, completion = _problem(row.values, path, train)
            reward, given = _reward(row.values)
            if problem.id in held_out:
                raise BrokenRow("its prompt is in data.dev or data.test, which nothing may be trained on")
            if not given and problem.answer is None:
                raise BrokenRow("it has neither a reward nor an answer, and its prompt is not in data.train")
            runtime.tokenizer.encode_prompt(problem)  # raises ValueError, as for special tokens in the text
            runtime.tokenizer.encode_completion(completion)
        except ValueError as error:  # BrokenRow is one
            raise ValueError(f"{row.where}: {error}") from error
        problems.setdefault(problem.id, problem)
        rows.append((problem.id, completion, reward, given))
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


def _reward(values: Mapping[str, Any]) -> tuple[float | None, bool]:
    if "reward" not in values:
        return None, False
    reward = values["reward"]
    if reward is None:
        return None, True
    try:
        number = float(reward)
    except (TypeError, ValueError, OverflowError) as error:
        raise BrokenRow(f"its reward {reward!r:.100} is not a number or null") from error
    if not np.isfinite(number):
        raise BrokenRow(f"its reward {reward!r:.100} is not finite")
    return number, True


def _score(
    runtime: Runtime, problems: Mapping[str, Problem], rows: list[tuple[str, str, float | None, bool]]
) -> list[ScoredRollout]:
    tokenizer, counts = runtime.tokenizer, dict.fromkeys(problems, 0)
    rollouts: list[Rollout] = []
    for identifier, completion, _, _ in rows:
        ids = tokenizer.encode_completion(completion)
        unknown = np.full(len(ids), np.nan, np.float32)
        prompt = tokenizer.encode_prompt(problems[identifier])
        rollouts.append(Rollout(identifier, 0, counts[identifier], prompt, ids, unknown, unknown, "stop"))
        counts[identifier] += 1
    open_scores = [i for i, row in enumerate(rows) if not row[3]]
    scores: list[Score] = [_given(runtime.tasks[problems[row[0]].task].reward, row[2]) for row in rows]
    questions = [problems[rows[i][0]] for i in open_scores]
    results = runtime.scorer(
        questions,
        graded_texts(runtime, questions, [rows[i][1] for i in open_scores]),
        [rollouts[i].token_ids for i in open_scores],
    )
    for i, score in zip(open_scores, results, strict=True):
        scores[i] = score
    return [
        ScoredRollout(rollout, safe_text(row[1]), score, "external")
        for rollout, row, score in zip(rollouts, rows, scores, strict=True)
    ]


def _given(settings: Reward, reward: float | None) -> Score:
    """Return the score of a given reward. settings: the reward section of the problem's task."""
    if reward is None:
        return Score(None, Verdict.UNSCORABLE)
    if settings.is_scalar:
        return Score(reward, Verdict.SCORED)
    return Score(reward, Verdict.CORRECT if reward > settings.correct_above else Verdict.INCORRECT)
