"""NAME.html and NAME.md of a study."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from g2d_jax.report import format as fmt
from g2d_jax.report import markup, study_ablations, study_cause, study_frontier, study_spectrum, study_stopping
from g2d_jax.report.page import Report, Section, write
from g2d_jax.report.sections import as_json
from g2d_jax.report.study import Study, read_study
from g2d_jax.report.study_csv import document as csv_document
from g2d_jax.report.study_tables import headline, sentence
from g2d_jax.storage import PathLike, fingerprint, read_json

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
    return write(report(study), csv_document(study), study.workdir, name)


def report(study: Study) -> Report:
    """Put together all that a study shows."""
    return Report(
        kind="study",
        name=study.name,
        eyebrow=_line(study),
        verdict=study_spectrum.sentence(study) or sentence(study),
        warnings=[*filter(None, [state(study)])],
        sections=[
            Section("headline", "Result", [headline(study)]),
            study_spectrum.section(study),
            study_frontier.section(study),
            study_cause.section(study),
            study_ablations.section(study),
            study_stopping.section(study),
            _points(study),
            _settings(study),
        ],
    )


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


def _points(study: Study) -> Section:
    """Points that are left out, and why; the others stand one by one in NAME.csv."""
    missing = [[label, "not finished"] for label in study.unfinished]
    missing += [[label, "not tested"] for label in study.untested]
    return Section("points", "Points left out", [("Points left out", ["point", "why"], missing)])


def _settings(study: Study) -> Section:
    folded = [
        markup.details(f"Environment of {count} stages (environment.json)", as_json(environment))
        for environment, count in environments(study)
    ]
    config = markup.details("Configuration of the study", as_json(study.config))
    return Section("settings", "Settings", [config, *folded])


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
