"""`g2d evaluate`, `sample` and `sweep` started on several hosts alike give what one process gives."""

import shutil
from pathlib import Path

import pandas as pd
import pytest
import same
from forks import Forked
from launched import HERE, Launch

from g2d_jax.session import stage_result
from g2d_jax.sweep.graph import node_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def _lines(process: Forked) -> list[str]:
    """What a process printed, without what the library that connects processes says."""
    return [line for line in process.stdout.splitlines() if not line.startswith("[Gloo]")]


def test_evaluate_and_sample(whole: Path, launch: Launch, tmp_path: Path) -> None:
    shown = {}
    for count in (1, 2):
        workdir = tmp_path / str(count)
        shutil.copytree(whole, workdir)
        asked = ("--policy", "dpo", "--num-generations", 3, "--workdir", workdir)
        launched = launch(count, 4 // count, "evaluate", *asked)
        assert launched.statuses() == [0] * count, launched.told()
        launched = launch(count, 4 // count, "sample", workdir, "--prompt", "1+1", "--count", 5)
        assert launched.statuses() == [0] * count, launched.told()
        shown[count], *others = map(_lines, launched.running)
        assert not any(others)
    assert shown[1] == shown[2]
    assert len(shown[1]) > 5
    (folder,) = (tmp_path / "1" / "evaluations").iterdir()
    again = tmp_path / "2" / "evaluations" / folder.name
    first, second = (stage_result.read(place) for place in (folder, again))
    assert first is not None and second is not None
    assert first.evaluation and second.evaluation
    assert first.evaluation.policies[0].marks == second.evaluation.policies[0].marks
    for file in (folder / "rollouts").glob("*.parquet"):
        one, two = pd.read_parquet(file), pd.read_parquet(again / "rollouts" / file.name)
        pd.testing.assert_frame_equal(one, two, rtol=0, atol=same.ATOL["logprobs"])


def test_a_study(launch: Launch, tmp_path: Path) -> None:
    arguments = ("--config", HERE / "small.py", "--product", "stages.warmup.steps=1,2")
    found = []
    for count in (1, 2):
        workdir = tmp_path / str(count)
        launched = launch(count, 4 // count, "sweep", *arguments, "--workdir", workdir)
        assert launched.statuses() == [0] * count, launched.told()
        assert len(list(workdir.glob("*.html"))) == 1
        nodes = sorted(path.name for path in (workdir / "stages").iterdir() if path.is_dir())
        accuracies = {}
        for node in nodes:
            result = stage_result.read(node_folder(workdir, node))
            if result is not None and result.evaluation is not None:
                marks = [policy.marks for policy in result.evaluation.policies]
                accuracies[node] = marks
        found.append((nodes, accuracies))
    assert found[0] == found[1]
    assert len(found[0][1]) >= 2
