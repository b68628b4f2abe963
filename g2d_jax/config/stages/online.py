"""The settings of online RL."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Literal, assert_never

from g2d_jax.config.build import stage_of
from g2d_jax.config.section import (
    Bounds,
    Issue,
    Measure,
    NonNegative,
    NotNegativeFloat,
    Policy,
    Positive,
    Run,
    Section,
    error,
    warning,
)
from g2d_jax.config.stages.dpo import OnlineDPO
from g2d_jax.config.stages.dump import Dump
from g2d_jax.config.stages.stage import (
    PassRates,
    Stages,
    TrainingStage,
    successive,
    unread,
)
from g2d_jax.config.training import Optimizer, Sampling

GRPOLossType = Literal["sum", "seq-mean-token-sum", "grpo", "dr_grpo", "dapo", "bnpo", "cispo"]
ScaleRewards = Literal["none", "group", "batch"]


Group = Annotated[int, Bounds(least=2, why="an online stage compares the responses to a prompt")]


class Budget(Section):
    """A cost at which an online stage ends, perhaps before its last step."""

    measure: Measure = "flops"
    """The cost that is counted. `tokens`: generated, prefilled, scored and trained ones together."""
    amount: NotNegativeFloat = 0.0
    """The stage ends at this cost, in units of `measure`, if that comes before `steps`. 0: no
    limit."""

    def issues(self, run: Run) -> Iterator[Issue]:
        """Warn of a measure without an amount."""
        if not self.amount and self.measure != Budget().measure:
            yield unread("measure", "budget.amount=0")


class Clip(Section):
    """How a GRPO loss clips the ratio of policies."""

    epsilon: NotNegativeFloat = 0.2
    """How far the ratio may fall below 1. `cispo` has no such bound."""
    epsilon_high: NotNegativeFloat | None = None
    """How far the ratio may rise above 1. Unset: as far as it may fall."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """A ratio for each token, or one for each response, as in GSPO, whose paper has
    `loss_type="grpo"`."""
    importance_cap: NotNegativeFloat = 0.0
    """Truncated importance sampling: each token is weighed by the ratio of the trainer's old
    probability to the sampler's, cut here. 0: off."""


class Filter(PassRates):
    """The choice of prompts that an online stage trains on. A prompt whose running pass rate is
    outside the window is used one time in ten."""

    dynamic_sampling: NonNegative = 0
    """The most rounds in which prompts without a signal are replaced."""
    drop_solved: NonNegative = 0
    """Leave out a prompt after this many groups in a row whose rewards were all one and the same.
    0: never."""

    @property
    def replaces(self) -> bool:
        """True if other prompts replace some that are skipped."""
        return bool(self.dynamic_sampling) or self.targets

    @property
    def targets(self) -> bool:
        """True if earlier results affect the choice of prompts."""
        return bool(self.drop_solved) or self.window != (0, 1)


OF_GRPO = (
    "loss_type",
    "scale_rewards",
    "scale_rewards_eps",
)
"""The settings of an online stage, in addition to `clip`, that a pair loss may have but ignores: a
study may vary `loss` alone."""


