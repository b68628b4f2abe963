"""A run's programs compiled for another machine: memory, least time, and the settings that would fit."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, get_args

from etils import epath

from g2d_jax import mesh as meshes
from g2d_jax.config import Config, Remat, TrainingStage
from g2d_jax.graph import plan
from g2d_jax.losses import chunk_of
from g2d_jax.models.config import ModelConfig
from g2d_jax.models.decoder import count_trained
from g2d_jax.plan.compiling import Compiled, DoesNotFit, compile_program, devices
from g2d_jax.plan.programs import programs_of
from g2d_jax.plan.rewarding import scorings
from g2d_jax.plan.topologies import GIB, Device, Topology
from g2d_jax.plan.work import Roofline, problems, reads_locally, roofline, shape_of
from g2d_jax.runtime.tracking import Tracker
from g2d_jax.stages import init_params
from g2d_jax.stages.programs.program import Program
from g2d_jax.stages.programs.training import saved_per_token
from g2d_jax.stages.runtime import Runtime
from g2d_jax.training import optimizer

STOPS = 2  # tokens that end a response, assumed without a tokenizer
MOST_TRIED = 5  # compilations that --auto, or the search for what fits, may cost
Say = Callable[[str], None]


@dataclass(frozen=True)
class Entry:
    """One program of one stage. compiled: None where it does not fit, and `why` says so. beside: resident bytes."""

    program: Program
    compiled: Compiled | None
    beside: int
    why: str
    time: Roofline | None

    @property
    def total(self) -> int:
        """The bytes a device at the program's peak, with what lies beside it."""
        return (self.compiled.peak if self.compiled else 0) + self.beside

    def fits(self, device: Device) -> bool:
        """Return whether the program fits in the device's memory."""
        return self.compiled is not None and self.total <= device.usable


@dataclass(frozen=True)
class Plan:
    """All programs of a run on a machine. sampling_ways: devices that the sampler's weights are split over. prompt:
    mean tokens of a prompt."""

    topology: Topology
    config: Config
    model: ModelConfig
    mesh: Mapping[str, int]
    sampling_ways: int
    entries: Sequence[Entry]
    prompt: float

    @property
    def misfits(self) -> list[Entry]:
        """The programs that need more memory than the device has."""
        return [entry for entry in self.entries if not entry.fits(self.topology.device)]


class Compiler:
    """A compiler for the devices of a machine; the same program is compiled once."""

    def __init__(self, devices: Sequence[Any], say: Say = lambda _: None) -> None:
        self.devices, self.say = list(devices), say
        self._known: dict[str, Compiled | DoesNotFit] = {}
        self._begun = self._expected = 0

    def expect(self, count: int) -> None:
        """Announce the number of programs to come, so that each report shows the progress."""
        self._begun, self._expected = 0, count

    @classmethod
    def of(cls, topology: Topology, say: Say = lambda _: None) -> Compiler:
        """Return the compiler for a machine, after `compiling.prepare`."""
        return cls(devices(topology), say)

    def compile(self, program: Program, outputs: Mapping[str, Any]) -> Compiled:
        """Compile a program. Raises DoesNotFit."""
        lowered = program.lower(outputs)
        key = hashlib.sha256(f"{program.dynamic} {lowered.as_text()}".encode()).hexdigest()
        self._begun += 1
        if key not in self._known:
            far = f" ({self._begun} of {self._expected})" if self._begun <= self._expected else ""
            self.say(f"compiling {program.stage}, {program.name}{far}")
            try:
                self._known[key] = compiled = compile_program(lowered, program.dynamic)
                peak = f"{compiled.peak / GIB:.2f} GiB, compiled in {compiled.seconds:.0f} s"
            except DoesNotFit as error:
                self._known[key] = error
                peak = str(error)
            self.say(f"{program.stage}, {program.name}: {peak}")
        result = self._known[key]
        if isinstance(result, DoesNotFit):
            raise result
        return result


def model_shape(runtime: Runtime) -> ModelConfig:
    """Return the run's model shape without a download: a local folder's config.json, models/shapes.py, or its own."""
    path = runtime.config.model.path
    if not path:
        return runtime.model_config
    return dataclasses.replace(shape_of(path), **init_params.adapters(runtime.config.lora))


