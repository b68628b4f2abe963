"""The report of a run: report.html, report.md, report.csv."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from g2d_jax.accounting import TRAINING
from g2d_jax.report import curves, figures, tables
from g2d_jax.report import format as fmt
from g2d_jax.report.curves import Logged
from g2d_jax.report.figures import Chart, Point
from g2d_jax.report.format import Written, policy_name
from g2d_jax.report.frame import NO_POINT, Policy, frame_of, interval_of
from g2d_jax.report.page import Code, Fold, Note, Part, Report, write
from g2d_jax.report.progress import waits
from g2d_jax.report.runs import COLLECT, EVALUATE, OFFLINE, Run, read_optional, read_parquet
from g2d_jax.report.samples import browser
from g2d_jax.report.tables import Table, table
from g2d_jax.report.verdict import no_verdict, run_sentence, run_verdict
from g2d_jax.runtime.processes import how_to_continue
from g2d_jax.stage_result import Evaluation, StageResult

ELSEWHERE = ("warning", "goodput")
"""Families of metrics that other sections show."""

ERRORS_NOTE = (
    "Errors are over problems: they are of these policies, and another seed of training is not in "
    "them. A study of several seeds (g2d sweep) has it."
)

TRAINING_NOTE = (
    "Every step is drawn, or the mean of neighbouring steps with their range as a band. Lines are "
    "of what a stage trained on: rollouts of the policy at its last synchronisation, or pairs. "
    "Fresh samples are of the trained policy itself, on the same prompts with the same random "
    "numbers each time; their cost is counted apart."
)

MEASURES: Mapping[str, tuple[str, Written]] = {
    "pass_rate": ("pass rate %", fmt.percent),
    "reward_variance": ("variance", fmt.fixed(3)),
    "frac_mixed": ("mixed %", fmt.percent),
    "entropy": ("entropy", fmt.fixed(3)),
    "distinct_answers": ("distinct", fmt.fixed(2)),
    "confidence": ("confidence %", fmt.percent),
    "ece": ("ECE", fmt.fixed(3)),
    "mean_length": ("length", fmt.fixed(1)),
    "frac_truncated": ("cut at limit %", fmt.percent),
}
"""Measure of a policy's rollouts -> head of its column, and its numbers as text."""

MEANINGS = (
    "Variance is that of the reward among a prompt's completions. Mixed prompts can give pairs, or "
    "advantages: they have right and wrong completions or, where rewards only rank, different "
    "ones. Answers are counted by prompt. Entropy is a token's, in nats. Confidence is the "
    "geometric mean of a completion's token probabilities; ECE, the expected calibration error, is "
    "0 where it is the share of right answers. Means over prompts, but for entropy (over tokens) "
    "and length (over completions, in tokens)."
)

BOTH = ("before", "after")
BEFORE = ("before", "")
AFTER = ("", "margins")
PAIR_MEASURES: Mapping[str, tuple[tuple[str, str], str, Written]] = {
    "gap in log-prob, chosen − rejected, nats": (BOTH, "gap_mean", fmt.fixed(2)),
    "its lowest tenth, below": (BOTH, "gap_p10", fmt.fixed(2)),
    "gap per token, nats": (BOTH, "gap_per_token", fmt.fixed(3)),
    "pairs ranked right %": (BOTH, "frac_ranked", fmt.percent),
    "length, chosen": (BEFORE, "chosen_length", fmt.fixed(1)),
    "length, rejected": (BEFORE, "rejected_length", fmt.fixed(1)),
    "implicit reward, chosen": (AFTER, "chosen_mean", fmt.fixed(2)),
    "implicit reward, rejected": (AFTER, "rejected_mean", fmt.fixed(2)),
    "implicit margin": (AFTER, "margin_mean", fmt.fixed(2)),
    "margins right %": (AFTER, "accuracy", fmt.percent),
}
"""Measure of an offline stage's pairs -> parts of its `measures` that have it before and after training
("": none has), its name there, and its numbers as text."""


