"""From parameters and one packed micro-batch to a loss: the losses of g2d_jax/losses on the model's log-probabilities.

An objective is a function (params, micro) -> (loss, sums). micro: the arrays of data/packing.py without their first
dimension: [R, T] per token, [R, M] per response. With "dropout" among them, as training/dropout.py makes it, the
adapters' inputs are dropped at the rate of the model's config.
The same settings give the same function, by which jitted programs are known again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from g2d_jax import losses
from g2d_jax.config import AttentionSetting, OnlineDPO
from g2d_jax.models.decoder import Decoder, Remat, forward, head_matrix
from g2d_jax.models.kernels import attention_for, platform_of
from g2d_jax.training.dropout import KEYS

ImportanceLevel = Literal["token", "sequence"]
Micro = Mapping[str, jax.Array]
Objective = Callable[[Decoder, Micro], tuple[jax.Array, dict[str, jax.Array]]]


@dataclass(frozen=True)
class Compute:
    """The settings of a forward pass; nothing here changes what is computed, beyond rounding."""

    mesh: Mesh
    dtype: jnp.dtype = jnp.float32  # type: ignore[assignment]
    remat: Remat = "none"
    attention: AttentionSetting = "auto"


def response_logprobs(
    compute: Compute, params: Decoder, micro: Micro, temperature: float = 1.0, with_entropy: bool = False
) -> tuple[jax.Array, jax.Array | None]:
    """Compute log-probabilities and entropies, float32 [R, T], of the response tokens; 0 on prompts and padding."""
    hidden, _ = forward(
        params,
        micro["tokens"],
        micro["positions"],
        micro["segment_ids"],
        dtype=compute.dtype,
        remat=compute.remat,
        mesh=compute.mesh,
        attention=attention_for(compute.attention, compute.mesh, "packed"),
        dropout=micro.get(KEYS),
    )
    hidden = jnp.take_along_axis(hidden, micro["logit_index"][:, :, None], axis=1)
    return losses.sharded_token_logprobs(
        hidden,
        head_matrix(params),
        micro["tokens"],
        micro["response_index"] >= 0,
        mesh=compute.mesh,
        temperature=temperature,
        chunk=losses.chunk_of(params.config.vocab_size, platform_of(compute.mesh)),
        with_entropy=with_entropy,
    )


@cache
def sft(compute: Compute) -> Objective:
    """Return the objective of supervised fine-tuning. micro: weight [R, T]."""

    def objective(params: Decoder, micro: Micro) -> tuple[jax.Array, dict[str, jax.Array]]:
        logprobs, _ = response_logprobs(compute, params, micro)
        return losses.sft_loss(logprobs, micro["weight"])

    return objective


@cache
def grpo(
    compute: Compute,
    *,
    temperature: float,
    beta: float,
    importance_sampling_level: ImportanceLevel = "token",
    entropy_coef: float = 0.0,
    **clipping: Any,
) -> Objective:
    """Return GRPO's objective. micro: weight, advantage and, for beta > 0, ref_logprob, each [R, T]; old_logprob and
    sampler_logprob if present.

    Without old_logprob the update is the first on its rollouts, at ratio 1 (`losses.grpo_loss`).
    importance_sampling_level: "token", or "sequence" for one ratio a response (GSPO). entropy_coef: if not 0, times the
    mean entropy at this temperature, which is rewarded; micro then needs entropy_weight [R, T] (`losses.sft_weights`).
    clipping: epsilon, epsilon_high, cispo and importance_cap of `losses.grpo_loss`.
    """

    def objective(params: Decoder, micro: Micro) -> tuple[jax.Array, dict[str, jax.Array]]:
        logprobs, entropies = response_logprobs(compute, params, micro, temperature, with_entropy=bool(entropy_coef))
        result = _policy_term(logprobs, micro, importance_sampling_level, beta=beta, **clipping)
        return _with_entropy(result, entropies, micro, entropy_coef)

    return objective


@cache
def dpo(compute: Compute, settings: OnlineDPO, *, entropy_coef: float = 0.0) -> Objective:
    """Return DPO's objective. micro, [R, M]: weight and, unless the loss has none, reference (summed log-probability);
    chosen in even places, rejected in odd ones.

    entropy_coef: if not 0, as in `grpo` but at temperature 1; micro then needs entropy_weight [R, T].
    """

    def objective(params: Decoder, micro: Micro) -> tuple[jax.Array, dict[str, jax.Array]]:
        logprobs, entropies = response_logprobs(compute, params, micro, with_entropy=bool(entropy_coef))
        sums, lengths = place_sums(logprobs, micro), place_sums(jnp.ones_like(logprobs), micro)
        reference = micro["reference"] if settings.compares else None
        result = losses.dpo_loss(
            sums[:, 0::2],
            sums[:, 1::2],
            None if reference is None else reference[:, 0::2],
            None if reference is None else reference[:, 1::2],
            micro["weight"][:, 0::2],
            settings,
            chosen_lengths=lengths[:, 0::2],
            rejected_lengths=lengths[:, 1::2],
        )
        return _with_entropy(result, entropies, micro, entropy_coef)

    return objective


@cache
def group_dpo(
    compute: Compute,
    settings: OnlineDPO,
    *,
    entropy_coef: float = 0.0,
    grpo_coef: float = 0.0,
    kl_beta: float = 0.0,
    importance_sampling_level: ImportanceLevel = "token",
    **clipping: Any,
) -> Objective:
    """Return the objective GroupDPO + grpo_coef * GRPO, in one forward pass, at temperature 1.

    micro, [R, M]: pair_weight, side, prompt (a number of its own within the row) and, unless the loss has none,
    reference. A prompt's responses must share a row.
    With grpo_coef also those of `grpo`, whose beta is kl_beta here; its metrics then carry their own count, "|tokens".
    With entropy_coef also entropy_weight [R, T].
    """

    def objective(params: Decoder, micro: Micro) -> tuple[jax.Array, dict[str, jax.Array]]:
        logprobs, entropies = response_logprobs(compute, params, micro, with_entropy=bool(entropy_coef))
        policy, lengths = place_sums(logprobs, micro), place_sums(jnp.ones_like(logprobs), micro)
        reference = micro["reference"] if settings.compares else None
        side, prompt, weight = (micro[name] for name in ("side", "prompt", "pair_weight"))
        loss, sums = losses.group_dpo_loss(policy, reference, side, prompt, weight, settings, lengths=lengths)
        if grpo_coef:
            other, more = _policy_term(logprobs, micro, importance_sampling_level, beta=kl_beta, **clipping)
            tokens = more.pop("tokens")
            loss = loss + grpo_coef * other
            sums = sums | {"tokens": tokens} | {f"{name}|tokens": value for name, value in more.items()}
        return _with_entropy((loss, sums), entropies, micro, entropy_coef)

    return objective


def place_sums(values: jax.Array, micro: Micro) -> jax.Array:
    """Sum token values [R, T] over each response: [R, M], 0 for empty places. M is that of micro's weights."""
    rows, places = micro["pair_weight" if "pair_weight" in micro else "weight"].shape
    return losses.sequence_sums(values, _numbered(micro["response_index"], places), rows * places).reshape(rows, places)


