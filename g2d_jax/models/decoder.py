"""The decoder: Flax NNX modules used as plain pytrees, and one forward function for training and
prefill. decode.py has the decode step.

Shapes: B rows, T tokens, E hidden_size, H heads, K key/value heads, D head_dim, M
intermediate_size, V vocabulary, L layers. Parameters of the layers are stacked: every array of
`Decoder.blocks` begins with L.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from g2d_jax.config import Remat
from g2d_jax.models import delta, experts, quantise
from g2d_jax.models.attention import (
    SAVED,
    Segments,
    Windowed,
    packed_attention,
    rotary_table,
    rotate,
)
from g2d_jax.models.config import SLIDING, ModelConfig
from g2d_jax.models.delta import Inputs, Memory
from g2d_jax.models.kernels import Attention, platform_of
from g2d_jax.models.linear import (
    Multiply,
    is_sharded,
    linear,
    quantised,
    sharded_linear,
    wide_linear,
)
from g2d_jax.models.table import Param, block_params, outer_params, params, places
from g2d_jax.runtime import mesh as meshes
from g2d_jax.runtime.matmul import products_on

PRODUCT = "product"
"""The name of the results of linear layers for remat "dots"."""

Rope = tuple[Array, ...]
"""A `rotary_table`."""


class LayersKept(NamedTuple):
    """The cache from `forward`. keys, values: [L, B, T, K, D] of the layers with attention.
    memories: of the recurrent ones after the last column, each array beginning with their number;
    None if there are none."""

    keys: Array
    values: Array
    memories: Memory | None


class Parameters(nnx.Module):
    """Arrays, or other leaves of such a tree, as attributes: one per row of the table."""

    def __init__(self, values: Mapping[str, Array]):
        for name, value in values.items():
            setattr(self, name, nnx.Param(value))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> nnx.Param: ...


class Block(Parameters):
    """The parameters of one layer, or of all layers stacked: those of `block_params`."""


class Decoder(Parameters):
    """The parameters of a model. blocks: one stacked Block (training), or one Block a layer
    (`unstack`, decode)."""

    def __init__(self, config: ModelConfig, outer: Mapping[str, Array], blocks: Block | nnx.List):
        super().__init__(outer)
        self.config = config
        self.blocks = blocks


def build(config: ModelConfig, make: Callable[[str, Param], Any]) -> Decoder:
    """Build a stacked Decoder from the table: make(name, row) returns each array.

    `make` may return arrays, shapes or shardings: the tree is the same.
    """
    outer = {name: make(name, row) for name, row in outer_params(config).items()}
    blocks = {name: make(name, row) for name, row in block_params(config).items()}
    return Decoder(config, outer, Block(blocks))


def parameter(model: Decoder, name: str) -> Any:
    """Return a parameter by its name in the table; a layer's parameter is returned stacked."""
    return getattr(model if name in outer_params(model.config) else model.blocks, name).get_value()


def init(config: ModelConfig, key: Array, std: float = 0.02) -> Decoder:
    """Return random float32 parameters: see `fresh`."""
    return build(config, lambda name, row: fresh(name, row, key, std))


def fresh(name: str, row: Param, key: Array, std: float = 0.02) -> Array:
    """Return one random array, float32. normal(0, std), norms one, biases and adapters' B zero, their
    A as in PEFT, uniform within 1 / sqrt(inputs). Each array's key comes from its name."""
    shape, own = row.full_shape, jax.random.fold_in(key, zlib.crc32(name.encode()))
    if row.init == "normal":
        return std * jax.random.normal(own, shape)
    if row.init in ("uniform", "taps"):
        inputs = row.shape[-1:] if row.init == "taps" else row.shape[:-1]
        bound = 1 / math.sqrt(math.prod(inputs))
        return jax.random.uniform(own, shape, minval=-bound, maxval=bound)
    if row.init == "decay":
        return jnp.log(jax.random.uniform(own, shape, minval=0.01, maxval=16.0))
    return (jnp.ones if row.init == "ones" else jnp.zeros)(shape)


def shardings(config: ModelConfig, mesh: Mesh) -> Decoder:
    """Return the Decoder tree with a NamedSharding in place of every array."""

    def place(_: str, row: Param) -> Any:
        axes = (*("layers" for _ in row.stacked), *row.axes)
        return quantise.make_parameter(row, lambda shape, _: meshes.sharding(mesh, axes, shape))

    return build(config, place)


