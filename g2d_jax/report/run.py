"""What a work directory holds, finished or not, read once for a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etils import epath

from g2d_jax.records import Preference
from g2d_jax.storage import PathLike, finished, read_json
from g2d_jax.tables import read_columns, read_preferences
from g2d_jax.tracking import read_metrics
from g2d_jax.workdir import no_run, stage_folders


@dataclass(frozen=True)
class Stage:
    """One folder NN-name. manifest None: not finished. kind: of the manifest, else of the config, else ""."""

    folder: epath.Path
    name: str
    kind: str
    manifest: Mapping[str, Any] | None

    def preferences(self) -> list[Preference]:
        """The pairs of a collect stage, [] if none are written. Raises ValueError for a damaged part."""
        try:
            return read_preferences(self.folder / "preferences")
        except FileNotFoundError:
            return []

    def rollouts_file(self, policy: str) -> epath.Path | None:
        """Where a finished evaluate stage has a policy's completions; None if they are gone."""
        entries = (self.manifest or {}).get("result", {}).get("policies", ())
        named = next((entry["rollouts"] for entry in entries if entry["name"] == policy), "")
        return file if named and (file := self.folder / str(named)).exists() else None

    def parts(self) -> list[epath.Path]:
        """The files with a stage's completions, in order."""
        folder = self.folder / "rollouts"
        return sorted(folder.glob("*.parquet")) if folder.exists() else []

    def informativeness(self) -> Mapping[str, Any]:
        """Measures of a collect stage's rollouts by name, {} if they are not written."""
        return _read_optional(self.folder / "informativeness.json") or {}

    def prompts(self) -> Mapping[str, Any]:
        """The same measures by prompt: columns, {} if they are not written; raises as `preferences`."""
        try:
            return read_columns(self.folder / "informativeness" / "prompts.parquet")
        except FileNotFoundError:
            return {}

    def provenance(self) -> Mapping[str, Any]:
        """How the pairs of a collect stage came about, {} if they are not written."""
        return _read_optional(self.folder / "preferences" / "_manifest.json") or {}

    def problems(self) -> dict[str, Mapping[str, Any]]:
        """The problems of an evaluate stage by id, from its problems.json: [{"id", "prompt", "answer", "subset"}]."""
        return {row["id"]: row for row in _read_optional(self.folder / "problems.json") or ()}


@dataclass(frozen=True)
class Run:
    """A work directory. config, environment: {} if not written; planned: stages of the config without a folder."""

    workdir: epath.Path
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    stages: Sequence[Stage]
    planned: Sequence[str]
    metrics: Sequence[Mapping[str, Any]]

    @property
    def name(self) -> str:
        """The config's name, else the folder's."""
        return str(self.config.get("name") or self.workdir.name)

    @property
    def manifests(self) -> list[Mapping[str, Any]]:
        """Of the finished stages, in order."""
        return [stage.manifest for stage in self.stages if stage.manifest is not None]

    @property
    def warnings(self) -> list[str]:
        """What the stages warned of, in their order: as manifests have it; of one under way, as it was logged."""
        logged = [record for record in self.metrics if str(record["kind"]).startswith("warning/")]
        return [
            str(warning["text"])
            for stage in self.stages
            for warning in (
                [record for record in logged if record["stage"] == stage.name]
                if stage.manifest is None
                else stage.manifest.get("warnings", ())
            )
        ]

    @property
    def evaluations(self) -> list[Stage]:
        """Finished evaluate stages, in order; the last one is the result."""
        return [stage for stage in self.stages if stage.kind == "evaluate" and stage.manifest is not None]


def read_run(workdir: PathLike) -> Run:
    """Read all but completions and pairs. What is not written yet is empty.

    Raises ValueError if there is no such folder, it holds nothing of a run, or a file is damaged.
    """
    root = epath.Path(workdir)
    try:
        found = stage_folders(root)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise no_run(root) from error
    config = (_read_optional(root / "config.json") or {}).get("config", {})
    if not config and not found:
        raise no_run(root)
    kinds = {name: str(stage.get("kind", "")) for name, stage in config.get("stages", {}).items()}
    stages = [_stage(path, name, kinds) for name, path in found.items()]
    return Run(
        workdir=root,
        config=config,
        environment=_read_optional(root / "environment.json") or {},
        stages=stages,
        planned=[name for name in kinds if name not in {stage.name for stage in stages}],
        metrics=read_metrics(root),
    )


def _stage(folder: epath.Path, name: str, kinds: Mapping[str, str]) -> Stage:
    manifest = finished(folder)
    return Stage(folder, name, str((manifest or {}).get("kind") or kinds.get(name, "")), manifest)


def _read_optional(path: epath.Path) -> Any:
    try:
        return read_json(path)
    except FileNotFoundError:
        return None
