"""Settings that would fit if the run's result may change: bfloat16 moments, adapters, quantised weights."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Sequence

from ml_collections import ConfigDict

from g2d_jax import config_load
from g2d_jax.config import Config, TrainingStage
from g2d_jax.plan.planning import Choice, Compiler, search
from g2d_jax.plan.topologies import Topology

MOST_TRIED = 2  # choices of mesh, micro-batch and so on that are compiled with each
RANK = 16


def savings(config: Config, stages: Sequence[str] = ()) -> list[list[str]]:
    """List overrides that make training need less memory, the one that changes least first.

    Full training: AdamW's moments in bfloat16; adapters beside a base in bfloat16; with qwix, its layers as int8 codes.
    With adapters: the base the same way.
    """
    codes = ["lora.quantise=int8"] if importlib.util.find_spec("qwix") else []
    if config.lora.rank:
        base = ["lora.base_dtype=bfloat16"] if config.lora.base_dtype == "float32" else []
        beside = [base, [*base, *codes]] if codes and not config.lora.quantise else [base]
        return [overrides for overrides in beside if overrides]
    trained = {
        name: stage.optimizer
        for name, stage in config.stages.items()
        if isinstance(stage, TrainingStage) and name in (stages or config.stages)
    }
    moments = [
        f"stages.{name}.optimizer.moment_dtype=bfloat16"
        for name, optimizer in trained.items()
        if optimizer.kind == "adamw" and optimizer.moment_dtype == "float32"
    ]
    adapters = [f"lora.rank={RANK}", "lora.base_dtype=bfloat16"]
    beside = ([adapters, [*adapters, *codes]] if codes else [adapters]) if trained else []
    return [overrides for overrides in (moments, *beside) if overrides]


def search_savings(
    config: ConfigDict, topology: Topology, compiler: Compiler, *, stages: Sequence[str] = ()
) -> tuple[list[str], Choice] | None:
    """Find the first of `savings` with which something fits, and the choice that does; None if none does."""
    for overrides in savings(Config.of(config), stages):
        changed = copy.deepcopy(config)
        for override in overrides:
            config_load.apply(changed, override)
        compiler.say(f"with {as_arguments(overrides)}")
        choice = search(Config.of(changed), topology, compiler, stages=stages, most=MOST_TRIED)
        if choice is not None:
            return overrides, choice
    return None


def as_arguments(overrides: Sequence[str]) -> str:
    """Write the overrides as command-line arguments."""
    return " ".join(f"--config.{override}" for override in overrides)
