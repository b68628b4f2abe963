"""Kill a run again and again, at every stage, and continue: the result is that of a run that was
never interrupted."""

import random
import shutil
from pathlib import Path

import pytest
from alike import differences, redone, steps_logged
from killed import Runs

from g2d_jax import commands
from g2d_jax.runtime.tables import read_preferences
from g2d_jax.session import stage_result

pytestmark = pytest.mark.timeout(900)

# Pattern of a file, and up to how many seconds after it appears the process dies: 0 is right away.
KILLS = {
    "while the first checkpoint is written": ("01-sft/checkpoints/2*", 0.0),
    "in sft": ("01-sft/checkpoints/4", 0.2),
    "sampled, not yet trained on": ("02-warmup/rollouts/step-000001.parquet", 0.0),
    "in the warm-up": ("02-warmup/checkpoints/1", 0.2),
    "between two parts": ("03-collect/rollouts/part-00000.parquet", 0.0),
    "after the references": ("04-dpo/reference.json", 0.0),
    "while a checkpoint of dpo is written": ("04-dpo/checkpoints/*", 0.0),
    "in the evaluation": ("05-evaluate/rollouts/sft.parquet", 0.0),
}


def test_a_run_killed_once_ends_like_one_that_never_was(runs, finished, tmp_path):
    kill_and_continue(runs, finished, tmp_path, ["in the warm-up"])
    check_all_is_there(finished, tmp_path / "exported")
    assert redone(finished) == 0


@pytest.mark.slow
def test_a_run_killed_at_every_stage_ends_like_one_that_never_was(runs, finished, tmp_path):
    kill_and_continue(runs, finished, tmp_path, [*KILLS])
    again = Path(shutil.copytree(finished, tmp_path / "again"))
    before = {path: path.stat().st_mtime_ns for path in again.rglob("*.parquet")}
    runs(again)  # once more: nothing is done again
    assert before == {path: path.stat().st_mtime_ns for path in again.rglob("*.parquet")}


def kill_and_continue(runs: Runs, whole: Path, folder: Path, names: list[str]) -> None:
    rng = random.Random(0)
    for name in names:
        pattern, seconds = KILLS[name]
        assert runs(folder / "broken", -9, file=[pattern, seconds * rng.random()]), name
    runs(folder / "broken")
    assert differences(whole, folder / "broken") == []


def check_all_is_there(whole: Path, exported: Path) -> None:
    """What was compared is what a run leaves."""
    assert [step for stage, step in steps_logged(whole) if stage == "sft"] == [1, 2, 3, 4, 5, 6]
    # Steps, parts, preferences, informativeness, judged pairs, sampled and greedy answers of three
    # policies.
    assert len(list(whole.rglob("*.parquet"))) == 3 + 2 + 1 + 1 + 1 + 6
    assert read_preferences(whole / "03-collect" / "preferences")
    for name in ("01-sft", "02-warmup", "03-collect", "04-dpo", "05-evaluate"):
        manifest = stage_result.read(whole / name)
        assert manifest and manifest.cost.flops > 0
    for policy in ("sft", "warmup@1", "warmup", "dpo"):
        assert (
            commands.export(whole, exported / policy, policy=policy) / "model.safetensors"
        ).exists()
