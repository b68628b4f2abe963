"""Between online and offline: what a stage samples, when, with which policy, and what becomes of
it."""

import gc
import json
import shutil
from itertools import islice
from pathlib import Path

import jax
import numpy as np
import pytest
from alike import steady
from ml_collections import ConfigDict
from worlds import bits, only, run

from g2d_jax import config as settings
from g2d_jax.config import Online
from g2d_jax.data.order import draw
from g2d_jax.rollouts import window as windows
from g2d_jax.rollouts.batches import Batch
from g2d_jax.rollouts.logprobs import logprob_scorer_of
from g2d_jax.rollouts.window import StageSampling, WindowBatches
from g2d_jax.runtime import storage
from g2d_jax.runtime.tables import read_preferences, read_rollouts, write_preferences
from g2d_jax.runtime.tracking import read_metrics
from g2d_jax.session import stage_result
from g2d_jax.session.policies import load_policy
from g2d_jax.session.problems import order
from g2d_jax.session.trainer import Trainer, open_trainer
from g2d_jax.session.windows import SyncWindow, window_at
from g2d_jax.stages import online as stages
from g2d_jax.stages import run_issues
from g2d_jax.stages.online import phases


@pytest.fixture
def train(config: ConfigDict) -> ConfigDict:
    """One online stage alone, of 4 updates on 4 prompts with 4 responses each."""
    with config.unlocked():
        config.stages = {"train": config.stages.warmup}
    only(config, "train").stages.train.update(steps=4, keep=())
    config.data.train.limit = 60
    return config


def metrics_of(workdir: Path, stage: str = "train") -> list[dict[str, float]]:
    kept = {
        r["step"]: r["metrics"]
        for r in read_metrics(workdir)
        if r["stage"] == stage and "loss" in r["metrics"]
    }
    return [kept[step] for step in sorted(kept)]


def rollouts(workdir: Path, number: int, extra: str = "") -> list[object]:
    return read_rollouts(workdir / "01-train" / "rollouts" / f"step-{number:06d}{extra}.parquet")


def stage(**changes: int) -> Online:
    return Online(**{"steps": 10, **changes})


def test_intervals_of_literal_settings():
    assert window_at(7, stage()) == SyncWindow(7, 1, 7, 1)
    assert window_at(7, stage(sync_every=4)) == SyncWindow(4, 4, 4, 4)
    assert window_at(9, stage(sync_every=4)) == SyncWindow(8, 2, 8, 2)  # the last one is cut short
    assert window_at(9, stage(sync_every=0)) == SyncWindow(0, 10, 0, 10)
    assert window_at(0, stage(steps=0, sync_every=0)).updates == 0
    twice = window_at(5, stage(sync_every=4, num_iterations=2))
    assert twice == SyncWindow(4, 4, 2, 2)
    assert [twice.batch_of(step) for step in range(4, 8)] == [2, 3, 2, 3]
    assert [twice.is_new(step) for step in range(4, 8)] == [True, True, False, False]


def test_rollouts_of_an_interval_are_those_of_the_policy_it_began_with(train, tmp_path, opened):
    train.stages.train.sync_every = 2
    manifest = run(opened(train, tmp_path / "semi"))
    assert [rollouts(tmp_path / "semi", k)[0].policy for k in range(4)] == [
        "train@0",
        "train@0",
        "train@2",
        "train@2",
    ]
    assert manifest.generation["calls"] == 2 and manifest.generation["prompts_per_call"] == 8
    assert manifest.counts["rollouts"] == 4 * 4 * 4
    train.stages.train.sync_every = 0
    run(opened(train, tmp_path / "offline"))
    for number in range(4):
        one, other = rollouts(tmp_path / "semi", number), rollouts(tmp_path / "offline", number)
        same = [
            np.array_equal(a.rollout.token_ids, b.rollout.token_ids)
            for a, b in zip(one, other, strict=True)
        ]
        assert [(a.rollout.problem_id, a.rollout.visit) for a in one] == [
            (b.rollout.problem_id, b.rollout.visit) for b in other
        ]
        assert all(same) == (number < 2)
    ratios = [metrics["ratio"] for metrics in metrics_of(tmp_path / "semi")]
    assert abs(ratios[0] - 1) < 1e-5 and abs(ratios[2] - 1) < 1e-5
    assert abs(ratios[1] - 1) > 1e-4 and abs(ratios[3] - 1) > 1e-4


