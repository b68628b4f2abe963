"""Who may write in a folder: one process at a time, on local disk and on object stores.

    local        `flock` on FOLDER/.lock; the system lifts it when the process ends, however it ends. A process whose
                 .lock is gone, the folder having been deleted or moved, ends
    gs, s3       a lease: FOLDER/.lock/000001.json, 000002.json …, of which the highest number owns

A lock object is made by a conditional create, which the store grants to one process only, and is never deleted, so no
number is given twice. The owner rewrites its own object with a growing beat, and with "released" when it is through.
The next number may be made when the highest is released, or when its content has stood still for `lease` seconds of
watching; no clocks of two machines are compared. An owner that has not been able to beat for three quarters of that
time ends its process, and so does one that finds a higher number: from then on another may write.

What a lease cannot do: a process that is frozen as a whole (SIGSTOP, a paused virtual machine) for longer than `lease`
may, when it wakes, send what it was just about to write before it notices.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, NoReturn

import fsspec
from etils import epath

from g2d_jax import storage
from g2d_jax.processes import RESTART, check_stop

LOCK = ".lock"
BEAT = 20.0  # seconds between two rewrites of an owner's object
PATIENCE = 120.0  # seconds of waiting for a file server to lift the lock of another host
GONE = "was deleted or moved while this process worked in it: nothing more is written"
LOOK = 2.0  # seconds between two looks whether the folder is still there
LEASE = 60.0  # seconds without a change after which an owner counts as dead

_NUMBER = re.compile(r"(\d{6,})\.json")
_KEPT = 0.75  # of the lease: how long an owner goes on without a beat

_Sight = tuple[int, bytes, float]  # highest number, its content, own clock when first seen so
_seen: dict[str, _Sight] = {}  # by folder: `try_lock` may be called again and again, and watches across its calls


@contextmanager
def locked(workdir: epath.Path, *, beat: float | None = None, lease: float | None = None) -> Iterator[None]:
    """Keep a work directory to this process. Raises ValueError when another one runs in it.

    On an object store a lock that was not released is watched for up to `lease` seconds, and taken over when its owner
    is dead. beat, lease: seconds, BEAT and LEASE unless given; all that use a folder need the same. Raises ValueError
    also for a store that cannot create conditionally.
    """
    first, patience = None, LEASE if lease is None else lease
    began = time.monotonic()
    while True:
        with try_lock(workdir, beat=beat, lease=lease) as got:
            if got:
                yield
                return
        check_stop()
        if storage.is_local(workdir):
            first = _wait_for_server(workdir, first, time.monotonic() - began)
            continue
        sight = _seen[os.fspath(workdir)][:2]
        if first is None:
            first = sight
            _say(f"{workdir} is locked by {_owner(sight[1])}: waiting up to {patience:.0f} s to see whether it lives")
        elif sight != first:
            raise ValueError(f"{workdir} is in use by {_owner(sight[1])}: wait, or choose another --workdir")
        time.sleep(min(1.0, patience / 20))


@contextmanager
def awaited(folder: epath.Path) -> Iterator[None]:
    """Keep a folder to this process for a moment, however many others want it: each waits until it is free.

    Raises Preempted if this process is told to stop before it has it, and as `try_lock` does.
    """
    while True:
        with try_lock(folder) as got:
            if got:
                yield
                return
        check_stop()
        time.sleep(0.05 if storage.is_local(folder) else 1.0)


@contextmanager
def try_lock(folder: epath.Path, *, beat: float | None = None, lease: float | None = None) -> Iterator[bool]:
    """Take the lock of a folder, which is made if it is not there; False, at once, if another process has it.

    On an object store a dead owner's lock is had by calling again until `lease` seconds have passed without a change.
    Raises as `locked` does.
    """
    if storage.is_local(folder):
        with _flock(folder) as got:
            yield got
        return
    with storage.naming("lock", folder):
        owned = _take(folder, BEAT if beat is None else beat, LEASE if lease is None else lease)
    try:
        yield owned is not None
    finally:
        if owned is not None:
            owned.release()


@contextmanager
def _flock(folder: epath.Path) -> Iterator[bool]:
    with storage.naming("make", folder):
        folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            with contextlib.suppress(OSError):  # a full disk: the lock holds without its owner's name
                os.ftruncate(file.fileno(), 0)
                os.write(file.fileno(), json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode())
            closing = threading.Event()
            watch = threading.Thread(target=_watch_file, args=(folder, file, closing), name="g2d-lock", daemon=True)
            watch.start()
            try:
                yield True
            finally:
                closing.set()
                watch.join(LOOK)
            if _is_gone(folder, file):
                raise ValueError(f"{folder} {GONE}")


def _watch_file(folder: epath.Path, file: IO[str], closing: threading.Event) -> None:
    """End this process when the folder is taken away: it would go on in one that it makes anew, without a config."""
    looks = 0
    while not closing.wait(LOOK):
        looks = looks + 1 if _is_gone(folder, file) else 0
        if looks == 2:
            _say(f"{folder} {GONE}")
            os._exit(1)


def _is_gone(folder: epath.Path, file: IO[str]) -> bool:
    """Whether the folder's lock is another file than the one that is held, or none."""
    try:
        return not os.path.samestat(os.stat(folder / LOCK), os.fstat(file.fileno()))
    except FileNotFoundError:
        return True
    except OSError:  # a file server that does not answer now
        return False


