"""Studies whose numbers are known: costs, choices on dev, what a point is worth, what the headline
says."""

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from reports import Page, cost, evaluation, finish

from g2d_jax.report import paired_differences as paired
from g2d_jax.report.page import html
from g2d_jax.report.rows import read_study
from g2d_jax.report.runs import studies
from g2d_jax.report.study import details, first, priced, report, results, state, write_study
from g2d_jax.report.verdict import study_verdict
from g2d_jax.runtime.storage import write_json
from g2d_jax.session.stage_result import Stop
from g2d_jax.study.pricing import Rates

STEPS = "stages.warmup.steps"
RATE = "stages.warmup.optimizer.learning_rate"
SELECT = "stages.collect.select"
VERSUS = "against GRPO at this budget"
HOSTILE = "<img src=x onerror=alert(1)>|=1"
WARM = {2: [1, 0, 0, 0], 4: [1, 1, 0, 0]}  # right or wrong on each test problem after so many steps
# after the offline stage
ENDS = {
    0: [[1, 0, 0, 0]] * 2,
    2: [[1, 1, 1, 0], [1, 1, 1, 1]],
    4: [[1, 1, 1, 1]] * 2,
}
DEV = {0: 0.2, 2: 0.7, 4: 0.6}
COMMAND = ["/somewhere/g2d", "sweep", "--config", "mine:x", "--workdir", "runs/fake"]


