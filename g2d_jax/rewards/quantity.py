r"""Plain numbers with their units, read exactly: `-\frac{3}{4}`, `1,234.50`, `137 \frac{1}{2}`,
`3\times10^{4}`.

Values are Fractions of bounded size, so that comparison is exact and cheap; text beyond a number is
None.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from g2d_jax.rewards import measures
from g2d_jax.rewards.expression import evaluate
from g2d_jax.rewards.measures import POUND_STERLING
from g2d_jax.rewards.normalise import plain_text, without_text

MAX_CHARS = 700
"""Longer numbers are left to the worker."""

APPROXIMATION_PLACES = 6
"""A decimal of at least this many places may be an approximation of a number without a finite
decimal, such as 1/3 or sqrt(2)."""

_NUMBER = re.compile(
    r"(?P<sign>[-+]?)\s*(?P<currency>\\?\$|\\pounds?(?![A-Za-z])|[£€¥₹¢])?\s*(?P<number>[-+]?\s*(?:\\frac(?![A-Za-z])|\\times(?![A-Za-z])|\\cdot(?![A-Za-z])"
    r"|\*|10\s*\^\s*\{?\s*-?(?=\d)|\d[eE][-+]?(?=\d)|\{\s*-|[\d.,/{}]|\s)+)"
)
_DECIMAL = re.compile(r"[-+]?\d+(?:\.(\d*))?\s*")
_COMMAS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])")
_SPACES = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d.,/])")
_UNIT = re.compile(
    r"(?:\\text\s*\{(?P<text>[^{}]*)\}|(?P<bare>[A-Za-z][A-Za-z "
    r"/]*)|(?P<foreign>[^\x00-\x7f]{1,12}))"
    r"\s*(?:\^\s*\{?\s*(?P<power>[23])\s*\}?)?"
)
_SCIENTIFIC = re.compile(
    r"[-+]?\d+\.(\d+)\s*(?:(?:\\times|\\cdot|\*)\s*10\s*\^\s*\{?\s*|[eE])([-+]?\d{1,3})\s*\}?\s*"
)
_OF_DEGREES = re.compile(
    r"\^\\circ\s*(?:\\text\s*\{\s*)?"
    r"(?:([CFNSEW])|(celsius|fahrenheit|north|south|east|west))\s*\}?",
    re.IGNORECASE,
)
_REMARK = re.compile(r"\\text ?\{ ?\(([^{}()]*)\) ?\}")
_BASED = re.compile(
    r"(-?)(?:\(|\\overline\s*\{)?(?![a-z]\s*_)([0-9A-Za-z]{1,200})[)}]?\s*"
    r"(?:_\s*\{?|\(?\s*(?:in\s+)?(?=base))\s*(?:base\s+)?(\d{1,2}|[a-z]+)\s*[})]?"
)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _numbers(text: str) -> dict[str, int]:
    """Parse a table of words, each before its number."""
    return {word: int(number) for word, number in re.findall(r"(\w+) (\d+)", text)}


SCALES = _numbers(
    """
    pair 2 couple 2 dozen 12 dozens 12 score 20 hundred 100 hundreds 100 gross 144 k 1000 K 1000
    thousand 1000 thousands 1000 lakh 100000 M 1000000 mil 1000000 mn 1000000 million 1000000 millions 1000000
    crore 10000000 bn 1000000000 billion 1000000000 billions 1000000000 trillion 1000000000000
    """
)
"""Factors of the number before them. A plural such as "pairs" is a unit that was counted."""


_FOREIGN = _words("厘米 千米 小时 分钟 公里 公斤 千克 平方米 平方厘米 руб см км").union(
    "个只本元米人岁年天次条张件度块名位棵页题步台双辆间座层周月日颗支個円개명원м"
)
# Symbols that count as a unit; "" is no unit.
_SIGNS = {
    "": "",
    "%": "",
    "^\\circ": "degree",
    "£": POUND_STERLING,
    "€": "euro",
    "¥": "yen",
    "₹": "rupee",
    "¢": "cent",
    "$": "dollar",
}
POWER_WORDS = {"square": "2", "sq": "2", "squared": "2", "cubic": "3", "cubed": "3"}
NUMBER_WORDS = "zero one two three four five six seven eight nine ten eleven twelve"
_BASES = {name: base for base, name in enumerate(NUMBER_WORDS.split()) if base >= 2}
_CARDINALS = _BASES | _numbers(
    """
    zero 0 one 1 thirteen 13 fourteen 14 fifteen 15 sixteen 16 seventeen 17 eighteen 18 nineteen 19
    twenty 20 thirty 30 forty 40 fifty 50 sixty 60 seventy 70 eighty 80 ninety 90
    """
)
_PARTS = _numbers(
    """
    half 2 halves 2 third 3 thirds 3 quarter 4 quarters 4 fourth 4 fourths 4 fifth 5 fifths 5
    sixth 6 sixths 6 eighth 8 eighths 8 tenth 10 tenths 10
    """
)
_BASES |= {str(base): base for base in range(2, 37)}
# Words after a number that change it, doubt it or add another, and words that are mathematics
# outside \text.
HEDGES = _words(
    f"""{NUMBER_WORDS}
    and or not no never is isn't was are aren't be but if unless than more less fewer least
    most about approximately roughly around nearly almost maybe perhaps possibly probably
    likely anything other else wrong incorrect false guess instead except either neither nor
    plus minus times half twice double twenty thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen halves third thirds fourths fifths sixths sevenths eighths ninths tenths
    hundredths thousandths factorial thirty forty fourth tenth eighth ninth tens quarter doubled
    halved tripled triple quadrupled quadruple reciprocal approx doubtful cannot rejected upwards
    below above under beneath beyond past fold over power fifty sixty seventy eighty ninety january
    february march april may june july august september october november december
    """
)
# The exceptions: words that count or compare without changing the number: "3 times a day",
# "2 more", "9 other people", "120 feet above sea level".
_COUNTED = re.compile(
    r"\Atimes(?: as (?:many|much)| an? (?:second|minute|hour|day|week|month|year)| each| daily"
    r"| larger| greater| bigger| longer| faster)?\Z"
    r"|\A(?:more|less|fewer)(?= [a-z]{3}|\Z)|\Aother(?= [a-z]{3})"
    r"|\babove (?:sea level|(?:the )?ground)\Z|(?<=[a-z] )and no [a-z]{3,}\Z"
)
_NOT_UNITS = _words(
    """
    mod sin cos tan cot sec csc log ln exp gcd lcm max min times plus minus over half pi
    choose to from base root per by of i e x y z n k a b c d p q r t u v w
    """
)


@dataclass(frozen=True, slots=True)
class Quantity:
    """An exact value and its notation.

    unit: canonical name, "" if none or unknown; percent: written with a percent sign; places:
    digits after the point when it was written as a plain decimal, 0 otherwise.
    """

    value: Fraction
    unit: str = ""
    percent: bool = False
    places: int = 0


def parse_quantity(cleaned: str) -> Quantity | None:
    """Read a cleaned answer (see normalise.clean) that is one number with at most a harmless unit,
    or return None."""
    if len(cleaned) > MAX_CHARS:
        return None
    match = _NUMBER.match(cleaned)
    if match is None:
        return _in_words(cleaned)
    number = _COMMAS.sub(lambda m: m[0].replace(",", ""), match["number"])
    number = match["sign"] + _SPACES.sub(lambda m: m[0].replace(" ", ""), number)
    try:
        (value,) = [Fraction(number)] if _DECIMAL.fullmatch(number) else evaluate(number)
    except (ValueError, ArithmeticError):
        return None
    if not isinstance(value, Fraction):
        return None
    rest = cleaned[match.end() :].strip()
    remark = _REMARK.fullmatch(rest)
    if remark and _in_words(remark[1]) == Quantity(value):
        rest = ""
    tail = _tail(rest, spaced=match[0][-1:].isspace())
    if tail is None:
        return None
    scale, unit, percent = tail
    if match["currency"] and not percent:
        sign = match["currency"].lstrip("\\").replace("pound", "£")[:1]
        unit = unit or _SIGNS[sign]
    return Quantity(value * scale, unit, percent, _places(number))


def _in_words(cleaned: str) -> Quantity | None:
    """Read a number in words, "negative twenty-five" or "two thirds"; None for any other text."""
    words = (plain_text(cleaned) or "").split()
    sign = 1
    if words[:1] in (["negative"], ["minus"]):
        sign = -1
        del words[0]
    if words == ["half"]:
        return Quantity(Fraction(sign, 2))
    below = _PARTS.get(words[-1], 1) if words else 1
    above = _cardinal(words[: len(words) - (below > 1)])
    if above is None or (below > 1 and (above == 1) == words[-1].endswith("s")):
        return None
    return Quantity(Fraction(sign * above, below))


def _cardinal(words: Sequence[str]) -> int | None:
    """Read "two hundred and five"; None for text that is not one number."""
    if not words or words[0] not in _CARDINALS:
        return None
    total = part = 0
    for word in words:
        number = _CARDINALS.get(word)
        if word in SCALES and part:
            part *= SCALES[word]
            total += part * (part >= 1000)
            part *= part < 1000
        elif number is None:
            if word != "and":
                return None
        elif part % 100 == 0 or (part % 10 == 0 and part % 100 > 10 and number < 10):
            part += number
        else:
            return None
    return total + part


def _places(number: str) -> int:
    """Count the places of a plain decimal, or of one with a power of ten that is long enough by
    itself."""
    decimal = _DECIMAL.fullmatch(number)
    if decimal:
        return len(decimal[1] or "")
    scientific = _SCIENTIFIC.fullmatch(number)
    if scientific is None or len(scientific[1]) < APPROXIMATION_PLACES:
        return 0
    return max(len(scientific[1]) - int(scientific[2]), 0)


def same_quantity(gold: Quantity, answer: Quantity) -> bool:
    """Return whether two quantities agree: exactly, up to a missing unit or percent sign, or as a
    long decimal.

    Two different known units disagree (no conversion). With a percent sign on one side only, 50% is
    0.5, and also 50 (the question was "what percent"), but 0.5% is not 0.5.
    """
    if not measures.agree(gold.unit, answer.unit):
        return False
    if gold.percent != answer.percent:
        with_sign, without = (gold, answer) if gold.percent else (answer, gold)
        is_same_number = with_sign.value == without.value and abs(with_sign.value) > 1
        return is_same_number or with_sign.value / 100 == without.value
    if gold.value == answer.value:
        return True
    for exact, decimal in ((gold.value, answer), (answer.value, gold)):
        if decimal.places >= APPROXIMATION_PLACES and not terminates(exact):
            excess = abs(exact) - abs(decimal.value)  # cut or rounded in the last place
            unit = Fraction(1, 10**decimal.places)
            return exact * decimal.value > 0 and -unit / 2 <= excess < unit
    return False


def based_number(cleaned: str) -> tuple[str, int] | None:
    r"""Return the digits (sign kept, leading zeros dropped) and base of `1011_2`, `52_{\text{eight}}`
    or `52 \text{ base } 8`, or None."""
    may_be = "_" in cleaned or "base" in cleaned
    match = may_be and _BASED.fullmatch(without_text(cleaned))
    base = _BASES.get(match[3]) if match else None
    if not match or base is None:
        return None
    digits = match[2].upper().lstrip("0") or "0"
    if int(max(digits), 36) >= base:
        return None
    return match[1] + digits, base


def terminates(value: Fraction) -> bool:
    """Return whether a fraction has a finite decimal expansion."""
    # A large enough power of ten is a multiple of any denominator of twos and fives.
    return pow(10, value.denominator.bit_length(), value.denominator) == 0


def unit_of(tail: str) -> str:
    r"""Return the canonical name of a unit in `\text{ }` after a value, "" if unknown."""
    read = _tail(tail, spaced=True)
    return read[1] if read else ""


def _tail(tail: str, *, spaced: bool) -> tuple[int, str, bool] | None:
    """Read the text after the number: (scale, canonical unit, percent), or None if it is not a
    harmless unit."""
    sign = tail.lstrip("\\") or tail
    if sign in _SIGNS:
        return 1, _SIGNS[sign], sign == "%"
    if degrees := _OF_DEGREES.fullmatch(tail):
        return 1, f"degree {(degrees[1] or degrees[2])[0].upper()}", False
    match = _UNIT.fullmatch(tail)
    if match is None:
        return None
    written = match["text"] or match["bare"] or ""
    parts = [word.strip(".,()~") for word in written.replace(" per ", "/").split()]
    words = [part.lower() for part in parts]
    if words[:1] in (["percent"], ["percentage"]):
        return 1, "", True
    scale = 1
    while parts and (match["text"] or len(parts[0]) > 2):
        factor = SCALES.get(parts[0]) or (len(parts[0]) > 1 and SCALES.get(words[0]))
        if not factor:
            break
        scale *= factor
        del parts[0], words[0]
    if not all(map(measures.is_word, parts)) or not SCALES.keys().isdisjoint(words):
        return None
    phrase = " ".join(words)
    if match["text"]:
        phrase = _COUNTED.sub("", phrase)
    if not HEDGES.isdisjoint(phrase.split()):
        return None
    if match["foreign"] and match["foreign"].strip() not in _FOREIGN:  # words of other scripts
        return None
    names = [part for part in parts if part.lower() not in POWER_WORDS]
    if words and not names:  # "squared"
        return None
    unit = measures.unit_of(names, marked=match["text"] is not None)
    if match["bare"] and not _is_unit(words, unit, spaced=spaced):
        return None
    power = match["power"] or ""
    for word in words:
        power = POWER_WORDS.get(word, power)
    return scale, unit and unit + power, False


def _is_unit(words: Sequence[str], unit: str, *, spaced: bool) -> bool:
    """Return whether bare words after a number are its unit: "3ab" and "5m" are products, "5 m" and
    "18 eggs" are not."""
    if not _NOT_UNITS.isdisjoint(words):
        return False
    if unit:
        return spaced or len(words[0]) > 1
    return spaced and all(len(word) > 3 for word in words)
