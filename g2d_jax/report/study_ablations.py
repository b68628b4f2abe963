"""Arms of a study whose points differ in something else than K: a figure and a table for each, at each K."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from g2d_jax.report import format as fmt
from g2d_jax.report.page import Note, Section
from g2d_jax.report.study import Row, Study, described
from g2d_jax.report.study_cause import mean
from g2d_jax.report.study_compare import difference
from g2d_jax.report.study_tables import accuracy_of, caution, pairs_of, points_interval, steps_of
from g2d_jax.report.table import Text, known

MEASURES = ("mixed %", "pass rate %", "entropy", "gap before, nats", "implicit margin")
"""Of study_cause.MEASURES, those beside the accuracies."""


class Setting(NamedTuple):
    """One setting of an arm. values: what tells it from the others, field -> text."""

    values: Mapping[str, str]
    row: Row

    @property
    def words(self) -> str:
        """For readers: "select random"."""
        return described(self.values)


def section(study: Study) -> Section:
    """A table for each arm."""
    found = [table(name, settings) for name, settings in arms(study)]
    note = f"{caution(study)}. Entropy is of the distribution drawn from: between temperatures it does not compare."
    return Section("settings-compared", "Settings compared", [Note(note), *found] if found else [])


def arms(study: Study) -> Iterator[tuple[str, list[Setting]]]:
    """Each arm with several settings that end offline, once for each K that at least two of them have."""
    for arm in dict.fromkeys(group.arm for group in study.offline):
        groups = [group for group in study.offline if group.arm == arm]
        told = [field for field in groups[0].values if len({one.values.get(field) for one in groups}) > 1]
        for steps in dict.fromkeys(row.steps for group in groups for row in group.rows):
            settings = [
                Setting({field: group.values.get(field, "") for field in told}, row)
                for group in groups
                for row in group.rows
                if row.steps == steps
            ]
            if len(settings) > 1:
                yield arm if steps is None else f"{arm}, K = {steps}", settings


def table(name: str, settings: Sequence[Setting]) -> Text:
    """Title, columns and rows: accuracy, paired difference to the first setting, pairs and what they could teach."""
    first, base = settings[0].words, settings[0].row
    lines = [
        {
            **{"setting": setting.words, "K": steps_of(row), **accuracy_of(row)},
            f"over {first}": "reference" if row is base else points_interval(difference(row, base)),
            "pairs": pairs_of(row),
            **{measure: mean(row, measure) for measure in (*MEASURES, "length")},
            **{"offline gain": points_interval(row.offline_gain), "FLOPs": fmt.quantity(row.cost("flops"))},
        }
        for setting in settings
        for row in (setting.row,)
    ]
    return known(f"{name}: differences in points on test, paired by seed and problem", lines)
