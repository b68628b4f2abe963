r"""Answers that are not expressions: choices with their text, times of day, congruences, cases.

All functions expect cleaned answers (normalise.clean) and are linear.
"""

from __future__ import annotations

import re
from fractions import Fraction

from g2d_jax.rewards.names import is_name
from g2d_jax.rewards.normalise import without_text

MAX_CHARS = 200
"""Longer answers are not sums of unit vectors."""

_CHOICE = re.compile(r"\(([A-J])\)\s*[.:]?\s*(.*)|([A-J])(?:[.:)]|\s*\\[);])\s*(.*)", re.DOTALL)
_LABEL = re.compile(r"(?:choice|option|answer)\s*:?\s*(?=\(?[A-J](?![A-Za-z]))", re.IGNORECASE)
_LETTER = re.compile(r"(?<![A-Za-z\\])[A-J](?![A-Za-z])")
_NO_TEXT = re.compile(r"\s*(?:,|[\^(]|(?:or|and|is|isn't|not|no)\b)", re.IGNORECASE)
_TIME = re.compile(
    r"(\d{1,2})(?:\s*:\s*([0-5]\d))?\s*"
    r"(?:([ap])\.?\s*m\.?|(noon|midnight|in the (?:morning|afternoon|evening)))?",
    re.IGNORECASE,
)
_MORNING = {"": "", "midnight": "a", "in the morning": "a"}
_TH = r"(?:st|nd|rd|th)?"
_DATE = re.compile(
    rf"(?:(?:the )?(\d{{1,2}}){_TH} (?:of )?)?"
    r"(jan|feb|mar|apr|may|june?|july?|aug|sept?|oct|nov|dec)"
    r"(?:uary|ruary|ch|il|ust|ember|tember|ober)?\.?"
    rf"(?: (?:the )?(\d{{1,2}}){_TH})?(?:,? (\d{{4}}))?",
    re.IGNORECASE,
)
_DURATION = re.compile(
    r"(\d{1,9}(?:\.\d{1,9})?) ?(d|h|m|s)(?:ays?|(?:ou)?rs?|in(?:ute)?s?|ec(?:ond)?s?)?(?![a-z])(?:,? and |, | |$)"
)
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_MODULO = re.compile(
    r"(.+?)\s*\(?\s*(?:\\(?:pmod|bmod|mod|pod)(?![A-Za-z])|\\text\s*\{\s*mod\s*\}|mod(?![a-z]))\s*"
    r"\{?\s*(\d{1,30})\s*\}?\s*\)?"
)
_RESIDUE = re.compile(r"\s*(-|\\pm(?![A-Za-z]))?\s*(\d{1,30})\s*")
_CASES = re.compile(
    r"(?P<before>.{0,100}?)(?:\\\{\s*\\begin\{array\}(?:\s*\{[lcr| ]*\})?"
    r"|(?:\\\{\s*)?\\begin\{(?:cases|align(?:ed|\*)?)\})"
    r"(?P<rows>.+)\\end\{(?:cases|array|align(?:ed|\*)?)\}",
    re.DOTALL,
)
_MATRIX = re.compile(r"\\begin\{[pb]?matrix\}(.+)\\end\{[pb]?matrix\}", re.DOTALL)
_TERM = re.compile(
    r" *([-+]?[^-+ijk]*?) ?(?:\\(?:hat|vec|overline) ?\{? ?)?([ijk])(?![A-Za-z]) ?\}?"
)
_SIGNS = {"": "1", "-": "-1"}
_CONDITION = re.compile(
    r"\\text\s*\{\s*,?\s*(?:if|when|for|where|otherwise|else)\s*,?\s*\}|(?<![A-Za-z])(?:if|when|for|otherwise|else)(?![A-Za-z])"
)


def choice(cleaned: str) -> tuple[str, str] | None:
    r"""Read the letter and the text of `(D)\ 18`, `C. 12`, `\textbf{(D)}`, `\text{Option D}`; None
    for any other text."""
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


