"""The phase `log-probabilities`: those of a batch's responses under other policies than the one that
an update trains."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from etils import epath
from safetensors.numpy import load, save

from g2d_jax.config import Online
from g2d_jax.data.packing import Group
from g2d_jax.models.decoder import Decoder
from g2d_jax.runtime import storage
from g2d_jax.session.row_shapes import RowShape
from g2d_jax.session.session import Session
from g2d_jax.session.stage_result import Cost
from g2d_jax.session.training_programs import Scorer

FIXED, PRESENT = "fixed", "present"
"""The policies whose log-probabilities a loss may need: that which the stage began with, and that
which sampled."""


@dataclass(frozen=True)
class OtherLogprobs:
    """The log-probabilities of a batch's responses under other policies than the one that is
    trained.

    reference, trainer: of all responses one after the other, float32 [tokens], None where the loss
    needs none.
    cost: of computing them, for `Cost.add`.
    """

    reference: np.ndarray | None = None
    trainer: np.ndarray | None = None
    cost: Mapping[str, float] = field(default_factory=dict)


def trains_off_policy(stage: Online) -> bool:
    """Return whether a GRPO loss trains on rollouts of an earlier policy than its own.

    With sync_every=1 a batch serves one update, and the policy is the one that sampled: the old
    log-probabilities are its own, taken in the same forward pass. Else they are those of the policy
    at the synchronisation. The trainer computes them there, since the sampler's differ by its
    arithmetic (TRL does the same where steps_per_generation or num_iterations ask for it; the paper
    has GRPO with sync_every=1 alone).
    """
    return stage.has_ratio and stage.sync_every != 1


def scored_under(stage: Online) -> dict[str, str]:
    """Return the log-probabilities that a stage's loss needs besides those of the policy it trains,
    each with the policy that gives them, `FIXED` or `PRESENT`.

    "reference": of the policy that the loss compares with. "trainer": of the policy that sampled,
    as the trainer computes them and not the sampler. Files of log-probabilities have these names.
    """
    needed = {}
    if stage.compares:
        needed["reference"] = FIXED if stage.has_fixed_reference else PRESENT
    if trains_off_policy(stage):
        needed["trainer"] = PRESENT
    return needed


def logprob_scorer_of(session: Session, stage: Online, rows: RowShape) -> Scorer:
    """Return what computes the log-probabilities of a stage's batches under other policies: at the
    temperature of its loss. DPO compares the distributions of the models themselves, and so does
    GroupDPO."""
    temperature = float(stage.sampling.temperature) if stage.loss == "grpo" else 1.0
    return Scorer(session, rows, temperature)


def other_logprobs(
    scorer: Scorer,
    needed: Mapping[str, str],
    policies: Mapping[str, Decoder],
    groups: Sequence[Group],
) -> OtherLogprobs:
    """Compute the log-probabilities of the responses of all groups. needed: as of `scored_under`.
    policies: `FIXED` or `PRESENT` -> its parameters."""
    found: dict[str, Any] = {}
    cost = Cost()
    with scorer.session.track_cost(cost):
        for under, params in policies.items():
            names = [name for name, policy in needed.items() if policy == under]
            if names:
                logprobs = itertools.chain.from_iterable(scorer(params, groups, cost))
                found |= dict.fromkeys(names, np.concatenate(list(logprobs)))
    return OtherLogprobs(**found, cost=cost.part())


def logprobs_file(folder: epath.Path, number: int) -> epath.Path:
    """Return the file of a batch's log-probabilities, in a stage's folder."""
    return folder / "logprobs" / f"step-{number:06d}.safetensors"


def write_logprobs(file: epath.Path, logprobs: OtherLogprobs) -> None:
    """Write a batch's log-probabilities with their cost. Raises OSError."""
    arrays = {"reference": logprobs.reference, "trainer": logprobs.trainer}
    found = {name: array for name, array in arrays.items() if array is not None}
    storage.write_bytes(file, save(found, {"cost": json.dumps(logprobs.cost)}))


def read_logprobs(file: epath.Path) -> OtherLogprobs:
    """Read what `write_logprobs` wrote."""
    data = storage.read_bytes(file)
    # safetensors.numpy gives no metadata: a file begins with the header's size, then JSON.
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return OtherLogprobs(**load(data), cost=json.loads(header["__metadata__"]["cost"]))
