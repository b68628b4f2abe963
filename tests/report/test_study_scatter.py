"""Charts of points: what is drawn, what is labelled, what is left out."""

import math
import re

import pytest

from g2d_jax.report.scatter import Mark, Marks, scatter_chart

WORDS = re.compile(r"<text[^>]*>([^<]*)")


def drawn(source: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r'<circle[^>]*cx="([\d.]+)" cy="([\d.]+)"', source)]


def test_a_square_root_axis_begins_at_zero():
    marks = [Mark(0, 40, label="0"), Mark(25, 60, label="5"), Mark(100, 80, 70, 90, "10")]
    source = scatter_chart("Accuracy", [Marks("one", marks)], x_title="cost", root=True, zero=False)
    (left, low), (middle, _), (right, high) = drawn(source)
    assert middle - left == pytest.approx((right - left) / 2, abs=0.1)
    assert low > high
    assert source.count('class="whisker') == 1
    assert {"0", "5", "10", "cost"} <= set(WORDS.findall(source))
    assert "Square-root axis." in source and "10: 80 (70 to 90) at 100" in source


def test_labels_do_not_cover_each_other():
    crowd = [Mark(1 + i / 1000, 5, label=f"label{i}") for i in range(20)]
    source = scatter_chart("Crowd", [Marks("one", [*crowd, Mark(9, 9)])], x_title="x")
    assert 1 <= sum(word.startswith("label") for word in WORDS.findall(source)) <= 4
    assert all(f"label{i}: 5" in source for i in range(20))  # in the tooltips


def test_positions_have_names_and_unknown_points_are_counted():
    marks = [Mark(0, 1.0), Mark(1, math.nan), Mark(2, 3.0)]
    source = scatter_chart("Names", [Marks("a<b", marks, joined=False)], x_title="K", names=["0", "5", "<i>"])
    assert len(drawn(source)) == 2 and "<path" not in source
    assert "<i>" not in source and "&lt;i&gt;" in source
    assert "1 of 3 points are not known and not drawn." in source
    assert scatter_chart("None", [Marks("a", [Mark(0, math.nan)])], x_title="") == ""


def test_numbers_all_alike_still_have_axes():
    for marks in ([Mark(0, 0)], [Mark(5, 1), Mark(5, 1)], [Mark(-3, -1e-9), Mark(-3, 2e9)]):
        assert "nan" not in scatter_chart("Alike", [Marks("a", marks)], x_title="x", zero=False)
    assert "nan" not in scatter_chart("Zero", [Marks("a", [Mark(0, 0)])], x_title="x", root=True)
