r"""Verification of an answer against the reference answer ("gold") by strings and exact arithmetic.

All of it is pure, linear in its input and safe on untrusted text; it decides most answers. Computer
algebra in a worker (grade.py) decides the others.
"""

from __future__ import annotations

import re

from g2d_jax.rewards import expression, lists, measures, names, sets, shapes
from g2d_jax.rewards.normalise import canonical, clean, plain_text, without_text
from g2d_jax.rewards.pair import paired_up
from g2d_jax.rewards.quantity import (
    APPROXIMATION_PLACES,
    Quantity,
    based_number,
    parse_quantity,
    same_quantity,
)
from g2d_jax.rewards.units import without_unit

MAX_GOLD_CHARS = 10_000
"""Only the same text equals a longer reference answer."""

MAX_WORDS = 4
"""An answer of more words, not marked as text, is a sentence, which no response is expected to
repeat word by word."""

MOST_TIMES = 10
"""A list with more than this many times the elements of another is wrong."""

_SEPARATOR = re.compile(r"[,;&]|\\\\|\\cup")
_CHOICE = re.compile(r"\(?([A-J])\)?")
# Letters that are not prose: commands with a name in braces, other commands, indices.
_NAMES = re.compile(r"\\[A-Za-z]+\*?\s*\{[A-Za-z]*\}|\\text\s*\{[^{}]*\}|\\[A-Za-z]+|_\s*\{\w*\}")
_LETTERS = re.compile(r"[A-Za-z,()]+")
_LETTER_WORD = re.compile(r"[A-Za-z]{3,}|[A-Z]{2}|no|on")  # two small letters are a product
_DOTS = r"\ldots"
_INDEXED = re.compile(r"-?\d+\s*_")
_UNIT = re.compile(r"\\(?:text|circ)|[$£€¥₹¢]|(?<![A-Za-z\\])[A-Za-z]")
_TWO_WORDS = re.compile(r"(?<![A-Za-z])[A-Za-z]{2,} +[A-Za-z]{2,}")
_LONG_WORD = re.compile(r"[A-Za-z]{4,}")
# Mathematics even without a backslash, and not words of a sentence.
_FUNCTION = re.compile(
    r"sqrt|arc(?:sin|cos|tan)|(?:sin|cos|tan)h|alpha|beta|gamma|delta|theta|lambda|sigma|omega",
    re.I,
)


def quick_verdict(gold: str, answer: str, places: int = APPROXIMATION_PLACES) -> bool | None:
    """Return True or False if strings or exact rational arithmetic decide; None means that
    math-verify must decide.

    places: see `grade.grade`. An empty gold is never matched.
    """
    a, b = paired_up(gold, answer)
    if not a:
        return False
    if a == b or canonical(a) == canonical(b):
        return True
    if "\\begin{cases}" in a or "\\begin{cases}" in b:
        return None
    for rule in _RULES:
        verdict = rule(a, b)
        if verdict is False and may_be_rounded(a, b, places):
            return None
        if verdict is not None:
            return verdict
    # A long list would keep computer algebra busy, and cannot equal a short one.
    counts = [len(_SEPARATOR.findall(text)) + 1 for text in (a, b)]
    return False if max(counts) > MOST_TIMES * min(counts) else None


def may_be_rounded(gold: str, answer: str, places: int) -> bool:
    """Return whether one side is a decimal that may be the other one, rounded."""
    if places >= APPROXIMATION_PLACES or "." not in gold + answer:
        return False
    decimals = parse_quantity(gold), parse_quantity(answer)
    return any(decimal and decimal.places >= places for decimal in decimals)


def can_be_read(gold: str) -> bool | None:
    """Return whether a response other than the same text can equal a reference answer.

    True for numbers, choices, few words and lists of these, False for empty text or prose ("about
    72, I think"); None means that math-verify must decide (`grade.parses`).
    """
    if len(gold) > MAX_GOLD_CHARS:
        return False
    text = clean(gold)
    if not text:
        return False
    if sets.can_be_read(gold) or shapes.cases(text):
        return True
    read = set(map(_value_can_be_read, lists.elements(text) or [text]))
    if False in read:
        return False
    return None not in read or None


def _value_can_be_read(text: str) -> bool | None:
    """Return the result of `can_be_read` for a cleaned answer that is not a list."""
    readers = (_number, shapes.choice, shapes.time_of_day, shapes.congruence, based_number)
    if any(read(text) for read in readers):
        return True
    words = _words(text)
    if words:
        return text.startswith("\\text") or len(words.split()) <= MAX_WORDS
    bare = _FUNCTION.sub(" ", _NAMES.sub(" ", text))
    if _TWO_WORDS.search(bare) or _LONG_WORD.search(bare):
        return False
    return None


def _number(text: str) -> Quantity | None:
    """Read the number that an answer is, or that it assigns to a name."""
    _, value = names.assignment(text) or ("", text)
    return parse_quantity(value)


