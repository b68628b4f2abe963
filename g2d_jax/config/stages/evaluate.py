"""The settings of evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from g2d_jax.config.build import stage_of
from g2d_jax.config.section import FieldError, Policies, Positive, Split
from g2d_jax.config.stages.stage import Stage, Stages
from g2d_jax.config.training import Sampling


class Evaluate(Stage):
    """Accuracy of policies on held-out problems."""

    kind: Literal["evaluate"] = "evaluate"
    policies: Policies = ("sft", "warmup", "dpo")
    split: Split = "test"  # which of data.dev and data.test
    num_generations: Positive = 4
    sampling: Sampling = Sampling()
    pass_at: tuple[Positive, ...] = (1, 2, 4)
    greedy: bool = True

    def conflicts(self) -> Iterator[ValueError]:
        """Refuse an evaluation of nothing."""
        if not self.policies:
            yield FieldError("policies", "is empty: name at least one policy")

    @property
    def told_at(self) -> tuple[int, ...]:
        """The k of pass_at that so many answers tell. Of the default some may go; of others that is
        refused."""
        most = self.sampling.answers(self.num_generations)
        return tuple(k for k in self.pass_at if k <= most)

    comes_last = True

    def policy_count(self, stages: Stages) -> int:
        """Count the policies that it compares."""
        return len(self.policies)

    def splits_read(self) -> tuple[str, ...]:
        """Return the split whose problems are answered."""
        return (self.split,)

    def policies_sampled(self, name: str) -> set[str]:
        """Return the policies that it compares."""
        return {*self.policies}

    def conflicts_among(self, name: str, stages: Stages) -> Iterator[ValueError]:
        """Refuse a pass@k of more answers than are sampled.

        The default is nobody's wish: of it those are told that can be.
        """
        is_greedy = not self.sampling.temperature
        many = [k for k in self.pass_at if k not in self.told_at]
        if many and self.pass_at != Evaluate().pass_at:
            yield ValueError(
                f"pass_at has {many[0]}, and num_generations is {self.num_generations}"
                f"{', at sampling.temperature 0, which gives one answer' * is_greedy}: "
                f"pass@{many[0]} takes at least {many[0]} answers to a problem. Set pass_at to "
                f"{self.told_at}, or num_generations to {max(many)} or more"
                f"{' and a temperature above 0' * is_greedy}"
            )


evaluate = stage_of(Evaluate)
