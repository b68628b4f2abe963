"""All programs that a run compiles: those of its stages, and reward models, which are resident for
the whole run."""

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
    """Return the program of a full batch of the longest conversations for every reward model of a
    run, by its path.

    Raises ValueError for a name that models/shapes.py does not know and that is no local folder.
    """
    dtype, found = jnp.dtype(config.dtype), {}
    for path, settings in config.reward_models.items():
        length = columns(settings.max_length)
        rows = full_rows(mesh, length, settings.batch_tokens)
        model = reward_model.abstract_on(shape_of(path), mesh, dtype)
        found[path] = program_of(model, mesh, make_program(mesh, dtype), rows, length)
    return found


def _scored(config: Config) -> dict[str, float]:
    """Return the share of all responses that each reward model scores, by its path."""
    shares = defaultdict[str, float](float)
    total = sum(task.weight for task in config.all_tasks.values())
    for task in config.all_tasks.values():
        if task.reward.function == "model":
            shares[str(task.reward.model.path)] += task.weight / total
    return shares


def programs_of(session: Session, name: str, response: int | None = None) -> list[Program]:
    """List the programs of a stage, in the order in which they run; after each that decodes those
    of reward models over the responses, with their prompts.

    session: with the planned machine's mesh, and the model's shape. response: mean tokens of a
    response for the work to be done, max_new_tokens if None; shapes are those of the longest.
    """
    mesh, batches = session.mesh, scorings(session.config, session.mesh)
    models = tuple(batch.inputs[0] for batch in batches.values())
    programs = []
    for program in stage_modules.programs(session, name, response):
        # Reward models are loaded on first use, and stay.
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
