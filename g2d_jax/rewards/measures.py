"""Units by their names and symbols, and pairs of opposite words.

No unit is converted; two names of one unit are the same, two units are different.
"""

from __future__ import annotations

import re

_NAMES = """
    mm millimeter millimetre; cm centimeter centimetre; m meter metre; km kilometer kilometre;
    nm nanometer nanometre; μm micrometer micrometre micron um; dm decimeter decimetre;
    in inch inche; ft foot feet; yd yard; mi mile; s sec second; ms millisecond; μs microsecond;
    ns nanosecond; min minute; hour h hr; day; week; month; year yr; decade; century centurie;
    mg milligram; μg microgram mcg ug; g gram; kg kilogram kilo; t tonne ton; lb pound; oz ounce;
    ml milliliter millilitre; cl centiliter centilitre; dl deciliter decilitre; l liter litre;
    gal gallon; quart; pint; acre; ha hectare; mi/hour mph; km/hour kph kmh; knot;
    degree deg; radian rad; unit; ohm;
    N newton; kN kilonewton; J joule; kJ kilojoule; MJ megajoule; W watt; kW kilowatt;
    MW megawatt; kWh kwh; Pa pascal; kPa kilopascal; MPa megapascal; V volt; kV kilovolt;
    mV millivolt; A ampere amp; mA milliampere milliamp; Hz hertz; kHz kilohertz khz;
    MHz megahertz mhz; GHz gigahertz ghz; eV electronvolt; mol mole; cal calorie;
    kcal kilocalorie; K kelvin; bit; B byte; kB kilobyte; MB megabyte; GB gigabyte; TB terabyte;
    dollar usd; cent penny pennie pence; euro eur; yen jpy; yuan rmb cny; rupee inr; peso; won krw;
    ruble rouble rub; franc chf; krona kronor; lira; rand; baht; dinar; dirham; gbp;
    degree_C C celsius centigrade coulomb; degree_F F fahrenheit farad;
    Wh; nA; nV; nW; nF; nJ; μA uA; μV uV; μW uW; μF uF; μJ uJ; μl μL uL; mW; mN; mJ; mPa; ml mL;
    mHz; cl cL; dl dL; hPa; kA; keV; MN; MWh; MV; MeV; Mb; GN; GJ; GW; GWh; GPa; GV; GeV; Gb; TJ;
    TW; TWh; THz; TeV; Tb; ng; mmol; kmol
"""
"""Units, each before its other names; case counts where a name has a capital: mW, MW."""
POUND_STERLING = "pound sterling"
_EITHER = [{POUND_STERLING, "lb"}, {POUND_STERLING, "gbp"}, {"yen", "yuan"}]
"""Units that may be confused: a pound is money or weight, and ¥ is ambiguous too."""
_OPPOSITES = """
    north south east west northeast northwest southeast southwest; left right; up down; bc ad;
    profit loss; increase decrease; clockwise counterclockwise; clockwise anticlockwise;
    positive negative; early late; earlier later;
    monday tuesday wednesday thursday friday saturday sunday;
    january february march april may june july august september october november december
"""
"""Groups of words; two answers with words of a group must have the same ones."""

_POWER = re.compile(r"\^?([23])$")
_WORD = re.compile(r"(?<![\\a-z])[a-z]+")


def _read_units() -> tuple[dict[str, str], dict[str, str]]:
    """Return the unit by each of its names, and by each case-sensitive symbol; also by their
    plurals, except those of one letter."""
    names: dict[str, str] = {}
    symbols: dict[str, str] = {}
    for written in _NAMES.split(";"):
        unit, *others = written.split()
        for name in (unit, *others):
            table = names if name.islower() else symbols
            table[name] = unit.replace("_", " ")
            if len(name) > 1:
                table[f"{name}s"] = table[name]
    return names, symbols


_UNITS, _SYMBOLS = _read_units()
_GROUPS = [set(words.split()) for words in _OPPOSITES.split(";")]


def is_word(word: str) -> bool:
    """Return whether a word, or each side of a `/`, is letters; also a unit with a power,
    `m/s^2`."""
    return all(part.isalpha() or _unit(part, marked=True) for part in word.split("/"))


def unit_of(words: list[str], *, marked: bool) -> str:
    """Return the canonical name of the unit at the start of words, "" if unknown.

    Later words ("5 km north") are not units, except after degrees ("degrees Celsius"). marked:
    symbols such as "GB" count too, which are products without a mark.
    """
    units = [_unit(word, marked=marked) for word in words]
    if len(units) > 1 and units[0] == "degree" and units[1].startswith("degree "):
        del units[0]
    if len(units) > 1 and (any(units[1:]) or words[0].lower() == "in"):
        return ""
    return units[0] if units else ""


def _unit(word: str, *, marked: bool) -> str:
    """Return the canonical name of a unit such as "km" or "km/h", "" if unknown."""
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
    """Return whether two units may be the same: one is unknown, or degrees are of any kind."""
    if not unit or not other or unit == other or {unit, other} in _EITHER:
        return True
    return min(unit, other) == "degree" and max(unit, other).startswith("degree ")


def opposed(text: str, other: str) -> bool:
    """Return whether two texts have opposite words, as "5 km north" and "5 km south" do."""
    words, others = (set(_WORD.findall(each.lower())) for each in (text, other))
    both = [(words & group, others & group) for group in _GROUPS]
    return any(mine and theirs and mine.isdisjoint(theirs) for mine, theirs in both)
