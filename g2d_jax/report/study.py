"""The report of a study: NAME.html, NAME.md, NAME.csv."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter

import numpy as np
import pandas as pd

from g2d_jax.report import figures
from g2d_jax.report import format as fmt
from g2d_jax.report import paired_differences as paired
from g2d_jax.report.figures import Chart, Point
from g2d_jax.report.format import UNKNOWN, Written
from g2d_jax.report.frame import frame_of, runs_of
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
    start_of,
)
from g2d_jax.report.runs import COLLECT, ONLINE
from g2d_jax.report.tables import COSTS, MEASURES, Table, cost_cells, table
from g2d_jax.report.verdict import command, flops, study_sentence, study_verdict
from g2d_jax.runtime.storage import PathLike, fingerprint
from g2d_jax.runtime.terminal import counted
from g2d_jax.stage_result import TOKENS, Stop
from g2d_jax.study import frontier
from g2d_jax.study.pricing import Rates

FEWEST_SEEDS = 5
"""With fewer a study says that its intervals are wide, and what they rest on."""
ONE_SEED = "Intervals are 95 %, over problems only: another seed is not in them."
OUT_OF_RANGE = "out of range"
FRONTIERS = (
    "flops",
    "generated",
    "tokens",
    "trained",
    "device_seconds",
    "verifier_cpu_seconds",
)
"""Costs that accuracy is drawn against, a figure each."""

EVALUATED: Mapping[str, tuple[str, Written]] = {
    "greedy": ("greedy %", fmt.percent),
    "entropy": ("entropy, nats", fmt.fixed(3)),
    "mean_length": ("length", fmt.fixed(1)),
    "truncated": ("truncated %", fmt.percent),
}
"""Measure in the evaluation of a policy -> head of its column, and its numbers as text."""

OF_ROLLOUTS = (COLLECT, "informativeness")
OF_PAIRS = (COLLECT, "pairs")
TAUGHT: Mapping[tuple[str, ...], tuple[str, Written]] = {
    **{(*OF_ROLLOUTS, name): column for name, column in MEASURES.items()},
    ("offline", "before", "gap_mean"): ("gap before, nats", fmt.fixed(2)),
    ("offline", "after", "gap_mean"): ("gap after, nats", fmt.fixed(2)),
    ("offline", "before", "frac_ranked"): ("ranked before %", fmt.percent),
    ("offline", "margins", "margin_mean"): ("implicit margin", fmt.fixed(2)),
    ("offline", "margins", "accuracy"): ("margins right %", fmt.percent),
    (COLLECT, "counts", "pairs"): ("pairs", fmt.count),
    (*OF_PAIRS, "prompts"): ("their prompts", fmt.count),
    **{
        (*OF_PAIRS, name): (f"their {MEASURES[name][0]}", MEASURES[name][1])
        for name in ("pass_rate", "reward_variance", "entropy", "distinct_answers")
    },
}
"""Where a stage's record has a measure, see `Policy.measure` -> head of its column, and its numbers as text."""

TAUGHT_NOTE = (
    "Of the rollouts that pairs were chosen from; means over seeds. What is theirs is "
    "of the chosen pairs' prompts, each pair counting as its prompt. Gaps before and after are of "
    "the pairs' chosen and rejected completions, before and after offline training; the implicit "
    "margin is beta times what training moved of it. Between temperatures entropy does not compare."
)

