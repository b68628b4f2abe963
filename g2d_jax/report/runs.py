"""A run read from disk: its config, its stages, their records and logs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from etils import epath

from g2d_jax.records import Ended
from g2d_jax.runtime.lock import holder
from g2d_jax.runtime.storage import PathLike, read_bytes, read_informing, read_json
from g2d_jax.runtime.tracking import ended_by, read_metrics
from g2d_jax.session import stage_result
from g2d_jax.session.stage_result import Evaluated, Evaluation, StageResult
from g2d_jax.session.workdir import PLANS, absolute, no_run, stage_folders

ONLINE = "online"
OFFLINE = "offline"
SELECT = "best_checkpoint"
COLLECT = "collect"
EVALUATE = "evaluate"

Settings = Mapping[str, Any]
"""The config of a stage."""


def read_parquet(
    file: epath.Path, columns: Sequence[str], problems: Collection[str] | None = None
) -> pa.Table:
    """Read columns of a Parquet file; problems: ids of the rows to keep, None for all.

    Raises FileNotFoundError, and ValueError naming the file if it is damaged or lacks a column.
    """
    source = pa.BufferReader(read_bytes(file))
    chosen = None if problems is None else [("problem_id", "in", sorted(problems) or [""])]
    try:
        table = pq.read_table(
            source, columns=list(columns), filters=chosen, page_checksum_verification=True
        )
        table.validate(full=True)
        missing = [name for name in columns if name not in table.column_names]
        if missing:
            raise ValueError(f"it has no column {', '.join(missing)}")
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ValueError(f"{file} is damaged or from another program: {error}") from error
    return table


def read_optional(path: epath.Path) -> Any:
    """Read a JSON file, {} if it does not exist. Raises ValueError if it is damaged."""
    try:
        return read_json(path)
    except FileNotFoundError:
        return {}


@dataclass(frozen=True, eq=False)
class Run:
    """A work directory, or a study's point, finished or not.

    folders: stage -> its folder, for started stages, in order. results: stage -> its record, for
    finished stages, in order. left_out: faults of records that are treated as missing. has_ended:
    True if the run has ended though its process still holds the lock; otherwise the lock shows if
    it runs.
    """

    workdir: epath.Path
    config: Mapping[str, Any]
    folders: Mapping[str, epath.Path]
    results: Mapping[str, StageResult]
    left_out: Sequence[str] = ()
    has_ended: bool = False

    @property
    def name(self) -> str:
        """The config's name, otherwise the folder's."""
        return str(self.config.get("name") or self.workdir.name)

    @property
    def seed(self) -> int:
        """The config's seed, 0 if it has none."""
        return int(self.config.get("seed", 0))

    @property
    def sections(self) -> Mapping[str, Settings]:
        """The config's stages by name."""
        return self.config.get("stages", {})

    def kind(self, stage: str) -> str:
        """Return the kind of a stage, "" if unknown."""
        if stage in self.results:
            return self.results[stage].kind
        return str(self.sections.get(stage, {}).get("kind", ""))

    def evaluated(self, split: str | None = None) -> Iterator[tuple[str, Evaluation]]:
        """Yield the finished evaluate stages in order, with their results. split: only of this
        one."""
        for name, result in self.results.items():
            if result.evaluation is not None and split in (None, result.evaluation.split):
                yield name, result.evaluation

    def widest_last(self, split: str | None = None) -> list[tuple[str, Evaluation]]:
        """List the stages from `evaluated`, the evaluation of the most policies last, then the
        later one. The last one counts: it has a policy next to those it was trained from."""
        return sorted(self.evaluated(split), key=lambda found: len(found[1].policies))

    @property
    def latest(self) -> Evaluation | None:
        """The final evaluation: on test if there is one, the last of `widest_last`; None without
        any. Dev may have been used to choose a checkpoint or a setting."""
        found = self.widest_last("test") or self.widest_last()
        return found[-1][1] if found else None

    def rollouts_file(self, stage: str, policy: Evaluated) -> epath.Path:
        """Return the file of a stage's completions of a policy; it may not exist."""
        return absolute(self.folders[stage] / policy.rollouts)

    def parts(self, stage: str, name: str = "rollouts") -> list[epath.Path]:
        """List the Parquet files in a folder of a stage, in order; [] without any."""
        folder = self.folders[stage] / name
        return sorted(folder.glob("*.parquet")) if folder.exists() else []

    def problems(self, stage: str) -> dict[str, Mapping[str, Any]]:
        """Read the problems of an evaluate stage by id: {"id", "prompt", "answer", "subset"}."""
        rows = read_optional(self.folders[stage] / "problems.json")
        return {str(row["id"]): row for row in rows}

    def environment_of(self, stage: str) -> Mapping[str, Any]:
        """Return the environment of a study's stage, {} if it is missing or damaged."""
        return read_informing(self.folders[stage] / "environment.json")[0]

    @property
    def environment(self) -> Mapping[str, Any]:
        """The environment of the run, {} if it is missing."""
        return read_informing(self.workdir / "environment.json")[0]

    @cached_property
    def _logged(self) -> tuple[list[dict[str, Any]], list[str]]:
        damage: list[str] = []
        return read_metrics(self.workdir, damage.append), damage

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The stages' logs, see `tracking.read_metrics`."""
        return self._logged[0]

    @property
    def damage(self) -> list[str]:
        """The damage found, and ignored, in informative files."""
        environment = read_informing(self.workdir / "environment.json")[1]
        return [*self.left_out, *self._logged[1], *filter(None, [environment])]

    @property
    def is_running(self) -> bool:
        """True if a process works on it now: in its folder, or for a study's point in a stage's
        folder."""
        if self.has_ended:
            return False
        open_ones = [folder for name, folder in self.folders.items() if name not in self.results]
        return any(map(holder, [self.workdir, *open_ones]))

    @property
    def ended(self) -> Ended | None:
        """How it ended last; None if it continued, is finished, or was killed."""
        return ended_by(max(self.metrics, key=itemgetter("time"), default={}))

    @property
    def warnings(self) -> list[str]:
        """List the stages' warnings, in order: from records, or from the log of a running stage.

        `damage` comes last.
        """
        texts: list[str] = []
        for name in self.folders:
            if name in self.results:
                texts += [warning.text for warning in self.results[name].warnings]
                continue
            for record in self.metrics:
                if record["stage"] == name and str(record["kind"]).startswith("warning/"):
                    texts.append(str(record.get("text", "")))
        return [*dict.fromkeys(texts), *self.damage]


