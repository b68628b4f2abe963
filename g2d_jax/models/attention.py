"""Rotary positions, visibility masks and attention by XLA; the kernels of TPU and GPU are in
models/kernels.py.

Shapes: B rows, T queries, S keys, H query heads, K key/value heads, R = H/K, D head_dim.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from g2d_jax.models.config import LinearRope, LongRope, ModelConfig, YarnRope
from g2d_jax.records import SEGMENT_STRIDE

KEY_COLUMNS, VALUE_COLUMNS = -1, -2
"""The axes of the columns in a cache's keys [..., D, W] and values [..., W, D], counted from the
end."""

CPU_BLOCK = 64
"""Columns of a block whose scores fit a CPU's caches; skipping works by whole blocks."""

SAVED = "attention"
"""The name of attention's output for remat "attention" (decoder.rematerialise)."""

LOWEST = float(jnp.finfo(jnp.float32).min)

COLUMN_BLOCK = 256
"""Columns of a cache that `attend_blocks` reads at once; a wider cache is a multiple of it."""


class Windowed(NamedTuple):
    """Segment ids of a layer with a sliding window. The window counts positions, not columns: the
    responses to a shared prompt follow each other.

    segment_ids, positions: int32 [B, T]. oldest: int32 [B, T], the first position that a token
    sees.
    """

    segment_ids: Array
    positions: Array
    oldest: Array


Segments = Array | Windowed
"""Segment ids int32 [B, T], with the layer's window if it has one."""


def inverse_frequencies(config: ModelConfig) -> Array:
    """Compute rotary inverse frequencies, float32 [D/2], or half of the rotated part of D, with the
    configured scaling.

    Computed on the host from the config, rounded as PyTorch rounds: under jit XLA would fold the
    power in another precision, and at position 100,000 one unit in the last place of a frequency
    turns the angle by 0.006 rad.
    """
    dim = config.rotary_dim
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    powers = np.power(config.rope_theta, exponents.astype(np.float64)).astype(np.float32)
    freqs, scaling = np.float32(1) / powers, config.rope_scaling
    if scaling is None:
        return jnp.asarray(freqs)
    if isinstance(scaling, LinearRope):
        return jnp.asarray(freqs / np.float32(scaling.factor))
    if isinstance(scaling, LongRope):
        return jnp.asarray(np.float32(1) / (np.array(scaling.short_factor, np.float32) * powers))
    if isinstance(scaling, YarnRope):
        kept = 1 - _yarn_ramp(config, scaling)
        divided = np.float32(1) / (np.float32(scaling.factor) * powers)
        return jnp.asarray(divided * (1 - kept) + freqs * kept)
    wavelengths = np.float32(2 * np.pi) / freqs
    length = np.float32(scaling.original_max_position_embeddings)
    low = np.float32(scaling.low_freq_factor)
    high = np.float32(scaling.high_freq_factor)
    factor = np.float32(scaling.factor)
    smooth = (length / wavelengths - low) / (high - low)
    blended = (1 - smooth) * freqs / factor + smooth * freqs
    kept = np.where(wavelengths < length / high, freqs, blended)
    return jnp.asarray(np.where(wavelengths > length / low, freqs / factor, kept))


