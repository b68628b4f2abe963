r"""Run the demo again and again, killed and stopped at random times and started anew, and compare
each run with one that was never disturbed.

    python benchmarks/soak.py --minutes 60 --output soak.json python benchmarks/soak.py --minutes 5
    --layouts 2 --seed 7 --latest 30 python benchmarks/soak.py --minutes 90 --layouts 1 2 4
    --signals SIGTERM SIGHUP --skew 45

A layout is a number of processes on this machine, one CPU device each. For each there is first an
undisturbed run; then, in turn, runs that are disturbed until they end by themselves: kill -9 of one
process or of all, SIGTERM (or what --signals names) of one, at a random time, and the same command
again. With --skew in half of the starts one process, drawn anew, takes so many seconds longer to
compile one of its programs.

What is compared is everything a run leaves, bit for bit but for what a clock measured
(tests/stages/alike.py). At the first difference it stops, and both work directories stay.

Everything is waited for with a limit, and every process is searched for at the end: one that is
left counts as a difference. The figures are printed, and written after every run. Linux.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "stages")]

from alike import differences, redone, steps_logged  # noqa: E402

from g2d_jax.runtime import storage  # noqa: E402
from g2d_jax.runtime.processes import RESTART  # noqa: E402
from g2d_jax.session import workdir  # noqa: E402

CONFIG = "demo:preset=smoke"
# about a minute on a core: many checkpoints, and a policy right often enough to learn online
OVERRIDES = (
    "config.stages.sft.steps=200",
    "config.stages.sft.optimizer.learning_rate=0.003",
    "config.stages.warmup.steps=6",
    "config.stages.collect.prompts=32",
    "config.checkpoint.every=4",
    "config.faults.peer_timeout=10",
)
MOST_DISTURBED = 10  # times in one run; then it may end
PROGRAMS = 30  # of a start, at least
MARK = "G2D_SOAK"  # in the environment of all that is started
# in that of one that compiles longer: which of its programs, counted from 0, and seconds
SKEW = "G2D_SOAK_SKEW"
COMMAND = """
import os, sys, time
from g2d_jax import cli
if "G2D_SOAK_SKEW" in os.environ:
    import itertools, jax
    which, seconds = os.environ["G2D_SOAK_SKEW"].split()
    numbers = itertools.count()
    def listen(event, duration, **fields):
        if event == "/jax/core/compile/backend_compile_duration" and next(numbers) == int(which):
            print("compiling longer:", fields.get("fun_name"), flush=True)
            time.sleep(float(seconds))
    jax.monitoring.register_event_duration_secs_listener(listen)