class Fake:
    """Writes a study's directory."""

    def __init__(self, root: Path) -> None:
        self.root, self.points = root, []

    def stage(self, name: str, kind: str, flops: float = 0, **content) -> str:
        folder = self.root / "stages" / name
        finish(folder, kind, name.partition("-")[0], cost=cost(flops), **content)
        write_json(folder / "environment.json", {"jax": "0.10.2", "command": COMMAND})
        return name

    def evaluation(
        self, key: str, split: str, answers: dict[str, list[int]], mean=None, **measured
    ) -> str:
        """mean: the accuracy of all policies, in place of what the answers say."""
        table = {
            policy: {f"p{i}": [mark] for i, mark in enumerate(marks)}
            for policy, marks in answers.items()
        }
        folder = self.root / "stages" / f"{split}-{key}"
        means = {} if mean is None else dict.fromkeys(answers, mean)
        evaluation(folder, table, split=split, accuracies=means, **measured)
        return folder.name

    def point(
        self, arm: str, seed: int, values: dict[str, str], stages: dict, links: dict[str, str]
    ) -> None:
        label = ",".join(
            [
                arm,
                *(f"{field.rpartition('.')[2]}={value}" for field, value in values.items()),
                f"s{seed}",
            ]
        )
        folder = self.root / "points" / "fake" / label.replace("/", "_")
        write_json(
            folder / "config.json", {"config": {"seed": seed, "compute": {}, "stages": stages}}
        )
        write_json(
            folder / "stages.json",
            [[name, f"../../../stages/{target}"] for name, target in links.items()],
        )
        self.points.append({"arm": arm, "label": folder.name, "seed": seed, "values": values})

    def study(self):
        write_json(
            self.root / "sweeps" / "fake.json", {"config": {"name": "fake"}, "points": self.points}
        )
        return read_study(self.root, "fake")

    def warmup(self, rate: str, seed: int, each: float) -> None:
        """A trajectory that keeps 0, 2 and 4 steps, each for so many FLOPs."""
        costs = {str(k): cost(k * each) for k in (0, 2, 4)}
        self.stage(f"warmup-{rate}-{seed}", "online", 4 * each, counts={"steps": 4}, costs=costs)

    def offline(
        self, arm: str, seed: int, values: dict, policy: str, warmup: str, right: list[int], **more
    ) -> None:
        """A point that collects for 20 and trains for 30 FLOPs after a warm-up. dev: None for no
        evaluation on it."""
        key = f"{arm}{seed}{'.'.join(values.values())}".replace("/", "_")
        measured = {"informativeness": {"frac_mixed": more.get("mixed", 0.5)}}
        counts = {"pairs": more.get("pairs", 100)}
        self.stage(f"collect-{key}", "collect", 20, counts=counts, measures=measured)
        gaps = {"before": {"gap_mean": 1.5}, "after": {"gap_mean": 4.5}}
        self.stage(f"dpo-{key}", "offline", 30, measures=gaps)
        before = {} if policy == "init" else {policy: more.get("before") or [0, 0, 0, 0]}
        answers = {"init": [0, 0, 0, 0], **before, "dpo": right}
        links = {"warmup": warmup, "collect": f"collect-{key}", "dpo": f"dpo-{key}"}
        stages = recipe(policy, list(answers), budget=more.get("budget", 0.0))
        if more["dev"] is None:
            del stages["dev"]
        else:
            links["dev"] = self.evaluation(key, "dev", answers, mean=more["dev"])
        links["evaluate"] = self.evaluation(key, "test", answers)
        self.point(arm, seed, values, stages, links)

    def online(self, rate: str, seed: int, k: int, dev: float) -> None:
        """A point of online training alone."""
        policy, right = (f"warmup@{k}", WARM[k]) if k else ("init", [0, 0, 0, 0])
        links = {"warmup": f"warmup-{rate}-{seed}"}
        links["dev"] = self.evaluation(f"{rate}-{k}-{seed}", "dev", {policy: right}, mean=dev)
        links["evaluate"] = self.evaluation(f"{rate}-{k}-{seed}", "test", {policy: right})
        self.point(
            "grpo",
            seed,
            {RATE: rate, STEPS: str(k)},
            recipe(policy, [policy], offline=False),
            links,
        )

    def k(self, k: int, seed: int, **more) -> None:
        """A point of the arm g2d after K steps at the first learning rate."""
        policy = f"warmup@{k}" if k else "init"
        more = {"dev": DEV[k], "before": WARM.get(k), **more}
        self.offline(
            "g2d", seed, {STEPS: str(k)}, policy, f"warmup-0.1-{seed}", ENDS[k][seed], **more
        )

    def arm(self, arm: str, seed: int, stage: dict, right: list[int] | None, **more) -> None:
        """A point of 20 updates of online training from an SFT policy; right: None for one not
        evaluated yet."""
        key, names = str(len(self.points)), more.get("policies", ("sft", "train"))
        links = {
            "sft": self.stage(f"sft-{more.get('sft', seed)}", "sft", 7),
            "train": f"train-{key}",
        }
        kept = {name: more[name] for name in ("generation",) if name in more}
        self.stage(
            links["train"],
            "online",
            more.get("flops", 1e9),
            counts={"steps": more.get("steps", 20)},
            **kept,
        )
        if right is not None:
            answers = {name: [1, 0, 0, 0] if name == "sft" else right for name in names}
            measured = {"entropy": 0.25, "mean_length": 24.0, "frac_truncated": 0.125}
            links["evaluate"] = self.evaluation(
                key, "test", answers, mean=0.5, informativeness=measured
            )
        stages = {
            "sft": {"kind": "sft", "policy": "init"},
            "train": {"kind": "online", "policy": "sft", **stage},
            **more.get("stages", {}),
        }
        links |= {name: f"{name}-{key}" for name in more.get("stages", {})}
        stages["evaluate"] = {"kind": "evaluate", "split": "test", "policies": list(names)}
        self.point(arm, seed, more.get("values", {}), stages, links)


