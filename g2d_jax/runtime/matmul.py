"""Products of two matrices, and bfloat16 products on CPUs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh


class Products(NamedTuple):
    """The matrix products of a platform.

    multiply: (x [N, D], y [D, M], preferred_element_type=None) -> [N, M], like `jnp.matmul`.
    by_rows: returns x [N, D], before a product, with contiguous rows if the platform needs them.
    """

    multiply: Callable[..., Array]
    by_rows: Callable[[Array], Array]


def products_on(mesh: Mesh | None) -> Products:
    """Return the products of the mesh's devices; without a mesh, and for several CPUs, JAX's own.

    On several CPUs, XLA would gather arrays that are laid out by rows on each of them.
    """
    if mesh is None or mesh.size > 1 or mesh.devices.flat[0].platform != "cpu":
        return PLAIN
    return CPU


def _cpu_multiply(x: Array, y: Array, preferred_element_type: Any = None) -> Array:
    """Multiply [N, D] by [D, M], in x's type or the preferred one.

    XLA's CPU compiler uses the processor's bfloat16 products only if neither matrix is transposed
    and the result is float32. This is twice as fast as float32; otherwise XLA first converts both
    matrices to float32. So this function uses that form, for gradients too.
    """
    if x.dtype != jnp.bfloat16:
        return jnp.matmul(x, y, preferred_element_type=preferred_element_type)
    return _multiply_bfloat16(x, y, jnp.dtype(preferred_element_type or x.dtype))


def _cpu_by_rows(x: Array) -> Array:
    """Copy a transposed bfloat16 matrix: without a copy, XLA keeps its layout and multiplies a
    transposed matrix after all."""
    return with_layout_constraint(x, Layout((0, 1))) if x.dtype == jnp.bfloat16 else x


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _multiply_bfloat16(x: Array, y: Array, dtype: jnp.dtype) -> Array:
    return jnp.matmul(x, y, preferred_element_type=jnp.float32).astype(dtype)


def _forward(x: Array, y: Array, dtype: jnp.dtype) -> tuple[Array, tuple[Array, Array]]:
    return _multiply_bfloat16(x, y, dtype), (x, y)


def _backward(dtype: jnp.dtype, saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, y = saved
    gradient = gradient.astype(x.dtype)
    to_x = _multiply_bfloat16(gradient, _cpu_by_rows(y.T), x.dtype)
    to_y = _multiply_bfloat16(_cpu_by_rows(x.T), gradient, y.dtype)
    return to_x, to_y


_multiply_bfloat16.defvjp(_forward, _backward)

PLAIN = Products(jnp.matmul, lambda x: x)
CPU = Products(_cpu_multiply, _cpu_by_rows)
