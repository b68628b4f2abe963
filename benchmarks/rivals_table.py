"""Read the study of rivals: what each arm costs, which rate each runs at, and a table of verdicts
and costs for each seed.

    python benchmarks/rivals_table.py pilot DIR            # part=pilot: FLOPs at each checkpoint
    python benchmarks/rivals_table.py seconds DIR FILE     # of the same: seconds at the middle budget, as CSV
    python benchmarks/rivals_table.py write DIR tune 40 OUT    # two tables of a seed of part=tune, or judge
    python benchmarks/rivals_table.py choose OUT demo FILE     # writes FILE, which part=judge reads

The rule of choice: out is a rate at which any tuning run falls by FALL points or more below its own
earlier dev point; of the others the smallest whose mean dev accuracy is within NEAR points of the
best. An arm of which every rate is out has none, and is not judged. OUT/TASK-PART-SEED.parquet has
a row for each answer: study, arm, rate, seed, budget, policy, problem, verdict.
OUT/TASK-PART-SEED-policies.parquet has a row for each policy, in the order of training: the same
first columns, what its training cost (SFT left out), and what its answers were like.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import rivals

from g2d_jax.session import accounting, stage_result
from g2d_jax.session.stage_result import Evaluated, StageResult

FALL, NEAR = 5.0, 2.0
COSTS = ("flops", "generated", "trained", "tokens")
SECONDS = ("generation", "logprobs", "verification", "training")
ANSWERS = ("entropy", "distinct_answers", "ece", "mean_length", "frac_truncated")


@dataclass(frozen=True)
class Point:
    """One point of a study. rate: that of its arm. stages: name -> settings. results:
    name -> record, of the stages that are done. folders: name -> the stage's folder."""

    arm: str
    seed: int
    rate: str
    stages: Mapping[str, Mapping[str, Any]]
    results: Mapping[str, StageResult]
    folders: Mapping[str, Path]

    @property
    def evaluated(self) -> Sequence[Evaluated]:
        """Its evaluation's policies, in the order of training. Raises SystemExit without one."""
        result = self.results.get("evaluate")
        if result is None or result.evaluation is None:
            raise SystemExit(f"{self.arm}, seed {self.seed}, rate {self.rate}: not judged yet")
        return result.evaluation.policies


def points(folder: Path, part: str) -> Iterator[tuple[str, Point]]:
    """Read the points of the one study of a part that the folder has, each with its task."""
    plans = sorted((folder / "sweeps").glob(f"rivals-*-{part}.json"))
    if len(plans) != 1:
        raise SystemExit(f"{folder} has {len(plans)} studies of part={part}: one was expected")
    task = plans[0].stem.removeprefix("rivals-").removesuffix(f"-{part}")
    for point in json.loads(plans[0].read_text())["points"]:
        settings = json.loads(
            (folder / "points" / plans[0].stem / point["label"] / "config.json").read_text()
        )
        results = {}
        folders = {name: folder / "stages" / node for name, node in point["stages"].items()}
        for name, place in folders.items():
            if (result := stage_result.read(place)) is not None:
                results[name] = result
        values = point["values"]
        # after a warm-up DPO's rate is half of the one that is tried
        rate = values.get(rivals.RATE) or next(iter(values.values()))
        stages = settings["config"]["stages"]
        yield task, Point(point["arm"], point["seed"], rate, stages, results, folders)


def pilot(folder: Path) -> list[str]:
    """List each arm's FLOPs, in updates of GRPO: at its checkpoints, or by stage."""
    found = [point for _, point in points(folder, "pilot")]
    grpo = next(point for point in found if point.arm == "grpo").results["warmup"].costs
    budgets = {int(step): at.flops for step, at in grpo.items()}
    lines = [f"grpo: {', '.join(f'{step}: {flops:.3g}' for step, flops in budgets.items())} FLOPs"]
    each = budgets[max(budgets)] / max(budgets)
    for point in found:
        if "mid_collect" not in point.results:
            at = point.results["warmup"].costs
            costs = {step: f"{one.flops / each:.1f}" for step, one in at.items()}
        else:
            costs = {}
            for name, result in point.results.items():
                costs[name] = f"{result.cost.flops / each:.1f} {result.counts}"
        lines.append(f"{point.arm}: {', '.join(f'{key}: {cost}' for key, cost in costs.items())}")
    return lines


def seconds(folder: Path) -> pd.DataFrame:
    """Tabulate the seconds of each activity that each arm takes up to the middle budget, SFT and
    compilation left out."""
    rows = []
    for task, point in points(folder, "pilot"):
        scale = scale_of(task)
        arm = scale.arms[point.arm]
        updates = arm.steps[scale.middle] if arm.steps else arm.warmup
        row = {name: _up_to(updates, point.results["warmup"], name) for name in SECONDS}
        for stage, result in point.results.items():
            if stage not in ("sft", "warmup"):
                for name in SECONDS:
                    row[name] += getattr(result.cost, f"{name}_seconds")
        rows.append({"arm": point.arm, **row})
    return pd.DataFrame(rows)


def _up_to(updates: int, warmup: StageResult, name: str) -> float:
    """Return the seconds of an activity up to an update, between two checkpoints on a straight line:
    one run may serve several arms."""
    spent = {int(step): getattr(cost, f"{name}_seconds") for step, cost in warmup.costs.items()}
    steps = sorted({0, *spent})
    return float(np.interp(updates, steps, [spent.get(step, 0) for step in steps]))


