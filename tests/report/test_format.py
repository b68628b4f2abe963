"""Numbers as text."""

import math

import pytest

from g2d_jax.report import format as fmt


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (7, "7"), (0.5, "0.50"), (999, "999"), (999.6, "1.00 k"), (10_240, "10.2 k"), (128_400, "128 k"),
     (999_900, "1.00 M"), (5.12e6, "5.12 M"), (4.1e11, "410 G"), (1.08e13, "10.8 T"), (2e21, "2000 E"),
     (math.nan, "–"), (math.inf, "–")],
)  # fmt: skip
def test_quantity(value, text):
    assert fmt.quantity(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (245, "4 min 05 s"),
     (3599.6, "1 h 00 min"), (7380, "2 h 03 min"), (math.nan, "–")],
)  # fmt: skip
def test_duration(seconds, text):
    assert fmt.duration(seconds) == text


def test_percentages():
    assert fmt.spread(0.3338, 0.0101) == "33.4 ± 1.0"
    assert fmt.spread(0.3338, math.nan) == "33.4"
    assert fmt.spread(math.nan, math.nan) == "–"
    assert fmt.change(0.0524, 0.008) == "+5.2 ± 0.8"
    assert fmt.change(-0.0524, math.nan) == "-5.2"
    assert fmt.change(math.nan, 0.1) == "–"


def test_number_reads_what_storage_writes_and_nothing_else():
    record = {"a": {"b": 2, "nan": "NaN", "inf": "-Infinity"}, "none": None, "true": True, "text": "many", "list": [1]}
    assert fmt.number(record, "a", "b") == 2.0
    assert fmt.number(record, "a", "inf") == -math.inf
    for path in (("a", "nan"), ("none",), ("true",), ("text",), ("list",), ("a",), ("gone", "b"), ("none", "b")):
        assert math.isnan(fmt.number(record, *path)), path
