"""Conversion of Hugging Face's config.json to a ModelConfig and back.

Reads the formats of transformers 4 (rope_theta, rope_scaling) and transformers 5
(rope_parameters). Settings that would change the arithmetic but are not supported here raise
ValueError by name; none is ignored.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from g2d_jax.models.config import (
    EXPERT_SIZES,
    FAMILIES,
    FULL,
    RECURRENT,
    RECURRENT_SIZES,
    SCALARS,
    SIZES,
    SLIDING,
    Family,
    LinearRope,
    Llama3Rope,
    LongRope,
    ModelConfig,
    RopeScaling,
    YarnRope,
    check_layer_types,
    no_rope_layers,
    recurrent_types,
)

T = TypeVar("T", bool, int, float)

# Fields that change the arithmetic, and the values for which ours is right.
_SUPPORTED: dict[str, tuple[object, ...]] = {
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "residual_dropout": (0, None),
    "resid_pdrop": (0, None),
    "embd_pdrop": (0, None),
    "lm_head_bias": (False, None),
    "quantization_config": (None,),
    "partial_rotary_factor": (1, None),
    "use_mrope": (False, None),
    # transformers prefers it to that of the rope's entries.
    "original_max_position_embeddings": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "mamba_ssm_dtype": ("float32", None),
    "attn_output_gate": (None,),
    "output_gate_type": (None,),
    "use_bidirectional_attention": (False, None),
    # Layers without experts among those with some, and experts for every token.
    "decoder_sparse_step": (1, None),
    "mlp_only_layers": ([], None),
    "shared_expert_intermediate_size": (0, None),
    "n_shared_experts": (0, None),
}

# For a family with recurrent layers.
_GATES: dict[str, tuple[object, ...]] = {
    "attn_output_gate": (True, None),
    "output_gate_type": ("swish", "silu", None),
}

_LONG_ROPE_LENGTH = 4096  # the default

MAX_LAYERS = 10_000
"""More than any model has: checked before the number in config.json determines the size of lists."""

# Models with images: transformers' defaults for their text_config.
_WITH_IMAGES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "model_type": "gemma3_text",
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "mistral3": {},
    "qwen3_5": {"model_type": "qwen3_5_text"},
}

_ROPES: tuple[type[RopeScaling], ...] = (LinearRope, Llama3Rope, YarnRope)
_ROPE_FIELDS = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "mscale",
    "mscale_all_dim",
}
_ROPE_FIELDS |= {entry.name for rope in _ROPES for entry in dataclasses.fields(rope)}


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the contents of a config.json of a model_type in FAMILIES, or of a model with images
    whose language model has one.

    Raises ValueError naming the field for another model type (other mixtures of experts, vision …),
    sliding windows in a family without them, rope types that the family does not have, biases of
    feed-forward layers, quantised weights, and for missing or malformed sizes.
    """
    raw = _language_model(raw)
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(
            f"config.json: model_type {family!r} is not supported; supported are "
            f"{', '.join(FAMILIES)} (dense Qwen2, Qwen2.5, Qwen3, Llama 3 to 3.2, SmolLM2, "
            "Mistral, Ministral 3, SmolLM3, OLMo 2 and 3, Granite, Seed-OSS, Phi-3 and Phi-4-mini, "
            f"Gemma 3, dense Qwen3.5, Qwen3-MoE), and the language model of {', '.join(_WITH_IMAGES)}"
        )
    absent = FAMILIES[family]
    _refuse_unsupported(raw, absent)
    sizes: dict[str, Any] = {name: _field(raw, name, int) for name in SIZES}
    if sizes["num_hidden_layers"] > MAX_LAYERS:
        raise ValueError(
            f"config.json: num_hidden_layers {sizes['num_hidden_layers']} is more than {MAX_LAYERS}"
        )
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    if raw.get("head_dim") is None and absent.head_dim is None and hidden % heads:
        raise ValueError(
            f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}"
        )
    positions = _field(raw, "max_position_embeddings", int, absent.max_position_embeddings)
    if absent.recurrent:
        window, layer_types = None, _recurrent(raw, absent, sizes["num_hidden_layers"])
    else:
        window, layer_types = _sliding(raw, absent, sizes["num_hidden_layers"])
    of_family = _of_family(raw, absent)
    if absent.sliding_rope:
        raw = _by_layer_type(raw)
    theta, scaling = _rope(raw, absent, positions)
    whole = absent.partial_rotary_factor
    partial_factor = _field(raw, "partial_rotary_factor", float, whole)
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    partial_factor = _field(rope, "partial_rotary_factor", float, partial_factor)
    if absent.sliding_rope:
        local_theta = absent.rope_local_base_freq or theta
        of_family["rope_local_base_freq"] = _field(raw, "rope_local_base_freq", float, local_theta)
    return ModelConfig(
        family=family,
        **sizes,
        num_key_value_heads=_field(
            raw, "num_key_value_heads", int, heads if absent.kv_heads_optional else None
        ),
        head_dim=_field(raw, "head_dim", int, absent.head_dim or hidden // heads),
        tie_word_embeddings=_field(raw, "tie_word_embeddings", bool, absent.tie_word_embeddings),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=_field(raw, "rms_norm_eps", float, absent.rms_norm_eps),
        max_position_embeddings=positions,
        attention_bias=_field(raw, "attention_bias", bool, absent.attention_bias),
        attention_out_bias=_field(raw, "attention_out_bias", bool, False),
        no_rope_layers=_no_rope_layers(raw, absent, sizes["num_hidden_layers"]),
        sliding_window=window,
        layer_types=layer_types,
        partial_rotary_factor=partial_factor,
        **of_family,
    )


def _of_family(raw: Mapping[str, Any], absent: Family) -> dict[str, Any]:
    """Read the fields that only some families have."""
    fields: dict[str, Any] = {name: _field(raw, name, float, 1.0) for name in SCALARS}
    if absent.attention_multiplier or raw.get("attention_multiplier") is not None:
        default = absent.attention_multiplier
        fields["attention_multiplier"] = _field(raw, "attention_multiplier", float, default)
    if scalar := absent.query_pre_attn_scalar:
        fields["query_pre_attn_scalar"] = _field(raw, "query_pre_attn_scalar", int, scalar)
    if absent.recurrent:
        for name, size in RECURRENT_SIZES.items():
            fields[name] = _field(raw, name, int, size)
    if absent.experts:
        fields |= _experts(raw)
    return fields


def has_images(raw: Mapping[str, Any]) -> bool:
    """Return whether a config.json belongs to a model with images, whose language model is used."""
    kind = raw.get("model_type")
    return isinstance(kind, str) and kind in _WITH_IMAGES


def _language_model(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of the language model, which a model with images has in text_config, and
    those of the whole model."""
    if not has_images(raw):
        return raw
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(f"config.json: text_config must be an object, got {text!r:.200}")
    whole = {name: raw[name] for name in (*_SUPPORTED, "tie_word_embeddings") if name in raw}
    return {**_WITH_IMAGES[raw["model_type"]], **text, **whole}


def config_to_hf(
    config: ModelConfig,
    *,
    eos_ids: Sequence[int] = (),
    bos_id: int | None = None,
    pad_id: int | None = None,
    dtype: str = "float32",
) -> dict[str, Any]:
    """Return the config.json of this shape, in the transformers 4 form that versions 4 and 5 both
    read."""
    others = ("num_key_value_heads", "head_dim", "tie_word_embeddings", "rms_norm_eps")
    named = (*SIZES, *others, "max_position_embeddings", *config.traits.stated)
    copied = {name: getattr(config, name) for name in named}
    for name in ("no_rope_layers", "layer_types"):
        if name in copied:
            copied[name] = list(copied[name])
    return {
        "architectures": [config.traits.architecture],
        "model_type": config.family,
        **copied,
        **config.traits.fixed,
        **_sliding_to_hf(config),
        **_rope_to_hf(config),
        **_activation(config.traits),
        "attention_dropout": 0.0,
        "bos_token_id": bos_id,
        "eos_token_id": one_or_list(eos_ids),
        "pad_token_id": pad_id,
        "torch_dtype": dtype,
        "use_cache": True,
    }


def one_or_list(ids: Sequence[int]) -> int | list[int] | None:
    """Return token ids in Hugging Face's notation: None, one, or a list."""
    if len(ids) > 1:
        return list(ids)
    return next(iter(ids), None)


def _refuse_unsupported(raw: Mapping[str, Any], family: Family) -> None:
    of_family: dict[str, tuple[object, ...]] = {
        name: (value,) for name, value in _activation(family).items()
    }
    if family.recurrent:
        of_family |= _GATES
    for name, supported in (_SUPPORTED | of_family).items():
        if name in (*family.stated, *family.ignored_dropout):
            continue
        if name == "original_max_position_embeddings" and "longrope" in family.ropes:
            continue
        if name in raw and raw[name] not in supported:
            raise ValueError(f"config.json: {name} = {raw[name]!r} is not supported")


def _recurrent(raw: Mapping[str, Any], family: Family, layers: int) -> tuple[str, ...]:
    """Read the layer_types of a family with recurrent layers."""
    kinds = raw.get("layer_types")
    if kinds is None:
        every = family.full_attention_interval
        return recurrent_types(_field(raw, "full_attention_interval", int, every), layers)
    check_layer_types(kinds, layers, RECURRENT)
    return tuple(kinds)


def _experts(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields of mixtures of experts; newer versions of transformers write num_experts as
    num_local_experts."""
    name, newer = "num_experts", "num_local_experts"
    if raw.get(newer) is not None:
        if raw.get(name) not in (None, raw[newer]):
            raise ValueError(
                f"config.json: {newer} {raw[newer]!r:.200} is not {name} {raw[name]!r:.200}: remove "
                "one of the two"
            )
        raw = {**raw, name: _field(raw, newer, int)}
    sizes: dict[str, Any] = {
        name: _field(raw, name, int, size) for name, size in EXPERT_SIZES.items()
    }
    return sizes | {"norm_topk_prob": _field(raw, "norm_topk_prob", bool, False)}


def _activation(family: Family) -> dict[str, str]:
    """Return the field of config.json for the activation of feed-forward layers."""
    if family.gelu:
        return {"hidden_activation": "gelu_pytorch_tanh"}
    return {"hidden_act": "silu"}


def _sliding(
    raw: Mapping[str, Any], family: Family, layers: int
) -> tuple[int | None, tuple[str, ...]]:
    """Read sliding_window and layer_types, (None, ()) if no layer has a window."""
    window = None
    if family.sliding in ("all", "pattern") or _field(raw, "use_sliding_window", bool, False):
        window = raw.get("sliding_window", family.sliding_window)
    kinds = raw.get("layer_types")
    if kinds is None and window is None and family.sliding != "pattern":
        return None, ()
    usual = [SLIDING] * layers
    if family.sliding == "pattern":
        every = _field(raw, "sliding_window_pattern", int, family.sliding_window_pattern)
        for number in range(every - 1, layers, every):
            usual[number] = FULL
    else:
        full = 0
        if window is None:
            full = layers
        elif family.sliding == "last" and raw.get("max_window_layers") != 0:
            full = _field(raw, "max_window_layers", int, 28)
        usual[:full] = [FULL] * min(full, layers)
    if kinds is None:
        kinds = usual
    check_layer_types(kinds, layers, SLIDING)
    has_none = window is None or not family.sliding
    if (SLIDING in kinds and has_none) or (family.sliding == "all" and kinds != usual):
        raise ValueError(
            "config.json: layer_types: sliding-window attention is not supported in this family, "
            "or is not in use"
        )
    if SLIDING in kinds:
        return _field(raw, "sliding_window", int, family.sliding_window), tuple(kinds)
    return None, ()


def _sliding_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return the fields that `_sliding` reads."""
    sliding = config.traits.sliding
    kinds = list(config.layer_types)
    fields: dict[str, Any] = {}
    if sliding == "last":
        fields["use_sliding_window"] = bool(kinds)
    if config.is_sliding or sliding == "all":
        fields["sliding_window"] = config.sliding_window
    if sliding == "pattern" or (kinds and sliding == "last"):
        fields["layer_types"] = kinds or [FULL] * config.num_hidden_layers
    return fields


def _by_layer_type(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields with transformers 5's rope_parameters of two types of layers in the form of
    its version 4."""
    both = raw.get("rope_parameters")
    if not both or not isinstance(both, Mapping):
        return raw
    if not set(both) <= {SLIDING, FULL}:
        # Some versions of transformers scaled all layers by these, others none.
        raise ValueError(
            f"config.json: rope_parameters of this family must be one for {FULL} and one for "
            f"{SLIDING}, got {sorted(both)}: nest them, or write rope_theta and rope_scaling"
        )
    local = both.get(SLIDING) or {}
    kind = ""
    if isinstance(local, Mapping):
        kind = local.get("rope_type", local.get("type", "default"))
    if kind != "default":
        raise ValueError(
            f"config.json: rope_parameters.{SLIDING} must be of rope type default, got "
            f"{local!r:.200}"
        )
    theta = local.get("rope_theta", raw.get("rope_local_base_freq"))
    return {**raw, "rope_parameters": both.get(FULL), "rope_local_base_freq": theta}


def _no_rope_layers(raw: Mapping[str, Any], family: Family, layers: int) -> tuple[int, ...]:
    """Read which layers have rotary embeddings, in ModelConfig's form."""
    if not family.no_rope_layer_interval:
        return ()
    flags = raw.get("no_rope_layers")
    if flags is None:
        return no_rope_layers(
            _field(raw, "no_rope_layer_interval", int, family.no_rope_layer_interval), layers
        )
    is_list = isinstance(flags, list) and all(flag in (0, 1) for flag in flags)
    if not is_list or len(flags) < layers:
        raise ValueError("config.json: no_rope_layers must be a list of 0 or 1 for each layer")
    return tuple(map(int, flags[:layers]))


def _rope(
    raw: Mapping[str, Any], family: Family, positions: int
) -> tuple[float, RopeScaling | None]:
    """Read rope_theta and the scaling, from rope_parameters (transformers 5) or rope_theta and
    rope_scaling (4).

    positions: max_position_embeddings.
    """
    field, rope = _rope_entries(raw)
    kind = rope.get("rope_type", rope.get("type", "default"))
    _check_rope(rope, field, kind, family)
    theta = _field(rope, "rope_theta", float, _field(raw, "rope_theta", float, family.rope_theta))
    if kind == "default":
        return theta, None
    if kind in ("longrope", "su"):
        return theta, _long_rope(raw, rope, positions)
    length = _field(rope, "original_max_position_embeddings", int, positions)
    default = None
    if kind == "yarn" and "factor" in rope:  # if null: the extension of the positions
        default = positions / length
    factor = _field(rope, "factor", float, default)
    if kind == "linear":
        return theta, LinearRope(factor)
    if kind == "llama3":
        low = _field(rope, "low_freq_factor", float)
        high = _field(rope, "high_freq_factor", float)
        return theta, Llama3Rope(factor, low, high, length)
    return theta, _yarn(rope, factor, length)


def _rope_entries(raw: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the field with the rope's entries, and the entries."""
    field = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    rope = raw.get(field) or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"config.json: {field} must be an object, got {rope!r}")
    older = raw.get("rope_scaling") or {}
    if older is not rope and isinstance(older, Mapping):
        differing = [name for name, value in older.items() if rope.get(name) != value]
        if differing:
            raise ValueError(
                "config.json: rope_scaling and rope_parameters differ in "
                f"{', '.join(map(str, differing))}: remove one of the two"
            )
    return field, rope


def _check_rope(rope: Mapping[str, Any], field: str, kind: Any, family: Family) -> None:
    """Raise ValueError for a rope type that the family does not have, or for unknown entries."""
    if kind not in family.ropes:
        raise ValueError(
            f"config.json: {field}: rope type {kind!r} is not supported; this family supports "
            f"{', '.join(family.ropes)}"
        )
    if family.sliding_rope:
        _refuse_unread(rope, field)
    known = _ROPE_FIELDS | set(family.rope_entries)
    if family.scaled_queries:
        known.add("max_position_embeddings")
    if kind in ("longrope", "su"):
        known |= {"short_factor", "long_factor"}
    if unknown := sorted(set(rope) - known):
        raise ValueError(f"config.json: {field}: unknown entries {unknown}")
    is_partial = "partial_rotary_factor" in family.stated
    if rope.get("partial_rotary_factor") not in (None, 1) and not is_partial:
        raise ValueError(f"config.json: {field}.partial_rotary_factor is not supported")
    beta: Any = rope.get("llama_4_scaling_beta")
    if (beta is not None or family.scaled_queries) and (
        kind != "yarn" or not family.scaled_queries or type(beta) not in (int, float) or beta < 0
    ):
        raise ValueError(
            f"config.json: {field}: llama_4_scaling_beta requires ministral3, where it must be set, "
            f"with rope type yarn: got {beta!r} and {kind}"
        )


def _yarn(rope: Mapping[str, Any], factor: float, length: int) -> YarnRope:
    number = partial(_field, rope, kind=float)
    size = _mscale(factor, 1.0)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        size = _mscale(factor, number("mscale")) / _mscale(factor, number("mscale_all_dim"))
    return YarnRope(
        factor,
        length,
        number("attention_factor", default=size),
        number("beta_fast", default=32.0),
        number("beta_slow", default=1.0),
        _field(rope, "truncate", bool, True),
        float(rope.get("llama_4_scaling_beta") or 0.0),
    )


def _refuse_unread(rope: Mapping[str, Any], field: str) -> None:
    """Raise ValueError for entries that transformers 5 ignores if two types of layers have their own
    ropes, because its model would then differ."""
    if "rope_type" not in rope and rope.get("type", "default") != "default":
        raise ValueError(
            f"config.json: {field}.type is {rope['type']!r}, which transformers ignores in "
            "this family: write rope_type, or remove it"
        )
    if rope.get("truncate") is False:
        raise ValueError(
            f"config.json: {field}.truncate is false, which transformers ignores in this "
            "family: remove it"
        )


def _long_rope(raw: Mapping[str, Any], rope: Mapping[str, Any], positions: int) -> LongRope:
    """Read LongRoPE's scaling as transformers does for Phi-3: the original length is next to the
    rope's entries, 4096 by default."""
    length = _field(raw, "original_max_position_embeddings", int, _LONG_ROPE_LENGTH)
    factors = {}
    for name in ("short_factor", "long_factor"):
        numbers = rope.get(name)
        if not isinstance(numbers, list) or not all(
            type(number) in (int, float) and 0 < number < math.inf for number in numbers
        ):
            raise ValueError(f"config.json: {name} must be a list of positive numbers")
        factors[name] = tuple(map(float, numbers))
    size = _long_attention_factor(_field(rope, "factor", float, positions / length), length)
    return LongRope(
        **factors,
        original_max_position_embeddings=length,
        attention_factor=_field(rope, "attention_factor", float, size),
    )


def _long_attention_factor(factor: float, length: int) -> float:
    """Return the factor by which LongRoPE lengthens queries and keys if positions are extended by
    this factor from `length`."""
    if factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(length))


def _long_rope_to_hf(config: ModelConfig, scaling: LongRope) -> dict[str, Any]:
    """Return the fields that `_long_rope` reads. transformers 4 accepts only these three entries, if
    they are sufficient."""
    entries: dict[str, Any] = {
        "type": "longrope",
        "short_factor": list(scaling.short_factor),
        "long_factor": list(scaling.long_factor),
    }
    length = scaling.original_max_position_embeddings
    usual = _long_attention_factor(config.max_position_embeddings / length, length)
    if scaling.attention_factor != usual:
        entries["attention_factor"] = scaling.attention_factor
    return {
        "rope_theta": config.rope_theta,
        "rope_scaling": entries,
        "original_max_position_embeddings": length,
    }


def _rope_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return the fields that `_rope` and `_by_layer_type` read."""
    theta, scaling = config.rope_theta, None
    if isinstance(config.rope_scaling, LongRope):
        return _long_rope_to_hf(config, config.rope_scaling)
    if config.rope_scaling:
        scaling = {
            "rope_type": config.rope_scaling.rope_type,
            **dataclasses.asdict(config.rope_scaling),
        }
        if not config.traits.scaled_queries:
            scaling.pop("llama_4_scaling_beta", None)
    if config.traits.scaled_queries:
        if scaling is None:  # the family requires one: this one changes nothing
            scaling = {
                "rope_type": "yarn",
                "factor": 1.0,
                "original_max_position_embeddings": config.max_position_embeddings,
                "attention_factor": 1.0,
                "llama_4_scaling_beta": 0.0,
            }
        return {"rope_parameters": {**scaling, "rope_theta": theta}}
    if config.traits.recurrent:
        entries = {"rope_type": "default", "rope_theta": theta}
        entries["partial_rotary_factor"] = config.partial_rotary_factor
        return {"rope_parameters": entries}
    fields: dict[str, Any] = {"rope_theta": theta, "rope_scaling": scaling}
    usual = (config.traits.rope_theta,) * 2
    own = config.traits.sliding_rope and not config.traits.rope_local_base_freq
    if own and (theta, config.rope_local_base_freq) != usual:
        # transformers 4 uses rope_theta for all layers, its version 5 not for sliding ones.
        local = {"rope_type": "default", "rope_theta": config.rope_local_base_freq}
        full = {**(scaling or {"rope_type": "default"}), "rope_theta": theta}
        fields["rope_parameters"] = {SLIDING: local, FULL: full}
    return fields


def _mscale(factor: float, scale: float) -> float:
    """Return the factor by which YaRN lengthens queries and keys if positions are extended by this
    factor."""
    if factor <= 1:
        return 1.0
    return 0.1 * scale * math.log(factor) + 1.0


_KINDS = {bool: "true or false", int: "a positive integer", float: "a positive number"}


def _field(raw: Mapping[str, Any], name: str, kind: type[T], default: T | None = None) -> T:
    """Return a field of this kind, of JSON's types alone. Raises ValueError naming it."""
    value: Any = raw.get(name)
    if value is None:
        value = default
    is_of_kind = type(value) is kind or (kind is float and type(value) is int)
    if not is_of_kind or not (kind is bool or 0 < value <= sys.float_info.max):
        raise ValueError(f"config.json: {name} must be {_KINDS[kind]}, got {value!r}")
    return kind(value)
