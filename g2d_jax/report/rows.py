"""Policies beside each other: rows of several seeds, their groups over K, and the studies of them.

points ─► Policy ─► Row, its seeds ─► a group of rows, its K ─► Study
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from etils import epath
from numpy.typing import NDArray

from g2d_jax import accounting, stage_result
from g2d_jax.config.policy_name import own_stage
from g2d_jax.report.frame import Policy
from g2d_jax.report.runs import EVALUATE, OFFLINE, ONLINE, Run, read_run, studies
from g2d_jax.runtime.storage import PathLike, read_json
from g2d_jax.stage_result import Evaluated
from g2d_jax.study import frontier, stats
from g2d_jax.study.pricing import Rates
from g2d_jax.workdir import PLANS, absolute

Array = NDArray[np.float64]

UNFINISHED, UNTESTED = "not finished", "not evaluated on test"
"""Why a point is left out of a study."""

WARMUP = "warm-up (GRPO goes on)"
"""The arm of `Study.warmups`."""


@dataclass(frozen=True, eq=False)
class Row:
    """Policies that differ in their seed alone, on the same problems of a split.

    arm, values: those of its group: what its rows have in common, field -> text. k: steps where
    points of a study vary them. answers: of each policy, as `Policy.answers` has them.
    """

    arm: str
    values: Mapping[str, str]
    name: str
    policies: Sequence[Policy]
    answers: Sequence[pd.DataFrame]
    k: int | None = None
    split: str = "test"

    @property
    def setting(self) -> str:
        """The settings that vary, for readers: "learning rate 0.0001"."""
        settings = []
        for name, text in self.values.items():
            settings.append(f"{name.rpartition('.')[2].replace('_', ' ')} {text}")
        return ", ".join(settings)

    @property
    def group(self) -> str:
        """The name of its group: the arm, and what else varies but K."""
        return ", ".join(filter(None, [self.arm, self.setting]))

    @property
    def first(self) -> Policy:
        """The policy of the first seed."""
        return self.policies[0]

    @property
    def is_offline(self) -> bool:
        """Whether it ends with offline training; else it is online training that simply goes on."""
        return any(policy.kind == OFFLINE for policy in self.policies)

    @property
    def stops(self) -> bool:
        """Whether the warm-up ends by itself."""
        return any(policy.stop for policy in self.policies)

    @cached_property
    def ids(self) -> list[str]:
        """The problems [N], ids ascending."""
        return list(self.answers[0].index)

    @cached_property
    def correct(self) -> list[Array]:
        """Each policy's answers [N, samples]."""
        return [answers.to_numpy() for answers in self.answers]

    @cached_property
    def accuracies(self) -> Array:
        """Each problem's mean accuracy [seeds, N], NaN without a scored answer."""
        return np.stack(list(map(stats.row_means, self.correct)))

    @cached_property
    def seeds(self) -> list[int]:
        """The policies' seeds, in their order."""
        return [policy.run.seed for policy in self.policies]

    @cached_property
    def by_seed(self) -> dict[int, Array]:
        """Seed -> its `accuracies` [N]."""
        return dict(zip(self.seeds, self.accuracies, strict=True))

    def pass_at(self, k: int) -> float:
        """Average pass@k over seeds."""
        return float(np.mean([stats.pass_at(correct, k) for correct in self.correct]))

    def mean(self, measure: Callable[[Policy], float]) -> float:
        """Average a number of each policy over seeds; NaN if one lacks it."""
        return float(np.mean(list(map(measure, self.policies))))

    def evaluated(self, split: str, read: Callable[[Evaluated], float]) -> float:
        """Average a number of the evaluation on a split over seeds; NaN if one lacks it."""
        found = [policy.evaluated(split) for policy in self.policies]
        return float(np.mean([read(one[2]) if one else math.nan for one in found]))

    def measured(self, path: Sequence[str]) -> float:
        """Average `Policy.measure` over seeds; NaN if one lacks it."""
        return self.mean(lambda policy: policy.measure(path))

    @cached_property
    def steps(self) -> float:
        """The mean K of the seeds: where a warm-up stops by itself they differ."""
        return self.mean(lambda policy: policy.steps)

    @cached_property
    def accuracy(self) -> frontier.Interval:
        """Mean accuracy with its interval over problems and seeds."""
        return frontier.mean_interval(self.accuracies, limits=(0, 1))

    @cached_property
    def dev(self) -> float:
        """The mean accuracy on dev, NaN if a seed was not evaluated there."""
        return self.evaluated("dev", lambda entry: entry.accuracy.mean)

    @cached_property
    def gains(self) -> dict[int, Array]:
        """Seed -> what its last training added on each test problem [N]; without those of which
        that is not known."""
        known = [policy for policy in self.policies if policy.gain is not None]
        gains = {policy.run.seed: policy.gain for policy in known}
        return {seed: gain for seed, gain in gains.items() if gain is not None}

    @cached_property
    def gain(self) -> frontier.Interval | None:
        """The mean of `gains`; None if none is known."""
        return mean_change(self.gains)

    @cached_property
    def costs(self) -> dict[str, float]:
        """The means of `Policy.costs` over seeds; NaN where one lacks it."""
        costs = pd.DataFrame([policy.costs for policy in self.policies])
        return {str(name): float(value) for name, value in costs.mean(skipna=False).items()}

    @cached_property
    def warmup_folders(self) -> set[epath.Path]:
        """The folders of the last stages of online training behind its policies."""
        return {
            policy.run.folders[own_stage(policy.online[0])]
            for policy in self.policies
            if policy.online
        }


