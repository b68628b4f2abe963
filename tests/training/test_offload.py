"""The optimiser's state in the host's memory: the same updates, and it stays there, over
checkpoints too."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from g2d_jax.config import Optimizer
from g2d_jax.data.packing import Group, Response, pack
from g2d_jax.models import decoder
from g2d_jax.models.config import ModelConfig
from g2d_jax.runtime import mesh as meshes
from g2d_jax.training import objectives
from g2d_jax.training.checkpoint import Checkpoints
from g2d_jax.training.objectives import Compute
from g2d_jax.training.optimizer import make_optimizer
from g2d_jax.training.step import (
    TrainState,
    abstract_state,
    make_fresh_state,
    make_train_step,
    put_batch,
    put_numbers,
)

CONFIG = ModelConfig("qwen2", 64, 32, 2, 4, 2, 8, 48, tie_word_embeddings=True)
MESH = meshes.make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])
OPTIMIZER, NUMBERS = make_optimizer(Optimizer(learning_rate=0.01, weight_decay=0.1), total_steps=10)


def batch(weight: float) -> Any:
    group = Group(
        np.arange(3),
        [Response(np.arange(4, 12), {"weight": weight}), Response(np.arange(5), {"weight": 0.1})],
    )
    return put_batch(pack([group] * 4, row_length=32, microbatch_rows=4, rows_multiple=2), MESH)


def trained(offload: bool, weights: tuple[float, ...]) -> tuple[TrainState, list[float]]:
    made = jax.jit(
        lambda: decoder.init(CONFIG, jax.random.key(0), 0.2),
        out_shardings=decoder.shardings(CONFIG, MESH),
    )
    state = make_fresh_state(CONFIG, OPTIMIZER, MESH, offload)(made())
    step = make_train_step(objectives.sft(Compute(MESH)), OPTIMIZER, CONFIG, MESH, offload)
    skipped = []
    for weight in weights:
        before = jax.tree.leaves(state)
        state, metrics = step(
            state, *batch(weight), put_numbers({"optimizer": NUMBERS, "loss": {}}, MESH)
        )
        assert all(leaf.is_deleted() for leaf in before)
        skipped.append(float(metrics["skipped"]))
    assert step._cache_size() == 1  # type: ignore[attr-defined]
    return state, skipped


def kinds(tree: Any) -> set[tuple[bool, str | None]]:
    """(whether it is an array, of more than one number; where it lies) of all leaves."""
    return {(leaf.ndim > 0, leaf.sharding.memory_kind) for leaf in jax.tree.leaves(tree)}


@pytest.fixture(scope="module")
def offloaded() -> TrainState:
    state, skipped = trained(True, (0.1, np.nan, 0.1, 0.1))
    assert skipped == [0, 1, 0, 0]
    return state


def test_the_updates_are_the_same(offloaded: TrainState) -> None:
    """That which is not finite changes nothing."""
    expected, _ = trained(False, (0.1, 0.1, 0.1))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), offloaded, expected)
    assert int(jax.tree.leaves(offloaded.opt_state)[0]) == 3


def test_the_state_stays_in_the_hosts_memory(offloaded: TrainState) -> None:
    assert kinds(offloaded.opt_state) == {(True, "pinned_host"), (False, "device")}
    assert kinds(offloaded.params) == {(True, "device")}
    described = abstract_state(CONFIG, OPTIMIZER, MESH, True)
    for leaf, like in zip(jax.tree.leaves(offloaded), jax.tree.leaves(described), strict=True):
        assert leaf.shape == like.shape and leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim)
    assert kinds(abstract_state(CONFIG, OPTIMIZER, MESH).opt_state) == {
        (True, "device"),
        (False, "device"),
    }


def test_a_checkpoint_is_read_to_where_the_state_shall_lie(
    offloaded: TrainState, tmp_path: Path
) -> None:
    """Whatever it was written from."""
    trees = {"opt_state": offloaded.opt_state}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, trees, {})
        checkpoints.wait()
        for offload, kind in ((True, "pinned_host"), (False, "device")):
            like = abstract_state(CONFIG, OPTIMIZER, MESH, offload)
            found, _ = checkpoints.restore(1, {"opt_state": like.opt_state})
            assert kinds(found["opt_state"]) == {(True, kind), (False, "device")}
            jax.tree.map(np.testing.assert_array_equal, found, trees)


def test_devices_without_such_memory_are_refused() -> None:
    meshes.require_host_memory(MESH)
    bare = SimpleNamespace(
        device_kind="abacus", addressable_memories=lambda: [SimpleNamespace(kind="device")]
    )
    with pytest.raises(
        ValueError,
        match=r"devices of kind 'abacus' have no pinned_host .* compute.offload_optimizer=False",
    ):
        meshes.require_host_memory(SimpleNamespace(devices=np.array([bare])))  # type: ignore[arg-type]
