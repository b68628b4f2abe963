"""Draw lines over steps as small SVG charts in HTML figures; scatter.py has points with intervals.

A chart is text and shapes of CSS classes, so the page's style sheet colours it, light or dark; series differ in their
dashes too. Every chart has a title and a description in words, every mark a title that browsers show when pointed at.
Numbers that are not finite leave a gap and are counted under the chart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from g2d_jax.report import format as fmt
from g2d_jax.report.markup import shown

WIDTH, HEIGHT = 360, 214  # user units, about a CSS pixel on a phone and in a column of three
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 22, 24
COLOURS = 6  # series classes s0 … s5 in the style sheet
MAX_POINTS = 150  # of a line; more are averaged in as many buckets, with a band from smallest to largest


_SWATCH = (
    '<svg class="swatch" viewBox="0 0 20 10" aria-hidden="true"><line class="line {}" x2="20" y1="5" y2="5"/></svg>'
)


@dataclass(frozen=True)
class Series:
    """A line: x [N] ascending, y [N], NaN for a gap."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class Panel:
    """A part of the x axis with its own steps, such as one stage. Panels stand side by side on one y axis."""

    name: str
    series: Sequence[Series]


def line_chart(title: str, panels: Sequence[Panel]) -> str:
    """Lines over steps, a mark and a name for each panel if there are several.

    Returns "" if there is no finite value at all.
    """
    finite = np.array([y for panel in panels for series in panel.series for y in series.y if _drawable(y)])
    if not len(finite):
        return ""
    names = list(dict.fromkeys(series.name for panel in panels for series in panel.series))
    low, high = axis_range(float(finite.min()), float(finite.max()))
    body = [*y_axis(low, high)]
    left = float(LEFT)
    for i, (panel, width) in enumerate(zip(panels, _widths(panels), strict=True)):
        body += _panel_frame(panel.name if len(panels) > 1 else "", left, width, first=i == 0)
        body += _panel_lines(panel, names, left + 5, width - 10, low, high)
        left += width
    total = sum(len(series.y) for panel in panels for series in panel.series)
    notes = []
    longest = max(len(series.y) for panel in panels for series in panel.series)
    if longest >= 2 * MAX_POINTS:
        each = round(longest / MAX_POINTS)
        notes.append(f"Lines are means over about {each} points, bands their smallest and largest value.")
    if missing := total - len(finite):
        notes.append(f"{missing} of {total} values are not finite and not drawn.")
    legend = [(name, f"s{i % COLOURS}") for i, name in enumerate(names)] if len(names) > 1 else []
    return figure(title, _describe(panels), body, HEIGHT, legend=legend, note=" ".join(notes))


def figure(
    title: str,
    description: str,
    body: Sequence[str],
    height: float,
    *,
    legend: Sequence[tuple[str, str]] = (),
    note: str = "",
) -> str:
    """A figure: caption, legend (name, class), the SVG of `body`, which is markup, and a note."""
    keys = "".join(f"<li>{_SWATCH.format(css)}{shown(name)}</li>" for name, css in legend)
    caption = f"<figcaption>{shown(title)}</figcaption>" + (f'<ul class="legend">{keys}</ul>' if keys else "")
    head = (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{shown(f"{title}: {description}", plain=True)}">'
    )
    tail = f'<p class="note">{shown(note)}</p>' if note else ""
    return f"<figure>{caption}{head}{''.join(body)}</svg>{tail}</figure>"


def _widths(panels: Sequence[Panel]) -> list[float]:
    """Equal, but for panels of single points, which need less."""
    shares = [1.0 if max((len(series.x) for series in panel.series), default=0) > 1 else 0.4 for panel in panels]
    return [(WIDTH - LEFT - RIGHT) * share / sum(shares) for share in shares]


def y_axis(low: float, high: float, height: float = HEIGHT) -> Iterator[str]:
    """Lines and numbers of a y axis over [low, high], markup, in a chart of a height."""
    scale = linear(low, high, height - BOTTOM, TOP)
    for tick in round_ticks(low, high):
        y = scale(tick)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{fmt.value(tick)}</text>'


def _panel_frame(name: str, left: float, width: float, *, first: bool) -> Iterator[str]:
    if not first:
        yield f'<line class="mark" x1="{left:.1f}" x2="{left:.1f}" y1="6" y2="{HEIGHT - BOTTOM}"/>'
    if name:
        room = int(width / 6.2)
        short = name if len(name) <= room else name[: room - 1] + "…"
        yield f'<text class="strong" x="{left + 6:.1f}" y="14">{shown(short)}<title>{shown(name)}</title></text>'


