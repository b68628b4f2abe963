"""The settings of evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from g2d_jax.config.build import stage_of
from g2d_jax.config.section import Issue, Policies, Positive, Run, Split, error, warning
from g2d_jax.config.stages.stage import Stage, Stages
from g2d_jax.config.training import Sampling


class Evaluate(Stage):
    """Accuracy of policies on held-out problems."""

    kind: Literal["evaluate"] = "evaluate"
    policies: Policies = ("sft", "warmup", "dpo")
    """The policies that it compares."""
    split: Split = "test"
    """Problems of `data.dev` or `data.test`."""
    num_generations: Positive = 4
    """Responses to a problem; one at temperature 0."""
    sampling: Sampling = Sampling()
    pass_at: tuple[Positive, ...] = (1, 2, 4)
    """The k of pass@k, each at most `num_generations`, or 1 at temperature 0. Larger ones
    of the default are left out, others refused."""
    greedy: bool = True
    """Also measure greedy answers."""

    @property
    def shown_pass_at(self) -> tuple[int, ...]:
        """The k of pass_at that the number of answers allows. Larger default k are dropped; others
        are an error."""
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

    def issues(self, run: Run) -> Iterator[Issue]:
        """Yield an evaluation without policies, and a pass@k of more answers than are sampled,
        unless it is the default."""
        yield from super().issues(run)
        if self.num_generations > 1 and not self.sampling.temperature:
            yield warning(
                "num_generations",
                f"is {self.num_generations}, but sampling.temperature is 0, so all answers to a "
                "problem are the same: one is sampled",
            )
        if not self.policies:
            yield error("policies", "is empty", "name at least one policy")
        if len(set(self.policies)) < len(self.policies):
            yield error("policies", "names a policy twice", "name each once")
        is_greedy = not self.sampling.temperature
        many = [k for k in self.pass_at if k not in self.shown_pass_at]
        if many and self.pass_at != Evaluate().pass_at:
            yield error(
                "pass_at",
                f"has {many[0]}, but num_generations is {self.num_generations}"
                f"{', and sampling.temperature 0 allows one answer' * is_greedy}",
                f"remove these, or set num_generations to {max(many)} or more"
                f"{' and a temperature above 0' * is_greedy}",
            )


evaluate = stage_of(Evaluate)
