"""The report of a run: report.html, report.md, report.csv."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from g2d_jax.accounting import TRAINING
from g2d_jax.report import figures, tables
from g2d_jax.report import format as fmt
from g2d_jax.report.figures import Chart, Lines
from g2d_jax.report.format import Written, number, policy_name
from g2d_jax.report.page import Code, Fold, Note, Part, Report, Section, write
from g2d_jax.report.read import (
    COLLECT,
    EVALUATE,
    OFFLINE,
    SELECT,
    Run,
    Stage,
    read_parquet,
    read_run,
)
from g2d_jax.report.samples import browser
from g2d_jax.report.tables import Manifest, has_accuracy, leaves, policies, sheet, steps, table
from g2d_jax.runtime.processes import AGAIN
from g2d_jax.runtime.storage import PathLike
from g2d_jax.study.stats import t_quantile

COLUMNS = ("stage", "policy", "measure", "value")

CURVES: Mapping[str, tuple[str, ...]] = {
    "Reward": ("reward", "accuracy"),
    "Token entropy, nats": ("entropy",),
    "Completion length, tokens": (
        "completions/mean_length",
        "completions/mean_length_correct",
        "completions/mean_length_incorrect",
    ),
    "KL divergence from the reference, nats": ("kl",),
    "Spread of reward within groups": ("reward_std",),
    "Share of groups without signal": ("frac_reward_zero_std",),
    "Share of completions cut at the limit": ("completions/clipped_ratio",),
    "Length in pairs, tokens": ("pairs/chosen_length", "pairs/rejected_length"),
    "Implicit rewards": ("rewards/chosen", "rewards/rejected", "rewards/margins"),
    "Share of pairs ranked correctly": ("rewards/accuracies",),
    "Log-probability of completions, nats": ("logps/chosen", "logps/rejected"),
    "Loss": ("loss",),
    "Gradient norm": ("grad_norm",),
    "Learning rate": ("learning_rate",),
}
"""Title of a figure -> its metrics. Other metrics fold."""

OWN_AXES = ("Loss", "Learning rate")
"""Titles of figures in which each stage has a y axis of its own."""

ELSEWHERE = ("warning", "goodput")
"""Families of metrics that other sections show."""

ERRORS_NOTE = (
    "Errors are over problems: they are of these policies, and another seed of training is not "
    "in them. A study of "
    "several seeds (g2d sweep) has it."
)

TRAINING_NOTE = (
    "Every step is drawn, or the mean of neighbouring steps with their range as a band. Lines "
    "are of what a stage "
    "trained on: rollouts of the policy at its last synchronisation, or pairs. Fresh samples are "
    "of the trained policy "
    "itself, on the same prompts with the same random numbers each time; their cost is counted "
    "apart."
)

MEASURES: Mapping[str, tuple[str, Written]] = {
    "pass_rate": ("pass rate %", fmt.percent),
    "reward_variance": ("variance", fmt.fixed(3)),
    "frac_mixed": ("mixed %", fmt.percent),
    "entropy": ("entropy", fmt.fixed(3)),
    "distinct_answers": ("distinct", fmt.fixed(2)),
    "confidence": ("confidence %", fmt.percent),
    "ece": ("ECE", fmt.fixed(3)),
    "auroc": ("AUROC", fmt.fixed(3)),
    "logprob_gap": ("gap", fmt.fixed(2)),
    "mean_length": ("length", fmt.fixed(1)),
    "mean_length_correct": ("length, correct", fmt.fixed(1)),
    "mean_length_incorrect": ("length, incorrect", fmt.fixed(1)),
    "frac_truncated": ("cut at limit %", fmt.percent),
}
"""Measure of a policy's rollouts -> head of its column, and its numbers as text."""

MEANINGS = (
    "Variance is that of the reward among a prompt's completions. Mixed prompts can give pairs, "
    "or advantages: they "
    "have right and wrong completions or, where rewards only rank, different ones. Answers are "
    "counted by prompt. "
    "Entropy is a token's, in nats. Confidence is the geometric mean of a completion's token "
    "probabilities; ECE and "
    "AUROC tell whether it predicts correctness (an ECE of 0 and an AUROC of 1 are perfect, one "
    "of 0.5 is chance). "
    "The gap is the log-prob of right less that of wrong completions, in nats. Means over "
    "prompts, but for entropy "
    "(over tokens) and length (over completions, in tokens)."
)

