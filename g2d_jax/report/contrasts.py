"""What the policies of a study show beside each other: at equal compute, at equal K, and chosen on dev."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from g2d_jax.report.read import ONLINE, Array, Group, Policy, Row, Study
from g2d_jax.study import frontier


class Advantage(NamedTuple):
    """What offline training is worth against a baseline that spent as many FLOPs, seed by seed.

    difference: None where no seed's cost is within its baseline's. seeds: those that have both a point and a baseline.
    """

    difference: frontier.Interval | None
    seeds: int


@functools.lru_cache(maxsize=1024)  # page and CSV have the same ones
def advantage(row: Row, baseline: Group) -> Advantage:
    """Compare a row with a baseline, whose accuracy is interpolated at the row's FLOPs."""
    there = [
        (values, frontier.interpolate(*curve, policy.costs["flops"]))
        for policy, seed, values in zip(row.policies, row.seeds, row.accuracies, strict=True)
        if baseline.rows[0].ids == row.ids and (curve := _curve(baseline, seed)) is not None
    ]
    reached = [values - other for values, other in there if other is not None]
    return Advantage(frontier.bootstrap(np.stack(reached)) if reached else None, len(there))


def _curve(group: Group, seed: int) -> tuple[Array, Array] | None:
    """Give one seed's FLOPs [K], ascending, and accuracies [K, N]; None if it has fewer than two points."""
    points = [
        (policy.costs["flops"], values)
        for row in group.rows
        for policy, other, values in zip(row.policies, row.seeds, row.accuracies, strict=True)
        if other == seed
    ]
    points.sort(key=lambda point: point[0])
    costs = np.array([cost for cost, _ in points])
    if len(points) < 2 or not np.isfinite(costs).all() or (np.diff(costs) <= 0).any():
        return None
    return costs, np.stack([values for _, values in points])


def difference(row: Row, other: Row) -> frontier.Interval | None:
    """Subtract another row's accuracy, paired by seed and problem; None without a seed or the problems in common."""
    if row.ids != other.ids:
        return None
    there = dict(zip(other.seeds, other.accuracies, strict=True))
    pairs = [values - there[seed] for seed, values in zip(row.seeds, row.accuracies, strict=True) if seed in there]
    return frontier.bootstrap(np.stack(pairs)) if pairs else None


def comparable(rows: Iterable[Row]) -> list[Row]:
    """Return the rows to choose among: those that have every seed that any of them has, all evaluated on dev.

    A row of fewer seeds may be best because its seeds are.
    """
    rows = list(rows)
    seeds = {seed for row in rows for seed in row.seeds}
    return [row for row in rows if set(row.seeds) == seeds and row.dev == row.dev]


def chosen(rows: Iterable[Row]) -> Row | None:
    """Return the row that is best on dev, the first of equal ones; None if none is `comparable`."""
    return max(comparable(rows), key=lambda row: row.dev, default=None)


def best_at(study: Study, row: Row) -> Group | None:
    """Return the baseline that is best on dev at a row's FLOPs, its mean over seeds between its `comparable` points.

    So its learning rate is chosen for each budget without the test split. None where none reaches the cost, or dev was
    not evaluated; where there is but one baseline it is that one.
    """
    baselines = [group for group in study.baselines if group.rows[0].ids == row.ids]
    if len(baselines) == 1:
        return baselines[0]
    rows = comparable(one for group in baselines for one in group.rows)
    at_cost = []
    for group in baselines:
        points = sorted((one.cost("flops"), one.dev) for one in group.rows if one in rows)
        costs, dev = [cost for cost, _ in points], [value for _, value in points]
        if points and costs[0] <= row.cost("flops") <= costs[-1]:
            at_cost.append((group, float(np.interp(row.cost("flops"), costs, dev))))
    return max(at_cost, key=lambda one: one[1], default=(None, 0.0))[0]


