"""Where a learning curve bends: exact curves, and what is claimed of curves that do not, by
simulation."""

from collections.abc import Callable

import numpy as np
import pytest

from g2d_jax.study.bend import Bend, bend

STEPS = np.arange(10, 210, 10)


def test_two_lines_are_found_again() -> None:
    curve = 0.2 + 0.004 * np.minimum(STEPS, 80) + 0.0005 * np.maximum(STEPS - 80, 0)
    fit = bend(STEPS, curve, np.full(20, 1e-6))
    assert fit is not None and fit.flattens and fit.step == (80, 80, 80)
    assert fit.before == pytest.approx((0.004, 0.004, 0.004), rel=1e-3)
    assert fit.after == pytest.approx((0.0005, 0.0005, 0.0005), rel=1e-3)
    steeper = bend(STEPS, curve + 0.001 * np.maximum(STEPS - 80, 0), np.full(20, 1e-6))
    # 0.0015 is no quarter of 0.004
    assert steeper is not None and not steeper.flattens and steeper.step.value == 80


def test_the_interval_is_as_wide_as_the_estimates_of_other_draws_vary() -> None:
    curve, rng = 0.2 + 0.004 * np.minimum(STEPS, 80), np.random.default_rng(0)
    fits = [
        bend(STEPS, curve + 0.02 * rng.standard_normal(20), np.full(20, 0.02), samples=200)
        for _ in range(100)
    ]
    inside = [
        fit.step.low <= 80 <= fit.step.high and fit.after.low <= 0 <= fit.after.high
        for fit in fits
        if fit
    ]
    assert np.mean(inside) >= 0.85


@pytest.mark.parametrize(
    ("curve", "least", "most"),
    [
        (lambda u: 0.4, 0, 0.1),
        (lambda u: 0.3 + 0.4 * u, 0, 0),
        (lambda u: 0.6 - 0.3 * u, 0, 0),
        (lambda u: 0.25 + 0.4 * min(u / 0.15, 1) + 0.05 * u, 0.9, 1),
    ],
    ids=["level", "rising", "falling", "bent"],
)
def test_how_often_a_curve_is_said_to_flatten(
    curve: Callable[[float], float], least: float, most: float
) -> None:
    """60 steps, 16 prompts of 8 responses each, of which some are harder than others."""
    rng, flattens = np.random.default_rng(0), []
    for _ in range(25):
        rates = np.array([curve(u) for u in np.linspace(0, 1, 60)])[:, None]
        values = rng.binomial(8, rng.beta(2 * rates, 2 * (1 - rates), (60, 16))) / 8
        error = np.sqrt(values.var(axis=1, ddof=1).mean() / 16)
        fit = bend(np.arange(60), values.mean(axis=1), np.full(60, error), samples=200)
        flattens.append(isinstance(fit, Bend) and fit.flattens)
    assert least <= np.mean(flattens) <= most


def test_too_little_to_tell() -> None:
    assert bend(range(6), range(6), np.ones(6)) is None
    assert bend(range(7), range(7), np.full(7, np.nan)) is None
