"""The shape of a decoder, in Hugging Face's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Family = Literal["qwen2", "qwen3", "llama"]


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1's frequency scaling (rope_type "llama3")."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: pre-norm, RMSNorm, RoPE, grouped-query attention, SwiGLU.

    family decides qkv_bias and qk_norm only through the two flags below; it is kept for export.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    rope_theta: float = 10_000.0
    rope_scaling: Llama3Rope | None = None
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32_768

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")
