"""Floating-point operations by formula, since XLA's own count omits loops.

A multiply-add counts as two. P_mm are the parameters in products with tokens: all but the
embedding's rows, the head included. Attention counts the positions that each token really reads,
itself and the earlier ones of its own sequence; sliding windows are ignored. Kernels that also
compute masked positions do more work than is counted here. Of experts only those used by a token
count.
"""

from __future__ import annotations

import math

from g2d_jax.models.config import ModelConfig
from g2d_jax.models.decoder import count_params
from g2d_jax.models.table import block_params


def matmul_params(config: ModelConfig) -> int:
    """Count P_mm, the parameters used in a token's matrix products, a tied head counted as the
    head."""
    return read_params(config, 1)


def read_params(config: ModelConfig, tokens: float = math.inf) -> int:
    """Count the parameters that the products of this many tokens read, as `matmul_params`; of
    experts the used ones, if tokens are spread evenly over them."""
    embedding = config.vocab_size * config.hidden_size
    read = count_params(config) - (0 if config.tie_word_embeddings else embedding)
    if not config.num_experts:
        return read
    rows = [row for row in block_params(config).values() if row.experts]
    experts = sum(math.prod(row.full_shape) for row in rows)
    untouched = (1 - config.num_experts_per_tok / config.num_experts) ** tokens
    return read - round(untouched * experts)


def attended(length: int, before: int = 0) -> int:
    """Count the positions that `length` tokens read together, each itself and earlier ones, after
    `before` more."""
    return length * before + length * (length + 1) // 2


def forward_flops(config: ModelConfig, tokens: float, positions: float) -> float:
    """Count a forward pass of `tokens` tokens that read `positions` positions. 2 P_mm a token; 4 H d
    a position and layer with attention; 6 D E a token and head of a recurrent layer, whose state is
    read twice and written once (models/delta.py)."""
    width = config.num_attention_heads * config.head_dim
    attention = 4.0 * len(config.layers(recurrent=False)) * width * positions
    heads = len(config.layers(recurrent=True)) * config.linear_num_value_heads
    state = config.linear_key_head_dim * config.linear_value_head_dim
    return (2.0 * matmul_params(config) + 6.0 * heads * state) * tokens + attention


def train_flops(config: ModelConfig, tokens: float, positions: float) -> float:
    """Count both passes: three times the forward pass; with adapters, without the gradients of the
    frozen parameters.

    Not counted are the optimiser's few operations a parameter, and recomputation in the backward
    pass: with remat, the layers; in batches of more than one chunk of losses/logprobs.py, the
    logits.
    """
    frozen = matmul_params(config.base) if config.lora else 0
    return 3.0 * forward_flops(config, tokens, positions) - 2.0 * frozen * tokens
