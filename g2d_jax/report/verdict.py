"""Answer in a sentence how much online RL was enough, and what it cost: of a run, of a study.

The sentence stands on top of a page, above the numbers that headlines.py tells. It says no more
than the 95 % intervals do: what has 0 in it is not called a gain, and where a study cannot tell it
says so and what to run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from g2d_jax.config.policy_name import own_stage
from g2d_jax.report import format as fmt
from g2d_jax.report import paired_differences as paired
from g2d_jax.report.format import number
from g2d_jax.report.headlines import command, flops, for_flops
from g2d_jax.report.policies import Policy
from g2d_jax.report.rows import Row, Study, rows_of
from g2d_jax.report.runs import COLLECT, OFFLINE, ONLINE, Run, Settings
from g2d_jax.report.tables import Manifest, has_accuracy, policies, problems
from g2d_jax.report.tables import paired as paired_policies
from g2d_jax.runtime.terminal import counted
from g2d_jax.study.frontier import Interval
from g2d_jax.study.stats import t_quantile

MARGIN = 0.02
"""A policy is as good as the best where the 95 % interval of its difference lies above minus this
much accuracy."""


def run_verdict(run: Run) -> str:
    """Say what the last policy evaluated was made by, what it reaches and costs, and how much of
    its gain came from the last training. "" without an evaluation that has right answers.

    The gain is over the first policy evaluated, on these problems; a change whose 95 % interval
    over problems has 0 in it is none.
    """
    evaluation = run.latest
    ordered = policies(evaluation)
    if not evaluation or not ordered or not has_accuracy(evaluation):
        return ""
    last = Policy(run, str(ordered[-1]["name"]))
    if math.isnan(number(ordered[-1], "mean")):
        return ""
    reached = f"{fmt.percent(number(ordered[-1], 'mean'))} % of {problems(evaluation, 'problems')}"
    text = f"{_made_by(last)}: {reached}{for_flops(last.flops)}"
    gained = _gained(evaluation, ordered, last)
    return f"{text}; {gained}." if gained else f"{text}."


def _made_by(policy: Policy) -> str:
    """Name the training behind a policy: "10 online updates and DPO on their rollouts"."""
    phases = _phases(policy)
    start = f", from {policy.external_start}" if policy.external_start else ""
    if not phases and start:
        return f"The policy {policy.name}"
    if not phases:
        return f"The policy {policy.name}, without online updates or DPO"
    kinds = [phase.kind for phase in phases]
    if kinds == [OFFLINE]:
        # What a policy of elsewhere had before is not known here.
        alone = start or ", without an online update"
        return f"{phases[0].name} {_pairs_of(policy, 'its')}{alone}"
    if kinds == [ONLINE, OFFLINE]:
        return f"{phases[0].name} and {phases[1].name} {_pairs_of(policy, 'their')}{start}"
    return f"{', then '.join(phase.name for phase in phases)}{start}"


class _Phase(NamedTuple):
    """Training of one kind in a row. name: for readers, "10 online updates"."""

    kind: str
    name: str


def _phases(policy: Policy) -> list[_Phase]:
    """List the training behind a policy, the first one first."""
    phases: list[_Phase] = []
    updates: dict[str, float] = {}

    def close() -> None:
        for how, steps in updates.items():
            phases.append(_Phase(ONLINE, counted(steps, f"{how} update")))
        updates.clear()

    for name in reversed(policy.chain):
        section = policy.run.sections.get(own_stage(name), {})
        if section.get("kind") == ONLINE:
            how = _how_online(section)
            if updates.keys() - {how}:
                close()
            updates[how] = updates.get(how, 0) + policy.steps_of(name)
        elif section.get("kind") == OFFLINE:
            close()
            phases.append(_Phase(OFFLINE, _loss(section)))
    close()
    return phases


def _how_online(section: Settings) -> str:
    """Say whose rollouts online training learns from: of the policy itself, or of one that is
    refreshed now and then, or never."""
    every = section.get("sync_every", 1)
    if every == 0:
        return "offline"
    # Several updates on one batch are still online: they are how it is learnt from.
    return "online" if every <= section.get("num_iterations", 1) else "semi-online"


def _loss(section: Settings) -> str:
    """Name the loss of offline training."""
    return {"simpo": "SimPO", "ipo": "IPO"}.get(str(section.get("loss_type")), "DPO")


def _pairs_of(policy: Policy, whose: str) -> str:
    """Say whose rollouts a policy's pairs are. whose: "its" or "their", of what was before."""
    start = policy.parent
    pairs = policy.run.sections.get(str(policy.section.get("preferences", "")), {})
    if pairs.get("kind") != COLLECT:
        return "on pairs of others"
    if start is not None and pairs.get("policy") == start.name:
        return f"on {whose} rollouts"
    return f"on rollouts of {pairs.get('policy')}"


