"""Products of matrices on a CPU: what JAX's own give, in either type."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from g2d_jax.runtime import mesh as meshes
from g2d_jax.runtime.matmul import CPU, PLAIN, products_on

LEFT, RIGHT, OUT = (24, 16), (16, 40), (24, 40)


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def results(multiply: Any, x: jax.Array, y: jax.Array, wide: bool) -> list[jax.Array]:
    """A product, and its gradients for one of the output, which bfloat16 holds exactly."""
    product, pull = jax.vjp(
        lambda x, y: multiply(x, y, preferred_element_type=jnp.float32 if wide else None), x, y
    )
    return [product, *pull(jnp.asarray(draw(*OUT, seed=2), jnp.bfloat16).astype(product.dtype))]


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_cpu_multiplies_as_jax_does(dtype: Any, wide: bool) -> None:
    x, y = (jnp.asarray(draw(*shape, seed=i), dtype) for i, shape in enumerate((LEFT, RIGHT)))
    ours = results(CPU.multiply, x, y, wide)
    plain = results(jnp.matmul, x, y, wide)
    # bfloat16 has 8 bits; its sums are float32 in both, in another order.
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-5} if dtype == jnp.float32 else {"rtol": 2**-7, "atol": 0.02}
    )
    for one, two in zip(ours, plain, strict=True):
        assert (one.shape, one.dtype) == (two.shape, two.dtype)
        np.testing.assert_allclose(one.astype(np.float32), two.astype(np.float32), **tolerance)


def test_bfloat16_is_summed_in_float32() -> None:
    """256 + 1 + ... + 1: in bfloat16 each 1 would be lost."""
    x = jnp.asarray([[256.0] + [1.0] * 256], jnp.bfloat16)
    y = jnp.ones((257, 8), jnp.bfloat16)
    assert jax.jit(CPU.multiply)(x, y).tolist() == [[512.0] * 8]
    _, pull = jax.vjp(
        CPU.multiply, jnp.ones((1, 8), jnp.bfloat16), jnp.ones((8, 257), jnp.bfloat16)
    )
    to_x, to_y = pull(x)
    assert to_x.tolist() == [[512.0] * 8]
    assert to_y.tolist() == [[256.0] + [1.0] * 256] * 8


def test_a_transposed_matrix_keeps_its_values_by_rows() -> None:
    for dtype in (jnp.float32, jnp.bfloat16):
        x = jnp.asarray(draw(*LEFT), dtype)
        np.testing.assert_array_equal(jax.jit(lambda x: CPU.by_rows(x.T))(x), x.T)


def test_the_devices_decide() -> None:
    mesh = meshes.make_mesh(devices=jax.devices()[:1])
    assert products_on(mesh) is CPU
    assert products_on(None) is PLAIN
    assert products_on(meshes.make_mesh(devices=jax.devices()[:2])) is PLAIN
