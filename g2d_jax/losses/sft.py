"""Supervised fine-tuning: negative log-likelihood of the completion tokens.

Normaliser: the number of completion tokens in the global batch of one optimiser step
(`sft_weights`), so the loss is the mean over tokens, not over sequences or micro-batches.
"""

from __future__ import annotations

import jax
import numpy as np
from numpy.typing import ArrayLike

from g2d_jax.losses.reduction import (
    Sums,
    active_count,
    active_sum,
    check_same_shape,
    fill_inactive,
    weighted_sum,
)


def sft_weights(lengths: ArrayLike) -> np.ndarray:
    """Weigh each token of each sequence: 1 / (completion tokens in the global batch).

    lengths: [S] completion tokens of every sequence in the global batch. Returns [S] float32. Host
    side.
    """
    lengths = np.asarray(lengths, np.int64)
    return np.full(lengths.shape, 1.0 / max(int(lengths.sum()), 1), np.float32)


def sft_loss(logprobs: jax.Array, weights: jax.Array) -> tuple[jax.Array, Sums]:
    """Compute -sum(logprobs * weights).

    logprobs: log-probability of each target token, any shape. weights: same shape, see
    `sft_weights`; 0 on prompt and padding. Returns (loss, sums), scalars in float32. Sums, each
    over active tokens:
      tokens  their number, the normaliser of nll
      nll     -logprobs, so nll / tokens is the mean negative log-likelihood in nats per token
    Raises ValueError if the shapes differ.
    """
    check_same_shape(logprobs=logprobs, weights=weights)
    nll = -fill_inactive(logprobs, weights)
    return weighted_sum(nll, weights), {
        "tokens": active_count(weights),
        "nll": active_sum(nll, weights),
    }
