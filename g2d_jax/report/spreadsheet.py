"""report.csv: every figure of a run as one tidy table, for spreadsheets, pandas and R."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from g2d_jax.report import format as fmt
from g2d_jax.report import summary
from g2d_jax.report.run import Run, Stage
from g2d_jax.tracking import clean

COLUMNS = ("stage", "policy", "measure", "value")

_NOT_FIGURES = {"done", "started", "inputs", "fingerprint", "kind", "name", "sampling", "policies", "paired"}
_FORMULA = "=+-@\uff1d\uff0b\uff0d\uff20"  # the last four: their full-width forms, which some spreadsheets take too

_SPELLED = ("NaN", "Infinity", "-Infinity")  # as storage writes them

Record = tuple[str, str, str, float]


def document(run: Run) -> str:
    """The file's text: columns stage, policy ("" for a stage's own figures), measure, value (a number, or NaN).

    measure is a path such as "tokens/generated", "pass_at/4", "informativeness/ece" or, of a policy compared with one
    before it, "paired/sft/difference". Units are those of the manifests: fractions, seconds, tokens, nats.
    """
    return sheet(COLUMNS, records(run))


def sheet(columns: Sequence[str], rows: Iterable[tuple[*tuple[str, ...], float]]) -> str:
    """Write rows of texts, which no spreadsheet takes for formulas, and of a number as CSV."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([*map(guarded, texts), written(float(value))] for *texts, value in rows)
    return buffer.getvalue()


def records(run: Run) -> Iterator[Record]:
    """All figures of the finished stages, in their order: cost and counts, then those of each policy."""
    for stage in run.stages:
        if stage.manifest is not None:
            yield from _records(stage, stage.manifest)


def _records(stage: Stage, manifest: Mapping[str, Any]) -> Iterator[Record]:
    for measure, value in leaves(manifest):
        yield stage.name, "", measure, value
    for measure, value in leaves(stage.informativeness()) if stage.kind == "collect" else ():
        yield stage.name, "", f"informativeness/{measure}", value
    if stage.kind != "evaluate":
        return
    for policy in summary.policies(manifest):
        for measure, value in leaves(policy):
            yield stage.name, str(policy["name"]), measure, value
    for pair in manifest.get("result", {}).get("paired", ()):
        measured = {"": pair} if "difference" in pair else {}
        measured |= {"greedy/": pair["greedy"]} if "greedy" in pair else {}
        measured |= {f"{task}/": found for task, found in pair.get("tasks", {}).items()}
        for prefix, found in measured.items():
            for measure in ("difference", "sem"):
                path = f"paired/{pair['before']}/{prefix}{measure}"
                yield stage.name, str(pair["after"]), path, fmt.number(found, measure)


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Numbers by path, those in "result" without that name in front."""
    for key, value in values.items():
        if key in _NOT_FIGURES:
            continue
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from leaves(value, "" if path == "result" else f"{path}/")
        elif value in _SPELLED or (isinstance(value, int | float) and not isinstance(value, bool)):
            yield path, float(value)


def guarded(text: str) -> str:
    """Text that no spreadsheet takes for a formula: on one line, an apostrophe before a leading = + - @."""
    line = clean(text, newlines=False)
    return f"'{line}" if line.lstrip().startswith(tuple(_FORMULA)) else line


def written(value: float) -> str:
    """A number that reads back as the same float."""
    if math.isnan(value):
        return "NaN"
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
