"""Direct preference optimisation on sequence log-probabilities.

Equation 3 of "Bridging Offline and Online Reinforcement Learning for LLMs" (arXiv 2506.21495),
after Rafailov et al. (arXiv 2305.18290). Label smoothing is that of conservative DPO. IPO is
equation 17 of Azar et al. (arXiv 2310.12036). "sigmoid_norm" is length-normalised DPO as in TRL.
"simpo" is equation 6 of SimPO (arXiv 2405.14734), which has no reference. The optional negative
log-likelihood of the chosen response is that of the first paper's section 4.2 (scale 1 there), per
token as in its section 5.1 and in Pang et al. (arXiv 2404.19733, equation 1). Normaliser: the pairs
in the global batch of one optimiser step, or all of its prompts (`dpo_weights`).

N: preference pairs. Log-probabilities are sums over the tokens of a response (not means), in nats;
with beta 0.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import assert_never

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from g2d_jax.config import OnlineDPO
from g2d_jax.losses.reduction import (
    Number,
    Sums,
    active_count,
    active_sum,
    check_same_shape,
    fill_inactive,
    is_off,
    weighted_sum,
)
from g2d_jax.records import tie_nats

PER_TOKEN = ("sigmoid_norm", "ipo", "simpo")
"""The losses that average log-ratios (SimPO: log-probabilities) over a response's tokens."""

Pair = tuple[Array, Array]
"""Values of the chosen and of the rejected responses, both [N]."""

NUMBERS = ("beta", "simpo_gamma", "nll_coef")
"""The settings that are numbers of the loss: a program may have them as arguments."""


def dpo_weights(num_pairs: int, num_prompts: int | None = None) -> np.ndarray:
    """Weigh each pair, [num_pairs] float32: 1 / (pairs in the global batch), as in TRL. Give padding
    pairs 0.

    num_prompts: if given, the divisor: the prompts of the global batch, including those without a
    pair. Such a prompt counts as a loss of 0, as in the paper's published recipe (fairseq2): the
    more prompts are skipped, the shorter the step.
    """
    return np.full(
        (num_pairs,), 1.0 / max(num_pairs if num_prompts is None else num_prompts, 1), np.float32
    )


def ipo_loss(gaps: Array, beta: Number) -> Array:
    """Compute IPO per pair, (gap - 1 / (2 beta))^2: a target for the gap, which the sigmoid always
    widens.

    gaps: any shape, chosen minus rejected log-ratio per token. Returns the same shape, float32.
    """
    return jnp.square(gaps - 1.0 / (2.0 * beta))


