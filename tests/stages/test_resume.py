"""Kill a run again and again, at every stage, and continue: the result is that of a run that was never interrupted."""

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from g2d_jax import storage
from g2d_jax.tables import read_preferences, read_rollouts
from g2d_jax.tracking import read_metrics

HERE = Path(__file__).parent

# Pattern of a file, and up to how many seconds after it appears the process dies: 0 is right away.
KILLS = {
    "while the first checkpoint is written": ("01-sft/checkpoints/2*", 0.0),
    "in sft": ("01-sft/checkpoints/4", 0.2),
    "sampled, not yet trained on": ("02-warmup/rollouts/step-000001.parquet", 0.0),
    "in the warm-up": ("02-warmup/checkpoints/1", 0.2),
    "between two parts": ("03-collect/rollouts/part-00000.parquet", 0.0),
    "after the references": ("04-dpo/reference-*.json", 0.0),
    "while a checkpoint of dpo is written": ("04-dpo/checkpoints/2*", 0.0),
    "in the evaluation": ("05-evaluate/rollouts/sft.parquet", 0.1),
}


def start(workdir: Path, env: dict[str, str], pattern: str = "", seconds: float = 0.0) -> int:
    command = [sys.executable, HERE / "killed.py", workdir, pattern, str(seconds)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode in (0, -9), done.stderr
    return done.returncode


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def whole(folder: Path, one_device: dict[str, str]) -> Path:
    """A run without interruption."""
    assert start(folder / "whole", one_device) == 0
    return folder / "whole"


@pytest.fixture(scope="module")
def broken(folder: Path, whole: Path, one_device: dict[str, str]) -> Path:
    """The same run, killed and continued again and again."""
    rng = random.Random(0)
    killed = [start(folder / "broken", one_device, pattern, s * rng.random()) for pattern, s in KILLS.values()]
    assert killed.count(-9) == len(KILLS)
    assert start(folder / "broken", one_device) == 0
    return folder / "broken"


def test_metrics_are_those_of_the_uninterrupted_run(whole: Path, broken: Path) -> None:
    def metrics(workdir: Path) -> dict[tuple[str, int], str]:
        kept = {(r["stage"], r["step"]): {**r["metrics"], "step_time": 0.0} for r in read_metrics(workdir)}
        return {key: json.dumps(values, sort_keys=True) for key, values in kept.items()}

    assert metrics(whole) == metrics(broken)
    assert [step for stage, step in metrics(whole) if stage == "sft"] == [1, 2, 3, 4, 5, 6]


def test_rollouts_and_preferences_are_bit_equal(whole: Path, broken: Path) -> None:
    files = sorted(path.relative_to(whole) for path in whole.rglob("*.parquet"))
    assert len(files) == 3 + 2 + 1 + 6
    assert files == sorted(path.relative_to(broken) for path in broken.rglob("*.parquet"))
    for file in files:
        assert (whole / file).read_bytes() == (broken / file).read_bytes(), file
    assert read_preferences(whole / "03-collect" / "preferences")
    assert all(len(r.rollout.token_ids) for r in read_rollouts(whole / "02-warmup" / "rollouts"))


def test_results_counts_and_costs_are_equal(whole: Path, broken: Path) -> None:
    for name in ("01-sft", "02-warmup", "03-collect", "04-dpo", "05-evaluate"):
        one, other = storage.finished(whole / name), storage.finished(broken / name)
        assert one is not None and other is not None
        for key in ("started", "seconds", "verifier_cpu_seconds"):
            one.pop(key), other.pop(key)
        assert one == other, name
        assert one["tokens"] != {} and one["flops"] > 0


@pytest.mark.parametrize("policy", ["sft", "warmup@1", "warmup", "dpo"])
def test_parameters_are_bit_equal(whole: Path, broken: Path, tmp_path: Path, policy: str) -> None:
    from g2d_jax import policies

    found = [
        load_file(policies.export(workdir, tmp_path / workdir.name, policy=policy) / "model.safetensors")
        for workdir in (whole, broken)
    ]
    assert found[0].keys() == found[1].keys()
    for name, array in found[0].items():
        np.testing.assert_array_equal(array, found[1][name], err_msg=name)


def test_a_finished_run_does_nothing_again(whole: Path, one_device: dict[str, str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*.parquet")}
    assert start(whole, one_device) == 0
    assert before == {path: path.stat().st_mtime_ns for path in whole.rglob("*.parquet")}


def test_damaged_rollouts_are_named(whole: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(whole / "03-collect", tmp_path / "03-collect")
    file = copy / "rollouts" / "part-00000.parquet"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"part-00000\.parquet"):
        read_rollouts(file)
