"""The sampler's three jitted programs: prefill, admit, decode.

Shapes: S rows (slots), W cache columns, P prompt columns, N prompts of one prefill, C decode steps of one chunk,
K stop ids, L layers, E hidden_size, H key/value heads, D head_dim.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from g2d_jax import mesh as meshes
from g2d_jax.models.config import ModelConfig
from g2d_jax.models.decoder import Cache, Decoder, forward, head_matrix
from g2d_jax.models.kernels import Setting, attention_for
from g2d_jax.records import MEMBERS
from g2d_jax.rollout.sampling import draw

Array = TypeVar("Array", jax.Array, np.ndarray)
"""Where a record lies: on the device or on the host."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("keys", "position", "left", "temperature", "top_k", "top_p", "stop_ids", "response"),
    meta_fields=(),
)
@dataclass(frozen=True)
class Rows(Generic[Array]):
    """What the sampler knows of each row, besides its cache: numpy arrays where the host fills them in.

    keys: uint32 [S, 2] key data of the sample. position: int32 [S], of the next token in the whole sequence.
    response: int32 [S], tokens generated so far; left: int32 [S], how many more may come, 0 for a row at rest.
    temperature, top_p: float32 [S]. top_k: int32 [S]. stop_ids: int32 [S, K], filled up with -1.
    """

    keys: Array
    position: Array
    left: Array
    temperature: Array
    top_k: Array
    top_p: Array
    stop_ids: Array
    response: Array


@partial(jax.tree_util.register_dataclass, data_fields=("rows", "cache", "hidden"), meta_fields=())
@dataclass(frozen=True)
class State:
    """The device state between chunks. hidden: [S, E], from which each row's next token is drawn."""

    rows: Rows[jax.Array]
    cache: Cache
    hidden: jax.Array


@partial(jax.tree_util.register_dataclass, data_fields=("keys", "values", "hidden"), meta_fields=())
@dataclass(frozen=True)
class Prefilled:
    """Prompts run through the model once, right-aligned: keys [L, N, H, D, P], values [L, N, H, P, D], as in the cache.

    hidden: [N, E], of the last token.
    """

    keys: jax.Array
    values: jax.Array
    hidden: jax.Array


class Emitted(NamedTuple, Generic[Array]):
    """What a chunk produced. tokens, logprobs, entropies: [S, C], of which the first counts [S] are the row's.

    stopped: bool [S], a stop token was drawn.
    """

    tokens: Array
    logprobs: Array
    entropies: Array
    counts: Array
    stopped: Array


def constrain(mesh: Mesh, x: jax.Array, *axes: str | None) -> jax.Array:
    """Lay x out by its logical axes."""
    padded = (*axes, *(None,) * (x.ndim - len(axes)))
    return jax.lax.with_sharding_constraint(x, meshes.sharding(mesh, padded, x.shape))


def empty_state(config: ModelConfig, slots: int, width: int, stops: int, dtype: jnp.dtype) -> State:
    """All rows at rest. Zeros, not uninitialised memory: 0 * NaN would reach the attention's sum."""
    heads, dim, layers = config.num_key_value_heads, config.head_dim, range(config.num_hidden_layers)

    def integers() -> jax.Array:  # each its own buffer: the state is donated
        return jnp.zeros(slots, jnp.int32)

    rows = Rows(
        keys=jnp.zeros((slots, 2), jnp.uint32),
        position=integers(),
        left=integers(),
        temperature=jnp.ones(slots, jnp.float32),
        top_k=integers(),
        top_p=jnp.ones(slots, jnp.float32),
        stop_ids=jnp.full((slots, stops), -1, jnp.int32),
        response=integers(),
    )
    cache = Cache(
        keys=tuple(jnp.zeros((slots, heads, dim, width), dtype) for _ in layers),
        values=tuple(jnp.zeros((slots, heads, width, dim), dtype) for _ in layers),
        column=jnp.int32(0),
        start=integers(),
    )
    return State(rows, cache, jnp.zeros((slots, config.hidden_size), dtype))


def prefill(
    view: Decoder,
    tokens: jax.Array,
    lengths: jax.Array,
    *,
    mesh: Mesh,
    dtype: jnp.dtype,
    attention: Setting = "auto",
) -> Prefilled:
    """Run prompts, int32 [N, P] right-aligned with lengths int32 [N], through the model."""
    tokens = constrain(mesh, tokens, "rows")
    offsets = jnp.arange(tokens.shape[1])[None, :] - (tokens.shape[1] - lengths)[:, None]
    segments = jnp.where(offsets >= 0, MEMBERS, 0).astype(jnp.int32)
    positions = jnp.maximum(offsets, 0).astype(jnp.int32)
    kernel = attention_for(attention, mesh, "sequence")
    hidden, kv = forward(view, tokens, positions, segments, dtype=dtype, keep_kv=True, attention=kernel, mesh=mesh)
    assert isinstance(kv, tuple)
    keys, values = kv[0].transpose(0, 1, 3, 4, 2), kv[1].transpose(0, 1, 3, 2, 4)
    keys, values = (constrain(mesh, x, "layers", "rows", "kv_heads") for x in (keys, values))
    return Prefilled(keys, values, hidden[:, -1])


