"""Accuracy against compute: what a point adds over a baseline that has spent as much, and how far to trust it.

R runs (one a seed, or the differences of R pairs of runs) on the same N problems, in an array `values` [R, N]: each
problem's mean accuracy in each run, or the difference of two. NaN is "not scored" and left out of every figure. The
statistic is the mean over runs of each run's mean over its scored problems. A cost is one number in any unit that is
the same throughout: FLOPs, tokens, device-seconds, money.

`bootstrap` draws runs and problems, both with replacement and independently, every run of a replicate getting the same
problems: the pigeonhole bootstrap of Owen 2007 (Annals of Applied Statistics 1, 386-411). What is known about it:

    few runs             Too narrow in what differs from run to run. If nothing else varied and runs were normal, an
                         interval of level 0.95 would cover 0.50 for R = 2, 0.75 for 3, 0.84 for 5, 0.91 for 10 (a
                         simulation; for R = 2 and 3 it is exactly [lowest, highest run]). Below five runs show
                         `seed_spread` or the runs themselves beside it.
    one run              Only problems are drawn: the interval says nothing about another seed.
    noise of the answers Too wide in what is neither the run's nor the problem's (few answers for each problem):
                         that part's variance is counted 3 - 2 / R times. No bootstrap of a crossed table is exact
                         (McCullagh 2000, Bernoulli 6, 285-301).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its percentile interval, in the unit of the values; NaN where nothing is scored.

    seeds: the runs with a scored problem. problems: those scored in at least one run.
    """

    mean: float
    low: float
    high: float
    seeds: int
    problems: int


class Spread(NamedTuple):
    """The runs' means over their problems: mean, standard deviation (R - 1) and standard error std / sqrt(R)."""

    mean: float
    std: float
    sem: float


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """One run's baseline as it went on: per-problem `values` [K, N] at ascending `costs` [K], as float64.

    Raises ValueError, naming the curve, if the shapes do not fit or the costs are not finite and strictly ascending.
    """

    name: str
    costs: Array
    values: Array

    def __post_init__(self) -> None:
        costs, values = _trajectory(f"the curve {self.name!r}", self.costs, self.values)
        object.__setattr__(self, "costs", costs)
        object.__setattr__(self, "values", values)


def bootstrap(values: ArrayLike, *, samples: int = 2000, level: float = 0.95, seed: int = 0) -> Interval:
    """The mean of [R, N] values and its interval over another draw of runs and of problems.

    The interval runs from the (1 - level) / 2 to the (1 + level) / 2 quantile of `samples` replicates. It is too narrow
    for fewer than five runs, and with R = 1 only problems are drawn (see the module's docstring). The same arguments
    give the same interval. Runs and problems without anything scored are left out before drawing; a run with nothing
    scored among the problems drawn is left out of that replicate, and a replicate with nothing at all is not counted.
    Raises ValueError for other than two axes, infinite values, samples < 1 or a level outside (0, 1).
    """
    table = _runs(values)
    if samples < 1 or not 0 < level < 1:
        raise ValueError(f"give samples of 1 or more and a level between 0 and 1, got {samples} and {level}")
    scored = ~np.isnan(table)
    table = table[scored.any(axis=1)][:, scored.any(axis=0)]
    if not table.size:
        return Interval(math.nan, math.nan, math.nan, 0, 0)
    means = _replicates(table, samples, seed)
    # Few samples of a table that is mostly NaN can all be without a scored entry.
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2]) if len(means) else (math.nan, math.nan)
    return Interval(float(_run_means(table).mean()), float(low), float(high), *table.shape)


def seed_spread(values: ArrayLike) -> Spread:
    """Mean, standard deviation over runs and standard error of [R, N] values, runs without a scored problem left out.

    The deviation is between runs on these very problems: what another seed may move the mean by. NaN: fewer than two
    runs for std and sem, none for the mean. Raises ValueError for other than two axes or infinite values.
    """
    means = _run_means(_runs(values))
    means = means[~np.isnan(means)]
    std = float(means.std(ddof=1)) if len(means) > 1 else math.nan
    mean = float(means.mean()) if len(means) else math.nan
    return Spread(mean, std, std / math.sqrt(max(len(means), 1)))


def interpolate(costs: ArrayLike, values: ArrayLike, cost: float) -> Array | None:
    """Per-problem values [N] at a cost, on the straight line between the points of `costs` [K] beside it.

    values: [K, N]. At a point's own cost these are its values exactly; between points NaN in either is NaN. None below
    the first cost and above the last: nothing is extrapolated. Raises ValueError unless costs are finite and strictly
    ascending, K >= 1, the shapes fit and the cost is finite.
    """
    return _at_cost(*_trajectory("the trajectory", costs, values), cost)


def at_equal_compute(point_cost: float, point_values: ArrayLike, curve: Curve) -> Array | None:
    """Each problem's value of a point [N] minus the curve's at the same cost; None where the curve does not reach it.

    Raises ValueError if the numbers of problems differ, and as `interpolate`.
    """
    point = np.asarray(point_values, dtype=np.float64)
    if point.shape != curve.values.shape[1:]:
        raise ValueError(
            f"the point's values have the shape {list(point.shape)}, the curve {curve.name!r} has "
            f"{curve.values.shape[1]} problems: give one value for each of the same problems"
        )
    baseline = _at_cost(curve.costs, curve.values, point_cost)
    return None if baseline is None else point - baseline