def _wait_for_server(folder: epath.Path, told: _Sight | tuple[int, bytes] | None, waited: float) -> tuple[int, bytes]:
    """Wait a little for a lock that another host has: a file server may hold that of a dead one for its grace time.

    told: None the first time. Raises ValueError at once for a lock of this host, where the system lifts those of the
    dead, and when PATIENCE is over.
    """
    owner = (folder / LOCK).read_bytes()
    if waited > PATIENCE or _fields(owner).get("host") in (None, socket.gethostname()):
        raise ValueError(f"{folder} is in use by another process: wait, or choose another --workdir")
    if told is None:
        _say(f"{folder} is locked by {_owner(owner)}: waiting up to {PATIENCE:.0f} s to see whether that host is gone")
    time.sleep(1.0)
    return 0, owner


def _take(folder: epath.Path, beat: float, lease: float) -> _Lease | None:
    """The next number, if it may be had."""
    store = _Store(folder)
    number, content = store.highest()
    key, now = os.fspath(folder), time.monotonic()
    if number and _fields(content).get("state") != "released":
        before = _seen.get(key)
        if before is None or before[:2] != (number, content):
            _seen[key] = (number, content, now)
            return None
        if now - before[2] < lease:
            return None
        _say(f"{folder}: {_owner(content)} gave no sign of life for {lease:.0f} s, its lock is taken over")
    mine = _Lease(store, number + 1, beat, lease)
    if not mine.create():
        _seen[key] = (number + 1, store.read(number + 1), now)
        return None
    _seen.pop(key, None)
    return mine


class _Store:
    """The lock objects of one folder. Raises OSError, and what the store's driver raises; ImportError without one."""

    def __init__(self, folder: epath.Path) -> None:
        self.folder = folder
        storage.check_driver(folder)
        scheme = os.fspath(folder).partition("://")[0]
        self._files = fsspec.filesystem("gcs" if scheme == "gs" else scheme, use_listings_cache=False)

    def _path(self, number: int) -> str:
        return f"{os.fspath(self.folder)}/{LOCK}/{number:06d}.json"

    def highest(self) -> tuple[int, bytes]:
        """The highest number with its content; 0 if there is none."""
        try:
            names = self._files.ls(f"{os.fspath(self.folder)}/{LOCK}", detail=False)
        except FileNotFoundError:
            return 0, b""
        matches = (_NUMBER.fullmatch(name.rsplit("/", 1)[-1]) for name in names)
        number = max((int(match[1]) for match in matches if match), default=0)
        return (number, self.read(number)) if number else (0, b"")

    def read(self, number: int) -> bytes:
        return bytes(self._files.cat_file(self._path(number)))

    def exists(self, number: int) -> bool:
        return bool(self._files.exists(self._path(number)))

    def write(self, number: int, content: bytes) -> None:
        self._files.pipe_file(self._path(number), content)

    def create(self, number: int, content: bytes) -> bool:
        """Make the object; False if it is there. Of several processes at once the store lets one through."""
        try:
            self._files.pipe_file(self._path(number), content, mode="create")
        except FileExistsError:
            return False
        return True


