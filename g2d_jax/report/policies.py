"""Describe the policies of a run: what each was made from, what that cost, what it answered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from g2d_jax import accounting
from g2d_jax.config.policy_name import PolicyName, is_external, own_stage
from g2d_jax.report.format import number
from g2d_jax.report.runs import COLLECT, OFFLINE, ONLINE, SELECT, Run, Settings, Stage
from g2d_jax.report.tables import Manifest

if TYPE_CHECKING:
    import pandas as pd

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Policy:
    """A policy of a run: what it was made from, what that cost, and what it answered."""

    run: Run
    name: str

    def _section(self, policy: str) -> Settings:
        return self.run.sections.get(own_stage(policy), {})

    def _manifest(self, policy: str) -> Manifest:
        return self.run.manifests.get(own_stage(policy), {})

    @cached_property
    def chain(self) -> list[str]:
        """Itself, what it was trained from, or chosen from, and so on down to the first that
        neither made.

        Unlike `accounting.behind` without what its pairs were made from, which may be of other
        policies.
        """
        names = [self.name]
        for _ in self.run.sections:  # a config that goes in a circle ends too
            section = self._section(names[-1])
            if section.get("kind") not in (ONLINE, OFFLINE, SELECT):
                break
            chosen = self._manifest(names[-1]).get("result", {}).get("policy", "")
            names.append(str((section["kind"] == SELECT and chosen) or section.get("policy", "")))
        return names

    @property
    def _trained(self) -> list[str]:
        """The policies in `chain` from the one that was trained: the second where a stage chose
        it."""
        return self.chain[self._section(self.name).get("kind") == SELECT :]

    @property
    def section(self) -> Settings:
        """The config of the stage that trained it, {} if none did."""
        return self._section(self._trained[0])

    @property
    def kind(self) -> str:
        """The kind of the stage that trained it, "" if none did."""
        return str(self.section.get("kind", ""))

    @property
    def manifest(self) -> Manifest:
        """The manifest of the stage that trained it, {} if none did."""
        return self._manifest(self._trained[0])

    @property
    def parent(self) -> Policy | None:
        """The policy its training started from; None of one that online or offline training did not
        make."""
        if self.kind not in (ONLINE, OFFLINE):
            return None
        return Policy(self.run, self._trained[1])

    @property
    def loss(self) -> str:
        """The loss of the online training that made it, "" of any other policy."""
        return str(self.section.get("loss", "grpo")) if self.kind == ONLINE else ""

    @property
    def sync_every(self) -> int:
        """The updates of that training between two synchronisations of the policy that samples; 0
        is never."""
        return int(self.section.get("sync_every", 1))

    @property
    def external_start(self) -> str:
        """The policy of elsewhere ("run:…", "hf:…") that all began with, "" for none."""
        start = self.chain[-1]
        if start in self.run.sections:
            start = str(self._section(start).get("policy", ""))
        return start if is_external(start) else ""

    @property
    def pairs_manifest(self) -> Manifest:
        """The manifest of the collect stage whose pairs it was trained on, {} without one."""
        return self._manifest(str(self.section.get("preferences", "")))

    @property
    def online(self) -> list[str]:
        """The policies in `chain` that online training made, the last one first."""
        return [policy for policy in self.chain if self._section(policy).get("kind") == ONLINE]

    @property
    def is_single_warmup(self) -> bool:
        """Whether offline training made it of the cold policy, or of one that online training alone
        made of that."""
        kinds = [self._section(policy)["kind"] for policy in self._trained[1:-1]]
        is_online_alone = {*kinds} <= {SELECT, ONLINE} and kinds.count(ONLINE) <= 1
        return self.kind == OFFLINE and is_online_alone

    @property
    def steps(self) -> float:
        """K: the online steps behind it; NaN if a stage that counts them is not finished."""
        return sum(map(self.steps_of, self.online))

    def steps_of(self, policy: str) -> float:
        """Count the steps that the online stage of a policy in `chain` made; NaN if that is not
        finished."""
        step = PolicyName.parse(policy).step or ""
        if step.isdecimal():
            return float(step)
        return number(self._manifest(policy), "counts", "steps")

    @property
    def stop(self) -> Manifest:
        """Why the last online stage ended, of one that may end by itself (a manifest's "stop"); {}
        of any other."""
        if not self.online or not number(self._section(self.online[0]), "budget", "amount") > 0:
            return {}
        return self._manifest(self.online[0]).get("stop", {})

    @cached_property
    def costs(self) -> dict[str, float]:
        """The cost of making it by measure, supervised fine-tuning left out: it is the same for
        all.

        "hours": those that its tokens would take elsewhere, where the run has `Run.rates`.
        """
        run = self.run
        made = (self.name, run.sections, run.manifests)
        costs = accounting.cost_of(*made)
        if run.rates is not None:
            costs["hours"] = run.rates.hours(accounting.costs_by_stage(*made))
        return costs

    @property
    def flops(self) -> float:
        """The FLOPs of `costs`, NaN where a stage behind it is not finished."""
        try:
            return self.costs["flops"]
        except ValueError:
            return math.nan

    def evaluation(self, split: str | None) -> Stage | None:
        """Return the last stage that evaluated it on a split, None if none did."""
        for stage in reversed(self.run.evaluations):
            if stage.split == split and self.name in stage.policies:
                return stage
        return None

    def result(self, split: str) -> Manifest:
        """Return its measurements on a split, {} if there are none."""
        stage = self.evaluation(split)
        return stage.policies[self.name] if stage else {}

    def answers(self, split: str | None) -> pd.DataFrame | None:
        """Read its answers on a split with `Run.answers`; None if it was not evaluated there or
        they are gone."""
        stage = self.evaluation(split)
        if stage is None or not stage.rollouts_file(self.name).exists():
            return None
        return self.run.answers(stage.rollouts_file(self.name))

    @cached_property
    def gain(self) -> Array | None:
        """The accuracy that its training added on each test problem [N]; None if that is not
        known."""
        if self.parent is None:
            return None
        before = self.parent.answers("test")
        after = self.answers("test")
        if before is None or after is None or not before.index.equals(after.index):
            return None
        return (after.mean(axis=1) - before.mean(axis=1)).to_numpy()

    @property
    def mean_gain(self) -> float:
        """The mean of `gain`, NaN if that is not known."""
        return math.nan if self.gain is None else float(np.nanmean(self.gain))

    def measure(self, path: Sequence[str]) -> float:
        """Read a number in `pairs_manifest` (path: "collect", …) or the manifest of the stage that
        trained it, else NaN."""
        kind, *keys = path
        return number(self.pairs_manifest if kind == COLLECT else self.manifest, *keys)
