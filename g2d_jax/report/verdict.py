"""Verdicts on how much online RL is enough: of a run, a study and a comparison, as records and
sentences.

A verdict follows its 95 % intervals: a change whose interval includes 0 is inconclusive, and an
undecided study names the command that adds to it.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jinja2

from g2d_jax.config.policy_name import own_stage
from g2d_jax.report import format as fmt
from g2d_jax.report import paired_differences as paired
from g2d_jax.report.frame import Policy
from g2d_jax.report.rows import Row, Study, flat
from g2d_jax.report.runs import COLLECT, OFFLINE, ONLINE, Run
from g2d_jax.report.tables import count_problems, has_accuracy, ranked
from g2d_jax.runtime.terminal import counted
from g2d_jax.session.stage_result import NOT_COMPARED, Evaluation
from g2d_jax.study.frontier import Interval
from g2d_jax.study.stats import Paired, t_quantile

MARGIN = 0.02
"""A policy is as good as the best if the 95 % interval of its difference is above minus this
accuracy."""

_SENTENCES = jinja2.Environment(autoescape=False, undefined=jinja2.StrictUndefined)
"""Sentences are plain text: the page escapes them."""


# A run


@dataclass(frozen=True)
class RunVerdict:
    """The last policy evaluated: its training, accuracy and cost.

    score, error: its accuracy, otherwise the mean reward of the first task that only ranks;
    standard error clustered by problem. problems: of the evaluation. flops: its cost, NaN if
    unknown. before: the first policy evaluated, "" if the last was not trained from it. gain: over
    `before`. loss, added: the last training if offline, otherwise "", and its gain. Intervals are
    over problems, for one seed.
    """

    made_by: str
    is_accuracy: bool
    score: float
    error: float
    problems: str
    flops: float
    before: str
    gain: Interval
    loss: str
    added: Interval

    @property
    def share(self) -> float:
        """The share of the gain from the last offline training; NaN if one of both is inconclusive
        or a loss."""
        conclusive = self.gain.conclusive and self.added.conclusive
        if not conclusive or min(self.gain.mean, self.added.mean) < 0:
            return math.nan
        return min(self.added.mean / self.gain.mean, 1.0)


_RUN = _SENTENCES.from_string(
    "{{ v.made_by }}: {% if v.is_accuracy %}{{ score }} % right on {{ v.problems }}"
    "{% else %}mean reward {{ score }} on {{ v.problems }}{% endif %}"
    "{% if v.flops > 0 %},{{ for_flops(v.flops) }}{% endif %}."
    "{% if v.before %} "
    "{% if not v.gain.conclusive %}No significant change from {{ v.before }}: {{ size(v.gain) }}."
    "{% elif v.share >= 0 %}{{ '%.0f' % (100 * v.share) }} % of the gain over {{ v.before }}, "
    "{{ size(v.gain) }}, came from {{ v.loss }}."
    "{% else %}{{ 'Worse' if v.gain.mean < 0 else 'Better' }} than {{ v.before }}: {{ size(v.gain) }}."
    "{% if v.loss and v.gain.mean > 0 %} {{ v.loss }} made "
    "{{ 'it worse' if v.added.conclusive else 'no significant change' }}: {{ size(v.added) }}."
    "{% endif %}{% endif %}{% endif %}"
)


def run_verdict(run: Run) -> RunVerdict | None:
    """Judge the last policy of a run's final evaluation; None without a scored one."""
    evaluation = run.latest
    if evaluation is None or not evaluation.policies:
        return None
    first, last = evaluation.policies[0], evaluation.policies[-1]
    task = None if has_accuracy(evaluation) else ranked(evaluation)[0]
    score, error = last.accuracy.mean, last.accuracy.sem_clustered
    if task is not None:
        score, error = last.tasks[task].reward, last.tasks[task].sem
    if math.isnan(score):
        return None
    policy = Policy(run, last.name)
    before = loss = ""
    if first is not last and first.name in policy.chain:
        before = fmt.policy_name(first.name, first.label)
    if policy.kind == OFFLINE and policy.parent != first.name:
        loss = offline_loss(policy.loss)

    def change(other: str) -> Interval:
        """Return its gain over another policy, with the interval over problems."""
        found = evaluation.change(other, last.name)
        pair = found.sampled if task is None else found.tasks.get(task, NOT_COMPARED)
        return _interval(pair)

    return RunVerdict(
        made_by=_made_by(policy),
        is_accuracy=task is None,
        score=score,
        error=error,
        problems=count_problems(evaluation, "problems"),
        flops=policy.flops,
        before=before,
        gain=change(first.name if before else ""),
        loss=loss,
        added=change(policy.parent if loss else ""),
    )


