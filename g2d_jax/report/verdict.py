"""Verdicts on how much online RL is enough: records of a run, a study and a comparison, and the
sentences made from them.

A record says no more than its 95 % intervals do: a change whose interval has 0 in it is
inconclusive, and a study that cannot decide names the command that adds to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jinja2

from g2d_jax.config.policy_name import own_stage
from g2d_jax.report import format as fmt
from g2d_jax.report import paired_differences as paired
from g2d_jax.report.frame import Policy
from g2d_jax.report.rows import Row, Study, flat, policies_of
from g2d_jax.report.runs import COLLECT, OFFLINE, ONLINE, Run, Settings
from g2d_jax.report.tables import count_problems, has_accuracy, ranked
from g2d_jax.runtime.terminal import counted
from g2d_jax.stage_result import NOT_COMPARED, Change, Evaluated, Evaluation
from g2d_jax.study.frontier import Interval
from g2d_jax.study.stats import Paired, t_quantile

MARGIN = 0.02
"""A policy is as good as the best where the 95 % interval of its difference lies above minus this
much accuracy."""

_SENTENCES = jinja2.Environment(autoescape=False, undefined=jinja2.StrictUndefined)
"""Sentences are plain text: the page escapes them."""


def interval_of(pair: Paired) -> Interval:
    """Return a paired difference with its 95 % interval over problems, of one seed."""
    half = t_quantile(pair.problems) * pair.sem
    low, high = pair.difference - half, pair.difference + half
    return Interval(pair.difference, low, high, 1, pair.problems)


# A run


@dataclass(frozen=True)
class RunVerdict:
    """The last policy evaluated: its training, accuracy and cost.

    score, error: its accuracy, or where there is none the mean reward of the first task without
    right and wrong; standard error clustered by problem. problems: what it was evaluated on. flops:
    of making it, NaN if not known. before: the first policy evaluated, "" if the last was not made
    from it. gain: over that. loss, added: the last training where that was offline, "" else, and
    what it added. Intervals are over problems: another seed is not in them.
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
        """The share of the gain that the last offline training added; NaN where one of both is
        inconclusive or a loss."""
        conclusive = self.gain.conclusive and self.added.conclusive
        if not conclusive or min(self.gain.mean, self.added.mean) < 0:
            return math.nan
        return min(self.added.mean / self.gain.mean, 1.0)


_RUN = _SENTENCES.from_string(
    "{{ v.made_by }}: {{ score }} {{ '% of' if v.is_accuracy else 'mean reward on' }} "
    "{{ v.problems }}{{ for_flops(v.flops) }}"
    "{% if known(v.gain) %}; "
    "{% if not v.gain.conclusive %}the change from {{ v.before }} is inconclusive "
    "({{ size(v.gain) }})"
    "{% elif v.gain.mean < 0 %}worse than {{ v.before }} by {{ size(v.gain) }}"
    "{% elif known(v.share) %}{{ percent(v.share) }} % of the gain over {{ v.before }} "
    "({{ size(v.gain) }}) came from {{ v.loss }}"
    "{% else %}better than {{ v.before }} by {{ size(v.gain) }}"
    "{% if known(v.added) %}; the change by {{ v.loss }} is "
    "{{ 'a loss' if v.added.conclusive else 'inconclusive' }} ({{ size(v.added) }}){% endif %}"
    "{% endif %}{% endif %}."
)


def run_verdict(run: Run) -> RunVerdict | None:
    """Judge the last policy of the evaluation that is a run's result; None without one that has a
    score."""
    evaluation = run.latest
    if evaluation is None or not evaluation.policies:
        return None
    first, last = evaluation.policies[0], evaluation.policies[-1]
    task = None if has_accuracy(evaluation) else ranked(evaluation)[0]
    score, error = _score(last, task)
    if math.isnan(score):
        return None
    policy = Policy(run, last.name)
    before, loss = "", ""
    added = NOT_COMPARED
    if first is not last and first.name in policy.chain:
        before = fmt.policy_name(first.name, first.label)
    if policy.kind == OFFLINE and policy.parent is not None and policy.parent.name != first.name:
        loss = loss_name(policy.section)
        added = _difference(evaluation.change(policy.parent.name, last.name), task)
    gain = _difference(evaluation.change(first.name if before else "", last.name), task)
    return RunVerdict(
        made_by=_made_by(policy),
        is_accuracy=task is None,
        score=score,
        error=error,
        problems=count_problems(evaluation, "problems"),
        flops=policy.flops,
        before=before,
        gain=interval_of(gain),
        loss=loss,
        added=interval_of(added),
    )


