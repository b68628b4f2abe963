r"""Read answers that are no mathematical expression: choices with their text, times of day,
congruences, cases.

All of it works on cleaned answers (normalise.clean) and is linear.
"""

from __future__ import annotations

import re

from g2d_jax.rewards import expression
from g2d_jax.rewards.names import is_name
from g2d_jax.rewards.normalise import without_text

_CHOICE = re.compile(r"\(([A-J])\)\s*[.:]?\s*(.*)|([A-J])(?:[.:)]|\s*\\[);])\s*(.*)", re.DOTALL)
_LABEL = re.compile(r"(?:choice|option|answer)\s*:?\s*(?=\(?[A-J](?![A-Za-z]))", re.IGNORECASE)
_LETTER = re.compile(r"(?<![A-Za-z\\])[A-J](?![A-Za-z])")
_NO_TEXT = re.compile(r"\s*(?:,|[\^(]|(?:or|and|is|isn't|not|no)\b)", re.IGNORECASE)
_TIME = re.compile(
    r"(\d{1,2})(?:\s*:\s*([0-5]\d))?\s*(?:([ap])\.?\s*m\.?|(noon|midnight))?", re.IGNORECASE
)
_MODULO = re.compile(
    r"(.+?)\s*\(?\s*(?:\\(?:pmod|bmod|mod|pod)(?![A-Za-z])|\\text\s*\{\s*mod\s*\}|mod(?![a-z]))\s*"
    r"\{?\s*(\d{1,30})\s*\}?\s*\)?"
)
_RESIDUE = re.compile(r"\s*(-|\\pm(?![A-Za-z]))?\s*(\d{1,30})\s*")
_LETTERS = re.compile(r"(?=[A-F,]*[A-F],?[A-F])A?,*B?,*C?,*D?,*E?,*F?")
_CASES = re.compile(
    r"(?P<before>.{0,100}?)(?:\\\{\s*\\begin\{array\}(?:\s*\{[lcr| ]*\})?"
    r"|(?:\\\{\s*)?\\begin\{(?:cases|align(?:ed|\*)?)\})"
    r"(?P<rows>.+)\\end\{(?:cases|array|align(?:ed|\*)?)\}",
    re.DOTALL,
)
_MATRIX = re.compile(r"\\begin\{[pb]?matrix\}(.+)\\end\{[pb]?matrix\}", re.DOTALL)
_MULTIPLE = re.compile(
    r"([^=]{0,40}=|)\s*([^=&\s][^=&]{0,60}?)\s*(?:\\(?:cdot|times)\s*)?"
    r"(\\begin\{([pbB]?matrix)\})(.+)(\\end\{\4\})",
    re.DOTALL,
)
_BETWEEN = re.compile(r"(\\\\|&)")
_CONDITION = re.compile(
    r"\\text\s*\{\s*,?\s*(?:if|when|for|where|otherwise|else)\s*,?\s*\}|(?<![A-Za-z])(?:if|when|for|otherwise|else)(?![A-Za-z])"
)


def choice(cleaned: str) -> tuple[str, str] | None:
    r"""Read the letter and the text of `(D)\ 18`, `C. 12`, `\textbf{(D)}`, `\text{Option D}`; None
    for anything else."""
    text = without_text(cleaned)
    label = _LABEL.match(text)
    text = text[label.end() :] if label else text
    if len(text) == 1 and "A" <= text <= "J":
        return text, ""
    found = _CHOICE.fullmatch(text)
    if found is None:
        return None
    letter = found[1] or found[3]
    rest = found[2] or found[4] or ""
    if _LETTER.search(rest) or _NO_TEXT.match(rest):  # another choice, or a doubt
        return None
    return letter, rest.strip(" .~")


def time_of_day(cleaned: str) -> tuple[int, bool] | None:
    """Read minutes since midnight, and whether the half of the day is told, without which a time
    has its minutes."""
    found = _TIME.fullmatch(without_text(cleaned).replace(" .", "."))
    if found is None:
        return None
    hours, minutes, half, named = found.groups("")
    half = half.lower() or {"noon": "p", "midnight": "a"}.get(named.lower(), "")
    if not (minutes or half):
        return None
    since = 60 * int(hours) + int(minutes or 0)
    if half:
        since = since % 720 + 720 * (half == "p")
    return since, bool(half)


