"""Failures of the machine as one line: a full disk, no memory or threads, another process that is
gone, an optional package (an extra of pyproject.toml) that is not installed.

error ─► line ─► what the terminal shows; "" for an error of the code, which keeps its traceback
"""

from __future__ import annotations

import errno
import logging
import os
import re
import sys
from collections.abc import Iterator

_LIMITS = {
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "make room there",
    errno.EFBIG: "allow larger files there (ulimit -f)",
    errno.EMFILE: "allow more open files (ulimit -n)",
}
"""The limits of a disk or a process for files, each with what to do."""
_TEXTS = {os.strerror(number): number for number in _LIMITS}  # all that C++ libraries keep
_FORBIDDEN = "give this user the right to it, or choose another folder"
_UNWRITABLE = "choose a folder that can be written to"
_TAKEN = "a file is there: choose another folder"
_ADVICE = {
    errno.EACCES: _FORBIDDEN,
    errno.EPERM: _FORBIDDEN,
    errno.EROFS: _UNWRITABLE,
    errno.ENOENT: f"check the path, or {_UNWRITABLE}",
    errno.EEXIST: _TAKEN,
    errno.ENOTDIR: _TAKEN,
}
_STORES = {"gcsfs": "gcs", "s3fs": "s3"}  # packages that another one asks for, by their names
_GLOO = re.compile(r"\bGloo [\w -]+ failed: ")
_LESS = (
    "end other programs, raise the limit (ulimit -v, ulimit -u, a container's), or take less: "
    "reward.workers, compute.max_num_seqs, compute.microbatch_tokens"
)


def line(error: BaseException) -> str:
    """Return what is wrong with the machine and what to do, "" for an error that says nothing of
    the machine."""
    number = limit_of_files(error)
    if number:
        return _limited(error, number)
    if isinstance(error, OSError) and error.filename is not None and error.errno in _ADVICE:
        return f"{error.strerror}: {error.filename!r}; {_ADVICE[error.errno]}"
    if isinstance(error, ImportError):
        for package, extra in _STORES.items():
            if package in str(error):
                return f"{error}: {install_command(extra)}"
    if isinstance(error, MemoryError):
        said = " ".join(str(error).split())[:300]  # numpy's says how much, and for which array
        what = f" ({said})" if said else ""
        return f"this machine, or its limit for a process, has no more memory{what}: {_LESS}"
    if isinstance(error, RuntimeError) and _GLOO.search(str(error)):
        return (
            f"what the processes compute together gave up: {str(error).splitlines()[0]:.300}. "
            "Another process is gone, "
            "or came later than the others could wait; a run continues by the same command"
        )
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return (
            "the system starts no more threads: memory or the number of processes is at its "
            f"limit; {_LESS}"
        )
    return ""


def limit_of_files(error: BaseException) -> int:
    """Return the errno of a full disk, a used-up quota or another limit for files that an error, or
    one that it came from, is of; 0 for none."""
    for each in _chain(error):
        if isinstance(each, OSError) and each.errno in _LIMITS:
            return each.errno
        for text, number in _TEXTS.items():
            if text in str(each):
                return number
    return 0


def _limited(error: BaseException, number: int) -> str:
    """Name the file that could not be written, where one of the errors knows it."""
    advice = f"{_LIMITS[number]}, then give the same command again: a run continues where it was"
    for each in _chain(error):
        if isinstance(each, OSError) and each.errno == number and each.filename is not None:
            return f"{each.strerror}: {each.filename!r}; {advice}"
    return f"{os.strerror(number)}: {str(error)[:300]}; {advice}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, what it was raised from, and so on; `raise … from None` ends it, as in a
    traceback."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        before = None if current.__suppress_context__ else current.__context__
        current = current.__cause__ or before


def hush() -> None:
    """Keep libraries from printing their own tracebacks of a full disk or a damaged checkpoint: the
    command's own line tells of it.

    A save that fails is logged by Orbax in each of its threads, by asyncio for each write that
    nobody waited for, and by Tensorstore, which then calls back into an event loop that is closed.
    A read that fails leaves Orbax's other reads behind, whose errors nobody takes.
    """
    for name in ("absl", "asyncio"):
        logger = logging.getLogger(name)
        if _is_news not in logger.filters:
            logger.addFilter(_is_news)
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _unraisable


def _is_news(record: logging.LogRecord) -> bool:
    """Return whether a log record is about anything but a limit for files."""
    error = record.exc_info[1] if record.exc_info else None
    return error is None or not limit_of_files(error)


def _unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """Print an error that nothing can catch, unless it is Ctrl-C, which is raised again at the next
    check, or that of a callback into a closed event loop, or of a coroutine of Orbax."""
    error = unraisable.exc_value
    is_lost = isinstance(error, KeyboardInterrupt)
    is_late = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
    code = getattr(unraisable.object, "cr_code", None)
    if not (is_lost or is_late or "orbax" in getattr(code, "co_filename", "")):
        sys.__unraisablehook__(unraisable)


def install_command(extra: str) -> str:
    """Return the command that installs an extra, and where to give it."""
    return f"pip install '.[{extra}]' in the folder of g2d_jax's repository"


def missing_extra(need: str, extra: str) -> ImportError:
    """Return the error for an extra that is not installed. need: what cannot be done without, for
    the message."""
    return ImportError(f"{need}, from an extra that is not installed: {install_command(extra)}")
