r"""Answers of a small grammar, what they say, and random spellings of them in LaTeX.

An answer is a tree of the classes below. `known` tells what it says, in numbers of 60 digits at a
point of its variables; `Writer` spells it at random: order of terms and factors, fractions,
decimals, signs of multiplication, brackets, spaces. Spellings are such as people write and cannot
misread: no `1/2x`, nothing beside `\ln 2` but a sign.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import mpmath

mp = mpmath.mp.clone()
mp.dps = 60
CLOSE = mp.mpf(10) ** -40
VARIABLES = "xyant"
POINT = {
    name: mp.mpf(1) + mp.mpf(random.Random(name).getrandbits(180)) / 2**180 for name in VARIABLES
}
"""Irrational to all purposes, and positive, so that logarithms and roots of them are real."""


@dataclass(frozen=True)
class Number:
    value: Fraction


@dataclass(frozen=True)
class Name:
    """A variable, or pi."""

    name: str


@dataclass(frozen=True)
class Sum:
    terms: tuple[Any, ...]


@dataclass(frozen=True)
class Product:
    factors: tuple[Any, ...]


@dataclass(frozen=True)
class Quotient:
    above: Any
    below: Any


@dataclass(frozen=True)
class Power:
    base: Any
    exponent: Fraction


@dataclass(frozen=True)
class Exponential:
    base: Fraction
    exponent: Any


@dataclass(frozen=True)
class Root:
    index: int
    of: Any


@dataclass(frozen=True)
class Log:
    """base: None for the natural logarithm."""

    base: Fraction | None
    of: Any


@dataclass(frozen=True)
class Trig:
    """Of turns * 2 pi, or of times * a variable."""

    function: str
    factor: Fraction
    variable: str | None


@dataclass(frozen=True)
class Interval:
    """low, high: an expression, or None for infinity."""

    low: Any
    high: Any
    has_low: bool
    has_high: bool


@dataclass(frozen=True)
class Union:
    intervals: tuple[Interval, Interval]


@dataclass(frozen=True)
class Values:
    """A set of numbers, in any order."""

    elements: tuple[Any, ...]


@dataclass(frozen=True)
class Point:
    coordinates: tuple[Any, ...]


@dataclass(frozen=True)
class Assignment:
    """y = an expression in x."""

    value: Any


@dataclass(frozen=True)
class Line:
    """a x + b y + c = 0."""

    a: Fraction
    b: Fraction
    c: Fraction


# --- What an answer says


class NotDefinedError(Exception):
    """An expression has no value, or is outside of the grammar."""


def number(node: Any) -> mpmath.mpf:
    """The value of an expression at POINT."""
    match node:
        case Number(value):
            return mp.mpf(value.numerator) / value.denominator
        case Name(name):
            return mp.pi if name == "pi" else POINT[name]
        case Sum(terms):
            return mp.fsum(map(number, terms))
        case Product(factors):
            return mp.fprod(map(number, factors))
        case Quotient(above, below):
            divisor = number(below)
            _demand(abs(divisor) > CLOSE)
            return number(above) / divisor
        case Power(base, exponent):
            _demand(exponent.denominator == 1 and exponent >= 1)
            return number(base) ** exponent.numerator
        case Exponential(base, exponent):
            _demand(base > 0)
            return number(Number(base)) ** number(exponent)
        case Root(index, of):
            inside = number(of)
            _demand(inside > 0)
            return mp.root(inside, index)
        case Log(base, of):
            inside = number(of)
            _demand(inside > 0 and (base is None or (base >= 2 and base.denominator == 1)))
            return mp.log(inside) if base is None else mp.log(inside) / mp.log(int(base))
        case Trig(function, factor, variable):
            angle = number(Number(factor)) * (2 * mp.pi if variable is None else POINT[variable])
            _demand(function != "tan" or abs(mp.cos(angle)) > CLOSE)
            return getattr(mp, function)(angle)
    raise TypeError(node)


def _demand(condition: bool) -> None:
    if not condition:
        raise NotDefinedError


def known(answer: Any) -> list[Any]:
    """What an answer says, as a list of numbers and of other things that are compared as they
    stand."""
    match answer:
        case Interval(low, high, has_low, has_high):
            ends = [None if end is None else number(end) for end in (low, high)]
            _demand(None in ends or ends[1] - ends[0] > CLOSE)
            return [ends[0] is None, ends[0] or 0, has_low, ends[1] is None, ends[1] or 0, has_high]
        case Union(intervals):
            first, second = map(known, intervals)
            _demand(second[1] - first[4] > CLOSE)  # apart, in this order
            return first + second
        case Values(elements):
            numbers = sorted(map(number, elements))
            _demand(all(b - a > CLOSE for a, b in itertools.pairwise(numbers)))
            return numbers
        case Point(coordinates):
            return [*map(number, coordinates)]
        case Assignment(value):
            return [number(value)]
        case Line(a, b, c):
            _demand(a != 0 and b != 0)
            return [number(Number(b / a)), number(Number(c / a))]
    return [number(answer)]


def differs(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Tell whether two lists of `known` differ: by more than no digit of theirs explains."""
    return len(first) != len(second) or any(
        abs(a - b) > CLOSE for a, b in zip(first, second, strict=True)
    )


