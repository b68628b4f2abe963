"""How a session is made, step by step, with the errors of all steps at once.

    Run ─► loaded: model, tokenizer, mesh, weights, problems, compute ─► Loaded, or Invalid with all that is wrong
    Run, Loaded ─► session_of: server, trial of a kernel, micro-batches ─► Session

Steps that all processes take together are marked so; what comes after needs no other process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

from etils import epath
from jax.sharding import Mesh

from g2d_jax.config import Config, Invalid, Issue, check, prefix_of
from g2d_jax.config.policy_name import OF_MODEL, PolicyName
from g2d_jax.config.section import Made, made
from g2d_jax.data.template import Fault, refuse
from g2d_jax.data.tokenizer import PromptTokenizer
from g2d_jax.models import hf
from g2d_jax.models.config import ModelConfig
from g2d_jax.models.hf_folder import find_weights
from g2d_jax.models.kernels import LANES
from g2d_jax.records import Problem
from g2d_jax.runtime import mesh as meshes
from g2d_jax.runtime import processes
from g2d_jax.runtime.program import CompileAhead
from g2d_jax.runtime.program_cache import Programs
from g2d_jax.session import golds, init_params
from g2d_jax.session.background_writer import Writer
from g2d_jax.session.devices import Devices, Machine, machine_of, shape_here
from g2d_jax.session.policies import base_of, model_of
from g2d_jax.session.problems import SPLITS, Problems
from g2d_jax.session.problems import load as load_problems
from g2d_jax.session.reward_manager import RewardManager
from g2d_jax.session.sampling import RunSampling, open_server, refuse_unserved, tried_kernel
from g2d_jax.session.session import Loaded, Run, Session
from g2d_jax.session.tokenizers import open_tokenizer, stop_strings
from g2d_jax.session.training_memory import Micro, keep


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
        told = processes.gather([model is not None, mesh and meshes.memory(mesh)])
        problems = options.problems
        if model and not problems and all(has_model for has_model, _ in told):
            read = partial(_problems, run, options, model.tokenizer, scorer)
            problems = tried("data", read)  # together
        machine = options.there or (mesh and machine_of(mesh, [memory for _, memory in told]))
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
    if samples and server is None:
        kernel = tried_kernel(devices, say)  # together
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
    chosen, machine = devices.micro, devices.told
    remat, tokens = processes.on_leader(
        lambda: list(vars(keep(run.workdir, machine, chosen, begun)).values())
    )
    micro = Micro(remat, tokens)
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


def _problems(
    run: Run, options: Options, tokenizer: PromptTokenizer, scorer: RewardManager
) -> Problems:
    """Read the problems, which all processes do together."""

    def unreadable(asked: Sequence[Problem]) -> set[str]:
        return golds.unreadable(asked, scorer, run.tracker, run.workdir, options.follows)

    own, say = run.reward is not None, run.tracker.say
    asks = None if options.there else unreadable
    return load_problems(run.config, tokenizer, own, say, options.splits, asks)


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
        for field, policies in config.stages[name].policies_by_field().items():
            for policy in policies:
                if PolicyName.parse(policy).origin == OF_MODEL:
                    yield f"stages.{name}.{field}", partial(model_of, policy, shape)
                elif config.lora.rank:
                    yield f"stages.{name}.{field}", partial(base_of, run, policy)
    for name, task in config.all_tasks.items():
        is_own = name == "main" and run.reward is not None
        if task.reward.function == "model" and not is_own:
            from g2d_jax.scoring import reward_model  # here: few runs have one

            look = partial(reward_model.conversations_of, task.reward.model)
            yield f"{prefix_of(name)}reward.model.path", look
