"""The gain predicted of offline DPO: the rule's values, what it depends on, and where it was not calibrated."""

import math
from dataclasses import replace

import numpy as np
import pytest

from g2d_jax.config import Collect, Offline, Optimizer
from g2d_jax.study import gain
from g2d_jax.study.gain import Gain, tilted

OFFLINE = Offline(beta=1.0, optimizer=Optimizer(1e-4, schedule="cosine"))
STUDIED = Gain(1024, Collect(), OFFLINE)
RATES = np.array([0.0, 0.125, 0.25, 0.5, 0.5, 0.75, 1.0, math.nan])


@pytest.mark.parametrize(
    ("rates", "shift", "expected"),
    [
        ([0.0, 1.0], 5.0, [0.0, 1.0]),  # nothing to tell apart, nothing to gain
        ([0.5], math.log(3), [0.75]),
        ([0.25, 0.5], math.log(3), [0.5, 0.75]),
        ([0.25, math.nan], 0.0, [0.25, math.nan]),
        ([0.9, 0.1], 100.0, [1.0, 1.0]),
    ],
)
def test_odds_are_multiplied(rates: list[float], shift: float, expected: list[float]) -> None:
    assert tilted(rates, shift) == pytest.approx(np.array(expected), nan_ok=True)


def test_updates_are_batches_of_disjoint_pairs() -> None:
    pairs = np.array([0, 1, 2, 4, 4, 2, 0, math.nan])
    assert STUDIED.updates(RATES) == pytest.approx(pairs * 1024 / 64, nan_ok=True)
    few = replace(STUDIED, collect=Collect(pairs_per_prompt=1), offline=replace(OFFLINE, epochs=3, batch_size=8))
    assert few.updates(RATES) == pytest.approx(np.minimum(pairs, 1) * 1024 * 3 / 8, nan_ok=True)
    capped = replace(STUDIED, collect=Collect(max_pairs=640))
    assert capped.updates(RATES) == pytest.approx(pairs * 0 + 10, nan_ok=True)
    assert replace(STUDIED, collect=Collect(max_pairs=10**6)).updates(RATES)[3] == 64


def test_the_shift_is_the_rules() -> None:
    updates, wrong = 13 / 7 * 1024 / 64, 1 - 3.125 / 7
    assert STUDIED.shift(RATES) == pytest.approx(gain.SHIFT * updates * wrong)
    gentle = replace(STUDIED, offline=replace(OFFLINE, optimizer=Optimizer(1e-5, schedule="cosine")))
    assert gentle.shift(RATES, factor=2) == pytest.approx(2 * gain.SHIFT * updates * wrong * 10**-gain.POWER)
    assert STUDIED.shift(np.stack([RATES, 0 * RATES])) == pytest.approx([STUDIED.shift(RATES), 0])


def test_values_have_the_prediction_as_their_mean_and_its_slope_by_prompt() -> None:
    rng = np.random.default_rng(0)
    rates = rng.binomial(8, rng.uniform(0.05, 0.95, 64)) / 8

    def value(rates: np.ndarray) -> float:
        return float(tilted(rates.mean(), STUDIED.shift(rates)))

    assert STUDIED.values(rates).mean() == pytest.approx(value(rates), rel=1e-12)
    without = [value(np.delete(rates, i)) for i in range(64)]  # a jackknife's error is the delta method's
    error = math.sqrt(63 / 64 * np.sum((np.array(without) - np.mean(without)) ** 2))
    assert STUDIED.values(rates).std(ddof=1) / 8 == pytest.approx(error, rel=0.03)
    assert np.isnan(STUDIED.values(RATES)).tolist() == np.isnan(RATES).tolist()


@pytest.mark.parametrize("same", [0.0, 1.0])
def test_a_policy_without_pairs_gains_nothing(same: float) -> None:
    assert STUDIED.values(np.full(4, same)) == pytest.approx(np.full(4, same))
    assert STUDIED.prolonged(np.full(4, same)) == 0
    low, high = STUDIED.interval(np.full(4, same))
    assert low == -gain.SLACK and high == pytest.approx(0.0 if same else gain.SLACK)


def test_the_interval_holds_the_prediction_and_prolonging_adds_less() -> None:
    low, high = STUDIED.interval(RATES)
    added = float(np.nanmean(STUDIED.values(RATES) - RATES))
    assert low + gain.SLACK < added < high - gain.SLACK
    assert 0 < STUDIED.prolonged(RATES) < added


def test_what_no_study_had_is_told() -> None:
    assert list(STUDIED.outside(RATES, 140_480)) == []
    (line,) = STUDIED.outside(RATES, 3_155_712)
    assert line == "learning_rate is 0.0001: at 0.0001 DPO took up to 46 points from a model of 3,155,712 parameters"
    other = replace(
        STUDIED,
        prompts=2048,
        collect=Collect(num_generations=16),
        offline=replace(OFFLINE, beta=0.1, batch_size=128, optimizer=Optimizer(1e-6)),
    )
    assert list(other.outside(RATES, 7_615_616_512)) == [
        "beta is 0.1, in the studies 1.0",
        "optimizer.schedule is constant, in the studies cosine",
        "collect.num_generations is 16, in the studies 8",
        "learning_rate is 1e-06, in the studies 1e-05 to 0.0001",
        "batch_size is 128, in the studies 32 to 64",
        "updates is 41.1429, in the studies 0 to 40",
        "parameters is 7.61562e+09, in the studies 140480 to 3.15571e+06",
    ]