def dpo_loss(
    policy_chosen: Array,
    policy_rejected: Array,
    ref_chosen: Array | None,
    ref_rejected: Array | None,
    weights: Array,
    settings: OnlineDPO,
    *,
    numbers: Mapping[str, Number] = MappingProxyType({}),
    chosen_lengths: Array | None = None,
    rejected_lengths: Array | None = None,
) -> tuple[Array, Sums]:
    """Compute sum((pair loss - nll_coef * policy_chosen / chosen_lengths) * weight) over N pairs.

    policy_*, ref_*: [N] summed log-probability of each response under the policy and the reference.
    No gradient flows into the reference; "simpo" has none and does not read ref_*. weights: [N], see
    `dpo_weights`; 0 marks a padding pair, whose values do not matter. All arrays have one common
    shape. settings.loss_type: "sigmoid" is equation 3; "sigmoid_norm" and "ipo" first divide each
    log-ratio by its response's length in tokens, as TRL does; "simpo" divides each log-probability,
    and simpo_gamma is its target margin. All three need chosen_lengths and rejected_lengths [N].
    settings.nll_coef: multiplies the chosen response's negative log-likelihood, the mean over its
    tokens, which needs chosen_lengths. settings.normalizer is that of the weights.
    numbers: of NUMBERS, replacing those of the settings; they may be arguments of a program.

    Returns (loss, sums), scalars in float32. Sums under TRL's names, each over active pairs:
      pairs               their number, the normaliser of all the others
      rewards/chosen      beta * (policy - reference) of the chosen response; with "simpo" beta * policy / length
      rewards/rejected    the same of the rejected one
      rewards/margins     chosen reward - rejected reward
      rewards/accuracies  1 where the chosen reward is greater, 0.5 at a tie (`records.tie_nats`): a policy equal to
                          its reference scores 0.5, as by chance. TRL counts ties as 0
      logps/chosen, logps/rejected   the policy's summed log-probabilities
      nll_loss            the negative log-likelihood that nll_coef multiplies, only with nll_coef. TRL's CPO and ORPO
                          trainers use this name; its DPO has no such metric (its loss_type "sft" is a mean over all
                          chosen tokens of a batch)
    Raises ValueError for differing shapes, or if the reference or the lengths are missing but
    needed; AssertionError for a loss_type without a formula here.
    """
    beta, simpo_gamma, nll_coef = (numbers.get(name, getattr(settings, name)) for name in NUMBERS)
    loss_type = settings.loss_type
    has_nll = not is_off(nll_coef)
    _check_lengths(settings, has_nll, chosen_lengths, rejected_lengths)
    if not settings.compares:
        ref_chosen, ref_rejected = jnp.zeros_like(policy_chosen), jnp.zeros_like(policy_rejected)
    elif ref_chosen is None or ref_rejected is None:
        raise ValueError(
            f"loss_type {loss_type!r} compares with a reference: pass ref_chosen and ref_rejected"
        )
    check_same_shape(
        policy_chosen=policy_chosen,
        policy_rejected=policy_rejected,
        ref_chosen=ref_chosen,
        ref_rejected=ref_rejected,
        weights=weights,
        chosen_lengths=chosen_lengths,
        rejected_lengths=rejected_lengths,
    )
    terms: tuple[Array, ...] = tuple(
        fill_inactive(x, weights)
        for x in (policy_chosen, policy_rejected, ref_chosen, ref_rejected)
    )
    policy_chosen, policy_rejected, ref_chosen, ref_rejected = terms
    rewarded = (
        policy_chosen - jax.lax.stop_gradient(ref_chosen),
        policy_rejected - jax.lax.stop_gradient(ref_rejected),
    )
    scores = rewarded
    if loss_type in PER_TOKEN:
        scores = (
            _per_token(rewarded[0], chosen_lengths),
            _per_token(rewarded[1], rejected_lengths),
        )
    pair_loss = _pair_loss(settings, scores[0] - scores[1], beta, simpo_gamma)
    if loss_type == "simpo":
        rewarded = terms = scores
    metrics = _rewards(beta, rewarded, terms)
    metrics |= {"logps/chosen": policy_chosen, "logps/rejected": policy_rejected}
    if has_nll:
        nll = _per_token(-policy_chosen, chosen_lengths)
        pair_loss = pair_loss + nll_coef * nll
        metrics["nll_loss"] = nll
    sums = {name: active_sum(x, weights) for name, x in metrics.items()}
    return weighted_sum(pair_loss, weights), sums | {"pairs": active_count(weights)}


def _pair_loss(settings: OnlineDPO, gaps: Array, beta: Number, simpo_gamma: Number) -> Array:
    match settings.loss_type:
        case "ipo":
            return ipo_loss(gaps, beta)
        case "simpo":
            return -jax.nn.log_sigmoid(beta * gaps - simpo_gamma)
        case "sigmoid" | "sigmoid_norm":
            return -jax.nn.log_sigmoid(beta * gaps)
        case _:
            assert_never(settings.loss_type)


def _rewards(beta: Number, rewarded: Pair, terms: tuple[Array, ...]) -> dict[str, Array]:
    """Return the implicit rewards of each pair. terms: the log-probabilities in them."""
    chosen, rejected = (beta * values for values in rewarded)
    margins = chosen - rejected
    # Sums of tens of thousands of log-probabilities differ by rounding alone. Within that a pair is
    # a tie, so that a policy equal to its reference has an accuracy of one half.
    slack = beta * tie_nats(sum(map(jnp.abs, terms)))
    is_right = jnp.where(jnp.abs(margins) <= slack, 0.5, (margins > 0).astype(jnp.float32))
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": margins,
        "rewards/accuracies": is_right,
    }


def _check_lengths(
    settings: OnlineDPO,
    has_nll: bool,
    chosen_lengths: Array | None,
    rejected_lengths: Array | None,
) -> None:
    if settings.loss_type in PER_TOKEN and (chosen_lengths is None or rejected_lengths is None):
        raise ValueError(
            f"loss_type {settings.loss_type!r} averages log-probabilities: pass chosen_lengths and "
            "rejected_lengths"
        )
    if has_nll and chosen_lengths is None:
        raise ValueError("the NLL term is a mean over tokens: pass chosen_lengths")


def _per_token(total: Array, lengths: Array | None) -> Array:
    assert lengths is not None
    return total / jnp.maximum(lengths.astype(jnp.float32), 1.0)
