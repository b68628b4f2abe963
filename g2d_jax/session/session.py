"""The session of a run, which all stages share: settings, mesh, tokenizer, problems, rewards,
programs and costs; and how it is made, step by step, with the errors of all steps at once.

    Run ─► loaded: model, tokenizer, mesh, weights, problems, compute ─► Loaded, or Invalid with all that is wrong
    Run, Loaded ─► session_of: server, trial of a kernel, micro-batches ─► Session

Steps that all processes take together are marked so; what comes after needs no other process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, cast

import jax.numpy as jnp
from etils import epath
from jax.sharding import Mesh

from g2d_jax.config import Config, Invalid, Issue, check, prefix_of
from g2d_jax.config.policy_name import INIT, OF_MODEL, PolicyName
from g2d_jax.config.section import Made, made
from g2d_jax.data.template import Fault, refuse
from g2d_jax.data.tokenizer import PromptTokenizer
from g2d_jax.models import hf
from g2d_jax.models.config import ModelConfig
from g2d_jax.models.decoder import Decoder
from g2d_jax.models.hf_folder import find_weights
from g2d_jax.models.kernels import LANES
from g2d_jax.rewards.functions import RewardFunction
from g2d_jax.runtime import mesh as meshes
from g2d_jax.runtime import processes
from g2d_jax.runtime.program import CompileAhead
from g2d_jax.runtime.program_cache import Programs
from g2d_jax.runtime.tracking import Tracker
from g2d_jax.session import contents, golds, init_params
from g2d_jax.session.background_writer import Writer
from g2d_jax.session.clock import Clock
from g2d_jax.session.devices import Devices, Machine, machine_of, shape_here
from g2d_jax.session.init_params import Base, model_of
from g2d_jax.session.problems import SPLITS, Problems, Reading, reading
from g2d_jax.session.problems import load as load_problems
from g2d_jax.session.reward_manager import RewardManager
from g2d_jax.session.sampling import RunSampling, open_server, refuse_unserved, tried_kernel
from g2d_jax.session.stage_result import Cost
from g2d_jax.session.tokenizers import open_tokenizer, stop_strings
from g2d_jax.session.training_memory import Micro, keep
from g2d_jax.training.objectives import Compute, Objective

Objectives = Mapping[str, Callable[[Compute], Objective]]
"""Stage -> the function that makes its loss."""


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
    objectives: Objectives = field(default_factory=dict)
    evaluated: Mapping[str, epath.Path] = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, kw_only=True)
class Loaded:
    """What runs share whose settings differ in their stages only; `loaded` makes it.

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
    """What the stages of a run work with; `session_of` makes it.

    sampling: the engines that sample, and the devices as they use them. settled: how it trains, as
    its work directory keeps it; None leaves it to `Devices.micro`.
    """

    sampling: RunSampling
    settled: Micro | None = None

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


class Options(NamedTuple):
    """How much is loaded.

    names: of the stages that are about to run, whose weights and kernels are looked at; None looks
    at none. splits: those whose problems are read. fault: called for a fault of the tokenizer that
    no run should begin with. follows: the work directory that says which reference answers can be
    read, None: its own. devices: of the mesh, None: all. there: the machine that a plan is for, which
    asks no verifier. problems: what stands for them where neither they nor the tokenizer are at
    hand.
    """

    names: Sequence[str] | None = None
    splits: Sequence[str] = SPLITS
    fault: Fault = refuse
    follows: epath.Path | None = None
    devices: Sequence[Any] | None = None
    there: Machine | None = None
    problems: Problems | None = None


class _Model(NamedTuple):
    tokenizer: PromptTokenizer
    shape: ModelConfig


@contextmanager
def loaded(run: Run, options: Options, programs: Programs | None = None) -> Iterator[Loaded]:
    """Yield what a run shares with those that differ in their stages only. All processes call it
    together. Raises Invalid with all that is wrong; not what follows from another of these."""
    config, names, found = run.config, options.names, list[Issue]()

    def tried(setting: str, step: Callable[[], Made]) -> Made | None:
        """Return what a step makes, None where it makes errors."""
        try:
            return made(setting, step)
        except Invalid as error:
            found.extend(error.issues)
            return None

    with ExitStack() as stack:
        model = tried("model", lambda: _model(config, options))
        mesh = tried("mesh", lambda: _mesh(config, options.devices))
        if model and names is not None and processes.leader():
            for setting, look in _weights(run, model.shape, names):
                tried(setting, look)
        scorer = RewardManager(config.rewards, lambda: cast(Mesh, mesh), run.reward, config.dtype)
        stack.callback(scorer.close)
        # What all do together, none does if one of them cannot.
        memory = meshes.memory(mesh) if mesh and not options.there else None
        told = processes.gather([model is not None, memory])
        problems = options.problems
        if model and not problems and all(has_model for has_model, _ in told):
            known = scorer, run.tracker, run.workdir, options.follows
            asks = None if options.there else partial(golds.unreadable, *known)
            told_of = run.reward is not None, run.tracker.say, options.splits, asks
            read = partial(load_problems, config, model.tokenizer, *told_of)
            problems = tried("data", read)  # together
        machine = options.there or (mesh and machine_of(mesh, [size for _, size in told]))
        if model and mesh and machine and names is not None:
            devices = Devices(config, model.shape, mesh, machine)
            tried("compute", lambda: devices.row_kernel(LANES))
            tried("compute", lambda: devices.for_sampling)
        with processes.barrier():
            check.refuse(found)
        assert model and mesh and problems and machine  # else there was an error
        yield Loaded(
            tokenizer=model.tokenizer,
            model_config=model.shape,
            mesh=mesh,
            machine=machine,
            problems=problems,
            scorer=scorer,
            ahead=stack.enter_context(closing(CompileAhead())),
            writer=stack.enter_context(closing(Writer())),
            programs=programs or Programs(),
        )