def _panel_lines(
    panel: Panel,
    names: Sequence[str],
    left: float,
    width: float,
    low: float,
    high: float,
) -> Iterator[str]:
    steps = [x for series in panel.series for x in series.x]
    if not steps:
        return
    first, last = min(steps), max(steps)
    across, up = linear(first, last, left, left + width), linear(low, high, HEIGHT - BOTTOM, TOP)
    ticks = round_ticks(first, last, max(3, int(width / 50)), whole=True)
    for tick in ticks:
        yield f'<text x="{across(tick):.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{fmt.value(tick)}</text>'
    for series in panel.series:
        yield from _draw(series, f"s{names.index(series.name) % COLOURS}", across, up)


def _draw(series: Series, css: str, across: Callable[[float], float], up: Callable[[float], float]) -> Iterator[str]:
    xs, ys, *band = _thin(series)
    points = [(across(x), up(y)) if math.isfinite(y) else None for x, y in zip(xs, ys, strict=True)]
    if band:
        there = np.isfinite(band[0])
        lower, upper = (
            [f"{across(x):.1f},{up(y):.1f}" for x, y in zip(xs[there], edge[there], strict=True)] for edge in band
        )
        yield f'<polygon class="band {css}" points="{" ".join(upper + lower[::-1])}"/>'
    path = ""
    for before, point in zip([None, *points], points, strict=False):
        path += "" if point is None else f"{'M' if before is None else 'L'}{point[0]:.1f} {point[1]:.1f}"
    yield f'<path class="line {css}" d="{path}"><title>{shown(series.name)}</title></path>'
    if len(points) <= MAX_POINTS:
        mark = f'class="dot {css}" r="2"' if len(points) <= 30 else 'class="hidden" r="4"'
        for x, y, point in zip(xs, ys, points, strict=True):
            if point is not None:
                tip = shown(f"{series.name} at {fmt.value(x)}: {fmt.value(y)}")
                place = f'cx="{point[0]:.1f}" cy="{point[1]:.1f}"'
                yield f"<circle {mark} {place}><title>{tip}</title></circle>"


def _thin(series: Series) -> Sequence[NDArray[np.float64]]:
    """What is drawn of a series: x, y, and where points are averaged their smallest and largest value."""
    x, y = np.asarray(series.x, np.float64), np.asarray(series.y, np.float64)
    y = np.where([_drawable(one) for one in y], y, np.nan)
    if len(x) < 2 * MAX_POINTS:
        return x, y
    parts = [(xs, ys[~np.isnan(ys)]) for xs, ys in zip(*(np.array_split(a, MAX_POINTS) for a in (x, y)), strict=True)]
    columns = [(xs.mean(), *((ys.mean(), ys.min(), ys.max()) if len(ys) else (np.nan,) * 3)) for xs, ys in parts]
    return list(np.array(columns).T)


def _drawable(value: float) -> bool:
    """Finite, and small enough that the length of an axis is finite too."""
    return abs(value) < 1e300


def linear(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Maps [low, high] onto [start, end]; everything onto the middle if low is high."""
    if high == low:
        return lambda _: (start + end) / 2
    return lambda value: start + (value - low) / (high - low) * (end - start)


def axis_range(low: float, high: float) -> tuple[float, float]:
    """An axis around the data: with zero if that is near, never of no length."""
    size = max(abs(low), abs(high))
    if size < 1e-290:
        return 0.0, 1.0
    if high - low <= 1e-9 * size:  # all but equal: no axis has digits for the difference
        return low - size / 2, high + size / 2
    pad = 0.06 * (high - low)
    bottom = 0.0 if 0 <= low < 0.4 * high else low - pad
    top = 0.0 if 0 >= high > 0.4 * low else high + pad
    return bottom, top


def round_ticks(low: float, high: float, count: int = 5, *, whole: bool = False) -> list[float]:
    """About `count` round numbers in [low, high]: 1, 2, 2.5 or 5 times a power of ten apart. whole: integers."""
    if high == low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in ((1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10)) if m * power >= raw * 0.999)
    step = max(step, 1.0) if whole else step
    start = math.ceil(low / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(start, math.floor(high / step + 1e-9) + 1)]


def _describe(panels: Sequence[Panel]) -> str:
    """Each line in words: where it starts, ends, and its extremes."""
    words = []
    for panel in panels:
        for series in panel.series:
            ys = [y for y in series.y if math.isfinite(y)]
            if ys:
                ends = f"from {fmt.value(ys[0])} to {fmt.value(ys[-1])}"
                extremes = f"smallest {fmt.value(min(ys))}, largest {fmt.value(max(ys))}"
                where = f" in {panel.name}" if panel.name else ""
                words.append(f"{series.name}{where} {ends} over {len(ys)} points, {extremes}")
    return "; ".join(words)
