"""A machine that has no room, memory or threads left: told in one line, without the tracebacks of
libraries."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import pytest

from g2d_jax.runtime import failures, storage
from g2d_jax.training.checkpoint import Checkpoints


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 100 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", folder], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("this machine lets us mount nothing")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_checkpoint_on_a_full_disk_is_one_error_that_names_the_folder(
    small_disk: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("absl", "asyncio"):
        monkeypatch.setattr(logging.getLogger(name), "filters", [])
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    failures.hush()
    folder = small_disk / "checkpoints"
    state = {"params": {str(i): jnp.arange(40_000.0) * i for i in range(4)}}
    checkpoints = Checkpoints(folder)
    with pytest.raises(OSError, match="No space left on device") as caught:
        checkpoints.save(1, state, {"step": 1})
        checkpoints.wait()
        checkpoints.close()
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(folder))
    assert failures.line(caught.value).startswith(
        f"No space left on device: '{folder}'; free some space there"
    )
    assert "Traceback" not in capfd.readouterr().err
    log = storage.Segments(small_disk / "log")
    with pytest.raises(OSError, match=r"No space left.*00000\.jsonl"):
        log.append({"text": "x" * 200_000})


def test_a_checkpoint_beyond_the_limit_of_a_file_is_one_line(
    one_device: dict[str, str], tmp_path: Path
) -> None:
    code = """
import resource, sys
import jax.numpy as jnp
from g2d_jax.runtime import failures
from g2d_jax.training.checkpoint import Checkpoints

failures.hush()
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    with Checkpoints(sys.argv[1]) as checkpoints:
        checkpoints.save(1, {"params": {str(i): jnp.arange(40_000.0) * i for i in range(4)}}, {})
except OSError as error:
    print(failures.line(error))
"""
    python = [sys.executable, "-c", code, str(tmp_path / "kept")]
    done = subprocess.run(python, env=one_device, capture_output=True, text=True)
    line = f"File too large: '{tmp_path}/kept'; allow larger files there (ulimit -f), then"
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith(line)


def full(path: str | None) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *([] if path is None else [path]))


def wrapped(error: Exception, cause: Exception) -> Exception:
    try:
        raise error from cause
    except Exception as raised:
        return raised


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            full("/w/metrics"),
            "No space left on device: '/w/metrics'; free some space there, then run the same command "
            "again",
        ),
        (
            full(None),
            "No space left on device: [Errno 28] No space left on device; free some space there",
        ),
        (
            OSError(errno.EDQUOT, "Disk quota exceeded", "/w/x"),
            "Disk quota exceeded: '/w/x'; free some space there",
        ),
        (
            ValueError("RESOURCE_EXHAUSTED: write: No space left on device [local]"),
            "No space left on device: RESOURCE",
        ),
        (
            ValueError("OUT_OF_RANGE: Failed to write 5634 bytes to file 13: File too large"),
            "File too large: OUT_OF_RANGE: Failed to write 5634 bytes to file 13: File too large; "
            "allow larger files there (ulimit -f), then run the same command again",
        ),
        (
            OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/w/x"),
            "Too many open files: '/w/x'; allow more open files (ulimit -n), then run",
        ),
        (
            wrapped(RuntimeError("a thread failed"), full("/w/part")),
            "No space left on device: '/w/part'; free some space",
        ),
        (
            MemoryError(),
            "out of memory on this machine, or over a limit for this process: end other programs",
        ),
        (
            MemoryError("Unable to allocate 7.45 TiB for an array"),
            "out of memory on this machine, or over a limit for this process (Unable to allocate "
            "7.45 TiB for an array): ",
        ),
        (
            RuntimeError("can't start new thread"),
            "the system cannot start more threads: memory or the number",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "/w"),
            "Permission denied: '/w'; give this user access",
        ),
        (
            RuntimeError(
                "UNKNOWN: Gloo context initialization failed: DEADLINE_EXCEEDED: "
                "GetKeyValue()\nmore"
            ),
            "a collective operation failed: UNKNOWN: Gloo context initialization "
            "failed: DEADLINE_EXC",
        ),
        (
            RuntimeError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer"),
            "a collective operation failed",
        ),
        (
            ImportError("Please install gcsfs to access Google Storage"),
            "Please install gcsfs to access Google Storage: pip install '.[gcs]' in the folder",
        ),
        (
            ImportError("Install s3fs to access S3"),
            "Install s3fs to access S3: pip install '.[s3]'",
        ),
        (ImportError("another package"), ""),
        (RuntimeError("a fault of ours"), ""),
        (ValueError("data.train is not set"), ""),
    ],
)
def test_a_line_for_each_failure_of_the_machine(error: Exception, told: str) -> None:
    assert failures.line(error).startswith(told) and bool(failures.line(error)) == bool(told)
    assert "\n" not in failures.line(error)


@pytest.mark.slow
def test_threads_that_cannot_be_started_are_told_by_the_command(
    one_device: dict[str, str], tmp_path: Path
) -> None:
    code = """
import sys, threading
from g2d_jax import cli

def refuse(thread):
    raise RuntimeError("can't start new thread")  # as Python says it where the system starts none

threading.Thread.start = refuse
sys.exit(cli.main(["run", "--config", "demo:preset=smoke", "--workdir", sys.argv[1]]))
"""
    python = [sys.executable, "-c", code, str(tmp_path / "run")]
    done = subprocess.run(python, env=one_device, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert (
        done.returncode == 1
        and line.startswith("g2d: the system cannot start more threads")
        and "ulimit" in line
    )


@pytest.mark.parametrize(("hidden", "told"), [(True, False), (False, True)])
def test_an_error_raised_from_none_has_nothing_to_do_with_the_one_before(
    hidden: bool, told: bool
) -> None:
    try:
        try:
            raise OSError(errno.ENOSPC, "No space left on device", "/a/file")
        except OSError:
            if hidden:
                raise KeyError("another") from None
            raise KeyError("another")  # noqa: B904 (what was handled then is the context)
    except KeyError as error:
        assert bool(failures.limit_of_files(error)) is told and bool(failures.line(error)) is told
