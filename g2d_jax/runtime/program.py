"""A jitted function with the shapes that it is compiled for, and threads that compile ahead."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax.stages import Wrapped

from g2d_jax.runtime import processes
from g2d_jax.runtime.compile_times import compiling

_under_way = WeakKeyDictionary[Wrapped, list[Future[Any]]]()
"""Jitted function -> its compilations in other threads, until its next call."""


@dataclass(frozen=True)
class Work:
    """The work of a program in a stage, for plans. All values but the tokens are for one device and
    one call.

    calls: in the whole stage. flops: by models/flops.py, with remat's recomputation. moved: least
    bytes from and to memory; None: its arguments and results. temporary: other bytes that it needs,
    by formula. generated, prefilled, scored, trained: tokens of the whole stage on all devices;
    responses: those that rewards score.

    For decoding: rows: decoded together. cached: bytes of keys and values read, not part of
    `moved`. columns: of the cache, read for a row in a step, on average. layers: those whose
    kernels a GPU launches in a step, see `capacity.launched_layers`.
    """

    calls: float
    flops: float = 0.0
    moved: float | None = None
    temporary: float = 0.0
    generated: float = 0.0
    prefilled: float = 0.0
    scored: float = 0.0
    trained: float = 0.0
    responses: float = 0.0
    rows: int = 0
    cached: float = 0.0
    columns: float = 0.0
    layers: int = 0


@dataclass(frozen=True)
class Program:
    """A jitted function for arrays of these shapes. Runs call it; plans, dry runs and threads that
    compile ahead lower it.

    inputs: a tree of ShapeDtypeStructs with shardings for each argument, or arrays. static: its
    static arguments. trips: of its outermost loop, if the program's text does not state them. For
    plans, stage: that runs it; work: its amount there; resident: trees of arrays on the devices
    meanwhile, possibly among its inputs.
    """

    name: str
    function: Wrapped
    inputs: tuple[Any, ...]
    static: Mapping[str, Any] = field(default_factory=dict)
    trips: int = 1
    stage: str = ""
    work: Work = Work(0)
    resident: tuple[Any, ...] = ()

    def __call__(self, *arguments: Any) -> Any:
        """Call it on arrays of these shapes; host arrays are put where the inputs are.

        It waits for a compilation ahead; if that failed, this call compiles again and raises the
        error.
        """
        if ahead := _under_way.pop(self.function, None):
            with compiling.waiting(self.name):
                wait(ahead)
        return self.function(*map(put_like, arguments, self.inputs), **self.static)

    def lower(self) -> Any:
        """Lower it for its inputs, ready for compilation: see jax.stages."""
        return self.function.lower(*self.inputs, **self.static)

    def other_resident(self) -> list[Any]:
        """List the resident arrays that are not among its inputs."""
        resident = {id(x): x for x in jax.tree.leaves(self.resident)}
        for x in jax.tree.leaves(self.inputs):
            resident.pop(id(x), None)
        return list(resident.values())


def put_like(tree: Any, like: Any) -> Any:
    """Put a tree of numbers, or of host arrays that every process holds in full, on the devices as
    ShapeDtypeStructs state. Arrays already there stay."""
    leaves = jax.tree.leaves(tree)
    if not leaves or isinstance(leaves[0], jax.Array):
        return tree

    def put(x: Any, like: Any) -> jax.Array:
        host = np.asarray(x, like.dtype)
        return jax.make_array_from_callback(host.shape, like.sharding, host.__getitem__)

    return jax.tree.map(put, tree, like)


class CompileAhead:
    """Threads that compile, first come first served. JAX keeps the results for the later call."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None

    def compile(self, programs: Iterable[Program]) -> None:
        """Compile programs in threads, in their order.

        This thread continues, but waits on GPUs: there XLA times kernels on the device, which may
        lack memory for them while a stage runs. Raises Preempted if this run is stopped meanwhile.
        """
        if self._threads is None:
            # XLA uses several threads itself; on a CPU the devices need the cores too
            count = 1 if jax.default_backend() == "cpu" else max((os.cpu_count() or 1) // 2, 1)
            self._threads = ThreadPoolExecutor(min(count, 4), thread_name_prefix="compiling")
        futures = []
        for program in programs:
            future = self._threads.submit(lambda program=program: program.lower().compile())  # type: ignore[misc]
            _under_way.setdefault(program.function, []).append(future)
            futures.append(future)
        if jax.default_backend() == "gpu":
            with compiling.waiting("programs"):
                deque(processes.completed_interruptible(futures), maxlen=0)

    def close(self) -> None:
        """Cancel programs in the queue, and wait for the rest: a thread inside XLA cannot be
        stopped."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._threads = None
