"""The forward function: causality, packing, shared prefixes, decode through the cache,
rematerialisation."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain import assert_near, logits, noisy

from g2d_jax.models import decode, decoder
from g2d_jax.models.attention import SEGMENT_STRIDE
from g2d_jax.models.config import FULL, RECURRENT, SLIDING, Llama3Rope, ModelConfig, YarnRope
from g2d_jax.runtime import mesh as meshes

COMMON: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
}
CONFIGS = {
    "qwen2": ModelConfig("qwen2", head_dim=6, tie_word_embeddings=True, **COMMON),
    "qwen3": ModelConfig("qwen3", head_dim=10, **COMMON),
    "smollm3": ModelConfig(
        "smollm3",
        head_dim=6,
        no_rope_layers=(1, 0),
        rope_scaling=Llama3Rope(8.0, 1.0, 4.0, 16),
        **COMMON,
    ),
    "olmo2": ModelConfig("olmo2", head_dim=6, attention_bias=True, **COMMON),
    "granite": ModelConfig(
        "granite",
        head_dim=6,
        embedding_multiplier=3.0,
        attention_multiplier=0.4,
        residual_multiplier=0.6,
        logits_scaling=1.7,
        **COMMON,
    ),
    "seed_oss": ModelConfig("seed_oss", head_dim=6, attention_bias=True, **COMMON),
    "ministral3": ModelConfig(
        "ministral3",
        head_dim=6,
        rope_scaling=YarnRope(4.0, 4, 1.2, llama_4_scaling_beta=0.3),
        **COMMON,
    ),
    "phi3": ModelConfig("phi3", head_dim=8, partial_rotary_factor=0.5, **COMMON),
    "olmo3": ModelConfig(
        "olmo3",
        head_dim=6,
        sliding_window=4,
        layer_types=(SLIDING, FULL),
        rope_scaling=YarnRope(4.0, 8, 1.2),
        **COMMON,
    ),
    "gemma3": ModelConfig(
        "gemma3_text",
        head_dim=6,
        sliding_window=4,
        layer_types=(SLIDING, FULL),
        rope_local_base_freq=100.0,
        query_pre_attn_scalar=9,
        tie_word_embeddings=True,
        **COMMON,
    ),
}
CONFIGS["qwen3_5"] = ModelConfig(
    "qwen3_5_text",
    head_dim=6,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=10,
    linear_value_head_dim=6,
    partial_rotary_factor=2 / 3,
    layer_types=(RECURRENT, FULL, RECURRENT, FULL),
    **{**COMMON, "num_hidden_layers": 4},
)
CONFIGS["qwen3_moe"] = ModelConfig(
    "qwen3_moe",
    head_dim=6,
    num_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=12,
    norm_topk_prob=True,
    **COMMON,
)
TOLERANCE = 2e-5


# Their answers are compared with those of transformers in test_hf.py.
ELSEWHERE = (
    "qwen3",
    "smollm3",
    "olmo2",
    "granite",
    "seed_oss",
    "ministral3",
    "phi3",
    "olmo3",
    "qwen3_moe",
)


@pytest.fixture(scope="module", params=[name for name in CONFIGS if name not in ELSEWHERE])
def model(request: pytest.FixtureRequest) -> decoder.Decoder:
    return noisy(decoder.init(CONFIGS[request.param], jax.random.key(0), std=0.2))


@jax.jit
def hidden(
    model: decoder.Decoder, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array
) -> jax.Array:
    return decoder.forward(model, tokens, positions, segment_ids)[0]


def alone(model: decoder.Decoder, tokens: np.ndarray) -> np.ndarray:
    """Hidden states [T, E] of one sequence in a row of its own, padded to 16."""
    length, columns = len(tokens), np.arange(16)[None]
    padded = np.pad(tokens, (0, 16 - length))[None]
    ids = np.where(columns < length, SEGMENT_STRIDE, 0)
    return np.asarray(hidden(model, padded, columns, ids)[0, :length])


def random_tokens(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, COMMON["vocab_size"], length) for length in lengths]


@pytest.mark.quick
def test_a_packed_row_equals_its_sequences(model: decoder.Decoder) -> None:
    """Three responses to one prompt, another sequence, and padding."""
    prompt, *responses, other = random_tokens(6, 3, 5, 4, 7)
    tokens = np.concatenate([prompt, *responses, other, np.zeros(3, int)])
    parts = (range(6), *(range(6, 6 + len(r)) for r in responses), range(7), [0] * 3)
    positions = np.concatenate([np.array(part) for part in parts])
    ids = np.repeat(
        np.array([3, 3, 3, 3, 4, 0]) * SEGMENT_STRIDE + np.array([0, 1, 2, 3, 0, 0]),
        [6, 3, 5, 4, 7, 3],
    )
    packed = np.asarray(hidden(model, *(jnp.asarray(x)[None] for x in (tokens, positions, ids)))[0])
    start = 6
    for response in responses:
        expected = alone(model, np.concatenate([prompt, response]))
        np.testing.assert_allclose(packed[:6], expected[:6], atol=TOLERANCE)
        np.testing.assert_allclose(
            packed[start : start + len(response)], expected[6:], atol=TOLERANCE
        )
        start += len(response)
    np.testing.assert_allclose(packed[start:-3], alone(model, other), atol=TOLERANCE)
    assert np.isfinite(packed).all()


def prefill(
    model: decoder.Decoder, prompts: list[np.ndarray], columns: int, width: int
) -> decode.Cache:
    """Run ragged prompts, right-aligned in `columns`, into a ring of `width` columns that soon
    wraps."""
    starts = np.array([columns - len(p) for p in prompts])
    tokens = np.stack([np.pad(p, (s, 0)) for p, s in zip(prompts, starts, strict=True)])
    numbers = np.arange(columns)[None]
    positions = np.maximum(numbers - starts[:, None], 0)
    ids = np.where(numbers >= starts[:, None], SEGMENT_STRIDE, 0)
    _, kept = jax.jit(partial(decoder.forward, keep_kv=True))(model, tokens, positions, ids)
    assert kept is not None
    keys, values = (
        jnp.pad(x, ((0, 0), (0, 0), (width - 2 - columns, 2), (0, 0), (0, 0))) for x in kept[:2]
    )
    keys, values = keys.transpose(0, 1, 3, 4, 2), values.transpose(0, 1, 3, 2, 4)
    memories = () if kept.memories is None else (kept.memories,)
    return decode.Cache((keys,), (values,), jnp.int32(width - 2), memories)


def apart(stacked: tuple[Any, ...]) -> tuple[Any, ...]:
    """The entries of a stacked cache's one array, or tree of arrays."""
    count = len(jax.tree.leaves(stacked)[0]) if stacked else 0
    return tuple(jax.tree.map(lambda x, at=at: x[at], stacked[0]) for at in range(count))


