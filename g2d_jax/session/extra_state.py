"""The state of a training stage in its checkpoints, besides parameters and optimiser."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from g2d_jax.data.curriculum import History
from g2d_jax.session.stage_result import Cost, Stop, Warned


@dataclass(frozen=True)
class Cursor:
    """A position in the order of prompts, and counts of prompts up to it: drawn, and skipped by
    reason."""

    position: int = 0
    drawn: int = 0
    retired: int = 0
    outside: int = 0

    @property
    def skipped(self) -> int:
        """The number of prompts that were skipped."""
        return self.retired + self.outside


@dataclass
class PlannedWindow:
    """A sync window whose prompts were drawn before its first update.

    window: that update. step: the update at whose start its sampling policy was copied.
    draws: (index in the order of prompts, visit) of the first round; after: the position after
    them.
    """

    window: int
    step: int
    draws: list[tuple[int, int]]
    after: Cursor


@dataclass
class ExtraState:
    """The state that a stage resumes with; rollouts and early stopping are of online stages only.

    costs: step -> the cost up to each kept step
    skipped_updates, skipped_in_row: updates that were not finite, in all and latest in a row
    warnings: alerts that were shown, see `alerts.say`
    series: metric -> its first and last values, which alerts compare
    rounds: the number of rounds of each batch that was trained on
    ended: the rule that ended the stage before its last step, if one did
    without_signal: updates in a row whose batch taught nothing
    usage: metrics of the sampler's calls, see `rollouts.usage`; counts: of prompts and pairs
    cursor: the position after the prompts of the last sampled sync window
    planned: windows sampled ahead, see rollouts/ahead.py: at most the current and the next
    history: results of each prompt so far, for choosing among them
    """

    costs: dict[str, Cost] = field(default_factory=dict)
    skipped_updates: int = 0
    skipped_in_row: int = 0
    warnings: list[Warned] = field(default_factory=list)
    series: dict[str, list[float]] = field(default_factory=dict)
    rounds: list[int] = field(default_factory=list)
    ended: Stop | None = None
    without_signal: int = 0
    usage: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    cursor: Cursor = field(default_factory=Cursor)
    planned: list[PlannedWindow] = field(default_factory=list)
    history: History = field(default_factory=History)

    def count_update(self, skipped: bool) -> bool:
        """Count an update; return whether it is the first of several skipped in a row."""
        self.skipped_updates += skipped
        self.skipped_in_row = self.skipped_in_row + 1 if skipped else 0
        return self.skipped_in_row == 1

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON."""
        return {**dataclasses.asdict(self), "history": self.history.state()}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> ExtraState:
        """Restore the state that `to_json` wrote."""
        state = cls(**record)
        state.costs = {step: Cost(**cost) for step, cost in record["costs"].items()}
        state.warnings = [Warned(**warning) for warning in record["warnings"]]
        state.ended = record["ended"] and Stop(**record["ended"])
        state.history = History.from_state(record["history"])
        state.cursor = Cursor(**record["cursor"])
        state.planned = list(map(_planned, record["planned"]))
        return state


def _planned(record: Mapping[str, Any]) -> PlannedWindow:
    draws = [(index, visit) for index, visit in record["draws"]]
    return PlannedWindow(record["window"], record["step"], draws, Cursor(**record["after"]))
