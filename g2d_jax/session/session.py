"""The session of a run, which all stages share: settings, mesh, tokenizer, problems, rewards,
programs and costs."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax.numpy as jnp
from etils import epath
from jax.sharding import Mesh

from g2d_jax.config import Config
from g2d_jax.data.template import Fault, refuse
from g2d_jax.data.tokenizer import PromptTokenizer
from g2d_jax.models import hf
from g2d_jax.models.config import ModelConfig
from g2d_jax.models.decoder import Decoder
from g2d_jax.records import Problem
from g2d_jax.rewards.functions import RewardFunction
from g2d_jax.runtime import mesh as meshes
from g2d_jax.runtime.memory import Peak
from g2d_jax.runtime.program import CompileAhead
from g2d_jax.runtime.program_cache import Programs
from g2d_jax.runtime.tracking import Tracker
from g2d_jax.session import init_params
from g2d_jax.session.background_writer import Writer
from g2d_jax.session.clock import Clock
from g2d_jax.session.devices import Devices
from g2d_jax.session.problems import SPLITS, Problems, Reading, reading
from g2d_jax.session.problems import load as load_problems
from g2d_jax.session.reward_manager import RewardManager
from g2d_jax.session.sampling import RunSampling
from g2d_jax.session.stage_result import Cost, Warned
from g2d_jax.session.tokenizers import open_tokenizer
from g2d_jax.session.training_memory import Micro
from g2d_jax.training.objectives import Compute, Objective


class StopRun(ValueError):
    """The error that a run cannot go on usefully; the message says why and what to change. Nothing
    written is lost."""


@dataclass
class Session:
    """One run under way.

    config: the resolved settings. workdir: where artefacts go. folders: stage name -> its folder.
    reward, objectives: a user's own reward function, and own losses by stage, in place of the
    configured ones.
    evaluated: policy -> folder of another evaluate stage that has its completions already. steps:
    stage -> step that its bare name means, where this is not the last one. inputs: setting ->
    content of what it names outside the run.
    splits: those whose problems are read. fault: called for a fault of the tokenizer that no run
    should begin with.
    follows: the work directory that says which reference answers can be read, None: its own. asks:
    whether the verifier is asked about the others; else all can.
    mean_prompt: tokens of a mean prompt that a plan's work is for, None: of the problems. is_dry:
    whether examples are shown.
    """

    config: Config
    workdir: epath.Path
    tracker: Tracker
    folders: Mapping[str, epath.Path]
    reward: RewardFunction | None = None
    objectives: Mapping[str, Callable[[Compute], Objective]] = field(default_factory=dict)
    programs: Programs = field(default_factory=Programs)
    # the frozen part of policies, by `Base.policy`
    bases: dict[str, Decoder] = field(default_factory=dict)
    said: set[str] = field(default_factory=set)  # messages that are logged once
    # what attention is over -> its kernel: in manifests and the dry run, since few users ask for it
    kernels: dict[str, str] = field(default_factory=dict)
    evaluated: Mapping[str, epath.Path] = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)
    splits: Sequence[str] = SPLITS
    fault: Fault = refuse
    follows: epath.Path | None = None
    asks: bool = True
    mean_prompt: float | None = None
    is_dry: bool = False
    clock: Clock = field(default_factory=Clock)
    ahead: CompileAhead = field(default_factory=CompileAhead)
    writer: Writer = field(default_factory=Writer)
    peak: Peak | None = None  # of the host memory of the stage under way
    # a user's own, by stage
    losses: dict[str, tuple[Objective, Programs]] = field(default_factory=dict)
    # stage -> what was read to check it, until it runs; its warnings, and of "" those of all
    given: dict[str, Any] = field(default_factory=dict)
    warnings: dict[str, list[Warned]] = field(default_factory=dict)

    def at(
        self, config: Config, folders: Mapping[str, epath.Path], tracker: Tracker, **changes: Any
    ) -> Session:
        """Return this session for a config that differs in its stages only: loaded and compiled
        objects are shared."""
        other = copy.copy(self)
        # The stages decide over how many devices it splits, and what training has room for.
        for decided in ("sampling", "micro", "compute"):
            vars(other).pop(decided, None)
        vars(other).update(given={}, warnings={})
        vars(other).update(config=config, folders=folders, tracker=tracker, **changes)
        return other

    def reading(self, task: str) -> Reading:
        """Return what a task's reward needs of its problems."""
        return reading(self.config.rewards[task], self.reward is not None and task == "main")

    def say_once(self, text: str) -> None:
        """Show the user a message once a run."""
        if text not in self.said:
            self.said.add(text)
            self.tracker.say(text)

    @cached_property
    def mesh(self) -> Mesh:
        """The device mesh of mesh.*."""
        mesh = meshes.make_mesh(**self.config.mesh.to_dict())
        if self.config.compute.offload_optimizer:
            meshes.require_host_memory(mesh)
        return mesh

    @cached_property
    def micro(self) -> Micro:
        """Tell what the backward pass recomputes and the tokens of a micro-batch; a run that continues
        has what its work directory keeps. All processes must ask for it together the first time."""
        return self.sampling.devices.micro

    @cached_property
    def compute(self) -> Compute:
        """The settings of forward passes."""
        return Compute(
            self.mesh,
            jnp.dtype(self.config.dtype),
            self.micro.remat,
            self.config.compute.attention,
        )

    @cached_property
    def model_folder(self) -> Any:
        """The folder of a pretrained model, local or on a store, or None when the run starts from
        random parameters."""
        path = self.config.model.path
        return hf.resolve(path, revision=self.config.model.revision) if path else None

    @cached_property
    def model_config(self) -> ModelConfig:
        """The model's shape, with the adapters of lora.*. It is that of its config.json, or of
        model.* with the tokenizer's vocabulary."""
        adapters = init_params.adapters(self.config.lora)
        if self.model_folder is not None:
            return dataclasses.replace(hf.read_config(self.model_folder), **adapters)
        return init_params.shape(self.config.model, self.tokenizer.vocab_size, adapters)

    @cached_property
    def tokenizer(self) -> PromptTokenizer:
        """The tokenizer with its templates."""
        return open_tokenizer(self.config.tokenizer, self.config.model, self.fault)

    @cached_property
    def problems(self) -> Problems:
        """The problems, which all processes read together."""

        def unreadable(problems: Sequence[Problem]) -> set[str]:
            from g2d_jax.session import golds  # here: only runs with a verifier have any

            return golds.unreadable(problems, self.scorer, self.tracker, self.workdir, self.follows)

        return load_problems(
            self.config,
            self.tokenizer,
            self.reward is not None,
            self.tracker.say,
            self.splits,
            unreadable if self.asks else None,
        )

    @cached_property
    def scorer(self) -> RewardManager:
        """The scorer of responses."""
        return RewardManager(self.config.rewards, lambda: self.mesh, self.reward, self.config.dtype)

    @cached_property
    def sampling(self) -> RunSampling:
        """The engines that sample, and the devices as they use them."""
        return RunSampling(
            Devices(self.config, self.model_config, self.mesh),
            self.workdir,
            self.programs,
            tokenizer=lambda: self.tokenizer,
            prompt_lengths=lambda: self.problems.prompt_lengths,
            say=self.tracker.say,
            kernels=self.kernels,
        )

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

    def close(self) -> None:
        """End the verifiers' processes, and the threads that compile and write."""
        self.ahead.close()
        self.writer.close()
        if "scorer" in self.__dict__:
            self.scorer.close()
