"""Look for a task that a small model has to learn: the demo on variants of its task, over seeds, on
dev problems.

    python benchmarks/demo_task.py runs/demo-task [--only VARIANT …] [--seeds 0 1 2]
    python benchmarks/demo_task.py runs/demo --forgotten

Runs that are finished in the folder are not run again. Prints sampled pass@1 and greedy accuracy
in %, of the cold policy, after the warm-up and after DPO, the paired changes of the two with their
standard errors, and pass@4.
--forgotten: of a run of the demo, a table of how often each policy's greedy answers forget
to subtract. A variant is a task in place of procedural:slips, and settings of the demo. About 2
minutes of one core a run.
"""

import argparse
import dataclasses
import re
from collections import Counter
from pathlib import Path

from ml_collections import ConfigDict

from g2d_jax import pipeline
from g2d_jax.data import arithmetic
from g2d_jax.recipes.config_load import resolve
from g2d_jax.runtime.tables import read_rollouts
from g2d_jax.session import stage_result
from g2d_jax.study.stats import Paired

FLAT = {"forgotten": dict.fromkeys(range(2, 10), 0.6)}
MOSTLY_DIRECT = {"styles": {"direct": 0.6, "steps": 0.4}, "forgotten": {}}

# name: (what of the task differs, what of the demo's settings does)
VARIANTS: dict[str, tuple[dict, dict]] = {
    "demo": ({}, {}),
    "K=5": ({}, {"warmup.steps": 5}),
    "K=20": ({}, {"warmup.steps": 20}),
    "each forgotten 6 times in 10": (FLAT, {}),
    "most answer at once": (MOSTLY_DIRECT, {}),
    "half as much SFT": ({}, {"sft.steps": 500}),
}


def config_of(variant: str, seed: int) -> ConfigDict:
    """The demo on a variant of its task, evaluated on dev; registers the task."""
    task, changes = VARIANTS[variant]
    name = f"procedural:{variant}"
    arithmetic.TASKS[name] = dataclasses.replace(arithmetic.SLIPS, name=name, **task)
    config = resolve(f"demo:seed={seed}")
    config.unlock()
    for split in ("train", "dev", "test"):
        config.data[split].path = name
    config.data.dev.limit = 512
    config.stages.sft.data.path = name
    config.stages.evaluate.update(split="dev", num_generations=4, pass_at=(1, 4))
    config.stages.update_from_flattened_dict(changes)
    config.lock()
    return config


def line(variant: str, seed: int, workdir: Path) -> str:
    """A row of the table."""
    result = stage_result.read(workdir / "05-evaluate")
    assert result is not None and result.evaluation is not None
    policies, pairs = result.evaluation.policies, result.evaluation.changes[:2]

    def change(paired: Paired) -> str:
        return f"{100 * paired.difference:+.1f} ± {100 * paired.sem:.1f}"

    sampled = [f"{100 * policy.accuracy.mean:.1f}" for policy in policies]
    greedy = [f"{100 * policy.greedy:.1f}" for policy in policies]
    gains = [change(pair.sampled) for pair in pairs], [change(pair.greedy) for pair in pairs]
    most = [f"{100 * policy.pass_at['4']:.1f}" for policy in policies]
    cells = [
        variant,
        str(seed),
        *(" → ".join(row) for row in (sampled, gains[0], greedy, gains[1], most)),
    ]
    return f"| {' | '.join(cells)} |"


def forgotten(workdir: Path) -> list[str]:
    """Rows of how often, of the subtractions of 2 to 9 in a policy's greedy answers, the value
    stays as it was."""
    rows = []
    for policy in ("sft", "warmup", "dpo"):
        counts = {n: Counter[bool]() for n in range(2, 10)}
        for rollout in read_rollouts(
            workdir / "05-evaluate" / "rollouts" / f"{policy}-greedy.parquet"
        ):
            for value, operand, result in re.findall(r"(\d+)-([2-9])=(\d+);", rollout.text):
                counts[int(operand)][value == result] += 1
        shares = [f"{100 * count[True] / max(count.total(), 1):.0f} %" for count in counts.values()]
        rows.append(f"| {policy} | {' | '.join(shares)} |")
    return rows


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=[*VARIANTS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--forgotten", action="store_true")
    arguments = parser.parse_args()
    if arguments.forgotten:
        print("\n".join(forgotten(arguments.folder)))
        return
    rows = []
    for variant in arguments.only:
        for seed in arguments.seeds:
            workdir = arguments.folder / variant.replace(" ", "-") / str(seed)
            pipeline.run(config_of(variant, seed), workdir)
            rows.append(line(variant, seed, workdir))
    print(
        "| variant | seed | sampled | changes | greedy | changes | pass@4 "
        "|\n|---|---|---|---|---|---|---|"
    )
    print("\n".join(rows))


if __name__ == "__main__":
    main()
