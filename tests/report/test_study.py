"""Studies read from a directory whose numbers are known: costs, choices on dev, and what a point is worth."""

import csv
import math
from pathlib import Path

import numpy as np
import pytest

from g2d_jax.accounting import behind
from g2d_jax.records import Rollout, Score, ScoredRollout, Verdict
from g2d_jax.report import study_stopping, write_study
from g2d_jax.report.page import html
from g2d_jax.report.study import read_study, studies
from g2d_jax.report.study_compare import (
    advantage,
    best_at,
    choices,
    chosen,
    difference,
    rank_correlation,
    swept_rows,
)
from g2d_jax.report.study_page import report, state
from g2d_jax.report.study_tables import baselines, headline, sentence
from g2d_jax.storage import finish, write_json
from g2d_jax.tables import write_columns, write_rollouts

STEPS, RATE, SELECT = "stages.warmup.steps", "stages.warmup.optimizer.learning_rate", "stages.collect.select"
VERSUS = "against the best GRPO on dev at this budget"
HOSTILE = "<img src=x onerror=alert(1)>|=1"
TIMES = {"seconds": 1.0, "device_seconds": 1.0, "verifier_cpu_seconds": 0.5}
WARM = {2: [1, 0, 0, 0], 4: [1, 1, 0, 0]}  # right or wrong on each test problem after so many steps
ENDS = {
    0: [[1, 0, 0, 0]] * 2,
    2: [[1, 1, 1, 0], [1, 1, 1, 1]],
    4: [[1, 1, 1, 1]] * 2,
}  # after the offline stage, by seed
DEV = {0: 0.2, 2: 0.7, 4: 0.6}


def cost(flops: float) -> dict:
    return {**TIMES, "flops": flops, "tokens": {"generated": 10, "prefilled": 1, "scored": 0, "trained": 5}}


class Fake:
    """Writes a study's directory."""

    def __init__(self, root: Path) -> None:
        self.root, self.points = root, []

    def stage(self, name: str, kind: str, **content) -> str:
        folder = self.root / "stages" / name
        finish(folder, {"kind": kind, "name": name.partition("-")[0], "counts": {}, "result": {}, **cost(0), **content})
        write_json(folder / "environment.json", {"jax": "0.10.2", "command": ["g2d", name]})
        return name

    def evaluation(self, name: str, answers: dict[str, list[int]], dev: float | None = None) -> str:
        folder, policies = self.root / "stages" / name, []
        ids = [f"p{i}" for i in range(4)]
        write_json(folder / "problems.json", [{"id": one, "prompt": "1", "answer": "1", "subset": None} for one in ids])
        for policy, right in answers.items():
            rows = [scored(one, bool(ok), policy) for one, ok in zip(ids, right, strict=True)]
            write_rollouts(folder / "rollouts" / f"{policy}.parquet", rows)
            mean = float(np.mean(right)) if dev is None else dev if policy == "dpo" or len(answers) == 1 else 0.1
            policies.append({"name": policy, "mean": mean, "rollouts": f"rollouts/{policy}.parquet"})
        return self.stage(name, "evaluate", result={"policies": policies, "problems": 4, "samples": 1})

    def point(self, arm: str, seed: int, values: dict[str, str], stages: dict, links: dict[str, str]) -> None:
        label = ",".join([arm, *(f"{field.rpartition('.')[2]}={text}" for field, text in values.items()), f"s{seed}"])
        folder = self.root / "points" / "fake" / label.replace("/", "_")
        write_json(folder / "config.json", {"config": {"compute": {}, "stages": stages}})
        write_json(folder / "stages.json", [[name, f"../../../stages/{target}"] for name, target in links.items()])
        self.points.append({"arm": arm, "label": folder.name, "seed": seed, "values": values})

    def done(self) -> Path:
        write_json(self.root / "sweeps" / "fake.json", {"config": {"name": "fake"}, "points": self.points})
        return self.root


def scored(problem: str, right: bool, policy: str) -> ScoredRollout:
    ids, nats = np.array([1], np.int32), np.array([-0.5], np.float32)
    verdict = Verdict.CORRECT if right else Verdict.INCORRECT
    return ScoredRollout(
        Rollout(problem, 0, 0, ids, ids, nats, -nats, "stop"), "1", Score(float(right), verdict), policy
    )


