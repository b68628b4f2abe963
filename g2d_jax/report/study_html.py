"""NAME.html and NAME.md of a study."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from g2d_jax.report import format as fmt
from g2d_jax.report import html, markup, study_ablations, study_cause, study_frontier, study_spectrum, study_stopping
from g2d_jax.report.study import Study, read_study
from g2d_jax.report.study_csv import document as csv_document
from g2d_jax.report.study_entry import Entry, mean_of
from g2d_jax.report.study_tables import baselines, equal_compute, headline, sentence
from g2d_jax.report.table import Text, markdown_table, one_line, table
from g2d_jax.storage import PathLike, fingerprint, plain, read_json, write_bytes

LINKS = {"headline": "Result", "spectrum": "Offline to online", "frontier": "Compute"}
LINKS |= {"informativeness": "Informativeness"}
LINKS |= {"settings-compared": "Settings compared", "stopping": "K that chose itself", "points": "Points"}
LINKS |= {"settings": "Settings"}

Show = Callable[[str, list[str], list[list[str]]], None]


def write_study(workdir: PathLike, name: str, *, show: Show | None = None) -> list[str]:
    """Write WORKDIR/NAME.html, NAME.md and NAME.csv of a study, finished or not; returns their paths in this order.

    show: is given the headline table (title, columns, rows), or that of arms from offline to online, such as to print
    it. The same directory gives the same bytes. Raises ValueError if it holds no study of that name or a file is
    damaged, OSError.
    """
    study = read_study(workdir, name)
    if show is not None and study.offline:
        show(*headline(study))
    elif show is not None and study_spectrum.arms(study):
        show(*study_spectrum.table(study))
    documents = {"html": page(study), "md": markdown(study), "csv": csv_document(study)}
    for kind, text in documents.items():
        write_bytes(study.workdir / f"{name}.{kind}", text.encode())
    return [str(study.workdir / f"{name}.{kind}") for kind in documents]


def page(study: Study) -> str:
    """The whole document."""
    parts = (
        _headline(study),
        study_spectrum.section(study),
        study_frontier.section(study),
        study_cause.section(study),
        study_ablations.section(study),
        study_stopping.section(study),
        _points(study),
        _settings(study),
    )
    header = "".join(
        [
            markup.paragraph(_line(study), "eyebrow"),
            f"<h1>{markup.shown(study.name)}</h1>",
            markup.paragraph(_kept_together(study_spectrum.sentence(study) or sentence(study)), "verdict"),
            markup.paragraph(state(study), "warning"),
        ]
    )
    return html.document(f"{study.name}: G2D study", f"<header>{header}</header>", "".join(parts), LINKS)


def _kept_together(text: str) -> str:
    """Without line breaks within intervals and before percent signs."""
    return re.sub(r" \[[^\]]*\]( %)?", lambda found: found[0].replace(" ", "\u00a0"), text)


def _headline(study: Study) -> str:
    title, columns, rows = headline(study)
    total = bool(rows) and "best on dev" in rows[-1][0]
    return markup.section("headline", "Result", markup.table(title, columns, rows, total=total))


def _line(study: Study) -> str:
    """How much there is, and until when it was measured."""
    manifests = [manifest for entry in study.entries for manifest in entry.manifests.values()]
    times = [fmt.number(manifest, "started") + fmt.number(manifest, "seconds") for manifest in manifests]
    known = [time for time in times if time == time]
    seeds = {entry.seed for entry in study.entries}
    parts = ["G2D study", f"{len(study.entries)} points, {len(seeds)} seeds"]
    parts += [f"measured until {datetime.fromtimestamp(max(known), UTC):%d %B %Y, %H:%M} UTC"] if known else []
    return " · ".join(parts)


def state(study: Study) -> str:
    """What is missing, "" if nothing is."""
    parts = []
    if study.unfinished:
        total = len(study.unfinished) + len(study.untested) + len(study.entries)
        parts.append(f"{len(study.unfinished)} of {total} points are not finished and left out (listed under Points).")
    if study.untested:
        parts.append(f"{len(study.untested)} points were not evaluated on the test split and are left out.")
    if len({row.seeds for group in study.groups for row in group.rows}) > 1:
        parts.append("Rows have different seeds: their means are not yet comparable.")
    return " ".join(parts)


def points_table(study: Study) -> Text:
    """Title, columns and rows: every point by itself."""
    return table("Every point that is finished", [_point(entry) for entry in study.entries])


def _point(entry: Entry) -> dict[str, str]:
    cost, answers = entry.costs, entry.answers("test")
    gain = 100 * mean_of(entry.offline_gain)
    return {
        **{"point": entry.label, "seed": str(entry.seed), "K": str(entry.reached)},
        "dev %": fmt.percent(fmt.number(entry.result("dev"), "mean")),
        "test %": fmt.percent(mean_of(None if answers is None else answers.values)),
        "offline gain": f"{gain:+.1f}" if gain == gain else fmt.UNKNOWN,
        "pairs": fmt.count(entry.measure("collect", "counts", "pairs")),
        "FLOPs": fmt.quantity(cost["flops"]),
        "generated": fmt.quantity(cost["generated"]),
        "trained": fmt.quantity(cost["trained"]),
        "device time": fmt.duration(cost["device_seconds"]),
        "verifier CPU": fmt.duration(cost["verifier_cpu_seconds"]),
    }


def _points(study: Study) -> str:
    title, columns, rows = points_table(study)
    missing = [("not finished", label) for label in study.unfinished]
    missing += [("not tested", label) for label in study.untested]
    listed = [[label, why] for why, label in missing]
    return markup.section(
        "points",
        "Points",
        markup.details(f"Every point by seed ({len(rows)})", markup.table(title, columns, rows)),
        markup.details(
            f"Points left out ({len(listed)})",
            markup.table("Points left out of this page", ["point", "why"], listed),
        ),
    )


def _settings(study: Study) -> str:
    found = environments(study)
    folded = "".join(
        markup.details(f"Environment of {count} stages (environment.json)", _json(environment))
        for environment, count in found
    )
    return markup.section(
        "settings", "Settings and provenance", markup.details("Configuration of the study", _json(study.config)), folded
    )


def environments(study: Study) -> list[tuple[dict[str, Any], int]]:
    """The environments the stages were made in, but for the command, with how many stages; the most common first."""
    folders = {str(folder): folder for entry in study.entries for folder in entry.folders.values()}
    found: dict[str, tuple[dict[str, Any], int]] = {}
    for folder in folders.values():
        if (folder / "environment.json").exists():
            content = {k: v for k, v in read_json(folder / "environment.json").items() if k != "command"}
            key = fingerprint(content)
            found[key] = content, found.get(key, (content, 0))[1] + 1
    return sorted(found.values(), key=lambda pair: (-pair[1], fingerprint(pair[0])))


def _json(value: Any) -> str:
    return markup.preformatted(json.dumps(plain(value), indent=2, ensure_ascii=False), limit=200_000)


def markdown(study: Study) -> str:
    """The text of NAME.md: sentence and tables."""
    tables = [headline(study), equal_compute(study), study_frontier.pareto(study), baselines(study)]
    tables += [study_cause.table(study), study_cause.correlations(study)] if study.swept else []
    compared = list(study_ablations.arms(study))
    stopped = [(group, row) for group in study.groups if group.stops for row in group.rows]
    parts = [
        f"# {one_line(study.name)}",
        one_line(study_spectrum.sentence(study) or sentence(study)),
        one_line(state(study)),
    ]
    if study_spectrum.arms(study):
        parts.append(one_line(study_spectrum.note(study)))
        tables = [study_spectrum.table(study), study_spectrum.generation_table(study), *tables]
    parts += [markdown_table(*one) for one in tables]
    for name, settings in compared:
        parts += [markdown_table(*study_ablations.table(name, settings)), study_ablations.note(settings)]
    parts += [markdown_table(*study_stopping.table(study, group, row)) for group, row in stopped]
    parts += [f"- not finished: {one_line(label)}" for label in study.unfinished]
    return "\n\n".join(filter(None, parts)) + "\n"
