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
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray

from g2d_jax.report import format as fmt
from g2d_jax.report.markup import visible

MAX_POINTS = 150
"""Points of a line; more are averaged in as many buckets, with a band from smallest to largest."""

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
        buffer = io.BytesIO()
        date = {"svg": "Date", "pdf": "CreationDate"}[form]
        with _styled():
            self.figure.savefig(buffer, format=form, metadata={date: None})
        return buffer.getvalue()

    def inline(self) -> Markup:
        """Write the SVG as part of a page: no style attributes and no styles, which its policy
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
            node.attrib = {name: _VARIABLES.get(value, value) for name, value in attributes.items()}
        root.attrib |= {"role": "img", "aria-label": visible(f"{self.title}: {self.words}")}
        return Markup(ET.tostring(root, encoding="unicode"))


@contextlib.contextmanager
def _styled() -> Iterator[None]:
    """Drawing as it is here, whatever the user's matplotlibrc, without a word on letters that the
    font lacks."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        matplotlib.rc_file(_STYLE)
        yield


def _axes(
    columns: int = 1,
    *,
    height: float = 2.4,
    share: bool = True,
    left: float = 0.5,
    named: bool = False,
) -> tuple[Figure, list[Axes]]:
    """Make axes side by side. height, left margin: inches; named: with room for a name of the x
    axis.

    Margins are fixed: to fit them to their texts would take as long as to draw all else.
    """
    figure = Figure(figsize=(4.0, height))
    bottom = 0.42 if named else 0.25
    figure.subplots_adjust(left / 4, bottom / height, 0.985, 1 - 0.12 / height)
    figure.subplots_adjust(wspace=0.06 if share else 0.3)
    return figure, list(figure.subplots(1, columns, sharey=share, squeeze=False)[0])


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


