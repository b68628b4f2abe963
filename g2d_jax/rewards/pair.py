r"""Write a reference answer and an answer in forms that can be compared, each beside the other.

`x \in (1, 3)` beside `\{x \mid 1 < x < 3\}`: what one side says in another way, or does not say (a
name, the letter of a choice), is written as the other one does. Pure, linear in its input, safe on
hostile text.
"""

from __future__ import annotations

import re

from g2d_jax.rewards import lists, names, sets, shapes
from g2d_jax.rewards.normalise import clean

_COMMAND = re.compile(r"\\text\s*\{[^{}]*\}|\\[A-Za-z]+")
_LETTER = re.compile(r"[A-Za-z<>]")
_POINT = re.compile(r"([A-Z])\s*=?\s*(\([^()]*\))")
_RELATION = re.compile(r"[=<>]|\\(?:le|ge|ne|approx|equiv)(?![A-Za-z])")


def paired_up(gold: str, answer: str) -> tuple[str, str]:
    """Clean both, and write them alike: sets as intervals, systems as lists, values without a name
    that one side lacks.

    Of a computation such as `2+3 = 5, 5+5 = 10` only the last result is the answer, where no letter
    is involved and the
    gold is no equation: in `x=2, y=3` nothing is a last result.
    """
    a, b = clean(gold), clean(answer)
    if a == b and not _differ_in_and(a, gold, answer):
        return a, b
    expected, given = sets.as_sets(gold, answer)
    a = _as_list(expected or a)
    b = _as_list(given or b)
    if a.startswith("(") or b.startswith("("):
        a, b = shapes.vector(a), shapes.vector(b)
    # A choice loses its letter before lists are read, and signs are written out before names come
    # off: each step finds what the ones before it have laid bare.
    a, b = names.alike(a, b)
    a, b = _without_letters(a, b)
    a, b = lists.in_order(a, b)
    a, b = lists.signed(a), lists.signed(b)
    a, b = _without_member(a, b)
    a, b = _without_point(a, b)
    a, b = _without_name(a, b)
    if "=" in b and "=" not in a and "\\not" not in b and not _LETTER.search(_COMMAND.sub("", b)):
        b = b.rpartition("=")[2].strip()
    return a, b


def _differ_in_and(cleaned: str, gold: str, answer: str) -> bool:
    """Tell whether two answers are cleaned to the same inequalities, which one joins by "and" and
    the other by "or"."""
    return bool(_RELATION.search(cleaned)) and clean(gold, joined=False) != clean(
        answer, joined=False
    )


def _as_list(text: str) -> str:
    r"""Write a system, `\begin{cases} x=1 \\ y=2 \end{cases}`, as a list."""
    rows = "\\begin" in text and shapes.cases(text)
    if not rows:
        return text
    equations = [value for value, condition in rows if "=" in value and not condition]
    if len(equations) < len(rows):
        return text
    return ", ".join(equations)


def _without_letters(gold: str, answer: str) -> tuple[str, str]:
    """Take the text of a choice where the other side has no letter, or the same: `(D) 18` beside
    18."""
    letter, text = shapes.choice(gold) or ("", gold)
    its_letter, its_text = shapes.choice(answer) or ("", answer)
    is_other = letter and its_letter and letter != its_letter
    if is_other or (letter and not text) or (its_letter and not its_text):
        return gold, answer
    return text, its_text


def _without_member(gold: str, answer: str) -> tuple[str, str]:
    r"""Take `x \in` off, unless the other side names something else."""
    name, values = sets.member(gold) or ("", gold)
    its_name, its_values = sets.member(answer) or ("", answer)
    if name and its_name and not names.same(name, its_name):
        return gold, answer
    return values, its_values


def _without_point(gold: str, answer: str) -> tuple[str, str]:
    """Take the letter of a point off, of `P(1, 2)` and `P = (1, 2)`, where the other side has
    coordinates too."""
    letter, coordinates = _point(gold)
    its_letter, its_coordinates = _point(answer)
    if not coordinates.startswith("(") or not its_coordinates.startswith("("):
        return gold, answer
    if letter and its_letter and letter != its_letter:
        return gold, answer
    return coordinates, its_coordinates


def _point(text: str) -> tuple[str, str]:
    """Split the letter, "" if there is none, and the coordinates of a point."""
    found = _POINT.fullmatch(text)
    if found and "," in found[2]:
        return found[1], found[2]
    return "", text


def _without_name(gold: str, answer: str) -> tuple[str, str]:
    """Take a name off where both have the same one, or where the other side is a mere value."""
    name, value = names.assignment(gold) or ("", gold)
    its_name, its_value = names.assignment(answer) or ("", answer)
    if name and its_name and not names.same(name, its_name):
        return gold, answer
    if name and not its_name and _RELATION.search(answer):
        return gold, answer
    if its_name and not name and _RELATION.search(gold):
        return gold, answer
    return value, its_value
