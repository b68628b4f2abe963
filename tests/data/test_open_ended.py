"""The files of AlpacaEval and Arena-Hard: what those tools write and read, and files that are
neither."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from g2d_jax.data.open_ended import (
    Question,
    alpaca_json,
    arena_jsonl,
    markdown_counts,
    read_questions,
)

ALPACA = [
    {
        "dataset": "helpful_base",
        "datasplit": "eval",
        "instruction": "Say hi.",
        "output": "Hi",
        "generator": "davinci",
    },
    {
        "dataset": "koala",
        "datasplit": "eval",
        "instruction": "Say {x}.",
        "output": "x",
        "generator": "davinci",
    },
]
ARENA = [
    {"uid": "u1", "category": "hard_prompt", "subcategory": "coding", "prompt": "Say hi."},
    {
        "question_id": "u2",
        "category": "arena-hard-v0.1",
        "cluster": "c",
        "turns": [{"content": "Say {x}."}],
    },
]


def written(folder: Path, name: str, rows: list[Any]) -> str:
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / name).write_text(lines if name.endswith("l") else json.dumps(rows))
    return str(folder / name)


def test_the_tools_prompts(tmp_path: Path) -> None:
    assert read_questions(written(tmp_path, "alpaca_eval.json", ALPACA), "alpaca_eval") == [
        Question("Say hi.", dataset="helpful_base"),
        Question("Say {x}.", dataset="koala"),
    ]
    found = read_questions(written(tmp_path, "question.jsonl", ARENA), "arena_hard")
    assert found == [Question("Say hi.", "u1"), Question("Say {x}.", "u2")]


def test_alpaca_answers_are_what_the_tool_reads(tmp_path: Path) -> None:
    questions = [Question("Say hi.", dataset="koala"), Question("Say hi.")]
    (tmp_path / "a.json").write_bytes(alpaca_json("mine", questions, ["Hi", "Höi"]))
    assert json.loads((tmp_path / "a.json").read_text()) == [
        {"dataset": "koala", "instruction": "Say hi.", "output": "Hi", "generator": "mine"},
        {"dataset": "", "instruction": "Say hi.", "output": "Höi", "generator": "mine"},
    ]


def test_arena_answers_are_what_the_tool_reads(tmp_path: Path) -> None:
    text = "# Hi\n\n1. **a**\n2. b\n* c\n```\n# code\n- d\n```"
    (tmp_path / "m.jsonl").write_bytes(arena_jsonl("m", [Question("Say hi.", "u1")], [text], [12]))
    (row,) = map(json.loads, (tmp_path / "m.jsonl").read_text().splitlines())
    assert list(row) == ["uid", "ans_id", "model", "messages", "tstamp", "metadata"]
    assert (row["uid"], row["model"]) == ("u1", "m") and isinstance(row["tstamp"], float)
    assert (
        row["messages"][-1]["content"]["answer"] == text
        and row["messages"][0]["content"] == "Say hi."
    )
    # show_result.py takes the values by position: tokens, headers, list items, bold passages
    assert [v if isinstance(v, int) else sum(v.values()) for v in row["metadata"].values()] == [
        12,
        1,
        3,
        1,
    ]
    assert list(row["metadata"]) == ["token_len", "header_count", "list_count", "bold_count"]


@given(st.text(alphabet="\n\r\t 1.-*+#_`\x0b\x85a", max_size=60))
def test_markdown_is_counted_as_the_tool_counts_it(text: str) -> None:
    prose = text
    for block in re.findall(r"```([^`]*)```", text):
        prose = prose.replace(block, "")
    found = markdown_counts(text)
    assert found["header_count"] == {
        f"h{n}": len(re.findall(r"^#{" + str(n) + r"}\s", prose, re.MULTILINE)) for n in range(1, 7)
    }
    assert found["list_count"] == {
        "ordered": len(re.findall(r"^\s*\d+\.\s", prose, re.MULTILINE)),
        "unordered": len(re.findall(r"^\s*[-*+]\s", prose, re.MULTILINE)),
    }
    assert found["bold_count"] == {
        "**": len(re.findall(r"\*\*[^*\n]+\*\*", prose)),
        "__": len(re.findall(r"__[^_\n]+__", prose)),
    }


def test_counting_is_quick_on_text_made_to_be_slow() -> None:
    assert markdown_counts("\n" * 200_000)["list_count"] == {"ordered": 0, "unordered": 0}


@pytest.mark.parametrize(
    ("form", "rows", "message"),
    [
        ("alpaca_eval", [], "holds no prompt"),
        ("alpaca_eval", [{"prompt": "a"}], "row 1: no field 'instruction'; the row has 'prompt'"),
        ("alpaca_eval", [ALPACA[0], {"instruction": " "}], "row 2: 'instruction' is blank"),
        ("alpaca_eval", [{"instruction": "a", "input": "b"}], "write it into 'instruction'"),
        ("alpaca_eval", [{"instruction": "a", "dataset": 3}], "'dataset' must be a text"),
        ("arena_hard", [{"prompt": "a"}], "line 1: no field 'uid' or 'question_id'"),
        ("arena_hard", [ARENA[0], ARENA[0]], "uid 'u1' stands there twice"),
        (
            "arena_hard",
            [{"uid": "u", "turns": [{"content": "a"}, {"content": "b"}]}],
            "must be a list of one turn",
        ),
        ("arena_hard", [{"uid": "u", "turns": [3]}], "must be a list of one turn"),
        ("arena_hard", [{"uid": 3, "prompt": "a"}], "'uid' must be a text"),
    ],
)
def test_prompts_that_cannot_be_read(
    tmp_path: Path, form: Any, rows: list[Any], message: str
) -> None:
    path = written(tmp_path, "q.json" if form == "alpaca_eval" else "q.jsonl", rows)
    with pytest.raises(ValueError, match=message):
        read_questions(path, form)
