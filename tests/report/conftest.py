"""A finished run, and its report."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from reports import Page

from g2d_jax.report.run import write_run
from g2d_jax.report.runs import read_run


@pytest.fixture(scope="session")
def read() -> Callable[[Path], Page]:
    """Writes a run's report and parses its page."""
    return lambda workdir: Page(
        Path(write_run(read_run(workdir, lenient=True), figures=False)[0]).read_text(
            encoding="utf-8"
        )
    )


@pytest.fixture(scope="session")
def report_of(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Page]:
    """A finished run with its report: the folder, to be read only, and the page."""
    folder = tmp_path_factory.mktemp("report") / "run"
    shutil.copytree(finished, folder, ignore=shutil.ignore_patterns("checkpoints"))
    return folder, Page(Path(write_run(read_run(folder))[0]).read_text(encoding="utf-8"))


@pytest.fixture
def own_run(finished: Path, tmp_path: Path) -> Path:
    """A finished run to take things from."""
    shutil.copytree(finished, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    return tmp_path / "run"
