"""Sections of a report but result and browser: each takes the run and returns HTML, "" with nothing to show."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from g2d_jax.accounting import TRAINING
from g2d_jax.report import format as fmt
from g2d_jax.report import markup, summary
from g2d_jax.report.charts import Panel, Series, line_chart
from g2d_jax.report.goodput import compiled_table, goodput_table
from g2d_jax.report.page import Part, Section
from g2d_jax.report.run import Run, Stage
from g2d_jax.report.spreadsheet import leaves
from g2d_jax.report.table import Text
from g2d_jax.storage import plain

CURVES: tuple[tuple[str, tuple[str, ...], bool], ...] = (
    ("Reward", ("reward", "accuracy"), True),
    ("Token entropy, nats", ("entropy",), True),
    (
        "Completion length, tokens",
        ("completions/mean_length", "completions/mean_length_correct", "completions/mean_length_incorrect"),
        True,
    ),
    ("KL divergence from the reference, nats", ("kl",), True),
    ("Spread of reward within groups", ("reward_std",), True),
    ("Share of groups without signal", ("frac_reward_zero_std",), True),
    ("Share of completions cut at the limit", ("completions/clipped_ratio",), True),
    ("Length in pairs, tokens", ("pairs/chosen_length", "pairs/rejected_length"), True),
    ("Implicit rewards", ("rewards/chosen", "rewards/rejected"), True),
    ("Implicit reward margin", ("rewards/margins",), True),
    ("Share of pairs ranked correctly", ("rewards/accuracies",), True),
    ("Log-probability of completions, nats", ("logps/chosen", "logps/rejected"), True),
    ("Loss", ("loss",), False),
    ("Gradient norm", ("grad_norm",), True),
    ("Learning rate", ("learning_rate",), False),
)
"""Charts: title, metrics, and whether those of several stages go on one y axis. Other metrics fold."""

ELSEWHERE = ("warning", "goodput")
"""Kinds of logs that other sections show, "warning/CAUSE" among them."""

NOTE = (
    "Every step is drawn, or the mean of neighbouring steps with their range as a band. Lines are of what a stage "
    "trained on: rollouts of the policy at its last synchronisation, or pairs. Fresh samples are of the trained policy "
    "itself, on the same prompts with the same random numbers each time; a stage's cost includes theirs only where "
    "they decide its end (stop=adaptive)."
)


def compute(run: Run) -> Section:
    """What each stage cost."""
    cost = [summary.compute_table(run.manifests, summary.price(run))] if run.manifests else []
    return Section("compute", "Compute", [*cost, goodput_table(run.manifests), compiled_table(run.manifests)])


def curves(run: Run) -> Section:
    """What training did, and metrics over steps: those of several stages side by side first, then stage by stage."""
    table = {key: points for key, points in logged_metrics(run).items() if key[1].partition("/")[0] not in ELSEWHERE}
    stages = _order(run, (stage for stage, _, _ in table))
    named = {name for _, names, _ in CURVES for name in names}
    others = sorted({name for _, _, name in table} - named)
    across: list[str] = []
    single: dict[str, list[tuple[str, str]]] = {stage: [] for stage in stages}
    for title, names, shared in (*CURVES, *((name, (name,), False) for name in others)):
        drawn = (Panel(stage, list(_series(table, stage, names))) for stage in stages)
        panels = [panel for panel in drawn if panel.series]
        if shared and len(panels) > 1:
            across.append(line_chart(title, panels))
            continue
        for panel in panels:
            single[panel.name].append((title, line_chart(title, [panel])))
    parts = [_curve_group("Across stages", across, ())]
    for stage, figures in single.items():
        main = [figure for title, figure in figures if title not in others]
        parts.append(_curve_group(stage, main, [figure for title, figure in figures if title in others]))
    note = [markup.paragraph(NOTE, "hint")] if any(parts) else []
    return Section("curves", "Training", [_trained(run), *note, *parts])


def _trained(run: Run) -> Text:
    """What finished stages with updates counted, and what their generation took, in a column each."""
    found = {
        str(one["name"]): dict(leaves({part: one.get(part, {}) for part in ("counts", "generation")}))
        for one in run.manifests
        if one.get("kind") in TRAINING
    }
    measures = dict.fromkeys(measure for counted in found.values() for measure in counted)
    rows = [[_words(name), *(_figure(one.get(name, math.nan)) for one in found.values())] for name in measures]
    return "What training did", ["measure", *found], rows


def _curve_group(title: str, figures: Sequence[str], folded: Sequence[str]) -> str:
    more = markup.details(f"More metrics of {title} ({len(folded)})", markup.charts(*folded))
    body = markup.charts(*figures) + more
    return markup.heading(title) + body if body else ""


Metrics = dict[tuple[str, str, str], list[tuple[float, float]]]
"""(stage, kind of log, metric) -> points (step, value). Evaluations are left out: the results section has them."""


def logged_metrics(run: Run) -> Metrics:
    """All that the run's stages logged."""
    table: Metrics = {}
    evaluations = {stage.name for stage in run.stages if stage.kind == "evaluate"}
    for record in run.metrics:
        if record["stage"] in evaluations:
            continue
        for name, number in record["metrics"].items():
            table.setdefault((record["stage"], record["kind"], name), []).append((record["step"], number))
    return {key: sorted(points) for key, points in table.items()}


