"""Rotary positions, visibility and blocked attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from plain import attend

from g2d_jax.models.attention import (
    SAVED,
    SEGMENT_STRIDE,
    Segments,
    Windowed,
    attend_cached,
    inverse_frequencies,
    packed_attention,
    rotary_table,
    visible,
)
from g2d_jax.models.config import LinearRope, ModelConfig, YarnRope
from g2d_jax.models.hf_config import config_to_hf
from g2d_jax.models.shapes import SHAPES

M = SEGMENT_STRIDE


@pytest.mark.parametrize(
    "config",
    [
        *(
            SHAPES[name]
            for name in ("Qwen2.5-0.5B", "Qwen3-8B", "Llama-3-8B", "Llama-3.1-8B", "Llama-3.2-1B")
        ),
        *(
            dataclasses.replace(SHAPES["Qwen2.5-7B"], rope_scaling=scaling)
            for scaling in (
                LinearRope(8.0),
                YarnRope(4.0, 32_768, 1.25),
                YarnRope(8.0, 4096, 1.0, beta_fast=64.0, beta_slow=2.0, truncate=False),
                YarnRope(4.0, 8, 1.5),  # no frequency turns once within the original length
            )
        ),
    ],
)
def test_frequencies_are_those_of_transformers(config: ModelConfig) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    modules = transformers.models
    llama = modules.llama.modeling_llama.LlamaRotaryEmbedding
    qwen2 = modules.qwen2.modeling_qwen2.Qwen2RotaryEmbedding
    read = transformers.AutoConfig.for_model(**config_to_hf(config))
    rotary = (llama if config.family == "llama" else qwen2)(read)
    np.testing.assert_allclose(inverse_frequencies(config), rotary.inv_freq.numpy(), rtol=1.2e-7)
    positions = np.array([[0, 1, 8191, 8192, 32_767, 100_000]], np.int32)
    expected = rotary(torch.zeros(1), torch.tensor(positions, dtype=torch.int64))
    for ours, theirs in zip(
        jax.jit(lambda p: rotary_table(config, p))(positions), expected, strict=True
    ):
        # One unit in the last place of a frequency may differ from torch's power function: 1e5 *
        # 1.2e-7 * frequency.
        np.testing.assert_allclose(ours, theirs.numpy()[..., : config.head_dim // 2], atol=2e-5)


@examples(30)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=12, max_size=12),
    st.integers(1, 12),
)
def test_visible_equals_the_rule_written_out(tokens: list[tuple[int, int]], window: int) -> None:
    ids = np.array([[group * SEGMENT_STRIDE + member for group, member in tokens]])
    rule = [
        [k <= q and key[0] == query[0] and key[1] in (0, query[1]) for k, key in enumerate(tokens)]
        for q, query in enumerate(tokens)
    ]
    np.testing.assert_array_equal(visible(jnp.asarray(ids), jnp.asarray(ids))[0], rule)
    np.testing.assert_array_equal(
        visible(jnp.asarray(ids[:, 3:5]), jnp.asarray(ids), 3)[0], rule[3:5]
    )
    assert np.diagonal(rule).all()  # every token sees itself: no row of the softmax is empty
    positions = np.random.default_rng(window).integers(0, 12, 12)
    near = positions[None] > positions[:, None] - window
    limited = windowed(jnp.asarray(ids), jnp.asarray(positions)[None], window)
    np.testing.assert_array_equal(visible(limited, limited)[0], rule & near)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_by_matrix_products_equal_those_by_sums(dtype: str) -> None:
    """One query a row against a cache of which each row sees other columns: as CPUs and as
    accelerators do it."""
    keys = jax.random.split(jax.random.key(3), 3)
    q = jax.random.normal(keys[0], (3, 1, 6, 16), dtype)
    k = jax.random.normal(keys[1], (3, 2, 16, 40), dtype)
    v = jax.random.normal(keys[2], (3, 2, 40, 16), dtype)
    columns = jnp.arange(40)[None]
    mask = (columns >= jnp.array([[0], [7], [30]])) & (columns <= 33)
    sums, products = (attend_cached(q, k, v, mask, by_sums=by_sums) for by_sums in (True, False))
    assert sums.dtype == products.dtype == jnp.dtype(dtype)
    np.testing.assert_allclose(
        sums.astype(float), products.astype(float), atol=1e-6 if dtype == "float32" else 0.02
    )
    plain = attend(q, k.transpose(0, 3, 1, 2), v.transpose(0, 2, 1, 3), mask[:, None])
    np.testing.assert_allclose(
        products.astype(float), plain.astype(float), atol=1e-6 if dtype == "float32" else 0.02
    )


def windowed(ids: jax.Array, positions: jax.Array, window: int) -> Windowed:
    return Windowed(ids, positions, positions - window + 1)


def packed_ids(length: int) -> jax.Array:
    """Two rows of segments: groups that share a prompt and padding; one group whose prompt is
    longer than a block."""
    spans = [
        [(M, 30), (M + 1, 50), (M + 2, 9), (2 * M, 1), (2 * M + 1, 70), (0, 40)],
        [(M, 90), (M + 1, 20), (M + 2, 60), (M + 3, 30)],
    ]
    return jnp.asarray(
        [[i for i, size in row for _ in range(size)][:length] for row in spans], jnp.int32
    )


@pytest.mark.parametrize(("length", "window"), [(200, 25), (198, None)])
def test_blocks_equal_the_whole_in_value_and_gradient(length: int, window: int | None) -> None:
    """Lengths that blocks divide and that they do not; rows of several groups, responses of one,
    padding."""
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (6, 2, 2, 6)
    q, k, v, w = (
        jax.random.normal(key, (2, length, h, 8)) for key, h in zip(keys, heads, strict=True)
    )
    ids: Segments = packed_ids(length)
    if window:
        ids = windowed(ids, jnp.arange(2 * length).reshape(2, length) % 80, window)

    def total(run: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
        return jnp.sum(w * run(*arrays))

    ours = partial(packed_attention, segment_ids=ids, block=64)
    theirs = partial(attend, mask=visible(ids, ids))
    np.testing.assert_allclose(ours(q, k, v), theirs(q, k, v), atol=2e-5, rtol=0)
    grads = jax.jit(jax.grad(partial(total, ours), (0, 1, 2)))(q, k, v)
    expected = jax.jit(jax.grad(partial(total, theirs), (0, 1, 2)))(q, k, v)
    for one, other in zip(grads, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5, rtol=0)


def test_what_no_row_sees_is_not_read() -> None:
    """Keys of another group may hold anything: two groups of 64 columns, and NaN in the first
    one's."""
    ids = jnp.repeat(jnp.array([M, 2 * M], jnp.int32), 64)[None]
    q, k, v = (
        jax.random.normal(key, (1, 128, 1, 8)) for key in jax.random.split(jax.random.key(0), 3)
    )
    broken = np.array(k)
    broken[:, :64] = np.nan
    attend = jax.jit(packed_attention)
    found, expected = (np.asarray(attend(q, keys, v, ids)) for keys in (broken, k))
    np.testing.assert_array_equal(found[:, 64:], expected[:, 64:])


def test_the_backward_pass_keeps_what_remat_names_and_runs_no_forward_pass_again() -> None:
    ids = packed_ids(128)
    q, k, v = (
        jax.random.normal(key, (2, 128, 2, 8)) for key in jax.random.split(jax.random.key(0), 3)
    )
    policy = jax.checkpoint_policies.save_only_these_names(SAVED)

    def loops(**remat: Any) -> int:
        run = jax.checkpoint(lambda *x: packed_attention(*x, ids), **remat)
        return str(jax.make_jaxpr(jax.grad(lambda *x: run(*x).sum(), (0, 1, 2)))(q, k, v)).count(
            "while["
        )

    assert (loops(policy=policy), loops()) == (2, 3)
