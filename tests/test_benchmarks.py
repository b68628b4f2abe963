"""Benchmarks run on a CPU, so that an hour on an accelerator is not lost to them."""

import runpy
from pathlib import Path

import pytest

from g2d_jax import pipeline
from g2d_jax.data import arithmetic
from g2d_jax.data.problems import load_problems

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SCRIPT = runpy.run_path(str(BENCHMARKS / "accelerator.py"))
DEMO_TASK = runpy.run_path(str(BENCHMARKS / "demo_task.py"))


LONG = ("correct", "remat")
PARTS = sorted(SCRIPT["PARTS"].keys() - {"memory"})  # memory is a run of its own


@pytest.mark.parametrize("part", [pytest.param(part, marks=[pytest.mark.slow] * (part in LONG)) for part in PARTS])
def test_parts_on_a_cpu(part, tmp_path, capsys):
    assert SCRIPT["PARTS"][part](SCRIPT["shape"]("tiny"), tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert lines and all(line.split()[0] == part for line in lines)


@pytest.mark.parametrize("variant", DEMO_TASK["VARIANTS"])
def test_variants_of_the_demo_can_run(variant, monkeypatch):
    monkeypatch.setattr(arithmetic, "TASKS", {**arithmetic.TASKS})
    config = DEMO_TASK["config_of"](variant, 1)
    pipeline.check(config)
    problems, _ = load_problems(config.data.train.path, split="train", limit=100)
    assert config.stages.evaluate.split == "dev"
    assert max(len(problem.prompt) for problem in problems) <= config.data.max_prompt_length
