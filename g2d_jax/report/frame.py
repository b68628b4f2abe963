"""One frame of policies: ancestry, cost and accuracy of each.

work directories ─► read_run ─► Policy, which follows its ancestry ─► policies(), a row each
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from etils import epath

from g2d_jax.config.policy_name import PolicyName, is_external, own_stage
from g2d_jax.report.format import number
from g2d_jax.report.runs import OFFLINE, ONLINE, SELECT, Run, Settings, read_run, studies
from g2d_jax.runtime.storage import PathLike, read_json
from g2d_jax.session import accounting, stage_result
from g2d_jax.session.stage_result import MEASURES, Evaluated, Evaluation, StageResult, Stop
from g2d_jax.session.workdir import PLANS, absolute
from g2d_jax.study import frontier, stats
from g2d_jax.study.pricing import Rates


def policies(*workdirs: PathLike) -> pd.DataFrame:
    """Read every evaluated policy of runs, of points of studies, and of tables such as
    benchmarks/results, as a row each.

    A row is one policy of one run on one split, so of one seed. If several stages evaluated it on a
    split, the evaluation of the most policies counts, then the last. Unknown values are NaN or "".

        workdir, study, arm        the run's folder; a point's study and arm, "" for a run
        settings                   settings that its point varies: "FIELD=TEXT;…"
        seed, policy, split        split: "test" or "dev"
        label                      for readers: the step that a best_checkpoint stage chose
        ancestry                   "sft > warmup@20 > dpo": the first policy, then its descendants
        parent                     the policy that its training started from
        made                       its stage's folder and step, equal in all points that share it
        warmup                     folder of its online stage, if that is the only training besides
                                   the first policy's and final offline training
        start                      the external policy that it began with: "run:…", "hf:…"
        kind                       of the stage that trained it: "sft", "online", "offline"
        loss                       of that stage: "grpo", "dpo", "simpo", …
        learning_rate              of that stage
        online_learning_rate       of the last online stage in its ancestry
        K                          online updates in its ancestry
        s                          updates from one synchronisation to the next, or inf
        ahead                      of that training: 1 if its server sampled ahead, otherwise NaN
        stop                       why its last online stage ended, if that may end by itself
        generated, prefilled, scored, trained, tokens, flops, seconds, device_seconds, verifier_cpu_seconds
                                   cost of its training (tokens, FLOPs, seconds), without
                                   supervised fine-tuning
        hours                      of its tokens at the rates of a plan, if there are any
        problems, samples          of the evaluation: problems, and sampled answers to each
        accuracy, standard_error   mean over problems in [0, 1]; its error clustered by problem
        low, high                  95 % interval over problems, for this seed only
        gain, gain_low, gain_high  accuracy minus the parent's in the same evaluation, paired by
                               problem, with its interval
        greedy                     accuracy of greedy answers
        pass@K                     chance that one of K answers is correct, a column for each K
        reward/TASK                mean reward, for several tasks, or one whose reward only ranks
        mean_length, entropy, truncated  tokens; nats a token; share truncated at the limit
        pairs                      of its offline training
        rollouts/…, pairs/…        informativeness of those pairs, and of the rollouts they are from
        before/…, after/…, margins/…  of these pairs, before and after offline training
        ids, correct, gains        arrays: problem ids [N] ascending; answers [N, samples],
                               1 correct, 0 incorrect, NaN not scored; gains [N] or None

    Tables have fewer columns. Raises ValueError without a folder, for a folder with none of these,
    and for damaged records.
    """
    if not workdirs:
        raise ValueError("name folders of runs or studies, as in policies('runs/mine')")
    frames = []
    for folder in map(absolute, workdirs):
        if (folder / TABLES[0]).exists():
            frames.append(_archived(folder))
        else:
            frames.append(frame_of(runs_of(folder)))
    return pd.concat(frames, ignore_index=True)


TABLES = ("policies.parquet", "verdicts.parquet")
"""Tables of studies whose work directories no longer exist: see benchmarks/claims.py."""


def _archived(folder: epath.Path) -> pd.DataFrame:
    """Read the policies of `TABLES`, with the intervals of the verdicts."""
    table, verdicts = (pd.read_parquet(folder / name) for name in TABLES)
    one = ["study", "arm", "setting", "rate", "seed", "budget", "policy"]
    verdicts["correct"] /= verdicts["answers"]
    answers = verdicts.groupby([*one, "split"], observed=True)["correct"]
    found = answers.agg(accuracy="mean", standard_error="sem", problems="count").reset_index()
    frame = found.merge(table[[*one, "flops", "generated", "trained", "tokens"]], "left", one)
    half = frame["problems"].map(stats.t_quantile) * frame["standard_error"]
    frame["low"] = (frame["accuracy"] - half).clip(0, 1)
    frame["high"] = (frame["accuracy"] + half).clip(0, 1)
    frame["rate"] = pd.to_numeric(frame["rate"], errors="coerce")
    names = {"setting": "settings", "rate": "online_learning_rate", "budget": "K"}
    return frame.rename(columns=names)


def frame_of(
    runs: Iterable[tuple[Mapping[str, str], Run]], rates: Rates | None = None
) -> pd.DataFrame:
    """Return the frame of runs, each with the settings that its point varies; see `policies`.
    rates: for `hours`."""
    rows = []
    for point, run in runs:
        policy_of = functools.cache(functools.partial(Policy, run, rates=rates))
        for _, evaluation in run.widest_last():
            for entry in evaluation.policies:
                row = _row(policy_of(entry.name), evaluation, entry)
                rows.append({"workdir": str(run.workdir), **point, **row})
    if not rows:
        return pd.DataFrame(columns=["workdir", *NO_POINT, *KEPT])
    key = ["workdir", "split", "policy"]
    return pd.DataFrame(rows).drop_duplicates(key, keep="last", ignore_index=True)


KEPT = ("seed", "policy", "split", "accuracy", "correct")
"""Columns of a frame even without rows."""

NO_POINT = {"study": "", "arm": "", "settings": ""}
"""The columns of a run outside a study."""


def runs_of(workdir: PathLike, study: str | None = None) -> Iterator[tuple[Mapping[str, str], Run]]:
    """Yield the run of a work directory, or the points of its studies, or of one study, each with
    the settings that it varies."""
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
    order = np.argsort(np.array(evaluation.ids, dtype=object))
    interval = interval_of(entry)
    before = evaluation.by_name.get(policy.parent)
    gains = None
    gain = frontier.mean_interval([[math.nan]])
    if before is not None:
        gains = (stats.row_means(entry.correct) - stats.row_means(before.correct))[order]
        gain = frontier.mean_interval([gains], limits=(-1, 1))
    every = ahead = math.nan
    if policy.kind == ONLINE:
        every = int(policy.section.get("sync_every", 1)) or math.inf
        if policy.result:
            ahead = policy.result.generation.get("ahead", math.nan)
    return {
        "seed": policy.run.seed,
        "policy": policy.name,
        "label": entry.label,
        "split": evaluation.split,
        "ancestry": " > ".join(reversed(policy.chain)),
        "parent": policy.parent,
        "made": policy.made,
        "warmup": policy.warmup,
        "start": policy.start,
        "kind": policy.kind,
        "loss": policy.loss,
        "learning_rate": _learning_rate(policy.section),
        "online_learning_rate": _learning_rate(policy.last_online),
        "K": policy.steps,
        "s": every,
        "ahead": ahead,
        "stop": policy.stop,
        **policy.costs,
        "problems": len(order),
        "samples": evaluation.samples,
        "accuracy": entry.accuracy.mean,
        "standard_error": entry.accuracy.sem_clustered,
        "low": interval.low,
        "high": interval.high,
        "gain": gain.mean,
        "gain_low": gain.low,
        "gain_high": gain.high,
        "greedy": entry.greedy,
        **{f"pass@{k}": entry.pass_at[k] for k in sorted(entry.pass_at, key=int)},
        **{f"reward/{task}": result.reward for task, result in entry.tasks.items()},
        "mean_length": entry.measure("mean_length"),
        "entropy": entry.measure("entropy"),
        "truncated": entry.measure("frac_truncated"),
        **policy.taught,
        "ids": np.array(evaluation.ids, dtype=object)[order],
        "correct": entry.correct[order],
        "gains": gains,
    }


def _learning_rate(section: Settings) -> float:
    return float(section.get("optimizer", {}).get("learning_rate", math.nan))


def interval_of(entry: Evaluated) -> frontier.Interval:
    """Return a policy's accuracy with its 95 % interval over problems, NaN if unknown."""
    return frontier.mean_interval(stats.row_means(entry.correct)[None], limits=(0, 1))


