"""Parts of large files, read in place: on local disk, or on an object store without a copy of the
file.

`storage.py` reads whole files. Nothing is memory-mapped: a part uses only its own size.
safetensors' safe_open maps files, and reads none on object stores.
"""

from __future__ import annotations

import os

import fsspec
import numpy as np

from g2d_jax.runtime import storage

_REQUEST = 16 << 20  # bytes of one request to an object store
_TOGETHER = 8  # concurrent requests: memory holds only them and the result


def size(path: storage.PathLike) -> int:
    """Return the bytes of a file. Raises FileNotFoundError, or another OSError, naming the path."""
    with storage.naming("read", path):
        files, name = fsspec.core.url_to_fs(os.fspath(path))
        return int(files.size(name))


def read(path: storage.PathLike, start: int, length: int) -> np.ndarray:
    """Return uint8 [length]: the bytes from `start`, in a new array.

    Raises ValueError naming the file if it ends earlier, and OSErrors like `size`.
    """
    with storage.naming("read", path):
        if storage.is_local(path):
            data = np.fromfile(path, np.uint8, length, offset=start)
        else:
            data = _read_remote(path, start, length)
    if len(data) != length:
        end = start + len(data)
        raise ValueError(
            f"{os.fspath(path)} ends at byte {end}, but {length} bytes from {start} were requested"
        )
    return data


def _read_remote(path: storage.PathLike, start: int, length: int) -> np.ndarray:
    files, name = fsspec.core.url_to_fs(os.fspath(path))
    data, read = np.empty(length, np.uint8), 0
    for first in range(0, length, _REQUEST * _TOGETHER):
        begins = range(first, min(first + _REQUEST * _TOGETHER, length), _REQUEST)
        spans = (
            [start + begin for begin in begins],
            [start + min(begin + _REQUEST, length) for begin in begins],
        )
        for begin, part in zip(
            begins, files.cat_ranges([name] * len(begins), *spans, on_error="raise"), strict=True
        ):
            data[begin : begin + len(part)] = np.frombuffer(part, np.uint8)
            read += len(part)
    return data[:read]
