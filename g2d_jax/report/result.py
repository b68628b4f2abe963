"""The result of a run, as `pipeline.run` returns it: records, and in a notebook the summary and the
figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from etils import epath

from g2d_jax.report.runs import read_run
from g2d_jax.runtime.storage import PathLike
from g2d_jax.session.stage_result import StageResult

if TYPE_CHECKING:
    import pandas as pd


class Result(Mapping[str, StageResult]):
    """The finished stages of a work directory, in order: stage -> its record. A notebook shows its
    table and figures."""

    def __init__(self, workdir: PathLike) -> None:
        """Read a work directory, also of an unfinished run. Raises ValueError if it holds no
        run."""
        self._run = read_run(workdir)
        self.workdir = self._run.workdir

    @property
    def accuracies(self) -> pd.DataFrame:
        """The final evaluation, a row a policy: mean of samples, its standard error, greedy; in [0,
        1], NaN if unknown.

        Without an evaluation it has no rows.
        """
        import pandas as pd

        rows = []
        for policy in self._run.latest.policies if self._run.latest else ():
            accuracy = policy.accuracy
            rows.append((policy.name, accuracy.mean, accuracy.sem_clustered, policy.greedy))
        columns = ["policy", "accuracy", "standard_error", "greedy"]
        return pd.DataFrame(rows, columns=columns).set_index("policy")

    @property
    def policies(self) -> dict[str, epath.Path]:
        """Each trained stage -> the checkpoint folder of its last step, for `g2d export`."""
        saved = {}
        for name in self:
            checkpoints = (self._run.folders[name] / "checkpoints").glob("*")
            steps = [path for path in checkpoints if path.name.isdecimal()]
            if steps:
                saved[name] = max(steps, key=lambda path: int(path.name))
        return saved

    @property
    def report(self) -> epath.Path | None:
        """The report page, which exists from the first stage on; None before."""
        page = self.workdir / "report.html"
        return page if page.exists() else None

    def __getitem__(self, stage: str) -> StageResult:
        return self._run.results[stage]

    def __iter__(self) -> Iterator[str]:
        return iter(self._run.results)

    def __len__(self) -> int:
        return len(self._run.results)

    def __reduce__(self) -> tuple[type[Result], tuple[str]]:
        """Pickle as a work directory, which the other process reads."""
        return Result, (str(self.workdir),)

    def __repr__(self) -> str:
        return f"Result({str(self.workdir)!r}: {', '.join(self) or 'no stage is finished'})"

    def _repr_html_(self) -> str:
        from g2d_jax.report.run import summary  # here, since it imports the drawing of figures

        return summary(self._run)._repr_html_()
