"""Informativeness against K: what the rollouts at each K could teach, and whether the offline stage gained with it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from g2d_jax.report import format as fmt
from g2d_jax.report import markup
from g2d_jax.report.study import Row, Study
from g2d_jax.report.study_compare import rank_correlation
from g2d_jax.report.study_entry import Entry, mean_of
from g2d_jax.report.study_tables import point_name
from g2d_jax.report.table import Text

Written = Callable[[float], str]


def _fixed(digits: int) -> Written:
    return lambda value: fmt.UNKNOWN if value != value else f"{value:.{digits}f}"


ROLLOUTS, OF_STAGE = ("collect", "result", "informativeness"), ("offline", "result")

MEASURES: dict[str, tuple[tuple[str, ...], float, Written]] = {
    "mixed prompts, %": ((*ROLLOUTS, "frac_mixed"), 100, _fixed(1)),
    "pass rate, %": ((*ROLLOUTS, "pass_rate"), 100, _fixed(1)),
    "reward variance": ((*ROLLOUTS, "reward_variance"), 1, _fixed(3)),
    "token entropy, nats": ((*ROLLOUTS, "entropy"), 1, _fixed(3)),
    "distinct answers": ((*ROLLOUTS, "distinct_answers"), 1, _fixed(2)),
    "ECE": ((*ROLLOUTS, "ece"), 1, _fixed(3)),
    "AUROC": ((*ROLLOUTS, "auroc"), 1, _fixed(3)),
    "confidence, %": ((*ROLLOUTS, "confidence"), 100, _fixed(1)),
    "gap before, nats": ((*OF_STAGE, "before", "gap_mean"), 1, _fixed(2)),
    "gap after, nats": ((*OF_STAGE, "after", "gap_mean"), 1, _fixed(2)),
    "ranked before, %": ((*OF_STAGE, "before", "frac_ranked"), 100, _fixed(1)),
    "implicit margin": ((*OF_STAGE, "margins", "margin_mean"), 1, _fixed(2)),
    "margins right, %": ((*OF_STAGE, "margins", "accuracy"), 100, _fixed(1)),
    "gradient signal / noise": ((*OF_STAGE, "signal", "ratio"), 1, _fixed(3)),
    "noise scale, pairs": ((*OF_STAGE, "signal", "noise_scale"), 1, _fixed(0)),
    "length, tokens": ((*ROLLOUTS, "mean_length"), 1, _fixed(1)),
    "length, correct": ((*ROLLOUTS, "mean_length_correct"), 1, _fixed(1)),
    "length, incorrect": ((*ROLLOUTS, "mean_length_incorrect"), 1, _fixed(1)),
    "pairs": (("collect", "counts", "pairs"), 1, fmt.count),
}
"""Head of the column -> where a stage's manifest has it, what it is multiplied by, its numbers as text."""

MEANINGS = (
    "Of the rollouts that pairs were made from, at each K. Mixed prompts can give pairs: they have right and wrong "
    "completions or, of scalar rewards, different ones. Confidence is the geometric mean of a completion's token "
    "probabilities; ECE and AUROC tell whether it predicts correctness (0 and 1 are perfect, an AUROC of 0.5 is "
    "chance). The gap is the log-prob of the chosen less "
    "that of the rejected completion, before and after offline training; the implicit margin is beta times what "
    "training moved of it. Signal / noise is the norm of the mean DPO gradient over the norm of its noise in a batch, "
    "the noise scale the number of pairs at which both are equal."
)


def values(row: Row, name: str) -> np.ndarray:
    """A measure of each seed [seeds], in its unit."""
    path, factor, _ = MEASURES[name]
    return factor * row.by_seed(*path)


def value(entry: Entry, name: str) -> float:
    """A measure of one point."""
    path, factor, _ = MEASURES[name]
    return factor * entry.measure(*path)


def mean(row: Row, name: str) -> str:
    """The mean over seeds as text."""
    return MEASURES[name][2](float(np.mean(values(row, name))))


def section(study: Study) -> str:
    """Tables and correlations; "" for a study in which K does not vary."""
    if not study.swept:
        return ""
    parts = [markup.paragraph(MEANINGS, "hint")]
    for name, made in {"By K": table, "Did the offline stage gain with it?": correlations}.items():
        title, columns, rows = made(study)
        parts.append(f"<h3>{name}</h3>{markup.table(title, columns, rows)}" if rows else "")
    return markup.section("informativeness", "Informativeness against K", *parts)


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
        found = [float(entry.reached) if name == "K" else value(entry, name) for entry in entries]
        rho, n = rank_correlation(found, gains)
        if rho == rho:
            lines.append([name, f"{rho:+.2f}", str(n)])
    title = "Spearman's rank correlation with what the offline stage added on test, over points (K and seed). "
    title += "Points of one seed share a trajectory and all measures move with K: no test of a cause"
    return title, ["measure", "rank correlation", "points"], lines