sys.exit(cli.main(sys.argv[1:]))
"""


class Difference(Exception):
    """What must not happen."""


@dataclass
class Figures:
    """What is counted. skewed: starts of which one process compiled longer. most_redone: steps, by
    one disturbance.
    to_exit: seconds from a signal until all had ended."""

    reference_seconds: dict[str, float] = field(default_factory=dict)
    compared: Counter[str] = field(default_factory=Counter)
    disturbed: Counter[str] = field(default_factory=Counter)
    skewed: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    resumes: int = 0
    steps: int = 0
    redone: int = 0
    most_redone: int = 0
    to_exit: float = 0.0
    differences: list[str] = field(default_factory=list)


class Run:
    """The processes of one start of a run, ended when the block is left."""

    def __init__(
        self, folder: Path, processes: int, mark: str, cache: Path, skew: tuple[int, str] | None
    ) -> None:
        self.folder, self.mark = folder, mark
        arguments = [
            "run",
            "--config",
            CONFIG,
            "--workdir",
            str(folder),
            *(f"--{item}" for item in OVERRIDES),
        ]
        place = f"localhost:{_free_port()}"
        self.running: list[subprocess.Popen[bytes]] = []
        self._before = self._claimed()
        for index in range(processes):
            several = [
                "--coordinator",
                place,
                "--num-processes",
                str(processes),
                "--process-id",
                str(index),
            ]
            command = [
                sys.executable,
                "-c",
                COMMAND,
                *arguments,
                *(several if processes > 1 else []),
            ]
            environment = _environment(mark, cache)
            if skew is not None and skew[0] == index:
                environment[SKEW] = skew[1]
            with open(f"{folder}.{index}.log", "ab") as log:
                self.running.append(
                    subprocess.Popen(
                        command,
                        cwd=folder.parent,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                        preexec_fn=_die_with_parent,
                    )
                )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        """End what is still there, and whatever it started."""
        for process in self.running:
            if process.poll() is None:
                process.kill()
            process.wait(30)
        for process_id in _marked(self.mark):
            _kill(process_id)

    def send(self, number: signal.Signals, index: int) -> None:
        """A signal to one process, if it is there still."""
        if self.running[index].poll() is None:
            self.running[index].send_signal(number)

    def begun(self) -> bool:
        """Whether its processes have found each other, heed SIGTERM and have the work directory."""
        return self._claimed() != self._before

    def _claimed(self) -> int:
        """When environment.json was written, which every start does."""
        file = self.folder / "environment.json"
        return file.stat().st_mtime_ns if file.exists() else 0

    def alive(self, seconds: float) -> bool:
        """Whether any still runs after so many seconds."""
        limit = time.monotonic() + seconds
        while any(process.poll() is None for process in self.running):
            if time.monotonic() > limit:
                return True
            time.sleep(0.05)
        return False

    def statuses(self) -> list[int]:
        """Exit statuses of processes that have ended; -9 for kill -9."""
        return [process.wait(0) for process in self.running]


def _die_with_parent() -> None:
    # PR_SET_PDEATHSIG: whatever ends the soak leaves no run behind
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    # not ignored, as where the soak itself was started by nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _environment(mark: str, cache: Path) -> dict[str, str]:
    return {
        **os.environ,
        MARK: mark,
        "JAX_PLATFORMS": "cpu",
        "HF_HUB_OFFLINE": "1",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
        "PYTHONPATH": str(ROOT),
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def _marked(mark: str) -> list[int]:
    """Processes that were started with this mark and are there still."""
    found, wanted = [], f"{MARK}={mark}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:  # it has ended, or is another user's
            continue
    return found


def _kill(process_id: int) -> None:
    try:
        os.kill(process_id, signal.SIGKILL)
    except ProcessLookupError:
        return


class Soak:
    """Runs in a folder of their own, and what was counted."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder = folder
        self.layouts = options.layouts
        self.output = options.output
        self.latest = options.latest
        self.signals, self.skew, seed = options.signals, options.skew, options.seed
        self.random, self.seed, self.figures = random.Random(seed), seed, Figures()
        self.started, self.trials = time.time(), 0
        self.marks = f"{os.getpid()}-{int(self.started)}"

    def run(self, minutes: float) -> bool:
        """Until the time is over; False if there was a difference."""
        limit = time.monotonic() + 60 * minutes
        try:
            for processes in self.layouts:
                self.reference(processes)
            while time.monotonic() < limit:
                self.trial(self.layouts[self.trials % len(self.layouts)], limit)
                self.write()
        except Difference as error:
            self.figures.differences += str(error).splitlines()
            print(f"\n{error}\nkept: {self.folder}", flush=True)
        self.write()
        return not self.figures.differences

    def reference(self, processes: int) -> None:
        """The undisturbed run of a layout; one that a soak before left in this folder serves
        again."""
        seconds_file = self.folder / f"whole-{processes}.seconds"
        if seconds_file.exists():
            self.figures.reference_seconds[_name(processes)] = float(seconds_file.read_text())
            return
        # one that did not come to its end
        shutil.rmtree(self.folder / f"whole-{processes}", ignore_errors=True)
        started = time.monotonic()
        with self.begin(f"whole-{processes}", processes) as run:
            self.end(run, 1800)
            if run.statuses() != [0] * processes:
                raise Difference(
                    f"the undisturbed run of {processes} ended with {run.statuses()}: {_said(run)}"
                )
        seconds = round(time.monotonic() - started, 1)
        self.figures.reference_seconds[_name(processes)] = seconds
        seconds_file.write_text(str(seconds))
        print(f"{_name(processes)}: undisturbed in {seconds:.0f} s", flush=True)

    def begin(self, name: str, processes: int) -> Run:
        """Start a run, or start it again; half of those that may be disturbed with a process that
        compiles longer."""
        skew = None
        if self.skew and not name.startswith("whole") and self.random.random() < 0.5:
            skew = (
                self.random.randrange(processes),
                f"{self.random.randrange(PROGRAMS)} {self.skew}",
            )
            self.figures.skewed[_name(processes)] += 1
        return Run(
            self.folder / name, processes, f"{self.marks}-{name}", self.folder / "compiled", skew
        )

    def end(self, run: Run, seconds: float) -> None:
        """Wait until all have ended, and nothing they started is left."""
        if run.alive(seconds):
            raise Difference(
                f"{run.folder.name}: still running {seconds:.0f} s later: {_said(run)}"
            )
        limit = time.monotonic() + 20
        while left := _marked(run.mark):
            if time.monotonic() > limit:
                raise Difference(f"{run.folder.name}: processes {left} are left 20 s after its end")
            time.sleep(0.1)
        self.figures.statuses.update(map(str, run.statuses()))

    def trial(self, processes: int, limit: float) -> None:
        """One run, started again and again until it is through, and compared."""
        self.trials += 1
        name, whole = f"run-{self.trials:03d}", self.folder / f"whole-{processes}"
        folder, kinds, again = self.folder / name, [], 0
        usual = self.figures.reference_seconds[_name(processes)]
        for start in range(MOST_DISTURBED + 1):
            left_alone = start == MOST_DISTURBED or time.monotonic() > limit
            with self.begin(name, processes) as run:
                latest = min(0.6 * usual, self.latest)
                kind = "" if left_alone else self.disturb(run, self.random.uniform(1.0, latest))
                self.end(run, 120 + self.skew if kind else 10 * usual + 300 + self.skew)
                self.check(run, kind)
            again += self.count_redone(folder, again)
            if not any(run.statuses()):
                break
            self.figures.resumes += 1
            kinds.append(kind)
        self.figures.steps += steps_logged(folder).total()
        if found := differences(whole, folder):
            raise Difference(
                f"{name} differs from {whole.name} after {', '.join(kinds)}:\n"
                + "\n".join(found[:20])
            )
        self.figures.compared[_name(processes)] += 1
        print(
            f"{name}: {_name(processes)}, {', '.join(kinds) or 'undisturbed'}: no difference",
            flush=True,
        )
        shutil.rmtree(folder)
        for log in self.folder.glob(f"{name}.*.log"):
            log.unlink()

    def count_redone(self, folder: Path, before: int) -> int:
        """Steps that the start which just ended did again, because of the disturbance before it."""
        new = (redone(folder) if folder.exists() else 0) - before
        self.figures.redone += new
        self.figures.most_redone = max(self.figures.most_redone, new)
        return new

    def disturb(self, run: Run, after: float) -> str:
        """After so many seconds, unless it has ended by then; what was done.

        Until the processes have found each other, what ends one is told to all, as launchers do.
        """
        if not run.alive(after):
            return ""
        count = len(run.running)
        index, begun = self.random.randrange(count), run.begun()
        kill = ["kill -9"] if count == 1 else ["kill -9 of one", "kill -9"]
        kind = self.random.choice([*kill, *self.signals])
        number = signal.Signals[kind] if kind in self.signals else signal.SIGKILL
        if kind in self.signals and begun:
            self.terminate(run, index, number)
        else:
            for other in [index] if kind == "kill -9 of one" and begun else range(count):
                run.send(number, other)
        kind = kind if begun else f"{kind.removesuffix(' of one')} before it has begun"
        self.figures.disturbed[f"{_name(count)}: {kind}"] += 1
        return kind

    def terminate(self, run: Run, index: int, number: signal.Signals) -> None:
        """SIGTERM, say, to one process; all are to end, once what they compile side by side is
        compiled."""
        sent, limit = time.monotonic(), 60 * len(run.running) + self.skew
        run.send(number, index)
        if run.alive(limit):
            raise Difference(
                f"{run.folder.name}: still running {limit} s after {number.name}: {_said(run)}"
            )
        self.figures.to_exit = max(self.figures.to_exit, time.monotonic() - sent)

    def check(self, run: Run, kind: str) -> None:
        """Only the exit statuses that there are reasons for."""
        allowed = {0}
        if kind.startswith("kill -9"):
            allowed |= {-signal.SIGKILL}
        if kind == "kill -9 of one":
            # JAX ends a process by SIGABRT whose coordinator is gone
            allowed |= {
                RESTART,
                -signal.SIGABRT,
            }
        name, _, before = kind.partition(" ")
        if name in self.signals:
            allowed |= {RESTART}
        if name in self.signals and before:
            allowed |= {-signal.Signals[name]}
        if not {*run.statuses()} <= allowed:
            told = f"{run.folder.name}: exit statuses {run.statuses()} after {kind or 'nothing'}"
            raise Difference(f"{told}: {_said(run)}")

    def write(self) -> None:
        """The figures so far, if they were asked for."""
        if self.output is not None:
            storage.write_json(self.output, self.told())

    def told(self) -> dict[str, Any]:
        """The figures so far, and what they were measured with."""
        figures = self.figures
        return {
            "config": CONFIG,
            "overrides": list(OVERRIDES),
            "seed": self.seed,
            "minutes": round((time.time() - self.started) / 60, 1),
            "undisturbed_seconds": figures.reference_seconds,
            "runs_compared": dict(figures.compared),
            "disturbed": dict(sorted(figures.disturbed.items())),
            "starts_with_one_that_compiles_longer": dict(figures.skewed),
            "skew_seconds": self.skew,
            "resumes": figures.resumes,
            "steps_done": figures.steps,
            "steps_redone": figures.redone,
            "most_redone_by_one": figures.most_redone,
            "longest_from_sigterm_to_exit": round(figures.to_exit, 1),
            "exit_statuses": dict(sorted(figures.statuses.items())),
            "differences": figures.differences,
            "machine": _machine(),
        }


