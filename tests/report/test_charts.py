"""Charts: well-formed, to scale, honest about what is missing."""

import math
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from g2d_jax.report.charts import HEIGHT, LEFT, RIGHT, WIDTH, Panel, Series, line_chart
from g2d_jax.report.scatter import accuracy_chart, interval_chart

NUMBERS = st.floats(allow_nan=True, allow_infinity=True, width=64) | st.sampled_from([0.0, 1e-300, -1e300, 5e-324])


def parse(figure: str) -> ET.Element:
    return ET.fromstring(figure)


def texts(root: ET.Element, css: str | None = None) -> list[str]:
    return [node.text or "" for node in root.iter("text") if css is None or node.get("class") == css]


def path_of(root: ET.Element) -> list[tuple[str, float, float]]:
    found = next(node for node in root.iter("path")).get("d", "")
    return [(c, float(x), float(y)) for c, x, y in re.findall(r"([ML])(\S+) (\S+?)(?=[ML]|$)", found)]


def test_a_line_is_drawn_to_scale():
    root = parse(line_chart("loss", [Panel("", [Series("loss", [0, 5, 10], [0.0, 1.0, 0.5])])]))
    (_, x0, y0), (_, x1, y1), (_, x2, y2) = path_of(root)
    assert (x0 + x2) / 2 == pytest.approx(x1, abs=0.1)
    assert (y0 + y1) / 2 == pytest.approx(y2, abs=0.1)
    assert y1 < y2 < y0  # up is less
    assert {"0", "10"} <= set(texts(root))


def test_gaps_are_gaps_and_counted():
    figure = line_chart("kl", [Panel("", [Series("kl", range(5), [1, 2, math.nan, math.inf, 3])])])
    assert [command for command, _, _ in path_of(parse(figure))] == ["M", "L", "M"]
    assert "2 of 5 values are not finite and not drawn." in figure


def test_nothing_to_draw_is_no_chart():
    assert line_chart("kl", [Panel("", [Series("kl", [1], [math.nan])])]) == ""
    assert accuracy_chart("accuracy", [("cold", math.nan, 0.1)]) == ""


def test_stages_stand_side_by_side_with_marks():
    panels = [Panel(name, [Series("reward", [1, 20], [0.3, 0.7])]) for name in ("warmup", "online", "more")]
    root = parse(line_chart("reward", panels))
    assert sum(node.get("class") == "mark" for node in root.iter("line")) == 2
    assert [text for text in texts(root, "strong")] == ["warmup", "online", "more"]
    assert root.find("ul") is None  # one series needs no legend
    starts = [float(re.match(r"M(\S+)", node.get("d", ""))[1]) for node in root.iter("path")]
    assert starts == sorted(starts) and len(starts) == 3


def test_series_have_a_legend_and_keep_their_colour_in_every_panel():
    first = Panel("a", [Series("chosen", [1, 2], [1, 2]), Series("rejected", [1, 2], [0, 1])])
    second = Panel("b", [Series("rejected", [1, 2], [0, 1])])
    root = parse(line_chart("rewards", [first, second]))
    assert ["".join(item.itertext()) for item in root.iter("li")] == ["chosen", "rejected"]
    classes = [node.get("class") for node in root.iter("path")]
    assert classes == ["line s0", "line s1", "line s1"]


def test_long_lines_become_means_with_a_band_over_their_range():
    y = [float(i % 2) for i in range(3000)]
    root = parse(line_chart("loss", [Panel("", [Series("loss", range(3000), y)])]))
    assert len(path_of(root)) == 150
    assert len({y for _, _, y in path_of(root)}) == 1  # every mean is 1/2
    band = next(root.iter("polygon")).get("points", "").split()
    ys = [float(point.split(",")[1]) for point in band]
    assert len(band) == 300 and max(ys) - min(ys) > HEIGHT / 2
    assert "means over about 20 points" in "".join(root.itertext())


def test_short_lines_draw_every_point_with_its_value():
    root = parse(line_chart("loss", [Panel("", [Series("loss", [1, 2], [0.25, 0.5])])]))
    assert [node.find("title").text for node in root.iter("circle")] == ["loss at 1: 0.25", "loss at 2: 0.5"]


def test_the_chart_is_told_in_words():
    root = parse(line_chart("Reward", [Panel("warmup", [Series("reward", [1, 2, 3], [0.25, 0.75, 0.5])])]))
    svg = root.find("svg")
    assert svg.get("role") == "img"
    expected = "Reward: reward in warmup from 0.25 to 0.5 over 3 points, smallest 0.25, largest 0.75"
    assert svg.get("aria-label") == expected
    assert root.find("figcaption").text == "Reward"


def test_intervals_reach_two_standard_errors_to_each_side():
    root = parse(accuracy_chart("Accuracy", [("cold", 0.3, 0.01), ("warm-up", 0.5, math.nan)]))
    [bar] = [node for node in root.iter("line") if "whisker" in node.get("class", "")]  # the other error is not known
    ticks = {float(node.text): float(node.get("y")) for node in root.iter("text") if node.get("text-anchor") == "end"}
    (a, ya), (b, yb) = list(ticks.items())[:2]
    unit = (ya - yb) / (b - a)  # of one percent
    assert float(bar.get("y1")) - float(bar.get("y2")) == pytest.approx(4 * unit, abs=0.2)
    assert [node.get("class") for node in root.iter("circle")] == ["dot s0", "dot s1"]
    assert ["".join(item.itertext()) for item in root.iter("li")] == ["cold", "warm-up"]


def test_hostile_names_stay_text():
    name = '</title><script>alert(1)</script>"\u202e\0'
    panels = [Panel(name, [Series(name, [1, 2], [0, 1]), Series("b", [1, 2], [0, 1])]), Panel("c", [])]
    figure = line_chart(name, panels)
    root = parse(figure)  # a NUL or broken markup would not parse
    assert {node.tag for node in root.iter()} <= set(
        ["figure", "figcaption", "ul", "li", "svg", "line", "text", "title", "path", "circle", "p", "span"]
    )
    assert "\u202e" not in figure and "\\u202e" in figure
    parse(interval_chart(name, [(name, 0.5, 0.4, 0.6)], note=name))


@given(st.lists(st.tuples(st.integers(0, 10**7), NUMBERS), min_size=1, max_size=400))
def test_whatever_is_logged_stays_inside_the_chart(points):
    points = sorted(points, key=lambda point: point[0])
    x, y = zip(*points, strict=True)
    figure = line_chart("metric", [Panel("stage", [Series("metric", x, y)])])
    if not any(abs(value) < 1e300 for value in y):
        assert figure == ""
        return
    for _, px, py in path_of(parse(figure)):
        assert LEFT <= px <= WIDTH - RIGHT
        assert 0 <= py <= HEIGHT
