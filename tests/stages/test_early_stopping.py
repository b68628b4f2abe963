"""Online stages that end at a budget: its settings, the step that reaches it, and runs that go on
after."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from etils import epath
from ml_collections import ConfigDict
from worlds import bits, run

from g2d_jax.config import Config, graph
from g2d_jax.recipes.config_load import resolve
from g2d_jax.runtime.tracking import read_metrics
from g2d_jax.session.policies import load_policy
from g2d_jax.session.session import Session
from g2d_jax.session.stage_result import Cost, Stop
from g2d_jax.stages import run_issues
from g2d_jax.training.checkpoint import Checkpoints

TINY = str(Path(__file__).parents[1] / "tiny.py")
Manifests = dict[str, dict[str, Any]]


@pytest.fixture
def early() -> ConfigDict:
    """From random parameters, so that the warm-up is the first stage."""
    config = resolve(TINY, ["seed=4"])
    with config.unlocked(), config.stages.unlocked():
        for name in ("sft", "evaluate"):
            del config.stages[name]
    config.stages.warmup.update(policy="init", steps=8, keep=())
    config.stages.warmup.optimizer.learning_rate = 1e-2
    config.stages.collect.pairs_per_prompt = 1
    return config


def run_until(session: Session, until: str = "dpo") -> Manifests:
    """The stages of the config up to one, in order."""
    order = graph.plan(session.config).order
    return {name: run(session, name) for name in order[: order.index(until) + 1]}


def elsewhere(session: Session, config: ConfigDict, workdir: Path) -> Session:
    """The same runtime, programs and all, for another config in another folder."""
    folder = epath.Path(workdir)
    folders = graph.plan(Config.of(config)).folders(folder)
    return replace(session, config=Config.of(config), folders=folders, workdir=folder)


def changed(config: ConfigDict, **changes: Any) -> ConfigDict:
    """A copy with stages.warmup changed."""
    other = config.copy_and_resolve_references()
    other.stages.warmup.update(changes)
    return other


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": {"amount": -1.0}}, "budget.amount must be at least 0"),
        ({"budget": {"measure": "price", "amount": 1.0}}, "budget.measure must be one of"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_any_work(early, changes, message):
    with pytest.raises(ValueError, match=r"^stages\.warmup[.:]") as error:
        run_issues.checked(changed(early, **changes))
    assert message in str(error.value)


def test_a_budget_ends_with_the_step_that_reaches_it(early, tmp_path, opened):
    whole = changed(early, steps=3, keep=(0, 1, 2))
    session = opened(whole, tmp_path / "whole", None)
    manifest = run(session, "warmup")
    assert manifest.stop == Stop()
    at = {int(step): cost.measures for step, cost in manifest.costs.items()}
    assert manifest.costs["0"] == Cost()
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
        budgeted = changed(whole, budget={"measure": measure, "amount": amount}, keep=())
        ended = run(elsewhere(session, budgeted, tmp_path / name), "warmup")
        assert ended.counts["steps"] == expected, name
        assert ended.counts["rollouts"] == expected * 4 * 4
        assert ended.cost.flops == at[expected]["flops"]
        # that of writing this step is known later
        costs = [ended.costs[str(expected)], ended.cost]
        one, other = (replace(cost, checkpointing_seconds=0.0) for cost in costs)
        assert one == other
        assert Checkpoints(tmp_path / name / "01-warmup" / "checkpoints").latest() == expected
        if measure == "scored":
            assert ended.stop == Stop()
        else:
            spent = ended.cost.measures[measure]
            assert ended.stop == Stop("budget", measure)
            assert spent >= amount


def test_what_follows_goes_on_from_where_the_budget_ended_it(early, tmp_path, opened):
    budgeted = changed(early, steps=5, budget={"measure": "device_seconds", "amount": 1e-6})
    budgeted.stages.collect.rollouts = "archive"
    session = opened(budgeted, tmp_path, None)
    run_issues.checked(budgeted)
    found = run_until(session)
    assert found["warmup"].counts["steps"] == 1
    logged = [row for row in read_metrics(tmp_path) if row["stage"] == "warmup"]
    assert [row["step"] for row in logged if "loss" in row["metrics"]] == [1]  # as the last is
    assert bits(load_policy(session, "warmup")) == bits(load_policy(session, "warmup@1"))
    assert bits(load_policy(session, "warmup")) != bits(load_policy(session, "init"))
    assert found["collect"].counts["prompts"] == 4
    assert found["dpo"].counts["steps"] == 1


def test_no_step_at_all_leaves_the_policy_it_starts_from(early, tmp_path, opened):
    none = changed(early, steps=0, budget={"measure": "flops", "amount": 1.0})
    session = opened(none, tmp_path, None)
    found = run_until(session)
    assert found["warmup"].counts == {
        "steps": 0,
        "prompts": 0,
        "rollouts": 0,
        "train_problems": 40,
    }
    assert found["warmup"].costs == {"0": Cost()}
    assert found["warmup"].stop == Stop()
    assert Checkpoints(session.folders["warmup"] / "checkpoints").steps() == [0]
    assert bits(load_policy(session, "warmup")) == bits(load_policy(session, "init"))
    assert found["collect"].counts["pairs"] > 0
    assert found["dpo"].counts["steps"] == 1
