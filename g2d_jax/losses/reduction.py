"""Weighted sums that padding cannot poison: every loss and metric here uses them.

A loss is sum(value * weight); the weights contain the normaliser of the whole global batch and are
0 on padding. Any split over micro-batches and devices therefore adds up to the same gradient.

"Active" positions are those with a nonzero weight. Shapes: any, equal within one call. A metric
whose name ends in "/max" or "/min" is an extreme instead of a sum, and is combined as one
(`empty_sums`, `add_sums`).
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import Array

Sums = dict[str, Array]
"""Scalar float32 sums (or extremes) over active positions; `mean_metrics` turns them into means."""

Number = float | Array
"""A number of a loss: a constant of the program, or a float32 scalar that is an argument of it."""


def is_off(number: Number) -> bool:
    """Return whether a term's coefficient is 0, so that the term is left out. Always false for a
    program's argument."""
    return not isinstance(number, jax.core.Tracer) and not number


def check_not_negative(**numbers: Number) -> None:
    """Raise ValueError that names a negative or NaN number. Arguments of a program are not
    checked."""
    for name, number in numbers.items():
        if not isinstance(number, jax.core.Tracer) and not number >= 0.0:
            raise ValueError(f"{name} must not be negative, got {number}")


def fill_inactive(values: Array, weights: Array) -> Array:
    """Cast values to float32, with 0 wherever weights is 0.

    Apply it to the inputs of a loss, before any arithmetic: a NaN or infinity on padding then
    reaches neither the sum nor the gradient. Masking the result alone is not enough, because the
    gradient of a discarded branch is multiplied by 0, and 0 * NaN is NaN.
    """
    return jnp.where(weights != 0, values.astype(jnp.float32), 0.0)


def constant(values: Array, weights: Array) -> Array:
    """Fill in inactive positions as `fill_inactive` does; no gradient flows into the values."""
    return fill_inactive(jax.lax.stop_gradient(values), weights)


def weighted_sum(values: Array, weights: Array) -> Array:
    """Sum values * weights to a float32 scalar; positions of weight 0 contribute exactly 0, for any
    value."""
    return jnp.sum(fill_inactive(values, weights) * weights.astype(jnp.float32))


def active_sum(values: Array, weights: Array) -> Array:
    """Sum values over active positions, each counted once, without gradient, to a float32 scalar:
    for metrics.

    Divided by `active_count` of the same weights this is TRL's mean over the tokens (or pairs) that
    carry loss.
    """
    return jax.lax.stop_gradient(jnp.sum(fill_inactive(values, weights)))


def active_max(values: Array, weights: Array) -> Array:
    """Return the maximum of values over active positions, a float32 scalar without gradient; -inf
    if there are none."""
    active = jnp.where(weights != 0, values.astype(jnp.float32), -jnp.inf)
    return jax.lax.stop_gradient(jnp.max(active))


def active_min(values: Array, weights: Array) -> Array:
    """Return the minimum of values over active positions, a float32 scalar without gradient; +inf
    if there are none."""
    return -active_max(-values, weights)


def empty_sums(like: Mapping[str, jax.ShapeDtypeStruct]) -> Sums:
    """Return empty sums with these names, shapes and dtypes, as a start for `add_sums`."""
    start = {"max": -jnp.inf, "min": jnp.inf}
    return {
        name: jnp.full(x.shape, start.get(_extreme(name), 0), x.dtype) for name, x in like.items()
    }


def add_sums(a: Sums, b: Sums) -> Sums:
    """Combine the sums of two disjoint sets of positions: sums are added up, extremes compared."""
    combine = {"max": jnp.maximum, "min": jnp.minimum}
    return {name: combine.get(_extreme(name), jnp.add)(a[name], b[name]) for name in a}


def _extreme(name: str) -> str:
    """Return a metric's extreme, "max" or "min"; anything else for a sum."""
    return name.partition("|")[0].rpartition("/")[2]


def active_count(weights: Array) -> Array:
    """Count the active positions, as a float32 scalar."""
    return jnp.sum((weights != 0).astype(jnp.float32))


def mean_metrics(sums: Mapping[str, float | Array], per: str) -> dict[str, float]:
    """Compute means from sums that were added over all micro-batches (and devices) of one step.

    sums: from a loss, added up. per: the key of the count, "tokens" or "pairs". A sum whose name
    carries its own count, "kl|tokens", is divided by that and reported as "kl". Counts stay
    undivided, and extremes ("…/max", "…/min") unchanged. Without active positions every mean and
    extreme is NaN. Raises KeyError without a count, and ValueError if two sums would be reported
    under one name.
    """
    split = {name: name.partition("|") for name in sums}
    counts = {per, "tokens", "pairs"} | {count for _, own, count in split.values() if own}
    numbers = {name: float(sums[name]) for name in counts if name in sums or name == per}
    means: dict[str, float] = {}
    for name, (shown, _, count) in split.items():
        if shown in means:
            raise ValueError(
                f"two sums are called {shown!r} without their counts: rename one of {list(sums)}"
            )
        number = numbers[count or per] if name not in numbers else 1.0
        divisor = 1.0 if _extreme(name) in ("max", "min") else number
        means[shown] = float(sums[name]) / divisor if number else float("nan")
    return means


def check_same_shape(**arrays: Array | None) -> None:
    """Raise ValueError that names the arrays if their shapes differ (None is skipped)."""
    shapes = {name: tuple(array.shape) for name, array in arrays.items() if array is not None}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"these arrays must have one shape, got {listed}")
