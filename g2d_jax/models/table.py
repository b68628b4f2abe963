"""The table of a decoder's parameters: it drives initialisation, sharding, import, export and
adapters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from g2d_jax.models.config import ALL_LINEAR, ModelConfig

Init = Literal["normal", "ones", "zeros", "uniform", "taps", "decay"]

PEFT = "base_model.model."
"""The beginning of the names in PEFT's files."""


@dataclass(frozen=True)
class Param:
    """One row of the table.

    shape and axes are of one layer. hf_name: Hugging Face's tensor name, {layer} if there is one
    per layer. inputs: how many dimensions of a linear layer, the first ones, are its inputs; 0: it
    is not a linear layer. adapter: of LoRA; the name is then PEFT's. quantised: the kind of codes
    that replace it, see quantise.py; empty: none. layers: the numbers of the layers that have it,
    whose arrays are stacked along the first dimension; empty: it is in no layer. experts: how many
    a layer has, whose matrices it holds, the first dimension of its shape; Hugging Face has a tensor
    of each, {expert} in its name; 0: it belongs to no expert. stored: see `stored_shape`, if the
    other fields do not determine it. exact: it is always float32.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Init
    hf_name: str
    inputs: int = 0
    adapter: bool = False
    quantised: str = ""
    layers: tuple[int, ...] = ()
    experts: int = 0
    stored: tuple[int, ...] = ()
    exact: bool = False

    @property
    def stacked(self) -> tuple[int, ...]:
        """The dimension of the layers, [L], or ()."""
        return (len(self.layers),) if self.layers else ()

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The array's shape, including the layers' dimension."""
        return (*self.stacked, *self.shape)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Its shape in Hugging Face's files, for one layer and one expert: a linear layer as [out,
        in], and heads and head_dim always as one dimension."""
        if self.stored:
            return self.stored
        if self.inputs:
            own = self.shape[bool(self.experts) :]
            return math.prod(own[self.inputs :]), math.prod(own[: self.inputs])
        if "head_dim" in self.axes:
            return (math.prod(self.shape),)
        return self.shape


def block_params(c: ModelConfig) -> dict[str, Param]:
    """Return the table of the layers, adapters last."""
    attention, recurrent = c.layers(recurrent=False), c.layers(recurrent=True)
    every = tuple(range(c.num_hidden_layers))
    parts = (
        (every, _norms(c)),
        (attention, _attention(c)),
        (recurrent, _recurrent(c) if recurrent else {}),
        (every, _feed_forward(c)),
    )
    table: dict[str, Param] = {}
    for layers, rows in parts:
        table |= {name: replace(row, layers=layers) for name, row in rows.items()}
    if c.lora:
        for target in c.lora.targets:
            name = ALL_LINEAR[target]
            table |= _adapter(name, table[name], c.lora.rank)
    return table


def _norms(c: ModelConfig) -> dict[str, Param]:
    """Return the rows of a layer's norms."""
    return {
        ours: _row(c, ("norm",), _unit(c), f"model.layers.{{layer}}.{theirs}.weight")
        for ours, theirs in c.traits.norms
    }


def _feed_forward(c: ModelConfig) -> dict[str, Param]:
    """Return the rows of a layer's gated feed-forward layer, or of its experts and their router."""
    module, table = "model.layers.{layer}.mlp", {}
    inner = "expert_mlp" if c.num_experts else "mlp"
    sides = {"gate": ("embed", inner), "up": ("embed", inner), "down": (inner, "embed")}
    if c.num_experts:
        router = _row(c, ("embed", "routes"), "normal", f"{module}.gate.weight", 1)
        table["router"] = replace(router, exact=True)
    for name, axes in sides.items():
        if c.num_experts:
            hf_name = f"{module}.experts.{{expert}}.{name}_proj.weight"
            row = _row(c, ("experts", *axes), "normal", hf_name, 1)
            table[f"expert_{name}"] = replace(row, experts=c.num_experts)
        else:
            row = _row(c, axes, "normal", f"{module}.{name}_proj.weight", 1)
            table[name] = replace(row, quantised=c.quantise)
    return table


