r"""Grading with computer algebra, if `verify.quick_verdict` cannot decide: unbounded in time and
memory.

For worker processes only (worker.py): it imports sympy, which may run forever. The reference
("gold") is the first argument. Exact rules decide before anything is rounded.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import TypeVar

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

from g2d_jax.records import Verdict
from g2d_jax.rewards import angles, exact, lists, measures, names, sets, shapes, units
from g2d_jax.rewards.normalise import TEXT_OR_COMMAND, Pair
from g2d_jax.rewards.pair import paired_up
from g2d_jax.rewards.quantity import APPROXIMATION_PLACES, Quantity, parse_quantity
from g2d_jax.rewards.verify import may_be_rounded, quick_verdict

T = TypeVar("T")

MAX_PARTS = 10
"""The most parts of a union, a list or a piecewise definition for comparing each with each."""

_EQUALS = re.compile(r"=(?![^()]{0,200}\))")  # except P(X=3)
_TIMES = r"\cdot "
_BINOMIAL = re.compile(r"\\binom\s*\{\s*(\d{1,3})\s*\}\s*\{\s*(\d{1,3})\s*\}")
_ODD_ROOT = re.compile(
    r"(\\sqrt\s*\[\s*\d{0,3}[13579]\s*\]\s*\{)\s*-\s*((?:[\d., ()]|\\frac|\{[\d., ]*\}){1,200}\})"
)
_DECIMAL = re.compile(r"(?<![\d.])(\d{1,60})\.(\d{1,60})(?![\d.])")


# Units are judged here: math-verify would drop the "m" of "5m" and the unit of "5 cm" against
# "5 m".
_TARGETS = [
    LatexExtractionConfig(
        boxed_match_priority=-1,
        normalization_config=NormalizationConfig(
            basic_latex=True,
            units=False,
            malformed_operators=True,
            nits=True,
            boxed="none",
            equations=False,
        ),
    )
]


def parses(gold: str) -> bool:
    """Return whether math-verify can read a reference answer, in the spelling of the comparison. For
    worker processes, if `can_be_read` cannot decide."""
    a, _ = paired_up(gold, "")
    readings = angles.readings(units.without_unit(a), "")
    return any(_parse(_spelled(*reading)[0]) for reading in readings)


def _verdict(is_correct: bool) -> Verdict:
    return Verdict.CORRECT if is_correct else Verdict.INCORRECT


def grade(gold: str, answer: str, places: int = APPROXIMATION_PLACES) -> Verdict:
    r"""Return the verdict of the whole verifier. Unbounded in time and memory: for worker processes.

    places: if fewer than six, a decimal of at least this many places is correct if it is the other
    side, rounded.

    An answer that cannot be parsed is INCORRECT, as is any answer to an unparsable gold except the
    same text. NO_ANSWER is one with `\approx` that `_approximation` rejects.
    """
    quick = quick_verdict(gold, answer, places)
    if quick is not None:
        return _verdict(quick)
    a, b = paired_up(gold, answer)
    is_other_unit = units.differ(a, b)
    if may_be_rounded(a, b, places) and not is_other_unit and _rounded(a, b, places):
        return Verdict.CORRECT
    if "\\approx" in b and "\\approx" not in a:
        return _approximation(a, b)
    if is_other_unit:
        return Verdict.INCORRECT
    a, b = units.without_unit(a), units.without_unit(b)
    same_cases = _same_cases(a, b)
    if same_cases is not None:
        return _verdict(same_cases)
    if units.says_more(a) or units.says_more(b):
        return Verdict.INCORRECT
    if _same_by_parts(a, b):
        return Verdict.CORRECT
    expected, given = shapes.ratio(a), shapes.ratio(b)
    if expected and given:
        return _verdict(_same_ratio(expected, given))
    return _verdict(any(_same_by_parsing(x, y) for x, y in angles.readings(a, b)))


def _rounded(gold: str, answer: str, places: int) -> bool:
    """Return whether one side is a decimal of at least this many places that the other one rounds
    to."""
    for other, text in ((gold, answer), (answer, gold)):
        decimal = parse_quantity(text)
        if decimal and decimal.value and decimal.places >= places and _rounds(other, decimal):
            return True
    return False


def _same_by_parts(gold: str, answer: str) -> bool:
    """Return whether two unions, tuples or lists have the same parts, each compared by its value."""
    expected, given = sets.intervals(gold), sets.intervals(answer)
    if expected and given:
        return _paired(expected, given, _same_interval)
    are_tuples = all(map(lists.PARENTHESES.fullmatch, (gold, answer)))
    if are_tuples:
        gold, answer = gold[1:-1], answer[1:-1]
    a, b = lists.elements(gold), lists.elements(answer)
    if not (a and b):
        return False
    if are_tuples:
        return len(a) == len(b) and all(map(_same_element, a, b))
    return _paired(a, b, _same_element)


def _paired(gold: Sequence[T], answer: Sequence[T], same: Callable[[T, T], bool]) -> bool:
    """Return whether the parts can be matched one to one."""
    if len(gold) != len(answer) or len(gold) > MAX_PARTS:
        return False
    rest = list(answer)
    for part in gold:
        found = next((other for other in rest if same(part, other)), None)
        if found is None:
            return False
        rest.remove(found)
    return True


def _same_element(gold: str, answer: str) -> bool:
    """Return whether two elements are the same; an equation is not a value, though math-verify uses
    its right side."""
    return ("=" in gold) == ("=" in answer) and _same(gold, answer)


def _same(gold: str, answer: str) -> bool:
    return grade(gold, answer) is Verdict.CORRECT


def _same_interval(gold: tuple[str, str, str], answer: tuple[str, str, str]) -> bool:
    return gold[0] == answer[0] and _same_each(gold[1:], answer[1:])


def _same_ratio(gold: list[str], answer: list[str]) -> bool:
    """Compare ratios of any number of values: each to the first."""
    if len(gold) != len(answer):
        return False
    first, other = gold[0], answer[0]
    pairs = zip(gold[1:], answer[1:], strict=True)
    return all(_same(rf"\frac{{{a}}}{{{first}}}", rf"\frac{{{b}}}{{{other}}}") for a, b in pairs)


def _same_cases(gold: str, answer: str) -> bool | None:
    """Compare piecewise definitions row by row, in any order; None if neither is one."""
    expected, given = shapes.cases(gold), shapes.cases(answer)
    if expected is None and given is None:
        return None
    if expected is None or given is None:
        return False
    if not any(condition for _, condition in expected):
        return len(expected) == len(given) and all(map(_same_row, expected, given))
    return _paired(expected, given, _same_row)


def _same_row(gold: tuple[str, str], answer: tuple[str, str]) -> bool:
    return bool(gold[1]) == bool(answer[1]) and _same_each(gold, answer)


def _same_each(gold: Sequence[str], answer: Sequence[str]) -> bool:
    """Compare texts one by one; two missing ones are the same."""
    return all(_same(x, y) for x, y in zip(gold, answer, strict=True) if x or y)


def _same_by_parsing(gold: str, answer: str) -> bool:
    """Compare by math-verify, with both in its own spelling."""
    a, b = _spelled(gold, answer)
    given = _parse(b)
    expected = _parse(a) if given else []
    return any(
        _same_expression(x, y) or _approximates(x, gold, y, answer) for y in given for x in expected
    )


def _approximation(gold: str, answer: str) -> Verdict:
    r"""Return the verdict on `a \approx b`, which has two values: it is an answer only if b is a
    itself, rounded.

    CORRECT if a is the gold, or if a has no decimal point and b is the gold; otherwise NO_ANSWER.
    With only a name before it, as in `x \approx b`, b is the answer. A second `\approx` means that
    there is no answer.
    """
    left, _, right = answer.partition("\\approx")
    if "\\approx" in right:
        return Verdict.NO_ANSWER
    if all(names.is_name(part) and part.strip() != "e" for part in _EQUALS.split(left)):
        return grade(gold, right)
    left, right = left.rpartition("=")[2].strip(), right.strip()
    decimal = parse_quantity(right)
    if decimal is None or not _rounds(left, decimal):
        return Verdict.NO_ANSWER
    if _same(gold, left) or ("." not in left and _same(gold, right)):
        return Verdict.CORRECT
    return Verdict.NO_ANSWER


def _rounds(text: str, decimal: Quantity) -> bool:
    """Return whether a decimal is the rounding of the text before it. Both have the same unit, or
    one has none."""
    quantity = parse_quantity(text)
    if quantity is None:
        numbers: Sequence[object] = _parse(units.without_unit(text))
    elif not measures.agree(quantity.unit, decimal.unit):
        return False
    else:
        numbers = [_without_percent(quantity)]
    value = _without_percent(decimal)
    places = decimal.places + 2 * decimal.percent
    if (value * 10**places).denominator > 1:
        return False
    return any(exact.rounds_to(number, value, places) for number in numbers)


def _without_percent(quantity: Quantity) -> Fraction:
    """Return the value, 12 % being 0.12."""
    return quantity.value / 100**quantity.percent


def _combinations(found: re.Match[str]) -> str:
    r"""Compute a binomial coefficient, as a factor of the expression before it."""
    before = found.string[: found.start()].rstrip()[-1:]
    times = _TIMES * (before.isdigit() or before in ("}", ")"))
    return f"{times}({math.comb(int(found[1]), int(found[2]))})"


def _spelled(gold: str, answer: str) -> Pair:
    """Rewrite two answers so that math-verify reads them without loss."""
    a, b = (angles.with_arguments(names.primed(_exactly(text))) for text in (gold, answer))
    return _keep_case(a, b)


def _exactly(text: str) -> str:
    """Rewrite decimals within an expression as fractions: math-verify would turn them into
    floats."""
    text = _BINOMIAL.sub(_combinations, text)
    # the real root of a negative number, for which math-verify uses a complex one
    text = _ODD_ROOT.sub(r"(-\1\2)", text)
    if parse_quantity(text):
        return text
    return _DECIMAL.sub(_fraction, text)


def _fraction(decimal: re.Match[str]) -> str:
    return rf"\frac{{{int(decimal[1] + decimal[2])}}}{{{10 ** len(decimal[2])}}}"


def _keep_case(gold: str, answer: str) -> Pair:
    """Rename capital variables whose small letter occurs too: math-verify reads R and r as one, and
    R^2-r^2 as 0."""
    letters = set(TEXT_OR_COMMAND.sub(" ", f"{gold} {answer}"))
    clashes = "".join(c for c in string.ascii_uppercase if letters.issuperset((c, c.lower())))
    if not clashes:
        return gold, answer
    # An index turns it into another variable, and no answer has 99. A letter with an index is
    # already distinct.
    variable = re.compile(
        rf"(?P<command>{TEXT_OR_COMMAND.pattern})|(?P<letter>[{clashes}])(?!\s*_)"
    )
    indexed = partial(variable.sub, lambda m: m["command"] or f"{m['letter']}_{{99}}")
    return indexed(gold), indexed(answer)


def _parse(cleaned: str) -> list[object]:
    """Parse bare LaTeX with math-verify; [] when it cannot be read."""
    wrapped = "$" + cleaned.replace("\\$", "") + "$"
    parsed: list[object] = parse(
        wrapped, _TARGETS, fallback_mode="no_fallback", parsing_timeout=None
    )
    return parsed


def _same_expression(gold: object, answer: object) -> bool:
    for decide in (exact.numbers_equal, exact.equations_equal):
        equal = decide(gold, answer)
        if equal is not None:
            return equal
    digits = exact.DIGITS
    if verify(gold, answer, digits, digits, allow_set_relation_comp=True, timeout_seconds=None):
        return True
    return exact.same_function(gold, answer)


def _approximates(gold: object, gold_text: str, answer: object, answer_text: str) -> bool:
    """Return whether one side is a decimal of at least six places of the other, an irrational
    number."""
    for parsed, text in ((gold, answer_text), (answer, gold_text)):
        decimal = parse_quantity(text)
        if decimal and decimal.places >= APPROXIMATION_PLACES:
            return exact.rounds_to(parsed, decimal.value, decimal.places, cut=True)
    return False
