"""Distinct records of one split from rows, with a count of everything left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from g2d_jax.config import Source
from g2d_jax.data.fields import BrokenRow, LeftOut, Values, further_keys
from g2d_jax.data.rows import Row
from g2d_jax.data.splits import HasPrompt, split_of

R = TypeVar("R")
T = TypeVar("T", bound=HasPrompt)
MOST_BROKEN = 0.05
"""The share of a set's rows that may be broken unless a setting allows more."""
_SHOWN_ERRORS = 20


@dataclass(slots=True)
class LoadReport:
    """A reader of a set's rows that counts them by outcome: the same for problems, examples, pairs
    and rollouts. rows = kept + duplicates + broken + other_split + all of filtered.

    on_error: "raise" allows MOST_BROKEN of the rows to be broken, "skip" any share; "" is "raise"
    for a set without that setting.
    conflicts: the duplicates that differ from the first, which is kept, in a shared property (the
    answer).
    errors: the first broken rows, each with its place and fault.
    filtered: rows that the dataset's own filter leaves out, of every split, by reason.
    keys: rows by each key of their messages other than role and content.
    firsts: the place of the first row of each reason and key.
    holes: rows by each placeholder for a missing answer.
    """

    source: str
    on_error: str = ""
    rows: int = 0
    kept: int = 0
    duplicates: int = 0
    conflicts: int = 0
    broken: int = 0
    other_split: int = 0
    errors: list[str] = field(default_factory=list)
    filtered: Counter[str] = field(default_factory=Counter)
    keys: Counter[str] = field(default_factory=Counter)
    firsts: dict[str, str] = field(default_factory=dict)
    holes: Counter[str] = field(default_factory=Counter)

    def read(self, row: Row, convert: Callable[[Values], R]) -> R | None:
        """Convert a row; return None for one that is left out."""
        self.rows += 1
        try:
            record, keys = row.read(convert), row.read(further_keys)
        except LeftOut as reason:
            cause = f": {reason.__cause__}" if reason.__cause__ else ""
            self.firsts.setdefault(str(reason), f"{row.where}{cause}")
            self.filtered[str(reason)] += 1
            return None
        except BrokenRow as error:
            self.broken += 1
            self.errors += [str(error)] if len(self.errors) < _SHOWN_ERRORS else []
            return None
        for key in keys:
            self.firsts.setdefault(key, row.where)
            self.keys[key] += 1
        return record

    @property
    def left_out(self) -> str:
        """Describe the unused rows: how many, why, and the first of each kind; "" for none."""
        parts = []
        if self.broken:
            parts.append(f"{self.broken} broken (the first: {self.errors[0]})")
        for reason, count in self.filtered.items():
            parts.append(f"{count} {reason} (the first: {self.firsts[reason]:.400})")
        return ", ".join(parts)

    def require_usable(self, used: object) -> None:
        """Raise ValueError for too many broken rows, and if no row became a record. used: false in
        the second case."""
        if self.on_error != "skip":
            require_few(self.errors, self.broken, self.rows, self.on_error)
        if not used:
            raise ValueError(
                f"{self.source} has no usable row: {self.rows} rows, left out: "
                f"{self.left_out or 'none'}"
            )


def require_few(errors: Sequence[str], broken: int, rows: int, on_error: str) -> None:
    """Raise ValueError if more than MOST_BROKEN of the rows are broken. errors: the first of them,
    each with its place."""
    if broken <= MOST_BROKEN * rows:
        return
    advice = "Correct them, or remove them from the file"
    if on_error:
        skip = ', or skip broken rows with on_error="skip"' * (broken < rows)
        advice = f"Correct them, or map their fields{skip}"
    raise ValueError(
        f"{errors[0]}. {broken:,} of {rows:,} rows are broken; at most {MOST_BROKEN:.0%} may be. "
        f"{advice}"
    )


def collect(
    source: Source,
    rows: Iterable[Row],
    convert: Callable[[Values], T],
    *,
    key: Callable[[T], object],
    content: Callable[[T], object] = lambda _: None,
) -> tuple[list[T], LoadReport]:
    """Collect the records from `convert`, the first of each key, and count the rows by outcome.

    Reading stops at source.limit. content: the part that records of one key should share. Raises
    ValueError as `LoadReport.require_usable`.
    """
    report = LoadReport(source.path, source.on_error)
    first: dict[object, object] = {}  # key -> content
    records: list[T] = []
    for row in rows:
        record = report.read(row, convert)
        if record is None:
            continue
        if key(record) in first:
            report.duplicates += 1
            report.conflicts += first[key(record)] != content(record)
            continue
        first[key(record)] = content(record)
        # Only now: a repeated problem is a duplicate in any split.
        if source.split not in ("", split_of(record.id)):
            report.other_split += 1
            continue
        records.append(record)
        if len(records) == source.limit:
            break
    report.kept = len(records)
    report.require_usable(first)
    return records, report