def test_nothing_but_the_state_stays_on_the_devices(train, tmp_path, opened):
    """Parameters and two moments: neither the policy that the stage began with nor the sampler's
    form of it."""
    session = opened(train, tmp_path)
    stage = session.config.stages["train"]
    shape = session.model_config.vocab_size, session.model_config.hidden_size

    def copies() -> int:
        gc.collect()
        return sum(array.shape == shape for array in jax.live_arrays())

    before = copies()
    with open_trainer(phases(session, "train", stage)[-1]) as trainer:
        assert copies() - before == 3
        sampled(trainer, stage)
        assert copies() - before == 3


def sampled(trainer: Trainer, stage: Online) -> WindowBatches:
    """Sample the first window, with its log-probabilities under other policies."""
    session, name, training = trainer.session, trainer.name, trainer.training
    batches = WindowBatches(session, session.folders[name], window_at(0, stage))
    source = stages.Source(StageSampling.of(session, name, stage))
    stages._sample_window(trainer, stage, source, batches)
    scorer = logprob_scorer_of(session, stage, training.rows)
    stages._add_logprobs(trainer, stage, scorer, {}, batches)
    return batches


def test_a_window_longer_than_memory_is_read_back(train, tmp_path, opened, monkeypatch):
    """Batches and their log-probabilities: no more of either stays than the constant says."""
    train.stages.train.update(sync_every=0, beta=0.1)
    session = opened(train, tmp_path)
    stage = session.config.stages["train"]

    def batches_of(trainer: Trainer, batches: WindowBatches) -> list[Batch]:
        made = []
        for step in range(4):
            trainer.step = step
            made.append(stages._train_batch(trainer, stage, batches).batch)
        trainer.step = 0
        return made

    with open_trainer(phases(session, "train", stage)[-1]) as trainer:
        batches = sampled(trainer, stage)
        assert len(batches._rounds) == len(batches._logprobs) == 4
        expected = batches_of(trainer, batches)

        session.writer.wait()
        for folder in ("rollouts", "logprobs"):
            shutil.rmtree(tmp_path / "01-train" / folder)
        monkeypatch.setattr(windows, "MAX_BATCHES_IN_MEMORY", 1)
        batches = sampled(trainer, stage)
        found = batches_of(trainer, batches)
        assert list(batches._rounds) == list(batches._logprobs) == [0]
    for one, other in zip(expected, found, strict=True):
        for group, again in zip(one.groups, other.groups, strict=True):
            for response, same in zip(group.responses, again.responses, strict=True):
                assert response.token.keys() >= {"old_logprob", "ref_logprob"}
                np.testing.assert_equal(same.token, response.token)


@pytest.mark.slow
def test_never_synchronised_is_collect_and_offline_dpo(train, tmp_path, opened):
    """The same prompts, one pair a prompt: the same pairs and, with the pairs put where the offline
    stage draws them in the order of collection, the same updates."""
    online = train.stages.train
    online.update(loss="dpo", sync_every=0, num_generations=8)
    online.optimizer.learning_rate = 1e-3
    with train.unlocked():
        train.stages.collect = settings.collect(
            policy="train", rollouts="archive", pairs_per_prompt=1
        )
        train.stages.dpo = settings.offline(policy="init", batch_size=4, optimizer=online.optimizer)
    session = opened(train, tmp_path)
    for name in ("train", "collect"):
        run(session, name)
    parts = session.folders["collect"] / "preferences"
    pairs = read_preferences(parts)
    assert len(pairs) == 16  # every prompt has a pair: no batch is smaller than the others
    drawn_at = [index for index, _ in draw(order(session.config, 16, "offline/dpo"), 0, 16)]
    placed = iter([pairs[drawn_at.index(index)] for index in range(16)])
    for part in sorted(parts.glob("*.parquet")):
        write_preferences(part, list(islice(placed, len(read_preferences(part)))))
    run(session, "dpo")
    drawn = [
        row for number in range(4) for row in read_rollouts(session.folders["train"] / "rollouts")
    ]
    by_prompt = {(row.rollout.problem_id, row.text) for row in drawn}
    assert {
        (pair.problem_id, side) for pair in pairs for side in (pair.chosen, pair.rejected)
    } <= by_prompt
    one, other = metrics_of(tmp_path, "train"), metrics_of(tmp_path, "dpo")
    for name in ("loss", "grad_norm", "rewards/margins", "logps/chosen", "logps/rejected"):
        np.testing.assert_allclose(
            [m[name] for m in one], [m[name] for m in other], rtol=1e-4, atol=1e-5
        )
    assert one[0]["loss"] == pytest.approx(np.log(2), abs=1e-4)
    for x, y in zip(
        *(jax.tree.leaves(load_policy(session, name)) for name in ("train", "dpo")), strict=True
    ):
        np.testing.assert_allclose(x, y, atol=2e-5)


