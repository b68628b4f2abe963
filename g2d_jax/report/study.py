"""What a study measured, read from its directory: points, their costs and answers, and GRPO's curves beside them.

    sweeps/NAME.json ─► entries (one a finished point) ─► groups (points that differ in K and seed alone) ─► rows of tables
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from etils import epath
from numpy.typing import NDArray

from g2d_jax import accounting, frontier
from g2d_jax.records import Verdict
from g2d_jax.report.format import number
from g2d_jax.storage import PathLike, finished, read_json
from g2d_jax.tables import read_columns
from g2d_jax.workdir import PLANS, absolute, stage_folders

Array = NDArray[np.float64]
ONLINE, OFFLINE = "online", "offline"


@dataclass(frozen=True)
class Entry:
    """One finished point. values: field -> text, without what is in `steps`. config: of the point, as a mapping.

    final: the policy the point is about, the last one it evaluates, and kind: of the stage that trained it.
    steps: K of the warm-up, or of the online run itself; None without an online stage.
    """

    label: str
    arm: str
    seed: int
    values: Mapping[str, str]
    config: Mapping[str, Any]
    folders: Mapping[str, epath.Path]
    manifests: Mapping[str, Mapping[str, Any]]
    final: str
    kind: str
    steps: int | None

    @property
    def group(self) -> tuple[str, tuple[tuple[str, str], ...]]:
        """What points have in common that differ in K and seed alone."""
        return self.arm, tuple(self.values.items())

    @property
    def costs(self) -> dict[str, float]:
        """What making the final policy cost, supervised fine-tuning left out: it is the same for all."""
        price = self.config["compute"].get("price_per_device_hour")
        return accounting.cost_of(self.final, self.config["stages"], self.manifests, price_per_device_hour=price)

    def evaluation(self, split: str) -> Mapping[str, Any] | None:
        """The manifest of the stage that evaluates the final policy on a split."""
        for name, stage in self.config["stages"].items():
            if stage["kind"] == "evaluate" and stage["split"] == split and self.final in stage["policies"]:
                return self.manifests[name]
        return None

    def result(self, split: str) -> Mapping[str, Any]:
        """What was measured of the final policy on a split, {} if nothing was."""
        policies = (self.evaluation(split) or {}).get("result", {}).get("policies", ())
        return next((policy for policy in policies if policy["name"] == self.final), {})

    def accuracies(self, split: str) -> Array | None:
        """Each problem's mean accuracy [N] on a split, in the order of problems.json; None if it was not evaluated."""
        found = self.result(split)
        if not found:
            return None
        folder = self.folders[str((self.evaluation(split) or {})["name"])]
        order = {row["id"]: i for i, row in enumerate(read_json(folder / "problems.json"))}
        rows = read_columns(absolute(folder / found["rollouts"]), ("problem_id", "verdict"))
        values = {Verdict.CORRECT.value: 1.0, Verdict.UNSCORABLE.value: np.nan}
        right = np.array([values.get(str(verdict), 0.0) for verdict in rows["verdict"]])
        places = np.array([order[name] for name in rows["problem_id"]])
        known = ~np.isnan(right)
        counts = np.bincount(places[known], minlength=len(order))
        sums = np.bincount(places[known], right[known], minlength=len(order))
        return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)

    def measured(self, kind: str) -> Mapping[str, Any]:
        """The result of the point's last stage of a kind ("collect", "offline"), {} if it has none."""
        found = [manifest for manifest in self.manifests.values() if manifest["kind"] == kind]
        return found[-1].get("result", {}) if found else {}


@dataclass(frozen=True)
class Row:
    """Points that differ in their seed alone. accuracies: [seeds, N] on the test split; dev: their means on dev."""

    entries: Sequence[Entry]
    accuracies: Array
    dev: float

    @property
    def steps(self) -> int | None:
        """K."""
        return self.entries[0].steps

    @cached_property
    def accuracy(self) -> frontier.Interval:
        """Mean accuracy with its interval over problems and seeds."""
        return frontier.bootstrap(self.accuracies)

    def cost(self, measure: str) -> float:
        """The mean over seeds of a cost."""
        return float(np.mean([entry.costs[measure] for entry in self.entries]))

    def mean(self, kind: str, *keys: str) -> float:
        """The mean over seeds of a number that a stage of a kind measured, NaN if it measured none."""
        return float(np.mean([number(entry.measured(kind), *keys) for entry in self.entries]))


@dataclass(frozen=True)
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

    def curve(self, seed: int, measure: str) -> frontier.Curve | None:
        """One seed's trajectory over a cost, None if it has fewer than two points there."""
        found = [
            (entry.costs[measure], row.accuracies[i])
            for row in self.rows
            for i, entry in enumerate(row.entries)
            if entry.seed == seed
        ]
        found.sort(key=lambda pair: pair[0])
        costs = [cost for cost, _ in found]
        if len(found) < 2 or len(set(costs)) < len(costs):
            return None
        return frontier.Curve(self.name, np.array(costs), np.stack([values for _, values in found]))


