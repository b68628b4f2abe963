"""Sampling of a token from each row's logits: temperature, exact top-k and top-p.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from g2d_jax.losses.logprobs import transform_logits
from g2d_jax.records import SamplingParams

Filter = Literal["top_k", "top_p"]
"""A filter, which removes tokens from a row's distribution."""

FILTERS: tuple[Filter, ...] = ("top_k", "top_p")
"""All filters, in the order in which they are applied."""


def filters_of(params: Iterable[SamplingParams]) -> tuple[Filter, ...]:
    """List the filters that any of these settings uses, in the order of FILTERS."""
    used = set()
    for each in params:
        if each.top_k > 0:
            used.add("top_k")
        if each.top_p < 1.0:
            used.add("top_p")
    return tuple(name for name in FILTERS if name in used)


def readings(filters: tuple[Filter, ...]) -> int:
    """Estimate how often sampling a token reads its row's logits: for the log-normaliser, entropy
    and noise, and twice at each step of a filter's search."""
    return 4 + 32 * len(filters)


class Draw(NamedTuple):
    """token int32 [B]; logprob and entropy float32 [B], in nats, of the sampling distribution."""

    token: Array
    logprob: Array
    entropy: Array


def filter_logits(
    logits: Array,
    top_k: Array,
    top_p: Array,
    *,
    filters: tuple[Filter, ...] = FILTERS,
    branches: bool = True,
) -> Array:
    """Keep the top_k largest logits (0: all), and of these the smallest set whose mass reaches
    top_p; set others to -inf.

    logits float32 [B, V], top_k int32 [B], top_p float32 [B]. filters: those that some row may use,
    in the order of FILTERS. branches: whether to skip a filter that no row uses now; on a GPU the
    host waits for that. Equal logits are ranked by index, so exactly top_k tokens stay. top_p
    applies to the distribution after top_k, as in transformers.
    """

    def largest(logits: Array) -> Array:
        chosen = _highest(logits, jnp.ones_like(logits), top_k.astype(jnp.float32))
        return jnp.where(chosen | (top_k <= 0)[:, None], logits, -jnp.inf)

    def nucleus(logits: Array) -> Array:
        chosen = _highest(logits, jax.nn.softmax(logits, axis=-1), top_p)
        return jnp.where(chosen | (top_p >= 1.0)[:, None], logits, -jnp.inf)

    known = {"top_k": (top_k > 0, largest), "top_p": (top_p < 1.0, nucleus)}
    for used, keep in (known[name] for name in filters):
        if not branches:
            logits = keep(logits)
            continue
        logits = jax.lax.cond(jnp.any(used), keep, lambda logits: logits, logits)
    return logits


def _highest(values: Array, weights: Array, target: Array) -> Array:
    """Mark the highest values, equal ones by index, until their weights sum to the target: bool [B,
    V].

    values, weights float32 [B, V]; weights are not negative, and equal for equal values. target
    float32 [B]; all are marked if the weights do not reach it.
    """
    ranks = _ordered(values)
    least = _threshold(ranks, weights, target)
    above, equal = ranks > least, ranks == least
    rest = target - jnp.sum(jnp.where(above, weights, 0.0), axis=-1)
    weight = jnp.max(jnp.where(equal, weights, 0.0), axis=-1)
    # At least one: the values above alone do not reach the target.
    return above | _first(equal, jnp.maximum(jnp.ceil(rest / weight), 1))


def _first(marked: Array, number: Array) -> Array:
    """Keep the first `number` of the marked entries, bool [B, V]. number: float32 [B], at least
    1."""
    grid = _in_blocks(marked.astype(jnp.float32))
    counts = _running_sums(grid.sum(axis=-1))
    # The block with the last entry to keep, and its place there.
    chosen = jnp.minimum(jnp.sum(counts < number[:, None], axis=-1), counts.shape[1] - 1)[:, None]
    inside = jnp.take_along_axis(grid, chosen[..., None], axis=1)[:, 0]
    behind = number[:, None] - jnp.take_along_axis(counts, chosen, axis=1)
    wanted = behind + inside.sum(axis=-1, keepdims=True)
    place = jnp.sum(_running_sums(inside) < wanted, axis=-1, keepdims=True)
    last = chosen * grid.shape[2] + place
    return marked & (jnp.arange(marked.shape[1])[None] <= last)


def _ordered(x: Array) -> Array:
    """Map float32 to uint32 of the same order; both zeros map to one number."""
    bits, sign = jax.lax.bitcast_convert_type(x, jnp.uint32), jnp.uint32(1 << 31)
    return jnp.where(bits > sign, ~bits, bits | sign)  # the sign bit alone is -0.0


