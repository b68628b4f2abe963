"""Log-probabilities and entropies of tokens over a large vocabulary, without holding [N, V] logits.

With 152k words one row of 16k tokens would need 10 GB of logits, and as much again for their
gradient. So tokens are processed in chunks, forward and backward: each chunk's logits exist only
inside one step of a loop, and the backward pass recomputes them. A CPU, whose micro-batches are
small, keeps them instead. The loop ends at the last token that counts, so prompts and padding cost
nothing. The backward pass is written by hand: it sums the head's gradient over chunks in float32
even if the head is bfloat16. (Differentiating the loop would sum in the head's own type, and a
loop of data-dependent length has no gradient.)

N tokens, D width, V vocabulary, C tokens in a chunk, K chunks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from g2d_jax.losses.reduction import Number
from g2d_jax.runtime.matmul import CPU, PLAIN, Products, products_on
from g2d_jax.runtime.mesh import RULES, spec

CHUNK = 1024
"""Most tokens per chunk: enough to keep a matrix unit busy."""

LOGITS = 2**27
"""Most logits of a chunk: half a GiB in float32, of which the backward pass holds three. A CPU keeps
up to this many per micro-batch: recomputing them is a quarter of the head's work."""

CPU_CHUNK = 256
"""Tokens per chunk on a CPU, whose micro-batches are small: on average half of the last chunk is
empty."""


