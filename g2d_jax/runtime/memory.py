"""Host memory: that of a process and its children, and the limits. Not that of accelerators.

Current values come from /proc. Without it (macOS) a peak is the system's own, of the process's
whole life and of its largest ended child.
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
"""Least seconds between two checks of a process's children. A child's shorter use may be missed."""

_LOOKING = 0.01
"""Largest share of time for these checks: the kernel counts the pages of all children."""

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Peak:
    """Peak memory since creation: of this process, plus that of its children.

    The two maxima need not coincide. Use one at a time: creating one resets the kernel's own peak
    of this process, if permitted.
    """

    def __init__(self) -> None:
        self._children = 0
        self._next_look = 0.0
        with contextlib.suppress(OSError):
            # the peak resident size, not the pages' flags
            (_PROC / "self" / "clear_refs").write_text("5")

    def look(self) -> None:
        """Check the children."""
        began = time.monotonic()
        self._children = max(self._children, _children_bytes(os.getpid()))
        ended = time.monotonic()
        self._next_look = ended + (ended - began) / _LOOKING

    def look_if_due(self) -> None:
        """Check the children, unless the last check took so long that the next is not due."""
        if time.monotonic() >= self._next_look:
            self.look()

    def read(self) -> int:
        """Check the children, and return the bytes so far."""
        self.look()
        return self.so_far

    @property
    def so_far(self) -> int:
        """The bytes so far, with the children's from the last check."""
        # Not getrusage's, which starts with the memory of the parent program.
        own = _status(os.getpid()).get("VmHWM")
        if own is not None:
            return own + self._children
        unit = 1 if sys.platform == "darwin" else 1024
        whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        return sum(resource.getrusage(who).ru_maxrss * unit for who in whose)


@contextmanager
def measured() -> Iterator[Peak]:
    """Measure the peak of a block; a thread checks the children meanwhile."""
    peak = Peak()
    with repeating((PAUSE, peak.look_if_due)):
        yield peak


def give_back() -> None:
    """Return freed memory from the C library to the system. After a stage on CPUs this is some GiB,
    which the next one, with other array sizes, would not reuse. No effect if the library lacks the
    call."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def held(pid: int) -> int | None:
    """Return the bytes that a process of this machine and its children hold now, None if
    unreadable."""
    own = _status(pid).get("VmRSS")
    if own is None:
        return None
    return own + _children_bytes(pid)


def limit() -> int | None:
    """Return the most bytes that this process may use: the machine's, or its control group's if
    lower."""
    limits = []
    with contextlib.suppress(ValueError, OSError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * _PAGE)
    with contextlib.suppress(OSError):
        for line in (_PROC / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            limits += _group_limits(controllers, path)
    return min(limits, default=None)


def _group_limits(controllers: str, path: str) -> Iterator[int]:
    """Yield the limits of a control group and its parents. controllers: "" in version 2, "memory"
    in version 1."""
    if controllers not in ("", "memory"):
        return
    root, file = _CGROUPS, "memory.max"
    if controllers:
        root, file = _CGROUPS / "memory", "memory.limit_in_bytes"
    group = root / path.lstrip("/")
    for folder in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError):  # "max" is no limit
            yield int((folder / file).read_text())
        if folder == root:
            return


def _children_bytes(pid: int) -> int:
    """Return the bytes of all descendants of a process. Shared memory, as of a worker and its
    forks, counts once."""
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
    """List the descendants of a process."""
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
    """Read the kernel's sizes of a process, in bytes; {} for none."""
    sizes = {}
    with contextlib.suppress(OSError):
        for line in (_PROC / str(pid) / "status").read_text().splitlines():
            name, _, value = line.partition(":")
            if value.endswith(" kB"):
                sizes[name] = int(value.split()[0]) << 10
    return sizes
