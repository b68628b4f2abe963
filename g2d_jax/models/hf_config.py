"""Hugging Face's config.json to a ModelConfig and back.

Reads what transformers 4 writes (rope_theta, rope_scaling) and what transformers 5 writes (rope_parameters). Whatever
would change the arithmetic and is not built here is refused by name, never ignored.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from g2d_jax.models.config import Family, Llama3Rope, ModelConfig

ARCHITECTURES: dict[Family, str] = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
}

# Fields that add arithmetic we do not have, and the values under which they add none.
_MUST_BE_OFF: dict[str, tuple[object, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "quantization_config": (None,),
    "partial_rotary_factor": (1, None),
    "use_mrope": (False, None),
}

_LLAMA3_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_ROPE_FIELDS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_LLAMA3_FIELDS}


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the contents of a config.json of model_type qwen2 (Qwen2, Qwen2.5), qwen3 or llama (Llama 3 to 3.2).

    Raises ValueError naming the field for another model type (mixtures of experts, vision …), sliding windows in
    use, rope types other than "default" and "llama3", biases outside Qwen2's q, k and v, quantised weights, and for
    missing or misformed sizes.
    """
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in ARCHITECTURES:
        raise ValueError(
            f"config.json: model_type {family!r} is not supported; supported are {', '.join(ARCHITECTURES)} "
            "(dense Qwen2, Qwen2.5, Qwen3, Llama 3 to 3.2)"
        )
    _refuse_unsupported(raw)
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    fields: dict[str, Any] = {name: _integer(raw, name) for name in sizes}
    heads = fields["num_attention_heads"]
    theta, scaling = _rope(raw)
    return ModelConfig(
        family=family,
        **fields,
        num_key_value_heads=_integer(raw, "num_key_value_heads", heads if family == "llama" else None),
        head_dim=_head_dim(raw, fields["hidden_size"], heads),
        tie_word_embeddings=_boolean(raw, "tie_word_embeddings"),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        max_position_embeddings=_integer(raw, "max_position_embeddings", 2048 if family == "llama" else 32_768),
    )


def config_to_hf(
    config: ModelConfig,
    *,
    eos_ids: Sequence[int] = (),
    bos_id: int | None = None,
    pad_id: int | None = None,
    dtype: str = "float32",
) -> dict[str, Any]:
    """Return the config.json of this shape, in the transformers 4 form that versions 4 and 5 both read.

    Raises ValueError when the family's Hugging Face class cannot express the config's flags.
    """
    if config.qkv_bias != (config.family == "qwen2") or config.qk_norm != (config.family == "qwen3"):
        raise ValueError(
            f"family {config.family!r} with qkv_bias={config.qkv_bias}, qk_norm={config.qk_norm} has no Hugging Face "
            "architecture; qwen2 has the bias, qwen3 the norm, llama neither"
        )
    copied = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "intermediate_size", "tie_word_embeddings", "rope_theta", "rms_norm_eps", "max_position_embeddings",
    )  # fmt: skip
    scaling = config.rope_scaling
    family_fields = (
        {"attention_bias": False, "mlp_bias": False} if config.family == "llama" else {"use_sliding_window": False}
    )
    return {
        "architectures": [ARCHITECTURES[config.family]],
        "model_type": config.family,
        **{name: getattr(config, name) for name in copied},
        **family_fields,
        "rope_scaling": scaling
        and {"rope_type": "llama3", **{name: getattr(scaling, name) for name in _LLAMA3_FIELDS}},
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "bos_token_id": bos_id,
        "eos_token_id": one_or_list(eos_ids),
        "pad_token_id": pad_id,
        "torch_dtype": dtype,
        "use_cache": True,
    }


def one_or_list(ids: Sequence[int]) -> int | list[int] | None:
    """Return token ids as Hugging Face writes them: none, one, or a list."""
    return list(ids) if len(ids) > 1 else (ids[0] if ids else None)


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    for name, harmless in _MUST_BE_OFF.items():
        if name in raw and raw[name] not in harmless:
            raise ValueError(f"config.json: {name} = {raw[name]!r} is not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"config.json: hidden_act {raw['hidden_act']!r} is not supported; only silu is")
    layer_types = raw.get("layer_types")
    if layer_types is not None:
        windowed = not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types)
    else:  # as in transformers: layers from max_window_layers on have the window
        full = raw.get("max_window_layers", 28)
        has_windowed_layers = not isinstance(full, int) or full < _integer(raw, "num_hidden_layers")
        windowed = bool(raw.get("use_sliding_window")) and raw.get("sliding_window") is not None and has_windowed_layers
    if windowed:
        raise ValueError("config.json: sliding-window attention is in use and is not supported")


def _rope(raw: Mapping[str, Any]) -> tuple[float, Llama3Rope | None]:
    """Read rope_theta and llama3 scaling, from rope_parameters (transformers 5) or rope_theta and rope_scaling (4)."""
    field = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    rope = raw.get(field) or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"config.json: {field} must be an object, got {rope!r}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ValueError(f"config.json: {field}: rope type {kind!r} is not supported; default and llama3 are")
    if unknown := sorted(set(rope) - _ROPE_FIELDS):
        raise ValueError(f"config.json: {field}: unknown entries {unknown}")
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise ValueError(f"config.json: {field}.partial_rotary_factor is not supported")
    theta = _number(rope, "rope_theta", _number(raw, "rope_theta", 10_000.0))
    if kind == "default":
        return theta, None
    factor, low, high = (_number(rope, name) for name in _LLAMA3_FIELDS[:3])
    return theta, Llama3Rope(factor, low, high, _integer(rope, _LLAMA3_FIELDS[3]))


def _head_dim(raw: Mapping[str, Any], hidden: int, heads: int) -> int:
    if raw.get("head_dim") is None and raw["model_type"] == "qwen3":
        return 128  # the default of transformers' Qwen3Config, where head_dim does not follow from the width
    if raw.get("head_dim") is None and hidden % heads:
        raise ValueError(f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    return _integer(raw, "head_dim", hidden // heads)


def _integer(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = default if raw.get(name) is None else raw[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config.json: {name} must be a positive integer, got {value!r}")
    return value


def _number(raw: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = default if raw.get(name) is None else raw[name]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise ValueError(f"config.json: {name} must be a positive number, got {value!r}")
    return float(value)


def _boolean(raw: Mapping[str, Any], name: str) -> bool:
    value = raw.get(name, False)
    if not isinstance(value, bool):
        raise ValueError(f"config.json: {name} must be true or false, got {value!r}")
    return value
