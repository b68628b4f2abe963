"""Numbers as text. An unknown number (None, NaN, missing) is a dash, never a zero."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from g2d_jax.config.policy_name import own_stage
from g2d_jax.study.frontier import Interval

UNKNOWN = "–"
Written = Callable[[float], str]
"""A number as text."""


def cells(
    columns: Mapping[Any, tuple[str, Written]], read: Callable[[Any], float]
) -> dict[str, str]:
    """Format the numbers of a table row. columns: key of a number -> the head of its column, and
    its format."""
    return {head: written(read(key)) for key, (head, written) in columns.items()}


def number(record: Mapping[str, Any], *keys: str) -> float:
    """Return the number at record[key][key]…, NaN if it is missing or not a number. The texts "NaN"
    and "Infinity" count as numbers."""
    value: Any = record
    for key in keys:
        if not isinstance(value, Mapping):
            return math.nan
        value = value.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        return float(value)
    except ValueError:
        return math.nan


LABELS = {"sft": "cold", "warmup": "warm-up", "dpo": "G2D"}
"""Labels of the policies of the shipped configs' stages, for policies without their own."""


def policy_name(name: str, label: str = "") -> str:
    """Return a policy's name for readers: "cold (sft)"; just the name if it has no label."""
    if label in ("", name):
        label = LABELS.get(own_stage(name), name)
    if label.replace("-", "") == name:
        return label
    return f"{label} ({name})"


def words(measure: str) -> str:
    """Return a measure's name for readers: "dropped, all correct"."""
    return measure.replace("_", " ").replace("/", ", ")


def _known(value: float, form: str) -> str:
    if math.isnan(value):
        return UNKNOWN
    return format(value, form)


def _error(error: float, form: str) -> str:
    """Format the error after a value, " ± 1.0"; "" if undefined."""
    if math.isnan(error):
        return ""
    return f" ± {error:{form}}"


def fixed(digits: int) -> Written:
    """Return a format with this many decimal places."""
    return lambda value: _known(value, f".{digits}f")


def percent(fraction: float) -> str:
    """Format a fraction in percent, 0.3338 as "33.4": table heads state the unit."""
    return _known(100 * fraction, ".1f")


def spread(fraction: float, error: float) -> str:
    """Format a percentage with its error, "33.4 ± 1.0"; without the error if it is undefined."""
    return percent(fraction) + _error(100 * error, ".1f")


def change(difference: float, error: float) -> str:
    """Format a difference in percentage points with its sign, "+36.7 ± 1.1"."""
    if math.isnan(difference):
        return UNKNOWN
    return f"{100 * difference:+.1f}" + _error(100 * error, ".1f")


def percents(value: Interval) -> tuple[float, float, float]:
    """Return a mean and the ends of its interval, in percent."""
    return 100 * value.mean, 100 * value.low, 100 * value.high


def interval(value: Interval | None, sign: str = "", seeds: int = 0) -> str:
    """Format a mean with its interval in percent, "84.2 [83.1, 85.3]"; the mean alone if the
    interval is unknown.

    sign: "+" for a difference in points. seeds: their number, shown if the interval is of fewer.
    """
    if value is None or math.isnan(value.mean):
        return UNKNOWN
    mean, low, high = percents(value)
    text = f"{mean:{sign}.1f}"
    if not math.isnan(low):
        text += f" [{low:{sign}.1f}, {high:{sign}.1f}]"
    if 0 < value.seeds < seeds:
        text += f" ({value.seeds} of {seeds} seeds)"
    return text


def measured(value: float, error: float, *, sign: str = "") -> str:
    """Format a reward with its error, "1.234 ± 0.021"; sign: "+" for a difference."""
    if math.isnan(value):
        return UNKNOWN
    return f"{value:{sign}.4g}" + _error(error, ".2g")


def count(value: float) -> str:
    """Format a whole number with separators, "1,024"."""
    if not math.isfinite(value):
        return UNKNOWN
    return f"{value:,.0f}"


def quantity(value: float) -> str:
    """Format a number in three digits and a prefix, "12.3 M"; whole numbers below 1,000
    unchanged."""
    if not math.isfinite(value):
        return UNKNOWN
    exponent = int(f"{value:.2e}".partition("e")[2])
    group = min(max(exponent // 3, 0), 6)
    if group == 0 and value == round(value):
        return f"{value:.0f}"
    digits = min(max(2 - exponent + 3 * group, 0), 2)
    return f"{value / 1000**group:.{digits}f} {' kMGTPE'[group]}".strip()


def duration(seconds: float) -> str:
    """Format a time: "0.05 s", "0.7 s", "45 s", "4 min 05 s", "2 h 03 min"."""
    if not math.isfinite(seconds):
        return UNKNOWN
    if 0 < seconds < 0.095:
        return f"{seconds:.1g} s"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if round(seconds) < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    minutes = round(round(seconds) / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def until(times: Iterable[float]) -> str:
    """Return the time of the last measurement, from Unix seconds; "" for none."""
    last = max(itertools.filterfalse(math.isnan, times), default=None)
    if last is None:
        return ""
    return f"measured until {datetime.fromtimestamp(last, UTC):%d %B %Y, %H:%M} UTC"


def value(number: float) -> str:
    """Format a value in at most four digits, for charts and their descriptions."""
    return _known(number, ".4g")


def setting(value: object) -> str:
    """Format a setting as in Python, "none" for an empty list."""
    if value is None:
        return UNKNOWN
    return "none" if value == [] else str(value)
