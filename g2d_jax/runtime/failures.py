"""Failures of the machine as one line: a full disk, no memory or threads, a lost process, a missing
optional package (an extra of pyproject.toml).

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
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some space there",
    errno.EFBIG: "allow larger files there (ulimit -f)",
    errno.EMFILE: "allow more open files (ulimit -n)",
}
"""Limits of a disk or a process on files, each with its fix."""
_TEXTS = {os.strerror(number): number for number in _LIMITS}  # C++ libraries keep only the text
_FORBIDDEN = "give this user access, or choose another folder"
_UNWRITABLE = "choose a writable folder"
_TAKEN = "this is a file: choose another folder"
_ADVICE = {
    errno.EACCES: _FORBIDDEN,
    errno.EPERM: _FORBIDDEN,
    errno.EROFS: _UNWRITABLE,
    errno.ENOENT: f"check the path, or {_UNWRITABLE}",
    errno.EEXIST: _TAKEN,
    errno.ENOTDIR: _TAKEN,
}
_STORES = {"gcsfs": "gcs", "s3fs": "s3"}  # optional packages of other packages, by name
_GLOO = re.compile(r"\bGloo [\w -]+ failed: ")
_LESS = (
    "end other programs, raise the limit (ulimit -v, ulimit -u, a container's), or reduce "
    "reward.workers, compute.max_num_seqs, compute.microbatch_tokens"
)


def line(error: BaseException) -> str:
    """Return what is wrong with the machine and how to fix it, "" for other errors."""
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
        detail = " ".join(str(error).split())[:300]  # numpy's has the size and the array
        what = f" ({detail})" if detail else ""
        return f"out of memory on this machine, or over a limit for this process{what}: {_LESS}"
    if isinstance(error, RuntimeError) and _GLOO.search(str(error)):
        return (
            f"a collective operation failed: {str(error).splitlines()[0]:.300}. Another process "
            "was lost, or came too late; the same command continues a run"
        )
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return (
            "the system cannot start more threads: memory or the number of processes is at its "
            f"limit; {_LESS}"
        )
    return ""


def limit_of_files(error: BaseException) -> int:
    """Return the errno of a full disk, a quota or another limit on files, from an error or its
    causes; 0 for none."""
    for each in _chain(error):
        if isinstance(each, OSError) and each.errno in _LIMITS:
            return each.errno
        for text, number in _TEXTS.items():
            if text in str(each):
                return number
    return 0


def _limited(error: BaseException, number: int) -> str:
    """Name the file that could not be written, if one of the errors has it."""
    advice = f"{_LIMITS[number]}, then run the same command again: a run resumes where it stopped"
    for each in _chain(error):
        if isinstance(each, OSError) and each.errno == number and each.filename is not None:
            return f"{each.strerror}: {each.filename!r}; {advice}"
    return f"{os.strerror(number)}: {str(error)[:300]}; {advice}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes; `raise … from None` ends the chain, as in a traceback."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        before = None if current.__suppress_context__ else current.__context__
        current = current.__cause__ or before


def hush() -> None:
    """Silence libraries' own tracebacks of a full disk or a damaged checkpoint: the command prints
    one line about it.

    Orbax logs a failed save in each of its threads, asyncio for each write without a waiting
    caller, and Tensorstore, which then calls back into a closed event loop. A failed read leaves
    Orbax's other reads pending, with errors that nothing retrieves.
    """
    for name in ("absl", "asyncio"):
        logger = logging.getLogger(name)
        if _is_news not in logger.filters:
            logger.addFilter(_is_news)
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _unraisable


def _is_news(record: logging.LogRecord) -> bool:
    """Return whether a log record is about anything but a limit on files."""
    error = record.exc_info[1] if record.exc_info else None
    return error is None or not limit_of_files(error)


def _unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """Print an uncatchable error, except Ctrl-C (raised again at the next check), a callback into a
    closed event loop, and a coroutine of Orbax."""
    error = unraisable.exc_value
    is_lost = isinstance(error, KeyboardInterrupt)
    is_late = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
    code = getattr(unraisable.object, "cr_code", None)
    if not (is_lost or is_late or "orbax" in getattr(code, "co_filename", "")):
        sys.__unraisablehook__(unraisable)


def install_command(extra: str) -> str:
    """Return the command that installs an extra, and the folder to run it in."""
    return f"pip install '.[{extra}]' in the folder of g2d_jax's repository"


def missing_extra(need: str, extra: str) -> ImportError:
    """Return the error for a missing extra. need: its use, for the message."""
    return ImportError(f"{need}, from an extra that is not installed: {install_command(extra)}")
