"""What a process and its children hold, and the most that it was."""

import math
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from g2d_jax.runtime import memory
from g2d_jax.runtime.memory import GIB

MIB = 1 << 20
linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="there is no /proc")

HOLDER = """
import subprocess, sys
size, deeper = int(sys.argv[1]), int(sys.argv[2])
held = bytearray(size)
held[::4096] = b"x" * len(held[::4096])
child = subprocess.Popen([sys.executable, "-c", sys.argv[3], str(size), "0", ""], stdout=subprocess.PIPE,
                         stdin=subprocess.PIPE) if deeper else None
if child:
    child.stdout.readline()
print("holding", flush=True)
sys.stdin.readline()
if child:
    child.stdin.close()
    child.wait()
"""


@pytest.fixture
def holder():
    """Start a process that holds so many bytes, and another one below it that does too."""
    started = []

    def start(size, deeper=0):
        command = [sys.executable, "-c", HOLDER, str(size), str(deeper), HOLDER]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        started[-1].stdout.readline()
        return started[-1]

    yield start
    for process in started:
        process.communicate()


@linux
def test_a_process_counts_with_all_below_it(holder):
    process = holder(100 * MIB, deeper=1)
    assert 200 * MIB <= memory.held(process.pid) <= 260 * MIB
    assert memory.held(os.getpid()) >= 200 * MIB + memory._status(os.getpid())["VmRSS"] // 2
    assert memory.held(2**22 + 1) is None


@linux
def test_a_peak_is_not_that_of_the_program_that_started_it():
    read = "from g2d_jax.runtime import memory; print(memory.Peak().read())"
    block = bytearray(600 * MIB)
    block[::4096] = b"x" * len(block[::4096])
    done = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 300 * MIB


def alone(program, *arguments):
    """Run a program in a process of its own, which no other test's children and freed memory are
    in; what it prints."""
    command = [sys.executable, "-c", textwrap.dedent(program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [int(word) for word in done.stdout.split()]


@linux
def test_a_peak_is_of_its_block_alone():
    before, first, second, third = alone("""
        from g2d_jax.runtime import memory

        def touched(size):
            block = bytearray(size)
            block[::4096] = b"x" * len(block[::4096])
            return block

        with memory.measured() as peak:
            before = peak.read()
            block = touched(200 << 20)
            del block
            first = peak.read()
        with memory.measured() as peak:
            second = peak.read()
        block = touched(50 << 20)
        print(before, first, second, peak.read())
    """)
    assert 190 * MIB <= first - before <= 230 * MIB
    assert second - before <= 30 * MIB
    assert 50 * MIB <= third - second <= 80 * MIB


@linux
def test_a_peak_has_the_children_that_ended():
    before, after = alone(
        """
        import subprocess, sys
        from g2d_jax.runtime import memory

        holder = sys.argv[1]
        with memory.measured() as peak:
            before = peak.read()
            command = [sys.executable, "-c", holder, str(150 << 20), "1", holder]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            process.stdout.readline()
            peak.look()
            process.communicate()
        print(before, peak.read())
        """,
        HOLDER,
    )
    assert 300 * MIB <= after - before <= 400 * MIB


GROWN = """
import os
from g2d_jax.runtime import memory
pieces = [bytes(100_000) for _ in range(4000)]  # too small for maps of their own
last = bytes(100_000)
del pieces
before = memory.held(os.getpid())
memory.give_back()
print(before - memory.held(os.getpid()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the C library has no malloc_trim")
def test_what_was_freed_is_given_back():
    done = subprocess.run([sys.executable, "-c", GROWN], capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 200 * MIB


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": f"{GIB}\n"}, GIB),
        ("0::/a/b\n", {"a/b/memory.max": f"{GIB // 2}\n", "a/memory.max": f"{GIB}\n"}, GIB // 2),
        ("5:cpu:/c\n4:memory:/m\n0::/\n", {"memory/m/memory.limit_in_bytes": f"{GIB}\n"}, GIB),
        ("4:memory:/m\n", {"memory/m/memory.limit_in_bytes": "9223372036854771712\n"}, None),
        ("0::/\n", {}, None),
    ],
)
def test_the_limit_is_the_least_of_machine_and_groups(
    tmp_path, monkeypatch, groups, files, expected
):
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(groups)
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text)
    monkeypatch.setattr(memory, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path / "groups")
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory.limit() == (expected or machine)


@linux
def test_looking_at_children_takes_a_hundredth_of_the_time_at_most(holder):
    peak = memory.Peak()
    began = time.monotonic()
    peak.look()
    took = time.monotonic() - began
    assert began < peak._next_look <= began + took + took / 0.01
    peak._next_look = math.inf  # as after a look that took for ever
    peak._children = 0
    holder(100 * MIB)
    peak.look_if_due()
    assert peak._children == 0
    peak.read()  # the last look is not left out
    assert peak._children >= 100 * MIB
