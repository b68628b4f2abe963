"""A program before it runs: the shapes it is compiled for, and the work it does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from g2d_jax.mesh import device_bytes, placed
from g2d_jax.runtime.program_cache import CompileAhead, Jitted

Outputs = Mapping[str, Any]  # program -> its results' tree of ShapeDtypeStructs with shardings


@dataclass(frozen=True)
class Work:
    """The work of a program in a stage. All figures but the tokens are of one device and one call.

    calls: in the whole stage. flops: by models/flops.py, and what remat computes again. moved:
    bytes from and to memory, at least. parts: bytes that lie in memory, by what they are.
    generated, prefilled, scored, trained: tokens of the whole stage on all devices; responses:
    those that rewards score.

    Of decoding: rows: that are decoded together. cached: bytes of keys and values read, not among
    those moved. columns: of the cache that are read of a row in a step, on average. layers: whose
    kernels a GPU launches one after the other, see `capacity.launched_layers`.
    """

    calls: float
    flops: float
    moved: float
    parts: Mapping[str, int]
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
    """One jitted function of a stage.

    arguments: from the outputs of the stage's programs before it. dynamic: trips of its outermost
    loop, where the text of the program does not state them. resident: trees of arrays that lie on
    the devices meanwhile and are not among its arguments; also: programs before it whose results do
    so too. work: what it does in the stage.
    """

    stage: str
    name: str
    run: Jitted
    arguments: Callable[[Outputs], tuple[Any, ...]]
    work: Work
    static: Mapping[str, Any] = field(default_factory=dict)
    dynamic: int = 1
    resident: tuple[Any, ...] = ()
    also: tuple[str, ...] = ()

    def resident_bytes(self, outputs: Outputs) -> int:
        """Count the bytes a device of the resident arrays."""
        return sum(map(device_bytes, (*self.resident, *map(outputs.__getitem__, self.also))))

    def lower(self, outputs: Outputs) -> Any:
        """Lower the program for these shapes, ready to be compiled."""
        return self.run.lower(*self.arguments(outputs), **self.static)

    def compile(self, outputs: Outputs) -> Any:
        """Compile it for the devices at hand, and give its results' tree with shapes and
        shardings."""
        lowered = self.lower(outputs)
        return placed(lowered.out_info, lowered.compile().output_shardings)


class _Results(dict[str, Any]):
    """The programs' results by name, from futures; a look-up waits for the result."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name).result()


def compile_programs(ahead: CompileAhead, programs: Iterable[Program]) -> None:
    """Let other threads compile programs of a stage, in their order, while this one goes on."""
    futures: dict[str, Future[Any]] = {}
    for program in programs:
        futures[program.name] = ahead.compile(
            program.run, partial(program.compile, _Results(futures))
        )


def fixed(*arguments: Any) -> Callable[[Outputs], tuple[Any, ...]]:
    """Return arguments that no program before makes. (A lambda would look names up when the program
    is compiled.)"""
    return lambda _: arguments
