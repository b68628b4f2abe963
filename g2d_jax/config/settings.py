"""All settings of a run, and what its sections do not allow each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from functools import cached_property
from typing import TypeVar

from ml_collections import ConfigDict

from g2d_jax.config.machine import Checkpoint, Compute, Engine, Faults, Logging, Mesh
from g2d_jax.config.model import Lora, Model, Tokenizer
from g2d_jax.config.policy_name import PolicyName
from g2d_jax.config.rewards import Data, Reward, RewardModel, Task
from g2d_jax.config.section import Dtype, FieldError, Section, record
from g2d_jax.config.stages.stage import STAGES, Stage

StageT = TypeVar("StageT", bound=Stage)

RUNTIME = frozenset(
    [
        "mesh",
        "compute",
        "logging",
        "checkpoint",
        "faults",
        "reward.workers",
        "reward.model.batch_tokens",
        "reward.folder",
        "engine.url",
        "engine.model",
        "engine.sync",
        "engine.folder",
        "engine.api_key_env",
        "engine.timeout",
        "engine.retries",
        "engine.concurrency",
    ]
)
"""Top-level sections and fields that do not change what is computed, beyond rounding."""

RESERVED = ("init", "sample", "archive", "hf", "run", "main", "reward")
"""Words that mean something else where the name of a stage or a task could stand: policies,
rollouts, tasks, and the function that a run is given from Python."""


class Config(Section):
    """The settings of a run. tasks: further tasks of a mixed run, by name. stages: by name, in no
    order."""

    name: str = "run"
    seed: int = 0
    dtype: Dtype = "float32"  # of activations; parameters are float32
    model: Model = Model()
    lora: Lora = Lora()
    tokenizer: Tokenizer = Tokenizer()
    data: Data = Data()
    reward: Reward = Reward()
    tasks: Mapping[str, Task] = field(default_factory=dict)
    mesh: Mesh = Mesh()
    compute: Compute = Compute()
    engine: Engine = Engine()
    logging: Logging = Logging()
    checkpoint: Checkpoint = Checkpoint()
    faults: Faults = Faults()
    stages: Mapping[str, Stage] = field(default_factory=dict)

    @classmethod
    def of(cls, config: ConfigDict) -> Config:
        """Return the checked settings of a user's config; what makes a study of it (`sweep`) is
        left out.

        Raises ValueError naming the field, with its full path, or the stage.
        """
        tasks = {name: record(Task, task, f"tasks.{name}") for name, task in config.tasks.items()}
        stages = {
            name: record(STAGES[stage.kind], stage, f"stages.{name}")
            for name, stage in config.stages.items()
        }
        return record(cls, config, tasks=tasks, stages=stages)

    @cached_property
    def all_tasks(self) -> dict[str, Task]:
        """Every task by name: "main", of the sections data and reward, and the further ones."""
        data = self.data
        main = Task(
            train=data.train, dev=data.dev, test=data.test, weight=data.weight, reward=self.reward
        )
        return {"main": main, **self.tasks}

    @property
    def rewards(self) -> dict[str, Reward]:
        """The settings of each task's reward."""
        return {name: task.reward for name, task in self.all_tasks.items()}

    @property
    def reward_models(self) -> dict[str, RewardModel]:
        """The settings of all reward models by path."""
        models = {}
        for reward in self.rewards.values():
            if reward.function == "model":
                models[str(reward.model.path)] = reward.model
        return models

    @property
    def verifiable(self) -> dict[str, bool]:
        """By task, whether its reward knows right and wrong."""
        return {name: task.reward.is_verifiable for name, task in self.all_tasks.items()}

    def stage(self, name: str, kind: type[StageT]) -> StageT:
        """Return a stage that is known to be of this kind. Raises TypeError otherwise."""
        stage = self.stages[name]
        if not isinstance(stage, kind):
            raise TypeError(f"stages.{name} is of kind {stage.kind}, not {kind.kind}")
        return stage

    def stages_of(self, kind: type[StageT]) -> dict[str, StageT]:
        """Return the stages of a kind by name."""
        return {name: stage for name, stage in self.stages.items() if isinstance(stage, kind)}

    def conflicts(self) -> Iterator[ValueError]:
        """Refuse what sections and stages do not allow each other; what stages read of each other
        is in graph.py."""
        if not any(task.weight for task in self.all_tasks.values()):
            yield ValueError(
                "data.weight and all tasks.*.weight are 0: one of them must be positive"
            )
        # Where cuDNN cannot serve on any devices; models/kernels.py says the rest.
        if self.compute.attention == "cudnn" and self.dtype == "float32":
            yield ValueError(
                "compute.attention is 'cudnn', which computes in bfloat16 only: set dtype to "
                "bfloat16, or auto"
            )
        yield from self._window_conflicts()
        if self.engine.is_server:
            yield from self._engine_conflicts()
        for name, stage in self.stages.items():
            if self.tasks and stage.filters:
                yield ValueError(
                    f"stages.{name}: dynamic_sampling, drop_solved and difficulty put other "
                    "prompts, of whatever task, in place of those they skip, and so change the "
                    "ratio of the tasks of a mixed run: leave them off"
                )

    def unused(self) -> Iterator[ValueError]:
        """Refuse what stages are asked for that rewards, or other stages, do not give."""
        for name, stage in self.stages.items():
            if stage.needs_pass_rates and not any(self.verifiable.values()):
                yield ValueError(
                    f"stages.{name}: a window of pass rates goes by right and wrong, and the "
                    "rewards of this run know better and worse only: leave min_pass_rate and "
                    "max_pass_rate"
                )
            for error in stage.unused_among(self.stages):
                yield FieldError(f"stages.{name}.{error.path}", error.what)

    def _engine_conflicts(self) -> Iterator[ValueError]:
        """Refuse what a server cannot do: to follow a policy update by update, or to hold several
        without sync."""
        for name, stage in self.stages.items():
            for error in stage.conflicts_served():
                yield ValueError(f"stages.{name}: with engine.kind='server' {error}")
        if self.engine.sync == "none":
            yield from self._never_sent()
        if self.engine.sync == "adapter" and not self.lora.rank:
            yield FieldError("engine.sync", "is 'adapter', and lora.rank is 0: use 'folder'")
        if self.engine.ahead:
            yield from self._ahead_conflicts()

    def _never_sent(self) -> Iterator[FieldError]:
        """Refuse to sample from more than the policy that the server was started with."""
        sampled = self.policies_sampled()
        made = [name for name in sorted(sampled) if PolicyName.parse(name).own_stage in self.stages]
        if len(sampled) > 1:
            yield FieldError(
                "engine.sync",
                "is 'none', so the server holds one policy, and stages sample from "
                f"{', '.join(sorted(sampled))}: set it to 'folder' or 'adapter'",
            )
        elif made:
            yield FieldError(
                "engine.sync",
                "is 'none', so the server holds what it was started with, and stages sample from "
                f"{made[0]}, which this run makes: set it to 'folder' or 'adapter'",
            )

    def policies_sampled(self) -> set[str]:
        """Return the policies that a server would have to hold, in words."""
        sampled: set[str] = set()
        for name, stage in self.stages.items():
            sampled |= stage.policies_sampled(name)
        return sampled

    def _ahead_conflicts(self) -> Iterator[ValueError]:
        """Refuse to sample ahead where there is no next window."""
        for name, stage in self.stages.items():
            if stage.never_synchronises:
                yield ValueError(
                    f"stages.{name}: sync_every=0 samples all responses before the first update, "
                    "and engine.ahead=1 the next window's while one trains: set sync_every from 2 "
                    "on, or engine.ahead to 0"
                )

    def _window_conflicts(self) -> Iterator[ValueError]:
        """Refuse a window of updates that cannot come."""
        window = self.logging.window
        if window is None:
            return
        given = f"is {self.logging.profile!r}"
        training = [name for name, stage in self.stages.items() if stage.trains]
        if window.stage not in training:
            updated = ", ".join(training) or "none"
            yield FieldError("logging.profile", f"{given}: the stages with updates are {updated}")
            return
        # An offline stage has as many as its pairs fill, which are not known yet.
        steps = getattr(self.stages[window.stage], "steps", None)
        if steps is not None and window.last > steps:
            yield FieldError("logging.profile", f"{given}, but {window.stage} has {steps} updates")


def prefix_of(task: str) -> str:
    """Return what stands before a task's "reward" in the name of a setting: "" or "tasks.chat."."""
    return "" if task == "main" else f"tasks.{task}."


def setting_of(task: str, field: str) -> str:
    """Name the setting of a task's split or weight: "data.train", "tasks.chat.train"."""
    return f"{prefix_of(task) or 'data.'}{field}"