def _numbered(response_index: jax.Array, places: int) -> jax.Array:
    """Map places of a row, in [0, places), to numbers that no two rows share: [R, T]; negative ones stay."""
    return jnp.where(response_index >= 0, response_index + places * jnp.arange(response_index.shape[0])[:, None], -1)


def _policy_term(
    logprobs: jax.Array, micro: Micro, level: ImportanceLevel, *, beta: float, **clipping: Any
) -> tuple[jax.Array, dict[str, jax.Array]]:
    # A row of T tokens holds at most T responses, so that T numbers a row suffice whatever its number of places.
    ids = _numbered(micro["response_index"], logprobs.shape[1]) if level == "sequence" else None
    return losses.grpo_loss(
        logprobs,
        micro.get("old_logprob"),
        micro["ref_logprob"] if beta else None,
        micro["advantage"],
        micro["weight"],
        beta=beta,
        sampler_logprobs=micro.get("sampler_logprob"),
        sequence_ids=ids,
        **clipping,
    )


def _with_entropy(
    result: tuple[jax.Array, dict[str, jax.Array]], entropies: jax.Array | None, micro: Micro, coef: float
) -> tuple[jax.Array, dict[str, jax.Array]]:
    if entropies is None:
        return result
    loss, sums = losses.entropy_loss(entropies, micro["entropy_weight"], coef)
    return result[0] + loss, result[1] | sums
