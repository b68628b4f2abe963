"""Work-directory lock: one process at a time, on local disk and on object stores.

    local        filelock on FOLDER/.lock; the system lifts it when the process ends, however it ends. A process whose
                 .lock is gone, the folder having been deleted or moved, ends
    gs           a lease: FOLDER/.lock/000001.json, 000002.json …, of which the highest number owns

The lease is by hand: fsspec has no lock, and libraries of leases want a database. A lock object is
made by a conditional create, which the store grants to one process only, and is never deleted, so
no number is given twice. The owner rewrites its own object with a growing beat, and with "released"
when it is through. The next number may be made when the highest is released, or when its content
has stood still for LEASE seconds of watching; no clocks of two machines are compared. An owner that
has not been able to beat for three quarters of that time ends its process, and so does one that
finds a higher number: from then on another may write.

What a lease cannot do: a process that is frozen as a whole (SIGSTOP, a paused virtual machine) for
longer than LEASE may, when it wakes, send what it was just about to write before it notices.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

import filelock
import fsspec
from etils import epath

from g2d_jax.runtime import storage
from g2d_jax.runtime.processes import RESTART, check_stop, say
from g2d_jax.runtime.threads import repeating

LOCK = ".lock"
# seconds between two rewrites of an owner's object; all that use a folder need the same
BEAT = 20.0
LEASE = 60.0  # seconds without a change after which an owner counts as dead; the same
PATIENCE = 120.0  # seconds of waiting for a file server to lift the lock of another host
GONE = "was deleted or moved while this process worked in it: nothing more is written"
LOOK = 2.0  # seconds between two looks whether the folder is still there

_NUMBER = re.compile(r"(\d{6,})\.json")
_KEPT = 0.75  # of the lease: how long an owner goes on without a beat

_seen: dict[str, tuple[int, bytes, float]] = {}
"""The highest number of a folder, its content, and the own clock when it was first seen so: kept
between calls."""


@contextmanager
def locked(workdir: epath.Path) -> Iterator[None]:
    """Keep a work directory to this process. Raises ValueError when another one runs in it.

    On an object store a lock that was not released is watched for up to LEASE seconds, and taken
    over when its owner is dead. On local disk that of another host is watched for PATIENCE seconds:
    a file server may hold the lock of a dead one for its grace time. Raises ValueError also for a
    store that cannot create conditionally.
    """
    local, began, first = storage.is_local(workdir), time.monotonic(), None
    patience = PATIENCE if local else LEASE
    while True:
        with try_lock(workdir) as held:
            if held:
                yield
                return
        check_stop()
        # On a store a dead owner's object stands still, so one that changed while it was watched
        # lives. On a disk the system lifts the locks of this host's dead: only another host's is
        # waited for.
        sight = (0, (workdir / LOCK).read_bytes()) if local else _seen[os.fspath(workdir)][:2]
        if local:
            elsewhere = _fields(sight[1]).get("host") not in (None, socket.gethostname())
            lives = not elsewhere or time.monotonic() - began > patience
        else:
            lives = sight != (first or sight)
        owner = f"is locked by {_owner(sight[1])}"
        if lives:
            raise ValueError(
                f"{workdir} is in use by another process: it {owner}. Wait, or choose another "
                "--workdir"
            )
        if first is None:
            first = sight
            say(f"{workdir} {owner}: waiting up to {patience:.0f} s to see whether it lives")
        time.sleep(min(1.0, patience / 20))


@contextmanager
def awaited(folder: epath.Path) -> Iterator[None]:
    """Keep a folder to this process for a moment, however many others want it: each waits until it
    is free.

    Raises Preempted if this process is told to stop before it has it, and as `try_lock` does.
    """
    while True:
        with try_lock(folder) as held:
            if held:
                yield
                return
        check_stop()
        time.sleep(0.05 if storage.is_local(folder) else 1.0)


@contextmanager
def try_lock(folder: epath.Path) -> Iterator[bool]:
    """Take the lock of a folder, which is made if it is not there; False, at once, if another
    process has it.

    On an object store a dead owner's lock is had by calling again until LEASE seconds have passed
    without a change. Raises as `locked` does.
    """
    with storage.naming("create the folder", folder):
        lock = _Local.take(folder) if storage.is_local(folder) else _Lease.take(folder)
    if lock is None:
        yield False
        return
    try:
        with lock.watched():
            yield True
    finally:
        lock.release()


def holder(folder: epath.Path) -> str:
    """Name the process that works in a folder now, "" for none; nothing is taken or written.

    On an object store an owner that has not renewed its lock for LEASE seconds, by the store's
    clock and this machine's, counts as dead: good enough to show, not to take its place.
    """
    if storage.is_local(folder):
        return _local_holder(folder)
    with storage.naming("read", folder):
        files, root = fsspec.core.url_to_fs(f"{os.fspath(folder)}/{LOCK}")
        number, content = _highest(files, root)
        if not number or _fields(content).get("state") == "released":
            return ""
        age = time.time() - files.modified(f"{root}/{number:06d}.json").timestamp()
    if age >= LEASE:
        return ""
    return _owner(content)


def holder_here(folder: epath.Path) -> int | None:
    """Return the number of the process of this machine that works in a folder now, None if there is
    none."""
    if not storage.is_local(folder) or not _local_holder(folder):
        return None
    with contextlib.suppress(OSError, TypeError, ValueError):
        fields = _fields((folder / LOCK).read_bytes())
        if fields.get("host") == socket.gethostname():
            return int(fields["pid"])
    return None


def _local_holder(folder: epath.Path) -> str:
    try:
        with open(folder / LOCK, "rb") as file:
            content = file.read()
            fields = _fields(content)
            if fields.get("host") == socket.gethostname() and not _lives(fields.get("pid")):
                return ""  # not even looked at closer: that takes the lock for a moment
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # given back when the file is closed
    except BlockingIOError:
        return _owner(content)
    except OSError:  # there is no lock, or none that this user may read
        return ""
    return ""


def _lives(pid: Any) -> bool:
    """Return whether a process of this number is there."""
    try:
        os.kill(int(pid), 0)
    except PermissionError:  # another user's
        return True
    except (ProcessLookupError, TypeError, ValueError, OverflowError):
        return False
    return True


class _Local:
    """A lock on local disk, and a thread that ends this process when the folder is taken away.

    It would go on in one that it makes anew, without a config.
    """

    def __init__(self, folder: epath.Path, lock: filelock.BaseFileLock) -> None:
        self._folder, self._lock, self._held = folder, lock, os.stat(folder / LOCK)
        self._missed = 0  # looks in a row that did not find it

    @classmethod
    def take(cls, folder: epath.Path) -> _Local | None:
        """Lock a folder; None if another process has."""
        folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder / LOCK, thread_local=False)
        try:
            lock.acquire(blocking=False)
        except filelock.Timeout:
            return None
        with (
            contextlib.suppress(OSError),
            open(folder / LOCK, "w") as file,
        ):  # a full disk: it holds without a name
            json.dump({"host": socket.gethostname(), "pid": os.getpid()}, file)
        return cls(folder, lock)

    def _is_gone(self) -> bool:
        """Return whether the folder's lock is another file than the one that is held, or none."""
        try:
            return not os.path.samestat(os.stat(self._folder / LOCK), self._held)
        except FileNotFoundError:
            return True
        except OSError:  # a file server that does not answer now
            return False

    def watched(self) -> AbstractContextManager[None]:
        """End this process if the folder is taken away while a block runs."""
        return repeating((LOOK, self._look))

    def _look(self) -> None:
        self._missed = self._missed + 1 if self._is_gone() else 0
        if self._missed == 2:
            say(f"{self._folder} {GONE}")
            os._exit(1)

    def release(self) -> None:
        """Let others in. Raises ValueError if the folder was taken away."""
        gone = self._is_gone()
        self._lock.release()
        if gone:
            raise ValueError(f"{self._folder} {GONE}")


