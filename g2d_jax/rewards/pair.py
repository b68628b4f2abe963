r"""A reference answer and an answer, rewritten in forms that can be compared.

`x \in (1, 3)` and `\{x \mid 1 < x < 3\}`: a part that only one side has (a name, the letter of a
choice), or that both write differently, is rewritten as on the other side. Pure, linear in its
input, safe on untrusted text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeAlias

from g2d_jax.rewards import lists, names, sets, shapes
from g2d_jax.rewards.normalise import TEXT_OR_COMMAND, Pair, clean
from g2d_jax.rewards.quantity import HEDGES

Split: TypeAlias = Callable[[str], tuple[str, str] | None]
"""Splits the text before a value from the value; None if there is none."""

_LABEL = re.compile(
    r"(\\text ?\{ ?|(?=[A-Z]))(?!\w+ \(?[A-J]\)? ?:)([A-Za-z][A-Za-z ]{2,40}): ?(\} ?)?(?!\\text)(\S.*)",
    re.DOTALL,
)
_LETTER = re.compile(r"[A-Za-z<>]")
_RELATION = re.compile(r"[=<>]|\\(?:le|ge|ne|approx|equiv)(?![A-Za-z])")


def paired_up(gold: str, answer: str) -> Pair:
    """Clean both answers, and rewrite them alike: sets as intervals, systems as lists, values
    without a name that one side lacks.

    For a computation such as `2+3 = 5, 5+5 = 10` only the last result is the answer, unless a
    letter is involved or the gold is an equation: `x=2, y=3` has no last result.
    """
    a, b = clean(gold), clean(answer)
    if a == b and not _differ_in_and(a, gold, answer):
        return a, b
    a, b = _without(_label, a, b)
    a, b = sets.from_words(a, b), sets.from_words(b, a)
    expected, given = sets.as_sets(gold, answer)
    a = _as_list(expected or a)
    b = _as_list(given or b)
    a, b = shapes.by_units(a, b), shapes.by_units(b, a)
    if a.startswith("(") or b.startswith("("):
        a, b = shapes.vector(a), shapes.vector(b)
    # A choice loses its letter before lists are read, and signs are written out before names are
    # removed: each step depends on the previous ones.
    a, b = _without(names.parameter, *names.alike(a, b))
    a, b = _without(shapes.choice, a, b)
    a, b = lists.in_order(a, b)
    a, b = lists.signed(a), lists.signed(b)
    a, b = _without(sets.member, a, b)
    if not _relates_another(a, b):
        a, b = _without(names.assignment, a, b)
    is_computed = "=" in b and "=" not in a and "\\not" not in b
    if is_computed and not _LETTER.search(TEXT_OR_COMMAND.sub("", b)):
        b = b.rpartition("=")[2].strip()
    return a, b


def _differ_in_and(cleaned: str, gold: str, answer: str) -> bool:
    """Return whether two answers are cleaned to the same inequalities, which one joins by "and" and
    the other by "or"."""
    return bool(_RELATION.search(cleaned)) and clean(gold, joined=False) != clean(
        answer, joined=False
    )


def _as_list(text: str) -> str:
    r"""Rewrite a system, `\begin{cases} x=1 \\ y=2 \end{cases}`, as a list."""
    rows = "\\begin" in text and shapes.cases(text)
    if not rows:
        return text
    equations = [value for value, condition in rows if "=" in value and not condition]
    if len(equations) < len(rows):
        return text
    return ", ".join(equations)


def _without(split: Split, gold: str, answer: str) -> Pair:
    """Remove the text before a value, such as a name, if both have the same or only one has it;
    but not the letter of a choice without text."""
    mark, value = split(gold) or ("", gold)
    its_mark, its_value = split(answer) or ("", answer)
    is_bare = (mark and not value) or (its_mark and not its_value)
    if is_bare or (mark and its_mark and not names.same(mark, its_mark)):
        return gold, answer
    return value, its_value


def _label(text: str) -> tuple[str, str] | None:
    r"""Split `\text{Total: } 18` into the label and the value; a choice or a doubt is no label."""
    found = _LABEL.fullmatch(text)
    if found is None or not HEDGES.isdisjoint(found[2].lower().split()):
        return None
    opening = (found[1] or "") * (found[3] is None)
    return found[2], clean(opening + found[4])


def _relates_another(gold: str, answer: str) -> bool:
    """Return whether only one side is a name with its value, and the other an equation or such."""
    is_named = names.assignment(gold) is not None
    if is_named == (names.assignment(answer) is not None):
        return False
    return _RELATION.search(answer if is_named else gold) is not None
