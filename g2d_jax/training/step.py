"""The jitted train step: micro-batches accumulated in a loop, one optimiser update, state donated.

Losses carry global normalisers in their weights, so the gradients of micro-batches and devices are
simply added. The numbers of optimiser and loss are arguments: changing them does not recompile.
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
from jax import Array
from jax.sharding import Mesh
from jax.stages import Wrapped

from g2d_jax.data.packing import Packed
from g2d_jax.losses import Number, add_sums, empty_sums
from g2d_jax.models import lora
from g2d_jax.models.config import ModelConfig
from g2d_jax.models.decoder import Decoder, abstract_on, cast, shardings
from g2d_jax.runtime import mesh as meshes
from g2d_jax.runtime.program import put_like
from g2d_jax.training.objectives import Compute, Objective, Structure, join, response_logprobs
from g2d_jax.training.optimizer import abstract_opt_state

Arrays = Mapping[str, Array]
StepNumbers = Mapping[str, Mapping[str, Any]]
"""The numbers of a train step: "optimizer" -> `OptimizerNumbers`, "loss" -> `LossNumbers` (see
`objectives.split`)."""
Totals = tuple[Decoder, Array, dict[str, Array]]
"""Gradient, loss and sums of micro-batches."""


@partial(jax.tree_util.register_dataclass, data_fields=("params", "opt_state"), meta_fields=())
@dataclass(frozen=True)
class TrainState:
    """The state of training. params: float32 master weights; with adapters, the adapters alone.
    opt_state: optax's, with the count of updates."""

    params: Decoder
    opt_state: Any


