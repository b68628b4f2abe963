"""Operations by formula, against counts by hand and published sizes."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from g2d_jax.config import Optimizer
from g2d_jax.models import flops
from g2d_jax.models.config import Lora, ModelConfig
from g2d_jax.runtime.mesh import make_mesh
from g2d_jax.training import objectives
from g2d_jax.training.optimizer import make_optimizer
from g2d_jax.training.step import abstract_numbers, abstract_state, make_train_step

TINY = ModelConfig("llama", 64, 32, 2, 4, 2, 8, 48, tie_word_embeddings=True)
# A layer: q and o 32*32 each, k and v 32*16 each, three of 32*48, two norms of 32. Outside:
# embedding, norm.
LAYER = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32


def test_parameters_used_in_products():
    assert flops.matmul_params(TINY) == 2 * LAYER + 32 + 64 * 32 == 17_568
    # two matrices, one of them only looked up in
    untied = dataclasses.replace(TINY, tie_word_embeddings=False)
    assert flops.matmul_params(untied) == 17_568


def test_a_token_is_multiplied_with_its_own_experts_alone():
    """Two of eight, each of three matrices of 32 * 12; more tokens read more of them."""
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    config = dataclasses.replace(TINY, family="qwen3_moe", **sizes)
    dense = 2 * (LAYER - 3 * 32 * 48 + 2 * 8 + 32 * 8) + 32 + 64 * 32  # head norms and router
    expert = 2 * 3 * 32 * 12
    assert flops.matmul_params(config) == dense + 2 * expert
    assert flops.read_params(config, 1) == dense + 2 * expert
    assert flops.read_params(config, 2) == dense + 8 * expert * 7 // 16
    assert flops.read_params(config) == dense + 8 * expert
    assert flops.forward_flops(config, 10, 0) == 20 * (dense + 2 * expert)


def test_literal_values():
    # 10 tokens that read 7 positions each: products 2 * 17,568, attention 4 * 2 layers * 4 heads *
    # 8 * 7 a token.
    assert flops.forward_flops(TINY, 10, 70) == 10 * (2 * 17_568 + 4 * 2 * 32 * 7) == 369_280
    assert flops.train_flops(TINY, 10, 70) == 3 * 369_280
    assert flops.forward_flops(TINY, 0, 0) == 0


def test_adapters():
    """Their gradient needs that of every layer's output, but no gradient of the weights that
    stay."""
    config = dataclasses.replace(TINY, lora=Lora(4, 8.0, ("q_proj", "down_proj")))
    more = 2 * 4 * (32 + 32 + 48 + 32)  # two layers, rank 4, inputs and outputs of the two
    assert flops.matmul_params(config) == 17_568 + more
    assert flops.forward_flops(config, 10, 70) == 369_280 + 2 * more * 10
    assert flops.train_flops(config, 10, 70) == 3 * (369_280 + 2 * more * 10) - 2 * 17_568 * 10


def test_positions_read():
    assert [flops.attended(n) for n in (0, 1, 4)] == [0, 1, 1 + 2 + 3 + 4]
    assert flops.attended(3, before=5) == 6 + 7 + 8


@pytest.mark.slow
def test_a_train_step_is_near_the_compilers_count():
    """Forward, backward and update of one layer, attention counted in full: XLA computes what the
    mask hides.

    The rest, 2.6 % here, are AdamW and clipping (19 operations a parameter), softmax, norms and
    rotations. Two things that this step does not do twice are not counted where one does:
    rematerialised layers, and the logits of batches of more than one chunk (here the compiler sees
    that forward and backward pass compute the same).
    """
    config = dataclasses.replace(
        TINY, num_hidden_layers=1, hidden_size=128, intermediate_size=512, vocab_size=512
    )
    rows, length, mesh = 4, 64, make_mesh(1, 1, 1, devices=jax.devices()[:1])
    settings = {
        "schedule": "constant",
        "warmup_steps": 0,
        "b2": 0.999,
        "eps": 1e-8,
        "weight_decay": 0.0,
    }
    optimizer, numbers = make_optimizer(
        Optimizer(learning_rate=0.001, max_grad_norm=1.0, **settings), total_steps=5
    )
    step = make_train_step(
        objectives.sft(objectives.Compute(mesh, remat="none")), optimizer, config, mesh
    )
    names = ("tokens", "positions", "segment_ids", "logit_index", "response_index")
    arrays = {name: jax.ShapeDtypeStruct((1, rows, length), jnp.int32) for name in names}
    arrays["weight"] = jax.ShapeDtypeStruct((1, rows, length), jnp.float32)
    state, count = abstract_state(config, optimizer, mesh), jax.ShapeDtypeStruct((), jnp.int32)
    numbers = abstract_numbers({"optimizer": numbers, "loss": {}}, mesh)
    cost = step.lower(state, arrays, count, numbers).compile().cost_analysis()
    tokens = rows * length
    assert flops.train_flops(config, tokens, tokens * length) == pytest.approx(
        cost["flops"], rel=0.05
    )
