"""Studies whose arms are tuned alike: the rule of choice, the parts that it joins, the verdicts."""

import json
import runpy
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from g2d_jax.recipes.config_load import resolve
from g2d_jax.report.rows import Row
from g2d_jax.session.stage_result import NO_ACCURACY, Evaluated, Evaluation, StageResult, write
from g2d_jax.study.frontier import Interval
from g2d_jax.sweep.points import points

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TUNED = runpy.run_path(str(BENCHMARKS / "tuned_alike.py"))
NAN = float("nan")
STEPS, RATE = "stages.warmup.steps", "stages.dpo.optimizer.learning_rate"
ONLINE = "stages.warmup.optimizer.learning_rate"
DEV = {
    ("g2d", "1e-4", 0): 0.3,
    ("g2d", "1e-4", 1): 0.5,
    ("g2d", "2e-4", 0): 0.6,
    ("g2d", "2e-4", 1): 0.3,
    ("grpo", "1e-3", 0): 0.7,
    ("grpo", "1e-3", 1): 0.7,
    ("grpo", "2e-3", 0): 0.7,
    ("grpo", "2e-3", 1): 0.7,
}


def write_study(folder, dev):
    """A part=tune as far as the rule reads it. dev: (arm, rate, seed) -> mean, None: not there."""
    listed = []
    for (arm, rate, seed), mean in dev.items():
        stage = f"dev-{arm}-{rate}-{seed}"
        values = {STEPS: "5", RATE if arm == "g2d" else ONLINE: rate}
        listed.append({"arm": arm, "seed": seed, "values": values, "stages": {"dev": stage}})
        if mean is not None:
            own = folder / "stages" / stage
            judged = Evaluated("dpo", "dpo", "", accuracy=replace(NO_ACCURACY, mean=mean))
            evaluation = Evaluation([judged], [], [], 1, 1, "dev", {})
            write(own, StageResult(kind="evaluate", name="dev", evaluation=evaluation))
    config = {"stages": {"warmup": {"optimizer": {"learning_rate": 5e-5}}}}
    (folder / "sweeps").mkdir()
    plan = {"points": listed, "config": config}
    (folder / "sweeps" / "tune.json").write_text(json.dumps(plan))


def test_the_best_mean_on_dev_is_chosen_and_of_equal_ones_the_first(tmp_path):
    write_study(tmp_path, DEV)
    choice = TUNED["choose"](tmp_path, "tune")
    best = {arm: rows[0]["best"]["settings"] for arm, rows in choice["arms"].items()}
    assert best == {"g2d": {STEPS: "5", RATE: "2e-4"}, "grpo": {STEPS: "5", ONLINE: "1e-3"}}
    assert [len(row["tried"]) for rows in choice["arms"].values() for row in rows] == [2, 2]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({("g2d", "1e-4", 1): None}, "1 of 8 points are not judged"),
        ({("g2d", "3e-4", 0): 0.1, ("g2d", "3e-4", 1): 0.1}, "equally many settings"),
        ({("g2d", "3e-4", 0): 0.1}, "has seeds"),
    ],
)
def test_nothing_is_chosen_of_a_study_that_is_not_finished_or_uneven(tmp_path, changes, says):
    write_study(tmp_path, DEV | changes)
    with pytest.raises(SystemExit, match=says):
        TUNED["choose"](tmp_path, "tune")


def test_a_chosen_setting_without_a_field_takes_the_config_s(tmp_path):
    write_study(tmp_path, DEV)
    plan = tmp_path / "sweeps" / "tune.json"
    content = json.loads(plan.read_text())
    for point in content["points"]:
        if point["arm"] == "grpo":
            point["arm"] = "g2d"
            point["values"][STEPS] = "0"
    plan.write_text(json.dumps(content))
    choice = tmp_path / "choice.json"
    content["config"]["stages"]["dpo"] = {"optimizer": {"learning_rate": 7e-6}}
    plan.write_text(json.dumps(content))
    choice.write_text(json.dumps(TUNED["choose"](tmp_path, "tune")))
    assert TUNED["arms"](choice) == {
        "g2d": (f"{STEPS}=0,5", f"{ONLINE}=1e-3,5e-05", f"{RATE}=7e-06,2e-4")
    }


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (0.001, 0.2, "better"),
        (-0.2, -0.001, "worse"),
        (-0.019, 0.019, "level"),
        (-0.021, 0.019, "inconclusive"),
        (-0.01, 0.03, "inconclusive"),
        (NAN, NAN, "inconclusive"),
    ],
)
def test_verdicts(low, high, word):
    assert TUNED["verdict"](Interval((low + high) / 2, low, high, 5, 100)) == word
    # of one seed: over problems only
    assert TUNED["verdict"](Interval((low + high) / 2, low, high, 1, 100)) == "inconclusive"
    assert TUNED["verdict"](None) == "out of range"