def _gained(evaluation: Manifest, ordered: Sequence[Manifest], last: Policy) -> str:
    """Say what came from where: of the gain over the first policy evaluated, DPO's share."""
    first = str(ordered[0]["name"])
    if first == last.name or first not in last.chain:
        return ""
    whole, certain = _change(evaluation, first, last.name)
    if math.isnan(whole):
        return ""
    size = f"{100 * abs(whole):.1f} points"
    before = fmt.policy_name(ordered[0])
    if not certain:
        return f"that it differs from {before} cannot be told ({100 * whole:+.1f} points)"
    if whole < 0:
        return f"it lost {size} against {before}"
    gained = f"it gained {size} on {before}"
    if last.kind != OFFLINE or last.parent is None or last.parent.name == first:
        return gained
    added, is_certain = _change(evaluation, last.parent.name, last.name)
    offline = [phase.name for phase in _phases(last) if phase.kind == OFFLINE]
    loss = f"the last {offline[-1]}" if len(offline) > 1 else offline[-1]
    if math.isnan(added):
        return gained
    if not is_certain:
        return f"{gained}, and that any of it came from {loss} cannot be told ({100 * added:+.1f})"
    if added < 0:
        return f"{gained}, and more before {loss} took {-100 * added:.1f}"
    share = added / whole
    return f"{100 * min(share, 1):.0f} % of the gain came from {loss}"


def _change(evaluation: Manifest, before: str, after: str) -> tuple[float, bool]:
    """Return the paired difference of two policies, NaN where they were not compared, and whether
    its 95 % interval over problems leaves 0 out."""
    pair = paired_policies(evaluation).get((before, after), {})
    difference = number(pair, "difference")
    half = t_quantile(number(pair, "problems")) * number(pair, "sem")
    return difference, abs(difference) > half


class _Prices(NamedTuple):
    """Rows beside the best GRPO. apart: each row's difference from it. measure: the cost in which
    they are priced."""

    best: Row
    apart: Mapping[Row, Interval]
    measure: str

    def of(self, row: Row) -> float:
        """Return what a row costs."""
        return row.costs[self.measure]

    def written(self, row: Row) -> str:
        """Write what a row costs, for readers."""
        spent = self.of(row)
        return flops(spent) if self.measure == "flops" else fmt.duration(3600 * spent)

    def share(self, row: Row) -> str:
        """Write what a row costs, in percent of the best GRPO's cost."""
        return f"{100 * self.of(row) / self.of(self.best):.0f} %"

    def cheapest_near(self, rows: Iterable[Row]) -> Row | None:
        """Return the cheapest of the rows whose interval lies above -MARGIN."""
        near = [row for row in rows if self.apart[row].low >= -MARGIN]
        return min(near, key=self.of, default=None)


