"""Logits that transformers computed, so that the decoder can be held against them where torch cannot be installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from g2d_jax.models import decoder, hf
from g2d_jax.records import MEMBERS

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
}
FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def save_model(family: str, folder: Path) -> Path:
    """A folder in Hugging Face's layout with weights drawn by NumPy, the same everywhere."""
    rng, width, heads, kv_heads = np.random.default_rng(0), 16, 16, 8
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (8, width), "lm_head.weight": (8, width)}
    shapes["model.norm.weight"] = (width,)
    for layer in range(2):
        block = f"model.layers.{layer}"
        shapes |= {f"{block}.{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
        shapes |= {f"{block}.self_attn.{name}_proj.weight": (heads, width) for name in ("q", "o")}
        shapes |= {f"{block}.self_attn.{name}_proj.weight": (kv_heads, width) for name in ("k", "v")}
        shapes |= {f"{block}.mlp.{name}_proj.weight": (24, width) for name in ("gate", "up")}
        shapes[f"{block}.mlp.down_proj.weight"] = (width, 24)
        if family == "qwen2":
            shapes |= {f"{block}.self_attn.{name}_proj.bias": (n,) for name, n in (("q", 16), ("k", 8), ("v", 8))}
        if family == "qwen3":
            shapes |= {f"{block}.self_attn.{name}_norm.weight": (4,) for name in ("q", "k")}
    tensors = {name: rng.normal(0, 0.4, shape).astype(np.float32) for name, shape in shapes.items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {**CONFIG, "model_type": family, "architectures": [FAMILIES[family]]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = hf.load(save_model(family, tmp_path / family))
    positions = jnp.arange(TOKENS.shape[1])[None]

    @jax.jit
    def logits(model: decoder.Decoder) -> jax.Array:
        hidden, _ = decoder.forward(model, jnp.asarray(TOKENS), positions, jnp.full_like(positions, MEMBERS))
        return hidden @ decoder.head_matrix(model)[None]

    golden = json.loads(GOLDEN.read_text())[family]
    assert np.abs(golden).max() > 1
    np.testing.assert_allclose(logits(model), golden, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_still_computes_them(family: str, tmp_path: Path) -> None:
    found = transformers_logits(save_model(family, tmp_path / family))
    np.testing.assert_allclose(found, json.loads(GOLDEN.read_text())[family], atol=1e-5)


def transformers_logits(folder: Path) -> Any:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.numpy()


if __name__ == "__main__":  # writes golden.json anew
    import tempfile

    with tempfile.TemporaryDirectory() as parent:
        written = {name: transformers_logits(save_model(name, Path(parent) / name)) for name in FAMILIES}
    GOLDEN.write_text(json.dumps({name: np.round(x, 6).tolist() for name, x in written.items()}) + "\n")