def test_nothing_is_denied_by_one_seed():
    """Its interval is over problems only."""
    far = {0: ("worse", Interval(-0.1, -0.12, -0.08, 3, 100))}
    assert TUNED["_worth"](far) == "no."
    one = {**far, 5: ("inconclusive", Interval(-0.1, -0.12, -0.08, 1, 100))}
    assert TUNED["_worth"](one) == "inconclusive."
    assert TUNED["_worth"]({**far, 5: ("out of range", None)}) == "inconclusive."


def test_a_setting_that_is_judged_in_no_seed_is_named():
    def row(*labels):
        return SimpleNamespace(policies={"workdir": labels})

    left_out = {"g2d,steps=5,seed=2": "not finished", "g2d,steps=80,seed=2": "not finished"}
    read = SimpleNamespace(rows=[row("g2d,steps=5,seed=1")], left_out=left_out)
    with pytest.raises(SystemExit, match=r"judged in no seed yet: g2d,steps=80$"):
        TUNED["answers"](read)


def policies(seeds_and_costs, accuracies):
    """A row as `advantage` reads it."""
    ids = [["a", "b"]] * len(accuracies)
    correct = [np.array(own)[:, None] for own in accuracies]
    columns = {"seed": [*seeds_and_costs], "flops": [*seeds_and_costs.values()]}
    return Row("", "", "", pd.DataFrame({**columns, "ids": ids, "correct": correct}))


def test_lines_join_budgets_that_follow_each_other_and_a_seed_out_of_range_is_none():
    """The second seed's longest run was ruined: it cost less than the one before it."""
    grpo = [
        policies({1: 10.0, 2: 10.0}, [[0.2, 0.4], [0.2, 0.4]]),
        policies({1: 20.0, 2: 20.0}, [[0.4, 0.6], [0.4, 0.6]]),
        policies({1: 30.0, 2: 16.0}, [[0.5, 0.7], [0.0, 0.0]]),
    ]
    row = policies({1: 15.0, 2: 15.0}, [[0.5, 0.7], [0.5, 0.7]])
    found = TUNED["advantage"](row, grpo, "flops", 0.95)
    assert (found.mean, found.seeds) == (pytest.approx(0.2), 2)
    beyond = policies({1: 25.0, 2: 25.0}, [[0.5, 0.7], [0.5, 0.7]])
    assert TUNED["advantage"](beyond, grpo, "flops", 0.95) is None


def tried(config):
    """Settings by arm, budget and seed."""
    counts = Counter()
    for point in points(config):
        counts[TUNED["arm_of"](point.arm), point.values[STEPS], point.seed] += 1
    return counts


@pytest.mark.parametrize("preset", ["full", "smoke"])
@pytest.mark.parametrize(
    "spec",
    [
        "demo_study.py:part=tune",
        "smollm2_study.py:part=tune,task=stories",
        "smollm2_study.py:part=tune,task=arithmetic",
    ],
)
@pytest.mark.usefixtures("prepared")
def test_as_many_settings_are_tried_of_each_arm_at_each_budget(spec, preset):
    config = resolve(f"{BENCHMARKS / spec},preset={preset}")
    config.sweep.seeds = (0,)  # each is the same
    counts = tried(config)
    assert {arm for arm, *_ in counts} == {"g2d", "grpo"}
    assert len(set(counts.values())) == 1
    assert config.stages.dev.split == "dev" and "evaluate" not in config.stages


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize("study", ["demo_study.py", "smollm2_study.py"])
def test_judging_needs_what_was_chosen(study, tmp_path):
    with pytest.raises(ValueError, match="run part=tune to its end"):
        resolve(f"{BENCHMARKS / study}:part=judge,choice={tmp_path / 'none.json'}")


def test_judged_are_the_chosen_settings_on_seeds_that_chose_nothing(tmp_path):
    write_study(tmp_path, DEV)
    choice = tmp_path / "choice.json"
    choice.write_text(json.dumps(TUNED["choose"](tmp_path, "tune")))
    config = resolve(f"{BENCHMARKS / 'demo_study.py'}:part=judge,choice={choice}")
    judged = points(config)
    assert {point.seed for point in judged} == set(range(10, 20))
    assert {(point.arm, *point.values.values()) for point in judged} == {
        ("g2d", "5", "2e-4"),
        ("grpo", "5", "1e-3"),
    }
    assert "dev" not in config.stages and config.stages.evaluate.split == "test"


def test_arithmetic_has_every_problem_once():
    rows = []
    for line in (
        (BENCHMARKS.parent / "examples/smollm2/arithmetic.jsonl").read_text("utf-8").splitlines()
    ):
        rows.append(json.loads(line))
    compute = {"plus": int.__add__, "minus": int.__sub__, "times": int.__mul__}
    for row in rows:
        first, word, second = row["problem"].removeprefix("What is ").rstrip("?").split()
        assert row["answer"] == str(compute[word](int(first), int(second)))
    assert len({row["problem"] for row in rows}) == len(rows) == 19 * 19 + 190 + 121
