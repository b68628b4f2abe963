"""Read what runs and studies left on disk into records: runs, their policies, and rows of policies that differ in seed.

Run ─► Policy ─► Row, its seeds ─► Group, its K ─► Study, of a directory's points or of runs side by side
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
ONLINE, OFFLINE, SELECT, COLLECT, EVALUATE = "online", "offline", "best_checkpoint", "collect", "evaluate"
SAMPLING = ("temperature", "top_p", "top_k", "max_new_tokens", "stop", "num_generations")
"""Settings of an evaluation without which accuracies are not of the same thing."""


def read_parquet(file: epath.Path, columns: Sequence[str], problems: Collection[str] | None = None) -> pa.Table:
    """Read columns of a Parquet file; problems: ids of those whose rows are wanted, None for all.

    Raises FileNotFoundError, and ValueError naming the file if it is damaged or lacks a column.
    """
    source = pa.BufferReader(read_bytes(file))
    chosen = None if problems is None else [("problem_id", "in", sorted(problems) or [""])]
    try:
        table = pq.read_table(source, columns=list(columns), filters=chosen, page_checksum_verification=True)
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ValueError(f"{file} is damaged or not a part written here: {error}") from error
    if missing := [name for name in columns if name not in table.column_names]:
        raise ValueError(f"{file} is damaged or not a part written here: it has no column {', '.join(missing)}")
    return table


def read_answers(file: epath.Path) -> pd.DataFrame:
    """Read the correctness matrix of a file of rollouts, problem ids ascending by samples: 1, 0, NaN not scored.

    Raises as `read_parquet`.
    """
    frame = read_parquet(file, ["problem_id", "verdict"]).to_pandas()
    frame["correct"] = frame["verdict"].map({verdict.value: verdict.accuracy for verdict in Verdict}).astype(np.float64)
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
    """One stage's folder. section: its config, {} if unknown. manifest: {} if it is not finished."""

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
        """Read a JSON file of the stage, {} if there is none; raises ValueError if it is damaged."""
        return read_optional(self.folder / name)

    @property
    def environment(self) -> Mapping[str, Any]:
        """Where a study's stage was made, {} if that is not written or damaged: it only informs."""
        return read_informing(self.folder / "environment.json")[0]

    @cached_property
    def problems(self) -> dict[str, Mapping[str, Any]]:
        """The problems of an evaluate stage by id, from its problems.json: {"id", "prompt", "answer", "subset"}."""
        return {str(row["id"]): row for row in self.json("problems.json")}


@dataclass(frozen=True, eq=False)
class Run:
    """A work directory, or a study's point, finished or not. stages: those that have begun, in order.

    answers: reads a file of rollouts, each once. rates: those at which its tokens are priced, for `Policy.costs`.
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
            raise ValueError(f"{self.workdir / 'config.json'} is damaged: its seed is {seed!r:.50}, no whole number")
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
        """Finished evaluate stages, in order; the last one is the result."""
        return [stage for stage in self.stages.values() if stage.kind == EVALUATE and stage.manifest]

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
        """Whether a process works on it now: in its folder, or of a study's point in that of a stage."""
        unfinished = [stage.folder for stage in self.stages.values() if not stage.manifest]
        return any(holder(folder) for folder in [self.workdir, *unfinished])

    @property
    def warnings(self) -> list[str]:
        """List what the stages warned of, in their order: as manifests have it; of one under way, as it was logged.

        Before that come the reference answers that the verifier cannot read, after it `damage`.
        """
        logged = [record for record in self.metrics if str(record["kind"]).startswith("warning/")]
        by_stage = [
            stage.manifest.get("warnings", ())
            if stage.manifest
            else [record for record in logged if record["stage"] == name]
            for name, stage in self.stages.items()
        ]
        warned = [str(warning["text"]) for warnings in by_stage for warning in warnings if "text" in warning]
        unreadable = [entry["text"] for manifest in self.manifests.values() for entry in manifest.get("unreadable", ())]
        return [*dict.fromkeys(map(str, unreadable)), *warned, *self.damage]


