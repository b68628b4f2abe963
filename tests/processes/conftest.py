"""Several processes on this machine, each with simulated devices: started, watched, and never left behind."""

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.append(str(HERE))  # for the helpers beside this file

ENDS = 200.0  # seconds in which anything must end


@dataclass
class Started:
    """Processes of one run. errors: the file of each one's standard error."""

    running: list[subprocess.Popen[bytes]]
    outputs: list[Path]
    errors: list[Path]

    def send(self, index: int, number: signal.Signals) -> None:
        os.kill(self.running[index].pid, number)

    def wait_for(self, workdir: Path, pattern: str) -> None:
        """Until a file is there."""
        limit = time.monotonic() + ENDS
        while not next(workdir.glob(pattern), None):
            assert time.monotonic() < limit and self.alive(), f"no {pattern}\n{self.told()}"
            time.sleep(0.002)

    def alive(self) -> bool:
        return all(process.poll() is None for process in self.running)

    def statuses(self, within: float = ENDS) -> list[int]:
        """Exit statuses; -9 for a process killed by signal 9."""
        limit = time.monotonic() + within
        try:
            return [process.wait(max(limit - time.monotonic(), 0.1)) for process in self.running]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {within} s\n{self.told()}") from None

    def said(self, index: int, text: str, within: float = 10.0) -> bool:
        """Whether a process, or the one that speaks for it after its end, wrote this to standard error."""
        limit = time.monotonic() + within
        while text not in self.errors[index].read_text():
            if time.monotonic() > limit:
                return False
            time.sleep(0.05)
        return True

    def told(self) -> str:
        """All of standard error, for the message of an assertion."""
        return "\n".join(f"--- process {i}\n{error.read_text()[-3000:]}" for i, error in enumerate(self.errors))

    def end(self) -> None:
        for process in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # verifiers too
            process.wait(10)


Start = Callable[..., Started]


@pytest.fixture(scope="session")
def start_session(one_device: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Start processes; whoever calls it must end them."""

    def start(count: int, devices: int, *command: object, env: dict[str, str] | None = None) -> Started:
        folder = tmp_path_factory.mktemp("processes")
        place = f"localhost:{free_port()}"
        shared = one_device | {
            "XLA_FLAGS": f"{one_device['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}",
            "PYTHONPATH": os.pathsep.join([one_device["PYTHONPATH"], str(HERE)]),
        }
        started = Started([], [], [])
        try:
            for index in range(count):
                own = {
                    "JAX_COORDINATOR_ADDRESS": place,
                    "JAX_NUM_PROCESSES": str(count),
                    "JAX_PROCESS_ID": str(index),
                }
                out, err = folder / f"{index}.out", folder / f"{index}.err"
                with open(out, "wb") as stdout, open(err, "wb") as stderr:
                    started.running.append(
                        subprocess.Popen(
                            [sys.executable, *map(str, command)],
                            env=shared | (own if count > 1 else {}) | (env or {}),
                            stdin=subprocess.DEVNULL,
                            stdout=stdout,
                            stderr=stderr,
                            start_new_session=True,
                        )
                    )
                started.outputs.append(out)
                started.errors.append(err)
        except BaseException:
            started.end()
            raise
        return started

    return start


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


@pytest.fixture
def start(start_session: Start) -> Iterator[Start]:
    """Start COUNT processes with so many devices each; what is left of them at the end is killed."""
    with contextlib.ExitStack() as stack:

        def begin(*arguments: object, **more: object) -> Started:
            started = start_session(*arguments, **more)
            stack.callback(started.end)
            return started

        yield begin


def command(workdir: Path, *arguments: str, config: str = "small") -> list[object]:
    """`g2d run` of a config of this folder."""
    return ["-m", "g2d_jax", "run", "--config", HERE / f"{config}.py", "--workdir", workdir, *arguments]
