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
    """The optimiser, AdamW or Adafactor."""

    kind: Literal["adamw", "adafactor"] = "adamw"
    """`adafactor` factors the second moment and has no first; it ignores `moment_dtype`, `b2` and
    `eps`. Its learning rate is that of updates of at most 1 in root mean square."""
    moment_dtype: Dtype = "float32"
    """The type of AdamW's moments. `bfloat16` needs 4 bytes a parameter in place of 8, and rounds
    the second moment at random (`training/moments.py`)."""
    learning_rate: Annotated[float, Bounds(least=0, below=math.inf)] = field(
        default=1e-6, kw_only=False
    )
    """The learning rate after `warmup_steps`."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate decays over the stage's updates."""
    warmup_steps: NonNegative = 0
    """Updates in which the learning rate rises from 0."""
    min_lr_ratio: Fraction = 0.0
    """Where `linear` and `cosine` end, as a fraction of the learning rate."""
    b2: Annotated[float, Bounds(least=0, below=1)] = 0.999
    """Decay of AdamW's second moment."""
    eps: NotNegativeFloat = 1e-8
    """AdamW's epsilon. Online and offline stages begin with the papers' 1e-4, which
    `settings.optimizer(RATE)` replaces."""
    weight_decay: NotNegativeFloat = 0.0
    """Decoupled weight decay."""
    max_grad_norm: NotNegativeFloat = 1.0
    """The gradient is clipped at this L2 norm over all parameters. 0: never."""

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
    """How responses are sampled."""

    max_new_tokens: Positive = field(default=256, kw_only=False)
    """The longest response, in tokens."""
    temperature: NotNegativeFloat = 1.0
    """Divides the logits. 0: greedy."""
    top_p: Annotated[float, Bounds(above=0, most=1)] = 1.0
    """Sample from the likeliest tokens of this total probability. 1: off."""
    top_k: NonNegative = 0
    """Sample from this many of the likeliest tokens. 0: off."""
    stop: tuple[str, ...] = ()
    """Texts that end a response (docs/what-runs-when.md#stop-strings), in addition to the
    tokenizer's stop tokens: at most 16, of 256 characters. Typed as in Python:
    `'--config.stages.warmup.sampling.stop=["\\n\\n"]'`."""

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
