r"""Evaluation of plain LaTeX arithmetic, exact if rational, to find answers that are far apart.

Most wrong answers are: `15x - 80` against 17, `2\sqrt{5}` against `\frac{4}{3}`, `(2,4)` against
120. An expression is rewritten as Python's, whose parser builds the tree; only arithmetic in it is
computed. Length and size of numbers are bounded.
"""

from __future__ import annotations

import ast
import math
import operator
import re
import zlib
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from g2d_jax.rewards.normalise import rules

NAME = r"(?:[A-Za-z]|\\[a-z]+)(?:_\{?\w+\}?|\([a-z]\))?"
"""`x`, `x_1`, `f(x)`: the name that an answer assigns a value to, as a pattern."""

MAX_CHARS = 300
_LARGEST_POWER = 3000  # bits
_FAR = 0.1
"""Relative difference beyond which rounding cannot explain two numbers."""

_NAMED = re.compile(rf"\A{NAME}\s*(?:=|\\in(?![A-Za-z]))")
_THOUSANDS = re.compile(r"\d,\s*\d{3}(?!\d)")
_SEPARATOR = re.compile(r"\\(?:begin|end)\s*\{[bpB]?matrix\}|\\\\|[;&]")
_UNREAD = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{2}|\d_|\d\s*!")  # words, numerals with a base
_INNERMOST = rules(
    (r"([\^_])\s*\{([^{}]*)\}", r"\1(\2)"),
    (r"(\d+)\s*\\frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}", r"(\1+\2//\3)"),
    (r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"((\1)//(\2))"),
    (r"\\sqrt\s*\[([^][{}]*)\]\s*\{([^{}]*)\}", r"((\2)&(\1))"),  # & is for a root
    (r"\\sqrt\s*\{([^{}]*)\}", r"((\1)^(1//2))"),
)
_TO_PYTHON = rules(
    (r"\\?[{[]", "("),
    (r"\\?[]}]", ")"),
    (r"_\((\w+)\)", r"_\1"),
    (r"\\(?:cdot|times)(?![A-Za-z])", "*"),
    (r"\\infty(?![A-Za-z])", "10^30"),
    (r"\\pi(?![A-Za-z])", "\u03c0"),
    (r"(\d+) (\d+)\s*/\s*(\d+)", r"(\1+\2//\3)"),
    (r"(\d)[eE]([-+]?\d+)", r"\1*10^(\2)"),
    # neighbours are multiplied
    (
        r"(?<=[0-9A-Za-z\u03c0)])\s*(?=[(A-Za-z\u03c0])",
        "@",
    ),
    (r"\^", "**"),
    (r",(?:\s*,)+", ","),
)
_DIGITS = re.compile(r"\d+(?:\.\d*)?")
_PYTHON = re.compile("[\\w\u03c0\\s+*/@&().,-]*", re.ASCII)
_CONSTANTS = {"\u03c0": math.pi, "e": math.e, "i": 1j}
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.MatMult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.truediv,  # a/b, as // is \frac{a}{b}
}


def far_apart(gold: str, answer: str) -> bool:
    """Return whether two cleaned answers surely differ: one has a number far from all of the
    other's.

    Unions are not compared, nor degrees with a possible angle in radians.
    """
    a, b = values(gold), values(answer)
    if not (a and b) or "\\cup" in gold + answer or ("^\\circ" in gold) != ("^\\circ" in answer):
        return False
    return any(_is_alone(x, b) for x in a) or any(_is_alone(y, a) for y in b)


def _is_alone(x: complex, others: list[complex]) -> bool:
    """Return whether a number is far from all others."""
    return all(abs(x - y) > _FAR * max(abs(x), abs(y)) for y in others)


def values(cleaned: str) -> list[complex]:
    """Evaluate the numbers of an answer: elements of a list, a tuple or a matrix, ends of intervals.

    [] for input that cannot be read. Variables have the same value in every answer; i is the
    imaginary unit.
    """
    if len(cleaned) > MAX_CHARS or _THOUSANDS.search(cleaned):
        return []
    text = _NAMED.sub("", cleaned).removesuffix("^\\circ").strip()
    if text.rfind("\\begin") > 0:  # text before a matrix is not an element of a list
        return []
    try:
        return list(map(complex, evaluate(text)))
    except (ValueError, ArithmeticError):
        return []


def evaluate(latex: str) -> list[Any]:
    """Evaluate the numbers of a text: Fractions if they are rational, else floats or complex.

    Raises ValueError or ArithmeticError for input beyond plain arithmetic.
    """
    text, before = _SEPARATOR.sub(",", latex), ""
    if _UNREAD.search(text):
        raise ValueError(latex)
    while text != before:
        before = text
        for pattern, replacement in _INNERMOST:
            text = pattern.sub(replacement, text)
    for pattern, replacement in _TO_PYTHON:
        text = pattern.sub(replacement, text)
    text = _DIGITS.sub(_exact, text).strip(" ,")
    if not _PYTHON.fullmatch(text):
        raise ValueError(latex)
    try:
        return list(_elements(ast.parse(text, mode="eval").body))
    except (SyntaxError, MemoryError, RecursionError, LookupError, TypeError) as error:
        raise ValueError(latex) from error


def _exact(number: re.Match[str]) -> str:
    """Rewrite a number for Python: without leading zeros, decimals as fractions."""
    value = str(Fraction(number[0]))
    if "." not in number[0]:
        return value
    return f"({value.replace('/', '//')})"


def _elements(node: ast.expr) -> Iterator[Any]:
    if isinstance(node, ast.Tuple):
        for element in node.elts:
            yield from _elements(element)
    else:
        yield _number(node)


def _number(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int(value)):
            return Fraction(value)
        # The name determines a variable's number: `x + 1` has the same value in two answers, but
        # `y + 1` has another. Between 1.1 and 3.1 powers stay small.
        case ast.Name(id=name):
            return _CONSTANTS.get(name, 1.1 + zlib.crc32(name.encode()) % 10_007 / 5_000)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _number(operand)
        case ast.BinOp(left=ast.BinOp(op=ast.Div()), op=ast.MatMult()):
            raise ValueError("1/2x is ambiguous")
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_number(left), _number(right))
        case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
            base = _number(left)
            if isinstance(base, complex) or base < 0:
                raise ValueError("its root may be the real one")
            return _power(base, 1 / _number(right))
        case ast.BinOp(left=left, op=sign, right=right):
            return _OPERATORS[type(sign)](_number(left), _number(right))
    raise ValueError("not arithmetic")


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, Fraction):
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if bits * abs(exponent) > _LARGEST_POWER:
            raise ValueError("a large number")
    return base**exponent
