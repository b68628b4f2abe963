"""The report of a study: NAME.html, NAME.md, NAME.csv."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime

import numpy as np

from g2d_jax.report import contrasts, figures
from g2d_jax.report import format as fmt
from g2d_jax.report.figures import Chart, Point
from g2d_jax.report.format import UNKNOWN, number
from g2d_jax.report.page import Code, Note, Part, Report, Section, write
from g2d_jax.report.read import COLLECT, ONLINE, Group, Policy, Row, Study, read_study
from g2d_jax.report.run import MEANINGS, MEASURES, Written
from g2d_jax.report.tables import Table, cost_cells, leaves, sheet, table
from g2d_jax.runtime.storage import PathLike, fingerprint
from g2d_jax.study import frontier, stats
from g2d_jax.study.frontier import Interval

COLUMNS = ("arm", "values", "seed", "K", "split", "measure", "value")
FEW_SEEDS = 5
"""Intervals of fewer seeds are too narrow (see frontier.py)."""
OUT_OF_RANGE = "out of range"

COSTS: Mapping[str, tuple[str, Written]] = {
    "flops": ("FLOPs", fmt.quantity),
    "generated": ("generated tokens", fmt.quantity),
    "tokens": ("tokens of all kinds", fmt.quantity),
    "trained": ("trained tokens", fmt.quantity),
    "device_seconds": ("device time", fmt.duration),
    "verifier_cpu_seconds": ("verifier CPU time", lambda seconds: f"{fmt.value(seconds)} s"),
    "price": ("price", fmt.value),
}
"""Cost -> its name and its numbers as text, a figure each."""

EVALUATED: Mapping[str, tuple[str, Written]] = {
    "greedy %": ("greedy", fmt.percent),
    "entropy, nats": ("entropy", fmt.fixed(3)),
    "length": ("mean_length", fmt.fixed(1)),
    "truncated %": ("truncated", fmt.percent),
}
"""Head of a column -> its name in the evaluation of a policy, and its numbers as text."""

TAUGHT: Mapping[str, tuple[tuple[str, ...], Written]] = {
    **{head: ((COLLECT, "result", "informativeness", name), of) for name, (head, of) in MEASURES.items()},
    "gap before, nats": (("offline", "result", "before", "gap_mean"), fmt.fixed(2)),
    "gap after, nats": (("offline", "result", "after", "gap_mean"), fmt.fixed(2)),
    "ranked before %": (("offline", "result", "before", "frac_ranked"), fmt.percent),
    "implicit margin": (("offline", "result", "margins", "margin_mean"), fmt.fixed(2)),
    "margins right %": (("offline", "result", "margins", "accuracy"), fmt.percent),
    "gradient signal / noise": (("offline", "result", "signal", "ratio"), fmt.fixed(3)),
    "noise scale, pairs": (("offline", "result", "signal", "noise_scale"), fmt.fixed(0)),
    "pairs": ((COLLECT, "counts", "pairs"), fmt.count),
}
"""Head of a column -> where a stage's manifest has it, and its numbers as text."""

TAUGHT_NOTE = (
    f"Of the rollouts that pairs were made from; means over seeds. {MEANINGS} Gaps before and after are of the pairs' "
    "chosen and rejected completions, before and after offline training; the implicit margin is beta times what "
    "training moved of it. Signal / noise is the norm of the mean DPO gradient over the norm of its noise in a batch, "
    "the noise scale the number of pairs at which both are equal. Between temperatures entropy does not compare."
)

STOP_NOTE = (
    "Why: online steps had come to buy less per FLOP than offline training was predicted to (adaptive), at a budget, "
    "or at the last of its steps. Rates, in points a TFLOP: what the last probe saw of online steps, in accuracy and "
    "predicted gain together (± standard error), and predicted of offline training."
)


