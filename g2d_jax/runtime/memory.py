"""The memory that a process and its children take, and what there is of it: of the host, not of
accelerators.

Running figures are read from /proc. Where there is none (macOS) a peak is the system's own, of the
process's whole life and of the largest child that has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from g2d_jax.runtime.threads import repeating

GIB = 1 << 30
PAUSE = 1.0
"""Seconds between two looks at the children of a process, at least: what one of them held for less
may be missed."""

_LOOKING = 0.01
"""The share of the time that looking may take: the kernel counts the pages of all children."""

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Peak:
    """The most memory at a time since it was made: of this process, and of its children together.

    The sum of both maxima, which need not have come at one time. One at a time: making one begins
    the kernel's own account of this process anew, where that may be.
    """

    def __init__(self) -> None:
        self._children = 0
        self._next_look = 0.0
        with contextlib.suppress(OSError):
            # the mark of the most resident memory, and no page's
            (_PROC / "self" / "clear_refs").write_text("5")

    def look(self) -> None:
        """Look at the children."""
        began = time.monotonic()
        self._children = max(self._children, _children_bytes(os.getpid()))
        ended = time.monotonic()
        self._next_look = ended + (ended - began) / _LOOKING

    def look_if_due(self) -> None:
        """Look at the children unless the last look took so long that it is too early for
        another."""
        if time.monotonic() >= self._next_look:
            self.look()

    def read(self) -> int:
        """Look at the children, and return the bytes so far."""
        self.look()
        return self.so_far

    @property
    def so_far(self) -> int:
        """The bytes so far, those of children as of the last look at them."""
        # Not getrusage's, which begins with what the program had that started this one.
        own = _status(os.getpid()).get("VmHWM")
        if own is not None:
            return own + self._children
        unit = 1 if sys.platform == "darwin" else 1024
        whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        return sum(resource.getrusage(who).ru_maxrss * unit for who in whose)


@contextmanager
def measured() -> Iterator[Peak]:
    """Measure the peak of a block; a thread looks at the children meanwhile."""
    peak = Peak()
    with repeating((PAUSE, peak.look_if_due)):
        yield peak


def give_back() -> None:
    """Give the system the memory that was freed and that the C library keeps for later: after a
    stage on CPUs some GiB, which the next one, with arrays of other sizes, would not use. Nothing
    where the library has no such call."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def held(pid: int) -> int | None:
    """Return the bytes that a process of this machine and its children hold now, None where that
    cannot be read."""
    own = _status(pid).get("VmRSS")
    if own is None:
        return None
    return own + _children_bytes(pid)


def limit() -> int | None:
    """Return the bytes that this process may use at most: the machine's, or its control group's if
    these are fewer."""
    limits = []
    with contextlib.suppress(ValueError, OSError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * _PAGE)
    with contextlib.suppress(OSError):
        for line in (_PROC / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            limits += _group_limits(controllers, path)
    return min(limits, default=None)


def _group_limits(controllers: str, path: str) -> Iterator[int]:
    """Yield the limits of a control group and those around it. controllers: "" in version 2,
    "memory" in version 1."""
    if controllers not in ("", "memory"):
        return
    root, file = _CGROUPS, "memory.max"
    if controllers:
        root, file = _CGROUPS / "memory", "memory.limit_in_bytes"
    group = root / path.lstrip("/")
    for folder in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError):  # "max" is none
            yield int((folder / file).read_text())
        if folder == root:
            return


def _children_bytes(pid: int) -> int:
    """Return the bytes of all processes below one. What several share, a worker and its forks say,
    counts once."""
    total = 0
    for child in _below(pid):
        try:
            text = (_PROC / str(child) / "smaps_rollup").read_text()
            total += next(
                int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("Pss:")
            )
        except (OSError, StopIteration):  # ended meanwhile, another user's, or an old kernel
            total += _status(child).get("VmRSS", 0)
    return total


def _below(pid: int) -> list[int]:
    """List the processes below one."""
    children = defaultdict(list)
    for folder in _PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # "4242 (a name) S 17 …": the name may hold anything.
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            children[parent].append(int(folder.name))
    found = list(children[pid])
    for child in found:
        found += children[child]
    return found


def _status(pid: int) -> dict[str, int]:
    """Read the sizes, in bytes, that the kernel tells of a process; {} for none."""
    sizes = {}
    with contextlib.suppress(OSError):
        for line in (_PROC / str(pid) / "status").read_text().splitlines():
            name, _, value = line.partition(":")
            if value.endswith(" kB"):
                sizes[name] = int(value.split()[0]) << 10
    return sizes
