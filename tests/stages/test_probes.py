"""Probes of a policy in training: fresh samples, the same after a restart, without effect on it."""

import shutil
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict
from plain import logits
from worlds import bits, only, training

from g2d_jax import config as settings
from g2d_jax.config import Config, Offline
from g2d_jax.data.packing import Group, Response
from g2d_jax.records import Problem
from g2d_jax.runtime.tables import read_rollouts
from g2d_jax.runtime.tracking import read_metrics
from g2d_jax.session.policies import load_policy
from g2d_jax.session.session import Session
from g2d_jax.session.trainer import Trainer
from g2d_jax.stages import probes

STEPS = 3


@pytest.fixture
def small(config: ConfigDict) -> ConfigDict:
    """One stage from random parameters, probed at steps 0 and 2 and at its end, 3."""
    stage = only(config, "dpo").stages.dpo
    stage.probe.update(every=2, prompts=5, num_generations=2)
    stage.probe_sampling = settings.sampling(8)
    return config


def groups(step: int) -> list[Group]:
    rng = np.random.default_rng(step)
    ids = [rng.integers(1, 12, size).astype(np.int32) for size in (4, 6)]
    return [Group(ids[0], [Response(ids[1], {"weight": np.full(6, 1 / 6, np.float32)})])]


def trained(session: Session) -> tuple[Trainer, dict[str, Any]]:
    """The stage as an offline one goes on, with a supervised loss in place of a preference loss."""
    stage = session.config.stage("dpo", Offline)
    probe = partial(probes.probe, stage=stage, reference=lambda: load_policy(session, "init"))
    with training(session, "dpo", STEPS) as trainer:
        while trainer.step < STEPS:
            probe(trainer)
            with session.track_cost(trainer.cost):
                trainer.update(groups(trainer.step), {})
            trainer.checkpoint_if_due()
        probe(trainer, last=True)
        return trainer, trainer.finish({})


@pytest.mark.parametrize("changes", [{"top_p": 0.9}, {"temperature": 0.0}])
def test_a_filtered_distribution_is_compared_with_no_reference(
    small, tmp_path, opened, capsys, changes
):
    """Its log-probabilities are not the policy's, so that KL would not be 0 without a change."""
    small.stages.dpo.probe_sampling.update(changes)
    session = opened(small, tmp_path)
    stage = session.config.stage("dpo", Offline)
    with training(session, "dpo", STEPS) as trainer:
        probes.probe(trainer, stage, lambda: load_policy(session, "init"))
        (figures,) = trainer.extra_state.probes
    assert "entropy" in figures and "kl" not in figures
    assert (
        "dpo: its probes are drawn greedily or filtered, and have no kl" in capsys.readouterr().out
    )


@pytest.mark.slow
def test_divergence_from_float32(small, tmp_path, opened):
    """Of what samples in bfloat16: the same tokens scored with float32 activations."""
    small.dtype = "bfloat16"
    small.stages.dpo.probe.update(float32=True, prompts=16)
    session = opened(small, tmp_path)
    _, manifest = trained(session)
    first = manifest["dynamics"]["probes"][0]
    rows = read_rollouts(tmp_path / "01-dpo" / "probe" / "step-000000.parquet")
    policy = load_policy(session, "init")
    apart = []
    for row in rows:
        prompt, tokens = row.rollout.prompt_ids, row.rollout.token_ids
        ids = np.concatenate([prompt, tokens])[None]
        scores = jax.nn.log_softmax(logits(policy, ids)[0, len(prompt) - 1 : -1], axis=-1)
        exact = np.take_along_axis(np.asarray(scores), tokens[:, None], axis=1)[:, 0]
        apart.append(row.rollout.logprobs - exact)
    assert first["kl_float32"] == pytest.approx(np.concatenate(apart).mean(), abs=2e-5)
    assert np.abs(np.concatenate(apart)).max() > 1e-3
    assert first["kl"] != first["kl_float32"]


