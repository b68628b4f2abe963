r"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464, equation 10), which Qwen3.5's recurrent
layers use instead of attention.

A head has a matrix S, which maps keys to values. Each token decays S by a share, corrects its
result for the token's key towards the token's value, and reads it with its query:

    S_t = a_t S_{t-1} + k_t (b_t (v_t - a_t S_{t-1}^T k_t))^T        o_t = S_t^T q_t

`step` does that for one token of each row (decode). `scan` processes CHUNK tokens at once (training,
prefill): the corrections of a chunk are the solution of a triangular system (section 3.3).

In packed rows history is a tree: the responses to a prompt all begin from the state after it.
Attention's `visible` determines a token's ancestors within a chunk, so that one triangular system
holds all branches. Between chunks two states are kept: after the last token, and after the last
prompt.

Shapes: B rows, T tokens, C tokens of a chunk, H key heads, R value heads a key head, D and E sizes
of a key and of a value, F = 2 D + R E inputs of a key head's convolution, W taps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from g2d_jax.models.attention import LOWEST, visible
from g2d_jax.models.config import ModelConfig
from g2d_jax.records import SEGMENT_STRIDE
from g2d_jax.runtime import mesh as meshes

CHUNK = 64
"""Tokens processed at once, as in transformers and flash-linear-attention."""

EPSILON = 1e-6
"""Added to the squared length that divides queries and keys."""


class Memory(NamedTuple):
    """The state of a recurrent layer for a sequence.

    state: float32 [B, H * R, D, E]. tail: [B, H, W - 1, F], inputs of the convolution at the last
    tokens.
    """

    state: Array
    tail: Array


class Inputs(NamedTuple):
    """A layer's inputs for each token by itself.

    mixed: [B, T, H, F], queries, keys and values of each key head before the convolution. decay:
    float32 [B, T, H * R], the logarithm of the remaining share of the state. rate: float32
    [B, T, H * R], the strength of the correction.
    """

    mixed: Array
    decay: Array
    rate: Array


Recurrence = Callable[[Inputs, Array], tuple[Array, Memory]]
"""`scan` or `step` that still needs the inputs and the convolution's weights: it returns the outputs
[B, T, H * R, E] and the memory."""


def no_memory(c: ModelConfig, rows: int, dtype: jnp.dtype, split: int = 1) -> Memory:
    """Return the memory before the first token. dtype: of the tail. split: the number of devices
    that share the heads; the memory is that of one."""
    size, value_size = c.linear_key_head_dim, c.linear_value_head_dim
    heads, values = c.linear_num_key_heads // split, c.linear_num_value_heads // split
    features = 2 * size + values // heads * value_size
    return Memory(
        state=jnp.zeros((rows, values, size, value_size), jnp.float32),
        tail=jnp.zeros((rows, heads, c.linear_conv_kernel_dim - 1, features), dtype),
    )


def on_devices(c: ModelConfig, mesh: Mesh | None) -> Callable[..., tuple[Array, Memory]]:
    """Return `scan`, of segment ids, inputs and taps, each device running its rows and heads: XLA
    cannot split a triangular system by itself on every platform."""
    if mesh is None:
        return partial(scan, c)

    def run(segment_ids: Array, inputs: Inputs, taps: Array) -> tuple[Array, Memory]:
        # A value head is on the device of its key head.
        rows, _, heads, _ = meshes.spec(mesh, ("rows", None, "kv_heads", None), inputs.mixed.shape)
        of_tokens = PartitionSpec(rows, None, heads)
        of_memory = PartitionSpec(rows, heads)
        each = jax.shard_map(
            partial(scan, c),
            mesh=mesh,
            in_specs=(PartitionSpec(rows), of_tokens, PartitionSpec(heads)),
            out_specs=(of_tokens, of_memory),
            check_vma=False,
        )
        return each(segment_ids, inputs, taps)

    return run


def step(c: ModelConfig, memory: Memory, inputs: Inputs, taps: Array) -> tuple[Array, Memory]:
    """Run one token a row: the outputs [B, 1, H * R, E], and the new memory.

    inputs: with T = 1. taps: [H, F, W].
    """
    newest = jnp.swapaxes(inputs.mixed, 1, 2)
    window = jnp.concatenate([memory.tail, newest.astype(memory.tail.dtype)], axis=2)
    wide, factors = window.astype(jnp.float32), taps.astype(jnp.float32)
    convolved = jnp.einsum("bhwf,hfw->bhf", wide, factors, precision="highest")
    q, k, v = _split(c, convolved[:, None].astype(inputs.mixed.dtype))
    q, k = q[:, 0, :, None, :, None], k[:, 0, :, None, :, None]
    v = v[:, 0, :, :, None, :]
    rows, heads, _, _ = window.shape
    state = memory.state.reshape(rows, heads, -1, *memory.state.shape[2:])
    decay, rate = (x.reshape(rows, heads, -1, 1, 1) for x in (inputs.decay, inputs.rate))
    state = state * jnp.exp(decay)
    known = jnp.sum(state * k, axis=-2, keepdims=True)
    state = state + k * (rate * (v - known))
    out = jnp.sum(state * q, axis=-2).reshape(rows, 1, -1, state.shape[-1])
    return out.astype(inputs.mixed.dtype), Memory(
        state.reshape(memory.state.shape), window[:, :, 1:]
    )


