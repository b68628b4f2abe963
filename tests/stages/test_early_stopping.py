"""Online stages that end before their last step: the rules' settings, what they cost out, and runs that go on after."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from etils import epath
from ml_collections import ConfigDict
from worlds import bits, run, training

from g2d_jax import accounting, dryrun, graph, pipeline
from g2d_jax import config as settings
from g2d_jax.config import Collect, Config, Offline, Online
from g2d_jax.config_load import resolve
from g2d_jax.models.flops import forward_flops
from g2d_jax.runtime import storage
from g2d_jax.runtime.tables import read_rollouts
from g2d_jax.runtime.tracking import read_metrics
from g2d_jax.stages import early_stopping
from g2d_jax.stages.cost import Cost
from g2d_jax.stages.policies import load_policy
from g2d_jax.stages.rollouts import correct
from g2d_jax.stages.runtime import Runtime
from g2d_jax.study.gain import Gain
from g2d_jax.training.checkpoint import Checkpoints

HERE = Path(__file__).parent
Manifests = dict[str, dict[str, Any]]


@pytest.fixture
def early() -> ConfigDict:
    return resolve(str(HERE / "early.py"))


def run_until(runtime: Runtime, until: str = "dpo") -> Manifests:
    """The stages of the config up to one, in order."""
    order = graph.plan(runtime.config).order
    return {name: run(runtime, name) for name in order[: order.index(until) + 1]}


def elsewhere(runtime: Runtime, config: ConfigDict, workdir: Path) -> Runtime:
    """The same runtime, programs and all, for another config in another folder."""
    folders = graph.plan(Config.of(config)).folders(epath.Path(workdir))
    return runtime.at(Config.of(config), folders, runtime.tracker, workdir=epath.Path(workdir))


def changed(config: ConfigDict, **changes: Any) -> ConfigDict:
    """A copy with stages.warmup changed."""
    other = config.copy_and_resolve_references()
    other.stages.warmup.update(changes)
    return other


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stop": "never"}, "stop must be one of steps, budget, adaptive"),
        ({"stop": "budget"}, "budget.amount must be positive, got 0.0"),
        ({"stop": "budget", "budget": {"amount": -1.0}}, "budget.amount must be positive, got -1.0"),
        ({"stop": "budget", "budget": {"amount": float("nan")}}, "budget.amount must be positive, got nan"),
        ({"stop": "budget", "budget": {"measure": "price", "amount": 1.0}}, "budget.measure must be one of"),
        ({"adaptive": {"min_steps": 0}}, "min_steps must be at least 1, got 0"),
        ({"probe": {"every": 0}}, "measures on probes, fresh samples that no filter of prompts chose: set probe.every"),
        ({"probe": {"num_generations": 1}}, "probe.num_generations and probe.prompts to 2 at least"),
        (
            {"probe": {"split": "test"}},
            "would choose where to end on the test problems, and it is to measure on others",
        ),
        ({"probe": {"split": "train"}}, "would choose where to end on the train problems, and it is to measure on"),
        ({"adaptive": {"min_steps": 8}}, "min_steps=8 and probe.every=1 the rule, which wants 2 probes in a row"),
        ({"probe": {"every": 3}}, "steps, the most there may be, is 8, but"),
        ({"steps": 0}, "ends no stage before step 3"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_any_work(early, changes, message):
    with pytest.raises(ValueError, match=r"^stages\.warmup[.:]") as error:
        pipeline.check(Config.of(changed(early, **changes)))
    assert message in str(error.value)


def test_an_adaptive_stage_needs_what_it_is_weighed_against(early):
    assert graph.followers("warmup", Config.of(early).stages) == ("collect", "collect", "dpo")
    stages = early.stages
    with early.unlocked(), stages.unlocked():
        stages.pool = stages.collect.copy_and_resolve_references()
    stages.collect.rollouts = "pool"
    assert graph.followers("warmup", Config.of(early).stages) == ("pool", "collect", "dpo")
    pipeline.check(Config.of(early))
    stages.collect.rollouts = "archive"
    assert graph.followers("warmup", Config.of(early).stages) == ("collect", "collect", "dpo")
    pipeline.check(Config.of(early))
    stages.collect.rollouts = str(HERE / "early.py")  # a file's rollouts are not of this stage's last policy
    with pytest.raises(ValueError, match="offline stage with policy='warmup' and the collect stage of its preferences"):
        pipeline.check(Config.of(early))
    stages.collect.update(rollouts="sample", policy="init")
    with pytest.raises(ValueError, match="the config has none"):
        pipeline.check(Config.of(early))
    stages.collect.policy, stages.dpo.policy = "warmup", "warmup@8"
    with pytest.raises(ValueError, match="the config has none"):
        pipeline.check(Config.of(early))
    pipeline.check(Config.of(changed(early, stop="steps")))


def test_an_adaptive_stage_needs_verdicts_on_two_problems(early, tmp_path, opened):
    early.reward.verifiable = False
    with pytest.raises(ValueError, match=r"^stages\.warmup: stop='adaptive' goes by the share of right responses"):
        pipeline.check(Config.of(early))
    pipeline.check(Config.of(changed(early, stop="budget", budget={"amount": 1.0})))
    both = early.copy_and_resolve_references()
    splits = (both.data[split] for split in ("train", "dev", "test"))
    with both.unlocked():
        both.tasks.sums = settings.task(*splits, function="tiny:even")
    pipeline.check(Config.of(both))  # the other task's responses are right or wrong
    early.reward.verifiable, early.data.dev.limit = None, 1
    runtime = opened(early, tmp_path, None)
    for begin in (lambda: run(runtime, "warmup"), lambda: dryrun.show(early)):
        with pytest.raises(ValueError, match=r"probe\.prompts=8 of data\.dev come to 1: give data\.dev more problems"):
            begin()
    assert not list((tmp_path / "01-warmup").glob("*/*"))


def test_a_probe_without_a_verdict_is_none_of_two_in_a_row(early, tmp_path, opened):
    forecast = {
        "accuracy": 0.5,
        "gain": 0.1,
        "prolonged": 0.1,
        "slope": 0.0,
        "slope_error": 0.0,
        "step_flops": 1.0,
        "offline_flops": 1.0,
    }
    runtime = opened(early, tmp_path, None)
    with training(runtime, "warmup", 8) as trainer:
        trainer.step, trainer.extra_state.prospects = 6, [{"step": step} for step in (0, 2, 4, 5, 6)]
        trainer.extra_state.forecasts = [{"step": step, "mixed": 0.5, **forecast} for step in (4, 6)]
        assert not early_stopping.ends(trainer, runtime.config.stage("warmup", Online))
        del trainer.extra_state.prospects[3]
        assert early_stopping.ends(trainer, runtime.config.stage("warmup", Online))
        trainer.step = 0


def test_offline_flops_are_those_counted_by_hand(config, tmp_path, opened):
    model = opened(config, tmp_path).model_config
    seen = {"prompt": 3.0, "length": 2.0, "chosen": 2.2, "rejected": 3.0, "mixed": 0.25}
    collect, offline = Collect(pairs_per_prompt=2), Offline(epochs=3)
    prompt = (3, 1 + 2 + 3)  # tokens, and the positions they read
    generated = [(3, 6), *[(2, 4 + 5)] * 5]
    pair = [prompt, (2, 4 + 5), (3, 4 + 5 + 6)]

    def flops(parts: list[tuple[int, int]]) -> float:
        return sum(forward_flops(model, tokens, positions) for tokens, positions in parts)

    def found(**changes: Any) -> float:
        return early_stopping.offline_flops(model, Gain(40, collect, offline), {**seen, **changes}, responses=5)

    scored_and_trained = flops(pair) * (1 + 3 * 3)
    assert found() == pytest.approx(40 * flops(generated) + 40 * 0.25 * 2 * scored_and_trained, rel=1e-12)
    assert found(mixed=0.0) == pytest.approx(40 * flops(generated), rel=1e-12)
    only_wrong = flops([prompt, (2, 9), (3, 15)])  # without a chosen one the mean response stands for it
    assert found(chosen=float("nan")) == pytest.approx(40 * flops(generated) + 20 * only_wrong * (1 + 3 * 3), rel=1e-12)
    collect = Collect(pairs_per_prompt=2, max_pairs=7)
    assert found() == pytest.approx(40 * flops(generated) + 7 * scored_and_trained, rel=1e-12)
    archived = early_stopping.offline_flops(model, Gain(40, collect, offline), seen, responses=0)
    assert archived == pytest.approx(7 * scored_and_trained, rel=1e-12)


def test_a_budget_ends_with_the_step_that_reaches_it(early, tmp_path, opened):
    whole = changed(early, stop="steps", steps=3, keep=(0, 1, 2))
    runtime = opened(whole, tmp_path / "whole", None)
    manifest = run(runtime, "warmup")
    assert manifest["stop"] == {"rule": "steps", "probes": []}
    at = {int(step): accounting.cost(record) for step, record in manifest["at"].items()}
    assert manifest["at"]["0"] == Cost().manifest()
    assert sorted(at) == [0, 1, 2, 3]
    just, more = 1.0, 1 + 1e-9
    for measure, step, factor, expected in (
        ("flops", 2, just, 2),
        ("flops", 1, more, 2),
        ("generated", 1, just, 1),
        ("trained", 2, more, 3),
        ("device_seconds", 0, just, 1),
        ("scored", 1, just, 3),  # nothing is scored without a reference
    ):
        name = f"{measure}-{step}-{factor}"
        amount = max(at[step][measure] * factor, 1e-6)
        budgeted = changed(whole, stop="budget", budget={"measure": measure, "amount": amount}, keep=())
        ended = run(elsewhere(runtime, budgeted, tmp_path / name), "warmup")
        assert ended["counts"]["steps"] == expected, name
        assert ended["counts"]["rollouts"] == expected * 4 * 4
        assert accounting.cost(ended)["flops"] == at[expected]["flops"]
        cost = {**ended["at"][str(expected)], "checkpointing_seconds": 0.0}  # that of writing this step is known later
        assert cost == {**{key: ended[key] for key in cost}, "checkpointing_seconds": 0.0}
        assert Checkpoints(tmp_path / name / "01-warmup" / "checkpoints").latest() == expected
        if measure == "scored":
            assert ended["stop"] == {"rule": "steps", "probes": []}
        else:
            spent = accounting.cost(ended)[measure]
            rule = {"rule": "budget", "measure": measure, "spent": spent, "step": expected}
            assert ended["stop"] == {**rule, "probes": []}
            assert spent >= amount


@pytest.mark.parametrize("rollouts", ["sample", "archive"])
def test_what_follows_goes_on_from_where_the_budget_ended_it(early, tmp_path, opened, rollouts):
    budgeted = changed(early, stop="budget", steps=5, budget={"measure": "device_seconds", "amount": 1e-6})
    budgeted.stages.collect.rollouts = rollouts
    runtime = opened(budgeted, tmp_path, None)
    pipeline.check(Config.of(budgeted))
    found = run_until(runtime)
    assert found["warmup"]["counts"]["steps"] == 1
    assert bits(load_policy(runtime, "warmup")) == bits(load_policy(runtime, "warmup@1"))
    assert bits(load_policy(runtime, "warmup")) != bits(load_policy(runtime, "init"))
    assert found["collect"]["counts"]["prompts"] == (8 if rollouts == "sample" else 4)
    assert found["dpo"]["counts"]["steps"] == 1
    if rollouts == "sample":
        assert estimated(runtime, found) == pytest.approx(found["collect"]["flops"] + found["dpo"]["flops"], rel=0.03)


def estimated(runtime: Runtime, found: Manifests) -> float:
    """offline_flops from the lengths and the share of mixed prompts that the collect stage really had."""
    rows = read_rollouts(runtime.folders["collect"] / "rollouts")
    groups = [rows[i : i + 4] for i in range(0, len(rows), 4)]
    lengths = np.array([len(row.rollout.token_ids) for row in rows]).reshape(-1, 4)
    right = correct(groups)
    seen = {
        "prompt": float(np.mean([len(group[0].rollout.prompt_ids) for group in groups])),
        "length": float(lengths.mean()),
        "chosen": found["collect"]["result"]["chosen_mean_length"],
        "rejected": found["collect"]["result"]["rejected_mean_length"],
        "mixed": float(np.mean([0 < rate < 1 for rate in right.mean(axis=1)])),
    }
    stages = runtime.config.stages
    return early_stopping.offline_flops(
        runtime.model_config, Gain(8, stages["collect"], stages["dpo"]), seen, responses=4
    )


def test_no_step_at_all_leaves_the_policy_it_starts_from(early, tmp_path, opened):
    none = changed(early, stop="budget", steps=0, budget={"measure": "flops", "amount": 1.0})
    runtime = opened(none, tmp_path, None)
    found = run_until(runtime)
    assert found["warmup"]["counts"] == {"steps": 0, "prompts": 0, "rollouts": 0, "train_problems": 40}
    assert found["warmup"]["at"] == {"0": Cost().manifest()}
    assert found["warmup"]["stop"] == {"rule": "steps", "probes": []}
    assert Checkpoints(runtime.folders["warmup"] / "checkpoints").steps() == [0]
    assert bits(load_policy(runtime, "warmup")) == bits(load_policy(runtime, "init"))
    assert found["collect"]["counts"]["pairs"] > 0
    assert found["dpo"]["counts"]["steps"] == 1


def unscorable_at_first(steps: int) -> Callable[..., list[float | None]]:
    """No verdict in so many calls, then the tiny task's rewards."""
    calls = iter(range(10**6))

    def reward(completions: list[str], **columns: Any) -> list[float | None]:
        known = next(calls) >= steps
        return [float(len(text) % 2 == 0) if known else None for text in completions]

    return reward


