"""The rule that ends a warm-up: what it measures, when it finds that it has been enough; how well, by simulation."""

import functools
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest

from g2d_jax.config import Collect, Offline, Optimizer
from g2d_jax.study.gain import FACTOR, Gain
from g2d_jax.study.stopping import MIN_PROBES, PROBES_IN_A_ROW, Forecast, ends, forecast, trend, window

OFFLINE = Gain(1024, Collect(), Offline(beta=1.0, optimizer=Optimizer(1e-4, schedule="cosine")))
"""That of chains."""
NONE = replace(OFFLINE, offline=Offline(optimizer=Optimizer(0.0)))


def test_prompts_that_rise_alike_have_their_slope_and_no_error() -> None:
    steps = [10, 15, 20, 30]
    values = 0.2 + 0.01 * np.array(steps)[:, None] + np.linspace(-0.2, 0.2, 5)  # however much the prompts differ
    assert trend(steps, values) == (pytest.approx(0.01), pytest.approx(0.0, abs=1e-12))
    values[1, 2] = math.nan
    assert trend(steps, values) == (pytest.approx(0.01), pytest.approx(0.0, abs=1e-12))


def test_the_error_is_how_much_the_slope_varies_between_samples_of_prompts() -> None:
    rng = np.random.default_rng(0)
    steps = np.arange(0, 30, 5)
    found = []
    for _ in range(2000):  # prompts differ in their level, in how fast they rise, and by chance
        rates = 0.3 + 0.2 * rng.uniform(-1, 1, 32) + np.outer(steps, 0.004 * rng.uniform(0, 2, 32))
        found.append(trend(steps, rng.binomial(8, rates) / 8))
    slopes, errors = np.array(found).T
    assert slopes.mean() == pytest.approx(0.004, abs=4 * slopes.std() / math.sqrt(2000))
    assert np.sqrt(np.mean(errors**2)) == pytest.approx(slopes.std(), rel=0.06)


def test_the_slope_is_taken_over_the_later_half_of_the_steps() -> None:
    steps = list(range(0, 45, 5))
    assert [steps[window(steps[:n])] for n in (1, 3, 4, 5, 9)] == [[0], steps[:3], steps[1:4], steps[2:5], steps[4:9]]
    assert steps[window([0, 40])] == [0, 5] and MIN_PROBES == 3
    rates = np.concatenate([np.linspace(0.1, 0.9, 5), np.full(4, 0.9)])[:, None].repeat(2, axis=1)
    seen = forecast(steps, rates, steps, offline=NONE, offline_flops=1.0)
    assert (seen.step, seen.slope, seen.gain) == (40, pytest.approx(0, abs=1e-12), pytest.approx(0, abs=1e-12))


def test_what_a_probe_sees() -> None:
    steps, flops = [0, 10, 20, 30, 40], [5.0, 30.0, 60.0, 100.0, 150.0]
    rates = np.array([[0.2, 0.5], [0.3, 0.5], [0.4, 0.5], [0.5, 0.5], [0.6, 0.5]])
    seen = forecast(steps, rates, flops, offline=OFFLINE, offline_flops=70.0)
    values, recent = OFFLINE.values(rates, 1 / FACTOR), rates[3:]
    assert (seen.step, seen.accuracy) == (40, pytest.approx(0.525))
    assert seen.gain == pytest.approx(values[3:].mean() - 0.525)  # by the low end of what is predicted
    assert seen.prolonged == pytest.approx(OFFLINE.prolonged(recent, 1 / FACTOR).mean())
    assert seen.slope == pytest.approx((values[4] - values[2]).mean() / 20)  # of the value, over both prompts
    assert seen.slope < 0.01 / 2  # as accuracy alone has it: its rise leaves offline training less to add
    slopes = (values[4] - values[2]) / 20
    assert seen.slope_error == pytest.approx(abs(slopes[0] - slopes[1]) / 2)
    assert (seen.step_flops, seen.offline_flops) == ((150 - 60) / 20, 70.0)


@pytest.mark.parametrize(
    ("slope", "error", "prolonged", "step_flops", "offline_flops", "enough"),
    [
        (0.01, 0.0, 0.1, 1.0, 20.0, False),  # longer offline training buys 0.005 for the price of a step
        (0.01, 0.0, 0.1, 1.0, 10.0, True),  # as much: then offline
        (0.01, 0.0, 0.1, 2.0, 20.0, True),
        (0.004, 0.0006, 0.1, 1.0, 20.0, False),  # two errors above it may be more
        (0.004, 0.0005, 0.1, 1.0, 20.0, True),
        (-0.001, 0.0031, 0.1, 1.0, 20.0, False),
        (-0.001, 0.003, 0.1, 1.0, 20.0, True),
        (0.001, 0.0, 0.0, 1.0, 20.0, False),  # nothing to gain offline: go on as long as anything is gained
        (0.0, 0.0, 0.0, 1.0, 20.0, True),
    ],
)
def test_a_probe_finds_it_enough_when_offline_training_is_the_better_buy(
    slope: float, error: float, prolonged: float, step_flops: float, offline_flops: float, enough: bool
) -> None:
    assert Forecast(10, 0.5, 0.2, prolonged, slope, error, step_flops, offline_flops).enough is enough