def unstacked_shardings(config: ModelConfig, mesh: Mesh) -> Decoder:
    """Return the `shardings` of the tree from `unstack`."""
    return _by_layer(
        shardings(config, mesh), lambda _, at: NamedSharding(mesh, PartitionSpec(*at.spec[1:]))
    )


def abstract(config: ModelConfig, dtype: jnp.dtype = jnp.float32) -> Decoder:  # type: ignore[assignment]
    """Return the Decoder tree with a ShapeDtypeStruct in place of every array; adapters and `exact`
    rows are always float32."""

    def describe(_: str, row: Param) -> Any:
        is_wide = row.adapter or row.exact
        return quantise.make_parameter(row, jax.ShapeDtypeStruct, jnp.float32 if is_wide else dtype)

    return build(config, describe)


def abstract_on(config: ModelConfig, mesh: Mesh, dtype: jnp.dtype = jnp.float32) -> Decoder:  # type: ignore[assignment]
    """Return the `abstract` tree, every array with its sharding."""
    return meshes.placed(abstract(config, dtype), shardings(config, mesh))


def cast(model: Decoder, dtype: jnp.dtype) -> Decoder:
    """Cast the parameters of a stacked model to another dtype, except `exact` rows."""

    def convert(name: str, row: Param) -> Any:
        value = parameter(model, name)
        return value if row.exact else jax.tree.map(lambda x: x.astype(dtype), value)

    return build(model.config, convert)


def count_params(config: ModelConfig) -> int:
    """Count the parameters, a tied head once, quantised ones by their weights."""
    return sum(math.prod(row.full_shape) for row in params(config).values())


def count_trained(config: ModelConfig) -> int:
    """Count the trained parameters: all, or those of the adapters."""
    return count_params(config) - (count_params(config.base) if config.lora else 0)


def unstack(model: Decoder) -> Decoder:
    """Return the same parameters with one Block a layer: decode then reads each layer's arrays in
    place."""
    return _by_layer(model, lambda place, x: x[place])


def _by_layer(model: Decoder, take: Callable[[int, Any], Any]) -> Decoder:
    """Build one Block a layer of a stacked tree, from take(leaf, its place in the stack)."""
    rows = block_params(model.config)
    layers = []
    for layer in range(model.config.num_hidden_layers):
        own = {
            name: jax.tree.map(partial(take, place), parameter(model, name))
            for name, place in places(rows, layer).items()
        }
        layers.append(Block(own))
    outer = {name: parameter(model, name) for name in outer_params(model.config)}
    return Decoder(model.config, outer, nnx.List(layers))


def rms_norm(x: Array, weight: Array, eps: float, *, unit_offset: bool = False) -> Array:
    """Apply RMSNorm over the last axes, as many as the weight has, in float32; return x's dtype.
    unit_offset: multiply by 1 + weight, and round after it."""
    if x.ndim > weight.ndim and len(x) == 1:
        # With a first dimension of 1, XLA for CPUs takes ten times as long to sum the gradient.
        return rms_norm(jnp.squeeze(x, 0), weight, eps, unit_offset=unit_offset)[None]
    wide = x.astype(jnp.float32)
    axes = tuple(range(-weight.ndim, 0))
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=axes, keepdims=True) + eps)
    weight = jnp.expand_dims(weight, range(x.ndim - weight.ndim))
    if unit_offset:
        return (wide * scale * (1 + weight.astype(jnp.float32))).astype(x.dtype)
    return (wide * scale).astype(x.dtype) * weight


def norm(c: ModelConfig, parameters: Parameters, name: str, x: Array) -> Array:
    """Apply the norm `name` if the family has it; otherwise return x unchanged."""
    if not hasattr(parameters, name):
        return x
    weight = getattr(parameters, name)[...].astype(x.dtype)
    return rms_norm(x, weight, c.rms_norm_eps, unit_offset=c.traits.unit_offset)


