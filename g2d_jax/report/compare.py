"""Policies of several runs on the problems that all of them answered: the records of a comparison, and its figures.

    Comparison ─ sides (one a run), players (one a policy of a run), problems (common to all)
                   └► pairs (every two players), ratings

compare_read.py   makes one of run folders       compare_text.py   its tables and sentences, Markdown, CSV
compare_page.py   the page, and writing all three
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g2d_jax import elo, frontier, stats
from g2d_jax.report.run import Run, Stage

Array = NDArray[np.float64]

NORMAL = 1.96
"""Standard errors on each side of a mean in an interval of 95 %."""


@dataclass(frozen=True)
class Side:
    """One run. mark: A, B, … label: its folder's name, or its path where another has that.

    stage: the evaluation that takes part. problems: those evaluated, by id, {} for what is not on disk of one.
    sampling: by name, None where neither manifest nor config tells.
    """

    mark: str
    label: str
    run: Run
    stage: Stage
    split: str
    sampling: Mapping[str, Any]
    problems: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Player:
    """One policy of a run. correct [N, S] over the common problems in their order: 1, 0, NaN not scored or no answer.

    length: tokens of a completion, the mean. entropy: nats, the mean over tokens. costs: by measure.
    steps: K, the online steps of its run that it is made of. outside: the policy of elsewhere that it
    is made from, "" for none. is_last: its run's last one.
    """

    side: Side
    policy: str
    name: str
    correct: Array
    length: float
    entropy: float
    costs: Mapping[str, float]
    steps: float
    outside: str
    is_last: bool

    @cached_property
    def accuracy(self) -> stats.Accuracy:
        """Mean pass@1 over the common problems."""
        return stats.accuracy(self.correct)

    @cached_property
    def means(self) -> Array:
        """Each problem's mean [N], NaN without a scored answer."""
        return stats.row_means(self.correct)


@dataclass(frozen=True)
class Pair:
    """after - before over the common problems. interval: bootstrap over problems. wins, draws, losses: of `after`."""

    before: Player
    after: Player
    paired: stats.Paired
    interval: frontier.Interval
    wins: int
    draws: int
    losses: int

    @property
    def low(self) -> float:
        """The lower end of difference ± 1.96 standard errors."""
        return self.paired.difference - NORMAL * self.paired.sem

    @property
    def high(self) -> float:
        """The upper end."""
        return self.paired.difference + NORMAL * self.paired.sem

    @property
    def is_beyond_noise(self) -> bool | None:
        """Whether low … high leaves 0 out; None with fewer than two problems."""
        return None if math.isnan(self.low) else self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Comparison:
    """Runs side by side. problems: the common ones' ids, ascending. warnings: why accuracies may not be comparable.

    settings: of each run but the first, what differs from the first, as "field: there -> here". left_out: policies of a
    study's points that were evaluated once for several of these and are a player already, as (run's mark, policy).
    """

    sides: Sequence[Side]
    players: Sequence[Player]
    problems: Sequence[str]
    warnings: Sequence[str]
    settings: Sequence[tuple[Side, Sequence[str]]]
    left_out: Sequence[tuple[str, str]]

    @cached_property
    def pairs(self) -> list[Pair]:
        """Every two players, in order."""
        return [_pair(before, after) for before, after in combinations(self.players, 2)]

    @cached_property
    def ratings(self) -> list[elo.Rating]:
        """The players' Elo ratings in their order: a problem is won by the higher mean, equal ones are draws."""
        points = elo.outcomes([player.means for player in self.players])
        return elo.elo([player.name for player in self.players], points)

    @property
    def samples(self) -> int:
        """The largest k for which pass@k is defined for all players."""
        return min(player.correct.shape[1] for player in self.players)

    @property
    def leaders(self) -> tuple[Player, Player]:
        """The best and the second best of the runs' last policies."""
        ordered = sorted((p for p in self.players if p.is_last), key=lambda player: -player.accuracy.mean)
        return ordered[0], ordered[1]

    def most_different(self, count: int) -> list[str]:
        """Up to `count` problems on which the runs' last policies differ most in their means; equal ones by id."""
        means = np.stack([player.means for player in self.players if player.is_last])
        known = ~np.isnan(means).any(axis=0)
        spread = np.where(known, means.max(axis=0) - means.min(axis=0), 0.0)
        apart = [(-float(size), problem) for size, problem in zip(spread, self.problems, strict=True) if size > 0]
        return [problem for _, problem in sorted(apart)[:count]]


def _pair(before: Player, after: Player) -> Pair:
    difference = after.means - before.means
    won, lost = int((difference > 0).sum()), int((difference < 0).sum())
    return Pair(
        before,
        after,
        stats.paired(before.correct, after.correct),
        frontier.bootstrap(difference[None]),
        won,
        int((difference == 0).sum()),
        lost,
    )
