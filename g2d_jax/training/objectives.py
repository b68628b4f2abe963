"""From parameters and one packed micro-batch to a loss: the losses of g2d_jax/losses on the model's
log-probabilities.

An objective is a function (params, micro) -> (loss, sums). micro: the arrays of data/packing.py
without their first dimension: [R, T] per token, [R, M] per response.

Equal settings return the same function, which identifies jitted programs. The losses of this module
consist of a function and numbers (`Loss`), and the numbers are arguments of the train step: a study
over betas compiles once. A number that is 0 removes its term, so it is no argument: the program
without the term is a different one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from g2d_jax import losses
from g2d_jax.config import AttentionSetting, OnlineDPO
from g2d_jax.losses.dpo import NUMBERS
from g2d_jax.models.decoder import Decoder, Remat, forward, head_matrix
from g2d_jax.models.kernels import attention_for, platform_of

ImportanceLevel = Literal["token", "sequence"]
MicroBatch = Mapping[str, Array]
Result = tuple[Array, dict[str, Array]]
Objective = Callable[[Decoder, MicroBatch], Result]
LossNumbers = Mapping[str, losses.Number]
"""The numbers of a loss by name."""
Structure = Callable[..., Result]
"""An objective without its numbers: (params, micro, numbers) -> (loss, sums), or one that has
none."""


@dataclass(frozen=True)
class Loss:
    """An objective in two parts: a function, which is compiled to a program, and its numbers by
    name, which are arguments of the program. Any other objective is a constant of its program."""

    structure: Structure
    numbers: LossNumbers = field(hash=False)

    def __call__(self, params: Decoder, micro: MicroBatch) -> Result:
        """Compute loss and sums with these numbers."""
        return self.structure(params, micro, self.numbers)


def split(objective: Objective) -> tuple[Structure, LossNumbers]:
    """Split an objective into the function to compile and the numbers that it requires; {} for one
    without."""
    if isinstance(objective, Loss) and objective.numbers:
        return objective.structure, objective.numbers
    return objective, {}


def join(structure: Structure, numbers: LossNumbers) -> Objective:
    """Join the parts from `split`, perhaps with other numbers of the same names, such as traced
    ones."""
    if numbers:
        return Loss(structure, numbers)
    return structure


@dataclass(frozen=True)
class Compute:
    """The settings of a forward pass; they change the result by rounding only."""

    mesh: Mesh
    dtype: jnp.dtype = jnp.float32  # type: ignore[assignment]
    remat: Remat = "none"
    attention: AttentionSetting = "auto"


def response_logprobs(
    compute: Compute,
    params: Decoder,
    micro: MicroBatch,
    temperature: losses.Number = 1.0,
    with_entropy: bool = False,
) -> tuple[Array, Array | None]:
    """Compute log-probabilities and entropies, float32 [R, T], of the response tokens; 0 on prompts
    and padding."""
    hidden, _ = forward(
        params,
        micro["tokens"],
        micro["positions"],
        micro["segment_ids"],
        dtype=compute.dtype,
        remat=compute.remat,
        mesh=compute.mesh,
        attention=attention_for(compute.attention, compute.mesh, "packed"),
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

    def objective(params: Decoder, micro: MicroBatch) -> Result:
        logprobs, _ = response_logprobs(compute, params, micro)
        return losses.sft_loss(logprobs, micro["weight"])

    return objective


def raft(compute: Compute, *, entropy_coef: float = 0.0) -> Loss:
    """Return RAFT's objective, at temperature 1. micro: weight [R, T] (`losses.raft_weights`).

    entropy_coef: if not 0, as in `grpo`; micro then needs entropy_weight [R, T]. Raises ValueError
    for a negative one.
    """
    return _loss(_raft(compute), _on(entropy_coef=entropy_coef))


@cache
def _raft(compute: Compute) -> Structure:
    """Return the objective of `raft` without its numbers."""

    def objective(params: Decoder, micro: MicroBatch, numbers: LossNumbers) -> Result:
        logprobs, entropies = response_logprobs(
            compute, params, micro, with_entropy="entropy_coef" in numbers
        )
        result = losses.sft_loss(logprobs, micro["weight"])
        return _with_entropy(result, entropies, micro, numbers)

    return objective


def grpo(
    compute: Compute,
    *,
    temperature: float,
    beta: float,
    importance_sampling_level: ImportanceLevel = "token",
    cispo: bool = False,
    entropy_coef: float = 0.0,
    **clipping: Any,
) -> Loss:
    """Return GRPO's objective. micro: weight, advantage and, for beta > 0, ref_logprob, each [R,
    T]; old_logprob and sampler_logprob if present.

    Without old_logprob the update is the first on its rollouts, at ratio 1 (`losses.grpo_loss`).
    importance_sampling_level: "token", or "sequence" for one ratio a response (GSPO). entropy_coef:
    if not 0, times the mean entropy at this temperature, which is rewarded; micro then needs
    entropy_weight [R, T] (`losses.sft_weights`).
    cispo, and clipping: epsilon, epsilon_high and importance_cap, are those of `losses.grpo_loss`.
    Raises ValueError for a negative number, or a temperature that is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    losses.check_not_negative(beta=beta)  # by its name here: among the numbers it is kl_beta
    numbers = _policy_numbers(beta, **clipping) | _on(entropy_coef=entropy_coef)
    numbers["temperature"] = temperature
    return _loss(_grpo(compute, importance_sampling_level, cispo), numbers)


