"""Run a command, and print the most memory that it and all that it starts take at a time.

    python benchmarks/memory.py python -m pytest -n 3

Every two seconds it sums the memory of the command and its descendants (proportional set size: what
several processes share counts once), also of those whose parent has ended. The exit status is the
command's. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


def descendants(root: int) -> list[int]:
    """Return the process ids of all that a process started, and that they started, itself left
    out."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            children.setdefault(_parent(folder), []).append(int(folder.name))
    found: list[int] = []
    ahead = [root]
    while ahead:
        mine = children.get(ahead.pop(), [])
        found += mine
        ahead += mine
    return found


def _parent(folder: Path) -> int:
    """Return the parent's process id, -1 once the process has ended."""
    try:
        return int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1


def proportional(process: int) -> int:
    """Return a process's proportional set size in bytes, 0 once it has ended."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def main(command: list[str]) -> int:
    """Run the command to its end and print the peak, what it consisted of, and the times."""
    # what outlives its parent becomes a child of this process
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    start = time.monotonic()
    peak, largest = 0, [0]
    running = subprocess.Popen(command)
    while running.poll() is None:
        sizes = sorted(
            (proportional(process) for process in descendants(os.getpid())), reverse=True
        )
        if sum(sizes) > peak:
            peak, largest = sum(sizes), sizes
        time.sleep(2)
    shown = ", ".join(f"{size / 2**30:.2f}" for size in largest[:5])
    print(
        f"at most {peak / 2**30:.2f} GiB in {len(largest)} processes, the largest {shown} GiB; "
        f"{time.monotonic() - start:.0f} s"
    )
    return running.returncode


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1:]))