def read_run(
    workdir: PathLike,
    answers: Callable[[epath.Path], pd.DataFrame] | None = None,
    rates: Rates | None = None,
    *,
    lenient: bool = False,
) -> Run:
    """Read config and manifests; all else is read when it is asked for. What is not written yet is empty.

    answers: `Run.answers`, shared by the points of a study, which share evaluations. rates: `Run.rates`.
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
        """Itself, what it was trained from, or chosen from, and so on down to the first that neither made.

        Unlike `accounting.behind` without what its pairs were made from, which may be of other policies.
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
        """The policy its training started from; None of one that online or offline training did not make."""
        return Policy(self.run, self.chain[self._trained + 1]) if self.kind in (ONLINE, OFFLINE) else None

    @property
    def outside(self) -> str:
        """The policy of elsewhere ("run:…", "hf:…") that all began with, "" for none."""
        name = self.chain[-1]
        start = str(self._section(name).get("policy", "")) if name in self.run.sections else name
        return start if is_external(start) else ""

    @property
    def pairs_from(self) -> Manifest:
        """The manifest of the collect stage whose pairs it was trained on, {} without one."""
        return self._manifest(str(self.section.get("preferences", "")))

    @property
    def online(self) -> list[str]:
        """The policies in `chain` that online training made, the last one first."""
        return [policy for policy in self.chain if self._section(policy).get("kind") == ONLINE]

    @property
    def has_one_warmup(self) -> bool:
        """Whether offline training made it of the cold policy, or of one that online training alone made of that."""
        kinds = [self._section(policy)["kind"] for policy in self.chain[self._trained + 1 : -1]]
        return self.kind == OFFLINE and [kind for kind in kinds if kind != SELECT] in ([], [ONLINE])

    @property
    def steps(self) -> float:
        """K: the online steps behind it; NaN if a stage that counts them is not finished."""
        at = [(policy, PolicyName.parse(policy).step or "") for policy in self.online]
        return sum(
            float(step) if step.isdecimal() else number(self._manifest(policy), "counts", "steps")
            for policy, step in at
        )

    @property
    def stop(self) -> Manifest:
        """Why the last online stage ended, of one that may end by itself (a manifest's "stop"); {} of any other."""
        policy = self.online[0] if self.online else ""
        stops = self._section(policy).get("stop", "steps") != "steps"
        return self._manifest(policy).get("stop", {}) if stops else {}

    @cached_property
    def costs(self) -> dict[str, float]:
        """What making it cost by measure, supervised fine-tuning left out: it is the same for all.

        "hours": that its tokens would take elsewhere, where the run has `Run.rates`.
        """
        run = self.run
        costs = accounting.cost_of(self.name, run.sections, run.manifests, price_per_device_hour=run.price)
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
        """Its answers on a split, as `read_answers` has them; None if it was not evaluated there or they are gone."""
        stage = self.evaluation(split)
        file = stage.rollouts_file(self.name) if stage else None
        return self.run.answers(file) if file is not None and file.exists() else None

    @cached_property
    def gain(self) -> Array | None:
        """What the stage that trained it added on each test problem [N]; None if that is not known."""
        before, after = self.parent.answers("test") if self.parent else None, self.answers("test")
        if before is None or after is None or not before.index.equals(after.index):
            return None
        return (after.mean(axis=1) - before.mean(axis=1)).to_numpy()

    def measure(self, kind: str, *keys: str) -> float:
        """Read a number in the manifest of `pairs_from` (kind "collect") or of the stage that trained it, else NaN."""
        return number(self.pairs_from if kind == COLLECT else self.manifest, *keys)


