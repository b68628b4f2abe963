"""One step of decoding: one more token per row, with a cache of keys, values and memories.

Shapes: B rows, W cache columns, E hidden_size, K key/value heads, D head_dim, V vocabulary, L
layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

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
from g2d_jax.runtime.matmul import products_on

Pair = tuple[Array, Array]
"""Keys and values, or the reach of each row and of the longest one."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("keys", "values", "column", "memories"),
    meta_fields=(),
)
@dataclass(frozen=True)
class Cache:
    """Keys and values of earlier tokens in a ring of columns, which all rows share. A step writes
    one column, so the token that a row read n steps ago is n columns before it. Rows never move.

    keys: [B, K, D, W] and values: [B, K, W, D] of each layer with attention; in a stacked model one
    array of all, whose first dimension is the layer. attention.attend_cached explains the two
    layouts. column: int32 scalar, the place of the next token. memories: of each recurrent layer,
    or of all of them.
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    column: Array
    memories: tuple[Memory, ...] = ()


def decode(
    model: Decoder,
    tokens: Array,
    positions: Array,
    cache: Cache,
    *,
    dtype: jnp.dtype,
    mesh: Mesh | None = None,
    kernel: DecodeKernel = "xla",
) -> tuple[Array, Cache]:
    """Decode one more token per row: hidden states after the final norm, [B, E] in dtype, and the
    advanced cache.

    tokens, positions: int32 [B]. A position is the number of tokens before it in the row's whole
    sequence. It is -1 for a row at rest, whose hidden state is arbitrary; a `kernel` that can skip
    rows reads nothing for it.

    With a stacked cache attention reads as much as the longest row needs, with an unstacked one all
    columns. kernel: "pallas" reads only what each row needs: from a stacked cache by
    models/decode_kernel.py, from an unstacked one by models/decode_kernel_gpu.py.

    Activations are split by rows over `data` and by width over `fsdp`, so that weights stay in
    place. A sampling mesh has an fsdp axis if it splits weights more often than there are key
    heads; that axis splits rows for attention alone.
    """
    place = partial(lay_out, mesh)
    x = embedded(model, place(tokens, "rows")[:, None], dtype, mesh)
    c, positions = model.config, place(positions, "rows")
    tables = rotary_tables(c, jnp.maximum(positions, 0)[:, None])
    ropes = jax.tree.map(lambda table: place(table, "rows", None, None), tables)
    step = _Step(c, mesh, positions, ropes, c.windows(cache.keys[0].shape[-1]))
    if isinstance(model.blocks, Block):
        read = partial(_read_ring, cache.column, mesh, kernel)
        x, advanced = _decode_stacked(model, step, x, cache, read)
    else:
        x, advanced = _decode_unstacked(model, step, x, cache, _reader(cache, mesh, kernel))
    column = (cache.column + 1) % cache.keys[0].shape[-1]
    return last_norm(model, x)[:, 0], replace(advanced, column=column)


@dataclass(frozen=True)
class _Step:
    """The state that all layers of a step share. ropes: rotary tables of each kind of layer.
    positions: int32 [B]. windows: most columns that each layer reads, () without limits."""

    config: ModelConfig
    mesh: Mesh | None
    positions: Array
    ropes: Any
    windows: tuple[int, ...]

    def place(self, x: Array, *axes: str | None) -> Array:
        """Shard an array on the mesh."""
        return lay_out(self.mesh, x, *axes)

    def reach(self, number: Any) -> Pair:
        """Return the number of tokens before the newest one that a layer reads: of each row, and of
        the longest."""
        positions, longest = self.positions, jnp.max(self.positions)
        if not self.windows:
            return positions, longest
        most = jnp.array(self.windows)[number] - 1
        return jnp.minimum(positions, most), jnp.minimum(longest, most)

    def block(
        self,
        block: Block,
        x: Array,
        number: Any,
        attend: Callable[..., Any],
        recur: Callable[..., Any],
    ) -> tuple[Array, Any]:
        """Apply a layer. attend: from queries, keys and values to output and new cache; recur: from
        inputs and taps."""
        place = self.place

        def attended(q: Array, k: Array, v: Array) -> tuple[Array, Any]:
            k, v = (place(part[:, 0], "rows", "kv_heads", None) for part in (k, v))
            mixed, kept = attend(place(q, "rows", None, "heads", None), k, v)
            return place(mixed, "replica_rows", None, "heads", None), kept

        def advanced(inputs: Inputs, taps: Array) -> tuple[Array, Any]:
            inputs = jax.tree.map(
                lambda part: place(part, "rows", None, "kv_heads", *(None,) * (part.ndim - 3)),
                inputs,
            )
            mixed, kept = recur(inputs, taps)
            return place(mixed, "replica_rows", None, "kv_heads", None), kept

        mixture = experts.on_devices(self.mesh, split_width=True)
        multiply = products_on(self.mesh).multiply
        rope = layer_rope(self.config, self.ropes, number)
        x, kept = apply_block(self.config, block, x, rope, attended, advanced, mixture, multiply)
        return place(x, "replica_rows", None, "embed"), kept


Reader = Callable[[Array, Pair, Any, Pair], Array]
"""The attention of a step: of queries, a layer's cache, its number and its reach."""


