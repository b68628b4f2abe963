"""Digests of what a run reads, and what is said of two that differ."""

import datetime
import decimal
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hub_server import hub_server
from safetensors.numpy import save_file

from g2d_jax.contents import (
    BLOCK,
    Content,
    content,
    difference,
    files,
    grown,
    records,
    rollouts,
    rows,
    weights,
)
from g2d_jax.data.dumps import DumpRow, by_step
from g2d_jax.records import Example, Problem

HUB = """
from g2d_jax.contents import difference, weights
from g2d_jax.models import hf
first, again, pinned = [weights(hf.resolve("org/model", revision=r)) for r in ("main", "main", "v1")]
assert difference(first, again) == "" and first.digest == pinned.digest
print(difference(first, pinned))
"""


def named(**parts: str) -> Content:
    return content("files", parts)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (named(a="1", b="2"), named(a="1", b="2"), ""),
        (named(a="1", b="2"), named(a="1", b="3"), "of 2 files 1 changed (b)"),
        (named(a="1", b="2"), named(b="2", a="1"), "the same 2 files in another order"),
        (
            named(a="1", b="2"),
            named(a="3", c="2"),
            "of 2 files 1 changed (a), 1 added (c), 1 removed (b)",
        ),
        (
            named(**dict.fromkeys("abcde", "1")),
            named(**dict.fromkeys("abcde", "2")),
            "of 5 files 5 changed",
        ),
        (Content("files", "1", 2), named(a="1"), "other files: there were 2, there are 1"),
        (
            Content("x", "1", 2, commit="c"),
            Content("x", "2", 2, commit="d"),
            "the hub's commit was c, and is d",
        ),
        (
            Content("weights", "1", 2, commit="c"),
            Content("weights", "1", 2, commit="d"),
            "the hub's commit was c, and is d; the weights are the same: set revision=c",
        ),
        (Content("x", "1", 2, commit="c"), Content("x", "1", 2), ""),
    ],
)
def test_differences(old: Content, new: Content, said: str) -> None:
    assert difference(old, new) == said


def test_columns_count_where_they_are_read_and_whatever_they_hold() -> None:
    def digest(columns: bool, **values: object) -> str:
        return records([Problem("0", "1+1?", "2", columns=values)], columns=columns).digest

    assert digest(False, x=1) == digest(False, x=2)
    assert digest(True, x=1, y=2) == digest(True, y=2, x=1) != digest(True, x=1, y=3)
    dates = [digest(True, x=datetime.date(2026, 1, day)) for day in (1, 1, 2)]
    assert dates[0] == dates[1] != dates[2]
    assert digest(True, x=decimal.Decimal(1)) != digest(True, x=decimal.Decimal(2))
    assert digest(True, x=object()) == digest(True, x=object())  # no address in memory
    assert digest(True, x=float("nan")) == digest(True, x=float("nan"))


def test_prompts_count_as_they_are_written() -> None:
    one, two = (records([Problem("0", prompt, "2")]) for prompt in ("a b", "a  b"))
    assert difference(one, two) == "of 1 problems 1 changed (0)"
    user = {"role": "user", "content": "a\ud800"}
    assert records([Problem("0", (user,), None)]).count == 1


def test_rows_of_a_set_are_known_by_their_number() -> None:
    old, new = (
        rows([{"chosen": "a", "rejected": "b"}, {"rejected": last, "chosen": "c"}]) for last in "de"
    )
    assert (
        difference(old, rows([{"rejected": "b", "chosen": "a"}, {"chosen": "c", "rejected": "d"}]))
        == ""
    )
    assert difference(old, new) == "of 2 rows 1 changed (row 2)"


def test_examples_of_one_prompt_are_told_apart() -> None:
    told = [Example("0", "a", "x"), Example("0", "a", "y"), Example("1", "b", "x")]
    assert [*records(told).parts] == ["0", "0/2", "1"]
    assert difference(records(told), records([*told[:1], Example("0", "a", "z"), told[2]])) == (
        "of 3 examples 1 changed (0/2)"
    )


