"""One frame of policies: what each was made from, what that cost, and how it answers.

work directories ─► read_run ─► Policy, whose ancestry is walked here ─► policies(), a row each
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from etils import epath

from g2d_jax import accounting, stage_result
from g2d_jax.config.policy_name import PolicyName, is_external, own_stage
from g2d_jax.report.format import number
from g2d_jax.report.runs import COLLECT, OFFLINE, ONLINE, SELECT, Run, Settings, read_run, studies
from g2d_jax.runtime.storage import PathLike, read_json
from g2d_jax.stage_result import MEASURES, Evaluated, Evaluation, StageResult, Stop
from g2d_jax.study import frontier, stats
from g2d_jax.study.pricing import Rates
from g2d_jax.workdir import PLANS, absolute


def policies(*workdirs: PathLike) -> pd.DataFrame:
    """Read every evaluated policy of runs, of the points of studies, and of tables such as
    benchmarks/results, as a row each.

    A row is one policy on one split of problems, of one run and so of one seed. Where several
    stages evaluated it on a split, the last counts. NaN, or an empty text, is not known.

    workdir, study, arm       the run's folder; a point's study and arm, "" of a run
    settings                  what its point varies: "FIELD=TEXT;…"
    seed, policy, split       split: "test" or "dev"
    label                     for readers: the step that a best_checkpoint stage chose
    ancestry                  "sft > warmup@20 > dpo": the first policy, then all that was made of it
    kind                      of the stage that trained it: "sft", "online", "offline"
    loss                      of that stage: "grpo", "dpo", "simpo", …
    learning_rate             of that stage
    online_learning_rate      of the last online stage behind it
    K                         online updates behind it
    s                         updates between two synchronisations of the sampling policy, inf is never
    generated, prefilled, scored, trained, tokens, flops, seconds, device_seconds, verifier_cpu_seconds
                              spent to make it (tokens, FLOPs, seconds), supervised fine-tuning left out
    problems, samples         of the evaluation: how many, and sampled answers to each
    accuracy, standard_error  mean over problems in [0, 1]; its error clustered by problem
    low, high                 95 % interval over problems: another seed is not in it
    greedy                    accuracy of greedy answers
    pass@K                    chance that one of K answers is right, a column for each K
    reward/TASK               mean reward, a column for each task where there are several, or one without
                              right and wrong
    mean_length, entropy, truncated     tokens; nats a token; share cut at the limit
    ids, correct              arrays: problem ids [N] ascending; answers [N, samples], 1 right, 0 wrong,
                              NaN not scored

    Tables have fewer columns. Raises ValueError for a folder that holds none of these, and for
    damaged records.
    """
    frames = []
    for workdir in workdirs:
        is_table = (absolute(workdir) / TABLES[0]).exists()
        frames.append(_archived(absolute(workdir)) if is_table else frame_of(runs_of(workdir)))
    return pd.concat(frames, ignore_index=True)


TABLES = ("policies.parquet", "verdicts.parquet")
"""Files of studies whose work directories are gone: see benchmarks/claims.py."""


def _archived(folder: epath.Path) -> pd.DataFrame:
    """Read the policies of `TABLES`, with the intervals that the verdicts give."""
    point = ["study", "arm", "setting", "rate", "seed", "budget", "policy"]
    read, verdicts = (pd.read_parquet(folder / name) for name in TABLES)
    costs = ["flops", "generated", "trained", "tokens"]
    shown = {"var_name": "split", "value_name": "accuracy"}
    frame = read.melt([*point, *costs], ["dev", "test"], **shown).dropna(subset="accuracy")
    by_problem = verdicts["correct"] / verdicts["answers"]
    grouped = by_problem.groupby([verdicts[name].astype(object) for name in (*point, "split")])
    spread = grouped.agg(standard_error="sem", problems="count")
    frame = frame.merge(spread, "left", left_on=[*point, "split"], right_index=True)
    half = frame["problems"].map(stats.t_quantile) * frame["standard_error"]
    frame["low"] = (frame["accuracy"] - half).clip(0, 1)
    frame["high"] = (frame["accuracy"] + half).clip(0, 1)
    frame["rate"] = pd.to_numeric(frame["rate"], errors="coerce")
    names = {"setting": "settings", "rate": "online_learning_rate", "budget": "K"}
    return frame.rename(columns=names)


def frame_of(runs: Iterable[tuple[Mapping[str, str], Run]]) -> pd.DataFrame:
    """Return the frame of runs, each with what its point of a study varies; see `policies`."""
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for point, run in runs:
        for _, evaluation in run.evaluated():
            for entry in evaluation.policies:
                key = (str(run.workdir), evaluation.split, entry.name)
                row = _row(Policy(run, entry.name), evaluation, entry)
                rows[key] = {"workdir": str(run.workdir), **point, **row}
    if not rows:
        return pd.DataFrame(columns=["workdir", *NO_POINT, "seed", "policy", "split", "accuracy"])
    return pd.DataFrame(list(rows.values()))


NO_POINT = {"study": "", "arm": "", "settings": ""}
"""The columns of a run that belongs to no study."""


def runs_of(workdir: PathLike, study: str | None = None) -> Iterator[tuple[Mapping[str, str], Run]]:
    """Yield the run of a work directory, or the points of its studies, or of one of these, each
    with what it varies."""
    read = functools.cache(stage_result.read_lenient)
    names = studies(workdir) if study is None else [study]
    if not names:
        yield NO_POINT, read_run(workdir, read=read)
    root = absolute(workdir)
    for name in names:
        for point in read_json(root / PLANS / f"{name}.json")["points"]:
            settings = ";".join(f"{field}={text}" for field, text in point["values"].items())
            varied = {"study": name, "arm": point["arm"], "settings": settings}
            yield varied, read_run(root / "points" / name / point["label"], read=read)


def _row(policy: Policy, evaluation: Evaluation, entry: Evaluated) -> dict[str, Any]:
    ids, correct = answers_of(evaluation, entry)
    interval = interval_of(entry)
    online = policy.sections_of(ONLINE)
    return {
        "seed": policy.run.seed,
        "policy": policy.name,
        "label": entry.label,
        "split": evaluation.split,
        "ancestry": " > ".join(reversed(policy.chain)),
        "kind": policy.kind,
        "loss": policy.loss,
        "learning_rate": _learning_rate(policy.section),
        "online_learning_rate": _learning_rate(online[0] if online else {}),
        "K": policy.steps,
        "s": (policy.sync_every or math.inf) if policy.kind == ONLINE else math.nan,
        **policy.costs,
        "problems": len(ids),
        "samples": evaluation.samples,
        "accuracy": interval.mean,
        "standard_error": entry.accuracy.sem_clustered,
        "low": interval.low,
        "high": interval.high,
        "greedy": entry.greedy,
        **{f"pass@{k}": entry.pass_at[k] for k in sorted(entry.pass_at, key=int)},
        **{f"reward/{task}": result.reward for task, result in entry.tasks.items()},
        "mean_length": entry.measure("mean_length"),
        "entropy": entry.measure("entropy"),
        "truncated": entry.measure("frac_truncated"),
        "ids": ids,
        "correct": correct,
    }


def _learning_rate(section: Settings) -> float:
    return float(section.get("optimizer", {}).get("learning_rate", math.nan))


def interval_of(entry: Evaluated) -> frontier.Interval:
    """Return a policy's accuracy with its 95 % interval over problems, NaN where there is none."""
    return frontier.mean_interval(stats.row_means(entry.correct)[None], limits=(0, 1))


