"""Paths: what they are relative to, what is a hub id, and work directories used from elsewhere or
after they moved."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from g2d_jax import cli, commands, pipeline
from g2d_jax import config as settings
from g2d_jax.config import Config, Invalid, places
from g2d_jax.config.io import from_dict, to_dict
from g2d_jax.data.arithmetic import tokenizer
from g2d_jax.data.tokenizer import PromptTokenizer
from g2d_jax.models import decoder, hf
from g2d_jax.models.config import ModelConfig
from g2d_jax.recipes.config_load import resolve
from g2d_jax.session import init_params
from g2d_jax.sweep.points import points, with_axes

CONFIG = """
from g2d_jax import config as settings

def get_config(arg=""):
    config = settings.base()
    config.name = "mine"
    config.model.path = "models/tiny"
    config.data.train = settings.source("data/train.jsonl")
    config.data.dev = settings.source("")
    config.data.test = settings.source("data/test.jsonl")
    config.data.max_prompt_length = 16
    config.logging.tensorboard = False
    config.compute.update(max_num_seqs=8)
    config.stages.sft = settings.sft(
        data=settings.source("data/sft.jsonl"), steps=1, batch_size=8, max_length=64,
        optimizer=settings.optimizer(1e-3),
    )
    config.stages.evaluate = settings.evaluate(
        policies=("init", "sft"), num_generations=1, pass_at=(1,), sampling=settings.sampling(4)
    )
    {line}
    return config
"""
TEXTS = [
    "hf:",
    "run:#",
    "run:a#b@3",
    "hub:a:b",
    "x:y.jsonl",
    "gs://b/x.jsonl",
    "~x/y",
    "a/b",
    "~/a",
]
KINDS = ("path", "model", "problems", "policy", "rollouts", "preferences")


def save_model(folder: Path) -> None:
    """A tiny model with the embedded tasks' tokenizer."""
    words = PromptTokenizer(tokenizer())
    sizes = {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 64,
    }
    shape = ModelConfig(
        family="qwen2", hidden_size=32, num_hidden_layers=1, vocab_size=words.vocab_size, **sizes
    )
    params = decoder.init(shape, jax.random.key(0), 0.02)
    hf.save(
        params,
        folder,
        dtype="float32",
        eos_ids=words.eos_ids,
        bos_id=words.bos_id,
        pad_id=words.pad_id,
    )
    words.save(folder)


def make_project(folder: Path, line: str = "pass") -> Path:
    """A folder with a config, a model and data, all named relative to it."""
    rows: dict[str, list[dict[str, Any]]] = {
        "train": [{"problem": f"{i}+1=?", "answer": str(i + 1)} for i in range(4)],
        "test": [{"problem": f"{i}+2=?", "answer": str(i + 2)} for i in range(4)],
        "more": [{"problem": f"{i}+4=?", "answer": str(i + 4)} for i in range(4)],
        "sft": [{"prompt": f"{i}+3=?", "completion": str(i + 3)} for i in range(8)],
    }
    (folder / "data").mkdir(parents=True)
    for name, lines in rows.items():
        (folder / "data" / f"{name}.jsonl").write_text(
            "".join(f"{json.dumps(row)}\n" for row in lines)
        )
    (folder / "mine.py").write_text(CONFIG.replace("{line}", line))
    return folder