def abstract_state(
    config: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh, offload: bool = False
) -> TrainState:
    """Return the TrainState tree with a ShapeDtypeStruct and its sharding in place of every array;
    moments are sharded like their parameters.

    offload: keep the optimiser's arrays in pinned host memory, each device's part on its own
    host.
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
) -> Wrapped:
    """Return begin(params) -> the first state of a policy's trained part.

    It is a copy, since the step donates its state.
    """

    def optimizer_state(params: Decoder) -> TrainState:
        return TrainState(jax.tree.map(jnp.copy, params), optimizer.init(params))

    return jax.jit(optimizer_state, out_shardings=state_shardings(config, optimizer, mesh, offload))


def make_cast(config: ModelConfig, mesh: Mesh, dtype: jnp.dtype) -> Wrapped:
    """Return cast(params) -> the same in dtype."""
    return jax.jit(partial(cast, dtype=dtype), out_shardings=shardings(config, mesh))


def put_batch(packed: Packed, mesh: Mesh) -> tuple[dict[str, Array], Array]:
    """Put packed rows on the mesh, split over data and fsdp; also return the micro-batch count."""
    batch: tuple[dict[str, Array], Array] = put_like(
        (packed.arrays, packed.count), abstract_batch(packed, mesh)
    )
    return batch


def abstract_batch(
    packed: Packed, mesh: Mesh
) -> tuple[dict[str, jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]:
    """Return the result of `put_batch` with a ShapeDtypeStruct and its sharding in place of every
    array."""
    arrays = {}
    for name, x in packed.arrays.items():
        arrays[name] = meshes.abstract_rows(mesh, x.shape, x.dtype, axis=1)
    return arrays, meshes.abstract_number(mesh, np.int32)


def put_numbers(numbers: Any, mesh: Mesh) -> Any:
    """Put program arguments, one number or a tree of them, on every device as float32 scalars."""
    return put_like(numbers, abstract_numbers(numbers, mesh))


def abstract_numbers(numbers: Any, mesh: Mesh) -> Any:
    """Return the result of `put_numbers` with a ShapeDtypeStruct and its sharding in place of every
    number."""
    return jax.tree.map(lambda _: meshes.abstract_number(mesh, np.float32), numbers)


def make_train_step(
    objective: Structure,
    optimizer: optax.GradientTransformationExtraArgs,
    config: ModelConfig,
    mesh: Mesh,
    offload: bool = False,
) -> Wrapped:
    """Return step(state, arrays [N, R, …], count, numbers, rest=None) -> (state, metrics); state is
    donated.

    objective: without its numbers, from `objectives.split`. numbers: from `put_numbers`; another
    set of names under "loss" compiles another program.
    rest: a policy's untrained part with adapters, see `lora.partition`. Only the first `count`
    micro-batches are run. metrics: the objective's sums, loss, grad_norm (before clipping) and
    skipped, float32 scalars on the device; fetch them a step late so that the device never waits.
    skipped: 1 if loss or grad_norm is not finite. The state then stays the same, bit for bit,
    including the count of updates, so that the schedule does not advance.
    offload: as in `abstract_state`; the optimiser's arrays are on the devices only during their
    use.
    """
    where = state_shardings(config, optimizer, mesh, offload)
    near = state_shardings(config, optimizer, mesh)

    def train_step(
        state: TrainState,
        arrays: Arrays,
        count: Array,
        numbers: StepNumbers,
        rest: Decoder | None = None,
    ) -> tuple[TrainState, dict[str, Array]]:
        whole = join(objective, numbers["loss"])
        grads, loss, sums = accumulate(whole, state.params, arrays, count, rest)
        grads = jax.lax.with_sharding_constraint(grads, where.params)
        norm = optax.tree.norm(grads)
        sound = jnp.isfinite(loss) & jnp.isfinite(norm)
        if offload:
            # A branch begins when its condition is known. Without it XLA for TPU copies the arrays
            # to the devices at the start of the step, in addition to the activations.
            arguments = state, grads, numbers["optimizer"]
            state = jax.lax.cond(sound, updated, lambda state, *_: state, *arguments)
        else:
            # Chosen element by element, in the loops that write the new state anyway: this needs no
            # second copy of the state.
            moved = updated(state, grads, numbers["optimizer"])
            state = jax.tree.map(lambda new, old: jnp.where(sound, new, old), moved, state)
        skipped = (~sound).astype(jnp.float32)
        return state, {**sums, "loss": loss, "grad_norm": norm, "skipped": skipped}

    def updated(state: TrainState, grads: Decoder, numbers: Mapping[str, Array]) -> TrainState:
        opt_state = jax.device_put(state.opt_state, near.opt_state) if offload else state.opt_state
        updates, opt_state = optimizer.update(grads, opt_state, state.params, numbers=numbers)
        if offload:
            opt_state = jax.device_put(opt_state, where.opt_state)
        return TrainState(optax.apply_updates(state.params, updates), opt_state)

    return jax.jit(train_step, donate_argnums=0, out_shardings=(where, meshes.replicated(mesh)))


def accumulate(
    objective: Objective,
    params: Decoder,
    arrays: Arrays,
    count: Array,
    rest: Decoder | None = None,
) -> Totals:
    """Compute gradient in params, loss and sums over the first `count` micro-batches, float32.
    rest: as in the step."""
    value_and_grad = jax.value_and_grad(
        lambda p, micro: objective(lora.combine(p, rest), micro), has_aux=True
    )

    def add(index: Array, total: Totals) -> Totals:
        grads, loss, sums = total
        (more_loss, more_sums), more_grads = value_and_grad(params, _micro_batch(arrays, index))
        return jax.tree.map(jnp.add, grads, more_grads), loss + more_loss, add_sums(sums, more_sums)

    # Traced once here, without gradients.
    loss, sums = jax.eval_shape(
        lambda: objective(lora.combine(params, rest), _micro_batch(arrays, 0))
    )
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (params, loss))
    return jax.lax.fori_loop(0, count, add, (*zeros, empty_sums(sums)))


def _micro_batch(arrays: Arrays, index: Array | int) -> dict[str, Array]:
    """Select one micro-batch of a batch."""
    return {
        name: jax.lax.dynamic_index_in_dim(x, index, keepdims=False) for name, x in arrays.items()
    }


def make_scorer(compute: Compute) -> Wrapped:
    """Return score(params, arrays, count, temperature=1.0) -> (logprobs, entropies), float32 [N, R,
    T], without gradient. temperature: positive; with `put_numbers` one program serves all."""

    def score_logprobs(
        params: Decoder, arrays: Arrays, count: Array, temperature: Number = 1.0
    ) -> Any:
        blank = jnp.zeros(arrays["tokens"].shape, jnp.float32)

        def score_micro(index: Array, total: Any) -> Any:
            micro = _micro_batch(arrays, index)
            logprobs, entropies = response_logprobs(
                compute, params, micro, temperature, with_entropy=True
            )
            assert entropies is not None
            return total[0].at[index].set(logprobs), total[1].at[index].set(entropies)

        return jax.lax.fori_loop(0, count, score_micro, (blank, blank))

    return jax.jit(score_logprobs, out_shardings=meshes.replicated(compute.mesh))
