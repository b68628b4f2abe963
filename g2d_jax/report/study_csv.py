"""NAME.csv of a study: every figure as one tidy table, for spreadsheets, pandas and R."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from g2d_jax.frontier import Interval
from g2d_jax.report.spreadsheet import leaves, sheet
from g2d_jax.report.study import Group, Row, Study
from g2d_jax.report.study_compare import advantage, best_at
from g2d_jax.report.study_entry import Entry, mean_of
from g2d_jax.report.study_spectrum import gain, generation

COLUMNS = ("arm", "values", "seed", "K", "split", "measure", "value")
ALL = "all"  # in the column seed: a figure of all seeds together

Record = tuple[str, str, str, str, str, str, float]


def document(study: Study) -> str:
    """The file's text: columns `COLUMNS`; value is a number, or NaN. Units are those of the manifests.

    measure is a path such as "accuracy", "cost/flops", "collect/informativeness/ece", "offline/margins/margin_mean",
    and, of all seeds together, "accuracy/low" or "advantage/BASELINE/flops/mean"; BASELINE is "best on dev" for the one
    that is best there at these FLOPs, and "gain/mean" what the last stage added. split is "" where none applies.
    """
    return sheet(COLUMNS, records(study))


def records(study: Study) -> Iterator[Record]:
    """All figures, group by group and K by K: those of each seed, then those of all together."""
    for group in (*study.groups, *study.warmups):
        values = _varied(group)
        for row in group.rows:
            for entry in row.entries:
                for split, measure, value in _of_entry(entry):
                    yield group.arm, values, str(entry.seed), str(entry.reached), split, measure, value
            for split, measure, value in _of_row(study, group, row):
                yield group.arm, values, ALL, f"{row.reached:g}", split, measure, value


def _of_entry(entry: Entry) -> Iterator[tuple[str, str, float]]:
    for split in ("dev", "test"):
        answers = entry.answers(split)
        if answers is not None:
            yield split, "accuracy", mean_of(answers.values)
        for measure, value in leaves(entry.result(split)):
            yield split, measure, value
    yield "test", "offline_gain", mean_of(entry.offline_gain)
    for measure, value in entry.costs.items():
        yield "", f"cost/{measure}", value
    yield from _of_stage("collect", entry.pairs_from)
    yield from _of_stage("offline" if entry.parent else "online", entry.trained)
    for measure, value in leaves(generation(entry)):
        yield "", f"online/generation/{measure}", value


def _of_stage(name: str, manifest: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    for part in ("counts", "result"):
        for measure, value in leaves(manifest.get(part, {})):
            yield "", f"{name}/{measure}", value


def _of_row(study: Study, group: Group, row: Row) -> Iterator[tuple[str, str, float]]:
    yield "dev", "accuracy/mean", row.dev
    intervals = {"accuracy": row.accuracy, "offline_gain": row.offline_gain, "gain": gain(row)}
    for baseline in study.baselines if not group.is_baseline else ():
        intervals[f"advantage/{baseline.name}/flops"] = advantage(group, row, baseline, "flops").difference
    if not group.is_baseline and (best := best_at(study, row, "flops")) is not None:
        intervals["advantage/best on dev/flops"] = advantage(group, row, best, "flops").difference
    for name, found in intervals.items():
        for measure, value in _interval(name, found):
            yield "test", measure, value
    for measure in row.entries[0].costs:
        yield "", f"cost/{measure}", row.cost(measure)


def _varied(group: Group) -> str:
    return ";".join(f"{field}={text}" for field, text in group.values.items())


def _interval(name: str, found: Interval | None) -> Iterator[tuple[str, float]]:
    for part in ("mean", "low", "high", "seeds") if found is not None else ():
        yield f"{name}/{part}", float(getattr(found, part))
