"""The shapes of common models as tables: planning and random-weight runs need no download.

Sizes, rope_theta, eps and tying come from each model's published config.json (base model; for Qwen3
the chat model, whose max_position_embeddings is 40960). Tuned variants (-Instruct, -Base) share the
entry. They may have another max_position_embeddings or, rarely, another rms_norm_eps, so a run
always reads the config next to the weights.
"""

from __future__ import annotations

import difflib
from typing import Any

from g2d_jax.models.config import (
    FULL,
    SLIDING,
    LinearRope,
    Llama3Rope,
    LongRope,
    ModelConfig,
    YarnRope,
)

# Family, vocab_size, rope_theta and rms_norm_eps.
_FAMILIES = {
    "Qwen2.5": ("qwen2", 152_064, 1e6, 1e-6),
    "Qwen3": ("qwen3", 151_936, 1e6, 1e-6),
    "Qwen3-MoE": ("qwen3_moe", 151_936, 1e6, 1e-6),
    "Llama-3": ("llama", 128_256, 500_000.0, 1e-5),
    "SmolLM2": ("llama", 49_152, 100_000.0, 1e-5),
    "SmolLM3": ("smollm3", 128_256, 5e6, 1e-6),
    "Mistral": ("mistral", 32_768, 1e6, 1e-5),
    "Olmo-3": ("olmo3", 100_278, 500_000.0, 1e-6),
    "Phi-4": ("phi3", 200_064, 10_000.0, 1e-5),
    "OLMo-2": ("olmo2", 100_352, 500_000.0, 1e-6),
    "gemma-3": ("gemma3_text", 262_144, 1e6, 1e-6),
    "Qwen3.5": ("qwen3_5_text", 248_320, 1e7, 1e-6),
}


def _shape(
    kind: str,
    hidden: int,
    mlp: int,
    layers: int,
    heads: int,
    kv: int,
    positions: int,
    **more: Any,
) -> ModelConfig:
    """Build a shape of a kind in _FAMILIES. positions: max_position_embeddings; more: other fields,
    which override the kind's own."""
    family, vocab_size, rope_theta, rms_norm_eps = _FAMILIES[kind]
    fields = {
        "family": family,
        "vocab_size": vocab_size,
        "rope_theta": rope_theta,
        "rms_norm_eps": rms_norm_eps,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": hidden // heads,
        "max_position_embeddings": positions,
    }
    return ModelConfig(**{**fields, **more})


_TIED = {"tie_word_embeddings": True}
_TIED_25 = {**_TIED, "vocab_size": 151_936}


def _sliding(layers: int, window: int, every: int) -> dict[str, Any]:
    """Return the fields of a window in all layers but each `every`-th."""
    kinds = tuple(SLIDING if number % every else FULL for number in range(1, layers + 1))
    return {"sliding_window": window, "layer_types": kinds}


def _gemma(layers: int) -> dict[str, Any]:
    return {**_sliding(layers, 512, 6), "head_dim": 256, **_TIED}


# The language model of a model with images, whose vocabulary has 64 more.
_GEMMA3_4B = {
    **_sliding(34, 1024, 6),
    "head_dim": 256,
    "vocab_size": 262_208,
    "rope_scaling": LinearRope(8.0),
    **_TIED,
}
_OLMO3 = {
    **_sliding(32, 4096, 4),
    "rope_scaling": YarnRope(8.0, 8192, 1.2079441541679836),
}


# fmt: off
_PHI4_LONG = (
    1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649,
    2.446418898, 2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845,
    5.351743533, 5.984965424, 6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158,
    11.70738129, 13.09260651, 14.64173252, 16.37415215, 18.31155283, 20.47818807, 22.90118105,
    25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71,
    32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
)
# fmt: on
_PHI4_MINI = {
    "sliding_window": 262_144,
    "layer_types": (SLIDING,) * 32,
    "rope_scaling": LongRope((1.0,) * 48, _PHI4_LONG, 4096, 1.1902380714238083),
    "partial_rotary_factor": 0.75,
    **_TIED,
}


def _qwen35(values: int) -> dict[str, Any]:
    """Return the fields of a Qwen3.5's recurrent layers. values: their value heads."""
    return {
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": values,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        **_TIED,
    }


_128_EXPERTS = {
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}


def _scaled(factor: float) -> dict[str, Any]:
    return {"rope_scaling": Llama3Rope(factor, 1.0, 4.0, 8192)}


