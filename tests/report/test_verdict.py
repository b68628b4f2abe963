"""What is found: what a run's policy cost and where its gain came from, which K of a study is
enough, and what the intervals do not decide."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from reports import cost, evaluation, finish

from g2d_jax.report.rows import read_study
from g2d_jax.report.runs import read_run
from g2d_jax.report.verdict import (
    RunVerdict,
    StudyVerdict,
    command,
    run_sentence,
    run_verdict,
    study_sentence,
    study_verdict,
)
from g2d_jax.runtime.storage import write_json

PROBLEMS = 400
STEPS = "stages.warmup.steps"
ONLINE = {"kind": "online", "policy": "sft", "steps": 10}
STAGES = {
    "sft": {"kind": "sft", "policy": "init"},
    "warmup": ONLINE,
    "collect": {"kind": "collect", "policy": "warmup"},
    "dpo": {"kind": "offline", "policy": "warmup", "preferences": "collect"},
}


def answers(accuracy: float) -> dict[str, list]:
    """One answer to each problem, the first ones right, or none that can be scored."""
    if math.isnan(accuracy):
        return {f"p{i:03d}": ["u"] for i in range(PROBLEMS)}
    return {f"p{i:03d}": [int(i < round(PROBLEMS * accuracy))] for i in range(PROBLEMS)}


def run(
    root: Path, accuracies: dict[str, float], stages: dict, flops: dict[str, float]
) -> RunVerdict | None:
    """The verdict of a run whose policies reach these accuracies, in the order given."""
    config = {"name": "mine", "stages": {**stages, "evaluate": {"kind": "evaluate"}}}
    write_json(root / "config.json", {"config": config})
    for i, (name, section) in enumerate(stages.items(), 1):
        spent = cost(flops.get(name, 0))
        counts = {"steps": section.get("steps", 0)}
        finish(root / f"{i:02d}-{name}", section["kind"], counts=counts, cost=spent)
    folder = root / f"{len(stages) + 1:02d}-evaluate"
    evaluation(folder, {name: answers(a) for name, a in accuracies.items()})
    return run_verdict(read_run(root))


SPENT = {"sft": 7e12, "warmup": 48e9, "collect": 300e9, "dpo": 100e9}


@pytest.mark.parametrize(
    ("accuracies", "gain", "added", "conclusive", "share"),
    [
        ((0.3, 0.42, 0.78), 0.48, 0.36, (True, True), 0.75),
        ((0.3, 0.3, 0.6), 0.3, 0.3, (True, True), 1.0),
        ((0.3, 0.5, 0.5025), 0.2025, 0.0025, (True, False), math.nan),
        ((0.3, 0.6, 0.5), 0.2, -0.1, (True, True), math.nan),
        ((0.5, 0.45, 0.4), -0.1, -0.05, (True, True), math.nan),
        ((0.3, 0.3, 0.305), 0.005, 0.005, (False, False), math.nan),
    ],
)
def test_a_run_says_what_it_cost_and_where_its_gain_came_from(
    tmp_path: Path,
    accuracies: tuple[float, ...],
    gain: float,
    added: float,
    conclusive: tuple[bool, bool],
    share: float,
) -> None:
    names = ("sft", "warmup", "dpo")
    found = run(tmp_path, dict(zip(names, accuracies, strict=True)), STAGES, SPENT)
    assert found is not None and found.score == accuracies[-1] and found.flops == 448e9
    assert (found.problems, found.before, found.loss) == ("400 problems", "cold (sft)", "DPO")
    assert (found.gain.mean, found.added.mean) == pytest.approx((gain, added))
    assert (found.gain.conclusive, found.added.conclusive) == conclusive
    assert found.share == pytest.approx(share, nan_ok=True)
    assert run_sentence(found).startswith("10 GRPO updates, then DPO: ")


def test_the_sentence_of_a_run_has_its_numbers(tmp_path: Path) -> None:
    found = run(tmp_path, {"sft": 0.3, "warmup": 0.42, "dpo": 0.78}, STAGES, SPENT)
    assert run_sentence(found) == (
        "10 GRPO updates, then DPO: 78.0 ± 2.1 % right on 400 problems, for 448 GFLOPs. "
        "75 % of the gain over cold (sft), +48.0 [+43.1, +52.9] points, came from DPO."
    )


GRPO_ON = {"kind": "online", "policy": "dpo", "steps": 40}
COLLECT_2 = {"kind": "collect", "policy": "dpo"}
DPO_2 = {"kind": "offline", "policy": "dpo", "preferences": "collect2"}


@pytest.mark.parametrize(
    ("changed", "last", "made_by"),
    [
        (
            {"more": GRPO_ON},
            "more",
            "10 GRPO updates, then DPO, then 40 GRPO updates",
        ),
        (
            {"collect2": COLLECT_2, "dpo2": DPO_2},
            "dpo2",
            "10 GRPO updates, then DPO, then DPO",
        ),
        (
            {"dpo": {**STAGES["dpo"], "loss_type": "simpo"}},
            "dpo",
            "10 GRPO updates, then SimPO",
        ),
        (
            {"warmup": {**ONLINE, "sync_every": 0}},
            "dpo",
            "10 offline GRPO updates, then DPO",
        ),
        (
            {"warmup": {**ONLINE, "sync_every": 5}},
            "dpo",
            "10 semi-online GRPO updates, then DPO",
        ),
        (
            {"warmup": {**ONLINE, "sync_every": 4, "num_iterations": 4}},
            "dpo",
            "10 GRPO updates, then DPO",
        ),
        (
            {"collect": {"kind": "collect", "policy": "sft"}},
            "dpo",
            "10 GRPO updates, then DPO on rollouts of sft",
        ),
        (
            {"warmup": {**ONLINE, "policy": "run:../a/warmup"}},
            "dpo",
            "10 GRPO updates, then DPO, from run:../a/warmup",
        ),
    ],
)
def test_a_run_names_all_the_training_behind_its_policy(
    tmp_path: Path, changed: dict[str, dict], last: str, made_by: str
) -> None:
    found = run(tmp_path, {"sft": 0.3, last: 0.6}, {**STAGES, **changed}, SPENT)
    assert found is not None and found.made_by == made_by


def test_a_policy_of_elsewhere_is_not_said_to_be_without_training(tmp_path: Path) -> None:
    start = "run:../a/warmup"
    collect = {"kind": "collect", "policy": start}
    stages = {"collect": collect, "dpo": {**STAGES["dpo"], "policy": start}}
    found = run(tmp_path / "dpo", {start: 0.3, "dpo": 0.6}, stages, SPENT)
    assert found is not None and found.made_by == "DPO, from run:../a/warmup"
    found = run(tmp_path / "alone", {"dpo": 0.6, start: 0.3}, stages, SPENT)
    assert found is not None and found.before == "" and math.isnan(found.gain.mean)


def test_a_run_without_a_readable_answer_or_an_evaluation_has_no_verdict(tmp_path: Path) -> None:
    assert run(tmp_path / "a", {"sft": math.nan, "dpo": math.nan}, STAGES, SPENT) is None
    write_json(tmp_path / "b" / "config.json", {"config": {"stages": STAGES}})
    assert run_verdict(read_run(tmp_path / "b")) is None and run_sentence(None) == ""


G2D = dict[int, tuple[list[float], float]]


def study(root: Path, g2d: G2D, grpo: G2D) -> StudyVerdict:
    """The verdict of a study. g2d, grpo: steps -> each seed's accuracy, on dev and on test, and
    the FLOPs of the policy."""
    points = []

    def stage(name: str, kind: str, flops: float, steps: int = 0) -> str:
        finish(root / "stages" / name, kind, "any", counts={"steps": steps}, cost=cost(flops))
        return name

    for arm, at in (("g2d", g2d), ("grpo", grpo)):
        for k, (accuracies, flops) in at.items():
            for seed, accuracy in enumerate(accuracies):
                key, policy = f"{arm}-{k}-{seed}", "dpo" if arm == "g2d" else "warmup"
                links = {
                    "warmup": stage(f"warmup-{key}", "online", 0 if arm == "g2d" else flops, k)
                }
                stages = {"warmup": {**ONLINE, "policy": "init", "steps": k}}
                if arm == "g2d":
                    links["collect"] = stage(f"collect-{key}", "collect", 0)
                    links["dpo"] = stage(f"dpo-{key}", "offline", flops)
                    stages |= {name: STAGES[name] for name in ("collect", "dpo")}
                for split in ("dev", "test"):
                    folder = root / "stages" / f"{split}-{key}"
                    evaluation(folder, {policy: answers(accuracy)}, split=split)
                    links[split] = folder.name
                    stages[split] = {"kind": "evaluate", "split": split, "policies": [policy]}
                point = root / "points" / "fake" / key
                config = {"seed": seed, "compute": {}, "stages": stages}
                write_json(point / "config.json", {"config": config})
                targets = [[name, f"../../../stages/{to}"] for name, to in links.items()]
                write_json(point / "stages.json", targets)
                points.append({"arm": arm, "label": key, "seed": seed, "values": {STEPS: str(k)}})
    write_json(root / "sweeps" / "fake.json", {"config": {"name": "fake"}, "points": points})
    found = study_verdict(read_study(root, "fake"))
    assert "None" not in study_sentence(found) and "nan" not in study_sentence(found)
    return found


GRPO: G2D = {
    20: ([0.5, 0.5, 0.5], 40.0),
    40: ([0.79, 0.79, 0.79], 80.0),
    80: ([0.8, 0.8, 0.8], 100.0),
}


@pytest.mark.parametrize(
    ("g2d", "finding", "k", "difference", "share"),
    [
        (((0.6, 20.0), (0.795, 40.0)), "enough", 20, -0.005, 0.4),
        (((0.6, 20.0), (0.795, 90.0)), "alone", 20, -0.005, 0.9),
        (((0.6, 20.0), (0.7, 40.0)), "none", 20, -0.1, 0.4),
        (((0.6, 120.0), (0.7, 140.0)), "dearer", 20, -0.1, 1.4),
    ],
)
def test_a_study_finds_the_cheapest_that_comes_near_the_best(
    tmp_path: Path, g2d: tuple, finding: str, k: int, difference: float, share: float
) -> None:
    at = {10: ([g2d[0][0]] * 3, g2d[0][1]), 20: ([g2d[1][0]] * 3, g2d[1][1])}
    found = study(tmp_path, at, GRPO)
    assert (found.finding, [row.mean("K") for row in (found.row, found.best, found.alone)]) == (
        finding,
        [k, 80, 40],
    )
    assert found.difference.mean == pytest.approx(difference)
    assert (found.share(found.row), found.share(found.alone)) == pytest.approx((share, 0.8))
    assert (len(found.row.ids), len(found.row.seeds)) == (400, 3)


def test_the_sentence_of_a_study_has_its_numbers(tmp_path: Path) -> None:
    at: G2D = {10: ([0.6] * 3, 20.0), 20: ([0.795] * 3, 40.0)}
    said = study_sentence(study(tmp_path, at, GRPO))
    for part in (
        "(grpo, K = 80: 80.0 % for 100 FLOPs) for 40 % of its FLOPs",
        "g2d, K = 20 reaches 79.5 % for 40 FLOPs",
        "-0.5 [-1.2, +0.2] points on 400 test problems with 3 seeds",
    ):
        assert part in said


def test_a_study_that_is_inconclusive_says_what_to_run(tmp_path: Path) -> None:
    found = study(tmp_path, {10: ([0.6] * 3, 20.0), 20: ([0.9, 0.7, 0.8], 40.0)}, GRPO)
    assert (found.finding, found.row.mean("K")) == ("inconclusive", 20)
    assert found.command == f"g2d sweep --config CONFIG --workdir {tmp_path}"
    assert study_sentence(found).endswith(found.command)


def test_a_k_of_more_seeds_than_grpo_has_is_not_judged(tmp_path: Path) -> None:
    """One lucky seed in common would make it enough, beside the mean of all three."""
    grpo: G2D = {k: (accuracies[:1], flops) for k, (accuracies, flops) in GRPO.items()}
    at: G2D = {10: ([0.3] * 3, 20.0), 20: ([0.81, 0.4, 0.4], 40.0)}
    found = study(tmp_path, at, grpo)
    assert (found.finding, found.difference.seeds) == ("chosen", 1)
    found = study(tmp_path / "mixed", {**at, 10: ([0.3], 20.0)}, grpo)
    assert (found.finding, found.row.seeds) == ("inconclusive", [0])


@pytest.mark.parametrize(
    "given", [["runs/a"], ["--workdir", "runs/a"], ["--workdir=runs/a"]], ids=" ".join
)
def test_a_command_names_the_folder_where_the_study_lies_now(
    tmp_path: Path, given: list[str]
) -> None:
    study(tmp_path, {10: ([0.6], 20.0)}, {})
    (folder,) = (tmp_path / "stages").glob("test-*")
    words = ["/bin/g2d", "sweep", "--config", "my file.py", *given, "--seeds=0,1"]
    write_json(folder / "environment.json", {"command": words})
    assert command(read_study(tmp_path, "fake")) == (
        f"g2d sweep --config 'my file.py' --seeds=0,1 --workdir {tmp_path}"
    )


def test_a_study_of_one_seed_has_one_and_one_of_one_arm_names_the_best_on_dev(
    tmp_path: Path,
) -> None:
    grpo: G2D = {k: (accuracies[:1], flops) for k, (accuracies, flops) in GRPO.items()}
    found = study(tmp_path / "both", {10: ([0.6], 20.0), 20: ([0.9], 40.0)}, grpo)
    assert (found.finding, found.row.seeds) == ("enough", [0]) and found.difference.low > 0
    found = study(tmp_path / "g2d", {10: ([0.6], 20.0), 20: ([0.7], 40.0)}, {})
    assert (found.finding, found.row.mean("K")) == ("chosen", 20)
    assert study(tmp_path / "grpo", {}, GRPO).finding == "chosen"
