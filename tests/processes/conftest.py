"""Runs of several processes for the tests beside this file."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.append(str(HERE))  # for the helpers, here and in the processes

from launched import Launched, Told, by_jax, command  # noqa: E402
from once import once  # noqa: E402

Launching = Callable[..., AbstractContextManager[Launched]]


@pytest.fixture(scope="session")
def launching(one_device: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Launching:
    """Launch COUNT processes with so many devices each; what is left of them at the end of the block is killed."""

    @contextlib.contextmanager
    def launch(
        count: int, devices: int, *arguments: object, env: dict[str, str] | None = None, told: Told = by_jax
    ) -> Iterator[Launched]:
        shared = one_device | {
            "XLA_FLAGS": f"{one_device['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}",
            "PYTHONPATH": os.pathsep.join([one_device["PYTHONPATH"], str(HERE)]),
            "PYTHONUNBUFFERED": "1",
        }
        launched = Launched(tmp_path_factory.mktemp("launched"))
        try:
            launched.start(count, shared | (env or {}), told, *arguments)
            yield launched
        finally:
            launched.end()

    return launch


@pytest.fixture
def launch(launching: Launching) -> Iterator[Callable[..., Launched]]:
    """The same for a test: what is left is killed at its end."""
    with contextlib.ExitStack() as stack:
        yield lambda *arguments, **more: stack.enter_context(launching(*arguments, **more))


@pytest.fixture(scope="session")
def whole(launching: Launching, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The work directory of an undisturbed run of small.py by 2 processes with 2 devices each. Nothing may write there.

    One for all test workers.
    """

    def make(folder: Path) -> None:
        with launching(2, 2, *command(folder / "work")) as launched:
            assert launched.statuses() == [0, 0], launched.told()

    return once(tmp_path_factory, "launched-whole", make) / "work"
