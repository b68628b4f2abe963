"""The result section: the table, charts of it, verdicts, and every figure behind it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from g2d_jax.records import Verdict
from g2d_jax.report import format as fmt
from g2d_jax.report import markup, summary
from g2d_jax.report.page import Part, Section
from g2d_jax.report.run import Run
from g2d_jax.report.scatter import Mark, Marks, accuracy_chart, scatter_chart


def results(run: Run) -> Section:
    """The result table, with charts and details, of the last evaluation; earlier ones fold."""
    chosen = [summary.selection_table(one) for one in run.manifests if one.get("kind") == "select"]
    earlier = [
        markup.details(f"Earlier evaluation: {stage.name}", markup.table(*summary.summary_table(stage.manifest, ())))
        for stage in run.evaluations[:-1]
    ]
    latest = [part for stage in run.evaluations[-1:] for part in _result(stage.manifest or {}, run)]
    return Section("results", "Result", [*latest, *chosen, *earlier])


def _result(manifest: Mapping[str, Any], run: Run) -> list[Part]:
    policies = summary.policies(manifest)
    intervals = [(summary.policy_name(p), fmt.number(p, "mean"), fmt.number(p, "sem_clustered")) for p in policies]
    return [
        summary.summary_table(manifest, run.manifests),
        summary.tasks_table(manifest),
        _verdicts(policies),
        markup.charts(accuracy_chart("Accuracy (pass@1), %", intervals), _pass_at(policies)),
        markup.details("Every comparison, and subsets", _result_details(manifest, policies)),
    ]


def _verdicts(policies: Sequence[Mapping[str, Any]]) -> summary.Text:
    """Title, columns and rows: the share of each policy's answers by verdict, of the verdicts that occur."""
    known = [verdict.value for verdict in Verdict]
    there = [name for name in known if any(fmt.number(policy, "verdicts", name) > 0 for policy in policies)]
    counts = [[fmt.number(policy, "verdicts", verdict) for verdict in there] for policy in policies]
    rows = [
        [summary.policy_name(policy), *(fmt.percent(count / max(np.nansum(row), 1)) for count in row)]
        for policy, row in zip(policies, counts, strict=True)
        if there
    ]
    return "Verdicts, % of the answers", ["policy", *(verdict.replace("_", " ") for verdict in there)], rows


def _pass_at(policies: Sequence[Mapping[str, Any]]) -> str:
    ks = sorted({int(k) for policy in policies for k in policy.get("pass_at", {})})
    if len(ks) < 2:
        return ""
    series = [
        Marks(summary.policy_name(p), [Mark(i, 100 * fmt.number(p, "pass_at", str(k))) for i, k in enumerate(ks)])
        for p in policies
    ]
    note = "Chance that one of k answers is right: the unbiased estimator."
    return scatter_chart("pass@k, %", series, x_title="k", names=[str(k) for k in ks], note=note)


def _result_details(manifest: Mapping[str, Any], policies: Sequence[Mapping[str, Any]]) -> str:
    pairs = [
        [f"{before} → {after}{how}", fmt.change(difference, error)]
        for how, kind in (("", ()), (", greedy", ("greedy",)))
        for (before, after), (difference, error) in summary.differences(manifest, *kind).items()
        if not math.isnan(difference)
    ]
    pairs = pairs if summary.has_accuracy(manifest) else []
    names = list(dict.fromkeys(name for p in policies for name in p.get("subsets", {})))
    subsets = [
        [
            name,
            fmt.count(_subset_problems(policies, name)),
            *(fmt.percent(fmt.number(p, "subsets", name, "mean")) for p in policies),
        ]
        for name in names
    ]
    tables = [
        ("Paired differences, points ± standard error clustered by problem", ["pair", "change"], pairs),
        ("Accuracy by subset, %", ["subset", "problems", *map(summary.policy_name, policies)], subsets),
    ]
    return "".join(markup.table(*one) for one in tables)


def _subset_problems(policies: Sequence[Mapping[str, Any]], name: str) -> float:
    return next((n for p in policies if (n := fmt.number(p, "subsets", name, "problems")) == n), math.nan)
