r"""Degrees in radians, and arguments of functions in parentheses, for math-verify.

It reads `30^\circ` as 30, and `\ln 2 \cdot 3` as the logarithm of 6.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

DEGREE = r"^\circ"
_FUNCTIONS = r"(?:arc)?(?:sin|cos|tan|cot)h?|sec|csc|ln|lg|log|exp"
_OF_ANGLES = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_ANGLE = re.compile(
    r"(\\frac\s*\{[^{}]*\}\s*\{[^{}]*\}|\([^()]*\)|\d+(?:\.\d+)?|\\[a-z]+|[A-Za-z])\s*\^\\circ"
)
_UNBRACKETED = re.compile(
    rf"(\\(?:{_FUNCTIONS})(?![A-Za-z])(?:\s*[\^_]\s*(?:\{{[^{{}}]*\}}|\w))*)"
    r"\s*((?:\\(?:frac\s*\{[^{}]*\}\s*\{[^{}]*\}|sqrt\s*\{[^{}]*\}|alpha|beta|gamma|delta|theta|phi|psi|omega|pi|lambda|mu|rho)"
    r"|\d+(?:\.\d+)?|[A-Za-z]|\^\s*(?:\{[^{}]*\}|\w)|\s)+?)\s*(?=\\(?:cdot|times)(?![A-Za-z])|\*|/\s*\\[a-z]|(?<!\\pi)(?<!\\pi\s)/\s*\()"
)


def with_arguments(text: str) -> str:
    r"""Put the argument of a function into parentheses before a product or a quotient:
    `\ln 2\cdot 3` becomes `\ln(2)\cdot 3`, `\ln 2/(x+1)` becomes `\ln(2)/(x+1)`.

    `\cos\pi/(n+1)` stays the cosine of a fraction of `\pi`."""
    return _UNBRACKETED.sub(r"\1(\2)", text)


def readings(gold: str, answer: str) -> Iterator[tuple[str, str]]:
    r"""Yield the pairs to compare for two answers: with degrees as a unit, and as `\pi/180`.

    As a unit degrees are dropped, except in an argument of a function. They become radians if only
    one side has them.
    """
    degrees = DEGREE in gold, DEGREE in answer
    if not any(degrees):
        yield gold, answer
        return
    inside = any(_OF_ANGLES.search(text) and DEGREE in text for text in (gold, answer))
    if not inside:
        yield gold.replace(DEGREE, ""), answer.replace(DEGREE, "")
    if inside or not all(degrees):
        yield _in_radians(gold), _in_radians(answer)


def _in_radians(text: str) -> str:
    return _ANGLE.sub(r"(\\frac{\1\\pi}{180})", text)