def write_run(
    run: Run, *, figures: bool = True, say: Callable[[str], None] | None = None
) -> list[str]:
    """Write report.html, report.md, report.csv and, unless they are unwanted, figures of a run.

    The run may be unfinished. Returns the paths of the first three in this order. The same work
    directory gives the same bytes. say: is given the verdict, such as to print it. Raises
    ValueError if completions or pairs are damaged; OSError.
    """
    page = report(run)
    if say is not None and page.verdict:
        say(page.verdict)
    return write(page, run.workdir, "report", figures=figures)


def summary(run: Run, *, every_metric: bool = True) -> Report:
    """Put together what a notebook shows of a run: the result and the figures of training.

    every_metric: those, too, that fold.
    """
    return Report(
        kind="report",
        name=run.name,
        eyebrow=eyebrow(run),
        verdict=run_sentence(run_verdict(run)),
        headline=headline(run),
        warnings=[*filter(None, [state(run)]), *run.warnings],
        parts={"results": list(_results(run)), "curves": list(_training(run, every_metric))},
    )


def headline(run: Run) -> str:
    """Say with what error a run stopped, or why it has no verdict; "" of a good one."""
    if run.ended and run.ended.how == "error" and not run.is_running:
        return f"Stopped by an error: {run.ended.text}"
    kinds = {section.get("kind") for section in run.sections.values()}
    return no_verdict(run.latest, EVALUATE in kinds)


def report(run: Run) -> Report:
    """Put together all that there is to show of a run."""
    short = summary(run)
    parts: dict[str, Sequence[Part | None]] = {
        **short.parts,
        "compute": [
            tables.compute_table(run.results),
            tables.goodput_table(run.results),
            Fold("Programs", [tables.compiled_table(run.results.values())]),
        ],
        "informativeness": list(_informativeness(run)),
        "pairs": list(_pairs(run)),
        "browser": browser(run),
        "settings": [
            Code("Configuration (config.json)", run.config),
            Code("Environment (environment.json)", run.environment),
        ],
    }
    return short._replace(parts=parts, frame=partial(frame_of, [(NO_POINT, run)]))


def eyebrow(run: Run) -> str:
    """Say when it was measured, of which config and which seed."""
    measured = fmt.until(float(record["time"]) for record in run.metrics)
    titles = {"name": "config", "seed": "seed"}
    named = [f"{titles[key]} {run.config[key]}" for key in titles if key in run.config]
    return " · ".join(filter(None, ["G2D report", measured, *named]))


def state(run: Run) -> str:
    """Say what an unfinished run lacks, "" if nothing."""
    begun = [f"{name}{_reached(run, name)}" for name in run.folders if name not in run.results]
    waiting = [name for name in run.sections if name not in run.folders]
    missing = []
    if begun:
        missing.append(f"not finished: {', '.join(begun)}")
    if waiting:
        missing.append(f"not begun: {', '.join(waiting)}")
    if not missing:
        return ""
    if run.is_running:
        return f"This is the report of a run under way ({'; '.join(missing)})."
    ended = run.ended
    if ended and ended.how == "until":
        return f"This run ended after the stage of --until ({'; '.join(missing)}): without --until it continues."
    how = ""
    if ended:
        how = " by an error" if ended.how == "error" else f" by {ended.text}"
    text = how_to_continue(ended)
    return (
        f"This run stopped before its end{how} ({'; '.join(missing)}). {text[0].upper()}{text[1:]}."
    )


def _reached(run: Run, stage: str) -> str:
    """Name the last step that a stage logged, "" for none."""
    steps = [int(record["step"]) for record in run.metrics if record["stage"] == stage]
    last = max(steps, default=0)
    return f" at step {last}" if last else ""


