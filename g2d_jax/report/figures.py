"""Draw figures with matplotlib: inline SVG that a page's Content-Security-Policy allows, SVG and
PDF files for papers.

The same numbers give the same bytes. Colours are names of the page's style sheet there, so they
follow light and dark. Numbers that are not finite leave a gap and are counted under the figure.
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
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator
from numpy.typing import ArrayLike, NDArray

from g2d_jax.report import format as fmt
from g2d_jax.report.markup import visible

MAX_POINTS = 100
"""Points of a line; more are averaged in as many buckets, with a band from smallest to largest."""

SIZE = (3.8, 2.3)
"""Inches of a figure."""

LETTERS = 56
"""Letters that fit a line as wide as a figure."""

SPAN = 10.0
"""Percentage points that an axis of accuracies spans at least."""

# Distinguishable for the colour-blind (after Okabe and Ito 2008); dashes and markers differ too.
COLOURS = {
    "#0b62a8": "s0",
    "#c8500a": "s1",
    "#0a7d5c": "s2",
    "#8b3f86": "s3",
    "#8a6d00": "s4",
    "#4f5b66": "s5",
}
_VARIABLES = {colour: f"var(--{name})" for colour, name in COLOURS.items()}
_VARIABLES |= {"#5c646c": "var(--soft)", "#e3e0da": "var(--line)", "#ffffff": "var(--card)"}
_DROPPED = {"svg": ("width", "height"), "g": ("id",)}
_DASHES = ("-", (0, (4, 2)), (0, (1, 2)), (0, (5, 2, 1, 2)), (0, (8, 2)), (0, (3, 1, 1, 1, 1, 1)))
_MARKERS = "osD^vP"
_STYLE = Path(__file__).with_name("figures.mplstyle")


class Point(NamedTuple):
    """A point. low, high: the ends of its bar, NaN for none. label: written beside it."""

    x: float
    y: float
    low: float = math.nan
    high: float = math.nan
    label: str = ""


@dataclass(frozen=True, eq=False)
class Chart:
    """A drawn figure. name: of its files. words: what it shows, for those who do not see it.
    note: the sentence under it."""

    name: str
    title: str
    words: str
    note: str
    figure: Figure

    def file(self, form: Literal["svg", "pdf"]) -> bytes:
        """Write a file, without the date."""
        buffer = io.BytesIO()
        # not savefig, which draws everything twice
        with styled():
            if form == "svg":
                FigureCanvasSVG(self.figure).print_svg(buffer, metadata={"Date": None})
            else:
                FigureCanvasPdf(self.figure).print_pdf(buffer, metadata={"CreationDate": None})
        return buffer.getvalue()

    @cached_property
    def inline(self) -> Markup:
        """The SVG as part of a page: no style attributes and no styles, which its policy
        forbids."""
        root = ET.fromstring(self.file("svg"))
        for parent in list(root.iter()):
            for child in list(parent):
                if child.tag.endswith(("}metadata", "}style")):
                    parent.remove(child)
        for node in root.iter():
            node.tag = node.tag.rpartition("}")[2]
            attributes = {name.rpartition("}")[2]: value for name, value in node.attrib.items()}
            for part in filter(None, attributes.pop("style", "").split("; ")):
                name, value = part.split(": ", 1)
                attributes[name] = value
            for name in ("font-family", "version", *_DROPPED.get(node.tag, ())):
                attributes.pop(name, None)
            for name, value in attributes.items():
                shorter = re.sub(r"(\.\d)\d+", r"\1", " ".join(value.split()))
                attributes[name] = _VARIABLES.get(value, shorter)
            node.attrib = attributes
        root.attrib |= {"role": "img", "aria-label": visible(f"{self.title}: {self.words}")}
        return Markup(re.sub(r">\s+<", "><", ET.tostring(root, encoding="unicode")))


@contextlib.contextmanager
def styled() -> Iterator[None]:
    """Drawing as it is here, whatever the user's matplotlibrc, without a word on letters that the
    font lacks."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        matplotlib.rc_file(_STYLE)
        yield


