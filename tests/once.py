"""Work that is done once for all workers of a test session."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the session, the same one in all workers."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def once(
    tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]
) -> Path:
    """A folder of the session that `make` fills in the first worker that asks; the others wait.
    Read it only."""
    folder = root(tmp_path_factory) / name
    done = folder.with_suffix(".done")
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a worker whose `make` failed
            folder.mkdir()
            make(folder)
            done.touch()
    return folder