def _results(run: Run) -> Iterator[Part | None]:
    """Build the result's tables and figures, the chosen checkpoints, and the other evaluations
    folded."""
    latest = run.latest
    if latest is not None:
        yield _accuracies(run, latest)
        yield _pass_at(latest)
        yield summary_table(run, latest)
        yield Note(ERRORS_NOTE)
        yield tables.tasks_table(latest)
        yield tables.verdicts_table(latest)
        yield Fold("Subsets of the problems", [tables.subsets_table(latest)])
    for name, result in run.results.items():
        if result.selection is not None:
            yield tables.selection_table(name, result.selection)
    for name, evaluation in run.evaluated():
        if evaluation is not latest:
            yield Fold(f"Evaluation: {name}", [tables.summary_table(evaluation, {})])


def summary_table(run: Run, evaluation: Evaluation) -> Table:
    """Build the result of an evaluation of a run, with the cost of making each policy."""
    costs = {policy.name: Policy(run, policy.name).costs for policy in evaluation.policies}
    return tables.summary_table(evaluation, costs)


def _accuracies(run: Run, evaluation: Evaluation) -> Chart | None:
    """Draw each policy's accuracy against the FLOPs that made it; without them where one is not
    known."""
    note = "Bars: 95 %, over problems only; another seed is not in them."
    bars = []
    for entry in evaluation.policies:
        interval = fmt.percents(interval_of(entry))
        bars.append((policy_name(entry.name, entry.label), *interval))
    spent = [Policy(run, entry.name).flops for entry in evaluation.policies]
    # Policies of elsewhere cost nothing here: then there is no axis to speak of.
    if not all(map(math.isfinite, spent)) or not any(spent):
        return figures.intervals("accuracy", "Accuracy (pass@1), %", bars, note=note)
    points = []
    for cost, (name, mean, low, high) in zip(spent, bars, strict=True):
        points.append(Point(cost, mean, low, high, name))
    return figures.points(
        "accuracy",
        "Accuracy (pass@1), %, against FLOPs",
        {"policies": points},
        x_title="FLOPs, supervised fine-tuning left out",
        written=fmt.quantity,
        joined={"policies"},
        note=note,
    )


def _pass_at(evaluation: Evaluation) -> Chart | None:
    ks = tables.pass_at_ks(evaluation)
    if len(ks) <= 1:
        return None
    lines = {}
    for entry in evaluation.policies:
        values = [100 * entry.pass_at.get(str(k), math.nan) for k in ks]
        lines[policy_name(entry.name, entry.label)] = ks, values
    note = "Chance that one of k answers is right: the unbiased estimator."
    return figures.curves("pass-at-k", "pass@k, %", {"": lines}, x_title="k", note=note)


def _training(run: Run, every_metric: bool) -> Iterator[Part | None]:
    """Build the counts of training, and metrics over steps, stages side by side."""
    counts = {}
    for name, result in run.results.items():
        if result.kind in TRAINING:
            generation = {f"generation/{key}": value for key, value in result.generation.items()}
            counts[name] = {**result.counts, **generation}
    yield tables.counts_table("What training did", counts)
    for name, result in run.results.items():
        if said := waits(result.generation):
            yield Note(f"{name}: {said}.")
    logged = logged_metrics(run)
    charts = curves.training(logged)
    if charts:
        yield Note(TRAINING_NOTE)
    yield from charts
    if not every_metric:
        return
    others = curves.others(logged)
    yield Fold(f"More metrics ({len(others)})", others)


def logged_metrics(run: Run) -> Logged:
    """Read what the run's stages logged on their way, in the order of their folders; evaluations
    are in the result."""
    points: dict[str, dict[tuple[str, str], list[tuple[float, float]]]] = {
        name: {} for name in run.folders
    }
    evaluations = {name for name in run.folders if run.kind(name) == EVALUATE}
    for record in run.metrics:
        stage, kind = str(record["stage"]), str(record["kind"])
        if stage in evaluations or kind.partition("/")[0] in ELSEWHERE:
            continue
        of_stage = points.setdefault(stage, {})
        for name, value in record["metrics"].items():
            if name.partition("/")[0] not in ELSEWHERE:
                of_stage.setdefault((kind, name), []).append((record["step"], value))
    for stage, metrics in points.items():
        points[stage] = {key: sorted(values) for key, values in metrics.items() if len(values) > 1}
    return points


