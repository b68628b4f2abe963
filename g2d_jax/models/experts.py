"""Mixtures of experts (Shazeer et al. 2017, arXiv:1701.06538), as in Qwen3-MoE: a router sends each
token to its k best experts, gated feed-forward layers. Their outputs are added up, weighted by the
router's shares.

No expert has a capacity, and no token is dropped. Whole experts are split over the mesh's axis
tensor. Between layers each of its devices has the same tokens: it selects those of its experts,
sorts them by expert, and the outputs of the devices are added up. Tokens are not sent between
devices.

Products of tokens in groups, each with the matrix of its expert, have two implementations:
- ragged: `jax.lax.ragged_dot`, on TPUs, where XLA has a kernel for it. Elsewhere it multiplies all
  tokens with all experts, and copies the tokens for each of them.
- blocks: a loop over blocks of a group's tokens, on CPUs and GPUs. It computes whole blocks.

Shapes: B rows, T tokens of a row, R = B * T, k experts a token, N = R * k, X experts, G those on a
device, E hidden_size, M moe_intermediate_size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from g2d_jax.models.config import ModelConfig
from g2d_jax.models.kernels import platform_of
from g2d_jax.runtime import mesh as meshes

BLOCKS = (16, 512)
"""The fewest and the most tokens of a block."""

TILES = (512, 256, 128)
"""Rows that the TPU's kernel processes at once: the first that divides them."""

COLUMNS = (1024, 768)
"""Columns of a tile of its two operands in bfloat16; half as many in float32."""


class Routes(NamedTuple):
    """The destinations of tokens. experts: int32 [B, T, k]. weights: float32 [B, T, k], of their
    outputs."""

    experts: Array
    weights: Array


class Stacks(NamedTuple):
    """The matrices of a layer's experts. gate, up: [X, E, M]. down: [X, M, E]."""

    gate: Array
    up: Array
    down: Array


Mixture = Callable[[Array, Routes, Stacks], Array]
"""`mix` that still needs x [B, T, E], routes and matrices: returns the experts' sum, [B, T, E]."""


def choose(c: ModelConfig, router: Array, x: Array) -> Routes:
    """Choose each token's experts, in float32 for any type of x: rounded numbers would often rank
    experts differently. x: [B, T, E]. router: [E, X]."""
    wide = x.astype(jnp.float32)
    logits = jnp.einsum("bte,ex->btx", wide, router.astype(jnp.float32), precision="highest")
    shares = jax.nn.softmax(logits, axis=-1)
    weights, experts = jax.lax.top_k(shares, c.num_experts_per_tok)
    if c.norm_topk_prob:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return Routes(experts, weights)


def on_devices(mesh: Mesh | None, *, split_width: bool = False) -> Mixture:
    """Return `mix`, each device running its rows and experts: XLA cannot split it by itself.

    split_width: x's width is split over fsdp, as in decode: each device has a summand of the first
    matrices' products, and weights stay in place. Otherwise the rows are split, and weights are
    gathered.
    """
    if mesh is None:
        return partial(mix, platform="cpu")
    axes = ("replica_rows", None, "embed") if split_width else ("rows", None, None)

    def run(x: Array, routes: Routes, stacks: Stacks) -> Array:
        of_tokens = meshes.spec(mesh, axes, x.shape)
        of_stacks: Any = [
            meshes.spec(mesh, order, stack.shape)
            for order, stack in zip(_AXES, stacks, strict=True)
        ]
        experts, width, _ = of_stacks[0]

        def own(x: Array, routes: Routes, stacks: Stacks) -> Array:
            first: Array | int = 0
            summed = None
            if experts:
                first = jax.lax.axis_index(experts) * stacks.gate.shape[0]
            if width and split_width:
                summed = partial(jax.lax.psum, axis_name=width)
            elif width:
                gather = partial(jax.lax.all_gather, axis_name=width, tiled=True)
                gate, up, down = stacks
                stacks = Stacks(gather(gate, axis=1), gather(up, axis=1), gather(down, axis=2))
            found = mix(x, routes, stacks, first, summed, platform=platform_of(mesh))
            return found[None] if experts else found

        # The backward pass gathers again, under any remat policy.
        run_own = jax.checkpoint(own) if width and not split_width else own
        # The sum over devices is XLA's, whose gradient sends nothing.
        each = jax.shard_map(
            run_own,
            mesh=mesh,
            in_specs=(of_tokens, PartitionSpec(of_tokens[0]), Stacks(*of_stacks)),
            out_specs=PartitionSpec(experts, *of_tokens) if experts else of_tokens,
            check_vma=False,
        )
        found = each(x, routes, stacks)
        return found.sum(axis=0) if experts else found

    return run


_AXES = (
    ("experts", "embed", "expert_mlp"),
    ("experts", "embed", "expert_mlp"),
    ("experts", "expert_mlp", "embed"),
)