def session_of(
    run: Run,
    shared: Loaded,
    *,
    samples: bool = True,
    settle: Callable[[Run, Devices], Micro | None] = lambda *_: None,
) -> Session:
    """Return the session of a run. samples: False where no response will be drawn, whatever the
    stages. settle: decides how it trains, as `keep_micro` does. All processes call it together."""
    config, tokenizer, say = run.config, shared.tokenizer, run.tracker.say
    devices = Devices(config, shared.model_config, shared.mesh, shared.machine)
    server = kernel = None
    samples = samples and any(stage.samplings() for stage in config.stages.values())
    if samples:
        server = open_server(config, devices.model, tokenizer, run.workdir, say)  # together
        kernel = None if server else tried_kernel(devices, say)  # together
    sampling = RunSampling(
        devices,
        shared.programs,
        server,
        kernel,
        shared.problems.prompt_lengths,
        stop_ids=tokenizer.eos_ids if tokenizer else (0, 1),
        decode=tokenizer.decode if tokenizer and any(stop_strings(config)) else None,
    )
    settled = settle(run, devices)  # together
    return Session(**vars(run), **vars(shared), sampling=sampling, settled=settled)


def keep_micro(run: Run, devices: Devices, *, begun: bool = True) -> Micro | None:
    """Keep in what micro-batches a run trains, or take what its work directory keeps of such a
    machine, so that a run that continues rounds as it did. begun: as of `keep`. None where memory
    decides nothing. All processes call it together, before any stage."""
    if not devices.loads:
        return None
    chosen = devices.micro
    kept = partial(keep, run.workdir, devices.told, chosen, begun)
    micro = Micro(*processes.on_leader(lambda: [*vars(kept()).values()]))
    why = "by the memory of the devices"
    if micro != chosen:
        why = "as when this run began on such a machine"
    run.tracker.say(f"training: {micro}, {why}")
    return micro


def _model(config: Config, options: Options) -> _Model:
    """Read the model's shape and open its tokenizer: each step needs the one before."""
    path, shape = config.model.path, None
    tokenizer = cast(PromptTokenizer, None)  # no plan without problems looks at it
    if path:
        shape_of = options.there.shape_of if options.there else shape_here
        shape = made("model.path", lambda: shape_of(path, config.model.revision))
    if not (path and options.problems):
        opened = partial(open_tokenizer, config.tokenizer, config.model, options.fault)
        tokenizer = made("tokenizer", opened)

    def adapted() -> ModelConfig:
        adapters = init_params.adapters(config.lora)
        if shape:
            return replace(shape, **adapters)
        return init_params.shape(config.model, tokenizer.vocab_size, adapters)

    return _Model(tokenizer, made("lora", adapted))


def _mesh(config: Config, devices: Sequence[Any] | None) -> Mesh:
    mesh = meshes.make_mesh(**config.mesh.to_dict(), devices=devices)
    if config.compute.offload_optimizer:
        meshes.require_host_memory(mesh)
    return mesh


def _weights(
    run: Run, shape: ModelConfig, names: Sequence[str]
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the settings that name weights, each with what raises ValueError where they cannot be
    loaded, by config.json and headers, or not be sent to a server."""
    config, folder = run.config, None
    if config.model.path:
        folder = hf.resolve(config.model.path, revision=config.model.revision)
        yield "model.path", partial(find_weights, folder, shape.base)
    if any(config.stages[name].samplings() for name in names):
        yield "engine.url", lambda: refuse_unserved(config, shape, folder)
    for name in names:
        for setting, policies in config.stages[name].policies_by_field().items():
            for policy in policies:
                if PolicyName.parse(policy).origin == OF_MODEL:
                    yield f"stages.{name}.{setting}", partial(model_of, policy, shape)
                elif config.lora.rank:
                    yield f"stages.{name}.{setting}", partial(base_of, run, policy)
    for name, task in config.all_tasks.items():
        is_own = name == "main" and run.reward is not None
        if task.reward.function == "model" and not is_own:
            from g2d_jax.scoring import reward_model  # here: few runs have one

            look = partial(reward_model.conversations_of, task.reward.model)
            yield f"{prefix_of(name)}reward.model.path", look


def base_of(session: Run, policy: str) -> Base:
    """Follow a policy to the model that it was trained from. Raises ValueError as
    `init_params.base_of`, and for adapters whose model is no longer what they were trained with."""
    config = session.config
    base = init_params.base_of(config, policy, session.folders, session.inputs)
    path = config.model.path if base.policy == INIT else PolicyName.parse(base.policy).place
    if not (config.lora.rank and path and base.content):
        return base
    revision = config.model.revision if base.policy == INIT else None
    now = contents.of_model(hf.resolve(path, revision=revision))
    if now != base.content:
        raise ValueError(
            f"policy {policy!r}: its adapters were trained beside another model than {path} now "
            f"holds: its content was {base.content}, and is {now}. Put back that model, or export "
            "the policy and use hf:FOLDER"
        )
    return base
