"""Full and read-only disks, files where folders belong, a work directory taken away, two runs in
one: each ends with a message and exit status 1, and with the cause gone the same command ends like
a run that nothing happened to.
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from forks import Forks
from stages.alike import differences

from g2d_jax.runtime.tracking import read_metrics
from g2d_jax.session import stage_result

HERE = Path(__file__).parent
RUN = ["run", "--config", str(HERE / "short.py"), "--workdir"]
MOUNT = [
    "unshare",
    "-rm",
    "sh",
    "-c",
    'mount -t tmpfs -o size=8m none "$1" && shift && exec "$@"',
    "sh",
]
"""Runs a command in a namespace of its own, where a small file system of its own lies on a
folder."""


def can_mount(folder: Path) -> bool:
    try:
        return (
            subprocess.run([*MOUNT, folder, "true"], capture_output=True, timeout=20).returncode
            == 0
        )
    except OSError:
        return False


def on_disk(folder: Path, env: dict[str, str], *cases: tuple[str, str]) -> dict[str, Any]:
    """What on_disk.py prints; the work directory it leaves is `folder`/left."""
    disk = folder / "disk"
    disk.mkdir()
    command = [
        sys.executable,
        HERE / "on_disk.py",
        disk / "work",
        folder / "left",
        json.dumps(cases),
    ]
    done = subprocess.run(
        [*MOUNT, disk, *command], env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.partition("RESULT ")[2])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Path:
    """The work directory of a run that another one tried to enter."""
    workdir = tmp_path_factory.mktemp("whole") / "work"
    with forks.start(*RUN, workdir) as first:
        deadline = time.monotonic() + 120
        while not (workdir / "01-sft").exists() and first.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        first.send_signal(signal.SIGSTOP)  # else it might end before the second has started
        second = forks.run(*RUN, workdir, timeout=120)
        first.send_signal(signal.SIGCONT)
        assert second.returncode == 1
        assert (
            f"g2d: {workdir} is in use by another process: it is locked by process {first.pid} on"
            in second.stderr
        )
        assert first.wait() == 0, first.stderr
    return workdir


@pytest.mark.slow
def test_a_second_run_is_told_at_once_and_the_first_goes_on(whole: Path) -> None:
    assert all(stage_result.read(whole / name) for name in ("01-sft", "02-collect"))
    assert (whole / "report.html").exists()
    assert [record["step"] for record in read_metrics(whole) if record["stage"] == "sft"] == [
        1,
        2,
        3,
        4,
    ]


@pytest.mark.slow
def test_a_disk_that_is_full_or_read_only(
    tmp_path: Path, whole: Path, one_device: dict[str, str]
) -> None:
    if not can_mount(tmp_path):
        pytest.skip("this machine lets us mount nothing")
    cases = {
        ("full", ""): "config.json",
        ("readonly", ""): "work",
        ("full", "environment.json"): "environment.json",
        ("file", "metrics"): "metrics",
        ("file", "01-sft"): "01-sft",
        ("full", "metrics/*.jsonl"): "metrics/0000",
        ("full", "01-sft/checkpoints/2*"): "",  # Orbax names no file
        ("full", "01-sft/checkpoints/4*"): "",
        ("full", "01-sft/manifest.json"): "01-sft/manifest.json",
        (
            "full",
            "02-collect/rollouts/part-00001.parquet",
        ): "02-collect/rollouts/part-00001.parquet",
        ("full", "02-collect/preferences/*.parquet"): "02-collect/preferences/part-00000.parquet",
        ("full", "02-collect/manifest.json"): "02-collect/manifest.json",
    }
    result = on_disk(tmp_path, one_device, *cases)

    for (what, where), (status, errors) in zip(cases, result["runs"], strict=True):
        message = [line for line in errors.splitlines() if line.startswith("g2d: ")]
        assert status == 1 and len(message) == 1, (what, where, errors)
        assert cases[what, where] in message[0], (what, where, message)
        reason = {
            "full": "No space left on device",
            "readonly": "Read-only file system",
            "file": "",
        }[what]
        assert reason in message[0], (what, where, message)
    assert result["last"][0] == 0, result["last"]
    # parts of rollouts, preferences, informativeness
    assert len([*whole.rglob("*.parquet")]) == 2 + 1 + 1
    assert differences(whole, tmp_path / "left") == []


@pytest.mark.slow
def test_a_work_directory_taken_away(tmp_path: Path, forks: Forks) -> None:
    """The run ends by itself within seconds, and what it left there, if anything, is taken for no
    run."""
    workdir, away = tmp_path / "work", tmp_path / "away"
    with forks.start(*RUN, workdir, "--config.stages.sft.steps=100000") as run:
        deadline = time.monotonic() + 120
        while not (workdir / "01-sft" / "checkpoints" / "2").exists():
            assert time.monotonic() < deadline and run.poll() is None
            time.sleep(0.01)
        workdir.rename(away)
        assert run.wait(60) == 1
    errors = run.stderr
    assert (
        f"{workdir} was deleted or moved while this process worked in it" in errors
        or f"{workdir}/" in errors
    )
    assert not (workdir / "config.json").exists()
    assert (away / "config.json").exists()