def mix(
    x: Array,
    routes: Routes,
    stacks: Stacks,
    first: Array | int = 0,
    summed: Callable[[Array], Array] | None = None,
    *,
    platform: str,
) -> Array:
    """Compute the sum of one device's experts: [B, T, E] of x.

    stacks: of G experts, the first of which has the number `first`. summed: adds up the devices'
    parts of a product, if each has a part of the width.
    """
    tokens, per_token = x.shape[0] * x.shape[1], routes.experts.shape[-1]
    rows = x.reshape(tokens, -1)
    experts = routes.experts.reshape(tokens, per_token) - first
    weights = routes.weights.reshape(tokens, per_token)
    whole = summed or (lambda product: product)
    count = stacks.gate.shape[0]
    own = jnp.where((experts >= 0) & (experts < count), experts, count).reshape(-1)
    order = jnp.argsort(own, stable=True)  # those of other devices' experts last
    inverse = jnp.argsort(order)
    sizes = jnp.sum(own[None] == jnp.arange(count)[:, None], axis=1, dtype=jnp.int32)
    product = ragged if platform == "tpu" else partial(by_blocks, platform)
    sent = _send(rows, order, inverse, per_token)
    gate, up = (whole(product(sent, stack, sizes)) for stack in (stacks.gate, stacks.up))
    mixed = _weighted(gate, up, weights.reshape(-1)[order])
    found = _collect(product(mixed, stacks.down, sizes), order, inverse, per_token)
    return found.reshape(x.shape)


