"""All uses of other libraries' private names, which have no public equivalent; see
tests/test_private.py.

JAX's key-value store for messages between processes has no public access; Orbax uses it in the same
way.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any


def coordination() -> Any:
    """Return JAX's record of the processes: num_processes, process_id, and client, the key-value
    store that they share.

    client is None for one process.
    """
    from jax._src import distributed

    return distributed.global_state


@functools.cache
def before_shared_programs(platform: str, call: Callable[[str, tuple[int, ...]], None]) -> None:
    """Call call(name, processes) before each execution of a program over devices of several
    processes.

    name: the program's. processes: those of its devices, sorted. This affects programs of a
    platform, such as "cpu", compiled from now on, in the thread that executes them. Another call
    with the same changes nothing.
    """
    from jax._src.interpreters import pxla

    build = pxla.UnloadedMeshExecutable.build_unsafe_call

    def built(executable: Any) -> Any:
        execute, name = build(executable), executable.name
        processes = tuple(sorted({device.process_index for device in executable.device_list}))
        if len(processes) == 1 or executable.backend.platform != platform:
            return execute

        def after_call(
            *arguments: Any,
        ) -> Any:  # a Python function, which JAX's C++ dispatch does not bypass
            call(name, processes)
            return execute(*arguments)

        return after_call

    pxla.UnloadedMeshExecutable.build_unsafe_call = built  # type: ignore[method-assign]


@contextlib.contextmanager
def programs_compressed_by_zlib() -> Iterator[None]:
    """Compress the programs that JAX keeps in this block by zlib, which has a checksum."""
    from jax._src import compilation_cache

    before = compilation_cache.zstd, compilation_cache.zstandard
    compilation_cache.zstd = compilation_cache.zstandard = None  # type: ignore[assignment]
    try:
        yield
    finally:
        compilation_cache.zstd, compilation_cache.zstandard = before


def precision(value: Any) -> int:
    """Return the known bits of a sympy Float; 1 if evalf found no digit."""
    return int(value._prec)
