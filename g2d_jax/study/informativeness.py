"""Informativeness of a policy's rollouts: by prompt, by policy and by preference pair.

A group is the responses of one policy to one visit of a prompt. A response without a reward is not
scored and is ignored. `Score.accuracy` defines correct and incorrect: a response without an answer
and a timeout are incorrect; a reward that only ranks is neither.

Log-probabilities and entropies are in nats, under the sampled distribution: after temperature and
filters. Greedy responses have log-prob 0 at every token, so their confidence and calibration mean
nothing. NaN means undefined, such as the mean of nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from g2d_jax.records import ScoredRollout, exceeds, tie_nats
from g2d_jax.study.stats import mean

BINS = 10
"""Bins of confidence in the calibration error."""

NUMBERS = ("reward", "correct", "length", "logprob", "entropy", "truncated")
COLUMNS = ("group", "problem_id", "visit", *NUMBERS, "answer")
"""The columns of `responses`."""


def responses(groups: Sequence[Sequence[ScoredRollout]]) -> pd.DataFrame:
    """Tabulate a row a response.

    group              number of its group, from 0
    problem_id, visit  its prompt
    reward             NaN if not scored
    correct            1 or 0, NaN if neither
    length             tokens
    logprob, entropy   sums over tokens, nats
    truncated          1 if max_new_tokens truncated it, else 0
    answer             the extracted answer, None without one
    """
    rows = []
    for number, group in enumerate(groups):
        for row in group:
            rollout, score = row.rollout, row.score
            nats = (
                values.sum(dtype=np.float64) for values in (rollout.logprobs, rollout.entropies)
            )
            is_cut = rollout.stop_reason == "length"
            prompt = number, rollout.problem_id, rollout.visit
            judged = score.reward, score.accuracy
            rows.append((*prompt, *judged, rollout.length, *nats, is_cut, score.answer))
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype(dict.fromkeys(NUMBERS, float))


def prompts(rows: pd.DataFrame) -> pd.DataFrame:
    """Tabulate a row a group of `responses`, ascending.

    problem_id, visit           the prompt
    scored                      responses with a reward
    pass_rate                   share of correct among correct and incorrect responses
    reward_mean, reward_variance
    mixed                       has a correct and an incorrect response, or two rewards
    entropy                     mean over the tokens of all responses, nats
    distinct_answers            different answers, compared as text; none counts as one
    confidence                  mean over responses of exp(mean log-prob of a token)
    """
    rows = rows.assign(
        confidence=_confidence(rows), ranked=rows["reward"].where(rows["correct"].isna())
    )
    by = rows.groupby("group")
    low, high = by[["reward", "correct", "ranked"]].min(), by[["reward", "correct", "ranked"]].max()
    means = by["reward"].mean()
    # Equal values leave rounding errors of the mean, but their variance is 0.
    is_spread = exceeds(high["reward"], low["reward"])
    return pd.DataFrame(
        {
            "problem_id": by["problem_id"].first(),
            "visit": by["visit"].first(),
            "scored": by["reward"].count(),
            "pass_rate": by["correct"].mean(),
            "reward_mean": means,
            "reward_variance": by["reward"].var(ddof=0).where(is_spread, 0 * means),
            "mixed": (high["correct"] > low["correct"]) | exceeds(high["ranked"], low["ranked"]),
            "entropy": by["entropy"].sum(min_count=1) / by["length"].sum(),
            "distinct_answers": by["answer"].nunique(dropna=False),
            "confidence": by["confidence"].mean(),
        }
    )


def _confidence(rows: pd.DataFrame) -> pd.Series[float]:
    """Return the geometric mean of the tokens' probabilities, in [0, 1]; NaN without tokens."""
    # rounding may leave a log-prob just above 0
    return np.exp((rows["logprob"] / rows["length"].replace(0, math.nan)).clip(upper=0.0))


def summary(rows: pd.DataFrame) -> dict[str, float]:
    """Summarise one policy's `responses` in numbers, NaN for a missing value.

    prompts, responses, scored   counts
    pass_rate, reward_variance, distinct_answers, confidence
                                 means of `prompts` over those that have the value, equally weighted
    frac_mixed                   share of mixed prompts
    entropy                      mean over all tokens, nats
    mean_length, frac_truncated  means over responses: tokens; share truncated by max_new_tokens
    ece                          `expected_calibration_error` of the confidence of correct and
                                 incorrect responses
    """
    table, confidence = prompts(rows), _confidence(rows)
    rated = rows["correct"].notna() & confidence.notna()
    averaged = ["pass_rate", "reward_variance", "distinct_answers", "confidence"]
    tokens = rows["length"].sum() or math.nan
    found = {
        "prompts": len(table),
        "responses": len(rows),
        "scored": rows["reward"].count(),
        **table[averaged].mean(),
        "frac_mixed": table["mixed"].mean(),
        "entropy": rows["entropy"].sum(skipna=False) / tokens,
        "mean_length": rows["length"].mean(),
        "frac_truncated": rows["truncated"].mean(skipna=False),
        "ece": expected_calibration_error(confidence[rated], rows["correct"][rated]),
    }
    return {name: float(value) for name, value in found.items()}


