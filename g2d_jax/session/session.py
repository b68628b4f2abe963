"""The session of a run: all that its stages share, and how it is built.

    Run ─► loaded: model, tokenizer, mesh, weights, problems, compute ─► Loaded, or all errors
    Run, Loaded ─► session_of: server, trial of a kernel, micro-batches ─► Session

All processes enter a step marked "together" at once; the other steps need no other process.
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
from g2d_jax.session.sampling import RunSampling, open_server, tried_kernel
from g2d_jax.session.stage_result import Cost
from g2d_jax.session.tokenizers import open_tokenizer, stop_strings
from g2d_jax.session.training_memory import Micro, keep
from g2d_jax.training.objectives import Compute, Objective

Objectives = Mapping[str, Callable[[Compute], Objective]]
"""Stage -> the function that builds its loss."""


class StopRun(ValueError):
    """The error of a run that cannot usefully go on. Its message has the cause and a remedy; all
    data written so far is safe."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Run:
    """The part of a session that is a run's own: its settings, folders and functions.

    config: the resolved settings. workdir: where artefacts go. folders: stage -> its folder.
    tracker: prints messages and logs metrics.
    reward: your own function in place of the main task's reward. objectives: your own losses, by
    stage.
    evaluated: policy -> folder of an evaluation that already has its completions.
    steps: stage -> step that its bare name means, if that is not its last. inputs: setting ->
    content digest of the file, model or run that it names.
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
    """The part of a session that is slow to load: runs that differ only in their stages share it.
    `loaded` builds it.

    model_config: the model's shape, with adapters. mesh: the devices as training uses them.
    machine: their memory and speed. scorer: the rewards. ahead, writer: threads that compile
    programs and write files. programs: those built so far. bases: `Base.policy` -> frozen
    parameters. clock: seconds by activity.
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
    """All that the stages of a run use: a `Run`, a `Loaded`, and sampling. `session_of` builds it.

    sampling: the engines that sample, and the devices as they use them. settled: the remat and
    micro-batches stored in the work directory; None for those of `Devices.micro`.
    """

    sampling: RunSampling
    settled: Micro | None = None

    @cached_property
    def model_folder(self) -> epath.Path | None:
        """The folder of the pretrained model, local or on a store, None for random parameters."""
        path = self.config.model.path
        return hf.resolve(path, revision=self.config.model.revision) if path else None

    @property
    def micro(self) -> Micro:
        """The choice of what the backward pass recomputes, and of the tokens of a micro-batch."""
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
        """Your own losses, by stage, each with its own programs: two losses may look equal."""
        return {name: (own(self.compute), Programs()) for name, own in self.objectives.items()}

    def reading(self, task: str) -> Reading:
        """Return the data that a task's reward needs."""
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
    """The options of `loaded`: what to read and to check.

    names: stages that are about to run, whose weights and kernels are checked; None checks none.
    splits: those whose problems are read.
    fault: called with an error of the tokenizer that no new run may have. follows: the work
    directory whose record of readable reference answers applies, None: the run's own.
    devices: of the mesh, None: all. there: the machine that a plan is for; the verifier then checks
    no answers. problems: stand-ins, for a plan without tokenizer and data.
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
    """Yield the part of a session that runs with other stages can share. All processes call it
    together. Raises Invalid with all errors, except those that follow from another."""
    config, names, found = run.config, options.names, list[Issue]()

    def tried(setting: str, step: Callable[[], Made]) -> Made | None:
        """Return the result of a step, None if it fails; keep its errors."""
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
        # All processes take the next step together, or none does.
        memory = meshes.memory(mesh) if mesh and not options.there else None
        gathered = processes.gather([model is not None, memory])
        problems = options.problems
        if model and not problems and all(has_model for has_model, _ in gathered):
            known = scorer, run.tracker, run.workdir, options.follows
            unreadable = None if options.there else partial(golds.unreadable, *known)
            how = run.reward is not None, run.tracker.say, options.splits, unreadable
            read = partial(load_problems, config, model.tokenizer, *how)
            problems = tried("data", read)  # together
        machine = options.there or (mesh and machine_of(mesh, [size for _, size in gathered]))
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
    """Return the session of a run. samples: False if no response will be sampled, by any stage.
    settle: decides remat and micro-batches, as `keep_micro` does. All processes call it
    together."""
    config, tokenizer, say = run.config, shared.tokenizer, run.tracker.say
    devices = Devices(config, shared.model_config, shared.mesh, shared.machine)
    server = kernel = None
    samples = samples and any(stage.samplings() for stage in config.stages.values())
    if samples:
        known = config, devices.model, tokenizer, run.workdir, say
        server = made("engine.url", lambda: open_server(*known))  # together
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
    """Store a run's remat and micro-batches, or return those stored for such a machine, so that a
    resumed run rounds alike. begun: as in `keep`. None if memory decides nothing. All processes
    call it together, before any stage."""
    if not devices.loads:
        return None
    chosen = devices.micro
    kept = partial(keep, run.workdir, devices.inputs, chosen, begun)
    micro = Micro(*processes.on_leader(lambda: [*vars(kept()).values()]))
    why = "chosen by the memory of the devices"
    if micro != chosen:
        why = "as in this run's first start on such a machine"
    run.tracker.say(f"training: {micro}, {why}")
    return micro


def _model(config: Config, options: Options) -> _Model:
    """Read the model's shape and open its tokenizer: each step needs the previous one."""
    path, shape = config.model.path, None
    tokenizer = cast(PromptTokenizer, None)  # a plan with stand-in problems does not use it
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
    """Yield the settings that name weights, each with a check of config.json and headers. It raises
    ValueError if the weights cannot be loaded."""
    config = run.config
    if config.model.path:
        folder = hf.resolve(config.model.path, revision=config.model.revision)
        yield "model.path", partial(find_weights, folder, shape.base)
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
    """Return the model that a policy was trained from. Raises ValueError as `init_params.base_of`,
    and for adapters whose model has changed since they were trained."""
    config = session.config
    base = init_params.base_of(config, policy, session.folders, session.inputs)
    path = config.model.path if base.policy == INIT else PolicyName.parse(base.policy).place
    if not (config.lora.rank and path and base.content):
        return base
    revision = config.model.revision if base.policy == INIT else None
    now = contents.of_model(hf.resolve(path, revision=revision))
    if now != base.content:
        raise ValueError(
            f"policy {policy!r}: its adapters were trained on another model than {path} now holds: "
            f"its content was {base.content}, and is {now}. Restore that model, or export the "
            "policy and use hf:FOLDER"
        )
    return base
