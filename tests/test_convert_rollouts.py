"""examples/convert_rollouts.py: literal rows of verl and NeMo-RL, and what the library's reader and
autopsy make of the converted files."""

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from g2d_jax import cli
from g2d_jax.data.dumps import DumpRow, read_dump

SCRIPT = Path(__file__).parents[1] / "examples" / "convert_rollouts.py"
VERL = {
    "input": "user\n1+1=?\nassistant\n",
    "output": "",
    "gts": "2",
    "score": -1.0,
    "step": 3,
    "uid": "0_1_2",
    "acc": 0.0,
}
NEMO_RL = {
    "content": [["<|user|>1+1=?<|assistant|>", "It is 2"]],
    "rewards": [0.0],
    "filtered_rewards": [1.0],
    "input_lengths": [5],
    "token_ids": [[7, 8, 9, 4, 2, 0, 0]],
    "token_loss_mask": [[0, 0, 0, 1, 1, 0, 0]],
    "generation_logprobs": [[0.0, 0.0, 0.0, -0.5, -0.25, 0.0, 0.0]],
    "idx": 0,
}


def save(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def main() -> Any:
    return runpy.run_path(str(SCRIPT))["main"]


def converted(main: Any, kind: str, source: str, *options: str) -> list[DumpRow]:
    out = Path(source).parent / "converted" / "rollouts.jsonl"
    out.parent.mkdir(exist_ok=True)
    assert main([kind, source, str(out), *options]) == 0
    assert [file.name for file in out.parent.iterdir()] == [out.name]
    return list(read_dump(str(out)))


@pytest.mark.parametrize(
    ("gts", "answer"),
    [
        ("2", "2"),
        (["2"], '["2"]'),
        ([2, 3], '["2", "3"]'),
        ({"tests": []}, None),
        ([{"in": 1}], None),
        (True, None),
        (None, None),
    ],
)
def test_rows_of_verl(main: Any, tmp_path: Path, gts: Any, answer: str | None) -> None:
    (row,) = converted(main, "verl", save(tmp_path / "3.jsonl", {**VERL, "gts": gts}))
    assert (row.step, row.rendered_prompt, row.completion) == (3, VERL["input"], "")
    assert (row.reward, row.answer, row.prompt) == (-1.0, answer, None)


def test_another_column_of_rewards(main: Any, tmp_path: Path) -> None:
    (row,) = converted(main, "verl", save(tmp_path / "3.jsonl", VERL), "--reward", "acc")
    assert row.reward == 0.0


def test_rows_of_nemo_rl(main: Any, tmp_path: Path) -> None:
    (row,) = converted(main, "nemo-rl", save(tmp_path / "train_data_step7.jsonl", NEMO_RL))
    assert (row.step, row.reward, row.completion) == (7, 1.0, "It is 2")
    assert row.rendered_prompt == "<|user|>1+1=?<|assistant|>"
    lists = (row.prompt_ids, row.completion_ids, row.logprobs)
    assert [numbers.tolist() for numbers in lists if numbers is not None] == [
        [7, 8, 9],
        [4, 2],
        [-0.5, -0.25],
    ]
    named = ("content", "rewards", "input_lengths", "generation_logprobs")
    old = save(tmp_path / "train_data_step8.jsonl", {name: NEMO_RL[name] for name in named})
    (row,) = converted(main, "nemo-rl", old)
    assert (row.step, row.reward, row.completion) == (8, 0.0, "It is 2")
    assert row.completion_ids is row.logprobs is None


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        ("verl", {"prompt": "1", "completion": "1"}, "no column 'input'; the row has 'prompt'"),
        ("nemo-rl", VERL, "no column 'content'"),
        ("nemo-rl", {**NEMO_RL, "content": [["a", "b", "c", "d"]]}, "has 4 messages"),
        ("nemo-rl", {**NEMO_RL, "token_loss_mask": [[0, 1, 0, 1, 1, 0, 0]]}, "several stretches"),
        ("nemo-rl", {**NEMO_RL, "token_ids": [[7, 8]]}, "'token_ids' has 2 numbers, input_leng"),
        ("nemo-rl", {**NEMO_RL, "token_loss_mask": [None]}, "and 'token_loss_mask' a list"),
    ],
)
def test_other_rows_are_named_by_file_and_line(
    main: Any, tmp_path: Path, capsys: Any, kind: str, row: dict[str, Any], message: str
) -> None:
    good = {"verl": VERL, "nemo-rl": NEMO_RL}[kind]
    source = save(tmp_path / "rows.jsonl", good, row)
    assert main([kind, source, str(tmp_path / "out.jsonl")]) == 1
    said = capsys.readouterr().err
    assert "rows.jsonl, line 2: " in said and message in said
    assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]


def rows_of_a_run(kind: str, folder: Path) -> str:
    """Two steps of four responses to each of two prompts, as the program writes them."""
    for step in (1, 2):
        rows = []
        for number in range(8):
            prompt, right = f"user\n{number // 4}+1=?", number % 4 < step
            text = str(10 * step + number)
            if kind == "verl":
                row = {"input": prompt, "output": text, "score": float(right), "step": step}
            else:
                row = {**NEMO_RL, "content": [[prompt, text]]}
                row["filtered_rewards"] = [float(right)]
            rows.append(row)
        save(folder / f"train_data_step{step}.jsonl", *rows)
    return str(folder / "train_data_step*.jsonl")


@pytest.mark.parametrize("kind", ["verl", "nemo-rl"])
def test_an_autopsy_of_converted_rollouts(tmp_path: Path, capsys: Any, kind: str) -> None:
    source, out = rows_of_a_run(kind, tmp_path), tmp_path / "rollouts.jsonl"
    assert cli.main(["autopsy", source, "--output", str(tmp_path / "raw")]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "step1.jsonl, line 1: " in said and "examples/convert_rollouts.py" in said
    command = [sys.executable, str(SCRIPT), kind, source, str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{out}: 16 rollouts\n"
    assert cli.main(["autopsy", str(out), "--output", str(tmp_path / "autopsy")]) == 0
    table = (tmp_path / "autopsy" / "autopsy.csv").read_text().splitlines()
    assert {"1,pass_rate,0.25", "2,pass_rate,0.5"} <= set(table)
    assert 'PROBLEMS = ""' in (tmp_path / "autopsy" / "autopsy_dpo.py").read_text()
