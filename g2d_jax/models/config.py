"""The shape of a decoder, in Hugging Face's names."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

PRE_NORM = (("attn_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm"))
POST_NORM = (
    ("attn_post_norm", "post_attention_layernorm"),
    ("mlp_post_norm", "post_feedforward_layernorm"),
)
GEMMA_NORM = (PRE_NORM[0], POST_NORM[0], ("mlp_norm", "pre_feedforward_layernorm"), POST_NORM[1])
"""A layer's norms: before its two parts, after them, and both. Each pair is the parameter's name
here and Hugging Face's."""


@dataclass(frozen=True)
class Family:
    """The traits of one family of models.

    architecture: Hugging Face's class. qkv_bias: queries, keys and values have biases. qk_norm:
    queries and keys are normalised, per head or ("all heads") over all of them at once. norms: see
    PRE_NORM. unit_offset: they multiply by 1 + weight. gelu: instead of SiLU. scaled_embeddings: by
    the square root of hidden_size. sliding: the layers with a sliding window if config.json has no
    layer_types: "all"; "last", only with use_sliding_window, from max_window_layers on; "pattern",
    all but each sliding_window_pattern-th; empty: none may have one. sliding_rope: those layers
    have their own rotary embeddings, without scaling and with rope_local_base_freq. scaled_queries:
    by their position, see YarnRope; config.json has all of it in rope_parameters. fused: tensors
    that Hugging Face stores as one, by its name, in the order of their outputs. recurrent: layers
    may be RECURRENT, see models/delta.py, and attention's output has a gate, which the layer of
    queries also computes. experts: its feed-forward layers are mixtures of experts, see
    models/experts.py. ropes: its possible rope types; rope_entries: further entries of its ropes,
    which do not affect text. stated: fields of ModelConfig in this family's config.json, in addition
    to the common ones. fixed: other entries of config.json. ignored_dropout: rates of published
    models that training here does not apply. The rest: transformers' defaults for fields missing
    from config.json; kv_heads_optional: the default is the number of heads; no_rope_layer_interval:
    each layer at this interval has no rotary embeddings.
    """

    architecture: str
    qkv_bias: bool = False
    qk_norm: Literal["", "each head", "all heads"] = ""
    norms: tuple[tuple[str, str], ...] = PRE_NORM
    unit_offset: bool = False
    gelu: bool = False
    scaled_embeddings: bool = False
    sliding: Literal["", "all", "last", "pattern"] = ""
    sliding_rope: bool = False
    scaled_queries: bool = False
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    recurrent: bool = False
    experts: bool = False
    ropes: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    rope_entries: tuple[str, ...] = ()
    stated: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    ignored_dropout: tuple[str, ...] = ()
    attention_bias: bool = False
    kv_heads_optional: bool = False
    head_dim: int | None = None
    max_position_embeddings: int = 32_768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    tie_word_embeddings: bool = False
    no_rope_layer_interval: int = 0
    sliding_window: int | None = 4096
    sliding_window_pattern: int = 6
    rope_local_base_freq: float | None = None
    query_pre_attn_scalar: int | None = None
    attention_multiplier: float | None = None
    partial_rotary_factor: float = 1.0
    full_attention_interval: int = 0


SCALARS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
"""Fields of ModelConfig that are 1 in a family without them."""

RECURRENT_SIZES = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
"""Fields of ModelConfig that are 0 in a family without recurrent layers, with transformers'
defaults."""

EXPERT_SIZES = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
"""Fields of ModelConfig that are 0 in a family without mixtures of experts, with transformers'
defaults."""

