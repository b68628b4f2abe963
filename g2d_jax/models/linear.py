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

from g2d_jax.models import quantise

Multiply = Callable[..., Array]
"""`Products.multiply` of a platform."""


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
    """Compute `linear` in float32, not rounded to x's type. Its gradients are `linear`'s, in x's
    type."""
    return _wide(x, weight, inputs, multiply)


def quantised(product: Callable[..., Array]) -> Callable[..., Array]:
    """Make `linear` or `wide_linear` take a quantised weight. The backward pass computes the weight
    again from its codes, whatever the remat policy: it is never kept, and scanned layers have that
    of one at a time."""

    def decoding(x: Array, weight: Any, inputs: int) -> Array:
        if weight.qtype != "int8":
            return product(x, quantise.decode(weight, x.dtype), inputs)
        # One scale an output is one of the product, and codes are exact in x's type: a GPU's
        # product reads them itself.
        y = product(x, weight.qvalue.astype(x.dtype), inputs)
        return (y * weight.scale.reshape(1, 1, *weight.shape[inputs:])).astype(y.dtype)

    return jax.checkpoint(decoding, prevent_cse=False, static_argnums=2)
