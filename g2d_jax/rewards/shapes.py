r"""Read answers that are no mathematical expression: choices with their text, times of day, congruences, cases.

All of it works on cleaned answers (normalise.clean) and is linear.
"""

from __future__ import annotations

import re

from g2d_jax.rewards.normalise import without_text

_CHOICE = re.compile(r"\(([A-J])\)\s*[.:]?\s*(.*)|([A-J])(?:[.:)]|\s*\\[);])\s*(.*)", re.DOTALL)
_LETTER = re.compile(r"(?<![A-Za-z\\])[A-J](?![A-Za-z])")
_TIME = re.compile(r"(\d{1,2})\s*:\s*([0-5]\d)\s*(?:([ap])\.?\s*m\.?)?", re.IGNORECASE)
_MODULO = re.compile(r"(.+?)\s*\(?\s*\\(?:pmod|bmod|mod|pod)(?![A-Za-z])\s*\{?\s*(\d{1,30})\s*\}?\s*\)?")
_EQUIVALENT = re.compile(r".*\\equiv(?![A-Za-z])", re.DOTALL)
_RESIDUES = re.compile(r"-?\d{1,30}(?:\s*,\s*-?\d{1,30})*")
_CASES = re.compile(r"(?P<before>[^{}]*?)(?:\\begin\{cases\}|\\\{\s*\\begin\{(?:array|aligned)\}(?:\s*\{[lcr| ]*\})?)(?P<rows>.+)\\end\{(?:cases|array|aligned)\}", re.DOTALL)
_CONDITION = re.compile(r"\\text\s*\{[^{}]*\}|(?<![A-Za-z])(?:if|when|for|otherwise|else)(?![A-Za-z])")


def choice(cleaned: str) -> tuple[str, str] | None:
    r"""Read the letter and the text of `(D)\ 18`, `C. 12`, `\textbf{(D)}`; None for anything else."""
    text = without_text(cleaned)
    if len(text) == 1 and "A" <= text <= "J":
        return text, ""
    found = _CHOICE.fullmatch(text)
    if found is None:
        return None
    letter, rest = (found[1], found[2]) if found[1] else (found[3], found[4])
    if _LETTER.search(rest):  # another choice
        return None
    return letter, rest.strip(" .~")


def time_of_day(cleaned: str) -> tuple[int, str] | None:
    """Read minutes since 0:00 of a clock, and "a", "p" or "" for the half of the day."""
    found = _TIME.fullmatch(without_text(cleaned).replace(" .", "."))
    return None if found is None else (60 * int(found[1]) + int(found[2]), (found[3] or "").lower())


def congruence(cleaned: str) -> tuple[frozenset[int], int] | None:
    r"""Read `x \equiv 3, 5 \pmod 7` as its residues and its modulus; `3 \pmod 7` likewise."""
    found = _MODULO.fullmatch(cleaned)
    values = _RESIDUES.fullmatch(_EQUIVALENT.sub("", found[1]).strip()) if found else None
    if found is None or values is None or int(found[2]) == 0:
        return None
    modulus = int(found[2])
    return frozenset(int(value) % modulus for value in values[0].split(",")), modulus


def cases(cleaned: str) -> list[tuple[str, str]] | None:
    r"""Read the rows of `\begin{cases} … \end{cases}` as (value, condition); a system has no conditions."""
    found = _CASES.fullmatch(cleaned)
    if found is None:
        return None
    rows = []
    for row in re.split(r"\\\\", found["rows"]):
        value, _, condition = row.partition("&") if "&" in row else _by_comma(row)
        condition = _CONDITION.sub(" ", condition.replace("&", " "))
        if value.strip():
            rows.append((value.strip(" ,"), condition.strip(" ,.")))
    return rows or None


def _by_comma(row: str) -> tuple[str, str, str]:
    """Split `x^2, x > 0` at the comma where a condition follows it."""
    value, comma, rest = row.rpartition(",")
    if comma and re.search(r"[<>]|\\(?:le|ge|ne|lt|gt)(?![A-Za-z])|\\text", rest):
        return value, comma, rest
    return row, "", ""
