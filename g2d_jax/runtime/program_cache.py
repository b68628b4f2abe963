"""Compiled programs, kept from one stage and from one start to the next.

    Programs        ─► what is made from equal settings is compiled once in a process
    cached(shared)  ─► JAX's persistent compilation cache, in a folder of the user's own unless told otherwise

A program that is read back gives the bits of the one that was compiled, also on another number of
cores: seen on CPU with training and scoring. A CPU's programs hold its instructions: there a folder
has a part for each kind of processor. Starts at the same time may share a folder, on a local disk
or an object store: an entry that is cut off, since its writer was killed or is not done, is not
used.

JAX keeps programs compressed by zlib here, whose checksum finds a damaged entry: JAX then warns, and
compiles again. Where zstandard is installed JAX would use that. It writes no checksum, and XLA loads
a damaged program, which then gives wrong numbers.
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
    """The jitted programs of a run, or of the points of a study: what is made from equal settings
    is compiled once.

    Of each kind the newest few stay, since programs lie in the devices' memory.
    """

    MOST = 8

    def __init__(self) -> None:
        self._entries: dict[Callable[..., Any], list[tuple[Any, Any]]] = {}

    def get_or_make(self, make: Callable[..., T], *settings: Any, **named: Any) -> T:
        """Give make(*settings, **named): one that it made lately, if of equal settings, else a new
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
    """Keep the programs compiled in this block, and take those kept before. Touches the devices.

    The folder is JAX's own setting if there is one (the environment's JAX_COMPILATION_CACHE_DIR),
    else g2d_jax/compiled in XDG_CACHE_HOME, or in ~/.cache. Of several processes only the first
    writes, and GPUs agree on kernels while all compile, which one would not that need not: they need
    a folder that all of them see, and have `shared`, or none. Warns of a folder that cannot be made.
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
    """Name the folder's part for this process: the platform, and the kind of processor where
    programs run on that.

    Such as "gpu" or "cpu-1f0c9a42b7d5e683".
    """
    backend = jax.default_backend()
    if backend != "cpu":
        return backend
    return f"cpu-{hashlib.sha256(repr([platform.machine(), _cpu()]).encode()).hexdigest()[:16]}"


def _cpu() -> list[str]:
    """List the processor's model and instruction sets, as the kernel lists them; elsewhere than on
    Linux its name."""
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
    """Make this machine's part of a folder, and return it; None where it cannot be made."""
    part = folder / machine()
    try:
        part.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        warnings.warn(
            f"compiled programs are not kept: {error}; JAX_COMPILATION_CACHE_DIR names a folder",
            stacklevel=2,
        )
        return None
    return os.fspath(part)


def _use(folder: str | None) -> None:
    """Let JAX use another folder from now on: what it found before is forgotten."""
    jax.config.update(CACHE, folder)
    compilation_cache.reset_cache()
