"""Read what runs and studies left on disk into records: runs, their policies, and rows of policies
that differ in seed.

Run ─► Policy ─► Row, its seeds ─► Group, its K ─► Study, of a directory's points or of runs side by
side
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from etils import epath
from numpy.typing import NDArray

from g2d_jax import accounting
from g2d_jax.config.io import differences, own_differences
from g2d_jax.config.policy_name import PolicyName, is_external, own_stage
from g2d_jax.records import Verdict
from g2d_jax.report.format import number, policy_name, setting
from g2d_jax.report.tables import Manifest, policies
from g2d_jax.runtime.lock import holder
from g2d_jax.runtime.storage import PathLike, read_bytes, read_finished, read_informing, read_json
from g2d_jax.runtime.tracking import read_metrics
from g2d_jax.study import frontier, stats
from g2d_jax.study.pricing import Rates
from g2d_jax.workdir import PLANS, absolute, no_run, stage_folders

if TYPE_CHECKING:
    import pandas as pd  # takes half a second, which `g2d status` need not wait for

Array = NDArray[np.float64]
ONLINE = "online"
OFFLINE = "offline"
SELECT = "best_checkpoint"
COLLECT = "collect"
EVALUATE = "evaluate"
SAMPLING = ("temperature", "top_p", "top_k", "max_new_tokens", "stop", "num_generations")
"""Settings of an evaluation without which accuracies are not of the same thing."""


def read_parquet(
    file: epath.Path, columns: Sequence[str], problems: Collection[str] | None = None
) -> pa.Table:
    """Read columns of a Parquet file; problems: ids of those whose rows are wanted, None for all.

    Raises FileNotFoundError, and ValueError naming the file if it is damaged or lacks a column.
    """
    source = pa.BufferReader(read_bytes(file))
    chosen = None if problems is None else [("problem_id", "in", sorted(problems) or [""])]
    try:
        table = pq.read_table(
            source, columns=list(columns), filters=chosen, page_checksum_verification=True
        )
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ValueError(f"{file} is damaged or not a part written here: {error}") from error
    if missing := [name for name in columns if name not in table.column_names]:
        raise ValueError(
            f"{file} is damaged or not a part written here: it has no column {', '.join(missing)}"
        )
    return table


def read_answers(file: epath.Path) -> pd.DataFrame:
    """Read the correctness matrix of a file of rollouts, problem ids ascending by samples: 1, 0,
    NaN not scored.

    Raises as `read_parquet`.
    """
    frame = read_parquet(file, ["problem_id", "verdict"]).to_pandas()
    frame["correct"] = (
        frame["verdict"]
        .map({verdict.value: verdict.accuracy for verdict in Verdict})
        .astype(np.float64)
    )
    frame["sample"] = frame.groupby("problem_id").cumcount()
    return frame.pivot(index="problem_id", columns="sample", values="correct").sort_index()


def read_optional(path: epath.Path) -> Any:
    """Read a JSON file, {} if there is no such file. Raises ValueError if it is damaged."""
    try:
        return read_json(path)
    except FileNotFoundError:
        return {}


@dataclass(frozen=True)
class Stage:
    """One stage's folder. section: its config, {} if unknown. manifest: {} if it is not
    finished."""

    folder: epath.Path
    name: str
    section: Mapping[str, Any]
    manifest: Manifest

    @property
    def kind(self) -> str:
        """The kind of the manifest, else of the config, else ""."""
        return str(self.manifest.get("kind") or self.section.get("kind", ""))

    @property
    def split(self) -> str | None:
        """The split that an evaluate stage is about, as its manifest has it, else its config."""
        return self.manifest.get("result", {}).get("split") or self.section.get("split")

    @cached_property
    def policies(self) -> dict[str, Manifest]:
        """The policies of a finished evaluate stage by name, in the order they were evaluated."""
        return {str(entry.get("name", "")): entry for entry in policies(self.manifest)}

    def rollouts_file(self, policy: str) -> epath.Path:
        """Where the stage wrote the completions of a policy that it evaluated; they may be gone."""
        return absolute(self.folder / str(self.policies[policy]["rollouts"]))

    def parts(self, name: str = "rollouts") -> list[epath.Path]:
        """List the Parquet files in a folder of the stage, in order; [] if there is none."""
        folder = self.folder / name
        return sorted(folder.glob("*.parquet")) if folder.exists() else []

    def json(self, name: str) -> Any:
        """Read a JSON file of the stage, {} if there is none; raises ValueError if it is
        damaged."""
        return read_optional(self.folder / name)

    @property
    def environment(self) -> Mapping[str, Any]:
        """Where a study's stage was made, {} if that is not written or damaged: it only informs."""
        return read_informing(self.folder / "environment.json")[0]

    @cached_property
    def problems(self) -> dict[str, Mapping[str, Any]]:
        """The problems of an evaluate stage by id, from its problems.json: {"id", "prompt",
        "answer", "subset"}."""
        return {str(row["id"]): row for row in self.json("problems.json")}


