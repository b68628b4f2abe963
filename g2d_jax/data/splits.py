"""Stable problem ids, and the splits that follow from them.

An id depends on the prompt's text alone and a split on the id alone, so a problem stays in its split whatever file,
order, subset or machine it is read from, and a growing data set moves nothing from test to train.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, TypeVar, get_args

from g2d_jax.records import Prompt

Split: TypeAlias = Literal["train", "dev", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)


class HasId(Protocol):
    """Anything with an id that `problem_id` made: Problem, Example."""

    @property
    def id(self) -> str:
        """16 hex digits."""


T = TypeVar("T", bound=HasId)


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of the problems in train, dev and test; they sum to 1. Raises ValueError if they do not."""

    train: float = 0.8
    dev: float = 0.1
    test: float = 0.1

    def __post_init__(self) -> None:
        shares = (self.train, self.dev, self.test)
        if not all(0.0 <= share <= 1.0 for share in shares) or abs(sum(shares) - 1.0) > 1e-9:
            raise ValueError(f"shares of train, dev and test must be in [0, 1] and sum to 1, got {shares}")


DEFAULT_SHARES = Shares()


def prompt_text(prompt: Prompt) -> str:
    """The text an id is made of: the statement, or the messages with their roles.

    A conversation of one user message is the same problem as its bare text.
    """
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1 and prompt[0]["role"] == "user":
        return prompt[0]["content"]
    return "\x1e".join(f"{message['role']}\x1f{message['content']}" for message in prompt)


def problem_id(prompt: Prompt) -> str:
    """16 hex digits: BLAKE2b of the prompt's text in Unicode NFC with every run of whitespace as one space."""
    normalised = " ".join(unicodedata.normalize("NFC", prompt_text(prompt)).split())
    return hashlib.blake2b(normalised.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def split_of(identifier: str, shares: Shares = DEFAULT_SHARES) -> Split:
    """The split of an id. The id is itself a uniform hash: read as a fraction of 2^64 it falls into one share."""
    fraction = int(identifier, 16) / 2**64
    if fraction < shares.train:
        return "train"
    if fraction < shares.train + shares.dev or shares.test == 0.0:
        return "dev" if shares.dev > 0.0 else "train"
    return "test"


def check_split(split: str) -> Split:
    """`split` itself; raises ValueError if it is not train, dev or test."""
    for known in SPLITS:
        if split == known:
            return known
    raise ValueError(f"unknown split {split!r}: choose one of {', '.join(SPLITS)}")


def drop_overlap(train: Sequence[T], evaluation: Iterable[HasId]) -> tuple[list[T], int]:
    """Training records whose prompt does not occur in the evaluation set, and how many were dropped."""
    held_out = {record.id for record in evaluation}
    kept = [record for record in train if record.id not in held_out]
    return kept, len(train) - len(kept)