FAMILIES = {
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, sliding="last"),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        qk_norm="each head",
        sliding="last",
        stated=("attention_bias",),
        head_dim=128,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        qk_norm="each head",
        experts=True,
        stated=("attention_bias", "norm_topk_prob", *EXPERT_SIZES),
        fixed={"decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False},
    ),
    "llama": Family(
        "LlamaForCausalLM",
        stated=("attention_bias",),
        fixed={"mlp_bias": False},
        kv_heads_optional=True,
        max_position_embeddings=2048,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        sliding="all",
        max_position_embeddings=131_072,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        stated=("attention_bias", "no_rope_layers"),
        fixed={"mlp_bias": False, "use_sliding_window": False},
        rope_theta=2_000_000.0,
        tie_word_embeddings=True,
        no_rope_layer_interval=4,
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        qk_norm="all heads",
        norms=POST_NORM,
        stated=("attention_bias",),
        kv_heads_optional=True,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        qk_norm="all heads",
        norms=POST_NORM,
        sliding="pattern",
        sliding_rope=True,
        stated=("attention_bias", "rope_local_base_freq"),
        kv_heads_optional=True,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        sliding_window_pattern=4,
    ),
    "granite": Family(
        "GraniteForCausalLM",
        ignored_dropout=("attention_dropout",),
        stated=("attention_bias", "attention_multiplier", *SCALARS),
        fixed={"mlp_bias": False},
        kv_heads_optional=True,
        max_position_embeddings=2048,
        attention_multiplier=1.0,
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        stated=("attention_bias", "attention_out_bias"),
        fixed={"mlp_bias": False, "residual_dropout": 0.0},
        ignored_dropout=("attention_dropout", "residual_dropout"),
        attention_bias=True,
        head_dim=128,
        max_position_embeddings=524_288,
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        sliding="all",
        scaled_queries=True,
        head_dim=128,
        max_position_embeddings=262_144,
        rms_norm_eps=1e-5,
        sliding_window=None,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        sliding="all",
        fused={
            "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
            "mlp.gate_up_proj": ("gate_proj", "up_proj"),
        },
        ropes=("default", "longrope", "su"),
        stated=("partial_rotary_factor",),
        fixed={"resid_pdrop": 0.0, "embd_pdrop": 0.0},
        kv_heads_optional=True,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        sliding_window=None,
    ),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM",
        qk_norm="each head",
        unit_offset=True,
        fused={
            "linear_attn.in_proj_qkv": ("in_proj_q", "in_proj_k", "in_proj_v"),
            "linear_attn.conv1d": ("conv1d_q", "conv1d_k", "conv1d_v"),
        },
        recurrent=True,
        ropes=("default",),
        rope_entries=("mrope_section", "mrope_interleaved"),
        stated=("attention_bias", "partial_rotary_factor", "layer_types", *RECURRENT_SIZES),
        head_dim=256,
        partial_rotary_factor=0.25,
        full_attention_interval=4,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        qk_norm="each head",
        norms=GEMMA_NORM,
        unit_offset=True,
        gelu=True,
        scaled_embeddings=True,
        sliding="pattern",
        sliding_rope=True,
        stated=("attention_bias", "rope_local_base_freq", "query_pre_attn_scalar"),
        head_dim=256,
        max_position_embeddings=131_072,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
        rope_local_base_freq=10_000.0,
        query_pre_attn_scalar=256,
    ),
}

STATED = set[str]().union(*(family.stated for family in FAMILIES.values())) - {"layer_types"}
"""Fields of ModelConfig that only some families have; the others use layer_types for windows."""

SLIDING, FULL, RECURRENT = "sliding_attention", "full_attention", "linear_attention"
"""The types of layers, as Hugging Face calls them."""

NO_WINDOW = 2**31 - 1
"""The window of a layer without one, longer than any sequence."""

SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
)
"""The sizes that every config.json contains."""


@dataclass(frozen=True)
class LinearRope:
    """Positions divided by a factor."""

    rope_type: ClassVar[str] = "linear"
    factor: float


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1's frequency scaling."""

    rope_type: ClassVar[str] = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class YarnRope:
    """YaRN's frequency scaling (Peng et al. 2023, arXiv:2309.00071, definition 2).

    Frequencies that turn more than beta_fast times within the original length stay unchanged. Those
    of fewer than beta_slow turns are divided by the factor. Between them is a ramp; truncate aligns
    its ends to whole dimensions.
    attention_factor: of cos and sin. llama_4_scaling_beta: queries are multiplied by 1 + beta *
    log(1 + the number of original lengths before them) (transformers, ministral3).
    """

    rope_type: ClassVar[str] = "yarn"
    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    llama_4_scaling_beta: float = 0.0


@dataclass(frozen=True)
class LongRope:
    """LongRoPE's frequency scaling (Ding et al. 2024, arXiv:2402.13753), as in transformers for
    Phi-3 and Phi-4-mini.

    Wavelengths are multiplied by short_factor, one a frequency, in sequences of at most
    original_max_position_embeddings, and by long_factor at all positions of longer ones. Only the
    short ones are supported here. attention_factor: of cos and sin.
    """

    rope_type: ClassVar[str] = "longrope"
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float


