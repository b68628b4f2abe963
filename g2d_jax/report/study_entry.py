"""One finished point of a study: what it is about, what it cost, and what its policies answered."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from etils import epath
from numpy.typing import NDArray

from g2d_jax import accounting
from g2d_jax.records import Verdict
from g2d_jax.report.format import number
from g2d_jax.storage import finished, read_json
from g2d_jax.tables import read_columns
from g2d_jax.workdir import absolute

Array = NDArray[np.float64]
ONLINE, OFFLINE, SELECT = "online", "offline", "select"


class Answers(NamedTuple):
    """A policy's answers: the problems' ids [N], and each one's mean accuracy [N], NaN where nothing is scored."""

    ids: tuple[str, ...]
    values: Array


def mean_of(values: Array | None) -> float:
    """Give the mean of [N] over what is not NaN; NaN for None or nothing."""
    known = np.array([]) if values is None else values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


class Files:
    """What was read of a study's files, each of them once: points share stages, evaluations share answers."""

    def __init__(self) -> None:
        self.manifest = functools.cache(finished)
        self.answers = functools.cache(_answers)


def _answers(folder: epath.Path, file: epath.Path) -> Answers:
    """The answers in a file of rollouts, in the order of the problems.json in the folder of an evaluation."""
    order = {str(row["id"]): i for i, row in enumerate(read_json(folder / "problems.json"))}
    rows = read_columns(file, ("problem_id", "verdict"))
    if unknown := {str(name) for name in rows["problem_id"]} - order.keys():
        raise ValueError(
            f"{file} has answers to a problem that {folder / 'problems.json'} lacks: {min(unknown)!r:.100}"
        )
    values = {verdict.value: verdict.accuracy for verdict in Verdict}
    right = np.array([values.get(str(verdict), 0.0) for verdict in rows["verdict"]])
    places = np.array([order[str(name)] for name in rows["problem_id"]], np.int64)
    known = ~np.isnan(right)
    counts = np.bincount(places[known], minlength=len(order))
    sums = np.bincount(places[known], right[known], minlength=len(order))
    return Answers(tuple(order), np.where(counts > 0, sums / np.maximum(counts, 1), np.nan))


@dataclass(frozen=True)
class Entry:
    """One finished point. values: field -> text, without what is in `steps`. config: of the point, as a mapping.

    final: the policy the point is about, the last one it evaluates, and kind: of the stage that trained it, "" if none
    did; what a select stage chose was trained by the stage it chose from. steps: K where points of the arm vary it,
    else None (`reached` is the K of any point).
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
    files: Files = field(default_factory=Files, compare=False, repr=False)

    @property
    def group(self) -> tuple[str, tuple[tuple[str, str], ...]]:
        """What points have in common that differ in K and seed alone."""
        return self.arm, tuple(self.values.items())

    @cached_property
    def costs(self) -> dict[str, float]:
        """What making the final policy cost, supervised fine-tuning left out: it is the same for all."""
        price = self.config["compute"].get("price_per_device_hour")
        return accounting.cost_of(self.final, self.config["stages"], self.manifests, price_per_device_hour=price)

    @cached_property
    def chain(self) -> list[str]:
        """The policies that led to the final one: itself, what it was trained from, or chosen from, and so on.

        Unlike `accounting.behind` without what its pairs were made from, which may be of other policies.
        """
        stages, found = self.config["stages"], [self.final]
        while (stage := stages.get(name := found[-1].partition("@")[0])) and stage["kind"] in (ONLINE, OFFLINE, SELECT):
            found.append(self.manifests[name]["result"]["policy"] if stage["kind"] == SELECT else stage["policy"])
        return found

    @property
    def made(self) -> int:
        """The place in `chain` of the policy that the final one is: 1 where a stage chose it, else 0."""
        stage = self.config["stages"].get(self.final.partition("@")[0], {})
        return int(stage.get("kind") == SELECT)

    @property
    def parent(self) -> str | None:
        """The policy that the offline stage started from, None if the point does not end offline."""
        return self.chain[self.made + 1] if self.kind == OFFLINE else None

    @property
    def warmup(self) -> tuple[str, int | None] | None:
        """The online stage behind the final policy, and the step it was taken at (None: its end)."""
        for policy in self.chain[:-1]:
            name, _, step = policy.partition("@")
            if self.config["stages"][name]["kind"] == ONLINE:
                return name, int(step) if step else None
        return None

    @property
    def reached(self) -> int:
        """K: the online steps behind the final policy."""
        if self.warmup is None:
            return 0
        name, step = self.warmup
        return int(self.manifests[name]["counts"]["steps"]) if step is None else step

    @property
    def stop(self) -> Mapping[str, Any]:
        """Why the warm-up ended, of one that may end by itself (a manifest's "stop"); {} of any other."""
        if self.warmup is None or self.config["stages"][self.warmup[0]].get("stop", "steps") == "steps":
            return {}
        return self.manifests[self.warmup[0]].get("stop", {})

    def _evaluated(self, split: str, policy: str) -> tuple[str, Mapping[str, Any]] | None:
        for name, stage in self.config["stages"].items():
            if stage["kind"] == "evaluate" and stage["split"] == split and policy in stage["policies"]:
                entries = self.manifests[name].get("result", {}).get("policies", ())
                return next(((name, entry) for entry in entries if entry["name"] == policy), None)
        return None

    def result(self, split: str, policy: str | None = None) -> Mapping[str, Any]:
        """What was measured of a policy (None: the final one) on a split, {} if nothing was."""
        found = self._evaluated(split, policy or self.final)
        return found[1] if found else {}

    def answers(self, split: str, policy: str | None = None) -> Answers | None:
        """The answers of a policy (None: the final one) on a split; None if it was not evaluated there."""
        found = self._evaluated(split, policy or self.final)
        if found is None:
            return None
        folder = self.folders[found[0]]
        return self.files.answers(folder, absolute(folder / found[1]["rollouts"]))

    @cached_property
    def offline_gain(self) -> Array | None:
        """What the offline stage added on each test problem [N], None if either policy was not evaluated."""
        before = self.answers("test", self.parent) if self.parent else None
        after = self.answers("test")
        return None if before is None or after is None or before.ids != after.ids else after.values - before.values

    @property
    def has_one_warmup(self) -> bool:
        """Whether offline training started from the cold policy, or from one that online training alone made of it."""
        kinds = [self.config["stages"][policy.partition("@")[0]]["kind"] for policy in self.chain[self.made + 1 : -1]]
        return self.parent is not None and [kind for kind in kinds if kind != SELECT] in ([], [ONLINE])

    @property
    def pairs_from(self) -> Mapping[str, Any]:
        """The manifest of the collect stage that the offline stage read, {} without one."""
        return self.manifests.get(self._pairs_stage, {})

    @property
    def _pairs_stage(self) -> str:
        """ "" for a policy that is not trained on a stage's pairs."""
        name = str(self.config["stages"].get(self.chain[self.made].partition("@")[0], {}).get("preferences", ""))
        return name if name in self.folders else ""

    @property
    def trained(self) -> Mapping[str, Any]:
        """The manifest of the stage that made the final policy, {} if none did."""
        return self.manifests.get(self.chain[self.made].partition("@")[0], {})

    def measure(self, kind: str, *keys: str) -> float:
        """A number in the manifest of the stage behind `pairs_from` ("collect") or `trained` ("offline"), else NaN."""
        return number(self.pairs_from if kind == "collect" else self.trained, *keys)
