"""The report of a study: NAME.html, NAME.md, NAME.csv."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from g2d_jax.report import figures
from g2d_jax.report import format as fmt
from g2d_jax.report import paired_differences as paired
from g2d_jax.report.figures import Chart, Point
from g2d_jax.report.format import UNKNOWN, Written
from g2d_jax.report.page import Code, Note, Part, Report, write
from g2d_jax.report.rows import UNFINISHED, UNTESTED, Group, Row, Study, flat, read_study
from g2d_jax.report.tables import COSTS, Table, table
from g2d_jax.report.verdict import command, study_sentence, study_verdict
from g2d_jax.runtime.storage import PathLike, fingerprint
from g2d_jax.runtime.terminal import counted
from g2d_jax.session.stage_result import TOKENS
from g2d_jax.study import frontier
from g2d_jax.study.pricing import Rates

CAUTION = (
    "Intervals are 95 %, over problems and training seeds. With one seed they are over problems "
    "only; with fewer than 5 they are wide. Gain: over the policy before its last training. "
    "Differences are in points, paired by seed and problem. Costs exclude supervised fine-tuning, "
    "which is the same for all. s: updates between two synchronisations of the sampling policy; "
    "∞ is never."
)

FEW = 8
"""Most rows of the first table; beyond it, the best of each arm."""

Columns = Mapping[str, Callable[[Row], str]]
"""Head of a column -> the cell of a row."""

Numbers = Mapping[str, tuple[str, Written]]
"""Column of the frame -> head of its column here, and its format."""

ACCURACY = "accuracy % [95 %]"
SHORT: Columns = {
    ACCURACY: lambda row: fmt.interval(row.accuracy),
    "gain": lambda row: fmt.interval(row.gain, "+", len(row.seeds)),
    "FLOPs": lambda row: fmt.quantity(row.mean("flops")),
}
"""Columns of the first table: accuracy, gain of the last training, cost."""

SPENT = ("generated", "trained", "flops", "seconds")
DETAILS: Numbers = {
    "K": ("K", fmt.value),
    "greedy": ("greedy %", fmt.percent),
    "entropy": ("entropy, nats", fmt.fixed(3)),
    "mean_length": ("length", fmt.fixed(1)),
    "truncated": ("truncated %", fmt.percent),
    **{name: COSTS[name] for name in SPENT},
}

MEASURES = ("flops", "seconds")
"""Costs to draw accuracy against, a figure each."""

TAUGHT: Numbers = {
    "rollouts/pass_rate": ("pass rate %", fmt.percent),
    "rollouts/frac_mixed": ("mixed %", fmt.percent),
    "rollouts/entropy": ("entropy", fmt.fixed(3)),
    "rollouts/distinct_answers": ("distinct", fmt.fixed(2)),
    "pairs": ("pairs", fmt.count),
    "pairs/prompts": ("their prompts", fmt.count),
    "before/gap_mean": ("gap before, nats", fmt.fixed(2)),
    "after/gap_mean": ("gap after, nats", fmt.fixed(2)),
    "margins/accuracy": ("margins correct %", fmt.percent),
}

TAUGHT_NOTE = (
    "Means over seeds; the CSV has more. Mixed: prompts with correct and incorrect completions, "
    "which can form pairs. Distinct: answers to a prompt. Gap: log-probability of the chosen "
    "completion minus that of the rejected one, before and after offline training. Margins "
    "correct: pairs whose gap training widened."
)

LOOK = "Look for the leftmost point as high as the best GRPO. Bars are 95 % intervals."


def write_study(
    workdir: PathLike,
    name: str,
    *,
    show: Callable[..., None] | None = None,
    say: Callable[[str], None] | None = None,
    rates: Rates | None = None,
) -> list[str]:
    """Write NAME.html, NAME.md, NAME.csv and figures of a study into its directory; the study may
    be unfinished.

    show: receives the result table (title, columns, rows), say: the verdict, for example to print
    them. rates: of a recipe on a machine, to price the study's tokens too. Returns the paths of the
    first three in this order. The same directory produces the same bytes. Raises ValueError if it
    holds no study of that name or a file is damaged, OSError.
    """
    study = read_study(workdir, name, rates)
    if show is not None and study.rows:
        show(*results(study))
        if study.rates is not None:
            show(*priced(study, study.rates))
    page = report(study)
    if say is not None:
        say(page.verdict)
    return write(page, study.workdir, name)


def report(study: Study) -> Report:
    """Build the whole report of a study."""
    groups = [*study.offline, *study.baselines]
    rows = flat(groups)
    charts = [frontier_chart(groups, measure) for measure in MEASURES]
    seeds = len({run.seed for run in study.runs})
    return Report(
        kind="study",
        name=study.name,
        eyebrow=f"G2D study · {counted(len(study.runs), 'point')}, {counted(seeds, 'seed')}",
        verdict=study_sentence(study_verdict(study)),
        warnings=list(filter(None, [state(study)])),
        parts={
            "results": [charts[0], first(rows)],
            "rows": [Note(CAUTION), results(study)],
            "frontier": [*charts[1:], details(rows)],
            "priced": _elsewhere(study, study.rates) if study.rates is not None else [],
            "informativeness": [Note(TAUGHT_NOTE), taught(study)],
            "points": [left_out(study)],
            "settings": _settings(study),
        },
        frame=lambda: study.frame,
    )


def of_rows(
    title: str, rows: Iterable[Row], columns: Columns, numbers: Numbers | None = None
) -> Table:
    """Build a table with a line for each row, from cells and means over seeds."""
    lines = []
    for row in rows:
        cells = {head: cell(row) for head, cell in columns.items()}
        lines.append({"policy": row.name, **cells, **fmt.cells(numbers or {}, row.mean)})
    return table(title, lines)


def left_out(study: Study) -> Table:
    """List the points that have no row, and why."""
    lines = [{"point": label, "why": why} for label, why in study.left_out.items()]
    return table("Points left out", lines)


def first(rows: Sequence[Row]) -> Table:
    """Show the first table: all rows up to `FEW`, otherwise the best of each arm on dev, or on test
    if dev cannot choose."""
    title = "Accuracy and cost"
    if len(rows) <= FEW:
        return of_rows(title, rows, SHORT)
    by_arm: dict[str, list[Row]] = {}
    for row in rows:
        by_arm.setdefault(row.arm, []).append(row)
    best = list(filter(None, map(paired.chosen, by_arm.values())))
    title += ": the best of each arm"
    if not best:
        best = [max(own, key=lambda row: row.accuracy.mean) for own in by_arm.values()]
        title += " on test, since dev chose none; this is optimistic"
    return of_rows(title, best, SHORT)


def state(study: Study) -> str:
    """Describe the missing points, and the command that runs them; "" if there are none."""
    missing = Counter(study.left_out.values())
    parts = []
    if unfinished := missing[UNFINISHED]:
        parts.append(
            f"Not finished and left out (listed under Points): {unfinished} of "
            f"{counted(len(study.runs), 'point')}."
        )
    if untested := missing[UNTESTED]:
        parts.append(f"Not evaluated on test and left out: {counted(untested, 'point')}.")
    if len({frozenset(row.seeds) for row in study.rows}) > 1:
        parts.append("Rows have different seeds: their means are not yet comparable.")
    if unfinished:  # last and on its own, for copying
        parts.append(f"To finish: {command(study)}")
    return " ".join(parts)


def details(rows: Sequence[Row]) -> Table:
    """Show how the policies of rows answer, and their cost.

    pass@k is for the k answers that all of them have.
    """
    k = int(min((row.policies["samples"].min() for row in rows), default=1))
    passed: Columns = {f"pass@{k} %": lambda row: fmt.percent(row.pass_at(k))}
    return of_rows("Answers and cost", rows, passed if k > 1 else {}, DETAILS)


def results(study: Study) -> Table:
    """Show every row of the study: offline training after K online steps first, then online
    training alone."""
    start, arms, other = study.start, study.spectrum, paired.reference(study)
    rows = [*filter(None, [start]), *flat(study.offline), *(arms or flat(study.baselines))]
    best = [paired.chosen(group) for group in study.offline if len(group) > 1]

    def refreshed(row: Row) -> str:
        ahead = ", ahead" * bool(row.first["ahead"] > 0)  # up to twice as old
        return fmt.value(row.first["s"]).replace("inf", "∞") + ahead if arms else UNKNOWN

    def over(row: Row) -> str:
        apart = paired.difference(row, other) if other and row is not other else None
        return fmt.interval(apart, "+", len(row.seeds))

    columns: Columns = {
        "policy": lambda row: row.name + " (best on dev)" * (row in best),
        "s": refreshed,
        "dev %": lambda row: fmt.percent(row.mean("dev")),
        ACCURACY: SHORT[ACCURACY],
        "seed std": lambda row: fmt.percent(frontier.seed_spread(row.accuracies)),
        "gain": SHORT["gain"],
        f"over {other.name if other else ''}": over,
        "against GRPO at this budget": partial(_versus, study),
        "FLOPs": SHORT["FLOPs"],
    }
    count = fmt.count(len(rows[0].ids) if rows else 0)
    return of_rows(f"Accuracy on {count} test problems", rows, columns)


def _versus(study: Study, row: Row) -> str:
    """Compare a row with `best_at` its cost, named if there are several baselines."""
    if not row.is_offline:
        return UNKNOWN
    best = paired.best_at(study, row)
    if best is None:
        return OUT_OF_RANGE if paired.comparable(flat(study.baselines)) else UNKNOWN
    text = _against(best, "flops", row)
    return text + f", {best[0].group}" * (len(study.baselines) > 1 and "[" in text)


OUT_OF_RANGE = "GRPO was not run that far"


def _against(baseline: Group, measure: str, row: Row) -> str:
    """Format a row's difference from a baseline of equal cost."""
    if not row.is_offline:
        return UNKNOWN
    over = paired.over_baseline(row, baseline, measure)
    return OUT_OF_RANGE if over is paired.OUT_OF_RANGE else fmt.interval(over, "+", len(row.seeds))


