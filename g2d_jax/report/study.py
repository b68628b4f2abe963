"""The report of a study: NAME.html, NAME.md, NAME.csv."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from g2d_jax.report import figures
from g2d_jax.report import format as fmt
from g2d_jax.report import paired_differences as paired
from g2d_jax.report.figures import Chart, Point
from g2d_jax.report.format import UNKNOWN, Written
from g2d_jax.report.page import Code, Note, Part, Report, write
from g2d_jax.report.rows import (
    UNFINISHED,
    UNTESTED,
    Group,
    Row,
    Study,
    flat,
    mean_change,
    read_study,
)
from g2d_jax.report.runs import ONLINE
from g2d_jax.report.tables import COSTS, Table, cost_cells, table
from g2d_jax.report.verdict import command, study_sentence, study_verdict
from g2d_jax.runtime.storage import PathLike, fingerprint
from g2d_jax.runtime.terminal import counted
from g2d_jax.stage_result import TOKENS
from g2d_jax.study import frontier
from g2d_jax.study.pricing import Rates

FEWEST_SEEDS = 5
"""With fewer a study says that its intervals are wide, and what they rest on."""

FEW = 8
"""Rows that are shown first; of more the best of each arm."""

OUT_OF_RANGE = "out of range"

EVALUATED: Mapping[str, tuple[str, Written]] = {
    "K": ("K", fmt.value),
    "greedy": ("greedy %", fmt.percent),
    "entropy": ("entropy, nats", fmt.fixed(3)),
    "mean_length": ("length", fmt.fixed(1)),
    "truncated": ("truncated %", fmt.percent),
}
"""Measure in the evaluation of a policy -> head of its column, and its numbers as text."""

TAUGHT: Mapping[str, tuple[str, Written]] = {
    "rollouts/pass_rate": ("pass rate %", fmt.percent),
    "rollouts/frac_mixed": ("mixed %", fmt.percent),
    "rollouts/entropy": ("entropy", fmt.fixed(3)),
    "rollouts/distinct_answers": ("distinct", fmt.fixed(2)),
    "rollouts/mean_length": ("length", fmt.fixed(1)),
    "pairs": ("pairs", fmt.count),
    "pairs/prompts": ("their prompts", fmt.count),
    "pairs/pass_rate": ("their pass rate %", fmt.percent),
    "before/gap_mean": ("gap before, nats", fmt.fixed(2)),
    "after/gap_mean": ("gap after, nats", fmt.fixed(2)),
    "margins/accuracy": ("margins right %", fmt.percent),
}
"""Column of the frame -> head of its column here, and its numbers as text."""

TAUGHT_NOTE = (
    "Means over seeds; the CSV has more. Mixed: prompts with right and wrong completions, which can "
    "give pairs. Distinct: answers to a prompt. Gap: log-probability of the chosen completion less "
    "that of the rejected one, before and after offline training. Margins right: pairs whose gap "
    "training widened."
)

LOOK = (
    "Look for the leftmost point that is as high as GRPO at its best. Bars are 95 % intervals, "
    "numbers are K."
)


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

    show: is given the result table (title, columns, rows), such as to print it, say: what the study
    found. rates: those of a recipe on a machine, at which the study's tokens are priced too.
    Returns the paths of the first three in this order. The same directory gives the same bytes.
    Raises ValueError if it holds no study of that name or a file is damaged, OSError.
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
    """Put together all that a study shows."""
    groups = [*study.offline, *study.baselines]
    rows = flat(groups)
    others = [name for name in COSTS if name not in ("flops", "prefilled", "scored", "hours")]
    costs: list[Part | None] = [frontier_chart(groups, name, LOOK) for name in others]
    first = frontier_chart(groups, "flops", LOOK)
    if study.spectrum:
        costs.insert(0, first)
        first = accuracy_chart("Test accuracy, %", study.spectrum)
    stopped = flat(group for group in study.groups if group[0].stops)
    return Report(
        kind="study",
        name=study.name,
        eyebrow=eyebrow(study),
        verdict=study_sentence(study_verdict(study)),
        warnings=list(filter(None, [state(study)])),
        parts={
            "results": [first, first_table(rows if len(rows) <= FEW else best_of_arms(study))],
            "rows": [Note(caution(study)), results(study)],
            "frontier": [*costs, details(rows)],
            "priced": _elsewhere(study, study.rates) if study.rates is not None else [],
            "informativeness": [Note(TAUGHT_NOTE), taught(study)],
            "stopping": [stopping(stopped)],
            "points": [left_out("Points left out", "point", study.left_out)],
            "settings": _settings(study),
        },
        frame=lambda: study.frame,
    )


def left_out(title: str, what: str, reasons: Mapping[str, str]) -> Table:
    """List what has no row, and why. what: the head of its column."""
    return table(title, [{what: label, "why": why} for label, why in reasons.items()])


def accuracy_chart(title: str, rows: Sequence[Row]) -> Chart | None:
    """Draw every row's accuracy with its interval."""
    bars = [(row.name, *fmt.percents(row.accuracy)) for row in rows]
    return figures.intervals("accuracy", title, bars, note="Bars are 95 % intervals.")


