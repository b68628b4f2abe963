"""The phase `log-probabilities`: of a batch's responses under policies other than the trained
one."""

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
"""The policies whose log-probabilities a loss may need: the one at the stage's start, and the one
that sampled."""


@dataclass(frozen=True)
class OtherLogprobs:
    """Log-probabilities of a batch's responses under policies other than the trained one.

    reference, trainer: float32 [tokens], of all responses concatenated; None if the loss needs
    none. cost: of computing them, for `Cost.add`.
    """

    reference: np.ndarray | None = None
    trainer: np.ndarray | None = None
    cost: Mapping[str, float] = field(default_factory=dict)


def trains_off_policy(stage: Online) -> bool:
    """Return whether a GRPO loss trains on rollouts of an earlier policy than its own.

    With sync_every=1 each batch is used for one update of the policy that sampled it, so the old
    log-probabilities come from the same forward pass. Otherwise they are the policy's at the
    synchronisation. The trainer computes them, since the sampler's arithmetic differs. (TRL does
    the same for steps_per_generation and num_iterations; the paper only has GRPO with
    sync_every=1.)
    """
    return stage.has_ratio and stage.sync_every != 1


def scored_under(stage: Online) -> dict[str, str]:
    """Map the other log-probabilities that a stage's loss needs to their policy, `FIXED` or
    `PRESENT`.

    "reference": of the policy that the loss compares with. "trainer": of the policy that sampled,
    computed by the trainer. Files of log-probabilities use these names.
    """
    needed = {}
    if stage.compares:
        needed["reference"] = FIXED if stage.has_fixed_reference else PRESENT
    if trains_off_policy(stage):
        needed["trainer"] = PRESENT
    return needed


def logprob_scorer_of(session: Session, stage: Online, rows: RowShape) -> Scorer:
    """Return the Scorer of a stage's batches under other policies, at the temperature of its loss:
    the sampling temperature for GRPO. DPO and GroupDPO compare the models' own distributions."""
    temperature = float(stage.sampling.temperature) if stage.loss == "grpo" else 1.0
    return Scorer(session, rows, temperature)


def other_logprobs(
    scorer: Scorer,
    needed: Mapping[str, str],
    policies: Mapping[str, Decoder],
    groups: Sequence[Group],
) -> OtherLogprobs:
    """Compute the log-probabilities of all groups' responses. needed: from `scored_under`.
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
    """Read a file of `write_logprobs`."""
    data = storage.read_bytes(file)
    # safetensors.numpy does not return metadata: a file begins with the header's size, then JSON.
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return OtherLogprobs(**load(data), cost=json.loads(header["__metadata__"]["cost"]))