def write_study(workdir: PathLike, name: str, *, show: Callable[..., None] | None = None) -> list[str]:
    """Write NAME.html, NAME.md, NAME.csv and figures of a study into its directory; the study may be unfinished.

    show: is given the result table (title, columns, rows), such as to print it.
    Returns the paths of the first three in this order. The same directory gives the same bytes. Raises
    ValueError if it holds no study of that name or a file is damaged, OSError.
    """
    study = read_study(workdir, name)
    if show is not None and study.policies:
        show(*results(study))
    return write(report(study), sheet(COLUMNS, records(study)), study.workdir, name)


def report(study: Study) -> Report:
    """Put together all that a study shows."""
    arms = contrasts.spectrum(study)
    bars = [(row.name, 100 * one.mean, 100 * one.low, 100 * one.high) for _, row in arms for one in [row.accuracy]]
    left_out = [{"point": label, "why": "not finished"} for label in study.unfinished]
    left_out += [{"point": label, "why": "not evaluated on test"} for label in study.untested]
    charts = [frontier_chart(study, measure) for measure in COSTS]
    return Report(
        kind="study",
        name=study.name,
        eyebrow=_eyebrow(study),
        headline=headline(study),
        warnings=[*filter(None, [state(study)])],
        sections=[
            Section(
                "results",
                "Result",
                [
                    Note(caution(study)),
                    results(study),
                    figures.intervals("accuracy", "Test accuracy, % (bars: 95 %)", bars),
                ],
            ),
            Section("frontier", "Accuracy against compute", [*charts, details(study)]),
            Section("informativeness", "Informativeness", [Note(TAUGHT_NOTE), taught(study), correlations(study)]),
            Section("stopping", "K that chose itself", _stopping(study)),
            Section("points", "Points left out", [table("Points left out", left_out)]),
            Section("settings", "Settings", _settings(study)),
        ],
    )


def _eyebrow(study: Study) -> str:
    """How much there is, and until when it was measured."""
    manifests = [one for policy in study.policies for one in policy.run.manifests.values()]
    times = [number(one, "started") + number(one, "seconds") for one in manifests]
    last = max((time for time in times if time == time), default=math.nan)
    seeds = {seed for group in study.groups for row in group.rows for seed in row.seeds}
    parts = ["G2D study", f"{len(study.policies)} points, {len(seeds)} seed{'s' * (len(seeds) != 1)}"]
    parts += [f"measured until {datetime.fromtimestamp(last, UTC):%d %B %Y, %H:%M} UTC"] if last == last else []
    return " · ".join(parts)


def state(study: Study) -> str:
    """Say what is missing, and the command that runs it; "" if nothing is."""
    parts = []
    if study.unfinished:
        total = len(study.unfinished) + len(study.untested) + len(study.policies)
        parts.append(f"{len(study.unfinished)} of {total} points are not finished and left out (listed under Points).")
        parts.append(f"To finish them: {command(study)}")
    if study.untested:
        parts.append(f"{len(study.untested)} points were not evaluated on the test split and are left out.")
    if len({frozenset(row.seeds) for group in study.groups for row in group.rows}) > 1:
        parts.append("Rows have different seeds: their means are not yet comparable.")
    return " ".join(parts)


def command(study: Study) -> str:
    """Return the command that made the study, as its stages have it; it goes on with what is not finished."""
    for policy in study.policies:
        for stage in policy.run.stages.values():
            words = list(stage.json("environment.json").get("command", ()))[1:]
            if words[:1] == ["sweep"]:
                return " ".join(["g2d", *map(str, words)])
    return f"g2d sweep --config CONFIG --workdir {study.workdir}"


def caution(study: Study) -> str:
    """Explain the columns, and that intervals of few seeds are too narrow."""
    counts = {len(row.seeds) for group in study.groups for row in group.rows} or {0}
    many = f"{min(counts)}{f' to {max(counts)}' * (len(counts) > 1)} seed{'s' * (max(counts) != 1)}"
    text = f"Intervals are 95 %, over problems and {many}"
    text += f": with fewer than {FEW_SEEDS} seeds they are too narrow" if min(counts) < FEW_SEEDS else ""
    text += ". Gain: over the policy its last training started from; differences are in points on test, paired by seed "
    text += "and problem. Costs leave out supervised fine-tuning, which is the same for all."
    if contrasts.spectrum(study):
        text += " s: updates between two synchronisations of the sampling policy with the trained one; 1 is online, ∞ "
        text += "(never) is offline."
    swept = contrasts.swept_rows(study)
    if swept and any(group.stops for group in study.groups):
        costs = [row.cost("flops") for row in swept]
        spent = sum(cost * len(row.seeds) for cost, row in zip(costs, swept, strict=True))
        text += (
            f" The swept K spent {flops(float(np.median(costs)))} in the median, {flops(spent)} in all (each seed's "
        )
        text += "shared steps counted once for every K)."
    return text