def first_table(rows: Sequence[Row]) -> Table:
    """Show the rows that matter: what they reach, what their last training added, what they
    cost."""
    lines = []
    for row in rows:
        line = {"policy": row.name, "accuracy % [95 %]": fmt.interval(row.accuracy)}
        line["gain"] = fmt.interval(row.gain, "+", len(row.seeds))
        line["FLOPs"] = fmt.quantity(row.mean("flops"))
        lines.append(line)
    return table("Accuracy, and what it cost", lines)


def best_of_arms(study: Study) -> list[Row]:
    """Choose the best row of each arm on dev; without those where nothing can be chosen."""
    by_arm: dict[str, list[Row]] = {}
    for row in flat((*study.offline, *study.baselines)):
        by_arm.setdefault(row.arm, []).append(row)
    return list(filter(None, map(paired.chosen, by_arm.values())))


def eyebrow(study: Study) -> str:
    """Say how much there is, and until when it was measured."""
    ends = []
    for run in study.runs:
        ends += [result.started + result.cost.seconds for result in run.results.values()]
    seeds = counted(len({run.seed for run in study.runs}), "seed")
    size = f"{counted(len(study.runs), 'point')}, {seeds}"
    return " · ".join(filter(None, ["G2D study", size, fmt.until(ends)]))


def state(study: Study) -> str:
    """Say what is missing, and the command that runs it; "" if nothing is."""
    reasons = list(study.left_out.values())
    parts = []
    if unfinished := reasons.count(UNFINISHED):
        total = len(reasons) + len(study.runs)
        parts.append(
            f"{unfinished} of {total} points are not finished and left out (listed under Points)."
        )
        parts.append(f"To finish them: {command(study)}")
    if untested := reasons.count(UNTESTED):
        parts.append(f"{untested} points were not evaluated on the test split and are left out.")
    if len({frozenset(row.seeds) for row in study.rows}) > 1:
        parts.append("Rows have different seeds: their means are not yet comparable.")
    return " ".join(parts)


def caution(study: Study) -> str:
    """Explain how intervals are made, what those of few seeds rest on, and the columns."""
    counts = [len(row.seeds) for row in study.rows] or [0]
    over = "problems only: they do not include variation between training seeds"
    if max(counts) > 1:
        over = f"problems and seeds ({' to '.join(map(str, sorted({min(counts), max(counts)})))})"
    texts = [f"Intervals are 95 %, over {over}."]
    if 1 in counts and max(counts) > 1:
        texts.append("Those of one seed are over problems only.")
    if max(counts) > 1 and min(counts) < FEWEST_SEEDS:
        texts.append(f"With fewer than {FEWEST_SEEDS} seeds they are wide.")
    texts.append(
        "Gain: over the policy its last training started from. Differences are in points, paired "
        "by seed and problem. Costs leave out supervised fine-tuning, which is the same for all."
    )
    if study.spectrum:
        texts.append("s: updates between two synchronisations of the sampling policy; ∞ is never.")
    return " ".join(texts)


