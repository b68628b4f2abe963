"""Figures drawn with matplotlib: inline SVG that a page's Content-Security-Policy allows, SVG and
PDF files for papers.

The same numbers produce the same bytes. In a page, colours are names of its style sheet, so they
follow light and dark mode. Infinite and NaN values leave a gap, and a note counts them.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import re
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from g2d_jax.report import format as fmt
from g2d_jax.report.markup import visible

MAX_POINTS = 100
"""Most points of a line; more are averaged in this many buckets."""

LETTERS = 52
"""Letters that fit on a line of a figure."""

SPAN = 10.0
"""Smallest range of an accuracy axis, in percentage points."""

_STYLE = Path(__file__).with_name("figures.mplstyle")
_COLOURS = "#0b62a8 #c8500a #0a7d5c #8b3f86 #8a6d00 #4f5b66 #5c646c #e3e0da"
_VARIABLES = dict(
    zip(_COLOURS.split(), ["s0", "s1", "s2", "s3", "s4", "s5", "soft", "line"], strict=True)
)
"""Colours of the style -> their names in the page."""


class Point(NamedTuple):
    """A point. low, high: the ends of its bar, NaN for none. label: the text next to it."""

    x: float
    y: float
    low: float = math.nan
    high: float = math.nan
    label: str = ""


@dataclass(frozen=True, eq=False)
class Chart:
    """A drawn figure. name: of its files. words: a description for screen readers. note: the
    sentence below it."""

    name: str
    title: str
    words: str
    note: str
    figure: Figure

    def file(self, form: Literal["svg", "pdf"]) -> bytes:
        """Write a file, without the date."""
        buffer = io.BytesIO()
        with styled():
            if form == "svg":  # savefig would draw it twice
                FigureCanvasSVG(self.figure).print_svg(buffer, metadata={"Date": None})
            else:
                self.figure.savefig(buffer, format=form, metadata={"CreationDate": None})
        return buffer.getvalue()

    @cached_property
    def inline(self) -> Markup:
        """The SVG as part of a page, without style attributes and styles, which the page's policy
        forbids."""
        source = re.sub(rb"<(metadata|style).*?</\1>", b"", self.file("svg"), flags=re.DOTALL)
        root = ET.fromstring(source)
        for node in root.iter():
            node.tag = node.tag.rpartition("}")[2]
            own = {name.rpartition("}")[2]: value for name, value in node.items()}
            own |= dict(re.findall(r"([\w-]+): ([^;]+)", own.pop("style", "")))
            for name in ("font-family", "id" if node.tag == "g" else "version"):
                own.pop(name, None)
            node.attrib = {name: _shorter(value) for name, value in own.items()}
        root.attrib |= {"role": "img", "aria-label": visible(f"{self.title}: {self.words}")}
        return Markup(re.sub(r">\s+<", "><", ET.tostring(root, encoding="unicode")))


def _shorter(value: str) -> str:
    """Round an attribute's numbers to one decimal place, and replace colours by the page's
    names."""
    named = _VARIABLES.get(value)
    return f"var(--{named})" if named else re.sub(r"(\.\d)\d+", r"\1", " ".join(value.split()))


@contextlib.contextmanager
def styled() -> Iterator[None]:
    """Use this style, not the user's matplotlibrc, without warnings about missing glyphs."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        matplotlib.rc_file(_STYLE)
        yield


