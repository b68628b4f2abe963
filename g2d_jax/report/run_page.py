"""The report of a run."""

from __future__ import annotations

from datetime import UTC, datetime

from g2d_jax.report import format as fmt
from g2d_jax.report import markup, sections, summary
from g2d_jax.report.browser import browser
from g2d_jax.report.charts import COLOURS
from g2d_jax.report.informativeness import informativeness
from g2d_jax.report.page import Report
from g2d_jax.report.results import results
from g2d_jax.report.run import Run

SECTIONS = (
    results,
    sections.compute,
    sections.curves,
    informativeness,
    sections.pairs,
    browser,
    sections.provenance,
)
"""Functions of the run, in the order of the page; a section that has nothing to show is left out."""


def report(run: Run) -> Report:
    """Put together all that there is to show of a run."""
    latest = run.evaluations[-1].manifest if run.evaluations else None
    return Report(
        kind="report",
        name=run.name,
        eyebrow=_line(run),
        verdict=summary.verdict(latest),
        warnings=[*filter(None, [summary.state(run)]), *run.warnings],
        sections=[section(run) for section in SECTIONS],
        cards=_cards(latest),
    )


def _line(run: Run) -> str:
    """When, which config, which seed."""
    times = [float(record["time"]) for record in run.metrics]
    parts = ["G2D report"]
    parts += [f"measured until {datetime.fromtimestamp(max(times), UTC):%d %B %Y, %H:%M} UTC"] if times else []
    parts += [f"config {run.config['name']}"] if run.config.get("name") else []
    parts += [f"seed {run.config['seed']}"] if "seed" in run.config else []
    return " · ".join(parts)


def _cards(manifest: summary.Manifest | None) -> str:
    """The policies' accuracies, large, with the paired changes between them."""
    if manifest is None or not summary.has_accuracy(manifest):
        return ""
    gains = summary.gains(manifest)
    cards = []
    for i, policy in enumerate(summary.policies(manifest)):
        mean, error = fmt.number(policy, "mean"), fmt.number(policy, "sem_clustered")
        gain = fmt.change(*gains[policy["name"]]) + " points" if policy["name"] in gains else "starting point"
        margin = "" if error != error else f"<small>± {100 * error:.1f}</small>"
        cards.append(
            f'<li class="s{i % COLOURS}">'
            f"<span>{markup.shown(summary.policy_name(policy))}</span>"
            f"<strong>{fmt.percent(mean)}<small>%</small> {margin}</strong><span>{markup.shown(gain)}</span></li>"
        )
    return f'<ol class="cards">{"".join(cards)}</ol>'
