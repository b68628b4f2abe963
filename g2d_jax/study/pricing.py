"""The hours that a study's tokens would take with another model on another machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """The speed of a recipe on a machine, by its plan.

    seconds: kind of stage -> kind of token -> seconds of the whole machine for one token; "" is the
    mean of all stages, for missing kinds. chips: of the machine. response: mean tokens of a
    response in the plan. scale: a factor for all tokens. price: of one chip for an hour.
    """

    recipe: str
    topology: str
    seconds: Mapping[str, Mapping[str, float]]
    chips: int
    response: float
    scale: float = 1.0
    price: float | None = None

    def hours(self, spent: Iterable[tuple[str, Mapping[str, float]]]) -> float:
        """Return the hours for these tokens. spent: for each stage, its kind and its tokens by
        kind.

        Kinds of tokens that no stage of the recipe has count as 0.
        """
        taken: list[float] = []
        for stage, tokens in spent:
            per_token = {**self.seconds.get("", {}), **self.seconds.get(stage, {})}
            taken += [tokens[kind] * seconds for kind, seconds in per_token.items()]
        return self.scale * sum(taken) / 3600
