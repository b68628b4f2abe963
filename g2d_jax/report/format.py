"""Numbers as text. What is not known (None, NaN, missing) is a dash, never a zero."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from g2d_jax.study.frontier import Interval

UNKNOWN = "–"


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
    label = LABELS.get(name.partition("@")[0], name) if label == name else label
    return label if label.replace("-", "") == name else f"{label} ({name})"


def words(measure: str) -> str:
    """Name a measure for readers: "dropped, all correct"."""
    return measure.replace("_", " ").replace("/", ", ")


def fixed(digits: int) -> Callable[[float], str]:
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


def percents(interval: Interval | None) -> str:
    """Format a mean with its interval in percent, "84.2 [83.1, 85.3]"."""
    if interval is None or math.isnan(interval.mean):
        return UNKNOWN
    return f"{100 * interval.mean:.1f} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


def points(interval: Interval | None) -> str:
    """Format a difference with its interval in percentage points, "+3.1 [+2.0, +4.2]"."""
    if interval is None or math.isnan(interval.mean):
        return UNKNOWN
    return f"{100 * interval.mean:+.1f} [{100 * interval.low:+.1f}, {100 * interval.high:+.1f}]"


def measured(value: float, error: float, *, signed: bool = False) -> str:
    """Format a reward with its error, "1.234 ± 0.021"; signed: with its sign, as a difference has."""
    if math.isnan(value):
        return UNKNOWN
    return f"{value:{'+' if signed else ''}.4g}" + ("" if math.isnan(error) else f" ± {error:.2g}")


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
    """ "0.7 s", "45 s", "4 min 05 s", "2 h 03 min"."""
    if not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(whole / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def value(number: float) -> str:
    """Format a measured value in at most four digits, for charts and their descriptions."""
    return UNKNOWN if math.isnan(number) else f"{number:.4g}"


def _digits(number: float) -> str:
    size = abs(number)
    return f"{number:.{0 if size >= 99.95 else 1 if size >= 9.995 else 2}f}"
