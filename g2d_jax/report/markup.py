"""Escaping of text: untrusted text of models, datasets and configs passes through `shown`, or in
attributes `visible`.

There are two safeguards: jinja2 escapes everything that is not Markup, and the page's
Content-Security-Policy forbids foreign scripts, requests and styles.
"""

from __future__ import annotations

import re
import unicodedata

from markupsafe import Markup, escape


def _invisible(text: str) -> dict[str, str | int | None]:
    r"""Map each invisible or direction-changing character of a text to its escape, such as
    \u202e."""
    if text.isprintable():
        return {}
    hidden: dict[str, str | int | None] = {}
    for char in {*text} - {"\n", "\t"}:
        if not char.isprintable() and unicodedata.category(char) != "Zs":
            hidden[char] = char.encode("unicode_escape").decode("ascii")
    return hidden


def visible(text: str) -> str:
    """Return the text with invisible characters as escapes; newline and tab stay."""
    return text.translate(str.maketrans(_invisible(text)))


def shown(text: str) -> Markup:
    """Return the text as HTML, with escapes in elements of their own; newline and tab stay."""
    spans: dict[str, str | int | None] = {}
    for char, escaped in _invisible(text).items():
        spans[char] = f'<span class="escape" title="U+{ord(char):04X}">{escaped}</span>'
    return Markup(str(escape(text)).translate(str.maketrans(spans)))


def prose(text: str) -> Markup:
    """Return a sentence or a number as HTML that does not break lines inside "81 %", "± 0.6", "K =
    6" or "[1, 2]"."""
    return shown(re.sub(r"(?<=\d) (?=%)|(?<=[±=]) | (?=[±=]|[^ \[]+\])", "\u00a0", text))


def shorten(text: str, limit: int) -> str:
    """Return the text, without its middle if it is longer than `limit` characters."""
    extra = len(text) - limit
    if extra <= 0:
        return text
    return (
        f"{text[: limit // 2]}\n[… {extra:,} characters left out …]\n{text[limit // 2 + extra :]}"
    )


def on_one_line(text: str, limit: int) -> str:
    """Return the text on one line, cut at `limit` characters."""
    line = " ".join(text[: 4 * limit].split())
    if len(line) <= limit:
        return line
    return line[:limit] + " …"