def project(
    c: ModelConfig,
    block: Block,
    multiply: Multiply,
    mesh: Mesh | None,
    name: str,
    x: Array,
    inputs: int = 1,
) -> Array:
    """Apply the linear layer `name`, with its adapter and its bias if it has them. mesh: as in
    `apply_block`.

    The adapter's part is added before the sum is rounded to x's type. Added to y in bfloat16, it
    would be rounded away while B is small.
    """
    weight = getattr(block, name).get_value()
    adapted = c.adapted(name)
    product: Callable[..., Array] = partial(wide_linear if adapted else linear, multiply=multiply)
    if quantise.is_quantised(weight):
        product = quantised(product)
    elif mesh is not None and not adapted:
        axes = block_params(c)[name].axes
        if is_sharded(x, weight, mesh, axes):
            product = partial(sharded_linear, mesh=mesh, axes=axes)
    y = product(x, weight, inputs)
    if c.lora and adapted:
        low = linear(x, getattr(block, f"{name}_a")[...], inputs, multiply=multiply)
        high = wide_linear(low, getattr(block, f"{name}_b")[...], multiply=multiply)
        y = (y + c.lora.scale * high).astype(x.dtype)
    if hasattr(block, f"{name}_bias"):
        y = y + getattr(block, f"{name}_bias")[...][None, None]
    return checkpoint_name(y, PRODUCT)


def project_qkv(
    c: ModelConfig, block: Block, x: Array, rope: Rope, projected: Callable[..., Array]
) -> tuple[Array, Array, Array, Array]:
    """Compute queries [B, T, H, D], keys and values [B, T, K, D] of normalised x [B, T, E],
    rotated. projected: `project` of this block, called with a name and x. A family with gates has
    queries [B, T, H, 2 D], with the gates after them, which are not rotated."""
    q, k, v = (projected(name, x) for name in ("q", "k", "v"))
    q, gate = q[..., : c.head_dim], q[..., c.head_dim :]
    q, k = norm(c, block, "q_norm", q), norm(c, block, "k_norm", k)
    if c.query_scale != 1:
        q = q * c.query_scale
    q, k = rotate(q, rope), rotate(k, rope)
    for scale in rope[2:]:
        q = q * scale[..., None].astype(q.dtype)
    return q, k, v, gate


def delta_inputs(
    block: Block, x: Array, projected: Callable[..., Array]
) -> tuple[Inputs, Array, Array]:
    """Compute the inputs of a recurrent layer for each token of normalised x [B, T, E]: its inputs,
    the weights of its convolution [H, F, W], and the gates of its outputs [B, T, H * R, E]. block:
    as stored. projected: as in `project_qkv`."""
    parts = [projected(f"delta_{name}", x) for name in "qkv"]
    taps = [getattr(block, f"conv_{name}")[...].astype(x.dtype) for name in "qkv"]
    heads = parts[0].shape[2]
    mixed = [part.reshape(*part.shape[:2], heads, -1) for part in parts]
    stacked = [own.reshape(heads, -1, own.shape[-1]) for own in taps]
    wide = projected("delta_a", x).astype(jnp.float32)
    bias = block.decay_bias[...].astype(x.dtype).astype(jnp.float32)
    speed = jnp.exp(block.decay[...])
    inputs = Inputs(
        mixed=jnp.concatenate(mixed, axis=-1),
        decay=-speed[None, None] * jax.nn.softplus(wide + bias[None, None]),
        rate=jax.nn.sigmoid(projected("delta_b", x).astype(jnp.float32)),
    )
    return inputs, jnp.concatenate(stacked, axis=1), projected("delta_z", x)


def mlp(c: ModelConfig, block: Block, x: Array, projected: Callable[..., Array]) -> Array:
    """Apply the gated feed-forward layer and add its residual. projected: as in `project_qkv`."""
    y = norm(c, block, "mlp_norm", x)
    gate = (jax.nn.gelu if c.traits.gelu else jax.nn.silu)(projected("gate", y))
    y = projected("down", gate * projected("up", y))
    return add_residual(c, x, norm(c, block, "mlp_post_norm", y))


def mixture_of_experts(
    c: ModelConfig, block: Block, x: Array, router: Array, mixture: experts.Mixture
) -> Array:
    """Apply a layer's experts, chosen by the router [E, X], and add the residual."""
    y = norm(c, block, "mlp_norm", x)
    parts = (getattr(block, f"expert_{name}")[...] for name in ("gate", "up", "down"))
    y = mixture(y, experts.choose(c, router, y), experts.Stacks(*parts))
    return add_residual(c, x, norm(c, block, "mlp_post_norm", y))


