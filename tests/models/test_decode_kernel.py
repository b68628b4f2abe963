"""The kernel of decode steps against plain attention: what each row sees of the ring, and nothing
more is read."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from matrix import slow, some

from g2d_jax import mesh as meshes
from g2d_jax.models import decoder
from g2d_jax.models.attention import attend_blocks, attend_cached, blocks_back
from g2d_jax.models.config import FULL, SLIDING, ModelConfig
from g2d_jax.models.decode_kernel import attend_ring
from g2d_jax.models.kernels import check_decode

ONE = meshes.make_mesh(devices=jax.devices()[:1])
kernel = jax.jit(partial(attend_ring, mesh=ONE))
LAYER = jnp.int32(1)


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    """The kernel's program step by step on the CPU, with NaN in memory that nothing was written
    to."""
    with pltpu.force_tpu_interpret_mode():
        yield


def inputs(
    rows: int, kv_heads: int, repeats: int, width: int, dtype: str = "float32", dim: int = 8
) -> tuple:
    """A query a row, and keys and values of three layers."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (
        (rows, 1, kv_heads * repeats, dim),
        (3, rows, kv_heads, dim, width),
        (3, rows, kv_heads, width, dim),
    )
    return tuple(
        jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)
    )


def seen(column: int, earlier: jax.Array, width: int) -> jax.Array:
    """Which columns a row sees, bool [B, W]."""
    return ((column - jnp.arange(width)) % width)[None] <= earlier[:, None]


# width, the newest column, tokens before it: rows of one token and at rest, over the ring's end, a
# full ring
CASES = [
    (768, 0, [0, 1, 255, 256, 767]),
    (768, 300, [0, 44, 45, 301, 767]),
    (768, 767, [0, 511, 512, 766, 767]),
    (768, 511, [0, 0, 0, 0, 0]),
    (48, 7, [0, 6, 7, 8, 47]),
]


@pytest.mark.parametrize(
    ("kv_heads", "repeats", "dim", "dtype"),
    [
        (2, 1, 8, "float32"),
        (2, 7, 64, "bfloat16"),
        *slow((1, 7, 128, "float32"), (1, 1, 128, "bfloat16")),
    ],
)
@pytest.mark.parametrize(("width", "column", "lengths"), some(CASES[1:4:2], CASES))
def test_every_row_attends_to_what_it_sees(
    width: int, column: int, lengths: list[int], kv_heads: int, repeats: int, dim: int, dtype: str
) -> None:
    q, keys, values = inputs(len(lengths), kv_heads, repeats, width, dtype, dim)
    earlier, at = jnp.array(lengths, jnp.int32), jnp.int32(column)
    plain = attend_cached(
        q, keys[LAYER], values[LAYER], seen(column, earlier, width), by_sums=False
    )
    blocks = attend_blocks(q, keys, values, LAYER, at, earlier, earlier.max())
    ours = kernel(q, keys, values, LAYER, at, earlier)
    assert ours.dtype == q.dtype
    for one in (ours, blocks):
        np.testing.assert_allclose(
            one.astype(float), plain.astype(float), atol=1e-5 if dtype == "float32" else 0.02
        )


def test_a_row_reads_its_own_blocks_alone() -> None:
    """Blocks of 256 columns of which a row sees none hold NaN, which times a weight of 0 would be
    NaN."""
    q, keys, values = inputs(4, 1, 2, 1280)
    earlier, column = jnp.array([0, 255, 256, 900], jnp.int32), 255
    reached = seen(column, earlier, 1280).reshape(4, 5, 256).any(axis=2).repeat(256, axis=1)
    assert reached.sum(axis=1).tolist() == [256, 256, 512, 1024]
    values = (
        jnp.where(reached[:, None, :, None], values, jnp.nan).at[jnp.array([0, 2])].set(jnp.nan)
    )
    mixed = kernel(q, keys, values, LAYER, jnp.int32(column), earlier)
    assert np.isfinite(mixed).all()


@pytest.mark.parametrize(("block", "total"), [(1, 5), (4, 1), (4, 3), (5, 4)])
def test_blocks_of_a_row_are_those_that_hold_its_tokens(block: int, total: int) -> None:
    width = block * total
    for column in range(width):
        held = [
            len({(column - age) % width // block for age in range(earlier + 1)})
            for earlier in range(width)
        ]
        assert blocks_back(jnp.arange(width), jnp.int32(column), block, total).tolist() == held


def test_over_rows_and_heads() -> None:
    mesh = meshes.make_mesh(1, 2, 2, devices=jax.devices()[:4])
    q, keys, values = inputs(4, 2, 3, 768)
    earlier, column = jnp.array([3, 700, 0, 300], jnp.int32), jnp.int32(20)
    split = jax.jit(partial(attend_ring, mesh=mesh))(q, keys, values, LAYER, column, earlier)
    np.testing.assert_allclose(split, kernel(q, keys, values, LAYER, column, earlier), atol=1e-6)


def test_a_decode_step_is_the_same_with_it() -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    windows = {"sliding_window": 10, "layer_types": (SLIDING, FULL, SLIDING)}
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 3, "intermediate_size": 16}
    config = ModelConfig("qwen2", **sizes, **heads, **windows)
    _, keys, values = inputs(3, 2, 1, 512)
    cache = decoder.Cache((keys,), (values,), jnp.int32(5), jnp.int32(512))
    step = partial(decoder.decode, widths=(512,), dtype=jnp.float32, mesh=ONE)
    arguments = (
        decoder.init(config, jax.random.key(1), std=0.3),
        jnp.array([1, 2, 3]),
        jnp.array([0, 20, 511]),
        cache,
    )
    theirs, ours = (jax.jit(partial(step, kernel=name))(*arguments) for name in ("xla", "pallas"))
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), ours, theirs)


def test_it_is_refused_without_a_tpu() -> None:
    check_decode("pallas", "tpu")
    check_decode("xla", "cpu")
    with pytest.raises(
        ValueError, match=r"decode_attention is 'pallas'.* 'gpu': run there, or set it to xla"
    ):
        check_decode("pallas", "gpu")