def _informativeness(run: Run) -> Iterator[Part | None]:
    """Show how much rollouts of each policy can teach."""
    rows = []
    for name, result in run.results.items():
        measured = {}
        if result.evaluation is not None:
            for entry in result.evaluation.policies:
                measured[policy_name(entry.name, entry.label)] = entry.informativeness
        if result.kind == COLLECT:
            policy = str(run.sections.get(name, {}).get("policy") or name)
            measured[policy_name(policy)] = result.measures.get("informativeness", {})
        for policy, values in measured.items():
            if values:
                cells = fmt.cells(MEASURES, defaultdict(lambda: math.nan, values).__getitem__)
                rows.append({"policy": policy, "rollouts of": name, **cells})
    yield Note(MEANINGS)
    yield table("Rollouts of each policy", rows)
    for name in run.folders:
        yield _pass_rates(run, name)


def _pass_rates(run: Run, stage: str) -> Chart | None:
    """Draw how hard a collection's prompts were: the share of prompts by pass rate."""
    file = run.folders[stage] / "informativeness" / "prompts.parquet"
    if not file.exists():
        return None
    columns = read_parquet(file, ["pass_rate", "scored"]).to_pydict()
    rates = np.asarray(columns["pass_rate"], np.float64)
    scored = np.asarray(columns["scored"])
    is_rated = ~np.isnan(rates)
    if not is_rated.any():
        return None
    samples = set(scored[is_rated].tolist())
    bins = 10
    # One for each number of right answers.
    if len(samples) == 1 and max(samples) <= 32:
        (bins,) = samples
    rated = rates[is_rated]
    steps = np.round(rated * bins).astype(int)
    # At the ends only prompts that were always or never answered right: the others give pairs.
    is_mixed = (rated > 0) & (rated < 1)
    steps[is_mixed] = np.clip(steps[is_mixed], 1, bins - 1)
    counts = np.bincount(steps, minlength=bins + 1)
    shares = {}
    for i, count in enumerate(counts):
        shares[i / bins] = 100 * int(count) / len(rated)
    unrated = int(np.sum(~is_rated))
    note = f"Pass rates in steps of 1/{bins}. Prompts at 0 and 1 give no pairs."
    if unrated:
        note += f" {fmt.count(unrated)} prompts have no pass rate and are left out."
    title = f"Prompts of {stage} by pass rate, %"
    name = f"pass-rates-{stage}"
    return figures.bars(name, title, shares, x_title="pass rate", unit=" %", note=note)


def _pairs(run: Run) -> Iterator[Part | None]:
    """Build the fates of collections' prompts; pairs under the policy before and after training on
    them."""
    for name, folder in run.folders.items():
        result = run.results.get(name)
        if run.kind(name) == COLLECT:
            counts = {name: result.counts if result else {}}
            yield tables.counts_table(f"What became of the prompts of {name}", counts)
            provenance = read_optional(folder / "preferences/_manifest.json")
            yield Code(f"How {name} made its pairs (preferences/_manifest.json)", provenance)
        if run.kind(name) == OFFLINE and result is not None:
            yield table(f"The pairs under the policy before and after {name}", _moved(result))


def _moved(result: StageResult) -> Iterator[dict[str, str]]:
    """Yield each measure of an offline stage's pairs before and after training on them."""
    for name, ((before, after), key, written) in PAIR_MEASURES.items():
        start, end = result.measure(before, key), result.measure(after, key)
        if math.isnan(start) and math.isnan(end):
            continue
        row = {"measure": name, "before": written(start), "after": written(end)}
        if written is fmt.percent:
            row["change"] = fmt.change(end - start, math.nan)
        elif not math.isnan(end - start):
            row["change"] = f"{end - start:+.3g}"
        yield row