@dataclass(frozen=True, eq=False)
class Run:
    """A work directory, or a study's point, finished or not. stages: those that have begun, in
    order.

    answers: reads a file of rollouts, each once. rates: those at which its tokens are priced, for
    `Policy.costs`.
    left_out: what is wrong with manifests that were read as if they were not there.
    """

    workdir: epath.Path
    config: Mapping[str, Any]
    stages: Mapping[str, Stage]
    answers: Callable[[epath.Path], pd.DataFrame]
    rates: Rates | None = None
    left_out: Sequence[str] = ()

    @property
    def name(self) -> str:
        """The config's name, else the folder's."""
        return str(self.config.get("name") or self.workdir.name)

    @property
    def seed(self) -> int:
        """The config's seed, 0 if it has none. Raises ValueError for what is no whole number."""
        seed = self.config.get("seed", 0)
        if type(seed) is not int:
            raise ValueError(
                f"{self.workdir / 'config.json'} is damaged: its seed is {seed!r:.50}, no whole "
                "number"
            )
        return seed

    @property
    def sections(self) -> Mapping[str, Mapping[str, Any]]:
        """The config's stages by name."""
        return self.config.get("stages", {})

    @property
    def manifests(self) -> dict[str, Manifest]:
        """Stage -> manifest, of the finished stages in order."""
        return {name: stage.manifest for name, stage in self.stages.items() if stage.manifest}

    @property
    def evaluations(self) -> list[Stage]:
        """The finished evaluate stages, in order; the last one is the result."""
        return [
            stage for stage in self.stages.values() if stage.kind == EVALUATE and stage.manifest
        ]

    @property
    def latest(self) -> Manifest | None:
        """The manifest of the last finished evaluation, the result; None before there is one."""
        return next((stage.manifest for stage in reversed(self.evaluations)), None)

    @property
    def price(self) -> float | None:
        """The config's compute.price_per_device_hour, None if it has none."""
        price = number(self.config, "compute", "price_per_device_hour")
        return None if price != price else price

    @property
    def environment(self) -> Mapping[str, Any]:
        """Where it was made, {} if that is not written."""
        return read_informing(self.workdir / "environment.json")[0]

    @cached_property
    def _logged(self) -> tuple[list[dict[str, Any]], list[str]]:
        damage: list[str] = []
        return read_metrics(self.workdir, damage.append), damage

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """What the stages logged, see `tracking.read_metrics`."""
        return self._logged[0]

    @property
    def damage(self) -> list[str]:
        """The damage found in files that only inform, and that was left out."""
        environment = read_informing(self.workdir / "environment.json")[1]
        return [*self.left_out, *self._logged[1], *filter(None, [environment])]

    @property
    def is_running(self) -> bool:
        """Whether a process works on it now: in its folder, or of a study's point in that of a
        stage."""
        unfinished = [stage.folder for stage in self.stages.values() if not stage.manifest]
        return any(map(holder, [self.workdir, *unfinished]))

    @property
    def warnings(self) -> list[str]:
        """List what the stages warned of, in their order: as manifests have it; of one under way,
        as it was logged.

        Before that come the reference answers that the verifier cannot read, after it `damage`.
        """
        texts: list[str] = []
        for manifest in self.manifests.values():
            texts += [str(entry["text"]) for entry in manifest.get("unreadable", ())]
        texts = list(dict.fromkeys(texts))
        for stage in self.stages.values():
            texts += [
                str(warning["text"]) for warning in self._warnings_of(stage) if "text" in warning
            ]
        return texts + self.damage

    def _warnings_of(self, stage: Stage) -> Sequence[Mapping[str, Any]]:
        if stage.manifest:
            return stage.manifest.get("warnings", ())
        records = [record for record in self.metrics if record["stage"] == stage.name]
        return [record for record in records if str(record["kind"]).startswith("warning/")]


