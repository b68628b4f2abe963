"""Stop strings: texts that end a response, found in tokens that come one after the other.

A response ends with the token in which a stop string is first complete in its text. That token
stays among the ids, for the policy chose it; the text that rewards and readers see ends where the
stop string begins. A string may span tokens, begin inside one and end inside one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Turns token ids into the text that rewards see; of ids that end inside a character that character
is U+FFFD."""

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER = 4  # bytes of one in UTF-8, and so tokens
# characters beside a stop string's own, where a text that is cut out may begin otherwise than the
# whole
_CONTEXT = 8


def cut(text: str, stop: Sequence[str]) -> str:
    """Return a text up to the stop string that begins first, whole if it has none."""
    begins = [at for string in stop if (at := text.find(string)) >= 0]
    return text[: min(begins, default=len(text))]


class Watch:
    """Watch one response for the token in which a stop string is first complete.

    Where a response is handed over in other parts, the result is the same. Each part is decoded
    with some tokens before it, as many as the longest stop string may need, so that the work grows
    with the response's length alone. (Where a hundred times as many tokens have no text, or are
    bytes of no character, a string that spans them is not found.)
    """

    def __init__(self, decode: Decode, stop: Sequence[str]) -> None:
        self._decode, self._stop = decode, tuple(stop)
        self._ids: list[int] = []
        self._begin = 0  # of the tokens that are decoded with the next part
        self._context = max(map(len, self._stop)) + _CONTEXT

    def add(self, ids: Iterable[int]) -> int | None:
        """Take the next tokens. Return the number of tokens of the response once it has ended, None
        while it has not.

        No more tokens may be added to a response that has ended.
        """
        before = len(self._ids)
        self._ids += map(int, ids)
        text = self._decode(self._ids[self._begin :])
        # Text only grows at its end, but where a character is broken: there tokenizers with a
        # fallback to bytes take back what they had made of the bytes before it.
        if _BROKEN in text or self._has_stop(text):
            # The part's text settles that there is an end, and each of its tokens is tried as one;
            # the whole text has the last word, for a text that is cut out may begin otherwise.
            for end in range(before + 1, len(self._ids) + 1):
                seen = self._has_stop(self._decode(self._ids[self._begin : end]))
                if seen and self._has_stop(self._decode(self._ids[:end])):
                    return end
        self._move_on()
        return None

    def _has_stop(self, text: str) -> bool:
        return any(string in text for string in self._stop)

    def _move_on(self) -> None:
        """Keep the last tokens alone, where these have text enough: a character may take several,
        and some have none.

        They must not begin inside a character. Of most texts a character of context needs less than
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
