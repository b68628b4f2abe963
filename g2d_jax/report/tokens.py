"""Colour a completion's tokens by the probability they were sampled with.

Token boundaries come from decoding ever longer parts of the ids, so any fast tokenizer will do.
Tokens that hold parts of one character are shown together. What cannot be shown rightly is not
coloured: None, and callers show plain text.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from g2d_jax.config import places
from g2d_jax.data import arithmetic
from g2d_jax.data.template import TemplateSettings
from g2d_jax.data.tokenizer import Ids, PromptTokenizer, load_tokenizer
from g2d_jax.report.runs import read_optional
from g2d_jax.runtime.storage import PathLike, is_local
from g2d_jax.runtime.tables import safe_text
from g2d_jax.workdir import absolute

LEVELS = {
    0.9: "0.9 or more",
    0.5: "0.5 to 0.9",
    0.2: "0.2 to 0.5",
    0.05: "0.05 to 0.2",
    0.0: "less than 0.05",
}
"""Lowest probability of each class p0 … p4 of the style sheet, and how the legend names it."""

MOST = 800
"""Tokens of one completion that are shown: of a longer one the first and the last."""

_CHARACTER = 4  # tokens of one character at most: UTF-8 has at most four bytes
_BROKEN = "\ufffd"


class Piece(NamedTuple):
    """Neighbouring tokens first … last - 1 that make whole characters."""

    text: str
    first: int
    last: int


class Span(NamedTuple):
    """A stretch of text on a page, with its class in the style sheet and its tooltip."""

    text: str
    css: str = ""
    title: str = ""


def run_tokenizer(config: Mapping[str, Any], workdir: PathLike | None = None) -> PromptTokenizer:
    """Load the tokenizer that a run's config names from this machine: no hub and no object store is
    asked for it.

    workdir: of the run, for files that have moved together with it. Raises ValueError when it
    cannot be loaded.
    """
    settings = config.get("tokenizer") or {}
    model = config.get("model") or {}
    try:
        names = ("chat", "prompt_template", "system", "date", "enable_thinking")
        chosen = TemplateSettings(
            **{name: settings[name] for name in names if settings.get(name) is not None}
        )
        section = settings if settings.get("path") else model
        path = section.get("path") or arithmetic.SLIPS.name
        place = _on_this_machine(path, section.get("revision"), workdir)
        return load_tokenizer(place, chosen, fault=lambda error: None)  # a report only decodes
    except (
        OSError,
        ImportError,
        TypeError,
        AttributeError,
    ) as error:  # of a config.json that nothing here wrote, too
        raise ValueError(f"the tokenizer cannot be loaded: {error}") from error


def _on_this_machine(path: str, revision: str | None, workdir: PathLike | None) -> str:
    """Return the folder of a tokenizer on this machine, of a hub id the downloaded one. Raises
    ValueError."""
    if path in arithmetic.TASKS:
        return path
    if not is_local(path):
        raise ValueError(
            f"the tokenizer lies at {path}, and a report reads this machine's files alone"
        )
    if workdir is not None:
        content = read_optional(absolute(workdir) / "config.json")
        path = places.followed(
            path, "model", str(content.get("workdir", "")), str(absolute(workdir))
        )
    if places.is_path(path) or os.path.isdir(path):
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return snapshot_download(path, revision=revision, local_files_only=True)
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise ValueError(
            f"the tokenizer {path} was not downloaded here, and a report asks no hub"
        ) from error


def coloured(
    tokenizer: PromptTokenizer, text: str, ids: Ids, logprobs: np.ndarray
) -> list[Span] | None:
    """Cut a completion into spans, special tokens and stop token included; None where colours would
    be wrong.

    text: as it is on disk. ids [T] int32, logprobs [T] in nats. None if there is no
    log-probability, if the tokens do not spell the text (another tokenizer, a text from elsewhere)
    or if it cannot be cut between tokens.
    """
    if not len(ids) or len(logprobs) != len(ids) or np.isnan(logprobs).any() or ids.min() < 0:
        return None
    decoded = safe_text(tokenizer.decode(ids))
    if not decoded.startswith(
        text
    ):  # it may end before: a stop string and what follows it are cut off, or all is
        return None
    special = _special(tokenizer, ids)
    if len(ids) <= MOST:
        whole = pieces(tokenizer, ids)
        return None if whole is None else list(_spans(whole, logprobs, special))
    half = MOST // 2
    head = pieces(tokenizer, ids[:half])
    tail = pieces(tokenizer, ids[-half:], len(ids) - half)
    if head is None or tail is None:
        return None
    # the cut may have gone through a character, or dropped a space
    head, tail = (
        head[:-1],
        tail[1:],
    )
    while (
        tail and tail[0].first < len(ids) - half + _CHARACTER and tail[0].text.strip(_BROKEN) == ""
    ):
        tail = tail[1:]
    left_out = Span("")
    if head and tail:
        left_out = Span(f"\n[… {tail[0].first - head[-1].last:,} tokens left out …]\n")
    return [*_spans(head, logprobs, special), left_out, *_spans(tail, logprobs, special)]


def pieces(tokenizer: PromptTokenizer, ids: Ids, offset: int = 0) -> list[Piece] | None:
    """Cut the text of ids [T] wherever a token ends with a character; None if the parts are not the
    whole.

    offset: number of the first token.
    """
    cut: list[Piece] = []
    anchor = start = (
        # of the piece before, which tells whether a space belongs to the next; of the piece under
        # way
        0
    )
    for end in range(1, len(ids) + 1):
        before, now = tokenizer.decode_raw(ids[anchor:start]), tokenizer.decode_raw(ids[anchor:end])
        if now.endswith(_BROKEN) and end < min(start + _CHARACTER + 1, len(ids)):
            continue
        cut.append(Piece(now[len(before) :], offset + start, offset + end))
        anchor, start = start, end
    return cut if "".join(piece.text for piece in cut) == tokenizer.decode_raw(ids) else None


def _special(tokenizer: PromptTokenizer, ids: Ids) -> set[int]:
    """Find where the tokens stand that readers and rewards do not see."""
    hidden = []
    for i in set(ids.tolist()):
        if not tokenizer.decode([i]) and tokenizer.decode_raw([i]):
            hidden.append(i)
    return set(np.flatnonzero(np.isin(ids, hidden)).tolist())


def _spans(parts: Sequence[Piece], logprobs: np.ndarray, special: set[int]) -> Iterator[Span]:
    """Yield every piece with its probability; neighbours of the highest class together: they are
    most of a text."""
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


def _span(run: Sequence[tuple[Piece, float]], css: str = "") -> Span:
    count = sum(piece.last - piece.first for piece, _ in run)
    least = min((p for _, p in run), default=1.0)
    kind = "mean" if len(run) == 1 else "least"
    title = f"p = {least:.2g}" if count == 1 else f"{count} tokens, {kind} p = {least:.2g}"
    return Span("".join(piece.text for piece, _ in run), f"p{level(least)}{css}", title)


def level(probability: float) -> int:
    """Return the class of a probability: 0 for the highest."""
    return next(i for i, lowest in enumerate(LEVELS) if probability >= lowest)
