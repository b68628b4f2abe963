"""The headline of a study: what each K reached, cost and was worth, in tables and in a sentence of numbers."""

from __future__ import annotations

import math

import numpy as np

from g2d_jax import frontier
from g2d_jax.report import format as fmt
from g2d_jax.report.study import Group, Row, Study, described
from g2d_jax.report.study_compare import Advantage, advantage, best_at, choices, chosen
from g2d_jax.report.table import Text, known, same

OUT_OF_RANGE = "out of range"
FEW_SEEDS = 5
"""Intervals of fewer seeds are too narrow (see frontier.py)."""


def percent_interval(found: frontier.Interval | None) -> str:
    """A mean with its interval in percent, "84.2 [83.1, 85.3]"."""
    if found is None or math.isnan(found.mean):
        return fmt.UNKNOWN
    return f"{100 * found.mean:.1f} [{100 * found.low:.1f}, {100 * found.high:.1f}]"


def points_interval(found: frontier.Interval | None) -> str:
    """A difference with its interval in percentage points, "+3.1 [+2.0, +4.2]"."""
    if found is None or math.isnan(found.mean):
        return fmt.UNKNOWN
    return f"{100 * found.mean:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"


def seed_spread(row: Row) -> str:
    """The standard deviation over seeds in points, a dash for a single seed."""
    return fmt.percent(frontier.seed_spread(row.accuracies))


def worth(found: Advantage | None) -> str:
    """An advantage in points; how many seeds it is of, where the baseline did not reach the cost of all."""
    if found is None or not found.seeds:
        return fmt.UNKNOWN
    if found.difference is None:
        return OUT_OF_RANGE
    some = f" ({found.difference.seeds} of {found.seeds} seeds)" if found.difference.seeds < found.seeds else ""
    return points_interval(found.difference) + some


def point_name(study: Study, group: Group, row: Row) -> str:
    """K, with the group before it where a study has several groups that end offline."""
    return f"{group.name}, K = {steps_of(row)}" if len(study.offline) > 1 else steps_of(row)


def steps_of(row: Row) -> str:
    """K of a row, the mean of those reached where seeds differ."""
    reached = {entry.reached for entry in row.entries}
    return str(reached.pop()) if len(reached) == 1 else f"{row.reached:.1f} on average"


def costs_of(row: Row) -> dict[str, str]:
    """FLOPs, generated, trained, device time and price."""
    price = row.cost("price")
    return {
        "FLOPs": fmt.quantity(row.cost("flops")),
        "generated": fmt.quantity(row.cost("generated")),
        "trained": fmt.quantity(row.cost("trained")),
        "device time": fmt.duration(row.cost("device_seconds")),
        "price": f"{price:,.2f}" if price == price else fmt.UNKNOWN,
    }


def flops(amount: float) -> str:
    """An amount of compute, "2.58 TFLOPs"."""
    text = fmt.quantity(amount)
    return f"{text}{' ' * text[-1:].isdigit()}FLOPs"


def pairs_of(row: Row) -> str:
    """The mean number of preference pairs."""
    return fmt.count(float(np.mean(row.by_seed("collect", "counts", "pairs"))))


def headline(study: Study) -> Text:
    """Title, columns and rows: every K of every group that ends offline, and last, for each, the K chosen on dev."""
    lines = [_line(study, group, row, point_name(study, group, row)) for group in study.offline for row in group.rows]
    for group in study.swept:
        if (row := chosen(group.rows)) is not None:
            lines.append(_line(study, group, row, f"best on dev: {point_name(study, group, row)}"))
    title = "Offline training after K online steps. Offline gain: over the policy it started from"
    title += "; budget: FLOPs" if study.baselines else ""
    title += f"; in points, paired by seed and problem. {' '.join(filter(None, [choices(study), caution(study)]))}"
    # `caution` says how many seeds there are, if all rows have as many.
    return known(title, lines, hidden=same(lines, "seeds"))


def _head(study: Study) -> str:
    return "point" if len(study.offline) > 1 else "K"


def caution(study: Study) -> str:
    """What intervals are, and that those of few seeds are too narrow."""
    seeds = {len(row.entries) for group in study.groups for row in group.rows} or {0}
    many = f"{min(seeds)} seed{'s' * (min(seeds) != 1)}" if len(seeds) == 1 else f"{min(seeds)} to {max(seeds)} seeds"
    words = f"Intervals are 95 %, over problems and {many}"
    words += f": with fewer than {FEW_SEEDS} seeds they are too narrow" if min(seeds) < FEW_SEEDS else ""
    return words + ". Costs leave out supervised fine-tuning, which is the same for all"


