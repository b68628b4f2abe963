"""Has what every kind of stage says of itself, so that nobody asks which kind it is."""

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
    """A stage's settings. A kind of stage is a class made from it, registered under its `kind`.

    The attributes below are a kind's own, and no settings. trains: it makes checkpoints. is_policy:
    its name is that of a policy. comes_last: it waits for all stages that could run.
    shapes_from_data: the shapes of its programs depend on its examples or pairs, so that they
    compile at its own start and not ahead.
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

    # What it reads

    def policies_read(self) -> tuple[str, ...]:
        """Return the names of the policies that it reads: what its fields of the types Policy and
        Policies hold."""
        return tuple(itertools.chain.from_iterable(self.policies_by_field().values()))

    def with_policies(self, rename: Callable[[str], str]) -> Self:
        """Return it with other names for the policies that it reads, each once, where they may be
        another's of the same run."""
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
        """Return the stages that it reads, other than those of its policies. Raises ValueError for
        settings that name none it can read."""
        return ()

    def splits_read(self) -> tuple[str, ...]:
        """Return the splits of whose problems it samples responses."""
        return ()

    def examples_path(self) -> str | None:
        """Return where its examples are from, "" where no setting says so; None without any."""
        return None

    # What it samples

    def samplings(self) -> tuple[Sampling, ...]:
        """Return the settings with which it draws responses."""
        sampling = getattr(self, "sampling", None)
        return () if sampling is None else (sampling,)

    def policies_sampled(self, name: str) -> set[str]:
        """Return the policies that a server would have to hold for it, in words. name: the stage's
        own."""
        return set()

    @property
    def has_fixed_reference(self) -> bool:
        """True if a reference that stays the same lies beside the policy while it samples."""
        return False

    # What it makes

    def kept_steps(self) -> list[int]:
        """Return the steps whose checkpoints it keeps, ascending; [] where its data decide the last
        one."""
        return []

    def step_fault(self, step: str) -> str:
        """Say why other stages cannot read its policy at a step, "" where they can."""
        steps = self.kept_steps()
        if step.isdecimal() and int(step) in steps:
            return ""
        listed = ", ".join(map(str, steps)) or "of their end alone"
        return f"that stage keeps steps {listed}: add it to its keep"


class PassRates(Section):
    """A window of pass rates; prompts outside are left out."""

    min_pass_rate: Fraction = 0.0
    max_pass_rate: Fraction = 1.0

    @property
    def window(self) -> tuple[float, float]:
        """The lowest and the highest pass rate."""
        return self.min_pass_rate, self.max_pass_rate

    def issues(self, run: Run) -> Iterator[Issue]:
        """Yield a window that is none, or that no reward gives."""
        yield from super().issues(run)
        if self.min_pass_rate > self.max_pass_rate:
            yield error(
                "min_pass_rate",
                f"is {self.min_pass_rate}, above max_pass_rate, {self.max_pass_rate}",
                "give a window",
            )
        elif self.window != (0, 1) and not any(run.verifiable.values()):
            yield error(
                "min_pass_rate",
                "goes by right and wrong, and the rewards of this run know better and worse only",
                "leave min_pass_rate and max_pass_rate",
            )


class TrainingStage(Stage):
    """The settings of a stage that trains a policy from another one."""

    policy: Policy = "init"
    optimizer: Optimizer = Optimizer()

    trains = True
    is_policy = True

    def longest_row(self, prompt: int, stages: Stages) -> int:
        """Return the tokens that a packed row must have room for, behind prompts of at most
        `prompt`."""
        return prompt + max((sampling.max_new_tokens for sampling in self.samplings()), default=0)

    def issues(self, run: Run) -> Iterator[Issue]:
        """Yield a learning rate that would only rise, where settings say how many updates come."""
        yield from super().issues(run)
        steps = getattr(self, "steps", 0)
        warmup = self.optimizer.warmup_steps
        if steps and warmup >= steps:
            yield error(
                "optimizer.warmup_steps",
                f"is {warmup}, and steps is {steps}",
                "warm up for fewer updates than there are",
            )


def unread(path: str, setting: str) -> Issue:
    """Warn of a setting that another one, such as "loss='dpo'", leaves without effect."""
    return warning(path, f"is set, and {setting} does not read it")


def successive(name: str) -> set[str]:
    """Name, in words, a stage's policy and those that follow it in training: see
    `Stage.policies_sampled`."""
    return {f"{name}'s", "its later ones"}


Stages = Mapping[str, Stage]
