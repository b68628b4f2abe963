"""The kernel's filters: what they say to each call, on machines that are not here too, and what a grader then meets."""

from __future__ import annotations

import errno
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from g2d_jax.rewards import sandbox
from g2d_jax.rewards.sandbox import child_program, worker_program

ALLOW, KILL = 0x7FFF0000, 0x80000000
EPERM, ENOSYS = 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
HEADER = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")


def verdict(program: bytes, machine: str, call: int, *arguments: int) -> int:
    """What the kernel does with a call: the program interpreted as the kernel does (classic BPF)."""
    data = struct.pack("=IIQ6Q", call, ARCHITECTURE[machine], 0, *arguments, *[0] * (6 - len(arguments)))
    lines = list(struct.iter_unpack("HBBI", program))
    at, value = 0, 0
    while True:
        code, if_true, if_false, k = lines[at]
        at += 1
        if code == 0x20:
            (value,) = struct.unpack_from("=I", data, k)
        elif code == 0x06:
            return k
        else:
            holds = {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}[code]
            at += if_true if holds else if_false


@pytest.mark.parametrize(
    ("machine", "refused", "allowed"),
    [
        ("x86_64", {"socket": 41, "connect": 42, "execve": 59, "ptrace": 101, "unlink": 87, "bpf": 321},
         {"read": 0, "write": 1, "mmap": 9, "clone": 56, "kill": 62, "wait4": 61, "exit_group": 231}),
        ("aarch64", {"socket": 198, "connect": 203, "execve": 221, "ptrace": 117, "unlinkat": 35, "bpf": 280},
         {"read": 63, "write": 64, "mmap": 222, "clone": 220, "kill": 129, "wait4": 260, "exit_group": 94}),
    ],
)  # fmt: skip
def test_the_workers_calls(machine: str, refused: dict[str, int], allowed: dict[str, int]) -> None:
    program = worker_program(machine)
    assert {verdict(program, machine, call) for call in refused.values()} == {EPERM}
    assert {verdict(program, machine, call) for call in allowed.values()} == {ALLOW}
    assert verdict(program, machine, 463) == ENOSYS
    assert verdict(program, machine, 0x40000000 + 41) == ENOSYS  # socket of x32
    other = "aarch64" if machine == "x86_64" else "x86_64"
    assert verdict(program, other, allowed["read"]) == KILL


@pytest.mark.parametrize(("machine", "openat"), [("x86_64", 257), ("aarch64", 56)])
def test_files_open_for_reading_only(machine: str, openat: int) -> None:
    program = worker_program(machine)
    at = 2**64 - 100  # AT_FDCWD
    assert verdict(program, machine, openat, at, 1234, os.O_RDONLY | os.O_CLOEXEC) == ALLOW
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_CREAT, os.O_TRUNC, os.O_WRONLY | os.O_APPEND):
        assert verdict(program, machine, openat, at, 1234, flags) == EPERM
    if machine == "x86_64":  # open, which aarch64 lacks
        assert verdict(program, machine, 2, 1234, os.O_RDONLY) == ALLOW
        assert verdict(program, machine, 2, 1234, os.O_RDWR) == EPERM


@pytest.mark.parametrize(
    ("machine", "clone", "kill", "setitimer", "write"), [("x86_64", 56, 62, 38, 1), ("aarch64", 220, 129, 103, 64)]
)
def test_the_childs_calls(machine: str, clone: int, kill: int, setitimer: int, write: int) -> None:
    program = child_program(machine)
    assert {verdict(program, machine, call) for call in (clone, kill, setitimer, 435)} == {EPERM}
    assert verdict(program, machine, write) == ALLOW


@pytest.mark.skipif(not HEADER.exists(), reason="needs the kernel's headers")
def test_the_numbers_are_the_kernels() -> None:
    tables = [value for name, value in vars(sandbox).items() if isinstance(value, str) and re.match(r"_[A-Z]+", name)]
    known = {name: int(number) for name, number in re.findall(r"#define __NR_(\w+) (\d+)", HEADER.read_text())}
    ours = {name: number for table in tables for name, number in sandbox.numbers(table, 0).items()}
    assert len(ours) > 90
    assert {name: known[name] for name in ours if name in known} == {n: c for n, c in ours.items() if n in known}
    assert ours.keys() - known.keys() <= {"fchmodat2"}  # younger than some headers


PROBES = """
import errno, json, os, resource, signal, socket, sys
from g2d_jax.records import Verdict
from g2d_jax.rewards import worker
marker, parent = sys.argv[1], os.getpid()
held = os.open(os.devnull, os.O_RDONLY)
probes = {
    "socket": lambda: socket.socket(),
    "local socket": lambda: socket.socket(socket.AF_UNIX),
    "execute": lambda: os.execv("/bin/true", ["true"]),
    "create": lambda: os.open(marker + "-new", os.O_WRONLY | os.O_CREAT),
    "truncate": lambda: os.open(marker, os.O_RDONLY | os.O_TRUNC),
    "overwrite": lambda: os.open(marker, os.O_WRONLY),
    "another's memory": lambda: os.open(f"/proc/{parent}/mem", os.O_RDWR),
    "delete": lambda: os.unlink(marker),
    "rename": lambda: os.rename(marker, marker + "-moved"),
    "folder": lambda: os.mkdir(marker + "-folder"),
    "mode": lambda: os.chmod(marker, 0o777),
}
child_probes = probes | {
    "fork": os.fork,
    "kill": lambda: os.kill(parent, signal.SIGKILL),
    "limits": lambda: resource.prlimit(parent, resource.RLIMIT_NOFILE, (0, 0)),
    "timer": lambda: signal.setitimer(signal.ITIMER_PROF, 0),
}

def refused(probe):
    try:
        probe()
    except OSError as error:
        return error.errno == errno.EPERM
    return False

def in_child(probe):
    worker.grade = lambda gold, answer: Verdict.CORRECT if refused(probe) else Verdict.INCORRECT
    return worker._grade_in_child("1", "1", 5.0, 2048, child_filter)["verdict"] == "correct"

found = {"before": refused(probes["socket"])}
child_filter, found["unconfined"] = worker._confine()
found["worker"] = {name: refused(probe) for name, probe in probes.items()}
found["child"] = {name: in_child(probe) for name, probe in child_probes.items()}
worker.grade = lambda gold, answer: Verdict.CORRECT if open(marker).read() == "kept" else Verdict.INCORRECT
found["reads"] = worker._grade_in_child("1", "1", 5.0, 2048, child_filter)["verdict"]
def closed(gold, answer):
    os.fstat(held)
worker.grade = closed
found["inherited"] = worker._grade_in_child("1", "1", 5.0, 2048, child_filter)["stopped"]
print(json.dumps(found))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="seccomp is Linux'")
def test_what_a_grader_may_do(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    marker.write_text("kept")
    command = [sys.executable, "-c", PROBES, str(marker)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)
    assert found.pop("before") is False
    assert found.pop("unconfined") == ""
    assert [name for name, refused in found["worker"].items() if not refused] == []
    assert [name for name, refused in found["child"].items() if not refused] == []
    assert len(found["child"]) == 15
    assert found["reads"] == "correct"
    assert found["inherited"] == "crash"  # the descriptor is closed
    assert marker.read_text() == "kept" and [*tmp_path.iterdir()] == [marker]


def test_where_there_is_no_filter_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(OSError, match=r"no seccomp filters for .* on riscv64"):
        sandbox.confine()
