"""The settings of selecting a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar, Literal

from g2d_jax.config.build import stage_of
from g2d_jax.config.section import Issue, NonNegative, Policy, Run, Split, error
from g2d_jax.config.stages.online import Online
from g2d_jax.config.stages.stage import Stage, Stages, successive
from g2d_jax.config.training import Sampling


class BestCheckpoint(Stage):
    """The best of a stage's kept checkpoints on the problems of dev, with one answer to each. A
    task's score is its mean reward; without right and wrong, divided by the mean length in tokens.
    Tasks count equally. The stage's name is a policy."""

    kind: Literal["best_checkpoint"] = "best_checkpoint"
    policy: Policy = "train"
    """The stage whose checkpoints it compares."""
    steps: tuple[NonNegative, ...] = ()
    """The kept steps that it compares. (): all."""
    sampling: Sampling = Sampling(temperature=0.6, top_p=0.9)

    is_policy = True
    num_generations: ClassVar[int] = 1
    split: ClassVar[Split] = "dev"
    greedy: ClassVar[bool] = False

    def with_policies(self, rename: Callable[[str], str]) -> BestCheckpoint:
        """Return itself: it compares steps of a stage of this run."""
        return self

    def policy_count(self, stages: Stages) -> int:
        """Count the policies that it compares, 1 while their steps are unknown."""
        return len(self.steps or stages[self.policy].kept_steps()) or 1

    def splits_read(self) -> tuple[str, ...]:
        """Return dev."""
        return ("dev",)

    def policies_sampled(self, name: str) -> set[str]:
        """Return its policy's checkpoints."""
        return successive(name)

    def step_fault(self, step: str) -> str:
        """Return that it chooses the step itself."""
        return f"a best_checkpoint stage chooses the step: remove @{step}"

    def issues(self, run: Run) -> Iterator[Issue]:
        """Yield a policy that no stage here trains, and steps that it does not keep."""
        yield from super().issues(run)
        source = run.stages.get(self.policy)
        if source is None or not source.trains:
            yield error(
                "policy",
                f"is {self.policy!r}",
                "name a stage of this run that trains, without a step; set steps instead",
            )
            return
        kept = source.kept_steps() if isinstance(source, Online) else []
        unknown = sorted({*self.steps} - {*kept})
        if unknown:
            listed = ", ".join(map(str, kept)) or "its last step only"
            yield error("steps", f"has {unknown[0]}, but {self.policy} keeps {listed}")
        if self.steps and isinstance(source, Online) and source.budget.amount:
            yield error(
                "steps",
                f"is {self.steps}, but {self.policy} may end earlier",
                "leave it at () for all",
            )


best_checkpoint = stage_of(BestCheckpoint)