@dataclass(frozen=True, eq=False)
class Row:
    """Policies that differ in their seed alone, on the same problems. k: steps where points of a study vary them.

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
        """What the last training added over the policy it started from, paired by seed and problem; None: not known."""
        if self.split != "test":  # `Policy.gain` is of test problems
            return None
        gains = [gain for policy in self.policies if (gain := policy.gain) is not None and len(gain) == len(self.ids)]
        return frontier.mean_interval(np.stack(gains), limits=(-1, 1)) if gains else None

    @cached_property
    def costs(self) -> dict[str, float]:
        """`Policy.costs` averaged over seeds; NaN where one lacks it."""
        costs = [policy.costs for policy in self.policies]
        return {name: float(np.mean([cost.get(name, np.nan) for cost in costs])) for name in costs[0]}

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
        """What varies, for readers: "learning rate 0.0001"."""
        return ", ".join(f"{name.rpartition('.')[2].replace('_', ' ')} {text}" for name, text in self.values.items())

    @property
    def name(self) -> str:
        """The arm, and what else varies."""
        return ", ".join(filter(None, [self.arm, self.setting]))

    @property
    def policies(self) -> list[Policy]:
        """The policies of all rows."""
        return [policy for row in self.rows for policy in row.policies]

    @property
    def is_offline(self) -> bool:
        """Whether it ends with offline training; else it is online training that simply goes on."""
        return any(policy.kind == OFFLINE for policy in self.policies)

    @property
    def stops(self) -> bool:
        """Whether the warm-up ends by itself."""
        return any(policy.stop for policy in self.policies)

    def goes_on_from(self, other: Group) -> bool:
        """Whether a policy has the same online training behind it, and was tested on the same problems."""
        mine, theirs = (
            {policy.run.stages[own_stage(policy.online[0])].folder for policy in group.policies if policy.online}
            for group in (self, other)
        )
        return bool(mine & theirs) and self.rows[0].ids == other.rows[0].ids


@dataclass(frozen=True, eq=False)
class Side:
    """A run that is compared with others. mark: A, B, … label: its folder's name, or its path where another has that.

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
        values = {**result.get("sampling", {}), "split": self.stage.split, "num_generations": result.get("samples")}
        values["stop"] = list(values.get("stop") or ())  # evaluations of earlier versions had no such setting
        return {name: values.get(name) for name in ("split", *SAMPLING)}

    @property
    def last(self) -> str:
        """The last of the policies evaluated, by name."""
        return list(self.stage.policies)[-1]

    def file(self, policy: str) -> epath.Path:
        """Where a policy's completions are. Raises ValueError if they are gone."""
        file = self.stage.rollouts_file(policy)
        if not file.exists():
            raise ValueError(f"{self.stage.folder} has no completions of {policy!r} any more: they cannot be compared")
        return file


