"""Numbers as text. What is not known (None, NaN, missing) is a dash, never a zero."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from g2d_jax.config.policy_name import own_stage
from g2d_jax.study.frontier import Interval

UNKNOWN = "–"
Written = Callable[[float], str]
"""A number as text."""


def number(record: Mapping[str, Any], *keys: str) -> float:
    """Read the number at record[key][key]…, NaN if it is missing or no number. "NaN" and "Infinity" are read so."""
    value: Any = record
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        return float(value)
    except ValueError:
        return math.nan


LABELS = {"sft": "cold", "warmup": "warm-up", "dpo": "G2D"}
"""What the stages of the shipped configs lead to, where a policy has no label of its own."""


def policy_name(policy: Mapping[str, Any]) -> str:
    """Name a policy for readers, by its "name" and "label": "cold (sft)"; its name alone if it has no other label."""
    name = str(policy.get("name", ""))
    label = str(policy.get("label") or name)
    label = LABELS.get(own_stage(name), name) if label == name else label
    return label if label.replace("-", "") == name else f"{label} ({name})"


def words(measure: str) -> str:
    """Name a measure for readers: "dropped, all correct"."""
    return measure.replace("_", " ").replace("/", ", ")


def fixed(digits: int) -> Written:
    """Numbers with so many digits after the point."""
    return lambda value: UNKNOWN if math.isnan(value) else f"{value:.{digits}f}"


def percent(fraction: float) -> str:
    """0.3338 is "33.4": tables name the unit in their heads."""
    return UNKNOWN if math.isnan(fraction) else f"{100 * fraction:.1f}"


def spread(fraction: float, error: float) -> str:
    """Format a percentage with its error, "33.4 ± 1.0"; without one where it is not defined."""
    return percent(fraction) if math.isnan(error) else f"{percent(fraction)} ± {100 * error:.1f}"


def change(difference: float, error: float) -> str:
    """Format a difference in percentage points with its sign, "+36.7 ± 1.1"."""
    if math.isnan(difference):
        return UNKNOWN
    return f"{100 * difference:+.1f}" + ("" if math.isnan(error) else f" ± {100 * error:.1f}")


def interval(value: Interval | None, sign: str = "") -> str:
    """Format a mean with its interval in percent, "84.2 [83.1, 85.3]"; without one where it is not known.

    sign: "+" for a difference in points.
    """
    if value is None or math.isnan(value.mean):
        return UNKNOWN
    mean, low, high = (f"{100 * end:{sign}.1f}" for end in (value.mean, value.low, value.high))
    return mean if math.isnan(value.low) else f"{mean} [{low}, {high}]"


def measured(value: float, error: float, *, sign: str = "") -> str:
    """Format a reward with its error, "1.234 ± 0.021"; sign: "+" for a difference."""
    if math.isnan(value):
        return UNKNOWN
    return f"{value:{sign}.4g}" + ("" if math.isnan(error) else f" ± {error:.2g}")


def count(value: float) -> str:
    """Format a whole number with thousands separated, "1,024"."""
    return f"{value:,.0f}" if math.isfinite(value) else UNKNOWN


def quantity(value: float) -> str:
    """Three digits and a prefix, "12.3 M"; whole numbers below 1,000 as they are."""
    if not math.isfinite(value):
        return UNKNOWN
    for prefix, size in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 0.9995 * size:
            return f"{_digits(value / size)} {prefix}"
    return f"{value:.0f}" if value == round(value) else _digits(value)


def duration(seconds: float) -> str:
    """ "0.05 s", "0.7 s", "45 s", "4 min 05 s", "2 h 03 min"."""
    if not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 9.95:
        return f"{seconds:.1g} s" if 0 < seconds < 0.095 else f"{seconds:.1f} s"
    if round(seconds) < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    minutes = round(round(seconds) / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def price(amount: float) -> str:
    """Format an amount of money, "1,234.50"; little is not rounded to nothing, "0.0021"."""
    if math.isnan(amount):
        return UNKNOWN
    return f"{amount:.2g}" if 0 < amount < 0.095 else f"{amount:,.2f}"


def until(times: Iterable[float]) -> str:
    """Say when the last of some measurements was made, by Unix seconds; "" of none."""
    last = max((time for time in times if not math.isnan(time)), default=None)
    return "" if last is None else f"measured until {datetime.fromtimestamp(last, UTC):%d %B %Y, %H:%M} UTC"


def value(number: float) -> str:
    """Format a measured value in at most four digits, for charts and their descriptions."""
    return UNKNOWN if math.isnan(number) else f"{number:.4g}"


def setting(value: object) -> str:
    """Format a setting as Python writes it, "none" for an empty list."""
    if value is None:
        return UNKNOWN
    return "none" if value == [] else str(value)


def _digits(number: float) -> str:
    size = abs(number)
    return f"{number:.{0 if size >= 99.95 else 1 if size >= 9.995 else 2}f}"
