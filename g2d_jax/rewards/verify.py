r"""Is this answer the reference answer? In two steps: what can be decided exactly and cheaply, then math-verify.

`quick_verdict` is pure, linear in its input and safe on hostile text; it decides most answers. `grade` imports sympy
and may run for ever: call it in a worker only (pool.py). Both put the reference ("gold") first, and decide exactly
before anything is rounded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TypeVar

from g2d_jax.records import Verdict
from g2d_jax.rewards import angles, expression, lists, names, sets, shapes
from g2d_jax.rewards.normalise import canonical, clean, plain_text, without_text
from g2d_jax.rewards.pair import paired_up
from g2d_jax.rewards.quantity import (
    APPROXIMATION_PLACES,
    HEDGES,
    POWER_WORDS,
    SCALES,
    Quantity,
    based_number,
    parse_quantity,
    same_quantity,
    unit_of,
)

T = TypeVar("T")

MAX_QUICK_CHARS = 100_000
"""Longer texts are compared as they stand, without normalisation."""

MAX_GOLD_CHARS = 10_000
"""No response but the same text is taken to equal a longer reference answer."""

MAX_PARTS = 10
"""Parts of a union, a list or a definition by cases, at most, that are compared each with each."""

MAX_WORDS = 4
"""An answer of more words, not marked as text, is a sentence, which no response is expected to repeat word by word."""

_INDEX_OR_ARGUMENT = re.compile(r"(?<=[A-Za-z}])(?:_(?:\w|\{\w+\})|\([^()]*\))")
_EQUALS = re.compile(r"=(?![^()]{0,200}\))")  # but for P(X=3)
_TIMES = r"\cdot "
_BINOMIAL = re.compile(r"\\binom\s*\{\s*(\d{1,3})\s*\}\s*\{\s*(\d{1,3})\s*\}")
_WORD = re.compile(r"[a-z']+")
_PARENTHESES = re.compile(r"\(.*\)", re.DOTALL)
_DECIMAL = re.compile(r"(?<![\d.])(\d{1,60})\.(\d{1,60})(?![\d.])")
_VALUE_OR_LIST = re.compile(r"[\d,;]")
_CHOICE = re.compile(r"\(?([A-J])\)?")
_WORDS = re.compile(r"\\text\s*\{([^{}]*)\}")
_COMMAND = re.compile(r"\\text\s*\{[^{}]*\}|\\[A-Za-z]+")
# What is no prose for all its letters: commands with a name in braces, other commands, indices.
_NAMES = re.compile(r"\\[A-Za-z]+\*?\s*\{[A-Za-z]*\}|\\text\s*\{[^{}]*\}|\\[A-Za-z]+|_\s*\{\w*\}")
_TWO_WORDS = re.compile(r"(?<![A-Za-z])[A-Za-z]{2,} +[A-Za-z]{2,}")
_LONG_WORD = re.compile(r"[A-Za-z]{4,}")
_FUNCTION = re.compile(
    r"sqrt|arc(?:sin|cos|tan)|(?:sin|cos|tan)h|alpha|beta|gamma|delta|theta|lambda|sigma|omega", re.I
)
_TEXT_UNIT = re.compile(r"\s*\\text\s*\{([^{}0-9]*)\}\s*(?:\^\s*\{?\d\}?)?$")


def quick_verdict(gold: str, answer: str, places: int = APPROXIMATION_PLACES) -> bool | None:
    """Return true or False where strings or exact rational arithmetic decide; None means "ask math-verify".

    places: see `grade`. An empty gold is never matched.
    """
    if max(len(gold), len(answer)) > MAX_QUICK_CHARS:
        return True if gold == answer else None
    a, b = paired_up(gold, answer)
    if not a:
        return False
    if a == b or canonical(a) == canonical(b):
        return True
    if "\\begin{cases}" in a or "\\begin{cases}" in b:
        return None
    for rule in _RULES:
        verdict = rule(a, b)
        if verdict is not None:
            return None if not verdict and _may_be_rounded(a, b, places) else verdict
    return None


def _may_be_rounded(gold: str, answer: str, places: int) -> bool:
    """Tell whether one side is a decimal that may be the other one, rounded."""
    if places >= APPROXIMATION_PLACES or "." not in gold + answer:
        return False
    decimals = [parse_quantity(text) for text in (gold, answer)]
    return any(decimal is not None and decimal.places >= places for decimal in decimals)


def can_be_read(gold: str) -> bool | None:
    """Tell whether a response can equal a reference answer in any other way than by the same text.

    True for numbers, choices, few words and lists of these, False for what is empty or prose ("about 72, I think");
    None means "ask math-verify" (`parses`). Pure, linear, safe on hostile text.
    """
    text = clean(gold) if len(gold) <= MAX_GOLD_CHARS else ""
    if not text:
        return False
    if sets.can_be_read(gold) or shapes.cases(text):
        return True
    values = None if parse_quantity(text) is not None else lists.elements(text)
    if values is None:
        return _value_can_be_read(text)
    read = {_value_can_be_read(value) for value in values}
    if False in read:
        return False
    return None if None in read else True


def _value_can_be_read(text: str) -> bool | None:
    """Tell what `can_be_read` tells of a cleaned answer that is no list."""
    assigned = names.assignment(text)
    if parse_quantity(assigned[1] if assigned else text) is not None:
        return True
    if shapes.choice(text) or shapes.time_of_day(text) or shapes.congruence(text) or based_number(text):
        return True
    if len(text) > 1 and (words := plain_text(text)):
        return text.startswith("\\text") or len(words.split()) <= MAX_WORDS
    bare = _FUNCTION.sub(" ", _NAMES.sub(" ", text))
    return False if _TWO_WORDS.search(bare) or _LONG_WORD.search(bare) else None


def parses(gold: str) -> Verdict:
    """Tell whether math-verify reads a reference answer: CORRECT if it does, else UNSCORABLE. For worker processes."""
    read = can_be_read(gold)
    if read is None:
        a, _ = paired_up(gold, "")
        a, _ = _keep_case(_without_unit(a), "")
        read = bool(_parse(a))
    return Verdict.CORRECT if read else Verdict.UNSCORABLE


def reading(gold: str) -> str:
    """Say how a reference answer is read, in words for people: "the number 1080", "2 values: -2, 2", "the choice C"."""
    text = clean(gold)
    if not text:
        return "nothing: no answer can match it"
    if can_be_read(gold) is False:
        return "prose: no answer but the same text can match it"
    if choice := shapes.choice(text):
        return f"the choice {choice[0]}"
    if numeral := based_number(text):
        return f"the numeral {numeral[0]} in base {numeral[1]}"
    assigned = names.assignment(text)
    if number := parse_quantity(assigned[1] if assigned else text):
        return f"the number {number.value}{' %' * number.percent}{f' ({number.unit})' if number.unit else ''}"
    if values := lists.elements(text):
        return f"{len(values)} values: {', '.join(values)}"
    words = plain_text(text) if len(text) > 1 else None
    return f"the words {words}" if words else f"the expression {text}"


def grade(gold: str, answer: str, places: int = APPROXIMATION_PLACES) -> Verdict:
    r"""Give the verdict of the whole verifier. Unbounded in time and memory: for worker processes.

    places: with fewer than six, a decimal of at least so many places is right where it is the other side, rounded.

    An answer that does not parse is INCORRECT, as is every other text than that of a gold which does not; NO_ANSWER is
    one with `\approx` that `_approximation` refuses.
    """
    quick = quick_verdict(gold, answer, places)
    if quick is not None:
        return Verdict.CORRECT if quick else Verdict.INCORRECT
    a, b = paired_up(gold, answer)
    is_other_unit = _other_unit(a, b)
    if _may_be_rounded(a, b, places) and not is_other_unit and _rounded(a, b, places):
        return Verdict.CORRECT
    if "\\approx" in b and "\\approx" not in a:
        return _approximation(a, b)
    if is_other_unit:
        return Verdict.INCORRECT
    a, b = _without_unit(a), _without_unit(b)
    same_cases = _same_cases(a, b)
    if same_cases is not None:
        return Verdict.CORRECT if same_cases else Verdict.INCORRECT
    if _says_more(a) or _says_more(b):
        return Verdict.INCORRECT
    if _same_by_parts(a, b):
        return Verdict.CORRECT
    expected, given = shapes.ratio(a), shapes.ratio(b)
    if expected and given:
        return _same_ratio(expected, given)
    correct = any(_same_by_parsing(x, y) for x, y in angles.readings(a, b))
    return Verdict.CORRECT if correct else Verdict.INCORRECT


def _rounded(gold: str, answer: str, places: int) -> bool:
    """Tell whether one side is a decimal of at least so many places that the other one rounds to."""
    for exact, text in ((gold, answer), (answer, gold)):
        decimal = parse_quantity(text)
        if decimal is not None and decimal.value and decimal.places >= places and _rounds(exact, decimal):
            return True
    return False


def _other_unit(gold: str, answer: str) -> bool:
    """Tell whether both have units that are known, and differ."""
    found = [_TEXT_UNIT.search(text) for text in (gold, answer)]
    units = [unit_of(match[0].strip()) if match else "" for match in found]
    return all(units) and units[0] != units[1]


def _same_by_parts(gold: str, answer: str) -> bool:
    """Tell whether two unions, tuples or lists have the same parts, each compared by its value."""
    expected, given = sets.intervals(gold), sets.intervals(answer)
    if expected and given:
        return _paired(expected, given, _same_interval)
    if _PARENTHESES.fullmatch(gold) and _PARENTHESES.fullmatch(answer):
        a, b = lists.elements(gold[1:-1]) or [], lists.elements(answer[1:-1]) or []
        return len(a) == len(b) > 0 and all(map(_same_element, a, b))
    a, b = lists.elements(gold) or [], lists.elements(answer) or []
    return len(b) > 0 and _paired(a, b, _same_element)


def _paired(gold: Sequence[T], answer: Sequence[T], same: Callable[[T, T], bool]) -> bool:
    """Tell whether each of some parts has one of its own that is the same."""
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
    """Tell whether two elements are the same; an equation is no value, of which math-verify takes the right side."""
    return ("=" in gold) == ("=" in answer) and _same(gold, answer)


def _same(gold: str, answer: str) -> bool:
    return grade(gold, answer) is Verdict.CORRECT


def _same_interval(gold: tuple[str, str, str], answer: tuple[str, str, str]) -> bool:
    if gold[0] != answer[0]:
        return False
    return all(_same(x, y) for x, y in zip(gold[1:], answer[1:], strict=True) if x or y)


def _same_ratio(gold: list[str], answer: list[str]) -> Verdict:
    """Compare ratios of any number of values: each to the first."""
    if len(gold) != len(answer):
        return Verdict.INCORRECT
    for a, b in zip(gold[1:], answer[1:], strict=True):
        verdict = grade(rf"\frac{{{a}}}{{{gold[0]}}}", rf"\frac{{{b}}}{{{answer[0]}}}")
        if verdict is not Verdict.CORRECT:
            return verdict
    return Verdict.CORRECT


def _says_more(text: str) -> bool:
    r"""Tell whether words in `\text` doubt an answer, change it or add another: `5 \text{ or more}`."""
    for found in _WORDS.finditer(text):
        words = set(_WORD.findall(found[1].lower()))
        if (
            not HEDGES.isdisjoint(words)
            or not SCALES.keys().isdisjoint(words)
            or (words and words <= POWER_WORDS.keys())
        ):
            return True
    return False


def _same_cases(gold: str, answer: str) -> bool | None:
    """Compare piecewise definitions row by row, in any order; None where neither is one."""
    expected, given = shapes.cases(gold), shapes.cases(answer)
    if expected is None and given is None:
        return None
    if expected is None or given is None:
        return False
    if not any(condition for _, condition in expected):
        return len(expected) == len(given) and all(map(_same_row, expected, given))
    return _paired(expected, given, _same_row)


def _same_row(gold: tuple[str, str], answer: tuple[str, str]) -> bool:
    if bool(gold[1]) != bool(answer[1]):
        return False
    return all(_same(x, y) for x, y in zip(gold, answer, strict=True) if x or y)


def _same_by_parsing(gold: str, answer: str) -> bool:
    """Ask math-verify, with all in its own spelling."""
    a, b = _keep_case(*(angles.with_arguments(names.primed(_exactly(text))) for text in (gold, answer)))
    given = _parse(b)
    expected = _parse(a) if given else []
    return any(_same_expression(x, y) or _approximates(x, gold, y, answer) for y in given for x in expected)


def _approximation(gold: str, answer: str) -> Verdict:
    r"""Give the verdict on `a \approx b`, which says two things: an answer only where b is a itself, rounded.

    CORRECT if a is the gold, or if a has no decimal point and b is the gold; otherwise NO_ANSWER. With no more than a
    name before it, as in `x \approx b`, b is the answer. With a second `\approx` there is none.
    """
    left, _, right = answer.partition("\\approx")
    if "\\approx" in right:
        return Verdict.NO_ANSWER
    if all(_is_name(part.strip()) for part in _EQUALS.split(left)):
        return grade(gold, right)
    left, right = left.rpartition("=")[2].strip(), right.strip()
    decimal = parse_quantity(right)
    if decimal is not None and _rounds(left, decimal):
        for side in (left, right) if "." not in left else (left,):
            if _same(gold, side):
                return Verdict.CORRECT
    return Verdict.NO_ANSWER


def _is_name(text: str) -> bool:
    r"""Tell whether a text names a quantity, as `AB`, `\text{Area}` and `P(X>3)` do, and is no value: `12`, `e^\pi`."""
    from g2d_jax.rewards.exact import is_real

    return not _VALUE_OR_LIST.search(_INDEX_OR_ARGUMENT.sub("", text)) and not any(map(is_real, _parse(text)))


def _rounds(exact: str, decimal: Quantity) -> bool:
    """Tell whether a decimal is the rounding of what stands before it. Both have the same unit, or one has none."""
    from g2d_jax.rewards.exact import rounds_to

    quantity = parse_quantity(exact)
    if quantity is not None and quantity.unit and decimal.unit and quantity.unit != decimal.unit:
        return False
    value, places = _share(decimal), decimal.places + 2 * decimal.percent
    numbers = _parse(_without_unit(exact)) if quantity is None else [_share(quantity)]
    return (value * 10**places).denominator == 1 and any(rounds_to(number, value, places) for number in numbers)


def _share(quantity: Quantity) -> Fraction:
    """Return the value, 12 % being 0.12."""
    return quantity.value / 100 if quantity.percent else quantity.value


def _same_choice(gold: str, answer: str) -> bool | None:
    """Multiple choice: `C`, `(C)`, `\\text{(C)}` and `(C) 12` name the same letter."""
    expected = shapes.choice(gold)
    if expected is None:
        return None
    letter = without_text(answer).upper()
    given = shapes.choice(letter if _CHOICE.fullmatch(letter) else answer)
    return None if given is None else expected[0] == given[0]


def _same_shape(gold: str, answer: str) -> bool | None:
    """Compare times of day, congruences and several choices; a tuple is no set."""
    if lists.mixed(gold, answer):
        return False
    letters = shapes.choices(gold)
    if letters and (given := shapes.choices(answer)):
        return letters == given
    if ":" in gold and ":" in answer:
        a, b = shapes.time_of_day(gold), shapes.time_of_day(answer)
        if a and b and (a[1] or b[1]):
            return a[0] == b[0] or ((a[0] - b[0]) % 720 == 0 and a[1] != b[1])
    if "mod" in gold and "mod" in answer:
        x, y = shapes.congruence(gold), shapes.congruence(answer)
        return None if x is None or y is None else x == y
    return None


def _same_based(gold: str, answer: str) -> bool | None:
    """Numerals with a base: by value when both name one; digits without a base stand for the gold's base."""
    a, b = based_number(gold), based_number(answer)
    if a is not None and b is not None:
        return int(*a) == int(*b)
    return a[0] == answer if a is not None and answer.lstrip("-").isdigit() else None


