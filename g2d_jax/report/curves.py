"""Name the metrics of training in words, and draw them: a run's, and those of several runs over
each other."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from g2d_jax.report import figures
from g2d_jax.report import format as fmt
from g2d_jax.report.figures import Chart, Lines

CURVES: Mapping[str, Mapping[str, str]] = {
    "Reward": {"reward": "reward", "accuracy": "accuracy"},
    "Token entropy, nats": {"entropy": "entropy"},
    "Completion length, tokens": {
        "completions/mean_length": "all",
        "completions/mean_length_correct": "right",
        "completions/mean_length_incorrect": "wrong",
    },
    "KL divergence from the reference, nats": {"kl": "KL divergence"},
    "KL divergence from the same parameters in float32, nats": {"kl_float32": "KL divergence"},
    "Spread of reward within groups": {"reward_std": "standard deviation"},
    "Share of groups without signal": {"frac_reward_zero_std": "without signal"},
    "Share of completions cut at the limit": {"completions/clipped_ratio": "cut"},
    "Length in pairs, tokens": {
        "pairs/chosen_length": "chosen",
        "pairs/rejected_length": "rejected",
    },
    "Implicit rewards": {
        "rewards/chosen": "chosen",
        "rewards/rejected": "rejected",
        "rewards/margins": "margin",
    },
    "Share of pairs ranked correctly": {"rewards/accuracies": "ranked correctly"},
    "Log-probability of completions, nats": {
        "logps/chosen": "chosen",
        "logps/rejected": "rejected",
    },
    "Loss": {"loss": "loss"},
    "Gradient norm": {"grad_norm": "norm before clipping"},
    "Learning rate": {"learning_rate": "learning rate"},
}
"""Title of a figure -> its metrics, and what their lines are called. Other metrics fold."""

FOLDED: Mapping[str, Mapping[str, str]] = {
    "Share of prompts that teach": {"frac_signal": "with signal"},
    "Shortest and longest completion, tokens": {
        "completions/min_length": "shortest",
        "completions/max_length": "longest",
    },
    "Verdicts, share of completions": {
        "verdicts/correct": "correct",
        "verdicts/incorrect": "incorrect",
        "verdicts/no_answer": "no answer",
        "verdicts/timeout": "timeout",
        "verdicts/unscorable": "unscorable",
        "verdicts/scored": "scored",
    },
    "Ratio of the policy to the old one": {"ratio": "ratio"},
    "Share of tokens clipped": {
        "clip_ratio/low_mean": "below",
        "clip_ratio/high_mean": "above",
        "clip_ratio/region_mean": "both",
    },
    "Sampler less trainer, log-probability in nats": {"rollout_corr/kl": "difference"},
    "Sampler and trainer apart, nats of a token": {
        "sampling/sampling_logp_difference/mean": "mean",
        "sampling/sampling_logp_difference/max": "largest",
    },
    "Importance weights": {
        "sampling/importance_sampling_ratio/mean": "mean",
        "sampling/importance_sampling_ratio/min": "smallest",
        "sampling/importance_sampling_ratio/max": "largest",
    },
    "Entropy that the loss rewards, nats": {"policy_entropy": "entropy"},
    "Negative log-likelihood, nats of a token": {"nll": "all", "nll_loss": "chosen"},
    "Prompts of an update": {"pairs/prompts": "with a pair", "pairs/skipped": "without"},
    "Prompts at rest": {
        "curriculum/retired": "share that rests",
        "curriculum/skipped": "skipped",
        "curriculum/saved": "saved",
    },
    "Tokens of an update": {"tokens": "tokens"},
    "Pairs of an update": {"pairs": "pairs"},
    "Tokens so far": {"num_tokens": "tokens"},
    "Updates skipped so far": {"skipped_updates": "updates"},
    "Time of an update, s": {"step_time": "time"},
    "Prompts of a call of the sampler": {"generation/prompts": "prompts"},
    "Share of time in sampling": {
        "generation/share": "the trainer's",
        "generation/server_idle": "server without requests",
    },
    "Age of responses, updates": {"staleness": "age"},
    "Sampling, tokens a second": {"generation/tokens_per_second": "tokens a second"},
}
"""The same of metrics that fold."""

OWN_AXES = frozenset({"loss"})
"""Metrics of which each stage has a y axis of its own: losses are not one quantity."""

FACTORS = frozenset({"learning_rate", "grad_norm", "step_time", "generation/tokens_per_second"})
"""Metrics that are compared by factors, twice as much and a tenth: their axes may be logarithmic.

