"""Files of a work directory: JSON, manifests and logs, the same on local disk and on object stores.

Paths are strings, `os.PathLike` or `epath.Path`; "gs://…" and "s3://…" go through `etils.epath` and
`fsspec`. An object store has neither append nor atomic rename, but a whole object appears at once.
So:

    one file    local: written next to its target, synced, renamed; else: one whole-object write
    a stage     finished when its manifest, written last, states it
    a log       numbered segments, one a process start; local: appended; else: rewritten whole

JSON written here is ASCII with sorted keys. Standard JSON has no NaN: non-finite numbers are
written as the strings "NaN", "Infinity" and "-Infinity", which Python's `float()` and JavaScript's
`Number()` read back. Parquet files are in `tables.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import hashlib
import json
import math
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import fsspec
from etils import epath

from g2d_jax.runtime import failures

PathLike: TypeAlias = str | os.PathLike[str]

MANIFEST = "manifest.json"
MOST_JSON = 256 << 20
"""Most bytes of a JSON file: Python's objects use several times as much."""
_SEGMENT = re.compile(r"(\d{5,})\.jsonl")
_EXTRAS = {"gs": "gcs", "s3": "s3"}  # scheme of a URL -> the extra that installs its driver
# packages with their own exceptions
_DRIVERS = {
    "aiobotocore",
    "aiohttp",
    "botocore",
    "gcsfs",
    "google",
    "s3fs",
}

for (
    _scheme
) in _EXTRAS:  # otherwise an old listing hides later writes of other processes, and of Orbax
    fsspec.config.conf.setdefault(_scheme, {}).setdefault("use_listings_cache", False)


class StoreUnavailable(OSError):
    """A failed operation of an object store: a retry may succeed."""

    exit_status = 75  # see processes.RESTART


def is_local(path: PathLike) -> bool:
    """Return True for a path on this machine's file system, False for an object store's URL."""
    return "://" not in os.fspath(path)


def check_driver(path: PathLike) -> None:
    """Raise ImportError naming the extra if an object store's driver is missing, ValueError for an
    unknown store."""
    if is_local(path):
        return
    scheme = os.fspath(path).partition("://")[0]
    if scheme not in _EXTRAS:
        raise ValueError(
            f"{os.fspath(path)}: use a local path, gs://BUCKET/… or s3://BUCKET/…, not {scheme}://"
        )
    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        raise failures.missing_extra(
            f"{os.fspath(path)} needs a driver", _EXTRAS[scheme]
        ) from error


@contextlib.contextmanager
def naming(action: str, path: PathLike) -> Iterator[None]:
    """Add the path to an OSError (that of a full disk has none); the kind of error stays the same.

    Other errors of an object store's driver (no credentials, no connection) become OSErrors.
    """
    try:
        yield
    except ImportError:
        check_driver(path)
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno is not None and not _is_of_a_driver(error):
            raise OSError(error.errno, f"cannot {action}: {reason}", os.fspath(path)) from error
        kind: type[OSError] = OSError if is_local(path) else StoreUnavailable
        if isinstance(error, (FileNotFoundError, PermissionError, FileExistsError)):
            kind = type(error)
        raise kind(f"cannot {action} {os.fspath(path)}: {reason}") from error
    except Exception as error:
        if is_local(path) or not _is_of_a_driver(error):
            raise
        kind = OSError if "Credentials" in type(error).__name__ else StoreUnavailable
        raise kind(
            f"cannot {action} {os.fspath(path)}: {type(error).__name__}: {error!s:.300}"
        ) from error


def _is_of_a_driver(error: Exception) -> bool:
    """Return whether an error is from an object store's driver, such as no connection, not the
    system."""
    return type(error).__module__.partition(".")[0] in _DRIVERS


HUB_ANSWERS = {
    401: (
        "there is no such repository, or it is private: check the name, or log in with `hf auth "
        "login`"
    ),
    403: (
        "you have no access: if it is gated, accept its licence on its hub page; log in with "
        "`hf auth login` and a token that may read it, or write to it for a push"
    ),
    404: "there is no such repository, revision or file: check the name",
}


def hub_reason(error: BaseException) -> str:
    """Return in a line why the Hugging Face hub refused a request, and how to fix it.

    error: any error of the hub's libraries; its causes count too.
    """
    from huggingface_hub import errors

    chain: list[BaseException] = [error]
    cause = error.__cause__ or error.__context__
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    answers = [
        response.status_code
        for each in chain
        if (response := getattr(each, "response", None)) is not None
    ]
    if answers and answers[0] in HUB_ANSWERS:
        return HUB_ANSWERS[answers[0]]
    silent = (ConnectionError, TimeoutError, socket.gaierror, errors.LocalEntryNotFoundError)
    if not answers and any(isinstance(each, silent) for each in chain):
        return (
            "this machine cannot reach the hub: check the network (HF_HUB_OFFLINE, HTTPS_PROXY), "
            "or download the files on another machine and set the path"
        )
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]:.300}"


