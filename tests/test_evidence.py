"""The pages of evidence have the numbers that the tables of their studies give."""

import itertools
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from g2d_jax.study import frontier

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))  # claims.py imports its neighbours
CLAIMS = runpy.run_path(str(ROOT / "benchmarks" / "claims.py"))


def intervals(text: str) -> set[tuple[str, ...]]:
    """Every "mean [low, high]" of a text, without the signs of positive numbers."""
    number = r"[+-]?\d+\.\d"
    found = re.findall(rf"({number}) \[({number}), ({number})\]", text.replace("\\", ""))
    return {tuple(part.removeprefix("+") for part in each) for each in found}


def shown(differences, level: float, lowest: float = -1) -> tuple[str, ...]:
    """The interval of [N] differences of seeds, in points as a page has them."""
    found = frontier.mean_interval(np.stack([*differences]), level=level, limits=(lowest, 1))
    return tuple(f"{100 * number:.1f}" for number in (found.mean, found.low, found.high))


def against(points, grpo, level: float) -> set[tuple[str, ...]]:
    """The intervals of points of one K over GRPO, for equal FLOPs and for equally many tokens."""
    found = set()
    for measure in ("flops", "generated"):
        priced = grpo.assign(flops=grpo[measure])
        over = []
        for point in points.assign(flops=points[measure]).itertuples():
            over.append(CLAIMS["over_grpo"](point, priced))
        if not any(np.isnan(each).all() for each in over):
            found.add(shown(over, level))
    return found


def given(study: str, level: float = 0.95) -> set[tuple[str, ...]]:
    """Every interval of a study: of accuracies before and after training and their differences, and
    over GRPO."""
    points = CLAIMS["read"](study)
    found = set()
    settings = [each for _, each in points.groupby(["arm", "setting"])]
    for own in settings:
        found |= {shown(own.accuracy, 0.95, 0), shown(own.accuracy - own.gain, 0.95, 0)}
        found.add(shown(own.gain, 0.95))
    for own, other in itertools.permutations(settings, 2):
        found.add(shown(CLAIMS["apart"](own, other), level))
    grpo = points[points.arm == "grpo"]
    if len(grpo) and "g2d" in {*points.arm}:
        chosen = CLAIMS["against_grpo"]((study,), tuned=True)
        baselines = [CLAIMS["chosen"](grpo), *(each for _, each in grpo.groupby("rate"))]
        for _, own in chosen.groupby("budget"):
            found.add(shown(own.gain, 0.95))
            for baseline in baselines:
                found |= against(own, baseline, 0.95) | against(own, baseline, level)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "end", "studies"),
    [
        (
            "### The demo's task, first",
            "### The first study at",
            ["sweep-k-demo", "sweep-k-demo-fresh"],
        ),
        ("### Which pairs, at", "### Which pairs teach", ["ablations-demo"]),
        ("### Which pairs teach", "### From offline", ["cause"]),
        ("### From offline", "Beta 1 was settled", ["spectrum-demo"]),
        (
            "### The demo's task, tuned",
            "### SmolLM2 on arithmetic",
            ["demo-study-judge"],
        ),
        (
            "### SmolLM2 on arithmetic",
            "### SmolLM2 on stories",
            ["smollm2-arithmetic-judge"],
        ),
        (
            "### SmolLM2 on stories",
            "### SmolLM2 from offline",
            ["smollm2-stories-judge"],
        ),
        (
            "### SmolLM2 from offline",
            "### SmolLM2 stories on an H200",
            ["smollm2-arithmetic-spectrum", "smollm2-stories-spectrum"],
        ),
        ("### SmolLM2 stories on an H200", "### 3.2M", ["smollm2-study"]),
        ("### 3.2M", "### How the tasks", ["sweep-k-middle"]),
    ],
)
def test_no_page_has_an_interval_that_its_studies_do_not_give(
    start: str, end: str, studies: list[str]
) -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    assert start in text and end in text
    part = text[text.index(start) :]
    written = intervals(part[: part.index(end)] if end else part)
    assert len(written) >= 5
    for study in studies:
        # of studies tuned alike an interval is as much wider as there are K
        k = len({*CLAIMS["read"](study).query("arm == 'g2d'").budget})
        level = 1 - 0.05 / k if study.endswith("-judge") else 0.95
        written -= given(study, level)
    assert written == set()


