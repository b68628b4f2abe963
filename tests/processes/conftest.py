"""Runs of several processes for the tests beside this file."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent / "stages"), str(HERE.parent / "scoring")]  # for helpers

from forks import Forks  # noqa: E402
from launched import Launch, Launched, Told, by_jax, command, free_port  # noqa: E402
from once import once  # noqa: E402

CODE = f"import sys; sys.path.append({str(HERE)!r}); import several; several.main(*sys.argv[1:])"


@pytest.fixture(scope="session")
def launching(forks: Forks, one_device: dict[str, str]) -> Launch:
    """Launch COUNT processes of several.py with so many devices each."""
    path = os.pathsep.join([one_device["PYTHONPATH"], str(HERE)])

    def launch(
        count: int,
        devices: int,
        *arguments: object,
        env: dict[str, str] | None = None,
        told: Told = by_jax,
    ) -> Launched:
        flags = f"{one_device['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
        shared = one_device | {"XLA_FLAGS": flags, "PYTHONPATH": path} | (env or {})
        port = free_port()
        variables = [
            shared | (told(count, port, index) if count > 1 else {}) for index in range(count)
        ]
        return Launched([forks.start(*arguments, code=CODE, env=own) for own in variables])

    return launch


@pytest.fixture
def launch(launching: Launch) -> Iterator[Launch]:
    """The same for a test: what is left is killed at its end."""
    with contextlib.ExitStack() as stack:
        yield lambda *arguments, **more: stack.enter_context(launching(*arguments, **more))


@pytest.fixture(scope="session")
def whole(launching: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The work directory of an undisturbed run of small.py by 2 processes with 2 devices each.
    Nothing may write there.

    One for all test workers.
    """

    def make(folder: Path) -> None:
        with launching(2, 2, *command(folder / "work")) as launched:
            assert launched.statuses() == [0, 0], launched.told()

    return once(tmp_path_factory, "launched-whole", make) / "work"
