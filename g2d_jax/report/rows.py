"""The policies of a study as rows: selections of its frame.

points ─► frame_of, a row a policy and seed ─► Row, its seeds ─► a group of rows, its K ─► Study
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from etils import epath
from numpy.typing import NDArray

from g2d_jax.report.frame import frame_of, runs_of
from g2d_jax.report.runs import EVALUATE, OFFLINE, ONLINE, Run, studies
from g2d_jax.runtime.storage import PathLike, read_json
from g2d_jax.session import accounting
from g2d_jax.session.workdir import PLANS, absolute
from g2d_jax.study import frontier, stats
from g2d_jax.study.pricing import Rates

Array = NDArray[np.float64]

UNFINISHED, UNTESTED = "not finished", "not evaluated on test"
"""Why a point of a study is left out."""

WARMUP = "warm-up (GRPO goes on)"
"""The arm of `Study.warmups`."""


@dataclass(frozen=True, eq=False)
class Row:
    """Policies that differ in their seed alone, on the same problems.

    group: the name of the rows that differ from it in K alone. policies: rows of the frame, with
    their accuracy on dev, from `Study.tested`.
    """

    arm: str
    group: str
    name: str
    policies: pd.DataFrame

    def mean(self, column: str) -> float:
        """Average a column over seeds; NaN if a seed lacks it."""
        if column not in self.policies:
            return math.nan
        return float(self.policies[column].mean(skipna=False))

    def pass_at(self, k: int) -> float:
        """Average pass@k over seeds."""
        return float(np.mean([stats.pass_at(correct, k) for correct in self.policies["correct"]]))

    @property
    def first(self) -> pd.Series[Any]:
        """The policy of the first seed."""
        return self.policies.iloc[0]

    @property
    def is_offline(self) -> bool:
        """True if it ends with offline training, False for online training alone."""
        return bool((self.policies["kind"] == OFFLINE).any())

    @property
    def stops(self) -> bool:
        """True if the warm-up ends by itself."""
        return bool((self.policies["stop"] != "").any())

    @property
    def ids(self) -> list[str]:
        """The problems [N], ids ascending."""
        return list(self.first["ids"])

    @property
    def seeds(self) -> list[int]:
        """The policies' seeds, in order."""
        return self.policies["seed"].tolist()

    @cached_property
    def accuracies(self) -> Array:
        """Each problem's mean accuracy [seeds, N], NaN without a scored answer."""
        return np.stack([*map(stats.row_means, self.policies["correct"])])

    @cached_property
    def by_seed(self) -> dict[int, Array]:
        """Seed -> its `accuracies` [N]."""
        return dict(zip(self.seeds, self.accuracies, strict=True))

    @cached_property
    def accuracy(self) -> frontier.Interval:
        """Mean accuracy with its interval over problems and seeds."""
        return frontier.mean_interval(self.accuracies, limits=(0, 1))

    @cached_property
    def gains(self) -> dict[int, Array]:
        """Seed -> the gain of its last training on each test problem [N], for seeds where it is
        known."""
        gains = dict(zip(self.seeds, self.policies["gains"], strict=True))
        return {seed: gain for seed, gain in gains.items() if gain is not None}

    @cached_property
    def gain(self) -> frontier.Interval:
        """The mean of `gains`."""
        return mean_change(self.gains)


Group = Sequence[Row]
"""Rows that differ in K alone, ascending."""


def mean_change(changes: Mapping[int, Array], level: float = 0.95) -> frontier.Interval:
    """Average differences in accuracy, seed -> [N], with their interval; NaN without a seed."""
    values = [*changes.values()] or [np.full(1, math.nan)]
    return frontier.mean_interval(np.stack(values), level=level, limits=(-1, 1))


def flat(groups: Iterable[Group]) -> list[Row]:
    """List the rows of groups, in order."""
    return list(itertools.chain.from_iterable(groups))


@dataclass(frozen=True)
class Study:
    """The directory of a study. frame: of all its points. tested: its rows on test by workdir and
    policy, with the accuracy on dev. groups: of the points' last policies. left_out: label of a
    point -> why it is in no group.

    runs: of all points. warmups: groups of online training alone, from warm-ups that offline points
    evaluated, if no group covers them. rates: prices of tokens.
    """

    workdir: epath.Path
    name: str
    frame: pd.DataFrame
    tested: pd.DataFrame
    runs: Sequence[Run]
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
    def mean_length(self) -> float:
        """The mean tokens of a response on the test split, over all policies."""
        return float(np.mean([row.mean("mean_length") for row in self.rows]))

    @property
    def offline(self) -> list[Group]:
        """The groups that end with offline training."""
        return [group for group in self.groups if group[0].is_offline]

    @property
    def baselines(self) -> list[Group]:
        """The groups of online training alone."""
        return [*(group for group in self.groups if not group[0].is_offline), *self.warmups]

    @property
    def spectrum(self) -> list[Row]:
        """The arms of online training from offline (s = ∞) to s = 1. Losses other than that of the
        arm with the largest s come last.

        [] if all have the same s and loss: the study varies something else. The range is that of
        "Bridging Offline and Online Reinforcement Learning for LLMs" (arXiv 2506.21495).
        """
        arms = [row for row in self.rows if row.first["kind"] == ONLINE]
        counts = Counter(loss for loss, _ in {(row.first["loss"], row.first["s"]) for row in arms})
        if counts.total() <= 1:
            return []
        losses = [loss for loss, _ in counts.most_common()]
        return sorted(arms, key=lambda row: (losses.index(row.first["loss"]), -row.first["s"]))

    @property
    def start(self) -> Row | None:
        """The policy that all of the `spectrum` was trained from, if it is one for each seed and
        was evaluated on test."""
        keys: list[tuple[str, str]] = []
        for row in self.spectrum:
            keys += zip(row.policies["workdir"], row.policies["parent"], strict=True)
        starts = _there(self.tested, keys).drop_duplicates(["made", "seed"])
        if starts.empty or starts["seed"].duplicated().any():
            return None
        name = starts["policy"].iloc[0]
        return Row(name, name, name, starts)