RopeScaling = LinearRope | Llama3Rope | YarnRope | LongRope


def no_rope_layers(interval: int, layers: int) -> tuple[int, ...]:
    """Return ModelConfig.no_rope_layers for a model in which each `interval`-th layer has no rotary
    embeddings."""
    return tuple(int(number % interval != 0) for number in range(1, layers + 1))


def recurrent_types(interval: int, layers: int) -> tuple[str, ...]:
    """Return ModelConfig.layer_types for a model in which all but each `interval`-th layer are
    recurrent."""
    return tuple(FULL if number % interval == 0 else RECURRENT for number in range(1, layers + 1))


def check_layer_types(kinds: Any, layers: int, other: str) -> None:
    """Raise ValueError unless kinds is a list of `layers` types, each FULL or the other type."""
    is_list = isinstance(kinds, list | tuple)
    if not is_list or len(kinds) != layers or any(kind not in (other, FULL) for kind in kinds):
        raise ValueError(
            f"layer_types must have {layers} entries, each {other} or {FULL}, got {kinds!r:.200}"
        )


LINEAR = {f"{name}_proj": name for name in ("q", "k", "v", "o", "gate", "up", "down")}
"""The linear layers of a block: Hugging Face's name -> the parameter's here."""

FEED_FORWARD = ("gate", "up", "down")
"""The parameters among them in the feed-forward layer."""

RECURRENT_LINEAR = {f"in_proj_{name}": f"delta_{name}" for name in "qkvzba"}
RECURRENT_LINEAR["out_proj"] = "delta_o"
"""Maps the additional linear layers of a recurrent layer in the same way."""

ALL_LINEAR = LINEAR | RECURRENT_LINEAR