@pytest.mark.parametrize(
    ("enough", "steps", "ended"),
    [
        ("", [], False),
        ("y", [10], False),
        ("yn", [10, 15], False),
        ("yny", [10, 15, 20], False),
        ("nyy", [10, 15, 20], True),
        ("yy", [0, 5, 10, 20], True),  # of the first two nothing was forecast
        ("y-y", [0, 5, 10, 15, 20], False),  # a probe without a verdict between two is no row
        ("yy-", [0, 10, 20, 25], False),  # nor one behind them
    ],
)
def test_two_probes_in_a_row_end_it(enough: str, steps: list[int], ended: bool) -> None:
    probed = zip(enough, steps[len(steps) - len(enough) :], strict=True)
    forecasts = [Forecast(step, 0.5, 0.2, 0.1, float(e == "n"), 0.0, 1.0, 10.0) for e, step in probed if e != "-"]
    assert PROBES_IN_A_ROW == 2 and ends(forecasts, steps) is ended


def test_verdicts_that_are_missing() -> None:
    rates = np.full((5, 4), 0.5)
    rates[:, 0] = math.nan
    rates[3, 1] = math.nan
    seen = forecast(range(5), rates, range(5), offline=OFFLINE, offline_flops=1.0)
    assert (seen.accuracy, seen.slope, seen.slope_error) == (0.5, 0.0, 0.0)


# Simulated warm-ups: how much their end varies, and what it loses. Steps are the unit of compute.
#
# After k steps prompt i is answered correctly with probability sigmoid(mean(k) + spread(k) z_i), z_i normal; prompts
# learn at speeds that differ by 30 %. mean and spread are fitted to warm-up accuracies and shares of mixed prompts of
# the swept K of chains (docs/evidence-chains.md), the latter being pairs over 4,096. Offline training multiplies
# the odds by e^s. The swept accuracies after it give s = 1.20, 1.07, 0.92, 0.59, 0.22, -0.06, -0.13 at K = 0, 5, 10,
# 20, 40, 80, 160: a fall to `least`. At 0, or less, no offline training would be best from some K on; above, there
# is a best K. s grows with the compute of offline training, x in units of the planned stage, as 1 - e^(-1.6 x): of two
# offline runs from cold policies the one of 2.4 times the compute gained 30.9 points, not 25.8 (docs/spectrum.md).

STEPS, EVERY = 300, 5
PROBE_COST = 0.36  # of a step: the same responses, neither trained on
NORMAL = np.polynomial.hermite_e.hermegauss(41)


@dataclass(frozen=True)
class Curve:
    """speed: how many times as many steps as learning takes on chains. offline: steps the planned stage costs.

    start, rise, tail: of the mean in nats. spread, widening: at first, and by how much it grows. least: see above.
    """

    speed: float = 1.0
    offline: float = 33.0
    start: float = -0.56
    rise: float = 2.9
    spread: float = 0.77
    widening: float = 1.25
    least: float = 0.1

    def logits(self, k: np.ndarray, z: np.ndarray) -> np.ndarray:
        mean = self.start + self.rise * (1 - np.exp(-k / self.speed / 38))
        return mean + (self.spread + self.widening * (1 - np.exp(-((k / self.speed / 50) ** 1.5)))) * z

    def final(self, k: np.ndarray, left: np.ndarray) -> np.ndarray:
        """Accuracy after k steps and offline training for so much compute; both [K]."""
        trained = (1 - np.exp(-1.6 * left / self.offline)) / (1 - np.exp(-1.6))
        shift = (self.least + (1.2 - self.least) * np.exp(-k / self.speed / 25)) * trained
        return (1 / (1 + np.exp(-self.logits(k[:, None], NORMAL[0]) - shift[:, None]))) @ NORMAL[1] / NORMAL[1].sum()

    @functools.cached_property
    def best(self) -> float:
        """The K for which the planned offline stage is the best use of what K steps leave of the compute of both."""
        for k in range(1, 10 * STEPS):
            tried, total = np.arange(int(k + self.offline) + 1.0), k + self.offline
            if abs(int(np.argmax(self.final(tried, total - tried))) - k) <= 1:
                return float(k)
        return math.inf

    def regret(self, k: np.ndarray) -> np.ndarray:
        """Points of final accuracy that ends after k steps, [K], lose to `best`, at equal total compute.

        That is what `best` steps and the planned offline stage cost; whatever the steps and their probes leave of it is
        spent on offline training.
        """
        total, step = self.best + self.offline, 1 + PROBE_COST / EVERY
        k = np.minimum(k, total / step)
        return 100 * (self.final(np.array([self.best]), np.array([self.offline])) - self.final(k, total - k * step))