Shares, rewards, entropies and divergences are compared by differences: they have one axis in every
report, whatever they span.
"""

COMPARED = (
    "reward",
    "accuracy",
    "loss",
    "kl",
    "entropy",
    "completions/mean_length",
    "rewards/accuracies",
)
"""Metrics of which the curves of several runs are drawn over each other."""

Logged = Mapping[str, Mapping[tuple[str, str], Sequence[tuple[float, float]]]]
"""Stage -> (kind of log, metric) -> points (step, value) ascending, of what was logged more than
once."""


def _by_metric() -> dict[str, tuple[str, str]]:
    named = {}
    for title, names in (*CURVES.items(), *FOLDED.items()):
        for metric, name in names.items():
            named[metric] = title, name
    return named


_NAMED = _by_metric()


_ORDER = {metric: i for i, metric in enumerate(_NAMED)}


def _order(logged: tuple[str, str]) -> tuple[int, str, str]:
    """Say where a kind of log and a metric come among others: as in the tables here, then by
    name."""
    kind, metric = logged
    return _ORDER.get(metric, len(_ORDER)), metric, kind.replace("train", "")


def name_of(metric: str) -> tuple[str, str]:
    """Return the title of the figure that a metric belongs to, and its name there, both in words.

    Those of a task's metrics have the task's name. A metric that is not known here is called as it
    is, without underscores and slashes, in a figure of what is before its last slash.
    """
    if metric in _NAMED:
        return _NAMED[metric]
    family, _, rest = metric.partition("/")
    if family == "tasks" and "/" in rest:
        task, _, inner = rest.partition("/")
        title, name = name_of(inner)
        return f"{title}, by task", task if _is_first(inner, title) else f"{task}, {name}"
    family = metric.rpartition("/")[0] or metric
    return fmt.words(family), fmt.words(metric)


def _is_first(metric: str, title: str) -> bool:
    """Whether a metric is the first of its figure, which the title is about."""
    names = CURVES.get(title) or FOLDED.get(title) or {}
    return next(iter(names), metric) == metric


def training(logged: Logged) -> list[Chart]:
    """Draw the metrics of `CURVES`, stages side by side."""
    charts = [_chart(logged, title) for title in CURVES]
    return list(filter(None, charts))


def others(logged: Logged) -> list[Chart]:
    """Draw the other metrics: those of `FOLDED` first, then by title."""
    there = set()
    for _, metric in itertools.chain.from_iterable(logged.values()):
        there.add(name_of(metric)[0])
    titles = [title for title in FOLDED if title in there]
    titles += sorted(there - FOLDED.keys() - CURVES.keys())
    return list(filter(None, (_chart(logged, title) for title in titles)))


def _chart(logged: Logged, title: str) -> Chart | None:
    """Draw the metrics of a title, a panel a stage."""
    panels: dict[str, Lines] = {}
    drawn = set()
    for stage, metrics in logged.items():
        lines: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
        for kind, metric in sorted(metrics, key=_order):
            of, name = name_of(metric)
            if of == title:
                xs, ys = zip(*metrics[kind, metric], strict=True)
                lines[name + ("" if kind == "train" else f" ({kind})")] = xs, ys
                drawn.add(metric)
        panels[stage] = lines
    is_known = drawn <= _NAMED.keys()
    return figures.curves(
        _file_name(title),
        title,
        panels,
        share=is_known and not drawn & OWN_AXES,
        factors=bool(drawn) and drawn <= FACTORS,
    )


def _file_name(title: str) -> str:
    return title.partition(",")[0].lower()


def compared(runs: Mapping[str, Logged]) -> list[Chart]:
    """Draw each metric of `COMPARED` of stages that two runs or more have under one name, a line a
    run.

    runs: name of a run -> what it logged. A run has one colour in all figures.
    """
    return list(filter(None, (_overlay(runs, metric) for metric in COMPARED)))


def _overlay(runs: Mapping[str, Logged], metric: str) -> Chart | None:
    """Draw a metric of several runs, a panel a stage."""
    panels: dict[str, dict[str, tuple[Sequence[float], Sequence[float]]]] = {}
    for run, logged in runs.items():
        for stage, metrics in logged.items():
            if points := metrics.get(("train", metric)):
                xs, ys = zip(*points, strict=True)
                panels.setdefault(stage, {})[run] = xs, ys
    common = {stage: lines for stage, lines in panels.items() if len(lines) > 1}
    return figures.curves(
        metric,
        _title(metric),
        common,
        share=metric not in OWN_AXES,
        factors=metric in FACTORS,
        series=list(runs),
        note=_only(panels.keys() - common.keys()),
    )


def _title(metric: str) -> str:
    """Name a metric by itself: by its figure, and by its line where that has others."""
    title, name = name_of(metric)
    return title if _is_first(metric, title) else name.capitalize()


def _only(stages: Iterable[str]) -> str:
    """Say which stages one run alone logged."""
    names = ", ".join(sorted(stages))
    return f"Not drawn, since one run alone has it: {names}." if names else ""
