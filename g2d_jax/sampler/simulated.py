"""A simulated call of the sampler with random lengths: its decode steps, and the cache columns that
they read.

Response lengths are log-normal, clipped at both ends: as in reasoning, a few are several times the
mean. Free rows go to the next samples between chunks, as in `schedule.py`, but without shards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from g2d_jax.models.attention import COLUMN_BLOCK, blocks_back
from g2d_jax.sampler.engine import Sampler
from g2d_jax.sampler.programs import Shapes

SIGMA = 0.8
"""Assumed standard deviation of the logarithm of a response's length."""

SHORTEST = 16
"""Fewest tokens of a response."""

Reader = Callable[[Any, Any], Any]
"""A function that counts the columns a layer reads of each row, [steps, rows]. Arguments: the
tokens before the newest one, int32 [steps, rows], -1 for a row at rest; and the newest one's
column, int32 [steps, 1]."""


class Decoded(NamedTuple):
    """A call's decode steps. live, read: the mean columns with tokens, and the mean columns read,
    per row and step; rows at rest count."""

    steps: int
    live: float
    read: float


def lengths(count: int, mean: float, most: int, seed: int = 0) -> np.ndarray:
    """Draw response lengths, int [count], of this mean. most: the longest."""
    drawn = np.exp(np.random.default_rng(seed).normal(0, SIGMA, count))
    low, high = 0.0, 1e3 * mean
    for _ in range(60):  # clipping changes the mean: search the scale that restores it
        scale = (low + high) / 2
        cut = np.clip(scale * drawn, min(SHORTEST, most), most)
        low, high = (scale, high) if cut.mean() < mean else (low, scale)
    return np.rint(cut).astype(int)


def chunks(
    prompts: np.ndarray, responses: np.ndarray, rows: int, chunk: int
) -> Iterator[np.ndarray]:
    """Yield each chunk's steps as the tokens before the newest one, int32 [steps, rows], -1 for a
    row at rest. prompts, responses: their lengths, int [samples]."""
    earlier, left = np.zeros((2, rows), int)
    begun = 0
    while True:
        free = np.flatnonzero(left <= 0)[: len(responses) - begun]
        earlier[free] = prompts[begun : begun + len(free)]
        left[free] = responses[begun : begun + len(free)]
        begun += len(free)
        if not (left > 0).any():
            return
        step = np.arange(min(chunk, left.max()))[:, None]
        yield np.where(step < left, earlier + step, -1).astype(np.int32)
        earlier, left = earlier + len(step), left - len(step)


def decoded(
    prompt: int, responses: np.ndarray, rows: int, chunk: int, width: int, read: Reader
) -> Decoded:
    """Simulate a call. prompt: tokens of every prompt. width: columns of the ring."""
    if responses.min() == responses.max():  # all rows are equal, wave after wave
        waves = -(-len(responses) // rows)
        one = _decoded(prompt, responses[:1], 1, chunk, width, read)
        share = len(responses) / (waves * rows)
        return Decoded(waves * one.steps, share * one.live, share * one.read)
    return _decoded(prompt, responses, rows, chunk, width, read)


def _decoded(
    prompt: int, responses: np.ndarray, rows: int, chunk: int, width: int, read: Reader
) -> Decoded:
    steps, live, columns = 0, 0, 0.0
    for earlier in chunks(np.full(len(responses), prompt), responses, rows, chunk):
        newest = (steps + np.arange(len(earlier), dtype=np.int32))[:, None] % width
        columns += float(read(earlier, newest).sum())
        live += int((earlier + 1).sum())
        steps += len(earlier)
    return Decoded(steps, live / steps / rows, columns / steps / rows)


def reader(sampler: Sampler, shapes: Shapes) -> Reader:
    """Return the Reader of these shapes, averaged over layers. It uses the same functions as the
    kernel."""
    read = _of_kernel(sampler, shapes)
    if not (sampler.stacked or sampler.decode_kernel == "pallas"):
        return read  # all layers read the same columns, and a window masks them
    return over_layers(read, sampler.config.windows(shapes.width))


def over_layers(read: Reader, windows: Sequence[int]) -> Reader:
    """Return the average Reader over layers of these windows; `read` itself for no windows."""
    if not windows:
        return read
    layers = Counter(windows)

    def average(earlier: Any, column: Any) -> Any:
        columns = np.zeros(earlier.shape)
        for window, count in layers.items():
            columns += count * read(np.minimum(earlier, window - 1), column)
        return columns / len(windows)

    return average


def _of_kernel(sampler: Sampler, shapes: Shapes) -> Reader:
    width = shapes.width
    if sampler.stacked and sampler.decode_kernel == "pallas":
        from g2d_jax.models import decode_kernel  # Pallas takes long to import

        return partial(decode_kernel.columns_read, width=width)
    if sampler.stacked:
        return partial(by_longest, width=width)
    if sampler.decode_kernel == "pallas":
        from g2d_jax.models import decode_kernel_gpu

        dim, itemsize = sampler.config.head_dim, sampler.dtype.itemsize
        read = decode_kernel_gpu.columns_read
        return partial(read, width=width, dim=dim, itemsize=itemsize)
    return lambda earlier, _: np.full(earlier.shape, width)


def by_longest(earlier: Any, column: Any, width: int) -> Any:
    """Count the columns that `attend_blocks` reads: of every row as many blocks as of the
    longest."""
    block = min(COLUMN_BLOCK, width)
    longest = earlier.max(axis=1, keepdims=True)
    blocks = blocks_back(longest, column, block, width // block)
    return np.broadcast_to(block * blocks, earlier.shape)