@dataclass(frozen=True)
class Study:
    """A study's directory, or runs side by side. left_out: label of a point -> why it is in no group.

    warmups: online training alone, as points that end offline evaluated it on their way, where no point is about it.
    sides: of a study whose arms are runs, these; each policy of a run is a group of one row. warnings: why their
    accuracies may not be comparable.
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
        return [row for group in self.groups for row in group.rows]

    @property
    def problems(self) -> list[str]:
        """The ids of the problems of the first row: of runs side by side those that are common to all."""
        return self.rows[0].ids if self.rows else []

    @property
    def split(self) -> str:
        """The split that the accuracies are of."""
        return self.rows[0].split if self.rows else "test"

    @property
    def last(self) -> list[Row]:
        """The rows that are the last policies of runs side by side."""
        last = {side.run.workdir: side.last for side in self.sides}
        return [row for row in self.rows if row.policies[0].name == last[row.policies[0].run.workdir]]

    @property
    def policies(self) -> list[Policy]:
        """Of all finished points that were evaluated on the test split."""
        return [policy for group in self.groups for policy in group.policies]

    @property
    def mean_length(self) -> float:
        """The mean tokens of a response on the test split, over all policies."""
        return float(np.mean([policy.result("test")["mean_length"] for policy in self.policies]))

    @property
    def offline(self) -> list[Group]:
        """Groups that end with offline training."""
        return [group for group in self.groups if group.is_offline]

    @property
    def baselines(self) -> list[Group]:
        """Groups of online training alone."""
        return [*(group for group in self.groups if not group.is_offline), *self.warmups]

    @property
    def swept(self) -> list[Group]:
        """Groups that end with offline training at several K."""
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
    return sorted(path.stem for path in folder.iterdir() if path.suffix == ".json") if folder.exists() else []


def read_study(workdir: PathLike, name: str, rates: Rates | None = None) -> Study:
    """Read a study, finished or not. rates: those at which its tokens are priced.

    Raises ValueError if the directory has none of that name, a file is damaged, or points that differ in their seed
    alone were tested on different problems.
    """
    root = absolute(workdir)
    if name not in studies(root):
        raise ValueError(f"{root} holds no study {name!r}; there are: {', '.join(studies(root)) or 'none'}")
    plan = read_json(root / PLANS / f"{name}.json")
    answers, left_out = functools.cache(read_answers), dict[str, str]()
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
        by_steps.setdefault(steps[0] if steps else None, []).append(policy)
    groups = [_group(arm, dict(values), by_steps) for (arm, values), by_steps in arms.items()]
    return Study(root, name, plan["config"], groups, _warmups(groups), left_out, rates)


def _last_evaluated(run: Run) -> Policy | None:
    """Return the policy a point is about; None until its evaluations, and all they rest on, are finished.

    So points of K = 0 do not wait for a warm-up.
    """
    evaluated = {name: section["policies"] for name, section in run.sections.items() if section["kind"] == EVALUATE}
    needed = {*evaluated}.union(
        *(accounting.behind(policy, run.sections) for names in evaluated.values() for policy in names)
    )
    if not evaluated or not needed <= run.manifests.keys():
        return None
    return Policy(run, list(evaluated.values())[-1][-1])


def _is_steps(field: str, run: Run) -> bool:
    """Whether a field is K: the steps of an online stage."""
    section, _, name = field.removeprefix("stages.").rpartition(".")
    return name == "steps" and run.sections.get(section, {}).get("kind") == ONLINE


def _group(arm: str, values: Mapping[str, str], by_steps: Mapping[int | None, Sequence[Policy]]) -> Group:
    group = Group(arm, values, [])
    for k in sorted(by_steps, key=lambda k: -1 if k is None else k):
        seeds = by_steps[k]
        answers = []
        for policy in seeds:
            its_answers = policy.answers("test")
            if its_answers is None:
                raise ValueError(f"{policy.run.workdir} has no test completions of {policy.name!r} any more")
            answers.append(its_answers)
            if not its_answers.index.equals(answers[0].index):
                names = f"{seeds[0].run.workdir.name} and {policy.run.workdir.name}"
                raise ValueError(f"{names} were tested on different problems")
        name = group.name if len(by_steps) == 1 else f"{group.name}, K = {np.mean([p.steps for p in seeds]):g}"
        group.rows.append(Row(name, seeds, answers, k))
    return group


def _warmups(groups: Sequence[Group]) -> list[Group]:
    """Online training alone from what points evaluated of their own warm-ups, unless a group is about just that."""
    alone, families = [group for group in groups if not group.is_offline], list[list[Group]]()
    for group in groups:
        if group.stops or not all(policy.has_one_warmup for policy in group.policies):
            continue
        if any(group.goes_on_from(other) for other in alone):
            continue
        related = [family for family in families if any(group.goes_on_from(other) for other in family)]
        if not related:
            families.append([group])
        else:
            related[0].append(group)
    warmups = [_warmup(family, several=len(families) > 1) for family in families]
    return [group for group in warmups if len(group.rows) > 1]


def _warmup(family: Sequence[Group], *, several: bool) -> Group:
    """Add to groups with one warm-up a group of online training: K = 0 is the policy that it starts from."""
    shared = set[tuple[str, str]].intersection(*(set(group.values.items()) for group in family))
    values = {name: text for name, text in family[0].values.items() if (name, text) in shared}
    arm = f"{WARMUP} of {', '.join(dict.fromkeys(group.arm for group in family))}" if several else WARMUP
    by_steps: dict[int | None, dict[int, Policy]] = {}
    for trained in (policy for group in family for policy in group.policies):
        for policy in (Policy(trained.run, name) for name in trained.chain[1:]):
            if policy.result("test"):
                by_steps.setdefault(int(policy.steps), {}).setdefault(policy.run.seed, policy)
    rows = {k: [policies[seed] for seed in sorted(policies)] for k, policies in by_steps.items()}
    return _group(arm, values, rows)


def read_comparison(workdirs: Sequence[PathLike], output: PathLike = "compare", *, policies: str = "ends") -> Study:
    """Read runs, or points of a study, as a study whose arms they are, on the problems that all of them answered.

    Problems are those of the same id, which is a hash of their text. output: the directory of the study that is made.
    policies: "ends" for each run's first and last one, "all". Of each run its last finished evaluation counts: of the
    first run whichever that is, of the others the last on the same split if there is one. Raises ValueError for fewer
    than two runs, one given twice, a folder that is no run, a run without a finished evaluation or without its
    completions, and where no problem is common.
    """
    if policies not in ("ends", "all"):
        raise ValueError(f"policies must be ends or all, got {policies!r}")
    sides = _sides(workdirs)
    chosen, left_out, files = list[tuple[Side, str]](), dict[str, str](), set[epath.Path]()
    for side in sides:
        names = list(side.stage.policies)
        for name in names if policies == "all" else dict.fromkeys((names[0], names[-1])):
            file = side.file(name)
            if file in files and name != side.last:
                left_out[f"{side.mark}: {name}"] = SHARED
            else:
                chosen.append((side, name))
            files.add(file)
    answers = [side.run.answers(side.file(name)) for side, name in chosen]
    common = sorted(set.intersection(*(set(frame.index) for frame in answers)))
    if not common:
        evaluated = (f"{side.mark} ({side.label}) {len(side.stage.problems):,} of {side.stage.split}" for side in sides)
        raise ValueError(
            f"the runs have no problem in common, they cannot be compared; evaluated are {', '.join(evaluated)}"
        )
    groups = []
    for (side, name), frame in zip(chosen, answers, strict=True):
        title = f"{side.mark}: {policy_name(side.stage.policies[name])}"
        if frame.loc[common].isna().to_numpy().all():
            raise ValueError(
                f"none of the {len(common):,} common problems is scored for {title} as right or wrong: "
                "accuracies are compared, not rewards"
            )
        row = Row(title, [Policy(side.run, name)], [frame.loc[common]], split=str(side.stage.split))
        groups.append(Group(title, {"run": side.label}, [row]))
    warnings = list(_incomparable(sides, common))
    return Study(absolute(output), "compare", {}, groups, [], left_out, sides=sides, warnings=warnings)


def _sides(workdirs: Sequence[PathLike]) -> list[Side]:
    roots = [absolute(workdir) for workdir in workdirs]
    if len(roots) < 2:
        raise ValueError(f"a comparison takes two runs or more, got {len(roots)}")
    if twice := next((root for i, root in enumerate(roots) if root in roots[:i]), None):
        raise ValueError(f"{twice} is given twice: compare runs that differ")
    names, sides = [root.name for root in roots], list[Side]()
    for i, root in enumerate(roots):
        label, run = root.name if names.count(root.name) == 1 else str(root), read_run(root)
        stages = [stage for stage in run.evaluations if stage.policies]
        if not stages:
            raise ValueError(f"{run.workdir} has no finished evaluation: let its evaluate stage finish first")
        alike = [stage for stage in stages if sides and stage.split == sides[0].stage.split]
        sides.append(Side(_mark(i), label, run, [*stages, *alike][-1]))
    return sides


def _mark(number: int) -> str:
    """Return A … Z, AA … as spreadsheets count."""
    rest, letter = divmod(number, len(ascii_uppercase))
    return (_mark(rest - 1) if rest else "") + ascii_uppercase[letter]


def changed_settings(first: Run, other: Run) -> list[str]:
    """List the settings that differ, as "field: there -> here", functions given from Python included."""
    before, after = (read_json(run.workdir / "config.json").get("own", {}) for run in (first, other))
    return differences(first.config, other.config, places=True) + own_differences(before, after)


def _incomparable(sides: Sequence[Side], common: Sequence[str]) -> Iterator[str]:
    for name in ("split", *SAMPLING):
        values = {side.mark: side.sampling[name] for side in sides}
        if len({str(value) for value in values.values()}) > 1:
            listed = ", ".join(f"{mark} {setting(value)}" for mark, value in values.items())
            yield f"The evaluations differ in {name}: {listed}. A difference in accuracy may come from this."
    rows = [[side.stage.problems.get(problem, {}) for side in sides] for problem in common]
    different = sum(len({str(row.get("answer")) for row in in_runs if row}) > 1 for in_runs in rows)
    if different:
        yield f"{different:,} of the common problems have other reference answers in one run than in another."
