"""benchmarks/accelerator.py runs on a CPU, so that an hour on an accelerator is not lost to it."""

import runpy
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "accelerator.py"))


@pytest.mark.parametrize("part", sorted(SCRIPT["PARTS"].keys() - {"memory"}))  # memory is a run of its own
def test_parts_on_a_cpu(part, tmp_path, capsys):
    assert SCRIPT["PARTS"][part](SCRIPT["shape"]("tiny"), tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert lines and all(line.split()[0] == part for line in lines)
