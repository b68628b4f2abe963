"""Batched scoring of ragged conversations by a reward model: few batch shapes, one program, rows
split over the mesh."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.stages import Wrapped

from g2d_jax.data.tokenizer import Ids
from g2d_jax.models.reward_model import ScalarModel, read_scores, score_flops
from g2d_jax.runtime import mesh as meshes
from g2d_jax.runtime import processes
from g2d_jax.runtime.program import Program

COLUMNS = 64
"""The shortest row, in tokens; others are COLUMNS * (1, 1.5, 2, 3, 4, 6, …)."""


def columns(length: int) -> int:
    """Return a row's columns for a number of tokens: few sizes to compile, at most half of each
    unused."""
    step = COLUMNS
    while step < length:
        if step + step // 2 >= length:
            return step + step // 2
        step *= 2
    return step


@dataclass(slots=True)
class Usage:
    """The cost of scoring so far, without padding. conversations and tokens: those that the model
    scored."""

    conversations: int = 0
    tokens: int = 0
    flops: float = 0.0


def program_of(model: ScalarModel, mesh: Mesh, run: Wrapped, rows: int, length: int) -> Program:
    """Return the program that scores a batch. model: arrays or shapes. run: from `make_program`."""
    tokens = meshes.abstract_rows(mesh, (rows, length))
    return Program("reward", run, (model, tokens, meshes.abstract_rows(mesh, (rows,))))


def make_program(mesh: Mesh, dtype: jnp.dtype) -> Wrapped:
    """Return the jitted `read_scores`."""
    return jax.jit(
        partial(read_scores, mesh=mesh, dtype=dtype), out_shardings=meshes.replicated(mesh)
    )


def full_rows(mesh: Mesh, length: int, batch_tokens: int) -> int:
    """Return the rows of a full batch, each of `length` columns."""
    ways = meshes.row_ways(mesh)
    return max(batch_tokens // length // ways, 1) * ways


class BatchScorer:
    """A scorer of token ids in batches.

    batch_tokens: per forward pass over all devices, padding included; at least one row for every
    part of the mesh. dtype: of activations. Compiled shapes: columns by `columns`; rows are a full
    batch, or a power of two for each part of the mesh.
    """

    def __init__(
        self, model: ScalarModel, mesh: Mesh, *, batch_tokens: int, dtype: jnp.dtype
    ) -> None:
        self.model, self.mesh, self.batch_tokens = model, mesh, batch_tokens
        self.usage = Usage()
        self._run = make_program(mesh, dtype)

    def score(self, sequences: Sequence[Ids]) -> np.ndarray:
        """Compute scores, float32 [N], each at the last token of its sequence, int32 [T], T at
        least 1."""
        scores = np.zeros(len(sequences), np.float32)
        waiting = [
            (rows, self._dispatch([sequences[row] for row in rows]))
            for rows in self._batches(sequences)
        ]
        for rows, result in waiting:
            processes.note_progress("scoring by a reward model")
            scores[rows] = np.asarray(result)[: len(rows)]
        self._count(list(map(len, sequences)))
        return scores

    def _batches(self, sequences: Sequence[Ids]) -> Iterator[list[int]]:
        """Yield the indices of sequences that share a batch: one size class, at most a full
        batch."""
        classes: defaultdict[int, list[int]] = defaultdict(list)
        for row, ids in enumerate(sequences):
            classes[columns(len(ids))].append(row)
        # The largest first: if memory runs out, it does so at once.
        for size, rows in sorted(classes.items(), reverse=True):
            full = full_rows(self.mesh, size, self.batch_tokens)
            yield from (rows[start : start + full] for start in range(0, len(rows), full))

    def _dispatch(self, batch: Sequence[Ids]) -> jax.Array:
        """Start one forward pass; rows without a sequence are one token of padding."""
        length, size = columns(max(map(len, batch))), meshes.row_ways(self.mesh)
        while size < len(batch):
            size *= 2
        size = min(size, full_rows(self.mesh, length, self.batch_tokens))
        tokens, lengths = np.zeros((size, length), np.int32), np.ones(size, np.int32)
        for row, ids in enumerate(batch):
            tokens[row, : len(ids)], lengths[row] = ids, len(ids)
        program = program_of(self.model, self.mesh, self._run, size, length)
        scores: jax.Array = program(self.model, tokens, lengths)
        return scores

    def _count(self, lengths: Sequence[int]) -> None:
        self.usage.conversations += len(lengths)
        self.usage.tokens += sum(lengths)
        self.usage.flops += score_flops(self.model.config, lengths)
