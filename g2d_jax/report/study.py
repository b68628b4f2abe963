"""What a study measured, read from its directory: points in rows, and GRPO's curves beside them.

sweeps/NAME.json ─► entries (one a finished point) ─► rows (their seeds) ─► groups (their K)
                                                              └─► warm-ups, where GRPO has no points of its own
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from etils import epath

from g2d_jax import frontier
from g2d_jax.accounting import behind
from g2d_jax.report.format import number
from g2d_jax.report.study_entry import OFFLINE, ONLINE, SELECT, Array, Entry, Files
from g2d_jax.storage import PathLike, read_json
from g2d_jax.workdir import PLANS, absolute, stage_folders


@dataclass(frozen=True, eq=False)
class Row:
    """Points that differ in their seed alone. ids: of the test problems; accuracies: [seeds, N] on them."""

    entries: Sequence[Entry]
    ids: tuple[str, ...]
    accuracies: Array

    @property
    def steps(self) -> int | None:
        """K where it is varied."""
        return self.entries[0].steps

    @property
    def seeds(self) -> frozenset[int]:
        """Of its points."""
        return frozenset(entry.seed for entry in self.entries)

    @property
    def reached(self) -> float:
        """The mean K of the seeds: where a warm-up stops by itself they differ."""
        return float(np.mean([entry.reached for entry in self.entries]))

    @cached_property
    def accuracy(self) -> frontier.Interval:
        """Mean accuracy with its interval over problems and seeds."""
        return frontier.bootstrap(self.accuracies)

    @cached_property
    def dev(self) -> float:
        """The mean accuracy on dev, NaN if a seed was not evaluated there."""
        return float(np.mean([number(entry.result("dev"), "mean") for entry in self.entries]))

    @cached_property
    def offline_gain(self) -> frontier.Interval | None:
        """What the offline stage added over the policy it started from, paired by seed and problem."""
        gains = [entry.offline_gain for entry in self.entries]
        known = [gain for gain in gains if gain is not None]
        return frontier.bootstrap(np.stack(known)) if known else None

    def cost(self, measure: str) -> float:
        """The mean over seeds of a cost, NaN for one that is not known."""
        return float(np.mean([entry.costs.get(measure, np.nan) for entry in self.entries]))

    def by_seed(self, kind: str, *keys: str) -> Array:
        """A number that a stage of each point measured [seeds], NaN where it did not; see `Entry.measure`."""
        return np.array([entry.measure(kind, *keys) for entry in self.entries])


@dataclass(frozen=True, eq=False)
class Group:
    """Points that differ in K and seed alone, in order of K. kind: of the stage that ends them."""

    name: str
    arm: str
    values: Mapping[str, str]
    kind: str
    rows: Sequence[Row]

    @property
    def is_baseline(self) -> bool:
        """Online training that simply goes on."""
        return self.kind != OFFLINE

    @property
    def stops(self) -> bool:
        """Whether the warm-up ends by itself."""
        return any(entry.stop for row in self.rows for entry in row.entries)

    @property
    def trajectories(self) -> frozenset[epath.Path]:
        """The folders of the online stages behind its points."""
        entries = [entry for row in self.rows for entry in row.entries]
        return frozenset(entry.folders[entry.warmup[0]] for entry in entries if entry.warmup)

    def goes_on_from(self, other: Group) -> bool:
        """Whether a point has the same online training behind it, and was tested on the same problems."""
        return bool(self.trajectories & other.trajectories) and self.rows[0].ids == other.rows[0].ids

    def curve(self, seed: int, measure: str) -> tuple[Array, Array] | None:
        """Give one seed's trajectory, costs [K] and accuracies [K, N]; None if it has fewer than two points."""
        found = [
            (entry.costs[measure], row.accuracies[i])
            for row in self.rows
            for i, entry in enumerate(row.entries)
            if entry.seed == seed
        ]
        found.sort(key=lambda pair: pair[0])
        costs = [cost for cost, _ in found]
        if len(found) < 2 or len(set(costs)) < len(costs) or not np.isfinite(costs).all():
            return None
        return np.array(costs), np.stack([values for _, values in found])


@dataclass(frozen=True)
class Study:
    """A study's directory. unfinished: labels of points that lack a stage; untested: of those without a test split.

    warmups: online training alone, as points that end offline evaluated it on their way, where no point is about it.
    """

    workdir: epath.Path
    name: str
    config: Mapping[str, Any]
    groups: Sequence[Group]
    warmups: Sequence[Group]
    unfinished: Sequence[str]
    untested: Sequence[str]

    @property
    def entries(self) -> list[Entry]:
        """All finished points that were evaluated on the test split."""
        return [entry for group in self.groups for row in group.rows for entry in row.entries]

    @property
    def offline(self) -> list[Group]:
        """Groups that end with offline training."""
        return [group for group in self.groups if not group.is_baseline]

    @property
    def baselines(self) -> list[Group]:
        """Groups of online training alone."""
        return [*(group for group in self.groups if group.is_baseline), *self.warmups]

    @property
    def swept(self) -> list[Group]:
        """Groups that end with offline training at several K."""
        return [group for group in self.offline if len(group.rows) > 1]


WARMUP = "warm-up (GRPO goes on)"
"""The name of `Study.warmups`."""


def studies(workdir: PathLike) -> list[str]:
    """The names of the studies in a directory, [] if it is none of studies."""
    folder = absolute(workdir) / PLANS
    return sorted(path.stem for path in folder.iterdir() if path.suffix == ".json") if folder.exists() else []


