"""Tables of text: title, columns and rows, for the terminal, Markdown and pages."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from g2d_jax.report import format as fmt
from g2d_jax.tracking import clean

Text = tuple[str, list[str], list[list[str]]]
"""A table: title, columns, rows."""


def table(title: str, rows: Sequence[Mapping[str, str]], *, hidden: Container[str] = ()) -> Text:
    """Make a table of rows that map the same heads to cells, without the hidden columns."""
    columns = [name for name in (rows[0] if rows else ()) if name not in hidden]
    return title, columns, [[row[name] for name in columns] for row in rows]


def known(title: str, rows: Sequence[Mapping[str, str]], *, hidden: Container[str] = ()) -> Text:
    """Make a table without the columns in which no row knows anything."""
    heads = [name for name in (rows[0] if rows else ()) if name not in hidden]
    return table(title, [{name: row[name] for name in heads if _is_known(rows, name)} for row in rows])


def _is_known(rows: Sequence[Mapping[str, str]], name: str) -> bool:
    return any(row[name] != fmt.UNKNOWN for row in rows)


def same(rows: Sequence[Mapping[str, str]], name: str) -> list[str]:
    """List the column of this name, to hide it, if all its cells are the same."""
    return [name] if len({row[name] for row in rows}) < 2 else []


def markdown_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table under its title; "" without rows."""
    if not rows:
        return ""
    cells = [[one_line(cell) for cell in line] for line in (columns, *rows)]
    cells.insert(1, ["---"] + ["---:"] * (len(columns) - 1))
    return f"{one_line(title)}:\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in cells)


def one_line(text: str) -> str:
    """Text on one line in which Markdown and HTML see no markup."""
    return "".join(f"\\{char}" if char in "\\|`*_<>[]#" else char for char in clean(text, newlines=False))
