"""The session of a run, which all stages share: settings, mesh, tokenizer, problems, rewards,
programs and costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import jax.numpy as jnp
from etils import epath
from jax.sharding import Mesh

from g2d_jax.config import Config
from g2d_jax.data.tokenizer import PromptTokenizer
from g2d_jax.models import hf
from g2d_jax.models.config import ModelConfig
from g2d_jax.models.decoder import Decoder
from g2d_jax.rewards.functions import RewardFunction
from g2d_jax.runtime.program import CompileAhead
from g2d_jax.runtime.program_cache import Programs
from g2d_jax.runtime.tracking import Tracker
from g2d_jax.session.background_writer import Writer
from g2d_jax.session.clock import Clock
from g2d_jax.session.devices import Machine
from g2d_jax.session.problems import Problems, Reading, reading
from g2d_jax.session.reward_manager import RewardManager
from g2d_jax.session.sampling import RunSampling
from g2d_jax.session.stage_result import Cost
from g2d_jax.session.training_memory import Micro
from g2d_jax.training.objectives import Compute, Objective


class StopRun(ValueError):
    """The error that a run cannot go on usefully; the message says why and what to change. Nothing
    written is lost."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Run:
    """Whose stages run: its settings and places.

    config: the resolved settings. workdir: where artefacts go. folders: stage name -> its folder.
    reward, objectives: a user's own reward function, and own losses by stage, in place of the
    configured ones.
    evaluated: policy -> folder of another evaluate stage that has its completions already. steps:
    stage -> step that its bare name means, where this is not the last one. inputs: setting ->
    content of what it names outside the run.
    """

    config: Config
    workdir: epath.Path
    folders: Mapping[str, epath.Path]
    tracker: Tracker
    reward: RewardFunction | None = None
    objectives: Mapping[str, Callable[[Compute], Objective]] = field(default_factory=dict)
    evaluated: Mapping[str, epath.Path] = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, kw_only=True)
class Loaded:
    """What runs share whose settings differ in their stages only; `build.loaded` makes it.

    model_config: the model's shape, with adapters. bases: the frozen part of policies, by
    `Base.policy`.
    """

    tokenizer: PromptTokenizer
    model_config: ModelConfig
    mesh: Mesh
    machine: Machine
    problems: Problems
    scorer: RewardManager
    ahead: CompileAhead
    writer: Writer
    programs: Programs
    bases: dict[str, Decoder] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)


@dataclass(frozen=True, eq=False, kw_only=True)
class Session(Run, Loaded):
    """What the stages of a run work with; `build.session_of` makes it.

    sampling: the engines that sample, and the devices as they use them. settled: how it trains, as
    its work directory keeps it; None leaves it to `Devices.micro`. kernels: what attention is over
    -> its kernel.
    """

    sampling: RunSampling
    settled: Micro | None = None
    kernels: dict[str, str] = field(default_factory=dict)

    @cached_property
    def model_folder(self) -> epath.Path | None:
        """The folder of a pretrained model, local or on a store, None for random parameters."""
        path = self.config.model.path
        return hf.resolve(path, revision=self.config.model.revision) if path else None

    @property
    def micro(self) -> Micro:
        """What the backward pass recomputes, and the tokens of a micro-batch."""
        return self.settled or self.sampling.devices.micro

    @cached_property
    def compute(self) -> Compute:
        """The settings of forward passes."""
        settings = self.config.compute
        return Compute(
            self.mesh, jnp.dtype(self.config.dtype), self.micro.remat, settings.attention
        )

    @cached_property
    def losses(self) -> Mapping[str, tuple[Objective, Programs]]:
        """A user's own losses, by stage, each with programs of its own: it may look like another."""
        return {name: (own(self.compute), Programs()) for name, own in self.objectives.items()}

    def reading(self, task: str) -> Reading:
        """Return what a task's reward needs of its problems."""
        return reading(self.config.rewards[task], self.reward is not None and task == "main")

    @contextmanager
    def track_cost(self, cost: Cost) -> Iterator[None]:
        """Add the time of a block and the cost of scoring in it to a cost."""

        def usage() -> dict[str, float]:
            return {**self.scorer.usage(), **self.clock.read()}

        before, started = usage(), time.perf_counter()
        try:
            yield
        finally:
            spent, after = time.perf_counter() - started, usage()
            cost.add({"seconds": spent, "device_seconds": spent * self.mesh.size})
            cost.add({name: amount - before[name] for name, amount in after.items()})
