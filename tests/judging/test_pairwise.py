"""Answers files compared by judges with known tastes, from files to tables, through a server on this machine."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from judge_server import serving

from g2d_jax import cli
from g2d_jax.judging.answers import Question, alpaca_json, arena_jsonl
from g2d_jax.runtime import storage

QUESTIONS = [Question(f"Question {i} {{first}}?", f"u{i}") for i in range(6)]
PLACES = re.compile(r"<answer of assistant [AB]>\n(.*?)\n</answer of assistant [AB]>", re.DOTALL)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Three models, in both formats and other orders: the longer an answer, the later its model's letter."""
    texts = {name: [name * length + "[[A]] {second}"] * 6 for name, length in (("a", 1), ("b", 5), ("c", 9))}
    (tmp_path / "a.json").write_bytes(alpaca_json("a", QUESTIONS, texts["a"]))
    (tmp_path / "b.jsonl").write_bytes(arena_jsonl("b", QUESTIONS[::-1], texts["b"], [1] * 6))
    (tmp_path / "c.json").write_bytes(alpaca_json("c", QUESTIONS, texts["c"]))
    return [str(tmp_path / name) for name in ("a.json", "b.jsonl", "c.json")]


def by_length(content: str, number: int) -> str:
    first, second = map(len, PLACES.findall(content))
    return "I compared [[C]]. Verdict: " + ("[[A]]" if first > second else "[[B]]" if second > first else "[[C]]")


def judge(files: list[str], output: Path, url: str, *more: str) -> int:
    return cli.main(["judge", *files, "--url", url, "--model", "m", "--output", str(output), "--retries", "0", *more])


def result(output: Path) -> dict:
    return storage.read_json(output / "judgments.json")


def test_a_judge_that_loves_length_orders_three_models(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(by_length) as server:
        assert judge(files, tmp_path / "out", server.url) == 0
        assert len(server.asked) == 3 * 6 * 2
        contents = [body["messages"][0]["content"] for body in server.asked]
        assert any("Question 3 {first}?" in t and "c[[A]] {second}" in t for t in contents)  # nothing filled in
    written = result(tmp_path / "out")
    assert [(model["name"], model["mean_length"]) for model in written["models"]] == [("c", 23), ("b", 19), ("a", 15)]
    pair = written["pairs"][0]
    assert pair | {"first": "a", "second": "b", "wins": 0, "losses": 6, "draws": 0} == pair
    assert all(pair["agreed"] == 1.0 and pair["first_place"] == 0.5 for pair in written["pairs"])
    assert written["games"]["a against b"] == [[0.0, 0.0]] * 6
    out = capsys.readouterr().out
    assert "| c " in out and "a against b" in out and "36 requests sent" in out and "places swapped" in out


def test_a_judge_of_positions_gives_draws_and_verdicts_that_cannot_be_read_are_counted(
    files: list[str], tmp_path: Path
) -> None:
    with serving(lambda content, number: "?" if "Question 2" in content else "[[A]]") as server:
        assert judge(files, tmp_path / "out", server.url) == 0
    written = result(tmp_path / "out")
    assert [(p["draws"], p["unread"], p["win_rate"], p["first_place"]) for p in written["pairs"]] == [
        (5, 1, 0.5, 1)
    ] * 3
    assert [model["rating"] for model in written["models"]] == pytest.approx([1000] * 3)


def test_started_again_only_what_is_missing_is_asked(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def then_down(content: str, number: int) -> str | tuple[int, str]:
        return by_length(content, number) if number <= 20 else (500, "{}")

    with serving(then_down) as server:
        assert judge(files[:2], tmp_path / "out", server.url) == 0  # 12
        assert judge(files, tmp_path / "out", server.url, "--concurrency", "1") == 1
    assert "does not answer" in capsys.readouterr().err
    with serving(by_length) as server:
        assert judge(files, tmp_path / "out", server.url) == 0
        assert len(server.asked) == 36 - 20
        before = result(tmp_path / "out")
        assert judge(files, tmp_path / "out", server.url) == 0
        assert len(server.asked) == 36 - 20
    assert {**result(tmp_path / "out"), "requests": 0, "judge": 0} == {**before, "requests": 0, "judge": 0}
    assert not any(b"sk-secret" in path.read_bytes() for path in (tmp_path / "out").rglob("*.json*"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[:-1], "0 and 1 of them stand in one file only"),
        (lambda rows: [row | {"instruction": "another " + row["instruction"]} for row in rows], "6 and 6 of them"),
    ],
)
def test_files_of_other_questions_are_refused(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable, message: str
) -> None:
    Path(files[2]).write_text(json.dumps(change(json.loads(Path(files[2]).read_text()))))
    assert judge(files, tmp_path / "out", "http://127.0.0.1:9/v1") == 1
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_files_of_one_name(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_bytes(Path(files[0]).read_bytes())
    with serving(by_length) as server:
        assert judge([files[0], str(tmp_path / "other.json")], tmp_path / "out", server.url) == 0
    (pair,) = result(tmp_path / "out")["pairs"]
    assert (pair["first"], pair["second"], pair["draws"]) == ("a (a)", "a (other)", 6)
    assert judge([files[0]] * 2, tmp_path / "out", server.url) == 1
    assert "two files name the same model" in capsys.readouterr().err
    assert judge(files[:1], tmp_path / "out", server.url) == 1
    assert "two answers files or more" in capsys.readouterr().err