def flops(amount: float) -> str:
    """Format an amount of compute, "2.58 TFLOPs"."""
    text = fmt.quantity(amount)
    return f"{text}{' ' * text[-1:].isdigit()}FLOPs"


def row_cells(row: Row) -> dict[str, str]:
    """Accuracy, how it answers, and cost of a row, as all reports of several policies have them."""
    k = min(one.shape[1] for one in row.correct)
    passed = float(np.mean([stats.pass_at(one, k) for one in row.correct])) if k > 1 else math.nan
    return {
        "accuracy % [95 %]": fmt.percents(row.accuracy),
        "seed std": fmt.percent(frontier.seed_spread(row.accuracies)),
        f"pass@{k} %": fmt.percent(passed),
        **{head: of(row.evaluated(name)) for head, (name, of) in EVALUATED.items()},
        **cost_cells({measure: row.cost(measure) for measure in row.policies[0].costs}),
    }


def results(study: Study) -> Table:
    """Every row of the study: offline training after K online steps first, then online training alone."""
    arms = contrasts.spectrum(study)
    start = contrasts.start_of([row for _, row in arms]) if arms else None
    rows = [(group, row) for group in study.offline for row in group.rows]
    rows += arms or [(group, row) for group in study.baselines for row in group.rows]
    best = [one for one in (contrasts.chosen(group.rows) for group in study.swept) if one is not None]
    rows = [(Group(start.name, {}, [start]), start), *rows] if start is not None else rows
    others = [contrasts.reference(study, group, row) for group, row in rows]
    names = {other.name for other in others if other is not None}
    over = f"over {names.pop()}" if len(names) == 1 else "over"
    lines = [_line(study, *rows[i], rows[i][1] in best, over, other) for i, other in enumerate(others)]
    title = f"Accuracy on {fmt.count(len(rows[0][1].ids) if rows else 0)} test problems"
    hidden = {"seeds"} if len({line["seeds"] for line in lines}) == 1 else set()
    return table(title, lines, hidden=hidden if arms else {*hidden, "s", "loss"})


def _line(study: Study, group: Group, row: Row, is_chosen: bool, over: str, other: Row | None) -> dict[str, str]:
    """Build a row's cells. over: head of the column of the difference to another row; without a name it is in cells."""
    policy, cells = row.policies[0], row_cells(row)
    apart = UNKNOWN
    if other is not None and other is not row:
        apart = _of_seeds(contrasts.difference(row, other), len(row.seeds)) + f", {other.name}" * (over == "over")
    return {
        "policy": f"{row.name} (best on dev)" if is_chosen else row.name,
        "K": f"{row.steps:g}",
        "s": str(contrasts.sync_every(policy) or "∞") if policy.kind == ONLINE else UNKNOWN,
        "loss": contrasts.loss_of(policy) or UNKNOWN,
        "seeds": str(len(row.seeds)),
        "dev %": fmt.percent(row.dev),
        "accuracy % [95 %]": cells["accuracy % [95 %]"],
        "seed std": cells["seed std"],
        "gain": _of_seeds(row.gain, len(row.seeds)),
        over: apart,
        "against GRPO at this budget": _versus(study, row) if group.is_offline and study.baselines else UNKNOWN,
        "FLOPs": cells["FLOPs"],
    }


def details(study: Study) -> Table:
    """How the policies of every row answer, and what else making them cost."""
    rows = [row for group in (*study.groups, *study.warmups) for row in group.rows]
    cells = [{"policy": row.name, **row_cells(row)} for row in rows]
    return table("Their answers, and what they cost", cells, hidden={"accuracy % [95 %]", "seed std", "FLOPs"})