def test_a_synchronised_reference_is_the_policy_at_the_start_of_each_interval(
    train, tmp_path, opened
):
    train.stages.train.update(loss="dpo", sync_every=2, reference_sync=True)
    run(opened(train, tmp_path))
    losses = [metrics["loss"] for metrics in metrics_of(tmp_path)]
    for first in (0, 2):
        assert losses[first] == pytest.approx(np.log(2), abs=1e-5)
        assert abs(losses[first + 1] - np.log(2)) > 1e-4


def test_several_updates_on_a_batch(train, tmp_path, opened):
    train.stages.train.update(num_iterations=2, sync_every=2)
    manifest = run(opened(train, tmp_path))
    assert manifest.counts["rollouts"] == 2 * 4 * 4
    assert sorted(path.name for path in (tmp_path / "01-train" / "rollouts").glob("*.parquet")) == [
        "step-000000.parquet",
        "step-000001.parquet",
    ]
    metrics = metrics_of(tmp_path)
    assert metrics[0]["reward"] == metrics[1]["reward"]
    assert abs(metrics[0]["ratio"] - 1) < 1e-5 < abs(metrics[1]["ratio"] - 1)


SLOW = ("importance", "combined")
CASES = {
    "dynamic_sampling": {
        "sync_every": 2,
        "filter": {"dynamic_sampling": 2},
        "loss": "dpo",
    },
    "importance": {
        "clip": {"importance_cap": 2.0},
        "beta": 0.01,
        "sync_every": 2,
    },
    "combined": {"loss": "group_dpo", "grpo_coef": 0.01, "entropy_coef": 1e-3, "sync_every": 2},
}


