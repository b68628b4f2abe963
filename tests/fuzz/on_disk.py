"""Run the short config again and again in a folder where something happens to it: see test_disks.py.

python on_disk.py WORKDIR OUTPUT CASES        WORKDIR lies on a file system of its own; CASES: JSON, [[WHAT, WHERE], …]

    full       no byte is left on the disk as soon as a file of the pattern WHERE is in WORKDIR; "": before the start
    readonly   the file system is, from before the start
    file       a file lies where the folder WHERE belongs
    vanish     WORKDIR is taken away as soon as a file of the pattern WHERE is in it

After each case all is as before. At last it runs undisturbed, and WORKDIR is copied to OUTPUT. Prints JSON: the exit
status and what was written to standard error, for every run.
"""

import contextlib
import io
import json
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from g2d_jax.cli import main

CONFIG = Path(__file__).parent / "short.py"


def start(workdir: Path) -> tuple[int, str]:
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        try:
            status = main(["run", "--config", str(CONFIG), "--workdir", str(workdir)])
        except BaseException:
            traceback.print_exc()
            status = -1
    return status, errors.getvalue()


def fill(ballast: Path) -> None:
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass


@contextlib.contextmanager
def when(workdir: Path, pattern: str, happen: Callable[[], None]) -> Iterator[None]:
    """Something happens once, beside the run, when a file of a pattern is there; "": before the run."""
    over = threading.Event()

    def wait() -> None:
        while pattern and not over.is_set() and not list(workdir.glob(pattern)):
            time.sleep(0.0002)
        happen()

    thread = threading.Thread(target=wait)
    thread.start()
    if not pattern:
        thread.join()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def case(workdir: Path, what: str, where: str) -> Iterator[None]:
    match what:
        case "full":
            ballast = workdir.parent / "ballast"
            with when(workdir, where, lambda: fill(ballast)):
                yield
            ballast.unlink()
        case "readonly":
            subprocess.run(["mount", "-o", "remount,ro", workdir.parent], check=True)
            yield
            subprocess.run(["mount", "-o", "remount,rw", workdir.parent], check=True)
        case "file":
            (workdir / where).parent.mkdir(parents=True, exist_ok=True)
            (workdir / where).write_bytes(b"")
            yield
            (workdir / where).unlink()
        case "vanish":

            def vanish() -> None:  # renamed first: all of it goes at once
                workdir.rename(workdir.parent / "gone")
                shutil.rmtree(workdir.parent / "gone")

            with when(workdir, where, vanish):
                yield


def run(workdir: Path, what: str, where: str) -> tuple[int, str]:
    with case(workdir, what, where):
        return start(workdir)


if __name__ == "__main__":
    place, output, cases = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    runs = [run(place, what, where) for what, where in cases]
    last = start(place)
    shutil.copytree(place, output)
    print("RESULT", json.dumps({"runs": runs, "last": last}))
