"""The GPU kernel of decode steps, interpreted, against plain attention: what each row sees of the
ring, and nothing more is read."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from g2d_jax.models import decode, decoder
from g2d_jax.models.attention import attend_cached
from g2d_jax.models.config import FULL, SLIDING, ModelConfig
from g2d_jax.models.decode_check import trial
from g2d_jax.models.decode_kernel_gpu import (
    attend_columns,
    block_columns,
    columns_read,
    shares,
)
from g2d_jax.runtime import mesh as meshes

ONE = meshes.make_mesh(devices=jax.devices()[:1])
kernel = jax.jit(partial(attend_columns, mesh=ONE))


def inputs(
    rows: int, kv_heads: int, repeats: int, width: int, dtype: str = "float32", dim: int = 16
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A query a row, and keys and values of a layer."""
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (rows, 1, kv_heads * repeats, dim), dtype)
    k = jax.random.normal(keys[1], (rows, kv_heads, dim, width), dtype)
    return q, k, jax.random.normal(keys[2], (rows, kv_heads, width, dim), dtype)


def seen(column: int, earlier: jax.Array, width: int) -> jax.Array:
    """Which columns a row sees, bool [B, W]."""
    return ((column - jnp.arange(width)) % width)[None] <= earlier[:, None]


# A ring of several blocks and of one, head sizes and queries a head that fill a tile or do not;
# rows of one token and at rest, over the ring's end, a full ring.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "column", "kv_heads", "repeats", "dim", "dtype"),
    [
        (256, 70, 2, 3, 24, "float32"),
        (80, 63, 1, 2, 128, "float16"),
    ],
)
def test_every_row_attends_to_what_it_sees(
    width: int, column: int, kv_heads: int, repeats: int, dim: int, dtype: str
) -> None:
    lengths = [0, column % 64, column, -1, (column + 1) % width, width - 1]
    q, keys, values = inputs(len(lengths), kv_heads, repeats, width, dtype, dim)
    earlier = jnp.array(lengths, jnp.int32)
    plain = attend_cached(q, keys, values, seen(column, earlier, width), by_sums=False)
    ours = kernel(q, keys, values, jnp.int32(column), earlier)
    assert ours.dtype == q.dtype
    expected = jnp.where((earlier < 0)[:, None, None, None], 0, plain)
    np.testing.assert_allclose(
        ours.astype(float), expected.astype(float), atol=1e-5 if dtype == "float32" else 0.03
    )


def test_a_row_reads_its_own_blocks_alone() -> None:
    """Blocks of 64 columns of which a row sees none hold NaN, which times a weight of 0 would be
    NaN; the row at rest gives zeros."""
    q, keys, values = inputs(4, 1, 3, 320)
    earlier, column = jnp.array([0, 64, -1, 200], jnp.int32), 63
    reached = seen(column, earlier, 320).reshape(4, 5, 64).any(axis=2).repeat(64, axis=1)
    counted = columns_read(earlier, jnp.int32(column), 320, dim=16, itemsize=4)
    assert counted.tolist() == reached.sum(axis=1).tolist() == [64, 128, 0, 256]
    poisoned = jnp.where(reached[:, None, None, :], keys, jnp.nan)
    poisoned_values = jnp.where(reached[:, None, :, None], values, jnp.nan)
    mixed = kernel(q, poisoned, poisoned_values, jnp.int32(column), earlier)
    plain = attend_cached(q, keys, values, seen(column, earlier, 320), by_sums=False)
    np.testing.assert_allclose(mixed, plain.at[2].set(0.0), atol=1e-5)


@pytest.mark.slow
def test_over_rows_and_heads() -> None:
    mesh = meshes.make_mesh(1, 2, 2, devices=jax.devices()[:4])
    q, keys, values = inputs(4, 2, 3, 192)
    earlier, column = jnp.array([3, 170, -1, 100], jnp.int32), jnp.int32(20)
    split = jax.jit(partial(attend_columns, mesh=mesh))(q, keys, values, column, earlier)
    np.testing.assert_allclose(split, kernel(q, keys, values, column, earlier), atol=1e-6)


@pytest.mark.slow
def test_a_decode_step_is_the_same_with_it() -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    windows = {"sliding_window": 10, "layer_types": (SLIDING, FULL)}
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 16}
    config = ModelConfig("qwen2", **sizes, **heads, **windows)
    _, keys, values = inputs(3, 2, 1, 128, dim=8)
    cache = decode.Cache((keys, keys), (values, values), jnp.int32(5))
    step = partial(decode.decode, dtype=jnp.float32, mesh=ONE)
    arguments = (
        decoder.unstack(decoder.init(config, jax.random.key(1), std=0.3)),
        jnp.array([1, 2, 3]),
        jnp.array([0, 20, 127]),
        cache,
    )
    theirs, ours = (jax.jit(partial(step, kernel=name))(*arguments) for name in ("xla", "pallas"))
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), ours, theirs)


@pytest.mark.parametrize(
    ("width", "dim", "itemsize", "block"),
    [
        (3072, 128, 2, 64),
        (3072, 256, 2, 32),
        (3072, 96, 4, 32),
        (1040, 128, 2, 16),
        (48, 64, 1, 16),
    ],
)
def test_blocks_divide_the_ring_and_fit_shared_memory(
    width: int, dim: int, itemsize: int, block: int
) -> None:
    assert block_columns(width, dim, itemsize) == block


def test_few_rows_and_long_rings_are_shared_out() -> None:
    assert shares(512, 2, 2048, block=64) == 1
    assert shares(512, 2, 9216, block=64) == 5, "no program reads more than 2,048 columns"
    assert shares(16, 2, 2048, block=64) == 16, "16 * 2 * 16 programs"
    assert shares(1, 1, 256, block=64) == 4, "a block each"


def test_a_kernel_is_tried_before_it_samples() -> None:
    """Interpreted it is as XLA's; one that computes something else, or that cannot be compiled, is
    found out."""
    tried = partial(trial, jax.devices()[0], 4, 2, 16, jnp.dtype("float32"))
    assert tried() == ""

    def wrong(mesh: Any, *arrays: Any) -> jax.Array:
        return 1.1 * attend_columns(*arrays, mesh)

    def failing(mesh: Any, *arrays: Any) -> jax.Array:
        raise RuntimeError("out of shared memory\nand more")

    assert "differs from XLA's results" in tried(run=wrong)
    assert tried(run=failing) == "does not run on this cpu: RuntimeError: out of shared memory"
