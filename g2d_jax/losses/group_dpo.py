"""GroupDPO: the mean DPO loss over all pairs of a correct and an incorrect response to one prompt.

Equation 4 of "Bridging Offline and Online Reinforcement Learning for LLMs" (arXiv 2506.21495). Each
response has one forward pass. Pairs are formed from log-probabilities inside one row of a packed
batch, so a prompt's responses must share a row. Normaliser: prompts with a pair in the global
batch, or all its prompts, times the prompt's own pairs (`group_dpo_weights`).

R rows, M response places of a row, N prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import ArrayLike

from g2d_jax.config import OnlineDPO
from g2d_jax.losses.dpo import dpo_loss
from g2d_jax.losses.reduction import Number, Sums, check_same_shape


def group_dpo_weights(
    num_correct: ArrayLike, num_incorrect: ArrayLike, num_prompts: int | None = None
) -> np.ndarray:
    """Weigh every pair of each prompt: 1 / (prompts with a pair * correct * incorrect), 0 for a
    prompt without a pair.

    num_correct, num_incorrect: [N] responses used, of every prompt in the global batch of one
    optimiser step.
    num_prompts: if given, the divisor instead of the prompts with a pair, as in `dpo_weights`.
    Returns [N] float32. Host side. Raises ValueError for other shapes or a negative count.
    """
    correct, incorrect = np.asarray(num_correct, np.int64), np.asarray(num_incorrect, np.int64)
    is_1d = correct.ndim == 1 and correct.shape == incorrect.shape
    if not is_1d or min(correct.min(initial=0), incorrect.min(initial=0)) < 0:
        raise ValueError(
            f"counts must be [prompts] and >= 0; got shapes {correct.shape} and {incorrect.shape}"
        )
    pairs = correct * incorrect
    prompts = max(int((pairs > 0).sum()) if num_prompts is None else num_prompts, 1)
    return np.where(pairs > 0, 1.0 / (prompts * np.maximum(pairs, 1)), 0.0).astype(np.float32)


def pair_weights(sides: Array, groups: Array, weights: Array) -> Array:
    """Spread weights [R, M] to [R, M, M] float32: of chosen place i with rejected place j, 0 where
    they form no pair.

    See `group_dpo_loss` for the arguments.
    """
    pairs = (
        (sides[:, :, None] > 0)
        & (sides[:, None, :] < 0)
        & (groups[:, :, None] == groups[:, None, :])
    )
    return jnp.where(pairs, weights.astype(jnp.float32)[:, :, None], 0.0)


def group_dpo_loss(
    policy: Array,
    reference: Array | None,
    sides: Array,
    groups: Array,
    weights: Array,
    settings: OnlineDPO,
    *,
    numbers: Mapping[str, Number] = MappingProxyType({}),
    lengths: Array | None = None,
) -> tuple[Array, Sums]:
    """Compute sum(pair loss * weight) over all pairs of a chosen and a rejected place of one row
    and one group.

    All arrays are [R, M]. policy, reference: summed log-probability of each response; no gradient
    flows into the reference, which is None if the loss has none. sides: 1 chosen, -1 rejected, 0
    unused (its values do not matter). groups: the prompt of each response, a number unique within
    the row. weights: for each pair of a chosen place, see `group_dpo_weights`; other places' weights
    are not read.
    settings, numbers: as in `dpo_loss`; with these weights nll_coef multiplies the mean over a
    prompt's chosen responses, then over prompts. lengths: of the responses in tokens, required as
    in `dpo_loss`.

    Returns (loss, sums): equal to `dpo_loss` of all the pairs, with the same sums, each over pairs.
    Raises ValueError as `dpo_loss`.
    """
    check_same_shape(
        policy=policy,
        reference=reference,
        sides=sides,
        groups=groups,
        weights=weights,
        lengths=lengths,
    )
    if policy.ndim != 2:
        raise ValueError(f"the arrays of GroupDPO must be [rows, places], got {policy.shape}")
    pairs = pair_weights(sides, groups, weights)

    # Each response has one forward pass. Its number is read in the row of every pair in which it is
    # chosen, and in the column of every pair in which it is rejected.
    def spread(x: Array | None, axis: int) -> Any:
        if x is None:
            return None
        return jnp.broadcast_to(jnp.expand_dims(x, axis), pairs.shape)

    chosen, rejected = partial(spread, axis=2), partial(spread, axis=1)
    return dpo_loss(
        chosen(policy),
        rejected(policy),
        chosen(reference),
        rejected(reference),
        pairs,
        settings,
        numbers=numbers,
        chosen_lengths=chosen(lengths),
        rejected_lengths=rejected(lengths),
    )