class _Lease:
    """A number of this process's, kept by two threads: one beats, one ends the process when beats fail."""

    def __init__(self, store: _Store, number: int, beat: float, lease: float) -> None:
        self._store, self._number, self._beat, self._lease = store, number, beat, lease
        self._token, self._count = secrets.token_hex(8), 0
        self._closing = threading.Event()
        self._last = time.monotonic()  # when the last beat that came through was begun
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._keep, self._guard)]

    def _content(self, state: str) -> bytes:
        fields = {
            "state": state,
            "beat": self._count,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "token": self._token,
        }
        return json.dumps(fields, sort_keys=True).encode("ascii")

    def create(self) -> bool:
        """Make the object and begin to keep it; False if another was first. Raises ValueError: store cannot do it."""
        content = self._content("held")
        if not self._store.create(self._number, content) and not self._mine():
            return False
        if self._store.create(self._number, content):  # it is there: a store that heeds the condition refuses
            self._store.write(self._number, self._content("released"))
            raise ValueError(
                f"{self._store.folder}: this object store overwrites where it was asked to create only, so a work "
                "directory cannot be locked there; use Google Cloud Storage, Amazon S3 or another store with "
                "conditional writes (If-None-Match), or a file system"
            )
        self._last = time.monotonic()
        for thread in self._threads:
            thread.start()
        return True

    def _mine(self) -> bool:
        """Whether a create that was refused is this one's own: its answer was lost and the driver tried again."""
        return _fields(self._store.read(self._number)).get("token") == self._token

    def _keep(self) -> None:
        while not self._closing.wait(self._beat):
            begun = time.monotonic()
            try:
                self._count += 1
                self._store.write(self._number, self._content("held"))
                lost = self._store.exists(self._number + 1)
            except Exception as error:  # of any driver; `_guard` decides how long this may go on
                _say(f"cannot renew the lock of {self._store.folder}: {type(error).__name__}: {error!s:.200}")
                continue
            if lost:
                self._end("another process has taken it over, this one was not heard of in time", 1)
            self._last = begun

    def _guard(self) -> None:
        while not self._closing.wait(self._lease / 40):
            if time.monotonic() - self._last > _KEPT * self._lease:
                self._end(f"the store could not be written for {_KEPT * self._lease:.0f} s", RESTART)

    def _end(self, why: str, status: int) -> NoReturn:
        """End this process at once: any of its threads may be about to write."""
        _say(f"the lock of {self._store.folder} is lost: {why}. Nothing more is written; this process ends")
        os._exit(status)

    def release(self) -> None:
        """Let others in. If the store cannot be written now, they come in when the lease is over."""
        self._closing.set()
        for thread in self._threads:
            thread.join()
        with contextlib.suppress(Exception):
            self._store.write(self._number, self._content("released"))


def _fields(content: bytes) -> dict[str, Any]:
    """What a lock object says; {} for one that is damaged, which then counts as held by someone unknown."""
    try:
        fields = json.loads(content)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _owner(content: bytes) -> str:
    """Who holds a lock, for a message; the text comes from the store."""
    fields = _fields(content)
    return f"process {fields.get('pid', '?')!a:.20} on {fields.get('host', '?')!a:.100}"


def _say(message: str) -> None:
    print(f"g2d: {message}", file=sys.stderr, flush=True)