def compare(
    points: Sequence[tuple[float, ArrayLike]],
    curves: Sequence[Curve],
    *,
    samples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval | None:
    """How much better points are than baselines that have spent as much: run r's point against run r's curve.

    points: (cost, values [N]) of each run, the problems being the same ones throughout. Runs whose cost their curve
    does not reach are left out: `seeds` says how many are left; None if none is. Intervals as in `bootstrap`, which
    documents the other arguments. Raises ValueError unless there is one curve for each point and all have as many
    problems, and as `at_equal_compute` and `bootstrap`.
    """
    if len(points) != len(curves):
        raise ValueError(f"{len(points)} points and {len(curves)} curves: give each run's point and its own curve")
    sizes = sorted({curve.values.shape[1] for curve in curves})
    if len(sizes) > 1:
        raise ValueError(f"the curves have {sizes} problems: compare runs on the same problems")
    pairs = zip(points, curves, strict=True)
    differences = [at_equal_compute(cost, values, curve) for (cost, values), curve in pairs]
    reached = [one for one in differences if one is not None]
    return bootstrap(np.stack(reached), samples=samples, level=level, seed=seed) if reached else None


def pareto(costs: ArrayLike, means: ArrayLike) -> list[int]:
    """The points [K] that no other beats, cheapest first: none costs at most as much and is at least as good.

    Of equal cost and mean all are kept, in the order given. Points with NaN for the cost or the mean are left out.
    Raises ValueError unless both are [K].
    """
    price, mean = np.asarray(costs, dtype=np.float64), np.asarray(means, dtype=np.float64)
    if price.ndim != 1 or price.shape != mean.shape:
        raise ValueError(f"costs {list(price.shape)} and means {list(mean.shape)}: give one of each for every point")
    # One on the frontier is followed by those of its cost with a lower mean, then by dearer ones up to the next better.
    order = [int(k) for k in np.lexsort((-mean, price)) if not math.isnan(price[k] + mean[k])]
    kept: list[int] = []
    for k in order:
        if not kept or mean[k] > mean[kept[-1]] or (mean[k], price[k]) == (mean[kept[-1]], price[kept[-1]]):
            kept.append(k)
    return kept


def best_on(dev_means: ArrayLike) -> int:
    """The index of the highest of [K] means over the dev problems; of equal ones the first, so give the cheapest first.

    Choices (of K, of a learning rate, of a checkpoint) are made on the dev split, never on the split that is reported:
    the highest of several noisy means is too high on the problems that it was chosen on. NaN is left out. Raises
    ValueError if there is no mean to choose from.
    """
    means = np.asarray(dev_means, dtype=np.float64)
    if means.ndim != 1 or np.isnan(means).all():
        raise ValueError(f"choosing needs one dev mean for each point, and one that is not NaN, got {means.tolist()}")
    return int(np.nanargmax(means))


def _replicates(table: Array, samples: int, seed: int) -> Array:
    """The statistic of up to `samples` crossed resamples of a table without empty rows and columns."""
    scored = ~np.isnan(table)
    chosen, drawn = _draws(*table.shape, samples, seed)
    counts = drawn @ scored.T.astype(np.float64)  # [samples, R]: how many scored problems each run has
    means = drawn @ np.where(scored, table, 0.0).T / np.maximum(counts, 1)
    weights = chosen * (counts > 0)
    totals = weights.sum(axis=1)
    return (weights * means).sum(axis=1)[totals > 0] / totals[totals > 0]


@functools.lru_cache(maxsize=4)  # a report has many tables of few shapes, and drawing takes longest
def _draws(runs: int, problems: int, samples: int, seed: int) -> tuple[NDArray[np.int64], Array]:
    """How often each run [samples, R] and each problem [samples, N] is in a replicate."""
    rng = np.random.default_rng(seed)
    drawn = rng.multinomial(problems, np.full(problems, 1 / problems), size=samples).astype(np.float64)
    chosen = rng.multinomial(runs, np.full(runs, 1 / runs), size=samples)
    chosen.flags.writeable = drawn.flags.writeable = False
    return chosen, drawn


def _at_cost(costs: Array, values: Array, cost: float) -> Array | None:
    if not math.isfinite(cost):
        raise ValueError(f"values can be found at a finite cost only, got {cost}")
    if not costs[0] <= cost <= costs[-1]:
        return None
    k = int(np.searchsorted(costs, cost))  # the first at or above the cost
    if costs[k] == cost:
        return values[k].copy()
    share = (cost - costs[k - 1]) / (costs[k] - costs[k - 1])
    return (1 - share) * values[k - 1] + share * values[k]


def _trajectory(name: str, costs: ArrayLike, values: ArrayLike) -> tuple[Array, Array]:
    price, table = np.asarray(costs, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if price.ndim != 1 or table.ndim != 2 or len(price) != len(table) or not len(price):
        raise ValueError(
            f"{name} has costs of the shape {list(price.shape)} and values of {list(table.shape)}: "
            "give [K] and [K, problems] with K of at least 1"
        )
    if not np.isfinite(price).all() or (np.diff(price) <= 0).any():
        raise ValueError(f"{name} must have finite, strictly ascending costs, got {price.tolist()}")
    if np.isinf(table).any():
        raise ValueError(f"{name} has infinite values: accuracies are finite, or NaN where not known")
    return price, table


def _runs(values: ArrayLike) -> Array:
    table = np.asarray(values, dtype=np.float64)
    if table.ndim != 2:
        raise ValueError(f"values must be [runs, problems], got the shape {list(table.shape)}")
    if np.isinf(table).any():
        raise ValueError("values has infinite entries: accuracies are finite, or NaN where not known")
    return table


def _run_means(table: Array) -> Array:
    """Each run's mean over its scored problems [R]; NaN for a run without any."""
    counts = (~np.isnan(table)).sum(axis=1)
    return np.where(counts > 0, np.nansum(table, axis=1) / np.maximum(counts, 1), np.nan)