def _same_number(gold: str, answer: str) -> bool | None:
    """Plain numbers with harmless units."""
    a = parse_quantity(gold)
    b = parse_quantity(answer) if a is not None else None
    return None if a is None or b is None else same_quantity(a, b)


def _same_list(gold: str, answer: str) -> bool | None:
    """Compare lists of values in any order: complete or wrong. A list agrees with a single value if it says no more."""
    expected, given = lists.elements(gold), lists.elements(answer)
    if expected is not None and given is not None:
        return lists.same_elements(expected, given)
    if given is not None:
        return lists.says_only(gold, given)
    return lists.says_only(answer, expected) if expected is not None else None


def _same_words(gold: str, answer: str) -> bool | None:
    """Text answers. Only a gold that is marked as text can tell that another word is wrong: `ab` may be a product."""
    a, b = plain_text(gold), plain_text(answer)
    if a is None or len(a) < 2:
        return None
    if a == b:
        return True
    is_wrong = gold.startswith("\\text") and (b is not None or parse_quantity(answer) is not None)
    return False if is_wrong else None


def _far_apart(gold: str, answer: str) -> bool | None:
    """Return False for two answers that differ for certain: far apart in value, or words beside a number."""
    a, b = (without_text(text) if _CHOICE.fullmatch(without_text(text)) else text for text in (gold, answer))
    a, b = _without_unit(a), _without_unit(b)
    for words, number in ((a, b), (b, a)):
        if words.startswith("\\text") and plain_text(words) and re.search(r"\d", number) and expression.values(number):
            return False
    return False if expression.far_apart(a, b) else None