def recipe(policy: str, evaluated: list[str], *, budget: float = 0.0, offline: bool = True) -> dict:
    both = {
        "collect": {"kind": "collect", "policy": policy, "rollouts": "sample"},
        "dpo": {"kind": "offline", "policy": policy, "preferences": "collect"},
    }
    return {
        "warmup": {"kind": "online", "policy": "init", "steps": 4, "budget": {"amount": budget}},
        **(both if offline else {}),
        "dev": {"kind": "evaluate", "split": "dev", "policies": evaluated},
        "evaluate": {"kind": "evaluate", "split": "test", "policies": evaluated},
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fake = Fake(tmp_path_factory.mktemp("study"))
    for seed in (0, 1):
        for rate, each in (("0.1", 50.0), ("0.2", 75.0)):
            fake.warmup(rate, seed, each)
        for k in ENDS:
            fake.k(k, seed, mixed=0.9 - k / 10)
        for rate, best in (("0.1", 0.5), ("0.2", 0.55)):
            for k in ENDS:
                fake.online(rate, seed, k, best)
        stop = Stop("adaptive")
        own = fake.stage(f"warmup-own-{seed}", "online", 150, counts={"steps": 3 - seed}, stop=stop)
        fake.offline("own", seed, {}, "warmup", own, [1, 1, 1 - seed, 0], dev=0.65, budget=1.0)
        for select, right, pairs in (("all", [1, 0, 0, 0], 80), (HOSTILE, [1, 1, 0, seed], 60)):
            warm = f"warmup-0.1-{seed}"
            fake.offline(
                "ways", seed, {SELECT: select}, "warmup@2", warm, right, dev=0.5, pairs=pairs
            )
    links = {
        "warmup": "warmup-0.1-0",
        "collect": "none",
        "dpo": "none-2",
        "dev": "none-3",
        "evaluate": "none-4",
    }
    fake.point("g2d", 2, {STEPS: "4"}, recipe("warmup@4", ["dpo"]), links)
    fake.study()
    return fake.root


@pytest.fixture(scope="module")
def study(root: Path):
    return read_study(root, "fake")


def advantage(row, baseline):
    """What a row has over a baseline for equal FLOPs; None beyond its costs."""
    over = paired.over_baseline(row, baseline, "flops")
    return None if over is paired.OUT_OF_RANGE else over


def group(study, name: str):
    return next(one for one in study.groups if one[0].group == name)


def lines(table) -> dict[str, dict[str, str]]:
    """The rows of a table by their first cell."""
    return {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}


def test_points_are_read_with_their_cost_and_answers(root, study):
    assert studies(root) == ["fake"]
    assert [one[0].group for one in study.baselines] == [
        "grpo, learning rate 0.1",
        "grpo, learning rate 0.2",
    ]
    g2d = group(study, "g2d")
    assert [row.mean("K") for row in g2d] == [0, 2, 4]
    # the warm-up up to K, and 20 + 30
    assert [row.mean("flops") for row in g2d] == [
        50.0,
        150.0,
        250.0,
    ]
    assert [row.accuracy.mean for row in g2d] == [0.25, 0.875, 1.0]
    assert [row.mean("dev") for row in g2d] == pytest.approx([0.2, 0.7, 0.6])
    assert [row.gain.mean for row in g2d] == [0.25, 0.625, 0.5]
    assert study.left_out == {"g2d,steps=4,s2": "not finished"}
    with pytest.raises(ValueError, match="holds no study 'other'; there are: fake"):
        read_study(root, "other")


def test_an_advantage_is_taken_between_the_baselines_points_and_never_beyond(study):
    rows, slow, fast = group(study, "g2d"), *study.baselines
    # at 150 FLOPs the slow baseline is halfway from [1 0 0 0] to [1 1 0 0]: 0.375; the seeds have
    # 0.75 and 1
    worth = advantage(rows[1], slow)
    assert worth.mean == pytest.approx(0.5) and worth.seeds == 2
    assert advantage(rows[0], slow).mean == pytest.approx(0.125)
    assert advantage(rows[2], slow) is None  # 250 FLOPs: it spent 200 at most
    assert advantage(rows[2], fast).mean == pytest.approx(1 - 5 / 12)


def test_k_and_the_baseline_are_chosen_on_dev_and_the_headline_answers(study):
    rows = group(study, "g2d")
    assert paired.chosen(rows).mean("K") == 2  # though K = 4 is better on test
    assert paired.best_at(study, rows[1])[0].group == "grpo, learning rate 0.2"
    table = lines(results(study))
    best = table["g2d, K = 2 (best on dev)"]
    assert best["dev %"] == "70.0" and best["seed std"] == "17.7" and best["FLOPs"] == "150"
    assert best["accuracy % [95 %]"].startswith("87.5 [") and best["gain"].startswith("+62.5 [")
    assert best[VERSUS].startswith("+62.5 [") and best[VERSUS].endswith(
        "], grpo, learning rate 0.2"
    )
    # the best GRPO on dev
    assert table["own"]["over grpo, learning rate 0.2, K = 0"].startswith("+62.5 [")
    assert table["grpo, learning rate 0.1, K = 4"]["accuracy % [95 %]"].startswith("50.0 [")
    found = study_verdict(study)
    assert (found.finding, found.row.mean("K")) == ("dearer", 4)  # the policy before any training
    assert (found.best.group, found.best.mean("K")) == ("grpo, learning rate 0.2", 0)


def test_tokens_are_priced_at_the_rates_of_another_model(root, study):
    """A policy of 20 scored tokens in collect and 30 in DPO; the warm-up has 50 a step at K, GRPO
    likewise."""
    # and not the names of stages
    own = {kind: {"scored": 36.0} for kind in ("collect", "online", "offline")}
    seconds = {"": {"generated": 0.0, "scored": 1e9, "trained": 0.0}, **own}
    rates = Rates("big", "v5e-16", seconds, chips=16, response=1024)
    for scale, price in ((1.0, None), (2.0, 3.0)):
        other = read_study(root, "fake", dataclasses.replace(rates, scale=scale, price=price))
        rows = [row for one in other.offline if one[0].group == "g2d" for row in one]
        assert [row.mean("hours") for row in rows] == [scale * hours for hours in (0.5, 1.5, 2.5)]
        line = lines(priced(other, other.rates))["g2d, K = 2"]
        assert (line["time"], line.get("price")) == (
            ("1 h 30 min", None) if price is None else ("3 h 00 min", "144.00")
        )
        # FLOPs and tokens are in proportion here
        flops = lines(results(study))["g2d, K = 2 (best on dev)"][VERSUS]
        equal = line["against grpo, learning rate 0.2 in equal time"]
        assert (
            f"{equal}, grpo, learning rate 0.2" == flops
            and line["against grpo, learning rate 0.1 in equal time"] != "–"
        )
        assert Page(html(report(other))).table("as those of big on v5e-16")


def test_a_token_costs_what_it_does_in_its_kind_of_stage():
    seconds = {"": {"generated": 2.0, "scored": 1.0, "trained": 4.0}, "online": {"generated": 3.0}}
    rates = Rates("big", "v5e-16", seconds, chips=16, response=1024, scale=10.0)
    tokens = {"generated": 60.0, "prefilled": 1e9, "scored": 30.0, "trained": 15.0}
    assert rates.hours([("online", tokens)]) == 10 * (180 + 30 + 60) / 3600
    assert (
        rates.hours([("online", tokens), ("collect", tokens)])
        == 10 * (180 + 120 + 2 * (30 + 60)) / 3600
    )


def test_what_was_not_evaluated_on_dev_is_named_with_what_to_run(tmp_path):
    fake = Fake(tmp_path)
    for seed in (0, 1):
        fake.warmup("0.1", seed, 50.0)
        for k in ENDS:
            fake.k(k, seed, dev=None)
    study = fake.study()
    found = study_verdict(study)
    # where the study is now, not where the recorded command put it
    command = f"g2d sweep --config mine:x --workdir {tmp_path}"
    assert (found.finding, found.command) == ("undecided", command)
    (alone,) = study.baselines  # the warm-ups that the points evaluated on their way
    assert alone[0].group == "warm-up (GRPO goes on)" and [row.mean("K") for row in alone] == [
        0,
        2,
        4,
    ]
    assert [row.mean("flops") for row in alone] == [0.0, 100.0, 200.0]
    assert [row.accuracy.mean for row in alone] == [0.0, 0.25, 0.5]
    # 0.875 - 0.375
    assert advantage(group(study, "g2d")[1], alone).mean == pytest.approx(0.5)
    assert (
        lines(results(study))["g2d, K = 2"][VERSUS].startswith("+50.0 [") and len(study.runs) == 6
    )


def test_a_row_that_lacks_seeds_is_never_chosen_and_as_many_seeds_are_not_the_same_seeds(tmp_path):
    fake, apart = Fake(tmp_path), Fake(tmp_path / "apart")
    for seed in (0, 1):
        fake.warmup("0.1", seed, 50.0)
        fake.warmup("0.2", seed, 50.0)
        for k in ENDS:
            for rate, dev in (("0.1", 0.3), ("0.2", 0.9)):
                if (rate, seed) != ("0.2", 1):
                    fake.online(rate, seed, k, dev)
            if (k, seed) != (4, 1):
                fake.k(k, seed, dev={0: 0.2, 2: 0.5, 4: 0.9}[k])
    study = fake.study()
    rows = group(study, "g2d")
    assert paired.chosen(rows).mean("K") == 2  # the 0.9 of K = 4 is one seed's
    # as are those of the faster one
    assert paired.best_at(study, rows[1])[0].group == "grpo, learning rate 0.1"
    assert state(study)
    for k, seed in ((2, 0), (4, 1)):
        apart.warmup("0.1", seed, 50.0)
        apart.k(k, seed)
    study = apart.study()
    assert paired.chosen(group(study, "g2d")) is None
    assert study_verdict(study).finding == "undecided" and state(study)


def test_a_baselines_learning_rate_is_chosen_for_each_budget(tmp_path):
    fake = Fake(tmp_path)
    for rate in ("0.1", "0.2"):
        fake.warmup(rate, 0, 50.0)
    for k in ENDS:
        fake.online("0.1", 0, k, {0: 0.1, 2: 0.4, 4: 0.5}[k])
        fake.online("0.2", 0, k, {0: 0.1, 2: 0.2, 4: 0.9}[k])  # best in the end
        fake.k(k, 0)
    study = fake.study()
    # at 50, 150 and 250 FLOPs
    best = [paired.best_at(study, row) for row in group(study, "g2d")]
    # on dev 0.25 and 0.15 at 50 FLOPs, 0.45 and 0.55 at 150; neither has spent 250
    assert [baseline and baseline[0].group[-3:] for baseline in best] == ["0.1", "0.2", None]
    cells = [row[VERSUS] for name, row in lines(results(study)).items() if name.startswith("g2d")]
    assert [cell.rpartition(", ")[2] for cell in cells] == [
        "learning rate 0.1",
        "learning rate 0.2",
        "GRPO was not run that far",
    ]


def test_a_point_of_no_steps_does_not_wait_for_its_warm_up(tmp_path):
    fake = Fake(tmp_path)
    for k in (0, 2):
        fake.offline(
            "g2d", 0, {STEPS: str(k)}, f"warmup@{k}" if k else "init", "none", ENDS[k][0], dev=0.5
        )
    study = fake.study()
    assert [row.name for row in study.rows] == ["g2d"]
    assert study.left_out == {"g2d,steps=2,s0": "not finished"}
    assert state(study).endswith(f": g2d sweep --config mine:x --workdir {tmp_path}")
    nothing = dataclasses.replace(study, groups=[])
    assert study_verdict(nothing).finding == "unfinished"


@pytest.mark.slow
def test_the_files_have_the_same_bytes_every_time(root, study):
    shown = []
    paths = [
        Path(path) for path in write_study(root, "fake", show=lambda *table: shown.append(table))
    ]
    assert [path.name for path in paths] == ["fake.html", "fake.md", "fake.csv"]
    assert {"fake-flops.svg", "fake-flops.pdf", "fake-seconds.pdf"} <= {
        file.name for file in (root / "figures").iterdir()
    }
    before = [path.read_bytes() for path in paths]
    write_study(root, "fake")
    assert [path.read_bytes() for path in paths] == before and shown == [tuple(results(study))]
    rows = list(csv.DictReader(paths[2].read_text("utf-8").splitlines()))
    found = {}
    for row in rows:
        key = tuple(row[name] for name in ("arm", "settings", "seed", "K", "policy", "split"))
        found[key] = row
    assert len(found) == len(rows)
    k2, zero = f"{STEPS}=2", "0"
    assert found["g2d", k2, zero, "2.0", "dpo", "test"]["accuracy"] == "0.75"
    assert found["g2d", k2, zero, "2.0", "dpo", "test"]["flops"] == "150.0"
    assert found["g2d", k2, zero, "2.0", "warmup@2", "test"]["flops"] == "100.0"
    grpo = f"{RATE}=0.1;{STEPS}=4"
    assert found["grpo", grpo, zero, "4.0", "warmup@4", "test"]["flops"] == "200.0"
    assert not any(cell.startswith(("=", "+", "@")) for row in rows for cell in row.values())


def online(loss: str, sync_every: int) -> dict:
    return {"steps": 20, "loss": loss, "sync_every": sync_every}


def test_an_arm_whose_server_samples_ahead_says_so(tmp_path):
    fake = Fake(tmp_path)
    fake.arm("s1", 0, online("dpo", 1), [1, 1, 1, 1], generation={"calls": 4})
    fake.arm("s10", 0, online("dpo", 10), [1, 1, 0, 0], generation={"ahead": 1})
    found = lines(results(fake.study()))
    assert [found[arm]["s"] for arm in ("s1", "s10")] == ["1", "10, ahead"]


def test_arms_that_miss_seeds_or_begin_with_different_policies(tmp_path):
    fake = Fake(tmp_path)
    fake.arm("offline", 0, online("dpo", 0), [1, 1, 0, 0])
    fake.arm("s1", 0, online("dpo", 1), [1, 1, 1, 0], steps=18)
    fake.arm("s1", 1, online("dpo", 1), [1, 1, 1, 1], policies=("train",))
    found = lines(results(fake.study()))
    assert lines(details(fake.study().rows))["s1"]["K"] == "19"
    assert found["s1"]["over offline"].startswith("+25.0 [") and found["s1"][
        "over offline"
    ].endswith("(1 of 2 seeds)")
    assert found["s1"]["gain"].endswith("(1 of 2 seeds)")
    for i, sync_every in enumerate((10, 1)):
        fake.arm(f"other{sync_every}", i, online("dpo", sync_every), [1, 1, 0, 0], sft=f"own{i}")
    assert fake.study().start is None  # two cold policies


def test_seeds_that_began_with_one_policy_of_elsewhere_are_all_its_start(tmp_path):
    fake = Fake(tmp_path)
    for seed in (0, 1):
        for sync_every in (1, 10):
            stage = {**online("dpo", sync_every), "policy": "hf:some/model"}
            names = ("hf:some/model", "train")
            fake.arm(f"s{sync_every}", seed, stage, [1, 1, 1, 1], policies=names)
    assert fake.study().start.seeds == [0, 1]


def test_of_many_rows_the_best_of_each_arm_is_shown_and_without_dev_that_is_said(tmp_path):
    fake = Fake(tmp_path)
    for i in range(5):
        right = [1] * i + [0] * (4 - i)
        for arm in ("one", "other"):
            values = {"stages.train.steps": str(10 * i)}
            fake.arm(arm, 0, online("grpo", 1), right, values=values)
    shown = first(fake.study().rows)
    assert [row[0] for row in shown.rows] == ["one, K = 20", "other, K = 20"]
    assert "optimistic" in shown.title


def test_values_of_one_arm_are_arms_and_other_studies_are_no_spectrum(tmp_path):
    fake, other = Fake(tmp_path / "range"), Fake(tmp_path / "other")
    for sync_every in (1, 0, 10):
        values = {"stages.train.sync_every": str(sync_every)}
        fake.arm("range", 0, online("dpo", sync_every), [1, 1, 0, 0], values=values)
    names = [row.name for row in fake.study().spectrum]
    assert names == ["range, sync every 0", "range, sync every 10", "range, sync every 1"]
    for rate, stage in (
        ("0.1", {}),
        ("0.2", online("grpo", 1)),
    ):  # {}: from before there was anything but GRPO
        other.arm(
            "grpo", 0, stage, [1, 1, 0, 0], values={"stages.train.optimizer.learning_rate": rate}
        )
    assert other.study().spectrum == [] and "s" not in results(other.study()).columns


def test_points_of_one_setting_were_tested_on_the_same_problems(tmp_path):
    fake = Fake(tmp_path)
    for seed, right in ((0, [1, 0]), (1, [1, 0, 1])):
        fake.arm("s1", seed, online("dpo", 1), right, policies=("train",))
    with pytest.raises(ValueError, match="s1: its seeds were tested on different problems"):
        fake.study()


def test_the_notebook_reads_a_study(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("G2D_WORKDIR", str(root))
    cells = json.loads(
        (Path(__file__).parents[2] / "notebooks" / "study.ipynb").read_text("utf-8")
    )["cells"]
    names: dict[str, Any] = {}
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    for source in code[1:]:  # the first one installs
        exec(source, names)
    assert {"g2d", "grpo"} <= set(names["points"]["arm"]) and names["axes"].lines
    assert report(names["study"])._repr_html_().startswith('<iframe srcdoc="&lt;!DOCTYPE html')
