"""A policy's answers in the tools' own files: from a prompts file through the sampler, resumable,
on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from g2d_jax import cli, outputs
from g2d_jax.config import io as config_io
from g2d_jax.config_load import resolve
from g2d_jax.runtime import storage

TINY = str(Path(__file__).parent / "tiny.py")


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of which nothing is done: its random parameters are a policy, too."""
    monkeypatch.chdir(tmp_path)
    storage.write_json("work/config.json", {"config": config_io.to_dict(resolve(TINY, []))})
    (tmp_path / "p.json").write_text(
        json.dumps([{"instruction": f"{i}+2=?", "dataset": "d"} for i in (1, 2, 1)])
    )
    (tmp_path / "q.jsonl").write_text(
        "".join(f'{{"uid": "u{i}", "prompt": "{i}+2=?"}}\n' for i in (1, 2))
    )
    return tmp_path


def command(form: str, prompts: str, output: str, *more: str) -> list[str]:
    settings = ["--policy", "init", "--max-new-tokens", "6", *more]
    return [
        "outputs",
        "work",
        "--format",
        form,
        "--prompts",
        prompts,
        "--output",
        output,
        *settings,
    ]


def test_answers_in_both_formats(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(outputs, "PART", 2)
    assert cli.main(command("alpaca_eval", "p.json", "mine.json")) == 0
    out = capsys.readouterr().out
    assert (
        "3 answers of init" in out and "under the name mine" in out and out.endswith("mine.json\n")
    )
    rows = json.loads(Path("mine.json").read_text())
    assert [(row["dataset"], row["instruction"], row["generator"]) for row in rows] == [
        ("d", f"{i}+2=?", "mine") for i in (1, 2, 1)
    ]
    assert rows[0]["output"] != rows[2]["output"]  # the same prompt twice is drawn twice

    parts = sorted(work.glob("work/outputs/*/part-*.parquet"))
    assert len(parts) == 2
    kept = parts[0].stat().st_mtime_ns
    parts[1].unlink()  # as after a kill
    assert cli.main(command("alpaca_eval", "p.json", "again.json")) == 0
    assert parts[0].stat().st_mtime_ns == kept
    assert [row["output"] for row in json.loads(Path("again.json").read_text())] == [
        row["output"] for row in rows
    ]

    assert cli.main(command("arena_hard", "q.jsonl", "init.jsonl")) == 0
    answers = [json.loads(line) for line in Path("init.jsonl").read_text().splitlines()]
    assert [(answer["uid"], answer["model"]) for answer in answers] == [
        ("u1", "init"),
        ("u2", "init"),
    ]
    # other prompts beside a prompt do not change its answer
    assert [a["messages"][1]["content"]["answer"] for a in answers] == [
        row["output"] for row in rows[:2]
    ]
    assert all(0 < answer["metadata"]["token_len"] <= 6 for answer in answers)


def test_greedy_answers_to_one_prompt_are_one(work: Path) -> None:
    assert (
        cli.main(
            command("alpaca_eval", "p.json", "g.json", "--temperature", "0", "--name", "greedy one")
        )
        == 0
    )
    rows = json.loads(Path("g.json").read_text())
    assert rows[0] == rows[2] and rows[0]["generator"] == "greedy one"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (command("alpaca_eval", "p.json", "p.json"), "p.json is there already"),
        (command("alpaca_eval", "p.json", "a.jsonl"), "a file of alpaca_eval ends in .json"),
        (command("arena_hard", "q.jsonl", "a.jsonl", "--name", "b"), "call it b.jsonl"),
        (command("alpaca_eval", "q.jsonl", "a.json"), "line 1: no field 'instruction'"),
        (command("alpaca_eval", "none.json", "a.json"), "none.json cannot be read"),
        (command("alpaca_eval", "p.json", "a.json", "--policy", "warmup@3"), "no checkpoint"),
        (command("alpaca_eval", "p.json", "a.json", "--top-p", "0"), "top_p must be in"),
    ],
)
def test_mistakes(
    work: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert cli.main(arguments) == 1
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert not any(work.glob("work/outputs/*/*"))


def test_a_prompt_that_the_tokenizer_does_not_know_is_named(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("p.json").write_text(json.dumps([{"instruction": "1+1=?"}, {"instruction": "ж"}]))
    assert cli.main(command("alpaca_eval", "p.json", "a.json")) == 1
    assert "p.json, prompt 2: " in capsys.readouterr().err
