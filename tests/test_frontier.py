"""Accuracy against compute: intervals by hand and by how often they cover, lines by hand, and
nothing extrapolated."""

import functools
import math

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from g2d_jax.study.frontier import interpolate, mean_interval, seed_spread
from g2d_jax.study.stats import accuracy, t_quantile

NAN = float("nan")

tables = hnp.arrays(
    np.float64,
    hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=5),
    elements=st.sampled_from([-0.5, 0.0, 0.25, 1.0, NAN]),
)


def half(interval):
    return (interval.high - interval.low) / 2


def ends(interval):
    return interval.mean, interval.low, interval.high


def test_the_mean_is_that_of_the_runs_means():
    got = mean_interval([[1, 0, NAN, NAN], [1, 1, 1, NAN], [NAN, NAN, NAN, NAN]])
    assert got.mean == 0.75  # of 1/2 and 1; not 4/5
    assert (got.seeds, got.problems) == (2, 3)
    nothing = mean_interval([[NAN, NAN]])
    assert (nothing.seeds, nothing.problems) == (0, 0)
    assert all(math.isnan(x) for x in ends(nothing))


def test_an_interval_by_hand():
    # Runs' means 0.2 and 0.6: error 0.2, t 12.706. Problems' means 0.2, 0.4, 0.6: error 0.2 /
    # sqrt(3), t 4.3027.
    got = mean_interval([[0.0, 0.2, 0.4], [0.4, 0.6, 0.8]])
    expected = math.hypot(12.7062 * 0.2, 4.30265 * 0.2 / math.sqrt(3))  # 2.5893
    assert ends(got) == pytest.approx((0.4, 0.4 - expected, 0.4 + expected), rel=1e-5)


def test_an_interval_by_hand_where_a_problem_is_not_scored():
    # Runs' means 1/2 and 1: error 1/4. Problems' shares of the error: (1/2) / (2 * 2), its
    # opposite, and 0.
    got = mean_interval([[1, 0, NAN], [1, 1, 1]])
    between_problems = math.sqrt(3 / 2 * 2 * 0.125**2)
    assert half(got) == pytest.approx(
        math.hypot(12.7062 * 0.25, 4.30265 * between_problems), rel=1e-5
    )


def test_one_run_has_the_interval_of_its_problems():
    got = mean_interval([[0, 1, 1, 0]])
    assert ends(got) == pytest.approx(
        (0.5, 0.5 - 3.18245 / math.sqrt(12), 0.5 + 3.18245 / math.sqrt(12)), rel=1e-5
    )
    values = np.random.default_rng(0).random((1, 400))
    assert half(mean_interval(values)) == pytest.approx(
        t_quantile(400) * accuracy(values.T).sem_clustered
    )


def test_copies_of_a_run_give_no_more_certainty():
    values = np.random.default_rng(0).random((1, 50))
    one, many = mean_interval(values), mean_interval(np.repeat(values, 20, axis=0))
    assert half(many) == pytest.approx(half(one))  # not a fifth: problems are shared
    assert (many.seeds, many.problems) == (20, 50)


def test_one_problem_has_no_interval():
    for values in ([[0.5]], [[0.5], [1.0]], [[0.5, NAN], [1.0, NAN]]):
        got = mean_interval(values)
        assert got.mean in (0.5, 0.75) and math.isnan(got.low) and math.isnan(got.high)


def test_an_interval_is_cut_at_what_a_mean_can_be():
    values = [[0.2, 0.4], [0.8, 1.0]]
    assert ends(mean_interval(values, limits=(0, 1))) == pytest.approx((0.6, 0.0, 1.0))
    narrow = mean_interval([[0.5, 0.50001], [0.5, 0.50001]])
    assert mean_interval([[0.5, 0.50001], [0.5, 0.50001]], limits=(0, 1)) == narrow
    assert math.isnan(mean_interval([[0.5]], limits=(0, 1)).low)


def test_a_higher_level_is_wider():
    values = np.random.default_rng(3).random((4, 30))
    widths = [half(mean_interval(values, level=level)) for level in (0.5, 0.9, 0.95, 0.99)]
    assert widths == sorted(widths) and widths[0] < 0.5 * widths[2]


@pytest.mark.parametrize(
    ("count", "quantile"), [(2, 12.7062), (3, 4.30265), (5, 2.77645), (10, 2.26216), (1e6, 1.95997)]
)
def test_students_t(count, quantile):
    assert t_quantile(count) == pytest.approx(quantile, rel=1e-5)
    assert math.isnan(t_quantile(1)) and math.isnan(t_quantile(NAN))


@examples(60)
@given(tables, st.randoms())
def test_what_leaves_an_interval_alone_and_what_moves_it(values, random):
    got = mean_interval(values)
    padded = np.pad(values, ((1, 0), (0, 2)), constant_values=NAN)
    assert repr(mean_interval(padded)) == repr(got)  # as text, where NaN equals NaN
    rows, columns = (random.sample(range(size), size) for size in values.shape)
    assert ends(mean_interval(values[rows][:, columns])) == pytest.approx(ends(got), nan_ok=True)
    for scale, shift in ((1, 2), (4, 0), (-3, 1)):
        moved = mean_interval(scale * values + shift)
        low, high = sorted((scale * got.low + shift, scale * got.high + shift))
        assert ends(moved) == pytest.approx((scale * got.mean + shift, low, high), nan_ok=True)
    if got.problems > 1:
        assert got.low <= got.mean <= got.high


