"""Selection among kept checkpoints: scores from the answers on disk, and the choice as a policy
like any other."""

import numpy as np
import pytest
from etils import epath
from ml_collections import ConfigDict
from safetensors.numpy import load_file
from worlds import run

from g2d_jax import commands
from g2d_jax import config as settings
from g2d_jax.config import Config
from g2d_jax.config.graph import plan
from g2d_jax.config.io import from_dict, to_dict
from g2d_jax.records import ScoredRollout, Verdict
from g2d_jax.runtime import storage
from g2d_jax.runtime.tables import read_rollouts
from g2d_jax.runtime.tracking import read_metrics
from g2d_jax.session import accounting
from g2d_jax.session.policies import checkpoint_of, chosen_policy, load_policy, require_elsewhere
from g2d_jax.session.session import Session, StopRun
from g2d_jax.session.stage_result import NO_ACCURACY
from g2d_jax.session.workdir import claim
from g2d_jax.stages import run_issues
from g2d_jax.stages.best_checkpoint import best_step
from g2d_jax.stages.held_out import mean_quotient
from g2d_jax.sweep.graph import build
from g2d_jax.sweep.points import points


def negative(completions: list[str], **columns: object) -> list[float | None]:
    """A scalar reward below 0, and none at all for every third completion."""
    return [None if i % 3 == 2 else -1.0 - len(text) for i, text in enumerate(completions)]


def unscorable(completions: list[str], **columns: object) -> list[float | None]:
    return [None for _ in completions]


@pytest.fixture
def config(config: ConfigDict) -> ConfigDict:
    """Online training with kept steps, the best of them by a scalar reward, and an evaluation of
    it."""
    train, drawn = config.stages.warmup, settings.sampling(8)
    train.update(policy="init", steps=2, keep=(0, 1))
    with config.unlocked():
        config.stages = {
            "train": train,
            "best": settings.best_checkpoint(sampling=drawn),
            "evaluate": settings.evaluate(
                policies=("train@0", "best"),
                sampling=drawn,
                num_generations=2,
                pass_at=(1,),
                greedy=False,
            ),
        }
    config.reward.update(function="tiny:longest", verifiable=False)
    return config


def shard(session: Session, step: int) -> list[ScoredRollout]:
    return read_rollouts(session.folders["best"] / "rollouts" / f"train@{step}.parquet")


def per_token(groups: list[list[ScoredRollout]]) -> float:
    """Mean reward over mean length of those with a reward, the responses to each problem weighing
    the same."""
    known = [[r for r in group if r.score.reward is not None] for group in groups]
    rewards = np.mean([np.mean([r.score.reward for r in group]) for group in known if group])
    return float(
        rewards
        / np.mean([np.mean([len(r.rollout.token_ids) for r in group]) for group in known if group])
    )


def test_the_best_step_is_chosen_and_its_answers_are_read_back(config, tmp_path, opened):
    session = opened(config, tmp_path, None)
    run(session, "train")
    manifest = run(session, "best")
    result = manifest.selection
    expected = {step: per_token([[row] for row in shard(session, step)]) for step in (0, 1, 2)}
    assert {int(step): found.score for step, found in result.steps.items()} == pytest.approx(
        expected
    )
    assert (
        result.policy == f"train@{max(expected, key=lambda step: expected[step])}"
        and manifest.warnings == []
    )
    assert manifest.counts == {"checkpoints": 3, "problems": 8} and manifest.cost.flops > 0
    rows = shard(session, 1)
    assert {row.policy for row in rows} == {"train@1"} and len(rows) == 8
    assert {row.score.verdict for row in rows} == {Verdict.SCORED}
    one = result.steps["1"].tasks["main"]
    assert one.reward == pytest.approx(np.mean([row.score.reward for row in rows]))
    assert (one.verifiable, one.problems, one.unscorable) == (False, 8, 0.0)
    logged = {
        r["step"]: r["metrics"]["score"]
        for r in read_metrics(tmp_path)
        if r["stage"] == "best" and r["kind"] == "train"
    }
    assert logged == pytest.approx(expected)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.parquet")}
    (tmp_path / "02-best" / "manifest.json").unlink()
    again = opened(config, tmp_path, None)
    with pytest.raises(ValueError, match="'best': that stage has not chosen a checkpoint yet"):
        load_policy(again, "best")
    assert storage.plain(run(again, "best").selection) == storage.plain(result)
    assert again.sampling.sampler.usage.generated == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.parquet")} == before