class _Branch(NamedTuple):
    """A row's place in its tree. segment: int32 [B], of the last token. running, prompt: the
    memories after it, and after the prompt of its group."""

    segment: Array
    running: Memory
    prompt: Memory


def scan(
    c: ModelConfig, segment_ids: Array, inputs: Inputs, taps: Array, chunk: int = CHUNK
) -> tuple[Array, Memory]:
    """Run packed rows: the outputs [B, T, H * R, E], and the memory after the last column.

    segment_ids: int32 [B, T], as in attention.visible. taps: [H, F, W].
    """
    rows, length = segment_ids.shape
    padding = -length % chunk
    count = (length + padding) // chunk

    # Padding before the first column, so that the last one ends a chunk: zeros change nothing.
    def in_chunks(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (padding, 0), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(rows, count, chunk, *x.shape[2:]), 1, 0)

    split = c.linear_num_key_heads // inputs.mixed.shape[2]
    nothing = no_memory(c, rows, inputs.mixed.dtype, split)
    start = _Branch(jnp.full(rows, -1, jnp.int32), nothing, nothing)

    # Its backward pass keeps the states between chunks and recomputes the rest.
    @jax.checkpoint
    def advance(branch: _Branch, own: tuple[Array, Inputs]) -> tuple[_Branch, Array]:
        return _run_chunk(c, branch, *own, taps)

    own = jax.tree.map(in_chunks, (segment_ids, inputs))
    end, out = jax.lax.scan(advance, start, own)
    out = jnp.moveaxis(out, 0, 1).reshape(rows, count * chunk, *out.shape[3:])
    return out[:, padding:], end.running


def _run_chunk(
    c: ModelConfig, branch: _Branch, ids: Array, inputs: Inputs, taps: Array
) -> tuple[_Branch, Array]:
    """Run C tokens of each row. ids: int32 [B, C]."""
    rows, length, heads, _ = inputs.mixed.shape
    near = visible(ids, ids)  # [B, C, C], each token's ancestors in the chunk, and itself
    continues = ids == branch.segment[:, None]
    in_group = ids // SEGMENT_STRIDE == branch.segment[:, None] // SEGMENT_STRIDE
    entered = jnp.stack([continues, in_group & ~continues], axis=-1)  # [B, C, 2]: from which state
    convolved, ages, earlier = _convolve(branch, inputs.mixed, near, entered, taps)
    q, k, v = _split(c, convolved)  # [B, C, H, D], [B, C, H, R, E]
    exact = _precision(inputs.mixed.dtype)
    decays, since = _decays(near, inputs)
    rates = jnp.moveaxis(inputs.rate.reshape(rows, length, heads, -1), 1, 3)  # [B, H, R, C]

    # The results of a token's two possible entry states for its key and its query.
    states = jnp.stack([branch.running.state, branch.prompt.state], axis=1)
    states = states.reshape(rows, 2, heads, -1, *states.shape[3:])
    entry = entered.astype(jnp.float32)

    def read(x: Array) -> Array:
        masked = x[:, :, None] * entry[..., None, None]  # [B, C, 2, H, D]
        found = jnp.einsum("btnhd,bnhrde->bhrte", masked, states, precision=exact)
        return found * since[..., None]

    values = jnp.moveaxis(v, 1, 3)  # [B, H, R, C, E]
    written = _written(k, rates, decays, values - read(k))
    scores = jnp.einsum("bthd,bshd->bhts", q, k, precision=exact)[:, :, None] * decays
    out = read(q) + jnp.einsum("bhrts,bhrse->bhrte", scores, written, precision=exact)
    out = jnp.moveaxis(out, 3, 1).reshape(rows, length, -1, out.shape[-1])

    def kept_at(column: Array) -> Memory:
        """Return the memory after a column, int32 [B], of each row."""

        def at(x: Array, axis: int) -> Array:
            place = jnp.expand_dims(column, tuple(range(1, x.ndim)))
            return jnp.take_along_axis(x, place, axis=axis).squeeze(axis)

        came_from = at(entry, 1)[:, :, None, None, None, None]
        state = jnp.sum(states * came_from, axis=1) * at(since, 3)[..., None, None]
        state += jnp.einsum("bhrs,bshd,bhrse->bhrde", at(decays, 3), k, written, precision=exact)
        # Of the tokens up to it those that are less than W - 1 before it.
        wanted = jnp.arange(taps.shape[-1] - 2, -1, -1)
        tail = _pick(at(ages, 1)[:, None] == wanted[None, :, None], earlier)
        return Memory(state.reshape(branch.running.state.shape), jnp.moveaxis(tail, 2, 1))

    column, ends_here = _end_of_prompt(ids)

    def choose(here: Array, before: Array) -> Array:
        return jnp.where(jnp.expand_dims(ends_here, tuple(range(1, here.ndim))), here, before)

    prompt = jax.tree.map(choose, kept_at(column), branch.prompt)
    running = kept_at(jnp.full(rows, length - 1))
    return _Branch(ids[:, -1], running, prompt), out.astype(inputs.mixed.dtype)


