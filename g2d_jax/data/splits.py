"""Stable problem ids, and the splits that follow from them.

An id depends on the prompt's text alone and a split on the id alone, so a problem stays in its
split whatever file, order, subset or machine it is read from, and a growing data set moves nothing
from test to train.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Protocol, TypeAlias, TypeVar

from g2d_jax.records import Prompt

Split: TypeAlias = Literal["train", "dev", "test"]


class Asks(Protocol):
    """Anything with an id that `problem_id` made, and the prompt that it was made of: Problem,
    Example."""

    @property
    def id(self) -> str:
        """Return 16 hex digits."""

    @property
    def prompt(self) -> Prompt:
        """Return the statement or the conversation."""


T = TypeVar("T", bound=Asks)

_ENDS = ".,;:!?\u2026\u3002\uff0c\uff1b\uff1a\uff01\uff1f"  # also the Chinese ones
Names = dict[str, tuple[str, bool]]
"""Every id by which a held-out prompt may be met -> that of its problem, and whether that has a
system message."""


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


def _asked(prompt: Prompt) -> str:
    """Name what a prompt asks, by which leaks are found: its text without case, the punctuation at
    its end, and spaces other than those between two digits."""
    text = " ".join(unicodedata.normalize("NFC", prompt_text(prompt)).casefold().split())
    text = re.sub(r"(?<!\d) | (?!\d)", "", text)
    return problem_id(text.rstrip(_ENDS) or text)


def split_of(identifier: str) -> Split:
    """Return the split of an id, by this uniform hash as a fraction of 2^64: eight tenths train,
    one dev, one test."""
    fraction = int(identifier, 16) / 2**64
    if fraction < 0.8:
        return "train"
    if fraction < 0.9:
        return "dev"
    return "test"


def names_of(
    held_out: Iterable[Asks], conversation: Callable[[Prompt], Prompt] | None = None
) -> Names:
    """Map the ids by which the prompts of held-out problems may be met to the problems' own.

    Those are its own, and those of what it asks (spaces, case and final punctuation apart): as a
    whole, and of what the user says in it, if that is one message, alone and behind the prompt
    template. conversation: what makes the messages of a prompt, such as
    `PromptTokenizer.conversation`; None for no template.
    """
    records = sorted(held_out, key=lambda record: _has_system(record.prompt))
    names = {record.id: (record.id, _has_system(record.prompt)) for record in records}
    for record in records:
        names.setdefault(_asked(record.prompt), names[record.id])
        prompts = [record.prompt]
        if conversation is not None:
            prompts.append(conversation(record.prompt))
        for prompt in prompts:
            said = _said_by_user(prompt)
            if len(said) == 1:
                names.setdefault(_asked(said[0]), names[record.id])
    return names


def met(identifier: str, prompt: Prompt, names: Names) -> str | None:
    """Return the id of the held-out problem that a prompt asks, whatever stands around it: a system
    message, other turns. None if it asks none.

    Of two prompts that both have a system message, what the user says is not all that is asked: they
    are one problem only as a whole. identifier: the prompt's own id.
    """
    for name in (identifier, _asked(prompt)):
        if name in names:
            return names[name][0]
    has_system = _has_system(prompt)
    for text in _said_by_user(prompt):
        found = names.get(_asked(text))
        if found is not None and not (has_system and found[1]):
            return found[0]
    return None


def _has_system(prompt: Prompt) -> bool:
    """Return whether a prompt is a conversation with a system message."""
    return not isinstance(prompt, str) and any(message["role"] == "system" for message in prompt)


def _said_by_user(prompt: Prompt) -> list[str]:
    """List what the user says in a prompt."""
    if isinstance(prompt, str):
        return [prompt]
    return [message["content"] for message in prompt if message["role"] == "user"]


def drop_overlap(train: Sequence[T], names: Names) -> tuple[list[T], int]:
    """Return training records that ask no held-out problem, and how many were dropped. names: of
    `names_of`."""
    distinct = [record for record in train if met(record.id, record.prompt, names) is None]
    return distinct, len(train) - len(distinct)
