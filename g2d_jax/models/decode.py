"""One step of decoding: a further token a row, with a cache of keys, values and memories.

Shapes: B rows, W cache columns, E hidden_size, K key/value heads, D head_dim, V vocabulary, L
layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from g2d_jax.matmul import products_on
from g2d_jax.models import delta, experts
from g2d_jax.models.attention import KEY_COLUMNS, VALUE_COLUMNS, attend_blocks, attend_cached
from g2d_jax.models.config import ModelConfig
from g2d_jax.models.decoder import (
    Block,
    Decoder,
    apply_block,
    embedded,
    last_norm,
    lay_out,
    layer_rope,
    rotary_tables,
    scan_layers,
)
from g2d_jax.models.delta import Inputs, Memory
from g2d_jax.models.kernels import DecodeKernel, platform_of

Pair = tuple[Array, Array]
"""Keys and values, or what each row and the longest one reaches."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("keys", "values", "column", "width", "memories"),
    meta_fields=(),
)
@dataclass(frozen=True)
class Cache:
    """Keys and values of earlier tokens in a ring of columns, which all rows share. A step writes
    one column, and the token that a row read n steps ago lies n columns before it. Rows never move.

    keys: [B, K, D, W] and values: [B, K, W, D] of each layer with attention; of a stacked model one
    array of all, which begins with their number. See attention.attend_cached for
    why they differ. column: int32 scalar, where the next token is written. width: int32 scalar, the
    columns in use, no more than W. memories: of each recurrent layer, or of all of them.
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    column: Array
    width: Array
    memories: tuple[Memory, ...] = ()


def decode(
    model: Decoder,
    tokens: Array,
    positions: Array,
    cache: Cache,
    *,
    widths: tuple[int, ...],
    dtype: jnp.dtype,
    mesh: Mesh | None = None,
    kernel: DecodeKernel = "xla",
) -> tuple[Array, Cache]:
    """Run one further token a row: hidden states after the final norm, [B, E] in dtype, and the
    advanced cache.

    tokens, positions: int32 [B]. A position is the number of tokens before it in the row's whole
    sequence. It is -1 of a row at rest, whose hidden state may be any number; where `kernel` can
    leave a row out, it reads nothing.

    Of a stacked cache attention reads as much as the longest row needs. Of an unstacked one it reads
    the first `cache.width` columns, which is one of `widths`. kernel: "pallas" reads only what each
    row needs: of a stacked cache by models/decode_kernel.py; of an unstacked one, which then has all
    columns in use, by models/decode_kernel_gpu.py.

    Activations are split by rows over `data` and by width over `fsdp`: weights stay where they are.
    A sampling mesh has an fsdp axis where it splits weights more often than there are key heads;
    attention alone has its rows split by it.
    """
    c = model.config
    multiply = products_on(mesh).multiply
    place = partial(lay_out, mesh)
    x = embedded(model, place(tokens, "rows")[:, None], dtype, mesh)
    positions = place(positions, "rows")
    ropes = jax.tree.map(
        lambda table: place(table, "rows", None, None),
        rotary_tables(c, jnp.maximum(positions, 0)[:, None]),
    )
    reached = partial(_reached, c.windows(cache.keys[0].shape[-1]), positions, jnp.max(positions))
    order = _order_of_kind(c)
    mixture = experts.on_devices(mesh, split_width=True)
    is_stacked = isinstance(model.blocks, Block)
    read = _reader(is_stacked, cache, mesh, widths, kernel)

    def layer(x: Array, block: Block, cached: Any, number: Any) -> tuple[Array, Any]:
        pair, memory = cached
        at = number if c.period == 1 else jnp.asarray(order)[number]

        def attend(q: Array, k: Array, v: Array) -> tuple[Array, Any]:
            # Written before it is read: a token sees itself.
            kept = _write_column(place, cache.column, at, pair, k, v)
            mixed = read(place(q, "rows", None, "heads", None), kept, at, reached(number))
            return place(mixed, "replica_rows", None, "heads", None), (kept, memory)

        def recur(inputs: Inputs, taps: Array) -> tuple[Array, Any]:
            inputs = jax.tree.map(
                lambda part: place(part, "rows", None, "kv_heads", *(None,) * (part.ndim - 3)),
                inputs,
            )
            mixed, kept = _advance(c, memory, at, inputs, taps)
            return place(mixed, "replica_rows", None, "kv_heads", None), (pair, kept)

        x, kept = apply_block(
            c, block, x, layer_rope(c, ropes, number), attend, recur, mixture, multiply
        )
        return place(x, "replica_rows", None, "embed"), kept

    walk = _walk_layers
    if is_stacked:
        walk = _scan_stack
    x, pairs, memories = walk(model, cache, layer, x)
    keys, values = zip(*pairs, strict=True)
    column = (cache.column + 1) % cache.width
    advanced = Cache(keys, values, column, cache.width, tuple(memories))
    return last_norm(model, x)[:, 0], advanced


def _reader(
    is_stacked: bool,
    cache: Cache,
    mesh: Mesh | None,
    widths: tuple[int, ...],
    kernel: DecodeKernel,
) -> Callable[[Array, Pair, Any, Pair], Array]:
    """Return the attention of a step: of queries, a layer's cache, its number and its reach."""
    if is_stacked:
        return partial(_read_ring, cache.column, mesh, kernel)
    if kernel == "pallas":
        return partial(_read_own_columns, cache.column, mesh)
    ages = (cache.column - jnp.arange(cache.keys[0].shape[-1])) % cache.width
    by_sums = mesh is None or platform_of(mesh) == "cpu"
    return partial(_read_columns, ages, cache.width, widths, by_sums)


