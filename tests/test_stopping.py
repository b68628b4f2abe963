"""The rule that ends a warm-up: what it measures, and when it finds that it has been enough."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from g2d_jax.stopping import RECENT, Forecast, forecast, tilted, trend, window

RATES = st.lists(st.floats(0, 1), min_size=1, max_size=20)


@pytest.mark.parametrize(
    ("rates", "shift", "expected"),
    [
        ([0.0, 1.0], 5.0, 0.5),  # nothing to tell apart, nothing to gain
        ([0.5], math.log(3), 0.75),
        ([0.25, 0.5], math.log(3), (0.5 + 0.75) / 2),
        ([0.25, math.nan], 0.0, 0.25),
        ([0.9, 0.1], 100.0, 1.0),
    ],
)
def test_odds_are_multiplied(rates: list[float], shift: float, expected: float) -> None:
    assert tilted(rates, shift) == pytest.approx(expected)


@given(rates=RATES, shift=st.floats(0, 20))
def test_a_tilt_gains_only_where_responses_differ(rates: list[float], shift: float) -> None:
    gain = tilted(rates, shift) - tilted(rates, 0.0)
    assert -1e-12 <= gain <= np.mean([0 < rate < 1 for rate in rates]) + 1e-12
    assert tilted(rates, shift) <= tilted(rates, shift + 1) + 1e-12


def test_no_rates_and_wrong_ones() -> None:
    assert math.isnan(tilted([], 1.0)) and math.isnan(tilted([math.nan], 1.0))
    with pytest.raises(ValueError, match="between 0 and 1"):
        tilted([0.5, 1.5], 1.0)


def test_a_straight_line_has_its_slope_and_no_error() -> None:
    slope, error = trend(0.2 + 0.01 * np.arange(12))
    assert slope == pytest.approx(0.01) and error == pytest.approx(0.0, abs=1e-12)
    gaps = np.where(np.arange(12) % 3 == 0, np.nan, 0.2 + 0.01 * np.arange(12))
    assert trend(gaps)[0] == pytest.approx(0.01)
    with pytest.raises(ValueError, match="at least three steps with a verdict, there are 2"):
        trend([0.1, math.nan, 0.2])


def test_the_error_is_that_of_a_regression() -> None:
    rng = np.random.default_rng(0)
    x = np.arange(30)
    found = np.array([trend(0.4 + 0.005 * x + rng.normal(0, 0.03, 30)) for _ in range(2000)])
    true = 0.03 / math.sqrt(float(np.square(x - x.mean()).sum()))
    assert found[:, 0].mean() == pytest.approx(0.005, abs=4 * true / math.sqrt(2000))
    assert found[:, 0].std() == pytest.approx(true, rel=0.06)
    assert np.sqrt(np.mean(found[:, 1] ** 2)) == pytest.approx(true, rel=0.06)


def test_the_slope_is_taken_over_the_later_half() -> None:
    assert [window(steps) for steps in (1, 5, 10, 11, 19, 20, 21, 40, 41)] == [1, 5, 10, 10, 10, 10, 11, 20, 21]
    accuracies = np.concatenate([np.linspace(0.1, 0.9, 20), np.full(20, 0.9)])
    found = forecast(accuracies, accuracies, step_flops=1.0, offline_flops=1.0)
    assert (found.step, found.slope, found.gain) == (40, pytest.approx(0.0, abs=1e-12), 0.0)


def test_what_the_rule_sees() -> None:
    accuracies = 0.3 + 0.01 * np.arange(20)
    reachable = accuracies + np.linspace(0.4, 0.02, 20)
    found = forecast(accuracies, reachable, step_flops=2.0, offline_flops=30.0)
    assert found.accuracy == pytest.approx(accuracies[-RECENT:].mean())
    assert found.slope == pytest.approx(0.01)
    assert found.gain == pytest.approx(np.linspace(0.4, 0.02, 20)[-RECENT:].mean())
    assert (found.step_flops, found.offline_flops) == (2.0, 30.0)


@pytest.mark.parametrize(
    ("slope", "error", "gain", "step_flops", "offline_flops", "enough"),
    [
        (0.01, 0.0, 0.1, 1.0, 20.0, False),  # 0.01 a FLOP against 0.005
        (0.01, 0.0, 0.1, 1.0, 10.0, True),  # as much: then offline
        (0.01, 0.0, 0.1, 2.0, 20.0, True),
        (0.004, 0.002, 0.1, 1.0, 20.0, False),  # within one standard error online is still the better buy
        (0.002, 0.002, 0.1, 1.0, 20.0, True),
        (0.001, 0.0, 0.0, 1.0, 20.0, False),  # nothing to gain offline: go on as long as anything is gained
        (-0.001, 0.0005, 0.0, 1.0, 20.0, True),
    ],
)
def test_the_warm_up_ends_when_offline_training_is_the_better_buy(
    slope: float, error: float, gain: float, step_flops: float, offline_flops: float, enough: bool
) -> None:
    assert Forecast(10, 0.5, slope, error, gain, step_flops, offline_flops).enough is enough


def test_a_saturating_curve_is_enough_once_and_for_all() -> None:
    """Without noise: from the first step that is enough all later ones are, and a dearer offline stage puts it off."""
    steps = np.arange(200)
    accuracies = 0.9 - 0.5 * np.exp(-steps / 30)
    reachable = accuracies + 0.1

    def ends(offline_flops: float) -> list[bool]:
        costs = {"step_flops": 1.0, "offline_flops": offline_flops}
        return [forecast(accuracies[:k], reachable[:k], **costs).enough for k in range(20, 200)]

    cheap, dear = ends(20.0), ends(60.0)
    assert cheap.index(True) < dear.index(True)
    assert all(cheap[cheap.index(True) :]) and all(dear[dear.index(True) :])


def test_steps_without_a_verdict_and_costs_that_are_none() -> None:
    accuracies = np.full(20, 0.5)
    accuracies[::2] = np.nan
    found = forecast(accuracies, accuracies + 0.1, step_flops=1.0, offline_flops=1.0)
    assert (found.accuracy, found.gain) == (pytest.approx(0.5), pytest.approx(0.1))
    for step, offline in ((0.0, 1.0), (1.0, 0.0), (math.nan, 1.0), (1.0, math.nan)):
        with pytest.raises(ValueError, match="costs must be positive"):
            forecast(accuracies, accuracies, step_flops=step, offline_flops=offline)
