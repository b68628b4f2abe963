"""Problems, examples and tokenizers that no setting names: a run has none of them, and says so
before any work."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ml_collections import ConfigDict
from toys import save_rows

from g2d_jax import config as settings
from g2d_jax import pipeline
from g2d_jax.commands import dryrun
from g2d_jax.recipes.config_load import resolve, shipped
from g2d_jax.stages import run_issues

TINY = str(Path(__file__).parent / "tiny.py")
NUMBERS = [{"problem": f"{n}+1=?", "answer": str(n + 1)} for n in range(1, 9)]

Change = Callable[[ConfigDict], Any]


def unnamed(config: ConfigDict, *splits: str) -> None:
    for split in splits:
        config.data[split] = settings.source("")


def chat(config: ConfigDict, **sources: ConfigDict) -> None:
    """A second task with these sources alone."""
    none = {split: settings.source("") for split in ("train", "dev", "test")}
    config.tasks.chat = settings.task(**{**none, **sources})


def only(config: ConfigDict, *names: str) -> None:
    for name in [*config.stages]:
        if name not in names:
            del config.stages[name]


@pytest.fixture
def config() -> ConfigDict:
    return resolve(TINY).unlock()


def test_nothing_is_named_by_default() -> None:
    base = settings.base()
    assert [base.data[split].path for split in ("train", "dev", "test")] == ["", "", ""]
    assert settings.sft().data.path == ""


@pytest.mark.parametrize("name", ["demo", "sweep-k", "spectrum"])
def test_shipped_configs_name_their_own(name: str) -> None:
    assert name in shipped()
    config = resolve(f"{name}:preset=smoke")
    sources = [config.data.train, config.data.dev, config.data.test, config.stages.sft.data]
    assert {source.path.partition(":")[0] for source in sources} == {"procedural"}
    assert config.stages.sft.optimizer.learning_rate == 3e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: unnamed(c, "test"), r"^data\.test\.path is not set, .* need test problems: evaluate: set it"),
        (lambda c: unnamed(c, "train"), r"^data\.train\.path is not set, .* need train problems: collect, warmup"),
        (
            lambda c: c.stages.update(best=settings.best_checkpoint(policy="warmup")) or unnamed(c, "dev"),
            r"^data\.dev\.path is not set, .* need dev problems: best",
        ),
        (
            lambda c: chat(c) or c.tasks.chat.update(weight=0.0) or unnamed(c, "test"),
            r"^data\.test\.path .* set it or tasks\.chat\.test\.path to a file",
        ),
        (chat, r"^tasks\.chat\.train\.path is not set, .* train .*: collect, warmup: .* or tasks\.chat\.weight to 0"),
        (
            lambda c: chat(c, train=settings.source("procedural:slips", limit=9)) or unnamed(c, "train"),
            r"^data\.train\.path is not set, .* set it to a file .*, or data\.weight to 0",
        ),
        (
            lambda c: c.stages.sft.data.update(path=""),
            r"^stages\.sft\.data\.path is not set: set it to a file or hub:owner/name",
        ),
    ],
)  # fmt: skip
def test_a_stage_says_which_setting_it_lacks_before_any_work(
    config: ConfigDict, tmp_path: Path, change: Change, message: str
) -> None:
    change(config)
    with pytest.raises(ValueError, match=message):
        pipeline.run(config.lock(), tmp_path / "work")
    assert not (tmp_path / "work").exists()


def test_what_no_stage_needs_may_be_unnamed(config: ConfigDict) -> None:
    unnamed(config, "dev")
    chat(config, test=settings.source("procedural:slips", limit=4))
    config.tasks.chat.weight = 0.0
    run_issues.checked(config)
    only(config, "sft")
    unnamed(config, "train", "test")
    run_issues.checked(config)


def test_random_parameters_have_the_tokenizer_of_embedded_tasks_only_with_their_problems(
    config: ConfigDict, tmp_path: Path
) -> None:
    only(config, "warmup")
    config.stages.warmup.policy = "init"
    run_issues.checked(config)
    save_rows(tmp_path / "mine.jsonl", NUMBERS)
    for split in ("train", "dev", "test"):
        config.data[split] = settings.source(str(tmp_path / "mine.jsonl"), split, 9)
    with pytest.raises(
        ValueError,
        match=r"tokenizer\.path is empty, and so is model\.path, but random parameters have no tokenizer",
    ):
        run_issues.checked(config)
    config.tokenizer.path = "procedural:slips"
    run_issues.checked(config)


@pytest.mark.parametrize("split", ["test", "dev"])
def test_the_dry_run_tries_the_problems_that_there_are(
    config: ConfigDict, split: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An evaluation of a model needs no problems of train: its reward and stop strings are tried
    all the same."""
    only(config, "evaluate")
    config.stages.evaluate.update(policies=("init",), split=split)
    config.stages.evaluate.sampling.stop = ("}",)
    unnamed(config, *({"train", "dev", "test"} - {split}))
    config.data[split] = settings.source("procedural:chains", split, limit=2)
    config.reward.function = "verify"
    dryrun.show(config.lock())
    said = capsys.readouterr().out
    assert said.count("reference answer: ") == 2 and "is not tried" not in said
    assert len(re.findall(r"\| right \| \S+ +\| +1\.0 \| correct", said)) == 2
    assert "stages.evaluate.sampling.stop has '}', which ends 4 of 4 right responses early" in said