def _interval(pair: Paired) -> Interval:
    half = t_quantile(pair.problems) * pair.sem
    low, high = pair.difference - half, pair.difference + half
    return Interval(pair.difference, low, high, 1, pair.problems)


def run_sentence(verdict: RunVerdict | None) -> str:
    """Write a run's verdict, "" for none."""
    if verdict is None:
        return ""
    written = fmt.spread if verdict.is_accuracy else fmt.measured

    def size(change: Interval) -> str:
        if verdict.is_accuracy:
            return fmt.interval(change, "+") + " points"
        ends = (change.mean, change.low, change.high)
        return "{} [{}, {}]".format(*(fmt.measured(end, math.nan, sign="+") for end in ends))

    score = written(verdict.score, verdict.error)
    return _RUN.render(v=verdict, score=score, size=size, for_flops=for_flops)


LOSSES = {"dpo": "DPO", "sigmoid": "DPO", "sigmoid_norm": "DPO", "simpo": "SimPO"}
"""Losses of offline training -> their names in a report; other names are written in capitals."""

UPDATES = {"raft": "RAFT", "dpo": "online DPO", "group_dpo": "online group DPO"}
"""Losses of online training other than GRPO -> their names."""


def offline_loss(name: str) -> str:
    """Return the name of an offline loss in a report: "DPO", "SimPO", "IPO" and so on."""
    return LOSSES.get(name, name.upper())


def _made_by(policy: Policy) -> str:
    """Name the training of a policy: "10 GRPO updates, then DPO"."""
    phases: list[list[Any]] = []
    for name in reversed(policy.chain):
        section = policy.run.sections.get(own_stage(name), {})
        if section.get("kind") == OFFLINE:
            pairs = policy.run.sections.get(str(section.get("preferences", "")), {})
            how = offline_loss(str(section.get("loss_type", "sigmoid")))
            if pairs.get("kind") != COLLECT:
                how += " on pairs from a file"
            elif pairs.get("policy") != section.get("policy"):
                how += f" on rollouts of {pairs.get('policy')}"
            phases.append([how, math.nan])
        elif section.get("kind") == ONLINE:
            every = section.get("sync_every", 1)
            how = f"{UPDATES.get(str(section.get('loss')), 'GRPO')} update"
            if not every:
                how = f"offline {how}"
            # Several updates on one batch still count as online.
            elif every > section.get("num_iterations", 1):
                how = f"semi-online {how}"
            if not phases or phases[-1][0] != how:
                phases.append([how, 0.0])
            phases[-1][1] += policy.steps_of(name)
    names = [how if math.isnan(steps) else counted(steps, how) for how, steps in phases]
    made = ", then ".join(names) or f"The policy {policy.name}"
    return f"{made}, from {policy.start}" if policy.start else made


# A study

Finding = Literal[
    "enough", "alone", "none", "dearer", "inconclusive", "chosen", "undecided", "unfinished"
]


@dataclass(frozen=True)
class StudyVerdict:
    """The policy that comes within `MARGIN` of the best GRPO for the least cost.

    finding: "enough": `row`, a K with offline training, does, and no GRPO alone for less. "alone":
    GRPO alone does for less; `row` is the cheapest K that does. "none": every cheaper K is worse
    beyond `MARGIN`; `row` is the nearest. "inconclusive": the intervals are too wide; `row` is the
    nearest. "dearer": every K costs more than the best GRPO; `row` is the highest. For a study
    without both GRPO and K: "chosen": `row` is the best on dev. "undecided": dev cannot choose;
    `row` is the best on test. "unfinished": no point is tested. best: the best GRPO, chosen on dev;
    for "chosen" the row that others are compared with, if there are more. alone: the cheapest GRPO
    that comes near. difference: of `row` from `best`, in accuracy. measure: of costs, "flops" or
    "hours". command: continues the study.
    """

    finding: Finding
    command: str
    row: Row | None = None
    best: Row | None = None
    alone: Row | None = None
    difference: Interval | None = None
    measure: str = "flops"

    def share(self, row: Row) -> float:
        """Return a row's cost over that of the best GRPO."""
        cost = self.best.mean(self.measure) if self.best else math.nan
        return row.mean(self.measure) / cost if cost else math.inf