def read_run(
    workdir: PathLike,
    answers: Callable[[epath.Path], pd.DataFrame] | None = None,
    rates: Rates | None = None,
    *,
    lenient: bool = False,
) -> Run:
    """Read config and manifests; all else is read when it is asked for. What is not written yet is
    empty.

    answers: `Run.answers`, shared by the points of a study, which share evaluations. rates:
    `Run.rates`.
    lenient: read a damaged manifest as if its stage had not finished, see `Run.left_out`.
    Raises ValueError if there is no such folder, it holds nothing of a run, or a file is damaged.
    """
    root = epath.Path(workdir)
    try:
        folders = stage_folders(root)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise no_run(root) from error
    config = read_optional(root / "config.json").get("config", {})
    if not config and not folders:
        raise no_run(root)
    sections = config.get("stages", {})
    stages, left_out = {}, []
    for name, folder in folders.items():
        manifest, damage = read_finished(folder)
        if damage and not lenient:
            raise ValueError(damage)
        if damage:
            left_out.append(f"{name} is left out: {damage}")
        stages[name] = Stage(folder, name, sections.get(name, {}), manifest or {})
    return Run(root, config, stages, answers or functools.cache(read_answers), rates, left_out)


@dataclass(frozen=True, eq=False)
class Policy:
    """A policy of a run: what it was made from, what that cost, and what it answered."""

    run: Run
    name: str

    def _section(self, policy: str) -> Mapping[str, Any]:
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
    def _trained(self) -> int:
        """The place in `chain` of the policy that was trained: 1 where a stage chose it, else 0."""
        return int(self._section(self.name).get("kind") == SELECT)

    @property
    def section(self) -> Mapping[str, Any]:
        """The config of the stage that trained it, {} if none did."""
        return self._section(self.chain[self._trained])

    @property
    def kind(self) -> str:
        """The kind of the stage that trained it, "" if none did."""
        return str(self.section.get("kind", ""))

    @property
    def manifest(self) -> Manifest:
        """The manifest of the stage that trained it, {} if none did."""
        return self._manifest(self.chain[self._trained])

    @property
    def parent(self) -> Policy | None:
        """The policy its training started from; None of one that online or offline training did not
        make."""
        if self.kind not in (ONLINE, OFFLINE):
            return None
        return Policy(self.run, self.chain[self._trained + 1])

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
        kinds = [self._section(policy)["kind"] for policy in self.chain[self._trained + 1 : -1]]
        return self.kind == OFFLINE and [kind for kind in kinds if kind != SELECT] in ([], [ONLINE])

    @property
    def steps(self) -> float:
        """K: the online steps behind it; NaN if a stage that counts them is not finished."""
        return sum(map(self._steps_of, self.online))

    def _steps_of(self, policy: str) -> float:
        step = PolicyName.parse(policy).step or ""
        if step.isdecimal():
            return float(step)
        return number(self._manifest(policy), "counts", "steps")

    @property
    def stop(self) -> Manifest:
        """Why the last online stage ended, of one that may end by itself (a manifest's "stop"); {}
        of any other."""
        if not self.online or self._section(self.online[0]).get("stop", "steps") == "steps":
            return {}
        return self._manifest(self.online[0]).get("stop", {})

    @cached_property
    def costs(self) -> dict[str, float]:
        """The cost of making it by measure, supervised fine-tuning left out: it is the same for
        all.

        "hours": those that its tokens would take elsewhere, where the run has `Run.rates`.
        """
        run = self.run
        costs = accounting.cost_of(
            self.name, run.sections, run.manifests, price_per_device_hour=run.price
        )
        if run.rates is None:
            return costs
        spent = accounting.costs_by_stage(self.name, run.sections, run.manifests)
        return {**costs, "hours": run.rates.hours(spent)}

    def evaluation(self, split: str) -> Stage | None:
        """Return the last stage that evaluated it on a split, None if none did."""
        stages = (stage for stage in self.run.evaluations[::-1] if stage.split == split)
        return next((stage for stage in stages if self.name in stage.policies), None)

    def result(self, split: str) -> Manifest:
        """Return its measurements on a split, {} if there are none."""
        stage = self.evaluation(split)
        return stage.policies[self.name] if stage else {}

    def answers(self, split: str) -> pd.DataFrame | None:
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

    def measure(self, kind: str, *keys: str) -> float:
        """Read a number in `pairs_manifest` (kind "collect") or the manifest of the stage that
        trained it, else NaN."""
        return number(self.pairs_manifest if kind == COLLECT else self.manifest, *keys)


