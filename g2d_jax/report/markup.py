"""Escaping, and the parts of a page. Whatever a model, a data set or a config wrote goes through `shown`.

Two fences: nothing here lets text become markup, and the page's Content-Security-Policy forbids scripts, requests and
any style but the page's own, should that ever fail.
"""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Mapping, Sequence

from g2d_jax.records import Prompt, Verdict

_INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}  # control, format (text direction), surrogates, separators


def shown(text: str, *, plain: bool = False) -> str:
    r"""Text as HTML, with characters that are invisible or steer the text's direction shown as escapes such as \u202e.

    Newline and tab stay. plain: without elements around the escapes, as attributes need.
    """
    return "".join(_character(char, plain) for char in text)


def _character(char: str, plain: bool) -> str:
    if char in "\n\t" or unicodedata.category(char) not in _INVISIBLE:
        return html.escape(char)
    escape = char.encode("unicode_escape").decode("ascii")
    return escape if plain else f'<span class="escape" title="U+{ord(char):04X}">{escape}</span>'


def shorten(text: str, limit: int) -> tuple[str, int]:
    """The text, its middle left out if it is longer than `limit` characters, and how many characters that were."""
    extra = len(text) - limit
    if extra <= 0:
        return text, 0
    head = limit // 2
    return f"{text[:head]}\n[… {extra:,} characters left out …]\n{text[head + extra :]}", extra


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of text cells with its title as caption, first column heading the rows; "" without rows.

    It scrolls by itself where the screen is narrower; columns whose cells all start as numbers are right-aligned.
    """
    if not rows:
        return ""
    numeric = [all(_is_number(row[i]) for row in rows) and i > 0 for i in range(len(columns))]
    classes = [' class="number"' if flag else "" for flag in numeric]
    head = "".join(f'<th scope="col"{css}>{shown(name)}</th>' for name, css in zip(columns, classes, strict=True))
    body = []
    for row in rows:
        cells = "".join(f"<td{css}>{shown(cell)}</td>" for cell, css in zip(row[1:], classes[1:], strict=True))
        body.append(f'<tr><th scope="row">{shown(row[0])}</th>{cells}</tr>')
    inner = (
        f"<caption><span>{shown(title)}</span></caption><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody>"
    )
    label = shown(title, plain=True)
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{label}"><table>{inner}</table></div>'


def _is_number(cell: str) -> bool:
    return cell in ("", "–") or cell[0].isdigit() or cell[0] in "+-"


def heading(text: str) -> str:
    """A heading within a section."""
    return f"<h3>{shown(text)}</h3>"


def paragraph(text: str, css: str = "") -> str:
    """A paragraph of plain text."""
    attribute = f' class="{css}"' if css else ""
    return f"<p{attribute}>{shown(text)}</p>" if text else ""


def charts(*figures: str) -> str:
    """Figures in a grid of as many columns as fit; "" without any."""
    body = "".join(figures)
    return f'<div class="charts">{body}</div>' if body else ""


def details(summary: str, body: str) -> str:
    """A part that unfolds; "" if the body, which is markup, is empty."""
    return f"<details><summary>{shown(summary)}</summary>{body}</details>" if body else ""


def conversation(prompt: Prompt | Sequence[Mapping[str, str]]) -> str:
    """A prompt as text: chat messages below each other with their roles."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def badge(verdict: Verdict) -> str:
    """A verdict as a coloured label."""
    return f'<span class="badge v-{verdict.value}">{verdict.value.replace("_", " ")}</span>'


def preformatted(text: str, limit: int = 4000) -> str:
    """Text with its line breaks, at most `limit` characters of it, in a box of its own that scrolls."""
    short, _ = shorten(text, limit)
    return f'<pre tabindex="0">{shown(short)}</pre>' if text else '<pre class="empty">(empty)</pre>'
