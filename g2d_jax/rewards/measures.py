"""Units by their names and symbols, and words that oppose each other: which of them differ.

No unit is converted; two names of one unit are the same, two units are not.
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
"""Units, each before its other names, in which case counts where one has a capital: mW, MW."""
POUND_STERLING = "pound sterling"
_EITHER = [{POUND_STERLING, "lb"}, {POUND_STERLING, "gbp"}, {"yen", "yuan"}]
"""Units of which one may stand for the other: a pound is of either kind, and ¥ too."""
_OPPOSITES = """
    north south east west northeast northwest southeast southwest; left right; up down; bc ad;
    profit loss; increase decrease; clockwise counterclockwise; clockwise anticlockwise;
    positive negative; early late; earlier later;
    monday tuesday wednesday thursday friday saturday sunday;
    january february march april may june july august september october november december
"""
"""Groups of words of which two answers say the same ones, if both say any."""

_POWER = re.compile(r"\^?([23])$")
_WORD = re.compile(r"(?<![\\a-z])[a-z]+")


def _read_units() -> tuple[dict[str, str], dict[str, str]]:
    """Return the unit by each of its names, and by each symbol that is read with its case; by their
    plurals too, but for those of one letter."""
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
    words, others = (set(_WORD.findall(said.lower())) for said in (text, other))
    both = [(words & group, others & group) for group in _GROUPS]
    return any(mine and theirs and mine.isdisjoint(theirs) for mine, theirs in both)
