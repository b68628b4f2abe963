"""Text from files, models and servers, made safe for a terminal: without control codes, and of
limited length.

Everything that a command prints goes through here: its lines (`processes.say`, `cli`), a run's
messages and tables (`tracking.Screen`), and tracebacks of unexpected errors (`clean_tracebacks`).
"""

from __future__ import annotations

import sys
import threading
import traceback
import unicodedata
from collections.abc import Callable
from types import TracebackType

MOST = 10_000
"""Most characters of a message."""

MOST_TRACED = 50_000
"""Most characters of a traceback."""

_UNSAFE = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # control, format (text direction), surrogates, separators


def clean(text: str, *, newlines: bool = True) -> str:
    r"""Show every character that could control a terminal as its escape, such as \x1b."""
    keep = "\n" if newlines else ""
    return "".join(
        char
        if char == keep or unicodedata.category(char) not in _UNSAFE
        else char.encode("unicode_escape").decode()
        for char in text
    )


def counted(count: float, what: str) -> str:
    """Count things in words: "1 pair", "1,024 pairs"."""
    return f"{count:,.0f} {what}{'s' * (count != 1)}"


def shortened(text: str, most: int = MOST) -> str:
    """Remove the middle of a text of more than `most` characters, and state how much was
    removed."""
    if len(text) <= most:
        return text
    head = most * 2 // 3
    tail = most - head
    return f"{text[:head]} … ({len(text) - most:,} characters left out) … {text[-tail:]}"


def shown(text: str, most: int = MOST) -> str:
    """Clean a text and shorten it to about `most` characters."""
    return shortened(clean(shortened(text, most)), most)


def clean_tracebacks() -> Callable[[], None]:
    """Clean the tracebacks that this process prints: exceptions may hold text from files and
    servers.

    Returns a function that restores the default.
    """
    before, before_of_threads = sys.excepthook, threading.excepthook
    sys.excepthook = _print_traceback
    threading.excepthook = _print_of_thread

    def undo() -> None:
        sys.excepthook = before
        threading.excepthook = before_of_threads

    return undo


def print_traceback(error: BaseException) -> None:
    """Print the traceback of an error to standard error, cleaned."""
    _print_traceback(type(error), error, error.__traceback__)


def _print_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    text = "".join(traceback.format_exception(kind, error, trace))
    print(shown(text, MOST_TRACED), end="", file=sys.stderr, flush=True)


def _print_of_thread(arguments: threading.ExceptHookArgs) -> None:
    if arguments.exc_type is SystemExit or arguments.exc_value is None:
        return
    name = arguments.thread.name if arguments.thread is not None else "a thread"
    print(f"Exception in {clean(name)}:", file=sys.stderr)
    _print_traceback(arguments.exc_type, arguments.exc_value, arguments.exc_traceback)
