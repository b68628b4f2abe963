"""Checkpoints: what is saved comes back bit for bit, on any mesh; what is half written or damaged
is never used."""

from __future__ import annotations

import gc
import math
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from examples import examples
from forks import Forks
from hypothesis import given
from hypothesis import strategies as st

from g2d_jax.config import Optimizer
from g2d_jax.models import decoder
from g2d_jax.models.config import ModelConfig
from g2d_jax.runtime import failures
from g2d_jax.runtime import mesh as meshes
from g2d_jax.runtime.program import put_like
from g2d_jax.training.checkpoint import Checkpoints, DamagedCheckpoint, checksums, host_checksum
from g2d_jax.training.optimizer import abstract_opt_state, make_optimizer

CONFIG = ModelConfig("qwen2", 32, 16, 2, 4, 2, 4, 24, tie_word_embeddings=True)
OPTIMIZER, _ = make_optimizer(Optimizer(learning_rate=0.1, weight_decay=0.1), total_steps=10)
HOST = {
    "step": 3,
    "rate": 0.1,
    "data": {"position": 17},
    "names": ["a", "b"],
    "none": None,
    "worst": math.inf,
}


def abstract(devices: int, config: ModelConfig = CONFIG) -> dict[str, Any]:
    """What restore takes, for a mesh of so many devices."""
    mesh = meshes.make_mesh(
        data=1, fsdp=-1, tensor=2 if devices > 1 else 1, devices=jax.devices()[:devices]
    )
    params = decoder.abstract_on(config, mesh)
    return {"params": params, "opt_state": abstract_opt_state(OPTIMIZER, params, mesh)}


def make_state(devices: int = 1) -> dict[str, Any]:
    """A state of random bits in the right shapes, on so many devices; no two arrays are alike."""
    random = np.random.default_rng(0)

    def fill(x: jax.ShapeDtypeStruct) -> jax.Array:
        return put_like(random.normal(size=x.shape) * 100, x)

    return jax.tree.map(fill, abstract(devices))