@dataclass(frozen=True)
class Study:
    """A study's directory. unfinished: labels of points that lack a stage."""

    workdir: epath.Path
    name: str
    config: Mapping[str, Any]
    groups: Sequence[Group]
    unfinished: Sequence[str]

    @property
    def offline(self) -> list[Group]:
        """Groups that end with offline training."""
        return [group for group in self.groups if not group.is_baseline]

    @property
    def baselines(self) -> list[Group]:
        """Groups of online training alone."""
        return [group for group in self.groups if group.is_baseline]

    def best_baseline(self) -> Group | None:
        """The baseline whose best point on dev is highest: how a learning rate is chosen without the test split."""
        known = [group for group in self.baselines if any(row.dev == row.dev for row in group.rows)]
        best = [max(row.dev for row in group.rows if row.dev == row.dev) for group in known]
        return known[frontier.best_on(best)] if known else None


def studies(workdir: PathLike) -> list[str]:
    """The names of the studies in a directory, [] if it is none of studies."""
    folder = absolute(workdir) / PLANS
    return sorted(path.stem for path in folder.iterdir() if path.suffix == ".json") if folder.exists() else []


def read_study(workdir: PathLike, name: str) -> Study:
    """Read a study, finished or not. Raises ValueError if the directory has none of that name, or a file is damaged."""
    root = absolute(workdir)
    if name not in studies(root):
        raise ValueError(f"{root} holds no study {name!r}; there are: {', '.join(studies(root)) or 'none'}")
    plan = read_json(root / PLANS / f"{name}.json")
    entries, unfinished = [], []
    for point in plan["points"]:
        entry = _entry(root / "points" / name / point["label"], point)
        if entry is None:
            unfinished.append(point["label"])
        else:
            entries.append(entry)
    return Study(root, name, plan["config"], _groups(entries), unfinished)


def _entry(folder: epath.Path, point: Mapping[str, Any]) -> Entry | None:
    config = read_json(folder / "config.json")["config"]
    folders = stage_folders(folder)
    manifests = {name: finished(place) for name, place in folders.items()}
    known = {name: manifest for name, manifest in manifests.items() if manifest is not None}
    evaluations = [stage for stage in config["stages"].values() if stage["kind"] == "evaluate"]
    if len(known) < len(manifests) or not evaluations:
        return None
    final = evaluations[-1]["policies"][-1]
    stage = config["stages"].get(final.partition("@")[0], {})
    steps_of = [field for field in point["values"] if _is_steps(field, config)]
    steps = int(point["values"][steps_of[0]]) if steps_of else None
    values = {field: text for field, text in point["values"].items() if field not in steps_of}
    kind = stage.get("kind", "")
    return Entry(point["label"], point["arm"], point["seed"], values, config, folders, known, final, kind, steps)


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
        rows = [row for _, some in ordered if (row := _row(some)) is not None]
        if rows:
            kind = OFFLINE if any(entry.kind == OFFLINE for row in rows for entry in row.entries) else ONLINE
            groups.append(Group(_name(arm, values), arm, dict(values), kind, rows))
    return groups


def _row(entries: Sequence[Entry]) -> Row | None:
    answers = [entry.accuracies("test") for entry in entries]
    if any(one is None for one in answers):
        return None
    dev = [number(entry.result("dev"), "mean") for entry in entries]
    return Row(entries, np.stack([one for one in answers if one is not None]), float(np.mean(dev)))


def _name(arm: str, values: Sequence[tuple[str, str]]) -> str:
    """A group for readers: its arm, and what else varies, by the last part of the field's name."""
    return ", ".join([arm, *(f"{field.rpartition('.')[2]} {text}" for field, text in values)])


@dataclass(frozen=True)
class Advantage:
    """What offline training after K steps is worth against a baseline that spent as much on a measure."""

    group: Group
    row: Row
    baseline: Group
    measure: str
    difference: frontier.Interval | None


def advantages(study: Study, measure: str) -> list[Advantage]:
    """Every row of every group that ends offline, against every baseline; the difference is None out of its range."""
    return [
        Advantage(group, row, baseline, measure, _difference(row, baseline, measure))
        for group in study.offline
        for row in group.rows
        for baseline in study.baselines
    ]


def _difference(row: Row, baseline: Group, measure: str) -> frontier.Interval | None:
    pairs = [
        ((entry.costs[measure], row.accuracies[i]), curve)
        for i, entry in enumerate(row.entries)
        if (curve := baseline.curve(entry.seed, measure)) is not None
    ]
    return frontier.compare([point for point, _ in pairs], [curve for _, curve in pairs]) if pairs else None
