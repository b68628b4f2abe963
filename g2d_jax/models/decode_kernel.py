"""A TPU kernel for the attention of a decode step. It reads only the columns of a ring that each
row needs.

`attention.attend_blocks` reads for every row as many blocks as the longest one needs. Here each row
is read by itself, in pieces of 128 columns, the width of a tile: from the piece of its newest token
back to that of its oldest. A row at rest is not read.

Copies are small but products are not: an item is up to four pieces of one row. A step is up to four
items, until its keys reach STEP_BYTES, so that one item is multiplied while another waits for its
maximum. Copies of later steps run meanwhile, even across two rows, because memory responds with a
long delay. Missing pieces of an item are masked.

jax.experimental.pallas.ops.tpu.ragged_paged_attention does not fit: it reads pages of keys and
values interleaved by head, [pages, columns, 2 K, D], with a table of pages for each row. The ring
has no pages, keys with the columns last, and all layers in one array, so each step would have to
copy the cache into that form.

Shapes: B rows, H query heads, K key/value heads, R = H/K, D head_dim, L layers, W columns.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec

from g2d_jax.models.attention import LOWEST, blocks_back
from g2d_jax.models.kernels import LANES, PIECE_BYTES, piece_columns
from g2d_jax.runtime import mesh as meshes

STEP_BYTES = 2**19
"""Bytes of the keys of a step: three steps of keys and values, two of them in transfer, are 3 MiB
of the 16 MiB of vector memory that a kernel has on a v5e."""

ROW_BYTES = 2**21
"""Most bytes of the queries and outputs in vector memory at once."""

MEGACORE = ("TPU v4", "TPU v5", "TPU v5p")
"""Kinds of device with two cores: each handles half of the rows."""


class Sizes(NamedTuple):
    """The sizes of a kernel.

    piece: columns of a copy. pieces: of an item. items: of a step. steps: whose keys and values are
    in vector memory. rows: whose queries and outputs are. groups: of this many rows, on each core.
    """

    piece: int
    pieces: int
    items: int
    steps: int
    rows: int
    groups: int
    cores: int


def attend_ring(
    q: Array,
    keys: Array,
    values: Array,
    layer: Array,
    column: Array,
    earlier: Array,
    mesh: Mesh,
    *,
    cores: int | None = None,
) -> Array:
    """Compute `attention.attend_blocks`, [B, 1, H, D], each device for its rows and heads; zeros for
    rows at rest, whose `earlier` is -1.

    cores: of a device; None: the number of its kind.
    """
    if cores is None:
        cores = 2 if mesh.devices.flat[0].device_kind in MEGACORE else 1
    query = meshes.spec(
        mesh, ("rows", None, "kv_heads", None), (*q.shape[:2], *values.shape[2:3], q.shape[3])
    )
    cache = PartitionSpec(None, query[0], query[2], None, None)
    specs = query, PartitionSpec(), PartitionSpec(), PartitionSpec(query[0])
    run = jax.shard_map(
        partial(_attend, cores),
        mesh=mesh,
        in_specs=(*specs, cache, cache),
        out_specs=query,
        check_vma=False,
    )
    return run(q, layer, column, earlier, keys, values)


def columns_read(earlier: Array, column: Array, width: int) -> Array:
    """Count the columns of a ring that the kernel reads for rows with `earlier` tokens before the
    newest one, which is in `column`: int32 [B]; none for a row at rest, whose `earlier` is -1."""
    piece = piece_columns(width)
    return piece * blocks_back(earlier, column, piece, width // piece)


def sizes(
    rows: int, kv_heads: int, repeats: int, dim: int, width: int, itemsize: int, cores: int = 1
) -> Sizes:
    """Choose the sizes for a device's rows and heads. itemsize: of keys and values."""
    piece = piece_columns(width)
    piece_bytes = kv_heads * dim * piece * itemsize
    at_once = max(STEP_BYTES // piece_bytes, 1)
    pieces = min(4, at_once, width // piece)
    # Queries are padded to tiles of 16 * 128; each has two buffers, one in transfer.
    row_bytes = kv_heads * (pl.cdiv(repeats, 16) * 16) * (pl.cdiv(dim, LANES) * LANES) * 2 * 4
    most = min(max(ROW_BYTES // row_bytes, 1), 32)
    groups = -(-rows // (cores * most))
    return Sizes(
        piece,
        pieces,
        items=min(4, at_once // pieces),
        steps=3 if 2 * piece_bytes <= PIECE_BYTES else 2,
        rows=-(-rows // (cores * groups)),
        groups=groups,
        cores=cores,
    )


def _attend(
    cores: int, q: Array, layer: Array, column: Array, earlier: Array, keys: Array, values: Array
) -> Array:
    """Attend on one device's rows and heads."""
    batch, _, heads, dim = q.shape
    kv_heads, width = values.shape[2:4]
    repeats = heads // kv_heads
    size = sizes(batch, kv_heads, repeats, dim, width, keys.dtype.itemsize, cores)
    padding = size.cores * size.groups * size.rows - batch  # rows at rest, without a cache
    padded = batch + padding
    queries = jnp.pad(q.reshape(batch, kv_heads, -1, dim), ((0, padding), *[(0, 0)] * 3))
    # One entry after the last row, where the kernel looks for the next one.
    earlier = jnp.pad(earlier, (0, padding + 1), constant_values=-1)
    next_live = jnp.where(earlier >= 0, jnp.arange(padded + 1), padded)
    next_live = jax.lax.cummin(next_live, reverse=True)
    next_live = jnp.pad(next_live, (0, 1), constant_values=padded)
    last = dim % LANES != 0
    if last:
        # XLA stores such values with the columns last: in the order used here it would copy them.
        values = values.swapaxes(3, 4)

    item = size.pieces * size.piece
    shapes = (dim, item), (dim, item) if last else (item, dim)
    held = size.steps, size.items * kv_heads
    buffers = [pltpu.VMEM((*held, *shape), keys.dtype) for shape in shapes]
    sums = [pltpu.VMEM((kv_heads, repeats, n), jnp.float32) for n in (1, 1, dim)]
    of_group = pl.BlockSpec(
        (size.rows, kv_heads, repeats, dim),
        lambda core, group, *_: (core * size.groups + group, 0, 0, 0),
    )
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=3,
        grid=(size.cores, size.groups),
        in_specs=[of_group, *[pl.BlockSpec(memory_space=pl.ANY)] * 2],
        out_specs=of_group,
        scratch_shapes=[
            *buffers,
            *sums,
            pltpu.SMEM((5,), jnp.int32),
            pltpu.SemaphoreType.DMA((size.steps,)),
        ],
    )
    run = pl.pallas_call(
        partial(_group, size, width, last),
        out_shape=jax.ShapeDtypeStruct(queries.shape, q.dtype),
        grid_spec=grid,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        name="attend_ring",
    )
    place = jnp.stack([layer, column])
    out = run(place, earlier, next_live, queries, keys, values)
    return out[:batch].reshape(q.shape)


def _group(
    size: Sizes,
    width: int,
    last: bool,
    place: Any,
    earlier: Any,
    next_live: Any,
    q: Any,
    *refs: Any,
) -> None:
    """Attend with a group of rows.

    refs: the cache in high-bandwidth memory, the output, buffers of steps, sums of the current row,
    cursors, semaphores of steps. The cursors: row, item and number of the step to compute; row and
    item of the step to fetch.
    """
    cache, out, buffers = refs[:2], refs[2], refs[3:5]
    largest, mass, mixed, cursor, semaphores = refs[5:]
    kv_heads = mixed.shape[0]
    total = width // size.piece
    layer, newest = place[0], place[1]
    of_core = size.groups * size.rows
    core, group = pl.program_id(0), pl.program_id(1)
    first = core * of_core + group * size.rows
    axes = 2, 2 if last else 1  # of the columns

    def item(row: Any, number: Any, end: Any) -> tuple[Any, Any, Any, Any]:
        """Return whether such an item exists before row `end`, its pieces, and the row and number
        of the next one."""
        exists = row < end
        left = blocks_back(earlier[row], newest, size.piece, total) - number * size.pieces
        ends = exists & (left <= size.pieces)
        following = jnp.where(ends, next_live[row + 1], row)
        number = jnp.where(ends, 0, jnp.where(exists, number + 1, number))
        return exists, jnp.where(exists, jnp.minimum(left, size.pieces), 0), following, number

    def end_of_step(row: Any) -> Any:
        """Return the row before which a step starting at this one ends: its group's last, and none
        of the other core's."""
        end = (row // size.rows + 1) * size.rows
        return jnp.where(row < (core + 1) * of_core, end, 0)

    def each_copy(row: Any, number: Any, step: Any, act: Any) -> tuple[Any, Any]:
        """Apply `act` to the copies of a step's pieces to the buffers, and return the row and
        number of the item after the step."""
        end, slot = end_of_step(row), step % size.steps

        def of_item(at: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            row, number = carry
            _, pieces, *following = item(row, number, end)

            def copy(nth: Any, _: Any) -> None:
                back = newest // size.piece - number * size.pieces - nth
                source = jnp.where(back < 0, back + total, back)
                for array, buffer, axis in zip(cache, buffers, axes, strict=True):
                    heads = buffer.at[slot, pl.ds(at * kv_heads, kv_heads)]
                    here = _cut(array.at[layer, row], axis, source, size.piece)
                    there = _cut(heads, axis, nth, size.piece)
                    act(pltpu.make_async_copy(here, there, semaphores.at[slot]))

            jax.lax.fori_loop(0, pieces, copy, None)
            return tuple(following)

        return jax.lax.fori_loop(0, size.items, of_item, (row, number))

    def fetch(step: Any, _: Any = None) -> None:
        begin = cursor[3], cursor[4]
        cursor[3], cursor[4] = each_copy(*begin, step, lambda copy: copy.start())

    @pl.when(group == 0)
    def _() -> None:
        # Buffer parts without a piece are multiplied by weights of 0, and must be finite.
        buffers[1][...] = jnp.zeros_like(buffers[1])
        cursor[0] = cursor[3] = next_live[first]
        cursor[1] = cursor[2] = cursor[4] = 0
        jax.lax.fori_loop(0, size.steps - 1, fetch, None)

    def compute(carry: tuple[Any, Any]) -> tuple[Any, Any]:
        step = cursor[2]
        fetch(step + size.steps - 1)
        each_copy(*carry, step, lambda copy: copy.wait())
        keys, values = (buffer.at[step % size.steps] for buffer in buffers)
        last_row, parts = end_of_step(carry[0]), []
        row, number = carry
        for at in range(size.items):
            exists, pieces, *following = item(row, number, last_row)
            heads = pl.ds(at * kv_heads, kv_heads)
            ages = number * size.pieces * size.piece + newest % size.piece
            mask = _mask(size, width, pieces, ages, earlier[row])
            local = jnp.where(exists, row - first, 0)
            part = _part(q[local], keys[heads], values[heads], mask, last)
            parts.append((exists, local, number, part))
            row, number = following
        for exists, local, nth, part in parts:
            sums = [x[...] for x in (largest, mass, mixed)]
            starts = [jnp.full_like(sums[0], LOWEST), *map(jnp.zeros_like, sums[1:])]
            sums = [jnp.where(nth == 0, new, old) for new, old in zip(starts, sums, strict=True)]
            now = jnp.maximum(sums[0], part[0])
            decay, weight = jnp.exp(sums[0] - now), jnp.exp(part[0] - now)
            largest[...] = now
            mass[...] = sums[1] * decay + part[1] * weight
            mixed[...] = sums[2] * decay + part[2] * weight

            @pl.when(exists)
            def _(local: Any = local) -> None:
                out[local] = (mixed[...] / mass[...]).astype(out.dtype)

        cursor[2] = step + 1
        return row, number

    out[...] = jnp.zeros_like(out)
    end = first + size.rows
    cursor[0], cursor[1] = jax.lax.while_loop(
        lambda carry: carry[0] < end, compute, (cursor[0], cursor[1])
    )


def _cut(ref: Any, axis: int, number: Any, piece: int) -> Any:
    """Return a piece of an array [K, columns, D] or [K, D, columns], perhaps all of it."""
    if ref.shape[axis] == piece:
        return ref
    index: list[Any] = [slice(None)] * 3
    index[axis] = pl.ds(pl.multiple_of(number * piece, piece), piece)
    return ref.at[tuple(index)]


def _mask(size: Sizes, width: int, pieces: Any, ages: Any, earlier: Any) -> Array:
    """Return which columns of an item a row sees, bool [1, 1, S]. ages: of the first column of its
    first piece. Pieces of an item go back in time; columns of a piece go forward."""
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, 1, size.pieces * size.piece), 2)
    start = lane // size.piece * size.piece
    age = ages + start - (lane - start)
    # The ring wraps around: a column after the newest was written before it.
    age = jnp.where(age < 0, age + width, age)
    return (age <= earlier) & (lane < pieces * size.piece)


def _part(q: Array, k: Array, v: Array, mask: Array, last: bool) -> tuple[Array, Array, Array]:
    """Return the largest score of an item, its sum of weights and that of weighted values, [K, R,
    1], [K, R, 1] and [K, R, D] in float32."""
    scores = jnp.einsum("krd,kds->krs", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask, scores * q.shape[-1] ** -0.5, LOWEST)
    largest = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - largest)
    mass = weights.sum(axis=-1, keepdims=True)
    mixed = jnp.einsum(
        "krs,kds->krd" if last else "krs,ksd->krd",
        weights.astype(v.dtype),
        v,
        preferred_element_type=jnp.float32,
    )
    return largest, mass, mixed