def _attention(c: ModelConfig) -> dict[str, Param]:
    """Return the rows of a layer's attention."""
    module = "model.layers.{layer}.self_attn"
    heads = ("heads", "head_dim")
    kv_heads = ("kv_heads", "head_dim")
    of_outputs = {"q": heads, "k": kv_heads, "v": kv_heads}
    table = {}
    for name, axes in of_outputs.items():
        row = _row(c, ("embed", *axes), "normal", f"{module}.{name}_proj.weight", 1)
        table[name] = replace(row, quantised=c.quantise)
    if c.traits.recurrent:  # in addition to its query, a head computes its output's gate
        gated = c.hidden_size, c.num_attention_heads, 2 * c.head_dim
        table["q"] = replace(table["q"], shape=gated)
    row = _row(c, (*heads, "embed"), "normal", f"{module}.o_proj.weight", 2)
    table["o"] = replace(row, quantised=c.quantise)
    if c.traits.qkv_bias or c.attention_bias:
        for name, axes in of_outputs.items():
            row = _row(c, axes, "zeros", f"{module}.{name}_proj.bias")
            table[f"{name}_bias"] = replace(row, shape=table[name].shape[1:])
    if c.has_out_bias:
        table["o_bias"] = _row(c, ("norm",), "zeros", f"{module}.o_proj.bias")
    if c.traits.qk_norm:
        for name, axes in (("q_norm", heads), ("k_norm", kv_heads)):
            row = _row(c, axes, _unit(c), f"{module}.{name}.weight")
            if c.traits.qk_norm == "each head":
                row = replace(row, shape=(c.head_dim,), axes=("norm",))
            table[name] = row
    return table


def _recurrent(c: ModelConfig) -> dict[str, Param]:
    """Return the rows of a recurrent layer: models/delta.py.

    Its heads are sharded as those of keys. Hugging Face's single matrix of queries, keys and
    values, and its single convolution of them, are three rows each: `Family.fused`.
    """
    module = "model.layers.{layer}.linear_attn"
    heads = ("kv_heads", "head_dim")
    keys = c.linear_num_key_heads, c.linear_key_head_dim
    values = c.linear_num_value_heads, c.linear_value_head_dim
    sizes = {"q": keys, "k": keys, "v": values, "z": values, "b": values[:1], "a": values[:1]}
    table = {}
    for name, size in sizes.items():
        hf_name = f"{module}.in_proj_{name}.weight"
        axes = ("embed", *heads[: len(size)])
        row = Param((c.hidden_size, *size), axes, "normal", hf_name, 1, quantised=c.quantise)
        table[f"delta_{name}"] = row
    shape = (*values, c.hidden_size)
    row = Param(shape, (*heads, "embed"), "normal", f"{module}.out_proj.weight", 2)
    table["delta_o"] = replace(row, quantised=c.quantise)
    for name in "qkv":
        size, taps = sizes[name], c.linear_conv_kernel_dim
        row = Param((*size, taps), (*heads, "taps"), "taps", f"{module}.conv1d_{name}.weight")
        table[f"conv_{name}"] = replace(row, stored=(math.prod(size), 1, taps))
    # Rounding A_log to bfloat16 would change the decay of all tokens in the same direction.
    table["decay"] = Param(values[:1], heads[:1], "decay", f"{module}.A_log", exact=True)
    table["decay_bias"] = Param(values[:1], heads[:1], "ones", f"{module}.dt_bias")
    name = f"{module}.norm.weight"
    table["delta_norm"] = Param(values[1:], ("norm",), "ones", name, exact=True)
    return table


def _row(c: ModelConfig, axes: Sequence[str], init: Init, hf_name: str, inputs: int = 0) -> Param:
    """Return the row of a parameter with these axes, whose sizes are in the config."""
    sizes = {
        "vocab": c.vocab_size,
        "embed": c.hidden_size,
        "norm": c.hidden_size,
        "heads": c.num_attention_heads,
        "kv_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "mlp": c.intermediate_size,
        "experts": c.num_experts,
        "routes": c.num_experts,
        "expert_mlp": c.moe_intermediate_size,
    }
    return Param(tuple(sizes[axis] for axis in axes), tuple(axes), init, hf_name, inputs)


