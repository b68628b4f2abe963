"""Several processes give what one gives: the same prompts, tokens, verdicts and pairs, and numbers
but for rounding."""

import json
import shutil
from pathlib import Path

import pytest
import same
from launched import HERE, Launch, command
from test_reward_model import save_reward_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_each_stage_from_the_same_artefacts(whole: Path, launch: Launch, tmp_path: Path) -> None:
    """One process with four devices against two with two each."""
    workdir = tmp_path / "stages"
    launched = launch(1, 4, "stages", HERE / "small.py", whole, workdir)
    assert launched.statuses() == [0], launched.told()
    same.but_for_rounding(
        whole, workdir, ("sft", "warmup@1", "warmup", "dpo"), tmp_path / "exports"
    )


def test_resume_on_another_number_of_processes_and_devices(
    whole: Path, launch: Launch, tmp_path: Path
) -> None:
    """From 2 to 1 in the middle of sft, from 1 to 2 between stages, from 2 to 4 in the middle of
    the warm-up."""
    workdir, reference = tmp_path / "elsewhere", tmp_path / "whole"
    shutil.copytree(whole, workdir, ignore=shutil.ignore_patterns("02-*", "03-*", "04-*", "05-*"))
    go_back(workdir / "01-sft", "checkpoints/6")
    for count, devices, until in ((1, 2, "sft"), (2, 2, "warmup"), (4, 1, "warmup")):
        launched = launch(count, devices, *command(workdir, "--until", until))
        assert launched.statuses() == [0] * count, launched.told()
        if count == 2:
            go_back(workdir / "02-warmup", "checkpoints/3", "rollouts/*step-000002*")
    shutil.copytree(whole, reference, ignore=shutil.ignore_patterns("03-*", "04-*", "05-*"))
    same.but_for_rounding(reference, workdir, ("sft", "warmup@1", "warmup"), tmp_path / "exports")


def go_back(stage: Path, *patterns: str) -> None:
    """Take back what a stage wrote last."""
    for pattern in ("manifest.json", *patterns):
        found = list(stage.glob(pattern))
        assert found, pattern
        for path in found:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_tasks_reward_models_adapters_and_rollouts_from_elsewhere(
    launch: Launch, tmp_path: Path
) -> None:
    write_inputs(tmp_path)
    one, two = tmp_path / "one", tmp_path / "two"
    launched = launch(1, 2, *command(one, config="mixed"), env={"MIXED": str(tmp_path)})
    assert launched.statuses() == [0], launched.told()
    again = ("stages", HERE / "mixed.py", one, two)
    launched = launch(2, 1, *again, env={"MIXED": str(tmp_path)})
    assert launched.statuses() == [0, 0], launched.told()
    same.but_for_rounding(one, two, ("dpo@2", "dpo", "group"), tmp_path / "exports")


def write_inputs(folder: Path) -> None:
    """What mixed.py reads."""
    for split, first in (("train", 100), ("dev", 200), ("test", 300)):
        rows = [{"problem": f"{n} + 1 =", "answer": str(n + 1)} for n in range(first, first + 12)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    outside = [
        {"prompt": f"{n} - 1 =", "completion": "1" * (1 + i + n % 2), "answer": str(n - 1)}
        for n in range(10)
        for i in range(3)
    ]
    given = [
        {**row, "reward": float(i % 3 == 0), "prompt": f"1{row['prompt']}"}
        for i, row in enumerate(outside)
    ]
    (folder / "outside.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in outside + given)
    )
    save_reward_model(folder / "reward-model", "Llama")
