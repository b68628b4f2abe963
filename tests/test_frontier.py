"""Accuracy against compute: intervals against enumeration and formula, lines by hand, and nothing extrapolated."""

import itertools
import math

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from g2d_jax.study.frontier import bootstrap, interpolate, seed_spread
from g2d_jax.study.stats import accuracy

NAN = float("nan")

tables = hnp.arrays(
    np.float64,
    hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=5),
    elements=st.sampled_from([-0.5, 0.0, 0.25, 1.0, NAN]),
)


def test_the_mean_is_that_of_the_runs_means():
    got = bootstrap([[1, 0, NAN, NAN], [1, 1, 1, NAN], [NAN, NAN, NAN, NAN]], samples=50)
    assert got.mean == 0.75  # of 1/2 and 1; not 4/5
    assert (got.seeds, got.problems) == (2, 3)
    nothing = bootstrap([[NAN, NAN]])
    assert (nothing.seeds, nothing.problems) == (0, 0)
    assert all(math.isnan(x) for x in (nothing.mean, nothing.low, nothing.high))


def enumerated(table):
    """The statistic of every equally likely draw of runs and problems, by plain loops."""
    runs, problems = table.shape
    for rows in itertools.product(range(runs), repeat=runs):
        for columns in itertools.product(range(problems), repeat=problems):
            means = [[table[r, n] for n in columns if not math.isnan(table[r, n])] for r in rows]
            means = [sum(row) / len(row) for row in means if row]
            if means:
                yield sum(means) / len(means)


@pytest.mark.parametrize(
    "table",
    [
        [[0.0, 0.1, 0.7], [0.2, 0.9, 0.4]],
        [[0.0, NAN, 0.7], [NAN, 0.9, 0.4]],
        [[0.3, 0.1, 0.8, 0.9]],
        [[0.5], [0.1], [0.2]],
    ],
)
@pytest.mark.parametrize("level", [0.5, 0.9])
def test_the_interval_is_that_of_all_draws(table, level):
    table = np.array(table)
    every = np.array(list(enumerated(table)))
    got = bootstrap(table, samples=20_000, level=level)
    for value, share in ((got.low, (1 - level) / 2), (got.high, (1 + level) / 2)):
        # Draws are discrete: a quantile is where their distribution passes the share, 0.01 being noise of the samples.
        assert (every < value - 1e-9).mean() <= share + 0.01
        assert (every <= value + 1e-9).mean() >= share - 0.01


def test_one_run_has_the_interval_of_its_problems_and_copies_of_it_no_more_certainty():
    values = np.random.default_rng(0).random((1, 400))
    one, fifty = bootstrap(values), bootstrap(np.repeat(values, 50, axis=0))
    assert one.high - one.low == pytest.approx(2 * 1.96 * accuracy(values.T).sem_clustered, rel=0.06)
    assert fifty.high - fifty.low == pytest.approx(one.high - one.low, rel=0.06)  # not a seventh: problems are shared
    assert (fifty.seeds, fifty.problems) == (50, 400)


def test_runs_that_differ_widen_the_interval():
    rng = np.random.default_rng(1)
    values = rng.random((1, 300)) + rng.normal(0, 0.1, (10, 1))
    got, without = bootstrap(values), bootstrap(values - values.mean(axis=1, keepdims=True))
    spread = seed_spread(values)
    problems = (without.high - without.low) / 2
    assert (got.high - got.low) / 2 == pytest.approx(math.hypot(problems, 1.96 * spread / 10**0.5 * 0.9**0.5), rel=0.08)


def test_two_runs_that_differ_give_no_more_than_themselves_and_a_seed_the_same_each_time():
    got = bootstrap([[0.2] * 8, [0.6] * 8])
    assert (got.mean, got.low, got.high) == pytest.approx((0.4, 0.2, 0.6))
    values = np.random.default_rng(2).random((5, 64))
    assert bootstrap(values, seed=3) == bootstrap(values, seed=3) != bootstrap(values, seed=4)


@examples(30)
@given(tables)
def test_intervals_stay_among_the_values_and_what_is_not_scored_changes_nothing(values):
    got = bootstrap(values, samples=60)
    more = bootstrap(np.pad(values, ((1, 0), (0, 2)), constant_values=NAN), samples=60)
    assert repr(more) == repr(got)  # as text, where NaN equals NaN
    if got.seeds:
        least, greatest = np.nanmin(values) - 1e-12, np.nanmax(values) + 1e-12
        assert least <= got.mean <= greatest
        assert math.isnan(got.low) or least <= got.low <= got.high <= greatest
        shifted, scaled = bootstrap(values + 2, samples=60), bootstrap(4 * values, samples=60)
        for name in ("mean", "low", "high"):
            assert getattr(shifted, name) == pytest.approx(getattr(got, name) + 2, nan_ok=True)
            assert getattr(scaled, name) == pytest.approx(getattr(got, name) * 4, nan_ok=True)


def test_seed_spread_by_hand():
    assert seed_spread([[1, 0, NAN], [1, 1, 1], [NAN, NAN, NAN], [0, 0, 0]]) == 0.5  # of 1/2, 1 and 0
    assert math.isnan(seed_spread([[1, 0]]))
    assert math.isnan(seed_spread(np.zeros((2, 0))))


COSTS = np.array([1e18, 3e18, 7e18])
VALUES = np.array([[0.0, 0.5, NAN], [0.4, 0.5, 1.0], [0.4, 0.1, 0.0]])


def test_lines_between_points_and_nothing_beyond():
    np.testing.assert_allclose(interpolate(COSTS, VALUES, 1.5e18), [0.1, 0.5, NAN])
    np.testing.assert_allclose(interpolate(COSTS, VALUES, 6e18), [0.4, 0.2, 0.25])
    for cost, values in zip(COSTS, VALUES, strict=True):
        np.testing.assert_array_equal(interpolate(COSTS, VALUES, cost), values)
    assert interpolate(COSTS, VALUES, np.nextafter(1e18, 0)) is None
    assert interpolate(COSTS, VALUES, np.nextafter(7e18, 1e19)) is None
    np.testing.assert_array_equal(interpolate(np.array([2.0]), np.array([[0.5, 1.0]]), 2.0), [0.5, 1.0])
