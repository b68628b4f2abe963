r"""Filters for the training data of "Bridging Offline and Online RL for LLMs" (arXiv 2506.21495).

NuminaMath (section 3.2): proofs, multiple choice and synthetic sources are left out. The paper
gives no rules; these leave out too much rather than too little. A row counts under the first reason
that applies:

    synthetic           its source is orca_math, synthetic_amc or synthetic_math
    proof               the problem contains prove, disprove, "give a proof", "show that" (demonstrate, verify,
                        establish, justify, deduce that), or the boxed answer states that something is proven
    multiple choice     the problem lists options: (A) … (B) … (C) …, or A … B … C … at the beginnings of lines, or
                        A. … B. … C. … D. …, with . : ) or 、 after the letter; in \textbf, \text or \mathrm or not.
                        Or the answer is an option: A, (A), \textbf{(A)} 5, "A: 5", for A to E
    without an answer   the solution has no \boxed{} with content, and the row has no answer of its own

WildChat (section 3.1): the user's first turn, in any language. Rows that the dataset itself flags,
as a whole or at that turn, are left out: toxic, redacted (personal details were blanked).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from g2d_jax.data.fields import BrokenRow, LeftOut, Values, as_text, find
from g2d_jax.records import Message, Problem

SYNTHETIC = ("orca_math", "synthetic_amc", "synthetic_math")
UNWANTED = (
    "messages",
    "conversation",
    "openai_moderation",
    "detoxify_moderation",
    "hashed_ip",
    "header",
)
"""Columns not kept with a problem: they repeat it, are large, or identify a person."""
_FLAGS = ("toxic", "redacted")
_SHORTEST = 2  # characters of a prompt

_PROOF = re.compile(
    r"\b(?:dis)?prove\b|\b(?:give|write|find|provide) (?:a|the) proof\b"
    r"|\b(?:show|demonstrate|verify|establish|justify|deduce),? that\b",
    re.IGNORECASE,
)
_PROVEN = re.compile(r"\b(?:proof|proved|proven|q\.?e\.?d)\b|\\blacksquare", re.IGNORECASE)
_FONT = re.compile(
    r"\\(?:text(?:bf|it|rm)?|math(?:bf|it|rm)|bf|rm|quad|qquad)(?![a-zA-Z])|\\[ ,;!]|[{}$~*]"
)
_LISTS = (  # labels of options, which must occur in this order
    # In parentheses; not P(A), not "(A) = 0.3".
    [re.compile(rf"(?<![\w\\])\(\s*{letter}\s*\)(?!\s*[=,)+])") for letter in "ABC"],
    [re.compile(rf"^[ \t]*{letter}\s*[.:)．、：]", re.MULTILINE) for letter in "ABC"],
    # Within a line; the first not at the end of a sentence, as in "through A."
    [
        re.compile(r"(?<![A-Za-z(])(?<![A-Za-z]\s)A\s*[.:)．、：]\s*[^\s.]"),
        *(re.compile(rf"(?<![A-Za-z(]){letter}\s*[.:)．、：]\s*[^\s.]") for letter in "BCD"),
    ],
)
_OPTION = re.compile(r"\(\s*[A-E]\s*\)|[A-E]\s*(?:[.:)．、：](?![A-Za-z])|$)")


def filter_numinamath(problem: Problem) -> None:
    """Raise LeftOut for a problem that the module's rules leave out. The problem's subset is the
    row's source."""
    text = problem.prompt
    if not isinstance(text, str):
        text = "\n".join(message["content"] for message in text)
    answer = problem.answer or ""
    if problem.subset in SYNTHETIC:
        raise LeftOut("synthetic")
    if _PROOF.search(text) or _PROVEN.search(answer):
        raise LeftOut("proof")
    if has_options(text) or _OPTION.match(_plain(answer).strip()):
        raise LeftOut("multiple choice")
    if problem.answer is None:
        raise LeftOut("without an answer")


def has_options(text: str) -> bool:
    """Return whether a problem lists options to choose from."""
    plain = _plain(text)
    return any(_in_order(labels, plain) for labels in _LISTS)


def first_turn(values: Values, path: str) -> Message:
    """Return the user's first message of a WildChat row, whose conversation is the field `path`.

    Raises LeftOut for a flagged row, and BrokenRow if there is no such message, or if it is blank
    or one character.
    """
    conversation = find(values, path)[1]
    if not isinstance(conversation, list | tuple):
        raise BrokenRow(f"{path!r} must be a list of messages, got {type(conversation).__name__}")
    turn = next(
        (m for m in conversation if isinstance(m, Mapping) and m.get("role") == "user"), None
    )
    if turn is None:
        raise BrokenRow(f"{path!r} has no user message")
    for flag in _FLAGS:
        if values.get(flag) is True or turn.get(flag) is True:
            raise LeftOut(flag)
    content = as_text(turn.get("content"), f"{path}: content")
    return {"role": "user", "content": long_enough(content, path)}


def long_enough(text: str, path: str) -> str:
    """Return `text`. Raises BrokenRow when it is too short for a prompt."""
    if len(text.strip()) < _SHORTEST:
        raise BrokenRow(f"{path!r} is too short for a prompt: {text.strip()!r}")
    return text


def _plain(text: str) -> str:
    r"""Remove font commands, braces, dollar signs and LaTeX spaces: "$\textbf{(A)}\ 5$" becomes
    "(A) 5"."""
    return _FONT.sub(lambda match: "" if match[0] in "{}$*" else " ", text)


def _in_order(labels: list[re.Pattern[str]], text: str) -> bool:
    position = 0
    for label in labels:
        match = label.search(text, position)
        if match is None:
            return False
        position = match.end()
    return True
