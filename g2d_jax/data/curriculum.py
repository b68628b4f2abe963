"""Chooses the prompts that an online stage draws: those without a signal are skipped where there
are others.

    order ─► dropped? ─► outside the window? ─► drawn
                                └─ now and then drawn all the same
- Retirement (the density filter): a prompt all of whose responses got one reward, the same in
  several groups running, has no signal and is left out. A penalty of length is no part of it.
- Targeting: prompts whose running pass rate lies outside a window are drawn less often.

A choice depends on the order, the history and the seed alone, and neither on the batch nor on the
host. The history and the cursor are for the caller to save.
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
"""The weight of the last group in the running pass rate: the policy moves, so older groups soon
tell little."""

_OUTSIDE = 0.1
"""The chance of a prompt outside the window: enough to notice that it has come back into it."""


@dataclass(slots=True)
class PromptStats:
    """Holds what is known of a prompt.

    groups: how many were drawn of it. pass_rate: running share of right responses; None before any
    was judged.
    same: the one reward of all responses of the last group, None if they differed; times: in how
    many groups running.
    """

    groups: int = 0
    pass_rate: float | None = None
    same: float | None = None
    times: int = 0

    def is_dropped(self, drop_solved: int) -> bool:
        """Tell whether it is left out: after so many groups with the same one reward, 0: never."""
        return 0 < drop_solved <= self.times

    def is_out_of_window(self, window: tuple[float, float]) -> bool:
        """Tell whether its pass rate lies outside the window; an end at 0 below or at 1 above
        bounds nothing."""
        low, high = window
        rate = self.pass_rate
        return rate is not None and ((low != 0 and rate < low) or (high != 1 and rate > high))


class History:
    """Remembers what each prompt's groups got, by its index in the order; prompts never drawn take
    no room."""

    def __init__(self) -> None:
        self.seen: dict[int, PromptStats] = {}

    def update(self, index: int, rewards: np.ndarray, right: np.ndarray) -> None:
        """Take in one group. rewards: [G], NaN for responses that could not be scored.

        right: [G], 1 or 0, NaN where there is no right and wrong. The pass rate is their mean in
        the first group, and then half the old rate and half the new mean. A group with fewer than
        two scored responses says nothing of whether they differ: what is known of that stays.
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

    def share_retired(self, drop_solved: int, records: int) -> float:
        """Compute the share of all records that are retired."""
        return sum(seen.is_dropped(drop_solved) for seen in self.seen.values()) / records

    def state(self) -> dict[str, list[Any]]:
        """Write the history for JSON: {index: [groups, pass rate, same, times]}."""
        return {str(index): list(dataclasses.astuple(seen)) for index, seen in self.seen.items()}

    @classmethod
    def from_state(cls, state: Mapping[str, Sequence[Any]]) -> History:
        """Restore the history that `state` was taken of; {} is a new one."""
        history = cls()
        history.seen = {int(index): PromptStats(*values) for index, values in state.items()}
        return history


@dataclass(frozen=True, slots=True)
class Draws:
    """Holds the draws, (index, visit) each, the position to go on from, and how many were skipped
    and why."""

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
    """Draw the next `wanted` of an order from position `cursor`, less those that are skipped.

    chosen_by.drop_solved: skip prompts whose last so many groups, or more, all got one same reward
    (0: skip none). Its window: of running pass rates; a prompt outside is drawn with probability 0.1, by a
    key of (seed, index, visit). Prompts never drawn are always drawn.

    Walks at most one epoch, order.count positions, or `wanted` if that is more. If these do not
    hold enough, those skipped make up for it, the ones outside the window first, then the retired
    ones, each in the order of positions: exactly `wanted` come back, none at the same visit twice.
    With both filters off they are order[cursor] … order[cursor + wanted - 1]. The counts of skipped
    ones are of those that were not drawn after all.
    """
    drawn: list[Draw] = []
    retired: list[Draw] = []
    beyond: list[Draw] = []
    end = cursor + max(order.count, wanted)
    while len(drawn) < wanted and cursor < end:
        index, visit = order[cursor]
        cursor += 1
        seen = history.seen.get(index, PromptStats())
        if seen.is_dropped(chosen_by.drop_solved):
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
