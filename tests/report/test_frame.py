"""The frame of policies: what each was made from, what that cost, and how it answers."""

import math
from pathlib import Path

import numpy as np
import pytest
from reports import cost, evaluation, finish

from g2d_jax.report.frame import policies
from g2d_jax.report.runs import read_run
from g2d_jax.runtime.storage import write_json
from g2d_jax.session.stage_result import Selection

ROOT = Path(__file__).parents[2]
STAGES = {
    "sft": {"kind": "sft", "policy": "init", "optimizer": {"learning_rate": 3e-3}},
    "warmup": {
        **{"kind": "online", "policy": "sft", "sync_every": 0, "loss": "raft"},
        "optimizer": {"learning_rate": 1e-4},
    },
    "best": {"kind": "best_checkpoint", "policy": "warmup", "steps": [10, 20]},
    "collect": {"kind": "collect", "policy": "best", "rollouts": "sample"},
    "dpo": {
        **{"kind": "offline", "policy": "best", "preferences": "collect", "loss_type": "simpo"},
        "optimizer": {"learning_rate": 5e-5},
    },
}
ANSWERS = {
    "sft": {"b": [0, 0], "a": [1, 0]},
    "best": {"b": [0, 1], "a": [1, "u"]},
    "dpo": {"b": [1, 1], "a": [1, 1]},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """SFT, 20 online updates of which a checkpoint was chosen, and SimPO on its rollouts."""
    write_json(tmp_path / "config.json", {"config": {"seed": 7, "stages": STAGES}})
    chosen = Selection("warmup@10", {}, "dev")
    more = {
        "sft": {"cost": cost(1000.0)},
        "warmup": {
            **{"counts": {"steps": 20}, "cost": cost(200.0)},
            "costs": {"10": cost(100.0), "20": cost(200.0)},
        },
        "best": {"selection": chosen, "cost": cost(10.0)},
        "collect": {"cost": cost(20.0)},
        "dpo": {"cost": cost(30.0)},
    }
    for i, (name, section) in enumerate(STAGES.items(), 1):
        finish(tmp_path / f"{i:02d}-{name}", section["kind"], **more[name])
    evaluation(tmp_path / "06-evaluate", ANSWERS, informativeness={"mean_length": 24.0})
    return tmp_path


def test_a_row_has_ancestry_cost_and_accuracy(run: Path) -> None:
    frame = policies(run).set_index("policy")
    dpo = frame.loc["dpo"]
    assert (dpo["seed"], dpo["split"], dpo["kind"], dpo["loss"]) == (7, "test", "offline", "simpo")
    assert dpo["ancestry"] == "sft > warmup@10 > best > dpo"
    assert (dpo["K"], dpo["learning_rate"], dpo["online_learning_rate"]) == (10, 5e-5, 1e-4)
    assert math.isnan(dpo["s"])  # of online training alone
    # the trajectory up to the last step that was looked at, the choice, the rollouts, SimPO
    assert dpo["flops"] == 200 + 10 + 20 + 30 and dpo["seconds"] == 4.0
    assert (dpo["accuracy"], dpo["low"], dpo["high"]) == (1.0, 1.0, 1.0)
    best = frame.loc["best"]
    assert (best["kind"], best["loss"], best["s"], best["K"]) == ("online", "raft", math.inf, 10)
    # problems a and b: what was not scored is left out
    assert (best["accuracy"], best["problems"], best["samples"]) == (0.75, 2, 2)
    assert best["standard_error"] == pytest.approx(0.25) and best["mean_length"] == 24.0
    assert list(best["ids"]) == ["a", "b"]
    np.testing.assert_array_equal(best["correct"], [[1.0, np.nan], [0.0, 1.0]])
    sft = frame.loc["sft"]
    assert (sft["flops"], sft["K"], sft["learning_rate"]) == (0.0, 0, 3e-3)


def test_a_later_evaluation_of_fewer_policies_does_not_hide_what_was_gained(run: Path) -> None:
    evaluation(run / "07-more", {"dpo": {"b": [0, 0], "a": [0, 0]}})
    frame = policies(run)
    assert frame["policy"].tolist() == ["sft", "best", "dpo"]
    assert frame.set_index("policy").loc["dpo", "gain"] == 0.25
    assert len(read_run(run).latest.policies) == 3


def test_without_a_folder_it_says_what_to_give() -> None:
    with pytest.raises(ValueError, match="name folders of runs or studies"):
        policies()


def test_what_is_not_finished_is_not_known(run: Path) -> None:
    (run / "04-collect" / "manifest.json").unlink()
    frame = policies(run).set_index("policy")
    assert math.isnan(frame.loc["dpo", "flops"]) and frame.loc["best", "flops"] == 210
    assert "pairs" not in frame.columns


def test_the_tables_of_archived_studies_are_read_alike() -> None:
    frame = policies(ROOT / "benchmarks" / "results")
    judged = frame.query("study == 'demo-study-judge' and split == 'test' and policy == 'dpo'")
    assert {"K", "flops", "online_learning_rate"} <= {*frame.columns}
    assert (judged["low"] < judged["accuracy"]).all() and (judged["problems"] == 1024).all()