def recipe(policy: str, *, stop: str = "steps", offline: bool = True) -> dict:
    ends = ["init", policy, "dpo"] if offline and policy != "init" else ["init", "dpo"] if offline else [policy]
    both = {
        "collect": {"kind": "collect", "policy": policy, "rollouts": "sample"},
        "dpo": {"kind": "offline", "policy": policy, "preferences": "collect"},
    }
    return {
        "warmup": {"kind": "online", "policy": "init", "steps": 4, "stop": stop},
        **(both if offline else {}),
        "dev": {"kind": "evaluate", "split": "dev", "policies": ends},
        "evaluate": {"kind": "evaluate", "split": "test", "policies": ends},
    }


def add_offline(
    fake: Fake, arm: str, seed: int, values: dict, policy: str, warmup: str, right: list[int], **more
) -> None:
    """A point that collects 20 and trains for 30 FLOPs after a warm-up."""
    key = f"{arm}{seed}{'.'.join(values.values())}".replace("/", "_")
    measured = {"frac_mixed": more.get("mixed", 0.5), "entropy": more.get("entropy")}
    pairs = {"pairs": more.get("pairs", 100)}
    fake.stage(f"collect-{key}", "collect", **cost(20), counts=pairs, result={"informativeness": measured})
    fake.stage(f"dpo-{key}", "offline", **cost(30), result={"before": {"gap_mean": 1.5}, "after": {"gap_mean": 4.5}})
    before = {} if policy == "init" else {policy: more.get("before", [0, 0, 0, 0])}
    answers = {"init": [0, 0, 0, 0], **before, "dpo": right}
    links = {"warmup": warmup, "collect": f"collect-{key}", "dpo": f"dpo-{key}"}
    stages = recipe(policy, stop=more.get("stop", "steps"))
    if "prompts" in more:
        folder = fake.root / "stages" / f"collect-{key}" / "informativeness"
        write_columns(folder / "prompts.parquet", {"pairs": np.array(more["prompts"])})
    if "temperature" in more:
        stages["collect"]["sampling"] = {"temperature": more["temperature"], "top_p": 1.0, "top_k": 0}
    if more["dev"] is None:
        del stages["dev"]
    else:
        links["dev"] = fake.evaluation(f"dev-{key}", answers, dev=more["dev"])
    links["evaluate"] = fake.evaluation(f"evaluate-{key}", answers)
    fake.point(arm, seed, values, stages, links)


def add_warmup(fake: Fake, rate: str, seed: int, each: float) -> None:
    """A trajectory that keeps 0, 2 and 4 steps, each for so many FLOPs."""
    at = {str(k): cost(k * each) for k in (0, 2, 4)}
    fake.stage(f"warmup-{rate}-{seed}", "online", **cost(4 * each), counts={"steps": 4}, at=at)


def add_online(fake: Fake, rate: str, seed: int, k: int, dev: float) -> None:
    """A point of online training alone."""
    policy, right = (f"warmup@{k}", WARM[k]) if k else ("init", [0, 0, 0, 0])
    key = f"{rate}-{k}-{seed}"
    links = {"warmup": f"warmup-{rate}-{seed}", "dev": fake.evaluation(f"dev-{key}", {policy: right}, dev)}
    links["evaluate"] = fake.evaluation(f"evaluate-{key}", {policy: right})
    fake.point("grpo", seed, {RATE: rate, STEPS: str(k)}, recipe(policy, offline=False), links)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fake = Fake(tmp_path_factory.mktemp("study"))
    for seed in (0, 1):
        for rate, each in (("0.1", 50.0), ("0.2", 75.0)):
            add_warmup(fake, rate, seed, each)
        for k, right in ENDS.items():
            more = {"dev": DEV[k], "before": WARM.get(k), "mixed": 0.9 - k / 10}
            policy = f"warmup@{k}" if k else "init"
            add_offline(fake, "g2d", seed, {STEPS: str(k)}, policy, f"warmup-0.1-{seed}", right[seed], **more)
        for rate, best in (("0.1", 0.5), ("0.2", 0.55)):
            for k in (0, 2, 4):
                add_online(fake, rate, seed, k, best)
        probe = {"slope": 0.004, "slope_error": 0.001, "step_flops": 4e10, "gain": 0.08, "offline_flops": 5e11}
        stop = {"rule": "adaptive", "step": 3 - seed, "probes": [probe]}
        own = fake.stage(f"warmup-own-{seed}", "online", **cost(150), counts={"steps": 3 - seed}, stop=stop)
        add_offline(fake, "own", seed, {}, "warmup", own, [1, 1, 1 - seed, 0], dev=0.65, stop="adaptive")
        for select, right, pairs in (("all", [1, 0, 0, 0], 80), (HOSTILE, [1, 1, 0, seed], 60)):
            warm = f"warmup-0.1-{seed}"
            add_offline(fake, "ways", seed, {SELECT: select}, "warmup@2", warm, right, dev=0.5, pairs=pairs)
    links = {"warmup": "warmup-0.1-0", "collect": "none", "dpo": "none-2", "dev": "none-3", "evaluate": "none-4"}
    fake.point("g2d", 2, {STEPS: "4"}, recipe("warmup@4"), links)
    return fake.done()


