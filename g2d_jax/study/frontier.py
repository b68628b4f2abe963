"""Accuracy against compute: the gain of a point over a baseline of equal cost, with its interval.

R runs (one a seed, or the differences of R pairs of runs) on the same N problems form an array
`values` [R, N]: each problem's mean accuracy in each run, or the difference of two. NaN means "not
scored" and is ignored. The statistic is the mean over runs of each run's mean over its scored
problems. A cost is a number in any one unit: FLOPs, tokens, device-seconds, money.

`mean_interval` computes every interval over seeds. Its half width is

    sqrt((t(R - 1) * error between seeds)^2 + (t(N - 1) * error between problems)^2)

with t(d) the quantile of Student's t with d degrees of freedom. Both errors are one-way standard
errors of the mean, the parts of two-way clustering (Cameron, Gelbach and Miller 2011, Journal of
Business & Economic Statistics 29, 238-249): between the R runs' means, and clustered by problem.
Each has its own t, since few seeds make only the error between seeds uncertain. Such sums of
squares make an interval that covers at least `level` (Banerjee 1960, Sankhya 22, 357), here for
normal effects of runs, of problems and of answers:

    Let S_1 and S_2 be the squared errors. The mean's variance is v = v_1 + v_2 with v_1 = E S_1 and
    v_2 <= E S_2. With F the distribution function of chi-squared with 1 degree of freedom, coverage
    is E F((t_1^2 S_1 + t_2^2 S_2) / v). F is concave, so that this is at least (v_1 E F(t_1^2 S_1 /
    v_1) + v_2 E F(t_2^2 S_2 / v_2)) / v >= level.

Known properties:

    few runs              Wide where runs differ: t is 12.7 for R = 2, 4.3 for 3, 2.8 for 5, 2.3 for
                          10. A bootstrap over runs covers only 0.50, 0.75, 0.84 and 0.91 there, if
                          nothing else varies.
    one run               Over problems only, without the variation between seeds.
    noise of the answers  Counted in both errors: too wide by up to sqrt(2) if nothing else varies.
    few problems          Too narrow if nearly all answers are correct, or incorrect, like any
                          interval from their spread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from g2d_jax.study.stats import row_means, std, t_quantile

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its interval, in the unit of the values; NaN if unknown.

    seeds: the runs with a scored problem; for one the interval is over problems only. problems:
    those scored in at least one run; for one there is no interval.
    """

    mean: float
    low: float
    high: float
    seeds: int
    problems: int

    @property
    def conclusive(self) -> bool:
        """True if it excludes 0."""
        return self.low > 0 or self.high < 0


def mean_interval(
    values: ArrayLike, *, level: float = 0.95, limits: tuple[float, float] = (-math.inf, math.inf)
) -> Interval:
    """Compute the mean of [R, N] values and its interval over runs and problems.

    With R = 1 it is over problems only (see the module's docstring). Runs and problems without any
    score are ignored. limits: the range of a mean, such as (0, 1) for an accuracy: the interval is
    clipped to it, which keeps its coverage.
    """
    table = np.asarray(values, dtype=np.float64)
    scored = ~np.isnan(table)
    table = table[scored.any(axis=1)][:, scored.any(axis=0)]
    if not table.size:
        return Interval(math.nan, math.nan, math.nan, 0, 0)
    runs, problems = table.shape
    mean = float(row_means(table).mean())
    half = t_quantile(problems, level) * _error_between_problems(table)
    if runs > 1:
        between_seeds = t_quantile(runs, level) * seed_spread(table) / math.sqrt(runs)
        half = math.hypot(between_seeds, half)
    # np.clip keeps NaN, unlike min and max.
    low, high = np.clip([mean - half, mean + half], *limits)
    return Interval(mean, float(low), float(high), runs, problems)


def seed_spread(values: ArrayLike) -> float:
    """Return the standard deviation (R - 1) of the runs' means of [R, N] values; NaN for fewer than
    two runs.

    It estimates how much another seed changes the mean on these same problems. Runs without a
    scored problem are ignored.
    """
    means = row_means(np.asarray(values, dtype=np.float64))
    return std(means[~np.isnan(means)])


def _error_between_problems(table: Array) -> float:
    """Compute the mean's standard error clustered by problem; NaN for one problem.

    table: [R, N] without empty rows and columns. A problem contributes the sum of its deviations
    from each run's mean, over R times the problems scored in that run. Without missing values this
    is sqrt(sum_n (m_n - m)^2 / (N (N - 1))), m_n the problems' means.
    """
    runs, problems = table.shape
    if problems < 2:
        return math.nan
    deviations = table - row_means(table)[:, None]
    weights = runs * (~np.isnan(table)).sum(axis=1, keepdims=True)
    shares = np.nansum(deviations / weights, axis=0)
    return math.sqrt(problems / (problems - 1) * float(np.square(shares).sum()))


def interpolate(costs: Array, values: Array, cost: float) -> Array | None:
    """Return per-problem values [N] at a cost, on the straight line between the first two
    consecutive points that enclose the cost.

    costs: finite, [K], in the order of the budgets. A longer run can cost less than a shorter one
    if it learns from fewer prompts; no line joins budgets that are not consecutive. values: [K, N].
    At the cost of a point these are its values exactly; between two points NaN in either is NaN.
    None if no two points enclose the cost: there is no extrapolation.
    """
    for k, reached in enumerate(costs):
        if reached == cost:
            return values[k].copy()
        if k and min(costs[k - 1], reached) < cost < max(costs[k - 1], reached):
            share = (cost - costs[k - 1]) / (reached - costs[k - 1])
            return (1 - share) * values[k - 1] + share * values[k]
    return None
