"""The rows that batches are packed into: their length, their number at once, and the kernel of attention over them.

All batches of a stage have one shape, so that one train step is compiled: see data/packing.py for what a row holds.
"""

from __future__ import annotations

from collections.abc import Sequence

from g2d_jax import mesh as meshes
from g2d_jax.data.packing import Group, Packed, pack, positions, round_up
from g2d_jax.models import kernels
from g2d_jax.stages.runtime import Runtime

CPU_TOKENS = 1024
"""Tokens of a micro-batch that a CPU computes quickest: what its caches hold, and gradients are not added too often."""


def choose_row_length(
    runtime: Runtime, longest: int, batches: Sequence[Sequence[Group]] = (), *, places: int = 16
) -> int:
    """Choose the columns of a packed row: compute.row_length, or the length that leaves the fewest positions empty.

    At least `longest`, at most a device's micro-batch. batches: such as the stage will have, by which it is chosen;
    without any it is what holds `longest` tokens. Of equals the shortest is taken.
    Raises ValueError for a compute.row_length that is too short.
    """
    chosen = runtime.config.compute.row_length
    if chosen and chosen < longest:
        raise ValueError(f"compute.row_length is {chosen} but a group can need {longest} tokens: raise it, or set 0")
    step = kernels.LANES if _kernel(runtime, kernels.LANES) == "splash" else 16
    shortest = round_up(longest, step)
    most = max(shortest, _microbatch_tokens(runtime, 0) // meshes.row_ways(runtime.mesh))

    def columns(length: int) -> int:
        return sum(positions(groups, **_shape(runtime, length, len(groups), places)) for groups in batches)

    length = chosen or min(range(shortest, most + 1, step), key=columns)
    runtime.say_once(f"attention over packed rows of {length} tokens: {_kernel(runtime, length)}")
    return length


def pack_rows(runtime: Runtime, groups: Sequence[Group], length: int, most_rows: int, *, places: int = 16) -> Packed:
    """Pack groups into rows of this length, in micro-batches for the mesh, the same shape for all batches.

    most_rows: that any batch takes. places: responses that a row can hold, an even number.
    """
    return pack(groups, **_shape(runtime, length, most_rows, places))


def microbatch_rows(runtime: Runtime, length: int, most_rows: int) -> int:
    """Choose the rows of one micro-batch, of batches of at most `most_rows`; a multiple of the devices' parts.

    No more than compute.microbatch_tokens, nor than keep a device busy where that leaves few micro-batches: half of
    the last one is empty, on average.
    """
    ways = meshes.row_ways(runtime.mesh)
    return max(_microbatch_tokens(runtime, most_rows * length) // length // ways, 1) * ways


def _kernel(runtime: Runtime, length: int) -> kernels.Kernel:
    """Return the kernel of attention over rows of a length. Raises ValueError where the configured one cannot serve."""
    return kernels.choose(
        runtime.config.compute.attention,
        platform=kernels.platform_of(runtime.mesh),
        dtype=runtime.dtype,
        head_dim=runtime.model_config.head_dim,
        length=length,
        layout="packed",
    )


def _microbatch_tokens(runtime: Runtime, batch: int) -> int:
    """Return the tokens of one micro-batch on all devices, of batches of at most so many."""
    ways = meshes.row_ways(runtime.mesh)
    enough = CPU_TOKENS if kernels.platform_of(runtime.mesh) == "cpu" else max(batch // ways // 8, 4096)
    return int(min(runtime.config.compute.microbatch_tokens, enough * ways))


def _shape(runtime: Runtime, length: int, most_rows: int, places: int) -> dict[str, int]:
    """Return the arguments with which `pack` lays rows of this length."""
    return {
        "row_length": length,
        "microbatch_rows": microbatch_rows(runtime, length, most_rows),
        "rows_multiple": meshes.row_ways(runtime.mesh),
        "places": places,
        "most_rows": most_rows,
    }
