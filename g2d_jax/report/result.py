"""The outcome of a run as `pipeline.run` returns it: manifests, and in a notebook the summary and
the figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from etils import epath

from g2d_jax.report.format import number
from g2d_jax.report.read import read_run
from g2d_jax.report.tables import Manifest, policies
from g2d_jax.runtime.storage import PathLike

if TYPE_CHECKING:
    import pandas as pd


class Result(Mapping[str, Manifest]):
    """The finished stages of a work directory, in order: stage -> manifest. A notebook shows its
    table and figures."""

    def __init__(self, workdir: PathLike) -> None:
        """Read a work directory, also of a run that is not at its end. Raises ValueError if it
        holds nothing of one."""
        self._run = read_run(workdir)
        self.workdir = self._run.workdir
        self._manifests = self._run.manifests

    @property
    def accuracies(self) -> pd.DataFrame:
        """The last evaluation, a row a policy: mean of samples, its standard error, greedy; in [0,
        1], NaN if unknown.

        Without an evaluation it has no rows.
        """
        import pandas as pd

        measures = {"accuracy": "mean", "standard_error": "sem_clustered", "greedy": "greedy"}
        evaluated = policies(self._run.latest)
        frame = pd.DataFrame(index=[str(policy["name"]) for policy in evaluated])
        for name, key in measures.items():
            frame[name] = [number(policy, key) for policy in evaluated]
        return frame

    @property
    def policies(self) -> dict[str, epath.Path]:
        """Where each trained policy lies, stage -> checkpoint folder of its last step; `g2d export`
        writes it out."""
        saved = {name: _last_step(self._run.stages[name].folder / "checkpoints") for name in self}
        return {name: folder for name, folder in saved.items() if folder is not None}

    @property
    def report(self) -> epath.Path | None:
        """The page of the report, which follows a run from its first stage on; None before."""
        page = self.workdir / "report.html"
        if not page.exists():
            return None
        return page

    def __getitem__(self, stage: str) -> Manifest:
        return self._manifests[stage]

    def __iter__(self) -> Iterator[str]:
        return iter(self._manifests)

    def __len__(self) -> int:
        return len(self._manifests)

    def __reduce__(self) -> tuple[type[Result], tuple[str]]:
        """Go to another process as a work directory, which is read there."""
        return Result, (str(self.workdir),)

    def __repr__(self) -> str:
        return f"Result({str(self.workdir)!r}: {', '.join(self) or 'no stage is finished'})"

    def _repr_html_(self) -> str:
        from g2d_jax.report.run import summary  # here: it loads what draws figures

        return summary(self._run)._repr_html_()


def _last_step(checkpoints: epath.Path) -> epath.Path | None:
    steps = [path for path in checkpoints.glob("*") if path.name.isdecimal()]
    return max(steps, key=lambda path: int(path.name), default=None)
