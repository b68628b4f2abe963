"""Responses by prompt: rewards and lengths as arrays, metrics, and the cost of sampling."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from g2d_jax.data.tokenizer import PromptTokenizer
from g2d_jax.models.config import ModelConfig
from g2d_jax.models.flops import attended, forward_flops
from g2d_jax.records import Problem, ScoredRollout, Verdict, differ
from g2d_jax.runtime.tracking import Tracker
from g2d_jax.session.stage_result import Cost

LOGGED = 8  # responses of an update that are logged for people

Draws = list[tuple[Problem, int]]
"""Problems, each with its visit: the number of earlier draws."""

Groups = list[list[ScoredRollout]]
"""The responses to each draw, in order of their sample index."""


def draw_once(problems: Iterable[Problem]) -> Draws:
    """Draw each problem once, with visit 0."""
    return [(problem, 0) for problem in problems]


def draw_of(row: ScoredRollout) -> tuple[str, int]:
    """Return the id of a response's problem, and its visit."""
    return row.rollout.problem_id, row.rollout.visit


def problems_of(draws: Draws) -> list[Problem]:
    """List the problem of each draw."""
    return [problem for problem, _ in draws]


def rows_of(groups: Iterable[Sequence[ScoredRollout]]) -> list[ScoredRollout]:
    """Concatenate the responses of all groups."""
    return list(itertools.chain.from_iterable(groups))


def by_response(groups: Groups, value: Callable[[ScoredRollout], Any]) -> np.ndarray:
    """Return a value of each response, [N, G]. Groups must have equal sizes."""
    return np.array([list(map(value, group)) for group in groups])


def lengths(groups: Groups) -> np.ndarray:
    """Count the tokens of each response, int64 [N, G]."""
    return by_response(groups, lambda row: row.rollout.length)


def rewards(groups: Groups) -> np.ndarray:
    """Return rewards, float64 [N, G], NaN for unscorable responses and for padding of smaller
    groups."""
    values = np.full((len(groups), max(map(len, groups))), np.nan)
    for i, group in enumerate(groups):
        values[i, : len(group)] = [row.score.reward for row in group]  # NumPy makes NaN of None
    return values


def correct(groups: Groups) -> np.ndarray:
    """Return each response's accuracy, float64 [N, G], see `Score.accuracy`."""
    return by_response(groups, lambda row: row.score.accuracy)


def describe(groups: Groups) -> dict[str, float]:
    """Compute metrics of sampled groups under TRL's names, as means over responses (entropy: over
    tokens).

    frac_reward_zero_std: groups with equal rewards or fewer than two scored responses. Verifiable
    rewards add the lengths of correct and incorrect responses.
    """
    rows = rows_of(groups)
    tokens = np.array([row.rollout.length for row in rows])
    values = rewards(groups)
    scored = ~np.isnan(values)
    counts = scored.sum(axis=1)
    means = np.where(scored, values, 0.0).sum(axis=1) / np.maximum(counts, 1)
    # Compare rewards, since equal ones may have a standard deviation by rounding (1e-16 for six of
    # 0.7).
    apart = differ(values)
    centred = np.where(scored & apart[:, None], values - means[:, None], 0.0)
    spread = np.sqrt(np.square(centred).sum(axis=1) / np.maximum(counts - 1, 1))
    metrics = {
        "reward": float(values[scored].mean()) if scored.any() else float("nan"),
        "reward_std": float(spread.mean()),
        "frac_reward_zero_std": float(np.mean(~apart)),
        "entropy": float(np.concatenate([row.rollout.entropies for row in rows]).mean()),
        "completions/mean_length": float(tokens.mean()),
        "completions/min_length": float(tokens.min()),
        "completions/max_length": float(tokens.max()),
        "completions/clipped_ratio": float(
            np.mean([row.rollout.stop_reason == "length" for row in rows])
        ),
    }
    judged = np.array([row.score.accuracy for row in rows])
    for side, accuracy in (("correct", 1), ("incorrect", 0)):
        if accuracy in judged:
            metrics[f"completions/mean_length_{side}"] = float(tokens[judged == accuracy].mean())
    for name in sorted({name for row in rows for name in row.score.parts}):
        parts = np.array([row.score.parts.get(name) for row in rows], np.float64)
        known = parts[~np.isnan(parts)]
        metrics[f"reward/{name}"] = float(known.mean()) if known.size else float("nan")
    verdicts = Counter(row.score.verdict for row in rows)
    for verdict in Verdict:
        metrics[f"verdicts/{verdict.value}"] = verdicts[verdict] / len(rows)
    return metrics


def count_rollouts(config: ModelConfig, cost: Cost, groups: Groups) -> None:
    """Add the tokens and FLOPs of generating these groups: each prompt and each response token
    once.

    They are counted from rollouts, not by the sampler, so rollouts read back after a restart count
    too.
    """
    for group in groups:
        prompt = len(group[0].rollout.prompt_ids)
        cost.prefilled += prompt
        cost.flops += forward_flops(config, prompt, attended(prompt))
        for row in group:
            length = row.rollout.length
            cost.generated += length
            cost.flops += forward_flops(config, length, attended(length, before=prompt))


def log_samples(
    tracker: Tracker,
    tokenizer: PromptTokenizer,
    name: str,
    step: int,
    draws: Draws,
    groups: Groups,
    **columns: str,
) -> None:
    """Log the first response to each of the first LOGGED draws, with the prompt that the policy
    read. columns: further columns."""
    shown = list(zip(draws, groups, strict=True))[:LOGGED]
    rows = []
    for (problem, _), (first, *_) in shown:
        rows.append(
            {
                **columns,
                "problem_id": problem.id,
                "prompt": tokenizer.decode_raw(first.rollout.prompt_ids),
                "answer": problem.answer,
                "completion": first.text,
                "verdict": first.score.verdict.value,
            }
        )
    tracker.samples(name, step, rows)
