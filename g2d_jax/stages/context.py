"""What every stage works with: settings, mesh, tokenizer, problems, rewards, and policies by name."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh

from g2d_jax import keys, processes, storage
from g2d_jax import mesh as meshes
from g2d_jax.accounting import POLICIES
from g2d_jax.canonical import identity
from g2d_jax.compilation import Ahead, Programs
from g2d_jax.config import (
    Config,
    Online,
    Sampling,
    SamplingStage,
    Source,
    Stage,
    Task,
    TrainingStage,
)
from g2d_jax.data import arithmetic
from g2d_jax.data.loader import Mixture, Order
from g2d_jax.data.packing import Group, Packed, pack, positions, round_up
from g2d_jax.data.problems import LoadReport, load_problems
from g2d_jax.data.splits import drop_overlap
from g2d_jax.data.template import TemplateSettings
from g2d_jax.data.tokenizer import PromptTokenizer, load_tokenizer
from g2d_jax.models import decoder, hf, kernels, lora, reward_model
from g2d_jax.models.config import ModelConfig
from g2d_jax.models.decoder import Decoder
from g2d_jax.models.flops import forward_flops
from g2d_jax.records import Problem, SamplingParams
from g2d_jax.rewards.functions import RewardFunction
from g2d_jax.sampler import capacity
from g2d_jax.sampler.engine import Sampler
from g2d_jax.sampler.programs import Shapes
from g2d_jax.stages import starting
from g2d_jax.stages.clock import Clock
from g2d_jax.stages.programs.program import Program
from g2d_jax.stages.scorers import Scorers, Usage
from g2d_jax.stages.writer import Writer
from g2d_jax.tracking import Tracker
from g2d_jax.training import optimizer
from g2d_jax.training.checkpoint import Checkpoints
from g2d_jax.training.objectives import Compute, Objective
from g2d_jax.training.step import make_cast, make_scorer, put_batch
from g2d_jax.workdir import stage_folders

CPU_TOKENS = 1024
"""Tokens of a micro-batch that a CPU computes quickest: what its caches hold, and gradients are not added too often."""


class StopRun(ValueError):
    """The run cannot go on usefully; the message says why and what to change. Nothing written is lost."""


@dataclass(slots=True)
class Tally:
    """What a stage cost, carried across restarts in its checkpoints.

    seconds: on the clock, without writing checkpoints. device_seconds: times the devices that were held for it. Of each
    of accounting.ACTIVITIES: what of seconds was spent on it; and checkpointing, beside them.
    """

    seconds: float = 0.0
    device_seconds: float = 0.0
    generated: int = 0
    prefilled: int = 0
    scored: int = 0
    trained: int = 0
    flops: float = 0.0
    verifier_cpu_seconds: float = 0.0
    generation_seconds: float = 0.0
    verification_seconds: float = 0.0
    logprobs_seconds: float = 0.0
    training_seconds: float = 0.0
    checkpointing_seconds: float = 0.0
    compilation_seconds: float = 0.0

    def add(self, record: Mapping[str, Any]) -> None:
        """Add the cost in a manifest, or in a part of one."""
        for name, amount in {**record, **record.get("tokens", {})}.items():
            if name in self.__slots__:
                setattr(self, name, getattr(self, name) + amount)

    def parts(self, share: float) -> dict[str, float]:
        """A share of it, for `add`; whole tokens are rounded."""
        fields = dataclasses.asdict(self).items()
        return {name: round(x * share) if isinstance(x, int) else x * share for name, x in fields if x}

    def manifest(self) -> dict[str, Any]:
        """The fields of a stage's manifest that tell its cost."""
        values = dataclasses.asdict(self)
        tokens = {name: values.pop(name) for name in ("generated", "prefilled", "scored", "trained")}
        return {**values, "tokens": tokens}


