"""Names that other libraries do not promise and that have no public equal, all of them; see
tests/test_private.py.

JAX has one store for what processes tell each other, and lets nobody at it in public; Orbax reaches
it in this way too.
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
    """Have call(name, processes) made before each execution of a program over devices of several
    processes.

    name: the program's. processes: whose devices it runs on, sorted. That is for programs of a
    platform, such as "cpu", that are compiled from now on, in the thread that executes them.
    Calling it again with the same changes nothing.
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
        ) -> Any:  # a function: JAX's dispatch in C++, which knows it not, stays away
            call(name, processes)
            return execute(*arguments)

        return after_call

    pxla.UnloadedMeshExecutable.build_unsafe_call = built  # type: ignore[method-assign]


@contextlib.contextmanager
def programs_compressed_by_zlib() -> Iterator[None]:
    """Have JAX compress the programs that it keeps in this block by zlib, which has a checksum."""
    from jax._src import compilation_cache

    before = compilation_cache.zstd, compilation_cache.zstandard
    compilation_cache.zstd = compilation_cache.zstandard = None  # type: ignore[assignment]
    try:
        yield
    finally:
        compilation_cache.zstd, compilation_cache.zstandard = before


def precision(value: Any) -> int:
    """Return the bits of a sympy Float that are known; 1 where evalf found no digit."""
    return int(value._prec)