def details(rows: Sequence[Row]) -> Table:
    """Show how the policies of rows answer, and what making them cost.

    pass@k is of the k answers that all of them have.
    """
    k = min((correct.shape[1] for row in rows for correct in row.policies["correct"]), default=1)
    lines = []
    for row in rows:
        costs = {name: row.mean(name) for name in COSTS}
        lines.append(
            {
                "policy": row.name,
                f"pass@{k} %": fmt.percent(row.pass_at(k) if k > 1 else math.nan),
                **fmt.cells(EVALUATED, row.mean),
                **cost_cells(costs, ("generated", "trained", "flops", "seconds", "device_seconds")),
            }
        )
    return table("Their answers, and what they cost", lines)


def results(study: Study) -> Table:
    """Show every row of the study: offline training after K online steps first, then online
    training alone."""
    arms = study.spectrum
    start = study.start
    rows = [start] if start else []
    rows += flat(study.offline)
    rows += arms or flat(study.baselines)
    best = [paired.chosen(group) for group in study.offline if len(group) > 1]
    others = [paired.reference(study, row) for row in rows]
    names = {other.name for other in filter(None, others)}
    over = f"over {names.pop()}" if len(names) == 1 else "over"
    several = len({len(row.seeds) for row in rows}) > 1
    lines = []
    for row, other in zip(rows, others, strict=True):
        line = {
            "policy": f"{row.name}{' (best on dev)' * (row in best)}",
            "K": f"{row.mean('K'):g}",
            "s": UNKNOWN,
            "loss": UNKNOWN,
            "seeds": str(len(row.seeds)) if several else UNKNOWN,
            "dev %": fmt.percent(row.mean("dev")),
            "accuracy % [95 %]": fmt.interval(row.accuracy),
            "seed std": fmt.percent(frontier.seed_spread(row.accuracies)),
            "gain": fmt.interval(row.gain, "+", len(row.seeds)),
            over: UNKNOWN,
            "against GRPO at this budget": UNKNOWN,
            "FLOPs": fmt.quantity(row.mean("flops")),
        }
        if arms and row.first["kind"] == ONLINE:
            line["s"] = f"{row.first['s']:g}".replace("inf", "∞")
            line["s"] += ", ahead" * bool(row.first["ahead"] > 0)  # up to twice as old
            line["loss"] = row.first["loss"]
        if other is not None and other is not row:
            line[over] = fmt.interval(paired.difference(row, other), "+", len(row.seeds))
            line[over] += f", {other.name}" * (over == "over")
        if row.is_offline:
            line["against GRPO at this budget"] = _versus(study, row)
        lines.append(line)
    return table(f"Accuracy on {fmt.count(len(rows[0].ids) if rows else 0)} test problems", lines)


def _elsewhere(study: Study, rates: Rates) -> list[Part | None]:
    """Show what the study's tokens would take elsewhere: no forecast, since another model takes
    other steps."""
    scaled = f"all tokens times {rates.scale:.3g}" if rates.scale != 1 else "tokens as they are"
    absent = ", ".join(kind for kind in TOKENS if kind not in rates.seconds.get("", {}))
    note = (
        f"This study's own tokens ({scaled}) at the plan's rates for {rates.recipe} on "
        f"{rates.topology}: responses of {rates.response:,.0f} tokens, {rates.reached:.0%} of "
        "the stated rates, without verifiers, checkpoints and loading. It prices what was done "
        "here, and is no forecast of how many steps that model would need."
    )
    if absent:
        note += f" The recipe has no rate for tokens {absent}: they count as nothing."
    chart = frontier_chart([*study.offline, *study.baselines], "hours", LOOK)
    return [Note(note), priced(study, rates), chart]


