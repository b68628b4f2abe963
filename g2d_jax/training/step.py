"""The jitted train step: micro-batches accumulated in a loop, one optimiser update, state donated.

Losses carry global normalisers in their weights, so gradients of micro-batches and devices are
simply added. The numbers of optimiser and loss are arguments: with other ones the same program
runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from g2d_jax import mesh as meshes
from g2d_jax.data.packing import Packed
from g2d_jax.losses import Number, add_sums, empty_sums
from g2d_jax.models import lora
from g2d_jax.models.config import ModelConfig
from g2d_jax.models.decoder import Decoder, abstract_on, cast, shardings
from g2d_jax.runtime.program_cache import Jitted
from g2d_jax.training.objectives import Compute, Objective, Structure, join, response_logprobs
from g2d_jax.training.optimizer import abstract_opt_state

Arrays = Mapping[str, jax.Array]
StepNumbers = Mapping[str, Mapping[str, Any]]
"""The numbers of a train step: "optimizer" -> `OptimizerNumbers`, "loss" -> `LossNumbers` (see
`objectives.split`)."""
Totals = tuple[Decoder, jax.Array, dict[str, jax.Array]]
"""Gradient, loss and sums of micro-batches."""


@partial(jax.tree_util.register_dataclass, data_fields=("params", "opt_state"), meta_fields=())
@dataclass(frozen=True)
class TrainState:
    """The state of training. params: float32 master weights; of a policy with adapters these alone.
    opt_state: optax's, with the count of updates."""

    params: Decoder
    opt_state: Any