def assert_there(values: Any) -> None:
    """Raise Invalid where files that settings name are not there."""
    if gone := list(places.issues(values)):
        raise Invalid(gone)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project, seen from another folder."""
    made = make_project(tmp_path.resolve() / "project")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return made


def test_what_a_file_names_is_relative_to_it_and_what_the_command_line_names_to_the_working_directory(
    project: Path,
) -> None:
    (project / "models" / "tiny").mkdir(parents=True)
    (project / "mine.py").write_text(
        CONFIG.replace(
            "{line}",
            """
    config.tokenizer.path = "../tokenizer"
    config.reward.model.path = "~/rewards/model"
    config.reward.folder = "rewards"
    config.engine.folder = "./engine"
    config.tasks.other = settings.task(
        settings.source("math500:data/x.jsonl"), settings.source("gsm8k"), settings.source("hub:./rows@main:test")
    )
    config.stages.collect = settings.collect(policy="hf:./other", dump={"path": "dumps/*/step*.jsonl"})
    config.stages.dpo = settings.offline(policy="run:runs/a#warmup@3", preferences="pairs")
    config.stages.all = settings.offline(policy="sft", preferences="collect")
    """,
        )
    )
    config = resolve(
        str(project / "mine.py"),
        ["tasks.other.train.path=mine.parquet", "stages.all.policy=hf:~/m"],
    )
    here, home = Path.cwd(), Path.home()
    # "models/tiny" is a folder: no hub id
    assert config.model.path == str(project / "models" / "tiny")
    assert config.data.train.path == str(project / "data" / "train.jsonl")
    assert config.data.dev.path == "" and config.tokenizer.path == str(project.parent / "tokenizer")
    assert config.reward.model.path == str(home / "rewards" / "model")
    assert (config.reward.folder, config.engine.folder) == (
        str(project / "rewards"),
        str(project / "engine"),
    )
    other = config.tasks.other
    assert other.train.path == str(here / "mine.parquet")  # of the command line
    assert (other.dev.path, other.test.path) == ("gsm8k", f"hub:{project}/rows@main:test")
    assert config.stages.collect.policy == f"hf:{project}/other"
    assert config.stages.collect.dump.path == f"{project}/dumps/*/step*.jsonl"
    assert config.stages.dpo.policy == f"run:{project}/runs/a#warmup@3"
    assert config.stages.dpo.preferences == str(project / "pairs")
    assert (config.stages["all"].preferences, config.stages["all"].policy) == (
        "collect",
        f"hf:{home}/m",
    )
    assert tuple(config.stages.evaluate.policies) == ("init", "sft")
    again = resolve(str(project / "mine.py"), ["tasks.other.train.path=math500:mine.json"])
    assert again.tasks.other.train.path == f"math500:{here}/mine.json"


@pytest.mark.parametrize("name", ["demo", "qwen2.5-0.5b", "bridging-chat", "sweep-k"])
def test_shipped_configs_name_no_local_path(name: str) -> None:
    config = resolve(name)
    assert not [
        named.path
        for named in places.walk(config)
        for text in named.texts
        if "/" in text and is_local(text)
    ]
    assert resolve("qwen2.5-0.5b:path=./mine").model.path == str(Path.cwd() / "mine")


def is_local(text: str) -> bool:
    return os.path.isabs(text.rpartition(":")[2])


def test_a_link_to_a_config_file_names_what_lies_beside_the_link(
    project: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "linked"
    folder.mkdir()
    (folder / "link.py").symlink_to(project / "mine.py")
    assert resolve(str(folder / "link.py")).data.train.path == f"{folder}/data/train.jsonl"
    (tmp_path / "whole").symlink_to(project)  # a link to the folder has what is in it
    assert (
        resolve(str(tmp_path / "whole" / "mine.py")).data.train.path
        == f"{project}/data/train.jsonl"
    )


def test_a_folder_of_a_hub_id_s_form_is_that_folder_where_it_exists(project: Path) -> None:
    here = places.here()
    assert places.decided("owner/name", "model", here) == "owner/name"
    (Path.cwd() / "owner" / "name").mkdir(parents=True)
    assert places.decided("owner/name", "model", here) == str(here.folder / "owner" / "name")
    assert places.decided("hf:owner/name", "policy", here) == f"hf:{here.folder}/owner/name"
    assert (
        places.decided("hub:owner/name:test", "problems", here)
        == f"hub:{here.folder}/owner/name:test"
    )
    base = places.Base(project, "the folder of mine.py")
    assert places.decided("owner/name", "model", base) == "owner/name"


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text() | st.sampled_from(TEXTS))
@examples(60)
def test_what_is_decided_stays_so_wherever_it_is_read(kind: str, text: str) -> None:
    try:
        once = places.decided(text, kind, places.Base(Path("/nowhere/at/all"), "nowhere"))
    except ValueError as error:
        assert "write the path without ~" in str(error)
        return
    assert places.decided(once, kind, places.Base(Path("/other"), "another")) == once


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "data.train.path=r.jsonl",
            "data.train.path cannot be used: there is no {here}/r.jsonl (given as 'r.jsonl', relative",
        ),
        (
            "data.train.path=math500:x/y.json",
            "there is no {here}/x/y.json (given as 'x/y.json', relative to the working",
        ),
        (
            "data.test.path=hub:./rows:test",
            "data.test.path cannot be used: there is no {here}/rows (given as './rows'",
        ),
        (
            "model.path=./gone",
            "model.path cannot be used: there is no {here}/gone (given as './gone', relative to the working "
            "directory",
        ),
        ("model.path=/gone/a", "model.path cannot be used: there is no /gone/a"),
        ("tokenizer.path=a/b/c", "tokenizer.path cannot be used: there is no {here}/a/b/c"),
        ("stages.sft.policy=hf:./gone", "there is no {here}/gone"),
        (
            "stages.sft.data.path=gone.parquet",
            "stages.sft.data.path cannot be used: there is no {here}/gone.parquet",
        ),
        (
            "stages.sft.policy=run:./gone#dpo",
            "{here}/gone (given as './gone', relative to the working directory",
        ),
    ],
)
def test_a_path_that_is_not_there_is_an_error_that_names_it_whole_and_asks_nobody(
    setting: str,
    message: str,
    project: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket.socket, "connect", connected)
    (project / "models" / "tiny").mkdir(parents=True)
    for more in (["--dry-run"], ["--workdir=runs/a"]):
        assert (
            cli.main(["run", "--config", str(project / "mine.py"), f"--config.{setting}", *more])
            == 1
        )
        said = capsys.readouterr().err
        assert message.format(here=Path.cwd()) in said and len(said.splitlines()) == 1
    assert not (Path.cwd() / "runs").exists()


def connected(*_: object) -> None:
    raise AssertionError("somebody was asked")


def test_all_that_is_missing_is_told_at_once(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(project / "data")
    (project / "models" / "tiny").mkdir(parents=True)
    assert cli.main(["run", "--config", str(project / "mine.py"), "--dry-run"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "g2d: the settings have 3 errors:" and len(lines) == 4
    base = f"relative to the folder of mine.py, {project})"
    assert lines[1] == (
        f"  data.train.path cannot be used: there is no {project}/data/train.jsonl (given as "
        f"'data/train.jsonl', {base}"
    )


def test_a_config_from_python_is_relative_to_the_working_directory(project: Path) -> None:
    config = settings.base()
    config.data.train.path = "rows.jsonl"
    config.tokenizer.path = "procedural:slips"
    config.stages.sft = settings.sft(steps=100, data=settings.source("procedural:slips"))
    with pytest.raises(
        ValueError,
        match=rf"data\.train\.path cannot be used: there is no {Path.cwd()}/rows\.jsonl \(given as",
    ):
        pipeline.run(config, "runs/a")
    assert config.data.train.path == "rows.jsonl"  # the caller's own is left alone


@pytest.mark.parametrize(
    "setting",
    [
        "data.train.path=a.jsonl",
        "model.path=./m",
        "reward.folder=here",
        "stages.sft.data.path=a/b/c.jsonl",
    ],
)
def test_a_relative_path_in_a_config_of_frozen_settings_is_refused(
    setting: str, tmp_path: Path
) -> None:
    config = settings.base()
    config.stages.sft = settings.sft(steps=100, data=settings.source("procedural:slips"))
    path, _, text = setting.partition("=")
    *parents, key = path.split(".")
    section = config
    for name in parents:
        section = section[name]
    section[key] = text
    with pytest.raises(
        ValueError,
        match=rf"{path} cannot be used: {text} is relative, but a Config needs absolute paths",
    ):
        assert_there(to_dict(Config.of(config)))


def test_arms_of_a_file_are_relative_to_it_and_those_of_the_command_line_to_the_working_directory(
    project: Path,
) -> None:
    arms = '"main": settings.arm(product=("data.train.path=data/train.jsonl,/a/b.jsonl",))'
    (project / "mine.py").write_text(
        CONFIG.replace("{line}", f"config.sweep = settings.sweep(arms={{{arms}}})")
    )
    studied = points(resolve(str(project / "mine.py")))
    assert [point.config.data.train.path for point in studied] == [
        f"{project}/data/train.jsonl",
        "/a/b.jsonl",
    ]
    assert str(project) not in studied[0].label
    (project / "mine.py").write_text(
        CONFIG.replace("{line}", "config.sweep = settings.sweep(seeds=(1,))")
    )
    typed = with_axes(
        resolve(str(project / "mine.py")), ["data.train.path='a, b.jsonl',c.jsonl"], [], []
    )
    here = Path.cwd()
    assert [point.config.data.train.path for point in points(typed)] == [
        f"{here}/a, b.jsonl",
        f"{here}/c.jsonl",
    ]


def test_what_others_read_has_names_and_no_folders() -> None:
    values = {
        "model": {"path": "/home/me/models/tiny"},
        "data": {
            "train": {"path": "math500:/home/me/a.jsonl"},
            "test": {"path": "hub:openai/gsm8k"},
        },
        "stages": {
            "dpo": {
                "kind": "offline",
                "policy": "run:/home/me/runs/a#warmup@3",
                "preferences": "/home/me/pairs",
            },
            "evaluate": {
                "kind": "evaluate",
                "policies": ["dpo", "hf:/home/me/other", "hf:Qwen/Qwen3-8B"],
            },
        },
    }
    shown = places.without_folders(from_dict(values))
    assert "/home" not in json.dumps(to_dict(shown))
    assert (shown.model.path, shown.data.train.path, shown.data.test.path) == (
        "tiny",
        "math500:a.jsonl",
        "hub:openai/gsm8k",
    )
    assert shown.stages.dpo.policy == "run:a#warmup@3" and shown.stages.dpo.preferences == "pairs"
    assert tuple(shown.stages.evaluate.policies) == ("dpo", "hf:other", "hf:Qwen/Qwen3-8B")


def test_the_base_of_a_stage_is_the_one_that_the_settings_name_now(tmp_path: Path) -> None:
    stage = tmp_path / "01-sft"
    stage.mkdir()
    (stage / init_params.BASE).write_text(json.dumps([f"hf:{stage}", ""]))
    config = Config.of(from_dict({"stages": {"sft": {"kind": "sft", "policy": f"hf:{tmp_path}"}}}))
    assert init_params.base_of(config, "sft", {"sft": stage}, {}).policy == f"hf:{tmp_path}"


@pytest.mark.slow
def test_a_work_directory_is_used_from_anywhere_and_goes_on_in_another_place(
    project: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_model(project / "models" / "tiny")

    def g2d(*arguments: object, status: int = 0) -> str:
        assert cli.main([str(argument) for argument in arguments]) == status
        return "".join(capsys.readouterr())

    monkeypatch.chdir(tmp_path)
    g2d("run", "--config", "project/mine.py", "--workdir", "project/runs/a")
    kept = json.loads((project / "runs" / "a" / "config.json").read_text())
    assert kept["config"]["model"]["path"] == f"{project}/models/tiny"
    use(g2d, project / "runs" / "a", tmp_path / "first", "project/runs/a")
    monkeypatch.chdir("/")
    use(g2d, project / "runs" / "a", tmp_path / "second", project / "runs" / "a")

    moved = Path(shutil.move(project, tmp_path / "moved"))
    work = moved / "runs" / "a"
    said = g2d("export", work, "--output", tmp_path / "third", status=1)
    assert said.startswith(f"g2d: model.path cannot be used: there is no {project}/models/tiny")
    assert f"{work}/config.json names these paths" in said and said.count("cannot be used") == 1
    shutil.rmtree(work / "02-evaluate")
    said = g2d("run", "--config", moved / "mine.py", "--workdir", work)
    assert "sft: done before, skipped" in said and "evaluate: done before" not in said
    use(g2d, work, tmp_path / "third", work)

    shutil.rmtree(moved / "models")
    (moved / "data" / "test.jsonl").unlink()
    monkeypatch.setattr(socket.socket, "connect", connected)
    said = g2d("sample", work, status=1)
    assert (
        f"model.path cannot be used: there is no {moved}/models/tiny" in said
        and f"there is no {moved}/data/test.jsonl" in said
    )
    said = g2d("export", work, "--output", tmp_path / "fourth", status=1)
    assert said.startswith(f"g2d: model.path cannot be used: there is no {moved}/models/tiny")
    assert "report.html" in g2d("report", work) and "done" in g2d("status", work)


def use(g2d: Callable[..., str], work: Path, output: Path, named: object) -> str:
    """Export, sample, evaluate and report; return what was said."""
    said = g2d("export", named, "--output", output)
    assert hf.read_config(output).hidden_size == 32
    said += g2d("sample", named, "--count", 1) + g2d("report", named)
    problems = work.parents[1] / "data" / "more.jsonl"
    said += g2d("evaluate", named, "--policy", "sft", "--problems", os.path.relpath(problems))
    assert "completions: " in said and "without colours" not in (work / "report.html").read_text()
    commands.read_config(work)
    return said
