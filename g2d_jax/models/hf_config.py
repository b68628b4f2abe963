"""Hugging Face's config.json to a ModelConfig and back.

Reads what transformers 4 writes (rope_theta, rope_scaling) and what transformers 5 writes (rope_parameters). Whatever
would change the arithmetic and is not built here is refused by name, never ignored.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from g2d_jax.models.config import FAMILIES, SIZES, Llama3Rope, ModelConfig

T = TypeVar("T", bool, int, float)

# Fields that change the arithmetic, and the values under which it is the one that we have.
_SUPPORTED: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
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
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(
            f"config.json: model_type {family!r} is not supported; supported are {', '.join(FAMILIES)} "
            "(dense Qwen2, Qwen2.5, Qwen3, Llama 3 to 3.2)"
        )
    _refuse_unsupported(raw)
    absent = FAMILIES[family]
    sizes: dict[str, Any] = {name: _field(raw, name, int) for name in SIZES}
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    if raw.get("head_dim") is None and absent.head_dim is None and hidden % heads:
        raise ValueError(f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    theta, scaling = _rope(raw)
    return ModelConfig(
        family=family,
        **sizes,
        num_key_value_heads=_field(raw, "num_key_value_heads", int, heads if absent.kv_heads_optional else None),
        head_dim=_field(raw, "head_dim", int, absent.head_dim or hidden // heads),
        tie_word_embeddings=_field(raw, "tie_word_embeddings", bool, False),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=_field(raw, "rms_norm_eps", float, 1e-6),
        max_position_embeddings=_field(raw, "max_position_embeddings", int, absent.max_position_embeddings),
    )


def config_to_hf(
    config: ModelConfig,
    *,
    eos_ids: Sequence[int] = (),
    bos_id: int | None = None,
    pad_id: int | None = None,
    dtype: str = "float32",
) -> dict[str, Any]:
    """Return the config.json of this shape, in the transformers 4 form that versions 4 and 5 both read."""
    others = ("num_key_value_heads", "head_dim", "tie_word_embeddings", "rope_theta", "rms_norm_eps")
    copied = {name: getattr(config, name) for name in (*SIZES, *others, "max_position_embeddings")}
    scaling = config.rope_scaling
    return {
        "architectures": [config.traits.architecture],
        "model_type": config.family,
        **copied,
        **dict.fromkeys(config.traits.exported, False),
        "rope_scaling": {"rope_type": "llama3", **dataclasses.asdict(scaling)} if scaling else None,
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
    for name, supported in _SUPPORTED.items():
        if name in raw and raw[name] not in supported:
            raise ValueError(f"config.json: {name} = {raw[name]!r} is not supported")
    layer_types = raw.get("layer_types")
    if layer_types is not None:
        windowed = not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types)
    else:  # as in transformers: layers from max_window_layers on have the window
        full = raw.get("max_window_layers", 28)
        has_windowed_layers = not isinstance(full, int) or full < _field(raw, "num_hidden_layers", int)
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
    theta = _field(rope, "rope_theta", float, _field(raw, "rope_theta", float, 10_000.0))
    if kind == "default":
        return theta, None
    factor, low, high = (_field(rope, name, float) for name in _LLAMA3_FIELDS[:3])
    return theta, Llama3Rope(factor, low, high, _field(rope, _LLAMA3_FIELDS[3], int))


_KINDS = {bool: "true or false", int: "a positive integer", float: "a positive number"}


def _field(raw: Mapping[str, Any], name: str, kind: type[T], default: T | None = None) -> T:
    """Read a field of this kind, of JSON's types alone. Raises ValueError naming it."""
    value: Any = default if raw.get(name) is None else raw[name]
    right = type(value) in ((int, float) if kind is float else (kind,))
    if not right or not (kind is bool or 0 < value <= sys.float_info.max):
        raise ValueError(f"config.json: {name} must be {_KINDS[kind]}, got {value!r}")
    return kind(value)
