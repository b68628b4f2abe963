"""The table of a decoder's parameters: it drives initialisation, sharding, import, export and
adapters."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from g2d_jax.models.config import LINEAR, ModelConfig

_PEFT = "base_model.model."  # in front of the names in PEFT's files


@dataclass(frozen=True)
class Param:
    """One row of the table.

    shape and axes are of one layer. hf: Hugging Face's tensor name, {layer} where there is one per
    layer. Hugging Face stores a linear layer as [out, in]; `flat` gives our shape as (in, out), a
    bias as (out,), so that ours.reshape(flat).T is theirs. None means stored alike. adapter: of
    LoRA; the name is PEFT's then. quantised: the kind of codes that stand for it, see quantise.py;
    empty: none. layers: how many are stacked in one array, which begins with that dimension; 0: it
    is in no layer.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Literal["normal", "ones", "zeros", "uniform"]
    hf: str
    flat: tuple[int, ...] | None = None
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
        """The shape in which Hugging Face stores it, of one layer."""
        if self.flat is None:
            return self.shape
        return self.flat[::-1]

    @property
    def inputs(self) -> int:
        """The number of a linear layer's dimensions, the first ones, that are its inputs."""
        assert self.flat is not None
        return next(
            n for n in range(1, len(self.shape)) if math.prod(self.shape[:n]) == self.flat[0]
        )


def block_params(c: ModelConfig) -> dict[str, Param]:
    """Return the table of one layer, adapters last."""
    e = c.hidden_size
    h = c.num_attention_heads
    k = c.num_key_value_heads
    d = c.head_dim
    m = c.intermediate_size
    layer = "model.layers.{layer}"
    attn, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    table = {
        ours: Param((e,), ("norm",), _unit(c), f"{layer}.{theirs}.weight")
        for ours, theirs in c.traits.norms
    }
    table |= {
        "q": Param(
            (e, h, d), ("embed", "heads", "head_dim"), "normal", f"{attn}.q_proj.weight", (e, h * d)
        ),
        "k": Param(
            (e, k, d),
            ("embed", "kv_heads", "head_dim"),
            "normal",
            f"{attn}.k_proj.weight",
            (e, k * d),
        ),
        "v": Param(
            (e, k, d),
            ("embed", "kv_heads", "head_dim"),
            "normal",
            f"{attn}.v_proj.weight",
            (e, k * d),
        ),
        "o": Param(
            (h, d, e), ("heads", "head_dim", "embed"), "normal", f"{attn}.o_proj.weight", (h * d, e)
        ),
        "gate": Param((e, m), ("embed", "mlp"), "normal", f"{mlp}.gate_proj.weight", (e, m)),
        "up": Param((e, m), ("embed", "mlp"), "normal", f"{mlp}.up_proj.weight", (e, m)),
        "down": Param((m, e), ("mlp", "embed"), "normal", f"{mlp}.down_proj.weight", (m, e)),
    }
    if c.traits.qkv_bias or c.attention_bias:
        table |= {
            "q_bias": Param(
                (h, d), ("heads", "head_dim"), "zeros", f"{attn}.q_proj.bias", (h * d,)
            ),
            "k_bias": Param(
                (k, d), ("kv_heads", "head_dim"), "zeros", f"{attn}.k_proj.bias", (k * d,)
            ),
            "v_bias": Param(
                (k, d), ("kv_heads", "head_dim"), "zeros", f"{attn}.v_proj.bias", (k * d,)
            ),
        }
    if c.attention_bias:
        table["o_bias"] = Param((e,), ("norm",), "zeros", f"{attn}.o_proj.bias")
    if c.traits.qk_norm == "each head":
        table |= {
            "q_norm": Param((d,), ("norm",), _unit(c), f"{attn}.q_norm.weight"),
            "k_norm": Param((d,), ("norm",), _unit(c), f"{attn}.k_norm.weight"),
        }
    if c.traits.qk_norm == "all heads":
        table |= {
            "q_norm": Param(
                (h, d), ("heads", "head_dim"), "ones", f"{attn}.q_norm.weight", (h * d,)
            ),
            "k_norm": Param(
                (k, d), ("kv_heads", "head_dim"), "ones", f"{attn}.k_norm.weight", (k * d,)
            ),
        }
    for name in LINEAR.values():
        table[name] = replace(table[name], quantised=c.quantise)
    if c.lora:
        for target in c.lora.targets:
            table |= _adapter(LINEAR[target], table[LINEAR[target]], c.lora.rank)
    return {name: replace(row, layers=c.num_hidden_layers) for name, row in table.items()}


def _adapter(name: str, row: Param, rank: int) -> dict[str, Param]:
    """Return NAME_a [*in, rank] and NAME_b [rank, *out], beside a linear layer [*in, *out]."""
    assert row.flat is not None
    inputs = row.inputs
    stem = _PEFT + row.hf.removesuffix(".weight")
    to_rank, from_rank = (row.flat[0], rank), (rank, row.flat[1])
    a = Param(
        (*row.shape[:inputs], rank),
        (*row.axes[:inputs], "rank"),
        "uniform",
        f"{stem}.lora_A.weight",
        to_rank,
    )
    b = Param(
        (rank, *row.shape[inputs:]),
        ("rank", *row.axes[inputs:]),
        "zeros",
        f"{stem}.lora_B.weight",
        from_rank,
    )
    return {f"{name}_a": replace(a, adapter=True), f"{name}_b": replace(b, adapter=True)}


def _unit(c: ModelConfig) -> Literal["ones", "zeros"]:
    """Return the weights of a norm that multiplies by 1."""
    return "zeros" if c.traits.unit_offset else "ones"


def outer_params(c: ModelConfig) -> dict[str, Param]:
    """Return the table of what is not in a layer. A tied model has no "head": it reads the
    embedding transposed."""
    v, e = c.vocab_size, c.hidden_size
    table = {
        "embed": Param((v, e), ("vocab", "embed"), "normal", "model.embed_tokens.weight"),
        "final_norm": Param((e,), ("norm",), _unit(c), "model.norm.weight"),
    }
    if not c.tie_word_embeddings:
        table["head"] = Param((e, v), ("embed", "vocab"), "normal", "lm_head.weight", (e, v))
    return table


def params(c: ModelConfig) -> dict[str, Param]:
    """Return the whole table: what is not in a layer, then the layers."""
    return outer_params(c) | block_params(c)


def tensors(c: ModelConfig) -> dict[str, tuple[str, Param, int | None]]:
    """Map Hugging Face's names to (our name, row, layer or None), in Hugging Face's order."""
    table: dict[str, tuple[str, Param, int | None]] = {}
    table |= {row.hf: (name, row, None) for name, row in outer_params(c).items()}
    rows = block_params(c).items()
    for layer in range(c.num_hidden_layers):
        table |= {row.hf.format(layer=layer): (name, row, layer) for name, row in rows}
    return table


def expected_shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Map the names of all of the architecture's tensors to their stored shapes, in Hugging Face's
    order."""
    return {name: row.stored_shape for name, (_, row, _) in tensors(c).items()}
