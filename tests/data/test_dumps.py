"""Rollouts from other tools: literal rows, their order, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from g2d_jax.config.places import data_files
from g2d_jax.data.dumps import DumpRow, read_dump
from g2d_jax.records import Rollout, Score, ScoredRollout, Verdict
from g2d_jax.runtime.tables import write_rollouts

MESSAGES = [{"role": "user", "content": "1+1=?"}]
TRL = {
    "step": 5,
    "prompt": MESSAGES,
    "completion": [{"role": "assistant", "content": "2"}],
    "advantage": 0.7,
}


def lines(path: Path, *rows: Any) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def values(row: DumpRow) -> dict[str, Any]:
    """What a row has, arrays as lists."""
    fields = {name: getattr(row, name) for name in DumpRow.__slots__ if name != "where"}
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in fields.items()
        if name == "reward" or (value is not None and value is not False)
    }


def test_rows_of_any_program(tmp_path):
    exact = {
        "prompt_ids": [7, 8],
        "completion_ids": [4, 2],
        "logprobs": [-0.5, -0.25],
        "finish_reason": "length",
    }
    text = {"prompt": "1+1=?", "completion": "2", "answer": 2, "step": 9}
    path = lines(
        tmp_path / "mine.jsonl", exact, {**text, "reward": None}, text, {**exact, "quality": 0.5}
    )
    rows = list(read_dump(path))
    assert values(rows[0]) == {**exact, "reward": None} and rows[0].where == f"{path}, line 1"
    assert rows[0].completion_ids is not None and rows[0].completion_ids.dtype == np.int32
    assert values(rows[1]) == {**text, "answer": "2", "reward": None, "has_reward": True}
    assert values(rows[2]) == {**text, "answer": "2", "reward": None}
    assert rows[0].prompt_key == rows[3].prompt_key != rows[1].prompt_key == rows[2].prompt_key
    with pytest.raises(ValueError, match="line 1: it has no column 'quality'; it has 'prompt_ids'"):
        list(read_dump(path, {"reward": "quality"}))
    named = lines(tmp_path / "mine_step12.jsonl", exact, text)
    # its own before that of the file's name
    assert [row.step for row in read_dump(named)] == [
        12,
        9,
    ]


def test_columns_of_other_names(tmp_path):
    row = {"input": "user: 1+1=?", "output": "2", "score": 1.0, "gold": "2", "at": 3, "prompt": ""}
    columns = {
        "rendered_prompt": "input",
        "completion": "output",
        "reward": "score",
        "answer": "gold",
        "step": "at",
    }
    path = lines(tmp_path / "mine.jsonl", {**row, "prompt": None})
    (read,) = read_dump(path, columns)
    assert values(read) == {
        "rendered_prompt": row["input"],
        "completion": "2",
        "reward": 1.0,
        "has_reward": True,
        "answer": "2",
        "step": 3,
    }
    with pytest.raises(
        ValueError, match="columns has 'text': a rollout's fields are prompt, rendered_p"
    ):
        list(read_dump(path, {"text": "output"}))


@pytest.mark.parametrize(
    "row",
    [
        {"input": "user\n1+1=?", "output": "2", "gts": "2", "score": 1.0, "step": 3},
        {"content": [["a", "b"]], "rewards": [0.0], "input_lengths": [5], "token_ids": [[7, 8]]},
    ],
)
def test_files_of_verl_and_nemo_rl_name_their_converter(tmp_path, row):
    path = lines(tmp_path / "1.jsonl", row)
    with pytest.raises(ValueError, match=r"1\.jsonl, line 1: .*examples/convert_rollouts\.py"):
        list(read_dump(path))


def test_our_own_rollouts(tmp_path):
    ids, unknown = np.array([4, 2], np.int32), np.full(2, np.nan, np.float32)
    rollout = Rollout("ab" * 8, 0, 0, np.array([7], np.int32), ids, unknown, unknown, "stop")
    score = Score(None, Verdict.UNSCORABLE, "the response's answer")
    write_rollouts(tmp_path / "step-000012.parquet", [ScoredRollout(rollout, "It is 2", score)])
    (row,) = read_dump(str(tmp_path))
    ours = {
        "prompt_ids": [7],
        "completion_ids": [4, 2],
        "completion": "It is 2",
        "finish_reason": "stop",
    }
    assert values(row) == {**ours, "step": 12, "reward": None, "has_reward": True}


def test_tables_of_trl(tmp_path):
    """As its trainer writes them: of a data frame, NaN where a function gave no reward."""
    frame = pd.DataFrame([{**TRL, "accuracy": 1.0}, {**TRL, "accuracy": float("nan")}])
    frame.to_parquet(tmp_path / "completions_00005.parquet")
    rows = list(read_dump(str(tmp_path / "completions_*.parquet")))
    read = {"step": 5, "prompt": tuple(MESSAGES), "completion": "2", "has_reward": True}
    assert [values(row) for row in rows] == [{**read, "reward": 1.0}, {**read, "reward": None}]
    noted = {"note": "a text", "answer": "of the response, logged by a reward function"}
    two = lines(tmp_path / "two.jsonl", {**TRL, "accuracy": 1.0, "format": 0.5, **noted})
    with pytest.raises(
        ValueError,
        match=r"line 1: a completions table .* this has 'accuracy', 'format': name the right one",
    ):
        list(read_dump(two))
    (row,) = read_dump(two, {"reward": "format"})
    assert (row.reward, row.answer) == (0.5, None)


def test_files_are_read_in_the_order_of_their_numbers(tmp_path):
    for step in (10, 9):
        row = {"prompt": "1+1=?", "completion": "", "step": step}
        lines(tmp_path / "dump" / f"{step}.jsonl", row)
    (tmp_path / "dump" / "_cost.json").write_text("{}")
    folder = str(tmp_path / "dump")
    named = [str(tmp_path / "d*/10.jsonl"), str(tmp_path / "dump/9.jsonl")]
    assert [row.step for row in read_dump(folder)] == [9, 10]
    assert [row.step for row in read_dump(named)] == [10, 9]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"question": "1+1=?", "response": "2"},
            "a rollout needs prompt, rendered_prompt .* This row has 'question', 'response'",
        ),
        (
            {"prompt": "1", "completion_ids": [1.5]},
            "'completion_ids' must be a list of token ids",
        ),
        (
            {"prompt": "1", "completion_ids": [True]},
            "'completion_ids' must be a list of token ids",
        ),
        (
            {"prompt": "1", "completion_ids": [[1], [1, 2]]},
            "'completion_ids' must be a list of token ids",
        ),
        (
            {"prompt": "1", "completion_ids": [2**70]},
            "'completion_ids' must be a list of token ids",
        ),
        (
            {"prompt": "1", "completion_ids": []},
            "'completion_ids' must be a list of token ids, .* at least one",
        ),
        ({"prompt": "1", "completion_ids": [-1]}, "'completion_ids' has numbers that are not tok"),
        (
            {"prompt": "1", "completion_ids": [1, 2], "logprobs": [-1]},
            "1 logprobs for 2 completion_ids",
        ),
        (
            {"prompt": "1", "completion": "1", "logprobs": [-1]},
            "1 logprobs for 0 completion_ids",
        ),
        (
            {"prompt": "1", "completion_ids": [1, 2], "logprobs": [-1, float("nan")]},
            "'logprobs' must be from -104 to 0",
        ),
        (
            {"prompt": "1", "completion_ids": [1, 2], "logprobs": [-1, 0.5]},
            "'logprobs' must be from -104 to 0: are they negated",
        ),
        (
            {"prompt": "1", "completion_ids": [1, 2], "logprobs": [-1, -1e30]},
            "'logprobs' must be from -104 to 0",
        ),
        (
            {"prompt": "1", "completion": "1", "finish_reason": "abort"},
            "'finish_reason' must be 'stop', 'length' or",
        ),
        ({"prompt": "1", "completion": "1", "step": "3"}, "'step' must be a whole number"),
        (
            {"prompt": "1", "completion": "1", "reward": float("inf")},
            "its reward inf is not finite",
        ),
        ({"prompt": None, "completion": "1"}, "a rollout needs prompt"),
        ({"prompt": "1", "completion": None}, "completion or completion_ids"),
        (
            {**TRL, "right": 1.0, "completion": 2 * MESSAGES},
            "'completion' must be one assistant message",
        ),
        ({"prompt": "1", "completion": "1", "reward": "good"}, "its reward 'good' is not a number"),
    ],
)
def test_broken_rows_are_named_by_file_and_line(tmp_path, row, message):
    path = lines(tmp_path / "mine.jsonl", {"prompt": "1+1=?", "completion": "2"}, row)
    with pytest.raises(ValueError, match=rf"mine\.jsonl, line 2: .*{message}"):
        list(read_dump(path))


def test_a_folder_of_json_is_read_and_json_beside_other_files_is_not(tmp_path):
    rows = [{"prompt": "a", "completion": "b", "reward": 1}]
    for number in (10, 2):
        (tmp_path / f"{number}.json").write_text(json.dumps(rows * number))
    assert len(list(read_dump(str(tmp_path)))) == 12
    assert [Path(file).name for file in data_files(str(tmp_path))] == ["2.json", "10.json"]
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0]) + "\n")
    assert len(list(read_dump(str(tmp_path)))) == 1


def test_what_is_no_dump(tmp_path):
    for path in (tmp_path, tmp_path / "none.jsonl", tmp_path / "*.jsonl"):
        with pytest.raises(ValueError, match=r"is not a file, a folder with .* files, or a glob"):
            list(read_dump(str(path)))