def answers_of(evaluation: Evaluation, entry: Evaluated) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of the problems [N], ascending, and a policy's answers to them [N, S]."""
    ids = np.array(evaluation.ids, dtype=object)
    order = np.argsort(ids)
    return ids[order], entry.correct[order]


@dataclass(frozen=True, eq=False)
class Policy:
    """A policy of a run, its ancestry, and what that cost. rates: those at which its tokens are
    priced."""

    run: Run
    name: str
    rates: Rates | None = None

    def _section(self, policy: str) -> Settings:
        return self.run.sections.get(own_stage(policy), {})

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
            kind = section.get("kind")
            if kind not in (ONLINE, OFFLINE, SELECT):
                break
            chooser = self.run.results.get(own_stage(names[-1]))
            chosen = chooser.selection if chooser and kind == SELECT else None
            names.append(chosen.policy if chosen else str(section.get("policy", "")))
        return names

    @cached_property
    def trained(self) -> list[str]:
        """The policies in `chain` from the one that was trained: the second where a stage chose
        it."""
        return self.chain[self._section(self.name).get("kind") == SELECT :]

    def sections_of(self, kind: str) -> list[Settings]:
        """List the settings of the stages of a kind in `chain`, the last one first."""
        sections = map(self._section, self.chain)
        return [section for section in sections if section.get("kind") == kind]

    @property
    def section(self) -> Settings:
        """The config of the stage that trained it, {} if none did."""
        return self._section(self.trained[0])

    @property
    def kind(self) -> str:
        """The kind of the stage that trained it, "" if none did."""
        return str(self.section.get("kind", ""))

    @property
    def result(self) -> StageResult | None:
        """The record of the stage that trained it, None if none did or it is not finished."""
        return self.run.results.get(own_stage(self.trained[0]))

    @property
    def collected(self) -> StageResult | None:
        """The record of the collect stage whose pairs it was trained on, None without one."""
        result = self.run.results.get(str(self.section.get("preferences", "")))
        return result if result is not None and result.kind == COLLECT else None

    @property
    def parent(self) -> Policy | None:
        """The policy its training started from; None of one that online or offline training did not
        make."""
        if self.kind not in (ONLINE, OFFLINE):
            return None
        return Policy(self.run, self.trained[1], self.rates)

    @property
    def loss(self) -> str:
        """The loss of the training that made it, "" of any other policy."""
        if self.kind == OFFLINE:
            loss = str(self.section.get("loss_type", "sigmoid"))
            return loss if loss in ("simpo", "ipo") else "dpo"
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
    def online(self) -> list[str]:
        """The policies in `chain` that online training made, the last one first."""
        return [policy for policy in self.chain if self._section(policy).get("kind") == ONLINE]

    @property
    def is_single_warmup(self) -> bool:
        """Whether offline training made it of the cold policy, or of one that online training alone
        made of that."""
        kinds = [self._section(policy)["kind"] for policy in self.trained[1:-1]]
        is_online_alone = {*kinds} <= {SELECT, ONLINE} and kinds.count(ONLINE) <= 1
        return self.kind == OFFLINE and is_online_alone

    @cached_property
    def steps(self) -> float:
        """K: the online steps behind it; NaN if a stage that counts them is not finished."""
        return sum(map(self.steps_of, self.online))

    def steps_of(self, policy: str) -> float:
        """Count the steps that the online stage of a policy in `chain` made; NaN if that is not
        finished."""
        step = PolicyName.parse(policy).step or ""
        if step.isdecimal():
            return float(step)
        result = self.run.results.get(own_stage(policy))
        return float(result.counts.get("steps", math.nan)) if result else math.nan

    @property
    def stop(self) -> Stop | None:
        """Why the last online stage ended, of one that may end by itself; None of any other."""
        if not self.online or not number(self._section(self.online[0]), "budget", "amount") > 0:
            return None
        result = self.run.results.get(own_stage(self.online[0]))
        return result.stop if result else None

    @cached_property
    def costs(self) -> dict[str, float]:
        """The cost of making it by measure, supervised fine-tuning left out: it is the same for
        all. NaN where a stage behind it is not finished.

        "hours": those that its tokens would take elsewhere, where there are `rates`.
        """
        made = (self.name, self.run.sections, self.run.results)
        try:
            costs = accounting.cost_of(*made)
            if self.rates is not None:
                costs["hours"] = self.rates.hours(accounting.costs_by_stage(*made))
        except ValueError:
            hours = [] if self.rates is None else ["hours"]
            return dict.fromkeys([*MEASURES, *hours], math.nan)
        return costs

    @property
    def flops(self) -> float:
        """The FLOPs of `costs`."""
        return self.costs["flops"]

    def evaluated(self, split: str) -> tuple[str, Evaluation, Evaluated] | None:
        """Return the last stage that evaluated it on a split, with its result and the policy's."""
        for stage, evaluation in reversed([*self.run.evaluated(split)]):
            if self.name in evaluation.by_name:
                return stage, evaluation, evaluation.by_name[self.name]
        return None

    @functools.cache  # noqa: B019 (a policy lives as long as its report)
    def answers(self, split: str) -> pd.DataFrame | None:
        """Return its answers on a split, problem ids ascending by samples: 1, 0, NaN not scored;
        None if it was not evaluated there."""
        found = self.evaluated(split)
        if found is None:
            return None
        ids, correct = answers_of(*found[1:])
        return pd.DataFrame(correct, index=ids)

    @cached_property
    def gain(self) -> np.ndarray | None:
        """The accuracy that its training added on each test problem [N]; None if that is not
        known."""
        if self.parent is None:
            return None
        before, after = self.parent.answers("test"), self.answers("test")
        if before is None or after is None or not before.index.equals(after.index):
            return None
        return stats.row_means(after.to_numpy()) - stats.row_means(before.to_numpy())

    def measure(self, path: Sequence[str]) -> float:
        """Read a number of the record of the collect stage behind it (path: "collect", part, name)
        or of the stage that trained it (kind, part, name), else NaN."""
        kind, part, name = path
        result = self.collected if kind == COLLECT else self.result
        if result is None:
            return math.nan
        if part == "counts":
            return float(result.counts.get(name, math.nan))
        return result.measure(part, name)