def _difference(change: Change, task: str | None) -> Paired:
    return change.sampled if task is None else change.tasks.get(task, NOT_COMPARED)


def _score(entry: Evaluated, task: str | None) -> tuple[float, float]:
    if task is None:
        return entry.accuracy.mean, entry.accuracy.sem_clustered
    return entry.tasks[task].reward, entry.tasks[task].sem


def run_sentence(verdict: RunVerdict | None) -> str:
    """Write a run's verdict, "" for none."""
    if verdict is None:
        return ""
    is_accuracy = verdict.is_accuracy
    written = fmt.spread if is_accuracy else fmt.measured

    def size(change: Interval) -> str:
        points = fmt.interval(change, "+") + " points"
        if is_accuracy:
            return points
        ends = [fmt.measured(end, math.nan, sign="+") for end in (change.low, change.high)]
        return f"{fmt.measured(change.mean, math.nan, sign='+')} [{', '.join(ends)}]"

    return _RUN.render(
        v=verdict,
        score=written(verdict.score, verdict.error),
        size=size,
        known=_known,
        percent=lambda share: f"{100 * share:.0f}",
        for_flops=for_flops,
    )


def _known(value: Any) -> bool:
    """Whether a number, or an interval, is known."""
    return not math.isnan(value.mean if isinstance(value, Interval) else value)


def _made_by(policy: Policy) -> str:
    """Name the training behind a policy: "10 online updates, then DPO on its rollouts"."""
    phases: list[list[Any]] = []
    for name in reversed(policy.chain):
        section = policy.run.sections.get(own_stage(name), {})
        if section.get("kind") == ONLINE:
            how = f"{_how_online(section)} update"
            if not phases or phases[-1][0] != how:
                phases.append([how, 0.0])
            phases[-1][1] += policy.steps_of(name)
        elif section.get("kind") == OFFLINE:
            phases.append([loss_name(section) + _pairs_of(policy.run, section), None])
    names = []
    for how, steps in phases:
        is_known = steps is not None and not math.isnan(steps)
        names.append(counted(steps, how) if is_known else how)
    made = ", then ".join(names) or f"The policy {policy.name}"
    return f"{made}, from {policy.external_start}" if policy.external_start else made


def _how_online(section: Settings) -> str:
    """Say whose rollouts online training learns from: of the policy itself, or of one that is
    refreshed now and then, or never."""
    every = section.get("sync_every", 1)
    if every == 0:
        return "offline"
    # Several updates on one batch are still online: they are how it is learnt from.
    return "online" if every <= section.get("num_iterations", 1) else "semi-online"


def loss_name(section: Settings) -> str:
    """Name the loss of offline training."""
    return {"simpo": "SimPO", "ipo": "IPO"}.get(str(section.get("loss_type")), "DPO")


def _pairs_of(run: Run, section: Settings) -> str:
    """Say whose rollouts the pairs of offline training are, "" of the policy that it starts
    from."""
    pairs = run.sections.get(str(section.get("preferences", "")), {})
    if pairs.get("kind") != COLLECT:
        return " on pairs from a file"
    if pairs.get("policy") == section.get("policy"):
        return " on its rollouts"
    return f" on rollouts of {pairs.get('policy')}"


# A study

Finding = Literal[
    "enough", "alone", "none", "dearer", "inconclusive", "chosen", "undecided", "unfinished"
]


@dataclass(frozen=True)
class StudyVerdict:
    """Which policy comes within a point or two of the best GRPO for the least.

    finding: "enough": `row`, a K with offline training, does, and no GRPO alone for less; "alone":
    GRPO alone does for less, `row` is the cheapest K that does; "none": every cheaper K is worse
    beyond `MARGIN`, `row` is the nearest; "inconclusive": the intervals do not tell, `row` is the
    nearest; "dearer": every K costs more than the best GRPO, `row` is the highest. Of a study that
    does not have both GRPO and K: "chosen": `row` is the best on dev; "undecided": nothing can be
    chosen; "unfinished": no point is tested.
    best: GRPO's best, as dev chose it. difference: of `row` from it, in accuracy. share,
    alone_share: the cost of `row`, and of the cheapest GRPO that comes near, over that of the best.
    measure: "flops" or "hours". problems, seeds: of the comparison. tried: K that count, of all.
    command: which goes on with the study.
    """

    finding: Finding
    problems: int
    command: str
    row: Row | None = None
    best: Row | None = None
    alone: Row | None = None
    difference: Interval | None = None
    share: float = math.nan
    alone_share: float = math.nan
    measure: str = "flops"
    seeds: int = 0
    tried: tuple[int, int] = (0, 0)


