"""Arms from offline to online: their order, what they are compared with, and what a study without some of it shows."""

import csv
import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from g2d_jax.records import Rollout, Score, ScoredRollout, Verdict
from g2d_jax.report import study_spectrum, write_study
from g2d_jax.report.page import html, markdown
from g2d_jax.report.study import read_study
from g2d_jax.report.study_page import report
from g2d_jax.storage import finish, write_json
from g2d_jax.tables import write_rollouts

HOSTILE = "<img src=x onerror=alert(1)>|=1"
COLD = [1, 0, 0, 0]
ARMS = {
    "grpo": ("grpo", 1, 400e9, [[1, 1, 1, 1], [1, 1, 0, 0]]),
    HOSTILE: ("group_dpo", 1, 500e9, [[1, 1, 1, 0], [1, 1, 1, 0]]),
    "offline": ("dpo", 0, 100e9, [[1, 1, 0, 0], [1, 0, 0, 0]]),
    "s1": ("dpo", 1, 300e9, [[1, 1, 1, 1], [1, 1, 1, 0]]),
    "s100": ("dpo", 100, 200e9, [[1, 1, 1, 0], [1, 1, 0, 0]]),
}  # loss, sync_every, FLOPs, right or wrong on each test problem by seed


def online(loss: str, sync_every: int) -> dict:
    return {"kind": "online", "policy": "sft", "steps": 20, "loss": loss, "sync_every": sync_every}


class Fake:
    """Writes a study's directory."""

    def __init__(self, root: Path) -> None:
        self.root, self.points = root, []

    def stage(self, name: str, **content) -> str:
        times = {"seconds": 2.0, "device_seconds": 2.0, "verifier_cpu_seconds": 0.5, "flops": 0}
        tokens = {"generated": 1000, "prefilled": 1, "scored": 0, "trained": 5}
        finish(self.root / "stages" / name, {"counts": {}, "result": {}, **times, "tokens": tokens, **content})
        return name

    def evaluation(self, name: str, answers: dict[str, list[int]], **measured) -> str:
        folder, policies = self.root / "stages" / name, []
        ids = [f"p{i}" for i in range(4)]
        write_json(folder / "problems.json", [{"id": one, "prompt": "1", "answer": "1", "subset": None} for one in ids])
        for policy, right in answers.items():
            rows = [scored(one, bool(ok), policy) for one, ok in zip(ids, right, strict=True)]
            write_rollouts(folder / "rollouts" / f"{policy}.parquet", rows)
            found = measured if policy == "train" else {"entropy": 0.5, "mean_length": 30.0, "greedy": 0.25}
            policies.append({"name": policy, "rollouts": f"rollouts/{policy}.parquet", **found})
        return self.stage(name, kind="evaluate", result={"policies": policies})

    def point(self, arm: str, seed: int, stage: dict, right: list[int] | None, **more) -> None:
        """right: None for a point that is not evaluated yet."""
        values, key = more.get("values", {}), f"{len(self.points)}"
        links = {"sft": self.stage(f"sft-{more.get('sft', seed)}", kind="sft", flops=7), "train": f"train-{key}"}
        generation = {"generation": more["generation"]} if "generation" in more else {}
        counts = {"steps": more.get("steps", 20)}
        self.stage(links["train"], kind="online", counts=counts, flops=more.get("flops", 1e9), **generation)
        policies = more.get("policies", ("sft", "train"))
        if right is not None:
            answers = {name: COLD if name == "sft" else right for name in policies}
            measured = {"entropy": 0.2, "mean_length": 24.0, "greedy": None, "truncated": 0.125, **more.get("told", {})}
            links["evaluate"] = self.evaluation(f"evaluate-{key}", answers, **measured)
        stages = {
            "sft": {"kind": "sft", "policy": "init"},
            "train": stage,
            "evaluate": {"kind": "evaluate", "split": "test", "policies": list(policies)},
        }
        folder = self.root / "points" / "fake" / f"point-{key}"
        write_json(folder / "config.json", {"config": {"compute": {}, "stages": stages}})
        write_json(folder / "stages.json", [[name, f"../../../stages/{target}"] for name, target in links.items()])
        self.points.append({"arm": arm, "label": folder.name, "seed": seed, "values": values})

    def study(self):
        write_json(self.root / "sweeps" / "fake.json", {"config": {"name": "fake"}, "points": self.points})
        return read_study(self.root, "fake")


