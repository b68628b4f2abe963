"""Compare policies: at equal compute, at equal K, chosen on dev, problem by problem."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from g2d_jax.report.rows import Array, Group, Row, Study, flat, mean_change
from g2d_jax.study import frontier


@functools.lru_cache(maxsize=1024)
def compare(before: Row, after: Row) -> frontier.Interval:
    """Subtract the accuracy of two rows of one policy each, whatever their seeds, problem by
    problem.

    Another seed of training is not in the interval: it is of these two policies, and not of how
    they were trained.
    """
    return frontier.mean_interval(after.accuracies - before.accuracies, limits=(-1, 1))


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


def over_baseline(
    row: Row, baseline: Sequence[Row], measure: str, times: float = 1
) -> dict[int, Array]:
    """Subtract what the baseline of each seed reaches for so many times the cost, on a straight
    line between two of its rows that follow each other: seed -> [N], NaN beyond them.

    baseline: by steps. Left out are seeds of which the baseline has fewer than two rows, or two at
    one cost, or of which a cost is not known, and all of them where it was tested on other
    problems.
    """
    over: dict[int, Array] = {}
    if not baseline or baseline[0].ids != row.ids:
        return over
    for policy, values in zip(row.policies, row.accuracies, strict=True):
        seed = policy.run.seed
        cost = times * policy.costs[measure]
        rows = [other for other in baseline if seed in other.by_seed]
        costs = [other.policies[other.seeds.index(seed)].costs[measure] for other in rows]
        if len(costs) < 2 or len(set(costs)) < len(costs):
            continue
        if not np.isfinite([*costs, cost]).all():
            continue
        reached = np.stack([other.by_seed[seed] for other in rows])
        there = frontier.interpolate(np.array(costs), reached, cost)
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
    return [row for row in rows if set(row.seeds) == seeds and not math.isnan(row.dev)]


def chosen(rows: Iterable[Row]) -> Row | None:
    """Return the row that is best on dev, the first of equal ones; None if none is `comparable`."""
    return max(comparable(rows), key=lambda row: row.dev, default=None)


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
    cost = row.costs["flops"]
    at_cost = []
    for group in baselines:
        points = sorted((other.costs["flops"], other.dev) for other in group if other in rows)
        if points and points[0][0] <= cost <= points[-1][0]:
            costs, dev = zip(*points, strict=True)
            at_cost.append((float(np.interp(cost, costs, dev)), group))
    return max(at_cost, key=lambda candidate: candidate[0], default=(math.nan, None))[1]


def swept_rows(study: Study) -> list[Row]:
    """Return the rows of all groups that vary K and do not stop by themselves, cheapest first."""
    rows = flat(group for group in study.swept if not group[0].stops)
    return sorted(rows, key=lambda row: row.costs["flops"])


def reference(study: Study, row: Row) -> Row | None:
    """Return the row that another is compared with in points, None for none.

    For a warm-up that stopped by itself it is the swept K that is best on dev, for online training
    the arm whose sampling policy is never refreshed, else the first setting of the same arm at the
    same K.
    """
    if row.stops:
        return chosen(swept_rows(study))
    if not row.is_offline:
        return next((other for other in study.spectrum if other.first.sync_every == 0), None)
    place = (row.arm, row.k)
    return next(other for other in flat(study.offline) if (other.arm, other.k) == place)
