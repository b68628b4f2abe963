"""What a verifier worker may ask of the Linux kernel: seccomp filters that end its right to the network, to other
programs, to other processes and to changing files. Reading files stays allowed, since Python imports as it goes.

    worker filter   before the first answer, inherited by every child; forking and waiting go on working
    child filter    on top of it, for the process that grades: no children, no signals, no change of its own limits

A refused call fails with EPERM, one that is newer than these tables with ENOSYS, as on an older kernel. The lists name
what is refused: which calls Python, libc and sympy need differs between their versions. The numbers are those of
Linux' asm/unistd_64.h and asm-generic/unistd.h, the program that of seccomp(2).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Iterable

_AUDIT = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Machine -> the kernel's name for its calls (AUDIT_ARCH_*), and the column of the tables below."""

# Each line: call, number on x86_64, number on aarch64 (- where it has none).
_NETWORK = """
socket 41 198, socketpair 53 199, connect 42 203, bind 49 200, listen 50 201, accept 43 202, accept4 288 242,
sendto 44 206, sendmsg 46 211, sendmmsg 307 269
"""
_PROGRAMS = "execve 59 221, execveat 322 281"
_PROCESSES = """
ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, process_madvise 440 440, pidfd_open 434 434,
pidfd_getfd 438 438, pidfd_send_signal 424 424, shmget 29 194, shmat 30 196, msgget 68 186, mq_open 240 180
"""
_KERNEL = """
bpf 321 280, perf_event_open 298 241, userfaultfd 323 282, io_uring_setup 425 425, io_uring_enter 426 426,
io_uring_register 427 427, io_setup 206 0, keyctl 250 219, add_key 248 217, request_key 249 218, unshare 272 97,
setns 308 268, mount 165 40, umount2 166 39, chroot 161 51, pivot_root 155 41, open_tree 428 428, move_mount 429 429,
fsopen 430 430, open_by_handle_at 304 265, init_module 175 105, finit_module 313 273, kexec_load 246 104,
kexec_file_load 320 294, memfd_create 319 279, personality 135 92
"""
_FILES = """
creat 85 -, openat2 437 437, truncate 76 45, ftruncate 77 46, fallocate 285 47, unlink 87 -, unlinkat 263 35,
rename 82 -, renameat 264 38, renameat2 316 276, mkdir 83 -, mkdirat 258 34, rmdir 84 -, link 86 -, linkat 265 37,
symlink 88 -, symlinkat 266 36, mknod 133 -, mknodat 259 33, chmod 90 -, fchmod 91 52, fchmodat 268 53,
fchmodat2 452 452, chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54, utime 132 -, utimes 235 -,
futimesat 261 -, utimensat 280 88, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, removexattr 197 14,
lremovexattr 198 15, fremovexattr 199 16
"""
_OF_THE_CHILD = """
fork 57 -, vfork 58 -, clone 56 220, clone3 435 435, kill 62 129, tkill 200 130, tgkill 234 131,
rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, setrlimit 160 164, prlimit64 302 261, setitimer 38 103
"""
_FIRST_UNKNOWN = 463  # numbers from 424 on are the same everywhere; x32's, from 2^30 on, are unknown too
_OPENS = "open 2 -, openat 257 56"
_CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2


class Filter:
    """A program for the kernel, ready to be installed in this process and its later children, for good."""

    def __init__(self, code: bytes) -> None:
        self._code = ctypes.create_string_buffer(code, len(code))  # the kernel reads it through `_program`
        self._program = ctypes.create_string_buffer(struct.pack("HP", len(code) // 8, ctypes.addressof(self._code)))
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl
        self._prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]

    def install(self) -> None:
        """Restrict the calling thread. Raises OSError where the kernel refuses."""
        address = ctypes.addressof(self._program)
        for arguments in ((_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, address, 0, 0)):
            if self._prctl(*arguments) != 0:
                number = ctypes.get_errno()
                raise OSError(number, f"the kernel refuses a seccomp filter: {os.strerror(number)}")


def confine() -> Filter:
    """Restrict this process as a worker; the filter that its children install on top.

    Raises OSError, with the reason as its strerror, where there is no seccomp or it does not take effect.
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _AUDIT or struct.calcsize("P") != 8 or sys.byteorder != "little":
        raise OSError(errno.ENOSYS, f"there are no seccomp filters for {sys.platform} on {machine}")
    child = Filter(child_program(machine))
    Filter(worker_program(machine)).install()
    if ctypes.CDLL(None).socket(1, 1, 0) >= 0:  # emulators take filters and ignore them
        raise OSError(errno.ENOSYS, "the kernel takes seccomp filters and does not apply them")
    return child


def worker_program(machine: str) -> bytes:
    """The worker's filter in BPF. machine: "x86_64" or "aarch64"."""
    column = _AUDIT[machine][1]
    tables = (_NETWORK, _PROGRAMS, _PROCESSES, _KERNEL, _FILES)
    denied = [number for table in tables for number in numbers(table, column).values()]
    flags = {"open": 1, "openat": 2}  # which argument
    opens = [_refuse_changes(number, flags[name]) for name, number in numbers(_OPENS, column).items()]
    return _head(machine) + _refuse(denied) + b"".join(opens) + _line(_RETURN, _ALLOW)


def child_program(machine: str) -> bytes:
    """The further filter of a child that grades."""
    return _head(machine) + _refuse(numbers(_OF_THE_CHILD, _AUDIT[machine][1]).values()) + _line(_RETURN, _ALLOW)


def numbers(table: str, column: int) -> dict[str, int]:
    """Call -> number, of those that the machine of the column (0 x86_64, 1 aarch64) has."""
    rows = [row.split() for row in table.split(",")]
    return {row[0]: int(row[1 + column]) for row in rows if row[1 + column] != "-"}


def _head(machine: str) -> bytes:
    """Kill who calls as another machine (32-bit calls have other numbers); refuse what the tables do not know."""
    return (
        _line(_LOAD, _ARCHITECTURE)
        + _line(_IF_EQUAL, _AUDIT[machine][0], 1, 0)
        + _line(_RETURN, _KILL)
        + _line(_LOAD, _NUMBER)
        + _line(_IF_AT_LEAST, _FIRST_UNKNOWN, 0, 1)
        + _line(_RETURN, _ERROR | errno.ENOSYS)
    )


def _refuse(calls: Iterable[int]) -> bytes:
    return b"".join(_line(_IF_EQUAL, call, 0, 1) + _line(_RETURN, _ERROR | errno.EPERM) for call in calls)


def _refuse_changes(call: int, argument: int) -> bytes:
    """Let a call that opens files pass if its flags, its argument of that index, ask for reading only."""
    return (
        _line(_IF_EQUAL, call, 0, 4)
        + _line(_LOAD, _ARGUMENTS + 8 * argument)  # the lower half of it
        + _line(_IF_ANY_BIT, _CHANGES, 0, 1)
        + _line(_RETURN, _ERROR | errno.EPERM)
        + _line(_RETURN, _ALLOW)
    )


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """A struct sock_filter: on true and false, so many lines are skipped."""
    return struct.pack("HBBI", code, if_true, if_false, value)