@dataclass(frozen=True, eq=False)
class Row:
    """Policies that differ in their seed alone, on the same problems. k: steps where points of a
    study vary them.

    answers: of each policy, as `read_answers` has them, to the same problems of a split.
    """

    name: str
    policies: Sequence[Policy]
    answers: Sequence[pd.DataFrame]
    k: int | None = None
    split: str = "test"

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
        return np.stack([stats.row_means(correct) for correct in self.correct])

    def pass_at(self, k: int) -> float:
        """Average pass@k over seeds."""
        return float(np.mean([stats.pass_at(correct, k) for correct in self.correct]))

    @cached_property
    def seeds(self) -> list[int]:
        """The policies' seeds, in their order."""
        return [policy.run.seed for policy in self.policies]

    @property
    def steps(self) -> float:
        """The mean K of the seeds: where a warm-up stops by itself they differ."""
        return float(np.mean([policy.steps for policy in self.policies]))

    def evaluated(self, split: str, *keys: str) -> float:
        """Average a number of the evaluation on a split over seeds; NaN if one lacks it."""
        return float(np.mean([number(policy.result(split), *keys) for policy in self.policies]))

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
        """The accuracy that the last training added, paired by seed and problem; None if that is
        not known."""
        if self.split != "test":  # `Policy.gain` is of test problems
            return None
        gains = [
            gain
            for policy in self.policies
            if (gain := policy.gain) is not None and len(gain) == len(self.ids)
        ]
        return mean_change(gains)

    @cached_property
    def costs(self) -> dict[str, float]:
        """The means of `Policy.costs` over seeds; NaN where one lacks it."""
        return {measure: self._cost(measure) for measure in self.policies[0].costs}

    def _cost(self, measure: str) -> float:
        return float(np.mean([policy.costs.get(measure, np.nan) for policy in self.policies]))

    def mean(self, kind: str, *keys: str) -> float:
        """Average `Policy.measure` over seeds; NaN if one lacks it."""
        return float(np.mean([policy.measure(kind, *keys) for policy in self.policies]))


@dataclass(frozen=True, eq=False)
class Group:
    """Rows of an arm that differ in K alone, ascending. values: what else varies, field -> text."""

    arm: str
    values: Mapping[str, str]
    rows: list[Row]

    @property
    def setting(self) -> str:
        """The settings that vary, for readers: "learning rate 0.0001"."""
        return ", ".join(
            f"{name.rpartition('.')[2].replace('_', ' ')} {text}"
            for name, text in self.values.items()
        )

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
        return (
            not self._warmups.isdisjoint(other._warmups) and self.rows[0].ids == other.rows[0].ids
        )

    @property
    def _warmups(self) -> set[epath.Path]:
        """The folders of the last stages of online training behind its policies."""
        return {
            policy.run.stages[own_stage(policy.online[0])].folder
            for policy in self.policies
            if policy.online
        }


def mean_change(changes: Sequence[Array]) -> frontier.Interval | None:
    """Average the differences in accuracy of seeds, each [N], with their interval; None without a
    seed."""
    return frontier.mean_interval(np.stack(changes), limits=(-1, 1)) if changes else None


