"""The shapes of the models people bring, as tables: planning and random-weight runs need no download.

Sizes, rope_theta, eps and tying are those of each model's published config.json (base model; of Qwen3 the chat
model, whose max_position_embeddings is 40960). Tuned variants (-Instruct, -Base) share the entry: they may state
another max_position_embeddings or, rarely, another rms_norm_eps, so a run always reads the config beside the weights.
"""

from __future__ import annotations

import difflib

from g2d_jax.models.config import Llama3Rope, ModelConfig


def _qwen25(
    hidden: int, mlp: int, layers: int, heads: int, kv: int, *, tied: bool, positions: int, eps: float = 1e-6
) -> ModelConfig:
    return ModelConfig(
        family="qwen2",
        vocab_size=151_936 if tied else 152_064,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=hidden // heads,
        intermediate_size=mlp,
        tie_word_embeddings=tied,
        qkv_bias=True,
        rope_theta=1_000_000.0,
        rms_norm_eps=eps,
        max_position_embeddings=positions,
    )


def _qwen3(hidden: int, mlp: int, layers: int, heads: int, *, tied: bool) -> ModelConfig:
    return ModelConfig(
        family="qwen3",
        vocab_size=151_936,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=mlp,
        tie_word_embeddings=tied,
        qk_norm=True,
        rope_theta=1_000_000.0,
        rms_norm_eps=1e-6,
        max_position_embeddings=40_960,
    )


def _llama3(hidden: int, mlp: int, layers: int, heads: int, *, tied: bool, rope_factor: float | None) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=128_256,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=hidden // heads,
        intermediate_size=mlp,
        tie_word_embeddings=tied,
        rope_theta=500_000.0,
        rope_scaling=None if rope_factor is None else Llama3Rope(rope_factor, 1.0, 4.0, 8192),
        rms_norm_eps=1e-5,
        max_position_embeddings=8192 if rope_factor is None else 131_072,
    )


SHAPES: dict[str, ModelConfig] = {
    "Qwen2.5-0.5B": _qwen25(896, 4864, 24, 14, 2, tied=True, positions=32_768),
    "Qwen2.5-1.5B": _qwen25(1536, 8960, 28, 12, 2, tied=True, positions=131_072),
    "Qwen2.5-3B": _qwen25(2048, 11_008, 36, 16, 2, tied=True, positions=32_768),
    "Qwen2.5-7B": _qwen25(3584, 18_944, 28, 28, 4, tied=False, positions=131_072),
    "Qwen2.5-14B": _qwen25(5120, 13_824, 48, 40, 8, tied=False, positions=131_072, eps=1e-5),
    "Qwen2.5-32B": _qwen25(5120, 27_648, 64, 40, 8, tied=False, positions=131_072, eps=1e-5),
    "Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, tied=True),
    "Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, tied=True),
    "Qwen3-4B": _qwen3(2560, 9728, 36, 32, tied=True),
    "Qwen3-8B": _qwen3(4096, 12_288, 36, 32, tied=False),
    "Qwen3-14B": _qwen3(5120, 17_408, 40, 40, tied=False),
    "Llama-3-8B": _llama3(4096, 14_336, 32, 32, tied=False, rope_factor=None),
    "Llama-3.1-8B": _llama3(4096, 14_336, 32, 32, tied=False, rope_factor=8.0),
    "Llama-3.2-1B": _llama3(2048, 8192, 16, 32, tied=True, rope_factor=32.0),
    "Llama-3.2-3B": _llama3(3072, 8192, 28, 24, tied=True, rope_factor=32.0),
}

_OTHER_NAMES = {
    "Meta-Llama-3-8B": "Llama-3-8B",
    "Meta-Llama-3.1-8B": "Llama-3.1-8B",
    "Athene-RM-8B": "Llama-3.1-8B",  # a reward model's trunk: models/reward_model.py
}


def shape(name: str) -> ModelConfig:
    """The shape by model name: "Qwen2.5-7B", "Qwen2.5-7B-Instruct" or "Qwen/Qwen2.5-7B-Instruct".

    Raises ValueError with the nearest names when the table has no such model.
    """
    plain = name.rsplit("/", 1)[-1].removesuffix("-Instruct").removesuffix("-Base")
    plain = _OTHER_NAMES.get(plain, plain)
    if plain not in SHAPES:
        near = difflib.get_close_matches(plain, SHAPES, n=3) or list(SHAPES)
        listed = ", ".join(near)
        raise ValueError(f"no shape table for model {name!r}; nearest: {listed}; a folder with its config.json will do")
    return SHAPES[plain]
