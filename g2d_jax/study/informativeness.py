"""Informativeness of a policy's rollouts: by prompt, by policy and by preference pair.

A group is the responses of one policy to one draw of a prompt. A response is scored if its reward
is a finite number: what cannot be scored has none and is left out. Correct and incorrect are as
`Score.accuracy` has them: a response without an answer and a timeout are incorrect, and one of a
reward that only ranks is neither.

Log-probabilities and entropies are in nats and those of the distribution sampled from: after
temperature and filters. Greedy responses have log-prob 0 at every token, so confidence and
calibration say nothing about them. NaN stands for what is not defined, as the mean of nothing.
Spreads are population ones: divided by N, not N - 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from g2d_jax.records import ScoredRollout, differ, tie_nats
from g2d_jax.study.stats import mean

BINS = 10
"""Bins of confidence in the calibration error."""


@dataclass(frozen=True, slots=True, eq=False)
class _Responses:
    """Arrays [G] of G responses; wrong: judged and not correct.

    logprob and entropy: sums over tokens, float64.
    """

    reward: NDArray[np.float64]  # NaN where not scored
    correct: NDArray[np.bool_]
    wrong: NDArray[np.bool_]
    length: NDArray[np.float64]  # tokens
    logprob: NDArray[np.float64]
    entropy: NDArray[np.float64]
    truncated: NDArray[np.float64]  # 1 or 0

    @property
    def scored(self) -> NDArray[np.bool_]:
        return ~np.isnan(self.reward)

    @property
    def judged(self) -> NDArray[np.bool_]:
        return self.correct | self.wrong

    @property
    def gives_pairs(self) -> bool:
        ranked = self.reward[self.scored & ~self.judged]
        return bool((self.correct.any() and self.wrong.any()) or differ(ranked))

    @property
    def token_logprob(self) -> NDArray[np.float64]:
        """The mean log-prob of a token, the length-normalised log-prob; NaN for an empty
        response."""
        return np.where(self.length > 0, self.logprob / np.maximum(self.length, 1), math.nan)

    @property
    def confidence(self) -> NDArray[np.float64]:
        """The geometric mean of the tokens' probabilities, in [0, 1]: rounding may leave a log-prob
        just above 0."""
        return np.exp(np.minimum(self.token_logprob, 0.0))

    @property
    def token_entropy(self) -> float:
        tokens = int(self.length.sum())
        if tokens:
            return float(self.entropy.sum()) / tokens
        return math.nan


def _responses(rows: Sequence[ScoredRollout]) -> _Responses:
    numbers = np.array(list(map(_numbers, rows)), np.float64).reshape(len(rows), 6)
    reward, judged, length, logprob, entropy, truncated = np.ascontiguousarray(numbers.T)
    reward[~np.isfinite(reward)] = math.nan
    scored = ~np.isnan(reward)
    return _Responses(
        reward=reward,
        correct=scored & (judged == 1),
        wrong=scored & (judged == 0),
        length=length,
        logprob=logprob,
        entropy=entropy,
        truncated=truncated,
    )


def _numbers(row: ScoredRollout) -> tuple[float, ...]:
    """Return what is measured of a response: reward, accuracy, tokens, log-prob, entropy, and
    whether it was truncated."""
    rollout = row.rollout
    logprob = rollout.logprobs.sum(dtype=np.float64)
    entropy = rollout.entropies.sum(dtype=np.float64)
    reward = math.nan if row.score.reward is None else row.score.reward
    is_truncated = rollout.stop_reason == "length"
    return reward, row.score.accuracy, rollout.length, logprob, entropy, is_truncated


def prompts(groups: Sequence[Sequence[ScoredRollout]]) -> dict[str, list[str] | np.ndarray]:
    """Tabulate one row per group, in their order: texts in lists, numbers in arrays [len(groups)].

      problem_id, visit, policy   what was drawn and who answered
      samples, scored             responses, and those with a reward
      pass_rate                   share of correct among correct and incorrect responses
      reward_mean, reward_variance
      mixed                       pairs can be made: a correct and an incorrect response, or two scalar rewards
      entropy                     mean over the tokens of all responses, nats
      distinct_answers            different extracted answers, compared as text; "none" counts as one of them
      mean_length, mean_length_correct, mean_length_incorrect   tokens
      confidence                  mean over responses of exp(mean log-prob of a token)
      logprob_gap                 mean summed log-prob of correct responses minus that of incorrect ones, nats

    Raises ValueError for a group without responses, or of several prompts, draws or policies.
    """
    owners = list(map(_owner, groups))
    parts = list(map(_responses, groups))
    return {
        "problem_id": [problem_id for problem_id, _, _ in owners],
        "visit": np.array([visit for _, visit, _ in owners], np.int64),
        "policy": [policy for _, _, policy in owners],
        "samples": np.array(list(map(len, groups)), np.int64),
        "scored": np.array([r.scored.sum() for r in parts], np.int64),
        "pass_rate": _floats(mean(r.correct[r.judged]) for r in parts),
        "reward_mean": _floats(mean(r.reward[r.scored]) for r in parts),
        "reward_variance": _floats(_variance(r.reward[r.scored]) for r in parts),
        "mixed": np.array([r.gives_pairs for r in parts], np.bool_),
        "entropy": _floats(r.token_entropy for r in parts),
        "distinct_answers": np.array(
            [len({row.score.answer for row in group}) for group in groups], np.int64
        ),
        "mean_length": _floats(mean(r.length) for r in parts),
        "mean_length_correct": _floats(mean(r.length[r.correct]) for r in parts),
        "mean_length_incorrect": _floats(mean(r.length[r.wrong]) for r in parts),
        "confidence": _floats(_mean_known(r.confidence) for r in parts),
        "logprob_gap": _floats(
            mean(r.logprob[r.correct]) - mean(r.logprob[r.wrong]) for r in parts
        ),
    }


def summary(groups: Sequence[Sequence[ScoredRollout]]) -> dict[str, float]:
    """Summarise one policy in numbers, NaN where nothing has the value.

      prompts, responses, scored   counts
      pass_rate, reward_variance, frac_mixed, distinct_answers, confidence, logprob_gap
                                   means of `prompts` over those that have the value, all weighing
                                   the same
      entropy                      mean over all tokens, nats
      mean_length, mean_length_correct, mean_length_incorrect   means over responses, tokens
      frac_truncated               share of responses cut by max_new_tokens
      ece, auroc                   does the policy's own confidence predict correctness? over right and wrong ones:
                                   `expected_calibration_error` of exp(length-normalised log-prob),
                                   10 bins, and `auroc` of the length-normalised log-prob

    Raises ValueError as `prompts`.
    """
    table = prompts(groups)
    every = _responses(list(itertools.chain.from_iterable(groups)))
    rated = every.judged & ~np.isnan(every.token_logprob)
    by_prompt = ("pass_rate", "reward_variance", "distinct_answers", "confidence", "logprob_gap")
    return {
        "prompts": float(len(groups)),
        "responses": float(len(every.length)),
        "scored": float(every.scored.sum()),
        **{name: _mean_known(np.asarray(table[name], np.float64)) for name in by_prompt},
        "frac_mixed": mean(np.asarray(table["mixed"])),
        "entropy": every.token_entropy,
        "mean_length": mean(every.length),
        "mean_length_correct": mean(every.length[every.correct]),
        "mean_length_incorrect": mean(every.length[every.wrong]),
        "frac_truncated": mean(every.truncated),
        "ece": expected_calibration_error(every.confidence[rated], every.correct[rated]),
        "auroc": auroc(every.token_logprob[rated], every.correct[rated]),
    }


def expected_calibration_error(confidence: ArrayLike, correct: ArrayLike) -> float:
    """Compute the mean over answers of |accuracy - mean confidence| of their bin, in [0, 1]; NaN for no answers.

    Guo et al. 2017 ("On Calibration of Modern Neural Networks", arXiv 1706.04599, eq. 3). Bins of
    equal width over [0, 1] have their upper ends. confidence [N] in [0, 1]; correct [N], 0 or 1.
    """
    values, labels = np.asarray(confidence, np.float64), np.asarray(correct, np.float64)
    if not len(values):
        return math.nan
    inner = np.arange(1, BINS) / BINS
    apart = np.bincount(np.searchsorted(inner, values, side="left"), weights=labels - values)
    return float(np.abs(apart).sum()) / len(values)


def auroc(score: ArrayLike, label: ArrayLike) -> float:
    """Compute the chance that a random answer of label 1 has a higher score than one of label 0,
    ties counting half.

    The area under the ROC curve, from the ranks (Mann and Whitney), exact. NaN if either label is
    missing. score [N], any numbers but NaN; label [N], 0 or 1.
    """
    from scipy.stats import rankdata  # here: it takes a second to import

    values, labels = np.asarray(score, np.float64), np.asarray(label, np.bool_)
    positive, negative = int(labels.sum()), int((~labels).sum())
    if not positive or not negative:
        return math.nan
    # equal scores share their mean rank
    wins = float(rankdata(values)[labels].sum()) - positive * (positive + 1) / 2
    return wins / (positive * negative)


def pair_summary(
    chosen: ArrayLike, rejected: ArrayLike, chosen_lengths: ArrayLike, rejected_lengths: ArrayLike
) -> dict[str, float]:
    """Summarise the log-probs that one policy gives to N preference pairs.

    chosen, rejected [N]: its summed log-probs of the responses, nats. chosen_lengths,
    rejected_lengths [N]: tokens.

      pairs
      gap_mean, gap_std, gap_p10, gap_p50, gap_p90   chosen - rejected, nats
      gap_per_token                      mean of chosen / its length - rejected / its length, nats per token
      frac_ranked                        share of pairs with chosen strictly greater
      chosen_length, rejected_length     means, tokens

    NaN log-probs give NaN. Raises ValueError unless lengths are at least 1.
    """
    arrays = np.array([chosen, rejected, chosen_lengths, rejected_lengths], np.float64)
    better, worse, better_lengths, worse_lengths = arrays
    if not (np.all(better_lengths >= 1) and np.all(worse_lengths >= 1)):
        raise ValueError("lengths count tokens: each response of a pair has at least 1")
    return {
        "pairs": float(len(better)),
        **_spread("gap", better - worse),
        "gap_per_token": mean(better / better_lengths - worse / worse_lengths),
        "frac_ranked": _share_positive(better - worse),
        "chosen_length": mean(better_lengths),
        "rejected_length": mean(worse_lengths),
    }


def prompts_of_pairs(table: Mapping[str, Any]) -> dict[str, float]:
    """Summarise the prompts that N pairs are of. table: columns of `prompts`, and pairs, how many
    each of them gave.

      prompts                                                   those that gave a pair
      pass_rate, reward_variance, entropy, distinct_answers     means over pairs, each counting as its prompt

    Means of no pairs are NaN.
    """
    pairs = np.asarray(table["pairs"], np.int64)
    means = ("pass_rate", "reward_variance", "entropy", "distinct_answers")
    return {
        "prompts": float(np.count_nonzero(pairs)),
        **{name: mean(np.repeat(np.asarray(table[name], np.float64), pairs)) for name in means},
    }


def margin_summary(beta: float, ref: ArrayLike, policy: ArrayLike) -> dict[str, float]:
    """Summarise DPO's implicit rewards of N pairs: beta * (policy - ref). After Rafailov et al.
    (arXiv 2305.18290, section 4).

    ref, policy [N, 2]: summed log-probs (chosen, rejected), nats. beta: that of the loss, positive.

      pairs
      chosen_*, rejected_*, margin_*   mean, std, p10, p50, p90 of the rewards and of chosen - rejected
      accuracy                         share of pairs with a margin above 0; a tie (`records.tie_nats`) counts one half
      loss                             mean of -log sigmoid(margin), nats

    A policy that is its reference has rewards and margins 0, accuracy 0.5 and loss log 2. NaN
    log-probs give NaN.
    """
    before, after = np.asarray(ref, np.float64), np.asarray(policy, np.float64)
    rewards = beta * (after - before)
    margins = rewards[:, 0] - rewards[:, 1]
    slack = beta * tie_nats(np.abs(before).sum(axis=1) + np.abs(after).sum(axis=1))
    decided = np.where(np.abs(margins) <= slack, 0.0, margins)
    return {
        "pairs": float(len(margins)),
        **_spread("chosen", rewards[:, 0]),
        **_spread("rejected", rewards[:, 1]),
        **_spread("margin", margins),
        "accuracy": mean((np.sign(decided) + 1) / 2),
        "loss": mean(np.logaddexp(0.0, -margins)),
    }


def _owner(group: Sequence[ScoredRollout]) -> tuple[str, int, str]:
    owners = {(row.rollout.problem_id, row.rollout.visit, row.policy) for row in group}
    if len(owners) != 1:
        mixed = f"{len(group)} responses of {sorted(owners)[:3]}"
        raise ValueError(
            f"a group is what one policy answered to one draw of a prompt, got {mixed}: group "
            "them first"
        )
    return owners.pop()


def _spread(name: str, values: NDArray[np.float64]) -> dict[str, float]:
    quantiles = [math.nan] * 3
    if len(values):
        quantiles = np.quantile(values, (0.1, 0.5, 0.9)).tolist()
    figures = [mean(values), math.sqrt(_variance(values)), *quantiles]
    return {
        f"{name}_{what}": figure
        for what, figure in zip(("mean", "std", "p10", "p50", "p90"), figures, strict=True)
    }


def _floats(values: Iterable[float]) -> NDArray[np.float64]:
    return np.fromiter(values, np.float64)


def _mean_known(values: NDArray[np.float64]) -> float:
    return mean(values[~np.isnan(values)])


def _share_positive(values: NDArray[np.float64]) -> float:
    """Compute the share above 0; NaN if any is NaN, which is neither above nor below."""
    if np.isnan(values).any():
        return math.nan
    return mean(values > 0.0)


def _variance(values: NDArray[np.float64]) -> float:
    if not len(values):
        return math.nan
    # Equal values leave rounding errors of the mean, and their variance is 0.
    if not differ(values):
        return 0.0
    return float(values.var())
