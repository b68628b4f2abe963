"""The masks of adapters' dropout: what they keep, and what they depend on."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from g2d_jax.models import decoder, lora
from g2d_jax.models.config import Lora, ModelConfig
from g2d_jax.models.dropout import of_layer, token_keys
from g2d_jax.records import SEGMENT_STRIDE

CONFIG = ModelConfig("qwen3", 64, 32, 2, 4, 2, 8, 48, tie_word_embeddings=True, lora=Lora(3, 6.0))
SOME = ("k_proj", "o_proj", "gate_proj")
POSITIONS = np.tile(np.arange(6, dtype=np.int32), (2, 1))


def sequence_keys(*names: int) -> np.ndarray:
    """[B, 6, 2], the same key at all tokens of a row."""
    return np.repeat(np.array([[[name, 7]] for name in names], np.uint32), 6, axis=1)


def mask(
    rate: float, keys: np.ndarray, layer: int = 0, name: str = "q", width: int = 500
) -> np.ndarray:
    ones = jnp.ones((*keys.shape[:2], width))
    return np.asarray(
        of_layer(rate, token_keys(jnp.asarray(keys), jnp.asarray(POSITIONS)), layer)(name, ones)
    )


def test_numbers_are_dropped_at_the_rate_and_the_others_scaled() -> None:
    found = mask(0.25, sequence_keys(1, 2))
    np.testing.assert_allclose(np.unique(found), [0, 4 / 3], rtol=1e-6)
    # of 6,000 draws; one standard deviation is 0.006
    assert (found == 0).mean() == pytest.approx(0.25, abs=0.02)
    np.testing.assert_array_equal(mask(0.0, sequence_keys(1, 2)), 1)
    x = jnp.full((2, 6, 4, 2), 3.0, jnp.bfloat16)
    assert (
        of_layer(0.25, token_keys(sequence_keys(1, 2), POSITIONS), 0)("o", x).dtype == jnp.bfloat16
    )


def test_every_sequence_position_layer_and_adapter_has_a_mask_of_its_own() -> None:
    rows = [
        *mask(0.5, sequence_keys(1, 2)).reshape(12, -1),
        *mask(0.5, sequence_keys(1, 2), layer=1).reshape(12, -1),
        *mask(0.5, sequence_keys(1, 2), name="k").reshape(12, -1),
    ]
    equal = np.array([[np.mean(one == other) for other in rows] for one in rows])
    # of 500 draws; one standard deviation is 0.022
    assert np.abs(equal[~np.eye(36, dtype=bool)] - 0.5).max() < 0.15
    np.testing.assert_array_equal(
        mask(0.5, sequence_keys(2, 1)), mask(0.5, sequence_keys(1, 2))[::-1]
    )


def test_forward_drops_with_keys_only() -> None:
    base = jax.jit(lambda: decoder.init(CONFIG.base, jax.random.key(0), 0.2))()
    tokens = np.arange(12, dtype=np.int32).reshape(2, 6)
    ids = np.full_like(tokens, SEGMENT_STRIDE)

    def hidden(rate: float, b: float, dropout: np.ndarray | None) -> np.ndarray:
        config = dataclasses.replace(CONFIG, lora=Lora(3, 6.0, SOME, dropout=rate))
        trained = lora.adapters(config, jax.random.key(1))
        trained = jax.tree.map(lambda x: x + b, trained)
        policy = lora.combine(trained, lora.frozen(base, config))
        run = jax.jit(
            lambda policy, dropout: decoder.forward(
                policy, tokens, POSITIONS, ids, dropout=dropout
            )[0]
        )
        return np.asarray(run(policy, dropout))

    keys = sequence_keys(1, 2)
    np.testing.assert_array_equal(hidden(0.4, 0.0, keys), hidden(0.0, 0.0, None))  # B is zero
    np.testing.assert_array_equal(hidden(0.4, 0.1, None), hidden(0.0, 0.1, None))
    assert np.abs(hidden(0.4, 0.1, keys) - hidden(0.0, 0.1, None)).max() > 0.1