class Online(TrainingStage):
    """Online RL, up to fully offline: every `sync_every` updates the sampling policy becomes the
    trained one. A stage stops after 50 steps in a row without any signal."""

    kind: Literal["online"] = "online"
    policy: Policy = "sft"
    steps: NonNegative = 20
    """Updates (K)."""
    keep: tuple[NonNegative, ...] = ()
    """Steps whose checkpoints stay for later stages, in addition to the last."""
    budget: Budget = Budget()
    prompts_per_step: Positive = 32
    """Prompts of an update."""
    num_generations: Group = 8
    """Responses to a prompt, a group."""
    sampling: Sampling = Sampling()
    dump: Dump = Dump()
    filter: Filter = Filter()
    sync_every: NonNegative = 1
    """Updates between synchronisations of the sampling policy; each samples the rollouts of all
    updates up to the next one. 1 is online, 0 never synchronises: offline."""
    reference_sync: bool = False
    """The sampling policy becomes the reference at each synchronisation. Otherwise the reference
    stays the policy that the stage starts from."""
    num_iterations: Positive = 1
    """Updates on each batch of rollouts; `sync_every` must be a multiple. GRPO's old
    log-probabilities are the trainer's: of the same update with `sync_every=1`, else of the
    synchronisation."""
    loss: Literal["grpo", "raft", "dpo", "group_dpo"] = "grpo"
    """`dpo`: for each prompt a random right response against a random wrong one (without right and
    wrong: best against worst). `group_dpo`: the mean over all such pairs. `raft`: the likelihood of
    right responses alone."""
    loss_type: GRPOLossType = "sum"
    """How GRPO adds up: `sum` over tokens and group (arXiv 2506.21495), `seq-mean-token-sum`
    divides it by the group's size (verl's name), the others are TRL's (docs/losses.md)."""
    scale_rewards: ScaleRewards = "none"
    """Divide advantages by the standard deviation of the group or the batch, each task apart."""
    scale_rewards_eps: Annotated[float, Bounds(above=0)] = 1e-4
    """Added to that standard deviation."""
    clip: Clip = Clip()
    beta: NotNegativeFloat = 0.0
    """Coefficient of GRPO's KL term (k3, as in TRL)."""
    dpo: OnlineDPO = OnlineDPO()
    grpo_coef: NotNegativeFloat = 0.0
    """Coefficient of the GRPO loss of the same responses, added to `group_dpo`."""
    entropy_coef: NotNegativeFloat = 0.0
    """Coefficient of the mean next-token entropy, which the loss rewards."""
    mask_truncated: bool = False
    """Leave responses that reached `max_new_tokens` out of the loss."""
    optimizer: Optimizer = Optimizer(eps=1e-4)

    @property
    def samples(self) -> bool:
        """True if its responses are sampled."""
        return not self.dump.path

    @property
    def is_preference_loss(self) -> bool:
        """True if the loss compares chosen with rejected responses, False if it uses advantages.

        Raises AssertionError for an unknown loss.
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
        """Return the tokens of the longest group that needs one row: a response, or the responses
        that a preference loss compares."""
        responses = self.compared if self.is_preference_loss else 1
        return prompt + responses * self.sampling.max_new_tokens

    @property
    def compared(self) -> int:
        """The responses to a prompt that it trains on: a pair, or all."""
        return 2 if self.loss == "dpo" else self.num_generations

    @property
    def has_ratio(self) -> bool:
        """True if the loss weighs tokens by a ratio of policies, as in GRPO.

        Responses from a policy other than the trainer's then need clip.importance_cap: from a
        server, or from a dump with log-probabilities.
        """
        return self.loss == "grpo" or bool(self.grpo_coef)

    @property
    def has_fixed_reference(self) -> bool:
        """True if the loss uses a reference policy that stays the same."""
        return self.compares and not self.reference_sync

    @property
    def has_windows(self) -> bool:
        """True if it samples again after some updates, for several of them at once."""
        return self.samples_anew and self.sync_every > 1

    @property
    def samples_anew(self) -> bool:
        """True if it samples from the trained policy after some of its updates."""
        return self.samples and 0 < self.sync_every < self.steps

    @property
    def never_synchronises(self) -> bool:
        """True if it samples the rollouts of all its updates at once."""
        return self.samples and self.sync_every == 0

    def issues(self, run: Run) -> Iterator[Issue]:
        """Yield conflicting settings, and settings without effect."""
        yield from super().issues(run)
        if not self.sampling.temperature > 0:
            yield error(
                "sampling.temperature",
                "must be above 0, since greedy responses to a prompt are all the same",
            )
        if self.reference_sync and not self.compares:
            yield error(
                "reference_sync",
                "is set, but the loss has no reference: GRPO has one in its KL term only, SimPO "
                "has none",
                "set beta too, or set this to False",
            )
        yield from self._step_issues()
        yield from self._filter_issues(run)
        yield from self._window_issues(run)
        if not self.samples:
            yield from self._dump_issues()
        yield from self._loss_issues()
        if self.has_ratio:
            yield from self._ratio_issues(run)

    def _step_issues(self) -> Iterator[Issue]:
        """Warn of settings for steps beyond the last."""
        beyond = [step for step in self.keep if step > self.steps]
        if self.steps and beyond:
            yield warning("keep", f"has {beyond[0]}, but the stage ends with step {self.steps}")
        if self.budget.amount and self.optimizer.schedule != "constant":
            yield warning(
                "optimizer.schedule",
                f"is {self.optimizer.schedule!r}, which decays over all {self.steps} steps, but "
                "the budget may end the stage long before",
                "set steps to about the number that the budget allows, or schedule to 'constant'",
            )
        if 0 < self.steps <= self.sync_every and self.sync_every > self.num_iterations:
            yield warning(
                "sync_every",
                f"is {self.sync_every}, but the stage has {self.steps} steps: it samples all "
                "responses from its initial policy, which is offline",
                "set sync_every lower, or steps higher",
            )

    def _filter_issues(self, run: Run) -> Iterator[Issue]:
        """Yield filters that change the ratio of tasks."""
        if run.tasks and self.filter.replaces:
            yield error(
                "filter",
                "replaces prompts by others of any task, which changes the ratio of the tasks of a "
                "mixed run",
                "remove it",
            )

    def _window_issues(self, run: Run) -> Iterator[Issue]:
        """Yield settings that do not fit between two synchronisations."""
        every = self.sync_every
        if every % self.num_iterations:
            yield error(
                "sync_every",
                f"is {every} updates, so a batch cannot serve num_iterations={self.num_iterations}",
                "set sync_every to a multiple of num_iterations",
            )
        if self.budget.amount and every != 1:
            yield error(
                "sync_every",
                f"is {every}, but a budget may end in the middle of steps sampled together",
                "set sync_every to 1, or budget.amount=0",
            )
        if not every and self.filter.targets:
            yield error(
                "sync_every",
                "is 0, which chooses all prompts before training: filter.drop_solved and a "
                "window of pass rates need another value",
            )
        if self.never_synchronises and run.engine.ahead:
            yield error(
                "sync_every",
                "is 0, which samples all responses before the first update, but engine.ahead is 1",
                "set sync_every to 2 or more, or engine.ahead to 0",
            )
        if every == 1 and run.engine.is_server:
            yield error(
                "sync_every",
                "is 1, which loads weights into the server for every update",
                "set it to 0 or at least 2 (such as 10), or engine.kind to 'sampler'",
            )

    def _dump_issues(self) -> Iterator[Issue]:
        """Yield sampling settings that conflict with a dump."""
        without = f"but dump.path={self.dump.path!r} samples nothing"
        if self.sync_every != self.num_iterations:
            yield error(
                "sync_every",
                f"is {self.sync_every}, {without}",
                "set it to num_iterations",
            )
        if self.filter.replaces:
            yield error("filter", f"skips prompts, {without} in their place", "remove it")

    def _loss_issues(self) -> Iterator[Issue]:
        """Yield settings of another loss: errors if they would change the result, else warnings,
        since a study may vary `loss` alone."""
        loss, default = f"loss={self.loss!r}", Online()
        if self.loss != "group_dpo" and self.grpo_coef:
            yield error(
                "grpo_coef",
                f"adds GRPO to group_dpo, but the stage has {loss}",
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
        if self.beta:
            meant = "; did you mean dpo.beta?" * self.is_preference_loss
            yield error("beta", f"is for GRPO, but the stage has {loss}", f"leave it at 0{meant}")
        if self.clip.importance_cap:
            yield error(
                "clip.importance_cap", f"is for GRPO, but the stage has {loss}", "leave it at 0"
            )
        elif self.clip != default.clip:
            yield unread("clip", loss)
        for name in OF_GRPO:
            if getattr(self, name) != getattr(default, name):
                yield unread(name, loss)

    def _ratio_issues(self, run: Run) -> Iterator[Issue]:
        """Yield settings that conflict with GRPO's ratio or with a group's shared forward pass."""
        for name, off in (("top_p", 1), ("top_k", 0)):
            if getattr(self.sampling, name) != off:
                yield error(
                    f"sampling.{name}",
                    "is set and changes the sampled distribution, but a GRPO loss compares the "
                    "trained policy with the full one",
                    f"leave it at {off}",
                )
        if self.loss == "group_dpo" and self.sampling.temperature != 1:
            yield error(
                "sampling.temperature",
                "must be 1: GroupDPO and GRPO share one forward pass at temperature 1",
            )
        if run.engine.is_server and not self.clip.importance_cap:
            yield error(
                "clip.importance_cap",
                "is 0, but a server rounds differently from the trainer: GRPO weighs each token "
                "by the ratio of their probabilities",
                "set it, for example to 2",
            )
        if self.sync_every == 1:
            yield from self._on_policy_issues()

    def _on_policy_issues(self) -> Iterator[Issue]:
        """Warn of ratio settings without effect: with one update a batch, on-policy, the ratio is
        1.

        clip.importance_cap weighs each token by another ratio, trainer against sampler. With it, a
        sequence-level ratio changes the gradient even at 1; not for CISPO, whose gradient then
        equals dapo's.
        """
        names = ["epsilon", "epsilon_high"]
        if not self.clip.importance_cap or self.loss_type == "cispo":
            names.append("importance_sampling_level")
        without = "has no effect: with one update a batch the ratio of policies is 1"
        remedy = "raise num_iterations and sync_every, or only sync_every"
        for name in names:
            if getattr(self.clip, name) != getattr(Clip(), name):
                yield warning(f"clip.{name}", without, remedy)
        if self.loss_type == "cispo":
            yield warning("loss_type", f"'cispo' instead of 'dapo' {without}", remedy)

    def splits_read(self) -> tuple[str, ...]:
        """Return train."""
        return ("train",)

    def policies_sampled(self, name: str) -> set[str]:
        """Return its policy and the later ones."""
        return successive(name)

    def kept_steps(self) -> list[int]:
        """Return the steps of `keep` up to its last one, and the last one."""
        return sorted({*(step for step in self.keep if step <= self.steps), self.steps})


online = stage_of(Online)
