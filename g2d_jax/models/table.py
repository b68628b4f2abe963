"""The table of a decoder's parameters: it drives initialisation, sharding, import, export and
adapters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from g2d_jax.models.config import LINEAR, ModelConfig

Init = Literal["normal", "ones", "zeros", "uniform"]

PEFT = "base_model.model."
"""The beginning of the names in PEFT's files."""


@dataclass(frozen=True)
class Param:
    """One row of the table.

    shape and axes are of one layer. hf_name: Hugging Face's tensor name, {layer} where there is
    one per layer. inputs: how many dimensions of a linear layer, the first ones, are its inputs; 0:
    it is no linear layer. adapter: of LoRA; the name is PEFT's then. quantised: the kind of codes
    that stand for it, see quantise.py; empty: none. layers: how many are stacked in one array,
    which begins with that dimension; 0: it is in no layer.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Init
    hf_name: str
    inputs: int = 0
    adapter: bool = False
    quantised: str = ""
    layers: int = 0

    @property
    def stacked(self) -> tuple[int, ...]:
        """The dimension of the layers, [L], or none."""
        return (self.layers,) if self.layers else ()

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The array's shape, the layers' dimension included."""
        return (*self.stacked, *self.shape)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in which Hugging Face stores it, of one layer: a linear layer as [out, in],
        and heads and head_dim always as one dimension."""
        if self.inputs:
            return math.prod(self.shape[self.inputs :]), math.prod(self.shape[: self.inputs])
        if "head_dim" in self.axes:
            return (math.prod(self.shape),)
        return self.shape


def block_params(c: ModelConfig) -> dict[str, Param]:
    """Return the table of one layer, adapters last."""
    attn = "model.layers.{layer}.self_attn"
    mlp = "model.layers.{layer}.mlp"
    heads = ("heads", "head_dim")
    kv_heads = ("kv_heads", "head_dim")
    table = {
        ours: _row(c, ("norm",), _unit(c), f"model.layers.{{layer}}.{theirs}.weight")
        for ours, theirs in c.traits.norms
    }
    for name, inputs, outputs in (
        ("q", ("embed",), heads),
        ("k", ("embed",), kv_heads),
        ("v", ("embed",), kv_heads),
        ("o", heads, ("embed",)),
        ("gate", ("embed",), ("mlp",)),
        ("up", ("embed",), ("mlp",)),
        ("down", ("mlp",), ("embed",)),
    ):
        part = attn if name in "qkvo" else mlp
        hf_name = f"{part}.{name}_proj.weight"
        row = _row(c, (*inputs, *outputs), "normal", hf_name, len(inputs))
        table[name] = replace(row, quantised=c.quantise)
    if c.traits.qkv_bias or c.attention_bias:
        for name, axes in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            table[f"{name}_bias"] = _row(c, axes, "zeros", f"{attn}.{name}_proj.bias")
    if c.has_out_bias:
        table["o_bias"] = _row(c, ("norm",), "zeros", f"{attn}.o_proj.bias")
    if c.traits.qk_norm:
        for name, axes in (("q_norm", heads), ("k_norm", kv_heads)):
            row = _row(c, axes, _unit(c), f"{attn}.{name}.weight")
            if c.traits.qk_norm == "each head":
                row = replace(row, shape=(c.head_dim,), axes=("norm",))
            table[name] = row
    if c.lora:
        for target in c.lora.targets:
            table |= _adapter(LINEAR[target], table[LINEAR[target]], c.lora.rank)
    return {name: replace(row, layers=c.num_hidden_layers) for name, row in table.items()}


def _row(c: ModelConfig, axes: Sequence[str], init: Init, hf_name: str, inputs: int = 0) -> Param:
    """Return the row of a parameter with these axes, whose sizes the config states."""
    sizes = {
        "vocab": c.vocab_size,
        "embed": c.hidden_size,
        "norm": c.hidden_size,
        "heads": c.num_attention_heads,
        "kv_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "mlp": c.intermediate_size,
    }
    return Param(tuple(sizes[axis] for axis in axes), tuple(axes), init, hf_name, inputs)


def _adapter(name: str, row: Param, rank: int) -> dict[str, Param]:
    """Return NAME_a [*in, rank] and NAME_b [rank, *out], beside a linear layer [*in, *out]."""
    n = row.inputs
    stem = PEFT + row.hf_name.removesuffix(".weight")
    to_rank = (*row.shape[:n], rank), (*row.axes[:n], "rank")
    from_rank = (rank, *row.shape[n:]), ("rank", *row.axes[n:])
    return {
        f"{name}_a": Param(*to_rank, "uniform", f"{stem}.lora_A.weight", n, adapter=True),
        f"{name}_b": Param(*from_rank, "zeros", f"{stem}.lora_B.weight", 1, adapter=True),
    }


def _unit(c: ModelConfig) -> Init:
    """Return the weights of a norm that multiplies by 1."""
    return "zeros" if c.traits.unit_offset else "ones"


def outer_params(c: ModelConfig) -> dict[str, Param]:
    """Return the table of what is not in a layer. A tied model has no "head": it reads the
    embedding transposed."""
    table = {
        "embed": _row(c, ("vocab", "embed"), "normal", "model.embed_tokens.weight"),
        "final_norm": _row(c, ("norm",), _unit(c), "model.norm.weight"),
    }
    if not c.tie_word_embeddings:
        table["head"] = _row(c, ("embed", "vocab"), "normal", "lm_head.weight", 1)
    return table


def params(c: ModelConfig) -> dict[str, Param]:
    """Return the whole table: what is not in a layer, then the layers."""
    return outer_params(c) | block_params(c)


def tensors(c: ModelConfig) -> dict[str, tuple[str, Param, int | None]]:
    """Map Hugging Face's names to (our name, row, layer or None), in Hugging Face's order."""
    table: dict[str, tuple[str, Param, int | None]] = {}
    table |= {row.hf_name: (name, row, None) for name, row in outer_params(c).items()}
    rows = block_params(c).items()
    for layer in range(c.num_hidden_layers):
        table |= {row.hf_name.format(layer=layer): (name, row, layer) for name, row in rows}
    return table


def fused(c: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Map Hugging Face's names of tensors that hold several of `tensors` to these, in the order of
    their rows."""
    found: dict[str, tuple[str, ...]] = {}
    for layer in range(c.num_hidden_layers):
        for whole, parts in c.traits.fused.items():
            module = f"model.layers.{layer}.{whole.partition('.')[0]}"
            found[f"model.layers.{layer}.{whole}.weight"] = tuple(
                f"{module}.{part}.weight" for part in parts
            )
    return found


def expected_shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Map the names of all of the architecture's tensors in Hugging Face's files to their shapes
    there, fused ones last."""
    shapes = {name: row.stored_shape for name, (_, row, _) in tensors(c).items()}
    for whole, parts in fused(c).items():
        held = [shapes.pop(part) for part in parts]
        shapes[whole] = (sum(rows for rows, _ in held), held[0][1])
    return shapes
