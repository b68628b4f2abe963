"""Memory and time of a run's programs, compiled for another machine."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from etils import epath
from jax.sharding import Mesh

from g2d_jax.config import Config
from g2d_jax.config.graph import plan
from g2d_jax.models.config import ModelConfig
from g2d_jax.plan import target
from g2d_jax.plan.programs import programs_of
from g2d_jax.plan.target import Compiled, DoesNotFit
from g2d_jax.plan.topologies import GIB, Device, Topology
from g2d_jax.plan.work import Time, problems, reads_locally, shape_of, time_of, train_problems
from g2d_jax.runtime import mesh as meshes
from g2d_jax.runtime import precision
from g2d_jax.runtime.program import Program
from g2d_jax.runtime.tracking import Tracker
from g2d_jax.session.devices import Machine
from g2d_jax.session.problems import Problems
from g2d_jax.session.session import Options, Run, Session, loaded, session_of
from g2d_jax.session.training_memory import Micro


@dataclass(frozen=True)
class Entry:
    """One program of one stage. compiled: None if it does not fit; `why` has the reason. beside:
    resident bytes."""

    program: Program
    compiled: Compiled | None = None
    beside: int = 0
    time: Time | None = None
    why: str = ""

    @property
    def total(self) -> int:
        """The bytes per device at the program's peak, resident arrays included."""
        return (self.compiled.peak if self.compiled else 0) + self.beside

    def fits(self, device: Device) -> bool:
        """Return whether the program fits in the device's memory."""
        return self.compiled is not None and self.total <= device.usable


@dataclass(frozen=True)
class Plan:
    """All programs of a run on a machine. sampling_ways: devices that the sampler's weights are
    split over. micro: remat and micro-batches of training. prompt: mean tokens of a prompt."""

    topology: Topology
    config: Config
    model: ModelConfig
    mesh: Mapping[str, int]
    micro: Micro
    sampling_ways: int
    entries: Sequence[Entry]
    prompt: float

    @property
    def misfits(self) -> list[Entry]:
        """The programs that need more memory than the device has."""
        return [entry for entry in self.entries if not entry.fits(self.topology.device)]

    @property
    def stages(self) -> list[str]:
        """The planned stages, in order."""
        return list(dict.fromkeys(entry.program.stage for entry in self.entries))


class Compiler:
    """A compiler for a machine, which compiles equal programs once. Create it after
    `target.prepare`.

    say: shows a line of progress. devices: to compile for in place of the machine's.
    """

    def __init__(
        self,
        topology: Topology,
        say: Callable[[str], None] = lambda _: None,
        devices: Sequence[Any] = (),
    ) -> None:
        self.topology, self.say = topology, say
        self.devices = list(devices) or target.devices(topology)
        self._results: dict[str, Compiled | DoesNotFit] = {}
        self._begun = self._expected = 0

    def expect(self, count: int) -> None:
        """Set the number of programs to come, for the progress lines."""
        self._begun, self._expected = 0, count

    def compile(self, program: Program) -> Compiled:
        """Compile a program. Raises DoesNotFit."""
        lowered = program.lower()
        key = hashlib.sha256(f"{program.trips} {lowered.as_text()}".encode()).hexdigest()
        self._begun += 1
        if key not in self._results:
            far = f" ({self._begun} of {self._expected})" if self._begun <= self._expected else ""
            self.say(f"compiling {program.stage}, {program.name}{far}")
            try:
                self._results[key] = compiled = target.compile_program(
                    lowered, program.trips, self.topology.near
                )
                peak = f"{compiled.peak / GIB:.2f} GiB, compiled in {compiled.seconds:.0f} s"
            except DoesNotFit as error:
                self._results[key] = error
                peak = str(error)
            self.say(f"{program.stage}, {program.name}: {peak}")
        result = self._results[key]
        if isinstance(result, DoesNotFit):
            raise result
        return result

    def entries(self, programs: Sequence[Program], session: Session) -> Iterator[Entry]:
        """Compile the programs of a stage one by one, each when the iterator reaches it."""
        device = self.topology.device
        for program in programs:
            try:
                compiled = self.compile(program)
            except DoesNotFit as error:
                yield Entry(program, why=str(error))
                continue
            work = program.work
            if work.moved is None:
                work = dataclasses.replace(work, moved=compiled.touched)
            arrays = jax.tree.leaves(program.inputs)
            mesh = arrays[0].sharding.mesh if arrays else session.mesh
            sending = compiled.groups, _axes(mesh), compiled.far, compiled.collectives
            time = time_of(work, device, *sending)
            yield Entry(program, compiled, meshes.device_bytes(program.other_resident()), time)


