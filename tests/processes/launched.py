"""Several processes on this machine, each with simulated devices: started, watched, and never left
behind."""

import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from forks import Forked

HERE = Path(__file__).parent
ENDS = 600.0  # seconds in which anything must end


def command(workdir: Path, *arguments: str, config: str = "small") -> list[object]:
    """`g2d run` of a config of this folder."""
    return ["run", "--config", HERE / f"{config}.py", "--workdir", workdir, *arguments]


Told = Callable[[int, int, int], dict[str, str]]
"""From the number of processes, port and index to the environment that tells one of the others."""


def by_jax(count: int, port: int, index: int) -> dict[str, str]:
    """JAX's own variables."""
    return {
        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(index),
    }


def by_slurm(count: int, port: int, index: int) -> dict[str, str]:
    """What Slurm sets in a step's tasks; JAX takes the port from the job's number."""
    return {
        "SLURM_JOB_ID": str(port),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": str(count),
        "SLURM_PROCID": str(index),
        "SLURM_LOCALID": str(index),
    }


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


@dataclass
class Launched:
    """The processes of one run. A context manager that kills what is left of them."""

    running: list[Forked]

    def __enter__(self) -> "Launched":
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.running:
            process.kill()
            process.wait()

    def send(self, index: int, number: signal.Signals) -> None:
        self.running[index].send_signal(number)

    def wait_for(self, workdir: Path, pattern: str, seconds: float = 0.0) -> None:
        """Until a file is there, and so many seconds longer."""
        limit = time.monotonic() + ENDS
        while not next(workdir.glob(pattern), None):
            assert time.monotonic() < limit and self.alive(), f"no {pattern}\n{self.told()}"
            time.sleep(0.002)
        time.sleep(seconds)

    def alive(self) -> bool:
        return all(process.poll() is None for process in self.running)

    def statuses(self, within: float = ENDS) -> list[int]:
        """Exit statuses; -9 for a process killed by signal 9."""
        limit = time.monotonic() + within
        return [process.wait(max(limit - time.monotonic(), 0.1)) for process in self.running]

    def said(self, index: int, text: str, within: float = 10.0) -> bool:
        """Whether a process, or the one that speaks for it after its end, wrote this to standard
        error."""
        limit = time.monotonic() + within
        while text not in self.running[index].stderr:
            if time.monotonic() > limit:
                return False
            time.sleep(0.05)
        return True

    def told(self) -> str:
        """The end of each one's standard error, for the message of an assertion."""
        return "\n".join(
            f"--- process {i}\n{process.stderr[-3000:]}" for i, process in enumerate(self.running)
        )


Launch = Callable[..., Launched]
"""The fixture `launch`: from count, devices and arguments to the processes."""
