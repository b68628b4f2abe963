"""The settings of collecting rollouts and preference pairs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Literal

from g2d_jax.config.build import stage_of
from g2d_jax.config.policy_name import PolicyName, own_stage
from g2d_jax.config.section import Policy, Positive, Rollouts
from g2d_jax.config.stages.online import Online, columns_conflicts, dump
from g2d_jax.config.stages.stage import NeededFiles, Stage, Stages
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

    @property
    def needs_pass_rates(self) -> bool:
        """True if prompts give pairs by their pass rate."""
        return (self.min_pass_rate, self.max_pass_rate) != (0, 1)

    def conflicts(self) -> Iterator[ValueError]:
        """Refuse settings that cannot work together, or that would change nothing."""
        yield from columns_conflicts(self.columns, self.rollouts)
        if self.select in ("uncertain", "confident") and self.max_pairs is None:
            yield ValueError(
                f"select={self.select!r} chooses among pairs: set max_pairs to how many, or "
                'select="all"'
            )
        if not 0 <= self.min_pass_rate <= self.max_pass_rate <= 1:
            yield ValueError(
                f"the pass rates {self.min_pass_rate} to {self.max_pass_rate} are no window "
                "within 0 to 1"
            )

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

    def conflicts_among(self, name: str, stages: Stages) -> Iterator[ValueError]:
        """Refuse rollouts of nothing, of another policy, or without the entropies that it goes
        by."""
        if self.rollouts == "sample" and self.num_generations < 2:
            yield ValueError(
                f"num_generations is {self.num_generations}, and a preference pair takes two "
                "responses to a prompt, one better than the other: set it to 2 or more, 8 say"
            )
        if self.rollouts == "sample" and not self.sampling.temperature:
            yield ValueError(
                "sampling.temperature is 0, and greedy responses to a prompt are all the same, of "
                "which no pair can be made: set it above 0"
            )
        if self.rollouts == "archive":
            yield from self._archive_conflicts(stages)
        elif self.rollouts in stages:
            other = stages[self.rollouts]
            if not isinstance(other, Collect):
                yield ValueError(
                    f"rollouts is {self.rollouts!r}, a stage that is no collect stage; those of an "
                    "online stage are "
                    f'rollouts="archive" with policy={self.rollouts!r}'
                )
            elif other.policy != self.policy:
                yield ValueError(
                    f"rollouts of {self.rollouts!r} are those of policy {other.policy!r}: policy "
                    f"must be the same, got {self.policy!r}"
                )
        drawn = drawn_with(name, stages)
        if self.select in ("uncertain", "confident") and drawn.rollouts != "sample":
            yield ValueError(
                f"select={self.select!r} goes by token entropies, which the rollouts of "
                f"{drawn.rollouts} lack: use all or random"
            )

    def _archive_conflicts(self, stages: Stages) -> Iterator[ValueError]:
        """Refuse an archive of no stage, or of no steps."""
        source = PolicyName.parse(self.policy)
        online = stages.get(source.own_stage)
        if not isinstance(online, Online):
            yield ValueError(
                'rollouts="archive" needs a policy that is an online stage of this run, got '
                f"{self.policy!r}"
            )
        # Before the first update no rollouts were drawn: an archive of 0 steps is empty.
        elif 0 in (source.number, online.steps):
            yield ValueError(
                f'rollouts="archive" finds none before {self.policy!r}, which is 0 steps on: use '
                "sample"
            )

    def conflicts_served(self) -> Iterator[ValueError]:
        """Refuse what its sampling needs and a server does not give: entropies too."""
        yield from super().conflicts_served()
        if self.select in ("uncertain", "confident"):
            yield ValueError(
                f"select={self.select!r} has no token entropies to go by: use all or random"
            )


collect = stage_of(Collect)


def rollout_origin(name: str, stages: Stages) -> str:
    """Return the collect stage that a collect stage's rollouts are from in the end: itself, if it
    has its own."""
    stage = stages[name]
    while isinstance(stage, Collect) and (other := stage.rollout_source(stages)):
        name, stage = other, stages[other]
    return name


def drawn_with(name: str, stages: Stages) -> Collect | Online:
    """Return the stage whose settings a collect stage's rollouts were drawn with: of an archive the
    online one."""
    origin = stages[rollout_origin(name, stages)]
    assert isinstance(origin, Collect)
    drawn = stages[own_stage(origin.policy)] if origin.rollouts == "archive" else origin
    assert isinstance(drawn, Collect | Online)
    return drawn
