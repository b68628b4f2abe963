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
    """Offline DPO from a policy on a preference dataset; the reference is the policy it starts from
    (SimPO has none). The pairs' log-probabilities and implicit rewards are measured before and
    after; that cost is counted apart."""

    kind: Literal["offline"] = "offline"
    policy: Policy = "warmup"
    preferences: Preferences = "collect"
    """A collect stage; a folder of Parquet files as it writes them; or a set from other tools
    (docs/rollouts.md#preference-sets): JSONL, JSON, Parquet or `hub:owner/name`."""
    epochs: Positive = 1
    """Passes over the pairs, each in another order."""
    batch_size: Positive = 64
    """Pairs of an update."""
    max_length: Positive | None = None
    """For a set from other tools: the longest prompt and response, in tokens. Longer pairs are left
    out and counted. Unset: the model's positions."""
    on_error: OnError = "raise"
    """For a set from other tools: broken rows are left out and counted. `raise` allows 5 % of all
    rows, `skip` any share."""
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