def numbers_of(node: Any) -> Iterator[Fraction]:
    """All numbers of a tree, in its order."""
    if isinstance(node, Fraction):
        yield node
    elif isinstance(node, tuple):
        for item in node:
            yield from numbers_of(item)
    elif dataclasses.is_dataclass(node):
        for field in dataclasses.fields(node):
            yield from numbers_of(getattr(node, field.name))


def with_numbers(node: Any, numbers: Iterator[Fraction]) -> Any:
    """The same tree with other numbers."""
    if isinstance(node, Fraction):
        return next(numbers)
    if isinstance(node, tuple):
        return tuple(with_numbers(item, numbers) for item in node)
    if dataclasses.is_dataclass(node):
        values = [
            with_numbers(getattr(node, field.name), numbers) for field in dataclasses.fields(node)
        ]
        return type(node)(*values)
    return node


# --- How it is written

FRACTIONS = ("frac", "dfrac", "tfrac")
TIMES = (r"\cdot", r"\times")
AT_MOST = (r"\le", r"\leq")
AT_LEAST = (r"\ge", r"\geq")
INFINITY = (r"\infty", r"+\infty")
FUNCTION = (r"\sin", r"\cos", r"\tan", r"\ln", r"\log", r"\lg")
ATOM, POWER, PRODUCT, SLASH, SUM = range(5)


@dataclass(frozen=True)
class Text:
    """latex: as it stands. binds: how tightly. bare: it ends in a function's argument without
    parentheses."""

    latex: str
    binds: int = ATOM
    bare: bool = False