@contextlib.contextmanager
def _axes(x_title: str = "") -> Iterator[tuple[Figure, Axes]]:
    """Yield a figure and its axes; after the block, add a legend and place all parts."""
    with styled():
        figure = Figure(layout="constrained")
        ax = figure.subplots()
        ax.set_xlabel(x_title)
        ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        ax.yaxis.set_major_locator(MaxNLocator(4))
        yield figure, ax
        handles, names = ax.get_legend_handles_labels()
        if len(handles) > 1:
            columns = max(1, LETTERS // (5 + max(map(len, names))))
            figure.legend(handles, names, loc="outside upper left", ncols=columns)
        # once: otherwise every file repeats the layout
        layout = figure.get_layout_engine()
        assert layout is not None  # requested above
        layout.execute(figure)
        figure.set_layout_engine("none")


def _named(text: str, most: int = LETTERS - 4) -> str:
    """Return data as a label: one line, of at most `most` letters."""
    name = visible(" ".join(text[:300].split()))
    if len(name) > most:
        name = f"{name[: most - 1]}…"
    # matplotlib ignores labels that begin with an underscore.
    return f" {name}" if name.startswith("_") else name


Lines = Mapping[str, Sequence[tuple[float, float]]]
"""Name of a series -> its points (step, value), steps ascending."""


def curves(name: str, title: str, lines: Lines, *, note: str = "") -> Chart | None:
    """Draw lines over steps; None without a finite value. A series has the colour of its position,
    even if others have no points."""
    tables = {}
    for key, line in lines.items():
        table = pd.DataFrame(line, columns=["x", "y"], dtype=float)
        # the axis would overflow for larger values
        tables[key] = table.where(table.abs() < 1e300)
    every = pd.concat([pd.DataFrame(columns=["y"]), *tables.values()])["y"]
    if not every.notna().any():
        return None
    texts = []
    longest = max(map(len, tables.values()))
    with _axes("step") as (figure, ax):
        for key, table in tables.items():
            known = table["y"].dropna()
            if len(known):
                ends = f"from {fmt.value(known.iloc[0])} to {fmt.value(known.iloc[-1])}"
                texts.append(f"{key} {ends} over {len(known)} points")
            if len(table) > MAX_POINTS:
                table = table.groupby(np.arange(len(table)) * MAX_POINTS // len(table)).mean()
            label = _named(key) if len(table) else None
            ax.plot(table["x"], table["y"], label=label, marker=None if longest < 16 else "")
        if every.min() >= 0:
            ax.set_ylim(0, 1.08 * every.max())
    notes = [note]
    if longest > MAX_POINTS:
        notes.append(f"Each point is the mean of about {round(longest / MAX_POINTS)} steps.")
    if missing := every.isna().sum():
        notes.append(f"{missing} of {len(every)} values are not finite and left out.")
    return Chart(name, title, "; ".join(texts), " ".join(filter(None, notes)), figure)


def points(
    name: str,
    title: str,
    series: Mapping[str, Sequence[Point]],
    *,
    x_title: str,
    written: Callable[[float], str] = fmt.value,
    joined: Collection[str] = (),
    ticks: Sequence[float] = (),
    note: str = "",
) -> Chart | None:
    """Draw points with their bars, and labels next to them; None without a finite point.

    The x axis is linear from 0, or logarithmic if all points are positive and span two decades.
    joined: series to join by straight lines. written: numbers on the x axis as text. ticks: the
    only ticks of a logarithmic axis.
    """
    drawn = {}
    for key, ps in series.items():
        drawn[key] = sorted(p for p in ps if abs(p.x) < 1e300 and abs(p.y) < 1e300)
    every = list(itertools.chain.from_iterable(drawn.values()))
    if not every:
        return None
    xs = [p.x for p in every]
    words = []
    with _axes(x_title) as (figure, ax):
        ax.set_xlim(-0.03 * max(xs), 1.05 * max(xs) or 1)
        ax.xaxis.set_major_locator(MaxNLocator(4))
        if ticks or (min(xs) > 0 and max(xs) >= 100 * min(xs)):
            ax.set_xscale("log")
            ax.set_xlim(min(xs) / 1.2, 1.2 * max(xs))
            ax.xaxis.set_minor_locator(NullLocator())
        if ticks:
            ax.set_xticks(ticks)
        ax.xaxis.set_major_formatter(lambda value, _: written(value))
        for key, ps in drawn.items():
            if ps:
                _draw_points(ax, _named(key), ps, is_joined=key in joined)
                text = ", ".join(f"{_measured(*p[1:])} at {written(p.x)}" for p in ps)
                words.append(f"{key}: {text}".removeprefix(": "))
        _spread(ax.get_ylim, ax.set_ylim, title)
    missing = sum(map(len, series.values())) - len(every)
    notes = [note, f"{missing} of {missing + len(every)} points are unknown." * bool(missing)]
    return Chart(name, title, "; ".join(words), " ".join(filter(None, notes)), figure)


def _spread(limits: Callable[[], Any], set_limits: Callable[..., Any], title: str) -> None:
    """Widen an axis of percentages to `SPAN`, about its centre."""
    low, high = limits()
    if "%" in title:
        more = max(0.0, SPAN - high + low) / 2
        set_limits(low - more, high + more)


def _measured(value: float, low: float, high: float, label: str) -> str:
    """Return a value with its label, and its interval if known."""
    ends = "" if math.isnan(low) else f" ({fmt.value(low)} to {fmt.value(high)})"
    return f"{label} {fmt.value(value)}{ends}".strip()


def _draw_points(ax: Axes, name: str, points: Sequence[Point], *, is_joined: bool) -> None:
    xs, ys, low, high = np.array([p[:4] for p in points], np.float64).T
    bars = None
    if np.isfinite(low).any():
        bars = np.abs([ys - low, high - ys])
    # errorbar also without bars: plot and errorbar would use two colours of the cycle
    line, *_ = ax.errorbar(xs, ys, bars)
    line.set_label(name)
    if not is_joined:
        line.set_linestyle("none")
    for p in filter(attrgetter("label"), points):
        # A short label is above its bar, where no line passes. A long one is above left or below
        # right of its point, where a rising line leaves room.
        at, offset, side = (p.x, np.fmax(p.high, p.y)), (0, 2), "center"
        if len(p.label) > 3:
            is_right = 2 * ax.transData.transform((p.x, p.y))[0] > sum(ax.bbox.intervalx)
            at, offset, side = p[:2], *(((-6, 4), "right") if is_right else ((6, -9), "left"))
        label = ax.annotate(_named(p.label, 20), at, offset, textcoords="offset points")
        label.set(color=line.get_color(), ha=side)


def intervals(
    name: str, title: str, rows: Sequence[tuple[str, float, float, float]], *, note: str = ""
) -> Chart | None:
    """Draw a value with its interval for each name, as rows; None without a finite value.

    rows: name, value, the interval's ends, NaN if unknown.
    """
    rows = [row for row in rows if abs(row[1]) < 1e300]
    if not rows:
        return None
    texts = []
    with _axes() as (figure, ax):
        ax.grid(axis="x")
        ax.grid(visible=False, axis="y")
        ax.xaxis.set_major_locator(MaxNLocator(4))
        for i, (label, value, low, high) in enumerate(rows):
            ends = np.abs([[value - low], [high - value]])
            ax.errorbar([value], [i], xerr=ends, linestyle="none")
            texts.append(_measured(value, low, high, f"{label}:"))
        ax.set_ylim(len(rows) - 0.5, -0.5)
        ax.set_yticks(range(len(rows)), [_named(row[0], LETTERS // 2) for row in rows])
        _spread(ax.get_xlim, ax.set_xlim, title)
    return Chart(name, title, "; ".join(texts), note, figure)
