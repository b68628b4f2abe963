"""A kernel for NVIDIA GPUs for the attention of a decode step. It reads only the columns of a ring
that each row needs.

A program of the kernel handles a share of one row's blocks for one key head, with all query heads
of that head. Rows differ in length, so each has as many rounds as its own blocks need, from the
newest one back. The shares of a row are merged after the kernel.

Other kernels do not fit: keys have the columns last, a ring has no first column, and a step has one
query a row. This excludes cuDNN's attention, Hopper's wgmma (64 queries) and
jax.experimental.pallas.ops.gpu (columns before D, from column 0). So this is Triton, by Pallas; JAX
0.11 declared Pallas's Triton deprecated, and 0.12 still has it.

Shapes: B rows, H query heads, K key/value heads, R = H/K, D head_dim, W columns, N shares of a row.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.sharding import Mesh, PartitionSpec

from g2d_jax.models.attention import LOWEST, blocks_back
from g2d_jax.models.kernels import platform_of
from g2d_jax.runtime import mesh as meshes

BLOCK = 64
"""Most columns of a block: 128 bytes of a key's line in bfloat16. A row reads one block more than
it fills, so larger ones would read more for nothing."""

BLOCK_BYTES = 2**14
"""Most bytes of a block of keys: two of keys and two of values are in shared memory, which has at
least 99 KiB on every multiprocessor."""

PROGRAMS = 512
"""Programs that keep a GPU's 108 to 142 multiprocessors busy."""

SHARE = 2048
"""Most columns of a program: one that reads much more than the others would end last, alone."""

LEAST_TILE = 16
"""The least number of queries of a matrix product, and the least of its other sizes."""


def attend_columns(
    q: Array,
    keys: Array,
    values: Array,
    column: Array,
    earlier: Array,
    mesh: Mesh,
) -> Array:
    """Attend with one query a row to a ring of columns, each device for its rows and heads: [B, 1,
    H, D].

    q [B, 1, H, D]; keys [B, K, D, W], values [B, K, W, D] of one layer. column: int32 scalar, of
    the newest token. earlier: int32 [B], visible tokens of the row before it; -1: the row is at
    rest, reads nothing and returns zeros. On a CPU the kernel is interpreted, for tests.
    """
    query = meshes.spec(
        mesh, ("rows", None, "kv_heads", None), (*q.shape[:2], *values.shape[1:2], q.shape[3])
    )
    cache = PartitionSpec(query[0], query[2], None, None)
    specs = query, PartitionSpec(), PartitionSpec(query[0]), cache, cache
    attend = partial(_attend, interpret=platform_of(mesh) == "cpu")
    run = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=query, check_vma=False)
    return run(q, column, earlier, keys, values)


