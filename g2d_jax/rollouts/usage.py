"""Time and tokens of the sampler's calls, over the batches of a stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

NAMES = ("calls", "prompts", "sampled_tokens", "sampling_seconds", "serving_seconds")
"""A batch's share of its call of the sampler. sampling_seconds: while the trainer waited.
serving_seconds: while a server sampled, possibly at other times."""


def add_up(costs: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add up the numbers of `NAMES`."""
    total = dict.fromkeys(NAMES, 0.0)
    for cost in costs:
        for name in NAMES:
            total[name] += cost.get(name, 0.0)
    return total


def rates(spent: Mapping[str, float], has_server: bool) -> dict[str, float]:
    """Return the mean prompts of a call, and the response tokens per second of sampling."""
    seconds = spent["serving_seconds" if has_server else "sampling_seconds"]
    return {
        "prompts_per_call": quotient(spent["prompts"], spent["calls"]),
        "tokens_per_second": quotient(spent["sampled_tokens"], seconds),
    }


def summary(
    spent: Mapping[str, float], seconds: float, has_server: bool, is_ahead: bool
) -> dict[str, float]:
    """Return the numbers for a stage's record. seconds: of the whole stage."""
    found = {"calls": round(spent["calls"]), **rates(spent, has_server)}
    found["share"] = quotient(spent["sampling_seconds"], seconds)
    if has_server:
        found["server_idle"] = max(1 - quotient(spent["serving_seconds"], seconds), 0.0)
        found["ahead"] = int(is_ahead)
    return found


def quotient(amount: float, of: float) -> float:
    """Divide; 0 by 0 is 0."""
    return amount / of if of else 0.0