def _words(text: str) -> str | None:
    """Return the words of an answer that is text, as `plain_text` does; a single letter may be a
    variable."""
    if len(text) < 2:
        return None
    return plain_text(text)


def reading(gold: str) -> str:
    """Describe the meaning of a reference answer for people: "the number 1080", "2 values: -2, 2",
    "the choice C"."""
    text = clean(gold)
    if not text:
        return "nothing: no answer can match it"
    if can_be_read(gold) is False:
        return "prose: only the same text can match it"
    if choice := shapes.choice(text):
        return f"the choice {choice[0]}"
    if numeral := based_number(text):
        return f"the numeral {numeral[0]} in base {numeral[1]}"
    if number := _number(text):
        unit = number.unit and f" ({number.unit})"
        return f"the number {number.value}{' %' * number.percent}{unit}"
    if values := lists.elements(text):
        return f"{len(values)} values: {', '.join(values)}"
    if words := _words(text):
        return f"the words {words}"
    return f"the expression {text}"


def _same_choice(gold: str, answer: str) -> bool | None:
    """Compare the letters of two choices: `C`, `c`, `(C)`, `\\text{(C)}` and `(C) 12` name the same
    one."""
    expected = shapes.choice(gold)
    if expected is None:
        return None
    letter = without_text(answer).upper()
    if _CHOICE.fullmatch(letter):
        answer = letter
    given = shapes.choice(answer)
    if given is None and parse_quantity(answer):
        return False
    return given and expected[0] == given[0]


def _same_shape(gold: str, answer: str) -> bool | None:
    r"""Compare times, dates, durations and congruences. A tuple is no set, an inequality no value,
    north not south; only the same text equals one with `\ldots`."""
    if _DOTS in gold + answer or measures.opposed(gold, answer):
        return False
    if lists.mixed(gold, answer) or sets.differ(gold, answer):
        return False
    same = shapes.same_moment(gold, answer)
    if same is not None:
        return same
    if "mod" in gold and "mod" in answer:
        x, y = shapes.congruence(gold), shapes.congruence(answer)
        return x and y and x == y
    return None


def _same_based(gold: str, answer: str) -> bool | None:
    """Compare numerals with a base by value, also with a gold that has none; digits without a base
    have the gold's base."""
    a, b = based_number(gold), based_number(answer)
    if (_INDEXED.match(gold) and not a) or (_INDEXED.match(answer) and not b):
        return False
    if a and b:
        return int(*a) == int(*b)
    if a and answer.lstrip("-").isdigit():
        return a[0] == answer
    number = b and parse_quantity(gold)
    if b and number:
        return int(*b) == number.value
    return None


def _same_number(gold: str, answer: str) -> bool | None:
    """Compare plain numbers with harmless units."""
    a = parse_quantity(gold)
    b = a and parse_quantity(answer)
    if a is None or b is None:
        return None
    if a.percent != b.percent and _UNIT.search(answer if a.percent else gold):
        return False
    return same_quantity(a, b)


def _same_list(gold: str, answer: str) -> bool | None:
    """Compare lists of values in any order: complete or wrong. A list equals a single value if it
    only repeats it."""
    expected, given = lists.elements(gold), lists.elements(answer)
    if expected and given:
        return lists.same_elements(expected, given)
    if given:
        return lists.says_only(gold, given)
    if expected:
        return lists.says_only(answer, expected)
    return None


def _same_words(gold: str, answer: str) -> bool | None:
    """Compare text. Another word is wrong only if the gold is marked as text: `ab` may be a product.
    Words are not a number."""
    a, b = plain_text(gold), plain_text(answer)
    if a and len(a) > 1 and a == b:
        return True
    is_another = gold.startswith("\\text") and a and (b or parse_quantity(answer))
    is_no_number = answer.startswith("\\text") and b and parse_quantity(gold)
    return False if is_another or is_no_number else None


def _same_letters(gold: str, answer: str) -> bool | None:
    r"""Return False for words of the same letters in another order, alone or as elements: `HTH` is
    not `HHT`, though computer algebra would build two equal products."""
    a, b = (without_text(text).replace("\\angle", "").replace(" ", "") for text in (gold, answer))
    if not _LETTERS.fullmatch(a + b):
        return None
    words, others = (set(map(str.casefold, _LETTER_WORD.findall(text))) for text in (a, b))
    letters, its_letters = (set(map("".join, map(sorted, found))) for found in (words, others))
    return False if words != others and letters == its_letters else None


def _far_apart(gold: str, answer: str) -> bool | None:
    """Return False for two answers that are far apart in value."""
    return False if expression.far_apart(without_unit(gold), without_unit(answer)) else None


_RULES = (
    _same_shape,
    _same_choice,
    _same_based,
    _same_number,
    _same_list,
    _same_words,
    _same_letters,
    _far_apart,
)