def study_verdict(study: Study) -> str:
    """Say which policy comes within a point or two of the best GRPO for the least, or that it
    cannot be told and what to run. "" of a study that does not have both GRPO and K.

    GRPO's best, and each K's setting, are those that dev chose; a K counts that has the seeds of
    GRPO's best. Within: the 95 % interval of the difference lies above -`MARGIN`.
    """
    grpo = paired.comparable(rows_of(study.baselines))
    best = paired.chosen(grpo)
    by_k: dict[float, list[Row]] = {}
    for row in rows_of(study.offline):
        if not row.group.stops:
            by_k.setdefault(row.steps, []).append(row)
    if best is None or len(grpo) < 2 or len(by_k) < 2 or study.spectrum:
        return ""
    settings = []
    for choice in map(paired.chosen, by_k.values()):
        # An interval of fewer seeds is narrower, or of problems only.
        if choice is not None and set(best.seeds) <= set(choice.seeds):
            settings.append(choice)
    if not settings:
        return ""
    apart = {}
    for row in (*grpo, *settings):
        difference = paired.difference(row, best)
        if difference is not None:
            apart[row] = difference
    prices = _Prices(best, apart, "flops" if study.rates is None else "hours")
    # Without a known cost no policy is the cheaper one.
    if any(math.isnan(prices.of(row)) for row in apart):
        return ""
    cheaper = [row for row in settings if row in apart and prices.of(row) < prices.of(best)]
    where = f"On these {fmt.count(len(best.ids))} problems"
    if len(best.seeds) == 1:
        where += ", with one seed,"
    if len(settings) < len(by_k):
        where += (
            f" and at {len(settings)} of {len(by_k)} K, those with all seeds and evaluated on dev,"
        )
    losses = {row.first.loss for row in grpo} - {""}
    online = "GRPO" if losses <= {"grpo"} else "online training"
    grpo_name = f"the best {online} ({_reached(best)}, {prices.written(best)})"
    enough = prices.cheapest_near(cheaper)
    if enough is None:
        return f"{where} {_not_enough(study, prices, cheaper, grpo_name)}"
    # the best itself is near
    alone = prices.cheapest_near(row for row in grpo if row in apart) or best
    unit = {"flops": "FLOPs", "hours": "time"}[prices.measure]
    if prices.of(alone) < prices.of(enough):
        return (
            f"{where} {online} alone ({_reached(alone)}) comes within {_points(apart[alone])} of "
            f"{grpo_name} for {prices.share(alone)} of its {unit}; the cheapest K that does with "
            f"{_loss(enough.first.section)}, {_steps(enough)}, takes {prices.share(enough)}."
        )
    near = f"come within {_points(apart[enough])} of"
    if apart[enough].low > 0:
        near = "are above"
    setting = f"{enough.group.name}: " if len({row.group for row in settings}) > 1 else ""
    return (
        f"{where} {_trained(enough)} ({setting}{fmt.percent(enough.accuracy.mean)} %) {near} "
        f"{grpo_name} for {prices.share(enough)} of its {unit}; {online} alone takes "
        f"{prices.share(alone)} to come within {100 * MARGIN:.0f} points."
    )


def _not_enough(study: Study, prices: _Prices, cheaper: Sequence[Row], grpo_name: str) -> str:
    """Say that no K comes near the best GRPO for less, or that it cannot be told."""
    if not cheaper:
        dearer = (row for row in prices.apart if row.group.is_offline)
        highest = max(dearer, key=lambda row: prices.apart[row].mean, default=None)
        found = f"every K tried with offline training costs more than {grpo_name}"
        if highest is None:
            return f"{found}."
        return (
            f"{found}: the highest, {_trained(highest)}, differs by "
            f"{fmt.interval(prices.apart[highest], '+')} for {prices.written(highest)}."
        )
    nearest = max(cheaper, key=lambda row: prices.apart[row].mean)
    difference = fmt.interval(prices.apart[nearest], "+")
    margin = f"{100 * MARGIN:.0f} points"
    if all(prices.apart[row].high < -MARGIN for row in cheaper):
        return (
            f"no K tried comes within {margin} of {grpo_name} for less: the nearest, "
            f"{_trained(nearest)}, differs by {difference}."
        )
    seeds = counted(len(nearest.seeds), "seed")
    return (
        f"it cannot be told whether any K comes within {margin} of {grpo_name} for less: the "
        f"nearest, {_trained(nearest)}, differs by {difference} over {seeds}. More seeds "
        f"(--seeds) can tell; run: {command(study)}"
    )


def _steps(row: Row) -> str:
    """Name a K: "20 online steps"."""
    return counted(row.steps, "online step")


def _trained(row: Row) -> str:
    """Name a K and what follows it: "20 online steps and DPO"."""
    return f"{_steps(row)} and {_loss(row.first.section)}"


def _reached(row: Row) -> str:
    """Name a row of GRPO and what it reaches."""
    return f"{row.name}: {fmt.percent(row.accuracy.mean)} %"


def _points(apart: Interval) -> str:
    """Say within how many points of the best a row certainly is: at least 1."""
    return counted(max(1, math.ceil(-100 * apart.low)), "point")
