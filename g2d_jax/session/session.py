"""The session of a run, which all stages share: settings, mesh, tokenizer, problems, rewards,
programs and costs."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh

from g2d_jax import mesh as meshes
from g2d_jax.config import Config, Model, Online, Stage, Task, Tokenizer, TrainingStage
from g2d_jax.config.io import identity
from g2d_jax.config.section import Section
from g2d_jax.contents import Content
from g2d_jax.data import arithmetic
from g2d_jax.data.packing import Packed
from g2d_jax.data.stops import Decode
from g2d_jax.data.template import Fault, TemplateSettings, check_typed, refuse
from g2d_jax.data.tokenizer import PromptTokenizer, load_tokenizer
from g2d_jax.models import decoder, hf
from g2d_jax.models.config import ModelConfig
from g2d_jax.models.decoder import Decoder
from g2d_jax.models.flops import forward_flops
from g2d_jax.records import Problem, SamplingParams, by_id
from g2d_jax.rewards.functions import RewardFunction
from g2d_jax.runtime import processes, storage
from g2d_jax.runtime.program_cache import CompileAhead, Programs
from g2d_jax.runtime.tracking import Tracker, run_id
from g2d_jax.sampler import capacity
from g2d_jax.sampler.engine import Engine, Sampler
from g2d_jax.sampler.programs import Shapes
from g2d_jax.session import init_params
from g2d_jax.session.background_writer import Writer
from g2d_jax.session.cost import Clock, Cost
from g2d_jax.session.problems import SPLITS, Loaded, Splits, ids_of, joined
from g2d_jax.session.problems import load as load_problems
from g2d_jax.session.program import Program
from g2d_jax.session.reward_manager import RewardManager
from g2d_jax.session.windows import window_at
from g2d_jax.training import optimizer
from g2d_jax.training.objectives import Compute, Objective
from g2d_jax.training.step import make_scorer, put_batch, put_numbers
from g2d_jax.workdir import absolute

if TYPE_CHECKING:
    from g2d_jax.sampler.remote import Remote

SAMPLINGS = ("sampling", "probe_sampling")
"""The names that a stage has for settings of sampling."""


class StopRun(ValueError):
    """The error that a run cannot go on usefully; the message says why and what to change. Nothing
    written is lost."""


class _Results(dict[str, Any]):
    """The programs' results by name, from futures; a look-up waits for the result."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name).result()