def test_the_choice_is_a_policy_like_any_other(config, tmp_path, opened):
    config.stages.best.steps = (0, 1)
    with config.unlocked(), config.stages.unlocked():
        config.stages.more = settings.collect(
            policy="best", prompts=4, num_generations=4, sampling=settings.sampling(8)
        )
    assert plan(run_issues.checked(config)[0]).order == ("train", "best", "more", "evaluate")
    claim(Config.of(config), epath.Path(tmp_path))
    session = opened(config, tmp_path, None)
    manifests = {name: run(session, name) for name in ("train", "best", "more", "evaluate")}
    chosen = manifests["best"].selection.policy
    entry = manifests["evaluate"].evaluation.policies[1]
    assert (entry.name, entry.label, entry.accuracy) == ("best", chosen, NO_ACCURACY)
    assert checkpoint_of(session, "best") == checkpoint_of(session, chosen)
    assert commands.last_policy(Config.of(config)) == "best"
    folders = [commands.export(tmp_path, tmp_path / name, policy=name) for name in ("best", chosen)]
    one, other = (load_file(folder / "model.safetensors") for folder in folders)
    assert all(np.array_equal(one[name], other[name]) for name in one.keys() | other.keys())
    elsewhere = f"run:{tmp_path}#best"
    require_elsewhere(elsewhere)
    assert chosen_policy(session, elsewhere) == f"run:{tmp_path}#{chosen}"
    assert checkpoint_of(session, elsewhere) == checkpoint_of(session, chosen)
    with pytest.raises(ValueError, match="a best_checkpoint stage chooses the step itself"):
        require_elsewhere(f"{elsewhere}@1")
    # the newest checkpoint of a stage that goes on is another at every load
    (tmp_path / "01-train" / "manifest.json").unlink()
    require_elsewhere(f"run:{tmp_path}#train@1")
    with pytest.raises(
        ValueError, match=r"has not finished.*step that it keeps, as in run:\S+#train@\d+"
    ):
        require_elsewhere(f"run:{tmp_path}#train")
    cost = accounting.cost_of("best", to_dict(config)["stages"], manifests)
    assert cost["flops"] == manifests["train"].costs["1"].flops + manifests["best"].cost.flops


def mixed(config: ConfigDict) -> ConfigDict:
    """The main task with its scalar reward, and "sums" whose answers are right or wrong."""
    values = to_dict(config)
    sums = settings.task(
        *(settings.source("procedural:chains", split, 60) for split in ("train", "dev", "test"))
    )
    values["tasks"] = {"sums": to_dict(sums)}
    values["tasks"]["sums"]["reward"]["function"] = "tiny:even"
    return from_dict(values)


def test_a_mixed_run_averages_its_tasks(config, tmp_path, opened):
    session = opened(mixed(config), tmp_path, negative)
    run(session, "train")
    manifest = run(session, "best")
    result = manifest.selection
    tasks = {problem.id: problem.task for problem in session.problems.by_split["dev"]}
    for step in (0, 1, 2):
        found, rows = result.steps[str(step)], shard(session, step)
        main, sums = (
            [row for row in rows if tasks[row.rollout.problem_id] == task]
            for task in ("main", "sums")
        )
        accuracy = np.mean([row.score.verdict == Verdict.CORRECT for row in sums])
        assert found.tasks["sums"].score == found.tasks["sums"].accuracy == pytest.approx(accuracy)
        missing = np.mean([row.score.reward is None for row in main])
        assert found.tasks["main"].unscorable == pytest.approx(missing) and 0.2 < missing < 0.4
        each = [
            [row for row in main if row.rollout.problem_id == p]
            for p, task in tasks.items()
            if task == "main"
        ]
        assert found.tasks["main"].score == pytest.approx(per_token(each))
        assert found.score == pytest.approx((accuracy + per_token(each)) / 2)
        spread = [found.tasks[task].score_sem for task in ("main", "sums")]
        assert found.sem == pytest.approx(np.hypot(*spread) / 2)
    (warning,) = manifest.warnings
    assert "rewards of the task main are negative on average" in warning.text