@pytest.fixture(scope="module")
def study(root: Path):
    return read_study(root, "fake")


def group(study, name: str):
    return next(one for one in study.groups if one.name == name)


def test_points_are_read_with_their_cost_and_answers(root, study):
    assert studies(root) == ["fake"]
    assert [one.name for one in study.baselines] == ["grpo, learning rate 0.1", "grpo, learning rate 0.2"]
    g2d = group(study, "g2d")
    assert [row.steps for row in g2d.rows] == [0, 2, 4]
    assert [row.cost("flops") for row in g2d.rows] == [50.0, 150.0, 250.0]  # the warm-up up to K, and 20 + 30
    assert [row.accuracy.mean for row in g2d.rows] == [0.25, 0.875, 1.0]
    assert [row.dev for row in g2d.rows] == pytest.approx([0.2, 0.7, 0.6])
    assert [row.offline_gain.mean for row in g2d.rows] == [0.25, 0.625, 0.5]
    assert study.unfinished == ["g2d,steps=4,s2"]
    with pytest.raises(ValueError, match="holds no study 'other'; there are: fake"):
        read_study(root, "other")


def test_an_advantage_is_taken_between_the_baselines_points_and_never_beyond(study):
    g2d, slow, fast = (group(study, name) for name in ("g2d", "grpo, learning rate 0.1", "grpo, learning rate 0.2"))
    # at 150 FLOPs the slow baseline is halfway from [1 0 0 0] to [1 1 0 0]: 0.375; the seeds have 0.75 and 1
    found = advantage(g2d, g2d.rows[1], slow, "flops")
    assert found.difference.mean == pytest.approx(0.5)
    assert (found.seeds, found.difference.seeds) == (2, 2)
    assert advantage(g2d, g2d.rows[0], slow, "flops").difference.mean == pytest.approx(0.125)
    assert advantage(g2d, g2d.rows[2], slow, "flops").difference is None  # 250 FLOPs: it spent 200 at most
    assert advantage(g2d, g2d.rows[2], fast, "flops").difference.mean == pytest.approx(1 - 5 / 12)


def test_choices_are_made_on_dev(study):
    g2d = group(study, "g2d")
    assert chosen(g2d.rows).steps == 2  # though K = 4 is better on test
    assert best_at(study, g2d.rows[1], "flops").name == "grpo, learning rate 0.2"
    assert choices(study) == ""
    assert [row.steps for row in swept_rows(study)] == [0, 2, 4]
    title, columns, rows = headline(study)
    last = dict(zip(columns, next(row for row in rows if row[0].startswith("best on dev")), strict=True))
    assert last["point"] == "best on dev: g2d, K = 2" and last["dev %"] == "70.0"
    assert last["test % [95 %]"].startswith("87.5 [") and last["seed std"] == "17.7" and last["pairs"] == "100"
    assert (
        last[VERSUS].startswith("+62.5 [") and last[VERSUS].endswith("], learning rate 0.2") and last["FLOPs"] == "150"
    )  # the fast one has 0.25 there
    assert "over problems and 2 seeds: with fewer than 5 seeds they are too narrow" in title
    told = "g2d with K = 2, chosen on dev, answers 87.5 ["
    assert told in sentence(study) and "has at these FLOPs 62.5 points less" in sentence(study)


def test_settings_are_compared_pair_by_pair(study):
    first, other = (row for one in study.offline if one.arm == "ways" for row in one.rows)
    assert difference(other, first).mean == pytest.approx(0.375)  # 1 of 4 more, and 2 of 4 with the other seed


def test_ranks_share_ties():
    assert rank_correlation([1, 2, 3, 4], [10, 20, 20, 40])[0] == pytest.approx(0.9486832980505138)
    assert rank_correlation([3, 2, 1, math.nan], [1, 2, 3, 4]) == (pytest.approx(-1.0), 3)
    assert math.isnan(rank_correlation([1, 1, 1], [1, 2, 3])[0])