def scored(problem: str, right: bool, policy: str) -> ScoredRollout:
    ids, nats = np.array([1], np.int32), np.array([-0.5], np.float32)
    score = Score(float(right), Verdict.CORRECT if right else Verdict.INCORRECT)
    return ScoredRollout(Rollout(problem, 0, 0, ids, ids, nats, -nats, "stop"), "1", score, policy)


def table_of(made: tuple) -> dict[str, dict[str, str]]:
    """By the first cell of each row: head -> cell."""
    _, columns, rows = made
    return {row[0]: dict(zip(columns, row, strict=True)) for row in rows}


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Fake:
    made = Fake(tmp_path_factory.mktemp("spectrum"))
    for seed in (0, 1):
        for arm, (loss, sync_every, flops, right) in ARMS.items():
            calls = {0: 1, 100: 4, 1: 20}[sync_every]
            generation = {"calls": calls, "prompts_per_call": 640 / calls, "tokens_per_second": 2500.0, "share": 0.25}
            told = {"entropy": 0.1 + 0.1 * seed}
            more = {"flops": flops, "generation": generation, "told": told}
            made.point(arm, seed, online(loss, sync_every), right[seed], **more)
    made.point("s1", 2, online("dpo", 1), None)
    return made


@pytest.fixture(scope="module")
def study(fake):
    return fake.study()


def test_arms_go_from_offline_to_online_and_to_other_losses(study):
    found = study_spectrum.arms(study)
    assert [(arm.name, arm.s, arm.loss) for arm in found] == [
        ("offline", "∞", "dpo"),
        ("s100", "100", "dpo"),
        ("s1", "1", "dpo"),
        ("grpo", "1", "grpo"),
        (HOSTILE, "1", "group_dpo"),
    ]
    assert study_spectrum.offline_of(found) is found[0]
    start = study_spectrum.start_of(found)
    assert (start.name, start.s, start.row.accuracy.mean) == ("sft", "–", 0.25)


def test_the_table_compares_with_offline_and_with_the_start(study):
    found = table_of(study_spectrum.table(study))
    assert list(found) == ["sft", "offline", "s100", "s1", "grpo", HOSTILE]
    s1 = found["s1"]
    assert s1["test % [95 %]"].startswith("87.5 [")
    assert s1["over offline"].startswith("+50.0 [") and s1["over sft"].startswith("+62.5 [")
    assert (found["offline"]["over offline"], found["sft"]["over sft"]) == ("–", "–")
    assert found["offline"]["over sft"].startswith("+12.5 [") and found["sft"]["over offline"].startswith("-12.5 [")
    assert (s1["entropy, nats"], s1["length, tokens"], s1["truncated %"]) == ("0.150", "24.0", "12.5")
    assert (s1["updates"], s1["FLOPs"], s1["generated"], s1["device time"]) == ("20", "300 G", "1.00 k", "2.0 s")
    assert (found["sft"]["FLOPs"], found["sft"]["greedy %"], s1["greedy %"]) == ("0", "25.0", "–")
    assert "seeds" not in s1 and "price" not in s1


def test_the_sentence_has_every_arm(study):
    told = study_spectrum.sentence(study)
    assert told.startswith("On 4 test problems, from sft (25.0 %), after 20 updates: offline answers 37.5 [")
    assert "] %, s100 62.5 [" in told and told.endswith("] % correctly.")
    made = report(study)
    assert "On 4 test problems, from sft (25.0 %)" in markdown(made) and "from sft (25.0\u00a0%)" in html(made)


def test_the_page_and_markdown(study, parse):
    source = html(report(study))
    document = parse(source)
    assert "#spectrum" in document.links and "<img" not in source
    section = source.partition('<section id="spectrum">')[2].partition("</section>")[0]
    assert "<figcaption>Test accuracy, %" in section and "s100: 62.5 (" in section
    text = markdown(report(study))
    assert "| s100 | 100 | dpo | 62.5 \\[" in text
    assert "\\<img src=x onerror=alert(1)\\>\\|=1" in text


