"""The example that answers AlpacaEval's and Arena-Hard's prompts, by its command line on a tiny run."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from g2d_jax import commands
from g2d_jax.config import io as config_io
from g2d_jax.recipes.config_load import resolve
from g2d_jax.runtime import storage

TINY = str(Path(__file__).parent / "tiny.py")
EXAMPLE = runpy.run_path(
    str(Path(__file__).parents[1] / "examples" / "alpacaeval" / "answers.py"), run_name="answers"
)


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with prompts of both tools, and the random start of a run as an exported model."""
    monkeypatch.chdir(tmp_path)
    settings = {"config": config_io.to_dict(resolve(TINY, []))}
    storage.write_json("work/config.json", settings)
    commands.export("work", "model", policy="init")
    rows = [{"instruction": f"{i}+2=?", "dataset": "d"} for i in (1, 2, 1)]
    (tmp_path / "p.json").write_text(json.dumps(rows))
    first = {"uid": "u1", "prompt": "1+2=?"}
    second = {"question_id": "u2", "turns": [{"content": "2+2=?"}]}
    (tmp_path / "q.jsonl").write_text(f"{json.dumps(first)}\n{json.dumps(second)}\n")
    return tmp_path


def answer(form: str, prompts: str, output: str, *more: str) -> None:
    files = ["--format", form, "--prompts", prompts, "--output", output]
    EXAMPLE["main"](["model", "--max-new-tokens", "6", *files, *more])


def test_answers_in_both_formats(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer("alpaca_eval", "p.json", "mine.json")
    assert "3 answers, " in capsys.readouterr().out
    rows = json.loads(Path("mine.json").read_text())
    assert [(row["dataset"], row["instruction"], row["generator"]) for row in rows] == [
        ("d", f"{i}+2=?", "mine") for i in (1, 2, 1)
    ]
    assert rows[0]["output"] == rows[2]["output"] != rows[1]["output"]
    assert all(row["output"] for row in rows)

    answer(
        "arena_hard", "q.jsonl", "init.jsonl", "--work", "other", "--config.compute.max_num_seqs=8"
    )
    answers = [json.loads(line) for line in Path("init.jsonl").read_text().splitlines()]
    assert [(row["uid"], row["model"]) for row in answers] == [("u1", "init"), ("u2", "init")]
    texts = [row["messages"][1]["content"]["answer"] for row in answers]
    assert texts == [row["output"] for row in rows[:2]]
    assert all(0 < row["metadata"]["token_len"] <= 6 for row in answers)
    compute = json.loads(Path("other/run/config.json").read_text())["config"]["compute"]
    assert compute["max_num_seqs"] == 8


def test_mistakes_are_named(work: Path) -> None:
    def fails(message: str, *arguments: str) -> None:
        with pytest.raises(SystemExit, match=message):
            answer(*arguments)

    fails("must be a new file", "alpaca_eval", "p.json", "p.json")
    fails("with the ending .json", "alpaca_eval", "p.json", "a.jsonl")
    fails("q.jsonl is no prompts file of alpaca_eval", "alpaca_eval", "q.jsonl", "a.json")
    fails("p.json is no prompts file of arena_hard", "arena_hard", "p.json", "a.jsonl")
    fails("none.json", "alpaca_eval", "none.json", "a.json")
    fails("top_p", "alpaca_eval", "p.json", "a.json", "--top-p", "0")
    fails("2", "alpaca_eval", "p.json", "a.json", "--temprature", "0")
    assert not Path("a.json").exists()


def test_several_turns_and_inputs_are_refused(tmp_path: Path) -> None:
    turns = {"question_id": "u", "turns": [{"content": "a"}, {"content": "b"}]}
    (tmp_path / "q.jsonl").write_text(json.dumps(turns))
    with pytest.raises(ValueError, match="u has several turns"):
        EXAMPLE["read_questions"](tmp_path / "q.jsonl", "arena_hard")
    (tmp_path / "p.json").write_text(json.dumps([{"instruction": "a", "input": "b"}]))
    with pytest.raises(ValueError, match="put its text into 'instruction'"):
        EXAMPLE["read_questions"](tmp_path / "p.json", "alpaca_eval")


def test_arena_metadata_is_in_the_order_that_the_tool_takes() -> None:
    text = "# Hi\n\n1. **a**\n2. b\n* c\n```\n# code\n- d\n```"
    written = EXAMPLE["Answer"](text, 12, False)
    (line,) = EXAMPLE["arena_jsonl"]("m", [EXAMPLE["Question"]("Hi", "u")], [written]).splitlines()
    row = json.loads(line)
    assert list(row) == ["uid", "ans_id", "model", "messages", "tstamp", "metadata"]
    assert list(row["metadata"]) == ["token_len", "header_count", "list_count", "bold_count"]
    tokens, *counts = row["metadata"].values()
    assert [tokens, *(sum(kinds.values()) for kinds in counts)] == [12, 1, 3, 1]


def reference(text: str) -> dict[str, Any]:
    """Count as arena-hard-auto v2's utils/add_markdown_info.py does."""
    prose = text
    for block in re.findall(r"```([^`]*)```", text):
        prose = prose.replace(block, "")
    levels = {
        f"h{n}": len(re.findall(r"^#{" + str(n) + r"}\s", prose, re.MULTILINE)) for n in range(1, 7)
    }
    return {
        "header_count": levels,
        "list_count": {
            "ordered": len(re.findall(r"^\s*\d+\.\s", prose, re.MULTILINE)),
            "unordered": len(re.findall(r"^\s*[-*+]\s", prose, re.MULTILINE)),
        },
        "bold_count": {
            "**": len(re.findall(r"\*\*[^*\n]+\*\*", prose)),
            "__": len(re.findall(r"__[^_\n]+__", prose)),
        },
    }


@given(st.text(alphabet="\n\r\t 1.-*+#_`\x0b\x85a", max_size=60))
def test_markdown_is_counted_as_the_tool_counts_it(text: str) -> None:
    assert EXAMPLE["markdown_counts"](text) == reference(text)


def test_counting_is_quick_on_text_made_to_be_slow() -> None:
    assert EXAMPLE["markdown_counts"]("\n" * 200_000)["list_count"]["ordered"] == 0