@pytest.mark.parametrize(
    "case", ["dynamic_sampling", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_a_stage_that_goes_on_after_any_checkpoint_ends_the_same(train, tmp_path, opened, case):
    train.stages.train.update(CASES[case])
    train.checkpoint.update(every=1, keep=10)
    session = opened(train, tmp_path)
    whole, folder = run(session), session.folders["train"]
    ended, metrics = bits(load_policy(session, "train")), metrics_of(tmp_path)
    for step in (1, 3):
        (folder / storage.MANIFEST).unlink()
        for later in range(step + 1, 5):
            shutil.rmtree(folder / "checkpoints" / str(later))
        again_runtime = opened(train, tmp_path)
        again = run(again_runtime)
        assert again_runtime.sampling.sampler.usage.generated == 0  # all of it was on disk
        assert bits(load_policy(again_runtime, "train")) == ended
        assert list(map(steady, metrics_of(tmp_path))) == list(map(steady, metrics))
        assert (again.cost.tokens, again.cost.flops) == (whole.cost.tokens, whole.cost.flops)
        assert again.counts == whole.counts


def test_refilled_batches_survive_a_kill_between_any_two_journals(train, tmp_path, opened):
    """A batch of the last interval is gone, and what refilled the other one: all is drawn again,
    and the same."""
    train.stages.train.update(sync_every=2, filter={"dynamic_sampling": 2})
    train.checkpoint.update(every=1, keep=10)
    session = opened(train, tmp_path, first_letter)
    run(session)
    folder, ended = session.folders["train"], bits(load_policy(session, "train"))
    files = {file.name: file.read_bytes() for file in (folder / "rollouts").glob("*.parquet")}
    assert any(name.startswith("step-000002-") for name in files)
    (folder / storage.MANIFEST).unlink()
    for later in (3, 4):
        shutil.rmtree(folder / "checkpoints" / str(later))
    for name in files:
        if name.startswith(("step-000003", "step-000002-")):
            (folder / "rollouts" / name).unlink()
    again = opened(train, tmp_path, first_letter)
    run(again)
    assert {
        file.name: file.read_bytes() for file in (folder / "rollouts").glob("*.parquet")
    } == files
    assert bits(load_policy(again, "train")) == ended


def test_a_stage_that_continues_without_rollouts_it_trained_on_names_the_file(
    train, tmp_path, opened
):
    train.stages.train.update(sync_every=2, filter={"dynamic_sampling": 2})
    train.checkpoint.update(every=1, keep=10)
    session = opened(train, tmp_path, first_letter)
    run(session)
    folder = session.folders["train"]
    (folder / storage.MANIFEST).unlink()
    files = sorted((folder / "rollouts").glob("*.parquet"))
    assert any(file.name.startswith("step-000000-") for file in files)
    for file in files:
        content = file.read_bytes()
        file.unlink()
        with pytest.raises(ValueError, match=f"{file.name} is gone.*restore the file"):
            run(opened(train, tmp_path, first_letter))
        file.write_bytes(content)
    run(opened(train, tmp_path, first_letter))
    assert stage_result.read(folder)


def first_letter(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    """About half of the prompts get one same reward, whatever the answer."""
    return [
        float(len(text) % 2 == 0) if sum(prompt.encode()) % 2 else 0.0
        for prompt, text in zip(prompts, completions, strict=True)
    ]


def test_retired_prompts_are_not_drawn_again(train, tmp_path, opened):
    train.data.train.limit = 24
    train.stages.train.update(steps=8, filter={"drop_solved": 1})
    session = opened(train, tmp_path, first_letter)
    run(session)
    count = len(session.problems.train)
    seen: dict[str, bool] = {}
    for number in range(8):
        groups: dict[str, set[float]] = {}
        for row in rollouts(tmp_path, number):
            groups.setdefault(row.rollout.problem_id, set()).add(row.score.reward)
        alive = sum(mixed for mixed in seen.values()) + count - len(seen)
        if alive >= 4:
            assert not [problem for problem in groups if seen.get(problem) is False]
        seen |= {problem: len(values) > 1 for problem, values in groups.items()}
    last = metrics_of(tmp_path)[-1]
    assert 0.2 < last["curriculum/retired"] < 0.8
    assert last["curriculum/skipped"] > 0


def test_two_tasks_with_rewards_of_their_own(train, tmp_path, opened):
    file = tmp_path / "chat.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{a}+{a}"}) + "\n" for a in range(16)), "utf-8")
    train.data.max_prompt_length = 64
    train.data.weight = 3.0
    with train.unlocked():
        parts = [settings.source(str(file), split) for split in ("train", "dev", "test")]
        train.tasks.chat = settings.task(
            *parts, weight=1.0, function="tiny:longest", verifiable=False
        )
    train.tasks.chat.train.split = ""
    train.tasks.chat.dev.path = train.tasks.chat.test.path = ""
    train.stages.train.update(loss="dpo", steps=2)
    run(opened(train, tmp_path / "run"))
    rows = rollouts(tmp_path / "run", 0)
    assert sum(row.score.verdict.value == "scored" for row in rows) == 4
    metrics = metrics_of(tmp_path / "run")[0]
    assert metrics["tasks/chat/reward"] == np.mean(
        [r.score.reward for r in rows if r.score.verdict.value == "scored"]
    )
    assert metrics["tasks/main/reward"] <= 1 < metrics["tasks/chat/reward"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "dpa"}, "loss must be one of grpo, raft, dpo, group_dpo, got 'dpa'"),
        ({"num_iterations": 2}, "set sync_every to a multiple of num_iterations"),
        ({"grpo_coef": 0.1, "loss": "dpo"}, "grpo_coef adds GRPO .* has loss='dpo': leave it at 0"),
        ({"beta": 0.1, "loss": "raft"}, "has loss='raft': leave it at 0$"),
        ({"clip": {"importance_cap": 2.0}, "loss": "dpo"}, "importance_cap is for GRPO"),
        ({"beta": 0.1, "loss": "dpo"}, "did you mean dpo.beta"),
        (
            {"sync_every": 0, "budget": {"measure": "flops", "amount": 1.0}},
            "steps sampled together",
        ),
        ({"filter": {"drop_solved": 2}, "sync_every": 0}, "before training"),
        ({"clip": {"epsilon": -1.0}}, "clip.epsilon must be at least 0"),
        ({"entropy_coef": float("nan")}, "entropy_coef must be at least 0 .*, got nan"),
        (
            {"filter": {"min_pass_rate": 0.6, "max_pass_rate": 0.4}},
            "set min_pass_rate to max_pass_rate or less",
        ),
        ({"sync_every": -1}, "sync_every must be at least 0"),
    ],
)
def test_settings_that_cannot_work(train, changes, message):
    train.stages.train.update(changes)
    with pytest.raises(ValueError, match=message):
        run_issues.checked(train)