def test_the_csv(fake, study):
    rows = list(csv.DictReader(Path(write_study(fake.root, "fake")[2]).read_text("utf-8").splitlines()))
    found = {tuple(row[name] for name in ("arm", "seed", "split", "measure")): row["value"] for row in rows}
    assert len(found) == len(rows)
    assert found["s1", "1", "", "online/steps"] == "20"
    assert found["offline", "0", "", "online/generation/prompts_per_call"] == "640"
    assert found["s1", "all", "test", "gain/seeds"] == "2"
    assert found["s1", "1", "test", "mean_length"] == "24"
    shown = []
    write_study(fake.root, "fake", show=lambda *table: shown.append(table))
    assert shown == [study_spectrum.table(study)]


def test_seeds_that_are_missing_are_told(tmp_path):
    fake = Fake(tmp_path)
    fake.point("offline", 0, online("dpo", 0), [1, 1, 0, 0])
    fake.point("s1", 0, online("dpo", 1), [1, 1, 1, 0], steps=18)
    fake.point("s1", 1, online("dpo", 1), [1, 1, 1, 1], policies=("train",), told={"entropy": "NaN"})
    study = fake.study()
    found = table_of(study_spectrum.table(study))
    assert (found["s1"]["seeds"], found["offline"]["seeds"]) == ("2", "1")
    assert found["s1"]["over offline"].startswith("+25.0 [") and found["s1"]["over offline"].endswith("(1 of 2 seeds)")
    assert found["s1"]["over sft"].endswith("(1 of 2 seeds)") and found["s1"]["entropy, nats"] == "–"
    assert study_spectrum.note(study).endswith("Not all points have made the same number of updates.")


def test_nothing_to_compare_with(tmp_path):
    fake = Fake(tmp_path)
    for arm, sync_every, sft in (("s10", 10, "a"), ("s1", 1, "b")):
        fake.point(arm, 0, online("dpo", sync_every), [1, 1, 0, 0], sft=sft)
    study = fake.study()
    found = study_spectrum.arms(study)
    assert study_spectrum.offline_of(found) is None and study_spectrum.start_of(found) is None  # two cold policies
    _, columns, rows = study_spectrum.table(study)
    assert [row[0] for row in rows] == ["s10", "s1"] and "over " not in columns and "over sft" in columns
    assert "seed 0" not in study_spectrum.figure(study)  # the mean is the only seed


def test_values_of_one_arm_are_arms(tmp_path):
    fake = Fake(tmp_path)
    for sync_every in (1, 0, 10):
        values = {"stages.train.sync_every": str(sync_every)}
        fake.point("range", 0, online("dpo", sync_every), [1, 1, 0, 0], values=values)
    names = [arm.name for arm in study_spectrum.arms(fake.study())]
    assert names == ["range, sync every 0", "range, sync every 10", "range, sync every 1"]


def test_studies_of_something_else_have_no_such_section(tmp_path):
    fake = Fake(tmp_path)
    old = {"kind": "online", "policy": "sft", "steps": 20}  # before there was anything but GRPO, always synchronised
    for rate, stage in (("0.1", old), ("0.2", online("grpo", 1))):
        values = {"stages.train.optimizer.learning_rate": rate}
        fake.point("grpo", 0, stage, [1, 1, 0, 0], values=values)
    study = fake.study()
    assert (
        study_spectrum.arms(study) == []
        and study_spectrum.section(study).parts == []
        and study_spectrum.note(study) == ""
    )
    assert 'id="spectrum"' not in html(report(study)) and "offline to online" not in markdown(report(study))
    assert study_spectrum.start_of([]) is None


def test_generation_is_that_of_the_whole_stage(tmp_path):
    fake = Fake(tmp_path)
    generation = {"calls": 20, "prompts_per_call": 32.5, "tokens_per_second": math.nan, "share": 0.5}
    for arm, sync_every in (("a", 0), ("b", 1)):
        fake.point(arm, 0, online("dpo", sync_every), [1, 1, 0, 0], generation=generation)
    entry = fake.study().entries[0]
    assert study_spectrum.generation(entry)["calls"] == 20
    for final, calls in (("train@20", 20), ("train@5", None), ("sft", None)):
        kind = "sft" if final == "sft" else "online"
        assert study_spectrum.generation(dataclasses.replace(entry, final=final, kind=kind)).get("calls") == calls