class Writer:
    """Spells trees. pick: chooses one of several."""

    def __init__(self, pick: Callable[[Sequence[Any]], Any]) -> None:
        self.pick = pick

    def write(self, node: Any) -> str:
        """An answer in LaTeX."""
        match node:
            case Interval():
                return self._interval(node)
            case Union((first, second)):
                return self._union(first, second)
            case Values(elements):
                return self._values(elements)
            case Point(coordinates):
                return self._point([self._text(coordinate).latex for coordinate in coordinates])
            case Assignment(value):
                y, right = "y", self._text(value).latex
                return self.pick([f"{y}={right}", f"{y} = {right}", f"{right} = {y}"])
            case Line(a, b, c):
                return self._line(a, b, c)
        return self._text(node).latex

    def _text(self, node: Any) -> Text:
        match node:
            case Number(value):
                return self._number(value)
            case Name(name):
                return Text(r"\pi" if name == "pi" else name)
            case Sum(terms):
                return self._sum([self._text(term) for term in self._shuffled(terms)])
            case Product(factors):
                return self._product(factors)
            case Quotient(above, below):
                return self._quotient(self._text(above), self._text(below))
            case Power(base, exponent):
                return self._power(base, int(exponent))
            case Exponential(base, exponent):
                inside, below = self._text(exponent).latex, self._positive(base)
                below = below.latex if below.latex.isdigit() else self._bracketed(below.latex)
                return Text(f"{below}^{{{inside}}}", POWER)
            case Root(index, of):
                return self._root(index, self._text(of))
            case Log(base, of):
                return self._log(base, of)
            case Trig(function, factor, variable):
                return self._call(rf"\{function}", self._angle(factor, variable))
        raise TypeError(node)

    def _shuffled(self, items: Sequence[Any]) -> list[Any]:
        rest, order = list(items), []
        while rest:
            order.append(rest.pop(self.pick(range(len(rest)))))
        return order

    def _space(self) -> str:
        return self.pick(["", " ", r"\,"])

    def _bracketed(self, latex: str) -> str:
        return self.pick([f"({latex})", rf"\left({latex}\right)", rf"\left( {latex} \right)"])

    def _at_most(self, text: Text, binds: int) -> Text:
        """In parentheses if it binds less tightly, or begins with a sign."""
        if text.binds > binds or text.latex.startswith("-"):
            return Text(self._bracketed(text.latex))
        return text

    def _number(self, value: Fraction) -> Text:
        if value >= 0:
            return self._positive(value)
        size = self._positive(-value)
        return Text(f"-{size.latex}", max(size.binds, PRODUCT))

    def _positive(self, value: Fraction) -> Text:
        p, q = value.numerator, value.denominator
        if q == 1:
            return Text(str(p))
        ways = [Text(rf"\{name}{{{p}}}{{{q}}}") for name in FRACTIONS]
        ways.append(Text(f"{p}/{q}", SLASH))
        if 1000 % q == 0:
            ways += [Text(f"{float(value):.3f}".rstrip("0"))] * 2
        return self.pick(ways)

    def _sum(self, terms: Sequence[Text]) -> Text:
        latex = ""
        for term in terms:
            written = self._bracketed(term.latex) if term.binds == SUM else term.latex
            if not latex:
                latex = written
                continue
            sign, space = "-" if written.startswith("-") else "+", self.pick(["", " "])
            latex += f"{space}{sign}{space}{written.removeprefix('-')}"
        return Text(latex, SUM)

    def _product(self, factors: Sequence[Any]) -> Text:
        ratio = next(
            (
                f
                for f in factors
                if isinstance(f, Number) and f.value.denominator > 1 and f.value > 0
            ),
            None,
        )
        if ratio is not None and self.pick([True, False]):  # 3x/4 for 3/4 x
            above = [
                Number(Fraction(ratio.value.numerator)),
                *(f for f in factors if f is not ratio),
            ]
            above = above[ratio.value.numerator == 1 :]
            return self._quotient(self._product(above), Text(str(ratio.value.denominator)))
        texts = [self._text(factor) for factor in self._shuffled(factors)]
        first = texts[0] if texts[0].binds <= PRODUCT else Text(self._bracketed(texts[0].latex))
        for text in texts[1:]:
            first = self._times(first, self._at_most(text, POWER))
        return first

    def _times(self, left: Text, right: Text) -> Text:
        sign = f"{self._space()}{self.pick(TIMES)} "
        begins = right.latex
        follows = begins[0].isalpha() or begins.startswith(
            ("(", r"\left(", r"\pi", r"\sqrt", *FUNCTION)
        )
        if left.bare:
            follows = begins.startswith(FUNCTION)
        if follows and not begins[0].isdigit() and self.pick([True, True, False]):
            sign = " " if left.latex[-1].isalpha() and begins[0].isalpha() else self.pick(["", " "])
        return Text(left.latex + sign + right.latex, PRODUCT, right.bare)

    def _quotient(self, above: Text, below: Text) -> Text:
        if self.pick([True, True, False]):
            return Text(rf"\{self.pick(FRACTIONS)}{{{above.latex}}}{{{below.latex}}}")
        top, bottom = self._at_most(above, POWER), self._at_most(below, POWER)
        return Text(f"{top.latex}{self.pick(['/', ' / '])}{bottom.latex}", SLASH)

    def _power(self, base: Any, exponent: int) -> Text:
        raised = self.pick([f"^{exponent}", f"^{{{exponent}}}"])
        if isinstance(base, Trig) and self.pick([True, False]):
            return self._call(rf"\{base.function}{raised}", self._angle(base.factor, base.variable))
        text = self._text(base)
        if isinstance(base, Name) and exponent == 2 and self.pick([True, False, False]):
            return Text(rf"{text.latex}\cdot {text.latex}", PRODUCT)
        is_plain = isinstance(base, Name) or text.latex.isdigit()
        return Text((text.latex if is_plain else self._bracketed(text.latex)) + raised, POWER)

    def _root(self, index: int, of: Text) -> Text:
        ways = [
            Text(rf"\sqrt[{index}]{{{of.latex}}}" if index > 2 else rf"\sqrt{{{of.latex}}}")
        ] * 3
        if index == 2 and of.latex.isdigit() and len(of.latex) == 1:
            ways.append(Text(rf"\sqrt {of.latex}"))
        base = of.latex if of.latex.isdigit() else self._bracketed(of.latex)
        ways += [
            Text(f"{base}^{{1/{index}}}", POWER),
            Text(rf"{base}^{{\frac{{1}}{{{index}}}}}", POWER),
        ]
        return self.pick(ways)

    def _log(self, base: Fraction | None, of: Any) -> Text:
        inside = self._text(of)
        if base is None:
            return self._call(r"\ln", inside)
        names = [rf"\log_{{{base}}}"] + [rf"\log_{base}"] * (base < 10) + [r"\lg"] * (base == 10)
        if self.pick([True, False, False]):
            return self._quotient(self._call(r"\ln", inside), self._call(r"\ln", Text(str(base))))
        return self._call(self.pick(names), inside)

    def _angle(self, factor: Fraction, variable: str | None) -> Text:
        if variable is not None:
            size = self._positive(factor)
            return (
                Text(variable)
                if factor == 1
                else self._times(self._at_most(size, POWER), Text(variable))
            )
        degrees = factor * 360
        if degrees.denominator == 1 and self.pick([True, False]):
            return Text(str(degrees) + self.pick([r"^\circ", r"^{\circ}"]), POWER)
        return (
            self._text(Product((Number(2 * factor), Name("pi"))))
            if 2 * factor != 1
            else Text(r"\pi")
        )

    def _call(self, name: str, argument: Text) -> Text:
        is_short = argument.binds <= PRODUCT and not set(r"+-(*") & set(argument.latex)
        is_short = is_short and r"\cdot" not in argument.latex and r"\times" not in argument.latex
        if is_short and not argument.bare and self.pick([True, False]):
            return Text(
                f"{name} {argument.latex}",
                PRODUCT if argument.binds == PRODUCT else POWER,
                bare=True,
            )
        return Text(name + self._bracketed(argument.latex), POWER)

    def _interval(self, interval: Interval) -> str:
        ends = [
            None if end is None else self._text(end).latex for end in (interval.low, interval.high)
        ]
        relation = self._relation(interval, *ends)
        low = r"-\infty" if ends[0] is None else ends[0]
        high = self.pick(INFINITY) if ends[1] is None else ends[1]
        opens, closes = "(["[interval.has_low], ")]"[interval.has_high]
        inside = f"{low},{self._space()}{high}"
        pair = self.pick([f"{opens}{inside}{closes}", rf"\left{opens}{inside}\right{closes}"])
        return self.pick([pair, rf"x \in {pair}", relation, rf"\{{x \mid {relation}\}}"])

    def _relation(self, interval: Interval, low: str | None, high: str | None) -> str:
        below = self.pick(AT_MOST) if interval.has_low else "<"
        above = self.pick(AT_MOST) if interval.has_high else "<"
        if low is None:
            return f"x {above} {high}"
        if high is not None:
            return f"{low} {below} x {above} {high}"
        above = self.pick(AT_LEAST) if interval.has_low else ">"
        return self.pick([f"{low} {below} x", f"x {above} {low}"])

    def _union(self, first: Interval, second: Interval) -> str:
        intervals = self._shuffled((first, second))
        separator = self.pick([r"\cup", r" \cup ", "or"])
        if separator == "or":
            texts = [
                [None if end is None else self._text(end).latex for end in (i.low, i.high)]
                for i in intervals
            ]
            relations = [self._relation(i, *ends) for i, ends in zip(intervals, texts, strict=True)]
            return r" \text{ or } ".join(relations)
        written = []
        for interval in intervals:
            low = r"-\infty" if interval.low is None else self._text(interval.low).latex
            high = self.pick(INFINITY) if interval.high is None else self._text(interval.high).latex
            written.append(f"{'(['[interval.has_low]}{low}, {high}{')]'[interval.has_high]}")
        return separator.join(written)

    def _values(self, elements: Sequence[Any]) -> str:
        texts = [self._text(element).latex for element in self._shuffled(elements)]
        listed = f",{self.pick([' ', ' ', self._space()])}".join(texts)
        ways = [rf"\{{{listed}\}}", rf"\left\{{{listed}\right\}}", ", ".join(texts)]
        if not set("".join(texts)) & {"x"}:
            ways.append(r" \text{ or } ".join(f"x = {text}" for text in texts))
        return self.pick(ways)

    def _point(self, texts: Sequence[str]) -> str:
        inside = f",{self._space()}".join(texts)
        return self.pick([f"({inside})", rf"\left({inside}\right)"])

    def _line(self, a: Fraction, b: Fraction, c: Fraction) -> str:
        scale = Fraction(self.pick([1, 1, 2, 3, -1]))
        x, y = Product((Number(a * scale), Name("x"))), Product((Number(b * scale), Name("y")))
        whole, rest = Sum((x, y, Number(c * scale))), Sum((x, y))
        slope, start = Product((Number(-a / b), Name("x"))), Number(-c / b)
        solved = self._text(Sum((slope, start)) if c else slope).latex
        ways = [f"{self._text(rest).latex} = {self._number(-c * scale).latex}", f"y = {solved}"]
        return self.pick([*ways, f"{self._text(whole).latex} = 0"] if c else ways)
