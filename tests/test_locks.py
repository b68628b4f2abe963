"""One process in a folder at a time: by a file lock on local disk, by leases on object stores.
Timings are short."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator

import pytest
from etils import epath
from forks import Forked, Forks
from object_store import BUCKET, gs_server

from g2d_jax.runtime import lock
from g2d_jax.runtime.lock import LOCK, locked, try_lock


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT", 0.2)
    monkeypatch.setattr(lock, "LEASE", 1.0)


PRELUDE = """
import os, sys, time
from etils import epath
from g2d_jax.runtime import lock
from g2d_jax.runtime.lock import locked, try_lock
lock.BEAT, lock.LEASE = 0.2, 4.0
"""


@pytest.fixture
def start(forks: Forks) -> Iterator[Callable[..., Forked]]:
    """Starts a process that runs some code with the environment of a store; none outlives the
    test."""
    with contextlib.ExitStack() as stack:

        def begin(code: str, variables: dict[str, str], *arguments: object) -> Forked:
            process = forks.start(*arguments, code=PRELUDE + code, env={**os.environ, **variables})
            return stack.enter_context(process)

        yield begin


def printed(process: Forked, line: str) -> bool:
    """Wait until a process has printed this line; False if it ends before."""
    while line not in process.stdout.splitlines():
        if process.poll() is not None:
            return False
        time.sleep(0.01)
    return True


def fields(folder: epath.Path, number: int) -> dict:
    return json.loads((folder / LOCK / f"{number:06d}.json").read_bytes())


# Local


def test_a_local_folder_is_one_process_s(tmp_path):
    folder = epath.Path(tmp_path) / "work"
    with locked(folder):
        with try_lock(folder) as got:
            assert not got
        named = (
            rf"work is in use by another process: it is locked by process {os.getpid()} on '.*'. "
            r"Wait, or choose"
        )
        with pytest.raises(ValueError, match=named), locked(folder):
            pass
    with locked(folder), try_lock(epath.Path(tmp_path) / "other") as got:
        assert got


# Leases


@pytest.mark.parametrize("place", ["local", "store"])
def test_who_holds_a_folder_can_be_seen_and_looking_takes_nothing(
    place, tmp_path, bucket, monkeypatch
):
    folder = epath.Path(tmp_path / "run") if place == "local" else bucket
    assert lock.holder(folder) == "" and not (folder / LOCK).exists()
    with try_lock(folder) as got:
        assert got and lock.holder(folder) == f"process {os.getpid()} on {socket.gethostname()!a}"
        with try_lock(folder) as again:
            assert not again
        later = time.time() + 100
        # the owner on a store was not heard of for longer than a lease
        monkeypatch.setattr(time, "time", lambda: later)
        assert (lock.holder(folder) == "") == (place == "store")
    assert lock.holder(folder) == ""


def test_a_lease_is_numbered_released_and_never_deleted(bucket):
    for number in (1, 2, 3):
        with pytest.raises(KeyError), locked(bucket / "run"):
            assert fields(bucket / "run", number)["state"] == "held"
            assert fields(bucket / "run", number)["pid"] == os.getpid()
            raise KeyError
        assert fields(bucket / "run", number)["state"] == "released"
    assert sorted(path.name for path in (bucket / "run" / LOCK).iterdir()) == [
        f"00000{n}.json" for n in (1, 2, 3)
    ]


def test_a_living_owner_keeps_its_lock_and_is_named(bucket, capsys):
    with locked(bucket / "run"):
        with try_lock(bucket / "run") as got:
            assert not got
        began = time.monotonic()
        named = (
            rf"run is in use by another process: it is locked by process {os.getpid()} on .*. "
            r"Wait, or choose"
        )
        with pytest.raises(ValueError, match=named), locked(bucket / "run"):
            pass
        assert time.monotonic() - began < lock.LEASE  # it is seen to live before the lease is over
    assert f"is locked by process {os.getpid()} on" in capsys.readouterr().err
    with locked(bucket / "run"):
        assert fields(bucket / "run", 2)["state"] == "held"


@pytest.mark.parametrize(
    "left", [b'{"state": "held", "beat": 7, "host": "a\\u001b[2J"}', b"", b"[1]", b"\xff"]
)
def test_what_a_dead_owner_left_is_taken_over_when_it_has_stood_still(bucket, capsys, left):
    (bucket / "run" / LOCK / "000041.json").write_bytes(left)
    began = time.monotonic()
    with locked(bucket / "run"):
        assert time.monotonic() - began >= lock.LEASE
        assert fields(bucket / "run", 42)["state"] == "held"
    said = capsys.readouterr().err
    assert "waiting up to 1 s" in said and "takes it over" in said and "\x1b" not in said


def test_try_lock_watches_across_its_calls_and_never_waits(bucket):
    (bucket / "run" / LOCK / "000001.json").write_bytes(b'{"beat": 1}')
    outcomes = []
    for content in (b'{"beat": 1}', b'{"beat": 2}', b'{"beat": 2}', b'{"beat": 2}'):
        (bucket / "run" / LOCK / "000001.json").write_bytes(content)
        began = time.monotonic()
        with try_lock(bucket / "run") as got:
            outcomes.append(got)
        assert time.monotonic() - began < 0.5
        time.sleep(0.6)
    assert outcomes == [False, False, False, True]  # the beat in between started the watch again


# Against servers, with processes of their own

HOLD = "with locked(epath.Path(sys.argv[1])):\n    print('in', flush=True)\n    time.sleep(60)\n"


def test_of_many_processes_one_gets_in(gs, start, tmp_path):
    folder = f"gs://{BUCKET}/race"
    code = """
