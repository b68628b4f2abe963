"""A trial of the decode kernel on a device of the run: its results on a small ring are compared
with XLA's attention before sampling starts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from g2d_jax.models.attention import attend_cached
from g2d_jax.runtime import mesh as meshes

WIDTH, COLUMN = 512, 200
EARLIER = (0, 130, -1, WIDTH - 1)
"""Tokens before the newest one, in `COLUMN`, of each row: one token, across the ring's end, at
rest, a full ring."""

TOLERANCE = {"float32": 0.02, "bfloat16": 0.05, "float16": 0.02}
"""Tolerances by activation type, for outputs of about 0.1 to 1: in float32 products may be rounded
as TF32."""


def _run(mesh: Mesh, q: Array, keys: Array, values: Array, column: Array, earlier: Array) -> Array:
    """Attend by the kernel of the mesh's platform."""
    if mesh.devices.flat[0].platform != "tpu":
        from g2d_jax.models.decode_kernel_gpu import attend_columns  # importing Pallas takes long

        run = jax.jit(partial(attend_columns, mesh=mesh))
        return run(q, keys, values, column, earlier)
    from g2d_jax.models.decode_kernel import attend_ring

    run = jax.jit(partial(attend_ring, mesh=mesh))
    return run(q, keys[None], values[None], jnp.int32(0), column, earlier)


def trial(
    device: jax.Device,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: jnp.dtype,
    run: Callable[..., Array] = _run,
) -> str:
    """Run the platform's kernel with this many heads; return a description of its fault, or "".

    run: the kernel, called with a mesh and the arrays of `decode_kernel_gpu.attend_columns`; a GPU's
    is interpreted on a CPU.
    """
    mesh = meshes.make_mesh(devices=[device])
    random = np.random.default_rng(0)

    def draw(*shape: int) -> Array:
        return jnp.asarray(random.standard_normal(shape), dtype)

    rows = len(EARLIER)
    q = draw(rows, 1, heads, head_dim)
    keys, values = draw(rows, kv_heads, head_dim, WIDTH), draw(rows, kv_heads, WIDTH, head_dim)
    column, earlier = jnp.int32(COLUMN), jnp.array(EARLIER, jnp.int32)
    ages = (COLUMN - jnp.arange(WIDTH)) % WIDTH
    plain = attend_cached(q, keys, values, ages[None] <= earlier[:, None], by_sums=False)
    try:
        ours = run(mesh, q, keys, values, column, earlier)
    # Any error of a compiler or a driver is a reason not to sample with it.
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        return f"does not run on this {device.device_kind}: {type(error).__name__}: {first:.200}"
    live = np.array(EARLIER) >= 0
    apart = np.abs(np.asarray(ours, np.float32) - np.asarray(plain, np.float32))[live].max()
    if not apart <= TOLERANCE[jnp.dtype(dtype).name] or np.asarray(ours, np.float32)[~live].any():
        return f"differs from XLA's results on this {device.device_kind} by {apart:.3g}"
    return ""