@contextlib.contextmanager
def _axes(x_title: str = "") -> Iterator[tuple[Figure, Axes]]:
    """Yield a figure and its axes; at the end of the block add a legend and place all parts."""
    with styled():
        figure = Figure(SIZE, layout="constrained")
        ax = figure.subplots()
        ax.set_xlabel(x_title)
        ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        ax.yaxis.set_major_locator(MaxNLocator(4))
        yield figure, ax
        handles, names = ax.get_legend_handles_labels()
        if len(ax.containers or ax.lines) > 1 and names:
            columns = max(1, LETTERS // (5 + max(map(len, names))))
            figure.legend(handles, names, loc="outside upper left", ncols=columns)
        # once: else it is placed anew for every file
        layout = figure.get_layout_engine()
        assert layout is not None  # is asked for above
        layout.execute(figure)
        figure.set_layout_engine("none")


def _named(text: str, most: int = LETTERS - 4) -> str:
    """Write a name of data as a label: on one line, of so many letters at most."""
    name = visible(" ".join(text[:300].split()))
    if len(name) > most:
        name = f"{name[: most - 1]}…"
    # A label that begins with an underscore is none to matplotlib.
    return f" {name}" if name.startswith("_") else name


def _look(i: int) -> dict[str, Any]:
    """Return how the line of a series differs from others, so that equal ones show through."""
    return {
        "color": list(COLOURS)[i % len(COLOURS)],
        "linestyle": _DASHES[(i + i // len(COLOURS)) % len(_DASHES)],
        "marker": _MARKERS[i % len(_MARKERS)],
    }


def _drawable(values: ArrayLike) -> NDArray[np.float64]:
    """NaN for what is not finite, and for what is so large that the length of an axis would not
    be."""
    array = np.asarray(values, np.float64)
    with np.errstate(invalid="ignore"):
        return np.where(np.abs(array) < 1e300, array, np.nan)


Lines = Mapping[str, tuple[ArrayLike, ArrayLike]]
"""Name of a series -> its steps ascending and its values, both [N]."""


def curves(name: str, title: str, lines: Lines, *, note: str = "") -> Chart | None:
    """Draw lines over steps; None if there is no finite value. A series has the colour of its
    place, which one without points keeps free."""
    values = {key: _drawable(ys) for key, (_, ys) in lines.items()}
    every = np.concatenate([*values.values(), []])
    missing = int(np.isnan(every).sum())
    if missing == len(every):
        return None
    said = []
    with _axes("step") as (figure, ax):
        for i, (key, (xs, _)) in enumerate(lines.items()):
            if len(line := values[key]):
                _draw_line(ax, _named(key), np.asarray(xs, np.float64), line, _look(i))
                said.append(f"{key} {_in_words(line)}")
        if np.nanmin(every) >= 0:
            ax.set_ylim(bottom=0)
    notes = [note]
    longest = max(map(len, values.values()))
    if longest >= 2 * MAX_POINTS:
        many = round(longest / MAX_POINTS)
        notes.append(f"Lines are means over about {many} steps, bands their range.")
    if missing:
        notes.append(f"{missing} of {len(every)} values are not finite and not drawn.")
    return Chart(name, title, "; ".join(said), " ".join(filter(None, notes)), figure)


def _draw_line(
    ax: Axes,
    name: str,
    steps: NDArray[np.float64],
    values: NDArray[np.float64],
    look: dict[str, Any],
) -> None:
    """Draw a line, and the band of a long one."""
    if len(steps) >= 2 * MAX_POINTS:
        steps, (values, low, high) = _thin(steps, values)
        ax.fill_between(steps, low, high, color=look["color"], alpha=0.2, linewidth=0)
    if len(steps) > 15:
        look["marker"] = ""
    ax.plot(steps, values, label=name, **look)


def _thin(
    steps: NDArray[np.float64], values: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Average a line [N] in `MAX_POINTS` buckets: their steps, and mean, smallest and largest value
    [3, buckets]."""
    middles = np.array([part.mean() for part in np.array_split(steps, MAX_POINTS)])
    band = np.full((3, MAX_POINTS), np.nan)
    for i, part in enumerate(np.array_split(values, MAX_POINTS)):
        known = part[~np.isnan(part)]
        if len(known):
            band[:, i] = known.mean(), known.min(), known.max()
    return middles, band


def _in_words(line: NDArray[np.float64]) -> str:
    values = line[~np.isnan(line)]
    if not len(values):
        return "not known over 0 points"
    return f"from {fmt.value(values[0])} to {fmt.value(values[-1])} over {len(values)} points"


def points(
    name: str,
    title: str,
    series: Mapping[str, Sequence[Point]],
    *,
    x_title: str,
    written: Callable[[float], str] = fmt.value,
    joined: Collection[str] = (),
    ticks: Sequence[float] = (),
    span: float = SPAN,
    note: str = "",
) -> Chart | None:
    """Draw points with their bars, and labels next to them; None without a finite point.

    The x axis is linear from 0, or logarithmic where all are above it and span two decades or more.
    joined: series that straight lines join. written: numbers on the x axis as text. ticks: the only
    ones, on a logarithmic axis. span: that of the y axis at least.
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
        ax.xaxis.set_major_locator(MaxNLocator(4))
        if ticks or (min(xs) > 0 and max(xs) >= 100 * min(xs)):
            ax.set_xscale("log")
            ax.xaxis.set_minor_locator(NullLocator())
        else:
            ax.set_xlim(-0.03 * max(xs), 1.05 * max(xs) or 1)
        if ticks:
            ax.set_xticks(ticks)
        ax.xaxis.set_major_formatter(lambda value, _: written(value))
        for i, (key, ps) in enumerate(drawn.items()):
            if ps:
                look = _look(i) | ({} if key in joined else {"linestyle": "none"})
                _draw_points(ax, _named(key), ps, look)
                said = [f"{p.label} {_measured(p)} at {written(p.x)}".strip() for p in ps]
                words.append(f"{key}: {', '.join(said)}" if key else ", ".join(said))
        _spread(ax.get_ylim, ax.set_ylim, span)
    missing = sum(map(len, series.values())) - len(every)
    notes = [note, f"{missing} of {missing + len(every)} points are not known." * bool(missing)]
    return Chart(name, title, "; ".join(words), " ".join(filter(None, notes)), figure)


def _spread(limits: Callable[[], Any], set_limits: Callable[..., Any], span: float) -> None:
    """Widen an axis to what it spans at least, about its middle."""
    low, high = limits()
    more = max(0.0, span - abs(high - low)) / 2
    set_limits(low - more, high + more)


def _measured(p: Point) -> str:
    """Write a point's value, with its interval where it has one."""
    if math.isnan(p.low):
        return fmt.value(p.y)
    return f"{fmt.value(p.y)} ({fmt.value(p.low)} to {fmt.value(p.high)})"


def _draw_points(ax: Axes, name: str, points: Sequence[Point], look: dict[str, Any]) -> None:
    xs, ys, low, high = np.array([p[:4] for p in points], np.float64).T
    bars = None if np.isnan(low).all() else np.abs([ys - low, high - ys])
    ax.errorbar(xs, ys, bars, label=name, **look)
    for p in points:
        # Where a line rises, which is what it should do, above to the left and below to the right
        # are free.
        is_right = 2 * ax.transData.transform((p.x, p.y))[0] > sum(ax.bbox.intervalx)
        offset, side = ((-6, 4), "right") if is_right else ((6, -9), "left")
        label = ax.annotate(_named(p.label, 20), p[:2], offset, textcoords="offset points")
        label.set(color=look["color"], ha=side)


def intervals(
    name: str,
    title: str,
    rows: Sequence[tuple[str, float, float, float]],
    *,
    span: float = SPAN,
    note: str = "",
) -> Chart | None:
    """Draw a value with its interval for each name, one below the other; None without a finite
    value.

    rows: name, value, the interval's ends, NaN where none is known. span: that of the axis at least.
    """
    rows = [row for row in rows if abs(row[1]) < 1e300]
    if not rows:
        return None
    said = []
    with _axes() as (figure, ax):
        ax.grid(axis="x")
        ax.grid(visible=False, axis="y")
        ax.xaxis.set_major_locator(MaxNLocator(4))
        for i, (label, value, low, high) in enumerate(rows):
            ends = np.abs([[value - low], [high - value]])
            ax.errorbar([value], [i], xerr=ends, **_look(i))
            said.append(f"{label}: {_measured(Point(0, value, low, high))}")
        ax.set_ylim(len(rows) - 0.5, -0.5)
        ax.set_yticks(range(len(rows)), [_named(row[0], LETTERS // 2) for row in rows])
        _spread(ax.get_xlim, ax.set_xlim, span)
    return Chart(name, title, "; ".join(said), note, figure)