def choose(out: Path, task: str) -> dict[str, Any]:
    """Apply the rule to the tables of part=tune: arm -> its rate, with all that was tried. Raises
    SystemExit where a seed or a rate is missing."""
    files = sorted(out.glob(f"{task}-tune-*-policies.parquet"))
    if not files:
        raise SystemExit(f"{out} has no table of {task}-tune: write them first")
    read = pd.concat(map(pd.read_parquet, files))
    scale = scale_of(task)
    tried = read.groupby("arm")[["rate", "seed"]].agg(lambda values: set(values))
    for arm, row in tried.iterrows():
        if row.rate != {*scale.rates} or row.seed != {*scale.tuning}:
            raise SystemExit(
                f"{arm}: rates {row.rate} on seeds {row.seed} are not all that the plan has"
            )
    series: dict[str, dict[str, dict[int, list[float]]]] = defaultdict(lambda: defaultdict(dict))
    for (arm, rate, seed), run in read.groupby(["arm", "rate", "seed"]):
        series[arm][rate][seed] = (100 * run.accuracy).tolist()
    return {"arms": {arm: _choose(by_rate) for arm, by_rate in sorted(series.items())}}


def scale_of(task: str) -> rivals.Scale:
    """Return the scale of a task, "demo", "arithmetic" or "stories", with "-smoke" behind it if it is
    the toy's."""
    name, _, smoke = task.partition("-")
    scale = rivals.SCALES["demo" if name == "demo" else "smollm2"]
    return rivals.shrunk(scale) if smoke else scale


def _choose(by_rate: Mapping[str, Mapping[int, list[float]]]) -> dict[str, Any]:
    """Choose one arm's rate, None where every one ruined a run."""
    tried = []
    for rate in sorted(by_rate, key=float):
        runs = by_rate[rate]
        dev = sum(run[-1] for run in runs.values()) / len(runs)
        falls = max(map(largest_fall, runs.values()))
        tried.append({"rate": rate, "dev": dev, "out": falls >= FALL, "runs": runs})
    left = [row for row in tried if not row["out"]]
    if not left:
        return {"rate": None, "tried": tried}
    best = max(row["dev"] for row in left)
    rate = next(row["rate"] for row in left if row["dev"] >= best - NEAR)
    return {"rate": rate, "tried": tried}


def largest_fall(series: list[float]) -> float:
    """Return by how much a series falls at most below one of its earlier points, 0 if never."""
    fall = 0.0
    highest = series[0]
    for value in series:
        highest = max(highest, value)
        fall = max(fall, highest - value)
    return fall


def tables(folder: Path, part: str, seed: int) -> tuple[str, pd.DataFrame, pd.DataFrame]:
    """Return the task, the answers and the policies of one seed of a part."""
    answers, policies = [], []
    task = ""
    for task, point in points(folder, part):
        if point.seed != seed:
            continue
        scale = scale_of(task)
        budgets = scale.arms[point.arm].policies(scale.budgets)
        for policy in point.evaluated:
            row = {"study": f"rivals-{task}-{part}", "arm": point.arm, "rate": point.rate}
            row |= {"seed": seed, "budget": budgets.get(policy.name, 0)}
            row |= {"policy": policy.name}
            rollouts = (point.folders["evaluate"] / policy.rollouts).resolve()
            read = pd.read_parquet(rollouts, columns=["problem_id", "verdict"])
            read = read.rename(columns={"problem_id": "problem"})
            answers.append(pd.DataFrame({**row, **read.to_dict("series")}))
            costs = accounting.cost_of(policy.name, point.stages, point.results)
            row |= {name: costs[name] for name in COSTS}
            row |= {"accuracy": policy.accuracy.mean}
            policies.append(row | {name: policy.informativeness[name] for name in ANSWERS})
    if not policies:
        raise SystemExit(f"{folder} has no seed {seed} of part={part}")
    return task, pd.concat(answers, ignore_index=True), pd.DataFrame(policies)


def write(folder: Path, part: str, seed: int, out: Path) -> Path:
    """Write both tables of one seed; returns that of the answers."""
    task, answers, policies = tables(folder, part, seed)
    out.mkdir(parents=True, exist_ok=True)
    texts = ["study", "arm", "rate", "policy", "problem", "verdict"]
    answers[texts] = answers[texts].astype("category")
    answers = answers.astype({"seed": "int16", "budget": "int16"})
    file = out / f"{task}-{part}-{seed}.parquet"
    answers.to_parquet(file, index=False, compression="zstd")
    policies.to_parquet(file.with_name(f"{file.stem}-policies.parquet"), index=False)
    return file


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    arguments: dict[str, tuple[str, ...]] = {"pilot": (), "seconds": ("file",)}
    arguments |= {"choose": ("task", "file"), "write": ("part", "seed", "out")}
    kinds = {"task": str, "part": str, "seed": int}
    for name, more in arguments.items():
        command = commands.add_parser(name)
        command.add_argument("folder", type=Path)
        for argument in more:
            command.add_argument(argument, type=kinds.get(argument, Path))
    given = parser.parse_args()
    if given.command == "pilot":
        print("\n".join(pilot(given.folder)))
    elif given.command == "seconds":
        seconds(given.folder).round(1).to_csv(given.file, index=False)
    elif given.command == "choose":
        choice = choose(given.folder, given.task)
        given.file.parent.mkdir(parents=True, exist_ok=True)
        given.file.write_text(json.dumps(choice, indent=1) + "\n")
        for arm, chosen in choice["arms"].items():
            shown = [
                f"{one['rate']}: {one['dev']:.1f}{' out' * one['out']}" for one in chosen["tried"]
            ]
            print(f"{arm}: {chosen['rate']} of {', '.join(shown)}")
    else:
        print(write(given.folder, given.part, given.seed, given.out))


if __name__ == "__main__":
    main()
