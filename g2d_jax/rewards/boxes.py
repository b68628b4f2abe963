r"""Boxed answers of a text: `\boxed{5}`, `\fbox{5}` or the brace-less `\boxed 5`.

Boxes with only separators and names between them are one answer, a list:

    $x=\boxed{1}$ or $x=\boxed{2}$                ─► 1, 2
    \(a = \boxed{1}\) and \(b = \boxed{2}\)       ─► a = 1, b = 2
    \boxed{4}. Wait, no: \boxed{5}                ─► 5: words separate boxes, and the last ones count

Boxes that were escaped twice are read too (`\\boxed{\\frac{1}{2}}`), and those whose `\b` JSON
turned into a backspace (`oxed{5}`). Model text is untrusted: every search is linear in its length,
and nothing recurses.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

# A line break may precede a box: three backslashes are then not a box that was escaped twice, but
# four are.
_WRITTEN = r"\\{1,4}(?:boxed|fbox)|oxed(?<![\w\\]oxed)"
# One token per match, so that `\{` and `\\` are never mistaken for a brace or for the start of a
# command.
_TOKENS = r"|(?P<open>\{)|(?P<close>\})|\\."
_TOKEN = re.compile(rf"(?P<box>(?:{_WRITTEN})\s*+\{{){_TOKENS}", re.DOTALL)
_BARE = re.compile(r"\\(?:boxed|fbox)[ \t]*+([-+]?\d[\d,.]*(?<![,.])|[A-Za-z](?![A-Za-z]))")

_LONE_BACKSLASH = re.compile(r"(?<!\\)\\(?:\\\\)*+(?!\\)")

_SPACE = r"[\s$&~]|\\{1,2}(?:[()\[\],;:!>\s]|q?quad(?![A-Za-z]))|\\\\|\*\*"
_BULLET = r"\n[ \t]*+[-*\u2022](?=[ \t])"
_WORD = r"(?<![A-Za-z])(?:and|or)(?![A-Za-z])"
_TEXT = (
    r"\\{1,2}(?:text(?:rm|bf|it|normal)?|mbox|mathrm)\s*+\{(?:[\s,;]|\\[ "
    r",;:])*+(?:(?:and|or)[\s,;]*+)?\}"
)
_GAP = re.compile(
    rf"(?:{_BULLET}|{_TEXT}|{_SPACE}|[,;\uff0c\uff1b\u3001]|{_WORD})*+", re.IGNORECASE
)

_GREEK = (
    r"\\(?:(?:var)?(?:epsilon|theta|phi|rho|sigma)|alpha|beta|gamma|delta|zeta|eta|kappa|lambda|mu|nu|xi|pi|tau|chi|psi"
    r"|omega|ell|Gamma|Delta|Theta|Lambda|Sigma|Phi|Psi|Omega)(?![A-Za-z])"
)
_NAME = (
    rf"(?:\\angle\s*)?(?:[A-Z]{{2,3}}|[A-Za-z]|{_GREEK})'{{0,3}}"
    r"[\u2080-\u2089]{0,3}(?:_(?:\w+|\{\w+\}))?(?:\(\w{1,3}\))?"
)
_NAMED = re.compile(
    rf"(?<![\w\\}})\]^_.'])({_NAME})(?:[\s&]|\\[,;: ])*+=(?:[\s$&*]|\\{{1,2}}[(\[,;: ])*+$"
)
_NAME_WINDOW = 64  # characters before a box in which its name is looked for


class Box(NamedTuple):
    """A box: the start and end of its command, and the start and end of its content."""

    start: int
    end: int
    inside: tuple[int, int]


class Boxed(NamedTuple):
    """The answer of a run of boxes, "" if there is none, and the start and end of the run."""

    start: int
    end: int
    answer: str


NOT_BOXED = Boxed(-1, -1, "")


def braced(text: str) -> list[Box]:
    """Find the boxes with balanced braces that are not inside another such box, in order."""
    if "oxed" not in text and "fbox" not in text:
        return []
    # The start of each command, -1 for no box, and of its content.
    open_braces: list[tuple[int, int]] = []
    boxes: list[Box] = []
    for token in _TOKEN.finditer(text):
        kind = token.lastgroup
        if kind == "box":
            open_braces.append((token.start(), token.end()))
        elif kind == "open":
            open_braces.append((-1, token.end()))
        elif kind == "close" and open_braces:
            start, inside = open_braces.pop()
            if start >= 0:
                while boxes and boxes[-1].start > start:  # boxes inside this one
                    boxes.pop()
                boxes.append(Box(start, token.end(), (inside, token.start())))
    return boxes


def bare(text: str) -> list[Box]:
    r"""Find the boxes without braces, `\boxed 5`."""
    return [Box(box.start(), box.end(), box.span(1)) for box in _BARE.finditer(text)]


def answer_of(text: str, boxes: Sequence[Box]) -> Boxed:
    """Return the answer of the last run of boxes that are not all empty: the content of one, or a
    list of several."""
    run: list[tuple[Box, str]] = []  # the last box first
    for box in reversed(boxes):
        if run and not _is_joined(text, box, run[-1][0]):
            if any(content for _, content in run):
                break
            run = []
        run.append((box, _content(text, box)))
    filled = [(box, content) for box, content in reversed(run) if content]
    if not filled:
        return NOT_BOXED
    first, answer = filled[0]
    last, _ = filled[-1]
    if len(filled) > 1:
        answer = _listed(text, filled)
    return Boxed(first.start, last.end, answer)


def _is_joined(text: str, box: Box, after: Box) -> bool:
    """Return whether only separators, and the name of the later one, are between two boxes."""
    following = _name(text, box.end, after)
    start = following.start() if following else after.start
    return _GAP.fullmatch(text, box.end, start) is not None


def _name(text: str, start: int, box: Box) -> re.Match[str] | None:
    r"""Match the name that a box assigns a value to, as in `x = \boxed{1}`, from a place on."""
    first = max(start, box.start - _NAME_WINDOW)
    if "=" not in text[first : box.start]:
        return None
    return _NAMED.search(text, first, box.start)


def _listed(text: str, run: Sequence[tuple[Box, str]]) -> str:
    """Join the contents of a run to one answer, by name if each box has one and they differ."""
    found: list[tuple[str, str]] = []
    before = 0
    for box, content in run:
        name = _name(text, before, box)
        found.append((name[1] if name else "", content))
        before = box.end
    named = dict.fromkeys(found)  # each once
    names = {name for name, _ in named}
    if len(names) > 1 and "" not in names:
        return ", ".join(f"{name} = {content}" for name, content in named)
    return ", ".join(dict.fromkeys(content for _, content in named))


def _content(text: str, box: Box) -> str:
    """Return the content of a box, without any second escaping."""
    content = text[slice(*box.inside)]
    command = text[box.start : box.inside[0]]
    if command.count("\\") in (2, 4):
        content = _unescaped(content)
    # A line break, or half of an escaped space, means nothing at the end.
    return content.strip().rstrip("\\").rstrip()


def _unescaped(content: str) -> str:
    """Halve the backslashes of a box that was escaped twice: they only occur in pairs."""
    if _LONE_BACKSLASH.search(content):
        return content
    return content.replace("\\\\", "\\")
