"""The kernel of decode steps against plain attention: what each row sees of the ring, and nothing
more is read; interpreted on the CPU and compiled for TPUs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from g2d_jax.models import decode, decoder
from g2d_jax.models.attention import attend_blocks, attend_cached, blocks_back
from g2d_jax.models.config import FULL, SLIDING, ModelConfig
from g2d_jax.models.decode_kernel import attend_ring, columns_read
from g2d_jax.plan.target import ENVIRONMENT
from g2d_jax.runtime import mesh as meshes

ONE = meshes.make_mesh(devices=jax.devices()[:1])
kernel = jax.jit(partial(attend_ring, mesh=ONE), static_argnames="cores")
LAYER = jnp.int32(1)


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    """The kernel's program step by step on the CPU, with NaN in memory that nothing was written
    to."""
    with pltpu.force_tpu_interpret_mode():
        yield


def inputs(
    rows: int,
    kv_heads: int,
    repeats: int,
    width: int,
    dtype: str = "float32",
    dim: int = 8,
    layers: int = 3,
) -> tuple:
    """A query a row, and keys and values of all layers."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (
        (rows, 1, kv_heads * repeats, dim),
        (layers, rows, kv_heads, dim, width),
        (layers, rows, kv_heads, width, dim),
    )
    return tuple(
        jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)
    )


def seen(column: int, earlier: jax.Array, width: int) -> jax.Array:
    """Which columns a row sees, bool [B, W]."""
    return ((column - jnp.arange(width)) % width)[None] <= earlier[:, None]


def live(x: jax.Array, earlier: jax.Array) -> np.ndarray:
    """What rows that are not at rest have, and zeros of the others."""
    return np.where(np.asarray(earlier)[:, None, None, None] < 0, 0, np.asarray(x, float))


@pytest.mark.parametrize(
    ("width", "column", "lengths"),
    [
        (768, 300, [-1, 44, 45, 301, 767]),
        pytest.param(768, 127, [0, -1, 0, 640, -1], marks=pytest.mark.slow),
        pytest.param(208, 207, [0, 6, -1, 100, 207], marks=pytest.mark.slow),
    ],
)
def test_every_row_attends_to_what_it_sees(width: int, column: int, lengths: list[int]) -> None:
    """Rows of one token and at rest, over the ring's end."""
    q, keys, values = inputs(len(lengths), 4, 3, width, "bfloat16", 64)
    earlier, at = jnp.array(lengths, jnp.int32), jnp.int32(column)
    plain = attend_cached(
        q, keys[LAYER], values[LAYER], seen(column, earlier, width), by_sums=False
    )
    blocks = attend_blocks(q, keys, values, LAYER, at, earlier, earlier.max())
    ours = kernel(q, keys, values, LAYER, at, earlier)
    assert ours.dtype == q.dtype
    assert np.isfinite(plain).all() and np.isfinite(blocks).all()
    np.testing.assert_array_equal(ours, live(ours, earlier))
    for one in (ours, blocks):
        np.testing.assert_allclose(
            live(one, earlier),
            live(plain, earlier),
            atol=0.02,
        )


def test_a_row_reads_its_own_pieces_alone() -> None:
    """Pieces of 128 columns of which a row sees none hold NaN, which times a weight of 0 would be
    NaN."""
    q, keys, values = inputs(5, 4, 3, 768, "bfloat16", 64)
    earlier, column = jnp.array([-1, 44, 45, 300, 700], jnp.int32), 300
    reached = seen(column, earlier, 768).reshape(5, 6, 128).any(axis=2).repeat(128, axis=1)
    read = [0, 128, 256, 384, 768]
    assert reached.sum(axis=1).tolist() == read
    assert columns_read(earlier, jnp.int32(column), 768).tolist() == read
    others = jnp.array([0, 2])
    keys = jnp.where(reached[:, None, None, :], keys, jnp.nan).at[others].set(jnp.nan)
    values = jnp.where(reached[:, None, :, None], values, jnp.nan).at[others].set(jnp.nan)
    mixed = kernel(q, keys, values, LAYER, jnp.int32(column), earlier)
    assert np.isfinite(mixed).all()
    nothing = kernel(q, keys * jnp.nan, values * jnp.nan, LAYER, jnp.int32(column), earlier * 0 - 1)
    np.testing.assert_array_equal(nothing, jnp.zeros_like(q))


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
    q, keys, values = inputs(4, 4, 3, 768, dim=128)
    earlier, column = jnp.array([3, 700, -1, 300], jnp.int32), jnp.int32(20)
    split = jax.jit(partial(attend_ring, mesh=mesh))(q, keys, values, LAYER, column, earlier)
    blocks = attend_blocks(q, keys, values, LAYER, column, earlier, jnp.int32(700))
    np.testing.assert_allclose(split, live(blocks, earlier), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("cores", [1, 2])
def test_over_groups_of_rows_and_cores(cores: int) -> None:
    """Three groups of rows, the last of which has rows without a cache; a core of nothing but rows
    at rest."""
    q, keys, values = inputs(75, 1, 2, 256)
    column, random = jnp.int32(100), np.random.default_rng(0)
    earlier = jnp.array(np.where(random.random(75) < 0.3, -1, random.integers(0, 256, 75)))
    for ages in (earlier, earlier.at[33:].set(-1), earlier.at[:40].set(-1)):
        blocks = attend_blocks(q, keys, values, LAYER, column, ages, ages.max())
        ours = kernel(q, keys, values, LAYER, column, ages, cores=cores)
        np.testing.assert_allclose(ours, live(blocks, ages), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "kv_heads", "repeats", "dim", "width"),
    [(24, 4, 7, 128, 3072), (16, 2, 6, 64, 9216)],
)
def test_shapes_of_recipes_with_random_ages(
    rows: int, kv_heads: int, repeats: int, dim: int, width: int
) -> None:
    q, keys, values = inputs(rows, kv_heads, repeats, width, "bfloat16", dim, layers=2)
    random = np.random.default_rng(0)
    ages = np.clip(random.lognormal(np.log(0.2 * width), 0.8, rows), 0, width - 1)
    earlier = jnp.array(np.where(random.random(rows) < 0.2, -1, ages), jnp.int32)
    column = jnp.int32(random.integers(width))
    reached = seen(column, earlier, width).reshape(rows, -1, 128).any(axis=2).repeat(128, axis=1)
    assert columns_read(earlier, column, width).tolist() == reached.sum(axis=1).tolist()
    blocks = attend_blocks(q, keys, values, LAYER, column, earlier, earlier.max())
    # What no row reads is NaN for the kernel.
    keys = jnp.where(reached[:, None, None, :], keys, jnp.nan)
    values = jnp.where(reached[:, None, :, None], values, jnp.nan)
    ours = kernel(q, keys, values, LAYER, column, earlier)
    np.testing.assert_allclose(np.asarray(ours, float), live(blocks, earlier), atol=0.01)


