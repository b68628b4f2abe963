r"""Evaluate the numbers that an answer is made of, at one point of its variables: if they are far apart, it is wrong.

Most wrong answers are: `15x - 80` beside 17, `2\sqrt{5}` beside `\frac{4}{3}`, `(2,4)` beside 120. Nothing is decided
here between answers that are close, or in any notation beyond plain arithmetic. Bounded in time and depth.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterator

from g2d_jax.rewards.lists import CLOSING, NAME, OPENING

MAX_CHARS = 300
_DEEPEST = 20
_LARGEST_EXPONENT = 64
_FAR = 0.1
"""Relative difference beyond which no rounding makes one number of two."""

_TOKEN = re.compile(
    r"\s*(?:(\d+(?:\.\d+)?)|(\\(?:frac|sqrt|pi|infty|cdot|times|pm|cup)(?![A-Za-z])|\\\\|\\[{}])"
    r"|([A-Za-z](?:_(?:\w|\{\w+\}))?)(?![A-Za-z])|([-+*/^(){}\[\],;&]))"
)
_NAMED = re.compile(rf"{NAME}\s*(?:=|\\in(?![A-Za-z]))")
_MATRIX = re.compile(r"\\(?:begin|end)\s*\{[bpvBV]?matrix\}")
_THOUSANDS = re.compile(r"\d,\s*\d{3}(?!\d)")
_SEPARATORS = frozenset((",", ";", "&", "\\\\", "\\cup"))


class _Unknown(Exception):
    """A notation that is not plain arithmetic."""


def far_apart(gold: str, answer: str) -> bool:
    """Whether two cleaned answers differ for certain: one has a number that is far from all of the other's."""
    a, b = values(gold), values(answer)
    return bool(a and b) and (_some_alone(a, b) or _some_alone(b, a))


def _some_alone(numbers: list[complex], others: list[complex]) -> bool:
    return any(all(abs(x - y) > _FAR * max(abs(x), abs(y)) for y in others) for x in numbers)


def values(cleaned: str) -> list[complex]:
    r"""The numbers of a cleaned answer: elements of a list, a tuple or a matrix, ends of intervals, both of `\pm`.

    [] for anything that is not read. Variables have the same value in every answer; i is the imaginary unit.
    """
    text = _MATRIX.sub(" , ", cleaned)
    if len(text) > MAX_CHARS or _THOUSANDS.search(text):
        return []
    if named := _NAMED.match(text):
        text = text[named.end() :]
    try:
        tokens = list(_tokens(text))
        return [
            number
            for element in _elements(tokens)
            for sign in ((1, -1) if "\\pm" in element else (1,))
            for number in [_Reader(element, sign).whole()]
        ]
    except (_Unknown, ArithmeticError, ValueError):
        return []


def _tokens(text: str) -> Iterator[str]:
    at, text = 0, text.replace("^\\circ", "").rstrip()
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            raise _Unknown
        at = token.end()
        yield token[token.lastindex or 0]


def _elements(tokens: list[str]) -> Iterator[list[str]]:
    """What lies between separators, without brackets that enclose several elements."""
    element: list[str] = []
    for token in [*tokens, ","]:
        if token not in _SEPARATORS:
            element.append(token)
            continue
        excess = sum((t in OPENING) - (t in CLOSING) for t in element)
        while excess > 0 and element[0] in OPENING:
            element, excess = element[1:], excess - 1
        while excess < 0 and element[-1] in CLOSING:
            element, excess = element[:-1], excess + 1
        if element:
            yield element
        element = []


class _Reader:
    """Reads one element from left to right. sign: what `\\pm` stands for."""

    def __init__(self, tokens: list[str], sign: int) -> None:
        self.tokens, self.sign, self.at, self.depth = tokens, sign, 0, 0

    def whole(self) -> complex:
        value = self.sum()
        if self.at < len(self.tokens):
            raise _Unknown
        return value

    @property
    def next(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self) -> str:
        token = self.next
        self.at += 1
        return token

    def sum(self) -> complex:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise _Unknown
        signs = {"+": 1, "-": -1, "\\pm": self.sign}
        total = (signs[self.take()] if self.next in signs else 1) * self.product()
        while self.next in signs:
            total += signs[self.take()] * self.product()
        self.depth -= 1
        return total

    def product(self) -> complex:
        total, divided, number = self.power(), False, self.tokens[self.at - 1][0].isdigit()
        while self.next:
            if self.next in ("*", "\\cdot", "\\times"):
                self.take()
                total *= self.power()
            elif self.next == "/":
                self.take()
                total, divided = total / self.power(), True
            elif self.next[0].isalpha() or self.next in ("(", "{", "[", "\\frac", "\\sqrt", "\\pi"):
                if divided or (number and self.next == "\\frac"):  # 1/2x; 3\frac{1}{2}
                    raise _Unknown
                total *= self.power()
            else:
                break
            number = False
        return total

    def power(self) -> complex:
        base = self.atom()
        if self.next != "^":
            return base
        self.take()
        exponent = self.atom()
        if abs(exponent) > _LARGEST_EXPONENT:
            raise _Unknown
        return base**exponent

    def atom(self) -> complex:
        token = self.take()
        if token in ("(", "{", "["):
            value = self.sum()
            if self.take() != {"(": ")", "{": "}", "[": "]"}[token]:
                raise _Unknown
            return value
        if token == "\\frac":
            above = self.group()
            return above / self.group()
        if token == "\\sqrt":
            degree = self.atom() if self.next == "[" else 2
            return self.group() ** (1 / degree)
        if token in ("\\pi", "\\infty", "i", "e"):
            return {"\\pi": math.pi, "\\infty": 1e30, "i": 1j, "e": math.e}[token]
        if token[:1].isdigit():
            return complex(float(token))
        if token[:1].isalpha():
            return complex(1.1 + zlib.crc32(token.encode()) % 10_007 / 5_000)
        raise _Unknown

    def group(self) -> complex:
        if self.next != "{":
            raise _Unknown
        return self.atom()