def add_residual(c: ModelConfig, x: Array, y: Array) -> Array:
    """Add the output y of a layer's part to its input x."""
    if c.residual_multiplier != 1:
        y = y * c.residual_multiplier
    return x + y


def last_norm(model: Decoder, x: Array) -> Array:
    """Apply the final norm to x [B, T, E], and the scale of logits, which are its products with
    `head_matrix`."""
    x = norm(model.config, model, "final_norm", x)
    if model.config.logits_scaling != 1:
        x = x / model.config.logits_scaling
    return x


def rotary_tables(c: ModelConfig, positions: Array) -> list[Rope]:
    """Return the rotary table of the layers, and that of sliding ones if they have their own
    theta."""
    tables = [rotary_table(c, positions)]
    if c.rope_local_base_freq and SLIDING in c.layer_types:
        local = replace(c, rope_theta=c.rope_local_base_freq, rope_scaling=None)
        tables.append(rotary_table(local, positions))
    return tables


def layer_rope(c: ModelConfig, tables: list[Rope], number: Any) -> Rope:
    """Return the rotary table of a layer, an int or an int32 scalar; a layer without rotary
    embeddings has the table of no rotation."""
    rope, *local = tables
    if local:
        is_sliding = jnp.array([kind == SLIDING for kind in c.layer_types])[number]
        rope = jax.tree.map(partial(jnp.where, is_sliding), local[0], rope)
    if all(c.no_rope_layers):
        return rope
    turns = jnp.array(c.no_rope_layers, bool)[number]
    return jnp.where(turns, rope[0], 1.0), jnp.where(turns, rope[1], 0.0)


def apply_block(
    c: ModelConfig,
    block: Block,
    x: Array,
    rope: Rope,
    attention: Callable[[Array, Array, Array], tuple[Array, Any]],
    recurrence: delta.Recurrence,
    mixture: experts.Mixture,
    multiply: Multiply,
    mesh: Mesh | None = None,
) -> tuple[Array, Any]:
    """Apply one layer. attention: of queries, keys and values; recurrence: of `delta_inputs`; each
    returns its output and its new cache. mixture: `experts.on_devices`. multiply: from
    `products_on`. mesh: the one over which rows are split like weights, or None. Returns x and the
    cache."""
    stored = block
    block = jax.tree.map(
        lambda p: p if quantise.is_quantised(p) else p.astype(x.dtype),
        block,
        is_leaf=quantise.is_quantised,
    )
    projected = partial(project, c, block, multiply, mesh)
    before = norm(c, block, "attn_norm", x)
    if hasattr(block, "delta_q"):
        inputs, taps, gate = delta_inputs(stored, before, projected)
        mixed, kept = recurrence(inputs, taps)
        mixed = gated_norm(c, stored, mixed, gate)
        y = projected("delta_o", mixed, inputs=2)
    else:
        *qkv, gate = project_qkv(c, block, before, rope, projected)
        mixed, kept = attention(*qkv)
        if gate.shape[-1]:
            mixed = mixed * jax.nn.sigmoid(gate)
        y = projected("o", mixed, inputs=2)
    x = add_residual(c, x, norm(c, block, "attn_post_norm", y))
    if c.num_experts:
        router = lay_out(mesh, stored.router[...], None, None)
        return mixture_of_experts(c, block, x, router, mixture), kept
    return mlp(c, block, x, projected), kept


def gated_norm(c: ModelConfig, block: Block, x: Array, gate: Array) -> Array:
    """Apply the norm of a recurrent layer's outputs [B, T, heads, E], and their gates, rounded
    once."""
    normalised = rms_norm(x.astype(jnp.float32), block.delta_norm[...], c.rms_norm_eps)
    return (normalised * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)


def rematerialise(fn: Callable, remat: Remat, *, once: bool = False) -> Callable:
    """Recompute a layer in the backward pass: "full" saves its input only, "attention" also
    attention's output, "dots" also those of the linear layers. once: whether the loop over layers
    has one trip, in which XLA would eliminate the recomputation."""
    if remat == "none":
        return fn
    names = {"full": (), "attention": (SAVED,), "dots": (SAVED, PRODUCT)}[remat]
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    return jax.checkpoint(fn, prevent_cse=once, policy=policy)


