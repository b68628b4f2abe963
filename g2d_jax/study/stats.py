"""Accuracy of sampled answers, with its standard errors.

N problems with S answers each form an array `correct` [N, S]: 1 correct, 0 incorrect, NaN if the
problem cannot be scored. NaN is ignored, not counted as incorrect. All means weigh problems
equally, for any number of scored answers; problems without a scored answer are ignored.

The standard error over problems and answers, sem_clustered, is sqrt(sum_i (m_i - m)^2 / (N * (N -
1))) with m_i the mean of problem i's answers and m the mean of the m_i. For equally many answers
each, this is the clustered standard error of Miller 2024 ("Adding Error Bars to Evals", arXiv
2411.00640) with problems as clusters, times sqrt(N / (N - 1)), the usual correction for few
clusters.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Mean pass@1 with its standard error, in [0, 1] (see the module's docstring). NaN if
    undefined.

    problems: those with at least one scored answer, at most N.
    """

    mean: float
    sem_clustered: float
    problems: int


@dataclass(frozen=True, slots=True)
class Paired:
    """A paired difference in mean pass@1, after - before, over the problems scored in both. sem:
    its standard error clustered by problem."""

    difference: float
    sem: float
    problems: int


def accuracy(correct: ArrayLike) -> Accuracy:
    """Compute the mean pass@1 of [N, S] answers. The mean of no problem, and the error of fewer
    than two, are NaN."""
    problems = row_means(np.asarray(correct, dtype=np.float64))
    problems = problems[~np.isnan(problems)]
    return Accuracy(mean(problems), _sem(problems), len(problems))


def by_subset(correct: ArrayLike, subsets: Sequence[str]) -> dict[str, Accuracy]:
    """Compute the accuracy of each subset, by name in sorted order. subsets: the subset of each of
    N problems."""
    values, names = np.asarray(correct, dtype=np.float64), np.asarray(subsets, dtype=object)
    return {name: accuracy(values[names == name]) for name in sorted(set(subsets))}


def paired(before: ArrayLike, after: ArrayLike) -> Paired:
    """Compute the difference in mean pass@1 of two policies on the same problems, in the same rows.

    before [N, S1], after [N, S2]. With d_i the difference of problem i's means, the standard error
    is sqrt(sum_i (d_i - d)^2 / (N * (N - 1))): the difficulty of a problem cancels.
    """
    differences = row_means(np.asarray(after, np.float64)) - row_means(
        np.asarray(before, np.float64)
    )
    differences = differences[~np.isnan(differences)]
    return Paired(mean(differences), _sem(differences), len(differences))


def pass_at_k(n: ArrayLike, c: ArrayLike, k: int) -> NDArray[np.float64]:
    """Compute the chance that, of k answers drawn without replacement from n with c correct, at
    least one is correct.

    1 - C(n - c, k) / C(n, k): the unbiased estimator of pass@k (Chen et al. 2021, "Codex", arXiv
    2107.03374, eq. 1). n, c: integers or broadcastable arrays, 0 <= c <= n and 1 <= k <= n; the
    result has their shape.
    """
    total, right = np.broadcast_arrays(np.asarray(n), np.asarray(c))
    wrong = (total - right).astype(np.float64)
    none_right = np.ones(total.shape)
    for drawn in range(k):
        none_right *= np.maximum(wrong - drawn, 0.0) / (total - drawn)
    return np.asarray(1.0 - none_right)


def pass_at(correct: ArrayLike, k: int) -> float:
    """Compute the mean pass@k of [N, S] answers over the problems with at least k scored ones, NaN
    without any.

    pass_at(correct, 1) is `accuracy(correct).mean`.
    """
    values = np.asarray(correct, dtype=np.float64)
    scored = ~np.isnan(values)
    n, c = scored.sum(axis=1), np.nansum(values, axis=1).astype(int)
    return mean(pass_at_k(n[n >= k], c[n >= k], k))


def row_means(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute the mean of each row, ignoring NaN; NaN for a row without other entries."""
    counts = (~np.isnan(values)).sum(axis=1)
    return np.where(counts > 0, np.nansum(values, axis=1) / np.maximum(counts, 1), np.nan)


@functools.cache
def t_quantile(count: float, level: float = 0.95) -> float:
    """Compute Student's t for a two-sided interval from `count` values; NaN for fewer than two, and
    for NaN.

    count: of runs or problems under the standard error; count - 1 degrees of freedom.
    """
    from scipy.special import stdtrit  # here, since `g2d status` does not need it

    if count > 1:
        return float(stdtrit(count - 1, (1 + level) / 2))
    return math.nan


def mean(values: NDArray[Any]) -> float:
    """Compute the mean, in float64; NaN for no values."""
    return float(values.mean(dtype=np.float64)) if len(values) else math.nan


def std(values: NDArray[np.float64]) -> float:
    """Compute the standard deviation (N - 1); NaN for fewer than two values."""
    return float(values.std(ddof=1)) if len(values) > 1 else math.nan


def _sem(values: NDArray[np.float64]) -> float:
    return std(values) / float(np.sqrt(max(len(values), 1)))