Group = Sequence[Row]
"""Rows that differ in K alone, ascending."""


def mean_change(changes: Mapping[int, Array], level: float = 0.95) -> frontier.Interval | None:
    """Average differences in accuracy, seed -> [N], with their interval; None without a seed."""
    if not changes:
        return None
    return frontier.mean_interval(np.stack([*changes.values()]), level=level, limits=(-1, 1))


def flat(groups: Iterable[Group]) -> list[Row]:
    """List the rows of groups, in their order."""
    return list(itertools.chain.from_iterable(groups))


def policies_of(rows: Iterable[Row]) -> list[Policy]:
    """List the policies of rows, in their order."""
    return list(itertools.chain.from_iterable(row.policies for row in rows))


@dataclass(frozen=True)
class Study:
    """A study's directory. groups: of its points. left_out: label of a point -> why it is in none.

    warmups: groups of online training alone, as points that end offline evaluated it on their way,
    where no point is about it. rates: those at which tokens are priced.
    """

    workdir: epath.Path
    name: str
    groups: Sequence[Group]
    left_out: Mapping[str, str]
    config: Mapping[str, Any] = field(default_factory=dict)
    warmups: Sequence[Group] = ()
    rates: Rates | None = None

    @property
    def rows(self) -> list[Row]:
        """The rows of all groups."""
        return flat(self.groups)

    @property
    def problems(self) -> list[str]:
        """The ids of the problems of the first row."""
        return self.rows[0].ids if self.rows else []

    @property
    def policies(self) -> list[Policy]:
        """The policies of all finished points that were evaluated on the test split."""
        return policies_of(self.rows)

    @property
    def mean_length(self) -> float:
        """The mean tokens of a response on the test split, over all policies."""
        return float(np.mean([row.evaluated("test", _mean_length) for row in self.rows]))

    @property
    def offline(self) -> list[Group]:
        """The groups that end with offline training."""
        return [group for group in self.groups if group[0].is_offline]

    @property
    def baselines(self) -> list[Group]:
        """The groups of online training alone."""
        return [*(group for group in self.groups if not group[0].is_offline), *self.warmups]

    @property
    def swept(self) -> list[Group]:
        """The groups that end with offline training at several K."""
        return [group for group in self.offline if len(group) > 1]

    @property
    def spectrum(self) -> list[Row]:
        """The arms of online training from offline (s = ∞) to s = 1, other losses after the one
        with the most s.

        [] if all have the same s and loss: the study is about something else. The range is that of
        "Bridging Offline and Online Reinforcement Learning for LLMs" (arXiv 2506.21495).
        """
        arms = [row for row in self.rows if row.first.kind == ONLINE]
        spans: dict[str, set[float]] = {}
        for row in arms:
            spans.setdefault(row.first.loss, set()).add(row.first.sync_every or math.inf)
        if sum(map(len, spans.values())) <= 1:
            return []
        losses = sorted(spans, key=lambda loss: (-len(spans[loss]), -max(spans[loss])))

        def place(row: Row) -> tuple[int, float]:
            return losses.index(row.first.loss), -(row.first.sync_every or math.inf)

        return sorted(arms, key=place)


