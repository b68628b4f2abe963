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

READ_MORE = "Means over the problems; docs/metrics.md says what each measure is."

TRAINING_NOTE = (
    "Lines are of what a stage trained on; fresh samples are of the trained policy itself, on the "
    "same prompts each time. Every other metric is in metrics/ and in TensorBoard."
)


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


def summary(run: Run) -> Report:
    """Put together what a notebook shows of a run: the result and the figures of training."""
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
    """Say when it was measured, and of which seed."""
    measured = fmt.until(float(record["time"]) for record in run.metrics)
    seed = f"seed {run.config['seed']}" if "seed" in run.config else ""
    return " · ".join(filter(None, ["G2D report", measured, seed]))


def state(run: Run) -> str:
    """Say what an unfinished run lacks, "" if nothing."""
    begun = [f"{name}{_reached(run, name)}" for name in run.folders if name not in run.results]
    waiting = [name for name in run.sections if name not in run.folders]
    named = {"not finished": begun, "not begun": waiting}
    missing = "; ".join(f"{how}: {', '.join(names)}" for how, names in named.items() if names)
    if not missing:
        return ""
    if run.is_running:
        return f"This is the report of a run under way ({missing})."
    ended = run.ended
    if ended and ended.how == "until":
        return (
            f"This run ended after the stage of --until ({missing}): without --until it continues."
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
    """Build the result of an evaluation of a run, with the cost of making each policy."""
    costs = {policy.name: Policy(run, policy.name).costs for policy in evaluation.policies}
    return tables.summary_table(evaluation, costs)


def _scores(run: Run, evaluation: Evaluation) -> Chart | None:
    """Draw each policy's accuracy, or reward, over the FLOPs that made it; without them where one is
    not known."""
    note = "Bars: 95 %, over problems only; g2d sweep has other seeds too."
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
    # Policies of elsewhere cost nothing here: then there is no axis to speak of.
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
    """Show what else is known of the answers, what was chosen by them, and other evaluations."""
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
    note = "Chance that one of k answers is right. Where lines meet, training only sharpened."
    return figures.points(
        "pass-at-k", "pass@k, %", series, x_title="k", joined=series, ticks=ks, note=note
    )


def _informativeness(run: Run) -> Iterator[Part | None]:
    """Show how much rollouts of each policy can teach."""
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
    """Say what training did, and draw metrics over steps."""
    said = []
    for name, result in run.results.items():
        if result.kind in TRAINING:
            waited = waits(result.generation)
            said.append(f"{name}: {tables.counted(result.counts)}{f' {waited}.' * bool(waited)}")
    yield Note(" ".join(said))
    if charts := curves.training(logged_metrics(run)):
        yield Note(TRAINING_NOTE)
        yield from charts


def logged_metrics(run: Run) -> Logged:
    """Read what the run's stages logged more than once, in the order of their folders; evaluations
    are in the result."""
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
    """Say what became of collections' prompts, and show pairs under the policy before and after
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
    yield tables.transposed("The pairs under the policy before and after training on them", moved)
