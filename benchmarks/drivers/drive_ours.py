"""Drive this library: the sampler and the train step through the entry points that its stages
use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cases import FAMILIES, MODELS, STOPS, Case, Clock, run, tokens

from g2d_jax.config import OnlineDPO, Optimizer
from g2d_jax.data.packing import Group, Packed, Response, computed_columns, pack, round_up
from g2d_jax.losses import dpo_weights, group_advantages
from g2d_jax.models import decoder
from g2d_jax.models.config import ModelConfig
from g2d_jax.models.kernels import remat_for
from g2d_jax.records import Request, Rollout, SamplingParams
from g2d_jax.runtime import mesh as meshes
from g2d_jax.runtime import processes
from g2d_jax.sampler.engine import Sampler
from g2d_jax.session.row_shapes import CPU_TOKENS
from g2d_jax.training import objectives
from g2d_jax.training.optimizer import make_optimizer
from g2d_jax.training.step import (
    make_fresh_state,
    make_scorer,
    make_train_step,
    put_batch,
    put_numbers,
)


class Library:
    """A model on all devices with what samples from it and trains it, as the default config has
    them."""

    def __init__(self, case: Case, dtype: str = "float32") -> None:
        family = FAMILIES.get(case.model, "qwen3")
        config = ModelConfig(
            family, case.vocabulary, **MODELS[case.model], tie_word_embeddings=True
        )
        self.case, self.mesh = case, meshes.make_mesh()
        init = jax.jit(
            lambda key: decoder.init(config, key),
            out_shardings=decoder.shardings(config, self.mesh),
        )
        self.model = jax.block_until_ready(init(jax.random.key(0)))
        sampling_mesh = meshes.sampling(self.mesh, 1, config.num_key_value_heads)
        self.sampler = Sampler(config, sampling_mesh, seed=0, dtype=jnp.dtype(dtype))
        remat = remat_for("auto", self.mesh)
        compute = objectives.Compute(self.mesh, jnp.dtype(dtype), remat)
        self.scorer = make_scorer(compute)
        optimizer, of_optimizer = make_optimizer(Optimizer(learning_rate=1e-05), total_steps=10000)
        structure, of_loss = objectives.split(_objective(compute, case))
        self.numbers = put_numbers({"optimizer": of_optimizer, "loss": of_loss}, self.mesh)
        self.state = make_fresh_state(config, optimizer, self.mesh)(self.model)
        self.train = make_train_step(structure, optimizer, config, self.mesh)

    def sample(self, step: int) -> list[list[Rollout]]:
        """Sample responses to the prompts of a step, by prompt."""
        params = SamplingParams(self.case.response, stop_ids=STOPS if self.case.stops else ())
        prompts = enumerate(_ids(prompt) for prompt, _ in self.case.draw(step))
        requests = [
            Request(f"{i:016x}", ids, params, self.case.samples, step) for i, ids in prompts
        ]
        rollouts = list(
            self.sampler.generate(
                self.sampler.to_sampler_params(self.state.params), requests, "benchmark"
            )
        )
        return [
            [row for row in rollouts if row.problem_id == request.problem_id]
            for request in requests
        ]

    def pack(self, groups: list[Group], together: int) -> Packed:
        """Lay groups into rows for at least so many responses behind their prompt, as the stages do
        on a CPU."""
        row = self.row_length(together)
        return pack(groups, row_length=row, **self.layout(row, together))

    def layout(self, row: int, together: int) -> dict[str, int]:
        """How rows of this length make micro-batches."""
        ways, most = meshes.row_ways(self.mesh), self.case.prompts * self.case.samples // together
        return {
            "microbatch_rows": max(CPU_TOKENS // row, 1) * ways,
            "rows_multiple": ways,
            "most_rows": most,
        }

    @cache  # noqa: B019  (there is one library in a process)
    def row_length(self, together: int) -> int:
        """Choose what leaves the fewest positions empty in the first batches."""
        batches = [
            [
                Group(
                    _ids(prompt),
                    [Response(_ids(side)) for side in sides],
                    keep_together=together > 1,
                )
                for prompt, sides in data
            ]
            for data in map(self.case.draw, range(8))
        ]
        shortest = round_up(self.case.prompt + together * self.case.response, 16)

        def columns(row: int) -> int:
            layout = self.layout(row, together)
            return sum(computed_columns(groups, row_length=row, **layout) for groups in batches)

        return min(range(shortest, max(shortest, CPU_TOKENS) + 1, 16), key=columns)

    def reference(self, groups: list[Group], together: int) -> list[list[np.ndarray]]:
        """Log-probabilities of the responses' tokens under the model at the start; 0 where none is
        asked."""
        if not self.case.reference:
            return [
                [np.zeros(len(r.token_ids), np.float32) for r in group.responses]
                for group in groups
            ]
        packed = self.pack(groups, together)
        logprobs, _ = self.scorer(
            self.model, *put_batch(packed, self.mesh), put_numbers(1.0, self.mesh)
        )
        return packed.unpack(np.asarray(logprobs))

    def update(self, groups: list[Group], together: int) -> None:
        """Take one step of the optimiser, and wait for its loss."""
        arrays, count = put_batch(self.pack(groups, together), self.mesh)
        self.state, metrics = self.train(self.state, arrays, count, self.numbers)
        float(metrics["loss"])


def _objective(compute: objectives.Compute, case: Case) -> objectives.Objective:
    if case.table == "dpo":
        return objectives.dpo(compute, OnlineDPO())
    beta = 0.04 if case.reference else 0.0
    return objectives.grpo(compute, temperature=1.0, epsilon=0.2, epsilon_high=None, beta=beta)


def sampling(case: Case, clock: Clock) -> None:
    """Sample; a stop token is not counted, for peers do not return it."""
    library = Library(case)
    clock.start()
    for step in range(case.steps):
        rollouts = library.sample(step)
        clock.step(
            sum(len(r.token_ids) - (r.stop_reason == "stop") for rows in rollouts for r in rows)
        )


def dpo(case: Case, clock: Clock) -> None:
    """Update on pairs."""
    library, weight = Library(case), float(dpo_weights(case.prompts)[0])
    clock.start()
    for step in range(case.steps):
        data = case.draw(step)
        pairs = [
            Group(_ids(prompt), [Response(_ids(side)) for side in sides], keep_together=True)
            for prompt, sides in data
        ]
        groups = []
        for pair, sides in zip(pairs, library.reference(pairs, 2), strict=True):
            told = [{"reference": float(side.sum()), "weight": weight} for side in sides]
            groups.append(_with(pair, "sequence", told))
        library.update(groups, 2)
        clock.step(tokens(data))


def grpo(case: Case, clock: Clock) -> None:
    """Sample, score, update; the share of even tokens is the reward."""
    library = Library(case)
    clock.start()
    for step in range(case.steps):
        rollouts = library.sample(step)
        clock.part("sampling")
        count = sum(len(r.token_ids) for rows in rollouts for r in rows)
        advantages = group_advantages(
            [[float(np.mean(r.token_ids % 2 == 0)) for r in rows] for rows in rollouts]
        )
        bare = [
            Group(rows[0].prompt_ids, [Response(r.token_ids) for r in rows]) for rows in rollouts
        ]
        known = library.reference(bare, 1)
        clock.part("reference")
        groups = []
        for group, logprobs, values in zip(bare, known, advantages.tolist(), strict=True):
            pairs = zip(logprobs, values, strict=True)
            told = [
                {"ref_logprob": x, "advantage": value, "weight": 1 / count} for x, value in pairs
            ]
            groups.append(_with(group, "token", told))
        library.update(groups, 1)
        clock.part("training")
        clock.step(count)


def _with(group: Group, kind: str, values: Sequence[dict[str, Any]]) -> Group:
    """Tell each response of a group what its loss needs, by token or for the whole sequence."""
    return replace(
        group,
        responses=[replace(r, **{kind: v}) for r, v in zip(group.responses, values, strict=True)],
    )


def _ids(tokens: list[int]) -> np.ndarray:
    return np.asarray(tokens, np.int32)


if __name__ == "__main__":
    processes.initialise()
    run({"sampling": sampling, "dpo": dpo, "grpo": grpo}, "jax")
