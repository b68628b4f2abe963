"""All programs of a run: those of its stages and of reward models, which are resident for the whole
run."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from g2d_jax import stages as stage_modules
from g2d_jax.config import Config
from g2d_jax.models import reward_model
from g2d_jax.models.flops import read_params
from g2d_jax.plan.work import shape_of
from g2d_jax.runtime.program import Program, Work
from g2d_jax.scoring.batches import columns, full_rows, make_program, program_of
from g2d_jax.session.session import Session


def scorings(config: Config, mesh: Mesh) -> dict[str, Program]:
    """Return each reward model's program for a full batch of the longest conversations, by the
    model's path.

    Raises ValueError for a name that is neither in models/shapes.py nor a local folder.
    """
    dtype, found = jnp.dtype(config.dtype), {}
    for path, settings in config.reward_models.items():
        length = columns(settings.max_length)
        rows = full_rows(mesh, length, settings.batch_tokens)
        model = reward_model.abstract_on(shape_of(path), mesh, dtype)
        found[path] = program_of(model, mesh, make_program(mesh, dtype), rows, length)
    return found


def _scored(config: Config) -> dict[str, float]:
    """Return each reward model's share of all responses, by the model's path."""
    shares = defaultdict[str, float](float)
    total = sum(task.weight for task in config.all_tasks.values())
    for task in config.all_tasks.values():
        if task.reward.function == "model":
            shares[str(task.reward.model.path)] += task.weight / total
    return shares


def programs_of(session: Session, name: str, response: int | None = None) -> list[Program]:
    """List the programs of a stage in the order in which they run. Reward models' programs, over
    prompts and responses, follow each program that decodes.

    session: with the planned machine's mesh and the model's shape. response: mean tokens of a
    response for counting work, None for max_new_tokens; shapes are always for the longest.
    """
    mesh, batches = session.mesh, scorings(session.config, session.mesh)
    models = tuple(batch.inputs[0] for batch in batches.values())
    programs = []
    for program in stage_modules.programs(session, name, response):
        # Reward models stay loaded after their first use.
        resident = *program.resident, *models
        programs.append(replace(program, resident=resident))
        work = program.work
        if not work.responses:
            continue
        for path, share in _scored(session.config).items():
            model, tokens, _ = batches[path].inputs
            rows, length = tokens.shape
            scored = share * (work.generated + work.responses * session.problems.mean_prompt)
            (embed,) = jax.tree.leaves(model.trunk.embed)
            cost = Work(
                scored / (rows * length),
                reward_model.score_flops(model.config, [length] * rows) / mesh.size,
                embed.dtype.itemsize * read_params(model.config) / mesh.shape["tensor"],
                scored=scored,
            )
            programs.append(replace(batches[path], stage=name, work=cost, resident=resident))
    return programs