def _mean_length(entry: Evaluated) -> float:
    return entry.measure("mean_length")


def start_of(rows: Sequence[Row]) -> Row | None:
    """Return the policy that all rows were trained from, where it is one for each seed and was
    evaluated on test."""
    starts: dict[int, Policy] = {}
    for policy in policies_of(rows):
        start = policy.parent
        if start is None or _made(start) != _made(starts.setdefault(policy.run.seed, start)):
            return None
    if len({start.name for start in starts.values()}) > 1:
        return None
    policies, answers = [], []
    for start in starts.values():
        own = start.answers("test")
        if own is not None and list(own.index) == rows[0].ids:
            policies.append(start)
            answers.append(own)
    return Row(policies[0].name, {}, policies[0].name, policies, answers) if policies else None


def _made(policy: Policy) -> tuple[str, str]:
    """Tell a policy from those of other runs: its name, and the folder of its stage, "" if it has
    none."""
    return policy.name, str(policy.run.folders.get(own_stage(policy.name), ""))


def read_study(workdir: PathLike, name: str, rates: Rates | None = None) -> Study:
    """Read a study, finished or not. rates: those at which its tokens are priced.

    Raises ValueError if the directory has none of that name, a file is damaged, or points that
    differ in their seed alone were tested on different problems.
    """
    root = absolute(workdir)
    there = studies(root)
    if name not in there:
        raise ValueError(f"{root} holds no study {name!r}; there are: {', '.join(there) or 'none'}")
    plan = read_json(root / PLANS / f"{name}.json")
    read = functools.cache(stage_result.read_lenient)
    left_out = {}
    arms: dict[tuple[str, tuple[tuple[str, str], ...]], dict[int | None, list[Policy]]] = {}
    varied: dict[str, list[Mapping[str, str]]] = {}
    for point in plan["points"]:
        varied.setdefault(point["arm"], []).append(point["values"])
    for point in plan["points"]:
        run = read_run(root / "points" / name / point["label"], read=read)
        policy = _last_evaluated(run, rates)
        if policy is None or policy.evaluated("test") is None:
            left_out[point["label"]] = UNFINISHED if policy is None else UNTESTED
            continue
        steps = _steps_fields(point["values"], run)
        k = int(point["values"][steps[0]]) if steps else None
        others = []
        for field_name, text in point["values"].items():
            if field_name not in steps or not _follows(varied[point["arm"]], steps[0], field_name):
                others.append((field_name, text))
        arms.setdefault((point["arm"], tuple(others)), {}).setdefault(k, []).append(policy)
    groups = [_group(arm, dict(values), by_steps) for (arm, values), by_steps in arms.items()]
    return Study(root, name, groups, left_out, plan["config"], _warmups(groups), rates)


def _last_evaluated(run: Run, rates: Rates | None) -> Policy | None:
    """Return the policy a point is about; None until its evaluations, and all they rest on, are
    finished.

    So points of K = 0 do not wait for a warm-up.
    """
    evaluated: list[str] = []
    needed: set[str] = set()
    for name, section in run.sections.items():
        if section["kind"] == EVALUATE:
            needed.add(name)
            evaluated += section["policies"]
    for policy in evaluated:
        needed.update(accounting.behind(policy, run.sections))
    if not evaluated or not needed <= run.results.keys():
        return None
    return Policy(run, evaluated[-1], rates)


