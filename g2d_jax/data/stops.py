"""Stop strings: texts that end a response, found while its tokens arrive.

A response ends with the token that first completes a stop string in its text. That token stays
among the ids, because the policy sampled it; the text for rewards and readers ends where the stop
string begins. A string may span tokens, begin inside one and end inside one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Turns token ids into the text that rewards see; an incomplete character at the end becomes
U+FFFD."""

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER = 4  # bytes of one in UTF-8, and so tokens
# characters of context besides a stop string's own, since a text that is cut out may begin
# differently
_CONTEXT = 8


def cut(text: str, stop: Sequence[str]) -> str:
    """Return a text up to the stop string that begins first, or all of it."""
    begins = [at for string in stop if (at := text.find(string)) >= 0]
    return text[: min(begins, default=len(text))]


class Watch:
    """A watcher of one response for the token that first completes a stop string.

    The result does not depend on how the response is divided into parts. Each part is decoded with
    as many previous tokens as the longest stop string may need, so that the work grows with the
    response's length alone. (A string is not found if it spans a hundred times as many tokens that
    have no text, or are bytes of no character.)
    """

    def __init__(self, decode: Decode, stop: Sequence[str]) -> None:
        self._decode, self._stop = decode, tuple(stop)
        self._ids: list[int] = []
        self._begin = 0  # of the tokens that are decoded with the next part
        self._context = max(map(len, self._stop)) + _CONTEXT

    def add(self, ids: Iterable[int]) -> int | None:
        """Add the next tokens. Return the response's number of tokens once it has ended, until then
        None.

        Do not add tokens to a response that has ended.
        """
        before = len(self._ids)
        self._ids += map(int, ids)
        text = self._decode(self._ids[self._begin :])
        # Text grows only at its end, except at a broken character: there tokenizers with a byte
        # fallback replace the text of the previous bytes.
        if _BROKEN in text or self._has_stop(text):
            # The part's text shows that there is an end, and each of its tokens is tried as one.
            # The whole text decides, since a text that is cut out may begin differently.
            for end in range(before + 1, len(self._ids) + 1):
                seen = self._has_stop(self._decode(self._ids[self._begin : end]))
                if seen and self._has_stop(self._decode(self._ids[:end])):
                    return end
        self._move_on()
        return None

    def _has_stop(self, text: str) -> bool:
        return any(string in text for string in self._stop)

    def _move_on(self) -> None:
        """Keep only the last tokens, if they have enough text: a character may need several, and
        some have none.

        They must not begin inside a character. In most texts a character of context needs less than
        a token: the fewest tokens are tried first.
        """
        for size in (self._context, 4 * self._context, 16 * self._context):
            for begin in range(
                len(self._ids) - size, len(self._ids) - size - _LONGEST_CHARACTER, -1
            ):
                if begin <= self._begin:
                    break
                text = self._decode(self._ids[begin:])
                if len(text) >= self._context and not text.startswith(_BROKEN):
                    self._begin = begin
                    return
        if len(self._ids) - self._begin > 100 * self._context:
            self._begin = len(self._ids) - 50 * self._context