BOTH = ("before", "after")
BEFORE = ("before", "")
AFTER = ("", "margins")
PAIR_MEASURES: Mapping[str, tuple[tuple[str, str], str, Written]] = {
    "gap in log-prob, chosen − rejected, nats": (BOTH, "gap_mean", fmt.fixed(2)),
    "its median": (BOTH, "gap_p50", fmt.fixed(2)),
    "its lowest tenth, below": (BOTH, "gap_p10", fmt.fixed(2)),
    "its highest tenth, above": (BOTH, "gap_p90", fmt.fixed(2)),
    "gap per token, nats": (BOTH, "gap_per_token", fmt.fixed(3)),
    "pairs ranked right %": (BOTH, "frac_ranked", fmt.percent),
    "length, chosen": (BEFORE, "chosen_length", fmt.fixed(1)),
    "length, rejected": (BEFORE, "rejected_length", fmt.fixed(1)),
    "implicit reward, chosen": (AFTER, "chosen_mean", fmt.fixed(2)),
    "implicit reward, rejected": (AFTER, "rejected_mean", fmt.fixed(2)),
    "implicit margin": (AFTER, "margin_mean", fmt.fixed(2)),
    "margins right %": (AFTER, "accuracy", fmt.percent),
}
"""Measure of an offline stage's pairs -> parts of its result that have it before and after training
("": none has), its name there, and its numbers as text."""


def write_run(workdir: PathLike, *, figures: bool = True) -> list[str]:
    """Write report.html, report.md, report.csv and, unless they are unwanted, figures of what a
    work directory holds.

    The run may be unfinished. Returns the paths of the first three in this order. The same work
    directory gives the same bytes. A stage with a damaged manifest is left out, with a warning.
    Raises ValueError as `read_run` does for other files, and if completions or pairs are damaged;
    OSError.
    """
    run = read_run(workdir, lenient=True)
    return write(report(run), sheet(COLUMNS, records(run)), run.workdir, "report", figures=figures)


def summary(run: Run) -> Report:
    """Put together what a notebook shows of a run: the result and the figures of training."""
    return Report(
        kind="report",
        name=run.name,
        eyebrow=_eyebrow(run),
        headline=headline(run.latest),
        warnings=[*filter(None, [state(run)]), *run.warnings],
        sections=[
            Section("results", "Result", list(_results(run, run.latest))),
            Section("curves", "Training", list(_training(run))),
        ],
    )


def report(run: Run) -> Report:
    """Put together all that there is to show of a run."""
    short = summary(run)
    results, curves = short.sections
    manifests = list(run.manifests.values())
    pairs = itertools.chain.from_iterable(map(_pairs, run.stages.values()))
    compute = [tables.compute_table(manifests, run.price), tables.goodput_table(manifests)]
    settings = [
        Code("Configuration (config.json)", run.config),
        Code("Environment (environment.json)", run.environment),
    ]
    return short._replace(
        sections=[
            results,
            Section(
                "compute",
                "Compute",
                [*compute, Fold("Programs", [tables.compiled_table(manifests)])],
            ),
            curves,
            Section("informativeness", "Informativeness", list(_informativeness(run))),
            Section("pairs", "Preference pairs", list(pairs)),
            Section("browser", "Browser", browser(run)),
            Section("settings", "Settings", settings),
        ],
    )


def _eyebrow(run: Run) -> str:
    """Say when it was measured, of which config and which seed."""
    keys = {"config": "name", "seed": "seed"}
    config = " · ".join(
        f"{title} {run.config[key]}" for title, key in keys.items() if key in run.config
    )
    measured = fmt.until(float(record["time"]) for record in run.metrics)
    return " · ".join(filter(None, ["G2D report", measured, config]))


def state(run: Run) -> str:
    """Say what an unfinished run lacks, "" if nothing."""
    begun = [f"{name}{_reached(run, name)}" for name in run.stages if name not in run.manifests]
    lists = {
        "not finished": begun,
        "not begun": [name for name in run.sections if name not in run.stages],
    }
    missing = [f"{what}: {', '.join(names)}" for what, names in lists.items() if names]
    if not missing:
        return ""
    if run.is_running:
        return f"This is the report of a run under way ({'; '.join(missing)})."
    return (
        f"This run stopped before its end ({'; '.join(missing)}), and no process works on it: "
        f"{AGAIN}."
    )


