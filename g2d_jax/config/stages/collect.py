"""The settings of collecting rollouts and preference pairs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Literal

from g2d_jax.config.build import stage_of
from g2d_jax.config.policy_name import PolicyName, own_stage
from g2d_jax.config.section import Issue, OnError, Policy, Positive, Rollouts, Run, error
from g2d_jax.config.stages.online import Online, dump, dump_issues
from g2d_jax.config.stages.stage import NeededFiles, Stage, Stages, pass_rate_issues
from g2d_jax.config.training import Sampling


class Collect(Stage):
    """Rollouts of a frozen policy, and preference pairs from them.

    rollouts: "sample"; "archive" takes the groups that the policy's own online stage drew; the name
    of another collect stage takes those it has, whatever this one says of prompts and sampling; or
    a dump's path, see `data.dumps`.
    columns: of a dump, from our names to its own: {"reward": "accuracy_reward"}.
    """

    kind: Literal["collect"] = "collect"
    policy: Policy = "warmup"
    rollouts: Rollouts = "sample"
    columns: Mapping[str, str] = field(default_factory=dict)
    on_error: OnError = "raise"  # of a dump: "skip" leaves any number of broken rows out
    prompts: Positive = 1024
    part: Positive = 128  # prompts of a file
    num_generations: Positive = 8
    sampling: Sampling = Sampling()
    # names the order of prompts and the random draws; unset: the stage's own
    stream: str | None = None
    pairs_per_prompt: Positive = 4
    min_pass_rate: float = 0.0  # prompts outside this window of pass rates give no pair
    max_pass_rate: float = 1.0
    # which pairs to keep when max_pairs is set
    select: Literal["all", "random", "uncertain", "confident"] = "all"
    max_pairs: Positive | None = None  # unset: all pairs

    def stages_read(self, stages: Stages) -> tuple[str, ...]:
        """Return the collect stage whose rollouts it reads."""
        other = self.rollout_source(stages)
        return () if other is None else (other,)

    def rollout_source(self, stages: Stages) -> str | None:
        """Return the collect stage whose rollouts it reads, None if it has its own. A stage wins
        over a file."""
        if self.rollouts in ("sample", "archive") or not isinstance(
            stages.get(self.rollouts), Collect
        ):
            return None
        return self.rollouts

    def splits_read(self) -> tuple[str, ...]:
        """Return train, of rollouts that it draws."""
        return ("train",) if self.rollouts == "sample" else ()

    def files_read(self, stages: Stages) -> tuple[NeededFiles, ...]:
        """Return the dump that it takes rollouts from."""
        if self.rollouts in ("sample", "archive", *stages):
            return ()
        return (dump(self.rollouts, "sample, archive, a collect stage"),)

    def policies_sampled(self, name: str) -> set[str]:
        """Return the policy that it draws from."""
        return {self.policy} if self.rollouts == "sample" else set()

    def issues(self, run: Run) -> Iterator[Issue]:
        """Yield settings that cannot work together, and rollouts of nothing, of another policy, or
        without the entropies that `select` needs."""
        yield from super().issues(run)
        yield from dump_issues(self)
        yield from pass_rate_issues(self.min_pass_rate, self.max_pass_rate, run)
        if self.rollouts == "sample":
            yield from self._sampling_issues()
        elif self.rollouts == "archive":
            yield from self._archive_issues(run.stages)
        elif self.rollouts in run.stages:
            yield from self._rollout_issues(run.stages[self.rollouts])
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

    def _rollout_issues(self, other: Stage) -> Iterator[Issue]:
        """Yield another stage whose rollouts cannot be taken."""
        if not isinstance(other, Collect):
            yield error(
                "rollouts",
                f"is {self.rollouts!r}, which is no collect stage",
                f'for those of an online stage: rollouts="archive" with policy={self.rollouts!r}',
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
        read = drawn_with(self, run.stages).rollouts
        if run.engine.is_server or read not in ("sample", "archive"):
            yield error(
                "select",
                f"is {self.select!r}, which needs token entropies, and "
                f"{'a server' if run.engine.is_server else read} gives none",
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
