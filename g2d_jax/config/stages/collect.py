"""The settings of collecting rollouts and preference pairs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from g2d_jax.config.build import stage_of
from g2d_jax.config.policy_name import PolicyName, own_stage
from g2d_jax.config.section import Issue, Policy, Positive, Rollouts, Run, error
from g2d_jax.config.stages.dump import Dump
from g2d_jax.config.stages.online import Online
from g2d_jax.config.stages.stage import PassRates, Stage, Stages
from g2d_jax.config.training import Sampling


class Collect(PassRates, Stage):
    """Rollouts of a frozen policy, and preference pairs from them. Prompts outside the window of
    pass rates yield no pair."""

    kind: Literal["collect"] = "collect"
    policy: Policy = "warmup"
    """The policy that it samples from."""
    rollouts: Rollouts = "sample"
    """`sample`; `archive`: the groups that the policy's online stage sampled; or another collect
    stage: its rollouts. `prompts`, `num_generations` and `sampling` are for `sample` alone."""
    dump: Dump = Dump()
    prompts: Positive = 1024
    """Prompts, at most those of `data.train`; the run logs if there are fewer."""
    num_generations: Positive = 8
    """Responses to a prompt."""
    sampling: Sampling = Sampling()
    pairs_per_prompt: Positive = 4
    """The most pairs of a prompt."""
    select: Literal["all", "random", "uncertain", "confident"] = "all"
    """The pairs that `max_pairs` keeps. `all` and `random`: a random subset, nested for growing
    numbers. `uncertain`, `confident`: prompts of the highest or lowest mean token entropy first."""
    max_pairs: Positive | None = None
    """The most pairs. Unset: all."""

    @property
    def part(self) -> int:
        """The prompts of a file: at most half of all, so that a small collection can also
        resume."""
        return min(max(self.prompts // 2, 1), 128)

    @property
    def samples(self) -> bool:
        """True if it samples its rollouts."""
        return self.rollouts == "sample" and not self.dump.path

    def stages_read(self, stages: Stages) -> tuple[str, ...]:
        """Return the collect stage whose rollouts it reads."""
        other = self.rollout_source(stages)
        return () if other is None else (other,)

    def rollout_source(self, stages: Stages) -> str | None:
        """Return the collect stage whose rollouts it reads, None if it has its own."""
        return self.rollouts if isinstance(stages.get(self.rollouts), Collect) else None

    def splits_read(self) -> tuple[str, ...]:
        """Return train if it samples."""
        return ("train",) if self.samples else ()

    def policies_sampled(self, name: str) -> set[str]:
        """Return the policy that it samples from."""
        return {self.policy} if self.samples else set()

    def issues(self, run: Run) -> Iterator[Issue]:
        """Yield conflicting settings, empty rollouts, rollouts of another policy, and rollouts
        without the entropies that `select` needs."""
        yield from super().issues(run)
        if self.samples:
            yield from self._sampling_issues()
        elif self.rollouts == "archive":
            yield from self._archive_issues(run.stages)
        elif self.rollouts != "sample":
            yield from self._rollout_issues(run.stages)
        if self.dump.path and self.rollouts != "sample":
            yield error(
                "rollouts",
                f"is {self.rollouts!r}, but dump.path is set",
                "remove one of them",
            )
        if self.select in ("uncertain", "confident"):
            yield from self._select_issues(run)

    def _sampling_issues(self) -> Iterator[Issue]:
        """Yield sampling that yields no pair."""
        if self.num_generations < 2:
            yield error(
                "num_generations",
                f"is {self.num_generations}, but a preference pair needs two responses to a prompt",
                "set it to 2 or more, such as 8",
            )
        if not self.sampling.temperature:
            yield error(
                "sampling.temperature",
                "is 0, so all responses to a prompt are the same and form no pair",
                "set it above 0",
            )

    def _rollout_issues(self, stages: Stages) -> Iterator[Issue]:
        """Yield a stage whose rollouts it cannot reuse."""
        other = stages.get(self.rollouts)
        if not isinstance(other, Collect):
            yield error(
                "rollouts",
                f"is {self.rollouts!r}, which is not a collect stage",
                "for the rollouts of an online stage use 'archive', and name the stage as "
                "policy; for files of other tools set dump.path",
            )
        elif other.policy != self.policy:
            yield error(
                "policy",
                f"is {self.policy!r}, but the rollouts of {self.rollouts!r} are from "
                f"{other.policy!r}",
                "set both to the same policy",
            )

    def _archive_issues(self, stages: Stages) -> Iterator[Issue]:
        """Yield an archive without an online stage, or without steps."""
        source = PolicyName.parse(self.policy)
        online = stages.get(source.own_stage)
        if not isinstance(online, Online):
            yield error(
                "policy",
                f'is {self.policy!r}, but rollouts="archive" needs an online stage of this run',
            )
        # No rollouts are sampled before the first update: an archive of 0 steps is empty.
        elif 0 in (source.number, online.steps):
            yield error(
                "rollouts",
                f'is "archive", but {self.policy!r} is at step 0, before any rollouts',
                "use sample",
            )

    def _select_issues(self, run: Run) -> Iterator[Issue]:
        """Yield a `select` that has no effect, or that lacks entropies."""
        if self.max_pairs is None:
            yield error(
                "select",
                f"is {self.select!r}, but without max_pairs all pairs are kept",
                'set max_pairs, or select="all"',
            )
        if run.engine.is_server or drawn_with(self, run.stages).dump.path:
            yield error(
                "select",
                f"is {self.select!r}, which needs token entropies, but "
                f"{'a server' if run.engine.is_server else 'a dump'} has none",
                "use all or random",
            )


collect = stage_of(Collect)


def rollout_origin(name: str, stages: Stages) -> str:
    """Return the collect stage that sampled a collect stage's rollouts: itself, if it has its
    own."""
    stage = stages[name]
    while isinstance(stage, Collect) and (other := stage.rollout_source(stages)):
        name, stage = other, stages[other]
    return name


def drawn_with(stage: Collect, stages: Stages) -> Collect | Online:
    """Return the stage whose settings sampled a collect stage's rollouts: the online stage for an
    archive."""
    other = stage.rollout_source(stages)
    origin = stage if other is None else stages[rollout_origin(other, stages)]
    assert isinstance(origin, Collect)
    online = stages.get(own_stage(origin.policy))
    return online if origin.rollouts == "archive" and isinstance(online, Online) else origin
