"""Runs that train adapters: stopped and continued, from a model in bfloat16, and into the files
that others read."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from alike import arrays, differences, redone
from killed import Runs
from plain import merge
from safetensors.numpy import load_file

from g2d_jax import commands
from g2d_jax.commands.card import card
from g2d_jax.models import decoder, hf
from g2d_jax.records import SEGMENT_STRIDE
from g2d_jax.runtime.tracking import read_metrics
from g2d_jax.session.policies import load_policy
from g2d_jax.training.checkpoint import Checkpoints

ADAPTERS = ["config.lora.rank=2", "config.lora.targets=q_proj,down_proj"]


@pytest.fixture(scope="module")
def whole(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("whole") / "run"
    runs(workdir, overrides=ADAPTERS)
    return workdir


def test_checkpoints_hold_adapters_alone(whole):
    for stage in ("01-sft", "02-warmup", "04-dpo"):
        checkpoints = Checkpoints(whole / stage / "checkpoints")
        saved = arrays(checkpoints.folder / str(checkpoints.latest()))
        names = {name.rpartition(".")[2] for name, array in saved.items() if array.ndim}
        assert names == {"q_a", "q_b", "down_a", "down_b"}, stage
        # they were trained
        assert all(np.any(array) for name, array in saved.items() if name.endswith("_b")), stage


def test_dpo_starts_at_its_reference(whole):
    """The reference is the warm-up's policy: its adapters beside the same base."""
    first = next(r for r in read_metrics(whole) if r["stage"] == "dpo" and r["kind"] == "train")
    assert first["metrics"]["loss"] == pytest.approx(np.log(2), abs=1e-5)


@pytest.mark.slow
def test_a_stopped_run_ends_like_one_that_never_was(runs, whole, tmp_path):
    workdir = tmp_path / "run"
    runs(workdir, 75, overrides=ADAPTERS, call=["TERM", "Trainer.update", 7])
    runs(workdir, -9, overrides=ADAPTERS, file=["03-collect/rollouts/part-00000.parquet", 0.0])
    runs(workdir, overrides=ADAPTERS)
    assert differences(whole, workdir) == []
    assert redone(workdir) <= 2


def test_export_merged_and_alone(whole, tmp_path):
    merged = commands.export(whole, tmp_path / "merged")
    alone = commands.export(whole, tmp_path / "alone", adapters=True)
    libraries = [(folder / "README.md").read_text().split("\n")[1] for folder in (merged, alone)]
    assert libraries == ["library_name: transformers", "library_name: peft"]
    with pytest.raises(ValueError, match="holds adapters already"):
        commands.export(whole, alone, adapters=True)
    with commands.opened(whole) as session:
        policy = load_policy(session, "dpo")
        expected = jax.device_get(jax.jit(merge)(policy))
        assert (
            decoder.count_trained(session.model_config)
            < decoder.count_params(session.model_config) / 4
        )
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(hf.load(merged)), expected)
    written = load_file(alone / "adapter_model.safetensors")
    assert len(written) == 2 * 2 * 2  # two layers, two targets, A and B
    theirs = written["base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"]
    np.testing.assert_array_equal(theirs, np.asarray(policy.blocks.down_b[1]).T)
    assert json.loads((alone / "adapter_config.json").read_text())["r"] == 2


@pytest.mark.slow
def test_adapters_are_trained_beside_the_model_that_their_policy_names(runs, whole, tmp_path):
    """Policies from "hf:" keep that model as their base through every stage, also in another run's
    stages."""
    other = commands.export(whole, tmp_path / "other", policy="warmup")
    moved = [
        *ADAPTERS,
        f"config.stages.warmup.policy=hf:{other}",
        f"config.stages.dpo.policy=hf:{other}",
    ]
    runs(tmp_path / "moved", overrides=moved)
    first = next(
        r for r in read_metrics(tmp_path / "moved") if r["stage"] == "dpo" and r["kind"] == "train"
    )
    # trained beside what the reference is
    assert first["metrics"]["loss"] == pytest.approx(np.log(2), abs=1e-5)
    expected = np.asarray(hf.load(other).blocks.down[...])
    with commands.opened(tmp_path / "moved") as session:
        np.testing.assert_array_equal(load_policy(session, "warmup").blocks.down[...], expected)
        # whose base is the run's own
        assert np.any(load_policy(session, "sft").blocks.down[...] != expected)
        # of a path its last part: the card is published
        assert f"Base model: `{other.name}`" in card(session, "warmup")
    alone = commands.export(tmp_path / "moved", tmp_path / "alone", policy="warmup", adapters=True)
    assert json.loads((alone / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == str(other)
    taken = [*ADAPTERS, f"config.stages.warmup.policy=run:{tmp_path / 'moved'}#warmup"]
    runs(tmp_path / "taken", overrides=taken, until="warmup")
    with commands.opened(tmp_path / "taken") as session:
        np.testing.assert_array_equal(load_policy(session, "warmup").blocks.down[...], expected)


@pytest.mark.slow
def test_a_quantised_base_is_exported_as_what_its_codes_stand_for(runs, tmp_path):
    pytest.importorskip("qwix", reason="qwix is not installed: the extra quant")
    runs(tmp_path / "run", overrides=[*ADAPTERS, "config.lora.quantise=nf4"], until="sft")
    exported = commands.export(tmp_path / "run", tmp_path / "exported", policy="sft")
    assert "as nf4 codes" in (exported / "README.md").read_text()
    with commands.opened(tmp_path / "run") as session:
        policy = load_policy(session, "sft")
    assert policy.blocks.gate.get_value().qvalue.dtype == "uint4" and np.any(policy.blocks.q_b[...])
    tokens = np.arange(12)[None]
    positions, segments = tokens.astype(np.int32), np.full_like(tokens, SEGMENT_STRIDE)
    forward = jax.jit(lambda model: decoder.forward(model, tokens, positions, segments)[0])
    np.testing.assert_allclose(forward(policy), forward(hf.load(exported)), atol=1e-4)