def _finish(figure: Figure, axes: Sequence[Axes], *, titled: bool = False) -> None:
    """Name the series above the axes, where there are several, and leave room for that and for the
    axes' titles."""
    handles: dict[str, Any] = {}
    for ax in axes:
        drawn, labels = ax.get_legend_handles_labels()
        handles |= dict(zip(labels, drawn, strict=True))
    lines = 0
    if len(handles) > 1:
        names = [_short(label, 60) for label in handles]
        columns = min(len(names), max(1, 72 // (max(map(len, names)) + 7)))
        lines = -(-len(names) // columns)
        box: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0, 1), "borderpad": 0}
        figure.legend(
            handles.values(), names, ncols=columns, columnspacing=1, labelspacing=0.3, **box
        )
    figure.subplots_adjust(top=1 - (0.1 + 0.16 * lines + 0.2 * titled) / figure.get_figheight())


Lines = Mapping[str, tuple[ArrayLike, ArrayLike]]
"""Name of a series -> its steps ascending and its values, both [N]."""


def curves(
    name: str,
    title: str,
    panels: Mapping[str, Lines],
    *,
    share: bool = True,
    x_title: str = "",
    note: str = "",
) -> Chart | None:
    """Draw lines over steps, a panel a stage side by side; None if there is no finite value.

    share: whether the panels have one y axis. x_title: what the x axis has in place of steps.
    """
    names = list(dict.fromkeys(itertools.chain.from_iterable(panels.values())))
    values = {}
    missing = 0
    said = []
    for panel, lines in panels.items():
        for series, (_, ys) in lines.items():
            line = _drawable(ys)
            values[panel, series] = line
            missing += int(np.isnan(line).sum())
            said.append(f"{series} in {panel} {_in_words(line)}")
    total = sum(map(len, values.values()))
    if missing == total:
        return None
    with _styled():
        figure, axes = _axes(len(panels), share=share, named=bool(x_title))
        for ax, (panel, lines) in zip(axes, panels.items(), strict=True):
            if len(panels) > 1:
                ax.set_title(visible(panel), loc="left")
            ax.set_xlabel(x_title)
            ax.xaxis.set_major_locator(MaxNLocator(4, integer=not x_title))
            ax.yaxis.set_major_locator(MaxNLocator(5))
            for series, (x, _) in lines.items():
                look = _look(names.index(series))
                steps = np.asarray(x, np.float64)
                line = values[panel, series]
                if len(steps) >= 2 * MAX_POINTS:
                    steps, (line, low, high) = _thin(steps, line)
                    ax.fill_between(steps, low, high, color=look["color"], alpha=0.16, linewidth=0)
                marker = "o" if len(steps) <= 30 else ""
                ax.plot(steps, line, label=visible(series), marker=marker, **look)
        _finish(figure, axes, titled=len(panels) > 1)
    longest = max(map(len, values.values()))
    notes = [note]
    if longest >= 2 * MAX_POINTS:
        points = round(longest / MAX_POINTS)
        notes.append(
            f"Lines are means over about {points} points, bands their smallest and largest."
        )
    if missing:
        notes.append(f"{missing} of {total} values are not finite and not drawn.")
    return Chart(name, title, "; ".join(said), " ".join(filter(None, notes)), figure)


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
    """Draw points with their bars and labels over a square-root axis; None without a finite point.

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
    labels: list[tuple[Point, str]] = []
    words = []
    with _styled():
        figure, (ax,) = _axes(height=3.0, named=True, left=0.5 + 0.1 * bool(y_title))
        ax.set_xscale("function", functions=(lambda x: np.sqrt(np.maximum(x, 0)), np.square))
        for i, (key, points) in enumerate(drawn.items()):
            look = _look(i)
            _draw_points(ax, visible(key), points, look, joined=key in joined)
            said = []
            for p in points:
                labels.append((p, look["color"]))
                said.append(f"{p.label} {fmt.value(p.y)} at {written(p.x)}".strip())
            if said:
                words.append(f"{key}: {', '.join(said)}")
        ax.set_xlim(0, 1.06 * max(p.x for p in every) or 1)
        ax.set_xlabel(f"{x_title} (square-root axis)".lstrip())
        ax.set_ylabel(y_title)
        ax.xaxis.set_major_locator(MaxNLocator(4))
        ax.xaxis.set_major_formatter(lambda x, _: written(x))
        _label(ax, labels)
        _finish(figure, [ax])
    total = sum(map(len, series.values()))
    missing = total - len(every)
    notes = [note, f"{missing} of {total} points are not known." * bool(missing)]
    return Chart(name, title, "; ".join(words), " ".join(filter(None, notes)), figure)


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


def _label(ax: Axes, points: Sequence[tuple[Point, str]]) -> None:
    """Write labels in their colours above their points, or else below, but none that would cover
    one before."""
    taken: list[NDArray[np.float64]] = []
    for p, colour in points:
        if not p.label:
            continue
        place = ax.transAxes.inverted().transform(ax.transData.transform((p.x, p.y)))
        for offset, align in ((4, "bottom"), (-4, "top")):
            written = place + np.array([0, 0.01 * offset])
            apart = (0.02 + 0.02 * len(p.label), 0.06)
            if all((abs(written - other) > apart).any() for other in taken):
                taken.append(written)
                look: dict[str, Any] = {"ha": "center", "va": align, "fontsize": 7, "color": colour}
                ax.annotate(
                    visible(p.label), (p.x, p.y), (0, offset), textcoords="offset points", **look
                )
                break


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
    with _styled():
        names = [_short(visible(row[0])) for row in rows]
        figure, (ax,) = _axes(
            height=0.5 + 0.26 * len(rows), left=0.2 + 0.065 * max(map(len, names))
        )
        ax.grid(axis="x")
        ax.grid(visible=False, axis="y")
        for i, (_, value, low, high) in enumerate(rows):
            ends = np.nan_to_num(np.abs([[value - low], [high - value]]))
            colour = list(COLOURS)[i % len(COLOURS)]
            ax.errorbar([value], [i], xerr=ends, fmt="o", color=colour, elinewidth=1.4)
        ax.set_yticks(range(len(rows)), names)
        ax.set_ylim(len(rows) - 0.5, -0.5)
    said = []
    for label, *numbers in rows:
        middle, start, end = map(fmt.value, numbers)
        said.append(f"{label}: {middle} ({start} to {end})")
    return Chart(name, title, "; ".join(said), note, figure)


def _short(text: str, limit: int = 26) -> str:
    if len(text) <= limit:
        return text
    return f"{text[: limit - 1]}…"
