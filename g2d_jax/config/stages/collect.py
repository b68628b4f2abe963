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
    pass rates give no pair.

    rollouts: "sample"; "archive" takes the groups that the policy's own online stage drew; the name
    of another collect stage takes those it has, whatever this one says of prompts and sampling. dump:
    those that other tools wrote, in place of sampled ones.
    """

    kind: Literal["collect"] = "collect"
    policy: Policy = "warmup"
    rollouts: Rollouts = "sample"
    dump: Dump = Dump()
    prompts: Positive = 1024
    num_generations: Positive = 8
    sampling: Sampling = Sampling()
    pairs_per_prompt: Positive = 4
    # which pairs to keep when max_pairs is set
    select: Literal["all", "random", "uncertain", "confident"] = "all"
    max_pairs: Positive | None = None  # unset: all pairs

    @property
    def part(self) -> int:
        """The prompts of a file: at most half of all, so that a small collection is continued
        too."""
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
        """Return train, of rollouts that it draws."""
        return ("train",) if self.samples else ()

    def policies_sampled(self, name: str) -> set[str]:
        """Return the policy that it draws from."""
        return {self.policy} if self.samples else set()

    def issues(self, run: Run) -> Iterator[Issue]:
        """Yield settings that cannot work together, and rollouts of nothing, of another policy, or
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
                f"is {self.rollouts!r}, and dump.path is set",
                "leave one of them out",
            )
        if self.select in ("uncertain", "confident"):
            yield from self._select_issues(run)

    def _sampling_issues(self) -> Iterator[Issue]:
        """Yield sampling that no pair can come from."""
        if self.num_generations < 2:
            yield error(
                "num_generations",
                f"is {self.num_generations}, and a preference pair takes two responses to a prompt",
                "set it to 2 or more, 8 say",
            )
        if not self.sampling.temperature:
            yield error(
                "sampling.temperature",
                "is 0, and greedy responses to a prompt are all the same, which gives no pair",
                "set it above 0",
            )

    def _rollout_issues(self, stages: Stages) -> Iterator[Issue]:
        """Yield another stage whose rollouts cannot be taken."""
        other = stages.get(self.rollouts)
        if not isinstance(other, Collect):
            yield error(
                "rollouts",
                f"is {self.rollouts!r}, which is no collect stage",
                "for those of an online stage write archive, and name it as policy; for files of "
                "other tools set dump.path",
            )
        elif other.policy != self.policy:
            yield error(
                "policy",
                f"is {self.policy!r}, and the rollouts of {self.rollouts!r} are those of "
                f"{other.policy!r}",
                "make both the same",
            )

    def _archive_issues(self, stages: Stages) -> Iterator[Issue]:
        """Yield an archive of no stage, or of no steps."""
        source = PolicyName.parse(self.policy)
        online = stages.get(source.own_stage)
        if not isinstance(online, Online):
            yield error(
                "policy",
                f'is {self.policy!r}, and rollouts="archive" needs an online stage of this run',
            )
        # Before the first update no rollouts were sampled: an archive of 0 steps is empty.
        elif 0 in (source.number, online.steps):
            yield error(
                "rollouts",
                f'is "archive", and there is none before {self.policy!r}, which is at step 0',
                "use sample",
            )

    def _select_issues(self, run: Run) -> Iterator[Issue]:
        """Yield a choice among pairs that is none, or that lacks the entropies."""
        if self.max_pairs is None:
            yield error(
                "select",
                f"is {self.select!r}, which chooses among pairs",
                'set max_pairs to how many, or select="all"',
            )
        if run.engine.is_server or drawn_with(self, run.stages).dump.path:
            yield error(
                "select",
                f"is {self.select!r}, which needs token entropies, and "
                f"{'a server' if run.engine.is_server else 'a dump'} gives none",
                "use all or random",
            )


collect = stage_of(Collect)


def rollout_origin(name: str, stages: Stages) -> str:
    """Return the collect stage that a collect stage's rollouts are from in the end: itself, if it
    has its own."""
    stage = stages[name]
    while isinstance(stage, Collect) and (other := stage.rollout_source(stages)):
        name, stage = other, stages[other]
    return name


def drawn_with(stage: Collect, stages: Stages) -> Collect | Online:
    """Return the stage whose settings a collect stage's rollouts were drawn with: of an archive the
    online one."""
    other = stage.rollout_source(stages)
    origin = stage if other is None else stages[rollout_origin(other, stages)]
    assert isinstance(origin, Collect)
    online = stages.get(own_stage(origin.policy))
    return online if origin.rollouts == "archive" and isinstance(online, Online) else origin
