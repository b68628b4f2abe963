"""Compare rows of a study: at equal compute, chosen on dev, problem by problem."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from g2d_jax.report.rows import Array, Group, Row, Study, flat, mean_change
from g2d_jax.study import frontier


def difference(row: Row, other: Row) -> frontier.Interval | None:
    """Subtract another row's accuracy, paired by seed and problem; None without a seed or the
    problems in common."""
    return apart(row.by_seed, other.by_seed) if row.ids == other.ids else None


def apart(
    own: Mapping[int, Array], other: Mapping[int, Array], level: float = 0.95
) -> frontier.Interval | None:
    """Subtract values on the same problems, seed -> [N], of the seeds that both have; None without
    one."""
    common = [seed for seed in own if seed in other]
    return mean_change({seed: own[seed] - other[seed] for seed in common}, level)


def over_baseline(row: Row, baseline: Sequence[Row], measure: str) -> dict[int, Array]:
    """Subtract what the baseline of each seed reaches for the same cost, on a straight line between
    two of its rows that follow each other: seed -> [N], NaN beyond them.

    baseline: by steps. Left out are seeds of which the baseline has fewer than two rows, or two at
    one cost, or of which a cost is not known, and all of them where it was tested on other
    problems.
    """
    over: dict[int, Array] = {}
    if not baseline or baseline[0].ids != row.ids:
        return over
    for seed, cost in zip(row.seeds, row.policies[measure], strict=True):
        costs, reached = [], []
        for other in baseline:
            if seed in other.by_seed:
                costs.append(other.policies[measure].iloc[other.seeds.index(seed)])
                reached.append(other.by_seed[seed])
        if len({*costs}) < max(2, len(costs)) or not np.isfinite([*costs, cost]).all():
            continue
        values = row.by_seed[seed]
        there = frontier.interpolate(np.array(costs), np.stack(reached), cost)
        over[seed] = np.full_like(values, np.nan) if there is None else values - there
    return over


def is_out_of_range(over: Mapping[int, Array]) -> bool:
    """Tell from differences of `over_baseline` whether any seed's cost lies beyond its
    baseline's."""
    return any(np.isnan(values).all() for values in over.values())


def comparable(rows: Iterable[Row]) -> list[Row]:
    """Return the rows to choose among: those that have every seed that any of them has, all
    evaluated on dev.

    A row of fewer seeds may be best because its seeds are.
    """
    rows = list(rows)
    seeds = set(itertools.chain.from_iterable(row.seeds for row in rows))
    return [row for row in rows if {*row.seeds} == seeds and not math.isnan(row.mean("dev"))]


def chosen(rows: Iterable[Row]) -> Row | None:
    """Return the row that is best on dev, the first of equal ones; None if none is `comparable`."""
    return max(comparable(rows), key=lambda row: row.mean("dev"), default=None)


def best_at(study: Study, row: Row) -> Group | None:
    """Return the baseline that is best on dev at a row's FLOPs, its mean over seeds between its
    `comparable` points.

    So its learning rate is chosen for each budget without the test split. None where none reaches
    them, or dev was not evaluated; where there is but one baseline it is that one.
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


def reference(study: Study, row: Row) -> Row | None:
    """Return the row that another is compared with in points, None for none.

    For a warm-up that stopped by itself it is the swept K that is best on dev, for online training
    the arm whose sampling policy is never refreshed, else the first setting of the same arm at the
    same K.
    """
    if row.stops:
        swept = [group for group in study.offline if len(group) > 1 and not group[0].stops]
        return chosen(sorted(flat(swept), key=lambda one: one.mean("flops")))
    if not row.is_offline:
        return next((other for other in study.spectrum if math.isinf(other.first["s"])), None)
    place = row.arm, row.mean("K")
    return next(other for other in flat(study.offline) if (other.arm, other.mean("K")) == place)
