"""Informativeness against K: what the rollouts at each K could teach, and whether the offline stage gained with it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from g2d_jax.report import format as fmt
from g2d_jax.report import informativeness
from g2d_jax.report.page import Note, Part, Section
from g2d_jax.report.study import Row, Study
from g2d_jax.report.study_compare import rank_correlation
from g2d_jax.report.study_entry import mean_of
from g2d_jax.report.study_tables import point_name
from g2d_jax.report.table import Text

MEASURES: dict[str, tuple[tuple[str, ...], Callable[[float], str]]] = {
    **{
        head: (("collect", "result", "informativeness", name), of)
        for name, (head, of) in informativeness.MEASURES.items()
    },
    "gap before, nats": (("offline", "result", "before", "gap_mean"), fmt.fixed(2)),
    "gap after, nats": (("offline", "result", "after", "gap_mean"), fmt.fixed(2)),
    "ranked before, %": (("offline", "result", "before", "frac_ranked"), fmt.percent),
    "implicit margin": (("offline", "result", "margins", "margin_mean"), fmt.fixed(2)),
    "margins right, %": (("offline", "result", "margins", "accuracy"), fmt.percent),
    "gradient signal / noise": (("offline", "result", "signal", "ratio"), fmt.fixed(3)),
    "noise scale, pairs": (("offline", "result", "signal", "noise_scale"), fmt.fixed(0)),
    "pairs": (("collect", "counts", "pairs"), fmt.count),
}
"""Head of the column -> where a stage's manifest has it, and its numbers as text."""

MEANINGS = (
    f"Of the rollouts that pairs were made from, at each K. {informativeness.MEANINGS} Gaps before and after are of "
    "the pairs' chosen and rejected completions, before and after offline training; the implicit margin is beta times "
    "what training moved of it. Signal / noise is the norm of the mean DPO gradient over the norm of its noise in a "
    "batch, the noise scale the number of pairs at which both are equal."
)


def mean(row: Row, name: str) -> str:
    """The mean over seeds as text."""
    path, written = MEASURES[name]
    return written(float(np.mean(row.by_seed(*path))))


def section(study: Study) -> Section:
    """Tables and correlations; empty for a study in which K does not vary."""
    parts: list[Part] = [Note(MEANINGS), table(study), correlations(study)] if study.swept else []
    return Section("informativeness", "Informativeness against K", parts)


def table(study: Study) -> Text:
    """Title, columns and rows: the means over seeds of all that was measured, a column for each K."""
    points = [
        (point_name(study, group, row), row)
        for group in study.offline
        if group.stops or group in study.swept
        for row in group.rows
    ]
    lines = [[name, *(mean(row, name) for _, row in points)] for name in MEASURES]
    known = [line for line in lines if set(line[1:]) != {fmt.UNKNOWN}]
    return "Means over seeds, by K", ["measure", *(name for name, _ in points)], known if points else []


def correlations(study: Study) -> Text:
    """Title, columns and rows: each measure's rank correlation with what the offline stage added, over all points."""
    entries = [entry for group in study.swept for row in group.rows for entry in row.entries]
    gains = [mean_of(entry.offline_gain) for entry in entries]
    lines = []
    for name in ("K", *MEASURES):
        found = [float(entry.reached) if name == "K" else entry.measure(*MEASURES[name][0]) for entry in entries]
        rho, n = rank_correlation(found, gains)
        if rho == rho:
            lines.append([name, f"{rho:+.2f}", str(n)])
    title = "Spearman's rank correlation with what the offline stage added on test, over points (K and seed). "
    title += "Points of one seed share a trajectory and all measures move with K: no test of a cause"
    return title, ["measure", "rank correlation", "points"], lines