def _elsewhere(study: Study, rates: Rates) -> list[Part | None]:
    """Show the time of the study's tokens on another machine. It is no forecast, since another
    model needs another number of steps."""
    scaled = f"all tokens times {rates.scale:.3g}" if rates.scale != 1 else "tokens unscaled"
    absent = ", ".join(kind for kind in TOKENS if kind not in rates.seconds.get("", {}))
    note = (
        f"This study's own tokens ({scaled}) at the plan's rates for {rates.recipe} on "
        f"{rates.topology}: responses of {rates.response:,.0f} tokens, "
        "without verifiers, checkpoints and loading. It prices this study's "
        "tokens, and does not forecast how many steps that model would need."
    )
    if absent:
        note += f" The recipe has no rate for tokens {absent}: they count as 0."
    chart = frontier_chart([*study.offline, *study.baselines], "hours")
    return [Note(note), priced(study, rates), chart]


def priced(study: Study, rates: Rates) -> Table:
    """Show every row of the study at the rates, offline training against each GRPO alone in equal
    time."""
    an_hour = rates.chips * (rates.price or 0)
    columns: dict[str, Callable[[Row], str]] = {
        ACCURACY: SHORT[ACCURACY],
        "time": lambda row: fmt.duration(3600 * row.mean("hours")),
        "price": lambda row: f"{row.mean('hours') * an_hour:,.2f}" if an_hour else UNKNOWN,
    }
    for other in study.baselines:
        columns[f"against {other[0].group} in equal time"] = partial(_against, other, "hours")
    title = f"This study's tokens as those of {rates.recipe} on {rates.topology}"
    return of_rows(title, flat((*study.offline, *study.baselines)), columns)


