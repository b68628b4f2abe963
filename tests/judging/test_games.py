"""Who wins a game of two verdicts, and what many games make of it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from g2d_jax.judging.games import match, outcomes, rank

WIN, TIE, LOSS, UNREAD = 1.0, 0.5, 0.0, math.nan


def test_a_game_is_won_only_if_both_orders_agree() -> None:
    verdicts = np.array(
        [[WIN, WIN], [LOSS, LOSS], [WIN, LOSS], [LOSS, WIN], [TIE, TIE], [WIN, TIE], [WIN, UNREAD], [UNREAD, UNREAD]]
    )
    np.testing.assert_array_equal(outcomes(verdicts), [1, 0, 0.5, 0.5, 0.5, 0.5, np.nan, np.nan])
    game = match("a", "b", verdicts)
    assert (game.wins, game.draws, game.losses, game.unread) == (1, 4, 1, 2)
    assert game.win_rate == 0.5 and game.agreed == 0.5
    assert game.sem == pytest.approx(math.sqrt(2 * 0.25 / 5 / 6))
    assert game.first_place == pytest.approx(5 / 9)  # of 9 decided verdicts, 5 name the answer in the first place


def table(points: list[list[float]]) -> np.ndarray:
    """[3, 3, N, 2] of three models, whose pairs both orders judge alike."""
    verdicts = np.full((3, 3, len(points[0]), 2), np.nan)
    for (i, j), pair in zip([(0, 1), (0, 2), (1, 2)], points, strict=True):
        verdicts[i, j] = np.array(pair)[:, None]
    return verdicts


def test_ratings_of_three_models() -> None:
    standings = rank(["a", "b", "c"], table([[0, 0, 0.5], [0, 0, 0], [0, 0.5, 0.5]]), [1.0, 2.0, 3.0])
    assert [standing.name for standing in standings] == ["c", "b", "a"]
    assert [standing.games for standing in standings] == [6, 6, 6]
    assert [standing.win_rate for standing in standings] == pytest.approx([5 / 6, 3.5 / 6, 0.5 / 6])
    assert sum(standing.rating for standing in standings) == pytest.approx(3000)
    assert all(standing.low <= standing.rating <= standing.high for standing in standings)
    assert standings[0].mean_length == 3.0


def test_unread_games_count_for_nobody() -> None:
    standings = rank(["a", "b", "c"], table([[1, np.nan], [np.nan, np.nan], [1, 1]]), [1.0] * 3)
    assert {standing.name: standing.games for standing in standings} == {"a": 1, "b": 3, "c": 2}
    with pytest.raises(ValueError, match="no verdict on a can be read"):
        rank(["a", "b", "c"], table([[np.nan], [np.nan], [1]]), [1.0] * 3)
