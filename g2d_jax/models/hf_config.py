"""Hugging Face's config.json to a ModelConfig and back.

Reads what transformers 4 writes (rope_theta, rope_scaling) and what transformers 5 writes (rope_parameters). Whatever
would change the arithmetic and is not built here is refused by name, never ignored.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from g2d_jax.models.config import (
    FAMILIES,
    SIZES,
    Family,
    LinearRope,
    Llama3Rope,
    ModelConfig,
    RopeScaling,
    YarnRope,
    no_rope_layers,
)

T = TypeVar("T", bool, int, float)

# Fields that change the arithmetic, and the values under which it is the one that we have.
_SUPPORTED: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "quantization_config": (None,),
    "partial_rotary_factor": (1, None),
    "use_mrope": (False, None),
    "original_max_position_embeddings": (None,),  # transformers takes it in place of that of the rope's entries
}

MAX_LAYERS = 10_000
"""More than any model has: what config.json says is not believed before lists of all layers are made."""

_ROPES: tuple[type[RopeScaling], ...] = (LinearRope, Llama3Rope, YarnRope)
_ROPE_FIELDS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mscale", "mscale_all_dim"}
_ROPE_FIELDS |= {entry.name for rope in _ROPES for entry in dataclasses.fields(rope)}


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the contents of a config.json of a model_type in FAMILIES.

    Raises ValueError naming the field for another model type (mixtures of experts, vision …), sliding windows in
    use, rope types other than "default", "linear", "llama3" and "yarn", biases of feed-forward layers, quantised
    weights, and for missing or misformed sizes.
    """
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(
            f"config.json: model_type {family!r} is not supported; supported are {', '.join(FAMILIES)} "
            "(dense Qwen2, Qwen2.5, Qwen3, Llama 3 to 3.2, SmolLM2, Mistral, SmolLM3, OLMo 2)"
        )
    absent = FAMILIES[family]
    _refuse_unsupported(raw, absent)
    sizes: dict[str, Any] = {name: _field(raw, name, int) for name in SIZES}
    if sizes["num_hidden_layers"] > MAX_LAYERS:
        raise ValueError(f"config.json: num_hidden_layers {sizes['num_hidden_layers']} is more than {MAX_LAYERS}")
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    if raw.get("head_dim") is None and absent.head_dim is None and hidden % heads:
        raise ValueError(f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    positions = _field(raw, "max_position_embeddings", int, absent.max_position_embeddings)
    theta, scaling = _rope(raw, absent.rope_theta, positions)
    return ModelConfig(
        family=family,
        **sizes,
        num_key_value_heads=_field(raw, "num_key_value_heads", int, heads if absent.kv_heads_optional else None),
        head_dim=_field(raw, "head_dim", int, absent.head_dim or hidden // heads),
        tie_word_embeddings=_field(raw, "tie_word_embeddings", bool, absent.tie_word_embeddings),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=_field(raw, "rms_norm_eps", float, absent.rms_norm_eps),
        max_position_embeddings=positions,
        attention_bias=_field(raw, "attention_bias", bool, False),
        no_rope_layers=_no_rope_layers(raw, absent, sizes["num_hidden_layers"]),
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
    named = (*SIZES, *others, "max_position_embeddings", *config.traits.stated)
    copied = {name: list(value) if isinstance(value := getattr(config, name), tuple) else value for name in named}
    scaling = config.rope_scaling
    return {
        "architectures": [config.traits.architecture],
        "model_type": config.family,
        **copied,
        **config.traits.fixed,
        "rope_scaling": {"rope_type": scaling.rope_type, **dataclasses.asdict(scaling)} if scaling else None,
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


def _refuse_unsupported(raw: Mapping[str, Any], family: Family) -> None:
    for name, supported in _SUPPORTED.items():
        if name in raw and raw[name] not in supported:
            raise ValueError(f"config.json: {name} = {raw[name]!r} is not supported")
    layer_types = raw.get("layer_types")
    if family.sliding_window:
        window = raw.get("sliding_window", family.sliding_window)
        longest = _field(raw, "max_position_embeddings", int, family.max_position_embeddings)
        windowed = window is not None and _field(raw, "sliding_window", int, family.sliding_window) < longest
    elif layer_types is not None:
        windowed = not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types)
    else:  # as in transformers: layers from max_window_layers on have the window
        full = 0 if family.no_rope_layer_interval else raw.get("max_window_layers", 28)
        has_windowed_layers = not isinstance(full, int) or full < _field(raw, "num_hidden_layers", int)
        windowed = bool(raw.get("use_sliding_window")) and raw.get("sliding_window") is not None and has_windowed_layers
    if windowed:
        raise ValueError("config.json: sliding-window attention is in use and is not supported")


def _no_rope_layers(raw: Mapping[str, Any], family: Family, layers: int) -> tuple[int, ...]:
    """Read which layers have rotary embeddings, as ModelConfig has it."""
    if not family.no_rope_layer_interval:
        return ()
    flags = raw.get("no_rope_layers")
    if flags is None:
        return no_rope_layers(_field(raw, "no_rope_layer_interval", int, family.no_rope_layer_interval), layers)
    if not isinstance(flags, list) or len(flags) < layers or any(flag not in (0, 1) for flag in flags):
        raise ValueError(f"config.json: no_rope_layers must be a list of 0 or 1 for each layer, got {flags!r}")
    return tuple(map(int, flags[:layers]))


def _rope(raw: Mapping[str, Any], theta: float, positions: int) -> tuple[float, RopeScaling | None]:
    """Read rope_theta and the scaling, from rope_parameters (transformers 5) or rope_theta and rope_scaling (4).

    theta: where it is not stated. positions: max_position_embeddings.
    """
    field = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    rope = raw.get(field) or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"config.json: {field} must be an object, got {rope!r}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", *(rope.rope_type for rope in _ROPES)):
        raise ValueError(
            f"config.json: {field}: rope type {kind!r} is not supported; default, linear, llama3 and yarn are"
        )
    if unknown := sorted(set(rope) - _ROPE_FIELDS):
        raise ValueError(f"config.json: {field}: unknown entries {unknown}")
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise ValueError(f"config.json: {field}.partial_rotary_factor is not supported")
    theta = _field(rope, "rope_theta", float, _field(raw, "rope_theta", float, theta))
    if kind == "default":
        return theta, None
    factor = _field(rope, "factor", float)
    if kind == "linear":
        return theta, LinearRope(factor)
    length = _field(rope, "original_max_position_embeddings", int, positions)
    if kind == "llama3":
        return theta, Llama3Rope(
            factor, _field(rope, "low_freq_factor", float), _field(rope, "high_freq_factor", float), length
        )
    size = _mscale(factor, 1.0)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        both = (_field(rope, name, float) for name in ("mscale", "mscale_all_dim"))
        size = _mscale(factor, next(both)) / _mscale(factor, next(both))
    return theta, YarnRope(
        factor,
        length,
        _field(rope, "attention_factor", float, size),
        _field(rope, "beta_fast", float, 32.0),
        _field(rope, "beta_slow", float, 1.0),
        _field(rope, "truncate", bool, True),
    )


def _mscale(factor: float, scale: float) -> float:
    """Return by how much YaRN lengthens queries or keys, for an extension by this factor."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


_KINDS = {bool: "true or false", int: "a positive integer", float: "a positive number"}


def _field(raw: Mapping[str, Any], name: str, kind: type[T], default: T | None = None) -> T:
    """Read a field of this kind, of JSON's types alone. Raises ValueError naming it."""
    value: Any = default if raw.get(name) is None else raw[name]
    right = type(value) in ((int, float) if kind is float else (kind,))
    if not right or not (kind is bool or 0 < value <= sys.float_info.max):
        raise ValueError(f"config.json: {name} must be {_KINDS[kind]}, got {value!r}")
    return kind(value)
