r"""Lists of values, `1, 2, 3` or `\{1, 2\}`, compared as multisets of exact forms: linear, whatever their size.

A form is a plain number's exact value, a choice's letter, or the canonical string of anything else.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from g2d_jax.rewards.normalise import canonical
from g2d_jax.rewards.quantity import Quantity, parse_quantity, same_quantity

_TOKEN = re.compile(r"\\[{}]|\\.|[(\[{)\]},;]", re.DOTALL)
_OPENING, _CLOSING = frozenset(("\\{", "{", "(", "[")), frozenset(("\\}", "}", ")", "]"))
_THOUSANDS = re.compile(r"\d,\d{3}(?!\d)")
_CHOICE = re.compile(r"\(?([A-Z])\)?")


def elements(cleaned: str) -> list[str] | None:
    r"""The elements of a cleaned answer (see normalise.clean) that is a list, or None.

    A list is two values or more with commas or semicolons between them, or a set in `\{ \}`. A tuple or interval is
    none, nor a number such as 1,234 with others, of which the commas could be either kind.
    """
    braced = cleaned.startswith("\\{") and cleaned.endswith("\\}")
    inside = cleaned[2:-2] if braced else cleaned
    if not braced and (_THOUSANDS.search(inside) or parse_quantity(inside) is not None):
        return None
    parts, start, depth = [], 0, 0
    for token in _TOKEN.finditer(inside):
        text = token.group()
        depth += (text in _OPENING) - (text in _CLOSING)
        if depth < 0:
            return None
        if depth == 0 and text in (",", ";"):
            parts.append(inside[start : token.start()].strip())
            start = token.end()
    parts.append(inside[start:].strip())
    if depth or not all(parts) or (len(parts) < 2 and not braced):
        return None
    return parts


def same_elements(gold: Sequence[str], answer: Sequence[str]) -> bool | None:
    """Whether two lists have the same elements in any order; None where that takes more than exact forms."""
    a, b = Counter(map(_form, gold)), Counter(map(_form, answer))
    if a == b:
        return True
    if max((a | b).values()) > 1:  # as sets they may be equal
        return None
    rest = [sorted(_numbers(gold, b), key=_value), sorted(_numbers(answer, a), key=_value)]
    if [len(a - b), len(b - a)] != list(map(len, rest)):
        return None
    return len(rest[0]) == len(rest[1]) and all(map(same_quantity, *rest))


def says_only(value: str, elements: Sequence[str]) -> bool | None:
    r"""Whether a list repeats one value and nothing else, as `\frac{1}{2} or 0.5`; None where exact forms do not tell.

    It does not repeat a number if another number is in it.
    """
    if {_form(value)} == set(map(_form, elements)):
        return True
    number = _plain_number(value)
    if number is None:
        return None
    others = [other for other in map(_plain_number, elements) if other is not None]
    return None if all(same_quantity(number, other) for other in others) else False


def without_common(gold: str, answer: str) -> tuple[str, str]:
    """Two lists without the elements that they share, so that only what differs in form needs computer algebra.

    Other answers, lists in which an element occurs twice, and those that would be empty stay as they are.
    """
    expected, given = elements(gold), elements(answer)
    if expected is None or given is None:
        return gold, answer
    a, b = [_form(element) for element in expected], [_form(element) for element in given]
    if len(set(a)) < len(a) or len(set(b)) < len(b) or not (set(a) - set(b) and set(b) - set(a)):
        return gold, answer
    common = set(a) & set(b)
    left = [element for element, form in zip(expected, a, strict=True) if form not in common]
    right = [element for element, form in zip(given, b, strict=True) if form not in common]
    return ", ".join(left), ", ".join(right)


def _form(element: str) -> Fraction | str:
    number = _plain_number(element)
    if number is not None:
        return number.value
    text = canonical(element)
    choice = _CHOICE.fullmatch(text)
    return choice[1] if choice else text


def _plain_number(element: str) -> Quantity | None:
    quantity = parse_quantity(element)
    return None if quantity is None or quantity.unit or quantity.percent else quantity


def _numbers(elements: Sequence[str], others: Counter[Fraction | str]) -> list[Quantity]:
    """The plain numbers among the elements that are not among the others."""
    numbers = [_plain_number(element) for element in elements if _form(element) not in others]
    return [number for number in numbers if number is not None]


def _value(quantity: Quantity) -> Fraction:
    return quantity.value
