"""The inputs of a run by content: digests that are the same wherever it lies, and what differs
between two of them.

    problems, examples ─► records ┐
    files, rollouts    ─► files   ├─► Content: one digest
    a model's folder   ─► weights │
    a tokenizer        ─► tokens  ┘

Of a local model's tensors three blocks are read each, at the start, in the middle and at the end:
every other state of training, a scaled, merged or replaced tensor differs there. A few elements
edited elsewhere are not seen. Files of an object store go by the store's own checksums.
"""

from __future__ import annotations

import datetime
import decimal
import functools
import hashlib
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fsspec
from etils import epath

from g2d_jax.data.tokenizer import PromptTokenizer
from g2d_jax.models.hf_folder import (
    CONFIG,
    INDEX,
    WEIGHTS,
    read_headers,
    read_json,
    read_raw_config,
)
from g2d_jax.models.safetensors_file import DTYPES, Stored
from g2d_jax.records import Example, Problem
from g2d_jax.runtime import ranges, storage

BLOCK = 64 << 10
"""Bytes of a block of a tensor."""
# of a config.json
_NAMED_ONLY = (
    "_name_or_path",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "use_cache",
)
_SNAPSHOT = re.compile(r"models--[^/]+/snapshots/([0-9a-f]{40})$")
# of fsspec's info; those of the bytes come first
_CHECKSUMS = (
    "crc32c",
    "md5Hash",
    "ETag",
    "etag",
    "generation",
)


@dataclass(frozen=True)
class Content:
    """The content of an input: parts of a kind ("problems", "tensors", …).

    digest: 16 hex digits of all parts in their order. count: how many there are. commit: that of
    the hub's repository, "" elsewhere. place: where it is, for messages.
    """

    kind: str
    digest: str
    count: int
    commit: str = ""
    place: str = ""


def content(kind: str, parts: Mapping[str, str], commit: str = "") -> Content:
    """Return the Content of parts in this order. parts: name -> digest."""
    whole = hashlib.blake2b(digest_size=8)
    for name, digest in parts.items():
        whole.update(f"{len(name)} {name} {digest}\n".encode("utf-8", "surrogatepass"))
    return Content(kind, whole.hexdigest(), len(parts), commit)


def difference(old: Content, new: Content) -> str:
    """Say in a line how two contents differ, "" if they do not. A hub's commit counts where both
    have one."""
    if old.commit and new.commit and old.commit != new.commit:
        commits = f"the hub's commit was {old.commit}, and is {new.commit}"
        if old.digest == new.digest:
            commits += f"; the {new.kind} are the same: set revision={old.commit}"
        return commits
    if old.digest == new.digest:
        return ""
    if old.count != new.count:
        return f"other {new.kind}: there were {old.count}, there are {new.count}"
    return f"the {new.count} {new.kind} are not the same"


# Records


def records(read: Iterable[Problem | Example], *, columns: bool = False) -> Content:
    """Return the content of problems or examples in their order.

    columns: whether solutions and further columns count too, as they do for reward functions that
    are given them.
    """
    parts: dict[str, str] = {}
    seen: Counter[str] = Counter()
    kind = "problems"
    for row in read:
        text: list[Any] = [row.prompt]
        if isinstance(row, Example):
            kind = "examples"
            text.append(row.completion)
        else:
            text.append(row.answer)
            if columns:
                text += [row.solution, row.columns]
        seen[row.id] += 1
        # examples may share a prompt
        name = row.id if seen[row.id] == 1 else f"{row.id}/{seen[row.id]}"
        parts[name] = _digest(json.dumps(text, sort_keys=True, default=_plain).encode())[:8]
    return content(kind, parts)


def rows(values: Iterable[Mapping[str, Any]]) -> Content:
    """Return the content of a data set's rows as they are, in their order."""
    texts = (json.dumps(row, sort_keys=True, default=_plain) for row in values)
    return content(
        "rows",
        {f"row {number}": _digest(text.encode())[:8] for number, text in enumerate(texts, 1)},
    )


def _plain(value: Any) -> str:
    """Write a value that JSON has not; of what has no text of its own the type alone."""
    has_text = isinstance(
        value, datetime.date | datetime.time | datetime.timedelta | decimal.Decimal | bytes
    )
    return str(value) if has_text else type(value).__name__


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


