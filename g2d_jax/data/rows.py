"""Rows of JSONL, JSON and Parquet files and of hub data sets, each with the place it came from.

Files are untrusted. A row that cannot be read is handed on with the reason, for the caller to stop at or to count; a
file that cannot be read at all raises ValueError. What is held in memory at a time is bounded, also where a small file
says a long text many times.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any, TypeVar

from etils import epath

from g2d_jax.data.fields import BrokenRow
from g2d_jax.runtime import extras, storage

SUFFIXES = (".jsonl", ".json", ".parquet")
MAX_ROW_BYTES = 64 * 2**20
MAX_JSON_BYTES = 256 * 2**20  # Python's objects take several times as much
BATCH_BYTES = 256 * 2**20  # of Parquet rows that are expanded together
_BOM = b"\xef\xbb\xbf"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row:
    """One row. where: file and line (row), counted from 1. error: why `values` could not be read, None if they were."""

    where: str
    values: dict[str, Any]
    error: str | None = None

    def read(self, convert: Callable[[dict[str, Any]], T]) -> T:
        """Convert the values. Raises BrokenRow with the place where they could not be read, or are not as they must."""
        try:
            if self.error is not None:
                raise BrokenRow(self.error)
            return convert(self.values)
        except BrokenRow as error:
            raise BrokenRow(f"{self.where}: {error}") from error


def file_rows(path: str) -> Iterator[Row]:
    """Read the rows of a .jsonl, .json or .parquet file, local or gs://. Blank lines of JSONL are no rows.

    Raises ValueError when the file is missing or of another kind, is no list of objects, or is not Parquet.
    """
    file = epath.Path(path).expanduser()
    read = _READERS.get(file.suffix.lower())
    if read is None:
        raise ValueError(f"{path}: files are read by their ending, one of {', '.join(SUFFIXES)}")
    try:
        with file.open("rb") as handle:
            storage.refuse_pointer(path, handle.read(len(storage.POINTER)))
            handle.seek(0)
            # A store's own readline takes no limit.
            whole = handle if isinstance(handle, io.BufferedReader) else io.BufferedReader(handle)
            yield from read(whole, os.fspath(path))
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(
            f"{path} cannot be read: {reason}. A data set on the Hugging Face hub is written hub:owner/name"
        ) from error


def hub_rows(
    repository: str, config: str | None, split: str, revision: str | None = None, *, name: str = ""
) -> Iterator[Row]:
    """Read the rows of one split of a hub data set, or of a local folder that `datasets.load_dataset` understands.

    name: what the set is known by here, if it is. Raises ImportError, naming the extra, without the package `datasets`,
    and ValueError when the set cannot be loaded.
    """
    try:
        import datasets
    except ImportError as error:
        raise extras.missing(f"hub:{repository} needs the package datasets", "hub") from error
    try:
        loaded = datasets.load_dataset(repository, config, split=split, revision=revision)
    except Exception as error:  # network, authentication, configuration and parsing each raise their own kinds
        advice = f"write {name}:FILE.jsonl" if name else "give its path, or write hub:owner/name@configuration:split"
        raise ValueError(
            f"hub:{repository}: split {split!r} of configuration {config!r} cannot be loaded: "
            f"{storage.hub_reason(error)}. Of a file on this machine {advice}"
        ) from error
    for number, values in enumerate(loaded, 1):
        yield Row(f"hub:{repository}, {split} row {number}", values)


def _jsonl_rows(handle: IO[bytes], path: str) -> Iterator[Row]:
    for number, line in enumerate(iter(lambda: handle.readline(MAX_ROW_BYTES + 1), b""), 1):
        where = f"{path}, line {number}"
        if len(line) > MAX_ROW_BYTES:
            yield _too_long(where)
            while line and not line.endswith(b"\n"):
                line = handle.readline(MAX_ROW_BYTES)
        elif line.removeprefix(_BOM).strip():
            try:
                yield _checked(where, _loads(line))
            except ValueError as error:
                yield Row(where, {}, f"not JSON: {error}")


def _json_rows(handle: IO[bytes], path: str) -> Iterator[Row]:
    text = handle.read(MAX_JSON_BYTES + 1)
    if len(text) > MAX_JSON_BYTES:
        raise ValueError(
            f"{path} has more than {MAX_JSON_BYTES:,} bytes: make it .jsonl, one object a line, or .parquet"
        )
    try:
        content = _loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}. One object per line goes into a .jsonl file") from error
    if isinstance(content, dict) and isinstance(content.get("data"), list):
        content = content["data"]
    if not isinstance(content, list):
        raise ValueError(f'{path}: a list of objects is needed, or {{"data": [...]}}, got {type(content).__name__}')
    for number, values in enumerate(content, 1):
        yield _checked(f"{path}, row {number}", values)


def _parquet_rows(handle: IO[bytes], path: str) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        for number, row in enumerate(_slices(pq.ParquetFile(handle)), 1):
            where = f"{path}, row {number}"
            if row.nbytes > MAX_ROW_BYTES:
                yield _too_long(where)
                continue
            try:
                yield _checked(where, row.to_pylist()[0])
            except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # a date in the year 10000 …
                yield Row(where, {}, f"it holds what Python cannot: {error}")
    except pa.ArrowException as error:
        raise ValueError(f"{path} is not a readable Parquet file: {error}") from error


def _slices(file: Any) -> Iterator[Any]:
    """Yield each row of a pyarrow.parquet.ParquetFile as a batch of its own."""
    for group in range(file.num_row_groups):
        # A text is stored once, however many rows have it: each of them may be as long as all that is stored.
        stored = max(file.metadata.row_group(group).total_byte_size, 1)
        count = min(max(BATCH_BYTES // stored, 1), 1024)
        for batch in file.iter_batches(batch_size=count, row_groups=[group]):
            for i in range(batch.num_rows):
                yield batch.slice(i, 1)


_READERS = {".jsonl": _jsonl_rows, ".json": _json_rows, ".parquet": _parquet_rows}


def _loads(text: bytes) -> Any:
    """Parse JSON in UTF-8; every failure is a ValueError."""
    try:
        return json.loads(text.removeprefix(_BOM).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _too_long(where: str) -> Row:
    return Row(where, {}, f"the row is longer than {MAX_ROW_BYTES:,} bytes")


def _checked(where: str, values: Any) -> Row:
    if not isinstance(values, dict):
        return Row(where, {}, f"an object with named fields is needed, got {type(values).__name__}")
    return Row(where, values)
