"""docs/evidence.md says what the packed results of its studies give."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from g2d_jax.report.study import write_study

ROOT = Path(__file__).parents[1]


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


@pytest.mark.slow
def test_the_study_over_k_is_reported_as_its_page_says(results: Path) -> None:
    _, page, table = write_study(results / "study-demo", "sweep-k-demo")
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
        ("study-demo", "ablations-demo", "evidence.md", "gain"),
        ("study-demo", "cause", "cause.md", "gain"),
        ("study-demo", "spectrum-demo", "spectrum.md", "accuracy"),
        ("fresh-demo", "sweep-k-demo", "evidence.md", "gain"),
        ("middle", "sweep-k-middle", "benchmarks/middle-scale.md", "gain"),
        # its page has no gains of warm-ups
        (
            "middle-dpo",
            "middle",
            "benchmarks/middle-scale.md",
            "offline_gain",
        ),
    ],
)
def test_the_other_studies_are_reported_as_their_pages_say(
    results: Path, archive: str, name: str, page: str, measure: str
) -> None:
    table = write_study(results / archive, name)[2]
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