def read_study(workdir: PathLike, name: str) -> Study:
    """Read a study, finished or not.

    Raises ValueError if the directory has none of that name, a file is damaged, or points that differ in their seed
    alone were tested on different problems.
    """
    root = absolute(workdir)
    if name not in studies(root):
        raise ValueError(f"{root} holds no study {name!r}; there are: {', '.join(studies(root)) or 'none'}")
    plan = read_json(root / PLANS / f"{name}.json")
    files, entries, unfinished = Files(), [], []
    for point in plan["points"]:
        entry = _entry(root / "points" / name / point["label"], point, files)
        if entry is None:
            unfinished.append(point["label"])
        else:
            entries.append(entry)
    tested = [entry for entry in entries if entry.result("test")]
    untested = [entry.label for entry in entries if not entry.result("test")]
    groups = _groups(tested)
    return Study(root, name, plan["config"], groups, _warmups(groups), unfinished, untested)


def _entry(folder: epath.Path, point: Mapping[str, Any], files: Files) -> Entry | None:
    config = read_json(folder / "config.json")["config"]
    folders = stage_folders(folder)
    manifests = {name: files.manifest(place) for name, place in folders.items()}
    known = {name: manifest for name, manifest in manifests.items() if manifest is not None}
    evaluations = [stage for stage in config["stages"].values() if stage["kind"] == "evaluate"]
    if not evaluations or not _needed(config["stages"]) <= known.keys():
        return None
    final = evaluations[-1]["policies"][-1]
    steps_of = [field for field in point["values"] if _is_steps(field, config)]
    steps = int(point["values"][steps_of[0]]) if steps_of else None
    values = {field: text for field, text in point["values"].items() if field not in steps_of}
    stages = config["stages"]
    stage = stages.get(final.partition("@")[0], {})
    kind = stages[stage["policy"]]["kind"] if stage.get("kind") == SELECT else stage.get("kind", "")
    return Entry(point["label"], point["arm"], point["seed"], values, config, folders, known, final, kind, steps, files)


def _needed(stages: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Evaluations, and all the stages they rest on: points of K = 0 do not wait for a warm-up."""
    evaluations = {name: stage["policies"] for name, stage in stages.items() if stage["kind"] == "evaluate"}
    policies = {policy for some in evaluations.values() for policy in some}
    return {*evaluations, *(name for policy in policies for name in behind(policy, stages))}


def _is_steps(field: str, config: Mapping[str, Any]) -> bool:
    """Whether a field is K: the steps of an online stage."""
    section, _, name = field.removeprefix("stages.").rpartition(".")
    return name == "steps" and config["stages"].get(section, {}).get("kind") == ONLINE


def _groups(entries: Sequence[Entry]) -> list[Group]:
    found: dict[Any, dict[int | None, list[Entry]]] = {}
    for entry in entries:
        found.setdefault(entry.group, {}).setdefault(entry.steps, []).append(entry)
    groups = []
    for (arm, values), by_steps in found.items():
        ordered = sorted(by_steps.items(), key=lambda item: -1 if item[0] is None else item[0])
        rows = [_row(some) for _, some in ordered]
        kind = OFFLINE if any(entry.kind == OFFLINE for row in rows for entry in row.entries) else ONLINE
        groups.append(Group(_name(arm, values), arm, dict(values), kind, rows))
    return groups


def _warmups(groups: Sequence[Group]) -> list[Group]:
    """Online training alone from what points evaluated of their own warm-ups, unless a group is about just that."""
    alone, families = [group for group in groups if group.is_baseline], list[list[Group]]()
    for group in groups:
        one_warmup = all(entry.has_one_warmup for row in group.rows for entry in row.entries)
        if group.stops or not one_warmup or any(group.goes_on_from(other) for other in alone):
            continue
        family = next((some for some in families if any(group.goes_on_from(other) for other in some)), None)
        if family is None:
            families.append([group])
        else:
            family.append(group)
    found = [_warmup(family, several=len(families) > 1) for family in families]
    return [group for group in found if len(group.rows) > 1]


def _warmup(family: Sequence[Group], *, several: bool) -> Group:
    """Groups with one warm-up as a group of online training: K = 0 is the policy that it starts from."""
    shared = set[tuple[str, str]].intersection(*(set(group.values.items()) for group in family))
    values = {field: text for field, text in family[0].values.items() if (field, text) in shared}
    arm = f"{WARMUP} of {', '.join(dict.fromkeys(group.arm for group in family))}" if several else WARMUP
    by_steps: dict[int, dict[int, Entry]] = {}
    for entry in (entry for group in family for row in group.rows for entry in row.entries):
        for policy in entry.chain[1:]:
            one = replace(entry, arm=arm, values=values, final=policy, kind=ONLINE)
            if one.answers("test") is not None:
                by_steps.setdefault(one.reached, {}).setdefault(one.seed, replace(one, steps=one.reached))
    rows = [_row([entries[seed] for seed in sorted(entries)]) for _, entries in sorted(by_steps.items())]
    return Group(_name(arm, list(values.items())), arm, values, ONLINE, rows)


def _row(entries: Sequence[Entry]) -> Row:
    answers = [found for entry in entries if (found := entry.answers("test")) is not None]
    for entry, one in zip(entries, answers, strict=True):
        if one.ids != answers[0].ids:
            raise ValueError(f"{entries[0].label} and {entry.label} were tested on different problems")
    return Row(entries, answers[0].ids, np.stack([one.values for one in answers]))


def _name(arm: str, values: Sequence[tuple[str, str]]) -> str:
    """A group for readers: its arm, and what else varies, by the last part of the field's name."""
    return ", ".join([arm, described(dict(values))] if values else [arm])


def described(values: Mapping[str, str]) -> str:
    """What varies, for readers: "learning rate 0.0001"."""
    return ", ".join(f"{field.rpartition('.')[2].replace('_', ' ')} {text}" for field, text in values.items())