def chunk_of(words: int, platform: str) -> int:
    """Choose the tokens per chunk for a vocabulary: 256 on a CPU, else 1,024, and for 152k words
    768."""
    if platform == "cpu":
        return CPU_CHUNK
    return min(CHUNK, max(LOGITS // words // 256, 1) * 256)


def logits_kept(mesh: Mesh, tokens: int, words: int) -> int:
    """Count the logits of a device's `tokens` kept for the backward pass: all, or none."""
    logits = tokens * words
    return logits if products_on(mesh) is CPU and logits <= LOGITS else 0


def transform_logits(logits: Array, temperature: Number = 1.0) -> Array:
    """Divide logits by the temperature, in float32: the one transform that sampler and trainer
    share.

    logits: [..., V], any float type. temperature: positive; a number, or an array that broadcasts
    against logits. Returns [..., V] float32. Raises ValueError for a number that is not positive:
    greedy decoding has no log-probs of its own, so a caller that decodes greedily uses the argmax
    and passes 1.
    """
    if isinstance(temperature, int | float):
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        temperature = float(temperature)
    return logits.astype(jnp.float32) / temperature


def token_logprobs(
    hidden: Array,
    head: Array,
    targets: Array,
    counted: Array | None = None,
    *,
    temperature: Number = 1.0,
    chunk: int = CHUNK,
    with_entropy: bool = True,
) -> tuple[Array, Array | None]:
    """Compute the log-probability of each target, and the entropy of each next-token distribution,
    in nats.

    hidden: [N, D], the decoder's output after its final norm, at the position that predicts the
    target.
    head: [D, V]; multiplied in hidden's type, with float32 accumulation. targets: [N] int32. A
    target outside [0, V) has log-probability NaN, never another word's; a loss weight of 0 makes it
    harmless.
    counted: [N] bool; other tokens cost nothing and have 0 for both results and no gradient. None
    counts all.
    temperature: divides the logits, as the sampler does; no gradient flows into it. chunk: tokens
    at once; N may be any number.
    with_entropy: False returns None for the entropies and skips their work.

    Returns (logprobs [N] float32, entropies [N] float32 or None). Both are differentiable in hidden
    and head, in reverse mode. Softmax in float32 throughout. Raises ValueError for shapes that do
    not fit, N = 0, chunk < 1 or a temperature that is not positive.
    """
    if hidden.ndim != 2:
        raise ValueError(f"expected hidden [N, D], got {hidden.shape}")
    _check(hidden, head, targets, chunk)
    if counted is None:
        counted = jnp.ones(targets.shape, bool)
    settings = _Settings(chunk, with_entropy)
    logprobs, entropies = _chunked(hidden, head, targets, counted, _positive(temperature), settings)
    return logprobs, (entropies if with_entropy else None)


def _check(hidden: Array, head: Array, targets: Array, chunk: int) -> None:
    *tokens, width = hidden.shape
    if head.ndim != 2 or width != head.shape[0] or targets.shape != tuple(tokens):
        raise ValueError(
            f"expected hidden [..., D], head [D, V], targets [...]; got {hidden.shape}, "
            f"{head.shape}, {targets.shape}"
        )
    if not targets.size or chunk < 1:
        raise ValueError(
            f"need at least one token and chunk >= 1, got {targets.size} tokens and chunk {chunk}"
        )


def _positive(temperature: Number) -> Array:
    """Return a temperature as a float32 scalar. Raises ValueError if it is known and not
    positive."""
    if not isinstance(temperature, jax.core.Tracer) and not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    return jnp.asarray(temperature, jnp.float32)


@dataclass(frozen=True)
class _Settings:
    """The static settings of a program.

    keep_logits: keep [N, V] from the forward pass for the backward pass instead of recomputing.
    parts: inside `shard_map`, the mesh axes that split the given head, each with the head's
    dimension.
    """

    chunk: int
    with_entropy: bool
    keep_logits: bool = False
    products: Products = PLAIN
    parts: tuple[tuple[str, int], ...] = ()


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _chunked(
    hidden: Array,
    head: Array,
    targets: Array,
    counted: Array,
    temperature: Array,
    settings: _Settings,
) -> tuple[Array, Array]:
    once = replace(settings, keep_logits=False)  # no gradients needed
    return _forward(hidden, head, targets, counted, temperature, once)[0]


def _forward(
    hidden: Array,
    head: Array,
    targets: Array,
    counted: Array,
    temperature: Array,
    settings: _Settings,
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    """Return ((logprobs, entropies), residuals): the inputs, the whole head, two numbers per token,
    and the logits of each chunk if kept."""
    cast_head = head.astype(hidden.dtype)
    for axis, dimension in settings.parts:
        cast_head = jax.lax.all_gather(cast_head, axis, axis=dimension, tiled=True)
    cast_head = settings.products.by_rows(cast_head)
    chunks, count = _chunks(counted, settings.chunk)

    def add(number: Array, carry: tuple[tuple[Array, ...], Array]) -> Any:
        numbers, kept = carry
        at = chunks[number]
        logits = _logits(_take_rows(hidden, at), cast_head, temperature, settings)
        if settings.keep_logits:
            kept = kept.at[number].set(logits)
        is_target = _one_hot(_take_rows(targets, at), logits)
        target_logits = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
        top = jnp.max(logits, axis=-1)
        shifted = logits - top[:, None]
        # Both sums share it: after the product it is most of the cost.
        exponentials = jnp.exp(shifted)
        total = jnp.sum(exponentials, axis=-1)
        log_z = top + jnp.log(total)
        entropies = jnp.zeros_like(log_z)
        if settings.with_entropy:
            entropies = jnp.log(total) - jnp.sum(exponentials * shifted, axis=-1) / total
        results = (target_logits - log_z, log_z, entropies)
        written = tuple(_put_rows(x, at, y) for x, y in zip(numbers, results, strict=True))
        return written, kept

    blank = jnp.zeros(targets.shape, jnp.float32)
    # Not filled with zeros: only written parts are read, and on a CPU only they use memory.
    size = (*chunks.shape, cast_head.shape[1]) if settings.keep_logits else (0,)
    start = (blank, blank, blank), jax.lax.empty(size, jnp.float32)
    (logprobs, log_z, entropies), kept = jax.lax.fori_loop(0, count, add, start)
    unknown = counted & ((targets < 0) | (targets >= cast_head.shape[1]))
    logprobs = jnp.where(unknown, jnp.nan, logprobs)
    residuals = hidden, head, cast_head, targets, counted, temperature, log_z, entropies, kept
    return (logprobs, entropies), residuals


def _backward(
    settings: _Settings, residuals: tuple[Array, ...], grads: tuple[Array, Array]
) -> tuple[Array, Array, None, None, None]:
    """Return the gradients of hidden and head. With p the softmax: d logprob / d logit = one_hot -
    p, and d entropy / d logit = -p * (log p + entropy)."""
    hidden, head, cast_head, targets, counted, temperature, log_z, entropies, kept = residuals
    chunks, count = _chunks(counted, settings.chunk)
    multiply, by_rows = settings.products
    transposed_head = by_rows(cast_head.T)

    def add(number: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        at = chunks[number]
        hidden_c, targets_c, log_z_c, entropies_c, logprob_grad, entropy_grad = (
            _take_rows(x, at) for x in (hidden, targets, log_z, entropies, *grads)
        )
        chunk = hidden_c, cast_head, temperature, settings
        logits = kept[number] if settings.keep_logits else _logits(*chunk)
        logps = logits - log_z_c[:, None]
        p = jnp.exp(logps)
        grad = logprob_grad[:, None] * (_one_hot(targets_c, logps).astype(jnp.float32) - p)
        if settings.with_entropy:
            grad -= entropy_grad[:, None] * p * (logps + entropies_c[:, None])
        # Products are in the model's own type, as in the forward pass; sums in float32.
        grad = (grad / temperature).astype(hidden.dtype)
        to_head = multiply(by_rows(hidden_c.T), grad, preferred_element_type=jnp.float32)
        to_hidden = multiply(grad, transposed_head, preferred_element_type=jnp.float32)
        return carry[0] + to_head, _put_rows(carry[1], at, to_hidden.astype(hidden.dtype))

    start = (jnp.zeros(cast_head.shape, jnp.float32), jnp.zeros_like(hidden))
    head_grad, hidden_grad = jax.lax.fori_loop(0, count, add, start)
    # In float32; each device receives its own part only.
    for axis, dimension in reversed(settings.parts):
        blocks = 8 if head_grad.size > LOGITS else 1
        head_grad = sum_scattered(head_grad, axis, dimension, blocks)
    # Otherwise XLA would move the sum after the loop over micro-batches, and keep the whole head's
    # gradient for it.
    head_grad = jax.lax.optimization_barrier(head_grad)
    return hidden_grad, head_grad.astype(head.dtype), None, None, None


def sum_scattered(matrix: Array, axis: str, dimension: int, blocks: int) -> Array:
    """Add a matrix up over a mesh axis, each device keeping its part of a dimension. For tracing in
    `shard_map`.

    blocks: add it in this many blocks, as far as they divide the other dimension. libtpu turns each
    into an all-reduce, whose result is as large as its input: for Qwen2.5-7B's head 2 GiB at once.
    """
    other = 1 - dimension
    blocks = math.gcd(matrix.shape[other], blocks)
    width = matrix.shape[other] // blocks

    def add(number: Array, total: Array) -> Array:
        block = jax.lax.dynamic_slice_in_dim(matrix, number * width, width, other)
        block = _scattered(block, axis, dimension)
        return jax.lax.dynamic_update_slice_in_dim(total, block, number * width, other)

    shape = list(matrix.shape)
    shape[dimension] //= jax.lax.axis_size(axis)
    return jax.lax.fori_loop(0, blocks, add, jnp.zeros(shape, matrix.dtype))


def _scattered(block: Array, axis: str, dimension: int) -> Array:
    """Add a matrix up over a mesh axis, each device keeping its part of a dimension, in one go."""
    if jax.default_backend() != "cpu" or jax.process_count() == 1:
        return jax.lax.psum_scatter(block, axis, scatter_dimension=dimension, tiled=True)
    # Between processes on CPUs Gloo's reduce-scatter may return wrong values for large pieces
    # (jax-ml/jax#40830).
    size = block.shape[dimension] // jax.lax.axis_size(axis)
    total = jax.lax.psum(block, axis)
    return jax.lax.dynamic_slice_in_dim(total, jax.lax.axis_index(axis) * size, size, dimension)


_chunked.defvjp(_forward, _backward)


def _logits(hidden: Array, head: Array, temperature: Array, settings: _Settings) -> Array:
    """Multiply [C, D] x [D, V] -> [C, V] float32, and divide by the temperature."""
    logits = settings.products.multiply(hidden, head, preferred_element_type=jnp.float32)
    return transform_logits(logits, temperature)


def _one_hot(targets: Array, logits: Array) -> Array:
    """Compare targets [C] with the columns of logits [C, V]: [C, V] bool. Unlike a gather, it fuses
    with its neighbours and needs no scatter."""
    return targets[:, None] == jax.lax.broadcasted_iota(targets.dtype, logits.shape, 1)


def _chunks(counted: Array, chunk: int) -> tuple[Array, Array]:
    """Return the indices of the tokens that count, int32 [K, C], continued by numbers from N on, and
    the count of chunks in use. All are distinct: GPUs would sort writes to equal places."""
    size = counted.shape[0]
    columns = min(chunk, size)
    most = -(-size // columns)
    places = jnp.nonzero(counted, size=most * columns, fill_value=size)[0]
    places = jnp.where(places < size, places, size + jnp.arange(places.size))
    return places.reshape(most, columns), -(-jnp.sum(counted, dtype=jnp.int32) // columns)


def _take_rows(x: Array, at: Array) -> Array:
    """Gather rows of x [N, ...], zeros for rows from N on."""
    return x.at[at].get(mode="fill", fill_value=0)


def _put_rows(x: Array, at: Array, rows: Array) -> Array:
    """Write rows into x [N, ...], at distinct places; places from N on are dropped."""
    return x.at[at].set(rows, mode="drop", unique_indices=True)


def sharded_token_logprobs(
    hidden: Array,
    head: Array,
    targets: Array,
    counted: Array,
    *,
    mesh: Mesh,
    temperature: Number = 1.0,
    chunk: int = CHUNK,
    with_entropy: bool = True,
) -> tuple[Array, Array | None]:
    """Compute `token_logprobs` over a mesh: every device handles its own tokens, and the head is
    gathered once.

    The compiler alone would gather and reduce a sharded head or tokens anew for every chunk. Here
    rows are split over data and fsdp and the tokens of a row over tensor (an axis that does not
    divide is left out). Each device runs its own chunks against the whole head, and head gradients
    are added up once, after the last.

    hidden: [R, T, D] rows of packed tokens. head: [D, V], sharded as the mesh splits embed and
    vocab; gathered in hidden's type. targets: [R, T] int32. counted: [R, T] bool. chunk: tokens at
    once on one device.

    Returns (logprobs [R, T], entropies [R, T] or None), float32.
    """
    _check(hidden, head, targets, chunk)
    head_spec = spec(mesh, ("embed", "vocab"), head.shape)
    parts = tuple((axis, dimension) for dimension, axis in enumerate(head_spec) if axis)
    tokens = spec(mesh, ("rows", "tokens"), targets.shape, {**RULES, "tokens": "tensor"})
    outputs = (tokens, tokens if with_entropy else None)
    ways = math.prod(mesh.shape[axis] for axis in jax.tree.leaves(tuple(tokens)))
    keep = logits_kept(mesh, targets.size // ways, head.shape[1]) > 0
    settings = _Settings(chunk, with_entropy, keep, products_on(mesh), parts)

    def local(
        hidden: Array,
        head: Array,
        targets: Array,
        counted: Array,
        temperature: Array,
    ) -> tuple[Array, Array | None]:
        flat = hidden.reshape(-1, hidden.shape[-1])
        logprobs, entropies = _chunked(
            flat, head, targets.reshape(-1), counted.reshape(-1), temperature, settings
        )
        logprobs = logprobs.reshape(targets.shape)
        if not with_entropy:
            return logprobs, None
        return logprobs, entropies.reshape(targets.shape)

    # check_vma off: the hand-written gradient of the head is a device's own part; shard_map's
    # transpose adds it up over the axes that do not split the head.
    split = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(PartitionSpec(*tokens, None), head_spec, tokens, tokens, PartitionSpec()),
        out_specs=outputs,
        check_vma=False,
    )
    return split(hidden, head, targets, counted, _positive(temperature))


def sequence_sums(values: Array, sequence_ids: Array, num_sequences: int) -> Array:
    """Sum token values per sequence of a packed batch: summed log-probabilities, or lengths from
    ones.

    values: any shape, float. sequence_ids: same shape, int32, in [0, num_sequences) on the tokens
    that count and negative on prompt and padding, where a NaN is harmless. Returns [num_sequences]
    float32. Raises ValueError if the shapes differ.
    """
    if values.shape != sequence_ids.shape:
        raise ValueError(
            f"values and sequence_ids must have one shape, got {values.shape} and "
            f"{sequence_ids.shape}"
        )
    ids = sequence_ids.reshape(-1)
    counted = jnp.where(ids >= 0, values.reshape(-1).astype(jnp.float32), 0.0)
    return jax.ops.segment_sum(counted, jnp.maximum(ids, 0), num_sequences)


def sequence_means(values: Array, sequence_ids: Array) -> Array:
    """Replace each token's value by its sequence's mean; 0 where sequence_ids is negative.

    values: any shape, float. sequence_ids: same shape, int32, as for `sequence_sums` with at most
    as many sequences as there are tokens. Returns the same shape, float32, differentiable. Raises
    ValueError if the shapes differ.
    """
    totals = sequence_sums(values, sequence_ids, values.size)
    lengths = sequence_sums(jnp.ones_like(values), sequence_ids, values.size)
    means = totals / jnp.maximum(lengths, 1.0)
    return jnp.where(sequence_ids >= 0, means[jnp.maximum(sequence_ids, 0)], 0.0)