while not os.path.exists(sys.argv[2]):
    time.sleep(0.001)
with try_lock(epath.Path(sys.argv[1])) as got:
    print(got, flush=True)
    time.sleep(60)
"""
    racers = [start(code, gs, folder, tmp_path / "go") for _ in range(4)]
    (tmp_path / "go").touch()
    while not all(racer.stdout for racer in racers):
        assert all(racer.poll() in (None, 0) for racer in racers), [
            racer.stderr for racer in racers
        ]
        time.sleep(0.01)
    assert sorted(racer.stdout for racer in racers) == ["False\n"] * 3 + ["True\n"]


def test_a_killed_owner_is_followed_and_a_replaced_one_ends(gs, start):
    folder = f"gs://{BUCKET}/killed"
    first = start(HOLD, gs, folder)
    assert printed(first, "in")
    first.kill()
    second = start(HOLD, gs, folder)
    assert printed(second, "in")
    create = (
        "import fsspec\nfsspec.filesystem('gcs').pipe_file(sys.argv[1], b'{}', mode='create')\n"
    )
    third = start(create, gs, f"{folder}/{LOCK}/000003.json")
    assert third.wait(60) == 0, third.stderr
    assert second.wait(30) == 1
    assert "takes it over" in second.stderr and "writes nothing more and ends" in second.stderr
    assert f"the lock of {folder} is lost: another process took it over" in second.stderr


def test_an_owner_that_cannot_reach_the_store_ends_before_another_may_begin(start):
    with gs_server() as variables:
        owner = start(HOLD, variables, f"gs://{BUCKET}/gone")
        assert printed(owner, "in")
    began = time.monotonic()
    assert owner.wait(30) == 75 and time.monotonic() - began < 4.0  # the lease
    assert "writing to the store failed for 3 s" in owner.stderr


def test_a_store_that_ignores_the_condition_is_refused(start):
    with gs_server(conditional=False) as variables:
        done = start(HOLD, variables, f"gs://{BUCKET}/run")
        assert done.wait(60) == 1 and not done.stdout
    refused = (
        "ValueError: gs://g2d-bucket/run: this object store overwrites a file that must be "
        "created only once, so it cannot lock a work directory"
    )
    assert refused in done.stderr
