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
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter
from numpy.typing import ArrayLike, NDArray

from g2d_jax.report import format as fmt
from g2d_jax.report.markup import visible

MAX_POINTS = 150
"""Points of a line; more are averaged in as many buckets, with a band from smallest to largest."""

WIDTH, HEIGHT, ROW = 4.0, 2.4, 1.6
"""Inches of every figure: its width, its height with one row of axes, and that of each of several
rows."""

LETTERS = 60
"""Letters that fit a line as wide as a figure."""

DECADES = 1.5
"""Powers of ten between what lines mostly are and their largest value from which an axis of factors
is logarithmic."""

# Distinguishable for the colour-blind (after Okabe and Ito 2008); lines differ in their dashes too.
COLOURS = {
    "#0b62a8": "s0",
    "#c8500a": "s1",
    "#0a7d5c": "s2",
    "#8b3f86": "s3",
    "#8a6d00": "s4",
    "#4f5b66": "s5",
}
_VARIABLES = {colour: f"var(--{name})" for colour, name in COLOURS.items()}
_VARIABLES |= {"#5c646c": "var(--soft)", "#e3e0da": "var(--line)"}  # of figures.mplstyle
_DROPPED = {"svg": ("width", "height"), "g": ("id",)}
_DASHES = ("-", (0, (4, 2)), (0, (1, 2)), (0, (5, 2, 1, 2)), (0, (8, 2)), (0, (3, 1, 1, 1, 1, 1)))
_STYLE = Path(__file__).with_name("figures.mplstyle")


class Point(NamedTuple):
    """A point. low, high: the ends of its bar, NaN for none. label: written beside it where there
    is room."""

    x: float
    y: float
    low: float = math.nan
    high: float = math.nan
    label: str = ""


@dataclass(frozen=True, eq=False)
class Chart:
    """A drawn figure. name: of its files. words: what it shows, for those who do not see it."""

    name: str
    title: str
    words: str
    note: str
    figure: Figure

    def file(self, form: Literal["svg", "pdf"]) -> bytes:
        """Write a file, without the date."""
        return self._svg if form == "svg" else self._write(form)

    @cached_property
    def _svg(self) -> bytes:
        return self._write("svg")  # once for the page and the file

    def _write(self, form: Literal["svg", "pdf"]) -> bytes:
        buffer = io.BytesIO()
        date = {"svg": "Date", "pdf": "CreationDate"}[form]
        with styled():
            self.figure.savefig(buffer, format=form, metadata={date: None})
        return buffer.getvalue()

    def inline(self) -> Markup:
        """Write the SVG as part of a page: no style attributes and no styles, which its policy
        forbids."""
        return self._inline

    @cached_property
    def _inline(self) -> Markup:
        # once, for a page that is written again with another time on it
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
            node.attrib = {name: _VARIABLES.get(value, value) for name, value in attributes.items()}
        root.attrib |= {"role": "img", "aria-label": visible(f"{self.title}: {self.words}")}
        return Markup(ET.tostring(root, encoding="unicode"))