@pytest.mark.parametrize("keeps_parts", [True, False])
@pytest.mark.parametrize(
    ("rows", "goes_on"),
    [
        ("a0 a0 b0 b0 c0 c0 d0 d0", True),
        ("a0 a0 b0 b0 c0 c0 c0 c0", True),  # of the last prompt
        ("a0 a0 b0 b0 c0 c0 a1 a1", True),  # of a later step
        ("d1 d1 a0 a0 b0 b0 c0 c0", True),
        ("a0 b0 a0 b0 c0 c0 d0 d0", True),  # written in another order, taken in the same
        # trained on as the second group: b would be taken again
        (
            "a0 a0 b0 b0 c0 c0 a0 a0",
            False,
        ),
        ("a0 a0 b0 b0 c0 c0 b0 b0", False),
        ("a1 a1 b1 b1 a2 a2", True),
        ("a1 a1 b1 b1 a0 a0", False),
        ("b0 b0 a0 a0 c0 c0 d0 d0", False),
        ("a0 a0 b0 b0", False),
    ],
)
def test_a_dump_goes_on_only_behind_what_a_stage_has_taken(
    rows: str, goes_on: bool, keeps_parts: bool
) -> None:
    def read(text: str) -> Content:
        return rollouts(by_step([row_of_dump(name) for name in text.split()]))

    began = read("a1 a1 b1 b1" if rows.startswith("a1") else "a0 a0 b0 b0 c0 c0")
    kept = began if keeps_parts else replace(began, parts={})
    assert grown(kept, read(rows)) is goes_on


def row_of_dump(name: str) -> DumpRow:
    """A response to the prompt of a letter at the step of a digit."""
    return DumpRow(
        where="", step=int(name[1]), prompt=name[0], completion="1", prompt_ids=None, completion_ids=np.arange(3),
        logprobs=None, finish_reason=None, reward=1.0, has_reward=True, answer=None
    )  # fmt: skip


def test_files_of_one_name_in_several_folders_all_count(tmp_path: Path) -> None:
    paths = [tmp_path / folder / "rollouts.jsonl" for folder in ("d/1", "d/2", "e/2")]
    for number, path in enumerate(paths):
        path.parent.mkdir(parents=True)
        path.write_text(f"{number}")
    old = files([*map(str, paths)])
    assert [*old.parts] == ["d/1/rollouts.jsonl", "d/2/rollouts.jsonl", "e/2/rollouts.jsonl"]
    paths[0].write_text("changed")
    assert difference(old, files([*map(str, paths)])) == "of 3 files 1 changed (d/1/rollouts.jsonl)"
    assert [*files([str(paths[0])]).parts] == ["rollouts.jsonl"]


def save_weights(folder: Path, **changes: np.ndarray) -> Content:
    size = 4 * BLOCK  # elements, so that there is a middle that is not read
    whole = {"a": np.arange(size, dtype=np.float32), "b": np.ones((3, 5), np.float32), **changes}
    folder.mkdir(exist_ok=True)
    save_file(whole, folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps({"hidden_size": 1, "transformers_version": folder.name})
    )
    return weights(folder)


def test_blocks_of_every_tensor_are_read_and_the_rest_is_not(tmp_path: Path) -> None:
    first, size = save_weights(tmp_path / "one"), 4 * BLOCK
    assert [*first.parts] == ["config.json", "a", "b"]
    assert difference(first, save_weights(tmp_path / "moved")) == ""
    for at in (0, size // 2, size - 1):
        edited = np.arange(size, dtype=np.float32)
        edited[at] = -1
        assert difference(first, save_weights(tmp_path / "two", a=edited)).endswith(
            "1 changed (a)"
        ), at
    unseen = np.arange(size, dtype=np.float32)
    unseen[size // 4] = -1
    assert difference(first, save_weights(tmp_path / "two", a=unseen)) == ""
    for other in (np.ones((5, 3), np.float32), np.ones((3, 5), np.float16)):
        assert difference(first, save_weights(tmp_path / "two", b=other)).endswith("1 changed (b)")


def test_shards_are_the_same_model_as_one_file(tmp_path: Path) -> None:
    first, folder = save_weights(tmp_path / "one"), tmp_path / "two"
    save_weights(folder)
    (folder / "model.safetensors").unlink()
    save_file({"a": np.arange(4 * BLOCK, dtype=np.float32)}, folder / "1.safetensors")
    save_file({"b": np.ones((3, 5), np.float32)}, folder / "2.safetensors")
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert difference(first, weights(folder)) == ""


@pytest.mark.slow
def test_a_branch_of_the_hub_that_moved_is_known_by_its_commit(
    one_device: dict[str, str], tmp_path: Path
) -> None:
    save_weights(tmp_path / "model")
    with hub_server("org/model", {"main": tmp_path / "model", "v1": tmp_path / "model"}, []) as url:
        env = {
            **one_device,
            "HF_ENDPOINT": url,
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(tmp_path / "cache"),
        }
        done = subprocess.run(
            [sys.executable, "-c", HUB], env=env, capture_output=True, text=True, timeout=240
        )
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.startswith("the hub's commit was ")
        and "are the same: set revision=" in done.stdout
    )
