"""All programs that a run compiles: those of its stages, and reward models, which are resident for
the whole run."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from g2d_jax import mesh as meshes
from g2d_jax import stages as stage_modules
from g2d_jax.config import Config
from g2d_jax.models import reward_model
from g2d_jax.models.config import ModelConfig
from g2d_jax.models.flops import read_params
from g2d_jax.plan.work import shape_of
from g2d_jax.scoring.batches import columns, full_rows, make_program
from g2d_jax.session.program import Program, Work, device_bytes, fixed
from g2d_jax.session.session import Session
from g2d_jax.session.training_programs import mean_prompt


@dataclass(frozen=True)
class Scoring:
    """One batch of the longest rows through a reward model. share: of all responses that it scores.

    model, tokens, lengths: shapes with shardings.
    """

    share: float
    config: ModelConfig
    run: Any
    model: Any
    tokens: jax.ShapeDtypeStruct
    lengths: jax.ShapeDtypeStruct


def scorings(config: Config, mesh: Mesh) -> Iterator[Scoring]:
    """Yield a full batch of the longest conversations for every reward model of a run.

    Raises ValueError for a name that models/shapes.py does not know and that is no local folder.
    """
    weights = defaultdict[str, float](float)
    for task in config.all_tasks.values():
        if task.reward.function == "model":
            weights[str(task.reward.model.path)] += task.weight
    total = sum(task.weight for task in config.all_tasks.values())
    for path, settings in config.reward_models.items():
        share = weights[path] / total
        dtype, length = jnp.dtype(config.dtype), columns(settings.max_length)
        rows = full_rows(mesh, length, settings.batch_tokens)
        tokens = meshes.abstract_rows(mesh, (rows, length))
        lengths = meshes.abstract_rows(mesh, (rows,))
        model = reward_model.abstract_on(shape_of(path), mesh, dtype)
        yield Scoring(share, model.config, make_program(mesh, dtype), model, tokens, lengths)


def rewards(session: Session, decode: Program) -> Iterator[Program]:
    """Yield the programs of reward models over the responses that a program decodes, with their
    prompts."""
    work, mesh = decode.work, session.mesh
    batches = list(scorings(session.config, mesh))
    for batch in batches:
        others = tuple(other.model for other in batches if other is not batch)
        rows, length = batch.tokens.shape
        scored = batch.share * (work.generated + work.responses * mean_prompt(session))
        flops = reward_model.score_flops(batch.config, [length] * rows) / mesh.size
        (embed,) = jax.tree.leaves(batch.model.trunk.embed)
        read = embed.dtype.itemsize * read_params(batch.config) / mesh.shape["tensor"]
        cost = Work(
            scored / (rows * length),
            flops,
            read,
            {"parameters": device_bytes(batch.model)},
            scored=scored,
        )
        arguments = fixed(batch.model, batch.tokens, batch.lengths)
        name = decode.name.replace("decode", "reward")
        yield Program(
            decode.stage, name, batch.run, arguments, cost, resident=(*decode.resident, *others)
        )


def programs_of(session: Session, name: str, response: int | None = None) -> list[Program]:
    """List the programs of a stage, in the order in which they run.

    session: with the planned machine's mesh, and the model's shape. response: mean tokens of a
    response for the work to be done, max_new_tokens if None; shapes are those of the longest.
    """
    stage = session.config.stages[name]
    models = tuple(scoring.model for scoring in scorings(session.config, session.mesh))
    programs = []
    for program in stage_modules.of_kind(stage.kind).programs(session, name, stage, response):
        # Reward models are loaded on first use, and stay.
        programs.append(dataclasses.replace(program, resident=(*program.resident, *models)))
        if program.work.responses:
            programs += rewards(session, program)
    return programs
