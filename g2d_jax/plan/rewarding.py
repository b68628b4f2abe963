"""Reward models in a plan: their arrays, resident for the whole run, and the program that scores."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from g2d_jax import mesh as meshes
from g2d_jax.config import Config
from g2d_jax.models import reward_model
from g2d_jax.models.config import ModelConfig
from g2d_jax.models.flops import matmul_params
from g2d_jax.plan.work import shape_of
from g2d_jax.scoring.batches import columns, full_rows, make_program
from g2d_jax.stages.programs.program import Program, Work, device_bytes, fixed
from g2d_jax.stages.runtime import Runtime


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

    def flops(self) -> float:
        """Count the floating-point operations of the batch on all devices."""
        rows, columns = self.tokens.shape
        return reward_model.score_flops(self.config, [columns] * rows)

    def weights(self) -> float:
        """Count the bytes of the matrices that a batch reads."""
        (embed,) = jax.tree.leaves(self.model.trunk.embed)
        return embed.dtype.itemsize * matmul_params(self.config)


def scorings(config: Config, mesh: Mesh) -> Iterator[Scoring]:
    """Yield a full batch of the longest conversations for every reward model of a run.

    Raises ValueError for a name that models/shapes.py does not know and that is no local folder.
    """
    tasks = [(task.weight, task.reward) for task in config.all_tasks.values()]
    models = {str(reward.model.path): reward.model for _, reward in tasks if reward.function == "model"}
    for path, settings in models.items():
        weight = sum(weight for weight, reward in tasks if reward.function == "model" and reward.model.path == path)
        dtype, length = jnp.dtype(settings.dtype), columns(settings.max_length)
        rows = full_rows(mesh, length, settings.batch_tokens)
        tokens, lengths = (
            jax.ShapeDtypeStruct(size, np.int32, sharding=meshes.rows_sharding(mesh, size))
            for size in ((rows, length), (rows,))
        )
        model = reward_model.abstract_on(shape_of(path), mesh, dtype)
        yield Scoring(
            weight / sum(weight for weight, _ in tasks), model.config, make_program(mesh, dtype), model, tokens, lengths
        )


def rewards(runtime: Runtime, decode: Program) -> Iterator[Program]:
    """Yield the programs of reward models over the responses that a program decodes, with their prompts."""
    work, prompt = decode.work, runtime.mean_prompt
    batches = list(scorings(runtime.config, runtime.mesh))
    for scoring in batches:
        others = tuple(other.model for other in batches if other is not scoring)
        arguments = scoring.model, scoring.tokens, scoring.lengths
        scored = scoring.share * (work.generated + work.responses * prompt)
        calls = scored / math.prod(scoring.tokens.shape)
        weights = scoring.weights() / runtime.mesh.shape["tensor"]
        parts = {"parameters": device_bytes(scoring.model)}
        cost = Work(calls, scoring.flops() / runtime.mesh.size, weights, parts, scored=scored)
        name = decode.name.replace("decode", "reward")
        yield Program(decode.stage, name, scoring.run, fixed(*arguments), cost, resident=(*decode.resident, *others))