_STUDY = _SENTENCES.from_string(
    "{% if v.finding == 'unfinished' %}"
    "No point of this study is finished and tested yet. To continue: {{ v.command }}"
    "{% elif v.finding == 'undecided' %}"
    "On {{ v.problems }} test problems nothing can be chosen: no row has all seeds and was "
    'evaluated on dev (an evaluate stage with split="dev"). To continue: {{ v.command }}'
    "{% elif v.finding == 'chosen' %}"
    "On {{ v.problems }} test problems {{ v.row.name }}, chosen on dev, answers "
    "{{ interval(v.row.accuracy) }} % correctly{{ for_flops(v.row.costs.flops) }}."
    "{% else %}"
    "On {{ v.problems }} test problems, with {{ counted(v.seeds, 'seed') }}"
    "{% if v.tried[0] < v.tried[1] %} and {{ v.tried[0] }} of {{ v.tried[1] }} K{% endif %}: "
    "{% if v.finding == 'enough' %}{{ trained }} is within {{ margin }} of {{ best }} for "
    "{{ percent(v.share) }} % of its {{ unit }} ({{ difference }}); GRPO alone needs "
    "{{ percent(v.alone_share) }} %."
    "{% elif v.finding == 'alone' %}GRPO alone ({{ v.alone.name }}) is within {{ margin }} of "
    "{{ best }} for {{ percent(v.alone_share) }} % of its {{ unit }}; {{ trained }} needs "
    "{{ percent(v.share) }} % ({{ difference }})."
    "{% elif v.finding == 'none' %}no K tried is within {{ margin }} of {{ best }} for less. The "
    "nearest is {{ trained }} ({{ difference }})."
    "{% elif v.finding == 'dearer' %}every K tried costs more than {{ best }}. The highest is "
    "{{ trained }} ({{ difference }}), for {{ price }}."
    "{% else %}inconclusive whether any K is within {{ margin }} of {{ best }} for less. The "
    "nearest is {{ trained }} ({{ difference }}). More seeds (--seeds) may decide; run: "
    "{{ v.command }}{% endif %}{% endif %}"
)


def study_verdict(study: Study) -> StudyVerdict:
    """Judge a study.

    GRPO's best, and each K's setting, are those that dev chose; a K counts that has the seeds of
    GRPO's best. Within: the 95 % interval of the difference lies above -`MARGIN`.
    """
    return _near_best(study) or _chosen(study)


def _chosen(study: Study) -> StudyVerdict:
    about = len(study.problems), command(study)
    if not study.policies:
        return StudyVerdict("unfinished", *about)
    row = paired.chosen(study.rows)
    return StudyVerdict("chosen" if row else "undecided", *about, row=row)


def _near_best(study: Study) -> StudyVerdict | None:
    """Judge whether a K is enough; None of a study that does not have both GRPO and K, or whose
    costs are not known."""
    grpo = paired.comparable(flat(study.baselines))
    best = paired.chosen(grpo)
    by_k: dict[float, list[Row]] = {}
    for one in flat(study.offline):
        if not one.stops:
            by_k.setdefault(one.steps, []).append(one)
    if best is None or len(grpo) < 2 or len(by_k) < 2 or study.spectrum:
        return None
    measure = "flops" if study.rates is None else "hours"
    apart: dict[Row, Interval] = {}
    tried = 0
    # An interval of fewer seeds is narrower, or of problems only.
    chosen = [one for one in map(paired.chosen, by_k.values()) if one is not None]
    settings = [one for one in chosen if set(best.seeds) <= set(one.seeds)]
    for one in (*grpo, *settings):
        difference = paired.difference(one, best)
        if difference is not None:
            apart[one] = difference
            tried += one in settings
    cost = {row: row.costs[measure] for row in apart}
    if not tried or any(map(math.isnan, cost.values())):
        return None

    def cheapest(rows: Sequence[Row]) -> Row | None:
        near = [row for row in rows if apart[row].low >= -MARGIN]
        return min(near, key=cost.__getitem__, default=None)

    cheaper = [row for row in settings if row in apart and cost[row] < cost[best]]
    # the best itself is near
    alone = cheapest([row for row in grpo if row in apart]) or best
    row = cheapest(cheaper)
    finding: Finding = "enough"
    if row is not None and cost[alone] < cost[row]:
        finding = "alone"
    if row is None:
        others = cheaper or [row for row in settings if row in apart]
        row = max(others, key=lambda other: apart[other].mean)
        finding = "dearer"
        if cheaper:
            is_worse = all(apart[row].high < -MARGIN for row in cheaper)
            finding = "none" if is_worse else "inconclusive"
    return StudyVerdict(
        finding,
        len(best.ids),
        command(study),
        row=row,
        best=best,
        alone=alone,
        difference=apart[row],
        share=cost[row] / cost[best] if cost[best] else math.inf,
        alone_share=cost[alone] / cost[best] if cost[best] else math.inf,
        measure=measure,
        seeds=len(best.seeds),
        tried=(tried, len(by_k)),
    )


