"""The decoder: Flax NNX modules used as plain pytrees, and one forward function for training, prefill and decode.

Shapes: B rows, T tokens, S cache columns, E hidden_size, H heads, K key/value heads, D head_dim, M intermediate_size,
V vocabulary, L layers. Parameters of the layers are stacked: every array of `Decoder.blocks` begins with L.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from g2d_jax import mesh as meshes
from g2d_jax.models.attention import attend_cached, packed_attention, rotary_table, rotate
from g2d_jax.models.config import ModelConfig

Remat = Literal["none", "full", "attention"]


@dataclass(frozen=True)
class Param:
    """One row of the architecture's table: it drives initialisation, sharding, import and export.

    shape and axes leave out the layer dimension. hf: Hugging Face's tensor name, {layer} where there is one per layer.
    Hugging Face stores a linear layer as [out, in]; `flat` gives our shape as (in, out), a bias as (out,), so that
    ours.reshape(flat).T is theirs. None means stored alike.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Literal["normal", "ones", "zeros"]
    hf: str
    flat: tuple[int, ...] | None = None


def block_params(c: ModelConfig) -> dict[str, Param]:
    """The table of one layer."""
    e, h, k, d, m = c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.intermediate_size
    attn, mlp = "model.layers.{layer}.self_attn", "model.layers.{layer}.mlp"
    table = {
        "attn_norm": Param((e,), ("norm",), "ones", "model.layers.{layer}.input_layernorm.weight"),
        "q": Param((e, h, d), ("embed", "heads", "head_dim"), "normal", f"{attn}.q_proj.weight", (e, h * d)),
        "k": Param((e, k, d), ("embed", "kv_heads", "head_dim"), "normal", f"{attn}.k_proj.weight", (e, k * d)),
        "v": Param((e, k, d), ("embed", "kv_heads", "head_dim"), "normal", f"{attn}.v_proj.weight", (e, k * d)),
        "o": Param((h, d, e), ("heads", "head_dim", "embed"), "normal", f"{attn}.o_proj.weight", (h * d, e)),
        "mlp_norm": Param((e,), ("norm",), "ones", "model.layers.{layer}.post_attention_layernorm.weight"),
        "gate": Param((e, m), ("embed", "mlp"), "normal", f"{mlp}.gate_proj.weight", (e, m)),
        "up": Param((e, m), ("embed", "mlp"), "normal", f"{mlp}.up_proj.weight", (e, m)),
        "down": Param((m, e), ("mlp", "embed"), "normal", f"{mlp}.down_proj.weight", (m, e)),
    }
    if c.qkv_bias:
        table |= {
            "q_bias": Param((h, d), ("heads", "head_dim"), "zeros", f"{attn}.q_proj.bias", (h * d,)),
            "k_bias": Param((k, d), ("kv_heads", "head_dim"), "zeros", f"{attn}.k_proj.bias", (k * d,)),
            "v_bias": Param((k, d), ("kv_heads", "head_dim"), "zeros", f"{attn}.v_proj.bias", (k * d,)),
        }
    if c.qk_norm:
        table |= {
            "q_norm": Param((d,), ("norm",), "ones", f"{attn}.q_norm.weight"),
            "k_norm": Param((d,), ("norm",), "ones", f"{attn}.k_norm.weight"),
        }
    return table


def outer_params(c: ModelConfig) -> dict[str, Param]:
    """The table of what is not in a layer. A tied model has no "head": it reads the embedding transposed."""
    v, e = c.vocab_size, c.hidden_size
    table = {
        "embed": Param((v, e), ("vocab", "embed"), "normal", "model.embed_tokens.weight"),
        "final_norm": Param((e,), ("norm",), "ones", "model.norm.weight"),
    }
    if not c.tie_word_embeddings:
        table["head"] = Param((e, v), ("embed", "vocab"), "normal", "lm_head.weight", (e, v))
    return table


class Block(nnx.Module):
    """The parameters of one layer, or of all layers stacked: one attribute a row of `block_params`."""

    attn_norm: nnx.Param
    q: nnx.Param
    k: nnx.Param
    v: nnx.Param
    o: nnx.Param
    mlp_norm: nnx.Param
    gate: nnx.Param
    up: nnx.Param
    down: nnx.Param
    q_bias: nnx.Param
    k_bias: nnx.Param
    v_bias: nnx.Param
    q_norm: nnx.Param
    k_norm: nnx.Param

    def __init__(self, values: Mapping[str, jax.Array]):
        for name, value in values.items():
            setattr(self, name, nnx.Param(value))


class Decoder(nnx.Module):
    """The parameters of a model. blocks: one stacked Block (training), or one Block a layer (`unstack`, decode)."""

    embed: nnx.Param
    final_norm: nnx.Param
    head: nnx.Param

    def __init__(self, config: ModelConfig, outer: Mapping[str, jax.Array], blocks: Block | nnx.List):
        self.config = config
        self.blocks = blocks
        for name, value in outer.items():
            setattr(self, name, nnx.Param(value))


