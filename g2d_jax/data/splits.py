"""Stable problem ids, and the splits that follow from them.

An id depends on the prompt's text alone and a split on the id alone, so a problem stays in its
split whatever file, order, subset or machine it is read from, and a growing data set moves nothing
from test to train.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol, TypeAlias, TypeVar

from g2d_jax.records import Prompt

Split: TypeAlias = Literal["train", "dev", "test"]


class HasId(Protocol):
    """Anything with an id that `problem_id` made: Problem, Example."""

    @property
    def id(self) -> str:
        """Return 16 hex digits."""


T = TypeVar("T", bound=HasId)


def prompt_text(prompt: Prompt) -> str:
    """Return the text an id is made of: the statement, or the messages with their roles.

    A conversation of one user message is the same problem as its bare text.
    """
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1 and prompt[0]["role"] == "user":
        return prompt[0]["content"]
    return "\x1e".join(f"{message['role']}\x1f{message['content']}" for message in prompt)


def problem_id(prompt: Prompt) -> str:
    """Return 16 hex digits: BLAKE2b of the prompt's text in Unicode NFC with every run of
    whitespace as one space."""
    normalised = " ".join(unicodedata.normalize("NFC", prompt_text(prompt)).split())
    return hashlib.blake2b(normalised.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def split_of(identifier: str) -> Split:
    """Return the split of an id, by this uniform hash as a fraction of 2^64: eight tenths train,
    one dev, one test."""
    fraction = int(identifier, 16) / 2**64
    if fraction < 0.8:
        return "train"
    if fraction < 0.9:
        return "dev"
    return "test"


def drop_overlap(train: Sequence[T], evaluation: Iterable[HasId]) -> tuple[list[T], int]:
    """Return training records whose prompt does not occur in the evaluation set, and how many were
    dropped."""
    held_out = {record.id for record in evaluation}
    distinct = [record for record in train if record.id not in held_out]
    return distinct, len(train) - len(distinct)
