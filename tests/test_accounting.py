"""What a policy cost, from records."""

from typing import Any

import pytest

from g2d_jax.config.section import Rollouts
from g2d_jax.config.stages import stage as kinds
from g2d_jax.config.stages.stage import TrainingStage
from g2d_jax.session import accounting
from g2d_jax.session.accounting import cost_of
from g2d_jax.session.stage_result import MEASURES, TOKENS, Cost, StageResult

STAGES: dict[str, dict[str, Any]] = {
    "sft": {"kind": "sft", "policy": "init"},
    "warmup": {"kind": "online", "policy": "sft"},
    "pool": {"kind": "collect", "policy": "warmup@10", "rollouts": "sample"},
    "collect": {"kind": "collect", "policy": "warmup@10", "rollouts": "pool"},
    "dpo": {"kind": "offline", "policy": "warmup@20", "preferences": "collect"},
    "evaluate": {"kind": "evaluate", "policies": ("sft", "dpo")},
}


def spent(amount: float) -> Cost:
    """Every measure is a multiple of the amount."""
    tokens = {name: i * amount for i, name in enumerate(TOKENS, 1)}
    times = {"seconds": amount, "device_seconds": 8 * amount, "verifier_cpu_seconds": amount / 2}
    return Cost(flops=100 * amount, **tokens, **times)


def record(amount: float, **more: Any) -> StageResult:
    return StageResult(kind="any", name="any", cost=spent(amount), **more)


RESULTS = {
    "sft": record(1000),
    "warmup": record(50, counts={"steps": 50}, costs={"10": spent(10), "20": spent(20)}),
    "pool": record(3),
    "collect": record(0),
    "dpo": record(5),
    "evaluate": record(10_000),
}


def test_a_cost_by_measure() -> None:
    tokens = {"generated": 2, "prefilled": 4, "scored": 6, "trained": 8, "tokens": 20}
    times = {"seconds": 2, "device_seconds": 16, "verifier_cpu_seconds": 1}
    found = spent(2).measures
    assert found == {**tokens, "flops": 200, **times}
    assert tuple(found) == MEASURES


def test_a_collect_stage_counts_whatever_field_of_another_kind_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Learning(TrainingStage):  # without a kind, for that would register it for good
        answers: Rollouts = "collect"
        stream: str = "pool"  # a name of another sort

    monkeypatch.setitem(kinds.STAGES, "learning", Learning)
    monkeypatch.setattr(accounting, "POLICIES", (*accounting.POLICIES, "learning"))
    learning = {"kind": "learning", "policy": "sft", "answers": "collect", "stream": "pool"}
    results = {**RESULTS, "mine": record(7)}
    for answers, seconds in (("collect", 7 + 3 + 10), ("a/dump", 7)):
        stages = {**STAGES, "mine": {**learning, "answers": answers}}
        assert cost_of("mine", stages, results)["seconds"] == seconds


@pytest.mark.parametrize(
    ("policy", "seconds"),
    [
        *(("init", 0), ("hf:some/model", 0), ("run:elsewhere#dpo", 0), ("sft", 0)),
        *(("warmup@10", 10), ("warmup@50", 50), ("warmup", 50)),
        # the trajectory once, up to the later of its steps; the lent rollouts once
        (
            "dpo",
            5 + 20 + 3,
        ),
    ],
)
def test_everything_a_policy_is_made_from_counts_once(policy: str, seconds: float) -> None:
    assert cost_of(policy, STAGES, RESULTS)["seconds"] == seconds


def test_a_later_branch_extends_the_trajectory_and_a_policy_may_be_another_offline_stage_s() -> (
    None
):
    stages = {**STAGES, "collect": {**STAGES["collect"], "policy": "warmup"}}
    assert cost_of("dpo", stages, RESULTS)["seconds"] == 5 + 50 + 3
    stages = {
        **STAGES,
        "again": {"kind": "offline", "policy": "dpo", "preferences": "/some/pairs.parquet"},
    }
    assert cost_of("again", stages, {**RESULTS, "again": record(7)})["seconds"] == 7 + 5 + 20 + 3


@pytest.mark.parametrize(("steps", "seconds"), [((10, 20), 20), ((10,), 10), ((), 50)])
def test_a_choice_costs_all_that_was_looked_at(steps: tuple[int, ...], seconds: float) -> None:
    stages = {**STAGES, "best": {"kind": "best_checkpoint", "policy": "warmup", "steps": steps}}
    stages["more"] = {"kind": "offline", "policy": "best", "preferences": "pairs.parquet"}
    results = {**RESULTS, "best": record(2), "more": record(1)}
    assert cost_of("best", stages, results)["seconds"] == seconds + 2
    assert cost_of("more", stages, results)["seconds"] == seconds + 2 + 1


def test_every_measure_adds_up() -> None:
    assert cost_of("dpo", STAGES, RESULTS) == spent(5 + 20 + 3).measures


def test_what_is_not_known_is_named() -> None:
    with pytest.raises(ValueError, match="stage 'pool' has not finished yet"):
        cost_of("dpo", STAGES, {k: v for k, v in RESULTS.items() if k != "pool"})
    with pytest.raises(ValueError, match="'warmup' has no cost for step 30"):
        cost_of("warmup@30", STAGES, RESULTS)
    for policy in ("warm-up", "collect", "evaluate", "warmup@last"):
        with pytest.raises(
            ValueError, match=f"no stage trains '{policy}': .* one of sft, warmup, dpo"
        ):
            cost_of(policy, STAGES, RESULTS)
