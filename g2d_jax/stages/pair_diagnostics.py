"""Measurements of an offline stage's own pairs: the gradient's signal before training, rewards after it.

Both change nothing in the trained policy, and their cost is counted apart from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from g2d_jax.data.loader import Order, draw
from g2d_jax.data.packing import Group
from g2d_jax.models.flops import train_flops
from g2d_jax.records import Preference
from g2d_jax.runtime import processes, storage
from g2d_jax.runtime.tables import write_columns
from g2d_jax.stages.cost import Cost
from g2d_jax.stages.policies import load_policy
from g2d_jax.stages.rollouts import on_disk
from g2d_jax.stages.rows import pack_rows
from g2d_jax.stages.runtime import Runtime
from g2d_jax.study import informativeness
from g2d_jax.training.gradient_noise import gradient_norms
from g2d_jax.training.objectives import Objective

SIGNAL_BATCHES = 16  # gradients whose mean and spread are measured


def signal_draws(order: Order, total: int) -> list[list[int]]:
    """List the pairs' indices of each batch, M batches of B: the first M * B of an order of all pairs.

    total: pairs to use in total; no pair is used twice. M is 16, or the number of pairs if that is smaller.
    """
    available = min(total, order.count)
    batches = min(SIGNAL_BATCHES, available)
    size = available // batches if batches else 0
    return [[index for index, _ in draw(order, first * size, size)] for first in range(batches)]


def gradient_signal(
    runtime: Runtime,
    name: str,
    policy: str,
    objective: Objective,
    batches: Sequence[Sequence[Group]],
    row_length: int,
    inputs: Any,
) -> tuple[dict[str, float], Cost]:
    """Measure `informativeness.gradient_signal` of a loss at the policy that training starts from, and its cost.

    batches: groups of equally many pairs, each batch weighted so that its loss is their mean. Pairs of one prompt are
    not independent: where a few prompts give most of the pairs, their common part counts as signal.
    inputs: all that decides the result, fingerprinted; the result is read back where it has been computed before.
    The tally counts tokens that went forward and backward as trained. With fewer than 2 batches there is no
    noise to measure: ({}, no cost), with a message.
    """
    if len(batches) < 2:
        runtime.tracker.say(f"{name}: the gradient's signal is not measured, that takes at least 2 pairs")
        return {}, Cost()
    file = runtime.folders[name] / f"signal-{storage.fingerprint(inputs)}.json"
    if on_disk(runtime, [file]):
        cached = storage.read_json(file)
        return {key: float(value) for key, value in cached["signal"].items()}, Cost(**cached["tally"])
    tally = Cost()
    with runtime.track_cost(tally):
        packed = [pack_rows(runtime, groups, row_length, len(batches[0])) for groups in batches]
        objective, programs = runtime.loss_of(name, objective)
        norms = gradient_norms(objective, load_policy(runtime, policy), packed, runtime.mesh, programs)
        used = sum(batch.used for batch in packed)
        tally.trained += used
        tally.flops += train_flops(runtime.model_config, used, sum(batch.attended for batch in packed))
        signal = informativeness.gradient_signal(*norms, batches=len(batches), pairs_per_batch=len(batches[0]))
    processes.on_leader(lambda: storage.write_json(file, {"signal": signal, "tally": dataclasses.asdict(tally)}))
    return signal, tally


def pair_summary(pairs: Sequence[Preference], logprobs: np.ndarray) -> dict[str, float]:
    """Compute `informativeness.pair_summary` of pairs under one policy. logprobs: summed, [pairs, 2] (chosen,
    rejected), nats.

    Raises ValueError for a response without tokens.
    """
    return informativeness.pair_summary(logprobs[:, 0], logprobs[:, 1], *_lengths(pairs))


def write_pairs(path: epath.Path, pairs: Sequence[Preference], references: np.ndarray, trained: np.ndarray) -> None:
    """Write one row a pair, in their order: problem_id, lengths in tokens, and summed log-probs in nats.

    references, trained: [pairs, 2] (chosen, rejected), under the policy before and after training.
    """
    chosen_length, rejected_length = _lengths(pairs)
    columns: dict[str, Any] = {
        "problem_id": [pair.problem_id for pair in pairs],
        "chosen_length": chosen_length,
        "rejected_length": rejected_length,
        "ref_chosen": references[:, 0],
        "ref_rejected": references[:, 1],
        "chosen": trained[:, 0],
        "rejected": trained[:, 1],
    }
    processes.on_leader(lambda: write_columns(path, columns))


def figures(result: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Flatten a result to one row of metrics: "margins/accuracy" and so on."""
    return {f"{part}/{name}": value for part, values in result.items() for name, value in values.items()}


def _lengths(pairs: Sequence[Preference]) -> tuple[np.ndarray, np.ndarray]:
    chosen = np.array([len(pair.chosen_ids) for pair in pairs], np.int32)
    return chosen, np.array([len(pair.rejected_ids) for pair in pairs], np.int32)