@contextlib.contextmanager
def styled() -> Iterator[None]:
    """Drawing as it is here, whatever the user's matplotlibrc, without a word on letters that the
    font lacks."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        matplotlib.rc_file(_STYLE)
        yield


def _axes(
    count: int = 1, *, shared: bool = False, height: float = HEIGHT
) -> tuple[Figure, list[Axes]]:
    """Make axes in up to three columns, which matplotlib places. shared: whether they have one y
    axis. height: of a row of axes, in inches."""
    columns = min(count, 3)
    rows = -(-count // columns)
    figure = Figure(figsize=(WIDTH, height if rows == 1 else ROW * rows), layout="constrained")
    grid = figure.subplots(rows, columns, sharey=shared, squeeze=False).flatten()
    for unused in grid[count:]:
        unused.set_axis_off()
    axes = list(grid[:count])
    for ax in axes:
        ax.xaxis.set_major_locator(MaxNLocator(4 if columns == 1 else 2))
        ax.yaxis.set_major_locator(MaxNLocator(5))
    return figure, axes


def _legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """Name the series above the axes, where there are several."""
    handles: dict[str, Any] = {}
    for ax in axes:
        drawn, labels = ax.get_legend_handles_labels()
        handles |= dict(zip(labels, drawn, strict=True))
    if len(handles) > 1:
        columns = max(1, LETTERS // (4 + max(map(len, handles))))
        figure.legend(handles.values(), handles, loc="outside upper left", ncols=columns)


def _cut(text: str, most: int) -> str:
    """Write a name of data as part of a figure: on one line of so many letters at most."""
    name = _named(text)
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _named(text: str) -> str:
    """Write a name of data as a label: on one line that a legend has room for."""
    name = visible(" ".join(text[:300].split()))[: LETTERS - 4]
    # A label that begins with an underscore is none to matplotlib.
    return f" {name}" if name.startswith("_") else name


def _look(i: int) -> dict[str, Any]:
    return {
        "color": list(COLOURS)[i % len(COLOURS)],
        "linestyle": _DASHES[(i + i // len(COLOURS)) % len(_DASHES)],
    }


def _drawable(values: ArrayLike) -> NDArray[np.float64]:
    """NaN for what is not finite, and for what is so large that the length of an axis would not
    be."""
    array = np.asarray(values, np.float64)
    with np.errstate(invalid="ignore"):
        return np.where(np.abs(array) < 1e300, array, np.nan)


Lines = Mapping[str, tuple[ArrayLike, ArrayLike]]
"""Name of a series -> its steps ascending and its values, both [N]."""


def curves(
    name: str,
    title: str,
    panels: Mapping[str, Lines],
    *,
    share: bool = True,
    factors: bool = False,
    x_title: str = "",
    series: Sequence[str] = (),
    note: str = "",
) -> Chart | None:
    """Draw lines over steps, a panel a stage side by side; None if there is no finite value.

    share: whether the panels have one y axis. factors: whether values are compared by factors, as
    learning rates are: the y axis is logarithmic then where they span `DECADES`. x_title: what the
    x axis has in place of steps. series: names in the order of their colours, of those that other
    figures have too.
    """
    panels = {panel: lines for panel, lines in panels.items() if lines}
    every = itertools.chain(series, *panels.values())
    names = list(dict.fromkeys(every))
    values = {}
    missing = 0
    said = []
    for panel, lines in panels.items():
        for key, (_, ys) in lines.items():
            line = _drawable(ys)
            values[panel, key] = line
            missing += int(np.isnan(line).sum())
            place = f" in {panel}" if panel else ""
            said.append(f"{key}{place} {_in_words(line)}")
    total = sum(map(len, values.values()))
    if missing == total:
        return None
    with styled():
        figure, axes = _axes(len(panels), shared=share)
        lowest = _lowest(list(values.values())) if factors else None
        for ax, (panel, lines) in zip(axes, panels.items(), strict=True):
            ax.set_xlabel(x_title)
            ax.locator_params("x", integer=not x_title)
            if len(panels) > 1:
                ax.set_title(_cut(panel, LETTERS // min(len(panels), 3) - 2), loc="left")
            for key, (x, _) in lines.items():
                look = _look(names.index(key))
                steps = np.asarray(x, np.float64)
                _draw_line(ax, _named(key), steps, values[panel, key], look)
        if lowest is not None:
            _log_scale(axes, lowest)
        _legend(figure, axes)
    longest = max(map(len, values.values()))
    notes = [note]
    if longest >= 2 * MAX_POINTS:
        points = round(longest / MAX_POINTS)
        notes.append(
            f"Lines are means over about {points} points, bands their smallest and largest."
        )
    if lowest is not None:
        notes.append(_below(lowest, values.values()))
    if missing:
        notes.append(f"{missing} of {total} values are not finite and not drawn.")
    return Chart(name, title, "; ".join(said), " ".join(filter(None, notes)), figure)


def _log_scale(axes: Sequence[Axes], lowest: float) -> None:
    for ax in axes:
        ax.set_yscale("log", nonpositive="clip")
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.yaxis.set_minor_formatter(NullFormatter())
        ax.set_ylim(bottom=lowest)


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
        ax.fill_between(steps, low, high, color=look["color"], alpha=0.16, linewidth=0)
    marker = "o" if len(steps) <= 30 else ""
    ax.plot(steps, values, label=name, marker=marker, **look)


def _lowest(lines: Sequence[NDArray[np.float64]]) -> float | None:
    """Say where a logarithmic axis of these lines begins; None where it is to be linear.

    It is linear if a value is negative, or the largest value is less than `DECADES` above the
    lowest median of a line. The median is what a line mostly is: a schedule that ends at zero, or a
    first slow step, is no reason by itself. A decade below the lowest median is drawn at most.
    """
    values = np.concatenate(lines)
    if not (values[~np.isnan(values)] >= 0).all():
        return None
    positive = values[values > 0]
    medians = [np.median(line[line > 0]) for line in lines if (line > 0).any()]
    if not medians or np.log10(positive.max()) - np.log10(min(medians)) < DECADES:
        return None
    lowest = max(positive.min(), min(medians) / 10)
    return float(lowest / 1.3)


def _below(lowest: float, lines: Collection[NDArray[np.float64]]) -> str:
    """Say that the y axis is logarithmic, and how much is below its beginning."""
    count = sum(int((line < lowest).sum()) for line in lines)
    text = "The y axis is logarithmic."
    if count:
        text += f" {count} values are below it."
    return text


def _place(x: float) -> str:
    """Write a place on an x axis."""
    return fmt.count(x) if x == round(x) else fmt.value(x)


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
    y_title: str = "",
    written: Callable[[float], str] = fmt.value,
    joined: Collection[str] = (),
    note: str = "",
) -> Chart | None:
    """Draw points with their bars, and labels next to them, over a square-root axis; None without a
    finite point.

    On the axis points crowd less near zero, and lines, straight in the numbers as interpolation is,
    bend.
    joined: series that a line joins. written: numbers on the x axis as text.
    """
    drawn = {}
    for key, points in series.items():
        drawn[key] = [p for p in points if abs(p.x) < 1e300 and abs(p.y) < 1e300]
    every = list(itertools.chain.from_iterable(drawn.values()))
    if not every:
        return None
    words = []
    with styled():
        figure, (ax,) = _axes(height=1.25 * HEIGHT)
        ax.set_xscale("function", functions=(lambda x: np.sqrt(np.maximum(x, 0)), np.square))
        for i, (key, points) in enumerate(drawn.items()):
            look = _look(i)
            _draw_points(ax, _named(key), points, look, joined=key in joined)
            said = []
            for p in points:
                label = ax.annotate(
                    _cut(p.label, 20), (p.x, p.y), (3, 3), textcoords="offset points"
                )
                label.set(color=look["color"], fontsize=7)
                said.append(f"{p.label} {_measured(p)} at {written(p.x)}".strip())
            if said:
                words.append(f"{key}: {', '.join(said)}")
        ax.set_xlim(0, 1.06 * max(p.x for p in every) or 1)
        ax.set_xlabel(f"{x_title} (square-root axis)".lstrip())
        ax.set_ylabel(y_title)
        ax.xaxis.set_major_locator(MaxNLocator(4))
        ax.xaxis.set_major_formatter(lambda value, _: written(value))
        _legend(figure, [ax])
    total = sum(map(len, series.values()))
    missing = total - len(every)
    notes = [note, f"{missing} of {total} points are not known." * bool(missing)]
    return Chart(name, title, "; ".join(words), " ".join(filter(None, notes)), figure)


def _measured(p: Point) -> str:
    """Write a point's value, with its interval where it has one."""
    if math.isnan(p.low):
        return fmt.value(p.y)
    return f"{fmt.value(p.y)} ({fmt.value(p.low)} to {fmt.value(p.high)})"