def _there(rows: pd.DataFrame, keys: Iterable[tuple[str, str]]) -> pd.DataFrame:
    """Select the existing rows of these workdirs and policies, once each."""
    return rows.loc[[key for key in dict.fromkeys(keys) if key in rows.index]]


def read_study(workdir: PathLike, name: str, rates: Rates | None = None) -> Study:
    """Read a study, finished or not. rates: prices of its tokens.

    Raises ValueError if the directory has no study of that name, a file is damaged, or seeds of one
    point were tested on different problems.
    """
    root = absolute(workdir)
    there = studies(root)
    if name not in there:
        raise ValueError(f"{root} holds no study {name!r}; there are: {', '.join(there) or 'none'}")
    plan = read_json(root / PLANS / f"{name}.json")
    points = list(runs_of(root, name))
    frame = frame_of(points, rates)
    key = ["workdir", "policy"]
    rows = frame[frame["split"] == "test"].set_index(key, drop=False)
    rows["dev"] = frame[frame["split"] == "dev"].set_index(key)["accuracy"]
    varied: dict[str, list[Mapping[str, str]]] = {}
    for point in plan["points"]:
        varied.setdefault(point["arm"], []).append(point["values"])
    left_out = {}
    about = []
    for point, (_, run) in zip(plan["points"], points, strict=True):
        policy = _last_evaluated(run)
        workdir = str(run.workdir)
        if (workdir, policy) in rows.index:
            about.append((workdir, policy, *_place(point, varied[point["arm"]], run)))
        else:
            left_out[point["label"]] = UNFINISHED if policy is None else UNTESTED
    places = pd.DataFrame(about, columns=[*key, "group", "k"]).set_index(key)
    found = places.join(rows)
    groups = []
    for (arm, group), own in found.groupby(["arm", "group"], sort=False):
        groups.append(_group(arm, group, own, "k"))
    warmups = _warmups(groups, rows)
    runs = [run for _, run in points]
    return Study(root, name, frame, rows, runs, groups, left_out, plan["config"], warmups, rates)


def _last_evaluated(run: Run) -> str | None:
    """Return the last policy of a point; None until its evaluations, and the stages they need, are
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
    if evaluated and needed <= run.results.keys():
        return evaluated[-1]
    return None


def _place(
    point: Mapping[str, Any], of_arm: Sequence[Mapping[str, str]], run: Run
) -> tuple[str, int]:
    """Name the group of a point, and its k: the steps of the first online stage that the arm
    varies.

    The name is the arm's, with the settings that vary within one k.
    """
    values = point["values"]
    steps = [f"stages.{name}.steps" for name in run.folders if run.kind(name) == ONLINE]
    k = next((name for name in steps if name in values), "")
    texts = pd.DataFrame([{"": 0, **own} for own in of_arm])  # 0: without K
    several = texts.groupby(texts[k].to_numpy()).nunique().max() > 1
    parts = [point["arm"]]
    for name in texts.columns[several]:
        if name in values:
            parts.append(f"{name.rpartition('.')[2].replace('_', ' ')} {values[name]}")
    return ", ".join(dict.fromkeys(parts)), int(values.get(k, 0))


def _group(arm: str, group: str, policies: pd.DataFrame, by: str) -> Group:
    rows = []
    for _, seeds in policies.groupby(by):
        name = group + f", K = {seeds['K'].mean():g}" * (policies[by].nunique() > 1)
        if seeds["ids"].map(tuple).nunique() > 1:
            raise ValueError(f"{name}: its seeds were tested on different problems")
        rows.append(Row(arm, group, name, seeds))
    return rows


def _warmups(groups: Sequence[Group], rows: pd.DataFrame) -> list[Group]:
    """Build groups of online training alone from evaluated warm-ups, unless a group covers them. K
    = 0 is their initial policy."""
    alone = _trajectories(flat(group for group in groups if not group[0].is_offline))
    families: list[list[Group]] = []
    for group in groups:
        own = _trajectories(group)
        if not group[0].is_offline or group[0].stops or not own or own & alone:
            continue
        family = next((one for one in families if own & _trajectories(flat(one))), [])
        family.append(group)
        if family == [group]:
            families.append(family)
    warmups = []
    for family in families:
        keys = []
        for policy in pd.concat([row.policies for row in flat(family)]).itertuples():
            behind = policy.ancestry.split(" > ")[:-1]
            keys += [(policy.workdir, name) for name in behind]
        policies = _there(rows, keys).sort_values("seed", kind="stable")
        name = WARMUP
        if len(families) > 1:
            name += f" of {'; '.join(group[0].group for group in family)}"
        warmups.append(_group(WARMUP, name, policies.drop_duplicates(["K", "seed"]), "K"))
    return [warmup for warmup in warmups if len(warmup) > 1]


def _trajectories(rows: Collection[Row]) -> set[str]:
    """Return the online stages that are the only training of these rows."""
    return set().union(*(row.policies["warmup"] for row in rows)) - {""}
