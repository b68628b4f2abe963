r"""Inequalities and set-builders as intervals: `x < -1 \text{ or } x > 1` becomes
`(-\infty,-1)\cup(1,\infty)`.

Text in, text out: bounds stay the same, and only plain numbers are compared in size. Linear, safe on
untrusted text.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from g2d_jax.rewards import expression, names
from g2d_jax.rewards.normalise import COMMAND, clean, plain_text

MAX_CHARS = 400

_RELATION = re.compile(
    r"(<|>|\\(?:lt|gt|leqslant|leq|le|geqslant|geq|ge|neq|ne|in|notin)(?![A-Za-z])|=)"
)
_SPELLED = {
    r"\lt": "<",
    r"\gt": ">",
    r"\le": "<=",
    r"\ge": ">=",
    r"\ne": "!=",
    r"\neq": "!=",
    r"\in": "in",
}
_MIRROR = str.maketrans("<>", "><")
_MEMBER = re.compile(rf"({expression.NAME})\s*\\in(?![A-Za-z])\s*([(\[\\].*)", re.DOTALL)
_VARIABLE = re.compile(r"(?!(?:e|i|\\pi|\\infty|\\emptyset)\Z)(?:[A-Za-z]|\\[a-z]+)(?:_\{?\w+\}?)?")
_BUILDER = re.compile(
    r"(?:[^={}<>|]{1,60}=\s*)?\\\{\s*(?P<name>(?:[A-Za-z]|\\[a-z]+)(?:_\{?\w+\}?)?)\s*(?:\\in\s*(?P<domain>[^|:]{1,40}?))?\s*"
    r"(?:\\mid(?![A-Za-z])|\\vert(?![A-Za-z])|\||:)\s*(?P<condition>.+)\\\}",
    re.DOTALL,
)
_BARS = re.compile(r"\|\s*([A-Za-z])\s*\|\s*(<|>|\\[lg]eq?|\\[lg]t)(?![A-Za-z])\s*([^<>=|]+)")
_BOTH = re.compile(r"(?<![A-Za-z])and(?![A-Za-z])|\\land|\\wedge")
_OR = re.compile(
    r",?\s*(?:\\text\s*\{\s*or\s*\}|(?<![A-Za-z\\])or(?![A-Za-z])|\\lor(?![A-Za-z])|\\vee(?![A-Za-z]))\s*"
)
_AND = re.compile(
    r"\s*(?:,?\s*\\text\s*\{\s*and\s*\}|,?\s*(?<![A-Za-z\\])and(?![A-Za-z])|\\land(?![A-Za-z])|\\wedge(?![A-Za-z])|[,;])\s*"
)
_REALS = re.compile(r"\\*(?:(?:mathbf|mathbb|text)\{R\}|R)")
_CUP = re.compile(r"\s*\\cup(?![A-Za-z])\s*")
_INFINITE = {r"\infty": math.inf, r"+\infty": math.inf, r"-\infty": -math.inf}
_INTERVAL = re.compile(r"([(\[])([^,]+),([^,]+)([)\]])")
_BELOW = r"-\infty", False
_ABOVE = r"\infty", False
_IN_WORDS = dict.fromkeys(
    ["no solution", "no solutions", "no real solution", "no real solutions", "empty set"],
    r"\emptyset",
) | dict.fromkeys(["all real numbers", "all reals", "set of all real numbers"], r"\mathbb{R}")
"""Sets by their names."""
_Set: TypeAlias = tuple[str, bool, str]
"""The variable, whether a set-builder binds it, and the intervals."""
_Bound: TypeAlias = tuple[str, bool]
"""An end of an interval, and whether it belongs to the set."""
_Statement: TypeAlias = tuple[str, str]
"""A relation and the text after it, of the variable before it."""


@dataclass
class _Range:
    """The part of the line that several clauses leave: bounds, excluded points, and a single
    point."""

    low: _Bound | None = None
    high: _Bound | None = None
    without: list[str] = field(default_factory=list)
    point: str = ""


class _Unread(Exception):
    """The text is not a set of this kind."""


def as_sets(gold: str, answer: str) -> tuple[str | None, str | None]:
    r"""Return two answers as intervals united by `\cup` if they state inequalities or build sets;
    else None.

    A bare inequality counts as the set of its solutions if the other side is a set, or an
    inequality of the same variable.
    """
    mine, theirs = _read(gold), _read(answer)
    return _compared_with(mine, theirs, answer), _compared_with(theirs, mine, gold)


def _compared_with(mine: _Set | None, theirs: _Set | None, other: str) -> str | None:
    """Return the intervals of one side if they count with the other side, whose text is `other`."""
    if mine is None:
        return None
    name, built, written = mine
    if built or (theirs is None and is_set(other)):
        return written
    if theirs and (theirs[1] or theirs[0] == name):
        return written
    return None


def differ(gold: str, answer: str) -> bool:
    """Return whether one of two cleaned answers is an inequality and the other a mere value, or
    both are intervals with different brackets."""
    for one, other in ((gold, answer), (answer, gold)):
        states = names.ORDER.search(one) and not re.search(r"=|\\approx", one)
        if states and not (_RELATION.search(other) or is_set(other)):
            return True
    a, b = _INTERVAL.fullmatch(gold), _INTERVAL.fullmatch(answer)
    return a is not None and b is not None and a.group(1, 4) != b.group(1, 4)


def is_set(text: str) -> bool:
    """Return whether an answer is written as a set, an interval or a union of them."""
    cleaned = clean(text)
    cleaned = re.sub(rf"\A{expression.NAME}\s*(?:=|\\in(?![A-Za-z]))\s*", "", cleaned)
    if cleaned in (r"\emptyset", r"\mathbb{R}"):
        return True
    is_bracketed = cleaned.startswith(("(", "[", r"\{")) and cleaned.endswith((")", "]", r"\}"))
    return is_bracketed and ("," in cleaned or cleaned.startswith(r"\{"))


def from_words(text: str, other: str) -> str:
    r"""Return a cleaned answer, `\text{no solution}` as `\emptyset` if the other is a set or its
    name in words."""
    written = _in_words(text)
    return written if written and (_in_words(other) or is_set(other)) else text


def _in_words(cleaned: str) -> str:
    if " " not in cleaned:
        return ""
    return _IN_WORDS.get((plain_text(cleaned) or "").removeprefix("the "), "")


def can_be_read(text: str) -> bool:
    """Return whether a text is a set-builder or inequalities that `as_sets` reads."""
    return _read(text) is not None


def _read(text: str) -> _Set | None:
    """Read inequalities or a set-builder; None for any other text."""
    # Most answers have no relation and end here; other scripts may have one as a single character.
    if len(text) > MAX_CHARS or (text.isascii() and not (_RELATION.search(text) or "|" in text)):
        return None
    cleaned = clean(text, joined=False)
    if _RELATION.match(cleaned) and not cleaned.startswith("="):
        cleaned = f"x {cleaned}"  # "> 3", of any variable
    builder = _BUILDER.fullmatch(cleaned)
    try:
        if builder is None:
            name, written = _conditions(cleaned, bound="")
            return name, False, written
        if not _REALS.fullmatch((builder["domain"] or "R").strip()):
            return None
        name, written = _conditions(builder["condition"].strip(), bound=builder["name"])
        return name, True, written
    except _Unread:
        return None


def member(text: str) -> tuple[str, str] | None:
    r"""Split `x \in (1, 2)` into the name and the set."""
    found = _MEMBER.fullmatch(text)
    if found and names.is_name(found[1]):
        return found[1], found[2]
    return None


def intervals(text: str) -> list[tuple[str, str, str]] | None:
    r"""Split a union of intervals and finite sets into (brackets, low, high); sets have their
    elements as low.

    None for any other text, including a set alone.
    """
    parts = []
    for part in _CUP.split(text.strip()):
        found = _INTERVAL.fullmatch(part)
        if found and found[2].count("(") == found[2].count(")"):
            parts.append((found[1] + found[4], found[2].strip(), found[3].strip()))
        elif part.startswith("\\{") and part.endswith("\\}"):
            parts.append(("{}", part, ""))
        else:
            return None
    if len(parts) == 1 and parts[0][0] == "{}":
        return None
    return parts


def _conditions(text: str, bound: str) -> tuple[str, str]:
    """Read alternatives; bound: the variable, "" if the first clause names it. Return the variable
    and the set."""
    name = bound
    ranges = []
    text = _without_bars(text)
    for alternative in _OR.split(text):
        clauses = []
        known = name
        for clause in filter(None, _AND.split(alternative)):
            variable, statements = _clause(clause, known)
            name = name or variable
            if variable != name:
                raise _Unread
            clauses.append(statements)
        if not clauses:
            raise _Unread
        found = list(map(_narrowed, clauses))
        if bound or _BOTH.search(alternative) or not _outward(found):
            found = [_narrowed(list(itertools.chain(*clauses)))]
        ranges.extend(found)
    if all(part.point for part in ranges):
        raise _Unread  # values, not inequalities: lists compare them
    return name, "\\cup".join(map(_written, ranges))


def _without_bars(text: str) -> str:
    """Rewrite `|x| < c` and `|x| > c` without bars."""
    found = _BARS.fullmatch(text)
    if found is None:
        return text
    name, sign, bound = found.groups()
    if not _SPELLED.get(sign, sign).startswith(">"):
        return f"-({bound}) {sign} {name} {sign} {bound}"
    return f"-({bound}) {sign} {name} or {name} {sign} {bound}"


def _clause(text: str, name: str) -> tuple[str, list[_Statement]]:
    r"""Read one clause such as `1 < x \le 2`, `x \ne 3`; return its variable and the statements
    about it."""
    parts = list(map(str.strip, _RELATION.split(text)))
    terms = parts[0::2]
    signs = [_SPELLED.get(sign, sign) for sign in parts[1::2]]
    if not 1 <= len(signs) <= 2 or not all(terms):
        raise _Unread
    places = []
    for i, term in enumerate(terms):
        # only the middle term of a < x < b counts as the variable
        may_be = len(signs) == 1 or i == 1
        if may_be and (term == name or (not name and _VARIABLE.fullmatch(term))):
            places.append(i)
    if len(places) != 1:
        raise _Unread
    (place,) = places
    variable = terms.pop(place)
    if any(_mentions(term, variable) for term in terms):
        raise _Unread
    statements = []
    for i, (sign, value) in enumerate(zip(signs, terms, strict=True)):
        is_after = i == place  # the variable is before this sign
        if sign == "in" and is_after and _REALS.fullmatch(value):
            continue
        statements.append((sign if is_after else sign.translate(_MIRROR), value))
    return variable, statements


def _narrowed(statements: Sequence[_Statement]) -> _Range:
    """Return the range in which all statements hold."""
    found = _Range()
    for sign, value in statements:
        if sign in (">", ">=") and found.low is None:
            found.low = value, sign == ">="
        elif sign in ("<", "<=") and found.high is None:
            found.high = value, sign == "<="
        elif sign == "!=":
            found.without.append(value)
        elif sign == "=" and len(statements) == 1:
            found.point = value
        else:
            raise _Unread
    return found


def _outward(found: Sequence[_Range]) -> bool:
    """Return whether adjacent statements, `x<-1, x>1`, exclude each other: then they are
    alternatives."""
    if len(found) < 2 or any(part.point for part in found):
        return len(found) > 1
    first, second, *others = found
    high, low = first.high or second.high, first.low or second.low
    if others or high is None or low is None:
        return False
    last, begin = _number(high[0]), _number(low[0])
    return last is not None and begin is not None and last <= begin


def _written(part: _Range) -> str:
    """Return a range as intervals."""
    if part.point:
        return f"\\{{{part.point}\\}}"
    low, closed_low = part.low or _BELOW
    high, closed_high = part.high or _ABOVE
    opening = "[" * closed_low or "("
    gaps = "".join(f",{point})\\cup({point}" for point in part.without)
    closing = "]" * closed_high or ")"
    return f"{opening}{low}{gaps},{high}{closing}"


def _number(text: str) -> float | None:
    """Return the value of a plain real number."""
    if text in _INFINITE:
        return _INFINITE[text]
    if re.search(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])", COMMAND.sub(" ", text)):
        return None
    found = expression.values(text)
    if len(found) != 1 or found[0].imag:
        return None
    return found[0].real


def _mentions(term: str, variable: str) -> bool:
    """Return whether a term contains the variable."""
    if variable.startswith("\\"):
        return re.search(re.escape(variable) + r"(?![A-Za-z])", term) is not None
    bare = COMMAND.sub(" ", term)
    return re.search(rf"(?<![A-Za-z]){re.escape(variable)}(?![A-Za-z])", bare) is not None
