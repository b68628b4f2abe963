"""The pages of evidence say what the packed results of their studies give."""

import csv
import functools
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from g2d_jax.report.read import read_study
from g2d_jax.report.study import write_study

ROOT = Path(__file__).parents[1]
CLAIMS = runpy.run_path(str(ROOT / "benchmarks" / "claims.py"))
TUNED = runpy.run_path(str(ROOT / "benchmarks" / "tuned_alike.py"))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packed results, a folder for each archive."""
    folder, benchmarks = tmp_path_factory.mktemp("results"), ROOT / "benchmarks"
    for archive in (benchmarks / "results").glob("*.tar.xz"):
        target = folder / archive.name.removesuffix(".tar.xz")
        subprocess.run(
            [sys.executable, benchmarks / "results.py", "unpack", archive, target], check=True
        )
    return folder


written = functools.cache(write_study)


@pytest.mark.slow
def test_the_study_over_k_is_reported_as_its_page_says(results: Path) -> None:
    _, page, table = written(results / "study-demo", "sweep-k-demo")
    text = (ROOT / "docs" / "evidence.md").read_text("utf-8")
    rows = [
        line.replace("\\", "").split(" | ") for line in Path(page).read_text("utf-8").splitlines()
    ]
    accuracies = {
        row[0].removeprefix("| "): (row[3], row[5])
        for row in rows
        if row[0].startswith("| g2d, K") and len(row) == 9
    }
    assert len(accuracies) == 7
    for row, figures in accuracies.items():
        for figure in figures:
            assert figure in text, row
    with open(table, encoding="utf-8", newline="") as file:
        measured = {
            (row["measure"], row["K"]): row for row in csv.DictReader(file) if row["arm"] == "g2d"
        }
    for k in ("0", "5", "10", "20", "40", "80", "160"):
        mean, low, high = (
            100 * float(measured[f"advantage/grpo, learning rate 5e-05/flops/{name}", k]["value"])
            for name in ("mean", "low", "high")
        )
        assert f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]" in text, k


@pytest.mark.slow
@pytest.mark.parametrize(
    ("archive", "name", "page", "measure"),
    [
        ("study-demo", "cause", "cause.md", "gain"),
        ("study-demo", "spectrum-demo", "spectrum.md", "accuracy"),
        ("fresh-demo", "sweep-k-demo", "evidence.md", "gain"),
        ("middle", "sweep-k-middle", "benchmarks/middle-scale.md", "gain"),
    ],
)
def test_the_other_studies_are_reported_as_their_pages_say(
    results: Path, archive: str, name: str, page: str, measure: str
) -> None:
    table = written(results / archive, name)[2]
    text = (ROOT / "docs" / page).read_text("utf-8")
    intervals: dict[tuple[str, ...], dict[str, float]] = {}
    with open(table, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["seed"] == "all" and row["measure"] in (
                f"{measure}/{part}" for part in ("mean", "low", "high")
            ):
                point = intervals.setdefault((row["arm"], row["values"], row["K"]), {})
                point[row["measure"]] = 100 * float(row["value"])
    sign = "" if measure == "accuracy" else "+"
    assert len(intervals) >= 5
    for row_of, parts in intervals.items():
        mean, low, high = (
            f"{parts[f'{measure}/{part}']:{sign}.1f}" for part in ("mean", "low", "high")
        )
        assert f"{mean} [{low}, {high}]" in text, row_of


def intervals(text: str) -> set[tuple[str, ...]]:
    """Every "mean [low, high]" of a text, without the signs of positive numbers."""
    number = r"[+-]?\d+\.\d"
    found = re.findall(rf"({number}) \[({number}), ({number})\]", text.replace("\\", ""))
    return {tuple(part.removeprefix("+") for part in each) for each in found}


def reported(folder: Path, name: str) -> set[tuple[str, ...]]:
    """Every interval of a study's report, on its page or in its table, and what DPO added where the
    warm-up was judged as a point of its own."""
    _, page, table = written(folder, name)
    measures: dict[tuple[str, ...], dict[str, str]] = {}
    with open(table, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            measure, _, part = row["measure"].rpartition("/")
            if row["seed"] == "all" and part in ("mean", "low", "high"):
                of = (row["arm"], row["values"], row["K"], measure)
                measures.setdefault(of, {})[part] = f"{100 * float(row['value']):.1f}"
    in_table = {
        tuple(parts[part] for part in ("mean", "low", "high")) for parts in measures.values()
    }
    points = CLAIMS["Results"](folder.parent).points(((folder.name, name),), tuned=False)
    claims = [*CLAIMS["added"](points), *CLAIMS["against"](points, "best")]
    added = " ".join(CLAIMS["text"](found, "") for found in claims)
    return intervals(Path(page).read_text("utf-8")) | in_table | intervals(added)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "start", "end", "studies"),
    [
        (
            "evidence.md",
            "## K, and GRPO",
            "**At the prices",
            [("study-demo", "sweep-k-demo"), ("fresh-demo", "sweep-k-demo")],
        ),
        ("evidence.md", "## Which pairs", "## The demo", [("study-demo", "ablations-demo")]),
        ("cause.md", "# ", "", [("study-demo", "cause")]),
        ("spectrum.md", "# ", "Beta 1 was settled", [("study-demo", "spectrum-demo")]),
        (
            "benchmarks/middle-scale.md",
            "# ",
            "**DPO at two further rates",
            [("middle", "sweep-k-middle")],
        ),
        (
            "benchmarks/middle-scale.md",
            "**DPO at two further rates",
            "",
            [("middle-dpo", "middle")],
        ),
        (
            "benchmarks/2026-11-26-gpu.md",
            "## The study: what came out",
            "By the rules above",
            [("smollm2-gpu", "smollm2-study")],
        ),
        (
            "benchmarks/2026-11-26-studies.md",
            "5. *Synchronising more often*, seed 0",
            "## What came out: SmolLM2, stories",
            [("smollm2-arithmetic", "smollm2-arithmetic-spectrum")],
        ),
        (
            "benchmarks/2026-11-26-studies.md",
            "5. *Synchronising more often* on stories, seed 0",
            "",
            [("smollm2-stories", "smollm2-stories-spectrum")],
        ),
    ],
)
def test_no_page_has_an_interval_that_its_studies_do_not_give(
    results: Path, page: str, start: str, end: str, studies: list[tuple[str, str]]
) -> None:
    text = (ROOT / "docs" / page).read_text("utf-8")
    assert start in text and end in text
    part = text[text.index(start) :]
    told = intervals(part[: part.index(end)] if end else part)
    given = set()
    for archive, name in studies:
        given |= reported(results / archive, name)
    assert len(told) >= 5
    assert told - given == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("archive", "start", "end"),
    [
        ("demo-study", "## What came out: the demo's task", "## What came out: SmolLM2"),
        ("smollm2-arithmetic", "## What came out: SmolLM2, arithmetic", "5. *Synchronising"),
        ("smollm2-stories", "## What came out: SmolLM2, stories", "5. *Synchronising"),
    ],
)
def test_a_study_of_arms_tuned_alike_is_reported_as_its_answers_say(
    results: Path, archive: str, start: str, end: str
) -> None:
    study = read_study(results / archive, f"{archive}-judge")
    given = intervals("\n".join(TUNED["answers"](study)))
    page = (ROOT / "docs" / "benchmarks" / "2026-11-26-studies.md").read_text("utf-8")
    told = page[page.index(start) :]
    told = told[: told.index(end)]
    assert len(intervals(told)) >= 20 and intervals(told) - given == set()


@pytest.mark.slow
def test_the_claims_are_those_that_the_script_prints(results: Path) -> None:
    assert f"\n\n{CLAIMS['tables'](results)}\n\n" in (ROOT / "docs" / "evidence.md").read_text(
        "utf-8"
    )


@pytest.mark.parametrize(
    ("rule", "intervals", "verdict"),
    [
        ("more", [(1, 3), (0.1, 9)], "agrees"),
        ("more", [(1, 3), (-0.1, 9)], "cannot tell"),
        ("more", [(1, 3), (-4, -0.1)], "disagrees"),
        ("less", [(-4, -0.1), (-9, -3)], "agrees"),
        ("less", [(0.1, 2)], "disagrees"),
        ("any", [(-9, -3), (0.1, 9)], "agrees"),
        ("any", [(-9, -3), (-2, 1.9)], "disagrees"),
        ("any", [(-9, -3), (-2, 2.1)], "cannot tell"),
        ("best", [(-9, -3), (0.1, 9)], "agrees"),
        ("best", [(-9, -3), (-2, -0.1)], "disagrees"),
        ("best", [(-9, -3), (-2, 0.1)], "cannot tell"),
        ("level", [(-1.9, 1.9)], "agrees"),
        ("level", [(-4, -2.1)], "disagrees"),
        ("level", [(-4, -1.9)], "cannot tell"),
    ],
)
def test_a_claim_is_judged_by_whole_intervals(
    rule: str, intervals: list[tuple[float, float]], verdict: str
) -> None:
    found = [CLAIMS["Found"](None, (low + high) / 2, low, high, 5) for low, high in intervals]
    assert CLAIMS["verdict"](rule, found, "") == verdict


def test_a_claim_of_one_seed_has_no_verdict() -> None:
    """Its interval is over problems only."""
    claim, scale = CLAIMS["CLAIMS"][0], CLAIMS["SCALES"][0]
    seeds = {
        count: CLAIMS["cell"](claim, scale, [CLAIMS["Found"](5, 2.0, 1.0, 3.0, count)], count)
        for count in (1, 3)
    }
    assert seeds == {1: "one seed: K=5 +2.0 [+1.0, +3.0]", 3: "**agrees** K=5 +2.0 [+1.0, +3.0]"}
