"""Router replay in whole stages: what is stored and trained on, starts after a kill, refusals."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from alike import steady
from matrix import slow
from ml_collections import ConfigDict
from worlds import bits, only, run

from g2d_jax.rollouts import batches
from g2d_jax.runtime import storage
from g2d_jax.runtime.tables import read_rollouts
from g2d_jax.runtime.tracking import read_metrics
from g2d_jax.session.policies import load_policy


@pytest.fixture
def train(config: ConfigDict) -> ConfigDict:
    """One online stage alone, of 4 updates on a mixture of eight experts, two for each token."""
    with config.unlocked():
        config.stages = {"train": config.stages.warmup}
    only(config, "train").stages.train.update(steps=4, keep=(), router_replay=True)
    config.model.family = "qwen3_moe"
    config.data.train.limit = 60
    config.checkpoint.update(every=1, keep=10)
    return config


def metrics_of(workdir: Path) -> list[dict[str, Any]]:
    kept = {r["step"]: r["metrics"] for r in read_metrics(workdir) if "loss" in r["metrics"]}
    return [kept[step] for step in sorted(kept)]


CASES = {
    "once": {},
    "windows": {"sync_every": 2, "beta": 0.01, "importance_cap": 2.0},
    "again": {"sync_every": 2, "num_iterations": 2, "dynamic_sampling": 1},
    "dpo": {"loss": "dpo", "sync_every": 2},
    "group_dpo": {"loss": "group_dpo", "grpo_coef": 0.01, "reference_sync": True, "sync_every": 2},
}


@pytest.mark.parametrize("case", slow(*CASES))
def test_a_stage_that_goes_on_ends_the_same(train, tmp_path, opened, case):
    """All of its experts are on disk, [tokens, layers * 2]; a reference goes by its own."""
    train.stages.train.update(CASES[case])
    train.compute.row_length = 0
    session = opened(train, tmp_path)
    run(session)
    folder = session.folders["train"]
    for row in read_rollouts(folder / "rollouts"):
        rollout = row.rollout
        assert rollout.experts is not None and rollout.prompt_experts is not None
        assert rollout.experts.dtype == np.uint8 and rollout.experts.max() < 8
        assert rollout.experts.shape == (rollout.length, 4)
        assert rollout.prompt_experts.shape == (len(rollout.prompt_ids), 4)
    ended, metrics = bits(load_policy(session, "train")), metrics_of(tmp_path)
    assert len(metrics) == 4 and all(np.isfinite(of["grad_norm"]) for of in metrics)
    for step in (1, 3):
        (folder / storage.MANIFEST).unlink()
        for later in range(step + 1, 5):
            shutil.rmtree(folder / "checkpoints" / str(later))
        again = opened(train, tmp_path)
        run(again)
        assert again.sampling.sampler.usage.generated == 0  # all of it was on disk
        assert bits(load_policy(again, "train")) == ended
        assert list(map(steady, metrics_of(tmp_path))) == list(map(steady, metrics))


@pytest.mark.slow
def test_the_trainer_takes_the_experts_that_are_stored(train, tmp_path, opened, monkeypatch):
    """Others than the sampler's give another update; without the option nothing of them is kept."""
    train.stages.train.steps = 1
    run(session := opened(train, tmp_path / "replayed"))
    replayed = bits(load_policy(session, "train"))
    train.stages.train.router_replay = False
    run(session := opened(train, tmp_path / "own"))
    (file,) = (session.folders["train"] / "rollouts").glob("*.parquet")
    assert all(row.rollout.experts is None for row in read_rollouts(file))
    train.stages.train.router_replay = True
    response = batches._response

    def other(row: Any, *values: Any) -> Any:
        made = response(row, *values)
        made.experts[:, ::2] = (made.experts[:, 1::2] + 1) % 8
        return made

    monkeypatch.setattr(batches, "_response", other)
    run(session := opened(train, tmp_path / "others"))
    assert bits(load_policy(session, "train")) != replayed


def test_a_model_without_experts_is_refused(train, tmp_path, opened):
    train.model.family = "qwen3"
    with pytest.raises(ValueError, match=r"stages\.train\.router_replay is of a mixture .*qwen3"):
        _ = opened(train, tmp_path).model_config
