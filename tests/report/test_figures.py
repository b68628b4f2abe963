"""Figures: well-formed, to scale, honest about what is missing, the same bytes each time."""

import math
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reports import HOSTILE, STEERING, Page

from g2d_jax.report import figures
from g2d_jax.report.figures import Point

NUMBERS = st.floats(allow_nan=True, allow_infinity=True, width=64) | st.sampled_from(
    [0.0, 1e-300, -1e300, 5e-324]
)


def drawn(chart: figures.Chart) -> list[list[tuple[float, float]]]:
    """The lines of the first axes as pixels: that they are to scale is seen in their
    proportions."""
    return [
        ax.transData.transform(line.get_xydata()).tolist()
        for ax in chart.figure.axes
        for line in ax.lines
    ]


def texts(chart: figures.Chart) -> list[str]:
    return [node.text or "" for node in ET.fromstring(chart.inline).iter("text")]


def test_a_line_is_drawn_and_told_in_words():
    chart = figures.curves("loss", "Loss", {"loss": [(0, 0.0), (5, 1.0), (10, 0.5)]})
    assert chart.words == "loss from 0 to 0.5 over 3 points"
    (points,) = drawn(chart)
    assert points[1][0] == pytest.approx((points[0][0] + points[2][0]) / 2)
    assert points[2][1] == pytest.approx((points[0][1] + points[1][1]) / 2)
    svg = ET.fromstring(chart.inline)
    assert svg.get("role") == "img" and svg.get("aria-label") == f"Loss: {chart.words}"
    # one series needs no legend
    assert {"0", "3", "step"} <= set(texts(chart)) and "loss" not in texts(chart)


def test_gaps_are_gaps_and_counted_and_nothing_to_draw_is_no_figure():
    chart = figures.curves("kl", "KL", {"kl": list(enumerate([1, 2, math.nan, math.inf, 3]))})
    assert chart.note == "2 of 5 values are not finite and left out."
    assert "over 3 points" in chart.words
    assert figures.curves("kl", "KL", {"kl": [(1, math.nan)], "b": []}) is None
    assert figures.curves("kl", "KL", {}) is None
    assert figures.intervals("a", "A", [("cold", math.nan, 0.1, 0.2)]) is None
    assert figures.points("a", "A", {"a": [Point(0, math.nan)]}, x_title="") is None


def test_long_lines_become_means():
    chart = figures.curves("loss", "Loss", {"loss": [(i, i % 2) for i in range(2000)]})
    (line,) = chart.figure.axes[0].lines
    assert len(line.get_ydata()) == 100 and set(line.get_ydata()) == {0.5}
    assert "mean of about 20 steps" in chart.note


def test_points_are_joined_by_straight_lines_over_a_linear_axis_from_0():
    series = {
        "one": [Point(25, 60, label="5"), Point(0, 40, label="0"), Point(100, 80, 70, 90, "10")]
    }
    chart = figures.points("f", "Accuracy", series, x_title="cost", joined={"one"})
    dots = drawn(chart)[0]
    assert len(dots) == 3
    assert (dots[1][0] - dots[0][0]) / (dots[2][0] - dots[0][0]) == pytest.approx(0.25)
    assert {"0", "5", "10", "cost"} <= set(texts(chart)) and not chart.note
    assert chart.words == "one: 0 40 at 0, 5 60 at 25, 10 80 (70 to 90) at 100"
    lost = {"one": [Point(9, 9), Point(1, math.nan)]}
    chart = figures.points("f", "Lost, %", lost, x_title="x")
    assert chart.note == "1 of 2 points are unknown."
    low, high = chart.figure.axes[0].get_ylim()
    assert high - low >= 10  # a percentage: noise is no drama


def test_costs_that_span_decades_and_the_k_of_pass_at_k_are_on_a_logarithmic_axis():
    far = figures.points("f", "F", {"": [Point(1, 1), Point(1000, 2)]}, x_title="x")
    assert far.figure.axes[0].get_xscale() == "log"
    ks = [1, 4, 16]
    lines = {name: [Point(k, 100) for k in ks] for name in ("cold", "warm")}
    chart = figures.points("f", "F", lines, x_title="k", joined=lines, ticks=ks)
    assert [text for text in texts(chart) if text.isdecimal()][:3] == ["1", "4", "16"]
    cold, warm = chart.figure.axes[0].lines
    # equal ones can be told apart
    assert cold.get_linestyle() != warm.get_linestyle() and cold.get_marker() != warm.get_marker()


def test_intervals_reach_to_their_ends():
    chart = figures.intervals("a", "A", [("cold", 30, 28, 32), ("warm-up", 50, math.nan, math.nan)])
    cold, warm = (bar.get_segments() for bar in chart.figure.axes[0].collections)
    assert cold[0].tolist() == [[28, 0], [32, 0]] and not np.isfinite(warm).any()
    assert {"cold", "warm-up"} <= set(texts(chart)) and chart.words.startswith(
        "cold: 30 (28 to 32); warm-up: 50"
    )


def test_a_pages_policy_allows_the_svg_and_hostile_names_stay_text():
    lines = {HOSTILE: [(1, 0), (2, 1)], "数 $x^2$": [(1, 0), (2, 1)]}
    chart = figures.curves("x", HOSTILE, lines)
    source = str(chart.inline)
    Page(
        source
        # refuses elements and attributes that reports do not use themselves, styles and scripts
        # among them
    )
    assert not set(STEERING) & set(source) and "\\u202e" in source and "数 $x^2$" in texts(chart)
    assert (
        not re.search(r"https?:|#[0-9a-f]{6}\"", source)
        and "var(--s0)" in source
        and "var(--soft)" in source
    )
    named = figures.intervals("x", HOSTILE, [(HOSTILE, 0.5, 0.4, 0.6)])
    Page(str(named.inline))
    for form in ("svg", "pdf"):
        assert chart.file(form) == chart.file(form) and b"Date" not in chart.file(form)


@given(st.lists(st.tuples(st.integers(0, 10**7), NUMBERS), min_size=1, max_size=40))
def test_whatever_is_logged_is_drawn_inside_the_figure(points):
    points = sorted(points, key=lambda point: point[0])
    chart = figures.curves("metric", "Metric", {"metric": points})
    if not any(abs(value) < 1e300 for _, value in points):
        assert chart is None
        return
    ET.fromstring(chart.inline)
    width, height = chart.figure.bbox.size
    for px, py in drawn(chart)[0]:
        assert math.isnan(py) or (0 <= px <= width and 0 <= py <= height)


def test_six_series_look_different():
    series = {name: [Point(i, 50, 40, 60)] for i, name in enumerate("abcdef")}
    axes = figures.points("f", "F", series, x_title="x").figure.axes[0]
    looks = set()
    for handle in axes.get_legend_handles_labels()[0]:
        looks.add((handle.get_color(), handle.get_marker()))
    assert len(looks) == 6
