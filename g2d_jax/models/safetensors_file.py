"""A safetensors file: reading its header and the rows of its tensors, and writing one, without
holding the whole file.

    8 bytes      length of the header, little endian
    the header   JSON: tensor name -> dtype, shape, data_offsets [begin, end) into the rest; "__metadata__": texts
    the rest     the tensors, row by row, one after another

(https://github.com/safetensors/safetensors, "Format".) Files are local or on an object store, see
ranges.py.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from g2d_jax.runtime import ranges, storage

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(jnp.bfloat16)}
"""Dtypes of stored weights, by safetensors' code."""

_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
_ALIGN = 8  # the rest begins at a multiple of this


@dataclass(frozen=True)
class Stored:
    """A tensor's place in a file. file, the header's shape (Hugging Face's layout), safetensors'
    dtype code ("BF16"), and its first byte in the file."""

    file: storage.PathLike
    shape: tuple[int, ...]
    dtype: str
    start: int

    @property
    def nbytes(self) -> int:
        """Its bytes in the file, for a dtype in DTYPES."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def part(self, start: int, stop: int) -> Stored:
        """Return the place of rows [start, stop), as if they were a tensor."""
        row = math.prod(self.shape[1:]) * DTYPES[self.dtype].itemsize
        shape = (stop - start, *self.shape[1:])
        return dataclasses.replace(self, shape=shape, start=self.start + start * row)

    def rows(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Read rows [start, stop), all by default, in the stored layout and dtype: one range of its
        file."""
        dtype, (rows, *rest) = DTYPES[self.dtype], self.shape or (1,)
        stop, row = rows if stop is None else stop, math.prod(rest) * dtype.itemsize
        data = ranges.read(self.file, self.start + start * row, (stop - start) * row).view(dtype)
        return data.reshape((stop - start, *rest) if self.shape else ())


def read_header(file: storage.PathLike) -> dict[str, Stored]:
    """Read every tensor's place in a file, by name; only the header is read.

    Raises ValueError naming the file, and the tensor if possible, for a header that is longer than
    the file, is not JSON, or does not describe tensors that fill the file without gaps: for a
    truncated file it names the first incomplete tensor. Raises OSError for an object store that
    does not respond.
    """
    try:
        return _parse(file, ranges.size(file))
    except storage.IsPointer:
        raise
    except (ValueError, RecursionError, OSError) as error:
        # An object store that does not respond means nothing about the file.
        if isinstance(error, OSError) and not storage.is_local(file):
            raise
        raise ValueError(
            f"{os.fspath(file)} is not a readable safetensors file: {error}"
        ) from error


def _parse(file: storage.PathLike, size: int) -> dict[str, Stored]:
    if size < 8:
        raise ValueError(f"it has {size} bytes, too few for a header: truncated")
    length = int.from_bytes(ranges.read(file, 0, 8).tobytes(), "little")
    if length > min(size - 8, _MAX_HEADER_BYTES):  # checked before memory is allocated
        # The first letters of a Git LFS pointer are such a number; only then is a further request
        # worth it.
        start = ranges.read(file, 0, min(size, len(storage.POINTER)))
        storage.refuse_pointer(file, start.tobytes())
        raise ValueError(
            f"it declares a header of {length} bytes in a file of {size}: truncated, or not "
            "safetensors"
        )
    header = json.loads(ranges.read(file, 8, length).tobytes().decode("utf-8"))
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    header.pop("__metadata__", None)
    places = sorted((_place(name, entry), name) for name, entry in header.items())
    data, at = size - 8 - length, 0
    for (begin, end), name in places:
        if begin != at:
            raise ValueError(
                f"tensor {name:.200} begins at byte {begin} of the data, expected {at}"
            )
        if end > data:
            raise ValueError(
                f"truncated: tensor {name:.200} extends beyond the end of the file; download or copy "
                "it again"
            )
        at = end
    if at != data:
        raise ValueError(f"the tensors need {at} bytes, but the file has {data} for them")
    return {
        name: Stored(file, tuple(header[name]["shape"]), header[name]["dtype"], 8 + length + begin)
        for (begin, _), name in places
    }


def _place(name: str, entry: Any) -> tuple[int, int]:
    """Return a tensor's [begin, end) in the data. Raises ValueError for an invalid entry."""
    wrong = ValueError(f"tensor {name:.200}: its entry in the header is {entry!r:.200}")
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        raise wrong
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not (_sizes(shape) and _sizes(offsets) and len(offsets) == 2 and offsets[0] <= offsets[1]):
        raise wrong
    dtype = DTYPES.get(entry["dtype"])  # others are refused by name later, if they are loaded
    if dtype is not None and math.prod(shape) * dtype.itemsize != offsets[1] - offsets[0]:
        raise wrong
    return offsets[0], offsets[1]


def _sizes(value: Any) -> TypeGuard[list[int]]:
    """Return whether the value is a list of integers from 0 on."""
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def write(
    file: storage.PathLike,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: np.dtype,
    fetch: Callable[[str], np.ndarray],
    float32: Collection[str] = (),
) -> None:
    """Write a file tensor by tensor, in the order of `shapes`; its folder must exist.

    float32: names of tensors of this type instead of dtype. fetch: from a name to the array of that
    shape and its dtype, one of DTYPES; called for one tensor at once. Every process must call this
    function, to take part in fetching; the first one writes. The file's permissions follow the
    umask. Raises OSError naming the file; the part written until then stays, and is not a
    safetensors file.
    """
    if jax.process_index() > 0:
        for name in shapes:
            fetch(name)
        return
    dtypes = {name: np.dtype(np.float32) if name in float32 else dtype for name in shapes}
    head = _header(shapes, dtypes)
    with storage.naming("write", file), epath.Path(file).open("wb") as out:
        out.write(len(head).to_bytes(8, "little") + head)
        for name, shape in shapes.items():
            array = fetch(name)
            assert (array.shape, array.dtype) == (shape, dtypes[name]), name
            out.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _header(shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, np.dtype]) -> bytes:
    codes = {dtype: code for code, dtype in DTYPES.items()}
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes.items():
        end = at + math.prod(shape) * dtypes[name].itemsize
        entries[name] = {
            "dtype": codes[dtypes[name]],
            "shape": list(shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    return text + b" " * (-len(text) % _ALIGN)
