"""Linear layers, each a product of two matrices.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from g2d_jax.models import quantise
from g2d_jax.runtime import mesh as meshes

Multiply = Callable[..., Array]
"""A platform's `Products.multiply`."""


def linear(
    x: Array,
    weight: Array,
    inputs: int = 1,
    dtype: Any = None,
    *,
    multiply: Multiply = jnp.matmul,
) -> Array:
    """Multiply x [B, T, *in] with weight [*in, *out] to [B, T, *out]; `inputs` input dimensions, in
    dtype, or x's.

    Written as one product of two matrices: XLA's CPU compiler runs the gradient of the same product
    on three-dimensional arrays 3 times slower; on other devices it makes no difference.
    """
    size = math.prod(weight.shape[:inputs])
    rows = x.reshape(-1, size)
    product = multiply(rows, weight.reshape(size, -1), preferred_element_type=dtype)
    return product.reshape(*x.shape[:2], *weight.shape[inputs:])


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _wide(x: Array, weight: Array, inputs: int, multiply: Multiply) -> Array:
    return linear(x, weight, inputs, jnp.float32, multiply=multiply)


def _wide_forward(
    x: Array, weight: Array, inputs: int, multiply: Multiply
) -> tuple[Array, tuple[Array, Array]]:
    return _wide(x, weight, inputs, multiply), (x, weight)


def _wide_backward(
    inputs: int, multiply: Multiply, saved: tuple[Array, Array], gradient: Array
) -> tuple[Array, Array]:
    _, pull = jax.vjp(lambda x, weight: linear(x, weight, inputs, multiply=multiply), *saved)
    return pull(gradient.astype(saved[0].dtype))  # type: ignore[return-value]


_wide.defvjp(_wide_forward, _wide_backward)


def wide_linear(
    x: Array, weight: Array, inputs: int = 1, *, multiply: Multiply = jnp.matmul
) -> Array:
    """Compute `linear` in float32, without rounding to x's type. Its gradients are `linear`'s, in
    x's type."""
    return _wide(x, weight, inputs, multiply)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def sharded_linear(
    x: Array, weight: Array, inputs: int, mesh: Mesh, axes: tuple[str, ...]
) -> Array:
    """Compute `linear` if rows and weight are both split over the mesh's axis fsdp. axes: the
    weight's logical ones.

    Every device gathers the weight, whose gradient is then scattered to its parts. Otherwise XLA for
    TPU computes some products as a loop over parts of the weight, and rounds each result to
    bfloat16 before it adds them up.
    """
    return linear(x, _gathered(weight, mesh, axes), inputs)


def _sharded_forward(
    x: Array, weight: Array, inputs: int, mesh: Mesh, axes: tuple[str, ...]
) -> tuple[Array, tuple[Array, Array]]:
    return sharded_linear(x, weight, inputs, mesh, axes), (x, weight)


def _sharded_backward(
    inputs: int, mesh: Mesh, axes: tuple[str, ...], saved: tuple[Array, Array], gradient: Array
) -> tuple[Array, Array]:
    x, weight = saved
    whole = _gathered(weight, mesh, axes)
    _, pull = jax.vjp(lambda x, weight: linear(x, weight, inputs), x, whole)
    to_x, to_weight = pull(gradient)
    own = meshes.sharding(mesh, axes, weight.shape)
    return to_x, jax.lax.with_sharding_constraint(to_weight, own)


sharded_linear.defvjp(_sharded_forward, _sharded_backward)


def _gathered(weight: Array, mesh: Mesh, axes: tuple[str, ...]) -> Array:
    """Gather a weight's parts over fsdp."""
    spec = meshes.spec(mesh, axes, weight.shape)
    whole = PartitionSpec(*[None if part == "fsdp" else part for part in spec])
    return jax.lax.with_sharding_constraint(weight, NamedSharding(mesh, whole))


def is_sharded(x: Array, weight: Array, mesh: Mesh, axes: tuple[str, ...]) -> bool:
    """Return whether rows x [B, T, *in] and a weight are both split over fsdp."""
    rows = meshes.spec(mesh, ("rows",), x.shape[:1])[0]
    own = meshes.spec(mesh, axes, weight.shape)
    return mesh.shape["fsdp"] > 1 and rows is not None and "fsdp" in own


def quantised(product: Callable[..., Array]) -> Callable[..., Array]:
    """Make `linear` or `wide_linear` accept a quantised weight. The backward pass recomputes the
    weight from its codes, under any remat policy: it is never kept, and scanned layers hold one
    decoded layer at once."""

    def decoding(x: Array, weight: Any, inputs: int) -> Array:
        if weight.qtype != "int8":
            return product(x, quantise.decode(weight, x.dtype), inputs)
        # One scale per output can scale the product, and codes are exact in x's type: a GPU's
        # product reads them itself.
        y = product(x, weight.qvalue.astype(x.dtype), inputs)
        return (y * weight.scale.reshape(1, 1, *weight.shape[inputs:])).astype(y.dtype)

    return jax.checkpoint(decoding, prevent_cse=False, static_argnums=2)
