"""Attention of a decode step by a TPU kernel that reads from a ring of columns only what each row
needs.

`attention.attend_blocks` reads of every row as many blocks as the longest one reaches back; here a
row has blocks of its own. One grid step is one block of one row: the steps are those blocks alone,
counted on the device, and the next block is fetched while this one is multiplied, across the border
of two rows, too.

Why not jax.experimental.pallas.ops.tpu.ragged_paged_attention: it reads pages of keys and values
interleaved by head, [pages, columns, 2 K, D], with a table of pages for each row; the ring has no
pages, keys with the columns last, and all layers in one array, so that a step would copy the cache
into that form.

Shapes: B rows, H query heads, K key/value heads, R = H/K, D head_dim, L layers, W columns.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec

from g2d_jax import mesh as meshes
from g2d_jax.models.attention import COLUMN_BLOCK, LOWEST, blocks_back
from g2d_jax.models.kernels import LANES

BLOCK_BYTES = 2**18
"""Bytes of a block of keys, as far as the width allows: they take about as long to come as a grid
step to begin."""


def attend_ring(
    q: Array,
    keys: Array,
    values: Array,
    layer: Array,
    column: Array,
    earlier: Array,
    mesh: Mesh,
) -> Array:
    """Compute `attention.attend_blocks`, [B, 1, H, D], each device for its rows and heads."""
    query = meshes.spec(
        mesh, ("rows", None, "kv_heads", None), (*q.shape[:2], *values.shape[2:3], q.shape[3])
    )
    cache = PartitionSpec(None, query[0], query[2], None, None)
    specs = query, cache, cache, PartitionSpec(), PartitionSpec(), PartitionSpec(query[0])
    run = jax.shard_map(_attend, mesh=mesh, in_specs=specs, out_specs=query, check_vma=False)
    return run(q, keys, values, layer, column, earlier)


def block_columns(width: int, column_bytes: int) -> int:
    """Return a block's columns, a divisor of the width. column_bytes: of a column of a device's
    keys in a layer."""
    for size in (1024, 512):
        if width % size == 0 and size * column_bytes <= BLOCK_BYTES:
            return size
    return min(COLUMN_BLOCK, width)


def _attend(
    q: Array,
    keys: Array,
    values: Array,
    layer: Array,
    column: Array,
    earlier: Array,
) -> Array:
    """Attend on one device's rows and heads."""
    batch, _, heads, dim = q.shape
    kv_heads, width = values.shape[2:4]
    block = block_columns(width, kv_heads * dim * values.dtype.itemsize)
    total = width // block
    ends = jnp.cumsum(blocks_back(earlier, column, block, total))
    starts = jnp.pad(ends, (1, 0))
    rows = jnp.sum(jnp.arange(batch * total)[:, None] >= ends[None], axis=1)  # of each step
    place = jnp.stack([layer, column])

    nth = partial(_nth_block, block, total)

    def of_row(step: Any, *scalars: Any) -> Any:
        return scalars[3][step], 0, 0, 0

    head = pl.BlockSpec((None, kv_heads, heads // kv_heads, dim), of_row)
    key = pl.BlockSpec(
        (None, None, kv_heads, dim, block), lambda i, *s: (s[0][0], s[3][i], 0, 0, nth(i, *s))
    )
    value = pl.BlockSpec(
        (None, None, kv_heads, block, dim), lambda i, *s: (s[0][0], s[3][i], 0, nth(i, *s), 0)
    )
    mixing = "krs,ksd->krd"
    if dim % LANES:
        # XLA stores such values with the columns last: as they are here, they would be copied.
        values, value, mixing = values.swapaxes(3, 4), key, "krs,kds->krd"
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=4,
        grid=(ends[-1],),
        in_specs=[head, key, value],
        out_specs=head,
        scratch_shapes=[
            pltpu.VMEM((kv_heads, heads // kv_heads, n), jnp.float32) for n in (1, 1, dim)
        ],
    )
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, dim)
    run = pl.pallas_call(
        partial(_add_block, block, total, mixing),
        out_shape=jax.ShapeDtypeStruct(grouped.shape, q.dtype),
        grid_spec=grid,
    )
    return run(place, earlier, starts, rows, grouped, keys, values).reshape(q.shape)


def _nth_block(
    block: int, total: int, step: Any, place: Any, _: Any, starts: Any, rows: Any
) -> Any:
    """Return the block of columns that a step reads: from the newest one of its row back."""
    return (place[1] // block + total - (step - starts[rows[step]])) % total


def _add_block(block: int, total: int, mixing: str, *refs: Any) -> None:
    """Add a block to its row's softmax, which the row's first step begins and its last one ends."""
    (place, earlier, starts, rows), (q, k, v, out, largest, mass, mixed) = refs[:4], refs[4:]
    step = pl.program_id(0)
    row = rows[step]
    width = block * total

    @pl.when(step == starts[row])
    def _() -> None:
        largest[...] = jnp.full_like(largest, LOWEST)
        mass[...], mixed[...] = jnp.zeros_like(mass), jnp.zeros_like(mixed)

    scores = jnp.einsum("krd,kds->krs", q[...], k[...], preferred_element_type=jnp.float32)
    scores = scores * q.shape[-1] ** -0.5
    first = _nth_block(block, total, step, *refs[:4]) * block
    back = place[1] - first - jax.lax.broadcasted_iota(jnp.int32, (1, 1, block), 2)
    # The ring goes on behind its last column: one that lies after the newest was written before it.
    mask = jnp.where(back < 0, back + width, back) <= earlier[row]
    scores = jnp.where(mask, scores, LOWEST)
    now = jnp.maximum(largest[...], scores.max(axis=-1, keepdims=True))
    weights = jnp.exp(scores - now)
    decay = jnp.exp(largest[...] - now)
    product = jnp.einsum(
        mixing, weights.astype(v.dtype), v[...], preferred_element_type=jnp.float32
    )
    largest[...] = now
    mass[...] = mass[...] * decay + weights.sum(axis=-1, keepdims=True)
    mixed[...] = mixed[...] * decay + product

    @pl.when(step == starts[row + 1] - 1)
    def _() -> None:
        out[...] = (mixed[...] / mass[...]).astype(out.dtype)
