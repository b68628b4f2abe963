"""Exact comparison of parsed answers, for use inside worker processes: any of this may run for ever
or fill the memory.

math-verify rounds to six places and chops what is below 1e-15, so that 1/2^99 equals 1/2^98. Here
numbers are compared by their exact difference: as rationals, otherwise by interval-checked
evaluation of the difference, which is reliable for telling two numbers apart. Two numbers that
agree in DIGITS significant digits are called equal. All other expressions are math-verify's, with
so many digits in place of its few.
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
    """Tell whether two parsed numbers are equal; None if one is no plain number (free symbols,
    infinity, percent)."""
    a, b = _number(gold), _number(answer)
    if a is None or b is None:
        return None
    if a.is_Rational and b.is_Rational:
        return bool(a == b)
    return _is_zero(a - b)


def equations_equal(gold: Any, answer: Any) -> bool | None:
    """Tell whether two polynomial equations are the same but for a factor; None for anything
    else."""
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
    r"""Tell whether two expressions have the same value at random points where both are real.

    Symbolic rules hold for complex values, where `\sqrt{1/n}` and `1/\sqrt n` differ. The points are negative too, so
    that |x| is not x.
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
        # All positive first, then of any signs; small values and large ones.
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
    """Tell whether a number rounded to so many places is the decimal, at a half either way.

    exact: a parsed number or a Fraction. cut: it must be irrational, and may also be cut off in
    place of rounded.
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
    """Return the exact value of an expression without symbols; decimals are rationals, a lone i the
    imaginary unit."""
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
        if isinstance(part, Float) and private.precision(part) <= 1:  # no digit of it is known
            continue
        if not (isinstance(part, Float) or part.is_Rational):
            return None
        if part != 0:
            return False
    return True
