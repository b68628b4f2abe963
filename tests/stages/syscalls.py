"""Stop a process just before each call with which it changes files, from outside: seccomp's user
notification (Linux).

install(), in the process to be watched ─► a descriptor, sent to the watching parent ─► changes(descriptor)

What is on disk while a process is stopped there is what `kill -9` would leave, so every state that
a kill can leave is seen. The layout of the structures is that of seccomp_unotify(2).
"""

import ctypes
import fcntl
import os
import platform
import select
import struct
import subprocess
import sys
from collections.abc import Iterator

# call, number on x86_64, number on aarch64, - where it has none
_BY_PATH = """
creat 85 -, truncate 76 45, unlink 87 -, rename 82 -, mkdir 83 -, rmdir 84 -, link 86 -, symlink 88 -
"""
_BY_FOLDER = """
openat 257 56, unlinkat 263 35, renameat 264 38, renameat2 316 276, mkdirat 258 34, linkat 265 37, symlinkat 266 36
"""
_BY_DESCRIPTOR = """
write 1 64, pwrite64 18 68, writev 20 66, pwritev 296 70, ftruncate 77 46, fallocate 285 47, copy_file_range 326 285,
sendfile 40 71
"""
_OPEN = "open 2 -"
_CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_COLUMN = {"x86_64": 0, "aarch64": 1}
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_NEW_LISTENER = 8
_NOTIFY, _ALLOW = 0x7FC00000, 0x7FFF0000
_RECEIVE, _SEND = 0xC0502100, 0xC0182101  # ioctl numbers
_HERE = -100  # AT_FDCWD


def available() -> bool:
    """Whether the kernel notifies; False in emulators, and in containers that forbid it."""
    if sys.platform != "linux" or platform.machine() not in _COLUMN:
        return False
    return (
        subprocess.run([sys.executable, __file__], check=False, capture_output=True).returncode == 0
    )


def _numbers(table: str) -> dict[str, int]:
    """Call -> number, of those that this machine has."""
    rows = [row.split() for row in table.split(",")]
    column = 1 + _COLUMN[platform.machine()]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


def _calls() -> dict[int, str]:
    tables = (_BY_PATH, _BY_FOLDER, _BY_DESCRIPTOR, _OPEN)
    return {number: name for table in tables for name, number in _numbers(table).items()}


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _program() -> bytes:
    """Notify of every call above; of those that open, only when they may change something."""
    code = _line(0x20, 0)  # load the number
    for number, name in _calls().items():
        if name in ("open", "openat"):
            flags = 16 + 8 * (1 if name == "open" else 2)
            code += _line(0x15, number, 0, 4) + _line(0x20, flags) + _line(0x45, _CHANGES, 0, 1)
            code += _line(0x06, _NOTIFY) + _line(0x06, _ALLOW)
        else:
            code += _line(0x15, number, 0, 1) + _line(0x06, _NOTIFY)
    return code + _line(0x06, _ALLOW)


def install() -> int:
    """Have the calls of this thread, and of all it starts from now on, notified: the descriptor to
    listen at."""
    libc = ctypes.CDLL(None, use_errno=True)
    code = _program()
    lines = ctypes.create_string_buffer(code, len(code))
    program = ctypes.create_string_buffer(
        struct.pack("HP", len(code) // 8, ctypes.addressof(lines))
    )
    libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    libc.syscall.argtypes = [ctypes.c_long, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_void_p]
    libc.syscall.restype = ctypes.c_long
    found = -1
    if libc.prctl(38, 1, 0, 0, 0) == 0:  # no new privileges
        found = libc.syscall(
            _SECCOMP[platform.machine()], 1, _NEW_LISTENER, ctypes.addressof(program)
        )
    if found < 0:
        raise OSError(ctypes.get_errno(), "the kernel does not notify of calls")
    return int(found)


def changes(listener: int, seconds: float) -> Iterator[tuple[str, str]]:
    """(call, path) of each change, which is made when the iteration goes on. Ends with the process,
    or after seconds.

    path: of a rename the new one; "" for what is no file.
    """
    names, poll = _calls(), select.poll()
    poll.register(listener, select.POLLIN)
    while ready := poll.poll(seconds * 1000):
        if not ready[0][1] & select.POLLIN:
            return
        told = bytearray(80)
        try:
            fcntl.ioctl(listener, _RECEIVE, told)
        except OSError:  # the thread was killed meanwhile
            continue
        identifier, thread = struct.unpack_from("=QI", told)
        number = struct.unpack_from("=i", told, 16)[0]
        arguments = struct.unpack_from("=6Q", told, 32)
        yield names[number], _path(thread, names[number], arguments)
        try:
            # 1: let it go on
            fcntl.ioctl(listener, _SEND, bytearray(struct.pack("=QqiI", identifier, 0, 0, 1)))
        except OSError:
            continue


def _path(thread: int, call: str, arguments: tuple[int, ...]) -> str:
    try:
        if call in _numbers(_BY_DESCRIPTOR):
            which = 2 if call == "copy_file_range" else 0
            return os.readlink(f"/proc/{thread}/fd/{arguments[which] & 0xFFFFFFFF}")
        if call in _numbers(_BY_FOLDER):
            first = (
                2
                if call in ("renameat", "renameat2", "linkat")
                else 1
                if call == "symlinkat"
                else 0
            )
            folder = ctypes.c_int(arguments[first] & 0xFFFFFFFF).value
            start = os.readlink(f"/proc/{thread}/{'cwd' if folder == _HERE else f'fd/{folder}'}")
            return os.path.join(start, _text(thread, arguments[first + 1]))
        second = call in ("rename", "link", "symlink")
        return os.path.join(
            os.readlink(f"/proc/{thread}/cwd"), _text(thread, arguments[int(second)])
        )
    except OSError:
        return ""


def _text(thread: int, address: int) -> str:
    """The string at an address of the other process."""
    with open(f"/proc/{thread}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        found = bytearray()
        while b"\0" not in found:
            found += memory.read(256 - (address + len(found)) % 256)  # within a page
    return os.fsdecode(bytes(found.split(b"\0")[0]))


if __name__ == "__main__":  # see `available`
    install()