def forward(
    model: Decoder,
    tokens: Array,
    positions: Array,
    segment_ids: Array,
    *,
    dtype: jnp.dtype = jnp.float32,  # type: ignore[assignment]
    remat: Remat = "none",
    keep_kv: bool = False,
    attention: Attention = packed_attention,
    mesh: Mesh | None = None,
) -> tuple[Array, LayersKept | None]:
    """Compute hidden states after the final norm, [B, T, E] in dtype.

    tokens, positions, segment_ids: int32 [B, T]; see attention.visible for segment ids. The T
    tokens of a row attend among themselves; keep_kv also returns the cache for decode. attention:
    from kernels.attention_for. mesh: splits the values between layers by rows, and by columns over
    `tensor`, as the backward pass keeps them (Korthikanti et al. 2022, arXiv:2205.05198, section
    4.2.2). Otherwise XLA splits them like the weights, by width, and gathers the rows of all
    devices.
    """
    c = model.config
    multiply = products_on(mesh).multiply
    place = partial(lay_out, mesh)
    x = place(embedded(model, tokens, dtype, mesh), "rows", "columns", None)
    ropes = rotary_tables(c, positions)
    windows = c.windows(tokens.shape[1])

    def layer(x: Array, own: tuple[Block, Any]) -> tuple[Array, Any]:
        block, number = own
        ids: Segments = segment_ids
        if windows:
            ids = Windowed(segment_ids, positions, positions - jnp.array(windows)[number] + 1)

        def attend(q: Array, k: Array, v: Array) -> tuple[Array, Any]:
            return attention(q, k, v, ids), (k, v) if keep_kv else None

        def recur(inputs: Inputs, taps: Array) -> tuple[Array, Any]:
            out, memory = recurrent(segment_ids, inputs, taps)
            return out, memory if keep_kv else None

        x, kept = apply_block(
            c,
            block,
            x,
            layer_rope(c, ropes, number),
            attend,
            recur,
            mixture,
            multiply,
            mesh,
        )
        return place(x, "rows", "columns", None), kept

    recurrent, mixture = delta.on_devices(c, mesh), experts.on_devices(mesh)
    layer = rematerialise(layer, remat, once=c.period == c.num_hidden_layers)
    if isinstance(model.blocks, Block):
        x, outputs = scan_layers(model, layer, x)
    else:
        outputs = []
        for own in zip(model.blocks, jnp.arange(c.num_hidden_layers), strict=True):
            x, output = layer(x, own)
            outputs.append(jax.tree.map(lambda array: array[None], output))
    hidden = place(last_norm(model, x), "rows", None, None)
    return hidden, _all_kept(c, outputs) if keep_kv else None


def scan_layers(
    model: Decoder, apply: Callable[[Any, tuple[Block, Array]], tuple[Any, Any]], start: Any
) -> tuple[Any, list[Any]]:
    """Apply the layers of a stacked model in turn: apply(carry, (block, its number)) returns the
    next carry, and an output.

    One program serves all periods, see `ModelConfig.period`. Returns the last carry, and the output
    of each layer of a period, every array beginning with the periods.
    """
    period = model.config.period
    numbers = jnp.arange(model.config.num_hidden_layers)
    if period == 1:
        assert isinstance(model.blocks, Block)
        end, output = jax.lax.scan(apply, start, (model.blocks, numbers))
        return end, [output]
    rows = block_params(model.config)
    count = len(numbers) // period
    stacks = {
        name: jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), parameter(model, name))
        for name in rows
    }

    def apply_period(carry: Any, own: tuple[dict[str, Any], Array]) -> tuple[Any, list[Any]]:
        stacks, first = own
        parts = {name: _apart(stack) for name, stack in stacks.items()}
        outputs = []
        for layer in range(period):
            block = Block({name: parts[name][at] for name, at in places(rows, layer).items()})
            carry, output = apply(carry, (block, first + layer))
            outputs.append(output)
        return carry, outputs

    return jax.lax.scan(apply_period, start, (stacks, numbers[::period]))