def test_what_a_probe_measures(small, tmp_path, opened):
    session = opened(small, tmp_path)
    trainer, manifest = trained(session)
    probes = manifest["dynamics"]["probes"]
    assert [one["step"] for one in probes] == [0, 2, 3]
    assert abs(probes[0]["kl"]) < 1e-5 < 1e-4 < abs(probes[2]["kl"])
    folder, dev = tmp_path / "01-dpo" / "probe", session.problems.by_split["dev"]
    generated = prefilled = 0
    for one in probes:
        rows = read_rollouts(folder / f"step-{one['step']:06d}.parquet")
        assert [row.rollout.problem_id for row in rows] == [
            problem.id for problem in dev[:5] for _ in range(2)
        ]
        assert {row.policy for row in rows} == {f"dpo@{one['step']}"}
        lengths = np.array([len(row.rollout.token_ids) for row in rows])
        right = np.array([row.score.reward for row in rows])
        assert one["entropy"] == pytest.approx(
            np.concatenate([row.rollout.entropies for row in rows]).mean()
        )
        assert one["completions/mean_length"] == lengths.mean()
        assert one["accuracy"] == one["reward"] == right.mean()
        assert one["completions/clipped_ratio"] == np.mean(
            [row.rollout.stop_reason == "length" for row in rows]
        )
        for side, among in (("correct", lengths[right == 1]), ("incorrect", lengths[right == 0])):
            key = f"completions/mean_length_{side}"
            assert (key in one) == (among.size > 0) and (key not in one or one[key] == among.mean())
        generated += lengths.sum()
        prefilled += sum(len(row.rollout.prompt_ids) for row in rows[::2])
    cost = manifest["dynamics"]["probe_cost"]
    assert (cost["tokens"]["generated"], cost["tokens"]["prefilled"]) == (generated, prefilled)
    assert cost["tokens"]["scored"] >= generated and cost["flops"] > 0 and cost["seconds"] > 0
    assert (
        cost["tokens"]["trained"]
        == trainer.cost.generated
        == trainer.cost.prefilled
        == trainer.cost.scored
        == 0
    )
    logged = [record for record in read_metrics(tmp_path) if record["kind"] == "probe"]
    assert [{"step": record["step"], **record["metrics"]} for record in logged] == probes


def test_probes_change_nothing_in_the_policy(small, tmp_path, opened):
    one, _ = trained(opened(small, tmp_path / "with"))
    small.stages.dpo.probe.every = 0
    other, manifest = trained(opened(small, tmp_path / "without"))
    assert "dynamics" not in manifest and not (tmp_path / "without" / "01-dpo" / "probe").exists()
    assert bits(one.state.params) == bits(other.state.params)
    assert one.cost.flops == other.cost.flops and one.cost.trained == other.cost.trained


def test_a_restart_reads_the_probes_back(small, tmp_path, opened):
    whole, folder = trained(opened(small, tmp_path / "whole"))[1]["dynamics"], tmp_path / "01-dpo"
    first = trained(opened(small, tmp_path))[1]["dynamics"]
    session = opened(small, tmp_path)
    # from the last checkpoint, which does not have the last probe
    assert trained(session)[1]["dynamics"] == first
    shutil.rmtree(folder / "checkpoints" / "3")
    # as if killed in the third step, and from the start:
    assert trained(session)[1]["dynamics"] == first
    shutil.rmtree(folder / "checkpoints")
    assert trained(session)[1]["dynamics"] == first
    assert session.sampling.sampler.usage.generated == 0
    (folder / "probe" / "step-000002.json").unlink()  # as if killed while it was measured
    shutil.rmtree(folder / "checkpoints")
    again = trained(session)[1]["dynamics"]
    assert session.sampling.sampler.usage.generated == 0
    for other in (whole, again):
        assert other["probes"] == first["probes"]
        for key in ("tokens", "flops"):
            assert other["probe_cost"][key] == first["probe_cost"][key]


def test_a_probe_is_made_once_a_step(small, tmp_path, opened):
    session = opened(small, tmp_path)
    stage = session.config.stage("dpo", Offline)
    with training(session, "dpo", 5) as trainer:
        for step, last in (
            (0, False),
            (0, True),
            (1, False),
            (1, True),
            (2, False),
            (3, False),
            (5, False),
        ):
            trainer.step = step
            probes.probe(trainer, stage, last=last)
        records = trainer.extra_state.probes
        assert [record["step"] for record in records] == [0, 1, 2, 5] and "kl" not in records[0]
        # of one policy
        assert {tuple(record.values())[1:] for record in records} == {
            tuple(records[0].values())[1:]
        }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"every": -1}, "probe.every"),
        ({"prompts": 0}, "at least 1"),
        ({"split": "all"}, "train, dev, test"),
    ],
)
def test_settings_that_cannot_work_are_refused(small, change, message):
    small.stages.dpo.probe.update(change)
    with pytest.raises(ValueError, match=message):
        Config.of(small)


def test_probes_take_every_task_in_turn():
    made = [
        Problem(f"{task}{i}", "1", task=task)
        for task, count in (("a", 4), ("b", 2))
        for i in range(count)
    ]
    assert [problem.id for problem in probes.probed(made, 5)] == ["a0", "b0", "a1", "b1", "a2"]
    assert [problem.id for problem in probes.probed(made[:4], 3)] == ["a0", "a1", "a2"]
    assert len(probes.probed(made, 99)) == 6
