"""Compiled programs, kept between stages and between runs.

    Programs        ─► programs of equal settings are compiled once in a process
    cached(shared)  ─► JAX's persistent compilation cache, by default in a folder of the user's

A cached program returns the same bits as a compiled one, also on another number of cores: checked
on CPU with training and scoring. A CPU's programs depend on its instructions, so each kind of
processor has its own part of a folder. Concurrent runs may share a folder, on a local disk or an
object store: a truncated entry, from a killed or unfinished writer, is not used.

JAX compresses programs by zlib here, whose checksum finds a damaged entry: JAX then warns, and
compiles again. JAX prefers zstandard if it is installed. JAX writes no checksum with zstandard,
so XLA would load a damaged program, which returns wrong numbers.
"""

from __future__ import annotations

import hashlib
import os
import platform
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import jax
from etils import epath
from jax.experimental.compilation_cache import compilation_cache

from g2d_jax.runtime import private

T = TypeVar("T")

CACHE = "jax_compilation_cache_dir"


class Programs:
    """The jitted programs of a run, or of the points of a study; equal settings share one program.

    The newest few of each kind stay, since programs occupy device memory.
    """

    MOST = 8

    def __init__(self) -> None:
        self._entries: dict[Callable[..., Any], list[tuple[Any, Any]]] = {}

    def get_or_make(self, make: Callable[..., T], *settings: Any, **named: Any) -> T:
        """Return make(*settings, **named): a recent result for equal settings, otherwise a new
        one."""
        entries = self._entries.setdefault(make, [])
        entry = next((entry for entry in entries if entry[0] == (settings, named)), None)
        if entry is None:
            entry = (settings, named), make(*settings, **named)
        self._entries[make] = [entry, *(other for other in entries if other is not entry)][
            : self.MOST
        ]
        return entry[1]  # type: ignore[no-any-return]


@contextmanager
def cached(shared: epath.Path | None = None) -> Iterator[None]:
    """Keep the programs compiled in this block, and reuse earlier ones. Initialises the devices.

    The folder is JAX's own setting if there is one (JAX_COMPILATION_CACHE_DIR), otherwise
    g2d_jax/compiled in XDG_CACHE_HOME, or in ~/.cache. Of several processes only the first writes.
    GPUs agree on kernels while all compile, so several processes need a folder that all of them see
    (`shared`), or none. Warns if the folder cannot be created.
    """
    before = folder = getattr(jax.config, CACHE)
    if not before and jax.process_count() > 1:
        folder = shared and _made(shared)
    elif not before:
        home = epath.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        folder = _made(home / "g2d_jax" / "compiled")
    try:
        with private.programs_compressed_by_zlib():
            _use(folder)
            yield
    finally:
        _use(before)


def machine() -> str:
    """Return the folder's part for this process: the platform, and the kind of processor for
    programs that run on it.

    Such as "gpu" or "cpu-1f0c9a42b7d5e683".
    """
    backend = jax.default_backend()
    if backend != "cpu":
        return backend
    return f"cpu-{hashlib.sha256(repr([platform.machine(), _cpu()]).encode()).hexdigest()[:16]}"


def _cpu() -> list[str]:
    """List the processor's model and instruction sets from the kernel; outside Linux its name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", maxsplit=1)[0].splitlines()
    except OSError:
        return [platform.processor()]
    return [
        line
        for line in lines
        if line.partition("\t")[0].rstrip() in ("model name", "flags", "Features")
    ]


def _made(folder: epath.Path) -> str | None:
    """Create this machine's part of a folder, and return it; None if that fails."""
    part = folder / machine()
    try:
        part.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        warnings.warn(
            f"compiled programs are not cached: {error}; set JAX_COMPILATION_CACHE_DIR to a folder",
            stacklevel=2,
        )
        return None
    return os.fspath(part)


def _use(folder: str | None) -> None:
    """Let JAX use another folder from now on, without its earlier lookups."""
    jax.config.update(CACHE, folder)
    compilation_cache.reset_cache()