def test_files_hold_the_same_bytes_every_time(root, study):
    paths = [Path(path) for path in write_study(root, "fake")]
    assert [path.name for path in paths] == ["fake.html", "fake.md", "fake.csv"]
    before = [path.read_bytes() for path in paths]
    shown = []
    write_study(root, "fake", show=lambda *table: shown.append(table))
    assert [path.read_bytes() for path in paths] == before
    assert shown == [headline(study)]
    assert "| g2d,steps=4,s2 | not finished |" in before[1].decode()
    assert state(study).startswith("1 of 25 points are not finished")


def test_the_table_for_spreadsheets(root):
    rows = list(csv.DictReader(Path(write_study(root, "fake")[2]).read_text("utf-8").splitlines()))
    found = {
        tuple(row[name] for name in ("arm", "values", "seed", "K", "split", "measure")): row["value"] for row in rows
    }
    assert found["g2d", "", "0", "2", "test", "accuracy"] == "0.75"
    assert found["g2d", "", "0", "2", "", "cost/flops"] == "150"
    assert found["g2d", "", "1", "2", "test", "offline_gain"] == "0.75"
    assert found["g2d", "", "all", "2", "test", "accuracy/mean"] == "0.875"
    assert found["g2d", "", "all", "2", "test", "advantage/grpo, learning rate 0.1/flops/mean"] == "0.5"
    assert found["own", "", "1", "2", "dev", "mean"] == "0.65"
    assert found["grpo", f"{RATE}=0.1", "0", "4", "", "cost/flops"] == "200"
    assert not any(cell.startswith(("=", "+", "@")) for row in rows for cell in row.values())


def test_the_page(study, parse):
    source = html(report(study))
    text = " ".join(" ".join(parse(source).text).split())
    assert "<img" not in source and "&lt;img src=x onerror=alert(1)&gt;" in source
    assert "script-src" not in source  # no script is needed
    for words in ("Accuracy against compute", "Informativeness against K", "Settings compared", "K that chose itself"):
        assert words in text
    assert "10.0 ± 2.5 16.0" in text  # what the last probe saw, in points a TFLOP: online and offline
    assert "over K = 2, best on dev" in text
    assert "g2d,steps=4,s2" in text


def test_a_row_that_lacks_seeds_is_never_chosen(tmp_path):
    fake = Fake(tmp_path)
    for seed in (0, 1):
        add_warmup(fake, "0.1", seed, 50.0)
        add_warmup(fake, "0.2", seed, 50.0)
        for k in (0, 2, 4):
            for rate, dev in (("0.1", 0.3), ("0.2", 0.9)):
                if (rate, seed) != ("0.2", 1):
                    add_online(fake, rate, seed, k, dev)
            if (k, seed) != (4, 1):
                policy = f"warmup@{k}" if k else "init"
                dev = {0: 0.2, 2: 0.5, 4: 0.9}[k]
                add_offline(fake, "g2d", seed, {STEPS: str(k)}, policy, f"warmup-0.1-{seed}", ENDS[k][seed], dev=dev)
    study = read_study(fake.done(), "fake")
    rows = group(study, "g2d").rows
    assert [row.dev for row in rows] == pytest.approx([0.2, 0.5, 0.9])
    assert chosen(rows).steps == 2  # the 0.9 of K = 4 is one seed's
    assert best_at(study, rows[1], "flops").name == "grpo, learning rate 0.1"  # as are those of the faster one
    told = "K is chosen among 2 of 3: the others lack seeds, or dev. "
    told += "The baseline is chosen among 3 of 6: the others lack seeds, or dev."
    assert choices(study) == told and told in headline(study)[0]
    assert state(study) == "Rows have different seeds: their means are not yet comparable."


def test_as_many_seeds_are_not_the_same_seeds(tmp_path):
    fake = Fake(tmp_path)
    for k, seed in ((2, 0), (4, 1)):
        add_warmup(fake, "0.1", seed, 50.0)
        add_offline(fake, "g2d", seed, {STEPS: str(k)}, f"warmup@{k}", f"warmup-0.1-{seed}", ENDS[k][seed], dev=DEV[k])
    study = read_study(fake.done(), "fake")
    assert chosen(group(study, "g2d").rows) is None
    assert choices(study) == "K is not chosen yet: no K has all seeds."
    assert state(study) == "Rows have different seeds: their means are not yet comparable."