def read_bytes(path: PathLike) -> bytes:
    """Read the whole file. Raises FileNotFoundError, or another OSError, naming the path."""
    with naming("read", path):
        return epath.Path(path).read_bytes()


def write_bytes(path: PathLike, data: bytes) -> None:
    """Write a whole file, so that a reader sees the old content or the new, never a part.

    Missing folders are created. Raises OSError naming the path, and keeps the old file.
    """
    target = epath.Path(path)
    with naming("write", target):
        if not is_local(target):
            target.write_bytes(data)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.parent / f".{target.name}.{secrets.token_hex(4)}.tmp"
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        handle = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(handle)  # otherwise a power cut may lose the new name
        finally:
            os.close(handle)


POINTER = b"version https://git-lfs.github.com/spec/"
"""The first bytes of a Git LFS pointer."""


class IsPointer(ValueError):
    """A Git LFS pointer in place of the wanted file."""


def refuse_pointer(path: PathLike, beginning: bytes) -> None:
    """Raise IsPointer for a file that begins like one."""
    if beginning.startswith(POINTER):
        raise IsPointer(
            f"{os.fspath(path)} is only Git LFS's pointer to the file: run `git lfs pull` in its "
            "clone, or `hf download` the repository"
        )


def plain(value: Any, *, spell: bool = True) -> Any:
    """Convert a value to JSON's types: tuples and arrays (NumPy, JAX) become lists, dataclasses
    mappings.

    spell: write non-finite numbers as "NaN", "Infinity" and "-Infinity"; else leave them.
    Raises TypeError for a key that is not a string (JSON would change it) and for any other type.
    """
    if isinstance(value, float) and spell and not math.isfinite(value):
        return json.dumps(value)
    if value is None or isinstance(value, str | int | float):
        if isinstance(value, enum.Enum):
            return value.value
        return value
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise TypeError(
                f"keys of JSON objects must be strings, got {wrong[0]!r:.100}: write str(key)"
            )
        return {key: plain(item, spell=spell) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, spell=spell) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(
            {field.name: getattr(value, field.name) for field in dataclasses.fields(value)},
            spell=spell,
        )
    if hasattr(value, "tolist"):
        return plain(value.tolist(), spell=spell)
    raise TypeError(f"cannot write a {type(value).__name__} as JSON: {value!r:.100}")


def fingerprint(value: Any) -> str:
    """Return 16 hex digits that identify a value: BLAKE2b of its canonical JSON, equal in every
    process and on every machine.

    The order of keys, and the type of a sequence (tuple, list or array), do not matter; 1, 1.0 and
    True differ; floats count by their exact value, so float32(0.1) is not 0.1. Raises TypeError
    like `plain`.
    """
    text = json.dumps(plain(value, spell=False), sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode("ascii"), digest_size=8).hexdigest()


def write_json(path: PathLike, value: Any) -> None:
    """Write the value as indented JSON, atomically. Raises TypeError (see `plain`) and OSError,
    naming the path."""
    try:
        text = json.dumps(plain(value), indent=2, sort_keys=True, allow_nan=False)
    except TypeError as error:
        raise TypeError(f"{os.fspath(path)}: {error}") from error
    write_bytes(path, text.encode("ascii") + b"\n")


def write_json_lines(path: PathLike, values: Iterable[Any]) -> None:
    """Write values as JSON, one on each line, atomically. Raises OSError, naming the path."""
    lines = [f"{json.dumps(value)}\n" for value in values]
    write_bytes(path, "".join(lines).encode("ascii"))


def read_json(path: PathLike) -> Any:
    """Read a JSON file. Raises FileNotFoundError, or ValueError naming file, line and column if
    damaged.

    A file of more than MOST_JSON bytes is refused: it is neither ours nor a model's.
    """
    with naming("read", path), epath.Path(path).open("rb") as file:
        data = file.read(MOST_JSON + 1)
    if len(data) > MOST_JSON:
        raise ValueError(
            f"{os.fspath(path)} has more than {MOST_JSON:,} bytes, the limit for JSON files"
        )
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:  # the latter: nested too deeply
        raise ValueError(
            f"{os.fspath(path)} is not valid JSON; it was truncated or edited: {error}"
        ) from error


def read_informing(path: PathLike) -> tuple[dict[str, Any], str]:
    """Read an informative JSON object, and its fault: ({}, "") if there is no such file."""
    try:
        content = read_json(path)
    except FileNotFoundError:
        return {}, ""
    except StoreUnavailable:
        raise
    except (OSError, ValueError) as error:
        return {}, str(error)
    if not isinstance(content, dict):
        return {}, f"{os.fspath(path)} must hold a JSON object, got {type(content).__name__}"
    return content, ""


def unfinish(stage_dir: PathLike) -> None:
    """Mark a stage as not finished: it continues."""
    (epath.Path(stage_dir) / MANIFEST).unlink(missing_ok=True)