class _Lease:
    """A number of this process's. One thread beats, one ends the process when beats fail."""

    def __init__(self, folder: epath.Path, files: Any, root: str, number: int) -> None:
        self._folder, self._files = folder, files
        self._path, self._next = (f"{root}/{n:06d}.json" for n in (number, number + 1))
        self._token, self._count = secrets.token_hex(8), 0
        self._last = time.monotonic()  # when the last beat that came through was begun

    @classmethod
    def take(cls, folder: epath.Path) -> _Lease | None:
        """Make the next number, if it may be had. Raises ValueError for a store that cannot create
        conditionally."""
        storage.check_driver(folder)
        files, root = fsspec.core.url_to_fs(f"{os.fspath(folder)}/{LOCK}")
        key, now = os.fspath(folder), time.monotonic()
        number, content = _highest(files, root)
        if number and _fields(content).get("state") != "released":
            *before, since = _seen.get(key, (0, b"", now))
            if before != [number, content]:
                _seen[key] = (number, content, now)
                return None
            if now - since < LEASE:
                return None
            say(
                f"{folder}: {_owner(content)} gave no sign of life for {LEASE:.0f} s, its lock "
                "is taken over"
            )
        lease = cls(folder, files, root, number + 1)
        if not lease._create():
            _seen[key] = (*_highest(files, root), now)
            return None
        _seen.pop(key, None)
        return lease

    def watched(self) -> AbstractContextManager[None]:
        """Keep the lease while a block runs, and end this process if it is lost."""
        return repeating((BEAT, self._keep), (LEASE / 40, self._guard))

    def _content(self, state: str) -> bytes:
        fields = {"state": state, "beat": self._count, "token": self._token}
        owner = {"host": socket.gethostname(), "pid": os.getpid()}
        return json.dumps({**fields, **owner}, sort_keys=True).encode("ascii")

    def _create(self) -> bool:
        """Make the object; False if another was first. Raises ValueError if the store cannot do
        it."""
        content = self._content("held")
        if (
            not self._create_alone(content)
            and _fields(self._files.cat_file(self._path)).get("token") != self._token
        ):
            return False  # else its answer was lost, and the driver tried again
        if self._create_alone(content):  # it is there: a store that heeds the condition refuses
            self._files.pipe_file(self._path, self._content("released"))
            raise ValueError(
                f"{self._folder}: this object store overwrites where it was asked to create "
                "only, so a work "
                "directory cannot be locked there; use Google Cloud Storage, or a file system"
            )
        self._last = time.monotonic()
        return True

    def _create_alone(self, content: bytes) -> bool:
        """Make the object if it is not there. Of several processes at once the store lets one
        through."""
        try:
            self._files.pipe_file(self._path, content, mode="create")
        except FileExistsError:
            return False
        return True

    def _keep(self) -> None:
        begun = time.monotonic()
        try:
            self._count += 1
            self._files.pipe_file(self._path, self._content("held"))
            lost = self._files.exists(self._next)
        except Exception as error:  # of any driver; `_guard` decides how long this may go on
            say(f"cannot renew the lock of {self._folder}: {type(error).__name__}: {error!s:.200}")
            return
        if lost:
            self._end("another process has taken it over, this one was not heard of in time", 1)
        self._last = begun

    def _guard(self) -> None:
        if time.monotonic() - self._last > _KEPT * LEASE:
            self._end(f"the store could not be written for {_KEPT * LEASE:.0f} s", RESTART)

    def _end(self, why: str, status: int) -> NoReturn:
        """End this process at once: any of its threads may be about to write."""
        say(
            f"the lock of {self._folder} is lost: {why}. Nothing more is written; this process ends"
        )
        os._exit(status)

    def release(self) -> None:
        """Let others in. If the store cannot be written now, they come in when the lease is
        over."""
        with contextlib.suppress(Exception):
            self._files.pipe_file(self._path, self._content("released"))


def _highest(files: Any, root: str) -> tuple[int, bytes]:
    """Return the highest number of a folder's lock objects with its content; 0 if there is none."""
    try:
        names = files.ls(root, detail=False)
    except FileNotFoundError:
        return 0, b""
    numbers = [
        int(match[1]) for name in names if (match := _NUMBER.fullmatch(name.rpartition("/")[2]))
    ]
    if numbers:
        return max(numbers), bytes(files.cat_file(f"{root}/{max(numbers):06d}.json"))
    return 0, b""


def _fields(content: bytes) -> dict[str, Any]:
    """Parse a lock object; {} for one that is damaged, which then counts as held by someone
    unknown."""
    try:
        fields = json.loads(content)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _owner(content: bytes) -> str:
    """Describe who holds a lock, for a message; the text comes from the store."""
    fields = _fields(content)
    return f"process {fields.get('pid', '?')!a:.20} on {fields.get('host', '?')!a:.100}"
