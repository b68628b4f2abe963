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

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_TEXTS = tuple(map(os.strerror, _FULL))  # all that C++ libraries keep of the number
_FORBIDDEN = "give this user the right to it, or choose another folder"
_UNWRITABLE = "choose a folder that can be written to"
_TAKEN = "a file is there: choose another folder"
_MAKE_ROOM = "make room there, then give the same command again: a run continues where it was"
_ADVICE = {
    errno.EACCES: _FORBIDDEN,
    errno.EPERM: _FORBIDDEN,
    errno.EROFS: _UNWRITABLE,
    errno.ENOENT: f"check the path, or {_UNWRITABLE}",
    errno.EEXIST: _TAKEN,
    errno.ENOTDIR: _TAKEN,
    errno.ENOSPC: _MAKE_ROOM,
    errno.EDQUOT: _MAKE_ROOM,
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
    if is_full(error):
        return _full_disk(error)
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


def is_full(error: BaseException) -> bool:
    """Return whether an error, or one that it came from, is that of a full disk or of a quota that
    is used up."""
    for each in _chain(error):
        if isinstance(each, OSError) and each.errno in _FULL:
            return True
        if any(text in str(each) for text in _FULL_TEXTS):
            return True
    return False


def _full_disk(error: BaseException) -> str:
    """Name the file that could not be written, where one of the errors knows it."""
    for each in _chain(error):
        if isinstance(each, OSError) and each.errno in _FULL and each.filename is not None:
            return f"{each.strerror}: {each.filename!r}; {_MAKE_ROOM}"
    return f"{_FULL_TEXTS[0]}: {str(error)[:300]}; {_MAKE_ROOM}"


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
    """Keep libraries from printing their own tracebacks of a full disk: the command's last line
    tells of it.

    A save that fails is logged by Orbax in each of its threads, by asyncio for each write that
    nobody waited for, and by Tensorstore, which then calls back into an event loop that is closed.
    """
    for name in ("absl", "asyncio"):
        logger = logging.getLogger(name)
        if _is_news not in logger.filters:
            logger.addFilter(_is_news)
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _unraisable


def _is_news(record: logging.LogRecord) -> bool:
    """Return whether a log record is about anything but a full disk."""
    error = record.exc_info[1] if record.exc_info else None
    return error is None or not is_full(error)


def _unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """Print an error that nothing can catch, unless it is Ctrl-C or that of a callback into a closed
    event loop."""
    error = unraisable.exc_value
    is_lost = isinstance(error, KeyboardInterrupt)  # raised again at the next check
    if not is_lost and not (
        isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
    ):
        sys.__unraisablehook__(unraisable)


def install_command(extra: str) -> str:
    """Return the command that installs an extra, and where to give it."""
    return f"pip install '.[{extra}]' in the folder of g2d_jax's repository"


def missing_extra(need: str, extra: str) -> ImportError:
    """Return the error for an extra that is not installed. need: what cannot be done without, for
    the message."""
    return ImportError(f"{need}, from an extra that is not installed: {install_command(extra)}")
