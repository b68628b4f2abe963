"""Rows to distinct records of one split, with a count of everything that was left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from g2d_jax.config import Source
from g2d_jax.data.fields import BrokenRow, LeftOut, Values
from g2d_jax.data.rows import Row
from g2d_jax.data.splits import HasId, split_of

T = TypeVar("T", bound=HasId)
_SHOWN_ERRORS = 20


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Counts the rows that were read by their fate: rows = kept + duplicates + broken + other_split
    + all of filtered.

    conflicts: those duplicates that differ from the first, which is kept, in what they should share
    (the answer).
    errors: the first broken rows, each with its place and what is wrong.
    filtered: rows that the data set's own filter leaves out, of every split, by reason.
    """

    source: str
    rows: int
    kept: int
    duplicates: int = 0
    conflicts: int = 0
    broken: int = 0
    other_split: int = 0
    errors: tuple[str, ...] = ()
    filtered: Mapping[str, int] = field(default_factory=dict)


def collect(
    source: Source,
    rows: Iterable[Row],
    convert: Callable[[Values], T],
    *,
    key: Callable[[T], object],
    content: Callable[[T], object] = lambda _: None,
) -> tuple[list[T], LoadReport]:
    """Collect the records that `convert` makes, the first of each key, and count what became of the
    rows.

    Beyond source.limit no more rows are read. content: what records of one key should agree in.
    Raises ValueError for a broken row unless they are skipped, and when no row at all made a
    record.
    """
    counts, filtered = Counter[str](), Counter[str]()
    errors: list[str] = []
    first: dict[object, object] = {}  # key -> content
    records: list[T] = []
    for row in rows:
        counts["rows"] += 1
        try:
            record = row.read(convert)
        except LeftOut as reason:
            filtered[str(reason)] += 1
            continue
        except BrokenRow as error:
            if source.on_error == "raise":
                raise ValueError(
                    f'{error}. Mend it, map its fields, or leave broken rows out: on_error="skip"'
                ) from error
            counts["broken"] += 1
            errors += [str(error)] if len(errors) < _SHOWN_ERRORS else []
            continue
        if key(record) in first:
            counts["duplicates"] += 1
            counts["conflicts"] += first[key(record)] != content(record)
            continue
        first[key(record)] = content(record)
        # Only now: a problem that comes twice is a duplicate in whichever split it is.
        if source.split not in ("", split_of(record.id)):
            counts["other_split"] += 1
            continue
        records.append(record)
        if len(records) == source.limit:
            break
    if not first:
        shown = f"; the first: {errors[0]}" if errors else ""
        left_out = "".join(f", {count} {reason}" for reason, count in filtered.items())
        raise ValueError(
            f"{source.path} holds nothing usable: {counts['rows']} rows, {counts['broken']} of "
            f"them broken{left_out}{shown}"
        )
    report = LoadReport(
        source.path, kept=len(records), errors=tuple(errors), filtered=dict(filtered), **counts
    )
    return records, report
