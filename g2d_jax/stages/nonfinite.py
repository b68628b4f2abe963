"""Checks for numbers that are not finite: in sampled responses, and in updates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath
from safetensors.numpy import save

from g2d_jax.data.packing import Packed
from g2d_jax.records import Rollout
from g2d_jax.runtime import storage
from g2d_jax.stages.runtime import StopRun


def check_rollouts(rollouts: Sequence[Rollout], policy: str) -> None:
    """Raise StopRun if a policy sampled with log-probabilities that are not all finite: its weights are broken.

    Samples of such a distribution say nothing of the policy; they must not be trained on, nor measured.
    policy: its name, for the message.
    """
    broken = [rollout for rollout in rollouts if not np.isfinite(rollout.logprobs).all()]
    if not broken:
        return
    first = broken[0]
    at = int(np.argmin(np.isfinite(first.logprobs)))
    raise StopRun(
        f"policy {policy}: {len(broken)} of {len(rollouts)} sampled responses have log-probabilities that are not "
        f"finite (problem {first.problem_id}, sample {first.sample}: {first.logprobs[at]} at token {at + 1}), so its "
        "weights or its activations are not finite either. Nothing was written of them. Check the checkpoint or model "
        "the policy came from, try dtype='float32', or train it again with a lower learning rate"
    )


class Skips:
    """Updates that were skipped because their loss or gradient was not finite; kept in a stage's extra state.

    total: of the whole stage. row: in a row, up to the last update.
    """

    def __init__(self, extra_state: dict[str, object]) -> None:
        """Read the skips from extra_state, the Trainer's; "skipped" is in it from the first skip on."""
        self._extra_state = extra_state

    @property
    def total(self) -> int:
        """The number of the stage's updates that were skipped."""
        return self._counts()["total"]

    @property
    def row(self) -> int:
        """The number of them that came last, one after the other."""
        return self._counts()["row"]

    def _counts(self) -> dict[str, int]:
        counts = self._extra_state.get("skipped", {"total": 0, "row": 0})
        assert isinstance(counts, dict)
        return counts

    def count(self, skipped: bool) -> bool:
        """Count one more update; return True for the first skip of a row."""
        before = self._counts()
        if not skipped and not before["row"]:
            return False
        row = before["row"] + 1 if skipped else 0
        self._extra_state["skipped"] = {"total": before["total"] + skipped, "row": row}
        return row == 1

    def manifest(self) -> dict[str, int]:
        """Return the entry of a manifest's counts: {"skipped_updates": …}, {} if there were none."""
        return {"skipped_updates": self.total} if self.total else {}


def write_batch(folder: epath.Path, packed: Packed, record: Mapping[str, Any]) -> None:
    """Write the batch of an update that was not finite, for reading.

    batch.safetensors has the packed rows that count, [N, R, …]; record.json the record, and how many values of each
    array are not finite (all 0: the policy is to blame, or the loss). Raises OSError.
    """
    arrays = {name: array[: packed.count] for name, array in packed.arrays.items()}
    wrong = {name: int((~np.isfinite(x)).sum()) for name, x in arrays.items() if x.dtype.kind == "f"}
    storage.write_bytes(folder / "batch.safetensors", save({k: np.ascontiguousarray(x) for k, x in arrays.items()}))
    storage.write_json(folder / "record.json", {**record, "nonfinite_values": wrong})


def format_loss(loss: float, grad_norm: float) -> str:
    """Format the two numbers that decide whether an update is done, for a message."""
    return f"loss {_number(loss)}, gradient norm {_number(grad_norm)}"


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "NaN" if math.isnan(value) else "infinite"