def _combinations(found: re.Match[str]) -> str:
    r"""Compute a binomial coefficient, as a factor of what stands before it."""
    before = found.string[: found.start()].rstrip()[-1:]
    return f"{_TIMES if before.isdigit() or before in ('}', ')') else ''}({math.comb(int(found[1]), int(found[2]))})"


def _exactly(text: str) -> str:
    """Write decimals that are part of an expression as fractions: math-verify makes floats of them."""
    text = _BINOMIAL.sub(_combinations, text)
    return text if parse_quantity(text) is not None else _DECIMAL.sub(_fraction, text)


def _fraction(decimal: re.Match[str]) -> str:
    return rf"\frac{{{int(decimal[1] + decimal[2])}}}{{{10 ** len(decimal[2])}}}"


_RULES = (_same_shape, _same_choice, _same_based, _same_number, _same_list, _same_words, _far_apart)


def _without_unit(cleaned: str) -> str:
    """Drop a `\\text{...}` at the end, unless it is all there is or says more than a unit does ("or", "not")."""
    match = _TEXT_UNIT.search(cleaned)
    if match is None or _says_more(match[0]):
        return cleaned
    return cleaned[: match.start()] or cleaned


def _keep_case(gold: str, answer: str) -> tuple[str, str]:
    """Rename capital variables whose small letter occurs too: math-verify reads R and r as one, R^2-r^2 as 0."""
    letters = set(_COMMAND.sub(" ", gold + " " + answer))
    clashes = "".join(sorted(letter for letter in letters if "A" <= letter <= "Z" and letter.lower() in letters))
    if not clashes:
        return gold, answer
    variable = re.compile(rf"(?P<command>\\text\s*\{{[^{{}}]*\}}|\\[A-Za-z]+)|(?P<letter>[{clashes}])(?!\s*_)")
    a, b = (variable.sub(lambda m: m["command"] or f"{m['letter']}_{{99}}", text) for text in (gold, answer))
    return a, b


