"""Words and units in `\\text{ }` after a value: harmless ones, which a comparison ignores, and
ones that change the answer."""

from __future__ import annotations

import re

from g2d_jax.rewards import measures
from g2d_jax.rewards.normalise import TEXT
from g2d_jax.rewards.quantity import HEDGES, POWER_WORDS, SCALES, unit_of

_SAYING_MORE = HEDGES.union(SCALES)
_WORD = re.compile(r"[a-z']+")
# Also "cm" after a root or pi, where it is not a product.
_AT_END = re.compile(
    r"(?:\s*\\text\s*\{([^{}0-9]*)\}|(?:(?<=\} )|(?<=\\pi ))[cm]m)\s*(?:\^\s*\{?\d\}?)?$"
)


def says_more(text: str) -> bool:
    r"""Return whether words in `\text` doubt an answer, change it or add another:
    `5 \text{ or more}`."""
    for marked in TEXT.findall(text):
        words = {*_WORD.findall(marked.lower()), marked.strip()}  # also K and M, which are scales
        if words & _SAYING_MORE or (words and words <= POWER_WORDS.keys()):
            return True
    return False


def without_unit(cleaned: str) -> str:
    """Drop a `\\text{...}` at the end, unless it is the whole answer or more than a unit ("or",
    "not")."""
    match = _AT_END.search(cleaned)
    if match is None or says_more(match[0]):
        return cleaned
    return cleaned[: match.start()] or cleaned


def differ(gold: str, answer: str) -> bool:
    """Return whether both have known units that differ."""
    return not measures.agree(_known_unit(gold), _known_unit(answer))


def _known_unit(text: str) -> str:
    match = _AT_END.search(text)
    return unit_of(match[0].strip()) if match else ""