def _decode_stacked(
    model: Decoder, step: _Step, x: Array, cache: Cache, read: Reader
) -> tuple[Array, Cache]:
    """Apply the layers of a stacked model, whose cache is one array of all layers, by a scan that
    carries it."""
    c = model.config
    order = jnp.asarray(_order_of_kind(c))

    def scanned(carry: Any, own: tuple[Block, Array]) -> tuple[Any, None]:
        x, (pair, memory) = carry
        block, number = own
        at = number if c.period == 1 else order[number]

        def attend(q: Array, k: Array, v: Array) -> tuple[Array, Any]:
            # Written before the read: a token sees itself.
            kept = _written(pair, cache.column, k[None], v[None], layer=at)
            return read(q, kept, at, step.reach(number)), (kept, memory)

        def recur(inputs: Inputs, taps: Array) -> tuple[Array, Any]:
            mixed, kept = _advance_one(c, memory, at, inputs, taps)
            return mixed, (pair, kept)

        return step.block(block, x, number, attend, recur), None

    start = x, ((cache.keys[0], cache.values[0]), next(iter(cache.memories), None))
    (x, ((keys, values), memory)), _ = scan_layers(model, scanned, start)
    memories = (memory,) if cache.memories else ()
    return x, replace(cache, keys=(keys,), values=(values,), memories=memories)


def _decode_unstacked(
    model: Decoder, step: _Step, x: Array, cache: Cache, read: Reader
) -> tuple[Array, Cache]:
    """Apply the layers of an unstacked model, whose cache has one array a layer, in turn."""
    c = model.config
    pairs, memories = list(zip(cache.keys, cache.values, strict=True)), list(cache.memories)
    recurrent = c.layers(recurrent=True)
    order = _order_of_kind(c)
    for number, block in enumerate(model.blocks):
        at = int(order[number])

        def attend(
            q: Array, k: Array, v: Array, at: int = at, number: int = number
        ) -> tuple[Array, Any]:
            # Written before the read: a token sees itself.
            kept = _written(pairs[at], cache.column, k, v)
            return read(q, kept, at, step.reach(number)), kept

        def recur(inputs: Inputs, taps: Array, at: int = at) -> tuple[Array, Any]:
            return delta.step(c, memories[at], inputs, taps)

        x, kept = step.block(block, x, number, attend, recur)
        if number in recurrent:
            memories[at] = kept
        else:
            pairs[at] = kept
    keys, values = zip(*pairs, strict=True)
    return x, replace(cache, keys=keys, values=values, memories=tuple(memories))


def _reader(cache: Cache, mesh: Mesh | None, kernel: DecodeKernel) -> Reader:
    """Return the attention of a step over an unstacked cache."""
    if kernel == "pallas":
        return partial(_read_own_columns, cache.column, mesh)
    width = cache.keys[0].shape[-1]
    ages = (cache.column - jnp.arange(width)) % width
    by_sums = mesh is None or platform_of(mesh) == "cpu"
    return partial(_read_columns, ages, by_sums)


def _order_of_kind(c: ModelConfig) -> np.ndarray:
    """Return the index of each layer among those of its kind, int32 [L]."""
    order = np.zeros(c.num_hidden_layers, np.int32)
    for recurrent in (True, False):
        layers = c.layers(recurrent=recurrent)
        order[list(layers)] = np.arange(len(layers))
    return order


def _advance_one(
    c: ModelConfig, memories: Memory, at: Any, inputs: Inputs, taps: Array
) -> tuple[Array, Memory]:
    """Run the `delta.step` of one layer. memories: of all layers; entry `at` is read and
    written."""
    own = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, at, keepdims=False), memories)
    mixed, kept = delta.step(c, own, inputs, taps)
    update = partial(jax.lax.dynamic_update_index_in_dim, index=at, axis=0)
    return mixed, jax.tree.map(update, memories, kept)


def _written(cached: Pair, column: Array, k: Array, v: Array, layer: Any = None) -> Pair:
    """Write the newest keys and values, k, v [B, K, D], into a column of a layer's cache. layer: its
    number if the cache holds all layers, and k, v are [1, B, K, D]."""

    def write(array: Array, new: Array, axis: int) -> Array:
        start: list[Any] = [0] * array.ndim
        start[axis] = column
        if layer is not None:
            start[0] = layer
        return jax.lax.dynamic_update_slice(array, new.astype(array.dtype), start)

    keys, values = cached
    return write(keys, k[..., None], KEY_COLUMNS), write(values, v[..., None, :], VALUE_COLUMNS)


def _read_ring(
    column: Array,
    mesh: Mesh | None,
    kernel: DecodeKernel,
    q: Array,
    cached: Pair,
    number: Array,
    reach: Pair,
) -> Array:
    """Attend to the blocks of a stacked cache within each row's reach (kernel "pallas"), or within
    the longest row's."""
    if kernel == "xla":
        return attend_blocks(q, *cached, number, column, *reach)
    from g2d_jax.models.decode_kernel import attend_ring  # importing Pallas takes long

    assert mesh is not None
    return attend_ring(q, *cached, number, column, reach[0], mesh=mesh)


def _read_columns(
    ages: Array,
    by_sums: bool,
    q: Array,
    cached: Pair,
    _: int,
    reach: Pair,
) -> Array:
    """Attend to all columns of a layer's cache. ages: int32 [W], how many steps ago
    each was written."""
    keys, values = cached
    mask = ages[None] <= reach[0][:, None]  # [B, W]

    return attend_cached(q, keys, values, mask, by_sums=by_sums)


def _read_own_columns(
    column: Array, mesh: Mesh | None, q: Array, cached: Pair, _: int, reach: Pair
) -> Array:
    """Attend to the columns of a layer's cache within each row's reach."""
    from g2d_jax.models.decode_kernel_gpu import attend_columns  # importing Pallas takes long

    assert mesh is not None
    return attend_columns(q, *cached, column, reach[0], mesh)