STOP_NOTE = "Why: at a budget, or at the last of its steps."


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
    found. rates: those of a
    recipe on a machine, at which the study's tokens are priced too. Returns the paths of the first
    three in this order. The same directory gives the same bytes. Raises ValueError if it holds no
    study of that name or a file is damaged, OSError.
    """
    study = read_study(workdir, name, rates)
    if show is not None and study.policies:
        show(*results(study))
        if study.rates is not None:
            show(*priced(study, study.rates))
    page = report(study)
    if say is not None:
        say(page.verdict)
    return write(page, study.workdir, name)


def report(study: Study) -> Report:
    """Put together all that a study shows."""
    accuracies = accuracy_chart("Test accuracy, % (bars: 95 %)", study.spectrum)
    first, *others = FRONTIERS
    more: list[Part | None] = [_frontier(study, measure) for measure in others]
    best = best_of_arms(study)
    every = results(study)
    shown: list[Part | None] = [_frontier(study, first), accuracies, best or every]
    return Report(
        kind="study",
        name=study.name,
        eyebrow=eyebrow(study),
        verdict=study_sentence(study_verdict(study)),
        warnings=list(filter(None, [state(study)])),
        parts={
            "results": [*shown, Note(caution(study))],
            "rows": [every] if best else [],
            "frontier": [*more, details(study)],
            "priced": _elsewhere(study, study.rates) if study.rates is not None else [],
            "informativeness": [Note(TAUGHT_NOTE), taught(study)],
            "stopping": [Note(STOP_NOTE), stopping(study)],
            "points": [left_out("Points left out", "point", study.left_out)],
            "settings": _settings(study),
        },
        frame=lambda: _own_rows(study),
    )


def left_out(title: str, what: str, reasons: Mapping[str, str]) -> Table:
    """List what has no row, and why. what: the head of its column."""
    return table(title, [{what: label, "why": why} for label, why in reasons.items()])


def accuracy_chart(title: str, rows: Sequence[Row]) -> Chart | None:
    """Draw every row's accuracy with its interval."""
    bars = [(row.name, *fmt.percents(row.accuracy)) for row in rows]
    return figures.intervals("accuracy", title, bars)


def eyebrow(study: Study) -> str:
    """Say how much there is, and until when it was measured."""
    ends = []
    for policy in study.policies:
        for result in policy.run.results.values():
            ends.append(result.started + result.cost.seconds)
    measured = fmt.until(ends)
    seeds = {policy.run.seed for policy in study.policies}
    size = f"{counted(len(study.policies), 'point')}, {counted(len(seeds), 'seed')}"
    return " · ".join(filter(None, ["G2D study", size, measured]))


def state(study: Study) -> str:
    """Say what is missing, and the command that runs it; "" if nothing is."""
    reasons = list(study.left_out.values())
    parts = []
    if unfinished := reasons.count(UNFINISHED):
        total = len(reasons) + len(study.policies)
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
    counts = {len(row.seeds) for row in study.rows} or {0}
    texts = [
        *_of_intervals(min(counts), max(counts)),
        "Gain: over the policy its last training started from; differences are in points on "
        "test, paired by seed and "
        "problem. Costs leave out supervised fine-tuning, which is the same for all.",
    ]
    if study.spectrum:
        texts.append(
            "s: updates between two synchronisations of the sampling policy with the trained one; "
            "1 is online, ∞ (never) is offline."
        )
    swept = paired.swept_rows(study)
    if swept and any(group[0].stops for group in study.groups):
        median = float(np.median([row.costs["flops"] for row in swept]))
        spent = sum(row.costs["flops"] * len(row.seeds) for row in swept)
        texts.append(
            f"The swept K spent {flops(median)} in the median, {flops(spent)} in all (each seed's "
            "shared steps counted once for every K)."
        )
    return " ".join(texts)


def _of_intervals(fewest: int, most: int) -> list[str]:
    """Say how the intervals of rows with so many seeds are made, and what those of few seeds rest
    on."""
    if most <= 1:
        return [ONE_SEED]
    many = f"{fewest} to {most}" if fewest < most else f"{most}"
    texts = [
        (
            f"Intervals are 95 %, over problems and {many} seeds: Student's t times the error "
            "between each of them."
        )
    ]
    if fewest == 1:
        texts.append("Those of one seed are over problems only: another seed is not in them.")
    if fewest < FEWEST_SEEDS:
        texts.append(
            f"With fewer than {FEWEST_SEEDS} seeds intervals are wide, and rest on accuracies of "
            "seeds being roughly "
            "normal, which so few cannot show: no difference of theirs is called significant here."
        )
    return texts


