"""Points over any numbers, or over names, as an HTML figure: marks with error bars and labels, joined by lines.

On a square-root axis points crowd less near zero, which a logarithm would not show at all. Lines are straight in the
numbers, as interpolation is, so they bend on such an axis.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from g2d_jax.report import format as fmt
from g2d_jax.report.charts import (
    BOTTOM,
    COLOURS,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    axis_range,
    figure,
    linear,
    round_ticks,
    y_axis,
)
from g2d_jax.report.markup import shown

HEIGHT = 252
CURVE = 12  # pieces of a line on a bent axis
LETTER = 5.8  # width of a letter at most, in user units


@dataclass(frozen=True)
class Mark:
    """A point. low, high: the ends of its bar, NaN for none. label: written beside it where there is room."""

    x: float
    y: float
    low: float = math.nan
    high: float = math.nan
    label: str = ""


@dataclass(frozen=True)
class Marks:
    """A series. joined: by a line, in the order of x."""

    name: str
    marks: Sequence[Mark]
    joined: bool = True


def scatter_chart(
    title: str,
    series: Sequence[Marks],
    *,
    x_title: str,
    root: bool = False,
    zero: bool = True,
    names: Sequence[str] = (),
    written: Callable[[float], str] = fmt.value,
    note: str = "",
) -> str:
    """Series of points. root: a square-root x axis, for x of 0 and more. zero: the y axis may begin there.
    names: of the positions 0, 1, … on the x axis.

    written: numbers on the x axis as text. Points that are not finite are left out and counted under the chart; ""
    without any that is.
    """
    drawn = [Marks(one.name, [mark for mark in one.marks if _finite(mark)], one.joined) for one in series]
    marks = [mark for one in drawn for mark in one.marks]
    if not marks:
        return ""
    missing = sum(len(one.marks) for one in series) - len(marks)
    low, high = _y_range(marks, zero)
    bend = math.sqrt if root else float
    across, up = _across(marks, names, bend), linear(low, high, HEIGHT - BOTTOM, TOP)
    body = [*y_axis(low, high, HEIGHT), *_x_axis(marks, names, across, written, x_title, root)]
    for i, one in enumerate(drawn):
        body += _series(one, f"s{i % COLOURS}", across, up, written, names)
    body += _labels(drawn, across, up)
    notes = [note, "Square-root axis." if root else ""]
    notes += [f"{missing} of {missing + len(marks)} points are not known and not drawn."] if missing else []
    legend = [(one.name, f"s{i % COLOURS}") for i, one in enumerate(drawn)] if len(drawn) > 1 else []
    words = "; ".join(filter(None, (_words(one, written, names) for one in drawn)))
    return figure(title, words, body, HEIGHT + 14, legend=legend, note=" ".join(filter(None, notes)))


def interval_chart(title: str, rows: Sequence[tuple[str, float, float, float]], *, note: str = "") -> str:
    """Draw a point with its interval for each name. rows: name, value, the interval's ends (NaN: none is known)."""
    series = [Marks(row[0], [Mark(i, *row[1:])], joined=False) for i, row in enumerate(rows)]
    return scatter_chart(title, series, x_title="", zero=False, names=[row[0] for row in rows], note=note)


def accuracy_chart(title: str, rows: Sequence[tuple[str, float, float]]) -> str:
    """Draw fractions in percent with two standard errors to each side. rows: name, fraction, standard error."""
    ends = [(name, 100 * value, 100 * (value - 2 * sem), 100 * (value + 2 * sem)) for name, value, sem in rows]
    return interval_chart(title, ends, note="Bars: ± 2 standard errors, clustered by problem.")


def _finite(mark: Mark) -> bool:
    return abs(mark.x) < 1e300 and abs(mark.y) < 1e300


def _y_range(marks: Sequence[Mark], zero: bool) -> tuple[float, float]:
    values = [y for mark in marks for y in (mark.y, mark.low, mark.high) if abs(y) < 1e300]
    low, high = axis_range(min(values), max(values))
    return (low if zero or min(values) == max(values) else min(values) - 0.06 * (high - min(values))), high


def _across(marks: Sequence[Mark], names: Sequence[str], bend: Callable[[float], float]) -> Callable[[float], float]:
    """x to user units: room on both sides for marks, more where positions have names."""
    xs = [bend(mark.x) for mark in marks]
    first, last = (-0.5, len(names) - 0.5) if names else (min(0.0, *xs), max(xs))
    scale = linear(first, last, LEFT + (0 if names else 8), WIDTH - RIGHT - (0 if names else 12))
    return lambda x: scale(bend(x))


