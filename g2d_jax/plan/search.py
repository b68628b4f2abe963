"""Search for settings with which a run fits: first those that keep its result, then those that
change it."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import numpy as np
from ml_collections import ConfigDict

from g2d_jax.config import Config, Remat, TrainingStage
from g2d_jax.models.config import ModelConfig
from g2d_jax.models.decoder import count_trained
from g2d_jax.plan.planning import Compiler, planned
from g2d_jax.plan.programs import programs_of
from g2d_jax.plan.topologies import Topology
from g2d_jax.recipes import config_load
from g2d_jax.session import init_params
from g2d_jax.session.training_memory import TOKENS, WORK, load
from g2d_jax.training import optimizer

CHOSEN = ("mesh.data", "mesh.fsdp", "mesh.tensor", "compute.microbatch_tokens", "compute.remat")
"""Settings that do not change a run's result."""

MOST_TRIED = 5  # most settings that --auto, or the search after a misfit, compiles
MOST_TRIED_EACH = 2  # the same with each of `savings`
RANK = 16


def overrides(config: Config) -> list[str]:
    """List the settings `CHOSEN` of a config as overrides."""
    return [f"{name}={operator.attrgetter(name)(config)}" for name in CHOSEN]


def as_arguments(overrides: Sequence[str]) -> str:
    """Write the overrides as command-line arguments."""
    return " ".join(f"--config.{override}" for override in overrides)


def choices(config: Config, topology: Topology) -> list[Config]:
    """List configs with all `CHOSEN` settings to try, by estimate the quickest first: little
    recomputation, few micro-batches, no tensor split."""
    devices, slices, own = topology.devices, topology.slices, config.compute
    tensors = [ways for ways in (1, 2, 4, 8) if ways <= devices // topology.hosts]
    most = own.microbatch_tokens or TOKENS[0] * devices
    tokens = [most * 2**power // 16 for power in range(7)]

    def cost(choice: Config) -> tuple[float, int]:
        tensor = choice.mesh.tensor
        work = WORK[_remat(choice)] * (1 + 0.15 * (tensor > 1) * tensor)
        return work, -(choice.compute.microbatch_tokens or 0)

    candidates = []
    for tensor, count, remat in itertools.product(tensors, tokens, get_args(Remat)):
        if count >= devices // tensor:
            fsdp = devices // slices // tensor
            mesh = replace(config.mesh, data=slices, fsdp=fsdp, tensor=tensor)
            compute = replace(own, microbatch_tokens=count, remat=remat)
            candidates.append(replace(config, mesh=mesh, compute=compute))
    return sorted(candidates, key=cost)


def train_bytes(
    model: ModelConfig, config: Config, row_length: int, stages: Sequence[str] = ()
) -> float:
    """Estimate a train step's bytes per device, the largest among these stages (default: all).

    A trained parameter takes 8 bytes, with its float32 gradient, and those of its optimiser unless
    offloaded. Frozen parameters take their stored size. All are split over fsdp and tensor.
    `training_memory.load` counts the rest for the configured micro-batch and remat (unset: one row,
    "full").
    """
    mesh, compute = config.mesh, config.compute
    rows = (compute.microbatch_tokens or 0) // row_length // (mesh.data * mesh.fsdp)
    training = config.stages_of(TrainingStage)
    settings = [stage.optimizer for name, stage in training.items() if name in (stages or training)]
    moments = max((optimizer.state_bytes(s.kind, s.moment_dtype) for s in settings), default=8)
    trained = 8 if compute.offload_optimizer else 8 + moments
    state = trained * count_trained(model) + init_params.rest_bytes(config, model)
    ways = mesh.fsdp * mesh.tensor
    step = load(
        model,
        state=state / ways,
        parameters=init_params.float32_params(config, model) / ways,
        row=row_length,
        itemsize=2 if config.dtype == "bfloat16" else 4,
        tensor=mesh.tensor,
    )
    return step.total(_remat(config), rows * row_length)


def _remat(config: Config) -> Remat:
    remat = config.compute.remat
    return "full" if remat == "auto" else remat


def search(
    config: Config, compiler: Compiler, *, stages: Sequence[str] = (), most: int = MOST_TRIED
) -> Config | None:
    """Return the quickest of `choices` by estimate whose programs all compile and fit; None if none
    of the `most` tried fits."""
    names = stages or tuple(config.stages)
    with planned(config, compiler) as session:
        model = session.model_config
        lengths = []
        for name in names:
            for program in programs_of(session, name):
                if program.name == "train step":
                    lengths.append(program.inputs[1]["tokens"].shape[-1])
        row_length = max(lengths, default=config.data.max_prompt_length)

    def needs(choice: Config) -> float:
        return train_bytes(model, choice, row_length, stages)

    tried = choices(config, compiler.topology)
    likely = [choice for choice in tried if needs(choice) <= compiler.topology.device.usable]
    # The formula may overestimate: if nothing fits by it, try the choices that need least.
    likely = likely or sorted(tried, key=needs)
    # Go from the quickest to ever more frugal choices: each takes minutes to compile.
    for place in sorted(set(map(round, np.linspace(0, len(likely) - 1, most)))):
        choice = likely[place]
        compiler.say(f"trying {as_arguments(overrides(choice))}")
        if _all_fit(choice, compiler, names):
            return choice
    return None


def _all_fit(config: Config, compiler: Compiler, stages: Sequence[str]) -> bool:
    with planned(config, compiler) as session:
        for name in stages:
            # The train step first: most often it is the one that does not fit.
            programs = programs_of(session, name)
            programs.sort(key=lambda program: program.name != "train step")
            entries = compiler.entries(programs, session)
            if not all(entry.fits(compiler.topology.device) for entry in entries):
                return False
    return True


def savings(config: Config, stages: Sequence[str] = ()) -> list[list[str]]:
    """List overrides that reduce training's memory but change its result, the smallest change
    first.

    Full training: AdamW's moments in bfloat16; adapters on a bfloat16 base; with qwix, adapters on
    an int8 base. With adapters: the same steps for the base.
    """
    moments: list[str] = []
    adapters: list[str] = []
    if config.lora.rank:
        if config.lora.base_dtype == "float32":
            adapters = ["lora.base_dtype=bfloat16"]
    else:
        trained = config.stages_of(TrainingStage)
        chosen = [name for name in trained if name in (stages or trained)]
        if not chosen:
            return []
        for name in chosen:
            own = trained[name].optimizer
            if (own.kind, own.moment_dtype) == ("adamw", "float32"):
                moments.append(f"stages.{name}.optimizer.moment_dtype=bfloat16")
        adapters = [f"lora.rank={RANK}", "lora.base_dtype=bfloat16"]
    found = [moments, adapters]
    if importlib.util.find_spec("qwix") and not config.lora.quantise:
        found.append([*adapters, "lora.quantise=int8"])
    return list(filter(None, found))


def search_savings(
    config: ConfigDict, compiler: Compiler, *, stages: Sequence[str] = ()
) -> list[str]:
    """Return the first of `savings` with which a choice fits, together with that choice; [] if none
    does."""
    for saving in savings(Config.of(config), stages):
        changed = copy.deepcopy(config)
        for override in saving:
            config_load.apply(changed, override)
        compiler.say(f"with {as_arguments(saving)}")
        try:
            choice = search(Config.of(changed), compiler, stages=stages, most=MOST_TRIED_EACH)
        except ValueError as error:  # this model does not support it, such as int8 experts
            compiler.say(str(error))
            continue
        if choice is not None:
            return [*saving, *overrides(choice)]
    return []