def block_columns(width: int, dim: int, itemsize: int) -> int:
    """Return a block's columns: a power of two that divides the width. itemsize: bytes of a
    number."""
    most = min(BLOCK, max(BLOCK_BYTES // (_power(dim) * itemsize), LEAST_TILE))
    return min(most, width & -width)


def columns_read(earlier: Array, column: Array, width: int, dim: int, itemsize: int) -> Array:
    """Count the columns of a ring that the kernel reads for rows with `earlier` tokens before the
    newest one, which is in `column`: int32 [B]; none for a row at rest, whose `earlier` is -1.
    itemsize: bytes of a number."""
    block = block_columns(width, dim, itemsize)
    return block * blocks_back(earlier, column, block, width // block)


def shares(rows: int, kv_heads: int, width: int, block: int) -> int:
    """Choose into how many shares to divide the blocks of each row, for this many rows and key
    heads on a device."""
    wanted = max(-(-PROGRAMS // (rows * kv_heads)), -(-width // SHARE))
    return min(wanted, width // block)


def _attend(
    q: Array, column: Array, earlier: Array, keys: Array, values: Array, *, interpret: bool
) -> Array:
    """Attend on one device's rows and heads."""
    batch, _, heads, dim = q.shape
    kv_heads, width = values.shape[1:3]
    repeats = heads // kv_heads
    tile, lanes = max(LEAST_TILE, _power(repeats)), max(LEAST_TILE, _power(dim))
    if keys.size >= 2**31:
        raise ValueError(
            f"a layer's keys of {batch} rows have {keys.size:,} numbers, but a GPU's decode kernel "
            "can index at most 2**31: lower compute.max_num_seqs, or set "
            "compute.attention to xla"
        )
    block = block_columns(width, dim, values.dtype.itemsize)
    parts = shares(batch, kv_heads, width, block)

    def of_head(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *shape), lambda b, k, n: (b, k, 0, 0))

    in_specs = [
        pl.BlockSpec((), lambda b, k, n: ()),
        pl.BlockSpec((None,), lambda b, k, n: (b,)),
        of_head(tile, lanes),
        of_head(lanes, width),
        of_head(width, lanes),
    ]
    # One share is the row's result; several need sums in float32 and their weights.
    shape = parts, batch, kv_heads, repeats
    out_shape = [jax.ShapeDtypeStruct((*shape, dim), q.dtype if parts == 1 else jnp.float32)]
    out_specs = [pl.BlockSpec((None, None, None, tile, lanes), lambda b, k, n: (n, b, k, 0, 0))]
    if parts > 1:
        out_shape.append(jax.ShapeDtypeStruct(shape, jnp.float32))
        out_specs.append(pl.BlockSpec((None, None, None, tile), lambda b, k, n: (n, b, k, 0)))
    run = pl.pallas_call(
        partial(_read_share, block, width, (repeats, dim)),
        out_shape=out_shape,
        grid=(batch, kv_heads, parts),
        in_specs=in_specs,
        out_specs=out_specs,
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="attend_columns",
    )
    grouped = q.reshape(batch, kv_heads, repeats, dim)
    mixed, *logs = run(column, earlier, grouped, keys, values)
    if logs:
        mixed = jnp.sum(mixed * jax.nn.softmax(logs[0], axis=0)[..., None], axis=0)
    return mixed.astype(q.dtype).reshape(q.shape)


def _read_share(block: int, width: int, sizes: tuple[int, int], *refs: Any) -> None:
    """Attend to one share of a row's blocks, each refs' part of one row and key head.

    sizes: the actual queries and head_dim; tiles are powers of two, and parts beyond these are not
    read.
    """
    column, earlier, query, keys, values, *outs = refs
    column, earlier = column[()], earlier[()]
    total = width // block
    tile, lanes = query.shape
    rows, dims = (jnp.arange(full) < size for full, size in zip((tile, lanes), sizes, strict=True))
    is_padded = lanes != sizes[1]
    queried = rows[:, None] & dims[None]
    q = triton.load(query.at[:, :], mask=queried, other=0.0)
    count = blocks_back(earlier, column, block, total)
    share = (count + pl.num_programs(2) - 1) // pl.num_programs(2)
    first = pl.program_id(2) * share

    def add_block(number: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        largest, mass, mixed = carry
        start = jax.lax.rem(column // block + total - number, total) * block
        at = pl.ds(start, block)
        if is_padded:
            k = triton.load(keys.at[:, at], mask=dims[:, None], other=0)
            v = triton.load(values.at[at, :], mask=dims[None], other=0)
        else:
            k, v = keys[:, at], values[at, :]
        scores = _product(q, k) * sizes[1] ** -0.5
        # The ring wraps around: a column after the newest was written before it.
        back = column - start - jnp.arange(block)
        seen = jnp.where(back < 0, back + width, back) <= earlier
        scores = jnp.where(seen[None], scores, LOWEST)
        now = jnp.maximum(largest, scores.max(axis=1))
        weights, decay = jnp.exp(scores - now[:, None]), jnp.exp(largest - now)
        mass = mass * decay + weights.sum(axis=1)
        more = _product(weights.astype(v.dtype), v)
        return now, mass, mixed * decay[:, None] + more

    nothing = jnp.zeros(tile, jnp.float32)
    start = nothing + LOWEST, nothing, jnp.zeros((tile, lanes), jnp.float32)
    last = jnp.minimum(first + share, count)
    largest, mass, mixed = jax.lax.fori_loop(first, last, add_block, start)
    mixed = mixed / jnp.where(mass > 0, mass, 1.0)[:, None]
    triton.store(outs[0].at[:, :], mixed.astype(outs[0].dtype), mask=queried)
    if len(outs) > 1:
        logs = jnp.where(mass > 0, largest + jnp.log(jnp.where(mass > 0, mass, 1.0)), LOWEST)
        triton.store(outs[1].at[:], logs, mask=rows)


def _product(x: Array, y: Array) -> Array:
    """Multiply [N, D] by [D, M], in float32, without rounding float32 to tensorfloat32."""
    return jnp.dot(x, y, preferred_element_type=jnp.float32, precision=jax.lax.Precision.HIGHEST)


def _power(size: int) -> int:
    """Return the next power of two."""
    return 1 << (size - 1).bit_length()
