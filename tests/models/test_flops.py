"""Operations by formula, against counts by hand and published sizes."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from g2d_jax.models import decoder, flops, shapes
from g2d_jax.models.config import ModelConfig

TINY = ModelConfig("qwen2", 64, 32, 2, 4, 2, 8, 48, tie_word_embeddings=True)
# A layer: q and o 32*32 each, k and v 32*16 each, three of 32*48, two norms of 32. Outside: embedding, norm.
LAYER = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32


def test_parameters_used_in_products():
    assert flops.matmul_params(TINY) == 2 * LAYER + 32 + 64 * 32 == 17_568
    untied = dataclasses.replace(TINY, tie_word_embeddings=False)  # two matrices, one of them only looked up in
    assert flops.matmul_params(untied) == 17_568


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Qwen2.5-0.5B", 0.494), ("Qwen2.5-1.5B", 1.544), ("Qwen2.5-7B", 7.070), ("Llama-3.1-8B", 7.505)],
)
def test_parameters_of_known_models(name, billions):
    assert flops.matmul_params(shapes.shape(name)) / 1e9 == pytest.approx(billions, abs=1e-3)


def test_literal_values():
    # 10 tokens, 7 earlier ones each: products 2 * 17,568, attention 4 * 2 layers * 4 heads * 8 * 7 a token.
    assert flops.forward_flops(TINY, 10, 7) == 10 * (2 * 17_568 + 4 * 2 * 32 * 7) == 369_280
    assert flops.train_flops(TINY, 10, 7) == 3 * 369_280
    assert flops.forward_flops(TINY, 0, 7) == 0


def test_near_the_compilers_count():
    """XLA counts a loop's body once, so the model has one layer; it adds norms, softmax, rotations: a few percent."""
    config = dataclasses.replace(TINY, num_hidden_layers=1, hidden_size=128, intermediate_size=512, vocab_size=512)
    tokens = jax.ShapeDtypeStruct((4, 16), jnp.int32)

    def logits(model: decoder.Decoder, tokens: jax.Array) -> jax.Array:
        hidden, _ = decoder.forward(model, tokens, tokens, tokens)
        return hidden @ decoder.head_matrix(model)

    cost = jax.jit(logits).lower(decoder.abstract(config), tokens).compile().cost_analysis()
    assert flops.forward_flops(config, 4 * 16, 16) == pytest.approx(cost["flops"], rel=0.1)
