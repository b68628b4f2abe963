"""KTO's side of the offline stage: graded rollouts, each one an example by itself, and the reference point of a batch.

rollouts of a collect stage ─► every response that is correct or incorrect, those of prompts without a pair too
an example: prompt | response | a response to another prompt, for the reference point
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from etils import epath

from g2d_jax.config import Offline
from g2d_jax.data.packing import Group, Response
from g2d_jax.data.preferences import check_ids, is_correct
from g2d_jax.losses import dpo_weights, reference_point
from g2d_jax.models.decoder import Decoder
from g2d_jax.runtime.tables import read_rollouts
from g2d_jax.stages.collect import rollouts_of
from g2d_jax.stages.cost import Cost
from g2d_jax.stages.row_shapes import RowShape, pack_rows
from g2d_jax.stages.runtime import Runtime


def read(runtime: Runtime, stage: Offline) -> tuple[list[Group], np.ndarray]:
    """Read the rollouts of a collect stage of this run, or of a folder or file of Parquet as one writes them.

    Returns the examples, two responses each, of which the second is another prompt's, and [examples] float, 1 where the
    first is correct. Responses that could not be graded, or not in time, are left out.
    Raises ValueError for rollouts that cannot be trained on, or that are for held-out problems.
    """
    name = stage.preferences
    if name in runtime.folders:
        rows = [row for group in rollouts_of(runtime, name, Cost())[1] for row in group]
    else:
        rows = read_rollouts(epath.Path(name))
    labels = is_correct(rows)
    graded = np.flatnonzero(~np.isnan(labels))
    rollouts = [rows[i].rollout for i in graded]
    check_ids(name, rollouts, ("prompt_ids", "token_ids"), "graded responses", runtime.model_config.vocab_size)
    if leaked := sum(rollout.problem_id in runtime.held_out_ids for rollout in rollouts):
        raise ValueError(
            f"{leaked} of {len(rollouts)} rollouts are for problems of data.dev or data.test: leave them out"
        )
    problems = [rollout.problem_id for rollout in rollouts]
    if len(set(problems)) < 2:
        raise ValueError(f"{name}: all graded responses are to one problem; KTO's reference point takes two or more")
    examples = [
        Group(own.prompt_ids, [Response(own.token_ids), Response(rollouts[other].token_ids)], keep_together=True)
        for own, other in zip(rollouts, of_other_problems(problems), strict=True)
    ]
    return examples, labels[graded]


def of_other_problems(problems: Sequence[str]) -> np.ndarray:
    """Choose for each response one to another problem, int [responses], in whatever order and number they are.

    Sorted by problem, the first response of a problem takes the first one behind the problem's, the second the second,
    and so on round the list without the problem's own.
    """
    _, problem, counts = np.unique(problems, return_inverse=True, return_counts=True)
    order, total = np.argsort(problem, kind="stable"), len(problem)
    place = np.empty(total, int)
    place[order] = np.arange(total)
    begin, own = (np.cumsum(counts) - counts)[problem], counts[problem]
    return order[(begin + own + (place - begin) % (total - own)) % total]


def batch(examples: list[Group], labels: np.ndarray, references: np.ndarray, kl: float) -> list[Group]:
    """Build a batch of the examples' own responses, weighted so that the loss is their mean.

    references: of those, summed log-probabilities under the reference, [examples]. kl: see `reference_point`.
    """
    values = zip(examples, labels, references, dpo_weights(len(examples)), strict=True)
    return [
        Group(
            example.prompt_ids,
            [
                Response(
                    example.responses[0].token_ids,
                    {},
                    {"desirable": label, "reference": float(reference), "weight": float(weight), "kl": kl},
                )
            ],
        )
        for example, label, reference, weight in values
    ]


def others(examples: list[Group]) -> list[Group]:
    """Return the examples with the other prompt's response alone."""
    return [Group(example.prompt_ids, example.responses[1:]) for example in examples]


def measure_kl(
    runtime: Runtime, policy: Decoder, examples: list[Group], references: np.ndarray, rows: RowShape, cost: Cost
) -> float:
    """Compute a batch's reference point under the policy as it is now. references: [examples], of the others'."""
    packed = pack_rows(runtime, others(examples), rows)
    scored = packed.unpack(runtime.score_logprobs(policy, packed, cost))
    return reference_point(np.array([response.sum(dtype=np.float32) for (response,) in scored]), references)