def _scan_stack(
    model: Decoder, cache: Cache, layer: Callable[..., tuple[Array, Any]], x: Array
) -> tuple[Array, list[Pair], list[Memory]]:
    """Apply the layers of a stacked model, whose cache is one array of all layers."""

    def scanned(carry: Any, own: tuple[Block, Array]) -> tuple[Any, None]:
        x, cached = carry
        return layer(x, own[0], cached, own[1]), None

    memory = cache.memories[0] if cache.memories else None
    start = x, ((cache.keys[0], cache.values[0]), memory)
    (x, (pair, memory)), _ = scan_layers(model, scanned, start)
    return x, [pair], [memory] if cache.memories else []


def _walk_layers(
    model: Decoder, cache: Cache, layer: Callable[..., tuple[Array, Any]], x: Array
) -> tuple[Array, list[Pair], list[Memory]]:
    """Apply the layers of an unstacked model, whose cache has an array a layer."""
    pairs, memories = list(zip(cache.keys, cache.values, strict=True)), list(cache.memories)
    recurrent = model.config.layers(recurrent=True)
    order = _order_of_kind(model.config)
    for number, block in enumerate(model.blocks):
        at = int(order[number])
        is_recurrent = number in recurrent
        cached = (None, memories[at]) if is_recurrent else (pairs[at], None)
        x, (pair, memory) = layer(x, block, cached, number)
        if is_recurrent:
            memories[at] = memory
        else:
            pairs[at] = pair
    return x, pairs, memories


def _order_of_kind(c: ModelConfig) -> np.ndarray:
    """Return the place of each layer among those of its kind, int32 [L]."""
    order = np.zeros(c.num_hidden_layers, np.int32)
    for recurrent in (True, False):
        layers = c.layers(recurrent=recurrent)
        order[list(layers)] = np.arange(len(layers))
    return order


def _advance(
    c: ModelConfig, memory: Memory, at: Any, inputs: Inputs, taps: Array
) -> tuple[Array, Memory]:
    """Run a recurrent layer's `delta.step`. memory: the layer's, or of a stacked cache that of all
    of them, whose entry `at` is read and written."""
    if memory.state.ndim == 4:
        return delta.step(c, memory, inputs, taps)
    own = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, at, keepdims=False), memory)
    mixed, kept = delta.step(c, own, inputs, taps)
    update = partial(jax.lax.dynamic_update_index_in_dim, index=at, axis=0)
    return mixed, jax.tree.map(update, memory, kept)


def _write_column(
    place: Callable[..., Array],
    column: Array,
    number: Any,
    cached: Pair,
    k: Array,
    v: Array,
) -> Pair:
    """Write the newest keys and values, k, v [B, 1, K, D], into a column of a layer's cache."""
    keys, values = cached
    k, v = (place(x[:, 0], "rows", "kv_heads", None) for x in (k, v))

    def write(array: Array, new: Array, axis: int) -> Array:
        start: list[Any] = [0] * array.ndim
        start[axis] = column
        if array.ndim == 5:  # of a stacked cache
            start[0], new = number, new[None]
        return jax.lax.dynamic_update_slice(array, new.astype(array.dtype), start)

    keys = write(keys, k[..., None], KEY_COLUMNS)
    return keys, write(values, v[..., None, :], VALUE_COLUMNS)


def _reached(windows: tuple[int, ...], positions: Array, longest: Array, number: Any) -> Pair:
    """Return the tokens before the newest one that a layer reads: of each row, and of the
    longest."""
    if not windows:
        return positions, longest
    most = jnp.array(windows)[number] - 1
    return jnp.minimum(positions, most), jnp.minimum(longest, most)


def _read_ring(
    column: Array,
    mesh: Mesh | None,
    kernel: DecodeKernel,
    q: Array,
    cached: Pair,
    number: Array,
    reach: Pair,
) -> Array:
    """Attend to the blocks of a stacked cache that each row reaches (kernel "pallas"), or that the
    longest does."""
    if kernel == "xla":
        return attend_blocks(q, *cached, number, column, *reach)
    from g2d_jax.models.decode_kernel import attend_ring  # Pallas takes long to import

    assert mesh is not None
    return attend_ring(q, *cached, number, column, reach[0], mesh=mesh)


def _read_columns(
    ages: Array,
    used: Array,
    widths: tuple[int, ...],
    by_sums: bool,
    q: Array,
    cached: Pair,
    _: int,
    reach: Pair,
) -> Array:
    """Attend to the columns of a layer's cache that are `used`. ages: int32 [W], how many steps ago
    each was written."""
    keys, values = cached
    mask = ages[None] <= reach[0][:, None]  # [B, W]

    def first(size: int) -> Array:
        near = jax.lax.slice_in_dim(keys, 0, size, axis=KEY_COLUMNS)
        near_values = jax.lax.slice_in_dim(values, 0, size, axis=VALUE_COLUMNS)
        return attend_cached(q, near, near_values, mask[:, :size], by_sums=by_sums)

    if len(widths) == 1:
        return first(widths[0])
    # Sizes are static, and the width in use is known on the device only: of a branch for each width
    # that is compiled in, the one in use is run.
    at = jnp.searchsorted(jnp.array(widths), used)
    return jax.lax.switch(at, [partial(first, size) for size in widths])


def _read_own_columns(
    column: Array, mesh: Mesh | None, q: Array, cached: Pair, _: int, reach: Pair
) -> Array:
    """Attend to the columns of a layer's cache that each row reaches."""
    from g2d_jax.models.decode_kernel_gpu import attend_columns  # Pallas takes long to import

    assert mesh is not None
    return attend_columns(q, *cached, column, reach[0], mesh)
