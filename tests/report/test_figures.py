"""Figures: well-formed, to scale, honest about what is missing, the same bytes each time."""

import math
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st
from overlaps import overlaps
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
    return [node.text or "" for node in ET.fromstring(chart.inline()).iter("text")]


def test_a_line_is_drawn_and_told_in_words():
    chart = figures.curves("loss", "Loss", {"sft": {"loss": ([0, 5, 10], [0.0, 1.0, 0.5])}})
    assert chart.words == "loss in sft from 0 to 0.5 over 3 points"
    (points,) = drawn(chart)
    assert points[1][0] == pytest.approx((points[0][0] + points[2][0]) / 2)
    assert points[2][1] == pytest.approx((points[0][1] + points[1][1]) / 2)
    svg = ET.fromstring(chart.inline())
    assert svg.get("role") == "img" and svg.get("aria-label") == f"Loss: {chart.words}"
    # one series needs no legend
    assert {"0.00", "1.00", "3"} <= set(texts(chart)) and "loss" not in texts(chart)


def test_gaps_are_gaps_and_counted_and_nothing_to_draw_is_no_figure():
    chart = figures.curves("kl", "KL", {"a": {"kl": (range(5), [1, 2, math.nan, math.inf, 3])}})
    assert (
        chart.note == "2 of 5 values are not finite and not drawn."
        and "over 3 points" in chart.words
    )
    assert figures.curves("kl", "KL", {"a": {"kl": ([1], [math.nan])}}) is None
    assert figures.intervals("a", "A", [("cold", math.nan, 0.1, 0.2)]) is None
    assert figures.points("a", "A", {"a": [Point(0, math.nan)]}, x_title="") is None


def test_stages_stand_side_by_side_and_a_series_keeps_its_colour():
    panels = {
        "warmup": {"chosen": ([1, 2], [1, 2]), "rejected": ([1, 2], [0, 1])},
        "dpo": {"rejected": ([1, 20], [0, 1])},
    }
    chart = figures.curves("rewards", "Rewards", panels)
    assert [text for text in texts(chart) if text.isalpha()] == [
        "warmup",
        "dpo",
        "chosen",
        "rejected",
    ]
    first, second = chart.figure.axes
    assert first.lines[1].get_color() == second.lines[0].get_color() != first.lines[0].get_color()
    assert first.get_ylim() == second.get_ylim()
    apart = figures.curves(
        "rewards",
        "Rewards",
        {"a": {"x": ([1, 2], [0, 1])}, "b": {"x": ([1, 2], [5, 9])}},
        share=False,
    )
    assert apart.figure.axes[0].get_ylim() != apart.figure.axes[1].get_ylim()


def test_long_lines_become_means_with_a_band_over_their_range():
    chart = figures.curves(
        "loss", "Loss", {"a": {"loss": (range(3000), [float(i % 2) for i in range(3000)])}}
    )
    (line,) = chart.figure.axes[0].lines
    assert len(line.get_ydata()) == 150 and set(line.get_ydata()) == {0.5}
    (band,) = chart.figure.axes[0].collections
    assert (
        band.get_paths()[0].get_extents().height == 1.0
        and "means over about 20 points" in chart.note
    )


def test_ticks_do_not_repeat_where_values_hardly_differ():
    chart = figures.curves("loss", "Loss", {"a": {"loss": ([1, 2, 3], [6.8931, 6.8932, 6.8933])}})
    labels = [text for text in texts(chart) if "." in text]
    assert len(labels) == len(set(labels)) > 2


def test_points_have_bars_labels_and_a_square_root_axis():
    series = {
        "one": [Point(0, 40, label="0"), Point(25, 60, label="5"), Point(100, 80, 70, 90, "10")]
    }
    chart = figures.points("f", "Accuracy", series, x_title="cost", joined={"one"})
    dots = drawn(chart)[0]
    assert dots[1][0] - dots[0][0] == pytest.approx((dots[2][0] - dots[0][0]) / 2)
    assert {"0", "5", "10", "cost (square-root axis)"} <= set(texts(chart)) and not chart.note
    assert chart.words == "one: 0 40 at 0, 5 60 at 25, 10 80 (70 to 90) at 100"
    crowd = {
        "one": [Point(1 + i / 1000, 5, label=f"label{i}") for i in range(20)]
        + [Point(9, 9), Point(1, math.nan)]
    }
    chart = figures.points("f", "Crowd", crowd, x_title="x")
    above, below = chart.figure.axes[0].texts[:2]
    assert (
        above.xyann == (0, 4)
        and below.xyann == (0, -4)
        and above.get_color() == next(iter(figures.COLOURS))
    )
    assert 2 <= sum("label" in text for text in texts(chart)) <= 4 and "label19 5" in chart.words
    assert chart.note == "1 of 22 points are not known."