def test_forecasts_wait_for_verdicts_and_a_finished_stage_says_the_same_again(early, tmp_path, opened, capsys):
    runtime = opened(early, tmp_path, unscorable_at_first(3))  # the probe of no step, a batch, the probe of step 1
    manifest = run(runtime, "warmup")
    assert capsys.readouterr().out.count("predicted for settings of no study: beta is 0.1, in the studies 1.0; ") == 1
    probes = manifest["stop"]["probes"]
    assert probes[0]["step"] == 4  # before, the later half and two probes more had one without a verdict
    assert all(0 < probe["mixed"] <= 1 and 0 <= probe["accuracy"] <= 1 for probe in probes)
    (runtime.folders["warmup"] / storage.MANIFEST).unlink()
    again = run(runtime, "warmup")  # from the checkpoint: nothing is done, what was seen is still there
    clocked = {"started": 0, "checkpointing_seconds": 0, "programs": {}}  # a checkpoint cannot tell what it took itself
    assert {**again, **clocked} == {**manifest, **clocked}


def test_as_long_as_nothing_was_right_it_goes_on(early, tmp_path, opened):
    early.stages.warmup.steps = 4
    manifest = run(opened(early, tmp_path, lambda completions, **_: [0.0] * len(completions)), "warmup")
    assert manifest["counts"]["steps"] == 4
    assert manifest["stop"]["rule"] == "steps"
    assert manifest["stop"]["probes"] == []  # nothing is known of either way to go on