def _follows(points: Sequence[Mapping[str, str]], field_name: str, other: str) -> bool:
    """Tell whether one field's value decides another's in the points of an arm, as it does of
    fields that are zipped."""
    decided: dict[str, set[str]] = {}
    for values in points:
        if field_name in values and other in values:
            decided.setdefault(values[field_name], set()).add(values[other])
    return all(len(texts) == 1 for texts in decided.values())


def _steps_fields(values: Mapping[str, str], run: Run) -> list[str]:
    """List the fields that are steps of online stages, in the order of the stages: the first is
    K."""
    online = [name for name in run.folders if run.kind(name) == ONLINE]
    fields = [f"stages.{name}.steps" for name in online]
    return [name for name in fields if name in values]


def _group(
    arm: str, values: Mapping[str, str], by_steps: Mapping[int | None, list[Policy]]
) -> Group:
    rows = []
    for k in sorted(by_steps, key=lambda k: -1 if k is None else k):
        seeds = by_steps[k]
        answers = _same_problems(seeds)
        row = Row(arm, values, "", seeds, answers, k)
        name = row.group + (f", K = {row.steps:g}" if len(by_steps) > 1 else "")
        rows.append(Row(arm, values, name, seeds, answers, k))
    return rows


def _same_problems(seeds: Sequence[Policy]) -> list[pd.DataFrame]:
    """Return the test answers of policies. Raises ValueError where they are not to the same
    problems."""
    found = [policy.answers("test") for policy in seeds]
    answers = [own for own in found if own is not None]
    for policy, own in zip(seeds, answers, strict=True):
        if not own.index.equals(answers[0].index):
            names = f"{seeds[0].run.workdir.name} and {policy.run.workdir.name}"
            raise ValueError(f"{names} were tested on different problems")
    return answers


def _goes_on_from(group: Group, other: Group) -> bool:
    """Whether a policy has the same online training behind it, and was tested on the same
    problems."""
    mine = set[epath.Path]().union(*(row.warmup_folders for row in group))
    others = set[epath.Path]().union(*(row.warmup_folders for row in other))
    return bool(mine & others) and group[0].ids == other[0].ids


def _warmups(groups: Sequence[Group]) -> list[Group]:
    """Make groups of online training alone, of warm-ups that points evaluated, unless a group is
    about just that."""
    alone = [group for group in groups if not group[0].is_offline]
    families: list[list[Group]] = []
    for group in groups:
        if group[0].stops or not all(one.is_single_warmup for one in policies_of(group)):
            continue
        if any(_goes_on_from(group, other) for other in alone):
            continue
        for family in families:
            if any(_goes_on_from(group, other) for other in family):
                family.append(group)
                break
        else:
            families.append([group])
    warmups = [_warmup(family, several=len(families) > 1) for family in families]
    return [warmup for warmup in warmups if len(warmup) > 1]


def _warmup(family: Sequence[Group], *, several: bool) -> Group:
    """Make a group of online training of groups with one warm-up: K = 0 is the policy that it
    starts from."""
    common = set.intersection(*(set(group[0].values.items()) for group in family))
    values = {name: text for name, text in family[0][0].values.items() if (name, text) in common}
    arm = WARMUP
    if several:
        arm += f" of {', '.join(dict.fromkeys(group[0].arm for group in family))}"
    by_steps: dict[int | None, dict[int, Policy]] = {}
    for trained in sorted(policies_of(flat(family)), key=lambda policy: policy.run.seed):
        for name in trained.chain[1:]:
            policy = Policy(trained.run, name, trained.rates)
            if policy.evaluated("test"):
                by_steps.setdefault(int(policy.steps), {}).setdefault(policy.run.seed, policy)
    return _group(arm, values, {k: list(by_seed.values()) for k, by_seed in by_steps.items()})
