"""A report as sections, and as the two files made of them: a page, and Markdown without what only a page can show.

The page is one file without requests, to be opened anywhere and sent to anyone. Its only script filters what is on it
(filter.js); the Content-Security-Policy allows its bytes and no others.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from etils import epath

from g2d_jax.report import markup
from g2d_jax.report.table import Text, markdown_table, one_line
from g2d_jax.storage import write_bytes

STYLE, SCRIPT = (Path(__file__).with_name(name).read_text("utf-8") for name in ("style.css", "filter.js"))


class Note(NamedTuple):
    """A paragraph that explains."""

    text: str


Part: TypeAlias = str | Note | Text
"""Of a section: markup, which the page alone has, an explanation, or a table."""


class Section(NamedTuple):
    """A part of a report; left out if all its parts are empty. name: its anchor."""

    name: str
    title: str
    parts: Sequence[Part]


class Report(NamedTuple):
    """All of a report. kind: "report", "study", "comparison". eyebrow: a line above the name; cards: markup."""

    kind: str
    name: str
    eyebrow: str
    verdict: str
    warnings: Sequence[str]
    sections: Sequence[Section]
    cards: str = ""


def html(report: Report) -> str:
    """Write the page. The script stands on it only where there is a list to filter."""
    made = ((name, markup.shown(title), "".join(map(_markup, parts))) for name, title, parts in report.sections)
    shown = [section for section in made if section[2]]
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title, _ in shown)
    body = "".join(f'<section id="{name}"><h2>{title}</h2>{body}</section>' for name, title, body in shown)
    script = SCRIPT if "<div data-listing=" in body else ""
    policy = f"default-src 'none'; style-src {_digest(STYLE)}; img-src data:; base-uri 'none'; form-action 'none'"
    policy += f"; script-src {_digest(script)}" if script else ""
    verdict = re.sub(r" \[[^\]]*\]| ± | %", lambda found: found[0].replace(" ", "\u00a0"), report.verdict)
    header = (
        markup.paragraph(report.eyebrow, "eyebrow"),
        f"<h1>{markup.shown(report.name)}</h1>",
        markup.paragraph(verdict, "verdict"),
        report.cards,
        *(markup.paragraph(warning, "warning") for warning in report.warnings),
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">'
        f"<title>{markup.shown(f'{report.name}: G2D {report.kind}', plain=True)}</title><style>{STYLE}</style></head>\n"
        f'<body><header>{"".join(header)}</header><nav aria-label="Sections">{links}</nav>\n<main>{body}</main>'
        + (f"<script>{script}</script>" if script else "")
        + "</body></html>\n"
    )


def markdown(report: Report) -> str:
    """Write the same as Markdown, without figures and what unfolds."""
    lines = [f"# {one_line(report.name)}", one_line(report.verdict)]
    lines.append("\n".join(f"- Warning: {one_line(warning)}" for warning in report.warnings))
    for section in report.sections:
        texts = [_text(part) for part in section.parts if not isinstance(part, str)]
        lines += [f"## {one_line(section.title)}", *texts] if any(texts) else []
    return "\n\n".join(filter(None, lines)) + "\n"


def write(report: Report, csv: str, folder: epath.Path, name: str) -> list[str]:
    """Write NAME.html, NAME.md and NAME.csv into a folder; returns their paths. Raises OSError."""
    for kind, text in {"html": html(report), "md": markdown(report), "csv": csv}.items():
        write_bytes(folder / f"{name}.{kind}", text.encode())
    return [str(folder / f"{name}.{kind}") for kind in ("html", "md", "csv")]


def _markup(part: Part) -> str:
    if isinstance(part, str):
        return part
    return markup.paragraph(part.text, "hint") if isinstance(part, Note) else markup.table(*part)


def _text(part: Note | Text) -> str:
    return one_line(part.text) if isinstance(part, Note) else markdown_table(*part)


def _digest(source: str) -> str:
    """What a Content-Security-Policy calls these bytes."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
