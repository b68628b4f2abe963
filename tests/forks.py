"""Processes forked from one that has everything imported: a start costs no seconds of imports.

python forks.py     reads jobs from stdin, one a line in JSON, and forks a process for each
"""

import contextlib
import ctypes
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

# Imported once, for all: the command, and what it imports where it needs it, seconds each time.
IMPORTED = (
    "g2d_jax.cli",
    "g2d_jax.pipeline",
    "g2d_jax.report.study",
    "g2d_jax.sweep",
    "gcsfs",
    "grain",
    "scipy.stats",
    "tensorboardX",
    "transformers.models.auto.tokenization_auto",
)

G2D = "import sys; from g2d_jax.cli import main; sys.exit(main(sys.argv[1:]))"


class Forked:
    """A process under way, like a subprocess.Popen whose outputs go to files. A context manager
    that kills it."""

    def __init__(self, folder: Path, server: "subprocess.Popen[str]") -> None:
        self.folder, self.returncode = folder, None
        while not (folder / "pid").exists():
            assert server.poll() is None, "the server of forked processes has ended"
            time.sleep(0.002)
        self.pid = int((folder / "pid").read_text())

    @property
    def stdout(self) -> str:
        """What it wrote to standard output so far."""
        return (self.folder / "stdout").read_text(errors="surrogateescape")

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text(errors="surrogateescape")

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None before the end."""
        if self.returncode is None and (self.folder / "status").exists():
            self.returncode = int((self.folder / "status").read_text())
        return self.returncode

    def wait(self, timeout: float = 240.0) -> int:
        limit = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > limit:
                raise AssertionError(
                    f"still running after {timeout} s: {self.stdout[-3000:]}\n{self.stderr[-3000:]}"
                )
            time.sleep(0.02)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> "Forked":
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self.wait()


class Forks:
    """Starts processes in an environment; a context manager that leaves none behind."""

    def __init__(self, env: dict[str, str], folder: Path) -> None:
        self._env, self._folder, self._jobs = env, folder, 0
        command = [sys.executable, str(Path(__file__))]
        self._server = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, text=True, start_new_session=True
        )

    def __enter__(self) -> "Forks":
        return self

    def __exit__(self, *error: object) -> None:
        self._server.kill()  # and with it, by die_with_parent, all that is under way
        self._server.communicate()

    def start(
        self, *arguments: object, code: str = G2D, cwd: Path | None = None, env: Any = None
    ) -> Forked:
        """Begin to run some code, by default the command g2d, with arguments. env: the whole
        environment."""
        assert self._server.stdin
        self._jobs += 1
        folder = self._folder / f"{self._jobs:03d}"
        folder.mkdir(parents=True)
        for name in ("stdout", "stderr"):  # to be read from now on
            (folder / name).touch()
        job = {
            "code": code,
            "arguments": [str(argument) for argument in arguments],
            "folder": str(folder),
        }
        job |= {"cwd": str(cwd or Path.cwd()), "env": self._env if env is None else env}
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        return Forked(folder, self._server)

    def run(self, *arguments: object, timeout: float = 240.0, **job: Any) -> Forked:
        """The same, to its end."""
        with self.start(*arguments, **job) as process:
            process.wait(timeout)
        return process


def serve() -> None:
    for name in IMPORTED:
        if (
            importlib.util.find_spec(name.partition(".")[0]) is not None
        ):  # extras are not in every environment
            importlib.import_module(name)
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the watchers
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            # which a suite in the background ignores
            signal.signal(signal.SIGINT, signal.default_int_handler)
            watch(json.loads(line))


def die_with_parent() -> None:
    """Whatever ends the tests leaves no process behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def watch(job: dict[str, Any]) -> None:
    """Fork the process, and write down its number and how it ended."""
    folder = Path(job["folder"])
    die_with_parent()
    child = os.fork()
    if child == 0:
        work(job)
    write(folder / "pid", str(child))
    write(folder / "status", str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
    os._exit(0)


def write(file: Path, text: str) -> None:
    """It is there whole, or not at all."""
    file.with_suffix(".tmp").write_text(text)
    file.with_suffix(".tmp").rename(file)


def work(job: dict[str, Any]) -> None:
    """Become what was asked for, as a new interpreter would; never returns."""
    die_with_parent()
    status = 1
    try:
        os.setsid()
        for number, (name, how) in enumerate(
            (("stdin", os.O_RDONLY), *[(n, WRITE) for n in ("stdout", "stderr")])
        ):
            file = os.open(
                "/dev/null" if name == "stdin" else os.path.join(job["folder"], name), how
            )
            os.dup2(file, number)
            os.close(file)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        os.chdir(job["cwd"])
        os.environ.clear()
        os.environ.update(job["env"])
        sys.argv = ["-c", *job["arguments"]]
        exec(compile(job["code"], "<code>", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND

if __name__ == "__main__":
    serve()
