"""Text from files, models and servers as a terminal may see it: nothing in it steers, and it has an
end.

All that a command prints goes through here: its lines (`processes.say`, `cli`), what a run says and
its tables (`tracking.Screen`, laid out by `table_layout`), and the tracebacks of errors that nobody
expected (`clean_tracebacks`).
"""

from __future__ import annotations

import os
import re
import sys
import threading
import traceback
import unicodedata
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TextIO

MOST = 10_000
"""Characters of a message, at most."""

MOST_TRACED = 50_000
"""Characters of a traceback, at most."""

_UNSAFE = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # control, format (text direction), surrogates, separators


_BREAKS = ",;:/=_|-"
"""Characters behind which a word that is too long for its cell is broken."""


def clean(text: str, *, newlines: bool = True) -> str:
    r"""Show every character that could steer a terminal as its escape, such as \x1b."""
    keep = "\n" if newlines else ""
    return "".join(
        char
        if char == keep or unicodedata.category(char) not in _UNSAFE
        else char.encode("unicode_escape").decode()
        for char in text
    )


def shortened(text: str, most: int = MOST) -> str:
    """Leave out the middle of a text of more than so many characters, and say how much that is."""
    if len(text) <= most:
        return text
    head = most * 2 // 3
    tail = most - head
    return f"{text[:head]} … ({len(text) - most:,} characters left out) … {text[-tail:]}"


def shown(text: str, most: int = MOST) -> str:
    """Clean a text and shorten it to about so many characters."""
    return shortened(clean(shortened(text, most)), most)


def columns_of(stream: TextIO | None) -> int | None:
    """Return the columns of the terminal that a stream writes to, None where it writes to none, or
    to one that does not tell."""
    chosen = os.environ.get("COLUMNS", "")
    try:
        if stream is None or not stream.isatty():
            return None
        if chosen.isdecimal() and len(chosen) < 6:
            return int(chosen) or None
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):  # closed, or no file of the system's
        return None


def wrapped(text: str, columns: int) -> str:
    """Break lines that are wider than a terminal at spaces; what goes on is indented by two more.

    What has no spaces, such as a path, stays whole, and so does a command, "g2d …" behind a colon:
    both can be copied.
    """
    lines: list[str] = []
    for line in text.split("\n"):
        bare = line.lstrip(" ")
        start = line[: len(line) - len(bare)]
        words = re.findall("(?<=:) g2d .+| *[^ ]+", bare)
        lines += _packed(words, columns, start, f"{start}  ")
    return "\n".join(lines)


def folded(text: str, columns: int) -> list[str]:
    """Break a text into lines of at most so many cells, two or more: at spaces, words that are
    longer also behind punctuation or anywhere."""
    lines: list[str] = []
    for line in text.split("\n"):
        parts: list[str] = []
        for word in re.findall(" *[^ ]+", line):
            parts += _parts(word, columns)
        lines += _packed(parts, columns)
    return lines


def _parts(word: str, columns: int) -> Iterator[str]:
    """Yield a word, with the spaces before it, in parts of at most so many cells."""
    from rich.cells import cell_len

    bare = word.lstrip(" ")
    if cell_len(bare) <= columns:
        yield word
        return
    part, used = word[: len(word) - len(bare)], 0
    for char in _with_marks(bare):
        size = cell_len(char)
        if used + size > columns:
            yield part
            part, used = "", 0
        part += char
        used += size
        if char[0] in _BREAKS:
            yield part
            part, used = "", 0
    yield part


def _with_marks(text: str) -> list[str]:
    """Split a text into characters, each with the marks that are drawn over it."""
    chars: list[str] = []
    for char in text:
        if chars and unicodedata.category(char).startswith("M"):
            chars[-1] += char
        else:
            chars.append(char)
    return chars


def _packed(words: list[str], columns: int, start: str = "", indent: str = "") -> list[str]:
    """Put words, each with the spaces before it, on as few lines as they take; at least one.

    start, indent: the spaces before the first line, and before the others.
    """
    # Here, as in `_parts`: most that reads this module prints to no terminal.
    from rich.cells import cell_len

    lines: list[str] = []
    line, used = start, len(start)
    for word in words:
        size = cell_len(word)
        if used + size > columns:
            if line.strip():
                lines.append(line)
                line, used = indent, len(indent)
            word = word.lstrip(" ")
            size = cell_len(word)
        line += word
        used += size
    return [*lines, line]


def clean_tracebacks() -> Callable[[], None]:
    """Have this process print tracebacks cleaned: exceptions hold what files and servers said.

    Returns what undoes it.
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