EVERY_TARGET = ("all-linear",)
"""Targets of adapters: all linear layers of a model, by PEFT's names."""


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685, equation 3): y = x W + scale * (x A) B,
    W frozen.

    targets: names in ALL_LINEAR, or EVERY_TARGET, which a ModelConfig replaces by its own linear
    layers. scale: alpha / rank. Raises ValueError for values out of range.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = EVERY_TARGET

    def __post_init__(self) -> None:
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise ValueError(
                f"lora.targets must name at least one layer, and none twice, got {self.targets}"
            )

    @property
    def scale(self) -> float:
        """The factor of the adapters' product."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: RMSNorm, RoPE, grouped-query attention, a gated feed-forward
    layer.

    family: a name in FAMILIES. attention_bias: of all four linear layers of attention, or of all
    but the last, in a family that has attention_out_bias for that one. no_rope_layers: for each
    layer 0 if it has no rotary embeddings, else 1; empty: the family's default. sliding_window: the
    positions that a token sees, itself included, in layers whose entry in layer_types is SLIDING;
    without entries no layer has a window. rope_local_base_freq: theta of those layers, if the
    family has one for them. query_pre_attn_scalar: scores are divided by its root, if the family
    has it, else by head_dim's; attention_multiplier: multiplies them instead, if the family has it.
    embedding_multiplier, residual_multiplier: of embeddings, and of the output of a layer's two
    parts. logits_scaling: divides logits. partial_rotary_factor: the share of head_dim, its first
    numbers, that rotary embeddings turn.
    linear_*: the heads, their sizes and the taps of recurrent layers, whose entry in layer_types is
    RECURRENT. In a family with such layers the default is the family's interval, and missing sizes
    are those of attention.
    lora: adapters of the linear layers; only they are then trained. quantise: the kind of codes of
    the linear layers, see quantise.py; empty: none. Raises ValueError for an unknown family, for
    fields that the family lacks, and for inconsistent sizes.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    tie_word_embeddings: bool = False
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32_768
    attention_bias: bool = False
    attention_out_bias: bool = False
    no_rope_layers: tuple[int, ...] = ()
    sliding_window: int | None = None
    layer_types: tuple[str, ...] = ()
    rope_local_base_freq: float | None = None
    query_pre_attn_scalar: int | None = None
    attention_multiplier: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    partial_rotary_factor: float = 1.0
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    lora: Lora | None = None
    quantise: str = ""

    @property
    def traits(self) -> Family:
        """Return the traits of the model's family."""
        return FAMILIES[self.family]

    @property
    def positions(self) -> int:
        """The supported positions: max_position_embeddings, at least YaRN's extended length; with
        LongRoPE those of its short sequences.

        Qwen2.5's config.json still has the length before the extension.
        """
        rope = self.rope_scaling
        if isinstance(rope, LongRope):
            return rope.original_max_position_embeddings
        if not isinstance(rope, YarnRope):
            return self.max_position_embeddings
        return max(
            self.max_position_embeddings, int(rope.factor * rope.original_max_position_embeddings)
        )

    @property
    def has_out_bias(self) -> bool:
        """Whether the last linear layer of attention has a bias."""
        if "attention_out_bias" in self.traits.stated:
            return self.attention_out_bias
        return self.attention_bias

    @property
    def rotary_dim(self) -> int:
        """The numbers of a head that rotary embeddings turn."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def query_scale(self) -> float:
        """The factor of queries before scores are divided by the root of head_dim."""
        if self.attention_multiplier:
            return self.attention_multiplier * self.head_dim**0.5
        if self.query_pre_attn_scalar:
            return float((self.head_dim / self.query_pre_attn_scalar) ** 0.5)
        return 1.0

    @property
    def embedding_scale(self) -> float:
        """The factor of embeddings."""
        if self.traits.scaled_embeddings:
            return float(self.hidden_size**0.5)
        return self.embedding_multiplier

    def windows(self, length: int) -> tuple[int, ...]:
        """Return the window of each layer; () if all of them are as long as the sequences."""
        window = self.sliding_window
        if not self.is_sliding or window is None or window >= length:
            return ()
        return tuple(window if kind == SLIDING else NO_WINDOW for kind in self.layer_types)

    @property
    def is_sliding(self) -> bool:
        """Whether some layer has a sliding window."""
        return SLIDING in self.layer_types

    def layers(self, *, recurrent: bool) -> tuple[int, ...]:
        """Return the numbers of the recurrent layers, or of those with attention."""
        kinds = self.layer_types or (FULL,) * self.num_hidden_layers
        return tuple(
            number for number, kind in enumerate(kinds) if (kind == RECURRENT) == recurrent
        )

    @property
    def period(self) -> int:
        """The period in which recurrent layers and those with attention alternate: 1 if all are of
        one kind."""
        layers = self.num_hidden_layers
        recurrent = self.layers(recurrent=True)
        flags = [number in recurrent for number in range(layers)]
        sizes = (size for size in range(1, layers) if layers % size == 0)
        return next((size for size in sizes if flags[size:] == flags[:-size]), layers)

    @property
    def linear(self) -> dict[str, str]:
        """The linear layers that can have adapters: a name of ALL_LINEAR -> the parameter's."""
        if self.num_experts:
            return {name: ours for name, ours in LINEAR.items() if ours not in FEED_FORWARD}
        return ALL_LINEAR if self.layers(recurrent=True) else LINEAR

    @property
    def feed_forward_size(self) -> int:
        """The total width of a token's feed-forward layer, over all its experts."""
        return self.num_experts_per_tok * self.moe_intermediate_size or self.intermediate_size

    @property
    def base(self) -> ModelConfig:
        """The same config without adapters, and with weights instead of codes."""
        return dataclasses.replace(self, lora=None, quantise="")

    @property
    def without_codes(self) -> ModelConfig:
        """The same config with weights instead of codes."""
        return dataclasses.replace(self, quantise="")

    def adapted(self, name: str) -> bool:
        """Return whether a parameter has an adapter."""
        return self.lora is not None and name in map(ALL_LINEAR.__getitem__, self.lora.targets)

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {self.family!r}")
        self._check_stated()
        self._check_sizes()
        self._fill_in()
        self._check_layers()
        if self.traits.recurrent:
            self._check_recurrent()
        if self.traits.experts:
            self._check_experts()
        if self.lora:
            self._check_targets(self.lora)

    def _check_stated(self) -> None:
        """Raise ValueError for fields that the family lacks."""
        foreign = STATED.difference(self.traits.stated)
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if each.name in foreign and value and value != each.default:
                raise ValueError(f"{each.name}: the family {self.family} does not have this field")

    def _check_sizes(self) -> None:
        """Raise ValueError for numbers out of range, and for inconsistent sizes."""
        for name in (*SIZES, "num_key_value_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in (
            "rope_theta",
            "rope_local_base_freq",
            "query_pre_attn_scalar",
            "attention_multiplier",
            *SCALARS,
            "sliding_window",
        ):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive, got {value}")
        if isinstance(self.rope_scaling, YarnRope) and self.rope_theta <= 1:
            raise ValueError(f"rope_theta must be more than 1 for yarn, got {self.rope_theta}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")
        if not 0 < self.partial_rotary_factor <= 1 or self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(
                f"partial_rotary_factor must turn an even part of head_dim {self.head_dim}, got "
                f"{self.partial_rotary_factor}"
            )
        if isinstance(self.rope_scaling, LongRope):
            for name in ("short_factor", "long_factor"):
                if len(getattr(self.rope_scaling, name)) != self.rotary_dim // 2:
                    raise ValueError(f"{name} of longrope must have {self.rotary_dim // 2} numbers")

    def _fill_in(self) -> None:
        """Replace missing values (None, 0 or ()) by the family's defaults."""
        traits = self.traits
        layers = self.num_hidden_layers
        usual: dict[str, Any] = {"attention_multiplier": traits.attention_multiplier}
        if traits.no_rope_layer_interval:
            usual["no_rope_layers"] = no_rope_layers(traits.no_rope_layer_interval, layers)
        if traits.sliding_rope:
            usual["rope_local_base_freq"] = traits.rope_local_base_freq or self.rope_theta
        if traits.query_pre_attn_scalar:
            usual["query_pre_attn_scalar"] = self.head_dim
        if traits.recurrent:
            usual |= {
                "linear_num_key_heads": self.num_key_value_heads,
                "linear_num_value_heads": self.num_attention_heads,
                "linear_key_head_dim": self.head_dim,
                "linear_value_head_dim": self.head_dim,
                "linear_conv_kernel_dim": RECURRENT_SIZES["linear_conv_kernel_dim"],
                "layer_types": recurrent_types(traits.full_attention_interval, layers),
            }
        if traits.experts:
            usual |= {
                "num_experts": 8,
                "num_experts_per_tok": min(2, self.num_experts or 2),
                "moe_intermediate_size": self.intermediate_size,
            }
        for name, value in usual.items():
            object.__setattr__(self, name, getattr(self, name) or value)

    def _check_layers(self) -> None:
        """Raise ValueError for lists that do not fit the layers."""
        traits = self.traits
        layers = self.num_hidden_layers
        if self.layer_types:
            if not (traits.recurrent or (traits.sliding and self.sliding_window)):
                raise ValueError(
                    f"layer_types: the family {self.family} has none, or sliding_window is not set"
                )
            check_layer_types(self.layer_types, layers, RECURRENT if traits.recurrent else SLIDING)
        if self.no_rope_layers and len(self.no_rope_layers) != layers:
            raise ValueError(
                f"no_rope_layers must have 0 or 1 for each of {layers} layers, got "
                f"{self.no_rope_layers}"
            )

    def _check_targets(self, lora: Lora) -> None:
        """Replace "all of them" by the model's linear layers, and check other targets."""
        if lora.targets == EVERY_TARGET:
            every = dataclasses.replace(lora, targets=tuple(self.linear))
            object.__setattr__(self, "lora", every)
            return
        if wrong := [name for name in lora.targets if name not in self.linear]:
            why = "; experts have no adapters" if self.num_experts else ""
            raise ValueError(
                f"lora.targets has {wrong[0]!r}, which is not a linear layer of this model{why}; "
                f"choose from {', '.join(self.linear)}"
            )

    def _check_experts(self) -> None:
        """Raise ValueError for an impossible mixture of experts."""
        for name in EXPERT_SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok ({self.num_experts_per_tok}) is more than num_experts "
                f"({self.num_experts})"
            )
        if self.quantise:
            raise ValueError(
                f"the weights of experts cannot be quantised ({self.quantise!r}): leave "
                "lora.quantise empty for a mixture of experts"
            )

    def _check_recurrent(self) -> None:
        """Raise ValueError for impossible recurrent layers."""
        for name in RECURRENT_SIZES:
            if getattr(self, name) < 1 + (name == "linear_conv_kernel_dim"):
                raise ValueError(f"{name} is too small: {getattr(self, name)}")
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ValueError(
                f"linear_num_value_heads ({self.linear_num_value_heads}) must be a multiple of "
                f"linear_num_key_heads ({self.linear_num_key_heads})"
            )
        if FULL not in self.layer_types:
            raise ValueError(
                f"num_hidden_layers is {self.num_hidden_layers}, but none of the layers has attention: "
                f"use at least {self.traits.full_attention_interval} layers, or set layer_types"
            )
