"""Small models made and saved by transformers, one of every family, shared by the tests of this
folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

VOCAB = 131
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "attn_implementation": "eager",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
THETA = {"rope_type": "default", "rope_theta": 1_000_000.0}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.5}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 16,
}
IMAGES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2-tied": ("Qwen2Config", {"tie_word_embeddings": True, "rope_parameters": THETA}),
    "qwen3": ("Qwen3Config", {"head_dim": 20, "rope_parameters": THETA, "num_attention_heads": 6}),
    "llama3": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE, "rms_norm_eps": 1e-5}),
    "llama-biased": ("LlamaConfig", {"rope_parameters": LINEAR_ROPE, "attention_bias": True}),
    "qwen3-biased": (
        "Qwen3Config",
        {"rope_parameters": YARN_ROPE, "attention_bias": True, "head_dim": 20},
    ),
    "mistral": ("MistralConfig", {"rope_parameters": THETA, "sliding_window": 8, "head_dim": 16}),
    "qwen3-sliding": (
        "Qwen3Config",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "sliding_window": 8,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 20,
        },
    ),
    "smollm3": (
        "SmolLM3Config",
        {"rope_parameters": YARN_ROPE, "no_rope_layer_interval": 2, "pad_token_id": 0},
    ),
    "olmo2": ("Olmo2Config", {"rope_parameters": THETA, "attention_bias": True}),
    "granite": (
        "GraniteConfig",
        {
            "attention_bias": True,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.6,
            "logits_scaling": 1.7,
            "tie_word_embeddings": True,
        },
    ),
    "seed_oss": (
        "SeedOssConfig",
        {"rope_parameters": THETA, "head_dim": 16, "attention_out_bias": False},
    ),
    "seed_oss-out-bias": (
        "SeedOssConfig",
        {"head_dim": 20, "attention_bias": False, "attention_out_bias": True},
    ),
    "ministral3": (
        "Ministral3Config",
        {
            "head_dim": 16,
            "sliding_window": 40,
            "rope_parameters": {
                **YARN_ROPE,
                "original_max_position_embeddings": 32,
                "max_position_embeddings": 512,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    "phi3": (
        "Phi3Config",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
            "partial_rotary_factor": 0.5,
            "sliding_window": 40,
            "pad_token_id": 0,
        },
    ),
    "phi3-longrope": (
        "Phi3Config",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.3, 2.0, 2.5, 3.0],
                "long_factor": [2.0, 4.0, 8.0, 9.0, 10.0, 11.0],
            },
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "original_max_position_embeddings": 256,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
        },
    ),
    "gemma3-images": (
        "Gemma3Config",
        {
            "text_config": {
                "head_dim": 16,
                "sliding_window": 8,
                "sliding_window_pattern": 2,
                "query_pre_attn_scalar": 20,
                "rope_scaling": {"rope_type": "linear", "factor": 2.5},
            },
            "vision_config": {**IMAGES, "vision_use_head": False},
            "mm_tokens_per_image": 1,
        },
    ),
    "mistral3": (
        "Mistral3Config",
        {
            "text_config": {
                "model_type": "ministral3",
                "head_dim": 16,
                "rope_parameters": {**YARN_ROPE, "llama_4_scaling_beta": 0.3},
            },
            "vision_config": {**IMAGES, "model_type": "pixtral", "head_dim": 8},
            "tie_word_embeddings": False,
        },
    ),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "full_attention_interval": 2,
            "initializer_range": 0.1,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
            "tie_word_embeddings": True,
            "rope_parameters": {**THETA, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen3_5-images": (
        "Qwen3_5Config",
        {
            "text_config": {
                "head_dim": 16,
                "num_hidden_layers": 4,
                "initializer_range": 0.1,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 12,
                "linear_value_head_dim": 8,
                "linear_conv_kernel_dim": 3,
                "rope_parameters": {**THETA, "mrope_section": [1, 1, 0], "mrope_interleaved": True},
            },
            "vision_config": {
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
                "out_hidden_size": 48,
                "num_position_embeddings": 16,
            },
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "head_dim": 20,
            "rope_parameters": THETA,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
        },
    ),
    "olmo3": (
        "Olmo3Config",
        {
            "rope_parameters": {
                "full_attention": YARN_ROPE,
                "sliding_attention": {"rope_type": "default", "rope_theta": 20_000.0},
            },
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 8,
            "attention_bias": True,
        },
    ),
}

# Others have all of their arithmetic, or golden logits (test_golden.py) show it.
SLOW = (
    "llama-biased",
    "qwen3-biased",
    "mistral",
    "qwen3-sliding",
    "olmo3",
    "granite",
    "seed_oss",
    "seed_oss-out-bias",
    "ministral3",
    "phi3",
    "phi3-longrope",
    "gemma3-images",
    "mistral3",
    "qwen3_5-images",
    "qwen3_moe",
)


@dataclass(frozen=True)
class Reference:
    """A folder written by transformers, its model, and the logits [2, 160, VOCAB] of tokens."""

    folder: Path
    tokens: np.ndarray
    logits: np.ndarray
    model: Any


class References(dict[str, Reference]):
    """The references by name, each made when it is first asked for."""

    def __init__(self, factory: pytest.TempPathFactory):
        super().__init__()
        self.factory = factory

    def __missing__(self, name: str) -> Reference:
        self[name] = make_reference(name, self.factory.mktemp(name))
        return self[name]


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    return References(tmp_path_factory)


@pytest.fixture(params=[name for name in FAMILIES if name not in SLOW])
def reference(request: pytest.FixtureRequest, references: dict[str, Reference]) -> Reference:
    return references[request.param]


@pytest.fixture(params=SLOW)
def another(request: pytest.FixtureRequest, references: dict[str, Reference]) -> Reference:
    return references[request.param]


def make_reference(name: str, folder: Path) -> Reference:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config_class, extra = FAMILIES[name]
    torch.manual_seed(0)
    if "text_config" in extra:
        extra = {**extra, "text_config": {**SIZES, **extra["text_config"]}}
    else:
        extra = {**SIZES, **extra}
    config = getattr(transformers, config_class)(**extra)
    auto = transformers.AutoModelForCausalLM
    if "text_config" in extra:
        auto = transformers.AutoModelForImageTextToText
    model = auto.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():  # norms start as ones and biases as zeros: make them tell
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokens = np.random.default_rng(1).integers(0, VOCAB, (2, 160))
    with torch.no_grad():
        logits = model(torch.tensor(tokens)).logits.numpy()
    return Reference(folder, tokens.astype(np.int32), logits, model)
