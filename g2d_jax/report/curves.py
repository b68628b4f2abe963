"""Draw the metrics of training that answer a question: a run's, and those of several runs over each
other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from g2d_jax.report import figures
from g2d_jax.report.figures import Chart

CURVES: Mapping[str, tuple[Mapping[str, str], str]] = {
    "reward": ({"reward": "all"}, "It should rise."),
    "token entropy, nats": (
        {"entropy": "entropy"},
        "Falling slowly is healthy; at 0 nothing is explored.",
    ),
    "completion length, tokens": (
        {
            "completions/mean_length": "all",
            "completions/mean_length_correct": "right",
            "completions/mean_length_incorrect": "wrong",
        },
        "Right and wrong drifting apart: length is being rewarded.",
    ),
    "KL divergence, nats": (
        {"kl": "from the reference", "kl_float32": "from float32"},
        "How far training went.",
    ),
    "share without use": (
        {
            "frac_reward_zero_std": "groups without signal",
            "completions/clipped_ratio": "completions cut at the limit",
        },
        "Near 0 is good: both teach nothing.",
    ),
    "implicit rewards": (
        {
            "rewards/chosen": "chosen",
            "rewards/rejected": "rejected",
            "rewards/margins": "margin",
        },
        "The margin should rise without chosen falling far.",
    ),
    "loss": ({"loss": "loss"}, "It should fall."),
}
"""What a figure shows -> its metrics and what their lines are called, and what to look for."""

COMPARED = (
    "reward",
    "loss",
    "kl",
    "entropy",
    "completions/mean_length",
    "rewards/margins",
)
"""Metrics of which the curves of several runs are drawn over each other."""

Logged = Mapping[str, Mapping[tuple[str, str], Sequence[tuple[float, float]]]]
"""Stage -> (kind of log, metric) -> points (step, value) ascending, of what was logged more than
once."""

Xy = tuple[Sequence[float], Sequence[float]]


def training(logged: Logged) -> list[Chart]:
    """Draw the metrics of `CURVES`, a figure a stage.

    Rewards of several functions or tasks are lines of one figure. A loss is left out where
    rewards or margins say more.
    """
    charts = []
    for stage, metrics in logged.items():
        is_judged = {("train", "reward"), ("train", "rewards/margins")} & metrics.keys()
        for title, (names, note) in CURVES.items():
            lines: dict[str, Xy] = {}
            for kind, metric in metrics:
                name = names.get(metric) or _part(metric, title)
                if name and not (metric == "loss" and is_judged):
                    label = name + ("" if kind == "train" else f" ({kind})")
                    lines[label] = _xy(metrics[kind, metric])
            charts.append(
                figures.curves(
                    f"{stage}-{title.partition(',')[0]}", f"{stage}: {title}", lines, note=note
                )
            )
    return list(filter(None, charts))


def _part(metric: str, title: str) -> str:
    """Name a metric that is a part of the reward: that of a function, or of a task; "" for none."""
    family, _, rest = metric.partition("/")
    if family == "tasks":
        rest, _, family = rest.rpartition("/")
    return rest if family == title == "reward" else ""


def _xy(points: Sequence[tuple[float, float]]) -> Xy:
    xs, ys = zip(*points, strict=True)
    return xs, ys


def compared(runs: Mapping[str, Logged]) -> list[Chart]:
    """Draw each metric of `COMPARED` of stages that two runs or more have under one name, a line a
    run.

    runs: name of a run -> what it logged. A run has one colour in all figures.
    """
    charts = []
    stages = dict.fromkeys(stage for logged in runs.values() for stage in logged)
    for metric in COMPARED:
        title = next(title for title, (names, _) in CURVES.items() if metric in names)
        for stage in stages:
            lines: dict[str, Xy] = {}
            for run, logged in runs.items():
                points = logged.get(stage, {}).get(("train", metric))
                lines[run] = _xy(points) if points else ((), ())
            if sum(bool(xs) for xs, _ in lines.values()) > 1:
                charts.append(figures.curves(f"{stage}-{metric}", f"{stage}: {title}", lines))
    return list(filter(None, charts))
