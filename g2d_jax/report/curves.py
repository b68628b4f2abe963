"""The most useful training metrics as figures: of one run, and of several runs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from g2d_jax.report import figures
from g2d_jax.report.figures import Chart, Lines

CURVES: Mapping[str, tuple[Mapping[str, str], str]] = {
    "reward": ({"reward": "all"}, "It should rise."),
    "token entropy, nats": (
        {"entropy": "entropy"},
        "Falling slowly is healthy; at 0 there is no exploration.",
    ),
    "completion length, tokens": (
        {
            "completions/mean_length": "all",
            "completions/mean_length_correct": "right",
            "completions/mean_length_incorrect": "wrong",
        },
        "If correct and incorrect drift apart, length is being rewarded.",
    ),
    "KL divergence, nats": (
        {"kl": "from the reference", "kl_float32": "from float32"},
        "Distance that training moved the policy.",
    ),
    "share of unused responses": (
        {
            "frac_reward_zero_std": "groups without signal",
            "completions/clipped_ratio": "completions cut at the limit",
        },
        "Near 0 is good: neither adds a signal.",
    ),
    "implicit rewards": (
        {
            "rewards/margins": "margin",
            "rewards/chosen": "chosen",
            "rewards/rejected": "rejected",
        },
        "The margin should rise without chosen falling far.",
    ),
    "loss": ({"loss": "loss"}, "It should fall."),
}
"""Title of a figure -> its metrics with the names of their lines, and a hint for reading it."""

Logged = dict[str, dict[tuple[str, str], list[tuple[float, float]]]]
"""Stage -> (kind of log, metric) -> points (step, value) ascending, for metrics logged more than
once."""


def training(logged: Logged) -> list[Chart]:
    """Draw the metrics of `CURVES`, a figure a stage.

    Rewards of several functions or tasks are lines of one figure. The loss is left out if rewards
    or margins show more.
    """
    charts = []
    for stage, metrics in logged.items():
        is_judged = {("train", "reward"), ("train", "rewards/margins")} & metrics.keys()
        for title, (names, note) in CURVES.items():
            lines = {}
            for kind, metric in metrics:
                name = names.get(metric) or _part(metric, title)
                if name and not (metric == "loss" and is_judged):
                    label = f"{name} ({kind})".removesuffix(" (train)")
                    lines[label] = metrics[kind, metric]
            charts.append(_chart(stage, title, lines, note))
    return list(filter(None, charts))


def _chart(stage: str, title: str, lines: Lines, note: str) -> Chart | None:
    name = title.partition(",")[0]
    return figures.curves(f"{stage}-{name}", f"{stage}: {title}", lines, note=note)


def _part(metric: str, title: str) -> str:
    """Name a part of the reward: of a function, or of a task; "" for other metrics."""
    family, _, rest = metric.partition("/")
    if family == "tasks":
        rest, _, family = rest.rpartition("/")
    if family == title == "reward":
        return rest
    return ""


def compared(runs: Mapping[str, Logged]) -> list[Chart]:
    """Draw the first metric of each of `CURVES`, for stages that several runs have under the same
    name, a line a run.

    runs: name of a run -> its logs. A run has the same colour in all figures.
    """
    charts = []
    for stage in dict.fromkeys(itertools.chain.from_iterable(runs.values())):
        for title, (names, note) in CURVES.items():
            logged = ("train", next(iter(names)))
            lines = {run: stages.get(stage, {}).get(logged, []) for run, stages in runs.items()}
            if sum(map(bool, lines.values())) > 1:
                charts.append(_chart(stage, title, lines, note))
    return list(filter(None, charts))