def _axes(mesh: Mesh) -> dict[int, int]:
    """Map the size of a group along a mesh axis to the number of torus axes that it spans; the
    fewer if two mesh axes have the same size."""
    fsdp, tensor = meshes.torus_axes(mesh)
    axes = {mesh.shape["fsdp"]: fsdp}
    axes[mesh.shape["tensor"]] = min(tensor, axes.get(mesh.shape["tensor"], tensor))
    return axes


@contextmanager
def planned(config: Config, compiler: Compiler, prompt: int | None = None) -> Iterator[Session]:
    """Yield the run's session on the compiler's machine. prompt: mean tokens of a prompt, None to
    measure it if tokenizer and problems are on this machine, else the most.

    The model's shape is from a local folder's config.json, models/shapes.py, or the run's settings.
    Raises ValueError for a mesh that does not fit the machine, and for offloading if its devices
    report no host memory, as GPUs compiled for do.
    """
    order = plan(config)
    with (
        tempfile.TemporaryDirectory() as folder,
        Tracker(folder, tensorboard=False) as tracker,
        precision.used(config.dtype),
    ):
        place, topology = epath.Path(folder), compiler.topology
        run = Run(config=config, workdir=place, folders=order.folders(place), tracker=tracker)
        device = topology.device  # target devices report no memory, and GPUs no hosts
        there = Machine(device.usable, topology.near, device, lambda path, _: shape_of(path))
        assumed = None if reads_locally(config) else _assumed(config)
        with loaded(
            run, Options(devices=compiler.devices, there=there, problems=assumed)
        ) as shared:
            read = shared.problems
            if prompt is not None:
                mean = float(min(prompt, config.data.max_prompt_length))
                read = dataclasses.replace(read, mean_prompt=mean)
            yield session_of(run, dataclasses.replace(shared, problems=read))


def _assumed(config: Config) -> Problems:
    """Return a substitute for problems that are not on this machine, each with the longest
    prompt."""
    most = config.data.max_prompt_length
    counts = {split: problems(config, split) for split in ("dev", "test")}
    # without a limit, as many as a stage needs; `show.assumptions` prints this
    train = train_problems(config)
    counts["train"] = sys.maxsize if train is None else train
    return Problems({}, {}, [], lambda prompt: prompt, counts, (most,), most)


def make(
    config: Config,
    compiler: Compiler,
    *,
    stages: Sequence[str] = (),
    prompt: int | None = None,
    response: int | None = None,
) -> Plan:
    """Compile every program of the stages (default: all). prompt: see `planned`. response: mean
    tokens of a response, None for the longest."""
    with planned(config, compiler, prompt) as session:
        programs = [programs_of(session, name, response) for name in stages or plan(config).order]
        compiler.expect(sum(map(len, programs)))
        stage_entries = (compiler.entries(of_stage, session) for of_stage in programs)
        entries = list(itertools.chain.from_iterable(stage_entries))
        sampling = session.sampling.devices.for_sampling
        ways = sampling.size // sampling.shape["data"]
        mesh, mean = dict(session.mesh.shape), session.problems.mean_prompt
        shape, micro = session.model_config, session.micro
        return Plan(compiler.topology, config, shape, mesh, micro, ways, entries, mean)
