"""`g2d run --model --problems`: a run of a user's own model without a config file."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path

import pytest
from etils import epath
from toys import QWEN, make_tokenizer, save_policy, save_rows, solved_problems

from g2d_jax import cli, recipes
from g2d_jax.config.io import changes, to_dict
from g2d_jax.recipes.config_load import resolve
from g2d_jax.runtime import storage
from g2d_jax.runtime.tables import read_rollouts
from g2d_jax.runtime.terminal import clean
from g2d_jax.session import stage_result

FEW = (
    "--config.stages.warmup.steps=2",
    "--config.stages.warmup.prompts_per_step=4",
    "--config.stages.warmup.num_generations=4",
    "--config.stages.collect.prompts=16",
    "--config.stages.collect.num_generations=4",
    "--config.stages.evaluate.num_generations=2",
    "--config.stages.evaluate.pass_at=1,2",
    "--config.data.max_prompt_length=96",
    "--config.data.test.limit=3",
    "--config.compute.max_num_seqs=16",
    "--config.compute.remat=none",
    "--config.reward.workers=1",
    "--config.logging.tensorboard=False",
    *(f"--config.stages.{name}.sampling.max_new_tokens=8" for name in ("warmup", "collect")),
    "--config.stages.evaluate.sampling.max_new_tokens=8",
)


def g2d(*arguments: object, status: int = 0) -> str:
    """What the command prints."""
    said, stopped = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(stopped):
        assert cli.main([str(argument) for argument in arguments]) == status, stopped.getvalue()
    return stopped.getvalue() if status else said.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, the same without a chat template, and problems."""
    place = tmp_path_factory.mktemp("own")
    tokenizer = make_tokenizer(QWEN)
    save_policy(place / "toy", "Qwen2", tokenizer)
    shutil.copytree(place / "toy", place / "bare")
    (place / "bare" / "chat_template.jinja").unlink()
    save_rows(place / "problems.jsonl", solved_problems(80))
    return place


@pytest.fixture(scope="module")
def command(folder: Path) -> tuple[object, ...]:
    model, problems = folder / "toy", folder / "problems.jsonl"
    return "run", "--model", model, "--problems", problems, "--workdir", folder / "work", *FEW


@pytest.fixture(scope="module")
def said(command: tuple[object, ...]) -> str:
    return g2d(*command)


def test_it_ends_with_an_evaluated_policy(said: str, folder: Path) -> None:
    stages = ["01-warmup", "02-collect", "03-dpo", "04-evaluate"]
    assert [path.name for path in sorted((folder / "work").glob("0*"))] == stages
    evaluation = stage_result.read(folder / "work" / "04-evaluate").evaluation
    assert list(evaluation.by_name) == ["init", "warmup", "dpo"] and evaluation.problems == 3
    assert stage_result.read(folder / "work" / "03-dpo").counts["steps"] >= 1


def test_prompts_answers_grades_and_memory_come_before_the_first_update(
    said: str, folder: Path
) -> None:
    shown, trained, _ = said.partition("warmup: done")
    assert trained
    file = min((folder / "work" / "01-warmup" / "rollouts").glob("*.parquet"))
    first = [row for row in read_rollouts(epath.Path(file)) if row.rollout.sample == 0]
    assert shown.count("an answer of ") == 3
    for row in first[:3]:
        grade = f"reward {row.score.reward:g}, {row.score.verdict.value}"
        own = shown.partition(f"problem {row.rollout.problem_id}, a prompt of ")[2]
        assert own.index("|start|>user\n  | Given the following problem") < own.index(
            f"an answer of {row.rollout.length} tokens: {grade}\n  | {clean(row.text.splitlines()[0])}"
        )
        assert own.index("memory before the first update, host: ") < own.index("warmup 2/2")
    assert "| warmup   | train step " in shown and "this machine has " in shown


