"""Games between models, from a judge's verdicts on both orders of two answers: who wins, how often, and the ratings.

Judges favour a position, so that every two answers are judged twice with their places swapped. A game is won only if
both verdicts name the same answer; else it is a draw. Where either verdict cannot be read the game is left out, and
counted. Ratings are those of elo.py, of all games of all models.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from g2d_jax.study import elo

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Match:
    """Two models' games. win_rate: of the first, a draw counting half, with its standard error over questions.

    unread: games left out. agreed: share of the games whose two verdicts agree, a tie with a tie. first_place: share of
    the verdicts other than ties that name the answer in the first place; 1/2 without a favoured place.
    """

    first: str
    second: str
    wins: int
    draws: int
    losses: int
    unread: int
    win_rate: float
    sem: float
    agreed: float
    first_place: float


@dataclass(frozen=True)
class Standing(elo.Rating):
    """A model's rating. win_rate: over all its games, a draw counting half. mean_length: characters of an answer."""

    win_rate: float
    mean_length: float


def match(first: str, second: str, verdicts: Array) -> Match:
    """Summarise the games of two models from verdicts [N, 2]; see `outcomes`."""
    points = outcomes(verdicts)
    played = points[~np.isnan(points)]
    read = verdicts[~np.isnan(points)]
    sem = float(np.std(played, ddof=1) / math.sqrt(len(played))) if len(played) > 1 else math.nan
    placed = np.stack([read[:, 0], 1 - read[:, 1]], axis=1)  # points of the answer in the first place
    decided = placed[placed != 0.5]
    return Match(
        first,
        second,
        wins=int((played == 1).sum()),
        draws=int((played == 0.5).sum()),
        losses=int((played == 0).sum()),
        unread=len(points) - len(played),
        win_rate=_mean(played),
        sem=sem,
        agreed=_mean(read[:, 0] == read[:, 1]),
        first_place=_mean(decided),
    )


def outcomes(verdicts: Array) -> Array:
    """Return the points of the first model in each game [N]: 1 won, 0 lost, 1/2 a draw, NaN left out.

    verdicts [N, 2]: its points by the judge when its answer stands first and when it stands second, NaN unreadable.
    """
    agreed = np.where(verdicts[:, 0] == verdicts[:, 1], verdicts[:, 0], 0.5)
    return np.where(np.isnan(verdicts).any(axis=1), np.nan, agreed)


def rank(names: Sequence[str], verdicts: Array, lengths: Sequence[float]) -> list[Standing]:
    """Rate the models, best first, from verdicts [M, M, N, 2] (of the row's model; below the diagonal none is read).

    Raises ValueError where models have no games with each other, not through others either.
    """
    won = _won(verdicts)
    total = won.sum(axis=(1, 2))
    games = total + won.sum(axis=(0, 2))
    if idle := [name for name, played in zip(names, games, strict=True) if played == 0]:
        raise ValueError(f"no verdict on {', '.join(idle)} can be read: see what the judge replied, in its journal")
    more = zip(elo.elo(names, won), (total / games).tolist(), lengths, strict=True)
    standings = [Standing(**vars(rating), win_rate=share, mean_length=length) for rating, share, length in more]
    return sorted(standings, key=lambda standing: -standing.rating)


def _won(verdicts: Array) -> Array:
    """Tabulate [M, M, N]: points of the row's model against the column's, 0 where there was no game."""
    models, _, questions, _ = verdicts.shape
    won = np.zeros((models, models, questions))
    for i, j in itertools.combinations(range(models), 2):
        points = outcomes(verdicts[i, j])
        won[i, j], won[j, i] = np.nan_to_num(points, nan=0.0), np.nan_to_num(1 - points, nan=0.0)
    return won


def _mean(values: NDArray) -> float:
    return float(np.mean(values)) if len(values) else math.nan
