r"""Columns of the cache that decode steps read, beside those that live, by what the code itself reads.

    python benchmarks/decode_reads.py

The sampler's schedule with drawn lengths: a row is given to the next sample after the chunk in which
its response ends. Lengths of responses are log-normal, of prompts normal, both cut, with seed 0; all
rows write into the same column of the ring, whose width is the sampler's. Every step's ages go
through the functions by which the program on the device decides what it reads. A column is read for
every layer and key head: bytes are in this ratio, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from g2d_jax.data.packing import round_up  # noqa: E402
from g2d_jax.models import decode_kernel, decode_kernel_gpu  # noqa: E402
from g2d_jax.models.attention import COLUMN_BLOCK, blocks_back  # noqa: E402
from g2d_jax.models.kernels import LANES  # noqa: E402

CHUNK, GROUP, SIGMA = 16, 8, 0.8
SHORTEST, PROMPTS = 16, (30, 1024)


@dataclass(frozen=True)
class Case:
    """A call of the sampler. mean, most: tokens of responses. prompt: tokens of a mean prompt."""

    name: str
    samples: int
    rows: int
    mean: int
    most: int
    prompt: int = 150


CASES = (
    Case("warm-up, v5e-16", 512, 128, 600, 2048),
    Case("collect, v5e-16", 16384, 608, 600, 2048),
    Case("warm-up, h100x8", 512, 512, 600, 2048),
    Case("8k", 512, 128, 2500, 8192),
    Case("collect, 8k", 4096, 256, 2500, 8192),
)


class Steps(NamedTuple):
    """The steps of a call. earlier: int32 [steps, rows], tokens before the newest one, -1 of a row
    at rest. columns: int32 [steps, 1], of the newest token. width: of the ring."""

    earlier: np.ndarray
    columns: np.ndarray
    width: int


def simulate(case: Case, seed: int = 0) -> Steps:
    """Run the schedule of a call."""
    random = np.random.default_rng(seed)
    mu = np.log(case.mean) - SIGMA**2 / 2
    drawn = np.exp(random.normal(mu, SIGMA, case.samples * 2))
    lengths = np.clip(drawn, SHORTEST, case.most).astype(int)[: case.samples]
    drawn = random.normal(case.prompt, case.prompt / 3, case.samples // GROUP)
    prompts = np.repeat(np.clip(drawn, *PROMPTS).astype(int), GROUP)
    earlier, left = np.zeros((2, case.rows), int)
    chunks, begun = [], 0
    while True:
        free = np.flatnonzero(left <= 0)[: case.samples - begun]
        earlier[free] = prompts[begun : begun + len(free)]
        left[free] = lengths[begun : begun + len(free)]
        begun += len(free)
        if not (left > 0).any():
            break
        step = np.arange(min(CHUNK, left.max()))[:, None]
        chunks.append(np.where(step < left, earlier + step, -1))
        earlier, left = earlier + len(step), left - len(step)
    steps = np.concatenate(chunks).astype(np.int32)
    # As `Sampler.shapes` has it on a TPU.
    width = round_up(round_up(int(prompts.max()), LANES) + case.most, COLUMN_BLOCK)
    return Steps(steps, np.arange(len(steps), dtype=np.int32)[:, None] % width, width)


def by_longest(earlier: jax.Array, column: jax.Array, width: int) -> jax.Array:
    """Count what `attend_blocks` reads: of every row the blocks of the longest one."""
    most = jnp.max(earlier, axis=1, keepdims=True)
    blocks = blocks_back(most, column, COLUMN_BLOCK, width // COLUMN_BLOCK)
    return jnp.broadcast_to(COLUMN_BLOCK * blocks, earlier.shape)


PATHS: dict[str, Callable[[jax.Array, jax.Array, int], jax.Array]] = {
    "TPU, pallas": decode_kernel.columns_read,
    "TPU, xla": by_longest,
    "GPU, pallas": partial(decode_kernel_gpu.columns_read, dim=128, itemsize=2),
}
"""Columns that each way of a decode step reads of each row, int32 [steps, rows], of `Steps`."""


def ratios(steps: Steps) -> dict[str, float]:
    """Return the columns that each way reads for one that lives."""
    live = (steps.earlier + 1).sum(dtype=np.int64)
    read = {name: np.asarray(path(*steps)) for name, path in PATHS.items()}
    return {name: float(columns.sum(dtype=np.int64) / live) for name, columns in read.items()}


def main() -> None:
    """Print the table."""
    head = ["case", "rows", "steps", "live columns of a row and step", *PATHS]
    print("|", " | ".join(head), "|")
    print("|---" * len(head) + "|")
    for case in CASES:
        steps = simulate(case)
        live = (steps.earlier + 1).mean()
        cells = [case.name, f"{case.rows}", f"{len(steps.earlier):,}", f"{live:,.0f}"]
        cells += [f"{live * ratio:,.0f} ({ratio:.2f})" for ratio in ratios(steps).values()]
        print("|", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
