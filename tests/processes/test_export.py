"""`g2d export` started on several hosts alike: one model, as from one process; and what becomes of
errors."""

from pathlib import Path

import adapters
import jax
import pytest
from etils import epath
from launched import Launch

from g2d_jax import commands
from g2d_jax.config import Config
from g2d_jax.models import lora
from g2d_jax.session.policies import load_policy
from g2d_jax.session.workdir import claim
from g2d_jax.training.checkpoint import Checkpoints

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A work directory with a checkpoint of adapters that are not zero."""
    folder = tmp_path_factory.mktemp("export") / "run"
    claim(Config.of(adapters.get_config()), epath.Path(folder))
    with (
        commands.opened(folder) as session,
        Checkpoints(folder / "01-warmup" / "checkpoints") as checkpoints,
    ):
        trained, _ = lora.partition(load_policy(session, "init"))
        checkpoints.save(2, {"params": jax.tree.map(lambda x: x + 0.1, trained)}, {})
    return folder


def command(workdir: Path, output: Path) -> list[object]:
    return ["export", "--workdir", workdir, "--output", output, "--dtype", "bfloat16"]


@pytest.mark.slow
def test_two_processes_export_what_one_does(workdir: Path, launch: Launch, tmp_path: Path) -> None:
    commands.export(workdir, tmp_path / "one", dtype="bfloat16")
    launched = launch(2, 2, *command(workdir, tmp_path / "two"))
    assert launched.statuses() == [0, 0], launched.told()
    assert [str(tmp_path / "two") in process.stdout for process in launched.running] == [
        True,
        False,
    ]
    files = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= files.keys()
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "two").iterdir()}


@pytest.mark.slow
def test_an_error_in_the_midst_of_writing_ends_all(
    workdir: Path, launch: Launch, tmp_path: Path
) -> None:
    """The other one is then waiting for a tensor; it hears of the error long before a silent one
    would be lost."""
    launched = launch(2, 1, *command(workdir, tmp_path / "two"), env={"FULL": "10000"})
    assert launched.statuses(within=50) == [1, 1], launched.told()
    for process in launched.running:
        assert "cannot write: File too large" in process.stderr, launched.told()
    assert not (tmp_path / "two" / "config.json").exists()
