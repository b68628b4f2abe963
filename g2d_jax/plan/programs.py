"""All programs that a run compiles: those of its stages, and reward models beside them."""

from __future__ import annotations

import dataclasses

from g2d_jax.pipeline import STAGES
from g2d_jax.plan.rewarding import rewards, scorings
from g2d_jax.stages.programs.program import Program
from g2d_jax.stages.runtime import Runtime


def programs_of(runtime: Runtime, name: str, response: int | None = None) -> list[Program]:
    """List the programs of a stage, in the order in which they run.

    runtime: with the planned machine's mesh, and the model's shape. response: mean tokens of a response for the work
    to be done, max_new_tokens if None; shapes are those of the longest.
    """
    stage = runtime.config.stages[name]
    models = tuple(scoring.model for scoring in scorings(runtime.config, runtime.mesh))
    programs = []
    for program in STAGES[stage.kind].programs(runtime, name, stage, response):
        # Reward models are loaded on first use, and stay.
        programs.append(dataclasses.replace(program, resident=(*program.resident, *models)))
        if program.work.responses:
            programs += rewards(runtime, program)
    return programs
