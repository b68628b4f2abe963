"""Frames between pool and worker: 4 bytes length, big-endian, then JSON."""

from __future__ import annotations

import json
import os
import struct
from typing import Any

HEADER = struct.Struct(">I")
MAX_FRAME = 1 << 28


def encode_frame(message: dict[str, Any]) -> bytes:
    """A message as a frame. JSON escapes keep lone surrogates and NUL characters intact."""
    body = json.dumps(message).encode("ascii")
    return HEADER.pack(len(body)) + body


def write_frame(fd: int, message: dict[str, Any]) -> None:
    """Write a whole frame to a descriptor. Raises OSError when the other end is gone."""
    data = memoryview(encode_frame(message))
    while data:
        data = data[os.write(fd, data) :]


def read_frame(fd: int) -> dict[str, Any] | None:
    """The next frame from a descriptor, waiting for it; None at the end. Raises ValueError above MAX_FRAME bytes."""
    header = _read_exactly(fd, HEADER.size)
    if header is None:
        return None
    (length,) = HEADER.unpack(header)
    if length > MAX_FRAME:
        raise ValueError(f"frame of {length} bytes is longer than {MAX_FRAME}")
    body = _read_exactly(fd, length)
    return None if body is None else dict(json.loads(body))


def _read_exactly(fd: int, length: int) -> bytes | None:
    parts: list[bytes] = []
    while length:
        part = os.read(fd, min(length, 1 << 20))
        if not part:
            return None
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
