"""What the points of a study show beside each other: at equal compute, at equal K, and chosen on dev."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from g2d_jax import frontier
from g2d_jax.report.study import Group, Row, Study
from g2d_jax.report.study_entry import Array


@dataclass(frozen=True)
class Advantage:
    """What offline training is worth against a baseline that spent as much on a measure, seed by seed.

    difference: None where no seed's cost is within its baseline's. seeds: those that have both a point and a baseline.
    """

    difference: frontier.Interval | None
    seeds: int


@functools.lru_cache(maxsize=1024)  # page, Markdown and CSV have the same ones
def advantage(group: Group, row: Row, baseline: Group, measure: str) -> Advantage:
    """A row of a group that ends offline against a baseline, whose accuracy is interpolated at the row's cost."""
    there = [
        (row.accuracies[i], frontier.interpolate(*curve, entry.costs[measure]))
        for i, entry in enumerate(row.entries)
        if baseline.rows[0].ids == row.ids and (curve := baseline.curve(entry.seed, measure)) is not None
    ]
    reached = [values - other for values, other in there if other is not None]
    return Advantage(frontier.bootstrap(np.stack(reached)) if reached else None, len(there))


def difference(row: Row, other: Row) -> frontier.Interval | None:
    """A row's accuracy minus another's, paired by seed and problem; None without a seed in common."""
    found = differences(row, other)
    return frontier.bootstrap(np.stack(list(found.values()))) if found else None


def differences(row: Row, other: Row) -> dict[int, Array]:
    """Seed -> the difference on each problem [N], of the seeds that both have; {} if the problems are not the same."""
    if row.ids != other.ids:
        return {}
    there = {entry.seed: values for entry, values in zip(other.entries, other.accuracies, strict=True)}
    pairs = zip(row.entries, row.accuracies, strict=True)
    return {entry.seed: values - there[entry.seed] for entry, values in pairs if entry.seed in there}


def comparable(rows: Sequence[Row]) -> list[Row]:
    """The rows to choose among: those that have every seed that any of them has, all of them evaluated on dev.

    A row of fewer seeds may be best because its seeds are.
    """
    seeds = frozenset().union(*(row.seeds for row in rows))
    return [row for row in rows if row.seeds == seeds and row.dev == row.dev]


def chosen(rows: Sequence[Row]) -> Row | None:
    """The row that is best on dev, the first of equal ones; None if none is `comparable`."""
    return max(comparable(rows), key=lambda row: row.dev, default=None)


def best_at(study: Study, row: Row, measure: str) -> Group | None:
    """The baseline that is best on dev at a row's cost, its mean over seeds taken between its `comparable` points.

    So its learning rate is chosen for each budget without the test split. None where none reaches the cost, or dev was
    not evaluated; where there is but one baseline it is that one.
    """
    baselines = [group for group in study.baselines if group.rows[0].ids == row.ids]
    if len(baselines) == 1:
        return baselines[0]
    rows = comparable([one for group in baselines for one in group.rows])
    at_cost = [(group, _dev_at([one for one in group.rows if one in rows], row, measure)) for group in baselines]
    known = [(group, dev) for group, dev in at_cost if dev is not None]
    return max(known, key=lambda one: one[1])[0] if known else None


def _dev_at(rows: Sequence[Row], point: Row, measure: str) -> float | None:
    points = sorted((row.cost(measure), row.dev) for row in rows)
    costs = np.array([cost for cost, _ in points])
    if not len(points) or not np.isfinite([*costs, point.cost(measure)]).all() or (np.diff(costs) <= 0).any():
        return None
    found = frontier.interpolate(costs, np.array([[dev] for _, dev in points]), point.cost(measure))
    return None if found is None else float(found[0])


def choices(study: Study) -> str:
    """Which K and baselines could not be chosen among, and why; "" if all could."""
    parts = []
    for group in study.swept:
        of = f" of {group.name}" if len(study.swept) > 1 else ""
        parts.append(_choice(f"K{of}", "K", group.rows))
    if len(study.baselines) > 1:
        parts.append(_choice("The baseline", "point", [row for group in study.baselines for row in group.rows]))
    return " ".join(filter(None, parts))


def _choice(what: str, one: str, rows: Sequence[Row]) -> str:
    known = comparable(rows)
    if not any(entry.result("dev") for row in rows for entry in row.entries):
        return f"{what} is not chosen: nothing was evaluated on dev."
    if not known:
        return f"{what} is not chosen yet: no {one} has all seeds."
    if len(known) == len(rows):
        return ""
    return f"{what} is chosen among {len(known)} of {len(rows)}: the others lack seeds, or dev."


def swept_rows(study: Study) -> list[Row]:
    """The rows of all groups that vary K and do not stop by themselves, cheapest first."""
    rows = [row for group in study.swept if not group.stops for row in group.rows]
    return sorted(rows, key=lambda row: row.cost("flops"))


def rank_correlation(x: ArrayLike, y: ArrayLike) -> tuple[float, int]:
    """Give Spearman's rho of two measures [N], ties sharing their mean rank, and how many points have both.

    NaN for fewer than three points and for a measure that is the same everywhere.
    """
    from scipy.stats import spearmanr  # here: it takes a second to import

    first, second = np.asarray(x, np.float64), np.asarray(y, np.float64)
    known = ~np.isnan(first + second)
    n = int(known.sum())
    if n < 3 or any(len(np.unique(values[known])) == 1 for values in (first, second)):
        return float("nan"), n
    return float(spearmanr(first[known], second[known]).statistic), n