def _adapter(name: str, row: Param, rank: int) -> dict[str, Param]:
    """Return NAME_a [*in, rank] and NAME_b [rank, *out] for a linear layer [*in, *out]."""
    n = row.inputs
    stem = PEFT + row.hf_name.removesuffix(".weight")
    to_rank = (*row.shape[:n], rank), (*row.axes[:n], "rank")
    from_rank = (rank, *row.shape[n:]), ("rank", *row.axes[n:])
    return {
        f"{name}_a": Param(
            *to_rank, "uniform", f"{stem}.lora_A.weight", n, adapter=True, layers=row.layers
        ),
        f"{name}_b": Param(
            *from_rank, "zeros", f"{stem}.lora_B.weight", 1, adapter=True, layers=row.layers
        ),
    }


def _unit(c: ModelConfig) -> Init:
    """Return the initialisation of a norm that multiplies by 1."""
    return "zeros" if c.traits.unit_offset else "ones"


def outer_params(c: ModelConfig) -> dict[str, Param]:
    """Return the table of the parameters outside the layers. A tied model has no "head": it uses the
    transposed embedding."""
    table = {
        "embed": _row(c, ("vocab", "embed"), "normal", "model.embed_tokens.weight"),
        "final_norm": _row(c, ("norm",), _unit(c), "model.norm.weight"),
    }
    if not c.tie_word_embeddings:
        table["head"] = _row(c, ("embed", "vocab"), "normal", "lm_head.weight", 1)
    return table


def params(c: ModelConfig) -> dict[str, Param]:
    """Return the whole table: parameters outside the layers, then the layers."""
    return outer_params(c) | block_params(c)


Place = int | tuple[int, int] | None
"""A tensor's place in the stack of layers, and for an expert's also in that of experts; None: it is
in no stack."""


def tensors(c: ModelConfig) -> dict[str, tuple[str, Param, Place]]:
    """Map Hugging Face's names to (our name, row, its place), in Hugging Face's order."""
    table: dict[str, tuple[str, Param, Place]] = {}
    table |= {row.hf_name: (name, row, None) for name, row in outer_params(c).items()}
    rows = block_params(c)
    for layer in range(c.num_hidden_layers):
        for name, place in places(rows, layer).items():
            row = rows[name]
            for expert in range(row.experts):
                hf_name = row.hf_name.format(layer=layer, expert=expert)
                table[hf_name] = name, row, (place, expert)
            if not row.experts:
                table[row.hf_name.format(layer=layer)] = name, row, place
    return table


def places(rows: Mapping[str, Param], layer: int) -> dict[str, int]:
    """Map the names of a layer's rows to its place in their stacks. rows: from `block_params`."""
    return {name: row.layers.index(layer) for name, row in rows.items() if layer in row.layers}


def fused(c: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Map Hugging Face's names of tensors that hold several of `tensors` to these, in the order of
    their rows."""
    found: dict[str, tuple[str, ...]] = {}
    names = tensors(c) if c.traits.fused else {}
    for layer in range(c.num_hidden_layers):
        for whole, parts in c.traits.fused.items():
            module = f"model.layers.{layer}.{whole.partition('.')[0]}"
            own = tuple(f"{module}.{part}.weight" for part in parts)
            if names.keys() >= set(own):
                found[f"model.layers.{layer}.{whole}.weight"] = own
    return found


def expected_shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Map the names of all of the architecture's tensors in Hugging Face's files to their shapes
    there, fused ones last."""
    shapes = {name: row.stored_shape for name, (_, row, _) in tensors(c).items()}
    for whole, parts in fused(c).items():
        held = [shapes.pop(part) for part in parts]
        shapes[whole] = (sum(shape[0] for shape in held), *held[0][1:])
    return shapes