_STUDY: Mapping[Finding, str] = {
    "unfinished": "No point of this study is finished and tested yet. To continue: {{ v.command }}",
    "undecided": "{{ v.row.name }} is the most accurate ({{ at(v.row) }}), but choosing one needs "
    "the dev split: {% if v.row.mean('dev') >= 0 %}finish all seeds with "
    "{{ v.command }}{% else %}add an evaluate stage with split='dev'.{% endif %}",
    "chosen": "{{ v.row.name }}{% if v.best %}, chosen on dev{% endif %}: "
    "{{ interval(v.row.accuracy) }} % of {{ counted(v.row.accuracy.problems, 'test problem') }} "
    "solved,{{ for_flops(v.row.mean('flops')) }}."
    "{% if v.difference %} The difference from {{ v.best.name }} is "
    "{{ interval(v.difference, '+') }} points with {{ counted(v.difference.seeds, 'seed') }}."
    "{% endif %}",
    "enough": "{{ v.row.name }} is enough: it comes within {{ margin }} of {{ best }} for "
    "{{ share(v.row) }} of its {{ unit }}. {{ reached }} GRPO alone needs {{ share(v.alone) }} to come as near.",
    "alone": "GRPO alone is enough: {{ v.alone.name }} comes within {{ margin }} of {{ best }} for "
    "{{ share(v.alone) }} of its {{ unit }}, {{ v.row.name }} for {{ share(v.row) }}. {{ reached }}",
    "none": "No tested K is enough: none is within {{ margin }} of {{ best }} for less. {{ reached }}",
    "dearer": "Every tested K costs more than {{ best }}. {{ reached }}",
    "inconclusive": "Too few seeds to decide if a K comes within {{ margin }} of {{ best }} for "
    "less. {{ reached }} Add --seeds to: {{ v.command }}",
}
"""Finding -> its sentence."""


def study_verdict(study: Study) -> StudyVerdict:
    """Judge a study.

    Dev chooses the best GRPO, and each K's setting. A K counts only with exactly the seeds of the
    best GRPO. Within: the 95 % interval of the difference is above -`MARGIN`.
    """
    if (found := _near_best(study)) is not None:
        return found
    if not study.rows:
        return StudyVerdict("unfinished", command(study))
    if (row := paired.chosen(study.rows)) is not None:
        other = paired.reference(study) or row
        apart = paired.difference(row, other) if other is not row else None
        best = other if len(study.rows) > 1 else None
        return StudyVerdict("chosen", command(study), row, best, difference=apart)
    row = max(study.rows, key=lambda row: row.accuracy.mean)
    return StudyVerdict("undecided", command(study), row)


def _near_best(study: Study) -> StudyVerdict | None:
    """Judge if a K is enough; None for a study without both GRPO and K, or with unknown costs."""
    grpo = paired.comparable(flat(study.baselines))
    best = paired.chosen(grpo)
    by_k: dict[float, list[Row]] = {}
    for one in flat(study.offline):
        if not one.stops:
            by_k.setdefault(one.mean("K"), []).append(one)
    if best is None or len(grpo) < 2 or len(by_k) < 2 or study.spectrum:
        return None
    measure = "flops" if study.rates is None else "hours"
    # The same seeds: otherwise the difference would not match the accuracies next to it.
    settings = []
    for rows in by_k.values():
        row = paired.chosen(rows)
        if row is not None and {*best.seeds} == {*row.seeds} and row.ids == best.ids:
            settings.append(row)
    cost = {row: row.mean(measure) for row in (*grpo, *settings)}
    if not settings or any(map(math.isnan, cost.values())):
        return None
    apart = {row: paired.difference(row, best) for row in cost}

    def cheapest(rows: Sequence[Row]) -> Row | None:
        near = [row for row in rows if apart[row].low >= -MARGIN]
        return min(near, key=cost.__getitem__, default=None)

    cheaper = [row for row in settings if cost[row] < cost[best]]
    alone = cheapest(grpo) or best  # the best itself is near
    row = cheapest(cheaper)
    finding: Finding = "enough"
    if row is not None and cost[alone] < cost[row]:
        finding = "alone"
    if row is None:
        row = max(cheaper or settings, key=lambda other: apart[other].mean)
        finding = "inconclusive"
        is_judged = len(settings) == len(by_k)  # every K
        if is_judged and all(apart[other].high < -MARGIN for other in cheaper):
            finding = "none"
        if not cheaper:
            finding = "dearer"
    return StudyVerdict(finding, command(study), row, best, alone, apart[row], measure)