def _draw_points(
    ax: Axes, label: str, points: Sequence[Point], look: dict[str, Any], *, joined: bool
) -> None:
    xs, ys, low, high = np.array([p[:4] for p in sorted(points)], np.float64).T.reshape(4, -1)
    ends = np.nan_to_num(np.abs([ys - low, high - ys]))
    ax.errorbar(
        xs, ys, ends, fmt="o", color=look["color"], label="" if joined else label, elinewidth=1
    )
    if joined:
        numbers = range(len(xs))
        place = np.linspace(0, len(xs) - 1, 12 * len(xs))
        line = np.interp(place, numbers, xs), np.interp(place, numbers, ys)
        ax.plot(*line, label=label, **look)


def bars(
    name: str,
    title: str,
    heights: Mapping[float, float],
    *,
    x_title: str,
    unit: str = "",
    note: str = "",
) -> Chart | None:
    """Draw a histogram, a bar at each place; None without a finite height.

    heights: where a bar stands -> how high it is. unit: of the heights, after their numbers.
    """
    known = {x: y for x, y in heights.items() if abs(y) < 1e300}
    if not known:
        return None
    places = sorted(known)
    apart = min(np.diff(places), default=1.0)
    with styled():
        figure, (ax,) = _axes()
        ax.bar(places, [known[x] for x in places], 0.86 * apart, color=next(iter(COLOURS)))
        ax.set_xlabel(x_title)
    said = [f"{fmt.value(known[x])}{unit} at {_place(x)}" for x in places]
    return Chart(name, title, ", ".join(said), note, figure)


def intervals(
    name: str, title: str, rows: Sequence[tuple[str, float, float, float]], *, note: str = ""
) -> Chart | None:
    """Draw a value with its interval for each name, one below the other; None without a finite
    value.

    rows: name, value, the interval's ends, NaN where none is known.
    """
    rows = [row for row in rows if abs(row[1]) < 1e300]
    if not rows:
        return None
    said = []
    for label, *numbers in rows:
        middle, start, end = map(fmt.value, numbers)
        said.append(f"{label}: {middle} ({start} to {end})")
    with styled():
        figure, (ax,) = _axes(height=0.4 + 0.26 * len(rows))
        ax.grid(axis="x")
        ax.grid(visible=False, axis="y")
        for i, (_, value, low, high) in enumerate(rows):
            ends = np.nan_to_num(np.abs([[value - low], [high - value]]))
            colour = list(COLOURS)[i % len(COLOURS)]
            ax.errorbar([value], [i], xerr=ends, fmt="o", color=colour, elinewidth=1.4)
        ax.set_ylim(len(rows) - 0.5, -0.5)
        ax.set_yticks(range(len(rows)), [_cut(row[0], LETTERS // 2) for row in rows])
    return Chart(name, title, "; ".join(said), note, figure)