def expected_calibration_error(confidence: ArrayLike, correct: ArrayLike) -> float:
    """Compute the mean over answers of |accuracy - mean confidence| of their bin, in [0, 1]; NaN
    for no answers.

    Guo et al. 2017 ("On Calibration of Modern Neural Networks", arXiv 1706.04599, eq. 3). Bins of
    equal width over [0, 1] include their upper ends. confidence [N] in [0, 1]; correct [N], 0 or 1.
    """
    values, labels = np.asarray(confidence, np.float64), np.asarray(correct, np.float64)
    if not len(values):
        return math.nan
    inner = np.arange(1, BINS) / BINS
    apart = np.bincount(np.searchsorted(inner, values, side="left"), weights=labels - values)
    return float(np.abs(apart).sum()) / len(values)


def pair_summary(
    chosen: ArrayLike, rejected: ArrayLike, chosen_lengths: ArrayLike, rejected_lengths: ArrayLike
) -> dict[str, float]:
    """Summarise the log-probs of N preference pairs under one policy.

    chosen, rejected [N]: its summed log-probs of the responses, nats. chosen_lengths,
    rejected_lengths [N]: tokens.

        pairs
        gap_mean, gap_p10               chosen - rejected: mean, and 10 % quantile, nats
        gap_per_token                   mean of chosen / length - rejected / length, nats per token
        frac_ranked                     share of pairs with chosen strictly greater
        chosen_length, rejected_length  means, tokens

    NaN log-probs return NaN. Raises ValueError unless lengths are at least 1.
    """
    arrays = np.array([chosen, rejected, chosen_lengths, rejected_lengths], np.float64)
    better, worse, better_lengths, worse_lengths = arrays
    if not np.all(arrays[2:] >= 1):
        raise ValueError("lengths are in tokens: each response of a pair needs at least 1")
    gaps = better - worse
    return {
        "pairs": float(len(gaps)),
        "gap_mean": mean(gaps),
        "gap_p10": float(np.quantile(gaps, 0.1)) if len(gaps) else math.nan,
        "gap_per_token": mean(better / better_lengths - worse / worse_lengths),
        # NaN, which is neither above nor below, returns NaN
        "frac_ranked": mean(np.where(np.isnan(gaps), gaps, gaps > 0)),
        "chosen_length": mean(better_lengths),
        "rejected_length": mean(worse_lengths),
    }


def prompts_of_pairs(table: pd.DataFrame, pairs: ArrayLike) -> dict[str, float]:
    """Summarise the prompts of N pairs. table: from `prompts`; pairs: the number of pairs of each.

        prompts                                                those with a pair
        pass_rate, reward_variance, entropy, distinct_answers  means over pairs

    Means of no pairs are NaN.
    """
    means = ["pass_rate", "reward_variance", "entropy", "distinct_answers"]
    of_pairs = table[means].loc[table.index.repeat(np.asarray(pairs))].mean(skipna=False)
    return {"prompts": float(np.count_nonzero(pairs)), **of_pairs.astype(float)}


def margin_summary(beta: float, ref: ArrayLike, policy: ArrayLike) -> dict[str, float]:
    """Summarise DPO's implicit rewards of N pairs: beta * (policy - ref). After Rafailov et al.
    (arXiv 2305.18290, section 4).

    ref, policy [N, 2]: summed log-probs (chosen, rejected), nats. beta: that of the loss, positive.

        pairs
        chosen_mean, rejected_mean, margin_mean   of the rewards and of chosen - rejected
        accuracy    share of pairs with a margin above 0; a tie (`records.tie_nats`) counts one half
        loss        mean of -log sigmoid(margin), nats

    A policy equal to its reference has rewards and margins 0, accuracy 0.5 and loss log 2. NaN
    log-probs return NaN.
    """
    before, after = np.asarray(ref, np.float64), np.asarray(policy, np.float64)
    rewards = beta * (after - before)
    margins = rewards[:, 0] - rewards[:, 1]
    slack = beta * tie_nats(np.abs(before).sum(axis=1) + np.abs(after).sum(axis=1))
    decided = np.where(np.abs(margins) <= slack, 0.0, margins)
    return {
        "pairs": float(len(margins)),
        "chosen_mean": mean(rewards[:, 0]),
        "rejected_mean": mean(rewards[:, 1]),
        "margin_mean": mean(margins),
        "accuracy": mean((np.sign(decided) + 1) / 2),
        "loss": mean(np.logaddexp(0.0, -margins)),
    }