def rows_of(groups: Iterable[Group]) -> list[Row]:
    """List the rows of groups, in their order."""
    return list(itertools.chain.from_iterable(group.rows for group in groups))


def grouped_rows(groups: Iterable[Group]) -> list[tuple[Group, Row]]:
    """List the rows of groups, in their order, each with its group."""
    return [(group, row) for group in groups for row in group.rows]


def policies_of(rows: Iterable[Row]) -> list[Policy]:
    """List the policies of rows, in their order."""
    return list(itertools.chain.from_iterable(row.policies for row in rows))


def seeds_of(rows: Iterable[Row]) -> set[int]:
    """Return the seeds that any of the rows has."""
    return set(itertools.chain.from_iterable(row.seeds for row in rows))


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
        values = {
            **result.get("sampling", {}),
            "split": self.stage.split,
            "num_generations": result.get("samples"),
        }
        values["stop"] = list(
            values.get("stop") or ()
        )  # evaluations of earlier versions had no such setting
        return {name: values.get(name) for name in ("split", *SAMPLING)}

    @property
    def last(self) -> str:
        """The last of the policies evaluated, by name."""
        return list(self.stage.policies)[-1]

    def file(self, policy: str) -> epath.Path:
        """Where a policy's completions are. Raises ValueError if they are gone."""
        file = self.stage.rollouts_file(policy)
        if not file.exists():
            raise ValueError(
                f"{self.stage.folder} has no completions of {policy!r} any more: they cannot be "
                "compared"
            )
        return file


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
    config: Mapping[str, Any]
    groups: Sequence[Group]
    warmups: Sequence[Group]
    left_out: Mapping[str, str]
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
        last = {side.run.workdir: side.last for side in self.sides}
        return [
            row for row in self.rows if row.policies[0].name == last[row.policies[0].run.workdir]
        ]

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


UNFINISHED, UNTESTED = "not finished", "not evaluated on test"
"""Why a point is left out of a study."""

SHARED = "evaluated once for several of these runs, and listed with the first of them"
"""Why a policy of a run is left out of a study whose arms are runs."""

WARMUP = "warm-up (GRPO goes on)"
"""The name of `Study.warmups`."""


def studies(workdir: PathLike) -> list[str]:
    """List the names of the studies in a directory, [] if it is none of studies."""
    folder = absolute(workdir) / PLANS
    return (
        sorted(path.stem for path in folder.iterdir() if path.suffix == ".json")
        if folder.exists()
        else []
    )


def read_study(workdir: PathLike, name: str, rates: Rates | None = None) -> Study:
    """Read a study, finished or not. rates: those at which its tokens are priced.

    Raises ValueError if the directory has none of that name, a file is damaged, or points that
    differ in their seed alone were tested on different problems.
    """
    root = absolute(workdir)
    if name not in studies(root):
        raise ValueError(
            f"{root} holds no study {name!r}; there are: {', '.join(studies(root)) or 'none'}"
        )
    plan = read_json(root / PLANS / f"{name}.json")
    answers = functools.cache(read_answers)
    left_out = {}
    arms: dict[tuple[str, tuple[tuple[str, str], ...]], dict[int | None, list[Policy]]] = {}
    for point in plan["points"]:
        run = read_run(root / "points" / name / point["label"], answers, rates)
        policy = _last_evaluated(run)
        if policy is None or not policy.result("test"):
            left_out[point["label"]] = UNFINISHED if policy is None else UNTESTED
            continue
        values = dict(point["values"])
        steps = [int(values.pop(field)) for field in point["values"] if _is_steps(field, run)]
        by_steps = arms.setdefault((point["arm"], tuple(values.items())), {})
        by_steps.setdefault(next(iter(steps), None), []).append(policy)
    groups = [_group(arm, dict(values), by_steps) for (arm, values), by_steps in arms.items()]
    return Study(root, name, plan["config"], groups, _warmups(groups), left_out, rates)


