"""Norms of a loss's gradient over several batches at fixed parameters: of its mean, and of the batches' own gradients.

From the two norms `informativeness.gradient_signal` separates signal from noise. One gradient and one sum of gradients
are held at a time, so this needs less memory than a training step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from g2d_jax import mesh as meshes
from g2d_jax.data.packing import Packed
from g2d_jax.models import lora
from g2d_jax.models.config import ModelConfig
from g2d_jax.models.decoder import Decoder, abstract, shardings
from g2d_jax.runtime.program_cache import Jitted, Programs
from g2d_jax.training.objectives import Objective
from g2d_jax.training.step import Arrays, accumulate, put_batch


@partial(jax.tree_util.register_dataclass, data_fields=("gradient", "square_norm"), meta_fields=())
@dataclass(frozen=True)
class GradientSums:
    """Sums over batches. gradient: float32, laid out like the parameters. square_norm: of |g|^2, float32 scalar."""

    gradient: Decoder
    square_norm: jax.Array


def gradient_norms(
    objective: Objective, params: Decoder, batches: Sequence[Packed], mesh: Mesh, programs: Programs | None = None
) -> tuple[float, float]:
    """Compute (|mean g|^2, mean |g|^2) of the batches' gradients g of `objective` at `params`, of all trained arrays.

    params: float32, on the mesh; they are left as they are. batches: packed for this mesh, at least one; the weights in
    them decide what each gradient is a mean of. programs: where the program may lie already. NaN or infinite gradients
    are not caught.
    """
    trained, rest = lora.partition(params)
    totals = fresh_sums(params.config, mesh)
    add = (programs or Programs()).take(make_gradient_sums, objective, params.config, mesh)
    for batch in alike(batches):
        totals = add(totals, trained, *put_batch(batch, mesh), rest)
    square_of_sum = jax.jit(partial(optax.tree.norm, squared=True), out_shardings=meshes.replicated(mesh))
    norms = jax.device_get((square_of_sum(totals.gradient), totals.square_norm))
    return float(norms[0]) / len(batches) ** 2, float(norms[1]) / len(batches)


def fresh_sums(config: ModelConfig, mesh: Mesh) -> GradientSums:
    """Return sums over no batch, on the mesh."""
    shapes, _ = lora.partition(abstract(config))

    def zeros() -> GradientSums:
        return GradientSums(jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes), jnp.zeros(()))

    return jax.jit(zeros, out_shardings=_where(config, mesh))()  # type: ignore[no-any-return]


def make_gradient_sums(objective: Objective, config: ModelConfig, mesh: Mesh) -> Jitted:
    """Return add(sums, params, arrays [N, R, …], count, rest=None) -> sums with one batch more; sums are donated."""
    where = _where(config, mesh)

    def add(
        sums: GradientSums, params: Decoder, arrays: Arrays, count: jax.Array, rest: Decoder | None = None
    ) -> GradientSums:
        gradient, _, _ = accumulate(objective, params, arrays, count, rest)
        gradient = jax.lax.with_sharding_constraint(gradient, where.gradient)
        square_norm = optax.tree.norm(gradient, squared=True)
        return GradientSums(jax.tree.map(jnp.add, sums.gradient, gradient), sums.square_norm + square_norm)

    return Jitted(add, donate_argnums=0, out_shardings=where)


def alike(batches: Sequence[Packed]) -> list[Packed]:
    """Add empty rows and micro-batches to the batches until all have one shape: one program runs them all."""
    shapes = np.array([batch.arrays["tokens"].shape[:2] for batch in batches])
    largest = shapes.max(axis=0)

    def padded(name: str, array: np.ndarray) -> np.ndarray:
        widths = [(0, int(most - size)) for most, size in zip(largest, array.shape[:2], strict=True)]
        return np.pad(array, [*widths, (0, 0)], constant_values=-1 if name == "response_index" else 0)

    return [replace(b, arrays={name: padded(name, x) for name, x in b.arrays.items()}) for b in batches]


def _where(config: ModelConfig, mesh: Mesh) -> GradientSums:
    where, _ = lora.partition(shardings(config, mesh))
    return GradientSums(where, meshes.replicated(mesh))  # type: ignore[arg-type]  # in place of arrays
