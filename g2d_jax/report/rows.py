"""Describe policies beside each other: of several seeds, of several K, of several runs.

Row, its seeds ─► Group, its K ─► Study, of a directory's points or of runs side by side
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from etils import epath

from g2d_jax.config.policy_name import own_stage
from g2d_jax.report.format import number
from g2d_jax.report.policies import Array, Policy
from g2d_jax.report.runs import OFFLINE, ONLINE, Run, Stage
from g2d_jax.study import frontier, stats
from g2d_jax.study.pricing import Rates

if TYPE_CHECKING:
    import pandas as pd

SAMPLING = ("temperature", "top_p", "top_k", "max_new_tokens", "stop", "num_generations")
"""Settings of an evaluation without which accuracies are not of the same thing."""


@dataclass(frozen=True, eq=False)
class Row:
    """Policies that differ in their seed alone, on the same problems. k: steps where points of a
    study vary them.

    group: the rows it belongs to. answers: of each policy, as `read_answers` has them, to the same
    problems of a split.
    """

    group: Group
    name: str
    policies: Sequence[Policy]
    answers: Sequence[pd.DataFrame]
    k: int | None
    split: str

    @property
    def first(self) -> Policy:
        """The policy of the first seed."""
        return self.policies[0]

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
    def by_seed(self) -> dict[int, Array]:
        """Seed -> its `accuracies` [N]."""
        return dict(zip(self.seeds, self.accuracies, strict=True))

    @cached_property
    def gains(self) -> dict[int, Array]:
        """Seed -> the accuracy that its last training added on each problem [N]; without those of
        which that is not known."""
        gains: dict[int, Array] = {}
        if self.split != "test":  # `Policy.gain` is of test problems
            return gains
        for policy in self.policies:
            gain = policy.gain
            if gain is not None and len(gain) == len(self.ids):
                gains[policy.run.seed] = gain
        return gains

    def pass_at(self, k: int) -> float:
        """Average pass@k over seeds."""
        return float(np.mean([stats.pass_at(correct, k) for correct in self.correct]))

    @cached_property
    def seeds(self) -> list[int]:
        """The policies' seeds, in their order."""
        return [policy.run.seed for policy in self.policies]

    def over_seeds(self, measure: Callable[[Policy], float]) -> float:
        """Average a number of each policy; NaN if one lacks it."""
        return float(np.mean(list(map(measure, self.policies))))

    @property
    def steps(self) -> float:
        """The mean K of the seeds: where a warm-up stops by itself they differ."""
        return self.over_seeds(lambda policy: policy.steps)

    def evaluated(self, split: str, *keys: str) -> float:
        """Average a number of the evaluation on a split over seeds; NaN if one lacks it."""
        return self.over_seeds(lambda policy: number(policy.result(split), *keys))

    def measured(self, path: Sequence[str]) -> float:
        """Average `Policy.measure` over seeds; NaN if one lacks it."""
        return self.over_seeds(lambda policy: policy.measure(path))

    @cached_property
    def accuracy(self) -> frontier.Interval:
        """Mean accuracy with its interval over problems and seeds."""
        return frontier.mean_interval(self.accuracies, limits=(0, 1))

    @cached_property
    def dev(self) -> float:
        """The mean accuracy on dev, NaN if a seed was not evaluated there."""
        return self.evaluated("dev", "mean")

    @cached_property
    def gain(self) -> frontier.Interval | None:
        """The mean of `gains`; None if none is known."""
        return mean_change(self.gains)

    @cached_property
    def costs(self) -> dict[str, float]:
        """The means of `Policy.costs` over seeds; NaN where one lacks it."""
        return {measure: self._cost(measure) for measure in self.first.costs}

    def _cost(self, measure: str) -> float:
        return self.over_seeds(lambda policy: policy.costs.get(measure, math.nan))