@cache
def _grpo(compute: Compute, level: ImportanceLevel, cispo: bool) -> Structure:
    """Return the objective of `grpo` without its numbers."""

    def objective(params: Decoder, micro: MicroBatch, numbers: LossNumbers) -> Result:
        with_entropy = "entropy_coef" in numbers
        logprobs, entropies = response_logprobs(
            compute, params, micro, numbers["temperature"], with_entropy
        )
        result = _policy_term(logprobs, micro, level, cispo, numbers)
        return _with_entropy(result, entropies, micro, numbers)

    return objective


def dpo(compute: Compute, settings: OnlineDPO, *, entropy_coef: float = 0.0) -> Loss:
    """Return DPO's objective. micro, [R, M]: weight and, unless the loss has none, reference
    (summed log-probability); chosen in even places, rejected in odd ones.

    entropy_coef: if not 0, as in `grpo` but at temperature 1; micro then needs entropy_weight [R,
    T]. Raises ValueError for a negative one.
    """
    structure, numbers = _split_dpo(settings)
    return _loss(_dpo(compute, structure), numbers | _on(entropy_coef=entropy_coef))


@cache
def _dpo(compute: Compute, settings: OnlineDPO) -> Structure:
    """Return the objective of `dpo` without its numbers."""

    def objective(params: Decoder, micro: MicroBatch, numbers: LossNumbers) -> Result:
        logprobs, entropies = response_logprobs(
            compute, params, micro, with_entropy="entropy_coef" in numbers
        )
        sums = sum_per_response(logprobs, micro)
        lengths = sum_per_response(jnp.ones_like(logprobs), micro)
        reference = micro["reference"] if settings.compares else None
        result = losses.dpo_loss(
            sums[:, 0::2],
            sums[:, 1::2],
            None if reference is None else reference[:, 0::2],
            None if reference is None else reference[:, 1::2],
            micro["weight"][:, 0::2],
            settings,
            numbers=numbers,
            chosen_lengths=lengths[:, 0::2],
            rejected_lengths=lengths[:, 1::2],
        )
        return _with_entropy(result, entropies, micro, numbers)

    return objective


def group_dpo(
    compute: Compute,
    settings: OnlineDPO,
    *,
    entropy_coef: float = 0.0,
    grpo_coef: float = 0.0,
    kl_beta: float = 0.0,
    importance_sampling_level: ImportanceLevel = "token",
    cispo: bool = False,
    **clipping: Any,
) -> Loss:
    """Return the objective GroupDPO + grpo_coef * GRPO, in one forward pass, at temperature 1.

    micro, [R, M]: pair_weight, side, prompt (a number of its own within the row) and, unless the
    loss has none, reference. A prompt's responses must share a row. With grpo_coef also the arrays
    of `grpo`, whose beta is kl_beta here; its metrics then carry their own count, "|tokens". With
    entropy_coef also entropy_weight [R, T]. Raises ValueError for a negative number.
    """
    structure, numbers = _split_dpo(settings)
    numbers |= _on(entropy_coef=entropy_coef, grpo_coef=grpo_coef)
    if grpo_coef:
        numbers |= _policy_numbers(kl_beta, **clipping)
    return _loss(_group_dpo(compute, structure, importance_sampling_level, cispo), numbers)