# Files


def files(paths: Sequence[str]) -> Content:
    """Return the content of files, by their names in the folder that holds all of them."""
    folders = zip(*(path.split("/")[:-1] for path in paths), strict=False)
    shared = len(list(itertools.takewhile(lambda parts: len(set(parts)) == 1, folders)))
    return content("files", {"/".join(path.split("/")[shared:]): _file(path) for path in paths})


def stamp(path: str) -> str:
    """Return what tells that a file may have changed: its time and size, or what an object store
    knows of it."""
    if not storage.is_local(path):
        return _stored(path)
    status = os.stat(path)
    return f"{status.st_size}-{status.st_mtime_ns}"


def _file(path: str) -> str:
    """Return the digest of a file's bytes, or what an object store knows of it."""
    return _file_digest(path, stamp(path)) if storage.is_local(path) else _stored(path)


@functools.lru_cache(maxsize=1024)
def _file_digest(path: str, stamp: str) -> str:
    """Return the digest of a local file's bytes; they are read again only when its stamp is
    another."""
    digest = hashlib.blake2b(digest_size=8)
    with storage.naming("read", path), open(path, "rb") as file:
        while data := file.read(1 << 24):
            digest.update(data)
    return digest.hexdigest()


def _stored(path: str) -> str:
    """Return a checksum that an object store has of a file, or its generation."""
    with storage.naming("read", path):
        system, name = fsspec.core.url_to_fs(path)
        known = system.info(name)
    for key in _CHECKSUMS:
        if known.get(key):
            return f"{known['size']}-{known[key]}".replace('"', "")
    raise ValueError(
        f"{path}: its store tells neither a checksum nor a generation, so a change would not be "
        "noticed"
    )


# Models


def weights(folder: storage.PathLike) -> Content:
    """Return the content of a model's folder: its config.json and its tensors, by name.

    Raises ValueError for a folder without readable safetensors files.
    """
    place = epath.Path(folder)
    config = {key: value for key, value in read_raw_config(place).items() if key not in _NAMED_ONLY}
    parts = {CONFIG: storage.fingerprint(config)}
    if not storage.is_local(place):
        return content(
            "files and settings",
            parts | {name: _stored(os.fspath(place / name)) for name in _weight_files(place)},
        )
    headers = read_headers(place)
    parts |= {name: _tensor(headers[name]) for name in sorted(headers)}
    found = _SNAPSHOT.search(os.fspath(place))
    return content("tensors and settings", parts, found[1] if found else "")


def _weight_files(folder: epath.Path) -> list[str]:
    """List the names of a folder's files of weights."""
    if (folder / WEIGHTS).exists():
        return [WEIGHTS]
    return sorted(set(read_json(folder / INDEX)["weight_map"].values()))


def _tensor(stored: Stored) -> str:
    """Return the digest of a tensor's dtype, shape and three blocks."""
    digest = hashlib.blake2b(f"{stored.dtype} {stored.shape}".encode(), digest_size=4)
    if stored.dtype not in DTYPES:  # refused by name when it is loaded
        return digest.hexdigest()
    size = stored.nbytes
    starts, length = [0], size
    if size > 3 * BLOCK:
        starts, length = [0, (size - BLOCK) // 2, size - BLOCK], BLOCK
    for start in starts:
        digest.update(ranges.read(stored.file, stored.start + start, length).tobytes())
    return digest.hexdigest()


def tokens(tokenizer: PromptTokenizer) -> Content:
    """Return the content of a tokenizer: its tokens with the rules that make them, and the
    templates of prompts."""
    special = {key: str(token) for key, token in tokenizer.pretrained.special_tokens_map.items()}
    stops = [tokenizer.stop_id, *tokenizer.eos_ids, tokenizer.pad_id]
    parts = {
        "tokens": storage.fingerprint([json.loads(tokenizer.backend.to_str()), special, stops]),
        "chat template": storage.fingerprint(tokenizer.template.source),
        "prompt template": storage.fingerprint(tokenizer.settings.pattern),
    }
    return content("parts", parts)
