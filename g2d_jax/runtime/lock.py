"""Work-directory lock: one process at a time, on local disk and on object stores.

    local  filelock on FOLDER/.lock; the system releases it whenever the process ends. A process
           ends if its .lock disappears, because the folder was deleted or moved
    gs     a lease: FOLDER/.lock/000001.json, 000002.json …, of which the highest number owns

The lease is our own: fsspec has no lock, and lease libraries need a database. A conditional create
makes a lock object, which the store grants to one process only; it is never deleted, so no number
repeats. The owner rewrites its object with a growing beat, and with "released" at the end. The next
number is free when the highest is released, or when its content has not changed for LEASE seconds
of watching; clocks of two machines are never compared. An owner ends its process if it could not
beat for three quarters of that time, or finds a higher number: then another process may write.

Limit of a lease: a process may be frozen as a whole (SIGSTOP, a paused virtual machine) for longer
than LEASE. When it wakes, it may complete one pending write before it notices.
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
# seconds between two rewrites of an owner's object, equal for all users of a folder
BEAT = 20.0
LEASE = 60.0  # seconds without a change after which an owner counts as dead; also equal
PATIENCE = 120.0  # seconds of waiting for a file server to release another host's lock
GONE = "was deleted or moved while this process worked in it, so it writes nothing more"
LOOK = 2.0  # seconds between two checks that the folder still exists

_NUMBER = re.compile(r"(\d{6,})\.json")
_KEPT = 0.75  # of the lease: time that an owner continues without a beat

_seen: dict[str, tuple[int, bytes, float]] = {}
"""The highest number of a folder, its content, and the local time when this was first seen; kept
between calls."""


@contextmanager
def locked(workdir: epath.Path) -> Iterator[None]:
    """Reserve a work directory for this process. Raises ValueError if another one runs in it.

    On an object store, an unreleased lock is watched for up to LEASE seconds, and taken over if its
    owner is dead. On local disk, another host's lock is watched for PATIENCE seconds: a file server
    may hold a dead process's lock for its grace time. Raises ValueError also for a store without
    conditional create.
    """
    local, began, first = storage.is_local(workdir), time.monotonic(), None
    patience = PATIENCE if local else LEASE
    while True:
        with try_lock(workdir) as held:
            if held:
                yield
                return
        check_stop()
        # On a store a dead owner's object never changes, so an owner whose object changed is alive.
        # On a disk the system releases dead locks of this host: only another host's are watched.
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
            say(f"{workdir} {owner}: waiting up to {patience:.0f} s to see if it is alive")
        time.sleep(min(1.0, patience / 20))


@contextmanager
def awaited(folder: epath.Path) -> Iterator[None]:
    """Reserve a folder for this process for a moment: others wait until it is free.

    Raises Preempted if this process is stopped while it waits, and like `try_lock`.
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
    """Lock a folder, creating it if needed; return False at once if another process has the lock.

    On an object store, repeat the call to take over a dead owner's lock, until LEASE seconds have
    passed without a change. Raises like `locked`.
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
    """Name the process that works in a folder now, "" for none, without locking or writing.

    On an object store, an owner that has not renewed its lock for LEASE seconds, by the store's
    clock and this machine's, counts as dead: exact enough for display, not for a takeover.
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
    """Return the number of this machine's process that works in a folder now, None for none."""
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
                return ""  # without a closer check, which locks it for a moment
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # released when the file is closed
    except BlockingIOError:
        return _owner(content)
    except OSError:  # there is no lock, or none that this user may read
        return ""
    return ""


def _lives(pid: Any) -> bool:
    """Return whether a process of this number exists."""
    try:
        os.kill(int(pid), 0)
    except PermissionError:  # another user's
        return True
    except (ProcessLookupError, TypeError, ValueError, OverflowError):
        return False
    return True