def test_without_any_score_there_is_no_choice(config, tmp_path, opened):
    config.stages.train.update(steps=0, keep=())
    session = opened(config, tmp_path, unscorable)
    run(session, "train")
    with pytest.raises(StopRun, match="best: no checkpoint of train has a score"):
        run(session, "best")


def test_one_short_reply_does_not_decide():
    """Mean reward over mean length; the mean of their quotients is 0.256 for the first and 0.02 for
    the second."""
    rewards = np.array([[1.0, 1.0], [1.0, 1.0]])
    short, even = np.array([[1.0, 100.0], [100.0, 199.0]]), np.array([[50.0, 50.0], [50.0, 50.0]])
    assert mean_quotient(rewards, short)[0] == pytest.approx(1 / 100)
    assert mean_quotient(rewards, even) == pytest.approx((1 / 50, 0.0))
    quotient, error = mean_quotient(
        np.array([[2.0, np.nan], [4.0, 2.0]]), np.array([[10.0, 999.0], [20.0, 40.0]])
    )
    assert quotient == pytest.approx(2.5 / 20)  # means of the problems: 2 and 3, 10 and 30
    # residuals 2 - 1.25 and 3 - 3.75, over the mean length
    assert error == pytest.approx(0.75 / 20)


def test_equal_scores_give_the_earlier_step():
    assert best_step({1: 0.5, 5: 0.75, 10: 0.75}) == 5
    assert best_step({1: float("nan"), 5: -2.0}) == 5
    assert best_step({1: float("nan")}) is None


@pytest.mark.parametrize(
    ("stage", "field", "value", "message"),
    [
        ("best", "steps", (1, 3), "steps has 3, but train keeps 0, 1, 2"),
        (
            "best",
            "policy",
            "train@1",
            "'train@1': name a stage of this run that trains, without a step",
        ),
        ("best", "policy", "init", "'init': name a stage of this run that trains"),
        (
            "evaluate",
            "policies",
            ("best@1",),
            "names the policy 'best@1', but a best_checkpoint stage chooses the step",
        ),
        ("evaluate", "policies", ("worst",), "'worst'; there are: init, best, train"),
    ],
)
def test_what_cannot_work_is_refused(config, stage, field, value, message):
    run_issues.checked(config)
    config.stages[stage][field] = value
    with pytest.raises(ValueError, match=message):
        run_issues.checked(config)


def test_steps_of_a_stage_that_may_end_by_itself_are_not_named(config):
    config.stages.train.update(budget={"amount": 1.0})
    config.stages.train.budget.amount = 1.0
    run_issues.checked(config)
    config.stages.best.steps = (1,)
    with pytest.raises(ValueError, match=r"steps is \(1,\), but train may end earlier"):
        run_issues.checked(config)


def test_points_of_a_study_choose_among_their_own_steps(config):
    config.unlock()
    config.sweep = settings.sweep(arms={"main": settings.arm(product=("stages.train.steps=1,2",))})
    made = build(points(config.lock()))
    selections = [node for node in made.nodes.values() if node.name == "best"]
    assert [tuple(node.config.stages["best"].steps) for node in selections] == [(0, 1), (0, 1, 2)]
    assert [tuple(node.config.stages["train"].keep) for node in selections] == [(0, 1, 2)] * 2
    train = next(node.id for node in made.nodes.values() if node.name == "train")
    assert all(node.inputs == [train] for node in selections)
    assert [config.stages["evaluate"].policies for _, config, _ in made.points] == [
        ("train@0", "best")
    ] * 2
    assert len([node for node in made.nodes.values() if node.name == "evaluate"]) == 1 + 2 + 2
    stages = [to_dict(config)["stages"] for _, config, _ in made.points]
    assert [accounting.behind("best", some) for some in stages] == [
        {"best": None, "train": 1},
        {"best": None, "train": 2},
    ]


def test_a_selection_on_a_schedule_with_an_end_has_its_own_trajectory(config):
    config.stages.train.optimizer.schedule = "linear"
    config.unlock()
    config.sweep = settings.sweep(arms={"main": settings.arm(product=("stages.train.steps=1,2",))})
    made = build(points(config.lock()))
    assert len([node for node in made.nodes.values() if node.name == "train"]) == 2
    assert {
        tuple(node.config.stages["best"].steps)
        for node in made.nodes.values()
        if node.name == "best"
    } == {()}
