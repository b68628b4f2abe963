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
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from g2d_jax.data.packing import round_up  # noqa: E402
from g2d_jax.models import decode_kernel, decode_kernel_gpu  # noqa: E402
from g2d_jax.models.attention import COLUMN_BLOCK  # noqa: E402
from g2d_jax.models.kernels import LANES  # noqa: E402
from g2d_jax.sampler.simulated import by_longest, chunks, lengths  # noqa: E402

CHUNK, GROUP, PROMPTS = 16, 8, (30, 1024)


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
    drawn = random.normal(case.prompt, case.prompt / 3, case.samples // GROUP)
    prompts = np.repeat(np.clip(drawn, *PROMPTS).astype(int), GROUP)
    responses = lengths(case.samples, case.mean, case.most, seed)
    earlier = np.concatenate([*chunks(prompts, responses, case.rows, CHUNK)])
    # As `Sampler.shapes` has it on a TPU.
    width = round_up(round_up(int(prompts.max()), LANES) + case.most, COLUMN_BLOCK)
    return Steps(earlier, np.arange(len(earlier), dtype=np.int32)[:, None] % width, width)


PATHS: dict[str, Callable[[Any, Any, int], Any]] = {
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