def _parse(cleaned: str) -> list[object]:
    """Parse bare LaTeX with math-verify; [] when it cannot be read."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    # Units are ours to judge: math-verify would drop the "m" of "5m" and the unit of "5 cm" against "5 m".
    config = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
    )
    targets = [LatexExtractionConfig(boxed_match_priority=-1, normalization_config=config)]
    wrapped = "$" + cleaned.replace("\\$", "") + "$"
    parsed: list[object] = parse(wrapped, targets, fallback_mode="no_fallback", parsing_timeout=None)
    return parsed


def _same_expression(gold: object, answer: object) -> bool:
    from math_verify import verify

    from g2d_jax.rewards.exact import DIGITS, equations_equal, numbers_equal, same_function, sets_equal

    for decide in (numbers_equal, sets_equal, equations_equal):
        equal = decide(gold, answer)
        if equal is not None:
            return equal
    if verify(gold, answer, DIGITS, DIGITS, allow_set_relation_comp=True, timeout_seconds=None):
        return True
    return same_function(gold, answer)


def _approximates(gold: object, gold_text: str, answer: object, answer_text: str) -> bool:
    """Tell whether one side is a decimal of at least six places of the other, an irrational number."""
    from g2d_jax.rewards.exact import rounds_to

    for exact, text in ((gold, answer_text), (answer, gold_text)):
        decimal = parse_quantity(text)
        if decimal is not None and decimal.places >= APPROXIMATION_PLACES:
            return rounds_to(exact, decimal.value, decimal.places, cut=True)
    return False
