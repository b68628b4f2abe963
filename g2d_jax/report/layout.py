"""Give the texts of a figure room: margins, columns, ticks, legends and labels by what was measured
of them, in points.

No text covers another or leaves the figure: what does not fit is cut with an ellipsis (names) or
left out (numbers on axes, labels of points).
"""

from __future__ import annotations

import functools
import math
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path
from matplotlib.ticker import NullLocator

from g2d_jax.report.markup import visible

WIDTH = 288.0
"""Points of every figure."""
HEIGHT = 172.8
"""Points of a figure with one row of panels, more where a legend needs them."""

# Sizes as in figures.mplstyle, and the height of a line of them with what hangs below it.
SIZE = 8.0
LINE = 10.5
SMALL = 7.0
SMALL_LINE = 11.0

_EDGE = 4.0  # left free at the figure's edges
_GAP = 10.0  # between a panel and what belongs to the next one
_PAD = 4.0  # between an axis and its numbers, and between these and the axis's name
_HANDLE = 20.0  # a line in a legend, with the space to its name
_BETWEEN = 8.0  # columns of a legend
_OF_SEVERAL = 80.0  # the height of each of several rows of panels
_NARROWEST = 44.0  # of panels beside each other

TextsOf = Callable[[Sequence[float]], Sequence[str]]
"""Numbers of an axis as texts."""


class Box(NamedTuple):
    """Where something is, in points from the lower left."""

    left: float
    low: float
    right: float
    high: float

    def meets(self, other: Box, gap: float = 1.0) -> bool:
        """Whether two boxes are less than a gap apart."""
        beside = self.left - gap < other.right and other.left - gap < self.right
        return beside and self.low - gap < other.high and other.low - gap < self.high

    def is_in(self, other: Box) -> bool:
        """Whether the other box holds all of it."""
        beside = other.left <= self.left and self.right <= other.right
        return beside and other.low <= self.low and self.high <= other.high


_SCREEN = RendererAgg(1, 1, 100)


@functools.lru_cache(8192)
def width(text: str, size: float) -> float:
    """Measure a text of one line, in points: its outlines, or its pixels where these take more.

    Letters that the font lacks count as wide as others draw them.
    """
    font = FontProperties(size=size)
    outlines = text_to_path.get_text_width_height_descent(text, font, False)[0]
    pixels = _SCREEN.get_text_width_height_descent(text, font, False)[0]
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    return max(float(outlines), 0.72 * float(pixels)) + 1 + 0.4 * size * wide


def cut(text: str, size: float, room: float) -> str:
    """Write a text on one line of so many points, with an ellipsis for what is cut."""
    line = " ".join(visible(text[:1000]).split())
    if line == text and width(text, size) <= room:
        return text
    if len(text) <= 1000 and width(line, size) <= room:
        return line
    # The longest beginning that fits, by halves: every letter takes a measurement.
    fits, too_long = 0, min(len(line), 2 + int(room)) + 1
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if width(f"{line[:middle]}…", size) <= room:
            fits = middle
        else:
            too_long = middle
    return f"{line[:fits].rstrip()}…"


