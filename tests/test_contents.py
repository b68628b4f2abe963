"""The content of files, models and repositories as texts that are the same wherever these are."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hub_server import hub_server
from safetensors.numpy import save_file

from g2d_jax.session import contents
from g2d_jax.session.contents import of_files, of_model, of_repository

HUB = """
from g2d_jax.session.contents import of_model
from g2d_jax.models import hf
print(*(of_model(hf.resolve("org/model", revision=r)) for r in ("main", "main", "v1")), sep=",")
"""


def test_files_of_one_name_in_several_folders_all_count(tmp_path: Path) -> None:
    paths = [tmp_path / folder / "rollouts.jsonl" for folder in ("d/1", "d/2", "e/2")]
    for number, path in enumerate(paths):
        path.parent.mkdir(parents=True)
        path.write_text(f"{number}")
    old = of_files([*map(str, paths)])
    paths[0].write_text("changed")
    assert old != of_files([*map(str, paths)])


def test_content_does_not_depend_on_the_place_and_does_on_names(tmp_path: Path) -> None:
    for folder, names in (
        ("one", ("config", "tokenizer")),
        ("two", ("config", "tokenizer")),
        ("three", ("config", "vocab")),
    ):
        (tmp_path / folder).mkdir()
        for number, name in enumerate(names):
            (tmp_path / folder / f"{name}.json").write_text(f"{number}")
    one, two, three = (of_model(tmp_path / folder) for folder in ("one", "two", "three"))
    assert one == two == of_repository(str(tmp_path / "one"), None) != three
    assert one.startswith("content ")


def test_of_long_weights_every_tensor_is_looked_at_and_of_other_files_every_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "WHOLE", 100)
    monkeypatch.setattr(contents, "BLOCK", 10)
    monkeypatch.setattr(contents, "BLOCKS", 50)
    weights, rows = tmp_path / "model.safetensors", tmp_path / "rows.jsonl"

    def digest(file: Path, data: bytes) -> str:
        file.write_bytes(data)
        contents._local.cache_clear()
        return of_files([str(file)])

    zeros = bytes(10_000)
    before = digest(weights, zeros)
    for start in range(0, 9_800, 100):  # a tensor of 1/50 of the file
        assert digest(weights, zeros[:start] + b"1" * 210 + zeros[start + 210 :]) != before, start
    assert digest(weights, bytes(10_001)) != before
    before = digest(rows, zeros)
    assert all(
        digest(rows, zeros[:at] + b"1" + zeros[at + 1 :]) != before for at in (0, 50, 101, 9_999)
    )


def test_a_model_is_its_weights_settings_and_tokenizer(tmp_path: Path) -> None:
    save_file({"a": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 1}))
    seen = [of_model(tmp_path)]
    save_file({"a": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    seen.append(of_model(tmp_path))
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        (tmp_path / name).write_text("{}")
        seen.append(of_model(tmp_path))
    assert len(set(seen)) == 5
    for name in ("README.md", "trainer_state.json"):
        (tmp_path / name).write_text("a note")
    assert of_model(tmp_path) == seen[-1]


@pytest.mark.slow
def test_a_branch_of_the_hub_that_moved_is_known_by_its_commit(
    one_device: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": np.ones(3, np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"hidden_size": 1}))
    with hub_server("org/model", {"main": folder, "v1": folder}, []) as url:
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
    main, again, pinned = done.stdout.strip().split(",")
    assert main == again != pinned and main.startswith("commit ")
