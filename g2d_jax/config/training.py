"""The optimiser and sampling of stages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, Any, Literal

from g2d_jax.config.section import (
    Bounds,
    Dtype,
    Fraction,
    Issue,
    NonNegative,
    NotNegativeFloat,
    Positive,
    Run,
    Section,
    error,
    warning,
)
from g2d_jax.records import SamplingParams, stop_fault

HIGHEST_RATE = 0.05  # a learning rate above is more often a mistake than intended


class Optimizer(Section):
    """The optimiser, AdamW or Adafactor. schedule: "constant", or "linear" or "cosine" decay after
    warmup_steps."""

    # "adafactor" ignores moment_dtype, b2 and eps
    kind: Literal["adamw", "adafactor"] = "adamw"
    moment_dtype: Dtype = "float32"  # of AdamW's moments
    learning_rate: Annotated[float, Bounds(least=0, below=math.inf)] = field(
        default=1e-6, kw_only=False
    )
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegative = 0
    min_lr_ratio: Fraction = 0.0  # the end of a decay, as a fraction of the learning rate
    b2: Annotated[float, Bounds(least=0, below=1)] = 0.999
    eps: NotNegativeFloat = 1e-8
    weight_decay: NotNegativeFloat = 0.0
    max_grad_norm: NotNegativeFloat = 1.0  # L2 over all parameters; 0: no clipping

    def issues(self, run: Run) -> Iterator[Issue]:
        """Yield settings that the optimiser or schedule ignores, and extreme learning rates."""
        rate = self.learning_rate
        if rate == 0:
            yield warning("learning_rate", "is 0: the stage trains nothing")
        if rate > HIGHEST_RATE:
            yield warning(
                "learning_rate",
                f"is {rate:g}: every update moves each parameter by about that much, which ruins a "
                "model",
                "try 1e-6 for all parameters, 1e-5 for adapters, 1e-4 to 1e-3 for a tiny model",
            )
        if self.min_lr_ratio and self.schedule == "constant":
            yield error(
                "min_lr_ratio",
                f"is {self.min_lr_ratio}, but the learning rate is constant",
                "set schedule to 'linear' or 'cosine'",
            )
        if self.kind == "adafactor" and self.moment_dtype != "float32":
            yield error(
                "moment_dtype",
                "is for AdamW's moments, which Adafactor does not have",
                "leave it at float32",
            )


class Sampling(Section):
    """Settings of sampling: temperature 0 is greedy, top_p 1 and top_k 0 are off."""

    max_new_tokens: Positive = field(default=256, kw_only=False)
    temperature: NotNegativeFloat = 1.0
    top_p: Annotated[float, Bounds(above=0, most=1)] = 1.0
    top_k: NonNegative = 0
    # texts that end a response, in addition to the tokenizer's stop tokens
    stop: tuple[str, ...] = ()

    def issues(self, run: Run) -> Iterator[Issue]:
        """Yield stop strings that cannot end a response."""
        if fault := stop_fault(self.stop):
            yield error("stop", fault)

    def answers(self, count: int) -> int:
        """Return how many of `count` responses to a prompt are sampled: one if greedy, since all
        are equal."""
        return count if self.temperature else 1

    def params(self, stop_ids: tuple[int, ...] = (), **changes: Any) -> SamplingParams:
        """Return the sampler's parameters. stop_ids: tokens that end a response. changes: of the
        section's fields."""
        return SamplingParams(**{**self.to_dict(), "stop_ids": stop_ids, **changes})
