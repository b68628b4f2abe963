"""Rotary positions, visibility masks and attention by XLA; the kernels of TPU and GPU are in models/kernels.py.

Shapes: B rows, T queries, S keys, H query heads, K key/value heads, R = H/K, D head_dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from g2d_jax.models.config import ModelConfig
from g2d_jax.records import MEMBERS

QUERY_BLOCK = 512

COLUMN_BLOCK = 256
"""Columns of a cache that `attend_blocks` reads at once; a wider cache is a multiple of it."""


def inverse_frequencies(config: ModelConfig) -> jax.Array:
    """Rotary inverse frequencies, float32 [D/2], with Llama 3.1's scaling of long wavelengths where configured.

    Computed on the host from the config, rounded as PyTorch rounds: under jit XLA would fold the power in another
    precision, and at position 100,000 one unit in the last place of a frequency turns the angle by 0.006 rad.
    """
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    freqs = np.float32(1) / np.power(config.rope_theta, exponents.astype(np.float64)).astype(np.float32)
    scaling = config.rope_scaling
    if scaling is None:
        return jnp.asarray(freqs)
    wavelengths = np.float32(2 * np.pi) / freqs
    length = np.float32(scaling.original_max_position_embeddings)
    low, high, factor = (np.float32(x) for x in (scaling.low_freq_factor, scaling.high_freq_factor, scaling.factor))
    smooth = (length / wavelengths - low) / (high - low)
    blended = (1 - smooth) * freqs / factor + smooth * freqs
    scaled = np.where(wavelengths > length / low, freqs / factor, np.where(wavelengths < length / high, freqs, blended))
    return jnp.asarray(scaled)


def rotary_table(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32 [B, T, D/2], for positions int32 [B, T]."""
    angles = positions[..., None].astype(jnp.float32) * inverse_frequencies(config)[None, None]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Apply rotary embeddings to x [B, T, heads, D], halves paired as Hugging Face pairs them, in float32."""
    cos, sin = (t[:, :, None, :] for t in table)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def visible(query_ids: jax.Array, key_ids: jax.Array, offset: jax.Array | int = 0) -> jax.Array:
    """Causal visibility inside packed segments, bool [B, T, S].

    query_ids int32 [B, T], key_ids int32 [B, S]; query t sits in column offset + t. A token sees earlier columns (and
    itself) of its own segment and of its group's prefix. Padding sees padding, so no row of the softmax is empty.
    """
    query, key = query_ids[:, :, None], key_ids[:, None, :]
    same = (query == key) | ((query // MEMBERS == key // MEMBERS) & (key % MEMBERS == 0))
    columns = offset + jnp.arange(query_ids.shape[1])
    return same & (columns[:, None] >= jnp.arange(key_ids.shape[1])[None, :])[None]


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax attention, float32 softmax. q [B, T, H, D], k and v [B, S, K, D], mask bool [B, T, S] -> [B, T, H, D]."""
    batch, queries, heads, dim = q.shape
    kv_heads, repeats = k.shape[2], heads // k.shape[2]
    # The R query heads of a key head become further queries: plain batched products, which a CPU needs to be quick.
    q = q.reshape(batch, queries, kv_heads, repeats, dim).transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, dim)
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    scores = jnp.einsum("bkqd,bksd->bkqs", q, k, preferred_element_type=jnp.float32) * dim**-0.5
    scores = scores.reshape(batch, kv_heads, repeats, queries, -1)
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype).reshape(batch, kv_heads, repeats * queries, -1)
    mixed = jnp.einsum("bkqs,bksd->bkqd", weights, v).reshape(batch, kv_heads, repeats, queries, dim)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, queries, heads, dim)