def _reached(run: Run, stage: str) -> str:
    """Name the last step that a stage logged, "" for none."""
    last = max(
        (int(record["step"]) for record in run.metrics if record["stage"] == stage), default=0
    )
    return f" at step {last}" if last else ""


def headline(evaluation: Manifest | None) -> str:
    """State the run's result in one sentence of measured numbers; a change whose 95 % interval has
    0 in it is none.

    It is of these policies on these problems: of another seed a run knows nothing. Of accuracy, or
    where there are rewards only of the first task's.
    """
    ordered = policies(evaluation)
    if not evaluation or not ordered:
        return "No policy has been evaluated yet."
    first = ordered[0]
    name = policy_name(first)
    over = tables.problems(evaluation, "held-out problems")
    if has_accuracy(evaluation):
        kind: tuple[str, ...] = ()
        accuracy = fmt.spread(number(first, "mean"), number(first, "sem_clustered"))
        parts = [f"{name} answers {accuracy} % of {over} correctly"]
    else:
        kind = ("tasks", next(iter(tables.tasks(evaluation))))
        parts = [f"{name} has a mean reward of {tables.reward(first, kind[1])} on {over}"]
    compared = tables.compared(evaluation, *kind)
    for before, after, difference, error in steps(evaluation, *kind):
        reached = f"{fmt.percent(number(after, 'mean'))} %"
        size = f"{fmt.change(difference, error)} points"
        if kind:
            reached = fmt.measured(number(after, *kind, "reward"), math.nan)
            size = fmt.measured(difference, error, sign="+")
        half = t_quantile(compared.get((before["name"], after["name"]), math.nan)) * error
        parts.append(_step(before, after, reached, difference, half, size))
    sentence = "; ".join(parts) + "."
    # Not capitalised where it begins with a path.
    if set(name) & set(":/\\"):
        return f"The policy {sentence}{_greedily(evaluation)}"
    return sentence[0].upper() + sentence[1:] + _greedily(evaluation)


def _step(
    before: Manifest, after: Manifest, reached: str, difference: float, half: float, size: str
) -> str:
    """Say how a policy compares with the one before it. half: of the 95 % interval of their
    difference."""
    name = policy_name(after)
    if math.isnan(difference) or math.isnan(half):
        return f"{name} reaches {reached} (not compared pairwise with {policy_name(before)})"
    if abs(difference) <= half:
        apart = f"the 95 % interval of its difference from {policy_name(before)} has 0 in it"
        return f"{name} is at {reached}, and {apart} ({size})"
    return f"{name} {'rises' if difference > 0 else 'falls'} to {reached} ({size})"


def _greedily(evaluation: Manifest) -> str:
    """State the result of greedy answers, which a lower temperature does not change; "" where none
    were compared."""
    compared = steps(evaluation, "greedy")
    if not compared:
        return ""
    text = f" Decoded greedily: {fmt.percent(number(compared[0][0], 'greedy'))} %"
    for _, after, difference, error in compared:
        if math.isnan(difference):
            return ""
        text += f", then {fmt.percent(number(after, 'greedy'))} % ({fmt.change(difference, error)})"
    return f"{text}."


def _results(run: Run, latest: Manifest | None) -> Iterator[Part | None]:
    """Build the last evaluation's tables and figures, the chosen checkpoints, and earlier
    evaluations folded."""
    if latest is not None:
        yield tables.summary_table(latest, run.manifests.values())
        yield Note(ERRORS_NOTE)
        yield tables.tasks_table(latest)
        yield tables.verdicts_table(latest)
        bars = [(policy_name(policy), *_interval(policy)) for policy in policies(latest)]
        note = "Bars: 95 %, over problems only; another seed is not in them."
        yield figures.intervals("accuracy", "Accuracy (pass@1), %", bars, note=note)
        yield _pass_at(policies(latest))
        yield Fold(
            "Other comparisons, and subsets",
            [tables.paired_table(latest), tables.subsets_table(latest)],
        )
    for manifest in run.manifests.values():
        if manifest.get("kind") == SELECT:
            yield tables.selection_table(manifest)
    for stage in run.evaluations[:-1]:
        yield Fold(f"Earlier evaluation: {stage.name}", [tables.summary_table(stage.manifest, ())])


