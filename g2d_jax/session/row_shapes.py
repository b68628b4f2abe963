"""The rows that batches are packed into: their length, their number in a micro-batch, and the
attention kernel.

All batches of a stage have one shape, so that one train step is compiled. data/packing.py describes
a row's content.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from g2d_jax.data.packing import Group, Packed, computed_columns, pack, round_up
from g2d_jax.models import kernels
from g2d_jax.runtime import mesh as meshes
from g2d_jax.session.session import Session

CPU_TOKENS = 1280
"""Tokens of the fastest micro-batch on a CPU: it fits the caches, and gradients are rarely
added."""


@dataclass(frozen=True)
class RowShape:
    """The shape of a stage's batches. length: columns of a row; most_rows: of the largest batch;
    max_responses_per_row: an even number."""

    length: int
    most_rows: int = 1
    max_responses_per_row: int = 16


def choose_row_length(
    session: Session,
    longest: int,
    batches: Sequence[Sequence[Group]] = (),
    *,
    max_responses_per_row: int = 16,
) -> int:
    """Choose the columns of a packed row that leave the fewest positions empty.

    At least `longest`, at most a device's micro-batch; ties go to the shortest. batches: examples
    of the stage's; without any a row has room for `longest` tokens.
    """
    kernel_of = session.sampling.devices.row_kernel
    step = kernels.LANES if kernel_of(kernels.LANES) == "splash" else 16
    shortest = round_up(longest, step)
    most = max(shortest, _microbatch_tokens(session, 0) // meshes.row_ways(session.mesh))

    def columns(length: int) -> int:
        shapes = (RowShape(length, len(groups), max_responses_per_row) for groups in batches)
        return sum(
            computed_columns(groups, **_layout(session, rows))
            for groups, rows in zip(batches, shapes, strict=True)
        )

    length = min(range(shortest, most + 1, step), key=columns)
    session.sampling.kernels[f"packed rows of {length} tokens"] = kernel_of(length)
    return length


def pack_rows(session: Session, groups: Sequence[Group], rows: RowShape) -> Packed:
    """Pack groups into rows of this shape, in micro-batches for the mesh."""
    return pack(groups, **_layout(session, rows))


def _microbatch_tokens(session: Session, batch: int) -> int:
    """Return the tokens of one micro-batch over all devices. batch: the most tokens of a batch."""
    ways = meshes.row_ways(session.mesh)
    enough = (
        CPU_TOKENS if kernels.platform_of(session.mesh) == "cpu" else max(batch // ways // 8, 4096)
    )
    return int(min(session.micro.tokens, enough * ways))


def _layout(session: Session, rows: RowShape) -> dict[str, int]:
    """Return the arguments of `pack` for these rows.

    A micro-batch divides evenly over the devices and has at most `Session.micro` tokens. It has
    fewer where a batch has few micro-batches: half of the last one is empty, on average.
    """
    ways = meshes.row_ways(session.mesh)
    tokens = _microbatch_tokens(session, rows.most_rows * rows.length)
    return {
        "row_length": rows.length,
        "microbatch_rows": max(tokens // rows.length // ways, 1) * ways,
        "rows_multiple": ways,
        "max_responses_per_row": rows.max_responses_per_row,
        "most_rows": rows.most_rows,
    }
