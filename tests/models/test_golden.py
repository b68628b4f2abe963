"""Logits that transformers computed, so that the decoder can be held against them where torch
cannot be installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from plain import logits
from safetensors.numpy import save_file

from g2d_jax.models import hf
from g2d_jax.models.config import FAMILIES
from g2d_jax.models.hf_config import config_from_hf
from g2d_jax.models.table import expected_shapes

pytestmark = pytest.mark.quick

GOLDEN = Path(__file__).with_name("golden.json")
TOKENS = np.array([[3, 1, 7, 7, 0, 5, 2]])
CONFIG = {
    "vocab_size": 8,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-6,
    "no_rope_layers": [0, 1],
    "pad_token_id": 0,
    "sliding_window": 3,
    "sliding_window_pattern": 2,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 4,
}
OWN = {
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.6,
        "logits_scaling": 0.7,
    },
    "ministral3": {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.5}},
    "phi3": {
        "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 32,
        "rope_parameters": {"rope_type": "longrope", "short_factor": [1.5], "long_factor": [3.0]},
    },
    "olmo3": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": YARN,
        },
    },
    "qwen3_moe": {
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "norm_topk_prob": True,
    },
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 100.0,
            "partial_rotary_factor": 0.5,
        },
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 6,
        "linear_conv_kernel_dim": 3,
    },
}
"""Fields of a family that have other values than transformers' own, which do nothing."""


def save_model(family: str, folder: Path) -> Path:
    """A folder in Hugging Face's layout with weights drawn by NumPy, the same everywhere."""
    architecture = FAMILIES[family].architecture
    config = {
        **CONFIG,
        **OWN.get(family, {}),
        "model_type": family,
        "architectures": [architecture],
    }
    shapes, rng = expected_shapes(config_from_hf(config)), np.random.default_rng(0)
    folder.mkdir()
    tensors = {name: rng.normal(0, 0.4, shapes[name]).astype(np.float32) for name in sorted(shapes)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# test_hf.py compares these with transformers itself
COMPARED = ("gemma3_text", "llama", "olmo2", "qwen2", "qwen3", "qwen3_5_text", "smollm3")


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in COMPARED])
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    golden = json.loads(GOLDEN.read_text())[family]
    assert np.abs(golden).max() > 1
    np.testing.assert_allclose(
        jax.jit(logits)(hf.load(save_model(family, tmp_path / family)), TOKENS), golden, atol=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_still_computes_them(family: str, tmp_path: Path) -> None:
    found = transformers_logits(save_model(family, tmp_path / family))
    np.testing.assert_allclose(found, json.loads(GOLDEN.read_text())[family], atol=1e-5)


def transformers_logits(folder: Path) -> Any:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.numpy()


if __name__ == "__main__":  # writes golden.json anew
    import tempfile

    with tempfile.TemporaryDirectory() as parent:
        written = {
            name: transformers_logits(save_model(name, Path(parent) / name)) for name in FAMILIES
        }
    GOLDEN.write_text(
        json.dumps({name: np.round(x, 6).tolist() for name, x in written.items()}) + "\n"
    )
