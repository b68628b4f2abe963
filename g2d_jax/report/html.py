"""report.html: one file without requests, to be opened anywhere and sent to anyone.

Its only script filters what is on the page (script.py); the Content-Security-Policy allows its bytes and no others.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime

from g2d_jax.report import format as fmt
from g2d_jax.report import markup, sections, summary
from g2d_jax.report.browser import browser
from g2d_jax.report.charts import COLOURS
from g2d_jax.report.informativeness import informativeness
from g2d_jax.report.results import results
from g2d_jax.report.run import Run
from g2d_jax.report.script import SCRIPT
from g2d_jax.report.style import STYLE

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

LINKS = {"results": "Result", "compute": "Compute", "curves": "Training"}
LINKS |= {"informativeness": "Informativeness", "pairs": "Pairs", "browser": "Browser"}
LINKS |= {"settings": "Settings"}


def page(run: Run) -> str:
    """The whole document."""
    body = "".join(section(run) for section in SECTIONS)
    return document(f"{run.name}: G2D report", _header(run), body, LINKS)


def document(title: str, header: str, body: str, links: Mapping[str, str]) -> str:
    """A page of the report's style. title: text; header, body: markup; links: anchors of sections with their names.

    The script stands on it only where there is a list to filter.
    """
    listed = "".join(
        f'<a href="#{name}">{shown}</a>' for name, shown in links.items() if f'<section id="{name}">' in body
    )
    script = SCRIPT if "<div data-listing=" in body else ""
    policy = f"default-src 'none'; style-src {_digest(STYLE)}; img-src data:; base-uri 'none'; form-action 'none'"
    policy += f"; script-src {_digest(script)}" if script else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">'
        f"<title>{markup.shown(title, plain=True)}</title><style>{STYLE}</style></head>\n"
        f'<body>{header}<nav aria-label="Sections">{listed}</nav>\n<main>{body}</main>'
        + (f"<script>{script}</script>" if script else "")
        + "</body></html>\n"
    )


def _digest(source: str) -> str:
    """What a Content-Security-Policy calls these bytes."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"


def _header(run: Run) -> str:
    evaluations = run.evaluations
    latest = evaluations[-1].manifest if evaluations else None
    sentence = summary.verdict(latest).replace(" ± ", "\u00a0±\u00a0").replace(" %", "\u00a0%")  # kept together
    parts = [
        markup.paragraph(_line(run), "eyebrow"),
        f"<h1>{markup.shown(run.name)}</h1>",
        markup.paragraph(sentence, "verdict"),
        _cards(latest),
        markup.paragraph(summary.state(run), "warning"),
        _warnings(run),
    ]
    return f"<header>{''.join(parts)}</header>"


def _warnings(run: Run) -> str:
    """What went wrong on the way, with what to try, in a box."""
    listed = "".join(f"<li>{markup.shown(text)}</li>" for text in run.warnings)
    return f'<div class="warning"><strong>Warnings</strong><ul>{listed}</ul></div>' if listed else ""


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
    if manifest is None:
        return ""
    if not summary.has_accuracy(manifest):
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
