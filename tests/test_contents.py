"""Digests of what a run reads, and what is said of two that differ."""

import datetime
import decimal
import json
import subprocess
import sys
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
    records,
    rows,
    weights,
)
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
        (named(a="1", b="2"), named(a="1", b="3"), "the 2 files are not the same"),
        (named(a="1", b="2"), named(b="2", a="1"), "the 2 files are not the same"),
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
    assert difference(one, two) == "the 1 problems are not the same"
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
    assert difference(old, new) == "the 2 rows are not the same"


def test_examples_of_one_prompt_are_told_apart() -> None:
    told = [Example("0", "a", "x"), Example("0", "a", "y"), Example("1", "b", "x")]
    assert records(told).count == 3
    assert difference(records(told), records([*told[:1], Example("0", "a", "z"), told[2]]))


def test_files_of_one_name_in_several_folders_all_count(tmp_path: Path) -> None:
    paths = [tmp_path / folder / "rollouts.jsonl" for folder in ("d/1", "d/2", "e/2")]
    for number, path in enumerate(paths):
        path.parent.mkdir(parents=True)
        path.write_text(f"{number}")
    old = files([*map(str, paths)])
    assert old.count == 3
    paths[0].write_text("changed")
    assert difference(old, files([*map(str, paths)])) == "the 3 files are not the same"


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
    assert first.count == 3
    assert difference(first, save_weights(tmp_path / "moved")) == ""
    for at in (0, size // 2, size - 1):
        edited = np.arange(size, dtype=np.float32)
        edited[at] = -1
        assert difference(first, save_weights(tmp_path / "two", a=edited)), at
    unseen = np.arange(size, dtype=np.float32)
    unseen[size // 4] = -1
    assert difference(first, save_weights(tmp_path / "two", a=unseen)) == ""
    for other in (np.ones((5, 3), np.float32), np.ones((3, 5), np.float16)):
        assert difference(first, save_weights(tmp_path / "two", b=other))


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