@dataclass
class Session:
    """One run under way.

    config: the resolved settings. workdir: where artefacts go. folders: stage name -> its folder.
    reward, objectives: a user's own reward function, and own losses by stage, in place of the
    configured ones.
    evaluated: policy -> folder of another evaluate stage that has its completions already. steps:
    stage -> step that its bare name means, where this is not the last one. contents: setting ->
    digest of what it names outside the run.
    splits: those whose problems are read. fault: called for a fault of the tokenizer that no run
    should begin with.
    follows: the work directory that says which reference answers can be read, None: its own. asks:
    whether the verifier is asked about the others; else all can.
    """

    config: Config
    workdir: epath.Path
    tracker: Tracker
    folders: Mapping[str, epath.Path]
    reward: RewardFunction | None = None
    objectives: Mapping[str, Callable[[Compute], Objective]] = field(default_factory=dict)
    programs: Programs = field(default_factory=Programs)
    bases: dict[str, Decoder] = field(
        default_factory=dict
    )  # the frozen part of policies, by `init_params.base_policy`
    said: set[str] = field(default_factory=set)  # messages that are logged once
    evaluated: Mapping[str, epath.Path] = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)
    contents: Mapping[str, str] = field(default_factory=dict)
    splits: Sequence[str] = SPLITS
    fault: Fault = refuse
    follows: epath.Path | None = None
    asks: bool = True
    clock: Clock = field(default_factory=Clock)
    ahead: CompileAhead = field(default_factory=CompileAhead)
    writer: Writer = field(default_factory=Writer)
    losses: dict[str, tuple[Objective, Programs]] = field(
        default_factory=dict
    )  # a user's own, by stage

    def at(
        self, config: Config, folders: Mapping[str, epath.Path], tracker: Tracker, **changes: Any
    ) -> Session:
        """Return this session for a config that differs in its stages only: loaded and compiled
        objects are shared."""
        other = copy.copy(self)
        vars(other).update(config=config, folders=folders, tracker=tracker, **changes)
        return other

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
            meshes.check_host_memory(mesh)
        return mesh

    @cached_property
    def dtype(self) -> jnp.dtype:
        """The dtype of activations and caches."""
        return jnp.dtype(self.config.dtype)

    @cached_property
    def compute(self) -> Compute:
        """The settings of forward passes."""
        return Compute(
            self.mesh, self.dtype, self.config.compute.remat, self.config.compute.attention
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
        settings = self.config.tokenizer
        for name in ("prompt_template", "system"):
            warning = check_typed(f"tokenizer.{name}", getattr(settings, name) or "")
            if warning:
                self.say_once(warning)
        tokenizer = open_tokenizer(settings, self.config.model, self.fault)
        for setting, string in stop_strings(self.config):
            warning = tokenizer.check_stop_string(setting, string)
            if warning:
                self.say_once(warning)
        return tokenizer

    @cached_property
    def positions(self) -> int | None:
        """The positions that the model was trained on; None for one that begins with random
        parameters."""
        return None if self.model_folder is None else self.model_config.positions

    @cached_property
    def tasks(self) -> dict[str, Task]:
        """The settings of each task by name."""
        return self.config.all_tasks

    @cached_property
    def verifiable(self) -> dict[str, bool]:
        """By task, whether its reward knows right and wrong."""
        return {name: task.reward.is_verifiable for name, task in self.tasks.items()}

    @cached_property
    def problems(self) -> Splits:
        """The problems by split."""
        return self._loaded.problems

    @property
    def problem_contents(self) -> dict[str, Content]:
        """The contents of the sources of problems, by setting: "data.train"."""
        return self._loaded.contents

    @property
    def left_out(self) -> Splits:
        """The problems of each split that are left out: the verifier cannot read their reference
        answers."""
        return self._loaded.left_out

    @property
    def unreadable(self) -> list[dict[str, Any]]:
        """The messages about answers that the verifier cannot read, see `Loaded`; [] before
        problems are read."""
        return self._loaded.unreadable if "_loaded" in self.__dict__ else []

    @cached_property
    def _loaded(self) -> Loaded:
        unreadable = self._find_unreadable if self.asks else None
        own_reward = self.reward is not None
        return load_problems(
            self.config, self.tokenizer, own_reward, self.tracker.say, self.splits, unreadable
        )

    def _find_unreadable(self, problems: Sequence[Problem]) -> set[str]:
        from g2d_jax.session import golds  # here: only runs with a verifier have any

        return golds.unreadable(problems, self.scorer, self.tracker, self.workdir, self.follows)

    @cached_property
    def train(self) -> dict[str, Problem]:
        """The training problems by id."""
        return by_id(self.problems["train"])

    @cached_property
    def held_out_ids(self) -> set[str]:
        """The ids of `held_out`."""
        return set(ids_of(self.held_out))

    @property
    def held_out(self) -> list[Problem]:
        """The problems of dev and test, also those left out of them: nothing may be trained on
        any."""
        return joined(self.problems, ("dev", "test")) + joined(self.left_out, ("dev", "test"))

    @cached_property
    def scorer(self) -> RewardManager:
        """The scorer of responses."""
        rewards = {name: task.reward for name, task in self.tasks.items()}
        return RewardManager(rewards, lambda: self.mesh, self.workdir / "judged", self.reward)

    @cached_property
    def sampling_mesh(self) -> Mesh:
        """The devices as sampling uses them. Raises ValueError for settings that do not fit them.
        All processes must ask for it together the first time."""
        tensor = self.config.compute.sampling_tensor or self._sampling_tensor()
        return meshes.sampling(self.mesh, tensor, self.model_config.num_key_value_heads)

    def _sampling_tensor(self) -> int:
        """Choose over how many devices sampling splits the model: the quickest of what memory
        allows."""
        every = self.config.stages.values()
        stages = [
            stage for stage in every if stage.samplings() and getattr(stage, "steps", None) != 0
        ]
        samplings = itertools.chain.from_iterable(stage.samplings() for stage in stages)
        longest = max((sampling.max_new_tokens for sampling in samplings), default=1)
        columns = self.config.data.max_prompt_length + longest
        resident = max(map(self.state_bytes, every), default=0)
        samples = min(map(self._samples, stages), default=1)
        split = capacity.Split(
            self.model_config.base, self.dtype.itemsize, 1, self.mesh.size, columns
        )
        return capacity.best_ways(split, longest, self.device_memory, resident, samples, self.near)

    def _samples(self, stage: Stage) -> int:
        """Count the responses of a call of a stage, at most: an online stage's are those of its
        window."""
        most = self.config.compute.generation_batch_size
        if not isinstance(stage, Online):
            return most
        return min(
            most, window_at(0, stage).batches * stage.prompts_per_step * stage.num_generations
        )

    @cached_property
    def near(self) -> int:
        """The devices that fast links join, see `meshes.near`."""
        return meshes.near(self.mesh)

    @cached_property
    def device_memory(self) -> int | None:
        """The bytes programs may use of the smallest device, None if none reports them. All
        processes ask at once."""
        sizes = (
            memory for memory in processes.gather(meshes.memory(self.mesh)) if memory is not None
        )
        return min(sizes, default=None)

    @cached_property
    def reward_bytes(self) -> int:
        """The bytes of a device that reward models take, which stay once they are loaded."""
        from g2d_jax.models import reward_model  # here, as `Remote`: few runs have one

        models: dict[str, int] = {}
        for task in self.tasks.values():
            if task.reward.function == "model":
                model = task.reward.model
                shape = hf.read_config(hf.resolve(model.path))
                models[model.path] = meshes.device_bytes(
                    reward_model.abstract_on(shape, self.mesh, jnp.dtype(model.dtype))
                )
        return sum(models.values())

    def state_bytes(self, stage: Stage) -> int:
        """Estimate a device's bytes that a stage needs beside the sampler, which has weights of its
        own.

        By formula: the frozen parameters and reward models; of what is trained 4 a parameter, its
        optimiser's, and a reference.
        """
        model, compute = self.model_config, self.config.compute
        if self.device_memory is None:
            return 0
        size = init_params.rest_bytes(self.config, model)
        if isinstance(stage, TrainingStage):
            each = 4 + self.dtype.itemsize * stage.has_fixed_reference
            if not compute.offload_optimizer:
                each += optimizer.state_bytes(stage.optimizer.kind, stage.optimizer.moment_dtype)
            size += each * decoder.count_trained(model)
        return size // (self.mesh.shape["fsdp"] * self.mesh.shape["tensor"]) + self.reward_bytes

    @cached_property
    def engine(self) -> Engine:
        """The maker of responses: the sampler, or the server of engine.*."""
        return self.sampler() if self.server is None else self.server

    @cached_property
    def server(self) -> Remote | None:
        """The server that samples, None where the sampler does. All processes ask for it
        together."""
        settings, folder = self.config.engine, self.workdir / "engine"
        if not settings.is_server:
            return None
        from g2d_jax.sampler.remote import Remote

        if settings.folder:  # other runs may share it
            folder = absolute(settings.folder) / processes.on_leader(
                lambda: run_id(self.workdir / "engine.json")
            )
        return Remote(
            settings,
            folder,
            self.tokenizer,
            self.model_config.vocab_size,
            seed=self.config.seed,
            dtype=self.dtype.name,
            needs_logprobs=any(
                stage.importance_cap for stage in self.config.stages_of(Online).values()
            ),
            say=self.tracker.say,
        )

    def sampler(self) -> Sampler:
        """Return the sampler: one for the run."""
        names = ("chunk", "prefill_rows", "attention", "decode_attention", "max_num_seqs")
        settings = _chosen(self.config.compute, names)
        settings |= {
            "seed": self.config.seed,
            "dtype": self.dtype,
            "programs": self.programs,
            "decode": self.decode,
        }
        sampler = self.programs.get_or_make(
            Sampler, self.model_config, self.sampling_mesh, **settings
        )
        self.say_once(f"attention over prompts: {sampler.kernel}")
        return sampler

    @cached_property
    def prompt_lengths(self) -> tuple[int, ...]:
        """The tokens of the prompt of every problem."""
        return tuple(
            len(self.tokenizer.encode_prompt(problem)) for problem in joined(self.problems)
        )

    @cached_property
    def mean_prompt(self) -> float:
        """The mean tokens of a prompt; without problems the most there may be."""
        return float(np.mean(self.prompt_lengths or [self.config.data.max_prompt_length]))

    @cached_property
    def problem_counts(self) -> dict[str, int]:
        """The number of problems of each split."""
        return {split: len(problems) for split, problems in self.problems.items()}

    @cached_property
    def decode(self) -> Decode | None:
        """The text of ids, for the sampler; None where no stage has stop strings."""
        return self.tokenizer.decode if any(stop_strings(self.config)) else None

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end a response."""
        return self.tokenizer.eos_ids

    def sampling_shapes(
        self, stage: Stage, prompts: int, samples: int, *params: SamplingParams, weights: str = ""
    ) -> Shapes:
        """Choose the sampler's shapes by a stage's largest call: so many prompts, and responses
        each.

        Rows are compute.max_num_seqs, or the quickest that memory allows beside the stage's own
        arrays.
        weights: as of `sampler_params`.
        """
        sampler, rows = self.sampler(), self.config.compute.max_num_seqs
        call = prompts, prompts * samples, params, self.prompt_lengths
        if not rows:
            longest = max(sampling.max_new_tokens for sampling in params)
            memory = self.device_memory
            shapes, mesh = sampler.shapes(*call, 1), self.sampling_mesh
            model = self.model_config.base.with_quantisation(weights)
            ways = mesh.size // mesh.shape["data"]
            split = capacity.Split(model, self.dtype.itemsize, ways, mesh.size, shapes.widths[-1])
            _, prefilled = sampler.abstract(shapes)
            resident = self.state_bytes(stage) + meshes.device_bytes(prefilled)
            rows = max(split.rows_that_fit(memory, resident), 1)
            if memory is not None:
                rows = split.quickest_rows(longest, rows, prompts * samples)
        return sampler.shapes(*call, rows)

    def compile_ahead(self, programs: Iterable[Program]) -> None:
        """Let other threads compile programs of a stage, in their order, while this one goes on."""
        futures: dict[str, Future[Any]] = {}
        for program in programs:
            results = _Results(futures)
            futures[program.name] = self.ahead.compile(
                program.run, partial(program.compile, results)
            )

    def sampler_params(self, policy: Decoder, weights: str = "") -> Any:
        """Convert a policy to the form that the engine reads: see `Engine`. All processes make the
        call."""
        return self.engine.to_sampler_params(policy, weights)

    @contextmanager
    def track_cost(self, cost: Cost) -> Iterator[None]:
        """Add the time of a block, the cost of scoring in it and a server's counts to a cost."""
        before, clocked, started = self._usage(), self.clock.read(), time.perf_counter()
        try:
            yield
        finally:
            spent, after = time.perf_counter() - started, self._usage()
            cost.add(
                {
                    "seconds": spent,
                    "device_seconds": spent * self.mesh.size,
                    **self.clock.since(clocked),
                }
            )
            cost.add({name: amount - before[name] for name, amount in after.items()})

    def _usage(self) -> dict[str, float]:
        usage = self.scorer.usage()
        if self.server is not None:
            usage |= self.server.counts
        return usage

    def score_logprobs(
        self, params: Decoder, packed: Packed, cost: Cost, temperature: float = 1.0
    ) -> np.ndarray:
        """Compute log-probabilities of packed responses under a policy, float32 [N, R, T]; the cost
        goes to `cost`."""
        cost.scored += packed.used
        cost.flops += forward_flops(self.model_config, packed.used, packed.attended)
        with self.clock.doing("logprobs"):
            score = self.programs.get_or_make(make_scorer, self.compute)
            logprobs, _ = score(
                params, *put_batch(packed, self.mesh), put_numbers(temperature, self.mesh)
            )
            self.clock.settle()
            return np.asarray(logprobs)

    def loss_of(self, name: str, configured: Objective) -> tuple[Objective, Programs]:
        """Return a stage's loss and its programs; a user's own loss, which may look like another,
        has its own."""
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
        """Fingerprint everything outside the stages that decides a policy: model, tokenizer, data,
        seed."""
        sections = ("seed", "dtype", "model", "lora", "data", "reward", "tasks", "engine")
        shared = {name: value for name, value in identity(self.config).items() if name in sections}
        read = {
            name: digest for name, digest in self.contents.items() if not name.startswith("stages.")
        }
        return storage.fingerprint([shared, self.tokenizer.fingerprint, read])

    def stage_fingerprint(self, name: str, inputs: Mapping[str, Any]) -> str:
        """Fingerprint a stage: its settings, what it reads from outside, and the fingerprints of
        its inputs."""
        read = {
            key: digest
            for key, digest in self.contents.items()
            if key.startswith(f"stages.{name}.")
        }
        return storage.fingerprint(
            [self.fingerprint(), identity(self.config)["stages"][name], read, inputs]
        )


def stop_strings(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the stop strings of all stages, each with the setting that has it."""
    for name, stage in config.stages.items():
        for part in SAMPLINGS:
            sampling = getattr(stage, part, None)
            for string in () if sampling is None else sampling.stop:
                yield f"stages.{name}.{part}.stop", string


def open_tokenizer(settings: Tokenizer, model: Model, fault: Fault = refuse) -> PromptTokenizer:
    """Load the tokenizer that settings name, else the model's, else that of the embedded tasks.
    fault: of it."""
    source: Any = arithmetic.SLIPS.name
    rows = None
    if model.path:
        source = hf.resolve(model.path, revision=model.revision)
        rows = hf.read_config(source).vocab_size
    template = _chosen(settings, ("chat", "prompt_template", "system", "date", "enable_thinking"))
    return load_tokenizer(
        settings.path or source,
        TemplateSettings(**template),
        revision=settings.revision,
        rows=rows,
        fault=fault,
    )


def _chosen(section: Section, names: Sequence[str]) -> dict[str, Any]:
    """Return the fields that are not left to the default of what takes them."""
    values = {name: getattr(section, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}
