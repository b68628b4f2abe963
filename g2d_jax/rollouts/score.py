"""The phase `score`: the rewards of responses, computed by all processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from etils import epath

from g2d_jax.data.tokenizer import PromptTokenizer
from g2d_jax.records import Rollout, ScoredRollout, by_id
from g2d_jax.rollouts.groups import Draws, problems_of
from g2d_jax.rollouts.sample import Answer, graded_texts, in_order
from g2d_jax.runtime import processes
from g2d_jax.runtime.tables import read_rollouts, write_rollouts
from g2d_jax.session.reward_manager import RewardManager
from g2d_jax.session.session import StopRun


def score(
    scorer: RewardManager,
    tokenizer: PromptTokenizer,
    answers: Sequence[Answer],
    draws: Draws,
    policy: str,
    parts: epath.Path,
    *,
    has_logprobs: bool,
) -> list[ScoredRollout]:
    """Score this process's answers; return those of all processes, in the order of draws and
    samples.

    policy: the name of the policy that sampled. parts: a folder in which several processes share
    their devices' rollouts. has_logprobs: False for a server's answers, which may lack them. Raises
    StopRun as `require_finite`.
    """
    # Inside a barrier each process works alone, and all raise the error of one. Otherwise the
    # others would wait forever at the next synchronisation.
    with processes.barrier():
        if has_logprobs:
            require_finite([answer.rollout for answer in answers], policy)
        rows = _own(scorer, answers, policy)
        if processes.count() > 1:
            write_rollouts(parts / f"{processes.index()}.parquet", rows)
    scorer.share_usage()
    if processes.count() > 1:
        with processes.barrier():
            rows = []
            for peer in range(processes.count()):
                rows += read_rollouts(parts / f"{peer}.parquet")
            rows = in_order(rows, draws)
    if scorer.has_collective():
        rows = _together(scorer, tokenizer, rows, draws)
    return rows


def _own(scorer: RewardManager, answers: Sequence[Answer], policy: str) -> list[ScoredRollout]:
    """Score this process's answers with the rewards that it can compute alone."""
    processes.note_progress(f"scoring {policy}")
    scores = scorer.score_local(
        [answer.problem for answer in answers],
        [answer.graded for answer in answers],
        [answer.rollout.token_ids for answer in answers],
        [answer.pending for answer in answers],
    )
    return [
        ScoredRollout(answer.rollout, answer.text, score, policy)
        for answer, score in zip(answers, scores, strict=True)
    ]


def _together(
    scorer: RewardManager, tokenizer: PromptTokenizer, rows: Sequence[ScoredRollout], draws: Draws
) -> list[ScoredRollout]:
    """Add the scores that all processes compute together, for all processes' rows."""
    of_id = by_id(problems_of(draws))
    problems = [of_id[row.rollout.problem_id] for row in rows]
    texts = graded_texts(tokenizer, problems, [row.text for row in rows])
    token_ids = [row.rollout.token_ids for row in rows]
    scores = scorer.score_collective(problems, texts, token_ids, [row.score for row in rows])
    return [replace(row, score=score) for row, score in zip(rows, scores, strict=True)]


def require_finite(rollouts: Sequence[Rollout], policy: str) -> None:
    """Raise StopRun if any log-probability is not finite: the policy's weights are broken.

    Such samples must not be used for training or evaluation. policy: its name, for the message.
    """
    broken = [rollout for rollout in rollouts if not np.isfinite(rollout.logprobs).all()]
    if not broken:
        return
    first = broken[0]
    at = int(np.argmin(np.isfinite(first.logprobs)))
    raise StopRun(
        f"policy {policy}: {len(broken)} of {len(rollouts)} sampled responses have "
        f"log-probabilities that are not finite (problem {first.problem_id}, sample "
        f"{first.sample}: {first.logprobs[at]} at token {at + 1}), so its weights or activations "
        "are not finite either, and nothing was saved. Check the policy's checkpoint or model, try "
        "dtype='float32', or train it again with a lower learning rate"
    )
