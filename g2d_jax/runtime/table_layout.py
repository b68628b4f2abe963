"""Tables that fit a terminal: which of their columns are shown, and how wide.

Columns have an order of importance. Those that matter least are left out until the others fit, with
long texts broken into lines. Nothing is cut: two names that differ only in what is cut off would
read alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len

WHOLE = 20
"""Cells of a text that stays on one line; a longer one may be broken into lines of so many."""

WHOLE_NAME = 16
"""The same for texts of the first column, which has the rows' names: figures suffer more."""

LEAST = 2
"""Cells of the narrowest column: a wide character takes two."""

_EDGE = 1  # the frame's at the left
_BESIDE = 3  # a column's own: a space at each side, and the frame's at its right

NARROWEST = _EDGE + _BESIDE + LEAST
"""Columns of the narrowest terminal that a table fits."""


def fit(
    heads: Sequence[str], rows: Sequence[Sequence[str]], columns: int, first: Sequence[str] = ()
) -> dict[int, int]:
    """Choose the columns of a table that fit a terminal: their places, in order, and their widths
    in cells.

    columns: of the terminal, at least `NARROWEST`. first: heads that matter most, in this order;
    the others follow as they stand. The first column has the rows' names, and is always there.
    """
    order = sorted(range(len(heads)), key=lambda i: (i > 0, _rank(heads[i], first)))
    widths: dict[int, int] = {}
    natural: dict[int, int] = {}
    free = columns - _EDGE
    for i in order:
        cells = [row[i] for row in rows]
        least = _least(heads[i], cells, WHOLE if i else WHOLE_NAME)
        if i == 0:
            least = min(least, free - _BESIDE)
        if least + _BESIDE > free:
            break
        widths[i] = least
        natural[i] = max(map(_width, [heads[i], *cells]))
        free -= least + _BESIDE
    # What is left goes to the narrowest first of those that are broken into lines.
    for _ in range(free):
        broken = [i for i in widths if widths[i] < natural[i]]
        if not broken:
            break
        widths[min(broken, key=widths.__getitem__)] += 1
    return dict(sorted(widths.items()))


def _rank(head: str, first: Sequence[str]) -> int:
    return first.index(head) if head in first else len(first)


def _least(head: str, cells: Sequence[str], whole: int) -> int:
    """Count the cells that a column takes at least, its head broken into words."""
    word = max(map(cell_len, head.split()), default=0)
    text = max(map(_width, cells), default=0)
    return max(LEAST, min(max(word, text), whole))


def _width(text: str) -> int:
    return max(map(cell_len, text.split("\n")))
