"""The recipes of docs/extending, followed to the letter: their files are written, their edits made,
their tests run.

A python block that begins with "# FILE" is that file. A diff block has no line numbers: what an
edit leaves and takes away stands once in its file.
"""

from __future__ import annotations

import ast
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from etils import epath

from g2d_jax.config import Config
from g2d_jax.recipes.config_load import resolve
from g2d_jax.records import Problem
from g2d_jax.runtime.mesh import make_mesh
from g2d_jax.runtime.storage import read_json
from g2d_jax.runtime.tables import read_rollouts
from g2d_jax.runtime.tracking import read_metrics
from g2d_jax.session.reward_manager import RewardManager

ROOT = Path(__file__).parents[1]
CONFIG = """
import tiny
from g2d_jax import config as settings


def get_config(arg=""):
    config = tiny.get_config()
    config.reward.update(function="my_rewards:graded", correct_above=0.05)  # a random policy finds numbers by chance
    for name in ("sft", "warmup", "evaluate"):
        del config.stages[name]
    config.stages.collect.update(policy="init", prompts=16, num_generations=8, max_pairs=8)
    config.stages.dpo.update(policy="init", epochs=12)
    return config
"""


def follow(page: str, folder: Path) -> None:
    """Write a page's files, and make its edits of the files that lie in the folder."""
    text = (ROOT / "docs" / "extending" / f"{page}.md").read_text()
    blocks = re.findall(r"```(python|diff)\n(.*?)```", text, flags=re.DOTALL)
    for name, block in (
        (re.match(r"# (\S+\.py)\n", block), block) for kind, block in blocks if kind == "python"
    ):
        if name:
            (folder / name[1]).write_text(block)
    diffs = "".join(block for kind, block in blocks if kind == "diff")
    for name, edits in re.findall(
        r"^--- (\S+)\n(.*?)(?=^--- |\Z)", diffs, flags=re.DOTALL | re.MULTILINE
    ):
        source = (folder / name).read_text()
        for edit in edits.split("@@\n"):
            lines = edit.splitlines(keepends=True)
            before, after = (
                "".join(line[1:] for line in lines if line[0] != mark) for mark in "+-"
            )
            assert source.count(before) == 1, (
                f"{page}.md, {name}: once, not {source.count(before)} times:\n{before}"
            )
            source = source.replace(before, after)
        (folder / name).write_text(source)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The files of the loss and of the reward, in a folder on Python's path."""
    folder = tmp_path_factory.mktemp("files")
    for page in ("loss", "reward"):
        follow(page, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder


@pytest.mark.parametrize("name", ["test_hinge", "test_my_rewards"])
def test_the_tests_in_the_recipes_pass(files: Path, name: str) -> None:
    (test,) = (
        value
        for key, value in runpy.run_path(str(files / f"{name}.py")).items()
        if key.startswith("test_")
    )
    test()


def test_a_reward_grades_through_the_config(files: Path) -> None:
    config = Config.of(resolve(str(files / "my_config.py")))
    rewards = RewardManager({"main": config.reward}, make_mesh)
    problems = [Problem(str(number), "What is 3 + 4?", answer="7") for number in range(3)]
    scores = rewards(problems, ["3 + 4 = 7", "it is 8", "no idea"], [np.zeros(1, np.int32)] * 3)
    assert [(score.reward, score.verdict.value) for score in scores] == [
        (1.0, "correct"),
        (0.1, "incorrect"),
        (0.0, "incorrect"),
    ]


@pytest.mark.slow
def test_a_run_grades_with_the_reward_and_trains_with_the_loss(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_config.py").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(files / "train_hinge.py"))
    work = tmp_path / "runs" / "hinge"

    rollouts = read_rollouts(epath.Path(work / "01-collect" / "rollouts"))
    assert {row.score.reward for row in rollouts} <= {1.0, 0.1, 0.0}
    assert all((row.score.reward > 0) == any(map(str.isdigit, row.text)) for row in rollouts)
    steps = [row for row in read_metrics(work) if row["stage"] == "dpo" and row["kind"] == "train"]
    first, *_, last = (row["metrics"] for row in steps)
    assert last["loss"] < first["loss"] and last["rewards/margins"] > first["rewards/margins"]
    # the policy is the reference yet, and all margins are 0
    assert first["loss"] == pytest.approx(1.0, rel=1e-3)
    assert read_json(epath.Path(work / "config.json"))["own"]["dpo"] == "hinge:hinge"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package and its tests, with the edits of both pages made in it."""
    for name in ("g2d_jax", "tests"):
        shutil.copytree(
            ROOT / name,
            tmp_path / name,
            ignore=shutil.ignore_patterns("__pycache__", "object_store"),
        )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for page in ("model-family", "stage"):
        follow(page, tmp_path)
    return tmp_path


def test_a_family_and_a_stage_are_edits_that_fit_the_package(package: Path) -> None:
    for file in package.rglob("*.py"):
        compile(file.read_text(), str(file), "exec")
    assert (package / "tests" / "stages" / "test_rejection.py").is_file()
    stage = ast.parse((package / "g2d_jax" / "stages" / "rejection.py").read_text())
    functions = {node.name for node in stage.body if isinstance(node, ast.FunctionDef)}
    # what a run, a plan and a dry run call of every kind: stages/__init__.py
    assert functions >= {"run", "phases", "issues"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_family_and_a_stage_in_the_package(package: Path, one_device: dict[str, str]) -> None:
    """Its tests run in a process of their own."""
    tests = [
        "tests/models/test_hf.py",
        "tests/models/test_decoder.py",
        "tests/stages/test_rejection.py",
    ]
    # logits, export, decoding
    chosen = "rejection or (ernie4_5 and (transformers or True-1024) and not greedy)"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            "0",
            "-p",
            "no:cacheprovider",
            "-m",
            "slow or not slow",
            "-k",
            chosen,
            *tests,
        ],
        env={**one_device, "PYTHONPATH": str(package)},
        cwd=package,
        capture_output=True,
        text=True,
        timeout=590,
    )
    passed = 4 if find_spec("torch") else 2  # without it there is no parity with transformers
    assert done.returncode == 0 and f"{passed} passed" in done.stdout, (
        done.stdout[-5000:] + done.stderr[-2000:]
    )
