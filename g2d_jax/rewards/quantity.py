r"""Plain numbers with their units, read exactly: `-\frac{3}{4}`, `1,234.50`, `137 \frac{1}{2}`, `3\times10^{4}`.

Values are Fractions of bounded size, so that comparison is exact and cheap; whatever is more than a number is None.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_DIGITS = 300
"""Longer numbers, and powers of ten beyond 10^300, are left to the worker."""

APPROXIMATION_PLACES = 6
"""A decimal of at least so many places may stand for a number that has no finite decimal, such as 1/3 or sqrt(2)."""

_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s*(?P<dollar>\\?\$)?\s*(?P<sign2>[-+]?)\s*(?:"
    rf"(?P<whole>\d+)?\s*\\frac\s*\{{\s*(?P<above>-?{_DECIMAL})\s*\}}\s*\{{\s*(?P<below>-?{_DECIMAL})\s*\}}"
    rf"|(?P<mixed>\d+) (?P<mixed_above>\d+)\s*/\s*(?P<mixed_below>\d+)"
    rf"|(?P<spaced>\d{{1,3}}(?: \d{{3}})+)(?![\d.,/])"
    rf"|(?P<scale>{_DECIMAL})?\s*(?P<times>\\times|\\cdot|\*)?\s*10\s*\^\s*(?:\{{\s*(?P<power>-?\d+)\s*\}}|(?P<digit>\d)(?!\d))"
    rf"|(?P<mantissa>{_DECIMAL})[eE](?P<exponent>[-+]?\d+)"
    rf"|(?P<decimal>{_DECIMAL})(?:\s*/\s*(?P<over>{_DECIMAL}))?"
    rf")\s*"
)
_UNIT = re.compile(
    r"(?:\\text\s*\{(?P<text>[^{}]*)\}|(?P<bare>[A-Za-z][A-Za-z ]*))\s*(?:\^\s*\{?\s*(?P<power>[23])\s*\}?)?"
)
_BASED = re.compile(r"(-?)([0-9A-Za-z]{1,200})\s*_\s*\{?\s*(\d{1,2})\s*\}?")

_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_UNIT_NAMES = {
    "mm": "mm millimeter millimetre", "cm": "cm centimeter centimetre", "m": "m meter metre",
    "km": "km kilometer kilometre", "in": "in inch inche", "ft": "ft foot feet", "yd": "yd yard", "mi": "mi mile",
    "sec": "s sec second", "min": "min minute", "hour": "h hr hour", "day": "day", "week": "week", "month": "month",
    "year": "yr year", "mg": "mg milligram", "g": "g gram", "kg": "kg kilogram", "lb": "lb pound", "oz": "oz ounce",
    "ml": "ml milliliter millilitre", "l": "l liter litre", "gal": "gal gallon", "mph": "mph", "degree": "deg degree",
    "radian": "rad radian", "dollar": "dollar usd", "cent": "cent", "euro": "euro", "unit": "unit",
}  # fmt: skip
_KNOWN_UNITS = {name: unit for unit, names in _UNIT_NAMES.items() for name in names.split()}
_POWER_WORDS = {"square": "2", "sq": "2", "squared": "2", "cubic": "3", "cubed": "3"}
# Words after a number that change it or add another, and words that are mathematics where they stand bare.
HEDGES = frozenset({"and", "or", "not"})
_NOT_UNITS = frozenset({
    "mod", "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "gcd", "lcm", "max", "min", "times",
    "plus", "minus", "over", "half", "pi", "choose", "to", "from", "base", "root", "per", "by", "of", "i", "e",
    "x", "y", "z", "n", "k", "a", "b", "c", "d", "p", "q", "r", "t", "u", "v", "w",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Quantity:
    """value: exact; unit: canonical name, "" if none or unknown; percent: written with a percent sign;

    places: digits after the point when it was written as a plain decimal, 0 otherwise.
    """

    value: Fraction
    unit: str = ""
    percent: bool = False
    places: int = 0


def parse_quantity(cleaned: str) -> Quantity | None:
    """Read a cleaned answer (see normalise.clean) that is one number with at most a harmless unit, or None."""
    if len(cleaned) > 2 * MAX_DIGITS + 100:
        return None
    found = _NUMBER.match(cleaned)
    if found is None or (found["times"] and not found["scale"]):
        return None
    value = _value(found)
    tail = _tail(cleaned[found.end() :], bool(found["dollar"]), spaced=found.group().endswith(" "))
    if value is None or tail is None:
        return None
    scale, unit, percent = tail
    decimal = found["decimal"] if not found["over"] else None
    places = len(decimal.partition(".")[2]) if decimal else 0
    return Quantity(value * scale, unit, percent, places)


def same_quantity(gold: Quantity, answer: Quantity) -> bool:
    """Whether two quantities agree: exactly, up to a missing unit or percent sign, or as a long decimal of a fraction.

    Two different known units disagree (no conversion). With a percent sign on one side only, 50% is 0.5, and also 50
    (the question asked "what percent"), but 0.5% is not 0.5.
    """
    if gold.unit and answer.unit and gold.unit != answer.unit:
        return False
    if gold.percent == answer.percent:
        return _same_value(gold, answer)
    with_sign, without = (gold, answer) if gold.percent else (answer, gold)
    if with_sign.value == without.value and abs(with_sign.value) > 1:
        return True
    return with_sign.value / 100 == without.value


def based_number(cleaned: str) -> tuple[str, int] | None:
    r"""The digits (sign kept, leading zeros dropped) and base of `1011_2` or `52_{8}`, or None."""
    found = _BASED.fullmatch(cleaned)
    if found is None or not 2 <= int(found[3]) <= 36:
        return None
    digits = found[2].upper().lstrip("0") or "0"
    if any(int(digit, 36) >= int(found[3]) for digit in digits):
        return None
    return found[1] + digits, int(found[3])


def terminates(value: Fraction) -> bool:
    """Whether a fraction has a finite decimal expansion."""
    below = value.denominator
    for prime in (2, 5):
        while below % prime == 0:
            below //= prime
    return below == 1


def _same_value(gold: Quantity, answer: Quantity) -> bool:
    if gold.value == answer.value:
        return True
    for exact, decimal in ((gold.value, answer), (answer.value, gold)):
        if decimal.places >= APPROXIMATION_PLACES and not terminates(exact):
            excess = abs(exact) - abs(decimal.value)  # cut or rounded in the last place
            unit = Fraction(1, 10**decimal.places)
            return exact * decimal.value > 0 and -unit / 2 <= excess < unit
    return False


def _value(found: re.Match[str]) -> Fraction | None:
    if found["above"]:
        value = _ratio(found["above"], found["below"])
        whole = int(found["whole"] or 0) if len(found["whole"] or "") <= MAX_DIGITS else None
        value = None if value is None or whole is None else value + whole
    elif found["mixed"]:
        part = _ratio(found["mixed_above"], found["mixed_below"])
        value = None if part is None or len(found["mixed"]) > MAX_DIGITS else part + int(found["mixed"])
    elif found["power"] or found["digit"]:
        value = _scientific(found["scale"] or "1", found["power"] or found["digit"])
        if found["scale"] and not found["times"]:  # "2 10^3" is not a number we know how to read
            value = None
    elif found["mantissa"]:
        value = _scientific(found["mantissa"], found["exponent"])
    elif found["spaced"]:
        value = _decimal(found["spaced"].replace(" ", ""))
    else:
        value = _ratio(found["decimal"], found["over"] or "1")
    negative = (found["sign"] == "-") != (found["sign2"] == "-")
    return -value if value is not None and negative else value


def _decimal(digits: str) -> Fraction | None:
    return Fraction(digits.replace(",", "").removesuffix(".")) if len(digits) <= MAX_DIGITS else None


def _ratio(above: str, below: str) -> Fraction | None:
    top, bottom = _decimal(above), _decimal(below)
    return top / bottom if top is not None and bottom else None


def _scientific(scale: str, power: str) -> Fraction | None:
    value = _decimal(scale)
    if value is None or len(power) > 4 or abs(int(power)) > MAX_DIGITS:
        return None
    return value * Fraction(10) ** int(power)


def _tail(tail: str, dollar: bool, *, spaced: bool) -> tuple[int, str, bool] | None:
    """What follows the number: (scale, canonical unit, percent), or None when it is no harmless unit."""
    tail = tail.strip()
    if not tail:
        return 1, "dollar" if dollar else "", False
    if tail in ("%", "\\%"):
        return 1, "", True
    if tail == "^\\circ":
        return 1, "degree", False
    found = _UNIT.fullmatch(tail)
    if found is None:
        return None
    words = [word.strip(".,()").lower() for word in (found["text"] or found["bare"] or "").split()]
    if words and words[0] in ("percent", "percentage"):
        return 1, "", True
    scale = _SCALES.get(words[0], 1) if words else 1
    words = words[1:] if scale != 1 else words
    in_text = found["text"] is not None
    if any(not word.isalpha() or word in _SCALES or word in HEDGES for word in words):
        return None
    if not in_text and not _NOT_UNITS.isdisjoint(words):
        return None
    unit = _unit(words, found["power"] or "")
    if not in_text and not _harmless_word(words, unit, spaced):
        return None  # "3ab" and "5m" are products, "5 m" and "18 eggs" are not
    return scale, unit or ("dollar" if dollar else ""), False


def _unit(words: list[str], power: str) -> str:
    """The canonical name of a known unit with its power, "" for any other words ("apples")."""
    names = []
    for word in words:
        if word in _POWER_WORDS:
            power = _POWER_WORDS[word]
        else:
            names.append(word)
    if len(names) != 1:
        return ""
    unit = _KNOWN_UNITS.get(names[0]) or _KNOWN_UNITS.get(names[0].removesuffix("s"), "")
    return unit + power if unit else ""


def _harmless_word(words: list[str], unit: str, spaced: bool) -> bool:
    if unit:
        return spaced or len(words[0]) > 1
    return spaced and all(len(word) > 3 for word in words)
