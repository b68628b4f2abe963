"""Dumps: an update comes back bit for bit; what is half written or changed is never read."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from etils import epath

from g2d_jax import mesh as meshes
from g2d_jax.data.packing import Group, Packed, Response, pack
from g2d_jax.models import decoder
from g2d_jax.models.config import ModelConfig
from g2d_jax.training.dump import read_dump, versions, write_dump
from g2d_jax.training.optimizer import make_optimizer
from g2d_jax.training.step import TrainState, fresh_state

CONFIG = ModelConfig("qwen2", 32, 16, 1, 2, 1, 8, 24, tie_word_embeddings=True, qkv_bias=True)
MESH = meshes.make_mesh(devices=jax.devices()[:1])
RECORD = {"stage": "warmup", "step": 7, "metrics": {"loss": float("nan"), "grad_norm": float("inf")}}


def batch() -> Packed:
    weights = {"weight": np.array([0.5, np.inf, np.nan], np.float32)}
    groups = [Group(np.array([1, 2]), [Response(np.array([3, 4, 5]), weights)]) for _ in range(5)]
    return pack(groups, row_length=16, microbatch_rows=1)


@pytest.fixture
def state() -> TrainState:
    optimizer, _ = make_optimizer(1e-2, total_steps=10)
    params = jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(np.inf), decoder.init(CONFIG, jax.random.key(0)))
    return fresh_state(params, optimizer, MESH)


def test_an_update_comes_back_bit_for_bit(tmp_path: Path, state: TrainState) -> None:
    folder, packed = epath.Path(tmp_path / "dump-000007"), batch()
    for _ in range(2):  # the second replaces the first
        write_dump(folder, state, packed, RECORD)
    dump = read_dump(folder)
    assert dump.count == packed.count == 2
    assert dump.arrays.keys() == packed.arrays.keys()
    for name, array in packed.arrays.items():
        assert dump.arrays[name].dtype == array.dtype
        assert dump.arrays[name].tobytes() == array.tobytes()
    params = dump.params(meshes.placed(decoder.abstract(CONFIG), decoder.shardings(CONFIG, MESH)))
    for found, expected in zip(jax.tree.leaves(params), jax.tree.leaves(state.params), strict=True):
        assert np.asarray(found).tobytes() == np.asarray(expected).tobytes()
    assert dump.record["step"] == 7 and dump.record["versions"] == versions()
    assert dump.record["metrics"] == {"loss": "NaN", "grad_norm": "Infinity"}


def test_a_partial_or_changed_dump_is_not_read(tmp_path: Path, state: TrainState) -> None:
    folder = epath.Path(tmp_path / "dump-000007")
    write_dump(folder, state, batch(), RECORD)
    data = (folder / "batch.safetensors").read_bytes()
    (folder / "batch.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ValueError, match="the dump is damaged"):
        read_dump(folder)
    (folder / "dump.json").unlink()  # as it is until all else is written
    with pytest.raises(ValueError, match=r"holds no dump \(no dump.json\)"):
        read_dump(folder)
