"""Exact comparison of parsed answers, for worker processes only: it may run forever or fill the
memory.

math-verify rounds to six places and drops values below 1e-15, so that 1/2^99 equals 1/2^98. Here
numbers are compared by their exact difference: as rationals, otherwise by interval-checked
evaluation of the difference, which reliably separates two numbers. Two numbers that agree in DIGITS
significant digits count as equal. All other expressions are compared by math-verify, with this many
digits instead of its few.
"""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

from sympy import (
    Abs,
    Derivative,
    Eq,
    Expr,
    Float,
    GeneratorsNeeded,
    I,
    Integral,
    Limit,
    Max,
    Min,
    Mod,
    Poly,
    PolynomialError,
    Product,
    Rational,
    Sum,
    UnevaluatedExpr,
    acos,
    acot,
    asin,
    atan,
    ceiling,
    floor,
    nan,
    oo,
    zoo,
)
from sympy.core.function import AppliedUndef

from g2d_jax.runtime import private

DIGITS = 300
MOST_SYMBOLS = 6
POINTS = 16
"""Points at which two functions are compared; at a quarter of them both must be real."""
_OPERATORS = (AppliedUndef, Derivative, Integral, Limit, Product, Sum, UnevaluatedExpr)
_IN_PIECES = (Abs, Max, Min, Mod, floor, ceiling, asin, acos, atan, acot)


def numbers_equal(gold: Any, answer: Any) -> bool | None:
    """Return whether two parsed numbers are equal; None if one is not a plain number (free symbols,
    infinity, percent)."""
    a, b = _number(gold), _number(answer)
    if a is None or b is None:
        return None
    if a.is_Rational and b.is_Rational:
        return bool(a == b)
    return _is_zero(a - b)


def equations_equal(gold: Any, answer: Any) -> bool | None:
    """Return whether two polynomial equations are the same up to a factor; None for any other
    input."""
    if not (isinstance(gold, Eq) and isinstance(answer, Eq)):
        return None
    if not all(isinstance(side, Expr) for side in (*gold.args, *answer.args)):
        return None
    try:
        a, b = (Poly(_exact(side.lhs - side.rhs).doit()) for side in (gold, answer))
    except (PolynomialError, GeneratorsNeeded):
        return None
    are_rational = all(value.is_Rational for value in (*a.coeffs(), *b.coeffs()))
    if a.gens != b.gens or a.is_zero or b.is_zero or not are_rational:
        return None
    return bool(a.monic() == b.monic()) or None


def same_function(gold: Any, answer: Any) -> bool:
    r"""Return whether two expressions have the same value at random points where both are real.

    Symbolic rules hold for complex values, for which `\sqrt{1/n}` and `1/\sqrt n` differ. Some
    points are negative, so that |x| is not x.
    """
    if not (isinstance(gold, Expr) and isinstance(answer, Expr)):
        return False
    if any(side.has(*_OPERATORS, *_IN_PIECES) for side in (gold, answer)):
        return False
    symbols = sorted(gold.free_symbols, key=str)
    if not 0 < len(symbols) <= MOST_SYMBOLS or set(symbols) != answer.free_symbols:
        return False
    draw = random.Random(0)
    seen = 0
    for number in range(POINTS):
        # All positive first, then of any sign; small values and large ones.
        largest = draw.choice((400, 4_000, 100_000))
        point = {symbol: Rational(draw.randint(11, largest), 100) for symbol in symbols}
        if number >= POINTS // 4:
            point = {symbol: value * draw.choice((-1, 1)) for symbol, value in point.items()}
        a = _exact(gold).xreplace(point).doit()
        b = _exact(answer).xreplace(point).doit()
        if not all(value.is_number and value.evalf(30, maxn=DIGITS).is_real for value in (a, b)):
            continue
        if not _is_zero(a - b):
            return False
        seen += 1
    return seen >= POINTS // 4


def _exact(expr: Any) -> Any:
    """Return an expression with decimals as rationals."""
    return expr.xreplace({atom: Rational(str(atom)) for atom in expr.atoms(Float)})


def rounds_to(exact: Any, decimal: Fraction, places: int, *, cut: bool = False) -> bool:
    """Return whether a number rounded to this many places is the decimal; a half may go either way.

    exact: a parsed number or a Fraction. cut: it must be irrational, and may also be truncated
    instead of rounded.
    """
    number = Rational(exact) if isinstance(exact, Fraction) else _number(exact)
    if number is None or (cut and number.is_Rational):
        return False
    unit = Rational(1, 10**places)
    excess = number - Rational(decimal)
    if decimal <= 0:
        excess = -excess
    if not excess.is_Rational:
        excess = excess.evalf(30, maxn=DIGITS)
    if not excess.is_real or excess < -unit / 2:
        return False
    return bool(excess < unit if cut else excess <= unit / 2)


def _number(expr: Any) -> Expr | None:
    """Return the exact value of an expression without symbols; decimals become rationals, a lone i
    the imaginary unit."""
    if not isinstance(expr, Expr) or expr.has(UnevaluatedExpr):
        return None
    symbols = expr.free_symbols
    if symbols and {symbol.name for symbol in symbols} != {"i"}:
        return None
    exact = _exact(expr).xreplace(dict.fromkeys(symbols, I)).doit()
    if not isinstance(exact, Expr) or exact.has(nan, zoo, oo) or not exact.is_number:
        return None
    return exact


def _is_zero(difference: Expr) -> bool | None:
    value = difference.evalf(30, maxn=DIGITS)
    if not value.is_number:
        return None
    for part in value.as_real_imag():
        if isinstance(part, Float) and private.precision(part) <= 1:  # none of its digits is known
            continue
        if not (isinstance(part, Float) or part.is_Rational):
            return None
        if part != 0:
            return False
    return True
