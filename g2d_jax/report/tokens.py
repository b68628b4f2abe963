"""A completion's tokens coloured by the probability they were drawn with.

Token boundaries come from decoding ever longer parts of the ids, so any fast tokenizer will do. Tokens that hold parts
of one character are shown together. What cannot be shown rightly is not coloured: None, and callers show plain text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from g2d_jax.data import arithmetic
from g2d_jax.data.template import TemplateSettings
from g2d_jax.data.tokenizer import Ids, PromptTokenizer, load_tokenizer
from g2d_jax.report.markup import shown
from g2d_jax.tables import safe_text

LEVELS = {0.9: "0.9 or more", 0.5: "0.5 to 0.9", 0.2: "0.2 to 0.5", 0.05: "0.05 to 0.2", 0.0: "less than 0.05"}
"""Lowest probability of each class p0 … p4 of the style sheet, and how the legend names it."""

MOST = 800
"""Tokens of one completion that are shown: of a longer one the first and the last."""

_LOOKAHEAD = 3  # tokens that may follow in one character: UTF-8 has at most four bytes
_BROKEN = "\ufffd"


@dataclass(frozen=True)
class Piece:
    """Neighbouring tokens first … last - 1 that make whole characters."""

    text: str
    first: int
    last: int


def run_tokenizer(config: Mapping[str, Any]) -> PromptTokenizer:
    """The tokenizer that a run's config names, as its stages load it. Raises ValueError when it cannot be loaded."""
    settings, model = config.get("tokenizer") or {}, config.get("model") or {}
    try:
        names = ("chat", "prompt_template", "system", "date", "enable_thinking")
        chosen = TemplateSettings(**{name: settings[name] for name in names if settings.get(name) is not None})
        if path := settings.get("path"):
            return load_tokenizer(path, chosen, revision=settings.get("revision"))
        return load_tokenizer(model.get("path") or arithmetic.SLIPS.name, chosen, revision=model.get("revision"))
    except (OSError, ImportError, TypeError, AttributeError) as error:  # of a config.json that nothing here wrote, too
        raise ValueError(f"the tokenizer cannot be loaded: {error}") from error


def coloured(tokenizer: PromptTokenizer, text: str, ids: Ids, logprobs: np.ndarray) -> str | None:
    """Markup of a completion, special tokens and stop token included; None where colours would be wrong.

    text: as it is on disk. ids [T] int32, logprobs [T] in nats. None if there is no log-probability, if the tokens do
    not spell the text (another tokenizer, a text from elsewhere) or if it cannot be cut between tokens.
    """
    if not len(ids) or len(logprobs) != len(ids) or np.isnan(logprobs).any() or ids.min() < 0:
        return None
    if safe_text(tokenizer.decode(ids)) != text:
        return None
    head, tail = _ends(tokenizer, ids)
    if head is None or tail is None:
        return None
    special = _special(tokenizer, ids)
    body = "".join(_spans(head, logprobs, special))
    if tail:
        left_out = f"\n[… {tail[0].first - head[-1].last:,} tokens left out …]\n"
        body += shown(left_out) + "".join(_spans(tail, logprobs, special))
    return f'<pre tabindex="0" class="tokens">{body}</pre>'


def legend() -> str:
    """What the colours mean, as a list."""
    names = list(LEVELS.values())
    keys = "".join(f'<li><span class="p{i}">{shown(name)}</span></li>' for i, name in enumerate(names))
    return f'<ul class="legend scale"><li>Probability of a token:</li>{keys}</ul>'


def pieces(tokenizer: PromptTokenizer, ids: Ids, offset: int = 0) -> list[Piece] | None:
    """The text of ids [T] cut wherever a token ends with a character; None if the parts do not add up to the whole.

    offset: number of the first token. A part is settled when the tokens that may still belong to its last character
    leave it as it is.
    """
    found: list[Piece] = []
    anchor = start = 0  # of the piece before, which tells whether a space belongs to the next; of the piece under way
    for end in range(1, len(ids) + 1):
        before, now = tokenizer.decode_raw(ids[anchor:start]), tokenizer.decode_raw(ids[anchor:end])
        if now.endswith(_BROKEN) and not _settled(tokenizer, ids[anchor:], end - anchor, now):
            continue
        if found and now == before:  # more bytes of a character that stays broken: they add nothing to its piece
            found[-1] = Piece(found[-1].text, found[-1].first, offset + end)
        else:
            found.append(Piece(now[len(before) :], offset + start, offset + end))
            anchor = start
        start = end
    whole = "".join(piece.text for piece in found)
    return found if start == len(ids) and whole == tokenizer.decode_raw(ids) else None


def _settled(tokenizer: PromptTokenizer, ids: Ids, end: int, text: str) -> bool:
    longest = min(end + _LOOKAHEAD, len(ids))
    return all(tokenizer.decode_raw(ids[:i]).startswith(text) for i in range(end + 1, longest + 1))


def _ends(tokenizer: PromptTokenizer, ids: Ids) -> tuple[list[Piece] | None, list[Piece] | None]:
    """All pieces and none, or the first and the last of them, without those that the cut may have broken."""
    if len(ids) <= MOST:
        return pieces(tokenizer, ids), []
    half, last = MOST // 2, len(ids) - MOST // 2
    head, tail = pieces(tokenizer, ids[:half]), pieces(tokenizer, ids[last:], last)
    if not head or not tail:
        return None, None
    return _whole(head[::-1])[::-1] or None, _whole(tail) or None


def _whole(parts: list[Piece]) -> list[Piece]:
    """Without the first piece, where a tokenizer may drop a space, and the rest of a character after it."""
    broken = (i for i, piece in enumerate(parts) if i == 0 or (i < _LOOKAHEAD and piece.text.strip(_BROKEN) == ""))
    return parts[max(broken, default=0) + 1 :]


def _special(tokenizer: PromptTokenizer, ids: Ids) -> set[int]:
    """Where the tokens stand that readers and rewards do not see."""
    hidden = {i for i in set(ids.tolist()) if not tokenizer.decode([i]) and tokenizer.decode_raw([i])}
    return {place for place, i in enumerate(ids.tolist()) if i in hidden}


def _spans(parts: Sequence[Piece], logprobs: np.ndarray, special: set[int]) -> Iterator[str]:
    """Every piece with its probability; neighbours of the highest class together, as they are most of a text."""
    run: list[tuple[Piece, float]] = []
    for piece in parts:
        nats = float(logprobs[piece.first : piece.last].mean(dtype=np.float64))
        probability = math.exp(min(nats, 0.0))  # rounding may leave a log-prob just above 0
        if level(probability) == 0 and piece.first not in special:
            run.append((piece, probability))
            continue
        yield _span(run)
        yield _span([(piece, probability)], " special" if piece.first in special else "")
        run = []
    yield _span(run)


def _span(run: Sequence[tuple[Piece, float]], css: str = "") -> str:
    text = "".join(piece.text for piece, _ in run)
    if not text:
        return ""
    count, least = sum(piece.last - piece.first for piece, _ in run), min(probability for _, probability in run)
    kind = "mean" if len(run) == 1 else "least"
    title = f"p = {least:.2g}" if count == 1 else f"{count} tokens, {kind} p = {least:.2g}"
    return f'<span class="p{level(least)}{css}" title="{title}">{shown(text)}</span>'


def level(probability: float) -> int:
    """The class of a probability: 0 for the highest."""
    return next(i for i, lowest in enumerate(LEVELS) if probability >= lowest)