def _last_evaluated(run: Run) -> Policy | None:
    """Return the policy a point is about; None until its evaluations, and all they rest on, are
    finished.

    So points of K = 0 do not wait for a warm-up.
    """
    evaluated = {
        name: section["policies"]
        for name, section in run.sections.items()
        if section["kind"] == EVALUATE
    }
    needed = set(evaluated)
    for policy in itertools.chain.from_iterable(evaluated.values()):
        needed.update(accounting.behind(policy, run.sections))
    if not evaluated or not needed <= run.manifests.keys():
        return None
    return Policy(run, list(evaluated.values())[-1][-1])


def _is_steps(field: str, run: Run) -> bool:
    """Whether a field is K: the steps of an online stage."""
    section, _, name = field.removeprefix("stages.").rpartition(".")
    return name == "steps" and run.sections.get(section, {}).get("kind") == ONLINE


def _group(
    arm: str, values: Mapping[str, str], by_steps: Mapping[int | None, Sequence[Policy]]
) -> Group:
    group = Group(arm, values, [])
    for k in sorted(by_steps, key=lambda k: -1 if k is None else k):
        seeds = by_steps[k]
        name = group.name
        if len(by_steps) > 1:
            name += f", K = {np.mean([policy.steps for policy in seeds]):g}"
        group.rows.append(Row(name, seeds, _same_problems(seeds), k))
    return group


def _same_problems(seeds: Sequence[Policy]) -> list[pd.DataFrame]:
    """Read the test answers of policies. Raises ValueError where they are gone, or not to the same
    problems."""
    answers = []
    for policy in seeds:
        own = policy.answers("test")
        if own is None:
            raise ValueError(
                f"{policy.run.workdir} has no test completions of {policy.name!r} any more"
            )
        answers.append(own)
        if not own.index.equals(answers[0].index):
            names = f"{seeds[0].run.workdir.name} and {policy.run.workdir.name}"
            raise ValueError(f"{names} were tested on different problems")
    return answers


def _warmups(groups: Sequence[Group]) -> list[Group]:
    """Make groups of online training alone, of warm-ups that points evaluated, unless a group is
    about just that."""
    alone = [group for group in groups if not group.is_offline]
    families: list[list[Group]] = []
    for group in groups:
        if group.stops or not all(policy.is_single_warmup for policy in group.policies):
            continue
        if any(map(group.goes_on_from, alone)):
            continue
        related = [family for family in families if any(map(group.goes_on_from, family))]
        if related:
            related[0].append(group)
        else:
            families.append([group])
    warmups = [_warmup(family, several=len(families) > 1) for family in families]
    return [group for group in warmups if len(group.rows) > 1]


def _warmup(family: Sequence[Group], *, several: bool) -> Group:
    """Add to groups with one warm-up a group of online training: K = 0 is the policy that it starts
    from."""
    shared = set[tuple[str, str]].intersection(*(set(group.values.items()) for group in family))
    values = dict(item for item in family[0].values.items() if item in shared)
    arm = WARMUP
    if several:
        arm += f" of {', '.join(dict.fromkeys(group.arm for group in family))}"
    by_steps: dict[int | None, dict[int, Policy]] = {}
    for trained in sorted(policies_of(rows_of(family)), key=lambda policy: policy.run.seed):
        for name in trained.chain[1:]:
            policy = Policy(trained.run, name)
            if policy.result("test"):
                by_steps.setdefault(int(policy.steps), {}).setdefault(policy.run.seed, policy)
    return _group(arm, values, {k: list(by_seed.values()) for k, by_seed in by_steps.items()})


