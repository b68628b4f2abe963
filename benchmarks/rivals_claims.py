"""Compare each rival with GRPO at its own cost, from the tables of benchmarks/results/rivals.

    python benchmarks/rivals_claims.py demo              # prints the tables, once every seed is there
    python benchmarks/rivals_claims.py demo --ended      # the same with the seeds that were finished
    python benchmarks/rivals_claims.py demo --measure generated    # at equal tokens, not FLOPs
    python benchmarks/rivals_claims.py demo --chart FILE.svg

docs/rivals.md has the plan: the comparisons, their intervals, the verdicts and the rule of advice.
Accuracies are in %, differences in points, costs after SFT. A run is ruined at a budget if it is
there FALL points or more below one of its own earlier checkpoints or its start.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

import claims
import numpy as np
import pandas as pd
import rivals
from matplotlib.figure import Figure
from rivals_table import FALL, NEAR, scale_of

from g2d_jax.report import figures

BASELINE = "grpo"


class Difference(claims.Found):
    """A mean over seeds in points, with its interval: NaN for one seed, or without some seed's
    value."""

    @property
    def verdict(self) -> str:
        """One of the plan's four."""
        if self.low > 0:
            return "better"
        if self.high < 0:
            return "worse"
        return "level" if self.low >= -NEAR and self.high <= NEAR else "inconclusive"

    def __str__(self) -> str:
        if math.isnan(self.low):
            return "–"
        return f"{self.mean:+.1f} [{self.low:+.1f}, {self.high:+.1f}]"


def over_seeds(values: pd.Series, level: float = 0.95) -> Difference:
    """Compute the mean with Student's t over seeds."""
    return Difference(*dataclasses.astuple(claims.over_seeds(values, level=level)))


def read(
    task: str, *, ended: bool, measure: str = "flops", folder: Path = rivals.RESULTS
) -> pd.DataFrame:
    """Read a task's policies: a row for each, in the order of training, with `over`, what it has
    over GRPO at its own cost (NaN outside of GRPO's checkpoints), `added`, what DPO added to its
    warm-up (NaN without one), and `ruined`.

    ended: whether fewer seeds than planned are enough. measure: of cost. Raises SystemExit if seeds
    are missing.
    """
    files = sorted(folder.glob(f"{task}-judge-*-policies.parquet"))
    frame = pd.concat(map(pd.read_parquet, files)) if files else pd.DataFrame({"seed": []})
    missing = {*scale_of(task).judging} - {*frame.seed}
    if missing and not (ended and files):
        raise SystemExit(f"seeds {sorted(missing)} of {task} are not judged yet")
    frame = frame.reset_index(drop=True)
    frame["accuracy"] *= 100
    for (arm, seed), own in frame.groupby(["arm", "seed"]):
        earlier = own.accuracy
        if not scale_of(task).arms[arm].steps:  # its budgets share only the start and the warm-up
            earlier = own.accuracy.where(own.budget == 0)
        frame.loc[own.index, "ruined"] = earlier.cummax().ffill() - own.accuracy >= FALL
        grpo = frame[(frame.arm == BASELINE) & (frame.seed == seed) & (frame.flops > 0)]
        known = np.interp(own[measure], grpo[measure], grpo.accuracy, left=np.nan, right=np.nan)
        frame.loc[own.index, "over"] = own.accuracy - known
        warmup = own.accuracy.where(own.policy == "warmup").ffill()
        frame.loc[own.index, "added"] = own.accuracy - warmup
    return frame


def bought(frame: pd.DataFrame, arm: str) -> pd.DataFrame:
    """Tabulate an arm's policies at budgets whose cost is within GRPO's checkpoints in every
    seed."""
    own = frame[(frame.arm == arm) & (frame.budget > 0)]
    outside = {*own.budget[own.over.isna()]}
    return own[~own.budget.isin(outside)]


def primary(frame: pd.DataFrame, task: str) -> dict[str, Difference]:
    """Compute each arm less GRPO, the mean over its budgets, at the interval of the plan."""
    rivals_of = [arm for arm in scale_of(task).arms if arm != BASELINE]
    level = 1 - 0.05 / len(rivals_of)
    found = {}
    for arm in rivals_of:
        own = bought(frame, arm)
        if len(own):
            found[arm] = over_seeds(own.groupby("seed").over.mean(), level)
    return found


