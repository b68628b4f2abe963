"""A GGUF file: its metadata, and the places and rows of its tensors.

    "GGUF"    version, count of tensors, count of entries
    entries   name, type, value
    tensors   name, dimensions (the quickest first), type, offset into the rest
    the rest  the tensors, each at a multiple of general.alignment

(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.) A file may come from anybody: counts,
lengths, types and offsets are checked against the file's size before room is made for them or
anything is read by them. The library of that name maps files into memory and believes them, so of
it only the sizes of blocks and their numbers' formulas are taken. Files are local.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from g2d_jax.runtime import failures, ranges, storage

ENDING = ".gguf"

KINDS = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
)
"""The types of tensors that are read, by GGML's names."""

_VERSIONS = (2, 3)
_SCALARS = {
    **{0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4"},
    **{7: "<u1", 10: "<u8", 11: "<i8", 12: "<f8"},
}
"""NumPy's types of the numbers, by their codes."""
_BOOL, _STRING, _ARRAY = 7, 8, 9

# Far more than any file of a model has: what a file says of itself is not believed beyond that.
_MOST_HEADER_BYTES = 64 << 20
_MOST_ENTRIES = 10_000
_MOST_TENSORS = 100_000
_MOST_ITEMS = 1 << 21  # of one list
_MOST_DIMENSIONS = 4
_MOST_ALIGNMENT = 1 << 20

_PART = 1 << 18  # bytes that are decoded at once


@dataclass(frozen=True)
class Tensor:
    """A tensor's place. shape: the slowest dimension first. kind: one of KINDS. start, length:
    bytes of the file."""

    shape: tuple[int, ...]
    kind: str
    start: int
    length: int


_WORDS = {
    **{str: "a text", int: "an integer", bool: "true or false"},
    **{list: "a list of texts", np.ndarray: "a list of numbers"},
}


@dataclass(frozen=True)
class Gguf:
    """The header of a file. metadata: name -> number, text, list of texts, or array of numbers.
    tensors: by their names in the file."""

    path: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """Return an entry of this type, the default where there is none. Raises ValueError for one
        of another type."""
        value = self.metadata.get(name, default)
        if value is not default and type(value) is not kind:
            raise ValueError(f"{self.path}: {name} must be {_WORDS[kind]}, got {value!r:.100}")
        return value

    def need(self, name: str, kind: type) -> Any:
        """Return an entry of this type. Raises ValueError without one."""
        if name not in self.metadata:
            raise ValueError(f"{self.path}: its metadata lacks {name}")
        return self.get(name, kind)


def is_gguf(path: storage.PathLike) -> bool:
    """Tell whether a path names a GGUF file, by its ending, and no folder."""
    name = os.fspath(path)
    return name.lower().endswith(ENDING) and not os.path.isdir(name)


def read(path: storage.PathLike) -> Gguf:
    """Read the header of a file; one that was read before only if it has changed.

    Raises ValueError naming the file, and the entry or tensor, for one that is truncated or
    damaged, of an unknown version or byte order, split over several files, or with tensors of
    other types than KINDS. Raises ImportError without the extra `gguf`.
    """
    name = os.fspath(path)
    with storage.naming("read", name):
        status = os.stat(name)
    return _read(name, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _read(path: str, size: int, changed: int) -> Gguf:
    sizes = _block_sizes()
    try:
        with storage.naming("read", path), open(path, "rb") as file:
            storage.refuse_pointer(path, file.read(len(storage.POINTER)))
            file.seek(0)
            return _parse(path, _Header(file, size), sizes)
    except storage.IsPointer:
        raise
    except ValueError as error:
        raise ValueError(f"{path} is not a readable GGUF file: {error}") from error


def _library() -> Any:
    """Import the library gguf. Raises ImportError naming the extra."""
    try:
        import gguf
    except ImportError as error:
        raise failures.missing_extra("GGUF files need the package gguf", "gguf") from error
    return gguf


def _block_sizes() -> dict[int, tuple[str, int, int]]:
    """Map the codes of KINDS to their names, the numbers in a block and its bytes."""
    library = _library()
    codes = {kind: library.GGMLQuantizationType[kind] for kind in KINDS}
    return {int(code): (kind, *library.GGML_QUANT_SIZES[code]) for kind, code in codes.items()}


class _Header:
    """The bytes of a header, taken one part after the other."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file = file
        self.size = size
        self.at = 0

    def take(self, length: int) -> bytes:
        """Return the next bytes. Raises ValueError where the file or the room for a header ends."""
        if length > self.size - self.at:
            raise ValueError(
                f"truncated or damaged: {length} bytes from {self.at} on are in a file of "
                f"{self.size}"
            )
        if self.at + length > _MOST_HEADER_BYTES:
            raise ValueError(f"its header is longer than {_MOST_HEADER_BYTES} bytes")
        data = self.file.read(length)
        if len(data) != length:
            raise ValueError("it became shorter while it was read")
        self.at += length
        return data

    def number(self, length: int) -> int:
        """Return the next bytes as a number from 0 on."""
        return int.from_bytes(self.take(length), "little")

    def text(self) -> str:
        """Return the next string."""
        at = self.at
        try:
            return self.take(self.number(8)).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"the string at byte {at} is not UTF-8") from error

    def count(self, what: str, least: int, most: int) -> int:
        """Return the next number as a count of things that take at least so many bytes each."""
        count = self.number(8)
        if count > min(most, (self.size - self.at) // least):
            raise ValueError(f"it declares {count} {what} in a file of {self.size} bytes")
        return count


def _parse(path: str, header: _Header, sizes: Mapping[int, tuple[str, int, int]]) -> Gguf:
    if header.size < 4 or header.take(4) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version = header.number(4)
    if version not in _VERSIONS:
        reason = "of another byte order" if version & 0xFFFF == 0 else f"of version {version}"
        raise ValueError(f"it is {reason}; versions 2 and 3 in little-endian order are read")
    tensors = header.count("tensors", 32, _MOST_TENSORS)
    entries = header.count("entries", 13, _MOST_ENTRIES)
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        name = header.text()
        if name in metadata:
            raise ValueError(f"the entry {name:.100} is there twice")
        metadata[name] = _value(header, header.number(4), f"entry {name:.100}")
    parts = metadata.get("split.count")
    if isinstance(parts, int) and parts > 1:
        raise ValueError("it is one of several parts: merge them with llama-gguf-split --merge")
    found: dict[str, Tensor] = {}
    for _ in range(tensors):
        name, tensor = _tensor(header, sizes)
        if name in found:
            raise ValueError(f"the tensor {name:.100} is there twice")
        found[name] = tensor
    return Gguf(path, metadata, _placed(header, found, metadata.get("general.alignment", 32)))


def _value(header: _Header, code: int, what: str) -> Any:
    """Read a value of the metadata. what: its description for messages."""
    if code == _STRING:
        return header.text()
    if code == _ARRAY:
        return _list(header, what)
    return _numbers(header, code, 1, what)[0].item()


def _list(header: _Header, what: str) -> Any:
    code = header.number(4)
    if code == _STRING:
        count = header.count(f"items of {what}", 8, _MOST_ITEMS)
        return [header.text() for _ in range(count)]
    count = header.count(f"items of {what}", 1, _MOST_ITEMS)
    return _numbers(header, code, count, what)


def _numbers(header: _Header, code: int, count: int, what: str) -> np.ndarray:
    if code not in _SCALARS:
        raise ValueError(f"{what} is of type {code}, which is not known, or a list of lists")
    dtype = np.dtype(_SCALARS[code])
    numbers = np.frombuffer(header.take(count * dtype.itemsize), dtype)
    if code != _BOOL:
        return numbers
    if (numbers > 1).any():
        raise ValueError(f"{what} is neither true nor false")
    return numbers.astype(bool)


def _tensor(header: _Header, sizes: Mapping[int, tuple[str, int, int]]) -> tuple[str, Tensor]:
    """Read a tensor's name, and its place with the offset for a start."""
    name = header.text()
    what = f"tensor {name:.100}"
    count = header.number(4)
    if not 1 <= count <= _MOST_DIMENSIONS:
        raise ValueError(f"{what} has {count} dimensions")
    dimensions = struct.unpack(f"<{count}Q", header.take(8 * count))
    code = header.number(4)
    offset = header.number(8)
    if code not in sizes:
        raise ValueError(f"{what} is of type {_kind_name(code)}; {', '.join(KINDS)} are read")
    kind, numbers, block = sizes[code]
    if 0 in dimensions or dimensions[0] % numbers:
        raise ValueError(f"{what} of type {kind} has the shape {list(dimensions[::-1])}")
    length = math.prod(dimensions) // numbers * block
    return name, Tensor(dimensions[::-1], kind, offset, length)


def _kind_name(code: int) -> str:
    try:
        return str(_library().GGMLQuantizationType(code).name)
    except ValueError:
        return str(code)


def _placed(header: _Header, tensors: Mapping[str, Tensor], alignment: Any) -> dict[str, Tensor]:
    """Return the tensors with the bytes of the file at which they start, all of them in it, and
    none in another."""
    if type(alignment) is not int or not 8 <= alignment <= _MOST_ALIGNMENT or alignment % 8:
        raise ValueError(f"general.alignment is {alignment!r:.100}")
    begin = -(-header.at // alignment) * alignment
    placed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.start % alignment:
            raise ValueError(
                f"tensor {name:.100} begins at byte {tensor.start}, which is no multiple of "
                f"{alignment}"
            )
        start = begin + tensor.start
        if start + tensor.length > header.size:
            raise ValueError(
                f"truncated or damaged: tensor {name:.100} ends at byte {start + tensor.length} "
                f"of {header.size}; download or copy it again"
            )
        placed[name] = Tensor(tensor.shape, tensor.kind, start, tensor.length)
    ordered = sorted(placed.items(), key=lambda item: item[1].start)
    for (before, first), (behind, second) in itertools.pairwise(ordered):
        if second.start < first.start + first.length:
            raise ValueError(f"the tensors {before:.100} and {behind:.100} overlap")
    return placed


def read_rows(path: storage.PathLike, tensor: Tensor, start: int, stop: int) -> np.ndarray:
    """Return rows [start, stop) of a tensor, float32: one range of its file. A row is along the
    first dimension, a number where there is no other."""
    rows, *rest = tensor.shape
    if not rest:  # a block does not end with a number
        return _decode(path, tensor, 0, tensor.length)[start:stop]
    row = tensor.length // rows
    numbers = _decode(path, tensor, start * row, (stop - start) * row)
    return numbers.reshape((stop - start, *rest))


def _decode(path: storage.PathLike, tensor: Tensor, at: int, length: int) -> np.ndarray:
    """Return the numbers of bytes [at, at + length) of a tensor, float32.

    A part at a time: formulas take many times what they are applied to.
    """
    library = _library()
    kind = library.GGMLQuantizationType[tensor.kind]
    numbers, block = library.GGML_QUANT_SIZES[kind]
    data = ranges.read(path, tensor.start + at, length).reshape(-1, block)
    decoded = np.empty((len(data), numbers), np.float32)
    step = _PART // block
    for first in range(0, len(data), step):
        part = data[first : first + step].reshape(1, -1)
        decoded[first : first + step] = library.dequantize(part, kind).reshape(-1, numbers)
    return decoded.reshape(-1)
