"""Floating-point operations by formula: what XLA's own count misses inside loops.

A multiply-add counts as two. P_mm are the parameters that tokens are multiplied with: all but the embedding's rows, the
head included. Attention reads on average half of a causal context.
"""

from __future__ import annotations

from g2d_jax.models.config import ModelConfig
from g2d_jax.models.decoder import count_params


def matmul_params(config: ModelConfig) -> int:
    """P_mm: parameters used in matrix products, a tied head counted as the head."""
    embedding = config.vocab_size * config.hidden_size
    return count_params(config) - (0 if config.tie_word_embeddings else embedding)


def forward_flops(config: ModelConfig, tokens: float, context: float) -> float:
    """Forward pass of `tokens` tokens that each attend to `context` tokens: 2 P_mm + 4 L H d context a token."""
    width = config.num_attention_heads * config.head_dim
    return tokens * (2.0 * matmul_params(config) + 4.0 * config.num_hidden_layers * width * context)


def train_flops(config: ModelConfig, tokens: float, context: float) -> float:
    """Forward and backward: three times the forward pass."""
    return 3.0 * forward_flops(config, tokens, context)
