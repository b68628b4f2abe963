"""The settings of online RL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Annotated, Literal, assert_never

from g2d_jax.config.build import stage_of
from g2d_jax.config.section import (
    Bounds,
    FieldError,
    Fraction,
    Measure,
    NonNegative,
    NotNegativeFloat,
    Policy,
    Positive,
    Rollouts,
    Section,
)
from g2d_jax.config.stages.dpo import OnlineDPO
from g2d_jax.config.stages.stage import NeededFiles, Stages, TrainingStage, successive
from g2d_jax.config.training import Optimizer, Sampling

GRPOLossType = Literal["sum", "seq-mean-token-sum", "grpo", "dr_grpo", "dapo", "bnpo", "cispo"]
ScaleRewards = Literal["none", "group", "batch"]


class Budget(Section):
    """The cost limit of an online stage with stop="budget"."""

    measure: Measure = "flops"
    amount: float = 0.0


class DropSolved(Section):
    """A filter of solved prompts. After so many equal rewards in a row a prompt rests so many steps
    (0: for ever)."""

    after: NonNegative = 0
    revisit: NonNegative = 0


class Difficulty(Section):
    """A filter by difficulty: prompts with a running pass rate outside the window are drawn with
    chance `outside`."""

    min_pass_rate: float = 0.0
    max_pass_rate: float = 1.0
    outside: Fraction = 0.1

    @property
    def window(self) -> tuple[float, float]:
        """The lowest and the highest pass rate."""
        return self.min_pass_rate, self.max_pass_rate

    def conflicts(self) -> Iterator[ValueError]:
        """Refuse a window from high to low."""
        if not self.min_pass_rate <= self.max_pass_rate:
            yield ValueError(
                f"the window of pass rates must go from low to high, got {self.window}"
            )

    def unused(self) -> Iterator[ValueError]:
        """Refuse what is no pass rate."""
        if self.min_pass_rate < 0 or self.max_pass_rate > 1:
            yield ValueError(f"the window of pass rates lies within 0 to 1, got {self.window}")


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
    steps: NonNegative = 20
    keep: tuple[NonNegative, ...] = ()
    # "budget" may end it earlier: stages/early_stopping.py
    stop: Literal["steps", "budget"] = "steps"
    budget: Budget = Budget()
    prompts_per_step: Positive = 32
    num_generations: Positive = 8
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
    drop_solved: DropSolved = DropSolved()
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
    def idle(self) -> tuple[str, ...]:
        """The settings that are set and that the loss does not read."""
        default = Online()
        named: list[str] = []
        if not self.has_ratio:
            named += [name for name in OF_GRPO if getattr(self, name) != getattr(default, name)]
        if self.is_preference_loss:
            return (*named, *(f"dpo.{name}" for name in self.dpo.idle))
        for name, value in self.dpo.to_dict().items():
            if value != default.dpo.to_dict()[name]:
                named.append(f"dpo.{name}")
        return tuple(named)

    @property
    def idle_on_policy(self) -> tuple[str, ...]:
        """The settings of the ratio that are set and change no gradient, since one update a batch,
        by the policy that the stage takes for the sampler's, has a ratio of 1.

        importance_cap weighs by another ratio, of trainer against sampler, token by token: with it
        one ratio a response has another gradient than one a token, at 1 too. CISPO's gradient is
        dapo's then, and reads no level.
        """
        if not self.has_ratio or self.sync_every != 1:
            return ()
        default = Online()
        names = ["epsilon", "epsilon_high"]
        if not self.importance_cap or self.loss_type == "cispo":
            names.append("importance_sampling_level")
        idle = [name for name in names if getattr(self, name) != getattr(default, name)]
        if self.loss_type == "cispo":
            idle.append("what 'cispo' has beyond 'dapo'")
        return tuple(idle)

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
        return bool(self.drop_solved.after) or self.difficulty.window != (0, 1)

    @property
    def needs_pass_rates(self) -> bool:
        """True if prompts are drawn by their pass rate."""
        return self.difficulty.window != (0, 1)

    def conflicts(self) -> Iterator[ValueError]:
        """Refuse settings that cannot work together, or that would change nothing."""
        if self.num_generations < 2:
            yield FieldError(
                "num_generations",
                "must be at least 2: an online stage compares responses of a group",
            )
        if not self.sampling.temperature > 0:
            yield FieldError(
                "sampling.temperature",
                "must be above 0: greedy responses to a prompt are all the same",
            )
        yield from super().conflicts()
        yield from self._window_conflicts()
        if self.stop == "budget" and not self.budget.amount > 0:
            yield FieldError("budget.amount", f"must be positive, got {self.budget.amount}")
        if self.reference_sync and not self.compares:
            yield ValueError(
                "reference_sync is set, but the loss has no reference: GRPO has one in its KL "
                "term only, set beta too; SimPO has none"
            )
        yield from columns_conflicts(self.columns, self.rollouts)
        if self.rollouts != "sample":
            yield from self._dump_conflicts()
        if self.loss != "group_dpo" and self.grpo_coef:
            yield ValueError(
                f'grpo_coef weighs GRPO next to loss="group_dpo"; with loss={self.loss!r} leave it '
                "at 0"
            )
        if self.has_ratio:
            yield from self._ratio_conflicts()
            return
        for name, meant in (
            ("beta", "; did you mean dpo.beta?" if self.is_preference_loss else ""),
            ("importance_cap", ""),
            ("overlong_buffer", ""),
        ):
            if getattr(self, name):
                yield FieldError(
                    name,
                    f"is a setting of GRPO, and loss={self.loss!r} has none: leave it at 0{meant}",
                )

    def unused(self) -> Iterator[ValueError]:
        """Refuse a budget that ends nothing, and a rest that nothing takes."""
        yield from super().unused()
        if self.stop == "steps" and self.budget.amount:
            yield FieldError(
                "budget.amount",
                f'is {self.budget.amount:g}, and stop="steps" ends the stage by its steps alone: '
                'set stop to "budget", or leave the amount at 0',
            )
        if self.drop_solved.revisit and not self.drop_solved.after:
            yield FieldError(
                "drop_solved.revisit",
                "is how long a solved prompt rests, and drop_solved.after is 0, so none does: set "
                "that too",
            )

    def _window_conflicts(self) -> Iterator[ValueError]:
        """Refuse settings that do not fit between two synchronisations."""
        if self.sync_every % self.num_iterations:
            yield ValueError(
                f"sync_every is {self.sync_every} updates, so a batch cannot serve num_iterations="
                f"{self.num_iterations} of them: make sync_every a multiple of num_iterations"
            )
        if self.stop != "steps" and self.sync_every != 1:
            yield ValueError(
                f"stop={self.stop!r} weighs step by step, and with sync_every={self.sync_every} "
                "the rollouts of later "
                'steps are paid for already: use sync_every=1 or stop="steps"'
            )
        if not self.sync_every and self.targeted:
            yield ValueError(
                "sync_every=0 chooses all prompts before any is seen: drop_solved and difficulty "
                "need another one"
            )

    def _dump_conflicts(self) -> Iterator[ValueError]:
        """Refuse settings of sampling where the groups are those of a dump."""
        without = f"rollouts={self.rollouts!r} samples nothing"
        if self.sync_every != self.num_iterations:
            yield ValueError(
                f"{without}, so no policy is synchronised: set sync_every to num_iterations"
            )
        if self.filters:
            yield ValueError(
                f"{without} in place of other prompts: leave dynamic_sampling, drop_solved and "
                "difficulty"
            )
        if self.stream:
            yield FieldError("stream", f"is set, but {without}: leave it unset")

    def _ratio_conflicts(self) -> Iterator[ValueError]:
        """Refuse what GRPO's ratio of policies, or a group's shared forward pass, does not
        allow."""
        if self.sampling.top_p < 1 or self.sampling.top_k > 0:
            yield ValueError(
                "with a GRPO loss an online stage needs sampling.top_p 1 and top_k 0: it "
                "compares the trained policy "
                "with the distribution that was sampled from, which filters would change"
            )
        if self.loss == "group_dpo" and self.sampling.temperature != 1:
            yield ValueError(
                "GroupDPO and GRPO share one forward pass at temperature 1: set "
                "sampling.temperature to 1"
            )
        if self.overlong_buffer > self.sampling.max_new_tokens:
            yield ValueError(
                "overlong_buffer is a part of sampling.max_new_tokens and cannot be larger"
            )

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

    def conflicts_served(self) -> Iterator[ValueError]:
        """Refuse what its sampling needs and a server does not give: a change at every update
        too."""
        yield from super().conflicts_served()
        if self.sync_every == 1:
            yield ValueError(
                "sync_every=1 would load weights there for every update: set it to 0 or from 2 "
                "on, 10 say, or engine.kind='sampler'"
            )
        if self.has_ratio and not self.importance_cap:
            yield ValueError(
                "a GRPO loss needs importance_cap, 2 say: the server's arithmetic is not the "
                "trainer's, and each token is weighed by the ratio of their probabilities"
            )


online = stage_of(Online)


def columns_conflicts(columns: Mapping[str, str], rollouts: str) -> Iterator[ValueError]:
    """Refuse names of columns where no dump is read."""
    if columns and rollouts in ("sample", "archive"):
        yield FieldError(
            "columns", f"are those of a dump, and rollouts is {rollouts!r}: leave it empty"
        )


def dump(path: str, others: str) -> NeededFiles:
    """Return a dump of rollouts as files that are needed. others: what could stand in its place."""
    refusal = f"rollouts is {{place}}: write {others}, or the path of a dump that exists: {{error}}"
    return NeededFiles(path, refusal)