def _machine() -> dict[str, Any]:
    versions = workdir.environment()
    return {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "system": platform.platform(),
        **{name: versions[name] for name in ("g2d_jax", "python", "packages")},
    }


def _name(processes: int) -> str:
    return "1 process" if processes == 1 else f"{processes} processes"


def _said(run: Run) -> str:
    """The last that its processes said."""
    logs = (Path(f"{run.folder}.{index}.log") for index in range(len(run.running)))
    return "".join(f"\n--- {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in logs)


def main() -> int:
    """Exit status 0 if there was no difference."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument(
        "--layouts", type=int, nargs="+", default=[1, 2], metavar="N", help="numbers of processes"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the times and kinds of kills")
    parser.add_argument(
        "--signals",
        nargs="+",
        default=["SIGTERM"],
        choices=["SIGTERM", "SIGHUP"],
        help="that ask a run to stop",
    )
    parser.add_argument(
        "--skew", type=float, default=0.0, help="seconds that one of the processes compiles longer"
    )
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    parser.add_argument(
        "--folder", type=Path, help="for the work directories; default: a temporary one"
    )
    parser.add_argument(
        "--latest",
        type=float,
        default=float("inf"),
        help="seconds after which a disturbance comes, at most",
    )
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="g2d-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["JAX_PLATFORMS"] = "cpu"
    soak = Soak(folder.resolve(), arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    well = soak.run(arguments.minutes)
    print(json.dumps(soak.told(), indent=2))
    if well and arguments.folder is None:
        shutil.rmtree(folder)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
