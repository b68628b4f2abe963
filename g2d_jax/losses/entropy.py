"""Entropy regularisation: a bonus for the mean next-token entropy of the trained responses.

"Bridging Offline and Online Reinforcement Learning for LLMs" (arXiv 2506.21495) adds the mean
negative entropy of the next-token distributions to any loss, with coefficients of 1e-4 to 5e-4.
Normaliser: the response tokens of the global batch, as in supervised fine-tuning (`sft_weights`).
"""

from __future__ import annotations

import jax

from g2d_jax.losses.reduction import (
    Number,
    Sums,
    active_count,
    active_sum,
    check_not_negative,
    check_same_shape,
    weighted_sum,
)


def entropy_loss(entropies: jax.Array, weights: jax.Array, coef: Number) -> tuple[jax.Array, Sums]:
    """Compute -coef * sum(entropy * weight), to add to another loss.

    entropies: in nats, of the distribution that each token was sampled from, differentiable
    (`token_logprobs`); any shape. weights: same shape, see `sft_weights`; 0 on prompt and padding.
    coef: at least 0. Returns (loss, sums), scalars in float32. Sums, each over active tokens; they
    have their own count, since the other loss may use other tokens ("entropy" is the sampler's
    metric):
      policy_entropy|entropy_tokens   entropy
      entropy_tokens                  their number
    Raises ValueError if the shapes differ or for a negative coef.
    """
    check_not_negative(entropy_coef=coef)
    check_same_shape(entropies=entropies, weights=weights)
    sums = {
        "policy_entropy|entropy_tokens": active_sum(entropies, weights),
        "entropy_tokens": active_count(weights),
    }
    return -coef * weighted_sum(entropies, weights), sums
