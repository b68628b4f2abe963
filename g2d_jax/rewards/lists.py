r"""Lists of values, `1, 2, 3` or `\{1, 2\}`, compared as sets of exact forms: linear for any size.

Order and repetition of the elements do not count, unless they assign values to different names. A
form is a plain number's exact value, a choice's letter, or the canonical string of any other
element.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from fractions import Fraction

from g2d_jax.rewards.names import assignment
from g2d_jax.rewards.normalise import Pair, canonical
from g2d_jax.rewards.quantity import Quantity, parse_quantity, same_quantity

_TOKEN = re.compile(r"\\[{}]|\\.|[(\[{)\]},;]", re.DOTALL)
_OPENING = ("\\{", "{", "(", "[")
_CLOSING = ("\\}", "}", ")", "]")
_SET = re.compile(r"\\\{.*\\\}", re.DOTALL)
PARENTHESES = re.compile(r"\(.*\)", re.DOTALL)
_THOUSANDS = re.compile(r"\d,\d{3}(?!\d)")
_CHOICE = re.compile(r"\A\(?([A-Z])\)?\Z")
_TUPLE = re.compile(r"\(([^()]*)\)\s*=\s*\((.*)\)")
_LETTER = re.compile(r"\s*[A-Za-z]\s*")
_PLUS = re.compile(r"(?:(?<=[({,=])|(?<=, )|^)\+")  # of a positive sign, not of a sum
_SIGNS = re.compile(r"\\pm(?![A-Za-z])")
_MOST_SIGNS = 4


def elements(cleaned: str) -> list[str] | None:
    r"""Split the elements of a cleaned answer (see normalise.clean) that is a list, or return None.

    A list is two values or more with commas or semicolons between them, or a set in `\{ \}`. A
    tuple or interval is not a list. Neither is a number such as 1,234 with others, whose commas are
    ambiguous.
    """
    braced = _SET.fullmatch(cleaned)
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


def in_order(gold: str, answer: str) -> Pair:
    r"""Return two cleaned answers, as tuples if one is a list of values with different names, such
    as `x=1, y=2`.

    If the other has the same names, its values follow the gold's order; a list without names stays
    the same. An answer such as `x_1=1, x_2=2` has the values of one unknown: compared with a gold
    without names it stays a list.
    """
    if "=" not in gold and "=" not in answer:
        return gold, answer
    a, b = _parts(gold), _parts(answer)
    expected, given = _values(a), _values(b)
    if expected and given:
        if expected.keys() != given.keys():
            return gold, answer
        return _tuple(expected.values()), _tuple(given[name] for name in expected)
    if expected:
        return _aligned(expected, b, answer)
    if given:
        answer, gold = _aligned(given, a, gold)
    return gold, answer


def _aligned(named: Mapping[str, str], parts: Sequence[str] | None, other: str) -> Pair:
    """Return values by name, and the other answer, which has no names or not as many.

    Values of one unknown become a list, others a tuple, of x, y and z in that order; a value common
    to all is used alone next to a single one."""
    if _of_one_unknown(named):
        return ", ".join(named.values()), other
    names = list(named)
    if set(names) <= set("xyz"):
        names.sort()
    values = [named[name] for name in names]
    is_single = parts is None and "=" not in other and not PARENTHESES.fullmatch(other)
    if is_single and len(set(values)) == 1:
        return values[0], other
    return _tuple(values), _tuple(parts) or other


def _parts(cleaned: str) -> list[str] | None:
    """Split a list as `elements` does, `(a, b) = (1, 2)` as `a = 1, b = 2`."""
    pair = _TUPLE.fullmatch(cleaned)
    if pair is None:
        *letters, value = cleaned.split("=")
        if len(letters) < 2 or not all(map(_LETTER.fullmatch, letters)):
            return elements(cleaned)
        return [f"{letter.strip()} = {value.strip()}" for letter in letters]  # x = y = 1
    names, values = elements(pair[1]), elements(pair[2])
    if names is None or values is None or len(names) != len(values):
        return None
    return [f"{name} = {value}" for name, value in zip(names, values, strict=True)]


def _values(parts: Sequence[str] | None) -> dict[str, str]:
    """Return the values by name if each part, of two or more, assigns one to its own name, else
    {}."""
    named = dict(filter(None, map(assignment, parts or ())))
    return named if parts and len(named) == len(parts) > 1 else {}


def _of_one_unknown(values: Collection[str]) -> bool:
    """Return whether names differ in their index alone, as `x_1` and `x_2` do."""
    letters = {name.partition("_")[0] for name in values}
    return len(letters) == 1 and all("_" in name for name in values)


def signed(cleaned: str) -> str:
    r"""Write every `\pm` of a list's elements out, as two values; of a tuple's coordinates all
    combinations."""
    count = len(_SIGNS.findall(cleaned))
    if not 0 < count <= _MOST_SIGNS or "\\mp" in cleaned or "mod" in cleaned:
        return cleaned
    parts = elements(cleaned) or [cleaned]
    if any(len(_SIGNS.findall(part)) > 1 and not part.startswith("(") for part in parts):
        return cleaned  # do they vary together?
    written = []
    for part in parts:
        pieces = _SIGNS.split(part)
        for signs in itertools.product("+-", repeat=len(pieces) - 1):
            whole = pieces[0] + "".join(map(operator.add, signs, pieces[1:]))
            written.append(_PLUS.sub("", whole))
    return ", ".join(written)


def mixed(gold: str, answer: str) -> bool:
    r"""Return whether exactly one of two cleaned answers is a tuple: `(1, 2)` is not `\{1, 2\}`. A
    gold that is a tuple may be written as a mere list."""
    in_tuple = _in_tuple(answer) and elements(gold)
    in_set = _SET.fullmatch(answer) and _in_tuple(gold) and elements(answer)
    return len(in_tuple or in_set or ()) > 1


def _in_tuple(cleaned: str) -> list[str] | None:
    """Return the coordinates of a tuple, None for any other text."""
    if not PARENTHESES.fullmatch(cleaned):
        return None
    return elements(cleaned[1:-1])


def _tuple(values: Iterable[str] | None) -> str:
    """Return values as a tuple, "" for None."""
    return "" if values is None else f"({', '.join(values)})"


def same_elements(gold: Sequence[str], answer: Sequence[str]) -> bool | None:
    """Return whether two lists have the same elements in any order; None if exact forms cannot
    decide."""
    a, b = Counter(map(form, gold)), Counter(map(form, answer))
    if a == b:
        return True
    if max((a | b).values()) > 1:  # as sets they may be equal
        return None
    # The remaining elements on both sides are numbers, which may be roundings of each other: in
    # rising order each is compared with one alone.
    by_value = operator.attrgetter("value")
    rest = [sorted(_numbers(gold, b), key=by_value), sorted(_numbers(answer, a), key=by_value)]
    if [len(a - b), len(b - a)] != list(map(len, rest)):
        return None
    return len(rest[0]) == len(rest[1]) and all(map(same_quantity, *rest))


def says_only(value: str, elements: Sequence[str]) -> bool | None:
    r"""Return whether a list repeats one value alone, as `\frac{1}{2} or 0.5`; None if exact forms
    cannot decide.

    It does not repeat a number if another number is in it.
    """
    if {form(value)} == set(map(form, elements)):
        return True
    number = _plain_number(value)
    if number is None:
        return None
    others = map(_plain_number, elements)
    if any(other and not same_quantity(number, other) for other in others):
        return False
    return None


def form(element: str) -> Fraction | str:
    """Return the form in which a cleaned element is compared."""
    number = _plain_number(element)
    if number:
        return number.value
    return _CHOICE.sub(r"\1", canonical(element))


def _plain_number(element: str) -> Quantity | None:
    quantity = parse_quantity(element)
    if quantity and not quantity.unit and not quantity.percent:
        return quantity
    return None


def _numbers(elements: Sequence[str], others: Counter[Fraction | str]) -> list[Quantity]:
    """Return the plain numbers among the elements that are not among the others."""
    numbers = (_plain_number(element) for element in elements if form(element) not in others)
    return [number for number in numbers if number]