def simulated(curve: Curve, runs: int, prompts: int = 32, responses: int = 8, seed: int = 0) -> np.ndarray:
    """The K at which warm-ups of at most STEPS end, [runs]; each has its own prompts and its own chance."""
    steps, found = list(range(0, STEPS + 1, EVERY)), []
    flops = np.array(steps) + PROBE_COST * np.arange(1, len(steps) + 1)
    for run in range(runs):
        rng = np.random.default_rng([seed, run])
        k = np.outer(steps, np.exp(0.3 * rng.normal(size=prompts)))
        rates = rng.binomial(responses, 1 / (1 + np.exp(-curve.logits(k, rng.normal(size=prompts))))) / responses
        forecasts: list[Forecast] = []
        while not ends(forecasts, steps[: len(forecasts) + 4]) and len(forecasts) + 4 < len(
            steps
        ):  # the first probe that is asked is at 20 steps
            n = len(forecasts) + 5
            forecasts.append(forecast(steps[:n], rates[:n], flops[:n], offline=OFFLINE, offline_flops=curve.offline))
        found.append(forecasts[-1].step)
    return np.array(found)


SWEPT = np.array([0.0, 5, 10, 20, 40, 80, 160])
CURVES = [Curve(speed=speed, offline=33 * speed) for speed in (0.5, 1.0, 2.0)]


def test_the_simulated_task_is_the_one_that_was_swept() -> None:
    curve = Curve(least=0.0)
    before, after = (100 * curve.final(SWEPT, np.full(7, left)) for left in (0.0, curve.offline))
    assert before == pytest.approx([37.9, 44.0, 51.3, 62.0, 72.8, 78.0, 80.8], abs=1.7)
    assert after == pytest.approx([63.8, 66.5, 70.0, 72.8, 76.0, 77.3, 79.4], abs=1.7)
    p = 1 / (1 + np.exp(-curve.logits(SWEPT[:, None], NORMAL[0])))
    mixed = (1 - p**8 - (1 - p) ** 8) @ NORMAL[1] / NORMAL[1].sum()
    assert mixed == pytest.approx(np.array([3768, 3812, 3808, 3614, 3013, 2422, 2136]) / 4096, abs=0.03)


@pytest.fixture(scope="module")
def stopped() -> list[np.ndarray]:
    """Where 60 warm-ups of each curve end."""
    return [simulated(curve, runs=60) for curve in CURVES]


def test_warm_ups_of_one_true_curve_end_at_about_the_same_step(stopped: list[np.ndarray]) -> None:
    for k in stopped:
        median = np.median(k)
        assert np.mean((k >= median / 2) & (k <= median * 2)) >= 0.8
    assert stopped[0].max() < STEPS  # by the rule, all of them


@pytest.mark.parametrize("least", [0.1, 0.2])
def test_warm_ups_end_later_where_they_should_and_lose_little(stopped: list[np.ndarray], least: float) -> None:
    curves = [replace(curve, least=least) for curve in CURVES]
    assert curves[2].best >= 4 * curves[0].best > 0
    medians = [np.median(k) for k in stopped]
    assert medians[0] < medians[1] < medians[2]
    for curve, k in zip(curves, stopped, strict=True):
        assert np.median(curve.regret(k)) <= 2


def any_curve(rng: np.random.Generator) -> Curve:
    """Quick and slow learners, easy and hard problems, cheap and dear offline stages."""
    return Curve(
        speed=math.exp(rng.uniform(math.log(0.3), math.log(2))),
        offline=math.exp(rng.uniform(math.log(15), math.log(120))),
        start=rng.uniform(-2.5, 1),
        rise=rng.uniform(0.5, 3.5),
        spread=rng.uniform(0.7, 2),
        widening=rng.uniform(0, 1.3),
        least=rng.uniform(0.1, 0.4),
    )


@pytest.mark.slow
def test_curves_that_nothing_was_chosen_on() -> None:
    """Drawn at random after the rule was settled; where no warm-up at all is best, no rule that waits finds it."""
    rng, warmed = np.random.default_rng(2026), []
    for number in range(30):
        curve = any_curve(rng)
        k = simulated(curve, runs=100, seed=number + 1)
        median = np.median(k)
        assert np.mean((k >= median / 1.5) & (k <= median * 1.5)) >= 0.5, curve
        if curve.best > 1:
            warmed.append(np.median(curve.regret(k)))
    assert len(warmed) == 18 and max(warmed) <= 4 and np.median(warmed) <= 2
