"""Recurrent layers: chunks of packed rows against one token after the other."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain import noisy

from g2d_jax.models import decoder, delta, hf, lora
from g2d_jax.models.config import ModelConfig
from g2d_jax.models.delta import Inputs, Memory
from g2d_jax.records import SEGMENT_STRIDE
from g2d_jax.runtime import mesh as meshes

CONFIG = ModelConfig(
    "qwen3_5_text",
    vocab_size=8,
    hidden_size=8,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    intermediate_size=8,
    linear_key_head_dim=5,
    linear_value_head_dim=3,
)
LENGTH = 40
HEADS, VALUES, FEATURES, TAPS = 2, 4, 16, 4


def inputs_of(seed: int) -> tuple[Inputs, jax.Array]:
    """Inputs of a row of LENGTH tokens, and taps."""
    rng = np.random.default_rng(seed)
    mixed = rng.normal(size=(1, LENGTH, HEADS, FEATURES))
    decay = -rng.exponential(0.5, size=(1, LENGTH, VALUES))
    rate = rng.uniform(0.05, 1, size=(1, LENGTH, VALUES))
    taps = rng.normal(size=(HEADS, FEATURES, TAPS))
    arrays = (jnp.asarray(x, jnp.float32) for x in (mixed, decay, rate, taps))
    *own, taps = arrays
    return Inputs(*own), taps


scan = jax.jit(partial(delta.scan, CONFIG), static_argnames="chunk")
step = jax.jit(partial(delta.step, CONFIG))


def one_by_one(inputs: Inputs, taps: jax.Array, columns: list[int]) -> tuple[np.ndarray, Memory]:
    """Outputs [len(columns), VALUES, E] of a sequence that lies in these columns."""
    memory = delta.no_memory(CONFIG, 1, jnp.dtype(jnp.float32))
    outputs = []
    for column in columns:
        token = jax.tree.map(lambda x, at=column: x[:, at : at + 1], inputs)
        out, memory = step(memory, token, taps)
        outputs.append(np.asarray(out[0, 0]))
    return np.stack(outputs), memory


groups = st.lists(
    st.tuples(st.integers(1, 12), st.lists(st.integers(1, 9), max_size=4)), min_size=1, max_size=4
)


@given(groups=groups, chunk=st.sampled_from([4, 8, 64]), seed=st.integers(0, 99))
@settings(max_examples=8)
def test_each_response_goes_on_from_its_prompt(
    groups: list[tuple[int, list[int]]], chunk: int, seed: int
) -> None:
    """Wherever prompts and responses begin and end, in whatever chunk."""
    inputs, taps = inputs_of(seed)
    ids = np.zeros((1, LENGTH), np.int32)
    sequences: list[tuple[list[int], int]] = []  # columns, and which of them are told apart
    column = 0
    for number, (prompt, responses) in enumerate(groups, start=1):
        first = column
        for member, length in enumerate((prompt, *responses)):
            if column + length > LENGTH:
                break
            own = list(range(column, column + length))
            ids[0, own] = number * SEGMENT_STRIDE + member
            before = list(range(first, first + prompt)) if member else []
            sequences.append(([*before, *own], length))
            column += length
        else:
            continue
        break
    out, memory = scan(jnp.asarray(ids), inputs, taps, chunk=chunk)
    for columns, own in sequences:
        expected, last = one_by_one(inputs, taps, columns)
        np.testing.assert_allclose(out[0, columns[-own:]], expected[-own:], atol=2e-5)
        if columns[-1] == LENGTH - 1:
            jax.tree.map(partial(np.testing.assert_allclose, atol=2e-5), memory, last)
    assert np.isfinite(out).all()


def test_gradients_of_a_packed_row_are_those_of_its_sequences() -> None:
    inputs, taps = inputs_of(3)
    spans = {0: range(11), 1: range(11, 20), 2: range(20, 21), 3: range(21, LENGTH)}
    ids = np.concatenate([np.full(len(own), SEGMENT_STRIDE + n) for n, own in spans.items()])
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(LENGTH, VALUES, 3)), jnp.float32)

    def packed(inputs: Inputs, taps: jax.Array) -> jax.Array:
        out, _ = delta.scan(CONFIG, jnp.asarray(ids)[None], inputs, taps, chunk=8)
        return jnp.sum(out[0] * weights)

    def apart(inputs: Inputs, taps: jax.Array) -> jax.Array:
        total = jnp.float32(0)
        for number, own in spans.items():
            columns = np.array([*spans[0], *own] if number else own)
            alone = jax.tree.map(lambda x, at=columns: x[:, at], inputs)
            one = jnp.full((1, len(columns)), SEGMENT_STRIDE)
            out, _ = delta.scan(CONFIG, one, alone, taps, chunk=64)
            total += jnp.sum(out[0, -len(own) :] * weights[np.array(own)])
        return total

    found = jax.jit(jax.grad(packed, argnums=(0, 1)))(inputs, taps)
    expected = jax.jit(jax.grad(apart, argnums=(0, 1)))(inputs, taps)
    jax.tree.map(partial(np.testing.assert_allclose, atol=2e-4, rtol=1e-4), found, expected)


def test_a_long_decay_neither_overflows_nor_gives_nan() -> None:
    inputs, taps = inputs_of(1)
    inputs = inputs._replace(decay=jnp.full_like(inputs.decay, -90.0))
    ids = jnp.full((1, LENGTH), SEGMENT_STRIDE)

    def total(inputs: Inputs) -> jax.Array:
        return jnp.sum(scan(ids, inputs, taps)[0])

    gradients: Any = jax.grad(total)(inputs)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((total(inputs), gradients)))


def test_rows_and_heads_are_split_over_devices() -> None:
    """Two key heads over two devices."""
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")
    mesh = meshes.make_mesh(2, 2, 2)
    inputs, taps = inputs_of(2)
    inputs = jax.tree.map(lambda x: jnp.concatenate([x, 2 * x, -x, x + 1]), inputs)
    inputs = inputs._replace(decay=-jnp.abs(inputs.decay))
    ids = jnp.full((4, LENGTH), SEGMENT_STRIDE).at[:, 20:].add(1)
    expected = scan(ids, inputs, taps)
    found = jax.jit(delta.on_devices(CONFIG, mesh))(ids, inputs, taps)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), found, expected)


@pytest.mark.slow
def test_what_decides_how_fast_a_state_decays_is_never_rounded(tmp_path: Path) -> None:
    """Published Qwen3.5 has A_log and the norm of outputs in float32; so have masters, the sampler's
    parameters and exports."""
    model = decoder.cast(noisy(decoder.init(CONFIG, jax.random.key(0))), jnp.dtype(jnp.bfloat16))
    taken = lora.to_sampler_params(model, jnp.dtype(jnp.bfloat16))
    apart = lora.to_unstacked_sampler_params(model, jnp.dtype(jnp.bfloat16))
    hf.save(model, tmp_path / "model", dtype="bfloat16")
    loaded = hf.load(tmp_path / "model", dtype=jnp.dtype(jnp.bfloat16))
    for name in ("decay", "delta_norm"):
        value = decoder.parameter(model, name)
        assert value.dtype == jnp.float32 and model.blocks.delta_q[...].dtype == jnp.bfloat16
        for other in (taken, loaded):
            np.testing.assert_array_equal(decoder.parameter(other, name), value)
        np.testing.assert_array_equal(getattr(apart.blocks[2], name)[...], value[2])