def time_of_day(cleaned: str) -> tuple[set[int], bool] | None:
    """Return the possible times in minutes since midnight, and whether the text names the half of
    the day.

    Without a half it has minutes, and is one of two times unless its hour is unambiguous.
    """
    found = _TIME.fullmatch(without_text(cleaned).replace(" .", "."))
    if found is None:
        return None
    hours, minutes, half, named = found.groups("")
    half = half.lower() or _MORNING.get(named.lower(), "p")
    if not (minutes or half):
        return None
    since = 60 * int(hours) + int(minutes or 0)
    if half:
        return {since % 720 + 720 * (half == "p")}, True
    if 0 < int(hours) <= 12:
        return {since % 720, since % 720 + 720}, False
    return {since}, False


def same_moment(gold: str, answer: str) -> bool | None:
    """Compare times of day, dates, and durations of which one has two units; None for any other
    texts.

    Two times without a half of the day may be ratios. A time with one is not a mere number.
    """
    a, b = time_of_day(gold), time_of_day(answer)
    if a and b and min(len(a[0]), len(b[0])) == 1:
        return not a[0].isdisjoint(b[0])
    if (a and a[1] and ":" in gold) or (b and b[1] and ":" in answer):
        return False
    expected, given = _date(gold), _date(answer)
    if expected and given:
        return expected[:2] == given[:2] and (
            expected[2] == given[2] or not all((expected[2], given[2]))
        )
    span, its_span = _duration(gold), _duration(answer)
    if span and its_span and max(span[1], its_span[1]) > 1:
        return span[0] == its_span[0]
    return None


def _date(cleaned: str) -> tuple[str, int, str] | None:
    """Read the month, the day and the year, "" for none, of `March 5th` and `5 March 2026`."""
    found = _DATE.fullmatch(without_text(cleaned))
    if found is None or bool(found[1]) == bool(found[3]):
        return None
    return found[2][:3].lower(), int(found[1] or found[3]), found[4] or ""


def _duration(cleaned: str) -> tuple[Fraction, int] | None:
    """Read the seconds of `2 hours and 30 minutes`, and its number of units."""
    text = without_text(cleaned).lower()
    parts = _DURATION.findall(text)
    if not parts or _DURATION.sub("", text):
        return None
    seconds = [Fraction(number) * _SECONDS[unit] for number, unit in parts]
    return sum(seconds, Fraction(0)), len(parts)


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


def ratio(cleaned: str) -> list[str]:
    """Split `1 : 2 : 3`; [] for any other text."""
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
            value, condition = row.replace("&", " "), ""
        condition = _CONDITION.sub(" ", condition.replace("&", " "))
        if value.strip():
            rows.append((value.strip(" ,."), condition.strip(" ,.")))
    return rows or None


def vector(cleaned: str) -> str:
    r"""Rewrite a matrix of one column or one row as a tuple; other text stays the same."""
    found = _MATRIX.fullmatch(cleaned)
    if found is None or ("&" in found[1] and "\\\\" in found[1]):
        return cleaned
    parts = [part.strip() for part in re.split(r"\\\\|&", found[1])]
    return f"({', '.join(part for part in parts if part)})"


def by_units(cleaned: str, other: str) -> str:
    r"""Rewrite `3\mathbf{i} - \mathbf{k}` as a tuple if the other is a vector; else unchanged."""
    if len(cleaned) > MAX_CHARS or not other.startswith(("(", "\\begin")):
        return cleaned
    factors = {}
    for factor, unit in _TERM.findall(cleaned):
        factor = factor.strip(" +").replace(" ", "")
        factors[unit] = _SIGNS.get(factor, factor)
    is_other = _TERM.sub("", cleaned) or list(factors) != sorted(factors)
    if is_other or factors.keys().isdisjoint("jk"):
        return cleaned
    values = [factors.get(unit, "0") for unit in "ijk" if unit <= max("j", *factors)]
    return f"({', '.join(values)})"