def _end_of_prompt(ids: Array) -> tuple[Array, Array]:
    """Return the column of the last token of the last group's prompt, int32 [B], and whether it is
    in this chunk, bool [B], or the prompt ended earlier."""
    is_prompt = ids == (ids[:, -1:] // SEGMENT_STRIDE * SEGMENT_STRIDE)
    column = ids.shape[1] - 1 - jnp.argmax(is_prompt[:, ::-1], axis=1)
    return column, is_prompt.any(axis=1)


def _written(k: Array, rates: Array, decays: Array, missed: Array) -> Array:
    """Solve the triangular system for each token's write, less the changes by its ancestors in the
    chunk, [B, H, R, C, E]. missed: values less the results of the entry states."""
    alike = jnp.einsum("bthd,bshd->bhts", k, k, precision="highest")[:, :, None]
    own = jnp.eye(k.shape[1])[None, None, None]
    system = rates[..., None] * decays * alike * (1 - own)
    return jax.lax.linalg.triangular_solve(
        system + own, rates[..., None] * missed, left_side=True, lower=True, unit_diagonal=True
    )


def _decays(near: Array, inputs: Inputs) -> tuple[Array, Array]:
    """Return the share left at t of the write at s, [B, H, R, C, C], and of the state when the
    chunk, or the segment, began, [B, H, R, C]. near: bool [B, C, C], see `_run_chunk`."""
    rows, length, heads, _ = inputs.mixed.shape
    # The logarithm of the former is a sum over the tokens between them: the difference of two sums
    # from the beginning would have their larger rounding.
    is_near = near.astype(jnp.float32)
    is_before = is_near * (1 - jnp.eye(length)[None])
    spent = is_near[:, None] * jnp.moveaxis(inputs.decay, 1, 2)[:, :, None]  # [B, H * R, C, C]
    left = spent.sum(axis=-1).reshape(rows, heads, -1, length)
    between = jnp.einsum("bhtr,brs->bhts", spent, is_before, precision="highest")
    between = between.reshape(*left.shape, length)
    decays = jnp.exp(jnp.where(near[:, None, None], between, LOWEST))
    return decays, jnp.exp(left)


def _convolve(
    branch: _Branch, mixed: Array, near: Array, entered: Array, taps: Array
) -> tuple[Array, Array, Array]:
    """Convolve each token with its last ancestors: [B, C, H, F].

    Also returns how many tokens each of `earlier` is before each token, int32 [B, C, S], -1 if it
    is not an ancestor; and `earlier` [B, S, H, F], the two tails and the chunk.
    """
    reach = taps.shape[-1] - 1
    tails = [jnp.moveaxis(memory.tail, 1, 2) for memory in (branch.running, branch.prompt)]
    earlier = jnp.concatenate([*tails, mixed], axis=1)
    count = jnp.cumsum(near[..., ::-1], axis=-1)[..., ::-1]
    inside = jnp.where(near, count - 1, -1)
    steps = jnp.arange(reach - 1, -1, -1)[None, None]
    before = near.sum(axis=-1)[..., None] + steps  # [B, C, W - 1]
    outside = [jnp.where(entered[..., n, None], before, -1) for n in range(2)]
    ages = jnp.concatenate([*outside, inside], axis=-1)
    factors = taps.astype(jnp.float32)[None, None]
    summed = mixed.astype(jnp.float32) * factors[..., -1]
    for age in range(1, reach + 1):
        # A product with zeros and ones instead of a gather, whose gradient would scatter.
        summed += _pick(ages == age, earlier).astype(jnp.float32) * factors[..., -1 - age]
    return summed.astype(mixed.dtype), ages, earlier


def _pick(wanted: Array, earlier: Array) -> Array:
    """Return the wanted one of `earlier` [B, S, H, F], by wanted bool [B, N, S], or zeros: [B, N, H,
    F]."""
    return jnp.einsum("bns,bshf->bnhf", wanted.astype(earlier.dtype), earlier, precision="highest")


def _split(c: ModelConfig, convolved: Array) -> tuple[Array, Array, Array]:
    """Split the convolved inputs into queries and keys [B, T, H, D] of length 1 and 1 / sqrt(D), and
    values [B, T, H, R, E], float32."""
    size, value_size = c.linear_key_head_dim, c.linear_value_head_dim
    active = jax.nn.silu(convolved.astype(jnp.float32))
    q, k, v = jnp.split(active, [size, 2 * size], axis=-1)
    q, k = (x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + EPSILON) for x in (q, k))
    return q * size**-0.5, k, v.reshape(*v.shape[:-1], -1, value_size)


def _precision(dtype: jnp.dtype) -> str:
    """Return the precision of products of float32 numbers in a model that computes in dtype: no
    better than its own."""
    return "highest" if dtype == jnp.float32 else "default"
