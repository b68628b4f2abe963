"""Parts of large files, read where they lie: on local disk, or on an object store without a copy of the file.

`storage.py` has whole files. Nothing is mapped into memory: what a part takes is what the caller asked for.
"""

from __future__ import annotations

import itertools
import os

import fsspec
import numpy as np

from g2d_jax import storage

_REQUEST = 16 << 20  # bytes of one request to an object store
_TOGETHER = 8  # requests at once: they and the result are all that memory holds


def size(path: storage.PathLike) -> int:
    """Bytes of a file. Raises FileNotFoundError, or another OSError, naming the path."""
    with storage.naming("read", path):
        if storage.is_local(path):
            return os.stat(path).st_size
        files, name = fsspec.core.url_to_fs(os.fspath(path))
        return int(files.info(name)["size"])


def read(path: storage.PathLike, start: int, length: int) -> np.ndarray:
    """uint8 [length]: the bytes from `start` on, in an array of their own.

    Raises ValueError naming the file if it ends before that, and OSErrors as `size` does.
    """
    found = np.empty(length, np.uint8)
    with storage.naming("read", path):
        there = (_read_local if storage.is_local(path) else _read_remote)(path, start, found)
    if there != length:
        raise ValueError(f"{os.fspath(path)} ended at byte {start + there}, while {length} from {start} on were read")
    return found


def _read_local(path: storage.PathLike, start: int, found: np.ndarray) -> int:
    with open(path, "rb") as file:
        file.seek(start)
        return file.readinto(found.data)


def _read_remote(path: storage.PathLike, start: int, found: np.ndarray) -> int:
    files, name = fsspec.core.url_to_fs(os.fspath(path))
    edges = [*range(0, len(found), _REQUEST), len(found)]
    spans = list(itertools.pairwise(edges))
    there = 0
    for first in range(0, len(spans), _TOGETHER):
        begins, ends = zip(*spans[first : first + _TOGETHER], strict=True)
        absolute = [[start + edge for edge in each] for each in (begins, ends)]
        parts = files.cat_ranges([name] * len(begins), *absolute, on_error="raise")
        for begin, end, part in zip(begins, ends, parts, strict=True):
            there += len(part)
            if len(part) != end - begin:
                return there
            found[begin:end] = np.frombuffer(part, np.uint8)
    return there