def test_the_config_that_it_writes_is_one_to_run(
    said: str, folder: Path, command: tuple[object, ...]
) -> None:
    written = folder / "work" / "config.json"
    assert f"--config {written}" in said
    kept = resolve(str(written))
    assert to_dict(kept) == storage.read_json(written)["config"]
    other = resolve(str(written), ["config.seed=3"])
    assert changes(kept, other) == ["seed: 0 -> 3"]
    # It continues the same run, as does the same command; nothing is shown again.
    for again in (("run", "--config", written, folder / "work"), command):
        printed = g2d(*again)
        assert printed.count("done before, skipped") == 4
        assert "an answer of " not in printed and "estimated" not in printed


def test_a_config_of_a_work_directory_runs_no_code_that_lies_there(
    tmp_path: Path,
) -> None:
    values = {"config": to_dict(resolve("demo"))}
    values["config"]["reward"]["function"] = "beside:reward"
    (tmp_path / "config.json").write_text(json.dumps(values))
    marker = tmp_path / "ran"
    (tmp_path / "beside.py").write_text(f"open({str(marker)!r}, 'w')\ndef reward(**_): pass\n")
    refused = g2d("run", "--config", tmp_path / "config.json", "--dry-run", status=1)
    assert "cannot import 'beside'" in refused and not marker.exists()


def test_a_model_without_a_chat_template_is_told_how_to_ask(folder: Path, tmp_path: Path) -> None:
    bare = ("run", "--model", folder / "bare", "--problems", folder / "problems.jsonl", *FEW)
    for other in (["--dry-run"], ["--workdir", tmp_path / "work"]):
        refused = g2d(*bare, *other, status=1)
        assert "no chat template: pass --template paper" in refused
    assert not list(tmp_path.glob("work/0*"))
    asked = g2d(*bare, "--dry-run", "--template", "Q: {problem}\nA, in \\boxed{}:")
    assert asked.count(" tokens:\n  | Q: What is ") == 3 and "  | A, in \\boxed{}:\n" in asked
    assert "stages.warmup.prompts_per_step: 8 -> 4" in asked


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model", "m"],
        ["--problems", "p"],
        ["--config", "demo", "--model", "m", "--problems", "p"],
        ["--config", "demo", "--template", "plain"],
    ],
)
def test_a_run_is_given_a_config_or_a_model_and_problems(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["run", *arguments])
    said = "either --config NAME_OR_FILE, or --model MODEL --problems FILE"
    assert said in capsys.readouterr().err


def test_what_is_not_there_is_named_before_any_work(folder: Path, tmp_path: Path) -> None:
    work = ("--workdir", tmp_path / "work")
    gone = tmp_path / "gone"
    run = ("run", "--model", folder / "toy", "--problems", gone / "p.jsonl", *work)
    assert f"--problems: there is no {gone}/p.jsonl\n" in g2d(*run, status=1)
    run = ("run", "--model", gone, "--problems", folder / "problems.jsonl", *work)
    assert f"model: there is no folder {gone}\n" in g2d(*run, status=1)
    with pytest.raises(ValueError, match=r"no config file .*/gone/config\.json"):
        resolve(str(gone / "config.json"))
    assert list(tmp_path.iterdir()) == []


def test_defaults_go_by_the_size_of_the_model() -> None:
    large = recipes.own("me/Large-7B", "mine.jsonl", None, 7_000_000_000)
    small = recipes.own("me/Small", "mine.jsonl", "plain", 135_000_000)
    assert (large.name, small.name) == ("Large-7B-g2d", "Small-g2d")
    assert (large.dtype, small.dtype) == ("bfloat16", "float32")
    assert (large.tokenizer.chat, large.tokenizer.prompt_template) == (True, "paper")
    assert (small.tokenizer.chat, small.tokenizer.prompt_template) == (None, "plain")
    for config, numbers in ((large, (150, 64, 1e-6, 2048)), (small, (10, 8, 1e-5, 256))):
        stage = config.stages.warmup
        rate, length = stage.optimizer.learning_rate, stage.sampling.max_new_tokens
        assert (stage.steps, stage.prompts_per_step, rate, length) == numbers
        assert config.data.dev.path == ""  # nothing reads it
        for split in ("train", "test"):
            assert (config.data[split].path, config.data[split].split) == ("mine.jsonl", split)