def numbers(values: Sequence[float]) -> list[str]:
    """Write the numbers of an axis as short as tells them apart: "0.25", "1.5 M", "2e-5"."""
    largest = max(map(abs, values), default=0.0)
    apart = np.diff(np.sort(np.asarray(values, np.float64)))
    # What two numbers of the axis may be off without being taken for one another.
    close = 1e-3 * min(apart[apart > 0], default=largest or 1.0)
    prefix, scale = "", 1.0
    if largest >= 1e5:
        power = min(math.floor(math.log10(largest)) // 3, len(_PREFIXES) - 1)
        prefix, scale = f" {_PREFIXES[power]}", 1000.0**power
    digits = _digits([value / scale for value in values], close / scale)
    if not 1e-3 <= largest < 1e16 or digits > 12:
        return [_scientific(value, close) for value in values]
    return [_signed(f"{v / scale:.{digits}f}{prefix if v else ''}") for v in values]


_PREFIXES = ("", "k", "M", "G", "T")


def _digits(values: Sequence[float], close: float) -> int:
    """Count the digits after the point without which a number would be another one; 13 for more
    than 12."""
    for digits in range(13):
        if all(abs(round(value, digits) - value) <= close for value in values):
            return digits
    return 13


def _scientific(value: float, close: float) -> str:
    """Write a number with as few digits as are close to it: "2.5e-5"."""
    if not value:
        return "0"
    for digits in range(17):
        text = f"{value:.{digits}e}"
        if abs(float(text) - value) <= close:
            break
    return _signed(text)


def _signed(text: str) -> str:
    """Write a sign as a minus, not a hyphen, and an exponent without zeros before it."""
    mantissa, mark, exponent = text.partition("e")
    power = f"{mark}{int(exponent)}" if mark else ""
    return mantissa.replace("-", "−") + power


def decades(low: float, high: float) -> list[float]:
    """Choose the ticks of a logarithmic axis: powers of ten, with 2 and 5 times them where there
    are few."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    powers = [float(f"1e{e}") for e in exponents]
    inside = [power for power in powers if low <= power <= high]
    if len(inside) >= 3:
        return inside[:: -(-len(inside) // 6)]
    between = [factor * power for power in powers for factor in (1, 2, 5)]
    return [tick for tick in between if low <= tick <= high]


def short(values: Sequence[float]) -> list[str]:
    """Write numbers of a logarithmic axis: "0.01", or "2e-5" where one of them is small or large."""
    if all(1e-3 <= value < 1e5 for value in values):
        return [f"{value:g}" for value in values]
    return [_scientific(value, 1e-3 * value) for value in values]


def place(
    figure: Figure,
    axes: Sequence[Axes],
    *,
    shared: bool = False,
    titles: Sequence[str] = (),
    names: Sequence[str] = (),
    height: float = HEIGHT,
    least: float = 100.0,
    texts_of: TextsOf = numbers,
) -> None:
    """Place axes in columns and rows, name the series above them where there are several, and fix
    the numbers of axes.

    shared: whether they have one y axis, written in the first column. titles: of each panel. names:
    of the rows of a y axis without numbers. height: of the figure in points, more where
    that leaves the row of panels less than `least`. texts_of: the numbers of x axes as texts. Axes'
    limits and names are set before.
    """
    top = _EDGE + _legend(figure, axes)
    pads = [_fix_rows(ax, names) if names else _fix_y(ax) for ax in axes]
    y_title = (LINE + _PAD) * bool(axes[0].get_ylabel())
    columns = _columns(len(axes), shared)
    while True:
        margins = _margins(pads, columns, shared)
        margins[0] += y_title
        panel = (WIDTH - sum(margins) - (columns - 1) * _GAP - 2 * _EDGE) / columns
        if columns == 1 or panel >= _NARROWEST:
            break
        columns -= 1
    rows = -(-len(axes) // columns)
    head = LINE / 2 + (LINE + 3) * bool(titles)
    foot = _PAD + LINE + (LINE + _PAD) * bool(axes[0].get_xlabel())
    tall = max(height - top - head - foot, least) if rows == 1 else _OF_SEVERAL
    total = top + rows * (head + tall + foot)
    figure.set_size_inches(WIDTH / 72, total / 72)
    for i, ax in enumerate(axes):
        row, column = divmod(i, columns)
        start = _EDGE + sum(margins[:column]) + column * (panel + _GAP)
        left = start + margins[column]
        low = total - top - row * (head + tall + foot) - head - tall
        ax.set_position((left / WIDTH, low / total, panel / WIDTH, tall / total))
        if shared and column:
            ax.tick_params(labelleft=False)
        if titles:
            title = cut(titles[i], SIZE, margins[column] + panel)
            ax.set_title(title, loc="left", x=(start - left) / panel, y=1, pad=LINE / 2 + 2)
        zone = (max(1.0, start - _GAP / 2 + 1), min(WIDTH - 1, left + panel + _GAP / 2 - 1))
        _fix_x(ax, zone, texts_of, is_free=bool(shared and column))
        ax.set_xlabel(cut(ax.get_xlabel(), SIZE, panel))
        ax.set_ylabel(cut(ax.get_ylabel(), SIZE, tall))


def _columns(count: int, shared: bool) -> int:
    """Say how many panels stand side by side: with y axes of their own fewer, and even rows."""
    most = 4 if shared else 3
    return -(-count // -(-count // most))


def _margins(pads: Sequence[float], columns: int, shared: bool) -> list[float]:
    """Return the room that the numbers of y axes need left of each column."""
    if shared:
        return [max(pads), *[0.0] * (columns - 1)]
    return [max(pads[column::columns]) for column in range(columns)]


def _legend(figure: Figure, axes: Iterable[Axes]) -> float:
    """Name the series at the top, where there are several, in as many columns as fit; return the
    height."""
    handles: dict[str, Any] = {}
    for ax in axes:
        drawn, labels = ax.get_legend_handles_labels()
        handles |= dict(zip(labels, drawn, strict=True))
    if len(handles) <= 1:
        return 0.0
    room = WIDTH - 2 * _EDGE
    names = [cut(label, SMALL, room - _HANDLE) for label in handles]
    columns = len(names)
    while columns > 1 and _wide(names, columns) > room:
        columns -= 1
    figure.legend(
        handles.values(),
        names,
        ncols=columns,
        columnspacing=_BETWEEN / SMALL,
        labelspacing=0.3,
        loc="upper left",
        bbox_to_anchor=(0, 1),
        borderpad=0,
    )
    return SMALL_LINE * -(-len(names) // columns) + 2


def _wide(names: Sequence[str], columns: int) -> float:
    """Measure a legend in so many columns, which matplotlib fills one after another, the first ones
    with one name more where they are uneven."""
    rows, longer = divmod(len(names), columns)
    left = list(names)
    total = (columns - 1) * _BETWEEN
    for column in range(columns):
        count = rows + (column < longer)
        total += _HANDLE + max((width(name, SMALL) for name in left[:count]), default=0.0)
        left = left[count:]
    return total


def _fix_y(ax: Axes) -> float:
    """Fix the numbers of a y axis; return the room that they need."""
    low, high = sorted(ax.get_ylim())
    if ax.get_yscale() == "log":
        ticks = decades(low, high)
        texts = short(ticks)
    else:
        ticks = [t for t in ax.yaxis.get_major_locator()() if low <= t <= high]
        texts = numbers(ticks)
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set_yticks(ticks, texts)
    return _PAD + max((width(text, SIZE) for text in texts), default=0.0)


def _fix_rows(ax: Axes, names: Sequence[str]) -> float:
    """Name the rows of a y axis; return the room that they need."""
    texts = [cut(name, SIZE, 0.45 * WIDTH) for name in names]
    ax.set_yticks(range(len(texts)), texts)
    return _PAD + max(width(text, SIZE) for text in texts)


def _fix_x(ax: Axes, zone: tuple[float, float], texts_of: TextsOf, *, is_free: bool) -> None:
    """Fix the numbers of an x axis between two places: four of them, or fewer where they would
    touch.

    is_free: whether no numbers of the y axis stand beside it.
    """
    low, high = sorted(ax.get_xlim())
    corner = at(ax, low, ax.get_ylim()[0])
    heights = [at(ax, low, tick)[1] for tick in ax.get_yticks()]
    # The lowest number of the y axis may stand as low as these do.
    if not is_free and any(height - corner[1] < LINE for height in heights):
        zone = (max(zone[0], corner[0] - _PAD + 1), zone[1])
    locator: Any = ax.xaxis.get_major_locator()
    chosen: list[tuple[float, str]] = []
    for most in (4, 3, 2, 1):
        locator.set_params(nbins=most)
        ticks = [tick for tick in locator() if low <= tick <= high]
        texts = list(texts_of(ticks))
        kept = [(ticks[i], texts[i]) for i in _apart(ax, ticks, texts, zone)]
        is_whole = len(kept) == len(ticks) and len(kept) > 1
        if is_whole or len(kept) > len(chosen):
            chosen = kept
        if is_whole:
            break
    ax.set_xticks([tick for tick, _ in chosen], [text for _, text in chosen])


def _apart(
    ax: Axes, ticks: Sequence[float], texts: Sequence[str], zone: tuple[float, float]
) -> list[int]:
    """List the numbers of an x axis that stay in their zone and touch none before them, and which
    say something else than that."""
    kept: list[int] = []
    end = zone[0]
    for i, (tick, text) in enumerate(zip(ticks, texts, strict=True)):
        middle = at(ax, tick, ax.get_ylim()[0])[0]
        half = width(text, SIZE) / 2
        if middle - half < end or middle + half > zone[1]:
            continue
        if kept and texts[kept[-1]] == text:
            continue
        kept.append(i)
        end = middle + half + 4
    return kept


def at(ax: Axes, x: float, y: float) -> tuple[float, float]:
    """Return where a point is drawn, in points from the figure's lower left."""
    left, low = 72 / ax.figure.get_dpi() * ax.transData.transform((x, y))
    return float(left), float(low)


def _height(ax: Axes) -> float:
    """Return the height of the axes' figure in points."""
    return 72 / ax.figure.get_dpi() * float(ax.figure.bbox.height)


def area(ax: Axes) -> Box:
    """Return where axes are."""
    left, low, right, high = ax.get_position().extents
    total = _height(ax)
    return Box(WIDTH * left, total * low, WIDTH * right, total * high)


Offset = tuple[float, float]


def label(ax: Axes, labels: Sequence[tuple[float, float, str, str]]) -> None:
    """Write labels beside their points, above them if that is free, in the axes and not over one
    before.

    labels: x, y, text, colour; a text that has no place is left out. Places where no point is come
    first.
    """
    inside = area(ax)
    inside = inside._replace(left=inside.left + 1, high=inside.high + 4)
    places = [at(ax, x, y) for x, y, _, _ in labels]
    dots = [Box(x - 2, y - 2, x + 2, y + 2) for x, y in places]
    taken: list[Box] = []
    for (x, y, text, colour), place in zip(labels, places, strict=True):
        if not text:
            continue
        line = cut(text, SMALL, 80)
        free: list[tuple[int, int, Offset, Box]] = []
        for offset, box in _beside(place, width(line, SMALL)):
            if box.is_in(inside) and not any(map(box.meets, taken)):
                covered = sum(map(functools.partial(box.meets, gap=0), dots))
                free.append((covered, len(free), offset, box))
        if free:
            _, _, offset, box = min(free)
            taken.append(box)
            _annotate(ax, line, (x, y), offset, colour)


def _beside(place: tuple[float, float], wide: float) -> list[tuple[Offset, Box]]:
    """List where a label may be: above its point, below, right, left. Offsets are from the
    point."""
    x, y = place
    half = wide / 2
    high = SMALL_LINE - 1
    return [
        ((0, 4), Box(x - half, y + 3, x + half, y + 3 + high)),
        ((0, -4), Box(x - half, y - 3 - high, x + half, y - 3)),
        ((4, 0), Box(x + 4, y - high / 2, x + 4 + wide, y + high / 2)),
        ((-4, 0), Box(x - 4 - wide, y - high / 2, x - 4, y + high / 2)),
    ]


def _annotate(ax: Axes, text: str, point: Offset, offset: Offset, colour: str) -> None:
    across = {0: "center", 4: "left", -4: "right"}[int(offset[0])]
    up = {0: "center", 4: "bottom", -4: "top"}[int(offset[1])]
    look: dict[str, Any] = {"ha": across, "va": up, "fontsize": SMALL, "color": colour}
    ax.annotate(text, point, offset, textcoords="offset points", **look)
