"""GGUF files made for tests with the library gguf, as llama.cpp's converter makes them: its names,
its order of rows, its entries."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file

from g2d_jax.models.hf_config import config_from_hf
from g2d_jax.models.table import expected_shapes

PERMUTED = ("llama", "mistral", "smollm3")
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
}
ENTRIES = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}


def write(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[np.ndarray, str]]
) -> Path:
    """Write a file. tensors: name -> float32 numbers, and the type that they are written as."""
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    adders = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for name, value in metadata.items():
        if name != "general.architecture":
            adders[type(value)](name, value)
    for name, (array, kind) in tensors.items():
        stored = Kind[kind]
        writer.add_tensor(name, gguf.quantize(array, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def permuted(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys as llama.cpp has them."""
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def entries(config: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a model by its config.json, but for the tokenizer's."""
    name = gguf.MODEL_ARCH_NAMES[ARCHITECTURES[config["model_type"]]]
    found = {f"{name}.{ours}": config[theirs] for theirs, ours in ENTRIES.items()}
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    found[f"{name}.rope.freq_base"] = float(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        found[f"{name}.rope.scaling.type"] = rope["rope_type"]
        found[f"{name}.rope.scaling.factor"] = rope["factor"]
    if rope["rope_type"] == "yarn":
        length = rope["original_max_position_embeddings"]
        found[f"{name}.rope.scaling.original_context_length"] = length
    if config.get("head_dim"):
        found[f"{name}.attention.key_length"] = config["head_dim"]
        found[f"{name}.attention.value_length"] = config["head_dim"]
    if config["model_type"] == "gemma3_text":
        found[f"{name}.attention.sliding_window"] = config["sliding_window"]
    elif config["model_type"] in PERMUTED:
        found[f"{name}.vocab_size"] = config["vocab_size"]
        found[f"{name}.rope.dimension_count"] = config["head_dim"]
    return {"general.architecture": name, **found}


def rope_factors(config: Mapping[str, Any]) -> np.ndarray:
    """What llama.cpp's converter writes for Llama 3.1's scaling, float32 [D/2]."""
    rope = config["rope_parameters"]
    exponents = np.arange(0, config["head_dim"], 2, dtype=np.float32) / config["head_dim"]
    wavelengths = 2 * np.pi * rope["rope_theta"] ** exponents
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    length = rope["original_max_position_embeddings"]
    smooth = np.clip((length / wavelengths - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


def convert(
    folder: Path, path: Path, kind: str, tokenizer: Mapping[str, Any] | None = None
) -> dict[str, np.ndarray]:
    """Write a Hugging Face folder as a GGUF file, matrices as this type, the rest as float32.

    Returns the numbers that the file then has, by Hugging Face's names and in its layout.
    """
    config = json.loads((folder / "config.json").read_text())
    family = config["model_type"]
    names = gguf.get_tensor_name_map(ARCHITECTURES[family], config["num_hidden_layers"])
    heads = {
        "q_proj": config["num_attention_heads"],
        "k_proj": config["num_key_value_heads"],
    }
    tensors: dict[str, tuple[np.ndarray, str]] = {}
    numbers: dict[str, np.ndarray] = {}
    for theirs, array in load_file(folder / "model.safetensors").items():
        name = names.get_name(theirs, (".weight", ".bias"))
        assert name is not None, theirs
        used = kind if array.ndim > 1 else "F32"
        numbers[theirs] = gguf.dequantize(gguf.quantize(array, Kind[used]), Kind[used])
        part = theirs.split(".")[-2]
        if family in PERMUTED and part in heads:
            array = permuted(array, heads[part])
        if family == "gemma3_text" and part.endswith("norm"):
            array = array + 1
        tensors[name] = (array, used)
    if config["rope_parameters"].get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = (rope_factors(config), "F32")
    write(path, {**entries(config), **(tokenizer or {})}, tensors)
    return numbers


TINY: dict[str, Any] = {
    **{"model_type": "llama", "vocab_size": 6, "hidden_size": 32, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32},
    **{"max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": True},
    **{"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
}
_TOKENS = {
    "tokens": ["<unk>", "<s>", "</s>", "a", "b", "ab"],
    "scores": [0.0, 0.0, 0.0, -1.0, -2.0, -3.0],
    "token_type": [2, 3, 3, 1, 1, 1],
    **{"model": "llama", "pre": "default"},
    **{"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0},
}


def write_tiny(path: Path) -> Path:
    """Write a Llama of one layer, all of whose numbers are 1, and a tokenizer of six tokens."""
    names = gguf.get_tensor_name_map(ARCHITECTURES["llama"], 1)
    tensors = {}
    for name, shape in expected_shapes(config_from_hf(TINY)).items():
        kind = "Q8_0" if len(shape) > 1 else "F32"
        tensors[names.get_name(name, (".weight",))] = (np.ones(shape, np.float32), kind)
    tokenizer = {f"tokenizer.ggml.{name}": value for name, value in _TOKENS.items()}
    return write(path, {**entries(TINY), **tokenizer}, tensors)