@dataclass(frozen=True, eq=False)
class Policy:
    """A policy of a run, with its ancestry and cost. rates: prices of its tokens."""

    run: Run
    name: str
    rates: Rates | None = None

    def _section(self, policy: str) -> Settings:
        return self.run.sections.get(own_stage(policy), {})

    @cached_property
    def chain(self) -> list[str]:
        """Itself, then the policy that it was trained or chosen from, and so on to the first.

        Unlike `accounting.behind`, it excludes the policies behind its pairs.
        """
        names = [self.name]
        for _ in self.run.sections:  # a config with a cycle must end too
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
        """The policies in `chain` from the trained one: the second if a stage chose it."""
        return self.chain[self._section(self.name).get("kind") == SELECT :]

    def _of_kind(self, kind: str, policies: Iterable[str]) -> list[str]:
        """Return the policies trained by a stage of a kind, in order."""
        return [policy for policy in policies if self._section(policy).get("kind") == kind]

    @property
    def section(self) -> Settings:
        """The config of the stage that trained it, {} if there is none."""
        return self._section(self.trained[0])

    @property
    def kind(self) -> str:
        """The kind of the stage that trained it, "" if there is none."""
        return str(self.section.get("kind", ""))

    @property
    def result(self) -> StageResult | None:
        """The record of the stage that trained it, None if there is none or it is not finished."""
        return self.run.results.get(own_stage(self.trained[0]))

    @property
    def parent(self) -> str:
        """The policy that its training started from; "" without online or offline training."""
        return self.trained[1] if self.kind in (ONLINE, OFFLINE) else ""

    @property
    def made(self) -> str:
        """The folder and step of the stage that trained it, or its name."""
        folder = self.run.folders.get(own_stage(self.name))
        if folder is None:
            return self.name
        return f"{folder.name}@{PolicyName.parse(self.name).step or ''}"

    @property
    def warmup(self) -> str:
        """The folder of its online stage; "" if there is none, or more training other than final
        offline training."""
        before = self.trained[self.kind == OFFLINE : -1]
        is_alone = len(self.online) == 1 and not self._of_kind(OFFLINE, before)
        return self.run.folders[own_stage(self.online[0])].name if is_alone else ""

    @property
    def loss(self) -> str:
        """The loss of its online or offline training, otherwise ""."""
        if self.kind == OFFLINE:
            loss = str(self.section.get("loss_type", "sigmoid"))
            return "dpo" if loss.startswith("sigmoid") else loss
        return str(self.section.get("loss", "grpo")) if self.kind == ONLINE else ""

    @property
    def start(self) -> str:
        """The external policy ("run:…", "hf:…") that its training began with, "" for none."""
        start = self.chain[-1]
        if start in self.run.sections:
            start = str(self._section(start).get("policy", ""))
        return start if is_external(start) else ""

    @cached_property
    def online(self) -> list[str]:
        """The policies in `chain` from online training, the last one first."""
        return self._of_kind(ONLINE, self.chain)

    @property
    def last_online(self) -> Settings:
        """The config of its last online stage, {} for none."""
        return self._section(self.online[0]) if self.online else {}

    @cached_property
    def steps(self) -> float:
        """K: its online steps; NaN if one of those stages is not finished."""
        return sum(map(self.steps_of, self.online))

    def steps_of(self, policy: str) -> float:
        """Count the steps of an online stage in `chain`; NaN if it is not finished."""
        step = PolicyName.parse(policy).step or ""
        if step.isdecimal():
            return float(step)
        result = self.run.results.get(own_stage(policy))
        return float(result.counts.get("steps", math.nan)) if result else math.nan

    @property
    def stop(self) -> str:
        """Why its last online stage ended, if that may end by itself; otherwise ""."""
        if not number(self.last_online, "budget", "amount") > 0:
            return ""
        result = self.run.results.get(own_stage(self.online[0]))
        stop = (result and result.stop) or Stop(rule="")
        return stop.rule + f" ({stop.measure})" * bool(stop.measure)

    @property
    def taught(self) -> dict[str, float]:
        """The measures of its pairs, and of the rollouts they are from."""
        parts = dict(self.result.measures) if self.result else {}
        found = {}
        if collected := self.run.results.get(str(self.section.get("preferences", ""))):
            found["pairs"] = float(collected.counts.get("pairs", math.nan))
            parts["rollouts"] = collected.measures.get("informativeness", {})
            parts["pairs"] = collected.measures.get("pairs", {})
        for part, measures in parts.items():
            found |= {f"{part}/{name}": value for name, value in measures.items()}
        return found

    @cached_property
    def costs(self) -> dict[str, float]:
        """The cost of its training by measure, without supervised fine-tuning, which is the same
        for all. NaN if one of its stages is not finished.

        "hours": of its tokens at `rates`, if given.
        """
        made = (self.name, self.run.sections, self.run.results)
        hours = {}
        try:
            if self.rates is not None:
                hours["hours"] = self.rates.hours(accounting.costs_by_stage(*made))
            return {**accounting.cost_of(*made), **hours}
        except ValueError:
            return dict.fromkeys([*MEASURES, *["hours"] * bool(self.rates)], math.nan)

    @property
    def flops(self) -> float:
        """The FLOPs of `costs`."""
        return self.costs["flops"]