@contextmanager
def planned(
    config: Config, compiler: Compiler, memory: int | None = None, prompt: int | None = None
) -> Iterator[Runtime]:
    """Yield the run's runtime on the compiler's machine. memory: bytes of a device, which those devices do not report.
    prompt: mean tokens of a prompt, None: of the problems where tokenizer and problems are on this machine, else the
    most.

    Raises ValueError for a mesh that does not fit the machine, and for offloading where its devices report no memory
    to offload to, such as compiled-for GPUs.
    """
    order = plan(config)
    with tempfile.TemporaryDirectory() as folder, Tracker(folder, tensorboard=False) as tracker:
        runtime = Runtime(config, epath.Path(folder), tracker, order.folders(epath.Path(folder)))
        mesh = meshes.make_mesh(**config.mesh.to_dict(), devices=compiler.devices)
        if config.compute.offload_optimizer:
            meshes.check_host_memory(mesh)
        model = model_shape(runtime)
        attributes = {
            "mesh": mesh,
            "model_config": model,
            "stop_ids": tuple(range(STOPS)),
            "device_memory": memory,
            "reward_bytes": sum(meshes.device_bytes(scoring.model) for scoring in scorings(config, mesh)),
        }
        if not reads_locally(config):
            held_out = {split: problems(config, split) for split in ("dev", "test")}
            attributes["prompt_lengths"] = (config.data.max_prompt_length,)
            attributes["problem_counts"] = {"train": sys.maxsize, **held_out}
        if prompt is not None:
            attributes["mean_prompt"] = float(min(prompt, config.data.max_prompt_length))
        yield runtime.at(config, runtime.folders, tracker, **attributes)


def make(
    config: Config,
    topology: Topology,
    compiler: Compiler,
    *,
    stages: Sequence[str] = (),
    prompt: int | None = None,
    response: int | None = None,
) -> Plan:
    """Compile every program of the stages (default: all). prompt: see `planned`. response: mean tokens of a response,
    None: the longest."""
    with planned(config, compiler, topology.device.usable, prompt) as runtime:
        names = stages or plan(config).order
        programs = [programs_of(runtime, name, response) for name in names]
        compiler.expect(sum(map(len, programs)))
        entries = [entry for stage_programs in programs for entry in _stage(compiler, topology, stage_programs)]
        ways = runtime.sampling_mesh.size // runtime.sampling_mesh.shape["data"]
        mesh, mean = dict(runtime.mesh.shape), runtime.mean_prompt
        return Plan(topology, runtime.config, runtime.model_config, mesh, ways, entries, mean)


class _NotCompiled(LookupError):
    """The error that a program's results are needed, and it did not fit; it carries the program's name."""


class _Outputs(dict[str, Any]):
    """The results of programs by name."""

    def __missing__(self, name: str) -> Any:
        raise _NotCompiled(name)


def _stage(compiler: Compiler, topology: Topology, programs: Sequence[Program]) -> Iterator[Entry]:
    outputs = _Outputs()
    for program in programs:
        try:
            compiled = compiler.compile(program, outputs)
        except DoesNotFit as error:
            yield Entry(program, None, 0, str(error), None)
            continue
        except _NotCompiled as missing:
            yield Entry(program, None, 0, f"not compiled: {missing.args[0]} before it does not fit", None)
            continue
        outputs[program.name] = compiled.outputs
        time = roofline(program.work, compiled.sent, topology.device)
        yield Entry(program, compiled, program.beside(outputs), "", time)


# What would fit


@dataclass(frozen=True)
class Choice:
    """Settings of a run that change nothing in its result: mesh, micro-batch, remat."""

    fsdp: int
    tensor: int
    microbatch_tokens: int
    remat: Remat

    def apply(self, config: Config) -> Config:
        """Return a copy of the config with these settings."""
        compute = replace(config.compute, microbatch_tokens=self.microbatch_tokens, remat=self.remat)
        return replace(config, mesh=replace(config.mesh, data=1, fsdp=self.fsdp, tensor=self.tensor), compute=compute)

    def overrides(self) -> str:
        """Write the settings as command-line overrides."""
        values = {
            "mesh.data": 1,
            "mesh.fsdp": self.fsdp,
            "mesh.tensor": self.tensor,
            "compute.microbatch_tokens": self.microbatch_tokens,
            "compute.remat": self.remat,
        }
        return " ".join(f"--config.{name}={value}" for name, value in values.items())