def study_sentence(verdict: StudyVerdict) -> str:
    """Write a study's verdict."""
    by_flops = verdict.measure == "flops"

    def at(row: Row) -> str:
        cost = row.mean(verdict.measure)
        spent = for_flops(cost) if by_flops else f" for {fmt.duration(3600 * cost)}"
        return f"{fmt.percent(row.accuracy.mean)} %{spent}"

    row, best = verdict.row, verdict.best
    reached = ""
    if row is not None and (apart := verdict.difference) is not None:
        reached = (
            f"{row.name} reaches {at(row)}, a difference of "
            f"{fmt.interval(apart, '+')} points on {counted(apart.problems, 'test problem')} with "
            f"{counted(apart.seeds, 'seed')}."
        )
    return _SENTENCES.from_string(_STUDY[verdict.finding]).render(
        v=verdict,
        at=at,
        best=f"the best GRPO alone ({best.name}: {at(best)})" if best else "",
        reached=reached,
        margin=f"{100 * MARGIN:.0f} points",
        unit="FLOPs" if by_flops else "time",
        share=lambda row: f"{100 * verdict.share(row):.0f} %",
        interval=fmt.interval,
        counted=counted,
        for_flops=for_flops,
    )


def for_flops(amount: float) -> str:
    """Return a policy's cost, " for 448 GFLOPs", "" if unknown or zero."""
    if amount > 0:
        return f" for {flops(amount)}"
    return ""


def flops(amount: float) -> str:
    """Format an amount of compute, "2.58 TFLOPs"."""
    text = fmt.quantity(amount)
    return f"{text}{' ' * text[-1:].isdigit()}FLOPs"


def command(study: Study) -> str:
    """Return the command of the study, from its last stages, since the first may be another
    study's.

    It continues unfinished points, in the current folder of the study.
    """
    place = f"--workdir {shlex.quote(str(study.workdir))}"
    for run in study.runs:
        for stage in reversed([*run.folders]):
            words = [*map(str, run.environment_of(stage).get("command", ()))][1:]
            if words[:1] == ["sweep"]:
                return f"g2d sweep {shlex.join(_without_workdir(words[1:]))} {place}"
    return f"g2d sweep --config CONFIG {place}"


def _without_workdir(words: Sequence[str]) -> list[str]:
    """Remove a command's work directory, which may be a positional argument."""
    kept = []
    option = ""
    for word in words:
        if word.startswith("-"):
            option = word
        if option and not option.startswith("--workdir"):
            kept.append(word)
        if not word.startswith("-") or "=" in word:
            option = ""
    return kept


# Runs side by side


def comparison_sentence(last: Sequence[Row]) -> str:
    """Compare the best of the runs' last policies with the next best, on the problems scored for
    both.

    It makes no claim about training methods: each policy has one seed.
    """
    best, second = sorted(last, key=lambda row: -row.accuracy.mean)[:2]
    texts = []
    for row in (best, second):
        cost = for_flops(row.mean("flops"))
        texts.append(f"{row.name} {fmt.percent(row.accuracy.mean)} %{cost}")
    apart = paired.difference(best, second)
    return (
        f"{', '.join(texts)}. On {counted(apart.problems, 'common problem')} the difference is "
        f"{fmt.interval(apart, '+')} points. It reflects the choice of problems only, not another "
        "seed of training."
    )


def no_verdict(evaluation: Evaluation | None, has_stage: bool) -> str:
    """Return why a run has no verdict, "" if it has an evaluation."""
    if evaluation is not None and evaluation.policies:
        return ""
    if not has_stage:
        return "No stage of this run evaluates a policy."
    return "No policy has been evaluated yet."
