"""Comparisons of rows of a study: at equal compute, chosen on dev, problem by problem."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from g2d_jax.report.rows import Array, Group, Row, Study, flat, mean_change
from g2d_jax.study import frontier


def difference(row: Row, other: Row) -> frontier.Interval:
    """Subtract another row's accuracy, paired by seed and problem; NaN without a common seed, or on
    other problems."""
    return apart(row.by_seed, other.by_seed if row.ids == other.ids else {})


def apart(
    own: Mapping[int, Array], other: Mapping[int, Array], level: float = 0.95
) -> frontier.Interval:
    """Subtract values on the same problems, seed -> [N], for common seeds; NaN without any."""
    common = [seed for seed in own if seed in other]
    return mean_change({seed: own[seed] - other[seed] for seed in common}, level)


def over_baseline(
    row: Row, baseline: Sequence[Row], measure: str, level: float = 0.95
) -> frontier.Interval:
    """Subtract each seed's baseline at the same cost, on a straight line between two consecutive
    rows; `OUT_OF_RANGE` if a seed's cost is beyond them.

    baseline: by steps. A seed is left out if its baseline has fewer than two rows, or two at one
    cost, or if a cost is unknown. NaN without a seed, or on other problems.
    """
    over: dict[int, Array] = {}
    if baseline[0].ids != row.ids:
        return mean_change(over)
    for seed, cost in zip(row.seeds, row.policies[measure], strict=True):
        costs, reached = [], []
        for other in baseline:
            if seed in other.by_seed:
                costs.append(other.policies[measure].iloc[other.seeds.index(seed)])
                reached.append(other.by_seed[seed])
        if len({*costs}) < max(2, len(costs)) or not np.isfinite([*costs, cost]).all():
            continue
        there = frontier.interpolate(np.array(costs), np.stack(reached), cost)
        if there is None:
            return OUT_OF_RANGE
        over[seed] = row.by_seed[seed] - there
    return mean_change(over, level)


OUT_OF_RANGE = frontier.mean_interval([[math.nan]])
"""The difference if a baseline does not reach a cost. Leaving out those seeds would bias the
rest."""


def comparable(rows: Iterable[Row]) -> list[Row]:
    """Return the rows to choose among: those with all seeds of any row, all evaluated on dev.

    A row of fewer seeds may be best just because of its seeds.
    """
    rows = list(rows)
    seeds = set(itertools.chain.from_iterable(row.seeds for row in rows))
    return [row for row in rows if {*row.seeds} == seeds and not math.isnan(row.mean("dev"))]


def chosen(rows: Iterable[Row]) -> Row | None:
    """Return the best row on dev, the first if equal; None if no row is `comparable`."""
    return max(comparable(rows), key=lambda row: row.mean("dev"), default=None)


def best_at(study: Study, row: Row) -> Group | None:
    """Return the best baseline on dev at a row's FLOPs, by its mean over seeds between its
    `comparable` points.

    So dev, not test, chooses its learning rate for each budget. None if no baseline reaches the
    FLOPs, or dev was not evaluated. A single baseline is returned without a choice.
    """
    baselines = [group for group in study.baselines if group[0].ids == row.ids]
    if len(baselines) == 1:
        return baselines[0]
    rows = comparable(flat(baselines))
    best, highest = None, -math.inf
    for group in baselines:
        points = sorted((one.mean("flops"), one.mean("dev")) for one in group if one in rows)
        if points and points[0][0] <= row.mean("flops") <= points[-1][0]:
            costs, dev = zip(*points, strict=True)
            reached = float(np.interp(row.mean("flops"), costs, dev))
            if reached > highest:
                best, highest = group, reached
    return best


def reference(study: Study) -> Row | None:
    """Return the row that all others are compared with, None for none: in a spectrum the arm that
    never synchronises its sampling policy, otherwise the best GRPO alone on dev."""
    if study.spectrum:
        return next((row for row in study.spectrum if math.isinf(row.first["s"])), None)
    return chosen(flat(study.baselines))
