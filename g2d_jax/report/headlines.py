"""Say in a sentence what was found: of a run, of a study, of runs side by side.

The sentence stands below the name of a page (`page.Report.headline`), on a card and in the
terminal: the one place for what a reader is told first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from g2d_jax.report import format as fmt
from g2d_jax.report import paired_differences as paired
from g2d_jax.report.format import number, policy_name
from g2d_jax.report.rows import Row, Study, policies_of, rows_of, start_of
from g2d_jax.report.tables import (
    Manifest,
    Step,
    has_accuracy,
    policies,
    problems,
    reward,
    steps,
    tasks,
)
from g2d_jax.runtime.terminal import counted
from g2d_jax.study.stats import t_quantile


def run_headline(evaluation: Manifest | None) -> str:
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
    over = problems(evaluation, "held-out problems")
    if has_accuracy(evaluation):
        kind: tuple[str, ...] = ()
        accuracy = fmt.spread(number(first, "mean"), number(first, "sem_clustered"))
        parts = [f"{name} answers {accuracy} % of {over} correctly"]
    else:
        kind = ("tasks", next(iter(tasks(evaluation))))
        parts = [f"{name} has a mean reward of {reward(first, kind[1])} on {over}"]
    for step in steps(evaluation, *kind):
        reached = f"{fmt.percent(number(step.after, 'mean'))} %"
        size = f"{fmt.change(step.difference, step.error)} points"
        if kind:
            reached = fmt.measured(number(step.after, *kind, "reward"), math.nan)
            size = fmt.measured(step.difference, step.error, sign="+")
        parts.append(_compared(step, reached, size))
    sentence = "; ".join(parts) + "."
    # Not capitalised where it begins with a path.
    if set(name) & set(":/\\"):
        return f"The policy {sentence}{_greedily(evaluation)}"
    return sentence[0].upper() + sentence[1:] + _greedily(evaluation)


def _compared(step: Step, reached: str, size: str) -> str:
    """Say how a policy compares with the one before it: by the 95 % interval of their
    difference."""
    name, before = policy_name(step.after), policy_name(step.before)
    half = t_quantile(step.problems) * step.error
    if math.isnan(step.difference) or math.isnan(half):
        return f"{name} reaches {reached} (not compared pairwise with {before})"
    if abs(step.difference) <= half:
        apart = f"the 95 % interval of its difference from {before} has 0 in it"
        return f"{name} is at {reached}, and {apart} ({size})"
    return f"{name} {'rises' if step.difference > 0 else 'falls'} to {reached} ({size})"


def _greedily(evaluation: Manifest) -> str:
    """State the result of greedy answers, which a lower temperature does not change; "" where none
    were compared."""
    compared = steps(evaluation, "greedy")
    if not compared or any(math.isnan(step.difference) for step in compared):
        return ""
    reached = [f"{fmt.percent(number(compared[0].before, 'greedy'))} %"]
    for step in compared:
        size = fmt.change(step.difference, step.error)
        reached.append(f"{fmt.percent(number(step.after, 'greedy'))} % ({size})")
    return f" Decoded greedily: {', then '.join(reached)}."


def comparison_headline(runs: Study) -> str:
    """Say in one sentence which of the runs' last policies is best, and by how much before the next
    on these problems.

    Never that one way of training is better: each policy is of one seed.
    """
    best, second = sorted(runs.last, key=lambda row: -row.accuracy.mean)[:2]
    pair = paired.compare(second, best)
    count = len(runs.problems)
    over = counted(count, "common problem")
    reached = (
        f"{best.name} answers {fmt.percent(best.accuracy.mean)} % of {over} correctly"
        f"{for_flops(best.costs['flops'])}, {second.name} {fmt.percent(second.accuracy.mean)} %"
        f"{for_flops(second.costs['flops'])}"
    )
    if math.isnan(pair.low):
        return (
            f"{reached}: {fmt.percent(pair.difference)} points apart, too few problems for an "
            "interval."
        )
    interval = f"[{100 * pair.low:.1f}, {100 * pair.high:.1f}]"
    return (
        f"{reached}: these two policies differ on them by {fmt.percent(pair.difference)} points "
        f"{interval} (95 %, over problems; another seed is not in it)."
    )


def for_flops(amount: float) -> str:
    """Say what a policy cost, " for 448 GFLOPs", "" where that is not known or nothing."""
    return f" for {flops(amount)}" if amount > 0 else ""


def study_headline(study: Study) -> str:
    """Answer the study's question: which K, or setting, was chosen on dev, what it reaches, and
    what that costs.

    Where that cannot be said it says what to run. Of a study of online training alone it has every
    arm.
    """
    if not study.policies:
        return f"No point of this study is finished and tested yet. To go on: {command(study)}"
    arms = study.spectrum
    if arms and not study.offline:
        return _span(arms)
    answers = []
    undecided: list[Row] = []
    for what, rows in _questions(study):
        row = paired.chosen(rows)
        if row is None:
            answers.append(_span_of(what, rows))
            undecided += rows
        else:
            answers.append(_chosen(study, row, rows))
    if undecided:
        answers.append(_advice(study, undecided))
    return f"On {fmt.count(len(study.problems))} test problems: {' '.join(answers)}"


def _questions(study: Study) -> list[tuple[str, list[Row]]]:
    """List what is to be chosen, each with its rows: K where it is swept, else an arm's setting,
    else a policy."""
    swept = [("K", group.rows) for group in study.swept if not group.stops]
    if swept:
        return swept
    by_arm: dict[str, list[Row]] = {}
    for group in study.offline:
        by_arm.setdefault(f"the setting of {group.arm}", []).extend(group.rows)
    several = [(what, rows) for what, rows in by_arm.items() if len(rows) > 1]
    return several or [("the best policy", study.rows)]


def _chosen(study: Study, row: Row, rows: Sequence[Row]) -> str:
    candidates = len(paired.comparable(rows))
    among = f" among {candidates} of {len(rows)}" if candidates < len(rows) else ""
    text = f"{row.name}, chosen on dev{among}, answers {fmt.interval(row.accuracy)} % correctly"
    every = rows_of((*study.groups, *study.warmups))
    alike = [other for other in every if {*other.seeds} >= {*row.seeds}]
    best = max(alike, key=lambda other: other.accuracy.mean)
    lost = paired.difference(row, best)
    spent, most = row.costs["flops"], best.costs["flops"]
    if best is row:
        text += f", the most of all rows with these seeds, for {flops(spent)}"
    elif lost is None:
        text += f" for {flops(spent)}; {best.name} is about other problems"
    else:
        interval = fmt.interval(lost, "+").partition(" ")[2]
        text += (
            f", {-100 * lost.mean:.1f} points below the best, {best.name} (difference {interval})"
        )
        text += f", for {flops(spent)}"
        if most and not math.isnan(spent / most):
            text += f" or {100 * spent / most:.0f} % of its compute"
    if row.gain is not None:
        added = fmt.interval(row.gain, "+", len(row.seeds))
        text += f"; its last training added {added} points"
    baseline = paired.best_at(study, row)
    if baseline and (advantage := paired.advantage(row, baseline)) is not None:
        ahead = fmt.interval(advantage, "+", len(row.seeds))
        text += f"; against {baseline.name} at these FLOPs it has {ahead} points"
    return f"{text}."


def _span_of(what: str, rows: Sequence[Row]) -> str:
    means = [row.accuracy.mean for row in rows]
    text = (
        f"{len(rows)} settings answer {fmt.percent(min(means))} to {fmt.percent(max(means))} % "
        "correctly"
    )
    return f"{text}; {what} cannot be chosen."


def _advice(study: Study, rows: Sequence[Row]) -> str:
    """Say what to run for a setting to be chosen among rows."""
    missing = sorted({policy.name for policy in policies_of(rows) if not policy.result("dev")})
    if not missing:
        return f"No row has all seeds yet. To finish them: {command(study)}"
    names = "".join(f'"{name}", ' for name in missing).rstrip()
    return (
        f"{', '.join(missing)} {'were' if len(missing) > 1 else 'was'} not evaluated on dev. Add "
        f'config.stages.dev = settings.evaluate(policies=({names}), split="dev") to the config '
        f"and run again, what is finished is kept: {command(study)}"
    )


def _span(rows: Sequence[Row]) -> str:
    start = start_of(rows)
    updates = {f"{row.steps:g}" for row in rows}
    text = f"On {fmt.count(len(rows[0].ids))} test problems"
    if start:
        text += f", from {start.name} ({fmt.percent(start.accuracy.mean)} %)"
    if len(updates) == 1:
        text += f", after {updates.pop()} updates"
    verb = " answers"
    reached = []
    for row in rows:
        reached.append(f"{row.name}{verb} {fmt.interval(row.accuracy)} %")
        verb = ""
    return f"{text}: {', '.join(reached)} correctly."


def flops(amount: float) -> str:
    """Format an amount of compute, "2.58 TFLOPs"."""
    text = fmt.quantity(amount)
    return f"{text}{' ' * text[-1:].isdigit()}FLOPs"


def command(study: Study) -> str:
    """Return the command that made the study, as its last stages have it: the first ones may be
    another study's.

    It goes on with what is not finished.
    """
    for policy in study.policies:
        for stage in reversed([*policy.run.stages.values()]):
            words = list(stage.environment.get("command", ()))[1:]
            if words[:1] == ["sweep"]:
                return " ".join(["g2d", *map(str, words)])
    return f"g2d sweep --config CONFIG --workdir {study.workdir}"
