"""The sampler's jitted programs over the whole mesh: prefill, insert and decode.

Shapes: S rows, W cache columns, N prompts that are prefilled together, P prompt columns, C decode
steps of one chunk, K stop ids, L layers, E hidden_size, H key/value heads, D head_dim. Keys and
values are one array per layer, or one array of all layers with L first: see decode.Cache.

Rows and prompts are split over data and fsdp. A prompt is on the devices that decode its samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from g2d_jax.models.attention import KEY_COLUMNS, VALUE_COLUMNS
from g2d_jax.models.config import ModelConfig
from g2d_jax.models.decode import Cache, decode
from g2d_jax.models.decoder import Decoder, forward, head_matrix, lay_out
from g2d_jax.models.delta import Memory, no_memory
from g2d_jax.models.kernels import AttentionSetting, DecodeKernel, attention_for, platform_of
from g2d_jax.records import SEGMENT_STRIDE
from g2d_jax.runtime import mesh as meshes
from g2d_jax.runtime.matmul import products_on
from g2d_jax.sampler.sampling import Draw, Filter, draw

Held = TypeVar("Held", Array, np.ndarray)
"""The type of a record's arrays: on the device or on the host."""

Tree = TypeVar("Tree")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows(Generic[Held]):
    """The state of each row besides its cache; NumPy arrays while the host fills them in.

    random_keys: uint32 [S, 2], the sample's key data. position: int32 [S], of the next token in the
    whole sequence. generated: int32 [S], tokens so far. remaining: int32 [S], most tokens to come,
    0 for a row at rest. temperature, top_p: float32 [S]. top_k: int32 [S]. stop_ids: int32 [S, K],
    padded with -1.
    """

    random_keys: Held
    position: Held
    remaining: Held
    temperature: Held
    top_k: Held
    top_p: Held
    stop_ids: Held
    generated: Held

    @classmethod
    def at_rest(cls, rows: int, stops: int) -> Rows[np.ndarray]:
        """Return rows without a sample."""
        position, remaining, top_k, generated = np.zeros((4, rows), np.int32)
        temperature, top_p = np.ones((2, rows), np.float32)
        random_keys = np.zeros((rows, 2), np.uint32)
        stop_ids = np.full((rows, stops), -1, np.int32)
        return Rows(
            random_keys, position, remaining, temperature, top_k, top_p, stop_ids, generated
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """The device state between chunks. hidden: [S, E], the input of each row's next logits."""

    rows: Rows[Array]
    cache: Cache
    hidden: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Prompts:
    """Prefilled prompts, right-aligned: keys [N, H, D, P], values [N, H, P, D] and memories, as in
    the cache.

    hidden: [N, E], of the last token.
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    hidden: Array
    memories: tuple[Memory, ...] = ()


class Emitted(NamedTuple):
    """The output of a chunk. tokens, logprobs, entropies: [S, C]; the first `counts` [S] of a row
    are valid.

    stopped: bool [S], a stop token was sampled. interrupt_code: int32 scalar, the largest of all
    processes. counts, stopped and interrupt_code are on every device.
    """

    tokens: Array
    logprobs: Array
    entropies: Array
    counts: Array
    stopped: Array
    interrupt_code: Array


@dataclass(frozen=True)
class Shapes:
    """The shapes that the programs are compiled for.

    rows: S. prompts: N. columns: of a prefill, ascending; the last is P. width: W. stops: K.
    filters: those that any row uses. tail: rows that decode at a call's end, once few samples are
    left; 0: all.
    """

    rows: int
    prompts: int
    columns: tuple[int, ...]
    width: int
    stops: int
    filters: tuple[Filter, ...]
    tail: int = 0


ROWS = -4
"""The axis of the rows in keys, values and memories. Negative, since the arrays may begin with the
layers."""


def logical_axes(array: Any) -> tuple[str | None, ...]:
    """Return the logical axes of an array: keys, values or a memory, an array with a line for each
    row, or a number."""
    if array.ndim >= 4:
        return (*(None,) * (array.ndim - 4), "rows", "kv_heads", None, None)
    if not array.ndim:
        return ()
    return ("rows", *(None,) * (array.ndim - 1))


def lay_out_tree(tree: Tree, place: Callable[..., Any]) -> Tree:
    """Apply place(array, *logical axes) to every array of a State or of Prompts."""
    return jax.tree.map(lambda x: place(x, *logical_axes(x)), tree)


def empty(
    config: ModelConfig,
    shapes: Shapes,
    *,
    stacked: bool,
    dtype: jnp.dtype,
    cache_dtype: jnp.dtype,
) -> tuple[State, Prompts]:
    """Create a state with all rows at rest, and empty prompts.

    Arrays are zeros, not uninitialised memory: 0 * NaN would reach the attention's sum.
    """
    layers = len(config.layers(recurrent=False))
    heads, dim = config.num_key_value_heads, config.head_dim
    width = shapes.width
    columns = shapes.columns[-1]

    def zeros(*shape: int) -> tuple[Array, ...]:
        if stacked:
            shape = (layers, *shape)
        # Each has its own buffer, since they are donated.
        return tuple(jnp.zeros(shape, cache_dtype) for _ in range(1 if stacked else layers))

    def memories(rows: int) -> tuple[Memory, ...]:
        count = len(config.layers(recurrent=True))
        if not stacked:
            return tuple(no_memory(config, rows, cache_dtype) for _ in range(count))
        if not count:
            return ()
        one = jax.eval_shape(partial(no_memory, config, rows, cache_dtype))
        return (jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), one),)

    cache = Cache(
        keys=zeros(shapes.rows, heads, dim, width),
        values=zeros(shapes.rows, heads, width, dim),
        column=jnp.int32(0),
        memories=memories(shapes.rows),
    )
    rows = jax.tree.map(jnp.array, Rows.at_rest(shapes.rows, shapes.stops))
    state = State(rows, cache, jnp.zeros((shapes.rows, config.hidden_size), dtype))
    prompts = Prompts(
        keys=zeros(shapes.prompts, heads, dim, columns),
        values=zeros(shapes.prompts, heads, columns, dim),
        hidden=jnp.zeros((shapes.prompts, config.hidden_size), dtype),
        memories=memories(shapes.prompts),
    )
    return state, prompts


def prefill(
    params: Decoder,
    prompts: Prompts,
    tokens: Array,
    lengths: Array,
    fresh: Array,
    *,
    mesh: Mesh,
    dtype: jnp.dtype,
    attention: AttentionSetting = "auto",
) -> Prompts:
    """Prefill prompts; those that are `fresh`, bool [N], replace the previous ones.

    tokens: int32 [N, P' <= P], right-aligned, with lengths int32 [N].
    """
    place = partial(lay_out, mesh)
    columns = tokens.shape[1]
    # Prompts end in the last column. Their tokens count from 0; earlier columns are padding.
    offsets = jnp.arange(columns)[None, :] - (columns - lengths)[:, None]
    segments = jnp.where(offsets >= 0, SEGMENT_STRIDE, 0).astype(jnp.int32)
    positions = jnp.maximum(offsets, 0).astype(jnp.int32)
    kernel = attention_for(attention, mesh, "sequence")
    hidden, kept = forward(
        params,
        tokens,
        positions,
        segments,
        dtype=dtype,
        keep_kv=True,
        attention=kernel,
        mesh=mesh,
    )
    assert kept is not None
    keys, values, memories = (_by_layer(params, part) for part in kept)

    def choose(new: Array, old: Array) -> Array:
        is_fresh = fresh.reshape((1,) * (new.ndim - 4) + (-1, 1, 1, 1))
        return jnp.where(is_fresh, place(new, *logical_axes(new)), old)

    def put(order: tuple[int, ...], axis: int, old: Array, new: Array) -> Array:
        new = jnp.moveaxis(new, (-4, -3, -2, -1), order)  # from [N, P', H, D]
        padding = [(0, 0)] * new.ndim
        padding[axis] = (old.shape[axis] - columns, 0)
        return choose(jnp.pad(new.astype(old.dtype), padding), old)

    return Prompts(
        keys=tuple(map(partial(put, (-4, -1, -3, -2), KEY_COLUMNS), prompts.keys, keys)),
        values=tuple(map(partial(put, (-4, -2, -3, -1), VALUE_COLUMNS), prompts.values, values)),
        hidden=jnp.where(fresh[:, None], hidden[:, -1], prompts.hidden),
        memories=jax.tree.map(choose, memories, prompts.memories),
    )


def _by_layer(params: Decoder, kept: Any) -> tuple[Any, ...]:
    """Convert the arrays that `forward` keeps to the cache's layout: one per layer, or one of all
    layers; () for None."""
    if kept is None:
        return ()
    if not isinstance(params.blocks, nnx.List):
        return (kept,)
    count = len(jax.tree.leaves(kept)[0])
    return tuple(jax.tree.map(lambda x, at=at: x[at], kept) for at in range(count))


def insert(
    state: State,
    prompts: Prompts,
    fresh: Rows[Array],
    order: Array,
    places: Array,
    counts: Array,
    *,
    mesh: Mesh,
) -> State:
    """Begin samples in some rows after prefilled prompts, without communication; other rows keep
    their samples.

    order: int32 [S], in each device's part its rows that begin, of which the first `counts` [ways]
    are valid. places: int32 [S], the prompt of each, also within the part. fresh: settings of the
    rows that begin, at their row.
    """
    rows = meshes.spec(mesh, ("rows",), order.shape)
    specs: Any = jax.tree.map(
        lambda x: meshes.spec(mesh, logical_axes(x), x.shape), (state.cache, state.hidden, prompts)
    )

    # Devices loop over their own rows that begin, so the number of rounds differs: XLA could not
    # split this loop itself.
    def begin(
        cache: Cache,
        hidden: Array,
        prompts: Prompts,
        order: Array,
        places: Array,
        counts: Array,
    ) -> Any:
        def begin_row(number: Array, carry: Any) -> Any:
            keys, values, memories, hidden, begun = carry
            row = order[number]
            place = places[number]
            write = partial(_write, row=row, place=place, column=cache.column)
            return (
                tuple(map(partial(write, axis=KEY_COLUMNS), keys, prompts.keys)),
                tuple(map(partial(write, axis=VALUE_COLUMNS), values, prompts.values)),
                jax.tree.map(partial(_copy_row, row, place), memories, prompts.memories),
                jax.lax.dynamic_update_index_in_dim(hidden, prompts.hidden[place], row, 0),
                begun.at[row].set(True),
            )

        begun = jnp.zeros(order.shape, jnp.bool_)
        start = cache.keys, cache.values, cache.memories, hidden, begun
        return jax.lax.fori_loop(0, counts[0], begin_row, start)

    run = jax.shard_map(
        begin,
        mesh=mesh,
        in_specs=(*specs, rows, rows, rows),
        out_specs=(specs[0].keys, specs[0].values, specs[0].memories, specs[1], rows),
        check_vma=False,
    )
    began = run(state.cache, state.hidden, prompts, order, places, counts)
    keys, values, memories, hidden, begun = began

    def changed(new: Array, old: Array) -> Array:
        return jnp.where(begun.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

    cache = dataclasses.replace(state.cache, keys=keys, values=values, memories=memories)
    return State(jax.tree.map(changed, fresh, state.rows), cache, hidden)


def _copy_row(row: Array, place: Array, array: Array, source: Array) -> Array:
    """Copy a prompt's entry into a row."""
    entry = jax.lax.dynamic_slice_in_dim(source, place, 1, axis=ROWS)
    return jax.lax.dynamic_update_slice_in_dim(array, entry, row, axis=ROWS)


def _write(
    array: Array,
    source: Array,
    row: Array,
    place: Array,
    column: Array,
    axis: int,
) -> Array:
    """Fill a row of keys or values with the prompt at `place`, so that its last token is just
    before `column`.

    column: the next to be written. axis: of the columns.
    """
    # The columns are a ring: all rows write their next token into `column`, then the one after it,
    # and column 0 follows the last. A row that begins now has its prompt just before `column`; if
    # there are too few columns, the prompt's beginning is at the end of the ring.
    width = array.shape[axis]
    size = source.shape[axis]
    prompt = jax.lax.dynamic_slice_in_dim(source, place, 1, axis=ROWS)
    start = (column - size) % width
    # Shapes are static and `start` is known only on the device, so the prompt is written in one
    # piece into zeros longer than the ring. The part beyond the ring is added to its beginning,
    # where the line has zeros. The line replaces the whole row, including the previous response.
    shape = list(array.shape)
    shape[ROWS] = 1
    shape[axis] += size
    zeros = jnp.zeros(shape, array.dtype)
    line = jax.lax.dynamic_update_slice_in_dim(zeros, prompt, start, axis=axis)
    beyond = jax.lax.dynamic_slice_in_dim(line, width, size, axis=axis)
    line = jax.lax.slice_in_dim(line, 0, array.shape[axis], axis=axis)
    head = jax.lax.slice_in_dim(line, 0, size, axis=axis)
    line = jax.lax.dynamic_update_slice_in_dim(line, head + beyond, 0, axis=axis)
    return jax.lax.dynamic_update_slice_in_dim(array, line, row, axis=ROWS)


def take_rows(state: State, order: Array) -> State:
    """Keep some rows, int32 [fewer than S], in this order."""

    def take(x: Array) -> Array:
        axes = logical_axes(x)
        return jnp.take(x, order, axis=axes.index("rows")) if axes else x

    return jax.tree.map(take, state)


def retire(state: State, ended: Array) -> State:
    """Put rows to rest. ended: bool [S], the rows whose response the host found complete."""
    rows = dataclasses.replace(state.rows, remaining=jnp.where(ended, 0, state.rows.remaining))
    return dataclasses.replace(state, rows=rows)


def may_branch(mesh: Mesh) -> bool:
    """Return whether a decode step may have data-dependent control flow. On GPUs it costs time: XLA
    copies the condition to the host, and the device idles until the next launches."""
    return platform_of(mesh) not in ("gpu", "cuda")


def decode_chunk(
    params: Decoder,
    state: State,
    interrupt_codes: Array,
    *,
    chunk: int,
    filters: tuple[Filter, ...],
    mesh: Mesh,
    dtype: jnp.dtype,
    kernel: DecodeKernel = "xla",
    branches: bool = True,
) -> tuple[State, Emitted]:
    """Run `chunk` decode steps on every row that has tokens left; with `branches`, end when none
    has.

    interrupt_codes: int32 [devices], 0 or a reason to stop (`processes.stop_code`); their maximum
    reaches all processes. branches: whether control flow may depend on data, see `may_branch`.
    """
    place = partial(lay_out, mesh)
    multiply, by_rows = products_on(mesh)
    head = by_rows(head_matrix(params, dtype))
    step_of = partial(decode, dtype=dtype, mesh=mesh, kernel=kernel)
    emitted = _nothing_emitted(state.hidden.shape[0], chunk, jnp.max(interrupt_codes), place)

    def running(carry: tuple[Array, tuple[State, Emitted]]) -> Array:
        step, (state, _) = carry
        return (step < chunk) & jnp.any(state.rows.remaining > 0)

    def advance(step: Array, carry: tuple[State, Emitted]) -> tuple[State, Emitted]:
        state, emitted = carry
        rows = state.rows
        active = rows.remaining > 0
        drawn = _draw_next(state, head, multiply, mesh, filters, branches)
        stopped = active & jnp.any(drawn.token[:, None] == rows.stop_ids, axis=-1)
        increment = active.astype(jnp.int32)
        emitted = _add_column(emitted, drawn, step, increment, stopped, place)
        # -1: the cache of a row at rest is not read.
        position = jnp.where(active, rows.position, -1)
        hidden, cache = step_of(params, drawn.token, position, state.cache)
        remaining = jnp.where(stopped, 0, rows.remaining - increment)
        rows = dataclasses.replace(
            rows,
            position=rows.position + increment,
            generated=rows.generated + increment,
            remaining=remaining,
        )
        return lay_out_tree(State(rows, cache, hidden), place), emitted

    start = state, emitted
    if branches:
        _, (state, emitted) = jax.lax.while_loop(
            running, lambda carry: (carry[0] + 1, advance(*carry)), (jnp.int32(0), start)
        )
    else:
        state, emitted = jax.lax.fori_loop(0, chunk, advance, start)
    return state, emitted


def _nothing_emitted(rows: int, chunk: int, code: Array, place: Callable[..., Array]) -> Emitted:
    """Return a chunk's empty output. code: the reason to stop, 0 for none."""
    floats = place(jnp.zeros((rows, chunk), jnp.float32), "rows", None)
    nothing = place(jnp.zeros(rows, jnp.int32), "rows")
    return Emitted(floats.astype(jnp.int32), floats, floats, nothing, nothing > 0, code)


def _draw_next(
    state: State,
    head: Array,
    multiply: Callable[..., Array],
    mesh: Mesh,
    filters: tuple[Filter, ...],
    branches: bool,
) -> Draw:
    """Sample each row's next token from the hidden state of its last one."""
    # Each device computes logits of its words for many rows, then samples its rows from all words.
    logits = _logits(state.hidden, head, multiply, mesh)
    logits = lay_out(mesh, logits, "all_rows", None)
    rows = state.rows
    settings = rows.random_keys, rows.generated, rows.temperature, rows.top_k, rows.top_p
    return draw(logits, *settings, filters=filters, branches=branches)


def _logits(hidden: Array, head: Array, multiply: Callable[..., Array], mesh: Mesh) -> Array:
    """Compute the logits, float32 [S, V], of hidden [S, E] and the head [E, V]: split by rows over
    data and fsdp, and by words over tensor."""
    by_width = meshes.spec(mesh, ("replica_rows", "embed"), hidden.shape)
    words = meshes.spec(mesh, ("embed", "vocab"), head.shape)
    split = meshes.spec(mesh, ("rows", "vocab"), (hidden.shape[0], head.shape[1]))
    product = partial(multiply, preferred_element_type=jnp.float32)
    if by_width[1] is None or split[0] is None:
        logits = product(lay_out(mesh, hidden, "replica_rows", "embed"), head)
        return lay_out(mesh, logits, "rows", "vocab")

    # Each device of fsdp has a summand for all of their rows. XLA on TPU would sum all rows on each
    # device, which sends twice the bytes, and then keep its own.
    def summed(hidden: Array, head: Array) -> Array:
        return jax.lax.psum_scatter(product(hidden, head), "fsdp", scatter_dimension=0, tiled=True)

    run = jax.shard_map(
        summed, mesh=mesh, in_specs=(by_width, words), out_specs=split, check_vma=False
    )
    return run(hidden, head)


def _add_column(
    emitted: Emitted,
    drawn: Draw,
    step: Array,
    increment: Array,
    stopped: Array,
    place: Callable[..., Array],
) -> Emitted:
    """Write a step's tokens into its column, and count those of active rows."""

    def write(buffer: Array, value: Array) -> Array:
        column = place(value[:, None], "rows", None)
        return jax.lax.dynamic_update_slice_in_dim(buffer, column, step, axis=1)

    return emitted._replace(
        tokens=write(emitted.tokens, drawn.token),
        logprobs=write(emitted.logprobs, drawn.logprob),
        entropies=write(emitted.entropies, drawn.entropy),
        counts=emitted.counts + increment,
        stopped=emitted.stopped | stopped,
    )
