"""What a plan knows of one program that a run compiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from g2d_jax.plan.work import Work, device_bytes

Outputs = Mapping[str, Any]  # program -> its results' tree of ShapeDtypeStructs with shardings


@dataclass(frozen=True)
class Program:
    """One jitted function of a stage.

    arguments: from the outputs of the stage's programs before it. dynamic: trips of its outermost loop, where the
    text of the program does not tell. resident: trees of arrays that lie on the devices meanwhile and are not among its
    arguments; also: programs before it whose results do so too. work: what it does in the stage.
    """

    stage: str
    name: str
    run: Any
    arguments: Callable[[Outputs], tuple[Any, ...]]
    work: Work
    static: Mapping[str, Any] = field(default_factory=dict)
    dynamic: int = 1
    resident: tuple[Any, ...] = ()
    also: tuple[str, ...] = ()

    def beside(self, outputs: Outputs) -> int:
        """Bytes a device of what is resident."""
        return sum(device_bytes(tree) for tree in (*self.resident, *(outputs[name] for name in self.also)))

    def lower(self, outputs: Outputs) -> Any:
        """The program for these shapes, ready to be compiled."""
        return self.run.lower(*self.arguments(outputs), **self.static)


def fixed(*arguments: Any) -> Callable[[Outputs], tuple[Any, ...]]:
    """Arguments that no program before makes. (A lambda would look its names up when the program is compiled.)"""
    return lambda _: arguments
