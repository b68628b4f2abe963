"""Warm-ups that stopped by themselves: which K they chose, why, and how that compares with K chosen by a sweep."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from g2d_jax.report import format as fmt
from g2d_jax.report.page import Note, Section
from g2d_jax.report.study import Group, Row, Study
from g2d_jax.report.study_compare import choices, chosen, difference, differences, swept_rows
from g2d_jax.report.study_entry import Entry, mean_of
from g2d_jax.report.study_tables import flops, points_interval, steps_of
from g2d_jax.report.table import Text


def section(study: Study) -> Section:
    """A table for each group whose warm-up may end by itself."""
    tables = [table(study, group, row) for group in study.groups if group.stops for row in group.rows]
    return Section("stopping", "K that chose itself", [Note(note(study)), *tables] if tables else [])


def note(study: Study) -> str:
    """What the columns compare with, and the sweep's median compute."""
    rows = swept_rows(study)
    text = (
        "Why: online steps had come to buy less per FLOP than offline training was predicted to (adaptive), at a "
        "budget, or at the last of its steps. Rates, in points a TFLOP: what the last probe saw of online steps, in "
        "accuracy and predicted gain together (± standard error), and predicted of offline training. Differences are "
        "on test, in points, of the same seed and problems, to the swept K that is best on dev."
    )
    if rows:
        median = float(np.median([row.cost("flops") for row in rows]))
        text += f" The swept K spent {flops(median)} in the median, {_all_swept(rows)} in all"
        text += " (each seed's shared steps counted once for every K)."
    return " ".join(filter(None, [text, choices(study)]))


def _all_swept(rows: Sequence[Row]) -> str:
    return flops(sum(row.cost("flops") * len(row.entries) for row in rows))


def table(study: Study, group: Group, row: Row) -> Text:
    """Title, columns and rows, seed by seed and over all: K reached, why, the forecast, accuracy, cost, differences."""
    best = chosen(swept_rows(study))
    others = [] if best is None else [(f"over K = {steps_of(best)}, best on dev", best)]
    columns = ["seed", "K", "why", "online rate", "offline rate", "dev %", "test %", "FLOPs", "device time"]
    compared = [differences(row, other) for _, other in others]
    lines = [
        [*_line(entry, row.accuracies[i]), *(_one(found.get(entry.seed)) for found in compared)]
        for i, entry in enumerate(row.entries)
    ]
    total = [points_interval(difference(row, other)) for _, other in others]
    lines.append(["all seeds", f"{row.reached:.1f}", "", "", "", fmt.percent(row.dev), fmt.percent(row.accuracy.mean)])
    lines[-1] += [fmt.quantity(row.cost("flops")), fmt.duration(row.cost("device_seconds")), *total]
    return f"{group.name}: where the warm-up ended", [*columns, *(name for name, _ in others)], lines


def _line(entry: Entry, accuracies: np.ndarray) -> list[str]:
    stop = entry.stop
    probes = stop.get("probes") or [{}]
    last = {
        name: fmt.number(probes[-1], name) for name in ("slope", "slope_error", "step_flops", "gain", "offline_flops")
    }
    return [
        str(entry.seed),
        str(entry.reached),
        f"{stop['rule']} ({stop['measure']})" if "measure" in stop else str(stop["rule"]),
        fmt.spread(last["slope"] / last["step_flops"] * 1e12, last["slope_error"] / last["step_flops"] * 1e12),
        fmt.percent(last["gain"] / last["offline_flops"] * 1e12),
        fmt.percent(fmt.number(entry.result("dev"), "mean")),
        fmt.percent(mean_of(accuracies)),
        fmt.quantity(entry.costs["flops"]),
        fmt.duration(entry.costs["device_seconds"]),
    ]


def _one(found: np.ndarray | None) -> str:
    """One seed's difference with its standard error over problems."""
    known = np.array([]) if found is None else found[~np.isnan(found)]
    if not len(known):
        return fmt.UNKNOWN
    error = float(known.std(ddof=1)) / math.sqrt(len(known)) if len(known) > 1 else math.nan
    return fmt.change(float(known.mean()), error)