def read_comparison(
    workdirs: Sequence[PathLike], output: PathLike = "compare", *, policies: str = "ends"
) -> Study:
    """Read runs, or points of a study, as a study whose arms they are, on the problems that all of
    them answered.

    Problems are those of the same id, which is a hash of their text. output: the directory of the
    study that is made.
    policies: "ends" for each run's first and last one, "all". Of each run its last finished
    evaluation counts: of the first run whichever that is, of the others the last on the same split
    if there is one. Raises ValueError for fewer than two runs, one given twice, a folder that is no
    run, a run without a finished evaluation or without its completions, and where no problem is
    common.
    """
    if policies not in ("ends", "all"):
        raise ValueError(f"policies must be ends or all, got {policies!r}")
    sides = _sides(workdirs)
    chosen = []
    left_out = {}
    files = set()
    for side in sides:
        names = list(side.stage.policies)
        if policies == "ends":
            names = list(dict.fromkeys((names[0], names[-1])))
        for name in names:
            file = side.file(name)
            if file in files and name != side.last:
                left_out[f"{side.mark}: {name}"] = SHARED
            else:
                chosen.append((side, name))
            files.add(file)
    answers = [side.run.answers(side.file(name)) for side, name in chosen]
    common = sorted(set(answers[0].index).intersection(*(frame.index for frame in answers)))
    if not common:
        evaluated = (
            f"{side.mark} ({side.label}) {len(side.stage.problems):,} of {side.stage.split}"
            for side in sides
        )
        raise ValueError(
            "the runs have no problem in common, they cannot be compared; evaluated are "
            f"{', '.join(evaluated)}"
        )
    groups = []
    for (side, name), frame in zip(chosen, answers, strict=True):
        title = f"{side.mark}: {policy_name(side.stage.policies[name])}"
        if frame.loc[common].isna().to_numpy().all():
            raise ValueError(
                f"none of the {len(common):,} common problems is scored for {title} as right or "
                "wrong: "
                "accuracies are compared, not rewards"
            )
        row = Row(title, [Policy(side.run, name)], [frame.loc[common]], split=str(side.stage.split))
        groups.append(Group(title, {"run": side.label}, [row]))
    warnings = list(_incomparable(sides, common))
    return Study(
        absolute(output), "compare", {}, groups, [], left_out, sides=sides, warnings=warnings
    )


def _sides(workdirs: Sequence[PathLike]) -> list[Side]:
    roots = [absolute(workdir) for workdir in workdirs]
    if len(roots) < 2:
        raise ValueError(f"a comparison takes two runs or more, got {len(roots)}")
    if twice := next((root for i, root in enumerate(roots) if root in roots[:i]), None):
        raise ValueError(f"{twice} is given twice: compare runs that differ")
    names = [root.name for root in roots]
    sides: list[Side] = []
    for i, root in enumerate(roots):
        label = root.name if names.count(root.name) == 1 else str(root)
        run = read_run(root)
        stages = [stage for stage in run.evaluations if stage.policies]
        if not stages:
            raise ValueError(
                f"{run.workdir} has no finished evaluation: let its evaluate stage finish first"
            )
        alike = [stage for stage in stages if sides and stage.split == sides[0].stage.split]
        sides.append(Side(_mark(i), label, run, [*stages, *alike][-1]))
    return sides


def _mark(number: int) -> str:
    """Return A … Z, AA … as spreadsheets count."""
    rest, letter = divmod(number, len(ascii_uppercase))
    return (_mark(rest - 1) if rest else "") + ascii_uppercase[letter]


def changed_settings(first: Run, other: Run) -> list[str]:
    """List the settings that differ, as "field: there -> here", functions given from Python
    included."""
    before, after = (
        read_json(run.workdir / "config.json").get("own", {}) for run in (first, other)
    )
    return differences(first.config, other.config, places=True) + own_differences(before, after)


def _incomparable(sides: Sequence[Side], common: Sequence[str]) -> Iterator[str]:
    for name in ("split", *SAMPLING):
        values = {side.mark: side.sampling[name] for side in sides}
        if len({str(value) for value in values.values()}) > 1:
            listed = ", ".join(f"{mark} {setting(value)}" for mark, value in values.items())
            yield (
                f"The evaluations differ in {name}: {listed}. A difference in accuracy may come "
                "from this."
            )
    different = sum(len(_reference_answers(sides, problem)) > 1 for problem in common)
    if different:
        yield (
            f"{different:,} of the common problems have other reference answers in one run than "
            "in another."
        )


def _reference_answers(sides: Sequence[Side], problem: str) -> set[str]:
    rows = (side.stage.problems.get(problem) for side in sides)
    return {str(row.get("answer")) for row in rows if row}