def _interval(policy: Manifest) -> tuple[float, float, float]:
    """Return an accuracy in percent and the ends of its 95 % interval over problems, NaN where
    there is none.

    The ends are cut at 0 and 100, as those of `frontier.mean_interval` are.
    """
    mean = 100 * number(policy, "mean")
    half = 100 * t_quantile(number(policy, "problems")) * number(policy, "sem_clustered")
    low, high = np.clip((mean - half, mean + half), 0.0, 100.0)
    return mean, float(low), float(high)


def _pass_at(ordered: Sequence[Manifest]) -> Chart | None:
    ks = tables.pass_at_ks(ordered)
    if len(ks) <= 1:
        return None
    lines = {}
    for policy in ordered:
        lines[policy_name(policy)] = ks, [100 * number(policy, "pass_at", str(k)) for k in ks]
    note = "Chance that one of k answers is right: the unbiased estimator."
    return figures.curves("pass-at-k", "pass@k, %", {"": lines}, x_title="k", note=note)


def _training(run: Run) -> Iterator[Part | None]:
    """Build the counts of training, and metrics over steps, stages side by side."""
    counts = {
        name: {**manifest.get("counts", {}), "generation": manifest.get("generation", {})}
        for name, manifest in run.manifests.items()
        if manifest.get("kind") in TRAINING
    }
    yield tables.counts_table("What training did", counts)
    logged = logged_metrics(run)
    charts = [
        _curves(logged, title, names, title not in OWN_AXES) for title, names in CURVES.items()
    ]
    if any(charts):
        yield Note(TRAINING_NOTE)
    yield from charts
    drawn = set(itertools.chain.from_iterable(CURVES.values()))
    there = {name for _, name in itertools.chain.from_iterable(logged.values())}
    families: dict[str, list[str]] = {}
    for name in sorted(there - drawn):
        families.setdefault(name.rpartition("/")[0] or name, []).append(name)
    others = [_curves(logged, family, names, False) for family, names in families.items()]
    yield Fold(f"More metrics ({len(others)})", [chart for chart in others if chart is not None])


Logged = Mapping[str, Mapping[tuple[str, str], Sequence[tuple[float, float]]]]
"""Stage -> (kind of log, metric) -> points (step, value) ascending, of what was logged more than
once."""


def logged_metrics(run: Run) -> Logged:
    """Read what the run's stages logged on their way, in the order of their folders; evaluations
    are in the result."""
    points: dict[str, dict[tuple[str, str], list[tuple[float, float]]]] = {
        name: {} for name in run.stages
    }
    evaluations = {name for name, stage in run.stages.items() if stage.kind == EVALUATE}
    for record in run.metrics:
        stage, kind = str(record["stage"]), str(record["kind"])
        if stage in evaluations or kind.partition("/")[0] in ELSEWHERE:
            continue
        for name, value in record["metrics"].items():
            if name.partition("/")[0] not in ELSEWHERE:
                points.setdefault(stage, {}).setdefault((kind, name), []).append(
                    (record["step"], value)
                )
    for stage, metrics in points.items():
        points[stage] = {key: sorted(values) for key, values in metrics.items() if len(values) > 1}
    return points


def _curves(logged: Logged, title: str, names: Sequence[str], share: bool) -> Chart | None:
    panels: dict[str, Lines] = {}
    for stage, metrics in logged.items():
        lines: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
        for (kind, name), points in metrics.items():
            if name in names:
                xs, ys = zip(*points, strict=True)
                lines[name + {"train": "", "probe": ", fresh"}.get(kind, f" ({kind})")] = xs, ys
        if lines:
            panels[stage] = lines
    return figures.curves(title.partition(",")[0].lower(), title, panels, share=share)