def test_a_dozen_lines_look_different():
    lines = {str(i): ([1, 2], [i, i]) for i in range(12)}
    drawn = figures.curves("a", "A", {"": lines}).figure.axes[0].lines
    looks = {(line.get_color(), str(line._dash_pattern)) for line in drawn}
    assert len(looks) == len(drawn) == 12


def test_intervals_reach_to_their_ends():
    chart = figures.intervals("a", "A", [("cold", 30, 28, 32), ("warm-up", 50, math.nan, math.nan)])
    cold, warm = (bar.get_segments()[0] for bar in chart.figure.axes[0].collections)
    assert cold.tolist() == [[28, 0], [32, 0]] and warm.tolist() == [[50, 1], [50, 1]]
    assert {"cold", "warm-up"} <= set(texts(chart)) and chart.words.startswith(
        "cold: 30 (28 to 32); warm-up: 50"
    )


def test_a_pages_policy_allows_the_svg_and_hostile_names_stay_text():
    chart = figures.curves(
        "x", HOSTILE, {HOSTILE: {HOSTILE: ([1, 2], [0, 1]), "数 $x^2$": ([1, 2], [0, 1])}, "c": {}}
    )
    source = str(chart.inline())
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
    Page(str(named.inline()))
    for form in ("svg", "pdf"):
        assert chart.file(form) == chart.file(form) and b"Date" not in chart.file(form)


@given(st.lists(st.tuples(st.integers(0, 10**7), NUMBERS), min_size=1, max_size=40))
def test_whatever_is_logged_is_drawn_inside_the_figure(points):
    x, y = zip(*sorted(points, key=lambda point: point[0]), strict=True)
    chart = figures.curves("metric", "Metric", {"stage": {"metric": (x, y)}})
    if not any(abs(value) < 1e300 for value in y):
        assert chart is None
        return
    ET.fromstring(chart.inline())
    width, height = chart.figure.bbox.size
    for px, py in drawn(chart)[0]:
        assert math.isnan(py) or (0 <= px <= width and 0 <= py <= height)


LONG = "a stage with a name that is longer than any panel is wide"
HARD = [HOSTILE, "W" * 90, "数" * 40, LONG, "_hidden", "two\nlines", "i" * 300, ""]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize(
    "values",
    [
        [1e-5, 9e-6, 1.1e-5],
        [-1.5e299, 0.0, 1e-300],
        [6.8931, 6.89315, 6.8932],
        [1234567.0, -7654321.0, 0.0],
        [math.nan, math.inf, 1e-3],
    ],
)
def test_no_text_covers_another_or_leaves_the_figure(values, share):
    four = {}
    for i, name in enumerate(["sft", LONG, "W" * 90, HOSTILE]):
        steps = [10 ** (2 * i), 10 ** (2 * i) + 1, 10 ** (2 * i) + 2]
        four[name] = {key: (steps, values) for key in HARD[: 1 + 2 * i]}
    assert not overlaps(figures.curves("a", "A", four, share=share, x_title=HOSTILE))


def test_no_label_of_points_rows_and_bars_covers_another():
    crowd = {}
    for i, name in enumerate(HARD[:6]):
        dots = [Point(10.0 ** (2 * j), 50 + i + j / 9, 1, 99, HARD[j]) for j in range(6)]
        crowd[name] = [*dots, Point(0, 0, label="0"), Point(1e10, 99.9, label=LONG)]
    written = "{:,.0f} of a long unit".format
    charts = [
        figures.points("a", "A", crowd, x_title=LONG * 3, y_title=LONG * 3, written=written),
        figures.intervals("a", "A", [(name, 1e-5 * i, -1e12, 1e12) for i, name in enumerate(HARD)]),
        figures.bars("a", "A", {1e-7 * i: 1e9 * i for i in range(9)}, x_title=LONG * 3),
    ]
    assert [overlaps(chart) for chart in charts] == [[], [], []]


