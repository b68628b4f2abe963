"""The informativeness section: how much rollouts of each policy can teach, and what an offline stage moved."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from g2d_jax.report import format as fmt
from g2d_jax.report import markup, summary
from g2d_jax.report.page import Note, Part, Section
from g2d_jax.report.run import Run, Stage
from g2d_jax.report.scatter import Mark, Marks, scatter_chart

MEASURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "pass_rate": ("pass rate %", fmt.percent),
    "reward_variance": ("variance", fmt.fixed(3)),
    "frac_mixed": ("mixed %", fmt.percent),
    "entropy": ("entropy", fmt.fixed(3)),
    "distinct_answers": ("distinct", fmt.fixed(2)),
    "confidence": ("confidence %", fmt.percent),
    "ece": ("ECE", fmt.fixed(3)),
    "auroc": ("AUROC", fmt.fixed(3)),
    "logprob_gap": ("gap", fmt.fixed(2)),
    "mean_length": ("length", fmt.fixed(1)),
    "mean_length_correct": ("length, correct", fmt.fixed(1)),
    "mean_length_incorrect": ("length, incorrect", fmt.fixed(1)),
    "frac_truncated": ("cut at limit %", fmt.percent),
    "prompts": ("prompts", fmt.count),
    "responses": ("responses", fmt.count),
    "scored": ("scored", fmt.count),
}
"""Measure -> head of its column, and its numbers as text, in the order of the columns; others follow by name."""

MAIN = 10
"""That many of them are in the first table, the others fold."""

MEANINGS = (
    "Variance is that of the reward among a prompt's completions. Mixed prompts can give pairs, or advantages: they "
    "have right and wrong completions or, of scalar rewards, different ones. Distinct answers are counted by prompt. "
    "Entropy is a token's, in nats. Confidence is the geometric mean of a completion's token probabilities; ECE and "
    "AUROC tell whether it predicts correctness (an ECE of 0 and an AUROC of 1 are perfect, one of 0.5 is chance). "
    "The gap is the log-prob of right less that of wrong completions, in nats. Means over prompts, but for entropy "
    "(over tokens) and length (over completions, in tokens)."
)

Measured = tuple[str, str, Mapping[str, Any]]
"""A policy's name, the stage whose rollouts these are, and measure -> number."""

STEPS = 32
"""Of the pass rate in the chart at most: one for each number of right answers, or tenths where samples are more."""


def informativeness(run: Run) -> Section:
    """Measures by policy, of evaluations and collections; pairs before and after each offline stage."""
    rows, parts = list(measured(run)), list[Part]()
    if rows:
        parts += [Note(MEANINGS), ("Rollouts of each policy", *table(rows, list(MEASURES)[:MAIN]))]
        more = table(rows, _others(rows))
        if len(more[0]) > 2:
            folded = markup.table("More of the same rollouts", *more)
            parts.append(markup.details("Lengths, counts and other measures", folded))
    figures = markup.charts(*(_pass_rates(stage) for stage in run.stages))
    offline = [part for stage in run.stages if stage.kind == "offline" for part in _offline(stage)]
    return Section("informativeness", "Informativeness", [*parts, figures, *offline])


def measured(run: Run) -> Iterator[Measured]:
    """All there is, in the order of the stages."""
    for stage in run.stages:
        if stage.kind == "collect" and (found := stage.informativeness()):
            policy = stage.provenance().get("policy") or run.config.get("stages", {}).get(stage.name, {}).get("policy")
            yield summary.policy_name({"name": str(policy or stage.name)}), stage.name, found
        for entry in summary.policies(stage.manifest or {}) if stage.kind == "evaluate" else ():
            if entry.get("informativeness"):
                yield summary.policy_name(entry), stage.name, entry["informativeness"]


def _others(rows: Sequence[Measured]) -> list[str]:
    unknown = {name for _, _, found in rows for name in found} - MEASURES.keys()
    return [*list(MEASURES)[MAIN:], *sorted(unknown)]


def table(rows: Sequence[Measured], measures: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: policy, stage, and those of the measures that any of the rows has."""
    names = [name for name in measures if any(not math.isnan(fmt.number(found, name)) for _, _, found in rows)]
    heads = [MEASURES[name][0] if name in MEASURES else name.replace("_", " ") for name in names]
    lines = [[policy, stage, *(_cell(found, name) for name in names)] for policy, stage, found in rows]
    return ["policy", "rollouts of", *heads], lines


def _cell(found: Mapping[str, Any], name: str) -> str:
    written = MEASURES[name][1] if name in MEASURES else fmt.value
    return written(fmt.number(found, name))


def _pass_rates(stage: Stage) -> str:
    """How hard the prompts were: the share of prompts by pass rate."""
    columns = stage.prompts()
    rates = np.asarray(columns.get("pass_rate", ()), np.float64)
    known = ~np.isnan(rates)
    if not known.any():
        return ""
    samples = set(np.asarray(columns.get("scored", ()))[known].tolist()) if "scored" in columns else set()
    steps = int(samples.pop()) if len(samples) == 1 and max(samples) <= STEPS else 10
    counts = np.bincount(np.round(rates[known] * steps).astype(int), minlength=steps + 1)
    shares = 100 * counts / known.sum()
    series = Marks(stage.name, [Mark(i / steps, float(share)) for i, share in enumerate(shares)])
    note = f"Pass rates in steps of 1/{steps}. Prompts at 0 and 1 give no pairs."
    note += f" {fmt.count(np.sum(~known))} prompts have no pass rate and are left out." if not known.all() else ""
    return scatter_chart(f"Prompts of {stage.name} by pass rate, %", [series], x_title="pass rate", note=note)


def _offline(stage: Stage) -> list[Part]:
    """Pairs under the policy before and after training on them, and what else was measured."""
    result = (stage.manifest or {}).get("result") or {}
    parts = {name: result[name] for name in ("before", "after", "pairs", "signal") if _numbers(result.get(name))}
    before, after = parts.pop("before", {}), parts.pop("after", {})
    moved = [
        [_words(name), *(fmt.value(fmt.number(side, name)) for side in (before, after)), _change(before, after, name)]
        for name in dict.fromkeys([*before, *after])
    ]
    others = [
        [_words(name), _words(what), fmt.value(value)]
        for name, found in parts.items()
        for what, value in _numbers(found)
    ]
    return [
        (f"The pairs under the policy before and after {stage.name}", ["measure", "before", "after", "change"], moved),
        (f"More of {stage.name}", ["of", "measure", "value"], others),
    ]


def _change(before: Mapping[str, Any], after: Mapping[str, Any], name: str) -> str:
    difference = fmt.number(after, name) - fmt.number(before, name)
    return fmt.UNKNOWN if math.isnan(difference) else f"{difference:+.4g}"


def _numbers(found: Any) -> list[tuple[str, float]]:
    if not isinstance(found, Mapping):
        return []
    return [(str(name), value) for name in found if not math.isnan(value := fmt.number(found, name))]


def _words(name: str) -> str:
    return name.replace("_", " ")