def congruence(cleaned: str) -> tuple[frozenset[int], int] | None:
    r"""Read `x \equiv 3, 5 \pmod 7` as its residues and its modulus; `3 \pmod 7` likewise."""
    found = _MODULO.fullmatch(cleaned)
    if found is None or int(found[2]) == 0:
        return None
    name, sign, values = found[1].rpartition("\\equiv")
    if sign and (not is_name(name) or "|" in name):
        return None
    modulus = int(found[2])
    residues: set[int] = set()
    for value in values.split(","):
        read = _RESIDUE.fullmatch(value)
        if read is None:
            return None
        sign, number = read.groups()
        if sign:
            residues.add(-int(number) % modulus)
        if sign != "-":
            residues.add(int(number) % modulus)
    return frozenset(residues), modulus


def choices(cleaned: str) -> frozenset[str]:
    """Read several letters, `ACD` or `A, C and D`; none for anything else."""
    letters = without_text(cleaned).replace("and", ",").replace(" ", "")
    if not _LETTERS.fullmatch(letters):
        return frozenset()
    return frozenset(letters.replace(",", ""))


def ratio(cleaned: str) -> list[str]:
    """Split `1 : 2 : 3`; [] for anything else."""
    parts = [part.strip() for part in cleaned.split(":")]
    if not 2 <= len(parts) <= 10 or re.search(r"[=<>]|\\(?:mid|text)", cleaned):
        return []
    if not all(part.strip("0") for part in parts):  # empty, or zero
        return []
    return parts


def cases(cleaned: str) -> list[tuple[str, str]] | None:
    r"""Read the rows of `\begin{cases} … \end{cases}` as (value, condition); a system has no
    conditions."""
    found = _CASES.fullmatch(cleaned)
    if found is None or "\\end" in found["rows"]:
        return None
    name, sign, rest = found["before"].partition("=")
    if found["before"].strip() and not (sign and not rest.strip() and is_name(name)):
        return None
    rows = []
    for row in re.split(r"\\\\", found["rows"]):
        value, mark, condition = row.partition("&")
        if not (mark and value.strip()) or condition.lstrip().startswith("="):  # of an alignment
            value, condition = _by_comma(row.replace("&", " "))
        condition = _CONDITION.sub(" ", condition.replace("&", " "))
        if value.strip():
            rows.append((value.strip(" ,."), condition.strip(" ,.")))
    return rows or None


def multiplied(cleaned: str) -> str:
    r"""Multiply the entries of a matrix by the number before it, `2\begin{pmatrix} 1 \\ 3 …`;
    another text as it stands."""
    found = "matrix" in cleaned and _MULTIPLE.fullmatch(cleaned)
    if not found or "\\begin" in found[5]:
        return cleaned
    name, factor, begin, _, rows, end = found.groups()
    is_sum = re.search("[-+]", factor[1:])
    if is_sum or len(expression.values(factor)) != 1:
        return cleaned
    parts = _BETWEEN.split(rows)
    parts[::2] = [part and rf" {factor} \cdot ({part}) " for part in map(str.strip, parts[::2])]
    return f"{name}{begin}{''.join(parts)}{end}"


def vector(cleaned: str) -> str:
    r"""Write a matrix of one column or one row as a tuple; another text as it stands."""
    found = _MATRIX.fullmatch(cleaned)
    if found is None or ("&" in found[1] and "\\\\" in found[1]):
        return cleaned
    parts = [part.strip() for part in re.split(r"\\\\|&", found[1])]
    return f"({', '.join(part for part in parts if part)})"


def _by_comma(row: str) -> tuple[str, str]:
    """Split `x^2, x > 0` at the comma where a condition follows it."""
    value, comma, rest = row.rpartition(",")
    if comma and re.search(r"[<>]|\\(?:le|ge|ne|lt|gt)(?![A-Za-z])|\\text", rest):
        return value, rest
    return row, ""