def test_a_decode_step_is_the_same_with_it() -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    windows = {"sliding_window": 10, "layer_types": (SLIDING, FULL, SLIDING)}
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 3, "intermediate_size": 16}
    config = ModelConfig("qwen2", **sizes, **heads, **windows)
    _, keys, values = inputs(4, 2, 1, 512)
    cache = decode.Cache((keys,), (values,), jnp.int32(5))
    step = partial(decode.decode, dtype=jnp.float32, mesh=ONE)
    arguments = (
        decoder.init(config, jax.random.key(1), std=0.3),
        jnp.array([1, 2, 3, 4]),
        jnp.array([0, 20, 511, -1]),
        cache,
    )
    theirs, ours = (jax.jit(partial(step, kernel=name))(*arguments) for name in ("xla", "pallas"))
    for hidden, _ in (theirs, ours):
        assert np.isfinite(hidden).all()
    np.testing.assert_allclose(ours[0][:3], theirs[0][:3], atol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a[:, :3], b[:, :3], atol=1e-5),
        (ours[1].keys, ours[1].values),
        (theirs[1].keys, theirs[1].values),
    )


FOR_TPU = """
import sys, jax, jax.numpy as jnp
from jax.experimental import topologies
from g2d_jax.runtime import mesh as meshes
from g2d_jax.models.decode_kernel import attend_ring
device = topologies.get_topology_desc(platform="tpu", topology_name=sys.argv[1]).devices[0]
mesh = meshes.make_mesh(devices=[device])
place = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=meshes.replicated(mesh))
for case in sys.argv[2:]:
    dtype, *sizes = case.split(",")
    rows, heads, repeats, dim, width = map(int, sizes)
    shapes = (2, rows, heads, dim, width), (2, rows, heads, width, dim)
    keys, values = (place(dtype, *shape) for shape in shapes)
    query = place(dtype, rows, 1, heads * repeats, dim)
    number = place("int32")
    run = lambda *arguments: attend_ring(*arguments, mesh=mesh)
    compiled = jax.jit(run).lower(query, keys, values, number, number, place("int32", rows)).compile()
    print(case, compiled.as_text().count('custom_call_target="tpu_custom_call"'))
"""

# Rows, key heads, query heads of one, head_dim, width.
COMPILED = ["bfloat16,64,1,7,128,3072", "bfloat16,64,4,7,64,256"]
ODD = [
    "bfloat16,77,1,7,128,208",
    "bfloat16,5,3,4,80,48",
    "float32,64,8,2,128,3072",
    "float32,64,32,1,128,3072",
    "bfloat16,8,64,1,128,3072",
]


@pytest.mark.parametrize(
    ("chip", "cases"),
    [
        ("v5e:2x2", COMPILED),
        ("tpu7x:2x2x1", COMPILED),
        *(
            pytest.param(chip, [*COMPILED, *ODD], marks=pytest.mark.slow)
            for chip in ("v6e:2x2", "v5p:2x2x1")
        ),
    ],
)
def test_it_compiles_for_a_tpu(chip: str, cases: list[str]) -> None:
    """In a process of its own: libtpu reads the environment when it is loaded."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed (extra tpu)")
    settings = {**ENVIRONMENT, "XLA_FLAGS": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", FOR_TPU, chip, *cases],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [f"{case} 1" for case in cases]