class _Local:
    """A lock on local disk, and a thread that ends this process if the folder disappears.

    It would otherwise continue in a new folder, without a config.
    """

    def __init__(self, folder: epath.Path, lock: filelock.BaseFileLock) -> None:
        self._folder, self._lock, self._held = folder, lock, os.stat(folder / LOCK)
        self._missed = 0  # consecutive checks that did not find it

    @classmethod
    def take(cls, folder: epath.Path) -> _Local | None:
        """Lock a folder; None if another process has it."""
        folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder / LOCK, thread_local=False)
        try:
            lock.acquire(blocking=False)
        except filelock.Timeout:
            return None
        with (
            contextlib.suppress(OSError),
            open(folder / LOCK, "w") as file,
        ):  # a full disk: the lock holds without a name
            json.dump({"host": socket.gethostname(), "pid": os.getpid()}, file)
        return cls(folder, lock)

    def _is_gone(self) -> bool:
        """Return whether the folder's lock file is missing or another file than the held one."""
        try:
            return not os.path.samestat(os.stat(self._folder / LOCK), self._held)
        except FileNotFoundError:
            return True
        except OSError:  # a file server that does not answer now
            return False

    def watched(self) -> AbstractContextManager[None]:
        """End this process if the folder disappears during a block."""
        return repeating((LOOK, self._look))

    def _look(self) -> None:
        self._missed = self._missed + 1 if self._is_gone() else 0
        if self._missed == 2:
            say(f"{self._folder} {GONE}")
            os._exit(1)

    def release(self) -> None:
        """Release the lock. Raises ValueError if the folder disappeared."""
        gone = self._is_gone()
        self._lock.release()
        if gone:
            raise ValueError(f"{self._folder} {GONE}")


class _Lease:
    """A lease number of this process. One thread beats, one ends the process if beats fail."""

    def __init__(self, folder: epath.Path, files: Any, root: str, number: int) -> None:
        self._folder, self._files = folder, files
        self._path, self._next = (f"{root}/{n:06d}.json" for n in (number, number + 1))
        self._token, self._count = secrets.token_hex(8), 0
        self._last = time.monotonic()  # start of the last successful beat

    @classmethod
    def take(cls, folder: epath.Path) -> _Lease | None:
        """Create the next number, if it is free. Raises ValueError for a store without conditional
        create."""
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
                f"{folder}: {_owner(content)} did not renew its lock for {LEASE:.0f} s, so this "
                "process takes it over"
            )
        lease = cls(folder, files, root, number + 1)
        if not lease._create():
            _seen[key] = (*_highest(files, root), now)
            return None
        _seen.pop(key, None)
        return lease

    def watched(self) -> AbstractContextManager[None]:
        """Keep the lease during a block, and end this process if it is lost."""
        return repeating((BEAT, self._keep), (LEASE / 40, self._guard))

    def _content(self, state: str) -> bytes:
        fields = {"state": state, "beat": self._count, "token": self._token}
        owner = {"host": socket.gethostname(), "pid": os.getpid()}
        return json.dumps({**fields, **owner}, sort_keys=True).encode("ascii")

    def _create(self) -> bool:
        """Create the object; False if another was first. Raises ValueError if the store cannot do
        it."""
        content = self._content("held")
        if (
            not self._create_alone(content)
            and _fields(self._files.cat_file(self._path)).get("token") != self._token
        ):
            return False  # otherwise its answer was lost, and the driver tried again
        if self._create_alone(content):  # it exists: a store with conditional create refuses
            self._files.pipe_file(self._path, self._content("released"))
            raise ValueError(
                f"{self._folder}: this object store overwrites a file that must be created only "
                "once, so it cannot lock a work directory; use Google Cloud Storage, or a file "
                "system"
            )
        self._last = time.monotonic()
        return True

    def _create_alone(self, content: bytes) -> bool:
        """Create the object if it does not exist. The store lets one of several processes
        succeed."""
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
        except Exception as error:  # of any driver; `_guard` limits how long this may continue
            say(f"cannot renew the lock of {self._folder}: {type(error).__name__}: {error!s:.200}")
            return
        if lost:
            self._end("another process took it over, since this one did not renew it in time", 1)
        self._last = begun

    def _guard(self) -> None:
        if time.monotonic() - self._last > _KEPT * LEASE:
            self._end(f"writing to the store failed for {_KEPT * LEASE:.0f} s", RESTART)

    def _end(self, why: str, status: int) -> NoReturn:
        """End this process at once: any of its threads may be about to write."""
        say(f"the lock of {self._folder} is lost: {why}. This process writes nothing more and ends")
        os._exit(status)

    def release(self) -> None:
        """Release the lock. If the store cannot be written now, the lease simply expires."""
        with contextlib.suppress(Exception):
            self._files.pipe_file(self._path, self._content("released"))


def _highest(files: Any, root: str) -> tuple[int, bytes]:
    """Return the highest number of a folder's lock objects with its content; 0 for none."""
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
    """Parse a lock object; {} for a damaged one, whose owner is unknown."""
    try:
        fields = json.loads(content)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _owner(content: bytes) -> str:
    """Describe the owner of a lock, for a message; the text comes from the store."""
    fields = _fields(content)
    return f"process {fields.get('pid', '?')!a:.20} on {fields.get('host', '?')!a:.100}"
