"""Short digests of the content of inputs, independent of their paths.

    a file, some files  ─► "content 3f0c…"   all bytes; a sample of long safetensors
    a model's folder    ─► "content 3f0c…"   its configuration, safetensors and tokenizer files
    a hub repository    ─► "commit 8ab3…"
    an object store     ─► "content 3f0c…"     by the store's own checksums

Of long safetensors the size and 512 evenly spaced blocks of 16 KB count. Every tensor larger than
1/512 of the file is read in part; small edits elsewhere go unnoticed.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

import fsspec
from etils import epath

from g2d_jax.runtime import storage

WHOLE = 64 << 20
"""Largest safetensors file, in bytes, that is read whole."""
BLOCKS, BLOCK = 512, 16 << 10
"""Number of blocks that are read of longer files, and their bytes."""

_OF_MODEL = re.compile(
    r"(config|generation_config|tokenizer.*|special_tokens_map|added_tokens|vocab|chat_template)\.json"
    r"|.*\.safetensors(\.index\.json)?|.*\.(jinja|model)|(vocab|merges)\.txt"
)
_SNAPSHOT = re.compile(r"--[^/]+/snapshots/([0-9a-f]{40})$")
# keys of fsspec's info; checksums of the bytes come first
_CHECKSUMS = ("crc32c", "md5Hash", "ETag", "etag", "generation")


def of_files(paths: Sequence[str]) -> str:
    """Digest files and their paths relative to their common folder: "content" and 16 hex digits.

    Raises ValueError for a file that cannot be read.
    """
    shared = os.path.commonpath(paths)
    whole = hashlib.blake2b(digest_size=8)
    for path in paths:
        whole.update(f"{os.path.relpath(path, shared)}\n{_of_file(path)}\n".encode())
    return f"content {whole.hexdigest()}"


def of_model(folder: storage.PathLike) -> str:
    """Digest a model's or tokenizer's folder; for one in the hub's cache return the commit.

    Raises ValueError for a folder without model files.
    """
    place = epath.Path(folder)
    if found := _SNAPSHOT.search(os.fspath(place)):
        return f"commit {found[1]}"
    files = sorted(os.fspath(path) for path in place.iterdir() if _OF_MODEL.fullmatch(path.name))
    if not files:
        raise ValueError(
            f"{place} has neither config.json nor safetensors: name the folder of a model"
        )
    return of_files(files)


def of_repository(name: str, revision: str | None) -> str:
    """Return the commit of a data set on the hub, or digest all files of a local folder.

    Raises ValueError if neither the hub nor its cache has it.
    """
    if os.path.isdir(name):
        return of_files(sorted(str(path) for path in Path(name).rglob("*") if path.is_file()))
    return _commit(name, revision)


@functools.lru_cache(maxsize=64)
def _commit(name: str, revision: str | None) -> str:
    """Look up the commit of a data set on the hub, once per process."""
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            name, repo_type="dataset", revision=revision, allow_patterns=["README.md"]
        )
    # Network, authentication and cache each raise their own kinds.
    except Exception as error:
        raise ValueError(f"hub:{name} cannot be read: {storage.hub_reason(error)}") from error
    return f"commit {Path(folder).name}"


def _of_file(path: str) -> str:
    if not storage.is_local(path):
        return _stored(path)
    status = os.stat(path)
    return _local(path, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=1024)
def _local(path: str, size: int, changed: int) -> str:
    """Digest a local file; only a new size or modification time repeats it."""
    digest = hashlib.blake2b(str(size).encode(), digest_size=8)
    with storage.naming("read", path), open(path, "rb") as file:
        if size > WHOLE and path.endswith(".safetensors"):
            for number in range(BLOCKS):
                file.seek(number * (size - BLOCK) // (BLOCKS - 1))
                digest.update(file.read(BLOCK))
        else:
            while data := file.read(1 << 24):
                digest.update(data)
    return digest.hexdigest()


def _stored(path: str) -> str:
    """Return an object store's checksum of a file, or the file's generation."""
    with storage.naming("read", path):
        system, name = fsspec.core.url_to_fs(path)
        known = system.info(name)
    for key in _CHECKSUMS:
        if known.get(key):
            return f"{known['size']}-{known[key]}".replace('"', "")
    raise ValueError(
        f"{path}: its store has neither a checksum nor a generation of it, so changes would go "
        "unnoticed: copy it to another place"
    )