def choice_of(config: Config, devices: int) -> Choice:
    """Return the config's own settings as a choice."""
    mesh = config.mesh
    tensor = mesh.tensor if mesh.tensor > 0 else devices // (mesh.data * mesh.fsdp)
    compute = config.compute
    return Choice(devices // tensor, tensor, compute.microbatch_tokens, compute.remat)


def choices(config: Config, topology: Topology) -> list[Choice]:
    """List all choices to try, quickest first by formula: little computed again, few micro-batches, no tensor split."""
    own, devices = choice_of(config, topology.devices), topology.devices
    host = devices // topology.hosts
    tensors = [ways for ways in (1, 2, 4, 8) if ways <= host]
    tokens = [own.microbatch_tokens * 2**power // 16 for power in range(7)]
    candidates = [
        Choice(devices // tensor, tensor, count, remat)
        for tensor, count, remat in itertools.product(tensors, tokens, get_args(Remat))
        if count >= devices // tensor
    ]

    def cost(choice: Choice) -> tuple[float, ...]:
        again = {"none": 3.0, "attention": 3.9, "full": 4.0}[choice.remat]
        return again * (1 + 0.15 * (choice.tensor > 1) * choice.tensor), -choice.microbatch_tokens

    return sorted(candidates, key=cost)


def train_bytes(
    model: ModelConfig, config: Config, choice: Choice, row_length: int, stages: Sequence[str] = ()
) -> float:
    """Count a train step's bytes a device by formula, the largest among these stages (default: all).

    8 bytes a trained parameter, itself and a gradient in float32, and its optimiser's (`state_bytes`), split over fsdp
    and tensor; the frozen parameters as they are stored. What the layers save; one layer's own work without remat's
    savings; the head gathered, with its gradient in float32; logits of a chunk of tokens and two more arrays of
    their size.
    """
    size = 2 if config.dtype == "bfloat16" else 4
    rows = max(choice.microbatch_tokens // row_length // choice.fsdp, 1)
    tokens = rows * row_length
    saved = saved_per_token(model, choice.remat, choice.tensor) * tokens * size
    layer = saved_per_token(model, "none", choice.tensor) / model.num_hidden_layers * tokens * 2 * size
    head = model.vocab_size * model.hidden_size * (size + 4)
    logits = 3 * 4 * min(tokens, chunk_of(model.vocab_size, "tpu")) * model.vocab_size
    parameters = (8 + state_bytes(config, stages)) * count_trained(model) + init_params.rest_bytes(config, model)
    return parameters / (choice.fsdp * choice.tensor) + saved + layer + head + logits


def state_bytes(config: Config, stages: Sequence[str] = ()) -> int:
    """Count bytes a trained parameter of the largest optimiser state of these stages (default: all). Offloaded state is
    not on the devices and counts 0."""
    if config.compute.offload_optimizer:
        return 0
    named = [config.stages[name] for name in stages or config.stages]
    settings = [stage.optimizer for stage in named if isinstance(stage, TrainingStage)]
    return max((optimizer.state_bytes(s.kind, s.moment_dtype) for s in settings), default=8)


def search(
    config: Config,
    topology: Topology,
    compiler: Compiler,
    *,
    stages: Sequence[str] = (),
    most: int = MOST_TRIED,
) -> Choice | None:
    """Find the quickest choice by formula whose programs all compile and fit; at most `most` are tried.

    None if none of those tried fits.
    """
    with planned(config, compiler, topology.device.usable) as runtime:
        model = runtime.model_config
        row_length = _row_length(runtime, stages or tuple(config.stages))

    def needs(choice: Choice) -> float:
        return train_bytes(model, config, choice, row_length, stages)

    tried = choices(config, topology)
    likely = [choice for choice in tried if needs(choice) <= topology.device.usable]
    if not likely:  # the formula may be wrong by more than that: try what needs least
        likely = sorted(tried, key=needs)
    for choice in _spread(likely, most):
        compiler.say(f"trying {choice.overrides()}")
        if _all_fit(choice.apply(config), topology, compiler, stages):
            return choice
    return None


def _spread(likely: Sequence[Choice], most: int) -> list[Choice]:
    """Pick the first choice, and ever more frugal ones up to the last."""
    if len(likely) <= most:
        return list(likely)
    return [likely[round(i * (len(likely) - 1) / (most - 1))] for i in range(most)]


def _all_fit(config: Config, topology: Topology, compiler: Compiler, stages: Sequence[str]) -> bool:
    with planned(config, compiler, topology.device.usable) as runtime:
        for name in stages or config.stages:
            programs = programs_of(runtime, name)
            # The train step first: it is what most often does not fit.
            entries = _stage(compiler, topology, sorted(programs, key=lambda program: program.name != "train step"))
            if not all(entry.fits(topology.device) for entry in entries):
                return False
    return True


def _row_length(runtime: Runtime, stages: Sequence[str]) -> int:
    lengths = [
        program.arguments({})[1]["tokens"].shape[-1]
        for name in stages
        for program in programs_of(runtime, name)
        if program.name == "train step"
    ]
    return max(lengths, default=runtime.config.data.max_prompt_length)