class Appender:
    """Grow one new file. For one thread.

    Local: every write reaches the operating system at once, so it survives a crash of the process.
    Elsewhere: the object is rewritten whole, at most once in `pause` seconds (stores allow about
    one write of an object a second); `flush` and `close` write the rest.
    """

    def __init__(self, path: PathLike, *, pause: float = 1.0) -> None:
        """Raise FileExistsError if a local file exists already."""
        self.path, self.size = epath.Path(path), 0  # bytes
        self._pause, self._written_at = pause, -math.inf
        self._whole, self._written = bytearray(), 0
        self._file = None
        if is_local(self.path):
            with naming("create", self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = open(self.path, "xb", buffering=0)  # noqa: SIM115 (closed in close)

    def write(self, data: bytes) -> None:
        """Append data. Raises OSError naming the path; the file may then hold a part of the
        data."""
        self.size += len(data)
        if self._file is None:
            self._whole += data
            if time.monotonic() - self._written_at >= self._pause:
                self.flush()
            return
        rest = memoryview(data)
        with naming("write", self.path):
            while rest:
                rest = rest[self._file.write(rest) :]

    def flush(self) -> None:
        """Make all written data durable."""
        with naming("write", self.path):
            if self._file is not None:
                os.fsync(self._file.fileno())
            elif self._written < self.size:
                self.path.write_bytes(bytes(self._whole))
                self._written_at, self._written = time.monotonic(), self.size

    def close(self) -> None:
        """Flush and close; later writes are an error."""
        with self._file or contextlib.nullcontext():
            self.flush()


class Segments:
    """A log of JSON records in numbered files FOLDER/00000.jsonl, 00001.jsonl …, one record a line.
    For one thread.

    Each object (each process start) opens a new segment at its first record, and another after
    `limit` bytes. So no old file is ever appended to, and a rewrite on an object store stays small.
    """

    def __init__(self, folder: PathLike, *, limit: int = 1 << 20, pause: float = 1.0) -> None:
        self.folder = epath.Path(folder)
        self._limit, self._pause = limit, pause
        self._current: Appender | None = None

    def append(self, record: Mapping[str, Any]) -> None:
        """Log one record. Raises OSError naming the file; the next record then goes to a new
        segment."""
        line = (
            json.dumps(plain(record), sort_keys=True, separators=(",", ":")).encode("ascii") + b"\n"
        )
        if self._current is not None and self._current.size + len(line) > self._limit:
            self.close()
        if self._current is None:
            number = max((number for number, _ in _numbered(self.folder)), default=-1) + 1
            self._current = Appender(self.folder / f"{number:05d}.jsonl", pause=self._pause)
        try:
            self._current.write(line)
        except OSError:  # the line may be torn, which is allowed only at the end of a segment
            with contextlib.suppress(OSError):
                self.close()
            raise

    def flush(self) -> None:
        """Make all records durable: before a checkpoint that relies on them."""
        if self._current is not None:
            self._current.flush()

    def close(self) -> None:
        """Flush and close the segment; a later record opens the next one."""
        current, self._current = self._current, None
        if current is not None:
            current.close()


def _numbered(folder: epath.Path) -> list[tuple[int, epath.Path]]:
    """List the segments of a log by number; none if the folder is missing."""
    try:
        with naming("list", folder):
            paths = list(folder.iterdir())
    except FileNotFoundError:
        return []
    return sorted(
        (int(match[1]), path) for path in paths if (match := _SEGMENT.fullmatch(path.name))
    )


def read_segments(
    folder: PathLike, damaged: Callable[[str], object] | None = None
) -> list[dict[str, Any]]:
    """Read all records of a log in the order written; [] if there are none.

    A segment's last line may be torn (the process died while writing it) and is then ignored.
    Raises ValueError naming file and line for other damage, and OSError. For an informative log,
    `damaged` receives each such message instead, and the line, or the file, is ignored.
    """

    def refuse(message: str, cause: Exception | None = None) -> None:
        if damaged is None:
            raise ValueError(message) from cause
        damaged(message)

    @contextlib.contextmanager
    def leaving_out() -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if damaged is None or isinstance(error, StoreUnavailable):
                raise
            damaged(str(error))

    records: list[dict[str, Any]] = []
    segments: list[tuple[int, epath.Path]] = []
    with leaving_out():
        segments = _numbered(epath.Path(folder))
    for _, path in segments:
        content = b""
        with leaving_out():
            content = read_bytes(path)
        *lines, tail = content.split(b"\n")
        for number, line in enumerate([*lines, tail], 1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                if number > len(lines):  # no newline after it: empty, or torn
                    break
                refuse(f"{path}, line {number}: not valid JSON; the log is damaged: {error}", error)
                continue
            if isinstance(record, dict):
                records.append(record)
            else:
                refuse(
                    f"{path}, line {number}: expected a JSON object, got {type(record).__name__}"
                )
    return records
