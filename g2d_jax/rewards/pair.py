r"""Write a reference answer and an answer in forms that can be compared, each beside the other.

`x \in (1, 3)` beside `\{x \mid 1 < x < 3\}`: what one side says in another way, or does not say (a name, the letter of
a choice), is written as the other one does. Pure, linear in its input, safe on hostile text.
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
    """Clean both, and write them alike: sets as intervals, systems as lists, values without a name that one side lacks.

    Of a computation such as `2+3 = 5, 5+5 = 10` only the last result is the answer, where no letter is involved and the
    gold is no equation: in `x=2, y=3` nothing is a last result.
    """
    a, b = clean(gold), clean(answer)
    if a == b and not _differ_in_and(a, gold, answer):
        return a, b
    expected, given = sets.as_sets(gold, answer)
    a, b = expected or a, given or b
    a, b = _as_list(a), _as_list(b)
    if a.startswith("(") or b.startswith("("):
        a, b = shapes.vector(a), shapes.vector(b)
    a, b = names.alike(a, b)
    a, b = _without_letters(a, b)
    a, b = lists.in_order(a, b)
    a, b = lists.signed(a), lists.signed(b)
    a, b = _without_member(a, b)
    a, b = _without_name(*_without_point(a, b))
    if "=" in b and "=" not in a and "\\not" not in b and not _LETTER.search(_COMMAND.sub("", b)):
        b = b.rpartition("=")[2].strip()
    return a, b


def _differ_in_and(cleaned: str, gold: str, answer: str) -> bool:
    """Tell whether two answers are cleaned to the same inequalities, which one joins by "and" and the other by "or"."""
    return bool(_RELATION.search(cleaned)) and clean(gold, joined=False) != clean(answer, joined=False)


def _as_list(text: str) -> str:
    r"""Write a system, `\begin{cases} x=1 \\ y=2 \end{cases}`, as a list."""
    rows = shapes.cases(text) if "\\begin" in text else None
    if rows is None or any(condition for _, condition in rows) or not all("=" in value for value, _ in rows):
        return text
    return ", ".join(value for value, _ in rows)


def _without_letters(gold: str, answer: str) -> tuple[str, str]:
    """Take the text of a choice where the other side has no letter, or the same: `(D) 18` beside 18."""
    expected, given = shapes.choice(gold), shapes.choice(answer)
    if expected and given:
        is_same = expected[0] == given[0] and expected[1] and given[1]
        return (expected[1], given[1]) if is_same else (gold, answer)
    if expected and expected[1]:
        return expected[1], answer
    if given and given[1]:
        return gold, given[1]
    return gold, answer


def _without_member(gold: str, answer: str) -> tuple[str, str]:
    r"""Take `x \in` off, unless the other side names something else."""
    expected, given = sets.member(gold), sets.member(answer)
    if expected and given and not names.same(expected[0], given[0]):
        return gold, answer
    return expected[1] if expected else gold, given[1] if given else answer


def _without_point(gold: str, answer: str) -> tuple[str, str]:
    """Take the letter of a point off, of `P(1, 2)` and `P = (1, 2)`, where the other side has coordinates too."""
    expected, given = _point(gold), _point(answer)
    if not (expected or gold.startswith("(")) or not (given or answer.startswith("(")):
        return gold, answer
    if expected and given and expected[0] != given[0]:
        return gold, answer
    return expected[1] if expected else gold, given[1] if given else answer


def _point(text: str) -> tuple[str, str] | None:
    """Split the letter and the coordinates of a point."""
    found = _POINT.fullmatch(text)
    return (found[1], found[2]) if found and "," in found[2] else None


def _without_name(gold: str, answer: str) -> tuple[str, str]:
    """Take a name off where both have the same one, or where the other side is a mere value."""
    expected, given = names.assignment(gold), names.assignment(answer)
    if expected and given:
        return (expected[1], given[1]) if names.same(expected[0], given[0]) else (gold, answer)
    if expected and not _RELATION.search(answer):
        return expected[1], answer
    if given and not _RELATION.search(gold):
        return gold, given[1]
    return gold, answer
