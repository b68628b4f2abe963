"""Compare each rival with GRPO at its own cost, from the tables of benchmarks/results/rivals.

benchmarks/claims.py prints these tables. docs/rivals.md has the plan: the comparisons, their
intervals, the verdicts and the rule of advice. Accuracies are in %, differences in points, costs
after SFT. A run is ruined at a budget if it is there FALL points or more below one of its own
earlier checkpoints or its start.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import rivals
from intervals import Found, over_seeds
from matplotlib.figure import Figure
from rivals_table import FALL, NEAR, scale_of

from g2d_jax.report import figures

BASELINE = "grpo"
NAMES = {
    "grpo": "GRPO",
    "grpo_n2": "GRPO, 2 rollouts a prompt",
    "grpo_2x": "GRPO, 2 updates a batch",
    "raft": "RAFT",
    "dpo_s1": "online DPO",
    "dpo_s10": "DPO, rollouts of every 10 updates",
    "dpo_2rounds": "DPO in two rounds",
    "offline": "offline DPO, K = 0",
    "g2d_k5": "G2D, K = 5",
    "g2d_k20": "G2D, K = 20",
    "g2d_k60": "G2D, K = 60",
}
"""Arm -> its name for readers."""


@functools.cache
def read(task: str, measure: str = "flops", folder: Path = rivals.RESULTS) -> pd.DataFrame:
    """Read a task's policies: a row for each, in the order of training, with `over`, what it has
    over GRPO at its own cost (NaN outside of GRPO's checkpoints), `added`, what DPO added to its
    warm-up (NaN without one), and `ruined`.

    measure: of cost, "flops" or "generated" (tokens). Raises SystemExit if seeds are missing.
    """
    files = sorted(folder.glob(f"{task}-judge-*-policies.parquet"))
    frame = pd.concat(map(pd.read_parquet, files)) if files else pd.DataFrame({"seed": []})
    missing = {*scale_of(task).judging} - {*frame.seed}
    if missing:
        raise SystemExit(f"seeds {sorted(missing)} of {task} are not judged yet")
    frame = frame.reset_index(drop=True)
    frame["accuracy"] *= 100
    frame["ruined"] = False
    for (arm, seed), own in frame.groupby(["arm", "seed"]):
        earlier = own.accuracy
        if not scale_of(task).arms[arm].steps:  # its budgets share only the start and the warm-up
            earlier = own.accuracy.where(own.budget == 0)
            warmup = earlier.where(own.flops > 0).ffill()
            frame.loc[own.index, "added"] = own.accuracy - warmup
        frame.loc[own.index, "ruined"] = earlier.cummax().ffill() - own.accuracy >= FALL
        grpo = frame[(frame.arm == BASELINE) & (frame.seed == seed) & (frame.flops > 0)]
        known = np.interp(own[measure], grpo[measure], grpo.accuracy, left=np.nan, right=np.nan)
        frame.loc[own.index, "over"] = own.accuracy - known
    return frame


def at_budgets(frame: pd.DataFrame, arm: str) -> pd.DataFrame:
    """Tabulate an arm's policies at its budgets."""
    return frame[(frame.arm == arm) & (frame.budget > 0)]


def bought(frame: pd.DataFrame, arm: str) -> pd.DataFrame:
    """Tabulate an arm's policies at budgets whose cost is within GRPO's checkpoints, SFT not among
    them, in every seed."""
    own = at_budgets(frame, arm)
    outside = {*own.budget[own.over.isna()]}
    return own[~own.budget.isin(outside)]


def leads(frame: pd.DataFrame, arm: str) -> pd.Series:
    """Average what an arm has over GRPO over its budgets, by seed; empty without a budget."""
    return bought(frame, arm).groupby("seed").over.mean()


def primary(frame: pd.DataFrame, task: str) -> dict[str, Found]:
    """Compute each arm less GRPO, the mean over its budgets, at the interval of the plan."""
    rivals_of = [arm for arm in scale_of(task).arms if arm != BASELINE]
    level = 1 - 0.05 / len(rivals_of)
    found = {}
    for arm in rivals_of:
        if len(own := leads(frame, arm)):
            found[arm] = over_seeds(own, level=level)
    return found


def apart(task: str, arm: str, other: str) -> Found:
    """Compare two arms by what each has over GRPO, the mean over its budgets, at 95 %."""
    frame = read(task)
    return over_seeds(leads(frame, arm) - leads(frame, other))


def g2d(task: str, folder: Path = rivals.RESULTS) -> list[Found]:
    """Compare G2D with GRPO at each K, the mean over budgets, at 95 %."""
    frame = read(task, folder=folder)
    found = []
    for arm, recipe in scale_of(task).arms.items():
        own = leads(frame, arm)
        if not recipe.steps and recipe.rounds == 1 and len(own):
            found.append(over_seeds(own, recipe.warmup))
    return found


def advice(frame: pd.DataFrame, budget: int) -> pd.DataFrame:
    """Tabulate the arms at one budget, the advised one first: mean and median accuracy, what each
    has over GRPO and what DPO added to its warm-up, seeds above GRPO, and ruined runs."""
    rows = []
    for arm, own in frame[frame.budget == budget].groupby("arm"):
        rows.append(
            {
                "recipe": arm,
                "accuracy": own.accuracy.mean(),
                "median": own.accuracy.median(),
                "over": over_seeds(own.over),
                "added": over_seeds(own.added),
                "ahead": int((own.over > 0).sum()),
                "ruined": int(own.ruined.sum()),
                "flops": own.flops.mean(),
            }
        )
    table = pd.DataFrame(rows)
    table["is_near"] = table.accuracy >= table.accuracy.max() - NEAR
    order = table.ruined.where(table.is_near, math.inf)
    return table.assign(order=order).sort_values(["order", "accuracy"], ascending=[True, False])


def budgets_of(frame: pd.DataFrame) -> list[int]:
    """List the budgets, in updates of GRPO."""
    return sorted({*frame.budget} - {0})


def advised(task: str, folder: Path = rivals.RESULTS) -> list[str]:
    """Write what to run for each budget."""
    frame = read(task, folder=folder)
    seeds = frame.seed.nunique()
    lines = [
        "| updates of GRPO | GFLOPs | run | accuracy, % (median) | over GRPO at equal FLOPs "
        "| seeds above it | within 2 points |",
        "|---|---|---|---|---|---|---|",
    ]
    for budget in budgets_of(frame):
        table = advice(frame, budget)
        best = table.iloc[0]
        flops = table.flops[table.recipe == BASELINE].item() / 1e9
        cells = [str(budget), f"{flops:.0f}", NAMES[best.recipe]]
        cells.append(f"{best.accuracy:.1f} ({best['median']:.1f})")
        if best.recipe == BASELINE:
            cells += ["–", "–"]
        else:
            cells += [str(best.over), f"{best.ahead} of {seeds}"]
        near = [NAMES[name] for name in table.recipe[table.is_near] if name != best.recipe]
        lines.append(f"| {' | '.join(cells)} | {'; '.join(near) or 'none'} |")
    return lines


def compared(task: str, folder: Path = rivals.RESULTS) -> list[str]:
    """Write each recipe less GRPO, the mean over budgets, and its ruined seeds."""
    frame = read(task, folder=folder)
    seeds = frame.seed.nunique()
    lines = ["| recipe | less GRPO at equal FLOPs | verdict | ruined seeds |", "|---|---|---|---|"]
    found = primary(frame, task)
    for arm in scale_of(task).arms:
        own = at_budgets(frame, arm)
        ruined = f"{own.seed[own.ruined].nunique()} of {seeds}"
        if own.empty:
            cells = ["–", "not judged", "counts as ruined"]
        elif arm == BASELINE:
            cells = ["–", "the baseline", ruined]
        else:
            cells = [str(found[arm]), found[arm].verdict, ruined]
        lines.append(f"| {NAMES[arm]} | {' | '.join(cells)} |")
    return lines


def costs(task: str) -> list[str]:
    """Write each recipe less GRPO at equally many generated tokens, with the budgets outside of
    GRPO's checkpoints, which are left out, and its seconds up to the middle budget on one core."""
    frame = read(task, "generated")
    found = primary(frame, task)
    seconds = pd.read_csv(rivals.RESULTS / f"{task}-seconds.csv", index_col="arm")
    lines = ["| recipe | less GRPO at equal tokens | left out | seconds | sampling |"]
    lines.append("|---|---|---|---|---|")
    for arm in scale_of(task).arms:
        own = at_budgets(frame, arm)
        if len(own):
            outside = sorted({*own.budget} - {*bought(frame, arm).budget})
            spent = seconds.loc[arm]
            cells = [str(found.get(arm, "–")), ", ".join(map(str, outside)) or "none"]
            cells += [f"{spent.sum():.0f}", f"{spent.generation:.0f}"]
            lines.append(f"| {NAMES[arm]} | {' | '.join(cells)} |")
    return lines


def each_budget(task: str) -> list[str]:
    """Write all recipes at each budget."""
    frame = read(task)
    lines = ["| updates of GRPO | recipe | mean | median | over GRPO | DPO added | ruined |"]
    lines.append("|---|---|---|---|---|---|---|")
    for budget in budgets_of(frame):
        for row in advice(frame, budget).itertuples():
            over = "–" if row.recipe == BASELINE else row.over
            cells = f"{row.accuracy:.1f} | {row.median:.1f} | {over} | {row.added} | {row.ruined}"
            lines.append(f"| {budget} | {NAMES[row.recipe]} | {cells} |")
    return lines


def answers(task: str) -> list[str]:
    """Write what answers are like at the highest budget."""
    frame = read(task)
    names = ["entropy", "distinct_answers", "ece", "mean_length"]
    means = frame[frame.budget == budgets_of(frame)[-1]].groupby("arm")[names].mean()
    lines = ["| recipe | entropy | distinct answers | calibration error | length |"]
    lines.append("|---|---|---|---|---|")
    for arm, row in means.iterrows():
        numbers = " | ".join(f"{row[name]:.2f}" for name in names)
        lines.append(f"| {NAMES[arm]} | {numbers} |")
    return lines


def chart(task: str) -> Figure:
    """Draw accuracy over FLOPs, a recipe a line, with 95 % bands over seeds."""
    frame = read(task)
    with figures.styled():
        figure = Figure(figsize=(6.5, 4.2), layout="constrained")
        ax = figure.subplots()
        ax.set_prop_cycle(color=matplotlib.colormaps["tab10"].colors)
        highest = frame[frame.budget == budgets_of(frame)[-1]].groupby("arm").accuracy.mean()
        for arm in highest.sort_values(ascending=False).index:
            own = at_budgets(frame, arm)
            flops = own.groupby("budget").flops.mean() / 1e9
            bands = own.groupby("budget").accuracy.apply(over_seeds)
            mean, low, high = np.transpose([(band.mean, band.low, band.high) for band in bands])
            (line,) = ax.plot(flops, mean, marker="o", label=NAMES[arm])
            ax.fill_between(flops, low, high, color=line.get_color(), alpha=0.1, linewidth=0)
        ax.set_xlabel("billion FLOPs after SFT")
        ax.set_ylabel("accuracy on test problems, %")
        ax.legend(loc="lower right", ncols=2)
    return figure
