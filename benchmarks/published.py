"""Times that others published, beside those that the formulas of plans give for the same work.

    python benchmarks/published.py

A constant of rates.py is fitted to one row a kind of chip. To the others none is fitted, and a test
holds them to 25 %; that one constant does for all kinds of work, and v5p's for v5e, was decided
with them in sight. They are of other programs than these: MaxText's training, decoding
by sglang-jax, and the GRPO steps of NeMo-RL with vLLM and Megatron.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from g2d_jax.models import shapes  # noqa: E402
from g2d_jax.models.config import ModelConfig  # noqa: E402
from g2d_jax.models.flops import (  # noqa: E402
    attended,
    forward_flops,
    matmul_params,
    train_flops,
)
from g2d_jax.runtime.rates import RATES, Rates, Seconds  # noqa: E402
from g2d_jax.sampler import simulated  # noqa: E402
from g2d_jax.sampler.capacity import Split  # noqa: E402

TIERING = "MaxText docs/reference/models/tiering.md"
V5E = "MaxText MaxText/configs/v5e/README.md"
SGLANG = "sglang-jax docs/cookbook/autoregressive/Qwen/Qwen3.md"
NEMO = "NeMo-RL 0.5 docs/about/performance-summary.md"

LLAMA = shapes.shape("Llama-3.1-8B")
LLAMA_70B = replace(
    LLAMA,
    hidden_size=8192,
    intermediate_size=28_672,
    num_hidden_layers=80,
    num_attention_heads=64,
)
LLAMA_2_70B = replace(LLAMA_70B, vocab_size=32_000)
QWEN = shapes.shape("Qwen3-8B")
QWEN_32B = replace(
    QWEN,
    hidden_size=5120,
    intermediate_size=25_600,
    num_hidden_layers=64,
    num_attention_heads=64,
)

WITHIN = 0.25
"""How far from a row that was not fitted the formulas may be."""


@dataclass(frozen=True)
class Row:
    """A published figure, and what gives it by formula. fitted: whether a constant is fitted to it.
    unit: of the figure."""

    what: str
    source: str
    figure: float
    unit: str
    computed: Callable[[], float]
    fitted: bool = False

    @property
    def off(self) -> float:
        """The computed figure less the published one, as a share of that."""
        return self.computed() / self.figure - 1


def train_rate(model: ModelConfig, kind: str, length: int, again: float) -> float:
    """Compute the tokens/s of a chip that trains on rows of so many tokens. again: the share of a
    forward pass that remat computes again."""
    forward = forward_flops(model, length, attended(length))
    flops = train_flops(model, length, attended(length)) + again * forward
    return length / RATES[kind].pass_seconds(Seconds(products=flops / RATES[kind].flops))


def model_tflops(kind: str) -> float:
    """Compute the TFLOP/s of a chip without those that full remat computes again: a quarter."""
    return 0.75 * RATES[kind].reached * RATES[kind].flops / 1e12


def share_of_layers(model: ModelConfig, computed: str) -> float:
    """Compute the share of a forward pass that products of these layers' weights are. computed: of
    "o", the output of attention, and "gate up"."""
    wide = model.num_attention_heads * model.head_dim
    sizes = {"o": wide * model.hidden_size, "up": model.hidden_size * model.intermediate_size}
    sizes["gate"] = sizes["up"]
    numbers = sum(sizes[name] for name in computed.split())
    return model.num_hidden_layers * numbers / matmul_params(model)


def step_ms(model: ModelConfig, rates: Rates, chips: int, rows: int, live: float) -> float:
    """Compute the milliseconds of a decode step over all chips, four of them a square of the torus,
    of rows with so many live columns."""
    axes = (1, 2) if chips == 4 else (1, 1)
    split = Split(model, 2, chips, chips, round(live), rates, axes=axes)
    return 1e3 * split.step_seconds(rows, live)


def grpo_seconds(
    model: ModelConfig,
    kind: str,
    devices: int,
    *,
    ways: int,
    response: float,
    again: float,
    samples: int = 2048,
    prompt: int = 150,
    longest: int = 4096,
) -> float:
    """Compute the seconds of a GRPO step: drawing the responses with a row for each, log-probs
    under the policy and a reference, and training.

    ways: devices that share the sampler's weights. response: mean tokens. prompt: tokens, assumed.
    longest: tokens of a prompt and a response at most. again: as in `train_rate`.
    """
    rates = replace(RATES[kind], decoding=RATES[kind].reached)  # vLLM samples, not this library
    drawn = simulated.lengths(samples, response, longest - prompt)
    call = simulated.decoded(prompt, drawn, samples, 16, longest, lambda earlier, _: earlier + 1)
    # The copies of the weights have equal shares of the rows, and wait for the longest response.
    step = step_ms(model, rates, ways, samples * ways // devices, call.live)
    sampling = call.steps * step / 1e3
    length = prompt + response
    forward = forward_flops(model, samples * length, samples * attended(round(length)))
    flops = (2 + 3 + again) * forward / devices
    return sampling + rates.pass_seconds(Seconds(products=flops / rates.flops))


ROWS = (
    Row(
        "training Llama-3.1-8B, v6e-256, rows of 8,192",
        TIERING,
        7207,
        "tok/s a chip",
        # The recipe keeps queries, keys, values and the output of attention.
        lambda: train_rate(LLAMA, "v6e", 8192, share_of_layers(LLAMA, "gate up")),
        fitted=True,
    ),
    Row(
        "training Llama-2-70B, 512 chips of v5p, rows of 4,096",
        TIERING,
        692,
        "tok/s a chip",
        lambda: train_rate(LLAMA_2_70B, "v5p", 4096, share_of_layers(LLAMA_2_70B, "gate up")),
        fitted=True,
    ),
    Row(
        "a GRPO step of Llama-3.1-8B, 16 H100, 2,048 x 1,019 tokens",
        NEMO,
        92.8,
        "s",
        lambda: grpo_seconds(LLAMA, "h100", 16, ways=1, response=869, again=1),
        fitted=True,
    ),
    Row(
        "training Llama-3.1-70B, v6e-256, rows of 8,192",
        TIERING,
        960,
        "tok/s a chip",
        lambda: train_rate(LLAMA_70B, "v6e", 8192, share_of_layers(LLAMA_70B, "o gate up")),
    ),
    Row(
        "training Llama-2-70B, v6e-256, rows of 4,096, remat full",
        TIERING,
        900,
        "tok/s a chip",
        lambda: train_rate(LLAMA_2_70B, "v6e", 4096, 1),
    ),
    *(
        Row(
            f"training {size}, v5e-256, rows of 2,048, remat full",
            V5E,
            figure,
            "TFLOP/s a chip",
            lambda: model_tflops("v5e"),
        )
        for size, figure in (("16B", 120), ("32B", 132), ("64B", 118))
    ),
    *(
        Row(
            f"a decode step of {name}, v6e-4, {rows} rows, prompts of {prompt:,}",
            SGLANG,
            figure,
            "ms",
            partial(step_ms, model, RATES["v6e"], 4, rows, prompt + 512),
        )
        for name, model, rows, prompt, figure in (
            ("Qwen3-8B", QWEN, 64, 1024, 11.11),
            ("Qwen3-8B", QWEN, 256, 1024, 30.00),
            ("Qwen3-8B", QWEN, 64, 4096, 21.13),
            ("Qwen3-8B", QWEN, 64, 8192, 31.98),
            ("Qwen3-32B", QWEN_32B, 64, 1024, 29.48),
        )
    ),
    Row(
        "a GRPO step of Qwen3-32B, 32 H100, 2,048 x 3,251 tokens",
        NEMO,
        376,
        "s",
        lambda: grpo_seconds(QWEN_32B, "h100", 32, ways=4, response=3101, again=0),
    ),
)


def table() -> str:
    """Write the rows as a table."""
    lines = ["| what | published | by formula | off | source |", "|---|---|---|---|---|"]
    for row in ROWS:
        off = "fitted" if row.fitted else f"{100 * row.off:+.0f} %"
        figures = f"{row.figure:,g} {row.unit} | {row.computed():,.4g}"
        lines.append(f"| {row.what} | {figures} | {off} | {row.source} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
