"""Elo ratings of policies from the problems that they share: one scale for many runs.

A problem is a game between every two players (policies) whose `scores` [P, N] on it are known: the greater score wins,
equal ones draw, NaN plays no game. Ratings are the maximum likelihood of the model of Bradley and Terry (1952), in
which player i wins against j with the chance

    1 / (1 + 10 ** ((r_j - r_i) / 400))

a draw being half a win and half a loss. So 100 points more are 64 of 100 games. The fit does not depend on the order
of games, as the running updates of chess would. Each pair plays one virtual draw beside its games, so that a player
that never loses has a finite rating; two players alone, a and b games won, are then 400 * log10((a + 1/2) / (b + 1/2))
apart. Ratings say how often a player is ahead, not by how much: for that see `stats.paired` and `frontier.bootstrap`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

ELO_PER_LOG_ODDS = 400 / math.log(10)
"""Points of rating in one unit of log-strength."""

MAX_STEPS = 1000


@dataclass(frozen=True)
class Rating:
    """A player's rating with its interval, in Elo points; games: its pairings with any other player on any problem."""

    name: str
    rating: float
    low: float
    high: float
    games: int


def outcomes(scores: ArrayLike) -> Array:
    """Give the points of each game, [P, P, N]: 1 where the row's player wins against the column's, 1/2 a draw, else 0.

    scores [P, N]: greater is better, NaN where not known. Scores are compared exactly, so give means of right answers
    as such, unrounded.
    """
    table = np.asarray(scores, dtype=np.float64)
    first, second = table[:, None], table[None]
    result = (first > second) + 0.5 * (first == second)  # NaN compares as neither
    result[np.arange(len(table)), np.arange(len(table))] = 0.0
    return result


def ratings(wins: ArrayLike) -> Array:
    """Give the Elo ratings [..., P] of players with these points against each other [..., P, P]; their mean is 1000.

    The maximum of the Bradley-Terry likelihood with a virtual draw between each two players (see the module's
    docstring).
    """
    return 1000 + ELO_PER_LOG_ODDS * _log_strengths(np.asarray(wins, dtype=np.float64))


def elo(names: Sequence[str], points: Array, *, samples: int = 500, seed: int = 0) -> list[Rating]:
    """Give the players' ratings in the order of `names`, from the `outcomes` [P, P, N] of their games on N problems.

    Intervals of 95 % are percentiles of the ratings over `samples` draws of as many problems with replacement, from
    those that at least two players share. They say what other problems would change, not what training again would.
    Ratings are relative: another set of players moves all of them. The same arguments give the same intervals, and
    those of a player do not depend on its place in the list. Raises ValueError where players cannot be compared because
    no games lead from one to the other.
    """
    points = points[:, :, points.any(axis=(0, 1))]
    won = points.sum(axis=2)
    _require_linked(won, names)
    low, high = np.quantile(ratings(_replicates(points, samples, seed)), [0.025, 0.975], axis=0)
    rows = zip(names, ratings(won), low, high, (won + won.T).sum(axis=1), strict=True)
    return [Rating(name, float(rating), float(a), float(b), round(games)) for name, rating, a, b, games in rows]


def _replicates(outcomes: Array, samples: int, seed: int) -> Array:
    """Count the wins [samples, P, P] on problems drawn with replacement."""
    players, _, problems = outcomes.shape
    drawn = np.random.default_rng(seed).multinomial(problems, np.full(problems, 1 / problems), size=samples)
    return (drawn.astype(np.float64) @ outcomes.reshape(-1, problems).T).reshape(samples, players, players)


def _log_strengths(wins: Array) -> Array:
    """Fit log-strengths [B, P] of mean 0 at the maximum of each of B likelihoods, by Newton's method.

    Differences of log-strengths change by at most 1 a step. On a log-likelihood of log-sigmoids whose arguments change
    by m, the curvature grows by at most e^m, so a step of m <= 1 gains at least 1 - (e - 2) of what its slope promises:
    every step goes up, and near the maximum steps are full and converge quadratically. The MM algorithm of Hunter 2004
    (Annals of Statistics 32, 384-406) has the same maximum and takes many more steps.
    """
    players = wins.shape[-1]
    won = wins + 0.5 * (1 - np.eye(players))  # the virtual draw of each pair
    games = won + won.swapaxes(-1, -2)
    strengths = np.zeros(wins.shape[:-1])
    for _ in range(MAX_STEPS):
        chance = 0.5 * (1 + np.tanh((strengths[..., :, None] - strengths[..., None, :]) / 2))
        slope = (won - games * chance).sum(axis=-1)
        weight = games * chance * (1 - chance)
        # Minus the Hessian, which is flat along a common shift of all; 1 / P there keeps the mean at 0.
        curvature = weight.sum(axis=-1)[..., None] * np.eye(players) - weight + 1 / players
        step = np.linalg.solve(curvature, slope[..., None])[..., 0]
        size = np.ptp(step, axis=-1, keepdims=True)
        strengths += step / np.maximum(size, 1.0)
        if size.max() < 1e-8:
            return strengths - strengths.mean(axis=-1, keepdims=True)
    raise ArithmeticError(f"the ratings did not converge in {MAX_STEPS} steps: {size.max():.3g} is left")


def _require_linked(wins: Array, names: Sequence[str]) -> None:
    """Raise ValueError unless games lead, through others perhaps, from each player to each other."""
    linked = (wins + wins.T > 0) | np.eye(len(wins), dtype=bool)
    for _ in range(len(wins).bit_length()):  # doubles the length of the paths each time
        linked = linked @ linked
    if not linked[0].all():
        apart = [name for name, reached in zip(names, linked[0], strict=True) if not reached]
        raise ValueError(
            f"{', '.join(apart)} cannot be compared with {names[0]}: there is no common problem, "
            "not through other players either; rate them on problems that they share"
        )