def build(config: ModelConfig, make: Callable[[str, Param, bool], jax.Array]) -> Decoder:
    """Make a Decoder from the table: make(name, row, stacked) gives each array ([L, …] when stacked).

    `make` may return arrays, shapes or shardings: the tree is the same.
    """
    outer = {name: make(name, row, False) for name, row in outer_params(config).items()}
    blocks = {name: make(name, row, True) for name, row in block_params(config).items()}
    return Decoder(config, outer, Block(blocks))


def full_shape(config: ModelConfig, row: Param, stacked: bool) -> tuple[int, ...]:
    """The array's shape with the layer dimension."""
    return (config.num_hidden_layers, *row.shape) if stacked else row.shape


def init(config: ModelConfig, key: jax.Array, std: float = 0.02) -> Decoder:
    """Random float32 parameters: normal(0, std), norms one, biases zero. Each array's key is its name's."""

    def make(name: str, row: Param, stacked: bool) -> jax.Array:
        shape = full_shape(config, row, stacked)
        if row.init == "normal":
            return std * jax.random.normal(jax.random.fold_in(key, zlib.crc32(name.encode())), shape)
        return (jnp.ones if row.init == "ones" else jnp.zeros)(shape)

    return build(config, make)


def shardings(config: ModelConfig, mesh: Mesh, rules: meshes.Rules = meshes.RULES) -> Decoder:
    """The Decoder tree with a NamedSharding in place of every array."""

    def make(_: str, row: Param, stacked: bool) -> jax.sharding.NamedSharding:
        axes = ("layers", *row.axes) if stacked else row.axes
        return meshes.sharding(mesh, axes, full_shape(config, row, stacked), rules)

    return build(config, make)  # type: ignore[arg-type]  # a tree of shardings


def abstract(config: ModelConfig, dtype: jnp.dtype = jnp.float32) -> Decoder:  # type: ignore[assignment]
    """The Decoder tree with a ShapeDtypeStruct in place of every array."""

    def make(_: str, row: Param, stacked: bool) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(full_shape(config, row, stacked), dtype)

    return build(config, make)  # type: ignore[arg-type]  # a tree of shapes


def abstract_on(config: ModelConfig, mesh: Mesh, dtype: jnp.dtype = jnp.float32) -> Decoder:  # type: ignore[assignment]
    """`abstract`, every array with its sharding."""
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        abstract(config, dtype),
        shardings(config, mesh),
    )


def cast(model: Decoder, dtype: jnp.dtype) -> Decoder:
    """The same parameters in another type."""
    return jax.tree.map(lambda x: x.astype(dtype), model)


def count_params(config: ModelConfig) -> int:
    """Number of parameters, a tied head counted once."""
    return sum(int(x.size) for x in jax.tree.leaves(abstract(config)))


def unstack(model: Decoder) -> Decoder:
    """The same parameters with one Block a layer: decode then reads each layer's arrays where they lie."""
    layers = [jax.tree.map(lambda x, i=i: x[i], model.blocks) for i in range(model.config.num_hidden_layers)]
    outer = {name: getattr(model, name)[...] for name in outer_params(model.config)}
    return Decoder(model.config, outer, nnx.List(layers))


@partial(jax.tree_util.register_dataclass, data_fields=("keys", "values", "column", "start"), meta_fields=())
@dataclass(frozen=True)
class Cache:
    """Keys and values of earlier tokens, right-aligned: every row's newest token sits in the same column.

    keys: tuple over layers of [B, K, D, S], values: of [B, K, S, D]; see attention.attend_cached for why they differ.
    column: int32 scalar, where the next token is written. start: int32 [B], each row's first valid column.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    column: jax.Array
    start: jax.Array


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """RMSNorm over the last axis, in float32, returned in x's dtype."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype) * jnp.expand_dims(weight, range(x.ndim - 1))


def linear(x: jax.Array, weight: jax.Array, inputs: int = 1) -> jax.Array:
    """x [B, T, *in] times weight [*in, *out] -> [B, T, *out], with `inputs` input dimensions.

    Written as one product of two matrices: XLA's CPU compiler runs the gradient of the same product on
    three-dimensional arrays 3 times slower; on other devices it makes no difference.
    """
    size = math.prod(weight.shape[:inputs])
    product = x.reshape(-1, size) @ weight.reshape(size, -1)
    return product.reshape(*x.shape[:2], *weight.shape[inputs:])