SHAPES: dict[str, ModelConfig] = {
    "Qwen2.5-0.5B": _shape("Qwen2.5", 896, 4864, 24, 14, 2, 32_768, **_TIED_25),
    "Qwen2.5-1.5B": _shape("Qwen2.5", 1536, 8960, 28, 12, 2, 131_072, **_TIED_25),
    "Qwen2.5-3B": _shape("Qwen2.5", 2048, 11_008, 36, 16, 2, 32_768, **_TIED_25),
    "Qwen2.5-7B": _shape("Qwen2.5", 3584, 18_944, 28, 28, 4, 131_072),
    "Qwen2.5-14B": _shape("Qwen2.5", 5120, 13_824, 48, 40, 8, 131_072, rms_norm_eps=1e-5),
    "Qwen2.5-32B": _shape("Qwen2.5", 5120, 27_648, 64, 40, 8, 131_072, rms_norm_eps=1e-5),
    "Qwen3-0.6B": _shape("Qwen3", 1024, 3072, 28, 16, 8, 40_960, head_dim=128, **_TIED),
    "Qwen3-1.7B": _shape("Qwen3", 2048, 6144, 28, 16, 8, 40_960, head_dim=128, **_TIED),
    "Qwen3-4B": _shape("Qwen3", 2560, 9728, 36, 32, 8, 40_960, head_dim=128, **_TIED),
    "Qwen3-8B": _shape("Qwen3", 4096, 12_288, 36, 32, 8, 40_960, head_dim=128),
    "Qwen3-14B": _shape("Qwen3", 5120, 17_408, 40, 40, 8, 40_960, head_dim=128),
    "Qwen3-30B-A3B": _shape("Qwen3-MoE", 2048, 6144, 48, 32, 4, 40_960, **_128_EXPERTS),
    "Qwen3.5-0.8B": _shape("Qwen3.5", 1024, 3584, 24, 8, 2, 262_144, **_qwen35(16)),
    "Qwen3.5-4B": _shape("Qwen3.5", 2560, 9216, 32, 16, 4, 262_144, **_qwen35(32)),
    "Llama-3-8B": _shape("Llama-3", 4096, 14_336, 32, 32, 8, 8192),
    "Llama-3.1-8B": _shape("Llama-3", 4096, 14_336, 32, 32, 8, 131_072, **_scaled(8.0)),
    "Llama-3.2-1B": _shape("Llama-3", 2048, 8192, 16, 32, 8, 131_072, **_TIED, **_scaled(32.0)),
    "Llama-3.2-3B": _shape("Llama-3", 3072, 8192, 28, 24, 8, 131_072, **_TIED, **_scaled(32.0)),
    "SmolLM2-135M": _shape("SmolLM2", 576, 1536, 30, 9, 3, 8192, **_TIED),
    "SmolLM2-360M": _shape("SmolLM2", 960, 2560, 32, 15, 5, 8192, **_TIED),
    "SmolLM2-1.7B": _shape("SmolLM2", 2048, 8192, 24, 32, 32, 8192, **_TIED, rope_theta=130_000.0),
    "SmolLM3-3B": _shape("SmolLM3", 2048, 11_008, 36, 16, 4, 65_536, **_TIED),
    "Mistral-7B-v0.3": _shape("Mistral", 4096, 14_336, 32, 32, 8, 32_768),
    "OLMo-2-0425-1B": _shape("OLMo-2", 2048, 8192, 16, 16, 16, 4096),
    "Olmo-3-7B": _shape("Olmo-3", 4096, 11_008, 32, 32, 32, 65_536, **_OLMO3),
    "Phi-4-mini": _shape("Phi-4", 3072, 8192, 32, 24, 8, 131_072, **_PHI4_MINI),
    "gemma-3-4b": _shape("gemma-3", 2560, 10_240, 34, 8, 4, 131_072, **_GEMMA3_4B),
    "gemma-3-270m": _shape("gemma-3", 640, 2048, 18, 4, 1, 32_768, **_gemma(18)),
    "gemma-3-1b": _shape("gemma-3", 1152, 6912, 26, 4, 1, 32_768, **_gemma(26)),
}

_OTHER_NAMES = {
    "Meta-Llama-3-8B": "Llama-3-8B",
    "Meta-Llama-3.1-8B": "Llama-3.1-8B",
    "Mistral-7B-Instruct-v0.3": "Mistral-7B-v0.3",
    "Olmo-3-1025-7B": "Olmo-3-7B",
    "Athene-RM-8B": "Llama-3.1-8B",  # a reward model's trunk: models/reward_model.py
}


def shape(name: str) -> ModelConfig:
    """Return the shape by model name: "Qwen2.5-7B", "Qwen2.5-7B-Instruct" or
    "Qwen/Qwen2.5-7B-Instruct".

    Raises ValueError with the nearest names when the table has no such model.
    """
    plain = name.rsplit("/", 1)[-1]
    for suffix in ("-Instruct", "-instruct", "-Base", "-it", "-pt"):
        plain = plain.removesuffix(suffix)
    plain = _OTHER_NAMES.get(plain, plain)
    if plain not in SHAPES:
        near = difflib.get_close_matches(plain, SHAPES, n=3) or list(SHAPES)
        listed = ", ".join(near)
        raise ValueError(
            f"no shape table for model {name!r}; nearest: {listed}; or give a folder with its "
            "config.json"
        )
    return SHAPES[plain]
