"""Accuracy against compute: what a point adds over a baseline that has spent as much, with its interval.

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
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from g2d_jax.study.stats import row_means

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


def bootstrap(values: ArrayLike, *, samples: int = 2000, level: float = 0.95, seed: int = 0) -> Interval:
    """Compute the mean of [R, N] values and its interval over another draw of runs and of problems.

    The interval runs from the (1 - level) / 2 to the (1 + level) / 2 quantile of `samples` replicates. It is too narrow
    for fewer than five runs, and with R = 1 only problems are drawn (see the module's docstring). The same arguments
    give the same interval. Runs and problems without anything scored are left out before drawing; a run with nothing
    scored among the problems drawn is left out of that replicate, and a replicate with nothing at all is not counted.
    """
    table = np.asarray(values, dtype=np.float64)
    scored = ~np.isnan(table)
    table = table[scored.any(axis=1)][:, scored.any(axis=0)]
    if not table.size:
        return Interval(math.nan, math.nan, math.nan, 0, 0)
    means = _replicates(table, samples, seed)
    # Few samples of a table that is mostly NaN can all be without a scored entry.
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2]) if len(means) else (math.nan, math.nan)
    return Interval(float(row_means(table).mean()), float(low), float(high), *table.shape)


def seed_spread(values: ArrayLike) -> float:
    """Give the standard deviation (R - 1) over runs of their means of [R, N] values; NaN for fewer than two runs.

    It is between runs on these very problems: what another seed may move the mean by. Runs without a scored problem are
    left out.
    """
    means = row_means(np.asarray(values, dtype=np.float64))
    means = means[~np.isnan(means)]
    return float(means.std(ddof=1)) if len(means) > 1 else math.nan


def interpolate(costs: Array, values: Array, cost: float) -> Array | None:
    """Give per-problem values [N] at a cost, on the straight line between the points of `costs` [K] beside it.

    costs: finite, strictly ascending; values: [K, N]. At a point's own cost these are its values exactly; between
    points NaN in either is NaN. None below the first cost and above the last: nothing is extrapolated.
    """
    if not costs[0] <= cost <= costs[-1]:
        return None
    k = int(np.searchsorted(costs, cost))  # the first at or above the cost
    if costs[k] == cost:
        return values[k].copy()
    share = (cost - costs[k - 1]) / (costs[k] - costs[k - 1])
    return (1 - share) * values[k - 1] + share * values[k]


def _replicates(table: Array, samples: int, seed: int) -> Array:
    """Compute the statistic of up to `samples` crossed resamples of a table without empty rows and columns."""
    scored = ~np.isnan(table)
    chosen, drawn = _draws(*table.shape, samples, seed)
    counts = drawn @ scored.T.astype(np.float64)  # [samples, R]: how many scored problems each run has
    means = drawn @ np.where(scored, table, 0.0).T / np.maximum(counts, 1)
    weights = chosen * (counts > 0)
    totals = weights.sum(axis=1)
    return (weights * means).sum(axis=1)[totals > 0] / totals[totals > 0]


@functools.lru_cache(maxsize=4)  # a report has many tables of few shapes, and drawing takes longest
def _draws(runs: int, problems: int, samples: int, seed: int) -> tuple[NDArray[np.int64], Array]:
    """Draw how often each run [samples, R] and each problem [samples, N] is in a replicate."""
    rng = np.random.default_rng(seed)
    drawn = rng.multinomial(problems, np.full(problems, 1 / problems), size=samples).astype(np.float64)
    chosen = rng.multinomial(runs, np.full(runs, 1 / runs), size=samples)
    chosen.flags.writeable = drawn.flags.writeable = False
    return chosen, drawn