def abstract_state(
    config: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh, offload: bool = False
) -> TrainState:
    """Return the TrainState tree with a ShapeDtypeStruct and its sharding in place of every array;
    moments lie like their parameters.

    offload: the optimiser's arrays lie in pinned memory of the host, each device's part with its
    own host.
    """
    params, _ = lora.partition(abstract_on(config, mesh))

    def place(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if offload and x.ndim:
            return x.update(sharding=x.sharding.with_memory_kind(meshes.HOST))
        return x

    return TrainState(params, jax.tree.map(place, abstract_opt_state(optimizer, params, mesh)))


def state_shardings(
    config: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh, offload: bool = False
) -> TrainState:
    """Return the shardings of `abstract_state`."""
    return jax.tree.map(lambda x: x.sharding, abstract_state(config, optimizer, mesh, offload))


def make_fresh_state(
    config: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh, offload: bool = False
) -> Jitted:
    """Return begin(params) -> the first state of what is trained of a policy.

    It is copied, since the step donates its state.
    """

    def optimizer_state(params: Decoder) -> TrainState:
        return TrainState(jax.tree.map(jnp.copy, params), optimizer.init(params))

    return Jitted(optimizer_state, out_shardings=state_shardings(config, optimizer, mesh, offload))


def make_cast(config: ModelConfig, mesh: Mesh, dtype: jnp.dtype) -> Jitted:
    """Return cast(params) -> the same in dtype."""
    return Jitted(partial(cast, dtype=dtype), out_shardings=shardings(config, mesh))


def put_batch(packed: Packed, mesh: Mesh) -> tuple[dict[str, jax.Array], jax.Array]:
    """Put packed rows on the mesh, split over data and fsdp, and the number of micro-batches."""
    arrays = {name: meshes.put_rows(mesh, array, axis=1) for name, array in packed.arrays.items()}
    return arrays, meshes.put(np.asarray(packed.count, np.int32), meshes.replicated(mesh))


def abstract_batch(
    packed: Packed, mesh: Mesh
) -> tuple[dict[str, jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]:
    """Return the result of `put_batch` with a ShapeDtypeStruct and its sharding in place of every
    array."""
    arrays = {
        name: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=meshes.rows_sharding(mesh, x.shape, axis=1)
        )
        for name, x in packed.arrays.items()
    }
    return arrays, jax.ShapeDtypeStruct((), np.int32, sharding=meshes.replicated(mesh))


def put_number(number: float, mesh: Mesh) -> jax.Array:
    """Put a number that is an argument of programs on every device, as a float32 scalar."""
    return meshes.put(np.asarray(number, np.float32), meshes.replicated(mesh))


def put_numbers(numbers: StepNumbers, mesh: Mesh) -> StepNumbers:
    """Put the numbers of a train step on every device, as float32 scalars."""
    return jax.tree.map(lambda number: put_number(number, mesh), numbers)


def abstract_number(mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Return the result of `put_number` as a ShapeDtypeStruct with its sharding."""
    return jax.ShapeDtypeStruct((), np.float32, sharding=meshes.replicated(mesh))


def abstract_numbers(numbers: StepNumbers, mesh: Mesh) -> StepNumbers:
    """Return the result of `put_numbers` with a ShapeDtypeStruct and its sharding in place of every
    number."""
    return jax.tree.map(lambda _: abstract_number(mesh), numbers)


def make_train_step(
    objective: Structure,
    optimizer: optax.GradientTransformationExtraArgs,
    config: ModelConfig,
    mesh: Mesh,
    offload: bool = False,
) -> Jitted:
    """Return step(state, arrays [N, R, …], count, numbers, rest=None) -> (state, metrics); state is
    donated.

    objective: without its numbers, as `objectives.split` gives it. numbers: as `put_numbers` puts
    them; with another set of names under "loss" another program is compiled.
    rest: what is not trained of a policy with adapters, see `lora.partition`. Only the first
    `count` micro-batches are run. metrics: the objective's sums, loss, grad_norm (before clipping)
    and skipped, float32 scalars on the device; fetch them a step late so that the device never
    waits.
    skipped: 1 where loss or grad_norm is not finite. The state then stays as it was, bit for bit;
    the count of updates too, so that the schedule does not move on.
    offload: as in `abstract_state`; the optimiser's arrays are on the devices only while they are
    used.
    """
    where = state_shardings(config, optimizer, mesh, offload)
    near = state_shardings(config, optimizer, mesh)

    def train_step(
        state: TrainState,
        arrays: Arrays,
        count: jax.Array,
        numbers: StepNumbers,
        rest: Decoder | None = None,
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        grads, loss, sums = accumulate(
            join(objective, numbers["loss"]), state.params, arrays, count, rest
        )
        grads = jax.lax.with_sharding_constraint(grads, where.params)
        norm = optax.tree.norm(grads)
        sound = jnp.isfinite(loss) & jnp.isfinite(norm)
        if offload:
            # A branch, which begins when its condition is known: without it XLA for TPU copies the
            # arrays to the devices at the start of the step, where they lie beside the activations.
            state = jax.lax.cond(
                sound, updated, lambda state, *_: state, state, grads, numbers["optimizer"]
            )
        else:
            # Chosen element by element, in the loops that write the new state anyway: no second
            # copy of the state.
            moved = updated(state, grads, numbers["optimizer"])
            state = jax.tree.map(lambda new, old: jnp.where(sound, new, old), moved, state)
        return state, {
            **sums,
            "loss": loss,
            "grad_norm": norm,
            "skipped": (~sound).astype(jnp.float32),
        }

    def updated(state: TrainState, grads: Decoder, numbers: Mapping[str, jax.Array]) -> TrainState:
        opt_state = jax.device_put(state.opt_state, near.opt_state) if offload else state.opt_state
        updates, opt_state = optimizer.update(grads, opt_state, state.params, numbers=numbers)
        if offload:
            opt_state = jax.device_put(opt_state, where.opt_state)
        return TrainState(optax.apply_updates(state.params, updates), opt_state)

    return Jitted(train_step, donate_argnums=0, out_shardings=(where, meshes.replicated(mesh)))


def accumulate(
    objective: Objective,
    params: Decoder,
    arrays: Arrays,
    count: jax.Array,
    rest: Decoder | None = None,
) -> Totals:
    """Compute gradient in params, loss and sums over the first `count` micro-batches, float32.
    rest: as in the step."""
    value_and_grad = jax.value_and_grad(
        lambda p, micro: objective(lora.combine(p, rest), micro), has_aux=True
    )

    def add(index: jax.Array, total: Totals) -> Totals:
        grads, loss, sums = total
        (more_loss, more_sums), more_grads = value_and_grad(params, _micro(arrays, index))
        return jax.tree.map(jnp.add, grads, more_grads), loss + more_loss, add_sums(sums, more_sums)

    # Traced once, without gradients.
    loss, sums = jax.eval_shape(lambda: objective(lora.combine(params, rest), _micro(arrays, 0)))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (params, loss))
    return jax.lax.fori_loop(0, count, add, (*zeros, empty_sums(sums)))


def _micro(arrays: Arrays, index: jax.Array | int) -> dict[str, jax.Array]:
    """Take one micro-batch of a batch."""
    return {
        name: jax.lax.dynamic_index_in_dim(x, index, keepdims=False) for name, x in arrays.items()
    }


def make_scorer(compute: Compute) -> Jitted:
    """Return score(params, arrays, count, temperature=1.0) -> (logprobs, entropies), float32 [N, R,
    T]. It has no gradient. temperature: positive; as `put_number` puts it one program serves
    all."""

    def score_logprobs(
        params: Decoder, arrays: Arrays, count: jax.Array, temperature: Number = 1.0
    ) -> tuple[jax.Array, jax.Array]:
        tokens = arrays["tokens"]
        blank = jnp.zeros(tokens.shape, jnp.float32)

        def score_micro(
            index: jax.Array, total: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            micro = _micro(arrays, index)
            logprobs, entropies = response_logprobs(
                compute, params, micro, temperature, with_entropy=True
            )
            assert entropies is not None
            return total[0].at[index].set(logprobs), total[1].at[index].set(entropies)

        return jax.lax.fori_loop(0, count, score_micro, (blank, blank))

    return Jitted(score_logprobs, out_shardings=meshes.replicated(compute.mesh))