def _threshold(ranks: Array, weights: Array, target: Array) -> Array:
    """Find the greatest t for which the weights of ranks >= t reach the target, uint32 [B, 1]; 0 if
    there is none.

    ranks uint32 [B, V]. The search decides two bits per step, from the highest: it reads the
    vocabulary 16 times, an accelerator's sort hundreds of times.
    """
    steps = 16

    def narrow(step: Array, least: Array) -> Array:
        shift, greatest = 2 * (steps - 1 - step), least
        # Sums fall as t grows: the last t that reaches the target is the greatest.
        for digit in (1, 2, 3):
            tried = least | (jnp.uint32(digit) << shift.astype(jnp.uint32))
            mass = jnp.sum(jnp.where(ranks >= tried, weights, 0.0), axis=-1, keepdims=True)
            greatest = jnp.where(mass >= target[:, None], tried, greatest)
        return greatest

    return jax.lax.fori_loop(0, steps, narrow, jnp.zeros((ranks.shape[0], 1), jnp.uint32))


def uniforms(keys: Array, numbers: Array) -> Array:
    """Draw two uniforms in [0, 1) per row, float32 [B, 2]. keys: key data, uint32 [B, 2]. numbers:
    int32 [B], each token's index in its response."""

    def row_uniforms(data: Array, number: Array) -> Array:
        key = jax.random.wrap_key_data(data, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, number), (2,))

    return jax.vmap(row_uniforms)(keys, numbers)


def first_above(masses: Array, uniform: Array) -> Array:
    """Return the first index [B] at which the running sum of masses [B, N] (not negative) exceeds
    uniform [B] * total.

    An entry of mass 0 is never chosen, even if the running sum rises there by rounding: a matrix
    product may add in another order for each column.
    """
    size = masses.shape[-1]
    reached = jnp.where(masses > 0, _running_sums(masses), 0.0)
    above = reached > (uniform * reached.max(axis=-1))[:, None]
    return jnp.min(jnp.where(above, jnp.arange(size)[None], size - 1), axis=-1)


def _running_sums(x: Array) -> Array:
    """Compute the running sums of x, float32 [B, N]."""
    # A product with a triangular matrix of ones is the fastest exact running sum.
    triangle = jnp.triu(jnp.ones((x.shape[-1],) * 2, x.dtype))
    return jnp.matmul(x, triangle, precision=jax.lax.Precision.HIGHEST)


def _in_blocks(x: Array) -> Array:
    """Split x [B, V] into about as many blocks as a block has numbers, padded with zeros: [B,
    blocks, block]."""
    rows, vocab = x.shape
    block = min(vocab, max(128, 1 << ((vocab - 1).bit_length() + 1) // 2))
    blocks = -(-vocab // block)
    return jnp.pad(x, ((0, 0), (0, blocks * block - vocab))).reshape(rows, blocks, block)


def inverse_cdf(probs: Array, uniform: Array) -> Array:
    """Sample indices, int32 [B], from unnormalised probs float32 [B, V] with uniforms [B, 2].

    Two levels, each with its own uniform, choose a block of the vocabulary and then a token in it.
    So float32 sums stay short, and a token far rarer than the uniform's step of 2^-23 keeps its
    probability.
    """
    grid = _in_blocks(probs)
    chosen = first_above(grid.sum(axis=-1), uniform[:, 0])
    inside = jnp.take_along_axis(grid, chosen[:, None, None], axis=1)[:, 0]
    return (chosen * grid.shape[2] + first_above(inside, uniform[:, 1])).astype(jnp.int32)


def draw(
    logits: Array,
    keys: Array,
    numbers: Array,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    *,
    filters: tuple[Filter, ...],
    branches: bool = True,
) -> Draw:
    """Sample one token per row from logits float32 [B, V].

    temperature [B]: 0 is greedy, a point mass (log-prob and entropy 0). filters, branches: see
    `filter_logits`. A row's noise depends only on its key and on `numbers`, the token's index in
    its response, from 0.
    """
    greedy = temperature <= 0.0
    scaled = transform_logits(logits, jnp.where(greedy, 1.0, temperature)[:, None])
    scaled = filter_logits(scaled, top_k, top_p, filters=filters, branches=branches)
    logprobs = jax.nn.log_softmax(scaled, axis=-1)
    probs = jnp.exp(logprobs)
    # A uniform of 0 picks the first of the highest; on a CPU this is faster than argmax.
    masses = jnp.where(greedy[:, None] & (scaled < scaled.max(axis=-1, keepdims=True)), 0.0, probs)
    token = inverse_cdf(masses, jnp.where(greedy[:, None], 0.0, uniforms(keys, numbers)))
    entropy = -jnp.sum(jnp.where(probs > 0, probs * logprobs, 0.0), axis=-1)
    chosen = jnp.take_along_axis(logprobs, token[:, None], axis=-1)[:, 0]
    # Keep NaN in greedy rows too, to show logits that are not finite.
    sure = greedy & ~jnp.isnan(chosen)
    logprob, entropy = (jnp.where(sure, 0.0, x) for x in (chosen, entropy))
    return Draw(token.astype(jnp.int32), logprob, entropy)