def admit(
    state: State,
    prefilled: Prefilled,
    order: jax.Array,
    source: jax.Array,
    fresh: Rows[jax.Array],
    column: jax.Array,
    *,
    width: int,
    mesh: Mesh,
) -> State:
    """Rearrange the rows and fill some of them from prefilled prompts.

    order: int32 [S'], which old row goes on in each new row. source: int32 [S'], the prefilled prompt that fills the
    row instead, or -1. fresh: host facts of the filled rows. Every row's newest key lands in column - 1 of W' = width.
    """
    shift = column - state.cache.column
    filled = source >= 0

    def move(old: jax.Array, new: jax.Array, axis: int) -> jax.Array:
        shape = list(old.shape)
        shape[0], shape[axis] = order.shape[0], width
        edge = jnp.zeros(shape, old.dtype)
        wide = jnp.concatenate([edge, old[order], edge], axis=axis)
        moved = jax.lax.dynamic_slice_in_dim(wide, width - shift, width, axis=axis)
        placed = jax.lax.dynamic_update_slice_in_dim(edge, new[source], column - new.shape[axis], axis=axis)
        return constrain(mesh, jnp.where(filled[:, None, None, None], placed, moved), "rows", "kv_heads")

    rows = jax.tree.map(
        lambda new, old: constrain(
            mesh, jnp.where(filled.reshape(-1, *(1,) * (new.ndim - 1)), new, old[order]), "rows"
        ),
        fresh,
        state.rows,
    )
    # A layer waits for the one before it: side by side they would all hold the rows of other devices at once.
    keys: list[jax.Array] = []
    values: list[jax.Array] = []
    for i, layer in enumerate(zip(state.cache.keys, state.cache.values, strict=True)):
        if i:
            layer, (keys[-1], values[-1]) = jax.lax.optimization_barrier((layer, (keys[-1], values[-1])))
        keys.append(move(layer[0], prefilled.keys[i], 3))
        values.append(move(layer[1], prefilled.values[i], 2))
    cache = Cache(
        keys=tuple(keys),
        values=tuple(values),
        column=column,
        start=jnp.where(filled, column - fresh.position, state.cache.start[order] + shift),
    )
    hidden = jnp.where(filled[:, None], prefilled.hidden[source], state.hidden[order])
    return State(rows, cache, constrain(mesh, hidden, "rows"))


def decode(
    view: Decoder, state: State, *, chunk: int, filtered: bool, mesh: Mesh, dtype: jnp.dtype
) -> tuple[State, Emitted[jax.Array]]:
    """Up to `chunk` steps for every row that has tokens left; ends early when none has."""
    slots = state.hidden.shape[0]
    head = head_matrix(view, dtype)
    floats = jnp.zeros((slots, chunk), jnp.float32)
    emitted = Emitted(
        floats.astype(jnp.int32), floats, floats, jnp.zeros(slots, jnp.int32), jnp.zeros(slots, jnp.bool_)
    )

    def running(carry: tuple[jax.Array, State, Emitted[jax.Array]]) -> jax.Array:
        step, state, _ = carry
        return (step < chunk) & jnp.any(state.rows.left > 0)

    def advance(carry: tuple[jax.Array, State, Emitted[jax.Array]]) -> tuple[jax.Array, State, Emitted[jax.Array]]:
        step, state, emitted = carry
        rows, active = state.rows, state.rows.left > 0
        # Each device multiplies its words, and draws for its rows from all words.
        logits = jnp.matmul(state.hidden, head, preferred_element_type=jnp.float32)
        logits = constrain(mesh, constrain(mesh, logits, "rows", "vocab"), "all_rows")
        drawn = draw(logits, rows.keys, rows.response, rows.temperature, rows.top_k, rows.top_p, filtered=filtered)
        stopped = active & jnp.any(drawn.token[:, None] == rows.stop_ids, axis=-1)
        one = active.astype(jnp.int32)

        def write(buffer: jax.Array, value: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(buffer, value[:, None], step, axis=1)

        emitted = Emitted(
            write(emitted.tokens, drawn.token),
            write(emitted.logprobs, drawn.logprob),
            write(emitted.entropies, drawn.entropy),
            emitted.counts + one,
            emitted.stopped | stopped,
        )
        token, position = drawn.token[:, None], rows.position[:, None]
        segments = jnp.full_like(token, MEMBERS)
        hidden, cache = forward(view, token, position, segments, state.cache, dtype=dtype, mesh=mesh)
        rows = dataclasses.replace(
            rows,
            position=rows.position + one,
            response=rows.response + one,
            left=jnp.where(stopped, 0, rows.left - one),
        )
        assert isinstance(cache, Cache)
        return step + 1, State(rows, cache, constrain(mesh, hidden[:, 0], "rows")), emitted

    _, state, emitted = jax.lax.while_loop(running, advance, (jnp.int32(0), state, emitted))
    return state, emitted
