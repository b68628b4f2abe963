"""The settings of offline DPO."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from g2d_jax.config.build import stage_of
from g2d_jax.config.section import Issue, OnError, Policy, Positive, Preferences, Run, error
from g2d_jax.config.stages.collect import Collect, drawn_with
from g2d_jax.config.stages.dpo import DPOLoss
from g2d_jax.config.stages.stage import Stages, TrainingStage
from g2d_jax.config.training import Optimizer, Sampling


class Offline(DPOLoss, TrainingStage):
    """Offline DPO from a policy on a preference dataset; the reference is the policy it starts
    from."""

    kind: Literal["offline"] = "offline"
    policy: Policy = "warmup"
    preferences: Preferences = "collect"
    epochs: Positive = 1
    batch_size: Positive = 64
    # tokens of prompt and response in a file of pairs; longer pairs are left out
    max_length: Positive | None = None
    on_error: OnError = "raise"  # for a file of pairs
    optimizer: Optimizer = Optimizer(eps=1e-4)

    shapes_from_data = True

    def longest_row(self, prompt: int, stages: Stages) -> int:
        """Return the tokens of the longest pair: from a collect stage's responses, or two of
        max_length. A file of pairs without that limit uses the default length."""
        collect = stages.get(self.preferences)
        if isinstance(collect, Collect):
            sampling = drawn_with(collect, stages).sampling
        elif self.max_length:
            return 2 * self.max_length
        else:
            sampling = Sampling()
        return prompt + 2 * sampling.max_new_tokens

    def stages_read(self, stages: Stages) -> tuple[str, ...]:
        """Return the collect stage whose pairs it trains on."""
        return (self.preferences,) if self.preferences in stages else ()

    def issues(self, run: Run) -> Iterator[Issue]:
        """Yield a stage that collects no pairs, and settings for a file of pairs."""
        yield from super().issues(run)
        yield from self.loss_issues()
        source = run.stages.get(self.preferences)
        if source is not None and source.kind != "collect":
            yield error("preferences", f"is {self.preferences!r}, a stage that collects no pairs")
            return
        for name in ("max_length", "on_error"):
            if source is not None and getattr(self, name) != getattr(Offline(), name):
                yield error(
                    name,
                    f"is for a file of pairs, but preferences is the stage {self.preferences!r}",
                    "leave it unset",
                )


offline = stage_of(Offline)