def row_cells(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Format each row's name, how it answers, and what it cost, as all reports of several policies
    have it.

    pass@k is of the k answers that all of them have.
    """
    answered = itertools.chain.from_iterable(row.correct for row in rows)
    k = min((correct.shape[1] for correct in answered), default=1)
    measures = ("generated", "trained", "flops", "seconds", "device_seconds")
    cells = []
    for row in rows:
        passed = row.pass_at(k) if k > 1 else math.nan
        read = partial(row.evaluated, row.split)
        evaluated = fmt.cells({attrgetter(name): form for name, form in EVALUATED.items()}, read)
        costs = cost_cells(row.costs, measures)
        reached = {"policy": row.name, f"pass@{k} %": fmt.percent(passed)}
        cells.append({**reached, **evaluated, **costs})
    return cells


def results(study: Study) -> Table:
    """Show every row of the study: offline training after K online steps first, then online
    training alone."""
    arms = study.spectrum
    start = start_of(arms)
    rows = [start] if start else []
    rows += flat(study.offline)
    rows += arms or flat(study.baselines)
    best = [paired.chosen(group) for group in study.swept]
    others = list(map(partial(paired.reference, study), rows))
    names = {other.name for other in filter(None, others)}
    over = f"over {names.pop()}" if len(names) == 1 else "over"
    several = len({len(row.seeds) for row in rows}) > 1
    lines = []
    for row, other in zip(rows, others, strict=True):
        line = {
            "policy": f"{row.name}{' (best on dev)' * (row in best)}",
            "K": f"{row.steps:g}",
            "s": UNKNOWN,
            "loss": UNKNOWN,
            "seeds": str(len(row.seeds)) if several else UNKNOWN,
            "dev %": fmt.percent(row.dev),
            "accuracy % [95 %]": fmt.interval(row.accuracy),
            "seed std": fmt.percent(frontier.seed_spread(row.accuracies)),
            "gain": fmt.interval(row.gain, "+", len(row.seeds)),
            over: UNKNOWN,
            "against GRPO at this budget": UNKNOWN,
            "FLOPs": fmt.quantity(row.costs["flops"]),
        }
        if arms and row.first.kind == ONLINE:
            line["s"] = str(row.first.sync_every or "∞")
            if row.first.result and row.first.result.generation.get("ahead"):
                line["s"] += ", ahead"  # up to twice as old
            line["loss"] = row.first.loss
        if other is not None and other is not row:
            apart = paired.difference(row, other)
            line[over] = fmt.interval(apart, "+", len(row.seeds))
            line[over] += f", {other.name}" * (over == "over")
        if row.is_offline:
            line["against GRPO at this budget"] = _versus(study, row)
        lines.append(line)
    return table(f"Accuracy on {fmt.count(len(rows[0].ids) if rows else 0)} test problems", lines)


def best_of_arms(study: Study) -> Table:
    """Show of each arm the row that dev chose; no rows where an arm has none, or one only."""
    by_arm: dict[str, list[Row]] = {}
    for group in (*study.offline, *study.baselines):
        by_arm.setdefault(group[0].arm, []).extend(group)
    rows = []
    for candidates in by_arm.values():
        row = paired.chosen(candidates)
        if row is not None and len(candidates) > 1:
            rows.append(row)
    lines = []
    for row in rows:
        line = {
            "policy": row.name,
            "accuracy % [95 %]": fmt.interval(row.accuracy),
            "gain": fmt.interval(row.gain, "+", len(row.seeds)),
        }
        if row.is_offline:
            line["against GRPO at this budget"] = _versus(study, row)
        line["FLOPs"] = fmt.quantity(row.costs["flops"])
        lines.append(line)
    return table("The best of each arm, chosen on dev", lines)


def details(study: Study) -> Table:
    """Show how the policies of every row answer, and what else making them cost."""
    rows = flat((*study.groups, *study.warmups))
    return table("Their answers, and what they cost", row_cells(rows))


def _elsewhere(study: Study, rates: Rates) -> list[Part | None]:
    """Show what the study's tokens would take elsewhere: no forecast, since another model takes
    other steps."""
    scaled = f"all tokens times {rates.scale:.3g}" if rates.scale != 1 else "tokens as they are"
    absent = ", ".join(kind for kind in TOKENS if kind not in rates.seconds.get("", {}))
    note = (
        f"This study's own tokens ({scaled}) at the plan's rates for {rates.recipe} on "
        f"{rates.topology}: responses of {rates.response:,.0f} tokens, {rates.reached:.0%} of "
        "the stated rates, without verifiers, checkpoints and loading. A token has the rate of "
        "the recipe's stages of the kind that it was spent in, at their batches, or their mean "
        "over all stages where it has none. It prices what was done here, and is no forecast of "
        "how many steps that model would need."
    )
    if absent:
        note += f" The recipe has no rate for tokens {absent}: they count as nothing."
    return [Note(note), priced(study, rates), _frontier(study, "hours")]


def priced(study: Study, rates: Rates) -> Table:
    """Show every row of the study at the rates, offline training against each GRPO alone in equal
    time."""
    lines = []
    for row in flat((*study.offline, *study.baselines)):
        hours = row.costs["hours"]
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
        on_dev = [other for other in flat(study.baselines) if not math.isnan(other.dev)]
        return OUT_OF_RANGE if on_dev else UNKNOWN
    text = _against(row, best, "flops")
    named = len(study.baselines) > 1 and text not in (UNKNOWN, OUT_OF_RANGE)
    return text + f", {best[0].setting or best[0].group}" * named


def _against(row: Row, baseline: Group, measure: str) -> str:
    """Format what a row has over a baseline that spent as much."""
    over = paired.over_baseline(row, baseline, measure)
    if paired.is_out_of_range(over):
        return OUT_OF_RANGE
    return fmt.interval(mean_change(over), "+", len(row.seeds))


def _frontier(study: Study, measure: str) -> Chart | None:
    note = (
        "Means over seeds, bars are 95 % intervals over problems and seeds, numbers at the points "
        "are K."
    )
    return frontier_chart((*study.offline, *study.baselines), measure, note)


def frontier_chart(groups: Sequence[Group], measure: str, note: str) -> Chart | None:
    """Draw accuracy against one cost; None where it is known of no point or zero for all.

    A line for each group, its points labelled with K, settings at one K with the setting.
    """
    name, written = COSTS[measure]
    series: dict[str, list[Point]] = {}
    joined = set()
    is_known = False
    for group in groups:
        line = group[0].group
        setting = ""
        if len(group) > 1:
            joined.add(line)
        elif group[0].values:
            line = group[0].arm
            setting = ", ".join(group[0].values.values())
        for row in group:
            spent = row.costs.get(measure, math.nan)
            is_known |= spent > 0
            point = Point(spent, *fmt.percents(row.accuracy), setting or f"{row.steps:g}")
            series.setdefault(line, []).append(point)
    if not is_known:
        return None
    name += {"generated": " tokens", "trained": " tokens", "verifier_cpu_seconds": " time"}.get(
        measure, ""
    )
    split = groups[0][0].split
    title = f"{split.capitalize()} accuracy, %"
    return figures.points(
        measure,
        title,
        series,
        x_title=name,
        written=written,
        joined=joined,
        note=note,
    )


def taught(study: Study) -> Table:
    """Show what the rollouts behind every row that ends offline could teach."""
    rows = []
    for row in flat(study.offline):
        cells = fmt.cells(TAUGHT, row.measured)
        rows.append({"policy": row.name, **cells})
    return table("Rollouts and pairs that offline training was given", rows)


def stopping(study: Study) -> Table:
    """Show why each warm-up that may end by itself did, seed by seed."""
    lines = []
    for row in flat(group for group in study.groups if group[0].stops):
        for policy in row.policies:
            stop = policy.stop or Stop()
            why = stop.rule + f" ({stop.measure})" * bool(stop.measure)
            seed = str(policy.run.seed)
            lines.append({"policy": row.name, "seed": seed, "K": f"{policy.steps:g}", "why": why})
    return table("Where each warm-up ended", lines)


def _settings(study: Study) -> list[Part | None]:
    """Show the study's config, and the environments its stages were made in, but for the
    command."""
    distinct = {}
    for policy in study.policies:
        for stage in policy.run.folders:
            environment = {**policy.run.environment_of(stage), "command": ""}
            distinct[fingerprint(environment)] = environment
    codes = [Code("Environment (environment.json)", distinct[key]) for key in sorted(distinct)]
    return [Code("Configuration of the study", study.config), *codes]


def _own_rows(study: Study) -> pd.DataFrame:
    """Return the frame of the study's own points."""
    return frame_of(runs_of(study.workdir, study.name))
