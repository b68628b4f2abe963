"""benchmarks/accelerator.py runs on a CPU, so that an hour on an accelerator is not lost to it."""

import runpy
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "accelerator.py"))


LONG = ("correct", "remat")
PARTS = sorted(SCRIPT["PARTS"].keys() - {"memory"})  # memory is a run of its own


@pytest.mark.parametrize("part", [pytest.param(part, marks=[pytest.mark.slow] * (part in LONG)) for part in PARTS])
def test_parts_on_a_cpu(part, tmp_path, capsys):
    assert SCRIPT["PARTS"][part](SCRIPT["shape"]("tiny"), tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert lines and all(line.split()[0] == part for line in lines)
