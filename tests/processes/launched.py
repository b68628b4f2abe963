"""Several processes on this machine, each with simulated devices: started, watched, and never left behind."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
ENDS = 600.0  # seconds in which anything must end


def command(workdir: Path, *arguments: str, config: str = "small") -> list[object]:
    """`g2d run` of a config of this folder."""
    return [HERE / "several.py", "run", "--config", HERE / f"{config}.py", "--workdir", workdir, *arguments]


Told = Callable[[int, int, int], dict[str, str]]


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
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


@dataclass
class Launched:
    """Processes of one run. folder: of what each writes to standard output and standard error, 0.out, 0.err …"""

    folder: Path
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, count: int, env: dict[str, str], told: Told, *arguments: object) -> None:
        """Start them. told: from count, port and index to the environment that tells one of the others."""
        port = free_port()
        for index in range(count):
            own = told(count, port, index) if count > 1 else {}
            with open(self.folder / f"{index}.out", "wb") as out, open(self.folder / f"{index}.err", "wb") as err:
                self.running.append(
                    subprocess.Popen(
                        [sys.executable, *map(str, arguments)],
                        env=own | env,
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=err,
                        start_new_session=True,
                    )
                )

    def send(self, index: int, number: signal.Signals) -> None:
        os.kill(self.running[index].pid, number)

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
        try:
            return [process.wait(max(limit - time.monotonic(), 0.1)) for process in self.running]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {within} s\n{self.told()}") from None

    def output(self, index: int) -> str:
        return (self.folder / f"{index}.out").read_text()

    def errors(self, index: int) -> str:
        return (self.folder / f"{index}.err").read_text()

    def said(self, index: int, text: str, within: float = 10.0) -> bool:
        """Whether a process, or the one that speaks for it after its end, wrote this to standard error."""
        limit = time.monotonic() + within
        while text not in self.errors(index):
            if time.monotonic() > limit:
                return False
            time.sleep(0.05)
        return True

    def told(self) -> str:
        """The end of each one's standard error, for the message of an assertion."""
        return "\n".join(f"--- process {i}\n{self.errors(i)[-3000:]}" for i in range(len(self.running)))

    def end(self) -> None:
        """Kill what is left, and what it started in its session."""
        for process in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


Launch = Callable[..., Launched]
"""The fixture `launch`: from count, devices and arguments to the processes."""
