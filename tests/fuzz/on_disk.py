"""Run the short config again and again in a folder where something happens to it: see
test_disks.py.

python on_disk.py WORKDIR OUTPUT CASES        WORKDIR lies on a file system of its own; CASES: JSON, [[WHAT, WHERE], …]

    full       no byte is left on the disk when a file or folder of the pattern WHERE is about to be made in WORKDIR, ""
               is before the start
    readonly   the file system is, from before the start
    file       a file lies where the folder WHERE belongs

After each case all is as before. At last it runs undisturbed, and WORKDIR is copied to OUTPUT.
Prints JSON: the exit status and what was written to standard error, for every run.
"""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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


_waiting: list[
    tuple[Path, str, Callable[[], None]]
] = []  # work directory, pattern, what is to happen once


def audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Python tells of every file before it is opened, so nothing here depends on who is faster."""
    made = event == "os.mkdir" or (event == "open" and set(arguments[1] or "") & set("wxa+"))
    if not made or not _waiting or not isinstance(arguments[0], str | os.PathLike):
        return
    workdir, pattern, happen = _waiting[0]
    path = Path(os.fspath(arguments[0]))
    # storage writes beside the target
    name = re.sub(r"^\.(.+)\.[0-9a-f]{8}\.tmp$", r"\1", path.name)
    if path.is_relative_to(workdir) and path.with_name(name).match(f"{workdir}/{pattern}"):
        _waiting.clear()
        happen()


@contextlib.contextmanager
def when(workdir: Path, pattern: str, happen: Callable[[], None]) -> Iterator[None]:
    """Something happens once; "": before the run."""
    if not pattern:
        happen()
    else:
        _waiting.append((workdir, pattern, happen))
    yield
    assert not _waiting, f"nothing of {pattern} was made"


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
            # The case before may have come as far as to make it.
            shutil.rmtree(workdir / where, ignore_errors=True)
            (workdir / where).parent.mkdir(parents=True, exist_ok=True)
            (workdir / where).write_bytes(b"")
            yield
            (workdir / where).unlink()


def run(workdir: Path, what: str, where: str) -> tuple[int, str]:
    with case(workdir, what, where):
        return start(workdir)


if __name__ == "__main__":
    sys.addaudithook(audit)
    place, output, cases = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    runs = [run(place, what, where) for what, where in cases]
    last = start(place)
    shutil.copytree(place, output)
    print("RESULT", json.dumps({"runs": runs, "last": last}), flush=True)
    os._exit(0)  # without waiting for the threads that failed writes may have left