@pytest.mark.quick
@pytest.mark.parametrize(("stacked", "width"), [(False, 16), (True, 1024)])
def test_decode_equals_the_full_forward(model: decoder.Decoder, stacked: bool, width: int) -> None:
    """Written over the end of the ring: all of it, and blocks of columns."""
    sequences = random_tokens(9, 12, 7)
    prompts = [s[:-4] for s in sequences]
    expected = np.stack([alone(model, s)[-4:] for s in sequences])
    cache = prefill(model, prompts, columns=10, width=width)
    if not stacked:
        parts = {name: getattr(cache, name) for name in ("keys", "values", "memories")}
        cache = dataclasses.replace(cache, **{name: apart(x) for name, x in parts.items()})
    params = model if stacked else jax.jit(decoder.unstack)(model)
    step = jax.jit(partial(decode.decode, params, dtype=jnp.float32))
    for t in range(4):
        tokens = jnp.array([s[len(s) - 4 + t] for s in sequences])
        states, cache = step(tokens, jnp.array([len(s) - 4 + t for s in sequences]), cache)
        np.testing.assert_allclose(states, expected[:, t], atol=TOLERANCE)
    assert int(cache.column) == 2


def test_remat_gives_equal_gradients() -> None:
    model = noisy(decoder.init(CONFIGS["qwen3"], jax.random.key(0), std=0.2))
    tokens = random_tokens(16)[0][None]

    def gradient(remat: decoder.Remat) -> decoder.Decoder:
        return jax.jit(
            jax.grad(lambda model: jnp.sum(jnp.sin(logits(model, tokens, remat=remat))))
        )(model)

    expected = gradient("none")
    near = partial(np.testing.assert_allclose, atol=5e-5, rtol=1e-4)
    for kind in ("full", "attention", "dots"):
        jax.tree.map(near, gradient(kind), expected)


