"""The report of a run: report.html, report.md, report.csv."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from g2d_jax.report import curves, figures, tables
from g2d_jax.report import format as fmt
from g2d_jax.report.curves import Logged
from g2d_jax.report.figures import Chart, Point
from g2d_jax.report.format import cells, number, policy_name
from g2d_jax.report.frame import NO_POINT, Policy, frame_of, interval_of
from g2d_jax.report.page import Code, Note, Part, Report, write
from g2d_jax.report.progress import waits
from g2d_jax.report.runs import COLLECT, EVALUATE, OFFLINE, Run
from g2d_jax.report.samples import browser
from g2d_jax.report.tables import MEASURES, PAIRS, Table
from g2d_jax.report.verdict import no_verdict, run_sentence, run_verdict
from g2d_jax.runtime.processes import how_to_continue
from g2d_jax.session.accounting import TRAINING
from g2d_jax.session.stage_result import Evaluation
from g2d_jax.study.stats import t_quantile

READ_MORE = "Means over the problems; docs/metrics.md defines each measure."

TRAINING_NOTE = (
    "Lines show the training prompts; fresh samples are from the trained policy itself, on the "
    "same prompts each time. Other metrics are in metrics/ and in TensorBoard."
)


def write_run(
    run: Run, *, figures: bool = True, say: Callable[[str], None] | None = None
) -> list[str]:
    """Write report.html, report.md, report.csv and, by default, figures of a run.

    The run may be unfinished. Returns the paths of the first three in this order. The same work
    directory produces the same bytes. say: receives the verdict, for example to print it. Raises
    ValueError if completions or pairs are damaged; OSError.
    """
    page = report(run)
    if say is not None and page.verdict:
        say(page.verdict)
    return write(page, run.workdir, "report", figures=figures)


def summary(run: Run) -> Report:
    """Build the notebook's view of a run: the result and the training figures."""
    latest = run.latest
    results = [_scores(run, latest), summary_table(run, latest)] if latest else []
    return Report(
        kind="report",
        name=run.name,
        eyebrow=eyebrow(run),
        verdict=run_sentence(run_verdict(run)),
        headline=headline(run),
        warnings=[*filter(None, [state(run)]), *run.warnings],
        parts={"results": results, "curves": list(_training(run))},
    )


def headline(run: Run) -> str:
    """Return the error that stopped a run, or why it has no verdict; "" for a good one."""
    if run.ended and run.ended.how == "error" and not run.is_running:
        return f"Stopped by an error: {run.ended.text}"
    kinds = {section.get("kind") for section in run.sections.values()}
    return no_verdict(run.latest, EVALUATE in kinds)


def report(run: Run) -> Report:
    """Build the whole report of a run."""
    short = summary(run)
    parts: dict[str, Sequence[Part | None]] = {
        **short.parts,
        "answers": list(_answers(run)),
        "informativeness": list(_informativeness(run)),
        "pairs": list(_pairs(run)),
        "browser": browser(run),
        "compute": [tables.stages_table(run.results), Note(tables.compiled(run.results.values()))],
        "settings": [
            Code("Configuration (config.json)", run.config),
            Code("Environment (environment.json)", run.environment),
        ],
    }
    return short._replace(parts=parts, frame=partial(frame_of, [(NO_POINT, run)]))


def eyebrow(run: Run) -> str:
    """Return the time of the measurements, and the seed."""
    measured = fmt.until(float(record["time"]) for record in run.metrics)
    seed = f"seed {run.config['seed']}" if "seed" in run.config else ""
    return " · ".join(filter(None, ["G2D report", measured, seed]))


def state(run: Run) -> str:
    """Describe the missing parts of an unfinished run, "" if there are none."""
    begun = [f"{name}{_reached(run, name)}" for name in run.folders if name not in run.results]
    waiting = [name for name in run.sections if name not in run.folders]
    named = {"not finished": begun, "not begun": waiting}
    missing = "; ".join(f"{how}: {', '.join(names)}" for how, names in named.items() if names)
    if not missing:
        return ""
    if run.is_running:
        return f"This run is still running ({missing})."
    ended = run.ended
    if ended and ended.how == "until":
        return (
            f"This run ended after the stage of --until ({missing}): run it without --until to "
            "continue."
        )
    how = ""
    if ended:
        how = " by an error" if ended.how == "error" else f" by {ended.text}"
    text = how_to_continue(ended)
    return f"This run stopped before its end{how} ({missing}). {text[0].upper()}{text[1:]}."


def _reached(run: Run, stage: str) -> str:
    """Name the last step that a stage logged, "" for none."""
    steps = [int(record["step"]) for record in run.metrics if record["stage"] == stage]
    last = max(steps, default=0)
    return f" at step {last}" if last else ""


def summary_table(run: Run, evaluation: Evaluation) -> Table:
    """Build the result table of an evaluation of a run, with the cost of each policy."""
    costs = {policy.name: Policy(run, policy.name).costs for policy in evaluation.policies}
    return tables.summary_table(evaluation, costs)


