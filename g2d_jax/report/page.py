"""A report as sections, and its files: a page, Markdown without the interactive parts, and figures.

The page is one self-contained file without requests. Its scripts filter its lists (filter.js) and
reload the page of a running run (live.js); the Content-Security-Policy allows their bytes and no
others.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jinja2
import pandas as pd
from etils import epath
from markupsafe import escape

from g2d_jax.report.figures import Chart
from g2d_jax.report.markup import on_one_line, prose, shorten, shown, visible
from g2d_jax.report.samples import Listing
from g2d_jax.report.tables import Table, markdown, one_line, sheet
from g2d_jax.runtime.storage import PathLike, plain, write_bytes
from g2d_jax.session.workdir import absolute

STYLE = Path(__file__).with_name("style.css").read_text("utf-8")
SCRIPT = Path(__file__).with_name("filter.js").read_text("utf-8")
RENEW = Path(__file__).with_name("live.js").read_text("utf-8")

TITLES = {
    "now": "Now",
    "results": "Result",
    "rows": "Every policy",
    "answers": "Answers in detail",
    "differences": "Differences",
    "frontier": "Accuracy against compute",
    "priced": "Time of its tokens on another machine",
    "curves": "Training",
    "informativeness": "Informativeness",
    "pairs": "Preference pairs",
    "browser": "Browse answers",
    "problems": "Problems",
    "compute": "Cost",
    "points": "Points left out",
    "steps": "Steps",
    "settings": "Settings",
}
"""Anchor of a section -> its title, in the order of any page. Each kind of report has some of
them."""


class Note(NamedTuple):
    """A paragraph of explanation; left out if empty."""

    text: str

    def __bool__(self) -> bool:
        """Return whether there is anything to show."""
        return bool(self.text)


class Code(NamedTuple):
    """A value as JSON, collapsed."""

    title: str
    value: Mapping[str, Any]

    def __bool__(self) -> bool:
        """Return whether there is anything to show."""
        return bool(self.value)

    @property
    def text(self) -> str:
        """The value as indented JSON, shortened."""
        return shorten(json.dumps(plain(self.value), indent=2, ensure_ascii=False), 200_000)


Part: TypeAlias = Note | Table | Chart | Listing | Code


class Live(NamedTuple):
    """When the page of a running run was written (Unix seconds), and the seconds until the next
    one."""

    written: float
    every: float


class Report(NamedTuple):
    """The content of a report; its page, Markdown, CSV and figures are built from it.

    kind: "report", "study", "comparison" or "autopsy". eyebrow: the line above the name; verdict:
    the sentence below it, "" for none; headline: a summary of all results. parts: by section, a
    name in `TITLES`; None is ignored. frame: returns the rows of the CSV. live: for a running run,
    whose page reloads itself.
    """

    kind: str
    name: str
    eyebrow: str
    warnings: Sequence[str]
    parts: Mapping[str, Sequence[Part | None]]
    headline: str = ""
    frame: Callable[[], pd.DataFrame] = pd.DataFrame
    live: Live | None = None
    verdict: str = ""

    @property
    def sections(self) -> dict[str, list[Part]]:
        """The sections with more than notes, in the order of `TITLES`: name -> its parts."""
        sections = {}
        for name in TITLES:
            parts = [part for part in self.parts.get(name, ()) if part]
            if any(not isinstance(part, Note) for part in parts):
                sections[name] = parts
        return sections

    @property
    def shown_parts(self) -> list[Part]:
        """The parts of all sections, in order."""
        return list(itertools.chain.from_iterable(self.sections.values()))

    def __repr__(self) -> str:
        """Return the names of the report and its sections: its text has hundreds of kB."""
        return f"Report({self.kind!r}, {self.name!r}: {', '.join(self.sections)})"

    def _repr_html_(self) -> str:
        """Return the page in a sandboxed frame, for a notebook."""
        return f'<iframe srcdoc="{escape(html(self))}" sandbox width="100%" height="600"></iframe>'


@functools.cache
def _environment() -> jinja2.Environment:
    folder = Path(__file__).with_name("templates")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    for function in (shown, prose, visible, on_one_line, shorten):
        environment.filters[function.__name__] = function
    environment.tests["of"] = isinstance  # type: ignore[assignment]
    environment.globals |= {"zip": zip, "titles": TITLES}
    environment.globals |= {kind.__name__: kind for kind in (Note, Table, Chart, Code)}
    return environment


def html(report: Report) -> str:
    """Write the page. It includes scripts only for a list to filter, or a running run to reload."""
    scripts = []
    if any(isinstance(part, Listing) for part in report.shown_parts):
        scripts.append(SCRIPT)
    if report.live is not None:
        scripts.append(RENEW)
    allowed = " ".join(map(_digest, scripts)) or "'none'"
    policy = (
        f"default-src 'none'; style-src {_digest(STYLE)}; script-src {allowed}; base-uri 'none'; "
        "form-action 'none'"
    )
    page = _environment().get_template("page.html.j2")
    return page.render(report=report, style=STYLE, scripts=scripts, policy=policy)


def _digest(source: str) -> str:
    """Return the name of these bytes in a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"


def text(report: Report) -> str:
    """Write the same as Markdown, without the interactive parts."""
    lines = [f"# {one_line(report.name)}", one_line(report.verdict), one_line(report.headline)]
    lines.append("\n".join(f"- Warning: {one_line(warning)}" for warning in report.warnings))
    for name, parts in report.sections.items():
        if any(isinstance(part, Table) for part in parts):
            lines.append(f"## {one_line(TITLES[name])}")
            for part in parts:
                if isinstance(part, Table):
                    lines.append(markdown(part))
                elif isinstance(part, Note):
                    lines.append(one_line(part.text))
    return "\n\n".join(filter(None, lines)) + "\n"


def output_folder(output: PathLike, files: Sequence[str], what: str) -> epath.Path:
    """Return the folder for these files. Raises ValueError if it holds other files.

    what: a name for these files in the message.
    """
    folder = absolute(output)
    if not folder.exists():
        return folder
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file: set --output to a folder")
    others = sorted(child.name for child in folder.iterdir() if child.name not in files)
    if others:
        raise ValueError(
            f"{folder} holds files that are not of {what} ({others[0]}): choose another --output"
        )
    return folder


def write(report: Report, folder: epath.Path, name: str, *, figures: bool = True) -> list[str]:
    """Write NAME.html, NAME.md and NAME.csv into a folder, and return their paths; also write
    figures/NAME-….svg and .pdf.

    Figures of collapsed sections are not written. The same report produces the same bytes. Raises
    OSError.
    """
    contents = {"html": html(report), "md": text(report), "csv": sheet(report.frame())}
    paths = []
    for form, content in contents.items():
        paths.append(str(folder / f"{name}.{form}"))
        write_bytes(epath.Path(paths[-1]), content.encode())
    for part in report.shown_parts:
        if figures and isinstance(part, Chart):
            stem = re.sub(r"[^\w.-]+", "-", f"{name}-{part.name}")
            write_bytes(folder / "figures" / f"{stem}.svg", part.file("svg"))
            write_bytes(folder / "figures" / f"{stem}.pdf", part.file("pdf"))
    return paths