@cache
def _group_dpo(
    compute: Compute, settings: OnlineDPO, level: ImportanceLevel, cispo: bool
) -> Structure:
    """Return the objective of `group_dpo` without its numbers."""

    def objective(params: Decoder, micro: MicroBatch, numbers: LossNumbers) -> Result:
        logprobs, entropies = response_logprobs(
            compute, params, micro, with_entropy="entropy_coef" in numbers
        )
        policy = sum_per_response(logprobs, micro)
        lengths = sum_per_response(jnp.ones_like(logprobs), micro)
        reference = micro["reference"] if settings.compares else None
        side, prompt, weight = (micro[name] for name in ("side", "prompt", "pair_weight"))
        loss, sums = losses.group_dpo_loss(
            policy, reference, side, prompt, weight, settings, numbers=numbers, lengths=lengths
        )
        if "grpo_coef" in numbers:
            other, more = _policy_term(logprobs, micro, level, cispo, numbers)
            loss = loss + numbers["grpo_coef"] * other
            sums["tokens"] = more.pop("tokens")
            # GroupDPO's own sums are over pairs; the suffix names what GRPO's are over.
            sums |= {f"{name}|tokens": value for name, value in more.items()}
        return _with_entropy((loss, sums), entropies, micro, numbers)

    return objective


def _loss(structure: Structure, numbers: dict[str, float]) -> Loss:
    losses.check_not_negative(**numbers)
    return Loss(structure, numbers)


def _on(**coefficients: float) -> dict[str, float]:
    """Return the coefficients that are not 0: the program contains the terms that they multiply."""
    return {name: number for name, number in coefficients.items() if number}


def _policy_numbers(
    beta: float,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    importance_cap: float = 0.0,
) -> dict[str, float]:
    """Return the numbers of `_policy_term`; beta, of the KL term, is called kl_beta among them."""
    if epsilon_high is None:
        epsilon_high = epsilon
    optional = _on(kl_beta=beta, importance_cap=importance_cap)
    return {"epsilon": epsilon, "epsilon_high": epsilon_high, **optional}


def _split_dpo(settings: OnlineDPO) -> tuple[OnlineDPO, dict[str, float]]:
    """Split DPO's settings into those that decide the program, with the numbers at their defaults,
    and the numbers."""
    defaults = OnlineDPO()
    # The incoming weights contain the normaliser, so the program does not depend on it.
    others = {name: getattr(defaults, name) for name in (*NUMBERS, "normalizer")}
    structure = replace(settings, **others)
    coefficients = _on(nll_coef=settings.nll_coef)
    return structure, {"beta": settings.beta, "simpo_gamma": settings.simpo_gamma, **coefficients}


def sum_per_response(values: Array, micro: MicroBatch) -> Array:
    """Sum token values [R, T] over each response: [R, M], 0 for empty places. M is that of micro's
    weights."""
    rows, places = micro["pair_weight" if "pair_weight" in micro else "weight"].shape
    ids = _global_response_ids(micro["response_index"], places)
    return losses.sequence_sums(values, ids, rows * places).reshape(rows, places)


def _global_response_ids(response_index: Array, places: int) -> Array:
    """Map places of a row, in [0, places), to numbers unique across rows: [R, T]; negative ones
    stay."""
    first = places * jnp.arange(response_index.shape[0])[:, None]
    return jnp.where(response_index >= 0, response_index + first, -1)


def _policy_term(
    logprobs: Array,
    micro: MicroBatch,
    level: ImportanceLevel,
    cispo: bool,
    numbers: LossNumbers,
) -> Result:
    ids = None
    if level == "sequence":
        # A row of T tokens holds at most T responses: T numbers a row suffice.
        ids = _global_response_ids(micro["response_index"], logprobs.shape[1])
    return losses.grpo_loss(
        logprobs,
        micro.get("old_logprob"),
        micro["ref_logprob"] if "kl_beta" in numbers else None,
        micro["advantage"],
        micro["weight"],
        epsilon=numbers["epsilon"],
        epsilon_high=numbers["epsilon_high"],
        beta=numbers.get("kl_beta", 0.0),
        cispo=cispo,
        sampler_logprobs=micro.get("sampler_logprob"),
        importance_cap=numbers.get("importance_cap", 0.0),
        sequence_ids=ids,
    )


def _with_entropy(
    result: Result, entropies: Array | None, micro: MicroBatch, numbers: LossNumbers
) -> Result:
    if entropies is None:
        return result
    loss, sums = losses.entropy_loss(entropies, micro["entropy_weight"], numbers["entropy_coef"])
    return result[0] + loss, result[1] | sums