def _against(study: Study) -> str:
    """Whom `_versus` compares with."""
    if len(study.baselines) > 1:
        return "against the best GRPO on dev at this budget"
    return f"against {study.baselines[0].name} at this budget"


def _versus(study: Study, group: Group, row: Row) -> str:
    """What a row is worth against the baseline `best_at` its cost, named if there are several."""
    best = best_at(study, row, "flops")
    if best is None:
        on_dev = any(one.dev == one.dev for baseline in study.baselines for one in baseline.rows)
        return OUT_OF_RANGE if on_dev else fmt.UNKNOWN
    text = worth(advantage(group, row, best, "flops"))
    named = len(study.baselines) > 1 and text not in (OUT_OF_RANGE, fmt.UNKNOWN)
    return f"{text}, {described(best.values) or best.name}" if named else text


def _line(study: Study, group: Group, row: Row, name: str) -> dict[str, str]:
    return {
        _head(study): name,
        **accuracy_of(row),
        "offline gain": points_interval(row.offline_gain),
        **({_against(study): _versus(study, group, row)} if study.baselines else {}),
        "pairs": pairs_of(row),
        **costs_of(row),
    }


def accuracy_of(row: Row) -> dict[str, str]:
    """Seeds, accuracy on dev and on test, and its spread over seeds."""
    return {
        "seeds": str(len(row.entries)),
        "dev %": fmt.percent(row.dev),
        "test % [95 %]": percent_interval(row.accuracy),
        "seed std": seed_spread(row),
    }


def baselines(study: Study) -> Text:
    """Title, columns and rows of online training alone."""
    lines = [
        {"online training alone": group.name, "K": steps_of(row), **accuracy_of(row), **costs_of(row)}
        for group in study.baselines
        for row in group.rows
    ]
    return known("Online training alone, which goes on", lines)


def sentence(study: Study) -> str:
    """What the study measured: each group's K chosen on dev, and the baseline's that is chosen there too."""
    if not study.entries:
        return "No point of this study is finished and tested yet."
    parts = []
    for group in study.swept:
        if (row := chosen(group.rows)) is not None:
            parts.append(_told(study, group, row))
    if not parts:
        return _all_told(study)
    problems = len(study.groups[0].rows[0].ids)
    return f"On {fmt.count(problems)} test problems: " + " ".join(parts)


def _told(study: Study, group: Group, row: Row) -> str:
    seeds = f"{len(row.entries)} seed{'s' * (len(row.entries) > 1)}"
    text = (
        f"{group.name} with K = {steps_of(row)}, chosen on dev, answers {percent_interval(row.accuracy)} % correctly "
    )
    text += f"({seeds}) after {flops(row.cost('flops'))}"
    if (gain := row.offline_gain) is not None:
        text += f"; its offline stage added {points_interval(gain)} points"
    best = best_at(study, row, "flops")
    found = advantage(group, row, best, "flops") if best else None
    if best and found and found.difference is not None:
        why = ", the best on dev there," if len(study.baselines) > 1 else ""
        text += f"; {best.name}{why} has at these FLOPs {_less(found.difference)}"
    elif _versus(study, group, row) == OUT_OF_RANGE:
        text += "; no online training alone has points on both sides of these FLOPs"
    return text + "."


def _less(difference: frontier.Interval) -> str:
    lower = -100 * difference.mean
    ends = f"[{-100 * difference.high:+.1f}, {-100 * difference.low:+.1f}]"
    return f"{abs(lower):.1f} points {'less' if lower < 0 else 'more'} ({lower:+.1f} {ends})"


def _all_told(study: Study) -> str:
    """Without a choice of K: the span of accuracies."""
    rows = [row for group in study.groups for row in group.rows]
    means = [row.accuracy.mean for row in rows]
    span = f"{fmt.percent(min(means))} to {fmt.percent(max(means))} %"
    text = f"{len(study.entries)} points of {len(rows)} settings answer {span} of {len(rows[0].ids):,} test problems."
    return " ".join(filter(None, [text, choices(study)]))