def test_warm_ups_are_the_baseline_of_a_study_without_one(tmp_path):
    fake = Fake(tmp_path)
    for seed in (0, 1):
        add_warmup(fake, "0.1", seed, 50.0)
        for k in (0, 2, 4):
            more = {"dev": None, "before": WARM.get(k)}
            policy = f"warmup@{k}" if k else "init"
            add_offline(fake, "g2d", seed, {STEPS: str(k)}, policy, f"warmup-0.1-{seed}", ENDS[k][seed], **more)
    study = read_study(fake.done(), "fake")
    (alone,) = study.baselines
    assert alone.name == "warm-up (GRPO goes on)" and [row.steps for row in alone.rows] == [0, 2, 4]
    assert [row.cost("flops") for row in alone.rows] == [0.0, 100.0, 200.0]
    assert [row.accuracy.mean for row in alone.rows] == [0.0, 0.25, 0.5]
    assert [row.seeds for row in alone.rows] == [{0, 1}] * 3
    g2d = group(study, "g2d")
    assert advantage(g2d, g2d.rows[1], alone, "flops").difference.mean == pytest.approx(0.5)  # 0.875 - 0.375
    assert "against warm-up (GRPO goes on) at this budget" in headline(study)[1]
    assert [row[:2] for row in baselines(study)[2]] == [[alone.name, k] for k in ("0", "2", "4")]
    assert len(study.entries) == 6  # no points of their own
    assert "K is not chosen: nothing was evaluated on dev." in sentence(study)
    assert "K is not chosen: nothing was evaluated on dev." in headline(study)[0]


def test_a_baselines_learning_rate_is_chosen_for_each_budget(tmp_path):
    fake = Fake(tmp_path)
    add_warmup(fake, "0.1", 0, 50.0)
    add_warmup(fake, "0.2", 0, 50.0)
    for k in (0, 2, 4):
        add_online(fake, "0.1", 0, k, {0: 0.1, 2: 0.4, 4: 0.5}[k])
        add_online(fake, "0.2", 0, k, {0: 0.1, 2: 0.2, 4: 0.9}[k])  # best in the end
        policy = f"warmup@{k}" if k else "init"
        add_offline(fake, "g2d", 0, {STEPS: str(k)}, policy, "warmup-0.1-0", ENDS[k][0], dev=DEV[k])
    study = read_study(fake.done(), "fake")
    rows = group(study, "g2d").rows
    assert [row.cost("flops") for row in rows] == [50.0, 150.0, 250.0]
    found = [best_at(study, row, "flops") for row in rows]
    # on dev 0.25 and 0.15 at 50 FLOPs, 0.45 and 0.55 at 150; neither has spent 250
    assert [one and one.values[RATE] for one in found] == ["0.1", "0.2", None]
    _, columns, lines = headline(study)
    cells = [line[columns.index(VERSUS)] for line in lines[:3]]
    assert [cell.rpartition(", ")[2] for cell in cells] == ["learning rate 0.1", "learning rate 0.2", "out of range"]


def test_a_stopped_warm_up_is_first_compared_with_the_best_k(tmp_path):
    fake = Fake(tmp_path)
    add_warmup(fake, "0.1", 0, 50.0)
    for k, dev in ((0, 0.4), (2, 0.7)):
        policy = f"warmup@{k}" if k else "init"
        add_offline(fake, "g2d", 0, {STEPS: str(k)}, policy, "warmup-0.1-0", ENDS[k][0], dev=dev)
    own = fake.stage("warmup-own", "online", **cost(150), counts={"steps": 3}, stop={"rule": "budget", "step": 3})
    add_offline(fake, "own", 0, {}, "warmup", own, [1, 1, 1, 1], dev=0.65, stop="budget")
    study = read_study(fake.done(), "fake")
    own = group(study, "own")
    _, columns, lines = study_stopping.table(study, own, own.rows[0])
    assert columns[-1] == "over K = 2, best on dev" and lines[0][-1].split()[0] == "+25.0"


def test_a_point_of_no_steps_does_not_wait_for_its_warm_up(tmp_path):
    fake = Fake(tmp_path)
    for k in (0, 2):
        add_offline(fake, "g2d", 0, {STEPS: str(k)}, f"warmup@{k}" if k else "init", "none", ENDS[k][0], dev=0.5)
    study = read_study(fake.done(), "fake")
    assert [entry.label for entry in study.entries] == ["g2d,steps=0,s0"] and study.unfinished == ["g2d,steps=2,s0"]
    assert behind("dpo", recipe("warmup@2")) == {"dpo": None, "warmup": 2, "collect": None}
