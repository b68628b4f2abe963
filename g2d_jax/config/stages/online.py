"""The settings of online RL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from typing import Annotated, Any, Literal, assert_never

from g2d_jax.config.build import stage_of
from g2d_jax.config.section import (
    Bounds,
    Issue,
    Measure,
    NonNegative,
    NotNegativeFloat,
    OnError,
    Policy,
    Positive,
    Rollouts,
    Run,
    Section,
    error,
    warning,
)
from g2d_jax.config.stages.dpo import OnlineDPO
from g2d_jax.config.stages.stage import (
    NeededFiles,
    Stages,
    TrainingStage,
    pass_rate_issues,
    successive,
    unread,
)
from g2d_jax.config.training import Optimizer, Sampling

GRPOLossType = Literal["sum", "seq-mean-token-sum", "grpo", "dr_grpo", "dapo", "bnpo", "cispo"]
ScaleRewards = Literal["none", "group", "batch"]


Group = Annotated[int, Bounds(least=2, why="an online stage compares the responses to a prompt")]


class Budget(Section):
    """The cost limit of an online stage with stop="budget"."""

    measure: Measure = "flops"
    amount: float = 0.0


class Difficulty(Section):
    """A filter by difficulty: of prompts with a running pass rate outside the window one in ten is
    drawn."""

    min_pass_rate: float = 0.0
    max_pass_rate: float = 1.0

    @property
    def window(self) -> tuple[float, float]:
        """The lowest and the highest pass rate."""
        return self.min_pass_rate, self.max_pass_rate

    def issues(self, run: Run) -> Iterator[Issue]:
        """Yield a window that is none, or that no reward gives."""
        yield from pass_rate_issues(*self.window, run)


OF_GRPO = (
    "loss_type",
    "scale_rewards",
    "scale_rewards_eps",
    "epsilon",
    "epsilon_high",
    "importance_sampling_level",
)
"""The settings of an online stage that a loss of pairs alone does not read, and may have: a study
varies `loss` alone."""


class Online(TrainingStage):
    """Online RL, and the range to offline: every `sync_every` updates the sampling policy becomes
    the trained one.

    An update trains on a batch of prompts_per_step prompts. At a synchronisation the rollouts of
    all batches up to the next one are drawn at once. keep: the steps K whose checkpoints stay for
    later stages (the last one always does).
    """

    kind: Literal["online"] = "online"
    policy: Policy = "sft"
    rollouts: Rollouts = "sample"  # or a dump's path: its groups in place of sampled ones
    columns: Mapping[str, str] = field(default_factory=dict)  # of a dump, see `data.dumps`
    on_error: OnError = "raise"  # of a dump: "skip" leaves any number of broken rows out
    steps: NonNegative = 20
    keep: tuple[NonNegative, ...] = ()
    # "budget" may end it earlier: stages/early_stopping.py
    stop: Literal["steps", "budget"] = "steps"
    budget: Budget = Budget()
    prompts_per_step: Positive = 32
    num_generations: Group = 8
    sampling: Sampling = Sampling()
    # names the order of prompts and the random draws; unset: the stage's own
    stream: str | None = None
    sync_every: NonNegative = 1  # updates; 0 is never: offline
    # whether the reference becomes the sampling policy at each synchronisation
    reference_sync: bool = False
    # updates on every batch of rollouts; sync_every must be a multiple
    num_iterations: Positive = 1
    loss: Literal["grpo", "raft", "dpo", "group_dpo"] = "grpo"
    # GRPO
    loss_type: GRPOLossType = "sum"
    scale_rewards: ScaleRewards = "none"
    scale_rewards_eps: Annotated[float, Bounds(above=0)] = 1e-4  # beside the standard deviation
    epsilon: NotNegativeFloat = 0.2
    epsilon_high: NotNegativeFloat | None = None
    beta: NotNegativeFloat = 0.0
    importance_sampling_level: Literal["token", "sequence"] = "token"  # "sequence" is GSPO
    # truncated importance sampling of trainer against sampler; 0: off
    importance_cap: NotNegativeFloat = 0.0
    # DPO
    dpo: OnlineDPO = OnlineDPO()
    grpo_coef: NotNegativeFloat = 0.0  # times the GRPO loss, beside "group_dpo"
    # both times the mean next-token entropy of the responses, which is rewarded
    entropy_coef: NotNegativeFloat = 0.0
    mask_truncated: bool = False  # leave responses that reached max_new_tokens out of the loss
    # tokens before max_new_tokens over which a reward falls linearly by 1 (DAPO)
    overlong_buffer: NonNegative = 0
    # more rounds of prompts, at most, in place of those without a signal
    dynamic_sampling: NonNegative = 0
    drop_solved: NonNegative = 0  # leave out prompts after so many groups of one reward; 0: none
    difficulty: Difficulty = Difficulty()
    patience: Positive = 50  # stop after so many steps in a row without any reward signal
    optimizer: Optimizer = Optimizer(eps=1e-4)

    @property
    def is_preference_loss(self) -> bool:
        """True if the loss is of chosen against rejected responses, False if of advantages.

        Raises AssertionError for a loss that nobody has said it of.
        """
        match self.loss:
            case "grpo" | "raft":
                return False
            case "dpo" | "group_dpo":
                return True
            case _:
                assert_never(self.loss)

    @property
    def compares(self) -> bool:
        """True if the loss compares the policy with a reference."""
        return bool(self.beta or (self.is_preference_loss and self.dpo.compares))

    def longest_row(self, prompt: int, stages: Stages) -> int:
        """Return the tokens of the longest group that has to lie in one row: a response, or those
        that a loss of preferences compares."""
        responses = self.compared if self.is_preference_loss else 1
        return prompt + responses * self.sampling.max_new_tokens

    @property
    def compared(self) -> int:
        """The responses to a prompt that are trained on: a pair, or all."""
        return 2 if self.loss == "dpo" else self.num_generations

    @property
    def has_ratio(self) -> bool:
        """True if the loss weighs tokens by a ratio of policies, as GRPO's does.

        Responses of another policy than the trainer's own then need importance_cap: those of a
        server, and of a dump with log-probabilities.
        """
        return self.loss == "grpo" or bool(self.grpo_coef)

    @property
    def has_fixed_reference(self) -> bool:
        """True if the loss compares the policy with a reference that stays the same."""
        return self.compares and not self.reference_sync

    @property
    def has_windows(self) -> bool:
        """True if it samples anew after some of its updates, for several of them at once."""
        return self.samples_anew and self.sync_every > 1

    @property
    def samples_anew(self) -> bool:
        """True if it samples after some of its updates from what they made of the policy."""
        return self.rollouts == "sample" and 0 < self.sync_every < self.steps

    @property
    def never_synchronises(self) -> bool:
        """True if it samples for all of its updates at once."""
        return self.rollouts == "sample" and self.sync_every == 0

    @property
    def filters(self) -> bool:
        """True if other prompts take the place of some that are skipped."""
        return bool(self.dynamic_sampling) or self.targeted

    @property
    def targeted(self) -> bool:
        """Whether earlier results decide which prompts are drawn."""
        return bool(self.drop_solved) or self.difficulty.window != (0, 1)

    def issues(self, run: Run) -> Iterator[Issue]:
        """Yield settings that cannot work together, or that change nothing."""
        yield from super().issues(run)
        if not self.sampling.temperature > 0:
            yield error(
                "sampling.temperature",
                "must be above 0: greedy responses to a prompt are all the same",
            )
        if self.reference_sync and not self.compares:
            yield error(
                "reference_sync",
                "is set, and the loss has no reference: GRPO has one in its KL term only, SimPO "
                "has none",
                "set beta too, or leave it off",
            )
        yield from self._step_issues()
        yield from self._filter_issues(run)
        yield from self._window_issues(run)
        yield from dump_issues(self)
        if self.rollouts != "sample":
            yield from self._dump_issues()
        yield from self._loss_issues()
        if self.has_ratio:
            yield from self._ratio_issues(run)

    def _step_issues(self) -> Iterator[Issue]:
        """Warn of settings for steps that do not come."""
        beyond = [step for step in self.keep if step > self.steps]
        if self.steps and beyond:
            yield warning("keep", f"has {beyond[0]}, and the stage ends with step {self.steps}")
        if self.stop == "budget" and self.optimizer.schedule != "constant":
            yield warning(
                "optimizer.schedule",
                f"is {self.optimizer.schedule!r}, which decays over all {self.steps} steps, and "
                "the budget may end the stage long before",
                "set steps to about what the budget pays for, or schedule to 'constant'",
            )
        if 0 < self.steps <= self.sync_every and self.sync_every > self.num_iterations:
            yield warning(
                "sync_every",
                f"is {self.sync_every}, and the stage has {self.steps} steps: all its responses "
                "are sampled from the policy that it begins with, which is offline",
                "set a smaller sync_every, or more steps",
            )

    def _filter_issues(self, run: Run) -> Iterator[Issue]:
        """Yield filters that change the ratio of tasks."""
        if run.tasks and self.filters:
            yield error(
                "",
                "skips prompts by dynamic_sampling, drop_solved or difficulty and takes others, of "
                "any task, which changes the ratio of the tasks of a mixed run",
                "leave them off",
            )

    def _window_issues(self, run: Run) -> Iterator[Issue]:
        """Yield settings that do not fit between two synchronisations."""
        every = self.sync_every
        if every % self.num_iterations:
            yield error(
                "sync_every",
                f"is {every} updates, so a batch cannot serve num_iterations={self.num_iterations}",
                "make sync_every a multiple of num_iterations",
            )
        if self.stop == "budget" and every != 1:
            yield error(
                "sync_every",
                f"is {every}, and stop='budget' ends between steps whose rollouts are paid for "
                "already",
                "use sync_every=1 or stop='steps'",
            )
        if self.stop == "budget" and not self.budget.amount > 0:
            yield error("budget.amount", f"must be positive, got {self.budget.amount:g}")
        if self.stop == "steps" and self.budget.measure != Budget().measure:
            yield unread("budget.measure", "stop='steps'")
        if self.stop == "steps" and self.budget.amount:
            yield error(
                "budget.amount",
                f"is {self.budget.amount:g}, and stop is 'steps'",
                "set stop to 'budget', or leave the amount at 0",
            )
        if not every and self.targeted:
            yield error(
                "sync_every",
                "is 0, which chooses all prompts before any is seen: drop_solved and difficulty "
                "need another value",
            )
        if self.never_synchronises and run.engine.ahead:
            yield error(
                "sync_every",
                "is 0, which samples all responses before the first update, and engine.ahead is 1",
                "set sync_every from 2 on, or engine.ahead to 0",
            )
        if every == 1 and run.engine.is_server:
            yield error(
                "sync_every",
                "is 1, which loads weights into the server for every update",
                "set it to 0 or from 2 on, 10 say, or engine.kind to 'sampler'",
            )

    def _dump_issues(self) -> Iterator[Issue]:
        """Yield settings of sampling where the groups are those of a dump."""
        without = f"and rollouts={self.rollouts!r} samples nothing"
        if self.sync_every != self.num_iterations:
            yield error(
                "sync_every",
                f"is {self.sync_every}, {without}",
                "set it to num_iterations",
            )
        if self.filters:
            yield error(
                "",
                f"skips prompts, {without} in their place",
                "leave dynamic_sampling, drop_solved and difficulty",
            )
        if self.stream:
            yield error("stream", f"is set, {without}", "leave it unset")

    def _loss_issues(self) -> Iterator[Issue]:
        """Yield settings of another loss: as errors where they would change the result, else as
        warnings, for a study may vary `loss` alone."""
        loss, default = f"loss={self.loss!r}", Online()
        if self.loss != "group_dpo" and self.grpo_coef:
            yield error(
                "grpo_coef",
                f"weighs GRPO in addition to group_dpo, and the stage has {loss}",
                "leave it at 0",
            )
        if self.is_preference_loss:
            for issue in self.dpo.loss_issues():
                yield replace(issue, path=f"dpo.{issue.path}")
        else:
            for name, value in default.dpo.to_dict().items():
                if getattr(self.dpo, name) != value:
                    yield unread(f"dpo.{name}", loss)
        if self.has_ratio:
            if self.scale_rewards == "none" and self.scale_rewards_eps != default.scale_rewards_eps:
                yield unread("scale_rewards_eps", "scale_rewards='none'")
            return
        for name in ("beta", "importance_cap", "overlong_buffer"):
            if getattr(self, name):
                meant = name == "beta" and self.is_preference_loss
                yield error(
                    name,
                    f"is for GRPO, and the stage has {loss}",
                    f"leave it at 0{'; did you mean dpo.beta?' * meant}",
                )
        for name in OF_GRPO:
            if getattr(self, name) != getattr(default, name):
                yield unread(name, loss)

    def _ratio_issues(self, run: Run) -> Iterator[Issue]:
        """Yield what GRPO's ratio of policies, or a group's shared forward pass, does not allow."""
        for name, off in (("top_p", 1), ("top_k", 0)):
            if getattr(self.sampling, name) != off:
                yield error(
                    f"sampling.{name}",
                    "is set, and a GRPO loss compares the trained policy with the distribution "
                    "that was sampled from, which filters change",
                    f"leave it at {off}",
                )
        if self.loss == "group_dpo" and self.sampling.temperature != 1:
            yield error(
                "sampling.temperature",
                "must be 1: GroupDPO and GRPO share one forward pass at temperature 1",
            )
        if self.overlong_buffer > self.sampling.max_new_tokens:
            yield error(
                "overlong_buffer",
                "is a part of sampling.max_new_tokens and cannot be larger",
            )
        if run.engine.is_server and not self.importance_cap:
            yield error(
                "importance_cap",
                "is 0, and the server's arithmetic is not the trainer's: GRPO weighs each token by "
                "the ratio of their probabilities",
                "set it to 2, say",
            )
        if self.sync_every == 1:
            yield from self._on_policy_issues()

    def _on_policy_issues(self) -> Iterator[Issue]:
        """Warn of settings of the ratio that change no gradient, since one update a batch, by the
        policy that sampled, has a ratio of 1.

        importance_cap weighs by another ratio, of trainer against sampler, token by token: with it
        one ratio a response has another gradient than one a token, at 1 too. CISPO's gradient is
        dapo's then, and reads no level.
        """
        names = ["epsilon", "epsilon_high"]
        if not self.importance_cap or self.loss_type == "cispo":
            names.append("importance_sampling_level")
        without = "has no effect: with one update a batch the ratio of policies is 1"
        remedy = "raise num_iterations and sync_every, or sync_every alone"
        for name in names:
            if getattr(self, name) != getattr(Online(), name):
                yield warning(name, without, remedy)
        if self.loss_type == "cispo":
            yield warning("loss_type", f"'cispo' instead of 'dapo' {without}", remedy)

    def splits_read(self) -> tuple[str, ...]:
        """Return train."""
        return ("train",)

    def files_read(self, stages: Stages) -> tuple[NeededFiles, ...]:
        """Return the dump that it trains on in place of sampled responses."""
        if self.rollouts == "sample":
            return ()
        return (dump(self.rollouts, "sample"),)

    def policies_sampled(self, name: str) -> set[str]:
        """Return its policy and the later ones."""
        return successive(name)

    def kept_steps(self) -> list[int]:
        """Return the steps of `keep` that it reaches, and the last one."""
        return sorted({*(step for step in self.keep if step <= self.steps), self.steps})


online = stage_of(Online)


def dump_issues(stage: Any) -> Iterator[Issue]:
    """Yield settings of a dump where none is read."""
    if stage.rollouts not in ("sample", "archive"):
        return
    for name in ("columns", "on_error"):
        if getattr(stage, name) not in ({}, "raise"):
            yield error(name, f"is for a dump, and rollouts is {stage.rollouts!r}", "leave it out")


def dump(path: str, others: str) -> NeededFiles:
    """Return a dump of rollouts as files that are needed. others: what could stand in its place."""
    refusal = f"is {{place}}: write {others}, or the path of a dump that exists: {{error}}"
    return NeededFiles("rollouts", path, refusal)