def _of_seeds(found: Interval | None, seeds: int) -> str:
    """Format a difference, and its number of seeds where that is not all of them."""
    some = f" ({found.seeds} of {seeds} seeds)" if found is not None and 0 < found.seeds < seeds else ""
    return fmt.points(found) + some


def _versus(study: Study, row: Row) -> str:
    """Compare a row with the baseline `best_at` its cost, named if there are several."""
    best = contrasts.best_at(study, row)
    if best is None:
        on_dev = any(one.dev == one.dev for baseline in study.baselines for one in baseline.rows)
        return OUT_OF_RANGE if on_dev else UNKNOWN
    found = contrasts.advantage(row, best)
    if found.difference is None:
        return OUT_OF_RANGE if found.seeds else UNKNOWN
    named = f", {best.setting or best.name}" if len(study.baselines) > 1 else ""
    return _of_seeds(found.difference, found.seeds) + named


def headline(study: Study) -> str:
    """Answer the study's question: which K, or setting, was chosen on dev, what it reaches, and what that costs.

    Where that cannot be said it says what to run. Of a study of online training alone it has every arm.
    """
    if not study.policies:
        return f"No point of this study is finished and tested yet. To go on: {command(study)}"
    arms = contrasts.spectrum(study)
    if arms and not study.offline:
        return _span(arms)
    by_arm = {arm: [row for g in study.offline if g.arm == arm for row in g.rows] for arm in _arms(study.offline)}
    questions = [("K", group.rows) for group in study.swept if not group.stops]
    questions = questions or [(f"The setting of {arm}", rows) for arm, rows in by_arm.items() if len(rows) > 1]
    questions = questions or [("The best policy", [row for group in study.groups for row in group.rows])]
    over = f"On {fmt.count(len(study.groups[0].rows[0].ids))} test problems"
    said = [
        _chosen(study, rows) if contrasts.chosen(rows) else _not_chosen(study, *one)
        for one in questions
        for rows in [one[1]]
    ]
    return f"{over}: {' '.join(said)}"


def _arms(groups: Sequence[Group]) -> list[str]:
    return list(dict.fromkeys(group.arm for group in groups))


def _chosen(study: Study, rows: Sequence[Row]) -> str:
    row = contrasts.chosen(rows)
    assert row is not None
    among = (
        ""
        if len(contrasts.comparable(rows)) == len(rows)
        else f" among {len(contrasts.comparable(rows))} of {len(rows)}"
    )
    text = f"{row.name}, chosen on dev{among}, answers {fmt.percents(row.accuracy)} % correctly"
    every = [one for group in (*study.groups, *study.warmups) for one in group.rows if set(one.seeds) >= set(row.seeds)]
    best = max(every, key=lambda one: one.accuracy.mean)
    lost = contrasts.difference(row, best)
    if best is row or lost is None:
        text += f", more than all others, for {flops(row.cost('flops'))}"
    else:
        interval = fmt.points(lost).partition(" ")[2]
        text += f", {-100 * lost.mean:.1f} points below the best, {best.name} (difference {interval})"
        text += f", for {flops(row.cost('flops'))}"
        share = row.cost("flops") / best.cost("flops") if best.cost("flops") else math.nan
        text += "" if math.isnan(share) else f" or {100 * share:.0f} % of its compute"
    if row.gain is not None:
        text += f"; its last training added {fmt.points(row.gain)} points"
    baseline = contrasts.best_at(study, row)
    found = contrasts.advantage(row, baseline).difference if baseline else None
    if baseline and found is not None:
        text += f"; against {baseline.name} at these FLOPs it has {fmt.points(found)} points"
    return f"{text}."


