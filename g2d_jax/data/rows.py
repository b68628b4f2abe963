"""Rows of JSONL, JSON and Parquet files and of hub datasets, each with its place.

Files are untrusted. An unreadable row carries the reason, so that the caller can stop or count; an
unreadable file raises ValueError. Memory use is bounded, even if a small file repeats a long text
many times, in rows or in a list; for Parquet the bound relies on the sizes that the file itself
declares.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from etils import epath

from g2d_jax.data.fields import BrokenRow, Values
from g2d_jax.runtime import failures, storage

SUFFIXES = (".jsonl", ".json", ".parquet")
MAX_ROW_BYTES = 64 * 2**20
BATCH_BYTES = MAX_ROW_BYTES  # of Parquet rows that are expanded together
GROUP_BYTES = 256 * 2**20  # of a group of Parquet rows, before texts are expanded
# the most that a group's stored bytes may grow, if that is more than GROUP_BYTES
MOST_GROWTH = 32
_INDEXED = {"PLAIN", "RLE", "BIT_PACKED", "RLE_DICTIONARY", "PLAIN_DICTIONARY"}
"""Encodings of texts that Arrow reads as indices."""
_APART = {"PLAIN", "RLE", "BIT_PACKED", "DELTA_LENGTH_BYTE_ARRAY"}
"""Encodings that store each text separately."""
_TEXTS = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
_BOM = b"\xef\xbb\xbf"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row:
    """One row. where: file and line (row), counted from 1. error: why `values` could not be read,
    or None."""

    where: str
    values: Values
    error: str | None = None

    def read(self, convert: Callable[[Values], T]) -> T:
        """Convert the values. Raises BrokenRow with the place if they are unreadable or invalid."""
        try:
            if self.error is not None:
                raise BrokenRow(self.error)
            return convert(self.values)
        except RecursionError as error:
            raise BrokenRow(f"{self.where}: nested too deeply") from error
        except BrokenRow as error:
            raise BrokenRow(f"{self.where}: {error}") from error


def file_rows(path: str) -> Iterator[Row]:
    """Read the rows of a .jsonl, .json or .parquet file, local or gs://. Blank lines of JSONL are
    skipped.

    Raises ValueError when the file is missing or of another kind, is no list of objects, or is not
    Parquet.
    """
    file = epath.Path(path).expanduser()
    read = _READERS.get(file.suffix.lower())
    if read is None:
        raise ValueError(f"{path}: the file's name must end in one of {', '.join(SUFFIXES)}")
    try:
        with file.open("rb") as handle:
            storage.refuse_pointer(path, handle.read(len(storage.POINTER)))
            handle.seek(0)
            # An object store's own readline has no limit.
            whole = handle if isinstance(handle, io.BufferedReader) else io.BufferedReader(handle)
            yield from read(whole, os.fspath(path))
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(
            f"{path} cannot be read: {reason}. For a dataset on the Hugging Face hub write "
            "hub:owner/name"
        ) from error


def hub_rows(
    repository: str, config: str | None, split: str, revision: str | None = None, *, name: str = ""
) -> Iterator[Row]:
    """Read the rows of one split of a hub data set, or of a local folder that
    `datasets.load_dataset` understands.

    name: the set's short name, if it has one. Raises ImportError, naming the extra, without the
    package `datasets`, and ValueError when the set cannot be loaded.
    """
    try:
        import datasets
    except ImportError as error:
        raise failures.missing_extra(
            f"hub:{repository} needs the package datasets", "hub"
        ) from error
    try:
        loaded = datasets.load_dataset(repository, config, split=split, revision=revision)
    # Network, authentication, configuration and parsing each raise their own errors.
    except Exception as error:
        advice = "give its path, or write hub:owner/name@configuration:split"
        if name:
            advice = f"write {name}:FILE.jsonl"
        raise ValueError(
            f"hub:{repository}: split {split!r} of configuration {config!r} cannot be loaded: "
            f"{storage.hub_reason(error)}. For a file on this machine {advice}"
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
                yield _as_row(where, _loads(line))
            except ValueError as error:
                yield Row(where, {}, f"not JSON: {error}")


def _json_rows(handle: IO[bytes], path: str) -> Iterator[Row]:
    text = handle.read(storage.MOST_JSON + 1)
    if len(text) > storage.MOST_JSON:
        raise ValueError(
            f"{path} has more than {storage.MOST_JSON:,} bytes: convert it to .jsonl, one object a "
            "line, or to .parquet"
        )
    try:
        content = _loads(text)
    except ValueError as error:
        raise ValueError(
            f"{path} is not JSON: {error}. Store one object per line in a .jsonl file"
        ) from error
    if isinstance(content, dict) and isinstance(content.get("data"), list):
        content = content["data"]
    if not isinstance(content, list):
        raise ValueError(
            f'{path}: must be a list of objects, or {{"data": [...]}}, got {type(content).__name__}'
        )
    for number, values in enumerate(content, 1):
        yield _as_row(f"{path}, row {number}", values)


def _parquet_rows(handle: IO[bytes], path: str) -> Iterator[Row]:
    try:
        file = pq.ParquetFile(handle)
        for number, row in enumerate(_single_rows(file, handle, path), 1):
            where = f"{path}, row {number}"
            if row is None or row.nbytes > MAX_ROW_BYTES:
                yield _too_long(where)
                continue
            try:
                yield _as_row(where, row.to_pylist()[0])
            # a date in the year 10000 …
            except (ArithmeticError, LookupError, TypeError, ValueError) as error:
                yield Row(where, {}, f"it has a value that Python cannot represent: {error}")
    except pa.ArrowException as error:
        raise ValueError(f"{path} is not a readable Parquet file: {error}") from error


def _single_rows(file: Any, handle: IO[bytes], path: str) -> Iterator[Any]:
    """Yield each row of a pyarrow.parquet.ParquetFile as a batch of its own, None for one of over
    BATCH_BYTES.

    Parquet stores a text once, however many rows, or elements of one row's list, have it. So texts
    are read as indices into the stored ones, which is little, and expanded only if they are known
    to fit. Raises ValueError for a group of rows that is too large even so: one compressed far
    better than text can be, or a list that repeats a number a billion times.
    """
    leaves = list(map(file.schema.column, range(len(file.schema))))
    groups = list(map(file.metadata.row_group, range(file.num_row_groups)))
    texts = []
    for i, leaf in enumerate(leaves):
        indexed = all(_INDEXED.issuperset(group.column(i).encodings) for group in groups)
        if leaf.physical_type == "BYTE_ARRAY" and indexed:
            texts.append(leaf.path)
    plain = []
    for column in file.schema_arrow:
        indices = pa.types.is_dictionary(column.type)  # a category of pandas
        plain.append(column.with_type(column.type.value_type) if indices else column)
    as_indices = pq.ParquetFile(handle, read_dictionary=texts)
    for number, group in enumerate(groups):
        count = _rows_at_a_time(leaves, texts, group, f"{path}, group {number + 1} of its rows")
        for batch in as_indices.iter_batches(batch_size=count, row_groups=[number]):
            for piece in _pieces(batch, range(batch.num_rows)):
                if piece is None:
                    yield None
                    continue
                expanded = piece.cast(pa.schema(plain))
                for i in range(expanded.num_rows):
                    yield expanded.slice(i, 1)


def _rows_at_a_time(leaves: list[Any], texts: list[str], group: Any, where: str) -> int:
    """Return how many rows of a group to read at once, by the sizes that the file declares.

    leaves: the columns of its schema. texts: those that are read as indices. Raises ValueError if
    one row may need more than GROUP_BYTES, and more than MOST_GROWTH times its stored bytes.
    """
    whole = compressed = 0  # what one row may need, if it holds nearly everything
    width = 1  # bytes of one row in the columns that are not lists
    for i, leaf in enumerate(leaves):
        chunk = group.column(i)
        value = 8
        is_expanded = leaf.physical_type == "BYTE_ARRAY" and leaf.path not in texts
        if leaf.physical_type == "FIXED_LEN_BYTE_ARRAY":
            value = max(leaf.length, 8)
        elif is_expanded and not _APART.issuperset(chunk.encodings):
            value = chunk.total_uncompressed_size
        compressed += chunk.total_compressed_size
        whole += chunk.total_uncompressed_size
        if leaf.max_repetition_level:
            whole += chunk.num_values * value
        else:
            width += value
    if whole > max(GROUP_BYTES, MOST_GROWTH * compressed):
        raise ValueError(
            f"{where}: {compressed:,} bytes may become {whole:,} in memory, beyond the limit of "
            f"{GROUP_BYTES:,}. Write smaller groups (row_group_size), or .jsonl"
        )
    return min(max(BATCH_BYTES // width, 1), 1024)


def _pieces(batch: Any, numbers: range) -> Iterator[Any]:
    """Split rows of a batch until each piece has at most BATCH_BYTES with its texts expanded; None
    is a larger row.

    A piece is a copy: for a slice Arrow would expand the whole batch.
    """
    piece = batch.take(pa.array(numbers, pa.int64()))
    if sum(map(_expanded_bytes, piece.columns)) <= BATCH_BYTES:
        yield piece
    elif len(numbers) == 1:
        yield None
    else:
        half = len(numbers) // 2
        yield from _pieces(piece, range(half))
        yield from _pieces(piece, range(half, len(numbers)))


def _expanded_bytes(values: Any) -> int:
    """Return the bytes of an Arrow array once its texts, stored as indices, are expanded."""
    kind = values.type
    if pa.types.is_struct(kind):
        return sum(map(_expanded_bytes, values.flatten()))
    if pa.types.is_map(kind):
        return _expanded_bytes(values.keys) + _expanded_bytes(values.items) + 8 * len(values)
    if pa.types.is_nested(kind):  # lists of all kinds
        return _expanded_bytes(values.flatten()) + 8 * len(values)
    if not pa.types.is_dictionary(kind) or kind.value_type not in _TEXTS:
        return int(values.nbytes)
    lengths = pc.binary_length(values.dictionary).take(values.indices)
    return int(pc.sum(lengths).as_py() or 0) + 8 * len(values)


_READERS = {".jsonl": _jsonl_rows, ".json": _json_rows, ".parquet": _parquet_rows}


def _loads(text: bytes) -> Any:
    """Parse JSON in UTF-8. Every failure raises ValueError."""
    try:
        return json.loads(text.removeprefix(_BOM).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}: save the file as UTF-8") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _too_long(where: str) -> Row:
    return Row(where, {}, f"the row is longer than {MAX_ROW_BYTES:,} bytes")


def _as_row(where: str, values: Any) -> Row:
    if not isinstance(values, dict):
        return Row(where, {}, f"must be an object with named fields, got {type(values).__name__}")
    return Row(where, values)
