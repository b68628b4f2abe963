"""What several tests of stages share: configs of a few stages, running one, training one with a supervised loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from g2d_jax import pipeline
from g2d_jax.config import TrainingStage, graph
from g2d_jax.session.row_shapes import RowShape
from g2d_jax.session.session import Runtime
from g2d_jax.session.trainer import Trainer, open_trainer
from g2d_jax.training import objectives

Opened = Callable[..., Runtime]


def only(config: ConfigDict, *names: str) -> ConfigDict:
    """The config with these stages alone, each from random parameters."""
    with config.unlocked():
        config.stages = {name: config.stages[name] for name in names}
    for name in names:
        config.stages[name].policy = "init"
    return config


def run(runtime: Runtime, name: str = "") -> dict[str, Any]:
    """A stage's manifest, after a run of it if there was none; by default the config's first one."""
    return pipeline.run_stage(runtime, name or next(iter(runtime.config.stages)), graph.plan(runtime.config))


@contextmanager
def training(runtime: Runtime, name: str, total: int, stage: TrainingStage | None = None) -> Iterator[Trainer]:
    """Training of one stage, whatever its kind, with a supervised loss."""
    stage, objective = stage or runtime.config.stages[name], objectives.sft(runtime.compute)
    with open_trainer(runtime, name, stage, objective, total=total, per="tokens", rows=RowShape(64)) as trainer:
        yield trainer


def bits(tree: object) -> list[bytes]:
    """Every array of a tree, to be compared bit for bit."""
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(jax.device_get(tree))]