def advice(frame: pd.DataFrame, budget: int) -> pd.DataFrame:
    """Tabulate the arms at one budget, the advised one first: mean and median accuracy, what each
    has over GRPO and what DPO added to its warm-up, and ruined runs."""
    rows = []
    for arm, own in frame[frame.budget == budget].groupby("arm"):
        rows.append(
            {
                "recipe": arm,
                "accuracy": own.accuracy.mean(),
                "median": own.accuracy.median(),
                "over": over_seeds(own.over),
                "added": over_seeds(own.added),
                "ruined": int(own.ruined.sum()),
            }
        )
    table = pd.DataFrame(rows)
    near = table.accuracy >= table.accuracy.max() - NEAR
    order = table.ruined.where(near, math.inf)
    return table.assign(order=order).sort_values(["order", "accuracy"], ascending=[True, False])


def lines(frame: pd.DataFrame, task: str) -> list[str]:
    """Write the comparisons, the advice and the other measures as Markdown."""
    seeds = frame.seed.nunique()
    compared: Mapping[str, Difference] = primary(frame, task)
    out = [f"{seeds} seeds", "", "| recipe | less GRPO at equal cost | verdict |", "|---|---|---|"]
    for arm, found in compared.items():
        out.append(f"| `{arm}` | {found} | {found.verdict} |")
    out.append("")
    for arm in scale_of(task).arms:
        own = frame[(frame.arm == arm) & (frame.budget > 0)]
        left_out = sorted({*own.budget} - {*bought(frame, arm).budget})
        if own.empty:
            out.append(f"`{arm}` was not judged: each rate ruined a tuning run.")
        elif left_out:
            out.append(f"`{arm}`: out of GRPO's range at {left_out}, left out of its mean.")
    budgets = sorted({*frame.budget} - {0})
    for budget in budgets:
        out += ["", f"{budget} updates of GRPO:", ""]
        out += ["| recipe | accuracy | median | over GRPO | DPO added | ruined |"]
        out += ["|---|---|---|---|---|---|"]
        for row in advice(frame, budget).itertuples():
            over = "–" if row.recipe == BASELINE else row.over
            cells = f"{row.accuracy:.1f} | {row.median:.1f} | {over} | {row.added} | {row.ruined}"
            out.append(f"| `{row.recipe}` | {cells} |")
    names = ["entropy", "distinct_answers", "ece", "mean_length"]
    means = frame[frame.budget == budgets[-1]].groupby("arm")[names].mean()
    out += ["", "| recipe | entropy | distinct answers | calibration error | length |"]
    out.append("|---|---|---|---|---|")
    for arm, row in means.iterrows():
        numbers = " | ".join(f"{row[name]:.2f}" for name in names)
        out.append(f"| `{arm}` | {numbers} |")
    return out


def chart(frame: pd.DataFrame) -> Figure:
    """Draw accuracy over FLOPs, a recipe a line, with 95 % bands over seeds."""
    with figures.styled():
        figure = Figure(figsize=(6.5, 4), layout="constrained")
        ax = figure.subplots()
        for arm, own in frame[frame.budget > 0].groupby("arm"):
            flops = own.groupby("budget").flops.mean() / 1e9
            bands = own.groupby("budget").accuracy.apply(over_seeds)
            mean, low, high = np.transpose([(band.mean, band.low, band.high) for band in bands])
            (line,) = ax.plot(flops, mean, marker="o", label=arm)
            ax.fill_between(flops, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
        ax.set_xlabel("billion FLOPs after SFT")
        ax.set_ylabel("accuracy on test problems, %")
        ax.legend(loc="lower right", ncols=2)
    return figure


def main() -> None:
    """Print the tables of a task, or draw its chart."""
    parser = argparse.ArgumentParser(description="Compare each rival with GRPO at its own cost.")
    parser.add_argument("task", help="demo, arithmetic or stories")
    parser.add_argument("--ended", action="store_true", help="with the seeds that were finished")
    parser.add_argument("--measure", choices=("flops", "generated"), default="flops")
    parser.add_argument("--chart", type=Path, help="draw the chart into this SVG file")
    given = parser.parse_args()
    frame = read(given.task, ended=given.ended, measure=given.measure)
    if given.chart:
        drawn = figures.Chart("rivals", "", "", "", chart(frame))
        given.chart.write_bytes(drawn.file("svg"))
    else:
        print("\n".join(lines(frame, given.task)))


if __name__ == "__main__":
    main()