def _yarn_ramp(config: ModelConfig, scaling: YarnRope) -> np.ndarray:
    """Return the shares of YaRN's frequencies to divide by the factor, float32 [D/2]."""
    dim, length = config.rotary_dim, scaling.original_max_position_embeddings

    def dimension(turns: float) -> float:
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    numbers = np.arange(dim // 2, dtype=np.float32)
    return np.clip((numbers - np.float32(low)) / np.float32(high - low or 0.001), 0, 1)


def rotary_table(config: ModelConfig, positions: Array) -> tuple[Array, ...]:
    """Return cos and sin, float32 [B, T, D/2], for positions int32 [B, T]; and the scale of queries
    [B, T, 1] if YaRN has one."""
    angles = positions[..., None].astype(jnp.float32) * inverse_frequencies(config)[None, None]
    scaling = config.rope_scaling
    size = scaling.attention_factor if isinstance(scaling, YarnRope | LongRope) else 1.0
    table = jnp.cos(angles) * size, jnp.sin(angles) * size
    if not isinstance(scaling, YarnRope) or not scaling.llama_4_scaling_beta:
        return table
    lengths = positions[..., None] // scaling.original_max_position_embeddings
    return *table, 1 + scaling.llama_4_scaling_beta * jnp.log1p(lengths.astype(jnp.float32))


def rotate(x: Array, table: tuple[Array, ...]) -> Array:
    """Apply rotary embeddings to x [B, T, heads, D], halves paired as in Hugging Face, in float32.
    Numbers beyond the table stay unchanged."""
    cos, sin = (t[:, :, None, :] for t in table[:2])
    half = cos.shape[-1]
    wide = x.astype(jnp.float32)
    first, second, rest = jnp.split(wide, [half, 2 * half], axis=-1)
    parts = [first * cos - second * sin, second * cos + first * sin]
    if rest.shape[-1]:
        parts.append(rest)
    return jnp.concatenate(parts, axis=-1).astype(x.dtype)


def visible(query_ids: Segments, key_ids: Segments, offset: Array | int = 0) -> Array:
    """Return the causal visibility inside packed segments, bool [B, T, S].

    query_ids [B, T], key_ids [B, S]; query t is in column offset + t. A token sees earlier columns
    (and itself) of its own segment and of its group's prefix, as far as its window reaches. Padding
    sees padding, so no row of the softmax is empty.
    """
    if isinstance(query_ids, Windowed):
        assert isinstance(key_ids, Windowed)
        near = key_ids.positions[:, None, :] >= query_ids.oldest[:, :, None]
        return near & visible(query_ids.segment_ids, key_ids.segment_ids, offset)
    assert isinstance(key_ids, Array)
    query, key = query_ids[:, :, None], key_ids[:, None, :]
    same = query == key
    same |= (query // SEGMENT_STRIDE == key // SEGMENT_STRIDE) & (key % SEGMENT_STRIDE == 0)
    columns = offset + jnp.arange(query_ids.shape[1])
    return same & (columns[:, None] >= jnp.arange(key_ids.shape[1])[None, :])[None]


def attend_cached(q: Array, keys: Array, values: Array, mask: Array, *, by_sums: bool) -> Array:
    """Attend with one query a row. q [B, 1, H, D], keys [B, K, D, S], values [B, K, S, D], mask
    bool [B, S].

    by_sums: compute scores by a product and a sum instead of a matrix product. With one query
    nothing is reused. A CPU's compiler fuses the two, and S is last in the keys, so that each step
    of the sum is a long vector: 4x as fast as a batched product. A TPU's compiler would copy the
    cache several times a layer, so accelerators use the matrix product.
    """
    batch, _, heads, dim = q.shape
    grouped = q.reshape(batch, keys.shape[1], heads // keys.shape[1], dim)
    if by_sums:
        wide = keys[:, :, None].astype(jnp.float32)
        products = grouped[..., None].astype(jnp.float32) * wide
        scores = jnp.sum(products, axis=3)  # [B, K, R, S]
    else:
        scores = _product("bkrd,bkds->bkrs", grouped, keys)
    scores = jnp.where(mask[:, None, None], scores * dim**-0.5, LOWEST)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    return jnp.einsum("bkrs,bksd->bkrd", weights, values).astype(q.dtype).reshape(q.shape)


def attend_blocks(
    q: Array,
    keys: Array,
    values: Array,
    layer: Array,
    column: Array,
    earlier: Array,
    most: Array,
) -> Array:
    """Attend with one query a row to a ring of columns, a block at a time from the newest one back.

    q [B, 1, H, D]; keys [L, B, K, D, W], values [L, B, K, W, D] of all layers; `layer` is read in
    place.
    column: of the newest token. earlier: int32 [B], tokens of the row before it, at most `most`.
    Blocks beyond every row's reach are not read: one program serves every length, at the cost of
    the longest row.
    """
    batch, _, heads, dim = q.shape
    kv_heads, width = values.shape[2:4]
    block = min(COLUMN_BLOCK, width)
    total = width // block
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, dim)
    reached = blocks_back(jnp.maximum(most, 0), column, block, total)

    def add_block(number: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        first = (column // block - number) % total * block

        # The layer and the block are read in one slice: XLA would copy a layer that is sliced out
        # of the stack by itself.
        def read(array: Array, axis: int) -> Array:
            start: list[Any] = [layer, 0, 0, 0, 0]
            start[axis] = first
            size = [1, *array.shape[1:]]
            size[axis] = block
            return jax.lax.dynamic_slice(array, start, size)[0]

        scores = _product("bkrd,bkds->bkrs", grouped, read(keys, KEY_COLUMNS)) * dim**-0.5
        ages = (column - first - jnp.arange(block)) % width
        mask = ages[None] <= earlier[:, None]  # [B, block]
        scores = jnp.where(mask[:, None, None], scores, LOWEST)
        return _softmax_step(carry, scores, read(values, VALUE_COLUMNS))

    _, mass, mixed = jax.lax.fori_loop(0, reached, add_block, _softmax_start(grouped.shape))
    return (mixed / mass[..., None]).astype(q.dtype).reshape(q.shape)


def blocks_back(earlier: Array, column: Array, block: int, total: int) -> Array:
    """Count the blocks of a ring of `total` that hold a row: its newest token in `column`, and
    `earlier` before it; none for a row at rest, whose `earlier` is -1."""
    space = earlier.__array_namespace__()  # NumPy's when plans count the reads
    count = space.minimum((earlier + block - 1 - column % block) // block + 1, total)
    result: Array = space.where(earlier < 0, 0, count)
    return result


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def packed_attention(
    q: Array, k: Array, v: Array, segment_ids: Segments, block: int = CPU_BLOCK
) -> Array:
    """Attend causally within segments, q [B, T, H, D], k and v [B, T, K, D] -> [B, T, H, D],
    softmax in float32.

    Pairs of a block of queries and a block of keys are processed one by one, and only those in
    which some row sees something (`visible`): memory grows with T, and groups that share a row cost
    each other nothing. block: the most columns of one. Output and log-sum-exp have the name SAVED:
    with both kept, the backward pass recomputes only the scores of a pair.
    """
    return _attended(q, k, v, segment_ids, block)[0]


def _attended(
    q: Array, k: Array, v: Array, segment_ids: Segments, block: int
) -> tuple[Array, tuple[Any, ...]]:
    """Return the output, and the residuals of the backward pass: the inputs, the output and its
    log-sum-exp."""
    ids = _ids_in_blocks(segment_ids, block)
    queries, keys, values = (_in_blocks(x, block, k.shape[2]) for x in (q, k, v))
    pairs, count = _visible_pairs(ids)

    def add(number: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        i, j = pairs[number]
        # If a query sees none of these keys its weights are 1, until `decay` removes them at a pair
        # that it sees.
        own = tuple(x[i] for x in carry)
        new = _softmax_step(own, _scores(queries[i], keys[j], ids, i, j), values[j])
        return tuple(x.at[i].set(part) for x, part in zip(carry, new, strict=True))

    largest, mass, mixed = jax.lax.fori_loop(0, count, add, _softmax_start(queries.shape))
    out = checkpoint_name(_in_rows((mixed / mass[..., None]).astype(q.dtype), q.shape), SAVED)
    return out, (q, k, v, segment_ids, out, checkpoint_name(largest + jnp.log(mass), SAVED))


def _attended_backward(block: int, residuals: tuple[Any, ...], gradient: Array) -> tuple[Any, ...]:
    """Return the gradients. With p the weights and g the gradient of the output: d score = p * (g .
    v - g . output)."""
    q, k, v, segment_ids, out, log_mass = residuals
    ids = _ids_in_blocks(segment_ids, block)
    queries, keys, values, gradients, outs = (
        _in_blocks(x, block, k.shape[2]) for x in (q, k, v, gradient, out)
    )
    pairs, count = _visible_pairs(ids)
    along = _product("...d,...d->...", gradients, outs)

    def add(number: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        to_q, to_k, to_v = carry
        i, j = pairs[number]
        weights = jnp.exp(_scores(queries[i], keys[j], ids, i, j) - log_mass[i][..., None])
        to_weights = _product("bkqd,bksd->bkqs", gradients[i], values[j])
        to_scores = weights * (to_weights - along[i][..., None]) * q.shape[3] ** -0.5
        to_scores = to_scores.astype(q.dtype)
        return (
            to_q.at[i].add(_product("bkqs,bksd->bkqd", to_scores, keys[j])),
            to_k.at[j].add(_product("bkqs,bkqd->bksd", to_scores, queries[i])),
            to_v.at[j].add(_product("bkqs,bkqd->bksd", weights.astype(v.dtype), gradients[i])),
        )

    start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (queries, keys, values))
    sums = zip(jax.lax.fori_loop(0, count, add, start), (q, k, v), strict=True)
    return *(_in_rows(x, like.shape).astype(like.dtype) for x, like in sums), None


packed_attention.defvjp(_attended, _attended_backward)


def _in_blocks(x: Array, block: int, kv_heads: int) -> Array:
    """Reshape [B, T, heads, D] to [blocks, B, K, R * columns, D], with zeros after the end.

    The R query heads of a key head become further queries: these are plain batched products, which
    are fast on a CPU.
    """
    batch, length, heads, dim = x.shape
    count = -(-length // block)
    columns = -(-length // count // 8) * 8 if count > 1 else length
    x = jnp.pad(x, ((0, 0), (0, count * columns - length), (0, 0), (0, 0)))
    x = x.reshape(batch, count, columns, kv_heads, heads // kv_heads, dim)
    x = x.transpose(1, 0, 3, 4, 2, 5)
    return x.reshape(count, batch, kv_heads, -1, dim)


def _ids_in_blocks(segment_ids: Segments, block: int) -> Segments:
    """Reshape ids [B, T] to [blocks, B, columns]."""
    return jax.tree.map(
        lambda x: _in_blocks(x[..., None, None], block, 1)[:, :, 0, :, 0], segment_ids
    )


def _in_rows(x: Array, shape: tuple[int, ...]) -> Array:
    """Undo `_in_blocks` for an array of this shape."""
    batch, length, heads, dim = shape
    x = x.reshape(*x.shape[:3], heads // x.shape[2], -1, dim).transpose(1, 0, 4, 2, 3, 5)
    return x.reshape(batch, -1, heads, dim)[:, :length]


def _visible_pairs(ids: Segments) -> tuple[Array, Array]:
    """List the pairs of blocks (i, j) in which some row's queries in i see keys in j: int32 [P, 2],
    and their number.

    ids [blocks, B, columns].
    """
    blocks, batch, columns = jax.tree.leaves(ids)[0].shape
    rows = jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(batch, -1), ids)
    sees = visible(rows, rows).reshape(batch, blocks, columns, blocks, columns).any(axis=(0, 2, 4))
    return jnp.stack(jnp.nonzero(sees, size=blocks * (blocks + 1) // 2), axis=1), sees.sum()


def _scores(queries: Array, keys: Array, ids: Segments, i: Array, j: Array) -> Array:
    """Compute the scores of block i of the queries and block j of the keys. float32 [B, K, R *
    columns, columns], LOWEST if a query does not see the key."""
    scores = _product("bkqd,bksd->bkqs", queries, keys) * queries.shape[-1] ** -0.5
    batch, kv_heads, _, columns = scores.shape
    of_queries, of_keys = (jax.tree.map(lambda x, at=at: x[at], ids) for at in (i, j))
    mask = visible(of_queries, of_keys, (i - j) * columns)
    grouped = scores.reshape(batch, kv_heads, -1, columns, columns)
    return jnp.where(mask[:, None, None], grouped, LOWEST).reshape(scores.shape)


def _softmax_start(shape: tuple[int, ...]) -> tuple[Array, Array, Array]:
    """Return the greatest score, the sum of weights and that of weighted values over no keys, for
    queries [..., D]."""
    return jnp.full(shape[:-1], LOWEST), jnp.zeros(shape[:-1]), jnp.zeros(shape, jnp.float32)


def _softmax_step(carry: tuple[Array, ...], scores: Array, values: Array) -> tuple[Array, ...]:
    """Add a block of keys to `_softmax_start`: scores float32 [B, K, Q, S], values [B, K, S, D]."""
    largest, mass, mixed = carry
    now = jnp.maximum(largest, scores.max(axis=-1))
    weights, decay = jnp.exp(scores - now[..., None]), jnp.exp(largest - now)
    more = _product("bkqs,bksd->bkqd", weights.astype(values.dtype), values)
    return now, mass * decay + weights.sum(axis=-1), mixed * decay[..., None] + more


_product = partial(jnp.einsum, preferred_element_type=jnp.float32)