def studies(workdir: PathLike) -> list[str]:
    """List the names of the studies in a directory, [] for none."""
    return sorted(path.stem for path in (absolute(workdir) / PLANS).glob("*.json"))


def read_run(
    workdir: PathLike,
    *,
    lenient: bool = False,
    has_ended: bool = False,
    read: Callable[[epath.Path], tuple[StageResult | None, str]] = stage_result.read_lenient,
) -> Run:
    """Read config and records; everything else is read on access. Missing files are empty.

    lenient: treat a stage with a damaged record as not finished, see `Run.left_out`. has_ended: see
    `Run`. read: reads a record, for example with a cache that points of a study share. Raises
    ValueError if there is no such folder, it holds no run, or a file is damaged.
    """
    root = epath.Path(workdir)
    try:
        folders = stage_folders(root)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise no_run(root) from error
    config = read_optional(root / "config.json").get("config", {})
    if not config and not folders:
        raise no_run(root)
    results: dict[str, StageResult] = {}
    left_out = []
    for name, folder in folders.items():
        result, damage = read(folder)
        if damage and not lenient:
            raise ValueError(damage)
        if damage:
            left_out.append(f"{name} is ignored: {damage}")
        if result is not None:
            results[name] = result
    return Run(root, config, folders, results, left_out, has_ended)