def frontier_chart(
    groups: Sequence[Group], measure: str, note: str = LOOK, *, has_labels: bool = True
) -> Chart | None:
    """Draw accuracy against one cost; None if the cost is unknown for all points or always zero.

    A line for each group. Points are labelled with K, or with the setting if an arm has only one K.
    """
    name, written = COSTS[measure]
    series: dict[str, list[Point]] = {}
    joined = set()
    for group in groups:
        arm, line = group[0].arm, group[0].group
        setting = line.removeprefix(arm).lstrip(", ")
        if len(group) > 1:
            joined.add(line)
        else:
            line = arm
        for row in group:
            label = setting
            if len(group) > 1:
                label = f"{row.mean('K'):g}"
            point = Point(row.mean(measure), *fmt.percents(row.accuracy), label * has_labels)
            series.setdefault(line, []).append(point)
    if not any(row.mean(measure) > 0 for row in flat(groups)):
        return None
    return figures.points(
        measure,
        f"Accuracy, %, against {name}{' tokens' * (measure in TOKENS)}",
        series,
        x_title=name,
        written=written,
        joined=joined,
        note=note + " Numbers are K." * (has_labels and bool(joined)),
    )


def taught(study: Study) -> Table:
    """Show the informativeness of the rollouts of every row that ends offline."""
    title = "Rollouts and pairs of offline training"
    return of_rows(title, flat(study.offline), {}, TAUGHT)


def _settings(study: Study) -> list[Part | None]:
    """Show the study's config, and the environments of its stages, without the command."""
    distinct = {}
    for run in study.runs:
        for stage in run.folders:
            environment = {**run.environment_of(stage), "command": ""}
            distinct[fingerprint(environment)] = environment
    codes = [Code("Environment (environment.json)", distinct[key]) for key in sorted(distinct)]
    return [Code("Configuration of the study", study.config), *codes]
