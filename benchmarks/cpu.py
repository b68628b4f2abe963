r"""Measure what a CPU makes of a model of SmolLM2-135M's shape: rates of a GRPO update and of decode
beside that of a plain matrix product, in one process, on one core.

    taskset -c 1 python benchmarks/cpu.py --dtype float32
    taskset -c 1 python benchmarks/cpu.py --dtype bfloat16

Rates count the arithmetic of the model alone, GFLOP a CPU-second, the least of some rounds: an
update of 8 prompts x 8 responses of 57 + 32 tokens (drivers/cases.py), whose layers see all tokens
and whose head those of the responses; decode of 64 rows, as the difference of 33 tokens and of 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).resolve().parent / "drivers"))

import jax
import jax.numpy as jnp
import numpy as np
from cases import TABLES, Case
from drive_ours import Library, plain_groups

from g2d_jax.matmul import CPU

HEAD = 576 * 49_152
LAYERS = 30 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536)
"""Parameters that a token is multiplied with."""


def least(run: Callable[[], object], rounds: int) -> float:
    """Return the CPU-seconds of the quickest of some calls, after one that compiles."""
    taken = []
    for _ in range(1 + rounds):
        begun = time.process_time()
        jax.block_until_ready(run())
        taken.append(time.process_time() - begun)
    return min(taken[1:])


def product(dtype: jnp.dtype) -> float:
    """Return the rate of products of 1,024 x 576 x 1,536."""
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((1024, 576), (576, 1536)))

    @jax.jit
    def run(x: jax.Array, y: jax.Array) -> jax.Array:
        return sum(CPU.multiply(x + number, y).sum() for number in range(8))

    return 8 * 2 * x.size * y.shape[1] / least(lambda: run(x, y), 5)


def update(library: Library) -> float:
    """Return the rate of GRPO updates."""
    case = library.case
    groups = plain_groups(case)
    responses = case.prompts * case.samples * case.response
    tokens = case.prompts * case.prompt + responses
    arithmetic = 3 * 2 * (tokens * LAYERS + responses * HEAD)
    return arithmetic / least(lambda: library.update(groups, 1), 3)


def decode(dtype: str) -> float:
    """Return the rate of decode steps of 64 rows."""

    def seconds(tokens: int) -> float:
        case = Case("sampling", 64, 57, tokens, model="smollm2", vocabulary=49_152)
        library = Library(case, dtype)
        return least(lambda: [library.sample(0)], 3)

    return 32 * 64 * 2 * (LAYERS + HEAD) / (seconds(33) - seconds(1))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    dtype = parser.parse_args().dtype
    case = next(case for case in TABLES["grpo"].values() if case.model == "smollm2")
    plain = product(jnp.dtype(dtype))
    print(f"{dtype}, jax {jax.__version__}: a matrix product {plain / 1e9:.0f} GFLOP a CPU-second")
    for name, rate in (("update", update(Library(case, dtype))), ("decode", decode(dtype))):
        print(f"{name}: {rate / 1e9:.0f}, {rate / plain:.0%} of it", flush=True)


if __name__ == "__main__":
    main()
