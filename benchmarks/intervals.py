"""A difference with its interval, and Student's t over seeds: what all claims are made of."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd

from g2d_jax.study import stats

LEVEL = 2.0
"""Points within which two accuracies count as level."""


@dataclass(frozen=True)
class Found:
    """A difference with its interval, in points or per cent; NaN where a seed is out of range. k:
    None of one that has no K."""

    k: int | None
    mean: float
    low: float
    high: float
    seeds: int

    @property
    def verdict(self) -> str:
        """One of the four of docs/rivals.md; "inconclusive" without an interval."""
        if self.low > 0:
            return "better"
        if self.high < 0:
            return "worse"
        return "level" if self.low >= -LEVEL and self.high <= LEVEL else "inconclusive"

    def __str__(self) -> str:
        if math.isnan(self.low):
            return "–"
        return f"{self.mean:+.1f} [{self.low:+.1f}, {self.high:+.1f}]"


def over_seeds(numbers: pd.Series, k: int | None = None, level: float = 0.95) -> Found:
    """Average one number a seed, in points or per cent, with Student's t over seeds."""
    mean, error = float(numbers.mean()), stats.std(numbers.to_numpy()) / math.sqrt(len(numbers))
    half = stats.t_quantile(len(numbers), level) * error
    return Found(k, mean, mean - half, mean + half, len(numbers))
