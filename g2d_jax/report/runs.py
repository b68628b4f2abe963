"""Read what a run left on disk: its config, its stages, their manifests and what they logged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from etils import epath

from g2d_jax.records import Verdict
from g2d_jax.report.tables import Manifest, policies, result_of
from g2d_jax.runtime.lock import holder
from g2d_jax.runtime.storage import read_bytes, read_informing, read_json
from g2d_jax.runtime.tracking import read_metrics
from g2d_jax.study.pricing import Rates
from g2d_jax.workdir import absolute

if TYPE_CHECKING:
    import pandas as pd  # takes half a second, which `g2d status` need not wait for

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
        missing = [name for name in columns if name not in table.column_names]
        if missing:
            raise ValueError(f"it has no column {', '.join(missing)}")
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ValueError(f"{file} is damaged or not a part written here: {error}") from error
    return table


def read_answers(file: epath.Path) -> pd.DataFrame:
    """Read the correctness matrix of a file of rollouts, problem ids ascending by samples: 1, 0,
    NaN not scored.

    Raises as `read_parquet`.
    """
    frame = read_parquet(file, ["problem_id", "verdict"]).to_pandas()
    accuracies = {verdict.value: verdict.accuracy for verdict in Verdict}
    frame["correct"] = frame["verdict"].map(accuracies).astype(np.float64)
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
    section: Settings
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
    left_out: what is wrong with manifests that were read as if they were not there. ending: how it
    stopped, told by the process that still holds its lock; "" where the lock tells whether one
    works on it.
    """

    workdir: epath.Path
    config: Mapping[str, Any]
    stages: Mapping[str, Stage]
    answers: Callable[[epath.Path], pd.DataFrame]
    rates: Rates | None = None
    left_out: Sequence[str] = ()
    ending: str = ""

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
    def sections(self) -> Mapping[str, Settings]:
        """The config's stages by name."""
        return self.config.get("stages", {})

    @property
    def manifests(self) -> dict[str, Manifest]:
        """Stage -> manifest, of the finished stages in order."""
        return {name: stage.manifest for name, stage in self.stages.items() if stage.manifest}

    @property
    def evaluations(self) -> list[Stage]:
        """The finished evaluate stages, in order."""
        return [
            stage for stage in self.stages.values() if stage.kind == EVALUATE and stage.manifest
        ]

    @property
    def latest(self) -> Manifest | None:
        """The manifest of the evaluation that is the result; None before there is one."""
        return result_of([stage.manifest for stage in self.evaluations if stage.manifest])

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
        if self.ending:
            return False
        unfinished = [stage.folder for stage in self.stages.values() if not stage.manifest]
        return any(map(holder, [self.workdir, *unfinished]))

    @property
    def error(self) -> str:
        """The error with which it stopped last, "" where it went on after it or logged none."""
        if self.ending:
            return self.ending.partition(": ")[2]
        last = max(self.metrics, key=itemgetter("time"), default={})
        return str(last.get("text", "")) if last.get("kind") == "error" else ""

    @property
    def warnings(self) -> list[str]:
        """List what the stages warned of, in their order: as manifests have it; of one under way,
        as it was logged.

        `damage` comes last.
        """
        warned: dict[str, None] = {}
        for stage in self.stages.values():
            for warning in self._warnings_of(stage):
                warned[str(warning["text"])] = None
        return [*warned, *self.damage]

    def _warnings_of(self, stage: Stage) -> Sequence[Mapping[str, Any]]:
        if stage.manifest:
            return stage.manifest.get("warnings", ())
        warnings = []
        for record in self.metrics:
            if record["stage"] == stage.name and str(record["kind"]).startswith("warning/"):
                warnings.append(record)
        return warnings