@pytest.mark.slow
def test_gradients_of_recurrent_layers_do_not_depend_on_the_mesh() -> None:
    """The gradients are those of one device, however rows, heads and weights are split."""
    config = dataclasses.replace(CONFIGS["qwen3_5"], hidden_size=32, intermediate_size=48)
    model = noisy(decoder.init(config, jax.random.key(0), std=0.2))
    tokens = np.stack([random_tokens(24)[0]] * 8)
    mesh = meshes.make_mesh(2, 2, 2)

    def loss(model: decoder.Decoder, mesh: jax.sharding.Mesh | None) -> jax.Array:
        return jnp.sum(jnp.sin(logits(model, tokens, remat="full", mesh=mesh)))

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    placed = jax.device_put(model, decoder.shardings(config, mesh))
    # One after the other: CPU devices wait for each other in threads, of which there are few.
    expected = jax.block_until_ready(gradient(model, None))
    assert_near(jax.block_until_ready(gradient(placed, mesh)), expected, 2e-4)


def test_init_is_deterministic_and_each_array_has_its_own_key() -> None:
    one, two = (decoder.init(CONFIGS["qwen3"], jax.random.key(3)) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, one, two)
    firsts = [float(x.reshape(-1)[0]) for x in jax.tree.leaves(one) if float(x.std()) > 0]
    assert len(set(firsts)) == len(firsts) == 9  # q, k, v, o, gate, up, down, embed, head
    assert float(one.embed[...].std()) == pytest.approx(0.02, rel=0.1)


def test_abstract_shardings_and_init_are_one_tree() -> None:
    for config in map(CONFIGS.get, ("qwen2", "gemma3", "qwen3_5", "qwen3_moe")):
        model, shapes = decoder.init(config, jax.random.key(0)), decoder.abstract(config)
        assert [(x.shape, x.dtype) for x in jax.tree.leaves(model)] == [
            (x.shape, x.dtype) for x in jax.tree.leaves(shapes)
        ]
        placed = decoder.shardings(config, meshes.make_mesh())
        jax.tree.map(lambda x, sharding: sharding.shard_shape(x.shape), model, placed)
        assert decoder.count_params(config) == sum(x.size for x in jax.tree.leaves(model))


def test_the_table_gradient_of_a_gpu_is_that_of_a_lookup() -> None:
    """Words that come once, often, next to each other or apart, and not at all."""
    table = jax.random.normal(jax.random.key(0), (11, 3))
    tokens = jnp.array([[4, 4, 9, 0, 4], [9, 4, 10, 10, 4]])
    weights = jax.random.normal(jax.random.key(1), (2, 5, 3))

    def total(look_up: Any, table: jax.Array) -> jax.Array:
        return (look_up(table, tokens) * weights).sum()

    expected = jax.grad(partial(total, lambda table, tokens: table[tokens]))(table)
    found = jax.grad(partial(total, decoder._look_up))(table)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    assert np.count_nonzero(np.abs(found).sum(axis=1)) == 4