def uneven(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Half of the prompts are hopeless, the others right about half of the time."""
    pairs = zip(prompts, completions, strict=True)
    return [float(len(prompt) % 2 == 0 and len(text) % 2 == 0) for prompt, text in pairs]


def test_a_frozen_policy_has_slope_0_whatever_chooses_its_prompts(early, tmp_path, opened):
    """And so it ends at the first chance, though its rollouts' accuracy rises as hopeless prompts are left out."""
    early.stages.warmup.optimizer.learning_rate = 0.0
    early.stages.warmup.probe.every = 2
    early.checkpoint.every = 100
    frozen = changed(early, steps=8, prompts_per_step=10, adaptive={"min_steps": 6})
    runtime, forecasts = opened(frozen, tmp_path, uneven), []
    for name, filters in (
        ("drop_solved", {"drop_solved": {"after": 1}}),
        ("difficulty", {"difficulty": {"min_pass_rate": 0.2, "outside": 0.0}}),
        ("dynamic_sampling", {"dynamic_sampling": 1}),
    ):
        config = changed(frozen, **filters)
        pipeline.check(Config.of(config))
        manifest = run(elsewhere(runtime, config, tmp_path / name), "warmup")
        assert manifest["stop"]["rule"] == "adaptive" and manifest["stop"]["step"] == 8
        forecasts.append(manifest["stop"]["probes"])
        assert [probe["step"] for probe in forecasts[-1]] == [6, 8]
        for probe in forecasts[-1]:
            assert abs(probe["slope"]) <= 2 * probe["slope_error"] + 1e-12
            assert 0 < probe["accuracy"] < 1 and probe["gain"] > 0
        drawn = [
            read_rollouts(file) for file in sorted((tmp_path / name / "01-warmup/rollouts").glob("step-*.parquet"))
        ]
        rewards = [np.mean([row.score.reward for row in rows]) for rows in drawn]
        if name == "dynamic_sampling":
            assert len(rewards) > 8
        else:  # what the filter does to the prompts that are trained on, once all were seen
            assert np.mean(rewards[4:]) > np.mean(rewards[:4]) + 0.05
    levels = [[(probe["accuracy"], probe["gain"], probe["mixed"]) for probe in probes] for probes in forecasts]
    assert levels[1:] == levels[:1] * 2  # and what is left for offline training is measured alike


def enough(probe: dict[str, float]) -> bool:
    """What a probe finds, by hand."""
    bought = probe["prolonged"] / probe["offline_flops"] * probe["step_flops"]
    return probe["slope"] <= bought and probe["slope_error"] <= bought


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_adaptive_stage_that_is_killed_ends_where_it_would_have(tmp_path, runs):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    early: dict[str, Any] = {"config": HERE / "early.py", "until": "warmup"}
    runs(whole, **early)
    manifest = storage.finished(whole / "01-warmup")
    assert manifest is not None
    probes, end = manifest["stop"]["probes"], manifest["counts"]["steps"]
    assert manifest["stop"]["rule"] == "adaptive" and manifest["stop"]["step"] == end
    assert end < 8 and [probe["step"] for probe in probes] == list(range(2, end + 1))
    found = [enough(probe) for probe in probes]
    assert found[-2:] == [True, True] and not any(all(found[i : i + 2]) for i in range(len(found) - 2))
    rollouts = [read_rollouts(whole / "01-warmup" / part) for part in ("rollouts", "probe")]  # probes are paid for
    assert manifest["tokens"]["generated"] == sum(len(row.rollout.token_ids) for rows in rollouts for row in rows)
    assert manifest["dynamics"]["probe_cost"]["tokens"]["generated"] < manifest["tokens"]["generated"]
    logged = [record for record in read_metrics(whole) if record["kind"] == "adaptive"]
    assert [record["step"] for record in logged] == list(range(2, end + 1))
    for record, probe in zip(logged, probes, strict=True):
        assert record["metrics"] == {f"adaptive/{key}": value for key, value in probe.items() if key != "mixed"}

    runs(broken, -9, **early, file=["01-warmup/rollouts/step-000002.parquet", 0.0])
    runs(broken, -9, **{**early, "until": "collect"}, file=[f"01-warmup/checkpoints/{end}", 0.0])
    assert Checkpoints(broken / "01-warmup" / "checkpoints").latest() == end
    runs(broken, **early)
    again = storage.finished(broken / "01-warmup")
    assert again is not None
    for key in ("stop", "counts", "tokens", "flops", "fingerprint"):
        assert again[key] == manifest[key], key
    assert not (broken / "01-warmup" / "rollouts" / f"step-{end:06d}.parquet").exists()


@pytest.mark.slow
def test_a_probe_that_is_interrupted_is_made_again_and_ends_the_stage(tmp_path, runs):
    """SIGTERM during the probe that ends the warm-up: the step before it is saved, and nothing more is trained."""
    changes = ("stop=adaptive", "adaptive.min_steps=1", "steps=5", "probe.every=1", "probe.num_generations=4")
    frozen = [f"stages.warmup.{change}" for change in (*changes, "keep=()", "optimizer.learning_rate=0")]
    frozen.append("stages.sft.steps=1")
    stopped = runs(tmp_path, 75, overrides=frozen, call=["TERM", "_measured", 3])
    assert "told to stop; saved at step 3 of 5" in stopped["text"]
    runs(tmp_path, overrides=frozen, until="collect")
    manifest = storage.finished(tmp_path / "02-warmup")
    assert manifest is not None and manifest["counts"]["steps"] == 3
    assert (manifest["stop"]["rule"], manifest["stop"]["step"]) == ("adaptive", 3)
    assert [probe["step"] for probe in manifest["stop"]["probes"]] == [2, 3]
    assert manifest["at"]["3"]["flops"] == manifest["flops"]
    assert not list((tmp_path / "02-warmup" / "rollouts").glob("step-000003*"))
