r"""Evaluate plain LaTeX arithmetic, exactly where it is rational, and tell answers that are far
apart.

Most wrong answers are: `15x - 80` beside 17, `2\sqrt{5}` beside `\frac{4}{3}`, `(2,4)` beside 120.
An expression is rewritten as Python's, whose parser gives the tree; nothing but arithmetic in it is
computed. Bounded in length and in the size of numbers.
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
"""`x`, `x_1`, `f(x)`: what an answer gives a value to, as a pattern."""

MAX_CHARS = 300
_LARGEST_POWER = 3000  # bits
_FAR = 0.1
"""Relative difference beyond which no rounding makes one number of two."""

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
    # what stands side by side is multiplied
    (
        r"(?<=[0-9A-Za-z\u03c0)])\s*(?=[(A-Za-z\u03c0])",
        "@",
    ),
    (r"\^", "**"),
    (r",(?:\s*,)+", ","),
)
_PLAIN = re.compile(
    r"[-+]?\s*(?:\\\$)?\d[\d.,]*|[-+]?\\frac\s*\{\d+\}\s*\{\d+\}|[A-Za-z]|\d+\s*_\s*\{?\d+\}?"
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
    """Tell whether two cleaned answers differ for certain: one has a number that is far from all of
    the other's.

    Degrees may be a number or an angle, which are both to be far. Unions are not compared.
    """
    if "\\cup" in gold or "\\cup" in answer:
        return _PLAIN.fullmatch(gold) is not None or _PLAIN.fullmatch(answer) is not None
    a, b = values(gold), values(answer)
    if not (a and b):
        return False
    is_apart = _some_alone(a, b) or _some_alone(b, a)
    if not is_apart or ("^\\circ" in gold) == ("^\\circ" in answer):
        return is_apart
    factor = math.pi / 180 if "^\\circ" in gold else 180 / math.pi
    a = [x * factor for x in a]
    return _some_alone(a, b) or _some_alone(b, a)


def _some_alone(numbers: list[complex], others: list[complex]) -> bool:
    return any(_is_alone(number, others) for number in numbers)


def _is_alone(number: complex, others: list[complex]) -> bool:
    return all(_are_far(number, other) for other in others)


def _are_far(x: complex, y: complex) -> bool:
    return abs(x - y) > _FAR * max(abs(x), abs(y))


def values(cleaned: str) -> list[complex]:
    r"""Evaluate the numbers of an answer: elements of a list, a tuple or a matrix, ends of
    intervals, both of `\pm`.

    [] for anything that is not read. Variables have the same value in every answer; i is the
    imaginary unit.
    """
    if len(cleaned) > MAX_CHARS or _THOUSANDS.search(cleaned):
        return []
    text = _NAMED.sub("", cleaned).removesuffix("^\\circ").strip()
    if text.rfind("\\begin") > 0:  # what stands before a matrix is no element of a list
        return []
    try:
        found = evaluate(text.replace("\\pm", "+"))
        if "\\pm" in text:
            found += evaluate(text.replace("\\pm", "-"))
        return list(map(complex, found))
    except (ValueError, ArithmeticError):
        return []


def evaluate(latex: str) -> list[Any]:
    """Evaluate the numbers that a text consists of: Fractions where they are rational, else floats
    or complex.

    Raises ValueError or ArithmeticError for anything but plain arithmetic of them.
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
    """Write a number as Python does: without leading zeros, decimals as fractions."""
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
        # A variable is a number that follows from its name, so that `x + 1` has the same value in
        # two answers and another one than `y + 1`; between 1.1 and 3.1 powers stay small.
        case ast.Name(id=name):
            return _CONSTANTS.get(name, 1.1 + zlib.crc32(name.encode()) % 10_007 / 5_000)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _number(operand)
        case ast.BinOp(left=ast.BinOp(op=ast.Div()), op=ast.MatMult()):
            raise ValueError("1/2x is two things")
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_number(left), _number(right))
        case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
            is_known = not any(isinstance(part, ast.Name) for part in ast.walk(left))
            return _root(_number(left), _number(right), is_known=is_known)
        case ast.BinOp(left=left, op=sign, right=right):
            return _OPERATORS[type(sign)](_number(left), _number(right))
    raise ValueError("no arithmetic")


def _root(base: Any, degree: Any, *, is_known: bool) -> Any:
    """Compute a root, the real one of a negative number where the degree is odd. is_known: the base
    has no variables, whose sign nothing says."""
    is_real = is_known and isinstance(base, Fraction | float)
    if is_real and base < 0 and degree % 2 == 1:
        return -_power(-base, 1 / degree)
    return _power(base, 1 / degree)


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, Fraction):
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if bits * abs(exponent) > _LARGEST_POWER:
            raise ValueError("a large number")
    return base**exponent
