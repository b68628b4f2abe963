"""Elo ratings: by hand, against the likelihood's equations, and under changes that must not matter."""

import math

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from g2d_jax.study.elo import elo as rate
from g2d_jax.study.elo import outcomes, ratings

NAN = float("nan")

scores = hnp.arrays(
    np.float64,
    st.tuples(st.integers(2, 5), st.integers(1, 8)),
    elements=st.sampled_from([0.0, 0.25, 1.0, NAN]),
)


def elo(names, table, **settings):
    return rate(list(names), outcomes(table), **settings)


def all_play(table):
    """The scores with one more problem, on which all draw: every player can be compared."""
    return np.pad(table, ((0, 0), (0, 1)), constant_values=0.5)


def test_wins_by_hand():
    table = [[1.0, 0.5, 0.0, NAN], [0.5, 0.5, NAN, 1.0], [0.0, 0.5, 0.5, 0.0]]
    # 0 and 1 share problems 0 (won) and 1 (drawn); 0 and 2 share 0, 1, 2; 1 and 2 share 0, 1, 3.
    np.testing.assert_array_equal(outcomes(table).sum(axis=2), [[0, 1.5, 1.5], [0.5, 0, 2.5], [1.5, 0.5, 0]])


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_two_players_have_a_closed_form(a, b):
    if a + b:
        first, second = ratings([[0, a], [b, 0]])
        assert first - second == pytest.approx(400 * math.log10((a + 0.5) / (b + 0.5)), abs=1e-6)
        assert first + second == pytest.approx(2000)


def test_literals():
    np.testing.assert_allclose(ratings([[0, 9.5], [0.5, 0]]), [1200, 800])  # 10 to 1 with the draw: 400 apart
    np.testing.assert_allclose(ratings([[0, 2, 0], [0, 0, 2], [2, 0, 0]]), [1000] * 3, atol=1e-9)  # a circle
    # Each beats the next 10 to 1 and the last but one 100 to 1, the virtual draws included: consistent strengths.
    chain = [[0, 9.5, 99.5], [0.5, 0, 9.5], [0.5, 0.5, 0]]
    np.testing.assert_allclose(ratings(chain), [1400, 1000, 600], atol=1e-6)


@examples(25)
@given(scores)
def test_chances_add_up_to_the_games_won(table):
    """At the maximum every player is expected to win what it has won: the likelihood's equations, solved exactly."""
    won = outcomes(all_play(table)).sum(axis=2)
    points, games = ratings(won), won + 0.5 * (1 - np.eye(len(table)))  # with a virtual draw for each pair
    chance = 1 / (1 + 10 ** ((points[None] - points[:, None]) / 400))
    np.testing.assert_allclose(((games + games.T) * chance).sum(axis=1), games.sum(axis=1), rtol=1e-9)


def test_far_apart_players_converge():
    points = ratings(np.triu(np.full((8, 8), 1e6), 1))  # each always beats all after it
    assert (np.diff(points) < 0).all()
    assert points.mean() == pytest.approx(1000)
    assert (np.diff(ratings(np.diag(np.full(7, 1e6), 1))) < 0).all()  # each meets the next only


@examples(25)
@given(scores, st.randoms(use_true_random=False))
def test_order_does_not_matter_and_of_scores_it_is_all_that_counts(table, random):
    table = all_play(table)
    names = [f"policy {p}" for p in range(len(table))]
    order, problems = list(range(len(table))), list(range(table.shape[1]))
    random.shuffle(order)
    random.shuffle(problems)
    found = elo(names, table, samples=20)
    expected = {rating.name: rating for rating in found}
    for got in elo([names[p] for p in order], table[order], samples=20):  # intervals too: the same problems are drawn
        same = expected[got.name]
        assert (got.rating, got.low, got.high) == pytest.approx((same.rating, same.low, same.high), abs=1e-5)
        assert got.games == same.games
    for got in elo(names, table[:, problems], samples=20):
        assert got.rating == pytest.approx(expected[got.name].rating, abs=1e-5)
    assert elo(names, table**2 + 3, samples=20) == found
    for got in elo(names, -table, samples=20):
        assert got.rating - 1000 == pytest.approx(1000 - expected[got.name].rating, abs=1e-5)


def test_known_strengths_are_found_and_covered():
    rng = np.random.default_rng(0)
    strengths = np.array([1.0, 0.5, 0.0, -1.5])
    # Gumbel noise on the log-strengths: the greater of two is distributed as in Bradley and Terry's model.
    got = elo("abcd", strengths[:, None] + rng.gumbel(size=(4, 3000)), samples=200)
    expected = 1000 + 400 / math.log(10) * (strengths - strengths.mean())
    np.testing.assert_allclose([r.rating for r in got], expected, atol=20)
    assert all(r.low < r.rating < r.high and r.high - r.low < 60 for r in got)
    assert sum(r.low <= e <= r.high for r, e in zip(got, expected, strict=True)) >= 3
    assert {r.games for r in got} == {9000}


def test_intervals_narrow_with_problems_and_repeat_with_the_seed():
    table = np.random.default_rng(1).random((2, 400))
    few, many = elo("ab", table[:, :100])[0], elo("ab", table)[0]
    # One game has the variance 1/4 and a slope of 1/4 for a log-odds; a player moves by half the difference.
    expected = 2 * 1.96 * math.sqrt(4 / 400) * 400 / math.log(10) / 2
    assert many.high - many.low == pytest.approx(expected, rel=0.15)
    assert few.high - few.low > 1.6 * (many.high - many.low)
    assert elo("ab", table, seed=5) == elo("ab", table, seed=5) != elo("ab", table, seed=6)


def test_unscored_problems_are_no_games():
    table = np.array([[1.0, 0.0, 1.0, 0.5], [0.0, 0.0, NAN, 1.0], [0.0, 1.0, 0.0, NAN]])
    got = elo("abc", table, samples=50)
    # On problem 2 only a and c play, on 3 only a and b, on 0 and 1 all do.
    assert [r.games for r in got] == [6, 5, 5]
    alone = np.pad(table, ((0, 0), (0, 2)), constant_values=NAN)
    alone[1, 4] = 1.0  # solved by b, tried by nobody else
    assert elo("abc", alone, samples=50) == got


def test_players_may_be_compared_through_a_third():
    a, b, c = elo("abc", [[1, 1, NAN, NAN], [0, 0, 1, 1], [NAN, NAN, 0, 0]], samples=20)
    assert a.rating > b.rating > c.rating
    assert (a.games, b.games, c.games) == (2, 4, 2)


@pytest.mark.parametrize(
    ("names", "table", "message"),
    [
        ("ab", [[1, NAN], [NAN, 1]], "b cannot be compared with a: there is no common problem"),
        ("ab", np.zeros((2, 0)), "no common problem"),
        ("abcd", [[1, NAN], [0, NAN], [NAN, 1], [NAN, 0]], "c, d cannot be compared with a"),
    ],
)
def test_players_without_games_are_named(names, table, message):
    with pytest.raises(ValueError, match=message):
        elo(names, table)
