"""All settings of a run, and conflicts between its sections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from functools import cached_property
from typing import TypeVar

from ml_collections import ConfigDict

from g2d_jax.config.machine import Checkpoint, Compute, Engine, Faults, Logging, Mesh
from g2d_jax.config.model import Lora, Model, Tokenizer
from g2d_jax.config.rewards import Data, Reward, RewardModel, Task
from g2d_jax.config.section import Dtype, Invalid, Issue, Run, Section, error, read
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
"""Top-level sections and fields that do not change the result, beyond rounding."""

RESERVED = ("init", "sample", "archive", "hf", "run", "main", "reward")
"""Reserved words, which cannot name a stage or a task: they mean policies, rollouts, tasks, and the
function that a run receives from Python."""


class Config(Section):
    """The settings of a run."""

    name: str = "run"
    """Shown in the report, and part of the work directory's name if you choose none."""
    seed: int = 0
    """Every random number depends on it, and on its use, problem, visit, sample and position."""
    dtype: Dtype = "float32"
    """The type of activations and caches; parameters and the optimiser are float32. `bfloat16`: on
    machines that have it (docs/hardware.md). With `float32`, matrix products are float32 on every
    machine, unless you set `JAX_DEFAULT_MATMUL_PRECISION` (JAX's own choice: `default`). A run
    resumes only under the same precision."""
    model: Model = Model()
    lora: Lora = Lora()
    tokenizer: Tokenizer = Tokenizer()
    data: Data = Data()
    reward: Reward = Reward()
    tasks: Mapping[str, Task] = field(default_factory=dict)
    """More tasks of a mixed run, by name (docs/howto.md#mix-tasks): `settings.task(TRAIN, DEV,
    TEST)`, with `weight` and fields of `reward` as keywords. Then
    `config.tasks.NAME.reward.FIELD`."""
    mesh: Mesh = Mesh()
    compute: Compute = Compute()
    engine: Engine = Engine()
    logging: Logging = Logging()
    checkpoint: Checkpoint = Checkpoint()
    faults: Faults = Faults()
    stages: Mapping[str, Stage] = field(default_factory=dict)
    """Stages by name, in any order: `config.stages.NAME = settings.KIND(FIELD=VALUE, …)`."""

    @classmethod
    def of(cls, config: ConfigDict) -> Config:
        """Return a user's config as records, without its study (`sweep`).

        Raises Invalid with every value of a wrong type or out of bounds. check.py finds conflicts.
        """
        found: list[Issue] = []
        made = cls.read(config, found)
        if found:
            raise Invalid(found)
        return made

    @classmethod
    def read(cls, config: ConfigDict, found: list[Issue], *, other: bool = False) -> Config:
        """Return the same with valid values in place of wrong ones: see `section.read`."""
        tasks = {}
        for name, task in config.tasks.items():
            tasks[name] = read(Task, task, found, f"tasks.{name}", other=other)
        stages = {}
        for name, stage in config.stages.items():
            kind = STAGES[stage.kind]
            stages[name] = read(kind, stage, found, f"stages.{name}", other=other)
        return read(cls, config, found, other=other, tasks=tasks, stages=stages)

    @cached_property
    def all_tasks(self) -> dict[str, Task]:
        """Every task by name: "main", from the sections data and reward, and the others."""
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
        """By task, whether its reward decides correctness."""
        return {name: task.reward.is_verifiable for name, task in self.all_tasks.items()}

    def policies_sampled(self) -> set[str]:
        """Return, in words, the policies that a server must hold."""
        sampled: set[str] = set()
        for name, stage in self.stages.items():
            sampled |= stage.policies_sampled(name)
        return sampled

    def stage(self, name: str, kind: type[StageT]) -> StageT:
        """Return a stage of a known kind. Raises TypeError otherwise."""
        stage = self.stages[name]
        if not isinstance(stage, kind):
            raise TypeError(f"stages.{name} is of kind {stage.kind}, not {kind.kind}")
        return stage

    def stages_of(self, kind: type[StageT]) -> dict[str, StageT]:
        """Return the stages of a kind by name."""
        return {name: stage for name, stage in self.stages.items() if isinstance(stage, kind)}

    def issues(self, run: Run) -> Iterator[Issue]:
        """Yield conflicts between whole sections."""
        for section, names in (("stages", self.stages), ("tasks", self.tasks)):
            for name in names:
                if name in RESERVED:
                    yield error(
                        f"{section}.{name}",
                        f"has a reserved name ({', '.join(RESERVED)})",
                        f"choose another, such as {name}-1",
                    )
        if not any(task.weight for task in self.all_tasks.values()):
            yield error("data.weight", "and all tasks.*.weight are 0", "set one to more than 0")
        # cuDNN supports this on no device; models/kernels.py has the other rules.
        if self.compute.attention == "cudnn" and self.dtype == "float32":
            yield error(
                "compute.attention",
                "is 'cudnn', which computes in bfloat16 only",
                "set dtype to bfloat16, or this to auto",
            )
        if not self._has_tokenizer:
            yield error(
                "tokenizer.path",
                "is empty, and so is model.path, but random parameters have no tokenizer",
                "set model.path, or tokenizer.path to a folder or hub id; procedural:slips has the "
                "tokenizer of the embedded arithmetic, which knows only its characters",
            )

    @property
    def _has_tokenizer(self) -> bool:
        """True if a setting names a tokenizer, or a model or embedded task that has one."""
        if self.model.path or self.tokenizer.path:
            return True
        paths = [stage.examples_path() or "" for stage in self.stages.values()]
        for task in self.all_tasks.values():
            paths += [task.train.path, task.dev.path, task.test.path]
        return any(path.startswith("procedural:") for path in paths)


def prefix_of(task: str) -> str:
    """Return the prefix of a task's "reward" in the name of a setting: "" or "tasks.chat."."""
    return "" if task == "main" else f"tasks.{task}."


def setting_of(task: str, field: str) -> str:
    """Name the setting of a task's split or weight: "data.train", "tasks.chat.train"."""
    return f"{prefix_of(task) or 'data.'}{field}"