def project_qkv(
    c: ModelConfig, block: Block, x: jax.Array, rope: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [B, T, H, D], keys and values [B, T, K, D] of normalised x [B, T, E], rotated."""
    q, k, v = (linear(x, getattr(block, name)[...]) for name in ("q", "k", "v"))
    if c.qkv_bias:
        q, k, v = (
            y + getattr(block, f"{name}_bias")[...][None, None] for name, y in zip("qkv", (q, k, v), strict=True)
        )
    if c.qk_norm:
        q, k = rms_norm(q, block.q_norm[...], c.rms_norm_eps), rms_norm(k, block.k_norm[...], c.rms_norm_eps)
    return rotate(q, rope), rotate(k, rope), v


def mlp(c: ModelConfig, block: Block, x: jax.Array) -> jax.Array:
    """Residual SwiGLU feed-forward."""
    y = rms_norm(x, block.mlp_norm[...], c.rms_norm_eps)
    return x + linear(jax.nn.silu(linear(y, block.gate[...])) * linear(y, block.up[...]), block.down[...])


def apply_block(
    c: ModelConfig,
    block: Block,
    x: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    attention: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """One layer; returns x and this layer's new (keys, values)."""
    block = jax.tree.map(lambda p: p.astype(x.dtype), block)
    q, k, v = project_qkv(c, block, rms_norm(x, block.attn_norm[...], c.rms_norm_eps), rope)
    mixed = checkpoint_name(attention(q, k, v), "attention")
    x = x + linear(mixed, block.o[...], inputs=2)
    return mlp(c, block, x), (k, v)


def rematerialise(fn: Callable, remat: Remat) -> Callable:
    """Recompute a layer in the backward pass: "full" saves its input only, "attention" also attention's output."""
    if remat == "none":
        return fn
    policy = jax.checkpoint_policies.save_only_these_names("attention") if remat == "attention" else None
    return jax.checkpoint(fn, prevent_cse=False, policy=policy)


def forward(
    model: Decoder,
    tokens: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    cache: Cache | None = None,
    *,
    dtype: jnp.dtype = jnp.float32,  # type: ignore[assignment]
    remat: Remat = "none",
    keep_kv: bool = False,
) -> tuple[jax.Array, Cache | tuple[jax.Array, jax.Array] | None]:
    """Hidden states after the final norm, [B, T, E] in dtype.

    tokens, positions, segment_ids: int32 [B, T]; see attention.visible for segment ids. Without a cache, T tokens
    attend among themselves; keep_kv also returns keys and values, each [L, B, T, K, D]. With a cache T is 1: the
    token is written at cache.column, sees columns start…column, and the advanced cache is returned.
    """
    c = model.config
    x = model.embed[...].astype(dtype)[tokens]
    rope = rotary_table(c, positions)
    if cache is not None:
        x, cache = decode_layers(model, x, rope, cache)
        return rms_norm(x, model.final_norm[...].astype(dtype), c.rms_norm_eps), cache

    def layer(x: jax.Array, block: Block) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        x, kv = apply_block(c, block, x, rope, lambda q, k, v: packed_attention(q, k, v, segment_ids))
        return x, kv if keep_kv else None

    x, kv = scan_layers(rematerialise(layer, remat), x, model.blocks)
    return rms_norm(x, model.final_norm[...].astype(dtype), c.rms_norm_eps), kv


def scan_layers(layer: Callable, x: jax.Array, blocks: Block | nnx.List) -> tuple[jax.Array, Any]:
    """Run the layers in order: lax.scan over a stacked Block, a Python loop over a list of them."""
    if isinstance(blocks, Block):
        return jax.lax.scan(layer, x, blocks)
    outputs = []
    for block in blocks:
        x, output = layer(x, block)
        outputs.append(output)
    return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)


def decode_layers(
    model: Decoder, x: jax.Array, rope: tuple[jax.Array, jax.Array], cache: Cache
) -> tuple[jax.Array, Cache]:
    """All layers for one new token a row; the model is unstacked, the cache one array a layer."""
    assert isinstance(model.blocks, nnx.List), "decode takes an unstacked model"
    columns = jnp.arange(cache.values[0].shape[2])[None]
    mask = (columns >= cache.start[:, None]) & (columns <= cache.column)  # [B, S]
    new_keys, new_values = [], []
    for layer, block in enumerate(model.blocks):

        def attention(q: jax.Array, k: jax.Array, v: jax.Array, layer: int = layer) -> jax.Array:
            keys, values, column = cache.keys[layer], cache.values[layer], cache.column
            k, v = k[:, 0, :, :, None].astype(keys.dtype), v[:, 0, :, None, :].astype(values.dtype)
            new_keys.append(jax.lax.dynamic_update_slice_in_dim(keys, k, column, axis=3))
            new_values.append(jax.lax.dynamic_update_slice_in_dim(values, v, column, axis=2))
            return attend_cached(q, new_keys[-1], new_values[-1], mask)

        x, _ = apply_block(model.config, block, x, rope, attention)
    return x, dataclasses.replace(cache, keys=tuple(new_keys), values=tuple(new_values), column=cache.column + 1)


def head_matrix(model: Decoder, dtype: jnp.dtype = jnp.float32) -> jax.Array:  # type: ignore[assignment]
    """The output projection [E, V]."""
    weight = model.embed[...].T if model.config.tie_word_embeddings else model.head[...]
    return weight.astype(dtype)