def attend_cached(q: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array, *, by_sums: bool) -> jax.Array:
    """Attend with one query a row. q [B, 1, H, D], keys [B, K, D, S], values [B, K, S, D], mask bool [B, S].

    by_sums: scores are a product and a sum, not a matrix product: with one query there is nothing to reuse, a CPU's
    compiler fuses the two, and with S last in the keys every step of the sum is a long vector (4x a batched product). A
    TPU's compiler copies the cache for it, several times a layer; accelerators get the product.
    """
    batch, _, heads, dim = q.shape
    grouped = q.reshape(batch, keys.shape[1], heads // keys.shape[1], dim)
    if by_sums:
        products = grouped[..., None].astype(jnp.float32) * keys[:, :, None].astype(jnp.float32)
        scores = jnp.sum(products, axis=3)  # [B, K, R, S]
    else:
        scores = jnp.einsum("bkrd,bkds->bkrs", grouped, keys, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None, None], scores * dim**-0.5, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    return jnp.einsum("bkrs,bksd->bkrd", weights, values).astype(q.dtype).reshape(q.shape)


def attend_blocks(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    layer: jax.Array,
    column: jax.Array,
    earlier: jax.Array,
    most: jax.Array,
) -> jax.Array:
    """Attend with one query a row to a ring of columns, a block at a time from the newest one back.

    q [B, 1, H, D]; keys [L, B, K, D, W], values [L, B, K, W, D] of all layers, of which `layer` is read where it lies.
    column: of the newest token. earlier: int32 [B], tokens of the row before it, at most `most`. Blocks that no row
    reaches back to are not read: one program serves every length, at the cost of the longest row there is.
    """
    batch, _, heads, dim = q.shape
    kv_heads, width = values.shape[2:4]
    block = min(COLUMN_BLOCK, width)
    total = width // block
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, dim)
    reached = jnp.minimum((most + 2 * (block - 1) - column % block) // block + 1, total)

    def add_block(number: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        largest, mass, mixed = carry
        first = (column // block - number) % total * block
        k = jax.lax.dynamic_slice(keys, (layer, 0, 0, 0, first), (1, *keys.shape[1:4], block))[0]
        v = jax.lax.dynamic_slice(values, (layer, 0, 0, first, 0), (1, *values.shape[1:3], block, dim))[0]
        scores = jnp.einsum("bkrd,bkds->bkrs", grouped, k, preferred_element_type=jnp.float32) * dim**-0.5
        seen = ((column - first - jnp.arange(block)) % width)[None] <= earlier[:, None]  # [B, block]
        scores = jnp.where(seen[:, None, None], scores, jnp.finfo(jnp.float32).min)
        now = jnp.maximum(largest, scores.max(axis=-1))
        weights, kept = jnp.exp(scores - now[..., None]), jnp.exp(largest - now)
        product = jnp.einsum("bkrs,bksd->bkrd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return now, mass * kept + weights.sum(axis=-1), mixed * kept[..., None] + product

    shape = grouped.shape[:3]
    start = (jnp.full(shape, jnp.finfo(jnp.float32).min), jnp.zeros(shape), jnp.zeros(grouped.shape, jnp.float32))
    _, mass, mixed = jax.lax.fori_loop(0, reached, add_block, start)
    return (mixed / mass[..., None]).astype(q.dtype).reshape(q.shape)


def packed_attention(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Causal attention within segments; long rows go through query blocks so that memory grows with T, not T²."""
    length = q.shape[1]
    if length <= QUERY_BLOCK or length % QUERY_BLOCK:
        return attend(q, k, v, visible(segment_ids, segment_ids))

    @jax.checkpoint
    def block(start: jax.Array) -> jax.Array:
        queries = jax.lax.dynamic_slice_in_dim(q, start, QUERY_BLOCK, axis=1)
        ids = jax.lax.dynamic_slice_in_dim(segment_ids, start, QUERY_BLOCK, axis=1)
        return attend(queries, k, v, visible(ids, segment_ids, start))

    blocks = jax.lax.map(block, jnp.arange(0, length, QUERY_BLOCK))  # [T/Q, B, Q, H, D]
    return jnp.moveaxis(blocks, 0, 1).reshape(q.shape)
