"""Stable problem ids, and the splits that follow from them.

An id depends on the prompt's text alone and a split on the id alone. So a problem stays in its
split for any file, order, subset or machine, and a growing dataset moves nothing from test to
train.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Protocol, TypeAlias, TypeVar

from g2d_jax.records import Prompt

Split: TypeAlias = Literal["train", "dev", "test"]


class HasPrompt(Protocol):
    """Anything with an id from `problem_id` and the prompt that it identifies: Problem,
    Example."""

    @property
    def id(self) -> str:
        """Return 16 hex digits."""

    @property
    def prompt(self) -> Prompt:
        """Return the statement or the conversation."""


T = TypeVar("T", bound=HasPrompt)

_ENDS = ".,;:!?\u2026\u3002\uff0c\uff1b\uff1a\uff01\uff1f"  # also the Chinese ones
Names = dict[str, tuple[str, bool]]
"""Every id that a held-out prompt may have -> its problem's id, and whether that problem has a
system message."""


def prompt_text(prompt: Prompt) -> str:
    """Return the text that an id identifies: the statement, or the messages with their roles.

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


def _leak_id(prompt: Prompt) -> str:
    """Return a prompt's id for finding leaks: from its text without case, final punctuation, and
    spaces other than those between two digits."""
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
    held_out: Iterable[HasPrompt], conversation: Callable[[Prompt], Prompt] | None = None
) -> Names:
    """Map the ids that held-out problems' prompts may have to the problems' own.

    These are its own id and those of its question (without spaces, case and final punctuation): as
    a whole, and, if it has one user message, that message alone and inside the prompt template.
    conversation: returns the messages of a prompt, such as `PromptTokenizer.conversation`; None for
    no template.
    """
    records = sorted(held_out, key=lambda record: _has_system(record.prompt))
    names = {record.id: (record.id, _has_system(record.prompt)) for record in records}
    for record in records:
        names.setdefault(_leak_id(record.prompt), names[record.id])
        prompts = [record.prompt]
        if conversation is not None:
            prompts.append(conversation(record.prompt))
        for prompt in prompts:
            texts = _user_texts(prompt)
            if len(texts) == 1:
                names.setdefault(_leak_id(texts[0]), names[record.id])
    return names


def met(identifier: str, prompt: Prompt, names: Names) -> str | None:
    """Return the id of the held-out problem in a prompt, in any context: a system message, other
    turns. None if there is none.

    If two prompts both have a system message, the user's text is not the whole question: they are
    one problem only if they are equal as a whole. identifier: the prompt's own id.
    """
    for name in (identifier, _leak_id(prompt)):
        if name in names:
            return names[name][0]
    has_system = _has_system(prompt)
    for text in _user_texts(prompt):
        found = names.get(_leak_id(text))
        if found is not None and not (has_system and found[1]):
            return found[0]
    return None


def _has_system(prompt: Prompt) -> bool:
    """Return whether a prompt is a conversation with a system message."""
    return not isinstance(prompt, str) and any(message["role"] == "system" for message in prompt)


def _user_texts(prompt: Prompt) -> list[str]:
    """List the user's texts in a prompt."""
    if isinstance(prompt, str):
        return [prompt]
    return [message["content"] for message in prompt if message["role"] == "user"]


def drop_overlap(train: Sequence[T], names: Names) -> tuple[list[T], int]:
    """Return training records without a held-out problem, and how many were dropped. names: from
    `names_of`."""
    distinct = [record for record in train if met(record.id, record.prompt, names) is None]
    return distinct, len(train) - len(distinct)
