"""Units by their names and symbols, and words that oppose each other: which of them differ.

No unit is converted; two names of one unit are the same, two units are not.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

_NAMES = """
    mm millimeter millimetre; cm centimeter centimetre; m meter metre; km kilometer kilometre;
    nm nanometer nanometre; μm micrometer micrometre micron; dm decimeter decimetre;
    in inch inche; ft foot feet; yd yard; mi mile; s sec second; ms millisecond; μs microsecond;
    ns nanosecond; min minute; hour h hr; day; week; month; year yr; decade; century centurie;
    mg milligram; μg microgram mcg; g gram; kg kilogram kilo; t tonne ton; lb pound; oz ounce;
    ml milliliter millilitre; cl centiliter centilitre; dl deciliter decilitre; l liter litre;
    gal gallon; quart; pint; acre; ha hectare; mi/hour mph; km/hour kph kmh; knot;
    degree deg; radian rad; unit; ohm;
    N newton; kN kilonewton; J joule; kJ kilojoule; MJ megajoule; W watt; kW kilowatt;
    MW megawatt; kWh kwh; Pa pascal; kPa kilopascal; MPa megapascal; V volt; kV kilovolt;
    mV millivolt; A ampere amp; mA milliampere milliamp; Hz hertz; kHz kilohertz khz;
    MHz megahertz mhz; GHz gigahertz ghz; eV electronvolt; mol mole; cal calorie;
    kcal kilocalorie; K kelvin; bit; B byte; kB kilobyte; MB megabyte; GB gigabyte; TB terabyte;
    dollar usd; cent penny pennie pence; euro eur; yen jpy; yuan rmb cny; rupee inr; peso; won krw;
    ruble rouble rub; franc chf; krona kronor; lira; rand; baht; dinar; dirham; gbp
"""
"""Units, each before its other names, in which case does not count."""
_PREFIXED = """
    n: m s A V W F J g; μ: m s g A V W F J L; u: m s g A V W F J L; m: A V W N J Pa mol L Hz;
    c: m L; d: L; h: Pa; k: N J W Wh Pa V A Hz eV B b mol cal m g;
    M: N J W Wh Pa V Hz eV B b; G: N J W Wh Pa V Hz eV B b; T: J W Wh Hz eV B b
"""
"""Prefixes, each before the symbols that it is usual with; here case counts: mW, MW."""
_SYMBOLS_ALONE = "N J W Wh Pa V A Hz eV B b mol cal K ha"
_TEMPERATURES = {"C": "degree C", "F": "degree F"}  # and coulomb, farad
_TEMPERATURE_NAMES = {
    "celsius": "degree C",
    "centigrade": "degree C",
    "coulomb": "degree C",
    "coulombs": "degree C",
    "fahrenheit": "degree F",
    "farad": "degree F",
    "farads": "degree F",
}
POUND_STERLING = "pound sterling"
_EITHER = [{POUND_STERLING, "lb"}, {POUND_STERLING, "gbp"}, {"yen", "yuan"}]
"""Units of which one may stand for the other: a pound is of either kind, and ¥ too."""
_OPPOSITES = """
    north northward northwards | south southward southwards | east eastward eastwards
    | west westward westwards | northeast | northwest | southeast | southwest;
    left leftward leftwards | right rightward rightwards; up upward upwards
    | down downward downwards;
    am midnight | pm noon; bc bce | ad ce; profit gain | loss; increase | decrease;
    clockwise | counterclockwise anticlockwise; positive | negative; early earlier | late later;
    monday | tuesday | wednesday | thursday | friday | saturday | sunday;
    january | february | march | april | may | june | july | august | september | october
    | november | december
"""
"""Groups of words of which one side says one and the other side another."""

_POWER = re.compile(r"\^?([23])$")
_WORD = re.compile(r"(?<![\\a-z])[a-z]+")


def _by_name() -> dict[str, str]:
    """Return the unit by each of its names, and by their plurals but for those of one letter."""
    units = dict(_TEMPERATURE_NAMES)
    for written in _NAMES.split(";"):
        unit, *others = written.split()
        # A capital tells a symbol, which is no name: it is looked up with its case.
        names = [name for name in (unit, *others) if name.islower() and "/" not in name]
        for name in names:
            units[name] = unit
            if len(name) > 1:
                units[f"{name}s"] = unit
    return units


def _by_symbol() -> dict[str, str]:
    """Return the unit by each symbol that is read with its case."""
    units = {symbol: symbol for symbol in _SYMBOLS_ALONE.split()} | _TEMPERATURES
    for written in _PREFIXED.split(";"):
        prefix, _, symbols = written.strip().partition(":")
        for symbol in symbols.split():
            unit = prefix.replace("u", "μ") + symbol
            units[prefix + symbol] = unit.replace("L", "l")
    return units


def _by_word() -> dict[str, tuple[int, int]]:
    """Return the group and the side of each word that has an opposite."""
    places: dict[str, tuple[int, int]] = {}
    for group, written in enumerate(_OPPOSITES.split(";")):
        for side, words in enumerate(written.split("|")):
            places.update(dict.fromkeys(words.split(), (group, side)))
    return places


_UNITS = _by_name()
_SYMBOLS = _by_symbol()
_PLACES = _by_word()


def is_word(word: str) -> bool:
    """Tell whether a word, or each side of a `/`, is letters; of a unit with a power too:
    `m/s^2`."""
    return all(part.isalpha() or _unit(part, marked=True) for part in word.split("/"))


def unit_of(words: list[str], *, marked: bool) -> str:
    """Return the canonical name of the unit that words begin with, "" for one that is not known.

    The words behind it ("5 km north") are no other units, but for degrees ("degrees Celsius").
    marked: symbols such as "GB" count too, which are products where they stand bare.
    """
    units = [_unit(word, marked=marked) for word in words]
    if len(units) > 1 and units[0] == "degree" and units[1].startswith("degree "):
        del units[0]
    if len(units) > 1 and (any(units[1:]) or words[0].lower() == "in"):
        return ""
    return units[0] if units else ""


def _unit(word: str, *, marked: bool) -> str:
    """Return the canonical name of a unit such as "km" or "km/h", "" for one that is not known."""
    names = []
    for part in word.split("/"):
        power = _POWER.search(part)
        bare = _POWER.sub("", part)
        name = (marked and _SYMBOLS.get(bare)) or _UNITS.get(bare.lower())
        if not name:
            return ""
        names.append(name + power[1] if power else name)
    return "/".join(names)


def agree(unit: str, other: str) -> bool:
    """Tell whether two units may be the same: one is not known, or degrees are of any kind."""
    if not unit or not other or unit == other or {unit, other} in _EITHER:
        return True
    return min(unit, other) == "degree" and max(unit, other).startswith("degree ")


def opposed(text: str, other: str) -> bool:
    """Tell whether two texts say opposite words, as "5 km north" and "5 km south" do."""
    sides = _sides(text)
    if not sides:
        return False
    others = _sides(other)
    return any(sides[group].isdisjoint(others[group]) for group in sides.keys() & others.keys())


def _sides(text: str) -> Mapping[int, set[int]]:
    """Return the sides by each group of opposites that a text has words of."""
    sides: defaultdict[int, set[int]] = defaultdict(set)
    for word in _WORD.findall(text.lower().replace(".", "")):
        if word in _PLACES:
            group, side = _PLACES[word]
            sides[group].add(side)
    return sides