def _weighted(gate: Array, up: Array, weights: Array) -> Array:
    """Apply the gates, and the router's weights [N]. This precedes the last matrix, whose output
    then need not be kept for their gradients."""
    gated = (jax.nn.silu(gate) * up).astype(jnp.float32)
    return (gated * weights[..., None]).astype(gate.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _send(rows: Array, order: Array, inverse: Array, per_token: int) -> Array:
    """Copy each token [R, E] once for each of its experts, sorted by these: [N, E].

    `_send` and `_collect` are each other's transposes. JAX's own would add up rows in scattered
    places, which is slow on TPUs and has a varying order on GPUs.
    """
    return rows[order // per_token]


def _send_forward(rows: Array, order: Array, inverse: Array, per_token: int) -> Any:
    return _send(rows, order, inverse, per_token), (order, inverse)


def _send_backward(per_token: int, places: tuple[Array, Array], gradient: Array) -> Any:
    return _collect(gradient, *places, per_token), None, None


_send.defvjp(_send_forward, _send_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _collect(found: Array, order: Array, inverse: Array, per_token: int) -> Array:
    """Add up the outputs of each token's experts: [R, E] of [N, E] sorted by experts."""
    parts = found[inverse].reshape(-1, per_token, found.shape[-1])
    return jnp.sum(parts, axis=1, dtype=jnp.float32).astype(found.dtype)


def _collect_forward(found: Array, order: Array, inverse: Array, per_token: int) -> Any:
    return _collect(found, order, inverse, per_token), (order, inverse)


def _collect_backward(per_token: int, places: tuple[Array, Array], gradient: Array) -> Any:
    return _send(gradient, *places, per_token), None, None


_collect.defvjp(_collect_forward, _collect_backward)


@jax.custom_vjp
def ragged(x: Array, stack: Array, sizes: Array) -> Array:
    """Compute `by_blocks` by `jax.lax.ragged_dot`, which leaves rows after the last group undefined.

    The gradient of the matrices uses megablox's kernel: XLA's for TPUs multiplies all rows for each
    of them, and masks those of other groups.
    """
    return _in_groups(jax.lax.ragged_dot(x, stack, sizes), sizes)


def _ragged_forward(x: Array, stack: Array, sizes: Array) -> Any:
    return ragged(x, stack, sizes), (x, stack, sizes)


def _ragged_backward(saved: tuple[Array, Array, Array], gradient: Array) -> Any:
    x, stack, sizes = saved
    gradient = _in_groups(gradient, sizes)
    _, pull = jax.vjp(lambda x: jax.lax.ragged_dot(x, stack, sizes), x)
    tile = next((tile for tile in TILES if len(x) % tile == 0), 0)
    if tile:
        to_stack = kernel_gradient(x, sizes, gradient, tile).astype(stack.dtype)
    else:
        to_stack = _stack_gradient("tpu", *saved, gradient)
    (to_x,) = pull(gradient)
    return _in_groups(to_x, sizes), to_stack, None


ragged.defvjp(_ragged_forward, _ragged_backward)


def kernel_gradient(
    x: Array, sizes: Array, gradient: Array, tile: int, *, interpret: bool = False
) -> Array:
    """Compute the gradient of the matrices, [G, in, out], by the kernel for TPUs.

    tile: rows processed at once, a divisor of all. interpret: run it step by step on any platform,
    for tests.
    """
    # Importing Pallas takes long.
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    # Twice the bytes would not fit the kernel's memory.
    tiling = tile, *(size * 2 // max(x.dtype.itemsize, 2) for size in COLUMNS)
    # It relies on JAX's promotion of types and ranks, which a setting may forbid.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return tgmm(x.T, gradient, sizes, gradient.dtype, tiling, interpret=interpret)


def _in_groups(x: Array, sizes: Array) -> Array:
    """Set rows after the last group to 0."""
    return jnp.where((jnp.arange(len(x)) < jnp.sum(sizes))[:, None], x, 0)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def by_blocks(platform: str, x: Array, stack: Array, sizes: Array) -> Array:
    """Multiply consecutive groups of rows, each with its own matrix: [N, out] of x [N, in] and stack
    [G, in, out], 0 in rows after the last group.

    sizes: int32 [G]. Sums are in float32, in the same order each time.
    """
    return _multiply_blocks(platform, x, stack, sizes, transposed=False)


class _Blocks(NamedTuple):
    """The blocks of all groups, in the order of their rows. group, start: int32, of each: its group
    and first row; stop: the first row after the group; begins: whether it is the first of its
    group. used: how many there are; the others come after all rows."""

    size: int
    group: Array
    start: Array
    stop: Array
    begins: Array
    used: Array


def _blocks(sizes: Array, rows: int) -> _Blocks:
    """Cut groups into blocks, each with rows of one group."""
    fewest, most = BLOCKS
    mean = max(rows // len(sizes), 1)
    size = min(max(1 << mean.bit_length() - 1, fewest), most)  # the power of two below it
    counts = -(-sizes // size)
    last, ends = jnp.cumsum(counts), jnp.cumsum(sizes)
    number = jnp.arange(rows // size + len(sizes))
    known = jnp.minimum(number, jnp.maximum(last[-1] - 1, 0))
    group = jnp.minimum(jnp.searchsorted(last, known, side="right"), len(sizes) - 1)
    within = known - (last - counts)[group]
    is_block = number < last[-1]
    return _Blocks(
        size,
        group,
        start=jnp.where(is_block, (ends - sizes)[group] + within * size, rows),
        stop=ends[group],
        begins=is_block & (within == 0),
        used=last[-1],
    )


def _rounds(platform: str, blocks: _Blocks) -> Any:
    """Count the blocks to compute: the greatest possible number if a loop of data-dependent length
    would wait for the device (sampler/programs.py, `may_branch`)."""
    return len(blocks.group) if platform in ("gpu", "cuda") else blocks.used


def _multiply_blocks(
    platform: str, x: Array, stack: Array, sizes: Array, transposed: bool
) -> Array:
    blocks = _blocks(sizes, len(x))
    padded = jnp.pad(x, ((0, blocks.size), (0, 0)))
    width = stack.shape[1 if transposed else 2]
    contracted = (((1,), (1 if transposed else 0,)), ((), ()))

    def multiply(number: Array, out: Array) -> Array:
        own = jax.lax.dynamic_slice_in_dim(padded, blocks.start[number], blocks.size)
        matrix = jax.lax.dynamic_index_in_dim(stack, blocks.group[number], keepdims=False)
        product = jax.lax.dot_general(own, matrix, contracted, preferred_element_type=jnp.float32)
        # The last block of a group may contain rows of the next, whose own block overwrites them.
        return jax.lax.dynamic_update_slice_in_dim(
            out, product.astype(out.dtype), blocks.start[number], 0
        )

    out = jnp.zeros((len(padded), width), x.dtype)
    out = jax.lax.fori_loop(0, _rounds(platform, blocks), multiply, out)[: len(x)]
    return _in_groups(out, sizes)


def _blocks_forward(platform: str, x: Array, stack: Array, sizes: Array) -> Any:
    return by_blocks(platform, x, stack, sizes), (x, stack, sizes)


def _blocks_backward(platform: str, saved: tuple[Array, Array, Array], gradient: Array) -> Any:
    _, stack, sizes = saved
    to_x = _multiply_blocks(platform, gradient, stack, sizes, transposed=True)
    return to_x, _stack_gradient(platform, *saved, gradient), None


def _stack_gradient(platform: str, x: Array, stack: Array, sizes: Array, gradient: Array) -> Array:
    """Compute the gradient of the matrices: for each group, its rows of x by the gradient's."""
    blocks = _blocks(sizes, len(x))
    padded, gradients = (jnp.pad(y, ((0, blocks.size), (0, 0))) for y in (x, gradient))
    contracted = (((0,), (0,)), ((), ()))

    def add(number: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        total, to_stack = carry
        start, group = blocks.start[number], blocks.group[number]
        own = jax.lax.dynamic_slice_in_dim(padded, start, blocks.size)
        in_group = (start + jnp.arange(blocks.size) < blocks.stop[number])[:, None]
        own = jnp.where(in_group, own, 0)
        back = jax.lax.dynamic_slice_in_dim(gradients, start, blocks.size)
        product = jax.lax.dot_general(own, back, contracted, preferred_element_type=jnp.float32)
        total = jnp.where(blocks.begins[number], 0.0, total) + product
        to_stack = jax.lax.dynamic_update_index_in_dim(
            to_stack, total.astype(stack.dtype), group, 0
        )
        return total, to_stack

    start = jnp.zeros(stack.shape[1:], jnp.float32), jnp.zeros_like(stack)
    _, to_stack = jax.lax.fori_loop(0, _rounds(platform, blocks), add, start)
    return to_stack


by_blocks.defvjp(_blocks_forward, _blocks_backward)
