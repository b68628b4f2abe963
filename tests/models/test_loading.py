"""Loading and exporting what is larger than one would like to hold: bounded host memory, and each
byte read once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hub_server import hub_server
from safetensors.numpy import load_file

from g2d_jax.models import hf
from g2d_jax.runtime import mesh as meshes

BOUNDED = """
import json, sys
from pathlib import Path
import loading
from g2d_jax.runtime import mesh
from g2d_jax.models.config import ModelConfig

folder, devices = Path(sys.argv[1]), mesh.make_mesh()
loading.write_checkpoint(folder / "model", ModelConfig("llama", 4096, 512, 12, 4, 4, 128, 2048), 30e6)
loading.measurements(folder / "model", folder / "first", devices)  # compiles
print(json.dumps(loading.measurements(folder / "model", folder / "second", devices)))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc"
)
def test_host_memory_holds_parameters_and_little_else(
    one_device: dict[str, str], tmp_path: Path
) -> None:
    """A loader that read all shards, or an export that gathered or merged the whole, would take the
    file's size more.

    Measured as benchmarks/loading.py does. Here the devices' memory is the host's.
    """
    flags = f"{one_device['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
    order = " --xla_cpu_enable_concurrency_optimized_scheduler=false"
    path = os.pathsep.join(
        [one_device["PYTHONPATH"], str(Path(__file__).parents[2] / "benchmarks")]
    )
    env = {**one_device, "XLA_FLAGS": flags + order, "PYTHONPATH": path}
    env["MALLOC_MMAP_THRESHOLD_"] = "65536"  # what is freed is gone
    command = [sys.executable, "-c", BOUNDED, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    files = list((tmp_path / "model").glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    assert len(files) == 4 and size > 105e6 and found["resident"] > 2 * 105e6
    assert found["load"]["peak"] - found["resident"] < 40e6, found
    assert found["export"]["peak"] < 40e6 and found["merge"]["peak"] < 40e6, found


@pytest.fixture
def requests(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What is fetched from the object store in memory from here on: (file, bytes)."""
    import fsspec

    store, fetched = fsspec.get_filesystem_class("s3"), []
    inner = store.cat_file

    def cat_file(
        self: Any, path: str, start: int | None = None, end: int | None = None, **more: Any
    ) -> bytes:
        data: bytes = inner(self, path, start=start, end=end, **more)
        fetched.append((path.rpartition("/")[2], len(data)))
        return data

    monkeypatch.setattr(store, "cat_file", cat_file)
    return fetched


def test_every_tensor_is_fetched_once_from_a_store(
    references: dict[str, Any], bucket: Any, requests: list[tuple[str, int]]
) -> None:
    model = hf.load(references["llama3"].folder)
    hf.save(model, bucket / "model", max_shard_bytes=60_000)
    files = {
        path.name: path for path in (bucket / "model").iterdir() if path.suffix == ".safetensors"
    }
    assert len(files) > 2
    requests.clear()
    mesh = meshes.make_mesh(fsdp=2, tensor=2, data=-1)
    loaded = hf.load(bucket / "model", mesh=mesh)
    jax.tree.map(np.testing.assert_array_equal, loaded, model)
    for name, path in files.items():
        assert sum(size for file, size in requests if file == name) == len(path.read_bytes())
    largest = 4 * 131 * 48
    assert max(size for file, size in requests if file in files) == largest


def test_an_export_to_a_store_is_the_one_on_local_disk(
    references: dict[str, Any], bucket: Any, tmp_path: Path
) -> None:
    model = hf.load(references["llama3"].folder)
    for folder in (tmp_path / "model", bucket / "model"):
        hf.save(model, folder, max_shard_bytes=60_000, eos_ids=[3])
        (folder / "config.json").unlink()  # unfinished
        # fewer shards: none is left over
        hf.save(model, folder, max_shard_bytes=90_000, eos_ids=[3])
    local = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    assert {path.name: path.read_bytes() for path in (bucket / "model").iterdir()} == local
    with pytest.raises(ValueError, match="s3://bucket/data/model already holds a model"):
        hf.save(model, bucket / "model")


def test_what_is_wrong_in_a_store_is_named_by_its_url(
    references: dict[str, Any], bucket: Any
) -> None:
    where = "s3://bucket/data/model"
    with pytest.raises(ValueError, match=f"{where} has no config.json"):
        hf.load(hf.resolve(where))
    with pytest.raises(
        ValueError, match="use a local path, gs://BUCKET/… or s3://BUCKET/…, not az://"
    ):
        hf.resolve("az://container/model")
    hf.save(hf.load(references["llama3"].folder), bucket / "model", max_shard_bytes=60_000)
    files = sorted(path for path in (bucket / "model").iterdir() if path.suffix == ".safetensors")
    whole = files[1].read_bytes()
    files[1].write_bytes(whole[:-4])
    with pytest.raises(
        ValueError, match=f"{where}/{files[1].name} is not a readable .* truncated: tensor model"
    ):
        hf.load(where)
    files[1].unlink()
    with pytest.raises(
        ValueError, match=f"{where}: file {files[1].name} is missing; .* lists model"
    ):
        hf.load(where)
    (bucket / "model" / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match=f"{where} has neither model.safetensors nor"):
        hf.load(where)


def test_nothing_is_made_on_a_device_before_all_headers_are_checked(
    references: dict[str, Any], tmp_path: Path
) -> None:
    hf.save(hf.load(references["llama3"].folder), tmp_path / "model", max_shard_bytes=60_000)
    last = max((tmp_path / "model").glob("*.safetensors"))
    names = list(load_file(last))
    last.write_bytes(last.read_bytes()[:-1])
    before = {id(array) for array in jax.live_arrays()}
    with pytest.raises(
        ValueError,
        match=rf"{last.name} is not .* truncated: tensor ({'|'.join(names)}) extends beyond",
    ):
        hf.load(tmp_path / "model", mesh=meshes.make_mesh())
    assert {id(array) for array in jax.live_arrays()} <= before


FROM_HUB = """
import sys
from pathlib import Path
from g2d_jax.models import hf
found = hf.resolve("org/model", revision="main")
print(sorted(path.name for path in found.iterdir()))
assert all(path.read_bytes() == Path(sys.argv[1], path.name).read_bytes() for path in found.iterdir())
try:
    hf.resolve("org/none")
except ValueError as error:
    assert "'org/none' is not a local folder and could not be downloaded" in str(error), error
else:
    sys.exit("found what is not there")
"""


def test_a_hub_id_is_downloaded_without_pickles_and_subfolders(
    references: dict[str, Any], one_device: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    hf.save(hf.load(references["qwen2-tied"].folder), folder, max_shard_bytes=60_000)
    (folder / "original").mkdir()
    for name in ("pytorch_model.bin", "original/params.json", "modeling.py"):
        (folder / name).write_bytes(b"not wanted")
    asked: list[str] = []
    with hub_server("org/model", folder, asked) as url:
        env = {
            **one_device,
            "HF_ENDPOINT": url,
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(tmp_path / "cache"),
        }
        command = [sys.executable, "-c", FROM_HUB, str(folder)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    wanted = sorted(
        path.name for path in folder.iterdir() if path.suffix in (".json", ".safetensors")
    )
    assert sorted(asked) == wanted and done.stdout.strip() == str(wanted)
