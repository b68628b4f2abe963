r"""Removal of names from answers: `x = 5` and `P(0 < \xi < 6) = 0.6` become values,
`f(n) = n^2 \quad \forall n` becomes a function.

All functions expect cleaned answers (normalise.clean), are linear, and change no value.
"""

from __future__ import annotations

import re

from g2d_jax.rewards.normalise import Pair

_INDEX = re.compile(r"_\s*(?:\{[^{}]*\}|\\[A-Za-z]+|\w)|'")
_ARGUMENTS = re.compile(r"(?<=[A-Za-z])\s*\([^()]*\)")
_BARS = re.compile(
    r"\|\s*([A-Za-z]{1,3})\s*\||\\(?:overline|vec|overarc|overrightarrow|widehat|bar)\s*(?:\{\s*([A-Za-z]{1,3})\s*\}|\s([A-Za-z]))"
)
_SETS = re.compile(r"\\(?:cap|cup|setminus|complement)(?![A-Za-z])|:")
_BEFORE = re.compile(
    r"\\(?:angle|triangle|max|min|sup|inf|deg|operatorname\s*\{[A-Za-z]+\}"
    r"|text\s*\{(?![^{}]*\b(?:not|no|is|isn|never)\b)[^{}]*\})(?![A-Za-z])"
)
_NAME = re.compile(
    r"\s*(?:[A-Za-z]{1,4}|\\(?!(?:pi|infty|not|neg|ln|lg|log|sin|cos|tan|exp)(?![A-Za-z])|frac|sqrt)[a-z]+)?\s*"
)
_FUNCTION = re.compile(r"\s*([A-Za-z])\s*\(\s*([A-Za-z])\s*\)\s*(?==)")
_LETTERS = r"[A-Za-z](?:\s*,\s*[A-Za-z])*"
_NUMBERS = (
    r"\\(?:mathbb|mathbf|text)\s*\{\s*[RQZNC]\s*\}"
    r"(?:\s*[\^_]\s*(?:\{[^{}]*\}|[-+*\w]|\\[a-z]+))*|[RQZN](?![A-Za-z])"
)
_KINDS = r"(?:(?:real|integer|natural|rational|positive|nonnegative|numbers?|integers|reals|values|of)\s*)*"
_FOR_ALL = re.compile(
    rf"[,;]?\s*\(?(?:\\text\s*\{{\s*,?\s*for (?:all|any|every|each)\s*{_KINDS}\}}|for "
    rf"(?:all|any|every|each)\s+{_KINDS}"
    rf"|\\forall(?![A-Za-z])\s*)\s*(?:{_LETTERS})\s*(?:\\in\s*(?:{_NUMBERS}))?(?![A-Za-z+*/^<>=\\])\)?"
)
ORDER = re.compile(r"[<>]|\\(?:le|ge|ne)(?![A-Za-z])")
_PARAMETER = re.compile(
    rf"(.*?)[,;]?\s*\(?\s*(?:\\text\s*\{{\s*(?:where|with|for)\s*\}}\s*)?([A-Za-z])\s*\\in\s*({_NUMBERS})\s*\)?\s*",
    re.DOTALL,
)
_PRIMES = re.compile(r"([A-Za-z\d])('+)")
_COMMAND_OR_LETTER = re.compile(r"\\[A-Za-z]+|[A-Za-z]")


def primed(text: str) -> str:
    """Replace the primes of `y'` and `f''` by an index, since math-verify drops primes."""
    return _PRIMES.sub(_indexed, text)


def _indexed(found: re.Match[str]) -> str:
    name, primes = found.groups()
    # Indices from 97 on: no answer has them, and grade._keep_case uses others.
    if name.isdigit():  # minutes of arc, feet
        name = f" {name}x"
    return f"{name}_{{97{len(primes)}}}"


def same(one: str, other: str) -> bool:
    """Return whether two names are the same except for spaces, braces and backslashes."""
    a, b = (re.sub(r"[{}\\\s]", "", name.replace(r"\mid", "|")) for name in (one, other))
    return a == b


def is_name(text: str) -> bool:
    r"""Return whether a text names a quantity, a function or a set: `x_1`, `m_{\max}`, `f(x)`, `M \cap N`, `|AB|`."""
    if len(text) > 100 or not text.strip():
        return False
    bare = _BARS.sub(lambda found: found[1] or found[2] or found[3], _INDEX.sub("", text))
    bare = _ARGUMENTS.sub("", bare)
    return all(map(_NAME.fullmatch, _SETS.split(_BEFORE.sub("", bare))))


def assignment(text: str) -> tuple[str, str] | None:
    """Split `name = value`; None for any other text, such as an equation."""
    left, sign, value = text.rpartition("=")
    name, value = left.strip(), value.strip()
    if not sign or not value or ORDER.search(value) or not is_name(name):
        return None
    return name.replace(" ", ""), value


def alike(gold: str, answer: str) -> Pair:
    r"""Return two answers with the same names for bound variables, of `f(t) = t`, and without a
    final `for all x \in R`."""
    gold, answer = _FOR_ALL.sub("", gold), _FOR_ALL.sub("", answer)
    a, b = _FUNCTION.match(gold), _FUNCTION.match(answer)
    if a and b and a[1] == b[1] and _varies(gold, a[2]) and _varies(answer, b[2]):
        names = {b[2]: a[2]}
        if a[2] not in _COMMAND_OR_LETTER.findall(answer):
            answer = _COMMAND_OR_LETTER.sub(lambda found: names.get(found[0], found[0]), answer)
    return _as_function(gold, answer), _as_function(answer, gold)


def parameter(text: str) -> tuple[str, str] | None:
    r"""Split a final `k \in \mathbb{Z}` from values that depend on k: the set, and the values."""
    found = _PARAMETER.fullmatch(text)
    if found is None or ORDER.search(found[1]):
        return None
    if found[2] not in _COMMAND_OR_LETTER.findall(found[1].rpartition("=")[2]):
        return None
    return found[3], found[1].strip()


def _as_function(text: str, other: str) -> str:
    """Rewrite `y = x^2` as `f(x) = x^2` if the other answer has that form."""
    found = _FUNCTION.match(other)
    if found and text[:1] == "y" and text[1:].lstrip().startswith("=") and _varies(text, found[2]):
        return found[0] + text[1:].lstrip()
    return text


def _varies(text: str, name: str) -> bool:
    """Return whether a definition's value contains its variable: then it is no event and no
    constant."""
    return name not in "ei" and name in _COMMAND_OR_LETTER.findall(text.partition("=")[2])
