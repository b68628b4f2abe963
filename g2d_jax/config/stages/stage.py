"""The interface of all kinds of stages, so that no caller checks the kind."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Self

from g2d_jax.config.section import (
    Fraction,
    Issue,
    Place,
    Policy,
    Run,
    Section,
    error,
    warning,
)
from g2d_jax.config.training import Optimizer, Sampling

STAGES: dict[str, type[Stage]] = {}
"""The kinds of stages, by name."""


class Stage(Section):
    """A stage's settings. A kind of stage is a subclass, registered under its `kind`.

    The attributes below belong to the kind and are not settings. trains: it writes checkpoints.
    is_policy: its name is a policy's name. comes_last: it runs after all other stages that can run.
    shapes_from_data: the shapes of its programs depend on its examples or pairs, so they compile
    when it starts, not ahead.
    """

    kind = ""
    trains = False
    is_policy = False
    comes_last = False
    shapes_from_data = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.kind:
            STAGES[cls.kind] = cls

    # Inputs

    def policies_read(self) -> tuple[str, ...]:
        """Return the names of the policies in its fields of type Policy and Policies."""
        return tuple(itertools.chain.from_iterable(self.policies_by_field().values()))

    def with_policies(self, rename: Callable[[str], str]) -> Self:
        """Return itself with the policies that it reads renamed, each once."""
        renamed: dict[str, Any] = {}
        for name, policies in self.policies_by_field().items():
            others = tuple(dict.fromkeys(map(rename, policies)))
            renamed[name] = others[0] if self.hints()[name].kind is str else others
        return replace(self, **renamed)

    def policies_by_field(self) -> dict[str, tuple[str, ...]]:
        """Return the policies by field."""
        found: dict[str, tuple[str, ...]] = {}
        for name, hint in self.hints().items():
            if hint.place == Place("policy"):
                value = getattr(self, name)
                found[name] = (value,) if hint.kind is str else value
        return found

    def stages_read(self, stages: Stages) -> tuple[str, ...]:
        """Return the stages that it reads in addition to its policies. Raises ValueError for
        settings that name none it can read."""
        return ()

    def splits_read(self) -> tuple[str, ...]:
        """Return the splits whose problems it samples responses to."""
        return ()

    def examples_path(self) -> str | None:
        """Return the source of its examples, "" if it is not set; None if it needs none."""
        return None

    # Sampling

    def samplings(self) -> tuple[Sampling, ...]:
        """Return the settings with which it samples responses."""
        sampling = getattr(self, "sampling", None)
        return () if sampling is None else (sampling,)

    def policies_sampled(self, name: str) -> set[str]:
        """Return, in words, the policies that a server must hold for it. name: the stage's own."""
        return set()

    @property
    def has_fixed_reference(self) -> bool:
        """True if sampling keeps a fixed reference in memory in addition to the policy."""
        return False

    # Results

    def kept_steps(self) -> list[int]:
        """Return the steps whose checkpoints it keeps, ascending; [] if its data decide the last
        one."""
        return []

    def step_fault(self, step: str) -> str:
        """Return why other stages cannot read its policy at a step, "" if they can."""
        steps = self.kept_steps()
        if step.isdecimal() and int(step) in steps:
            return ""
        listed = ", ".join(map(str, steps)) or "of its end only"
        return f"that stage keeps steps {listed}: add it to its keep"


class PassRates(Section):
    """A window of pass rates, for rewards with right and wrong."""

    min_pass_rate: Fraction = 0.0
    """The lower end of the window of pass rates. It needs rewards with right and wrong."""
    max_pass_rate: Fraction = 1.0
    """The upper end of the window."""

    @property
    def window(self) -> tuple[float, float]:
        """The lowest and the highest pass rate."""
        return self.min_pass_rate, self.max_pass_rate

    def issues(self, run: Run) -> Iterator[Issue]:
        """Yield an empty window, and a window without verifiable rewards."""
        yield from super().issues(run)
        if self.min_pass_rate > self.max_pass_rate:
            yield error(
                "min_pass_rate",
                f"is {self.min_pass_rate}, above max_pass_rate, {self.max_pass_rate}",
                "set min_pass_rate to max_pass_rate or less",
            )
        elif self.window != (0, 1) and not any(run.verifiable.values()):
            yield error(
                "min_pass_rate",
                "needs correct and incorrect responses, but the rewards of this run only rank them",
                "remove min_pass_rate and max_pass_rate",
            )


class TrainingStage(Stage):
    """The settings of a stage that trains a policy from another one."""

    policy: Policy = "init"
    """The policy that it starts from (docs/concepts.md#policies-have-names)."""
    optimizer: Optimizer = Optimizer()

    trains = True
    is_policy = True

    def longest_row(self, prompt: int, stages: Stages) -> int:
        """Return the tokens that a packed row must hold, for prompts of at most `prompt` tokens."""
        return prompt + max((sampling.max_new_tokens for sampling in self.samplings()), default=0)

    def issues(self, run: Run) -> Iterator[Issue]:
        """Yield a learning rate that only rises, if the number of updates is known."""
        yield from super().issues(run)
        steps = getattr(self, "steps", 0)
        warmup = self.optimizer.warmup_steps
        if steps and warmup >= steps:
            yield error(
                "optimizer.warmup_steps",
                f"is {warmup}, but steps is {steps}",
                "set it below steps",
            )


def unread(path: str, setting: str) -> Issue:
    """Warn of a setting that another one, such as "loss='dpo'", ignores."""
    return warning(path, f"is set, but {setting} ignores it")


def successive(name: str) -> set[str]:
    """Return, in words, a stage's policy and its successors in training: see
    `Stage.policies_sampled`."""
    return {f"{name}'s", "its later ones"}


Stages = Mapping[str, Stage]