class _Results(Mapping[str, Any]):
    """Programs' results by name, each waited for when it is asked for."""

    def __init__(self, futures: Mapping[str, Future[Any]]) -> None:
        self._futures = futures

    def __getitem__(self, name: str) -> Any:
        return self._futures[name].result()

    def __iter__(self) -> Iterator[str]:
        return iter(self._futures)

    def __len__(self) -> int:
        return len(self._futures)


@dataclass
class Context:
    """One run under way.

    config: the resolved settings. workdir: where artefacts go. folders: stage name -> its folder.
    reward, objectives: a user's own reward function, and own losses by stage, in place of the configured ones.
    evaluated: policy -> folder of another evaluate stage that has its completions already. steps: stage -> step that
    its bare name means, where this is not the last one.
    """

    config: Config
    workdir: epath.Path
    tracker: Tracker
    folders: Mapping[str, epath.Path]
    reward: RewardFunction | None = None
    objectives: Mapping[str, Callable[[Compute], Objective]] = field(default_factory=dict)
    programs: Programs = field(default_factory=Programs)
    bases: dict[str, Decoder] = field(default_factory=dict)  # the frozen part of policies, by `starting.base_policy`
    said: set[str] = field(default_factory=set)  # which is said once
    evaluated: Mapping[str, epath.Path] = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)
    ahead: Ahead = field(default_factory=Ahead)
    writer: Writer = field(default_factory=Writer)
    losses: dict[str, tuple[Objective, Programs]] = field(default_factory=dict)  # a user's own, by stage

    def at(self, config: Config, folders: Mapping[str, epath.Path], tracker: Tracker, **changes: Any) -> Context:
        """The same context for a config that differs in its stages only: what was loaded and compiled is shared."""
        other = copy.copy(self)
        other.config, other.folders, other.tracker = config, folders, tracker
        for name, value in changes.items():
            setattr(other, name, value)
        return other

    @cached_property
    def mesh(self) -> Mesh:
        """The device mesh of mesh.*."""
        mesh = meshes.make_mesh(**self.config.mesh.to_dict())
        if self.config.compute.offload_optimizer:
            meshes.check_host_memory(mesh)
        return mesh

    @cached_property
    def dtype(self) -> jnp.dtype:
        """Of activations and caches."""
        return jnp.dtype(self.config.dtype)

    @cached_property
    def compute(self) -> Compute:
        """How forward passes are carried out."""
        return Compute(self.mesh, self.dtype, self.config.compute.remat, self.config.compute.attention)

    @cached_property
    def model_folder(self) -> Any:
        """The folder of a pretrained model, local or on a store, or None when the run starts from random parameters."""
        path = self.config.model.path
        return hf.resolve(path, revision=self.config.model.revision) if path else None

    @cached_property
    def model_config(self) -> ModelConfig:
        """The model's shape, with the adapters of lora.*: from its config.json, or from model.* with the tokenizer's
        vocabulary."""
        adapters = starting.adapters(self.config.lora)
        if self.model_folder is not None:
            return dataclasses.replace(hf.read_config(self.model_folder), **adapters)
        return starting.shape(self.config.model, self.tokenizer.vocab_size, adapters)

    @cached_property
    def tokenizer(self) -> PromptTokenizer:
        """The tokenizer with its templates."""
        settings = self.config.tokenizer
        source = settings.path or (self.model_folder if self.config.model.path else arithmetic.SLIPS.name)
        names = ("chat", "prompt_template", "system", "date", "enable_thinking")
        chosen = {name: value for name in names if (value := getattr(settings, name)) is not None}
        return load_tokenizer(source, TemplateSettings(**chosen), revision=settings.revision)

    @cached_property
    def tasks(self) -> dict[str, Task]:
        """The settings of each task by name."""
        return self.config.all_tasks

    @cached_property
    def scalar(self) -> dict[str, bool]:
        """Whether a task's reward knows better and worse but no right and wrong."""
        return {name: task.reward.is_scalar for name, task in self.tasks.items()}

    @cached_property
    def problems(self) -> dict[str, list[Problem]]:
        """Problems by split, task after task: train without those of dev and test, dev without those of test, none with
        too long a prompt."""
        loaded: dict[str, list[Problem]] = {"train": [], "dev": [], "test": []}
        for name in self.tasks:
            for split, problems in self._problems_of(name).items():
                known = {problem.id for problem in loaded[split]}
                new = [problem for problem in problems if problem.id not in known]
                if len(new) < len(problems):
                    dropped = len(problems) - len(new)
                    self.tracker.say(f"{name}, {split}: {dropped} problems dropped that another task has too")
                loaded[split] += new
        for split, others in (("dev", ("test",)), ("train", ("dev", "test"))):
            count = len(loaded[split])
            loaded[split], overlap = drop_overlap(loaded[split], [p for other in others for p in loaded[other]])
            if count and not loaded[split]:
                raise ValueError(
                    f"data.{split} has no problem left: all {count} occur in "
                    f"{' or '.join(f'data.{other}' for other in others)}. Give data.{split} other problems; dev may be "
                    "a part held out from the training problems"
                )
            if overlap:
                self.tracker.say(f"{split}: {overlap} problems dropped that occur in {' or '.join(others)}")
        for split, problems in loaded.items():
            if not problems:
                raise ValueError(f"data.{split} has no problem left after filtering; see the messages above")
        ids = {split: [problem.id for problem in problems] for split, problems in loaded.items()}
        processes.agreed("problems", storage.fingerprint(ids))
        return loaded

    @cached_property
    def train(self) -> dict[str, Problem]:
        """The training problems by id."""
        return {problem.id: problem for problem in self.problems["train"]}

    def train_order(self, purpose: str) -> Order | Mixture:
        """The order in which a stage draws from problems["train"]: tasks mixed by their weights."""
        tasks = Counter(problem.task for problem in self.problems["train"])
        if len(self.tasks) == 1:
            return self.order(tasks["main"], purpose)
        empty = [name for name, task in self.tasks.items() if task.weight and not tasks[name]]
        if empty:
            raise ValueError(
                f"task {empty[0]!r} has no training problem left: see the messages above, or set its weight 0"
            )
        low, _ = keys.key_data(self.config.seed, "order", purpose)
        return Mixture([tasks[name] for name in self.tasks], [task.weight for task in self.tasks.values()], int(low))

    def _problems_of(self, name: str) -> dict[str, list[Problem]]:
        """One task's problems by split."""
        task, prefix = self.tasks[name], "" if name == "main" else f"{name}, "
        splits = [split for split in ("train", "dev", "test") if getattr(task, split).path]
        loaded = {split: self._load(task, split, prefix) for split in splits}
        longest = self.config.data.max_prompt_length
        for split, problems in loaded.items():
            kept, dropped = self.tokenizer.drop_too_long(problems, longest)
            loaded[split] = [dataclasses.replace(problem, task=name) for problem in kept]
            if dropped:
                self.tracker.say(f"{prefix}{split}: {dropped} prompts longer than {longest} tokens dropped")
        return loaded

    def _load(self, task: Task, split: str, prefix: str) -> list[Problem]:
        source: Source = getattr(task, split)
        problems, report = load_problems(
            source.path,
            fields=source.fields or None,
            split=source.split or None,
            limit=source.limit,
            on_error=source.on_error,
            seed=self.config.data.seed,
            revision=source.revision,
        )
        self._warn(f"{prefix}{split}", report)
        if task.reward.function == "verify" and (self.reward is None or prefix):
            known = [problem for problem in problems if problem.answer is not None]
            if len(known) < len(problems):
                dropped = len(problems) - len(known)
                self.tracker.say(f"{prefix}{split}: {dropped} problems without a reference answer dropped")
            return known
        return problems

    def _warn(self, split: str, report: LoadReport) -> None:
        for name in ("duplicates", "conflicts", "broken"):
            if getattr(report, name):
                self.tracker.say(f"{split}: {getattr(report, name)} rows of {report.source} are {name}")
        if report.filtered:
            listed = ", ".join(f"{count} {reason}" for reason, count in report.filtered.items())
            self.tracker.say(f"{split}: rows of {report.source} left out: {listed}")

    @cached_property
    def scorer(self) -> Scorers:
        """How responses are scored."""
        rewards = {name: task.reward for name, task in self.tasks.items()}
        return Scorers(rewards, lambda: self.mesh, self.workdir / "judged", self.reward)

    def order(self, count: int, purpose: str) -> Order:
        """The order in which a stage draws from `count` records."""
        low, _ = keys.key_data(self.config.seed, "order", purpose)
        return Order(count, int(low))

    @cached_property
    def sampling_mesh(self) -> Mesh:
        """The devices as sampling uses them. Raises ValueError for settings that do not fit them. All processes ask at
        once, the first time."""
        tensor, model = self.config.compute.sampling_tensor, self.model_config
        if not tensor:
            every = self.config.stages.values()
            stages = [
                stage for stage in every if isinstance(stage, SamplingStage) and getattr(stage, "steps", None) != 0
            ]
            longest = max((stage.sampling.max_new_tokens for stage in stages), default=1)
            columns = self.config.data.max_prompt_length + longest
            beside = max(map(self.state_bytes, self.config.stages.values()), default=0)
            itemsize, devices = self.dtype.itemsize, self.mesh.size
            samples = min(map(self._samples, stages), default=1)
            room = columns, longest, self.device_memory, beside
            tensor = capacity.best_ways(model.base, itemsize, devices, *room, samples)
        return meshes.sampling(self.mesh, tensor, model.num_key_value_heads)

    def _samples(self, stage: Stage) -> int:
        """Responses that a stage draws in a call, at most: an online stage's are those until it synchronises."""
        most = self.config.compute.responses_at_once
        if not isinstance(stage, Online):
            return most
        updates = min(stage.sync_every or stage.steps, stage.steps)
        return min(most, -(-updates // stage.num_iterations) * stage.prompts_per_step * stage.num_generations)

    @cached_property
    def device_memory(self) -> int | None:
        """Bytes that programs are to use of the smallest device, None where none tells. All processes ask at once."""
        told = (memory for memory in processes.gather(meshes.memory(self.mesh)) if memory is not None)
        return min(told, default=None)

    @cached_property
    def reward_bytes(self) -> int:
        """Bytes of a device that reward models take, which stay once they are loaded."""
        rewards = [task.reward for task in self.tasks.values() if task.reward.function == "model"]
        settings = {reward.model.path: reward.model for reward in rewards}
        models = (
            reward_model.abstract_on(hf.read_config(hf.resolve(path)), self.mesh, jnp.dtype(one.dtype))
            for path, one in settings.items()
        )
        return sum(map(meshes.device_bytes, models))

    def state_bytes(self, stage: Stage) -> int:
        """Bytes of a device that a stage's training takes while it samples, by formula; 0 for one that trains nothing.

        4 a trained parameter, its optimiser's, and a reference; what stands beside adapters; reward models.
        """
        model, compute = self.model_config, self.config.compute
        if self.device_memory is None:
            return 0
        if not isinstance(stage, TrainingStage):
            return self.reward_bytes
        moments = optimizer.state_bytes(stage.optimizer.kind, stage.optimizer.moment_dtype)
        reference = isinstance(stage, Online) and stage.compares and not stage.reference_sync
        each = 4 + (0 if compute.offload_optimizer else moments) + self.dtype.itemsize * reference
        size = each * decoder.count_trained(model) + starting.rest_bytes(self.config, model)
        return size // (self.mesh.shape["fsdp"] * self.mesh.shape["tensor"]) + self.reward_bytes

    def sampler(self) -> Sampler:
        """Give the sampler: one for the run."""
        names = ("chunk", "prefill_rows", "attention", "decode_attention", "max_num_seqs")
        chosen = {name: getattr(self.config.compute, name) for name in names}
        settings = {name: value for name, value in chosen.items() if value is not None}
        settings |= {"seed": self.config.seed, "dtype": self.dtype, "programs": self.programs}
        sampler = self.programs.take(Sampler, self.model_config, self.sampling_mesh, **settings)
        self._say_attention("prompts", sampler.kernel)
        return sampler

    @cached_property
    def prompt_lengths(self) -> tuple[int, ...]:
        """Tokens of the prompt of every problem."""
        problems = [problem for split in self.problems.values() for problem in split]
        return tuple(len(self.tokenizer.encode_prompt(problem)) for problem in problems)

    @cached_property
    def mean_prompt(self) -> float:
        """Mean tokens of a prompt."""
        return float(np.mean(self.prompt_lengths))

    @cached_property
    def problem_counts(self) -> dict[str, int]:
        """How many problems each split has."""
        return {split: len(problems) for split, problems in self.problems.items()}

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end a response."""
        return self.tokenizer.eos_ids

    def sampling_shapes(
        self, stage: Stage, prompts: int, samples: int, *params: SamplingParams, weights: str = ""
    ) -> Shapes:
        """Choose what the sampler is compiled for, by a stage's largest call: so many prompts, and responses each.

        Rows are compute.max_num_seqs, or the quickest of what memory allows beside what the stage holds there.
        weights: as of `view`.
        """
        rows = self.config.compute.max_num_seqs
        if not rows:
            longest, mesh = max(some.max_new_tokens for some in params), self.sampling_mesh
            columns, memory = max(self.prompt_lengths) + longest, self.device_memory
            model, ways = self.model_config.base.held(weights), mesh.size // mesh.shape["data"]
            how = model, self.dtype.itemsize, ways, mesh.size, columns
            rows = max(capacity.rows_that_fit(*how, memory, self.state_bytes(stage)), 1)
            if memory is not None:
                rows = capacity.quickest_rows(*how, longest, rows, prompts * samples)
        return self.sampler().shapes(prompts, prompts * samples, params, self.prompt_lengths, rows)

    def compile_ahead(self, programs: Iterable[Program]) -> None:
        """Let other threads compile programs of a stage, in their order, while this one goes on."""
        futures: dict[str, Future[Any]] = {}
        for program in programs:
            made = _Results(dict(futures))
            futures[program.name] = self.ahead.compile(program.run, partial(program.compile, made))

    def view(self, params: Decoder, weights: str = "") -> Decoder:
        """Give a policy as the sampler reads it: see `Sampler.view`. All processes make the call."""
        return self.sampler().view(params, weights)

    def sampling_params(self, sampling: Sampling, **changes: Any) -> SamplingParams:
        """Settings of a stage's sampling section; any of the tokenizer's stop tokens ends a response."""
        return sampling.params(self.stop_ids, **changes)

    def row_length(self, longest: int, batches: Sequence[Sequence[Group]] = (), *, places: int = 16) -> int:
        """Choose the columns of a packed row: compute.row_length, or what leaves the fewest positions empty.

        At least `longest`, at most a device's micro-batch. batches: such as the stage will have, by which it is chosen;
        without any it is what holds `longest` tokens. Of equals the shortest is taken.
        """
        chosen = self.config.compute.row_length
        if chosen and chosen < longest:
            raise ValueError(
                f"compute.row_length is {chosen} but a group can need {longest} tokens: raise it, or set 0"
            )
        step = kernels.LANES if self._kernel(kernels.LANES) == "splash" else 16
        shortest = round_up(longest, step)
        most = max(shortest, self._microbatch_tokens(0) // meshes.row_ways(self.mesh))

        def columns(length: int) -> int:
            return sum(positions(groups, **self._rows(length, len(groups), places)) for groups in batches)

        length = chosen or min(range(shortest, most + 1, step), key=columns)
        self._say_attention(f"packed rows of {length} tokens", self._kernel(length))
        return length

    def _kernel(self, length: int) -> kernels.Kernel:
        """Of attention over packed rows of this length. Raises ValueError where the one asked for cannot serve."""
        return kernels.choose(
            self.config.compute.attention,
            platform=kernels.platform_of(self.mesh),
            dtype=self.dtype,
            head_dim=self.model_config.head_dim,
            length=length,
            layout="packed",
        )

    def _say_attention(self, rows: str, kernel: kernels.Kernel) -> None:
        """Say once of each kind of rows which kernel it gets."""
        said = f"attention over {rows}: {kernel}"
        if said not in self.said:
            self.said.add(said)
            self.tracker.say(said)

    def microbatch_rows(self, row_length: int, most_rows: int) -> int:
        """Choose the rows of one micro-batch, of batches of at most `most_rows`; a multiple of the devices' parts.

        No more than compute.microbatch_tokens, nor than keep a device busy where that leaves few micro-batches: half of
        the last one is empty, on average.
        """
        ways = meshes.row_ways(self.mesh)
        return max(self._microbatch_tokens(most_rows * row_length) // row_length // ways, 1) * ways

    def _microbatch_tokens(self, batch: int) -> int:
        """Tokens of one micro-batch on all devices, of batches of at most so many."""
        ways = meshes.row_ways(self.mesh)
        enough = CPU_TOKENS if kernels.platform_of(self.mesh) == "cpu" else max(batch // ways // 8, 4096)
        return int(min(self.config.compute.microbatch_tokens, enough * ways))

    def pack(self, groups: Sequence[Group], row_length: int, most_rows: int, *, places: int = 16) -> Packed:
        """Lay groups into rows of this length, in micro-batches for this mesh, the same shape for all batches.

        most_rows: that any batch takes.
        """
        return pack(groups, **self._rows(row_length, most_rows, places))

    def _rows(self, row_length: int, most_rows: int, places: int) -> dict[str, int]:
        """How `pack` lays rows of this length."""
        return {
            "row_length": row_length,
            "microbatch_rows": self.microbatch_rows(row_length, most_rows),
            "rows_multiple": meshes.row_ways(self.mesh),
            "places": places,
            "most_rows": most_rows,
        }

    def policy(self, name: str) -> Decoder:
        """The parameters of a policy, by name, on the mesh.

        "init": the pretrained model, else random parameters. "STAGE": the stage's last checkpoint. "STAGE@K": that of
        its step K. "run:WORKDIR#STAGE" and "run:WORKDIR#STAGE@K": of another run. "hf:PATH": a Hugging Face folder.
        A STAGE that selects means the checkpoint that it chose. Raises ValueError when there is no such policy.
        """
        if name == "init" or name.startswith("hf:"):
            if (rest := self.frozen(self.base(name))) is None:
                return self._base(name)
            return starting.beside(rest, self.model_config, self.mesh, self.config.seed)
        folder, step = self.checkpoint_of(name)
        rest = self.frozen(self.base(name))
        with Checkpoints(folder) as checkpoints:
            there = processes.once(checkpoints.steps)
            found = max(there, default=None) if step is None else step
            if found is None or found not in there:
                kept = ", ".join(map(str, there))
                why = f"of that step in {folder} (there: {kept}); see stages.*.keep" if kept else f"in {folder} yet"
                raise ValueError(f"policy {name!r}: no checkpoint {why}")
            like, _ = lora.split(decoder.abstract_on(self.model_config, self.mesh))
            return lora.join(checkpoints.restore_params(found, like), rest)

    def reference(self, policy: str) -> Decoder:
        """Give a policy as a fixed reference beside one that is trained, in `reference_dtype`."""
        params = self.policy(policy)
        if self.reference_dtype == params.embed.dtype:
            return params
        return self.programs.take(make_cast, self.model_config, self.mesh, self.reference_dtype)(params)

    @property
    def reference_dtype(self) -> jnp.dtype:
        """Of a reference's parameters: the type that a forward pass casts them to, so that it gives the same bits.

        With adapters it is that of their base, which all policies share.
        """
        return starting.base_dtype(self.config) if self.model_config.lora else self.dtype

    def base(self, policy: str) -> str:
        """Follow a policy to the model that it was trained from: see `starting.base_policy`."""
        return starting.base_policy(self.config, policy, self.folders)

    def frozen(self, base: str) -> Decoder | None:
        """The part of policies that no stage trains, on the mesh: the model `base` that their adapters stand beside.

        None without adapters. Policies with one base share its arrays; the last base asked for is kept.
        """
        if self.model_config.lora is None:
            return None
        if base not in self.bases:
            self.bases.clear()
            self.bases[base] = self._base(base)
        return self.bases[base]

    def checkpoint_of(self, name: str) -> tuple[epath.Path, int | None]:
        """The checkpoint folder and step that a policy's name means."""
        found = self.chosen(name)
        step = found.rpartition("#")[2].partition("@")[2]
        return self._stage_folder(found) / "checkpoints", int(step) if step else self.steps.get(found)

    def chosen(self, name: str) -> str:
        """The policy that a name leads to: of a select stage the checkpoint it chose, "STAGE@K", else the name itself.

        Raises ValueError for a stage that is not there, or has not chosen yet.
        """
        if name == "init" or name.startswith("hf:"):
            return name
        folder, stage = self._stage_folder(name), name.partition("@")[0]
        selects = stage in self.config.stages and self.config.stages[stage].kind == "select"
        if selects and storage.finished(folder) is None:
            raise ValueError(f"policy {name!r}: that stage has not chosen a checkpoint yet: let it finish first")
        return followed(name, folder)

    def _stage_folder(self, name: str) -> epath.Path:
        stage, at, step = name.rpartition("#")[2].partition("@")
        if at and not step.isdecimal():
            raise ValueError(f"policy {name!r}: write the step after @ as a number, as in {stage}@20")
        if name.startswith("run:"):
            return stage_of_run(name)
        stages = self.config.stages
        trained = [known for known in self.folders if known in stages and stages[known].kind in POLICIES]
        if stage not in trained:
            why = f"a {stages[stage].kind} stage trains none" if stage in stages else "no such stage"
            raise ValueError(f"policy {name!r}: {why}; this run has {', '.join(trained)}, and 'init'")
        return self.folders[stage]

    def base_path(self, policy: str) -> str:
        """Name the pretrained model that a policy began with, a path or hub id; "" where that was random numbers."""
        base = self.base(policy)
        return self.config.model.path if base == "init" else base.removeprefix("hf:")

    def _base(self, name: str) -> Decoder:
        """Load "init" or "hf:PATH" without adapters: what stands beside them, if the run has some."""
        folder = self.model_folder if name == "init" else hf.resolve(name.removeprefix("hf:"))
        if name != "init" and hf.read_config(folder) != self.model_config.base:
            raise ValueError(f"policy {name!r} has another shape than this run's model")
        return starting.base(self.config, folder, self.model_config, self.mesh)

    @contextmanager
    def metered(self, tally: Tally) -> Iterator[None]:
        """Add the time of a block, and what scoring took in it, to a tally."""
        before, clocked, started = self.scorer.usage(), self.clock.read(), time.perf_counter()
        try:
            yield
        finally:
            spent, after = time.perf_counter() - started, self.scorer.usage()
            tally.seconds += spent
            tally.device_seconds += spent * self.mesh.size
            for name in Usage.__slots__:
                setattr(tally, name, getattr(tally, name) + getattr(after, name) - getattr(before, name))
            tally.add(self.clock.since(clocked))

    def score_logprobs(self, params: Decoder, packed: Packed, tally: Tally, temperature: float = 1.0) -> np.ndarray:
        """Log-probabilities of packed responses under a policy, float32 [N, R, T]; the cost goes to the tally."""
        tally.scored += packed.used
        tally.flops += forward_flops(self.model_config, packed.used, packed.attended)
        with self.clock.doing("logprobs"):
            score = self.programs.take(make_scorer, self.compute)
            logprobs, _ = score(params, *put_batch(packed, self.mesh), temperature=float(temperature))
            self.clock.settle()
            return np.asarray(logprobs)

    def loss_of(self, name: str, configured: Objective) -> tuple[Objective, Programs]:
        """A stage's loss, and where its programs lie: those of a user's own, which may look like another, alone."""
        own = self.objectives.get(name)
        if own is None:
            return configured, self.programs
        if name not in self.losses:
            self.losses[name] = own(self.compute), Programs()
        return self.losses[name]

    def close(self) -> None:
        """End the verifiers' processes, and the threads that compile and write."""
        self.ahead.close()
        self.writer.close()
        if "scorer" in self.__dict__:
            self.scorer.close()

    def fingerprint(self) -> str:
        """Of everything outside the stages that decides a policy: model, tokenizer, data, seed."""
        sections = ("seed", "dtype", "model", "lora", "data", "reward", "tasks")
        shared = {name: value for name, value in identity(self.config).items() if name in sections}
        return storage.fingerprint([shared, self.tokenizer.fingerprint])


def followed(policy: str, folder: epath.Path) -> str:
    """The policy that a stage's name leads to, `folder` being the stage's: see `Context.chosen`."""
    manifest = storage.finished(folder) or {}
    if manifest.get("kind") != "select":
        return policy
    place, hash_sign, stage = policy.rpartition("#")
    if "@" in stage:
        raise ValueError(f"policy {policy!r}: a select stage has chosen its step: leave out what is behind @")
    return f"{place}{hash_sign}{manifest['result']['policy']}"


def check_elsewhere(policy: str) -> None:
    """Raise ValueError if a policy outside this run ("run:…", "hf:…") is not there. A hub id is not looked up."""
    if policy.startswith("run:"):
        policy = followed(policy, stage_of_run(policy))
        _, at, step = policy.rpartition("#")[2].partition("@")
        steps = Checkpoints(stage_of_run(policy) / "checkpoints").steps()
        if not steps or (at and step not in map(str, steps)):
            raise ValueError(f"policy {policy!r}: there are checkpoints of {', '.join(map(str, steps)) or 'no step'}")
    if policy.startswith(("hf:.", "hf:/", "hf:~", "hf:gs://", "hf:s3://")):
        hf.read_config(hf.resolve(policy.removeprefix("hf:")))


def stage_of_run(policy: str) -> epath.Path:
    """The folder of another run's stage. Raises ValueError for "run:WORKDIR#STAGE[@STEP]" that leads nowhere."""
    workdir, hash_sign, last = policy.removeprefix("run:").rpartition("#")
    stage = last.partition("@")[0]
    if not (workdir and hash_sign and stage):
        raise ValueError(f"policy {policy!r}: write run:WORKDIR#STAGE or run:WORKDIR#STAGE@STEP")
    other = epath.Path(workdir).expanduser()
    if not (other / "config.json").exists():
        raise ValueError(f"policy {policy!r}: {other} holds no run (no config.json)")
    folders = stage_folders(other)
    if stage not in folders:
        raise ValueError(f"policy {policy!r}: {other} has no stage {stage!r}; it has {', '.join(folders) or 'none'}")
    return folders[stage]