def _apart(stack: Any) -> list[Any]:
    """Return the entries of a stack, or of a tree of stacks.

    Split at once: their gradients are then joined at once, instead of being added one by one, each
    as large as the stack.
    """
    leaves, tree = jax.tree.flatten(stack)
    parts = [jax.lax.split(leaf, (1,) * len(leaf)) for leaf in leaves]
    entries = zip(*parts, strict=True)
    return [jax.tree.unflatten(tree, [part[0] for part in entry]) for entry in entries]


def _all_kept(c: ModelConfig, outputs: list[Any]) -> LayersKept:
    """Join the caches of the layers of a period, in the order of the layers. outputs: from
    `scan_layers`."""
    recurrent = c.layers(recurrent=True)
    pairs = [output for layer, output in enumerate(outputs) if layer not in recurrent]
    memories = [output for layer, output in enumerate(outputs) if layer in recurrent]
    keys, values = _in_order(pairs)
    return LayersKept(keys, values, _in_order(memories) if memories else None)


def _in_order(outputs: Sequence[Any]) -> Any:
    """Join the outputs of the layers of a period, each array beginning with the periods."""
    return jax.tree.map(
        lambda *parts: jnp.stack(parts, axis=1).reshape(-1, *parts[0].shape[1:]), *outputs
    )


def lay_out(mesh: Mesh | None, x: Array, *axes: str | None) -> Array:
    """Split x over the mesh by its logical axes; without a mesh it stays unchanged."""
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, meshes.sharding(mesh, axes, x.shape))


def embedded(model: Decoder, tokens: Array, dtype: jnp.dtype, mesh: Mesh | None) -> Array:
    """Look tokens up, each device in its part of the width: the table is not gathered. [B, T, E] in
    dtype.

    The cast follows: the table's gradient, a sum over all places of a word, is then added up in its
    own type.
    """
    table = model.embed[...]
    if mesh is not None and mesh.size == 1 and platform_of(mesh) in ("gpu", "cuda"):
        x = _look_up(table, tokens)
    else:
        x = table[tokens]
    x = x.astype(dtype)
    if model.config.embedding_scale != 1:
        x = x * jnp.asarray(model.config.embedding_scale, dtype)
    return lay_out(mesh, x, "replica_rows", None, "embed")


@jax.custom_vjp
def _look_up(table: Array, tokens: Array) -> Array:
    """Look tokens up, with a gradient that adds the places of a word up in a fixed order without
    atomic sums. XLA's own, a scatter of equal indices, doubles the time to compile a step on a
    GPU."""
    return table[tokens]


def _looked_up(table: Array, tokens: Array) -> tuple[Array, tuple[Array, Array]]:
    return table[tokens], (tokens, jnp.zeros((table.shape[0], 0), table.dtype))


def _look_up_gradient(residuals: tuple[Array, Array], grads: Array) -> tuple[Array, None]:
    tokens, like = residuals
    rows = grads.reshape(-1, grads.shape[-1])
    order = jnp.argsort(tokens.reshape(-1))
    words, rows = tokens.reshape(-1)[order], rows[order]
    places = jnp.arange(words.size)

    # Places of a word are neighbours: each adds the rows 1, 2, 4, … before it, so that the last one
    # has the sum of all.
    def add(round_number: Array, rows: Array) -> Array:
        distance = 1 << round_number
        before = places - distance
        is_same = (before >= 0) & (words[jnp.maximum(before, 0)] == words)
        return rows + jnp.where(is_same[:, None], jnp.roll(rows, distance, axis=0), 0)

    rows = jax.lax.fori_loop(0, words.size.bit_length(), add, rows)
    is_last = jnp.append(words[1:] != words[:-1], True)
    # Rows that are not written have distinct numbers beyond the words.
    targets = jnp.where(is_last, words, like.shape[0] + places)
    table = jnp.zeros((like.shape[0], rows.shape[1]), like.dtype)
    return table.at[targets].set(rows, mode="drop", unique_indices=True), None


_look_up.defvjp(_looked_up, _look_up_gradient)


def head_matrix(model: Decoder, dtype: jnp.dtype = jnp.float32) -> Array:  # type: ignore[assignment]
    """Return the output projection [E, V]."""
    weight = model.embed[...].T if model.config.tie_word_embeddings else model.head[...]
    return weight.astype(dtype)
