"""The content of files, models and repositories as texts that are the same wherever these are."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hub_server import hub_server
from safetensors.numpy import save_file

from g2d_jax import contents
from g2d_jax.contents import of_files, of_model, of_repository

HUB = """
from g2d_jax.contents import of_model
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
    for folder, names in (("one", "ab"), ("two", "ab"), ("three", "ac")):
        (tmp_path / folder).mkdir()
        for number, name in enumerate(names):
            (tmp_path / folder / f"{name}.json").write_text(f"{number}")
    one, two, three = (of_model(tmp_path / folder) for folder in ("one", "two", "three"))
    assert one == two == of_repository(str(tmp_path / "one"), None) != three
    assert one.startswith("content ")


def test_of_a_long_file_three_blocks_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "WHOLE", 100)
    monkeypatch.setattr(contents, "BLOCK", 10)
    file = tmp_path / "weights.safetensors"

    def digest(data: bytes) -> str:
        file.unlink(missing_ok=True)
        file.write_bytes(data)
        contents._local.cache_clear()
        return of_files([str(file)])

    zeros = bytes(200)
    seen = {digest(zeros[:at] + b"1" + zeros[at + 1 :]) for at in (0, 9, 100, 109, 190, 199)}
    assert len(seen) == 6 and digest(zeros) not in seen
    assert digest(zeros[:50] + b"1" + zeros[51:]) == digest(zeros)
    assert digest(bytes(201)) != digest(zeros)


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
    (tmp_path / "README.md").write_text("a note")
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
