"""Accuracy against what it cost, by every measure, and the points that no other beats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from g2d_jax import frontier
from g2d_jax.report import format as fmt
from g2d_jax.report import markup
from g2d_jax.report.page import Part, Section
from g2d_jax.report.scatter import Mark, Marks, scatter_chart
from g2d_jax.report.study import Group, Row, Study
from g2d_jax.report.study_tables import baselines, percent_interval, steps_of
from g2d_jax.report.table import Text

Written = Callable[[float], str]

MEASURES: dict[str, tuple[str, Written]] = {
    "flops": ("FLOPs", fmt.quantity),
    "generated": ("generated tokens", fmt.quantity),
    "tokens": ("tokens of all kinds", fmt.quantity),
    "trained": ("trained tokens", fmt.quantity),
    "device_seconds": ("device time", fmt.duration),
    "verifier_cpu_seconds": ("verifier CPU time", lambda seconds: f"{fmt.value(seconds)} s"),
    "price": ("price", fmt.value),
}
"""Cost -> its name and its numbers as text, in the order of the charts."""


def section(study: Study) -> Section:
    """A chart for each measure, points that no other beats, and online training alone."""
    figures = [chart(study, measure) for measure in MEASURES]
    note = (
        "Means over seeds, bars are 95 % intervals over problems and seeds, numbers at the points are K. What was "
        "spent on supervised fine-tuning, the same for all, is left out."
    )
    parts: list[Part] = [markup.paragraph(note, "hint"), markup.charts(*figures)] if any(figures) else []
    return Section("frontier", "Accuracy against compute", [*parts, pareto(study), baselines(study)])


def chart(study: Study, measure: str) -> str:
    """Accuracy on test against one cost, "" where it is known of no point or zero for all."""
    name, written = MEASURES[measure]
    spent = [row.cost(measure) for group in study.groups for row in group.rows]
    if not any(value > 0 for value in spent):
        return ""
    series = [
        Marks(name, [_mark(row, measure, label) for label, row in points], joined)
        for name, points, joined in lines(study)
    ]
    return scatter_chart(
        f"Test accuracy, %, against {name}", series, x_title=name, root=True, zero=False, written=written
    )


def lines(study: Study) -> Iterator[tuple[str, list[tuple[str, Row]], bool]]:
    """What the charts draw: name, labelled points, whether a line joins them.

    A line for each group, labelled with K; the settings of an arm at one K are marks of one colour, named by setting.
    """
    settings = {group.name for group in ordered(study) if group.values and len(group.rows) == 1}
    for arm in dict.fromkeys(group.arm for group in ordered(study)):
        groups = [group for group in ordered(study) if group.arm == arm]
        for group in (group for group in groups if group.name not in settings):
            yield group.name, [(f"{row.reached:.0f}", row) for row in group.rows], True
        single = [(", ".join(one.values.values()), one.rows[0]) for one in groups if one.name in settings]
        if single:
            yield arm, single, False


def ordered(study: Study) -> list[Group]:
    """Groups that end offline first: their labels come first too."""
    return [*study.offline, *study.baselines]


def _mark(row: Row, measure: str, label: str) -> Mark:
    found = row.accuracy
    return Mark(row.cost(measure), 100 * found.mean, 100 * found.low, 100 * found.high, label)


def pareto(study: Study) -> Text:
    """Title, columns and rows: the points that no other beats, with what each spent of the measures it is best in."""
    rows = _distinct([(group, row) for group in ordered(study) for row in group.rows])
    means = [row.accuracy.mean for _, row in rows]
    columns: dict[str, list[str]] = {}
    for measure in ("flops", "generated", "device_seconds", "price"):
        name, written = MEASURES[measure]
        costs = [row.cost(measure) for _, row in rows]
        best = frontier.pareto(costs, means)
        if best:
            columns[name] = [written(cost) if k in best else fmt.UNKNOWN for k, cost in enumerate(costs)]
    lines = []
    for k in sorted(range(len(rows)), key=lambda k: means[k]):
        group, row = rows[k]
        spent = [cells[k] for cells in columns.values()]
        if set(spent) != {fmt.UNKNOWN}:
            lines.append([group.name, steps_of(row), percent_interval(row.accuracy), *spent])
    title = "Points than which none is as good on test and as cheap (means over seeds), with what they spent"
    return title, ["group", "K", "test % [95 %]", *columns], lines


def _distinct(rows: Sequence[tuple[Group, Row]]) -> list[tuple[Group, Row]]:
    """Without rows that are the same policies as one before: all baselines begin at the same one."""
    kept = {(row.cost("flops"), row.accuracies.tobytes()): (group, row) for group, row in reversed(rows)}
    return list(reversed(kept.values()))