def priced(study: Study, rates: Rates) -> Table:
    """Show every row of the study at the rates, offline training against each GRPO alone in equal
    time."""
    lines = []
    for row in flat((*study.offline, *study.baselines)):
        hours = row.mean("hours")
        line = {
            "policy": row.name,
            "accuracy % [95 %]": fmt.interval(row.accuracy),
            "time": fmt.duration(3600 * hours),
        }
        if rates.price is not None:
            line["price"] = f"{hours * rates.chips * rates.price:,.2f}"
        if row.is_offline:
            for other in study.baselines:
                line[f"against {other[0].group} in equal time"] = _against(row, other, "hours")
        lines.append(line)
    return table(f"This study's tokens as those of {rates.recipe} on {rates.topology}", lines)


def _versus(study: Study, row: Row) -> str:
    """Compare a row with the baseline `best_at` what it cost, named if there are several."""
    best = paired.best_at(study, row)
    if best is None:
        on_dev = [other for other in flat(study.baselines) if not math.isnan(other.mean("dev"))]
        return OUT_OF_RANGE if on_dev else UNKNOWN
    text = _against(row, best, "flops")
    named = len(study.baselines) > 1 and text not in (UNKNOWN, OUT_OF_RANGE)
    return text + f", {best[0].group}" * named


def _against(row: Row, baseline: Group, measure: str) -> str:
    """Format what a row has over a baseline that spent as much."""
    over = paired.over_baseline(row, baseline, measure)
    if paired.is_out_of_range(over):
        return OUT_OF_RANGE
    return fmt.interval(mean_change(over), "+", len(row.seeds))


def frontier_chart(groups: Sequence[Group], measure: str, note: str) -> Chart | None:
    """Draw accuracy against one cost; None where it is known of no point or zero for all.

    A line for each group, its points labelled with K; what an arm has at one K alone with the
    setting.
    """
    name, written = COSTS[measure]
    series: dict[str, list[Point]] = {}
    joined = set()
    for group in groups:
        line = group[0].group if len(group) > 1 else group[0].arm
        joined |= {line} if len(group) > 1 else set()
        for row in group:
            label = f"{row.mean('K'):g}"
            if len(group) == 1 and row.group != row.arm:
                label = row.group.removeprefix(f"{row.arm}, ")
            point = Point(row.mean(measure), *fmt.percents(row.accuracy), label)
            series.setdefault(line, []).append(point)
    if not any(row.mean(measure) > 0 for row in flat(groups)):
        return None
    return figures.points(
        measure,
        f"Accuracy, %, against {name}{' tokens' * (measure in TOKENS)}",
        series,
        x_title=name,
        y_title="accuracy, %",
        written=written,
        joined=joined,
        note=note,
    )


def taught(study: Study) -> Table:
    """Show what the rollouts behind every row that ends offline could teach."""
    lines = []
    for row in flat(study.offline):
        lines.append({"policy": row.name, **fmt.cells(TAUGHT, row.mean)})
    return table("Rollouts and pairs that offline training was given", lines)


def stopping(rows: Sequence[Row]) -> Table:
    """Show why each warm-up that may end by itself did, seed by seed."""
    lines = []
    for row in rows:
        for policy in row.policies.itertuples():
            line = {"policy": row.name, "seed": str(policy.seed), "K": f"{policy.K:g}"}
            lines.append({**line, "why (steps: the last of its steps)": policy.stop})
    return table("Where each warm-up ended", lines)


def _settings(study: Study) -> list[Part | None]:
    """Show the study's config, and the environments its stages were made in, but for the
    command."""
    distinct = {}
    for run in study.runs:
        for stage in run.folders:
            environment = {**run.environment_of(stage), "command": ""}
            distinct[fingerprint(environment)] = environment
    codes = [Code("Environment (environment.json)", distinct[key]) for key in sorted(distinct)]
    return [Code("Configuration of the study", study.config), *codes]
