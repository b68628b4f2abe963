"""Rows of parametrised tests that the usual run leaves out."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow(*rows: Any) -> list[Any]:
    """The rows as parameters of the slow set: those beside them show the same behaviour with other
    values."""
    return [
        pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.slow)
        for row in rows
    ]


def some(quick: Iterable[Any], rows: Iterable[Any]) -> list[Any]:
    """All rows, those that are not among the quick ones for the slow set."""
    kept = [*quick]
    return [row if row in kept else slow(row)[0] for row in rows]