def _not_chosen(study: Study, what: str, rows: Sequence[Row]) -> str:
    means = [row.accuracy.mean for row in rows]
    text = f"{len(rows)} settings answer {fmt.percent(min(means))} to {fmt.percent(max(means))} % correctly."
    missing = sorted({policy.name for row in rows for policy in row.policies if not policy.result("dev")})
    if not missing:
        return f"{text} {what} cannot be chosen yet: no row has all seeds. To finish them: {command(study)}"
    names = "".join(f'"{name}", ' for name in missing).rstrip()
    return (
        f"{text} {what} cannot be chosen: {', '.join(missing)} {'were' if len(missing) > 1 else 'was'} not evaluated "
        f'on dev. Add config.stages.dev = settings.evaluate(policies=({names}), split="dev") to the config and run '
        f"again, what is finished is kept: {command(study)}"
    )


def _span(arms: Sequence[tuple[Group, Row]]) -> str:
    rows = [row for _, row in arms]
    start, updates = contrasts.start_of(rows), {f"{row.steps:g}" for row in rows}
    text = f"On {fmt.count(len(rows[0].ids))} test problems"
    text += f", from {start.name} ({fmt.percent(start.accuracy.mean)} %)" if start else ""
    text += f", after {updates.pop()} updates" if len(updates) == 1 else ""
    reached = [f"{row.name}{' answers' * (i == 0)} {fmt.percents(row.accuracy)} %" for i, row in enumerate(rows)]
    return f"{text}: {', '.join(reached)} correctly."


def frontier_chart(study: Study, measure: str) -> Chart | None:
    """Accuracy on test against one cost; None where it is known of no point or zero for all.

    A line for each group, its points labelled with K, settings at one K with the setting.
    """
    name, written = COSTS[measure]
    series: dict[str, list[Point]] = {}
    for group in (*study.offline, *study.baselines):
        line = group.arm if group.values and len(group.rows) == 1 else group.name
        for row in group.rows:
            mean, low, high = (100 * end for end in (row.accuracy.mean, row.accuracy.low, row.accuracy.high))
            label = ", ".join(group.values.values()) if line != group.name else f"{row.steps:g}"
            series.setdefault(line, []).append(Point(row.cost(measure), mean, low, high, label))
    if not any(point.x > 0 for points in series.values() for point in points):
        return None
    joined = {group.name for group in (*study.offline, *study.baselines) if len(group.rows) > 1}
    note = "Means over seeds, bars are 95 % intervals over problems and seeds, numbers at the points are K."
    title = f"Test accuracy, %, against {name}"
    return figures.points(measure, title, series, x_title=name, written=written, root=True, joined=joined, note=note)


def taught(study: Study) -> Table:
    """Show what the rollouts behind every row that ends offline could teach."""
    return table(
        "Rollouts and pairs that offline training was given",
        [
            {"policy": row.name, **{head: of(row.mean(*path)) for head, (path, of) in TAUGHT.items()}}
            for group in study.offline
            for row in group.rows
        ],
    )


def correlations(study: Study) -> Table:
    """Each measure's rank correlation with what offline training added, over all points at several K."""
    policies = [policy for group in study.swept for policy in group.policies]
    gains = [math.nan if policy.gain is None else float(np.nanmean(policy.gain)) for policy in policies]
    lines = []
    for name in ("K", *TAUGHT):
        found = [policy.steps if name == "K" else policy.measure(*TAUGHT[name][0]) for policy in policies]
        rho, n = contrasts.rank_correlation(found, gains)
        lines += [] if math.isnan(rho) else [{"measure": name, "rank correlation": f"{rho:+.2f}", "points": str(n)}]
    title = "Spearman's rank correlation with what offline training added on test, over points (K and seed). "
    return table(
        f"{title}Points of one seed share a trajectory and all measures move with K: no test of a cause", lines
    )


def _stopping(study: Study) -> list[Part | None]:
    """Why each warm-up that may end by itself did, seed by seed."""
    lines = []
    for policy, seed, name in (
        (policy, seed, row.name)
        for group in study.groups
        if group.stops
        for row in group.rows
        for policy, seed in zip(row.policies, row.seeds, strict=True)
    ):
        stop = policy.stop
        last = (stop.get("probes") or [{}])[-1]
        step, whole = number(last, "step_flops") / 1e12, number(last, "offline_flops") / 1e12
        why = f"{stop['rule']} ({stop['measure']})" if "measure" in stop else str(stop["rule"])
        rate = fmt.spread(number(last, "slope") / step, number(last, "slope_error") / step)
        cells = {"K": f"{policy.steps:g}", "why": why, "online rate": rate}
        lines.append(
            {"policy": name, "seed": str(seed), **cells, "offline rate": fmt.percent(number(last, "gain") / whole)}
        )
    return [Note(STOP_NOTE), table("Where each warm-up ended", lines)]