def _x_axis(
    marks: Sequence[Mark],
    names: Sequence[str],
    across: Callable[[float], float],
    written: Callable[[float], str],
    x_title: str,
    root: bool,
) -> Iterator[str]:
    xs = [mark.x for mark in marks]
    numbers = _root_ticks(max(xs)) if root else round_ticks(min(0.0, *xs), max(xs), 8)
    ticks = list(enumerate(names)) if names else [(x, written(x)) for x in numbers]
    end = -math.inf
    for x, label in ticks:
        room = (WIDTH - LEFT - RIGHT) / len(names) / LETTER if names else math.inf
        short = label if len(label) <= room else label[: max(int(room) - 1, 1)] + "…"
        half = len(short) * LETTER / 2
        if across(x) - half < end:
            continue
        end = across(x) + half + 4
        tip = f"<title>{shown(label)}</title>" if short != label else ""
        place = f'x="{across(x):.1f}" y="{HEIGHT - BOTTOM + 15}"'
        yield f'<text {place} text-anchor="middle">{shown(short)}{tip}</text>'
    middle = (LEFT + WIDTH - RIGHT) / 2
    yield f'<text x="{middle:.1f}" y="{HEIGHT - BOTTOM + 31}" text-anchor="middle">{shown(x_title)}</text>'


def _root_ticks(high: float) -> list[float]:
    """Round numbers up to a high one, about evenly on a square-root axis."""
    found = {0.0}
    for share in (0.2, 0.4, 0.6, 0.8, 1.0):
        raw = high * share**2
        power = 10.0 ** math.floor(math.log10(raw)) if raw > 0 else 1.0
        found.add(float(f"{math.floor(raw / power * 1.001) * power:.12g}"))
    return sorted(found)


def _series(
    one: Marks,
    css: str,
    across: Callable[[float], float],
    up: Callable[[float], float],
    written: Callable[[float], str],
    names: Sequence[str],
) -> Iterator[str]:
    ordered = sorted(one.marks, key=lambda mark: mark.x)
    if one.joined and len(ordered) > 1:
        path = "L".join(f"{across(x):.1f} {up(y):.1f}" for x, y in _line(ordered))
        yield f'<path class="line {css}" d="M{path}"><title>{shown(one.name)}</title></path>'
    for mark in ordered:
        x, y = f"{across(mark.x):.1f}", f"{up(mark.y):.1f}"
        if abs(mark.low) < 1e300 and abs(mark.high) < 1e300:
            ends = f'y1="{up(mark.low):.1f}" y2="{up(mark.high):.1f}"'
            yield f'<line class="whisker {css}" x1="{x}" x2="{x}" {ends}/>'
        tip = shown(f"{one.name}{', ' * bool(mark.label)}{mark.label}: {_told(mark, written, names)}")
        yield f'<circle class="dot {css}" r="3" cx="{x}" cy="{y}"><title>{tip}</title></circle>'


def _line(marks: Sequence[Mark]) -> Iterator[tuple[float, float]]:
    for before, after in itertools.pairwise(marks):
        for i in range(CURVE):
            share = i / CURVE
            yield before.x + share * (after.x - before.x), before.y + share * (after.y - before.y)
    yield marks[-1].x, marks[-1].y


def _labels(series: Sequence[Marks], across: Callable[[float], float], up: Callable[[float], float]) -> Iterator[str]:
    """Labels above their marks, the first series' first; one that would cover another is left to the tooltip."""
    taken: list[tuple[float, float, float]] = []  # middle, base line, half the width
    for mark in (mark for one in series for mark in one.marks if mark.label):
        x, y, half = across(mark.x), up(mark.y) - 7, len(mark.label) * LETTER / 2
        if all(abs(x - middle) > half + other or abs(y - base) > 10 for middle, base, other in taken):
            taken.append((x, y, half))
            yield f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{shown(mark.label)}</text>'


def _told(mark: Mark, written: Callable[[float], str], names: Sequence[str]) -> str:
    where = names[int(mark.x)] if names else written(mark.x)
    bar = f" ({fmt.value(mark.low)} to {fmt.value(mark.high)})" if mark.low == mark.low else ""
    return f"{fmt.value(mark.y)}{bar} at {where}"


def _words(one: Marks, written: Callable[[float], str], names: Sequence[str]) -> str:
    told = [f"{mark.label} {_told(mark, written, names)}".strip() for mark in one.marks]
    return f"{one.name}: {', '.join(told)}" if told else ""
