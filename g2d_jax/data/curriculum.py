"""Prompt selection for an online stage: prompts without a signal are skipped in favour of other prompts.

    order ─► dropped? ─► outside the window? ─► drawn
                                └─ sometimes drawn anyway
- Retirement (the density filter): a prompt whose responses all had one reward, the same in several
  consecutive groups, has no signal and is left out. Length penalties are not part of that reward.
- Targeting: prompts whose running pass rate is outside a window are drawn less often.

A choice depends on the order, the history and the seed alone, not on the batch or the host. The
caller saves the history and the cursor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from g2d_jax.config import Filter
from g2d_jax.data.order import Draw, Mixture, Order
from g2d_jax.records import differ
from g2d_jax.runtime import keys

_NEW_SHARE = 0.5
"""The weight of the last group in the running pass rate: the policy changes, so older groups are
soon outdated."""

_OUTSIDE = 0.1
"""The chance to draw a prompt outside the window: enough to notice that it has returned."""


@dataclass(slots=True)
class PromptStats:
    """The results of one prompt so far.

    groups: how many of its groups were sampled. pass_rate: running share of correct responses; None
    until one was judged. same: the one reward of all responses of the last group, None if they
    differed; times: for how many consecutive groups.
    """

    groups: int = 0
    pass_rate: float | None = None
    same: float | None = None
    times: int = 0

    def is_dropped(self, chosen_by: Filter) -> bool:
        """Return whether it is left out: after drop_solved groups with one same reward; 0: never."""
        return 0 < chosen_by.drop_solved <= self.times

    def is_out_of_window(self, window: tuple[float, float]) -> bool:
        """Return whether its pass rate is outside the window; a lower end of 0 or an upper end of 1
        does not restrict."""
        low, high = window
        rate = self.pass_rate
        return rate is not None and ((low != 0 and rate < low) or (high != 1 and rate > high))


class History:
    """The results of each prompt's groups, by its index in the order; only drawn prompts use
    memory."""

    def __init__(self) -> None:
        self.seen: dict[int, PromptStats] = {}

    def update(self, index: int, rewards: np.ndarray, right: np.ndarray) -> None:
        """Add one group. rewards: [G], NaN for responses that could not be scored.

        right: [G], 1 or 0, NaN without right and wrong. The pass rate is their mean in the first
        group, and then half the old rate plus half the new mean. A group with fewer than two scored
        responses leaves the record of equal rewards unchanged.
        """
        seen = self.seen.setdefault(index, PromptStats())
        seen.groups += 1
        judged = right[~np.isnan(right)]
        if judged.size:
            mean = float(judged.mean())
            if seen.pass_rate is None:
                seen.pass_rate = mean
            seen.pass_rate = (1 - _NEW_SHARE) * seen.pass_rate + _NEW_SHARE * mean
        values = rewards[~np.isnan(rewards)]
        if values.size < 2:
            return
        if differ(values):
            seen.same = None
            seen.times = 0
            return
        if seen.same is None or differ(np.array([seen.same, values[0]])):
            seen.times = 0
        seen.same = float(values[0])
        seen.times += 1

    def share_retired(self, chosen_by: Filter, records: int) -> float:
        """Compute the share of all records that are retired."""
        return sum(seen.is_dropped(chosen_by) for seen in self.seen.values()) / records

    def state(self) -> dict[str, list[Any]]:
        """Return the history for JSON: {index: [groups, pass rate, same, times]}."""
        return {str(index): list(dataclasses.astuple(seen)) for index, seen in self.seen.items()}

    @classmethod
    def from_state(cls, state: Mapping[str, Sequence[Any]]) -> History:
        """Restore the history from its `state`; {} is a new one."""
        history = cls()
        history.seen = {int(index): PromptStats(*values) for index, values in state.items()}
        return history


@dataclass(frozen=True, slots=True)
class Draws:
    """The draws, (index, visit) each, the position of the next one, and the counts of skipped
    prompts by reason."""

    draws: list[Draw]
    cursor: int
    skipped_retired: int
    skipped_outside: int


def draw(
    order: Order | Mixture,
    cursor: int,
    wanted: int,
    history: History,
    chosen_by: Filter,
    seed: int,
) -> Draws:
    """Draw the next `wanted` prompts of an order from position `cursor`, without the skipped ones.

    chosen_by.drop_solved: skip prompts whose last groups, at least this many, all had one same
    reward (0: skip none). Its window: of running pass rates; a prompt outside is drawn with
    probability 0.1, by a key of (seed, index, visit). New prompts are always drawn.

    Covers at most one epoch, order.count positions, or `wanted` if that is more. If these hold too
    few, skipped prompts fill the gap in the order of positions: first those outside the window,
    then the retired ones. Exactly `wanted` are returned, none twice at the same visit. With both
    filters off they are order[cursor] … order[cursor + wanted - 1]. The counts of skipped prompts
    exclude those that were drawn after all.
    """
    drawn: list[Draw] = []
    retired: list[Draw] = []
    beyond: list[Draw] = []
    end = cursor + max(order.count, wanted)
    while len(drawn) < wanted and cursor < end:
        index, visit = order[cursor]
        cursor += 1
        seen = history.seen.get(index, PromptStats())
        if seen.is_dropped(chosen_by):
            retired.append((index, visit))
        elif (
            seen.is_out_of_window(chosen_by.window)
            and keys.rng(seed, "difficulty", index, visit).random() >= _OUTSIDE
        ):
            beyond.append((index, visit))
        else:
            drawn.append((index, visit))
    missing = wanted - len(drawn)
    from_beyond = min(missing, len(beyond))
    from_retired = missing - from_beyond
    drawn += [*beyond[:from_beyond], *retired[:from_retired]]
    return Draws(drawn, cursor, len(retired) - from_retired, len(beyond) - from_beyond)