def _settings(study: Study) -> list[Part | None]:
    """Show the study's config, and the environments its stages were made in, but for the command."""
    stages = {stage.folder: stage for policy in study.policies for stage in policy.run.stages.values()}
    found = [{**stage.json("environment.json"), "command": ""} for stage in stages.values()]
    distinct = {fingerprint(content): content for content in found}
    environments = [Code("Environment (environment.json)", distinct[key]) for key in sorted(distinct)]
    return [Code("Configuration of the study", study.config), *environments]


def records(study: Study) -> Iterator[tuple[str, str, str, str, str, str, float]]:
    """All figures, group by group and K by K: those of each seed, then those of all together (seed "all").

    arm, values, seed, K, split ("" where none applies), measure, value. measure is a path such as "accuracy",
    "cost/flops", "collect/informativeness/ece", "offline/margins/margin_mean", and, of all seeds together,
    "accuracy/low", "gain/mean" (what the last training added) or "advantage/BASELINE/flops/mean"; BASELINE is "best on
    dev" for the one that is best there at these FLOPs. Units are those of the manifests.
    """
    for group in (*study.groups, *study.warmups):
        values = ";".join(f"{field}={text}" for field, text in group.values.items())
        for row in group.rows:
            for policy, seed in zip(row.policies, row.seeds, strict=True):
                for split, measure, value in _of_policy(policy):
                    yield group.arm, values, str(seed), f"{policy.steps:g}", split, measure, value
            for split, measure, value in _of_row(study, group, row):
                yield group.arm, values, "all", f"{row.steps:g}", split, measure, value


def _of_policy(policy: Policy) -> Iterator[tuple[str, str, float]]:
    for split in ("dev", "test"):
        answers = policy.answers(split)
        if answers is not None:
            yield split, "accuracy", stats.accuracy(answers.correct).mean
        for measure, value in leaves(policy.result(split)):
            yield split, measure, value
    gain = policy.gain if policy.kind == "offline" else None
    yield "test", "offline_gain", math.nan if gain is None else float(np.nanmean(gain))
    for measure, value in policy.costs.items():
        yield "", f"cost/{measure}", value
    kind = "offline" if policy.kind == "offline" else "online"
    for name, manifest in ((COLLECT, policy.pairs_from), (kind, policy.manifest)):
        for measure, value in leaves({part: manifest.get(part, {}) for part in ("counts", "result")}):
            yield "", f"{name}/{measure.removeprefix('counts/')}", value
    ended = policy.kind == ONLINE and policy.steps == number(policy.manifest, "counts", "steps")
    for measure, value in leaves(policy.manifest.get("generation", {})) if ended else ():
        yield "", f"online/generation/{measure}", value


def _of_row(study: Study, group: Group, row: Row) -> Iterator[tuple[str, str, float]]:
    yield "dev", "accuracy/mean", row.dev
    intervals = {"accuracy": row.accuracy, "gain": row.gain, "offline_gain": row.gain if group.is_offline else None}
    for baseline in study.baselines if group.is_offline else ():
        intervals[f"advantage/{baseline.name}/flops"] = contrasts.advantage(row, baseline).difference
    if group.is_offline and (best := contrasts.best_at(study, row)) is not None:
        intervals["advantage/best on dev/flops"] = contrasts.advantage(row, best).difference
    for name, interval in intervals.items():
        for part in ("mean", "low", "high", "seeds") if interval is not None else ():
            yield "test", f"{name}/{part}", float(getattr(interval, part))
    for measure in row.policies[0].costs:
        yield "", f"cost/{measure}", row.cost(measure)