def _informativeness(run: Run) -> Iterator[Part | None]:
    """Show how much rollouts of each policy can teach."""
    rows = []
    for stage in run.stages.values():
        measured = [(entry, entry.get("informativeness", {})) for entry in stage.policies.values()]
        if stage.kind == COLLECT:
            policy = (
                stage.json("preferences/_manifest.json").get("policy")
                or stage.section.get("policy")
                or stage.name
            )
            measured.append(({"name": str(policy)}, stage.json("informativeness.json")))
        for entry, values in measured:
            cells = {
                head: written(number(values, name)) for name, (head, written) in MEASURES.items()
            }
            if values:
                rows.append({"policy": policy_name(entry), "rollouts of": stage.name, **cells})
    yield Note(MEANINGS)
    yield table("Rollouts of each policy", rows)
    for stage in run.stages.values():
        yield _pass_rates(stage)


def _pass_rates(stage: Stage) -> Chart | None:
    """Draw how hard a collection's prompts were: the share of prompts by pass rate."""
    file = stage.folder / "informativeness" / "prompts.parquet"
    if not file.exists():
        return None
    columns = read_parquet(file, ["pass_rate", "scored"]).to_pydict()
    rates = np.asarray(columns["pass_rate"], np.float64)
    scored = np.asarray(columns["scored"])
    is_rated = ~np.isnan(rates)
    if not is_rated.any():
        return None
    samples = set(scored[is_rated].tolist())
    bins = (
        samples.pop() if len(samples) == 1 and max(samples) <= 32 else 10
    )  # one for each number of right answers
    counts = np.bincount(np.round(rates[is_rated] * bins).astype(int), minlength=bins + 1)
    lines = {"share": (np.arange(bins + 1) / bins, 100 * counts / is_rated.sum())}
    unrated = int(np.sum(~is_rated))
    note = f"Pass rates in steps of 1/{bins}. Prompts at 0 and 1 give no pairs."
    if unrated:
        note += f" {fmt.count(unrated)} prompts have no pass rate and are left out."
    title = f"Prompts of {stage.name} by pass rate, %"
    return figures.curves(
        f"pass-rates-{stage.name}", title, {"": lines}, x_title="pass rate", note=note
    )


def _pairs(stage: Stage) -> Iterator[Part | None]:
    """Build the fates of a collection's prompts; pairs under the policy before and after training
    on them."""
    if stage.kind == COLLECT:
        counts = stage.manifest.get("counts", {})
        yield tables.counts_table(
            f"What became of the prompts of {stage.name}", {stage.name: counts}
        )
        provenance = stage.json("preferences/_manifest.json")
        yield Code(f"How {stage.name} made its pairs (preferences/_manifest.json)", provenance)
    if stage.kind == OFFLINE:
        rows = []
        for name, ((before, after), key, written) in PAIR_MEASURES.items():
            start = number(stage.manifest, "result", before, key)
            end = number(stage.manifest, "result", after, key)
            row = {"measure": name, "before": written(start), "after": written(end)}
            if written is fmt.percent:
                row["change"] = fmt.change(end - start, math.nan)
            elif not math.isnan(end - start):
                row["change"] = f"{end - start:+.3g}"
            if not math.isnan(start) or not math.isnan(end):
                rows.append(row)
        yield table(f"The pairs under the policy before and after {stage.name}", rows)


def records(run: Run) -> Iterator[tuple[str, str, str, float]]:
    """Yield all figures of the finished stages, in their order: cost and counts, then those of each
    policy.

    stage, policy ("" for a stage's own figures), measure, value. measure is a path such as
    "tokens/generated", "pass_at/4", "informativeness/ece" or, of a policy compared with one before
    it, "paired/sft/difference". Units are
    those of the manifests: fractions, seconds, tokens, nats.
    """
    for name, manifest in run.manifests.items():
        stage = run.stages[name]
        rollouts = stage.json("informativeness.json") if stage.kind == COLLECT else {}
        figures = {**dict(leaves(rollouts, "informativeness/")), **dict(leaves(manifest))}
        yield from ((name, "", *figure) for figure in figures.items())
        if stage.kind != EVALUATE:
            continue
        for policy, entry in stage.policies.items():
            yield from ((name, policy, *figure) for figure in leaves(entry))
        for pair in manifest.get("result", {}).get("paired", ()):
            tasks = {f"{task}/": values for task, values in pair.get("tasks", {}).items()}
            for prefix, values in {"": pair, "greedy/": pair.get("greedy", {}), **tasks}.items():
                for measure in ("difference", "sem"):
                    if measure in values:
                        path = f"paired/{pair['before']}/{prefix}{measure}"
                        yield name, str(pair["after"]), path, number(values, measure)