def _order(run: Run, logged: Iterable[str]) -> list[str]:
    """Stages that logged anything: in the order of their folders, then in that of the log."""
    there = dict.fromkeys(logged)
    order = [stage.name for stage in run.stages if stage.name in there]
    return [*order, *(stage for stage in there if stage not in order)]


def _series(table: Metrics, stage: str, names: Sequence[str]) -> Iterator[Series]:
    for (at, kind, name), points in table.items():
        if at == stage and name in names:
            x, y = zip(*points, strict=True)
            yield Series(name + {"train": "", "probe": ", fresh"}.get(kind, f" ({kind})"), x, y)


def pairs(run: Run) -> Section:
    """Counts of every collect stage and the lengths of its pairs."""
    parts = [part for stage in run.stages if stage.kind == "collect" for part in _pairs(stage)]
    return Section("pairs", "Preference pairs", parts)


def _pairs(stage: Stage) -> list[Part]:
    manifest = stage.manifest or {}
    figures = (figure for part in ("counts", "result") for figure in leaves(manifest.get(part, {})))
    rows = [[_words(name), _figure(value)] for name, value in figures]
    preferences = stage.preferences()
    chosen = [len(row.chosen_ids) for row in preferences]
    rejected = [len(row.rejected_ids) for row in preferences]
    lengths = [
        [name, fmt.value(float(np.mean(side))), *(fmt.count(x) for x in np.percentile(side, [10, 50, 90]))]
        for name, side in (("chosen", chosen), ("rejected", rejected))
        if side
    ]
    columns = ["side", "mean", "10 %", "median", "90 %"]
    return [
        (f"Counts and means of {stage.name}", ["what", "value"], rows),
        (f"Length of {len(chosen):,} pairs of {stage.name}, tokens", columns, lengths),
        markup.details(f"How {stage.name} made its pairs (preferences/_manifest.json)", as_json(stage.provenance())),
    ]


def _words(measure: str) -> str:
    return measure.removeprefix("counts/").replace("_", " ").replace("/", ", ")


def _figure(value: float) -> str:
    return fmt.count(value) if value.is_integer() else fmt.value(value)


def provenance(run: Run) -> Section:
    """Settings and environment."""
    parts = {"Configuration (config.json)": run.config, "Environment (environment.json)": run.environment}
    return Section("settings", "Settings", [markup.details(title, as_json(value)) for title, value in parts.items()])


def as_json(value: Mapping[str, Any]) -> str:
    """Markup of a value as it is in JSON; "" without any."""
    text = json.dumps(plain(value), indent=2, ensure_ascii=False)
    return markup.preformatted(text, limit=200_000) if value else ""
