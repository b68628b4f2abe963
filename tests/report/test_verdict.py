"""The sentence on top of a page: what a run's policy cost and where its gain came from, which K of
a study is enough, and that it cannot be told where the intervals do not tell."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from reports import evaluation

from g2d_jax.report.read import read_run, read_study
from g2d_jax.report.verdict import run_verdict, study_verdict
from g2d_jax.runtime.storage import finish, read_json, write_json
from g2d_jax.study.stats import paired

PROBLEMS = 400
STEPS = "stages.warmup.steps"
ONLINE = {"kind": "online", "policy": "sft", "steps": 10}
STAGES = {
    "sft": {"kind": "sft", "policy": "init"},
    "warmup": ONLINE,
    "collect": {"kind": "collect", "policy": "warmup"},
    "dpo": {"kind": "offline", "policy": "warmup", "preferences": "collect"},
}


def cost(flops: float) -> dict:
    tokens = dict.fromkeys(("generated", "prefilled", "scored", "trained"), 1)
    return {"seconds": 1.0, "device_seconds": 1.0, "flops": flops, "tokens": tokens}


def answers(accuracy: float) -> dict[str, list[int]]:
    """One answer to each problem, the first ones right."""
    right = 0 if math.isnan(accuracy) else round(PROBLEMS * accuracy)
    return {f"p{i:03d}": [int(i < right)] for i in range(PROBLEMS)}


def pairs(accuracies: dict[str, float]) -> list[dict]:
    """The paired differences of every two policies, as an evaluation has them."""
    table = {name: np.array([*answers(a).values()], float) for name, a in accuracies.items()}
    names = [*table]
    found = []
    for i, before in enumerate(names):
        for after in names[i + 1 :]:
            apart = paired(table[before], table[after])
            entry = {"difference": apart.difference, "sem": apart.sem, "problems": PROBLEMS}
            found.append({"before": before, "after": after, **entry})
    return found


def run(root: Path, accuracies: dict[str, float], stages: dict, flops: dict[str, float]) -> str:
    """The verdict of a run whose policies reach these accuracies, in the order given."""
    config = {"name": "mine", "stages": {**stages, "evaluate": {"kind": "evaluate"}}}
    write_json(root / "config.json", {"config": config})
    for i, (name, section) in enumerate(stages.items(), 1):
        counts = {"steps": section.get("steps", 0)}
        manifest = {"kind": section["kind"], "name": name, "counts": counts, "result": {}}
        finish(root / f"{i:02d}-{name}", {**manifest, **cost(flops.get(name, 0))})
    folder = root / f"{len(stages) + 1:02d}-evaluate"
    result = {"split": "test", "problems": PROBLEMS, "samples": 1, "paired": pairs(accuracies)}
    evaluation(folder, {name: answers(a) for name, a in accuracies.items()}, result)
    manifest = read_json(folder / "manifest.json")
    for entry in manifest["result"]["policies"]:
        entry["mean"] = accuracies[entry["name"]]
    finish(folder, {**manifest, **cost(0)})
    return run_verdict(read_run(root))


SPENT = {"sft": 7e12, "warmup": 48e9, "collect": 300e9, "dpo": 100e9}


@pytest.mark.parametrize(
    ("accuracies", "said"),
    [
        (
            {"sft": 0.3, "warmup": 0.42, "dpo": 0.78},
            "10 online updates and DPO on their rollouts: 78.0 % of 400 problems for 448 GFLOPs; "
            "75 % of the gain came from DPO.",
        ),
        (
            {"sft": 0.3, "warmup": 0.3, "dpo": 0.6},
            "10 online updates and DPO on their rollouts: 60.0 % of 400 problems for 448 GFLOPs; "
            "100 % of the gain came from DPO.",
        ),
        (
            {"sft": 0.3, "warmup": 0.5, "dpo": 0.5025},
            "10 online updates and DPO on their rollouts: 50.2 % of 400 problems for 448 GFLOPs; "
            "it gained 20.2 points on cold (sft), and that any of it came from DPO cannot be told "
            "(+0.2).",
        ),
        (
            {"sft": 0.3, "warmup": 0.6, "dpo": 0.5},
            "10 online updates and DPO on their rollouts: 50.0 % of 400 problems for 448 GFLOPs; "
            "it gained 20.0 points on cold (sft), and more before DPO took 10.0.",
        ),
        (
            {"sft": 0.5, "warmup": 0.45, "dpo": 0.4},
            "10 online updates and DPO on their rollouts: 40.0 % of 400 problems for 448 GFLOPs; "
            "it lost 10.0 points against cold (sft).",
        ),
        (
            {"sft": 0.3, "warmup": 0.3, "dpo": 0.305},
            "10 online updates and DPO on their rollouts: 30.5 % of 400 problems for 448 GFLOPs; "
            "that it differs from cold (sft) cannot be told (+0.5 points).",
        ),
    ],
)
def test_a_run_says_what_it_cost_and_where_its_gain_came_from(
    tmp_path: Path, accuracies: dict[str, float], said: str
) -> None:
    assert run(tmp_path, accuracies, STAGES, SPENT) == said


GRPO_ON = {"kind": "online", "policy": "dpo", "steps": 40}
COLLECT_2 = {"kind": "collect", "policy": "dpo"}
DPO_2 = {"kind": "offline", "policy": "dpo", "preferences": "collect2"}


@pytest.mark.parametrize(
    ("changed", "last", "made_by"),
    [
        ({"more": GRPO_ON}, "more", "10 online updates, then DPO, then 40 online updates: "),
        (
            {"collect2": COLLECT_2, "dpo2": DPO_2},
            "dpo2",
            "10 online updates, then DPO, then DPO: ",
        ),
        ({"dpo": {**STAGES["dpo"], "loss_type": "simpo"}}, "dpo", "10 online updates and SimPO on"),
        ({"warmup": {**ONLINE, "sync_every": 0}}, "dpo", "10 offline updates and DPO on their"),
        ({"warmup": {**ONLINE, "sync_every": 5}}, "dpo", "10 semi-online updates and DPO on their"),
        (
            {"warmup": {**ONLINE, "sync_every": 4, "num_iterations": 4}},
            "dpo",
            "10 online updates and DPO on their rollouts: ",
        ),
        (
            {"collect": {"kind": "collect", "policy": "sft"}},
            "dpo",
            "10 online updates and DPO on rollouts of sft: ",
        ),
        (
            {"warmup": {**ONLINE, "policy": "run:../a/warmup"}},
            "dpo",
            "10 online updates and DPO on their rollouts, from run:../a/warmup: ",
        ),
    ],
)
def test_a_run_names_all_the_training_behind_its_policy(
    tmp_path: Path, changed: dict[str, dict], last: str, made_by: str
) -> None:
    said = run(tmp_path, {"sft": 0.3, last: 0.6}, {**STAGES, **changed}, SPENT)
    assert said.startswith(f"{made_by}"), said


def test_a_policy_of_elsewhere_is_not_said_to_be_without_training(tmp_path: Path) -> None:
    start = "run:../a/warmup"
    collect = {"kind": "collect", "policy": start}
    stages = {"collect": collect, "dpo": {**STAGES["dpo"], "policy": start}}
    said = run(tmp_path / "dpo", {start: 0.3, "dpo": 0.6}, stages, SPENT)
    assert said.startswith("DPO on its rollouts, from run:../a/warmup: 60.0 %")
    said = run(tmp_path / "alone", {"dpo": 0.6, start: 0.3}, stages, SPENT)
    assert said == "The policy run:../a/warmup: 30.0 % of 400 problems."


def test_an_evaluation_without_a_readable_answer_has_no_verdict(tmp_path: Path) -> None:
    assert run(tmp_path, {"sft": math.nan, "dpo": math.nan}, STAGES, SPENT) == ""


def test_a_run_without_an_evaluation_has_no_verdict(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"config": {"stages": STAGES}})
    assert run_verdict(read_run(tmp_path)) == ""


G2D = dict[int, tuple[list[float], float]]


def study(root: Path, g2d: G2D, grpo: G2D, changed: dict[str, dict] | None = None) -> str:
    """The verdict of a study. g2d, grpo: steps -> each seed's accuracy, on dev and on test, and
    the FLOPs of the policy. changed: settings by kind of stage."""
    points = []

    def stage(name: str, kind: str, flops: float, steps: int = 0) -> str:
        manifest = {"kind": kind, "name": name.partition("-")[0], "counts": {"steps": steps}}
        finish(root / "stages" / name, {**manifest, "result": {}, **cost(flops)})
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
                    result = {"split": split, "problems": PROBLEMS, "samples": 1}
                    evaluation(folder, {policy: answers(accuracy)}, result, mean=accuracy)
                    finish(folder, {**read_json(folder / "manifest.json"), **cost(0)})
                    links[split] = folder.name
                    stages[split] = {"kind": "evaluate", "split": split, "policies": [policy]}
                for name, section in stages.items():
                    stages[name] = {**section, **(changed or {}).get(section["kind"], {})}
                point = root / "points" / "fake" / key
                config = {"seed": seed, "compute": {}, "stages": stages}
                write_json(point / "config.json", {"config": config})
                targets = [[name, f"../../../stages/{to}"] for name, to in links.items()]
                write_json(point / "stages.json", targets)
                points.append({"arm": arm, "label": key, "seed": seed, "values": {STEPS: str(k)}})
    write_json(root / "sweeps" / "fake.json", {"config": {"name": "fake"}, "points": points})
    return study_verdict(read_study(root, "fake"))


GRPO: G2D = {
    20: ([0.5, 0.5, 0.5], 40.0),
    40: ([0.79, 0.79, 0.79], 80.0),
    80: ([0.8, 0.8, 0.8], 100.0),
}


@pytest.mark.parametrize(
    ("g2d", "said"),
    [
        (
            {10: ([0.6, 0.6, 0.6], 20.0), 20: ([0.795, 0.795, 0.795], 40.0)},
            "On these 400 problems 20 online steps and DPO (79.5 %) come within 2 points of the "
            "best GRPO (grpo, K = 80: 80.0 %, 100 FLOPs) for 40 % of its FLOPs; GRPO alone takes "
            "80 % to come within 2 points.",
        ),
        (
            {10: ([0.6, 0.6, 0.6], 20.0), 20: ([0.795, 0.795, 0.795], 90.0)},
            "On these 400 problems GRPO alone (grpo, K = 40: 79.0 %) comes within 2 points of the "
            "best GRPO (grpo, K = 80: 80.0 %, 100 FLOPs) for 80 % of its FLOPs; the cheapest K "
            "that does with DPO, 20 online steps, takes 90 %.",
        ),
        (
            {10: ([0.6, 0.6, 0.6], 20.0), 20: ([0.7, 0.7, 0.7], 40.0)},
            "On these 400 problems no K tried comes within 2 points of the best GRPO (grpo, K = "
            "80: 80.0 %, 100 FLOPs) for less: the nearest, 20 online steps and DPO, differs by "
            "-10.0 [-13.0, -7.0].",
        ),
        (
            {10: ([0.6, 0.6, 0.6], 120.0), 20: ([0.7, 0.7, 0.7], 140.0)},
            "On these 400 problems every K tried with offline training costs more than the best GRPO "
            "(grpo, K = 80: 80.0 %, 100 FLOPs): the highest, 20 online steps and DPO, differs by "
            "-10.0 [-13.0, -7.0] for 140 FLOPs.",
        ),
    ],
)
def test_a_study_names_the_cheapest_that_comes_near_the_best(
    tmp_path: Path, g2d: G2D, said: str
) -> None:
    assert study(tmp_path, g2d, GRPO) == said


def test_a_study_that_cannot_tell_says_what_to_run(tmp_path: Path) -> None:
    said = study(tmp_path, {10: ([0.6, 0.6, 0.6], 20.0), 20: ([0.9, 0.7, 0.8], 40.0)}, GRPO)
    assert said.startswith(
        "On these 400 problems it cannot be told whether any K comes within 2 points of the best "
        "GRPO (grpo, K = 80: 80.0 %, 100 FLOPs) for less: the nearest, 20 online steps and DPO, "
        "differs by +0.0 ["
    )
    assert said.endswith(
        "over 3 seeds. More seeds (--seeds) can tell; run: g2d sweep --config "
        f"CONFIG --workdir {tmp_path}"
    )


def test_a_study_of_one_seed_says_so_and_what_is_above_the_best_is_said_to_be(
    tmp_path: Path,
) -> None:
    grpo: G2D = {k: (accuracies[:1], flops) for k, (accuracies, flops) in GRPO.items()}
    said = study(tmp_path, {10: ([0.6], 20.0), 20: ([0.9], 40.0)}, grpo)
    assert said.startswith(
        "On these 400 problems, with one seed, 20 online steps and DPO (90.0 %) are above the best "
        "GRPO (grpo, K = 80: 80.0 %, 100 FLOPs) for 40 % of its FLOPs; "
    )


def test_a_study_of_one_arm_has_no_verdict(tmp_path: Path) -> None:
    assert study(tmp_path / "g2d", {10: ([0.6], 20.0), 20: ([0.7], 40.0)}, {}) == ""
    assert study(tmp_path / "grpo", {}, GRPO) == ""