def study_sentence(verdict: StudyVerdict) -> str:
    """Write a study's verdict."""
    row, best = verdict.row, verdict.best
    reached = trained = price = ""

    def priced(row: Row) -> str:
        spent = row.costs[verdict.measure]
        return flops(spent) if verdict.measure == "flops" else fmt.duration(3600 * spent)

    if row is not None and best is not None:
        accuracy, price = fmt.percent(best.accuracy.mean), priced(row)
        reached = f"the best GRPO ({best.name}: {accuracy} %, {priced(best)})"
        trained = f"{row.name} ({fmt.percent(row.accuracy.mean)} %)"
    return _STUDY.render(
        v=verdict,
        best=reached,
        trained=trained,
        price=price,
        margin=f"{100 * MARGIN:.0f} points",
        unit={"flops": "FLOPs", "hours": "time"}[verdict.measure],
        difference=f"{fmt.interval(verdict.difference, '+')} points",
        interval=fmt.interval,
        counted=counted,
        percent=lambda share: f"{100 * share:.0f}",
        for_flops=for_flops,
    )


def for_flops(amount: float) -> str:
    """Say what a policy cost, " for 448 GFLOPs", "" where that is not known or nothing."""
    return f" for {flops(amount)}" if amount > 0 else ""


def flops(amount: float) -> str:
    """Format an amount of compute, "2.58 TFLOPs"."""
    text = fmt.quantity(amount)
    return f"{text}{' ' * text[-1:].isdigit()}FLOPs"


def command(study: Study) -> str:
    """Return the command that made the study, as its last stages have it: the first ones may be
    another study's.

    It goes on with what is not finished.
    """
    for policy in policies_of(study.rows):
        for stage in reversed([*policy.run.folders]):
            words = list(policy.run.environment_of(stage).get("command", ()))[1:]
            if words[:1] == ["sweep"]:
                return " ".join(["g2d", *map(str, words)])
    return f"g2d sweep --config CONFIG --workdir {study.workdir}"


# Runs side by side


@dataclass(frozen=True)
class ComparisonVerdict:
    """The best of the runs' last policies, the next one, and how far they are apart on the common
    problems.

    Never that one way of training is better: each policy is of one seed.
    """

    best: Row
    second: Row
    difference: Interval


_COMPARISON = _SENTENCES.from_string(
    "{{ v.best.name }} answers {{ percent(v.best.accuracy.mean) }} % of {{ over }} correctly"
    "{{ for_flops(v.best.costs.flops) }}, {{ v.second.name }} "
    "{{ percent(v.second.accuracy.mean) }} %{{ for_flops(v.second.costs.flops) }}: a difference of "
    "{{ interval(v.difference, '+') }} points (95 %, over problems; another seed is not in it)."
)


def comparison_verdict(last: Sequence[Row]) -> ComparisonVerdict:
    """Judge the last policies of runs, a row each."""
    best, second = sorted(last, key=lambda row: -row.accuracy.mean)[:2]
    return ComparisonVerdict(best, second, paired.compare(second, best))


def comparison_sentence(verdict: ComparisonVerdict) -> str:
    """Write the verdict of runs side by side."""
    over = counted(len(verdict.best.ids), "common problem")
    return _COMPARISON.render(
        v=verdict, over=over, percent=fmt.percent, interval=fmt.interval, for_flops=for_flops
    )


def no_verdict(evaluation: Evaluation | None, has_stage: bool) -> str:
    """Say why a run has no verdict, "" where it has an evaluation."""
    if evaluation is not None and evaluation.policies:
        return ""
    if not has_stage:
        return "No stage of this run evaluates a policy."
    return "No policy has been evaluated yet."
