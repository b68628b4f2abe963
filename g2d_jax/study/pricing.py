"""The hours that a study's tokens would take another model on another machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """The speed of a recipe on a machine, by its plan.

    seconds: of the whole machine for a token of each kind, at `efficiency` of the roofline. chips: of the machine.
    response: mean tokens of a response that the plan is for. scale: times all tokens. price: of one chip for an hour.
    """

    recipe: str
    topology: str
    seconds: Mapping[str, float]
    efficiency: float
    chips: int
    response: float
    scale: float = 1.0
    price: float | None = None

    def hours(self, tokens: Mapping[str, float]) -> float:
        """Return the hours that tokens of each kind take; kinds that the recipe's stages lack count as nothing."""
        return self.scale * sum(tokens[kind] * seconds for kind, seconds in self.seconds.items()) / 3600
