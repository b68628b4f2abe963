"""Group relative policy optimisation, token-level clipped, with the normalisers that TRL names.

The default is equation 1 of "Bridging Offline and Online Reinforcement Learning for LLMs" (arXiv
2506.21495). Its loss is summed over the tokens and the responses of a group and averaged over
prompts. The advantage is reward minus group mean, without standard deviation or length. The paper
leaves out the form of the KL term to the reference; here it is Schulman's k3 estimator
(joschu.net/blog/kl-approx.html), weighted like the rest. The other loss types are those of Hugging
Face TRL 1.16, and verl's "seq-mean-token-sum", which the paper's published recipe computes:
equation 1 over the group's size. With a large Adam epsilon the scale of the loss matters, so loss
types are not interchangeable at one learning rate. The ratio may be one per response (GSPO, arXiv
2507.18071). It may also be corrected for a sampler whose probabilities differ from the trainer's
(truncated importance sampling, as TRL's "token_truncate"). "cispo" (MiniMax-M1, arXiv 2506.13585,
equation 4) uses the clipped ratio as a constant weight of the log-probability, so that a token
beyond the bound still has a gradient.

N prompts, G responses per prompt, S sequences (all responses of one optimiser step's global batch).

Sums of `grpo_loss` under TRL's names, each over active tokens:

    tokens                  their number, the normaliser of all the others
    clip_ratio/low_mean     1 where the ratio is below 1 - epsilon and A < 0: clipped, no policy gradient
    clip_ratio/high_mean    1 where the ratio is above 1 + epsilon_high and A > 0; with cispo TRL's cispo_clip_ratio,
                            and the low one is 0
    clip_ratio/region_mean  either
    ratio                   policy / old probability (per response: its own at each of its tokens), 1 when on-policy
    sampling/sampling_logp_difference/mean, …/max        |old - sampler's log-probability|
    sampling/importance_sampling_ratio/mean, …/min, …/max   old / sampler's probability, at most the cap if any
    rollout_corr/kl         sampler's - old log-probability, verl's name; the mean estimates KL(sampler || old)
                            these six only with sampler_logprobs
    kl                      k3, only with ref_logprobs
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import ArrayLike

from g2d_jax.config import GRPOLossType, ScaleRewards
from g2d_jax.losses.logprobs import sequence_means
from g2d_jax.losses.reduction import (
    Number,
    Sums,
    active_count,
    active_max,
    active_min,
    active_sum,
    check_not_negative,
    check_same_shape,
    constant,
    fill_inactive,
    is_off,
    weighted_sum,
)
from g2d_jax.records import differ

MAX_LOG_RATIO = 20.0
"""Upper bound of a log-ratio before exp, so that ratio and gradient stay finite: e^20 is 4.9e8.
Beyond it a token has no gradient. No lower bound is needed."""


def group_advantages(
    rewards: ArrayLike, scale_rewards: ScaleRewards = "none", eps: float = 1e-4
) -> np.ndarray:
    """Compute each response's advantage: its reward minus its group's mean, optionally over a
    standard deviation.

    rewards: [N, G], NaN for an unscorable response. Mean and standard deviation leave it out, and
    its advantage is 0. A group of equal rewards, or with fewer than two scorable responses, has
    exactly 0 throughout.
    scale_rewards: "none" (the paper), or divide by eps + the unbiased (ddof 1) standard deviation
    of the "group" or of all scorable rewards of the "batch" about their common mean, as in TRL.
    eps: 1e-4 in TRL, 1e-6 in the paper's published recipe. Returns [N, G] float32, computed in
    float64 on the host. Raises ValueError for another shape, an infinite reward, an unknown
    scale_rewards or an eps that is not positive.
    """
    if not eps > 0.0:
        raise ValueError(
            f"scale_rewards_eps must be positive, got {eps}; it keeps groups of nearly equal "
            "rewards finite"
        )
    rewards = np.asarray(rewards, np.float64)
    if rewards.ndim != 2 or 0 in rewards.shape:
        raise ValueError(
            f"rewards must have shape [prompts, responses per prompt], got {rewards.shape}"
        )
    if np.isinf(rewards).any():
        prompt, response = np.argwhere(np.isinf(rewards))[0]
        raise ValueError(
            f"the reward of prompt {prompt}, response {response} is infinite; use NaN for "
            "unscorable"
        )
    scorable = ~np.isnan(rewards)
    total = np.where(scorable, rewards, 0.0).sum(1, keepdims=True)
    mean = total / np.maximum(scorable.sum(1, keepdims=True), 1)
    # Equal rewards leave rounding errors of the mean: a division by 1e-4 would turn these into a
    # signal.
    centred = np.where(scorable & differ(rewards)[:, None], rewards - mean, 0.0)
    return (centred / _reward_scale(rewards, centred, scale_rewards, eps)).astype(np.float32)


def _reward_scale(
    rewards: np.ndarray, centred: np.ndarray, scale_rewards: str, eps: float
) -> np.ndarray:
    """Return the divisor of centred rewards, which broadcasts against [N, G]."""
    scorable = ~np.isnan(rewards)
    if scale_rewards == "none":
        return np.ones((1, 1))
    if scale_rewards == "group":
        freedom = np.maximum(scorable.sum(1, keepdims=True) - 1, 1)
        return np.sqrt(np.square(centred).sum(1, keepdims=True) / freedom) + eps
    if scale_rewards == "batch":
        scored = rewards[scorable]
        return np.full((1, 1), scored.std(ddof=1) if scored.size > 1 else 0.0) + eps
    raise ValueError(f"unknown scale_rewards {scale_rewards!r}; choose 'none', 'group' or 'batch'")


def token_weights(
    loss_type: GRPOLossType,
    lengths: ArrayLike,
    *,
    num_prompts: int,
    max_completion_length: int,
    mask: ArrayLike | None = None,
) -> np.ndarray:
    """Weigh every token of each sequence; the weights contain the whole global batch's normaliser.

    loss_type, normaliser:
      "sum"      prompts: sum over tokens and over the group, mean over prompts (equation 1)
      "seq-mean-token-sum"  sequences: sum over tokens, mean over the group and over prompts
      "grpo"     sequences x own length: mean over a sequence's tokens, then over sequences
      "dr_grpo"  sequences x max_completion_length: a constant
      "dapo"     tokens of the step. If one generation serves several steps, TRL uses their average instead
      "cispo"    the same; its loss per token differs, see `grpo_loss`
      "bnpo"     tokens of this very step. TRL counts them per micro-batch and device and averages, so its value
                 depends on the split; ours is TRL's for one micro-batch on one device, for any
                 split
    lengths: [S] completion tokens of every sequence in the global batch of one optimiser step.
    num_prompts: prompts in that batch, including those without a signal.
    mask: [S] bool, False for a sequence left out of the loss (TRL's mask_truncated_completions):
    weight 0, so no policy term and no KL. It still counts as a sequence and in num_prompts, but not
    in the tokens of the last three.
    An unscorable sequence is not masked: its advantage is 0, but it counts like any other and keeps
    its KL term. Returns [S] float32. Host side. Raises ValueError for an unknown loss_type or a
    number out of range.
    """
    lengths = np.asarray(lengths, np.int64)
    included = np.ones(lengths.shape, bool) if mask is None else np.asarray(mask, bool)
    if lengths.ndim != 1 or included.shape != lengths.shape or (lengths < 0).any():
        raise ValueError(
            f"lengths and mask must be [S], lengths >= 0; got shapes {lengths.shape} and "
            f"{included.shape}"
        )
    if num_prompts < 1 or max_completion_length < 1:
        raise ValueError(
            f"num_prompts {num_prompts} and max_completion_length {max_completion_length} must "
            "be >= 1"
        )
    step_tokens = max(int(lengths[included].sum()), 1)
    normalizers: dict[str, float | np.ndarray] = {
        "sum": num_prompts,
        "seq-mean-token-sum": max(lengths.size, 1),
        "grpo": lengths.size * np.maximum(lengths, 1),
        "dr_grpo": lengths.size * max_completion_length,
        "dapo": step_tokens,
        "cispo": step_tokens,
        "bnpo": step_tokens,
    }
    if loss_type not in normalizers:
        raise ValueError(
            f"unknown GRPO loss_type {loss_type!r}; choose one of {', '.join(normalizers)}"
        )
    shares = 1.0 / np.asarray(normalizers[loss_type], np.float64)
    return np.where(included, shares, 0.0).astype(np.float32)


def k3(logprobs: Array, ref_logprobs: Array) -> Array:
    """Compute the k3 estimate of KL(policy || reference) per sampled token: r - 1 - log r with r = reference / policy.

    Any equal shapes, float32 nats, never negative. Log r is bounded above by MAX_LOG_RATIO.
    """
    log_ratio = jnp.minimum(ref_logprobs - logprobs, MAX_LOG_RATIO)
    return jnp.expm1(log_ratio) - log_ratio


def grpo_loss(
    logprobs: Array,
    old_logprobs: Array | None,
    ref_logprobs: Array | None,
    advantages: Array,
    weights: Array,
    *,
    epsilon: Number = 0.2,
    epsilon_high: Number | None = None,
    beta: Number = 0.0,
    cispo: bool = False,
    sampler_logprobs: Array | None = None,
    importance_cap: Number = 0.0,
    sequence_ids: Array | None = None,
) -> tuple[Array, Sums]:
    """Compute sum(weight * (-min(ratio * A, clip(ratio, 1 - epsilon, 1 + epsilon_high) * A) *
    importance + beta * k3)).

    The sum is over tokens. All arrays have one common shape. The numbers may be arguments of a
    program.
    logprobs: of the sampled tokens under the trained policy, the only input with a gradient.
    old_logprobs: under the policy before the first update on its rollouts. None means that this is
    the first update: old_logprobs then equal logprobs, without gradient, and the ratio is exactly 1
    in any dtype.
    ref_logprobs: under the reference; None if there is none, needed if beta is not 0.
    advantages: of each token's sequence, see `group_advantages`. weights: see `token_weights`; 0 on
    prompt and padding.
    epsilon_high: None is epsilon.
    cispo: the policy term is -min(ratio, 1 + epsilon_high) * A * log-probability, with no gradient
    through the ratio. It has no lower bound, as in the paper's runs and in TRL, whose epsilon_high
    is 1 + ours.
    sampler_logprobs: as sampled, by a sampler whose arithmetic, and so whose probabilities, differ
    a little; for metrics and importance weights. importance_cap: if not 0, each token's policy term
    is multiplied by min(old / sampler's probability, importance_cap). This is truncated importance
    sampling as in TRL's "token_truncate": the cap bounds the variance but adds a bias. It needs
    sampler_logprobs.
    sequence_ids: int32, the response of each token, in [0, number of tokens) and negative on prompt
    and padding. If given, each response has one ratio: exp of its mean log-ratio over the tokens of
    nonzero weight. This is GSPO's s_i, TRL's importance_sampling_level "sequence"; with the weights
    of "grpo" the loss is GSPO's objective. None: one ratio per token.

    Returns (loss, sums), scalars in float32; the module docstring describes the sums.
    Raises ValueError for differing shapes, a negative parameter, beta without a reference, or
    importance_cap without the sampler's log-probabilities.
    """
    if epsilon_high is None:
        epsilon_high = epsilon
    check_not_negative(
        epsilon=epsilon, epsilon_high=epsilon_high, beta=beta, importance_cap=importance_cap
    )
    _check_needed(beta, ref_logprobs, importance_cap, sampler_logprobs)
    check_same_shape(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        advantages=advantages,
        weights=weights,
        sampler_logprobs=sampler_logprobs,
        sequence_ids=sequence_ids,
    )
    old_logprobs = jax.lax.stop_gradient(logprobs if old_logprobs is None else old_logprobs)
    logprobs = fill_inactive(logprobs, weights)
    old_logprobs = fill_inactive(old_logprobs, weights)
    advantages = constant(advantages, weights)
    log_ratio = logprobs - old_logprobs
    if sequence_ids is not None:
        log_ratio = sequence_means(log_ratio, jnp.where(weights != 0, sequence_ids, -1))
    lowest = 0.0 if cispo else 1.0 - epsilon
    policy_term, clipped, metrics = _clip(log_ratio, advantages, lowest, 1.0 + epsilon_high)
    if cispo:
        policy_term = clipped * logprobs
    token_loss = -advantages * policy_term
    extremes: Sums = {}
    if sampler_logprobs is not None:
        log_importance = old_logprobs - constant(sampler_logprobs, weights)
        importance, more, extremes = _importance(log_importance, weights, importance_cap)
        metrics |= more
        if not is_off(importance_cap):
            token_loss = token_loss * importance
    if ref_logprobs is not None:
        kl = k3(logprobs, constant(ref_logprobs, weights))
        token_loss = token_loss + beta * kl
        metrics["kl"] = kl
    sums = {name: active_sum(x, weights) for name, x in metrics.items()}
    return weighted_sum(token_loss, weights), sums | extremes | {"tokens": active_count(weights)}


def _check_needed(
    beta: Number,
    ref_logprobs: Array | None,
    importance_cap: Number,
    sampler_logprobs: Array | None,
) -> None:
    if not is_off(beta) and ref_logprobs is None:
        raise ValueError(
            f"beta {beta} needs ref_logprobs; pass them, or set beta to 0 to train without a KL "
            "term"
        )
    if not is_off(importance_cap) and sampler_logprobs is None:
        raise ValueError(
            f"importance_cap {importance_cap} needs sampler_logprobs, the log-probabilities at "
            "sampling"
        )


def _clip(
    log_ratio: Array, advantages: Array, lowest: Number, highest: Number
) -> tuple[Array, Array, dict[str, Array]]:
    """Return the factor of the advantage in equation 1, the clipped ratio as a constant, and their
    metrics."""
    ratio = jnp.exp(jnp.minimum(log_ratio, MAX_LOG_RATIO))
    low = (ratio < lowest) & (advantages < 0)
    high = (ratio > highest) & (advantages > 0)
    clipped = jnp.clip(jax.lax.stop_gradient(ratio), lowest, highest)
    metrics = {
        "clip_ratio/low_mean": low.astype(jnp.float32),
        "clip_ratio/high_mean": high.astype(jnp.float32),
        "clip_ratio/region_mean": (low | high).astype(jnp.float32),
        "ratio": ratio,
    }
    # In exactly these two cases the minimum of equation 1 selects the clipped side, which is
    # constant.
    return jnp.where(low | high, clipped, ratio), clipped, metrics


def _importance(
    log_importance: Array, weights: Array, cap: Number
) -> tuple[Array, dict[str, Array], Sums]:
    """Return old / sampler's probability, at most the cap if that is not 0; its metrics, and
    extremes."""
    # The logarithm is bounded, before exp: an infinity times an advantage of 0 would be NaN.
    most = MAX_LOG_RATIO if is_off(cap) else jnp.log(cap)
    importance = jnp.exp(jnp.minimum(log_importance, most))
    difference = jnp.abs(log_importance)
    metrics = {
        "rollout_corr/kl": -log_importance,
        "sampling/sampling_logp_difference/mean": difference,
        "sampling/importance_sampling_ratio/mean": importance,
    }
    extremes = {
        "sampling/sampling_logp_difference/max": active_max(difference, weights),
        "sampling/importance_sampling_ratio/max": active_max(importance, weights),
        "sampling/importance_sampling_ratio/min": active_min(importance, weights),
    }
    return importance, metrics, extremes