def like_of(tree: Any, dtype: Any = None) -> Any:
    """The tree with shapes, dtypes and shardings in place of arrays."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=x.sharding), tree
    )


def assert_same(left: Any, right: Any) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        equal = a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()
        assert equal  # on its own: pytest would spell out the difference of megabytes


@pytest.mark.quick
def test_round_trip_onto_another_device_count(tmp_path: Path):
    state = make_state(min(8, jax.device_count()))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state, HOST)
    like = abstract(1)
    restored, host = Checkpoints(tmp_path).restore(3, like)
    assert_same(restored, state)
    assert host == HOST and type(host["step"]) is int
    assert isinstance(restored["params"], decoder.Decoder) and isinstance(
        restored["opt_state"][1].mu, decoder.Decoder
    )
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(like), strict=True):
        assert a.sharding == b.sharding


def test_params_alone_do_not_read_the_optimizer(tmp_path: Path):
    state = make_state()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
    for file in (tmp_path / "1" / "opt_state").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    params = Checkpoints(tmp_path).restore_params(1, abstract(1)["params"])
    assert_same(params, state["params"])


@pytest.mark.quick
def test_the_caller_may_donate_at_once(tmp_path: Path):
    update = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0.5 + 7.0, tree), donate_argnums=0)
    tree = {"w": jax.random.normal(jax.random.key(0), (1024, 1024))}
    expected = np.array(tree["w"])
    like = like_of({"params": tree})
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"params": tree}, {})
        update(tree)["w"].block_until_ready()
        if (
            not tree["w"].is_deleted()
        ):  # on CPU Orbax reads the buffer itself, and JAX then copies instead of donating
            tree["w"].delete()
        # reuse memory that was freed
        jax.block_until_ready([jnp.full((1024, 1024), float(i)) for i in range(8)])
        checkpoints.wait()
        restored, _ = checkpoints.restore(1, like)
    assert np.array_equal(restored["params"]["w"], expected)


def test_retention_keeps_the_newest_and_the_pinned(tmp_path: Path):
    tree = {"params": {"w": jnp.arange(3.0)}}
    with Checkpoints(tmp_path, keep=2, pinned=(0, 4)) as checkpoints:
        assert checkpoints.latest() is None and checkpoints.steps() == []
        seen = []
        for step in (0, 2, 4, 6, 8):
            checkpoints.save(step, tree, {})
            checkpoints.wait()
            seen.append(checkpoints.steps())
    assert seen == [[0], [0, 2], [0, 2, 4], [0, 4, 6], [0, 4, 6, 8]]
    with Checkpoints(
        tmp_path, keep=1, pinned=(0, 4)
    ) as checkpoints:  # another process, another setting
        checkpoints.save(10, tree, {})
    assert checkpoints.steps() == [0, 4, 10] and checkpoints.latest() == 10


def test_a_failed_save_raises_and_deletes_nothing(tmp_path: Path):
    tree = {"params": {"w": jnp.arange(3.0)}}
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, tree, {})
    with pytest.raises(ValueError, match="step 1 already exists"):
        checkpoints.save(1, tree, {})
    checkpoints.close()
    assert checkpoints.steps() == [1]


def test_reading_an_unknown_folder_makes_no_file(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path / "none")
    assert checkpoints.latest() is None
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 5"):
        checkpoints.restore(5, {})
    checkpoints.close()
    assert not (tmp_path / "none").exists()


@pytest.mark.quick
def test_mismatches_name_the_parameter_and_both_shapes(tmp_path: Path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, make_state(), {})
    wider = ModelConfig("qwen2", 40, 16, 2, 4, 2, 4, 24, tie_word_embeddings=True)
    with pytest.raises(
        ValueError,
        match=r"params.embed is float32\[32, 16\] in checkpoint .*1, .* float32\[40, 16\]",
    ):
        checkpoints.restore_params(1, abstract(1, wider)["params"])
    unbiased = ModelConfig("llama", 32, 16, 2, 4, 2, 4, 24, tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"params.blocks.k_bias is in \S+/1 but not in the model"):
        checkpoints.restore_params(1, abstract(1, unbiased)["params"])
    with pytest.raises(ValueError, match=r"float32\[.* bfloat16\["):
        checkpoints.restore_params(1, like_of(abstract(1)["params"], jnp.bfloat16))
    with pytest.raises(ValueError, match="has no 'reference'"):
        checkpoints.restore(1, {"reference": abstract(1)["params"]})


def test_host_is_checked_before_writing(tmp_path: Path):
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(TypeError, match="as JSON"):
        checkpoints.save(1, {"params": {"w": jnp.zeros(1)}}, {"x": object()})
    assert checkpoints.steps() == []


@pytest.mark.quick
@pytest.mark.parametrize("damage", ["cut", "flip", "remove", "zeros", "list"])
@pytest.mark.parametrize("name", ["params", "host"])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, name: str, damage: str, capfd, monkeypatch):
    """By restoring it, and by a process alone that reads a share of the arrays. In plain words: no
    repr of a library, nor a traceback."""
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    failures.hush()
    arrays = jax.random.normal(jax.random.key(0), (2, 64, 64))
    tree = {"params": {"w": arrays[0], "v": arrays[1]}}
    like = like_of(tree)
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, tree, {"position": 5, "note": "x" * 200})
    assert [checkpoints.find_damage(2, part, 2) for part in range(2)] == ["", ""]
    file = max(
        (f for f in (tmp_path / "2" / name).rglob("*") if f.is_file()),
        key=lambda f: f.stat().st_size,
    )
    data = bytearray(file.read_bytes())
    if damage == "remove":
        file.unlink()
    else:
        changed = {"cut": data[: len(data) // 2], "zeros": bytes(len(data)), "list": b"[]"}
        data[len(data) // 2] ^= 1
        file.write_bytes(changed.get(damage, data))
    with pytest.raises(
        DamagedCheckpoint, match=r"checkpoint \S+/2 is damaged: .*to continue from step 1"
    ) as raised:
        checkpoints.restore(2, like)
    assert raised.value.reason and "Delete that folder" not in raised.value.reason
    reason = checkpoints.find_damage(2)
    assert reason and f"2 is damaged: {reason}. Delete" in str(checkpoints.damaged(2, reason))
    assert any(checkpoints.find_damage(2, part, 2) for part in range(2))
    gc.collect()
    assert "Traceback" not in capfd.readouterr().err
    for library in ("Error", "DATA_LOSS", "tensorstore", "list indices"):
        assert library not in reason
    assert_same(checkpoints.restore(1, like)[0], tree)


@pytest.mark.slow
def test_any_change_of_any_file_is_found_or_does_not_matter(tmp_path: Path):
    """Each file gone, cut, and with bits flipped in several places; each folder gone."""
    tree = {"w": jax.random.normal(jax.random.key(0), (8, 8)), "count": jnp.int32(3)}
    state = {"params": tree, "opt_state": {"mu": tree}}
    like = like_of(state)
    with Checkpoints(tmp_path / "all") as checkpoints:
        checkpoints.save(1, state, {"position": 5})
    folder, whole = tmp_path / "all" / "1", tmp_path / "whole"
    shutil.copytree(folder, whole)
    found, random = 0, np.random.default_rng(0)
    for path in sorted(path.relative_to(whole) for path in whole.rglob("*")):
        changes: list[bytes | None] = [None]
        if (whole / path).is_file():
            data = (whole / path).read_bytes()
            changes += [b"", data[: len(data) // 2]]
            for at in random.integers(0, len(data), 2):
                changes.append(
                    data[:at] + bytes([data[at] ^ 1 << random.integers(8)]) + data[at + 1 :]
                )
        for change in changes:
            if change is not None:
                (folder / path).write_bytes(change)
            elif (folder / path).is_dir():
                shutil.rmtree(folder / path)
            else:
                (folder / path).unlink()
            try:
                assert_same(checkpoints.restore(1, like)[0], state)
            except DamagedCheckpoint:
                found += 1
            shutil.rmtree(folder)
            shutil.copytree(whole, folder)
    assert found > 30


def test_a_damaged_checkpoint_is_moved_aside_and_never_deleted(tmp_path: Path, bucket: epath.Path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for again in ("", "-1"):
        (tmp_path / "checkpoints" / "4" / "params").mkdir(parents=True)
        target = tmp_path / "damaged" / f"step-000004{again}"
        assert checkpoints.set_aside(4) == str(target)
        assert (target / "params").is_dir() and checkpoints.steps() == []
    (bucket / "checkpoints" / "4" / "file").write_text("x")
    with pytest.raises(ValueError, match="deletes nothing on an object"):  # which has no rename
        Checkpoints(bucket / "checkpoints").set_aside(4)
    assert (bucket / "checkpoints" / "4" / "file").exists()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"params": {"w": jnp.arange(4.0)}}, {"position": 5})
    return tmp_path


LIKE = {
    "params": {
        "w": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=meshes.replicated(meshes.make_mesh()))
    }
}


def test_a_file_that_cannot_be_read_now_is_no_damage(saved: Path):
    file = max(
        (f for f in (saved / "1" / "params" / "d").iterdir()), key=lambda f: f.stat().st_size
    )
    content = file.read_bytes()
    file.unlink()
    file.symlink_to(file)  # an error of the system's, which root gets too
    for read in (
        lambda: Checkpoints(saved).restore(1, LIKE),
        lambda: Checkpoints(saved).find_damage(1),
    ):
        with pytest.raises(OSError, match="cannot read") as error:
            read()
        assert file.name in str(error.value)
    file.unlink()
    file.write_bytes(content)
    assert Checkpoints(saved).restore(1, LIKE)[1] == {"position": 5}


def test_an_error_that_does_not_come_again_is_no_damage(
    saved: Path, monkeypatch: pytest.MonkeyPatch
):
    """As of a store that did not answer once, which TensorStore tells by a ValueError like any
    other."""
    whole, failed = ocp.JsonCheckpointHandler.restore, []

    def once(*arguments: Any) -> Any:
        if not failed:
            failed.append(True)
            raise ValueError("the store did not answer")
        return whole(*arguments)

    monkeypatch.setattr(ocp.JsonCheckpointHandler, "restore", once)
    assert Checkpoints(saved).restore(1, LIKE)[1] == {"position": 5} and failed


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("no room on the device"), OSError(5, "I/O error")]
)
def test_other_errors_of_reading_stay_what_they_are(
    saved: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(ocp.JsonCheckpointHandler, "restore", fail)
    with pytest.raises(type(error)) as raised:
        Checkpoints(saved).restore(1, LIKE)
    assert raised.value is error


def test_a_finished_stage_is_told_to_go_on_only_without_its_manifest(tmp_path: Path):
    tree = {"params": {"w": jnp.arange(3.0)}}
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, tree, {})
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "checkpoints" / "2" / "host" / "metadata").write_text("")
    with pytest.raises(
        DamagedCheckpoint,
        match=r"Delete that folder, and \S+/manifest.json to continue from step 1",
    ):
        checkpoints.restore(2, {})


@examples(25)
@given(
    st.sampled_from([np.float32, np.int32, np.uint8, np.bool_, jnp.bfloat16]),
    st.integers(0, 11),
    st.binary(min_size=48, max_size=48),
)
def test_a_checksum_sees_any_change_of_one_element(dtype: Any, at: int, content: bytes):
    dtype = np.dtype(dtype)
    raw = np.frombuffer(content, np.uint8)[: 12 * dtype.itemsize].reshape(12, dtype.itemsize).copy()
    if dtype == np.bool_:
        raw &= 1
    changed = raw.copy()
    changed[at, -1] ^= 1
    before, after = (
        checksums({"x": jnp.asarray(x.reshape(-1).view(dtype).reshape(3, 4))})
        for x in (raw, changed)
    )
    assert before != after
    assert before == {"x": host_checksum(raw.reshape(-1).view(dtype).reshape(3, 4))}


@pytest.mark.quick
def test_checksums_by_hand_and_on_a_mesh():
    x = np.array([[1, 2], [3, 4]], np.int32)
    assert checksums({"x": jnp.asarray(x), "s": jnp.float32(1.0)}) == {
        "x": 1 + 6 + 15 + 28,
        "s": 0x3F800000,
    }
    big = np.random.default_rng(0).normal(size=(16, 24)).astype(np.float32)
    mesh = meshes.make_mesh()
    assert checksums({"x": jnp.asarray(big)}) == checksums(
        {"x": put_like(big, meshes.abstract_rows(mesh, big.shape, big.dtype))}
    )


WRITER = """
import os
import signal
import sys
import jax
from g2d_jax.training.checkpoint import Checkpoints