@pytest.mark.slow
def test_the_tables_of_evidence_are_those_that_the_script_prints() -> None:
    page = (ROOT / "docs" / "evidence.md").read_text("utf-8")
    printed = CLAIMS["tables"]()
    tables = re.findall(r"(?:^\|.*\n)+", page, flags=re.MULTILINE)
    assert "\n".join(tables).strip() == printed
    assert intervals(page) == intervals(printed)


@pytest.mark.slow
def test_the_costs_of_rivals_are_those_of_the_tables() -> None:
    page = (ROOT / "docs" / "rivals.md").read_text("utf-8")
    assert "\n".join(CLAIMS["rivals_claims"].costs("demo")) in page


def test_the_charts_of_evidence_are_drawn_from_the_tables() -> None:
    charts = CLAIMS["charts"]()
    for name, place, label, expected in (
        ("evidence-demo", 0, "online DPO", [94.0, 96.6, 98.0]),
        ("evidence-smollm2", 0, "G2D", [62.3, 70.6, 75.4, 73.7]),  # docs/benchmarks.md
        ("evidence-smollm2", 1, "G2D", [26.6, 29.5, 32.9, 39.9]),
    ):
        lines = {line.get_label(): line.get_ydata() for line in charts[name].axes[place].lines}
        assert lines[label] == pytest.approx(expected, abs=0.06)
    for name, figure in charts.items():
        drawn = CLAIMS["figures"].Chart("", "", "", "", figure).file("svg").decode()
        kept = (ROOT / "docs" / f"{name}.svg").read_text("utf-8")
        texts = [re.findall(r"<text.*?>(.*?)</text>", each) for each in (drawn, kept)]
        assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("rule", "intervals", "verdict"),
    [
        ("more", [(1, 3), (0.1, 9)], "agrees"),
        ("more", [(1, 3), (-0.1, 9)], "inconclusive"),
        ("more", [(1, 3), (-4, -0.1)], "disagrees"),
        ("less", [(-4, -0.1), (-9, -3)], "agrees"),
        ("less", [(0.1, 2)], "disagrees"),
        ("any", [(-9, -3), (0.1, 9)], "agrees"),
        ("any", [(-9, -3), (-2, 1.9)], "disagrees"),
        ("any", [(-9, -3), (-2, 2.1)], "inconclusive"),
        ("best", [(-9, -3), (0.1, 9)], "agrees"),
        ("best", [(-9, -3), (-2, -0.1)], "disagrees"),
        ("best", [(-9, -3), (-2, 0.1)], "inconclusive"),
        ("level", [(-1.9, 1.9)], "agrees"),
        ("level", [(-4, -2.1)], "disagrees"),
        ("level", [(-4, -1.9)], "inconclusive"),
    ],
)
def test_a_claim_is_judged_by_whole_intervals(
    rule: str, intervals: list[tuple[float, float]], verdict: str
) -> None:
    found = [CLAIMS["Found"](None, (low + high) / 2, low, high, 5) for low, high in intervals]
    assert CLAIMS["verdict"](rule, found, "") == verdict


def test_a_claim_of_one_seed_is_inconclusive() -> None:
    """Its interval is over problems only."""
    verdicts = {n: CLAIMS["verdict"]("more", [CLAIMS["Found"](5, 2, 1, 3, n)], "") for n in (1, 3)}
    assert verdicts == {1: "inconclusive", 3: "agrees"}