def swept_rows(study: Study) -> list[Row]:
    """Return the rows of all groups that vary K and do not stop by themselves, cheapest first."""
    rows = [row for group in study.swept if not group.stops for row in group.rows]
    return sorted(rows, key=lambda row: row.cost("flops"))


def reference(study: Study, group: Group, row: Row) -> Row | None:
    """Return the row that another is compared with in points, None for none.

    For a warm-up that stopped by itself it is the swept K that is best on dev, for online training the arm whose
    sampling policy is never refreshed, else the first setting of the same arm at the same K.
    """
    if group.stops:
        return chosen(swept_rows(study))
    if not group.is_offline:
        return next((one for _, one in spectrum(study) if sync_every(one.policies[0]) == 0), None)
    alike = [one for other in study.offline if other.arm == group.arm for one in other.rows if one.k == row.k]
    return alike[0]


def sync_every(policy: Policy) -> int:
    """How many updates online training makes between two synchronisations of the sampling policy; 0 is never."""
    return int(policy.section.get("sync_every", 1))


def loss_of(policy: Policy) -> str:
    """Return the loss of online training, "" of any other policy."""
    return str(policy.section.get("loss", "grpo")) if policy.kind == ONLINE else ""


def spectrum(study: Study) -> list[tuple[Group, Row]]:
    """Arms of online training from offline (s = ∞) to s = 1, other losses after the one with the most s.

    [] if all have the same s and loss: the study is about something else. The range is that of "Bridging Offline and
    Online Reinforcement Learning for LLMs" (arXiv 2506.21495).
    """
    arms = [(group, row) for group in study.groups for row in group.rows if row.policies[0].kind == ONLINE]
    spans: dict[str, list[float]] = {}
    for _, row in arms:
        spans.setdefault(loss_of(row.policies[0]), []).append(_distance(row))
    losses = sorted(spans, key=lambda loss: (-len(set(spans[loss])), -max(spans[loss])))
    arms.sort(key=lambda arm: (losses.index(loss_of(arm[1].policies[0])), -_distance(arm[1])))
    return arms if len({(loss_of(row.policies[0]), _distance(row)) for _, row in arms}) > 1 else []


def _distance(row: Row) -> float:
    return sync_every(row.policies[0]) or math.inf


def start_of(rows: Sequence[Row]) -> Row | None:
    """Return the policy that all rows were trained from, where it is one for each seed and was evaluated on test."""
    starts: dict[int, Policy] = {}
    for row in rows:
        for seed, policy in zip(row.seeds, row.policies, strict=True):
            start = policy.parent
            if start is None or not _same(start, starts.setdefault(seed, start)):
                return None
    evaluated = [
        (policy, answers)
        for policy in starts.values()
        if (answers := policy.answers("test")) is not None and answers.ids == rows[0].ids
    ]
    if len({policy.name for policy in starts.values()}) > 1 or not evaluated:
        return None
    return Row(
        evaluated[0][0].name, [one for one, _ in evaluated], None, rows[0].ids, [two.correct for _, two in evaluated]
    )


def _same(one: Policy, other: Policy) -> bool:
    """Whether two runs' policies are of one stage's folder, or have none."""
    folders = [policy.run.stages.get(policy.name.partition("@")[0]) for policy in (one, other)]
    return one.name == other.name and len({str(stage and stage.folder) for stage in folders}) == 1


def rank_correlation(x: ArrayLike, y: ArrayLike) -> tuple[float, int]:
    """Give Spearman's rho of two measures [N], ties sharing their mean rank, and how many points have both.

    NaN for fewer than three points and for a measure that is the same everywhere.
    """
    from scipy.stats import spearmanr  # here: it takes a second to import

    first, second = np.asarray(x, np.float64), np.asarray(y, np.float64)
    known = ~np.isnan(first + second)
    n = int(known.sum())
    if n < 3 or any(len(np.unique(values[known])) == 1 for values in (first, second)):
        return math.nan, n
    return float(spearmanr(first[known], second[known]).statistic), n