def test_many_series_make_a_figure_higher_and_leave_its_panels_their_room():
    lines = {f"a rather long name of a series, {i}": ([1, 2], [i, i]) for i in range(25)}
    dots = {name: [Point(1, 2)] for name in lines}
    for chart in (
        figures.curves("a", "A", {"": lines}),
        figures.points("a", "A", dots, x_title="x"),
    ):
        panel = figures.layout.area(chart.figure.axes[0])
        assert panel.high - panel.low == pytest.approx(100)
        assert chart.figure.get_figheight() > 4 and overlaps(chart) == []


def test_overlaps_are_found():
    chart = figures.curves("loss", "Loss", {"a": {"loss": ([1, 2], [0, 1])}})
    chart.figure.text(0.5, 0.5, "one")
    chart.figure.text(0.5, 0.51, "two")
    chart.figure.text(0.99, 0.5, "outside")
    assert overlaps(chart) == ["'outside' leaves the figure", "'one' over 'two'"]


def test_panels_beside_each_other_do_not_share_a_place():
    panels = {name: {"x": ([1, 2], [0, 10.0**i])} for i, name in enumerate("abcd")}
    chart = figures.curves("a", "A", panels, share=False)
    boxes = [ax.get_position() for ax in chart.figure.axes]
    # With numbers of their own four do not fit beside each other: two rows of two.
    assert boxes[0].y0 == boxes[1].y0 > boxes[2].y1 and boxes[0].x1 < boxes[1].x0
    beside = figures.curves("a", "A", panels).figure.axes
    assert len({ax.get_position().y0 for ax in beside}) == 1


def test_factors_over_decades_have_a_logarithmic_axis_and_a_schedule_alone_has_none():
    cosine = [5e-4 * (1 + math.cos(math.pi * i / 99)) for i in range(100)]
    steps = list(range(100))

    def scale(*lines):
        panels = {str(i): {"rate": (steps, line)} for i, line in enumerate(lines)}
        chart = figures.curves("rate", "Rate", panels, factors=True)
        assert "logarithmic" in chart.note or chart.figure.axes[0].get_yscale() == "linear"
        return chart.figure.axes[0].get_yscale()

    assert scale(cosine) == scale(cosine, [1e-4] * 100) == "linear"
    assert scale(cosine, [5e-6] * 100) == "log"
    assert scale([20.0] + [0.05] * 99) == "log"  # the first step compiles
    assert scale([20.0] + [-0.05] * 99) == scale([0.0] * 100) == "linear"
    chart = figures.curves(
        "rate",
        "R",
        {"a": {"r": ([1, 2, 3], [1, 0, 1e-5])}, "b": {"r": ([1], [1e-5])}},
        factors=True,
    )
    assert chart.note == "The y axis is logarithmic. 1 values are below it."
    linear = figures.curves("share", "S", {"a": {"r": ([1, 2], [1, 1e-5])}})
    assert linear.figure.axes[0].get_yscale() == "linear"


def test_a_histogram_is_bars():
    chart = figures.bars("p", "P", {0.0: 25.0, 0.5: 0.0, 1.0: 75.0}, x_title="rate", unit=" %")
    bars = chart.figure.axes[0].patches
    assert [bar.get_height() for bar in bars] == [25, 0, 75] and not chart.figure.axes[0].lines
    assert chart.words == "25 % at 0, 0 % at 0.5, 75 % at 1"
    assert figures.bars("p", "P", {0.0: math.nan}, x_title="rate") is None


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([0, 0.25, 0.5], ["0.00", "0.25", "0.50"]),
        ([0, 5e-6, 1e-5], ["0", "5e-6", "1e-5"]),
        ([-30, 0], ["−30", "0"]),
        ([0, 5e5, 1e6], ["0.0", "0.5 M", "1.0 M"]),
        ([6.89310, 6.89315], ["6.89310", "6.89315"]),
        ([-1e300, 0], ["−1e300", "0"]),
        ([], []),
    ],
)
def test_numbers_of_an_axis_are_short_and_tell_apart(values, texts):
    assert figures.layout.numbers(values) == texts