def tree(step):
    return {"params": {"w": jax.random.bits(jax.random.key(step), (2048, 4096))}}

checkpoints = Checkpoints(sys.argv[1])
checkpoints.save(1, tree(1), {"step": 1})
checkpoints.wait()
checkpoints.save(2, tree(2), {"step": 2})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_kill_in_the_middle_of_a_save(tmp_path: Path, forks: Forks):
    """A process saves step 1, begins to save step 2, and is killed."""
    assert forks.run(tmp_path, code=WRITER).returncode == -signal.SIGKILL
    expected = {
        step: {"params": {"w": jax.random.bits(jax.random.key(step), (2048, 4096))}}
        for step in (1, 2)
    }
    like = like_of(expected[1])
    checkpoints = Checkpoints(tmp_path)
    latest = checkpoints.latest()
    # a step has its name only when it is whole
    assert latest == (2 if (tmp_path / "2").exists() else 1)
    restored, host = checkpoints.restore(latest, like)
    assert_same(restored, expected[latest])
    assert host == {"step": latest}
    with checkpoints:  # the rerun goes on, and sweeps up
        checkpoints.save(latest + 1, expected[2], {"step": 2})
    assert checkpoints.steps() == [latest, latest + 1]
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {
        str(latest),
        str(latest + 1),
    }
    assert_same(checkpoints.restore(latest + 1, like)[0], expected[2])