@examples(60)
@given(hnp.arrays(np.float64, (3, 4), elements=st.sampled_from([-0.5, 0.0, 0.25, 1.0])))
def test_seeds_only_ever_widen_the_interval_over_problems(values):
    assert (
        half(mean_interval(values))
        >= half(mean_interval(values.mean(axis=0, keepdims=True))) - 1e-12
    )


SPREAD = 2.0
"""Standard deviation of problems' difficulty, in logits."""


@functools.cache
def chance(mean, spread):
    """The mean of a logistic of a normal variable, by quadrature."""
    points, weights = np.polynomial.hermite_e.hermegauss(80)
    return float(weights @ (1 / (1 + np.exp(-mean - spread * points))) / weights.sum())


def drawn(kind, rng, runs, problems, seed_spread):
    """A table [runs, problems] of made-up accuracies or differences, and the mean that its interval
    is to cover."""
    seeds = rng.normal(0, seed_spread, (runs, 1))
    difficulty = rng.normal(0.5, SPREAD, (1, problems))
    after = rng.binomial(4, 1 / (1 + np.exp(-difficulty - seeds - 0.3))) / 4
    before = rng.binomial(4, 1 / (1 + np.exp(-difficulty)), (runs, problems)) / 4
    expected = chance(0.8, math.hypot(SPREAD, seed_spread))
    match kind:
        case "answers":
            return after, expected
        case "not all scored":
            return np.where(rng.random(after.shape) < 0.1, NAN, after), expected
        case "paired differences":
            return after - before, expected - chance(0.5, SPREAD)
        case "noise alone":
            return seeds + rng.normal(0, 0.3, (runs, problems)), 0.0
    raise ValueError(kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["answers", "not all scored", "paired differences", "noise alone"])
@pytest.mark.parametrize(("runs", "spread", "problems"), [(2, 1.0, 20), (5, 0.0, 300)])
def test_how_often_an_interval_covers(runs, kind, spread, problems):
    """Of 2,000 made-up studies whose seeds differ not at all, little or much: 0.93 is four errors
    below 0.95."""
    rng = np.random.default_rng([runs, problems, round(10 * spread)])
    covered = []
    for _ in range(2000):
        values, expected = drawn(kind, rng, runs, problems, spread)
        got = mean_interval(values)
        covered.append(got.low <= expected <= got.high)
    print(
        f"coverage: {kind}, spread {spread}, {runs} runs, {problems} problems: "
        f"{np.mean(covered):.3f}"
    )
    assert np.mean(covered) >= 0.93


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "most"), [("answers", 1.25), ("noise alone", 1.75)])
def test_how_wide_an_interval_is_where_seeds_do_not_differ(kind, most):
    """Against the mean's true error: noise alone counts twice, and t of five seeds is 1.4 times the
    normal's."""
    rng = np.random.default_rng(0)
    found = [mean_interval(drawn(kind, rng, 5, 300, 0.0)[0]) for _ in range(1000)]
    error = np.std([one.mean for one in found])
    assert 1.0 < np.median([half(one) for one in found]) / (1.96 * error) < most


def test_seed_spread_by_hand():
    # of 1/2, 1 and 0
    assert seed_spread([[1, 0, NAN], [1, 1, 1], [NAN, NAN, NAN], [0, 0, 0]]) == 0.5
    assert math.isnan(seed_spread([[1, 0]]))
    assert math.isnan(seed_spread(np.zeros((2, 0))))


COSTS = np.array([1e18, 3e18, 7e18])
VALUES = np.array([[0.0, 0.5, NAN], [0.4, 0.5, 1.0], [0.4, 0.1, 0.0]])


def test_no_line_joins_budgets_that_do_not_follow_each_other():
    """The third of four budgets cost less than the second."""
    values = np.array([[0.0], [0.8], [0.2], [1.0]])
    costs = np.array([1.0, 3.0, 2.0, 4.0])
    for cost, expected in ((2.0, 0.4), (1.5, 0.2), (3.0, 0.8), (3.5, 0.8)):
        np.testing.assert_allclose(interpolate(costs, values, cost), [expected])


def test_lines_between_points_and_nothing_beyond():
    np.testing.assert_allclose(interpolate(COSTS, VALUES, 1.5e18), [0.1, 0.5, NAN])
    np.testing.assert_allclose(interpolate(COSTS, VALUES, 6e18), [0.4, 0.2, 0.25])
    for cost, values in zip(COSTS, VALUES, strict=True):
        np.testing.assert_array_equal(interpolate(COSTS, VALUES, cost), values)
    assert interpolate(COSTS, VALUES, np.nextafter(1e18, 0)) is None
    assert interpolate(COSTS, VALUES, np.nextafter(7e18, 1e19)) is None
    np.testing.assert_array_equal(
        interpolate(np.array([2.0]), np.array([[0.5, 1.0]]), 2.0), [0.5, 1.0]
    )
