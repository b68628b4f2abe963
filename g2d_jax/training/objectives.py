"""From parameters and one packed micro-batch to a loss: the losses of g2d_jax/losses on the model's log-probabilities.

An objective is a function (params, micro) -> (loss, sums). micro: the arrays of data/packing.py without their first
dimension: [R, T] per token, [R, M] per response.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from g2d_jax import losses
from g2d_jax.models.decoder import Decoder, Remat, forward, head_matrix

Micro = Mapping[str, jax.Array]
Objective = Callable[[Decoder, Micro], tuple[jax.Array, dict[str, jax.Array]]]


@dataclass(frozen=True)
class Compute:
    """How a forward pass is carried out; nothing here changes what is computed, beyond rounding."""

    mesh: Mesh
    dtype: jnp.dtype = jnp.float32  # type: ignore[assignment]
    remat: Remat = "none"


def response_logprobs(
    compute: Compute, params: Decoder, micro: Micro, temperature: float = 1.0, with_entropy: bool = False
) -> tuple[jax.Array, jax.Array | None]:
    """Log-probabilities and entropies, float32 [R, T], of the response tokens; meaningless on prompts and padding."""
    hidden, _ = forward(
        params,
        micro["tokens"],
        micro["positions"],
        micro["segment_ids"],
        dtype=compute.dtype,
        remat=compute.remat,
    )
    hidden = jnp.take_along_axis(hidden, micro["source"][:, :, None], axis=1)
    return losses.sharded_token_logprobs(
        hidden,
        head_matrix(params),
        micro["tokens"],
        mesh=compute.mesh,
        temperature=temperature,
        with_entropy=with_entropy,
    )


def sft(compute: Compute) -> Objective:
    """micro: weight [R, T]."""

    def objective(params: Decoder, micro: Micro) -> tuple[jax.Array, dict[str, jax.Array]]:
        logprobs, _ = response_logprobs(compute, params, micro)
        return losses.sft_loss(logprobs, micro["weight"])

    return objective


def grpo(compute: Compute, *, temperature: float, epsilon: float, epsilon_high: float | None, beta: float) -> Objective:
    """micro: weight, advantage, old_logprob and, for beta > 0, ref_logprob, each [R, T]."""

    def objective(params: Decoder, micro: Micro) -> tuple[jax.Array, dict[str, jax.Array]]:
        logprobs, _ = response_logprobs(compute, params, micro, temperature)
        return losses.grpo_loss(
            logprobs,
            micro["old_logprob"],
            micro["ref_logprob"] if beta else None,
            micro["advantage"],
            micro["weight"],
            epsilon=epsilon,
            epsilon_high=epsilon_high,
            beta=beta,
        )

    return objective


def dpo(compute: Compute, *, beta: float, label_smoothing: float, loss_type: str) -> Objective:
    """micro: weight and reference (summed log-probability), [R, M]; chosen in even places, rejected in odd ones."""

    def objective(params: Decoder, micro: Micro) -> tuple[jax.Array, dict[str, jax.Array]]:
        logprobs, _ = response_logprobs(compute, params, micro)
        sums = place_sums(logprobs, micro)
        lengths = place_sums(jnp.ones_like(logprobs), micro)
        reference = micro["reference"]
        return losses.dpo_loss(
            sums[:, 0::2],
            sums[:, 1::2],
            reference[:, 0::2],
            reference[:, 1::2],
            micro["weight"][:, 0::2],
            beta=beta,
            label_smoothing=label_smoothing,
            loss_type=loss_type,  # type: ignore[arg-type]  # checked by the loss
            chosen_lengths=lengths[:, 0::2],
            rejected_lengths=lengths[:, 1::2],
        )

    return objective


def place_sums(values: jax.Array, micro: Micro) -> jax.Array:
    """Sum token values [R, T] over each response: [R, M], 0 for empty places."""
    rows, places = micro["weight"].shape
    offsets = jnp.arange(rows)[:, None] * places
    ids = jnp.where(micro["sequence"] >= 0, micro["sequence"] + offsets, -1)
    return losses.sequence_sums(values, ids, rows * places).reshape(rows, places)
