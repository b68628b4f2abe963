r"""Normalisation of LaTeX answers to one spelling, without a change of meaning.

`clean` returns valid LaTeX, which math-verify parses; `canonical` continues to a key for string
comparison. Every pattern is linear in the length of its input; nothing recurses.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

_NAMED = """
    times \u00d7 cdot \u00b7 cdot \u22c5 cdot \u2219 pi \u03c0 infty \u221e le \u2264
    ge \u2265 ne \u2260 cup \u222a cap \u2229 in \u2208 pm \u00b1 emptyset \u2205 alpha \u03b1
    beta \u03b2 gamma \u03b3 theta \u03b8 lambda \u03bb phi \u03c6 approx \u2248 forall \u2200
    mid \u2223 xi \u03be omega \u03c9 rho \u03c1 delta \u03b4 epsilon \u03b5
"""
"""Commands, each before its character."""
_SYMBOLS = {character: rf"\{name} " for name, character in re.findall(r"(\w+) (\S)", _NAMED)}
_SYMBOLS |= dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63", "-")
_SYMBOLS |= dict.fromkeys("\u00f7\u2044\u2215", "/")
_SYMBOLS |= {
    "\u00b0": r"^\circ ", "\u3002": ".", "\u3001": ",", "\u2032": "'", "\u211d": r"\mathbb{R}",
    "\u2124": r"\mathbb{Z}", "\u2115": r"\mathbb{N}", "\u211a": r"\mathbb{Q}",
}  # fmt: skip
_LATEX = str.maketrans(_SYMBOLS)
_THIN_SPACES = str.maketrans(
    dict.fromkeys("\u00a0\u2006\u2007\u2008\u2009\u200a\u202f\u205f", r"\,")
)
_SUPERSCRIPT = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207a\u207b\u207f]+")
_SUBSCRIPT = re.compile("[\u2080-\u2089\u208a\u208b]+")
_VULGAR = re.compile("[\u00bc-\u00be\u2150-\u215e\u2189]")
_ROOT = re.compile("\u221a\\s*(?:(\\d+(?:\\.\\d+)?|[A-Za-z])|\\(([^()]*)\\))?")

Pair: TypeAlias = tuple[str, str]
"""A reference answer and an answer, each rewritten in view of the other."""

Replacement: TypeAlias = str | Callable[[re.Match[str]], str]


Marked: TypeAlias = tuple[str, re.Pattern[str], Replacement]


def rules(*rules: tuple[str, Replacement]) -> tuple[tuple[re.Pattern[str], Replacement], ...]:
    """Compile patterns, each with its replacement."""
    return tuple((re.compile(pattern), replacement) for pattern, replacement in rules)


def marked(*rules: tuple[str, str, Replacement]) -> Sequence[Marked]:
    """Compile patterns, each with a text that any match contains: most answers lack these texts, and
    looking for one costs a tenth of the pattern."""
    return [(mark, re.compile(pattern), replacement) for mark, pattern, replacement in rules]


def _where_marked(rules: Sequence[Marked], text: str) -> str:
    for mark, pattern, replacement in rules:
        if mark in text:
            text = pattern.sub(replacement, text)
    return text


_SPACES = marked(
    ("", r"[\s\x00-\x1f\x7f\ud800-\udfff\u200b-\u200f\ufeff]+", " "),
    # space between rows
    ("\\", r"\\\\?\*?\s*\[\s*-?[\d.]{1,9}\s*(?:pt|em|ex|mm|cm|in)\s*\]", r"\\\\"),
    ("", r"(?<!\\)(?:\\[()\[\]]|\$)", " "),  # math delimiters
    ("", r"\*\*|`", ""),  # Markdown
    ("\\", r"\\(?:left|right)\s*\.", ""),
    ("\\", r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])\s*", ""),
    # thousands: 1\,234, 1{,}234, 1,\!234
    (
        "",
        r"(?:(?<=[1-9])|(?<=\d\d))(?:,\s*\\!\s*|\\[,!;:]\s*|\s*\{,\}\s*)(?=\d{3}(?!\d))",
        "",
    ),
    ("{,}", r"(?<=\d)\s*\{,\}\s*(?=\d)", "."),  # a decimal comma
    ("\\", r"\\'", "'"),
    ("\\", r"(?<!\\)\\!", ""),
    ("", r"(?<!\\)\\(?:[,;:> ]|q?quad(?![A-Za-z])|thinspace(?![A-Za-z]))|~", " "),
    ("\\", r"\\[dtc](frac|binom)(?![A-Za-z])", r"\\\1"),
    (
        "\\",
        r"\\(?:mathbf|boldsymbol|bm)\s*\{\s*(?:([a-z])\s*\}|(?=[-+\d\\]))",
        lambda found: found[1] or "{",
    ),
    (
        "\\",
        r"\\(?:mbox|emph|text(?:bf|it|rm|normal|sf|tt)?|math(?:rm|bf|it|sf))(?![A-Za-z])\s*\{"
        r"|\{\s*\\(?:rm|bf|it)(?![A-Za-z])",
        r"\\text{",
    ),
    (
        "\\",
        r"\\(?:(?:display|text)style|limits|rm|bf|it|small|[lL]arge|LARGE|[hH]uge|underline)(?![A-Za-z])",
        "",
    ),
    ("\\", r"\\text\s*\{\s*([einxyz]?)\s*\}", r"\1"),  # nothing, or not a unit
    # exponents of units: \text{cm^2}
    ("\\", r"(\\text ?\{[^{}^]*[A-Za-z]) ?\^ ?(?:\{ ?([23]|-1) ?\}|([23])) ?\}", r"\1}^{\2\3}"),
    ("\\", r"(\\text ?\{[^{}/]*)\} ?/ ?\\text ?\{", r"\1/"),  # units: km / h
    ("  ", r" {2,}", " "),  # from here on no rule meets a long run of spaces
)


_RARE = marked(
    ("phantom", r"\\[hv]?phantom(?![A-Za-z])\s*\{(?:[^{}]|\{[^{}]*\})*\}", ""),  # invisible text
    ("color", r"\\(?:text)?color(?:box)?\s*\{[^{}]*\}", ""),
    ("space", r"\\[hv]space\*?\s*\{[^{}]*\}", " "),
    ("vert", r"\\[lr]?vert(?![A-Za-z])", "|"),
    ("{:}", r"\{:\}", ":"),
    (r"\lg", r"\\lg(?![A-Za-z])", r"\\log_{10}"),
    ("Omega", r"(?<=[\d}]) ?(?:\\ )?\\Omega(?![A-Za-z])", r"\\text{ ohm}"),
    ("binom", r"\\binom\s*(\w)\s*(\w)", r"\\binom{\1}{\2}"),
    ("langle", r"\\langle(?![A-Za-z])", "("),
    ("rangle", r"\\rangle(?![A-Za-z])", ")"),
    (r"\var", r"\\var(phi|epsilon|theta|rho|sigma)(?![A-Za-z])", r"\\\1"),
    ("prime", r"\^\s*\{?\s*((?:\\prime\s*)+)\}?", lambda found: "'" * found[1].count("prime")),
    # units: km / h as a fraction, m s^{-1}
    (
        r"\frac{\text",
        r"(?<=[\d}]) ?\\frac\{(\\text ?\{[^{}/]*)\} ?\} ?\{ ?\\text ?\{"
        r" ?((?:[sh]|[A-Za-z]{2}[^{}/]*)\}(?: ?\^ ?(?:\d|\{\d\}))?) ?\}",
        r"\1/\2",
    ),
    (
        "-1",
        r"(\\text ?\{ ?[A-Za-z]{1,5})(?:\} ?(?:\\cdot)? ?\\text ?\{ ?| )(s|h|min)\} ?\^ ?\{ ?-1 ?\}",
        r"\1/\2}",
    ),
    ("colon", r"\\colon(?![A-Za-z])", ":"),
    ("to", r"(?<=[\d}]) ?(?:\\text ?\{ ?to ?\}|(?<= )to(?= )) ?(?=[\d\\])", ":"),
    ("backslash", r"\\backslash(?![A-Za-z])", r"\\setminus "),
    (r"\cr", r"\\cr(?![A-Za-z])", r"\\\\"),
    ("smallmatrix", "smallmatrix", "pmatrix"),
    (  # x \mapsto x^2: f(x)= x^2
        "mapsto",
        r"(?:([a-z]) ?: ?)?([a-z]) ?\\mapsto(?![A-Za-z])",
        lambda found: f"{found[1] or 'f'}({found[2]})=",
    ),
    (r"\log", r"\\log ?_ ?\{? ?e ?\}?", r"\\ln "),
    ("US", r"(?:\\text ?\{ ?USD? ?\}|(?<![A-Za-z])USD?) ?(?=\\?\$|\d)", ""),
    ("nfinity", r"\\text ?\{ ?[nN]egative infinity ?\}", r"-\\infty "),
    ("nfinity", r"(?:\\text ?\{ ?[iI]nfinity ?\}|^[iI]nfinity$)", r"\\infty "),
    ("'", r"(?<=\d)'(?=\d{3}(?!\d))", ""),  # 1'234
    ("0x", r"^0x([\dA-Fa-f]+)$", r"\1_{16}"),
    ("0b", r"^0b([01]+)$", r"\1_{2}"),
    ("pi", r"\\text ?\{ ?pi ?\}", r"\\pi "),
    ("choose", r"\{\s*([^{}\\]*)\\choose(?![A-Za-z])\s*([^{}]*)\}", r"\\binom{\1}{\2}"),
    *[
        (
            name,
            rf"(?<![A-Za-z\\] )(?<![A-Za-z\\])(?<![te]\{{)(?<![te]\{{ ){name}(?![A-Za-z])",
            rf"\\{name}",
        )
        for name in ["pi", "ln", "log", "sin", "cos", "tan"]
    ],
)
_SPELLINGS = rules(
    (r"\^\s*\{\s*\\circ\s*\}|(?:\^\s*)?\\degree(?![A-Za-z])|\^\s*\\circ(?![A-Za-z])", r"^\\circ "),
    (r"\\([gl]e)q(?:slant)?(?![A-Za-z])", r"\\\1"),
    (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
    (r"\\sqrt\s*([0-9A-Za-z])", r"\\sqrt{\1}"),
    (r"\\frac\s*([0-9A-Za-z])", r"\\frac{\1}"),
    (r"\\frac\s*(\{[^{}]*\})\s*([0-9A-Za-z])", r"\\frac\1{\2}"),
    (r"(?<![\d.])\.(?=\d|\\(?:overline|bar|dot)\s*\{?\s*\d)", "0."),
    (r" {2,}", " "),
)
# "and" and "or" between values, but not next to other words in \text.
_JOINED = re.compile(
    r",? ?\\text ?\{ ?(?:and|or) ?\} ?|(?P<words>\\text ?\{[^{}]*\})|,? (?:and|or) "
)
_ELLIPSIS = r"(?:\\[lc]?dots[bcimo]?(?![A-Za-z])|\.{3,})"
_DOTS = re.compile(_ELLIPSIS)
_ARTICLE = re.compile(r"\A(?:an?|the) (?=\w)")
_SYNONYMS = dict.fromkeys(("does not exist", "doesnt exist", "dne", "not defined"), "undefined")
_APOSTROPHE = re.compile(r"(?<=[a-z])'(?=[a-z])")
_DOUBLE_BACKSLASH = re.compile(r"\\\\(?=[a-zA-Z])")
_WORDS = re.compile(r"[A-Za-z\\{}]")
_SIGN = re.compile(r"\\[$%]")
TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
COMMAND = re.compile(r"\\[A-Za-z]+")
TEXT_OR_COMMAND = re.compile(rf"\\text\s*\{{[^{{}}]*\}}|{COMMAND.pattern}")
_DIGIT_GAP = re.compile(r"(?<=\d) (?=\d)")
_OF_ANGLES = re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_SHORT_SCRIPT = re.compile(r"([\^_])\{(\w)\}")


def clean(latex: str, *, joined: bool = True) -> str:
    """Return one spelling of an answer that is still LaTeX: unicode, spaces, delimiters, shorthand,
    trailing period.

    The meaning stays the same: units, signs, brackets and the order of elements are kept. Repeating
    decimals become fractions.
    joined: "and" and "or" between values become commas.
    """
    text = latex if latex.isascii() else _from_unicode(latex)
    if "\\\\" in text and not re.search(r"\\begin|\\cr", text):
        text = _DOUBLE_BACKSLASH.sub(r"\\", text)  # "\\frac" from a response that escaped twice
    text = _where_marked(_RARE, _where_marked(_SPACES, text))
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    if joined:
        text = _JOINED.sub(lambda found: found["words"] or ", ", text)
    text = _where_marked(_WHOLE, text)
    return _trim(_DOTS.sub(r"\\ldots ", text))


def without_text(cleaned: str) -> str:
    r"""Return a cleaned answer without its `\text{ }` marks."""
    return " ".join(TEXT.sub(r"\1", cleaned).split())


def canonical(cleaned: str) -> str:
    r"""Return the key that identifies cleaned answers with the same string: no spaces, `\text`,
    degrees, currency."""
    text = without_text(cleaned).replace(r"\$", "").replace(r"\%", "%")
    if "^\\circ" in text and not _OF_ANGLES.search(
        text
    ):  # a degree is a unit, except in an argument
        text = text.replace(r"^\circ", "")
    text = _DIGIT_GAP.sub("\x1f", text.strip())  # "1 2" is not "12"
    return _SHORT_SCRIPT.sub(r"\1\2", text.replace(" ", "")).rstrip(".")


def plain_text(cleaned: str) -> str | None:
    r"""Return the words of a text answer, casefolded: `\text{Evelyn}` becomes "evelyn". None for
    mathematics."""
    words = _APOSTROPHE.sub("", without_text(cleaned)).strip(" .,;:!?").replace("-", " ").split()
    if not words or not all(word.isalpha() for word in words):
        return None
    phrase = " ".join(words).casefold()
    return _SYNONYMS.get(phrase) or _ARTICLE.sub("", phrase)


def _from_unicode(text: str) -> str:
    text = text.translate(_THIN_SPACES)
    text = _SUPERSCRIPT.sub(lambda match: f"^{{{_compatible(match[0])}}}", text)
    text = _SUBSCRIPT.sub(lambda match: f"_{{{_compatible(match[0])}}}", text)
    text = _VULGAR.sub(_vulgar_fraction, text)
    text = "".join(map(_ascii_digit, _compatible(text)))
    return _ROOT.sub(_square_root, text).translate(_LATEX)


_compatible = partial(unicodedata.normalize, "NFKC")


def _ascii_digit(char: str) -> str:
    """Return the ASCII digit of a decimal digit of any script, other characters unchanged."""
    return str(unicodedata.decimal(char, char))


def _vulgar_fraction(match: re.Match[str]) -> str:
    above, _, below = _compatible(match[0]).partition("\u2044")
    return rf"\frac{{{above}}}{{{below}}}"


def _square_root(match: re.Match[str]) -> str:
    inside = match[1] or match[2]
    return rf"\sqrt{{{inside}}}" if inside else r"\sqrt "


def _degrees(match: re.Match[str]) -> str:
    """Rewrite degrees, minutes and seconds as a fraction of degrees."""
    degrees, minutes, seconds = map(int, match.groups("0"))
    seconds += 3600 * degrees + 60 * minutes
    return rf"\frac{{{seconds}}}{{3600}}^\circ "


def _interval(match: re.Match[str]) -> str:
    """Rewrite an interval with reversed brackets, `]0, 1[`, with parentheses."""
    outer, low, high, last = match.groups()
    opening = "(" if outer == "]" else "["
    closing = ")" if last == "[" else "]"
    return f"{opening}{low},{high}{closing}"


def _repeating_fraction(match: re.Match[str]) -> str:
    whole, fixed = match[1], match[2]
    repeating = match[3] or match[4]
    above = int(whole + fixed + repeating) - int(whole + fixed)
    below = 10 ** len(fixed) * (10 ** len(repeating) - 1)
    return rf"\frac{{{above}}}{{{below}}}"


def _before_its_unit(found: re.Match[str]) -> str:
    r"""Rewrite `\text{12 cm}` as `12\text{ cm}`."""
    number = found["before"] + found["number"].rstrip()
    if found["percent"]:
        return rf"{number}\%"
    return rf"{number}\text{{ {found['unit']}}}"


# Numbers and brackets of several characters; each rule relies on the output of the previous ones.
_WHOLE = marked(
    # A number and its unit in one \text, if that is a whole value: the number moves out of it. A
    # single letter after it is not a unit if it may be a variable.
    (
        "\\text",
        r"(?P<before>^ ?|[=,;] ?)\\text ?\{ ?(?P<number>[-+]?(?:\\?\$ ?)?(?:\d[\d.,/ ]{0,60}|\.\d{1,60}))"
        r"(?: ?(?P<percent>\\?%) ?|(?P<unit>(?<= )(?![abcdeiknpqrtuvwxyz](?![A-Za-z]))[A-Za-z][^{}0-9]*|[kKM]))\}",
        _before_its_unit,
    ),
    ("'", r"(\d{1,4})\^\\circ\s*(\d{1,2})'\s*(?:(\d{1,2})\s*'')?", _degrees),
    # 0.(3), and 0.1(6) if that is the whole value: elsewhere it may be a product
    (
        "(",
        r"(?<![\d.])(\d{1,60}\.)\((\d{1,60})\)(?![\d(])|^(\d{1,60}\.\d{1,60})\((\d{1,60})\)$",
        lambda found: rf"{found[1] or found[3]}\overline{{{found[2] or found[4]}}}",
    ),
    # dots over the first and the last digit that repeat: 0.\dot{1}\dot{8}
    (
        r"\dot",
        r"(?<![\d.])(\d{1,60}\.\d{0,60})\\dot\s*\{(\d)\}(\d{0,60})\\dot\s*\{(\d)\}",
        r"\1\\overline{\2\3\4}",
    ),
    ("", r"(?<![\d)}])(\]|\[)([^][()]{1,100})[,;]([^][()]{1,100})(\[|\])(?![\w(])", _interval),
    (
        r"\begin",
        r"\(\s*\\begin\s*\{array\}\s*\{[clr| ]*\}((?s:.{1,500}?))\\end\s*\{array\}\s*\)",
        r"\\begin{pmatrix}\1\\end{pmatrix}",
    ),
    # 0.333..., 0.1232323...: digits repeated three times before the dots continue; without other
    # digits before them, two repetitions are enough, as in 0.2727... (but not in 2.718281828...)
    (
        ".",
        rf"(?<![\d.])(\d{{1,60}})\.(?=\d{{3,}}\s*{_ELLIPSIS})"
        rf"(?:(\d{{2,20}}?)\2{{1,30}}|(\d{{0,60}}?)(\d{{1,20}}?)\4{{2,60}})\s*{_ELLIPSIS}",
        r"\1.\3\\overline{\2\4}",
    ),
    (
        ".",
        r"(?<![\d.])(\d{1,60})\.(\d{0,60})\\(?:overline|bar|dot)\s*(?:\{\s*(\d{1,60})\s*\}|(\d))"
        rf"(?:\s*{_ELLIPSIS})?(?!\s*(?:\d|\\(?:overline|bar|dot)(?![A-Za-z])))",
        _repeating_fraction,
    ),
)


def _trim(text: str) -> str:
    r"""Strip spaces, a trailing period or comma, and outer braces, boxes or the `\text` of a number
    (a few)."""
    for _ in range(8):
        before = text
        text = text.strip()
        if not text.endswith(("\\,", "\\;", "\\:")):
            text = text.rstrip(" ,;:?").removesuffix(".")
        text = text.lstrip(" ,;:=")
        for opening in ("\\boxed{", "\\fbox{", "{", "\\text{"):
            if not (text.startswith(opening) and text.endswith("}") and _wraps(text, len(opening))):
                continue
            inside = text[len(opening) : -1]
            if opening != "\\text{" or not _WORDS.search(_SIGN.sub("", inside)):
                text = inside
        if text == before:
            break
    return text


def _wraps(text: str, start: int) -> bool:
    """Return whether the last character closes the brace opened just before `start`."""
    depth = 1
    for token in re.finditer(r"\\.|[{}]", text[start:-1]):
        depth += (token[0] == "{") - (token[0] == "}")
        if depth == 0:
            return False
    return depth == 1 and not text.endswith("\\}")
