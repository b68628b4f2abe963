"""docs/evidence.md says what the packed results of its studies give."""

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest

from g2d_jax.report.study import write_study
from g2d_jax.study import gain

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_study_over_k_is_reported_as_its_page_says(tmp_path: Path) -> None:
    script, archive = ROOT / "benchmarks" / "results.py", ROOT / "benchmarks" / "results" / "study-demo.tar.xz"
    subprocess.run([sys.executable, script, "unpack", archive, tmp_path], check=True)
    _, page, table = write_study(tmp_path, "sweep-k-demo")
    text = (ROOT / "docs" / "evidence.md").read_text("utf-8")
    rows = [line.replace("\\", "").split(" | ") for line in Path(page).read_text("utf-8").splitlines()]
    accuracies = {
        row[0].removeprefix("| "): (row[3], row[5]) for row in rows if row[0].startswith("| g2d, K") and len(row) == 9
    }
    assert len(accuracies) == 7
    for row, figures in accuracies.items():
        for figure in figures:
            assert figure in text, row
    with open(table, encoding="utf-8", newline="") as file:
        measured = {(row["measure"], row["K"]): row for row in csv.DictReader(file) if row["arm"] == "g2d"}
    for k in ("0", "5", "10", "20", "40", "80", "160"):
        mean, low, high = (
            100 * float(measured[f"advantage/grpo, learning rate 5e-05/flops/{name}", k]["value"])
            for name in ("mean", "low", "high")
        )
        assert f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]" in text, k


@pytest.mark.slow
def test_the_prediction_has_the_constants_of_its_calibration() -> None:
    done = subprocess.run([sys.executable, ROOT / "benchmarks/forecast.py"], capture_output=True, text=True, check=True)
    constants = (
        f"SHIFT {gain.SHIFT:.4f}  POWER {gain.POWER:.2f}  FACTOR {gain.FACTOR:.2f}  SLACK {100 * gain.SLACK} points"
    )
    assert constants in done.stdout.splitlines()
    page = (ROOT / "docs" / "forecast.md").read_text("utf-8")
    errors = re.findall(
        r"(?:chains|constants|power 1|fit\)) .*?: mean \|error\| +(\S+), worst +([-+.0-9]+)", done.stdout
    )
    assert len(errors) == 5
    for mean, worst in errors:
        assert f"| {mean} | {worst} |" in page, (mean, worst)