def _scores(run: Run, evaluation: Evaluation) -> Chart | None:
    """Draw each policy's accuracy, or reward, over its FLOPs; without FLOPs if one is unknown."""
    note = "Bars: 95 %, over problems only; for several seeds use g2d sweep."
    task = tables.score_of(evaluation)
    title = "Mean reward" if task else "Accuracy, %"
    last = Policy(run, evaluation.policies[-1].name).chain
    series: dict[str, list[Point]] = {}
    points = []
    for entry in evaluation.policies:
        name = policy_name(entry.name, entry.label)
        numbers = fmt.percents(interval_of(entry))
        if task:
            result = entry.tasks[task]
            half = t_quantile(result.problems) * result.sem
            numbers = result.reward, result.reward - half, result.reward + half
        points.append(Point(Policy(run, entry.name).flops, *numbers, name))
        series.setdefault("" if entry.name in last else name, []).append(points[-1])
    # Without any cost, as of external policies, the cost axis is useless.
    if not 0 < sum(point.x for point in points) < math.inf:
        bars = [(point.label, *point[1:4]) for point in points]
        return figures.intervals("accuracy", title, bars, note=note)
    return figures.points(
        "accuracy",
        title,
        series,
        x_title="FLOPs, without SFT",
        written=fmt.quantity,
        joined={""},
        note=f"Higher for less is better. {note}",
    )


def _answers(run: Run) -> Iterator[Part | None]:
    """Show more about the answers, the selections based on them, and other evaluations."""
    latest = run.latest
    if latest is not None:
        yield _pass_at(latest)
        yield tables.answers_table(latest)
    for name, result in run.results.items():
        if result.selection is not None:
            yield tables.selection_table(name, result.selection)
    for name, evaluation in run.evaluated():
        if evaluation is not latest:
            table = summary_table(run, evaluation)
            yield table._replace(title=f"{name}: {table.title}")


def _pass_at(evaluation: Evaluation) -> Chart | None:
    series = {}
    for entry in evaluation.policies:
        values = [Point(int(k), 100 * chance) for k, chance in entry.pass_at.items()]
        series[policy_name(entry.name, entry.label)] = values
    ks = sorted({point.x for point in itertools.chain.from_iterable(series.values())})
    if len(ks) <= 1:
        return None
    note = (
        "Chance that one of k answers is correct. If the lines meet, or if the first policy is as "
        "good greedily, training only sharpened."
    )
    return figures.points(
        "pass-at-k", "pass@k, %", series, x_title="k", joined=series, ticks=ks, note=note
    )


def _informativeness(run: Run) -> Iterator[Part | None]:
    """Show the informativeness of each policy's rollouts."""
    columns = {}
    for name, result in run.results.items():
        if result.kind == COLLECT:
            measures = result.measures.get("informativeness", {})
            columns[f"rollouts of {name}"] = cells(MEASURES, partial(number, measures))
        for entry in result.evaluation.policies if result.evaluation else ():
            title = f"{policy_name(entry.name, entry.label)}, {name}"
            columns[title] = cells(MEASURES, partial(number, entry.informativeness))
    yield Note(READ_MORE)
    yield tables.transposed("Rollouts of each policy", columns)


def _training(run: Run) -> Iterator[Part | None]:
    """Describe the training counts, and draw metrics over steps."""
    texts = []
    for name, result in run.results.items():
        if result.kind in TRAINING:
            waited = waits(result.generation)
            texts.append(f"{name}: {tables.counted(result.counts)}{f' {waited}.' * bool(waited)}")
    yield Note(" ".join(texts))
    if charts := curves.training(logged_metrics(run)):
        yield Note(TRAINING_NOTE)
        yield from charts


def logged_metrics(run: Run) -> Logged:
    """Read the metrics that the run's stages logged more than once, in the order of their folders;
    evaluations are in the result."""
    logged: Logged = {name: {} for name in run.folders if run.kind(name) != EVALUATE}
    for record in run.metrics:
        of_stage = logged.get(record["stage"], {})
        for name, value in record["metrics"].items():
            points = of_stage.setdefault((record["kind"], name), [])
            points.append((record["step"], value))
    for stage, metrics in logged.items():
        logged[stage] = {key: sorted(points) for key, points in metrics.items() if points[1:]}
    return logged


def _pairs(run: Run) -> Iterator[Part | None]:
    """Describe what happened to collected prompts, and show pairs under the policy before and after
    training on them."""
    moved: dict[str, Mapping[str, str]] = {}
    for name, result in run.results.items():
        if result.kind == COLLECT:
            yield Note(f"{name}: {tables.counted(result.counts)}")
        if result.kind == OFFLINE:
            before, after, margins = map(result.measures.get, ("before", "after", "margins"))
            moved[f"before {name}"] = cells(PAIRS, partial(number, before or {}))
            after = {**(after or {}), **(margins or {})}
            moved[f"after {name}"] = cells(PAIRS, partial(number, after))
    yield tables.transposed("Pairs under the policy before and after training on them", moved)