@dataclass(frozen=True, eq=False)
class Group:
    """Rows of an arm that differ in K alone, ascending. values: what else varies, field -> text."""

    arm: str
    values: Mapping[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def add(
        self,
        name: str,
        policies: Sequence[Policy],
        answers: Sequence[pd.DataFrame],
        k: int | None = None,
        split: str = "test",
    ) -> Row:
        """Add a row and return it; arguments: see `Row`."""
        row = Row(self, name, policies, answers, k, split)
        self.rows.append(row)
        return row

    @property
    def setting(self) -> str:
        """The settings that vary, for readers: "learning rate 0.0001"."""
        settings = []
        for name, text in self.values.items():
            settings.append(f"{name.rpartition('.')[2].replace('_', ' ')} {text}")
        return ", ".join(settings)

    @property
    def name(self) -> str:
        """The arm, and what else varies."""
        return ", ".join(filter(None, [self.arm, self.setting]))

    @property
    def policies(self) -> list[Policy]:
        """The policies of all rows."""
        return policies_of(self.rows)

    @property
    def is_offline(self) -> bool:
        """Whether it ends with offline training; else it is online training that simply goes on."""
        return any(policy.kind == OFFLINE for policy in self.policies)

    @property
    def stops(self) -> bool:
        """Whether the warm-up ends by itself."""
        return any(policy.stop for policy in self.policies)

    def goes_on_from(self, other: Group) -> bool:
        """Whether a policy has the same online training behind it, and was tested on the same
        problems."""
        shared = self._warmups & other._warmups
        return bool(shared) and self.rows[0].ids == other.rows[0].ids

    @property
    def _warmups(self) -> set[epath.Path]:
        """The folders of the last stages of online training behind its policies."""
        folders = set()
        for policy in self.policies:
            online = policy.online
            if online:
                folders.add(policy.run.stages[own_stage(online[0])].folder)
        return folders


def mean_change(changes: Mapping[int, Array], level: float = 0.95) -> frontier.Interval | None:
    """Average differences in accuracy, seed -> [N], with their interval; None without a seed."""
    if not changes:
        return None
    return frontier.mean_interval(np.stack([*changes.values()]), level=level, limits=(-1, 1))


def rows_of(groups: Iterable[Group]) -> list[Row]:
    """List the rows of groups, in their order."""
    return list(itertools.chain.from_iterable(group.rows for group in groups))


def policies_of(rows: Iterable[Row]) -> list[Policy]:
    """List the policies of rows, in their order."""
    return list(itertools.chain.from_iterable(row.policies for row in rows))


def seeds_of(rows: Iterable[Row]) -> set[int]:
    """Return the seeds that any of the rows has."""
    return set(itertools.chain.from_iterable(row.seeds for row in rows))


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
    if not policies:
        return None
    name = policies[0].name
    return Group(name).add(name, policies, answers)


def _made(policy: Policy) -> tuple[str, str]:
    """Tell a policy from those of other runs: its name, and the folder of its stage, "" if it has
    none."""
    stage = policy.run.stages.get(own_stage(policy.name))
    return policy.name, str(stage.folder if stage else "")


@dataclass(frozen=True, eq=False)
class Side:
    """A run that is compared with others. mark: A, B, … label: its folder's name, or its path where
    another has that.

    stage: the evaluation that takes part.
    """

    mark: str
    label: str
    run: Run
    stage: Stage

    @property
    def sampling(self) -> dict[str, Any]:
        """ "split" and `SAMPLING` of the evaluation, None where one is not known."""
        result = self.stage.manifest.get("result", {})
        known = dict(result.get("sampling", {}))
        known["split"] = self.stage.split
        known["num_generations"] = result.get("samples")
        return {name: known.get(name) for name in ("split", *SAMPLING)}

    @property
    def last(self) -> str:
        """The last of the policies evaluated, by name."""
        return list(self.stage.policies)[-1]


@dataclass(frozen=True)
class Study:
    """A study's directory, or runs side by side. left_out: label of a point -> why it is in no
    group.

    warmups: online training alone, as points that end offline evaluated it on their way, where no
    point is about it.
    sides: of a study whose arms are runs, these; each policy of a run is a group of one row.
    warnings: why their accuracies may not be comparable.
    """

    workdir: epath.Path
    name: str
    groups: Sequence[Group]
    left_out: Mapping[str, str]
    config: Mapping[str, Any] = field(default_factory=dict)
    warmups: Sequence[Group] = ()
    rates: Rates | None = None
    sides: Sequence[Side] = ()
    warnings: Sequence[str] = ()

    @property
    def rows(self) -> list[Row]:
        """The rows of all groups."""
        return rows_of(self.groups)

    @property
    def problems(self) -> list[str]:
        """The ids of the problems of the first row: of runs side by side those that are common to
        all."""
        return self.rows[0].ids if self.rows else []

    @property
    def split(self) -> str:
        """The split that the accuracies are of."""
        return self.rows[0].split if self.rows else "test"

    @property
    def last(self) -> list[Row]:
        """The rows that are the last policies of runs side by side."""
        last = {(side.run, side.last) for side in self.sides}
        return [row for row in self.rows if (row.first.run, row.first.name) in last]

    @property
    def policies(self) -> list[Policy]:
        """The policies of all finished points that were evaluated on the test split."""
        return policies_of(self.rows)

    @property
    def mean_length(self) -> float:
        """The mean tokens of a response on the test split, over all policies."""
        return float(np.mean([policy.result("test")["mean_length"] for policy in self.policies]))

    @property
    def offline(self) -> list[Group]:
        """The groups that end with offline training."""
        return [group for group in self.groups if group.is_offline]

    @property
    def baselines(self) -> list[Group]:
        """The groups of online training alone."""
        return [*(group for group in self.groups if not group.is_offline), *self.warmups]

    @property
    def swept(self) -> list[Group]:
        """The groups that end with offline training at several K."""
        return [group for group in self.offline if len(group.rows) > 1]

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
