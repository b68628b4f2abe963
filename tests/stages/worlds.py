"""What several tests of stages share: configs of a few stages, running one, training one with a
supervised loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from g2d_jax.config import TrainingStage, graph
from g2d_jax.session.row_shapes import RowShape
from g2d_jax.session.session import Session
from g2d_jax.session.trainer import Trainer, open_trainer
from g2d_jax.session.training_programs import Training
from g2d_jax.stages import run_issues, run_stages
from g2d_jax.training import objectives


def only(config: ConfigDict, *names: str) -> ConfigDict:
    """The config with these stages alone, each from random parameters."""
    with config.unlocked():
        config.stages = {name: config.stages[name] for name in names}
    for name in names:
        config.stages[name].policy = "init"
    return config


def run(session: Session, name: str = "") -> dict[str, Any]:
    """A stage's manifest, after a look at what it needs and a run of it if there was none; by
    default the config's first one."""
    name = name or next(iter(session.config.stages))
    found = run_issues.of_stages(session, run_issues.unfinished(session.folders, [name]))
    run_issues.tell(session.tracker, found.issues)
    return run_stages.run_stage(session, name, graph.plan(session.config), found)


@contextmanager
def training(
    session: Session, name: str, total: int, stage: TrainingStage | None = None
) -> Iterator[Trainer]:
    """Training of one stage, whatever its kind, with a supervised loss."""
    stage, objective = stage or session.config.stages[name], objectives.sft(session.compute)
    rows = RowShape(64)
    made = Training(session, name, stage, objective, total=total, per="tokens", rows=rows)
    with open_trainer(made) as trainer:
        yield trainer


def bits(tree: object) -> list[bytes]:
    """Every array of a tree, to be compared bit for bit."""
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(jax.device_get(tree))]
