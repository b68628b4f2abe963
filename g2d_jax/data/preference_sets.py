r"""Preference sets of others, row by row: a prompt, a chosen and a rejected response, as texts or
as chat messages.

    form                 columns
    explicit             prompt (question, instruction), chosen, rejected: texts, or lists of messages
    implicit             chosen and rejected alone, whole conversations or whole texts: they begin with the prompt
    both                 prompt beside whole conversations, or whole texts, which must begin with it
    with a system text   system (system_prompt) beside any of them
    with token ids       prompt_ids, chosen_ids, rejected_ids beside the texts: the ids count, as in this library's sets

The forms are TRL 1.16's, UltraFeedback's, and those of Argilla's and Intel's sets after Orca. Sets
are untrusted: a row of no form is a BrokenRow that names file and line; an empty or equal pair is a
LeftOut, to be counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from g2d_jax.config.places import data_files
from g2d_jax.data.dumps import as_ids
from g2d_jax.data.fields import BrokenRow, LeftOut, Values, as_messages, as_prompt, as_text, find
from g2d_jax.data.problems import open_rows
from g2d_jax.data.rows import Row, file_rows
from g2d_jax.records import Conversation, Message, Prompt

HUB = "hub:"
_PROMPT = ("prompt", "question", "instruction")
_CHOSEN = ("chosen", "chosen_response")
_REJECTED = ("rejected", "rejected_response")
_SYSTEM = ("system", "system_prompt")
_IDS = ("prompt_ids", "chosen_ids", "rejected_ids")
EMPTY, EQUAL = "with an empty response", "with two equal responses"
HALF_WHOLE = "with the prompt before one of the responses alone"

Ids: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True, slots=True, eq=False)
class PairRow:
    """One pair as a set has it. prompt: as a problem's; chosen, rejected: the assistant's texts.

    ids: of prompt, chosen and rejected, int32 [P], [Tc], [Tr]; None where the row has none.
    """

    prompt: Prompt
    chosen: str
    rejected: str
    ids: Ids | None = None


def pair_rows(path: str) -> Iterator[Row]:
    """Read the rows of a .jsonl, .json or .parquet file, of a folder of them, of a glob, or of
    hub:owner/name.

    Raises ValueError for what cannot be read, ImportError naming the extra for a hub set without
    it.
    """
    if path.startswith(HUB):
        yield from open_rows(path)[1]
        return
    for file in data_files(path):
        yield from file_rows(file)


def to_pair(values: Values) -> PairRow:
    """Read one row. Raises BrokenRow for a row of no form, LeftOut for an empty or equal pair."""
    chosen_path, chosen = _reply(values, _CHOSEN)
    rejected_path, rejected = _reply(values, _REJECTED)
    if not chosen or not rejected:
        raise LeftOut(EMPTY)
    if chosen == rejected:
        raise LeftOut(EQUAL)
    prompt = _prompt(values)
    if isinstance(chosen, str) and isinstance(rejected, str):
        pair = _of_texts(prompt, chosen, rejected)
    elif not isinstance(chosen, str) and not isinstance(rejected, str):
        pair = _of_messages(prompt, chosen, rejected)
    else:
        raise BrokenRow(
            f"one of {chosen_path!r} and {rejected_path!r} is a text, the other messages: make "
            "them alike"
        )
    if not pair.chosen.strip() or not pair.rejected.strip():
        raise LeftOut(EMPTY)
    if pair.chosen.strip() == pair.rejected.strip():
        raise LeftOut(EQUAL)
    return PairRow(_with_system(pair.prompt, values), pair.chosen, pair.rejected, _ids(values))


def _reply(values: Values, names: tuple[str, ...]) -> tuple[str, str | Conversation]:
    """Read a response as a text or as messages, of which one may stand alone; "" where it is null
    or empty."""
    path = next((name for name in names if name in values), None)
    if path is None:
        listed = ", ".join(map(repr, values)) or "none"
        raise BrokenRow(
            f"no field {' or '.join(map(repr, names))}; the row has {listed}. A preference set "
            "has prompt, chosen and rejected, as texts or as lists of messages"[:600]
        )
    value = values[path]
    if isinstance(value, Mapping):
        value = [value]
    if value is None or value in ([], ()) or _is_blank(value):
        return path, ""
    if isinstance(value, str):
        return path, as_text(value, path)
    return path, as_messages(value, path)


def _is_blank(value: Any) -> bool:
    return isinstance(value, str) and not value.strip()


def _prompt(values: Values) -> Prompt | None:
    """Read the prompt's own column, None without one. An instruction is followed by its input, if
    the row has one."""
    path, value = find(values, *_PROMPT)
    if path is None:
        return None
    prompt = as_prompt(value, path)
    extra = values.get("input")
    has_input = isinstance(extra, str) and extra.strip()
    if path == "instruction" and isinstance(prompt, str) and has_input:
        prompt = f"{prompt}\n{as_text(extra, 'input')}"
    return prompt


def _of_texts(prompt: Prompt | None, chosen: str, rejected: str) -> PairRow:
    """Make a pair of two texts: responses beside a prompt, whole texts beside the prompt that both
    begin with, or else whole texts that begin alike. Raises LeftOut where one of two is whole."""
    if prompt is not None:
        whole = [isinstance(prompt, str) and _is_whole(text, prompt) for text in (chosen, rejected)]
        if not any(whole):
            return PairRow(prompt, chosen, rejected)
        if not all(whole):
            raise LeftOut(HALF_WHOLE)
        return PairRow(prompt, chosen[len(prompt) :], rejected[len(prompt) :])
    length = _common(chosen, rejected)
    # Words stay whole: "The sky is bl|ue" and "The sky is bl|ack" have "The sky is" in common.
    while _splits_a_word(chosen, length) or _splits_a_word(rejected, length):
        length -= 1
    shared = chosen[:length].rstrip()
    if not shared:
        raise BrokenRow(
            "there is no 'prompt', and 'chosen' and 'rejected' have no beginning in common"
        )
    return PairRow(as_text(shared, "chosen"), chosen[len(shared) :], rejected[len(shared) :])


def _is_whole(text: str, prompt: str) -> bool:
    """Return whether a text is a prompt and its response, not a response that greets back: "Hi" and
    "Good morning" do not make "Hi there" and "Good morning!" whole."""
    if not text.startswith(prompt) or len(prompt.split()) < 2:
        return False
    following = text[len(prompt) :]
    return not prompt[-1].isalnum() or not following or following[0].isspace()


def _splits_a_word(text: str, at: int) -> bool:
    return 0 < at < len(text) and not text[at - 1].isspace() and not text[at].isspace()


def _of_messages(prompt: Prompt | None, chosen: Conversation, rejected: Conversation) -> PairRow:
    """Make a pair of two lists of messages: the assistant's alone, or whole conversations that
    differ in their last."""
    length = _common(chosen, rejected)
    shared = chosen[:length]
    if prompt is None and not shared:
        raise BrokenRow(
            "there is no 'prompt', and 'chosen' and 'rejected' have no message in common"
        )
    if prompt is not None and shared:
        _check_begins(prompt, shared)
    if prompt is None or shared:
        prompt = as_prompt(shared, "chosen")
    return PairRow(prompt, _last(chosen[length:], "chosen"), _last(rejected[length:], "rejected"))


def _check_begins(prompt: Prompt, shared: Conversation) -> None:
    """Raise BrokenRow for conversations that do not begin with the prompt beside them."""
    if isinstance(prompt, str):
        begins = any(message["content"].strip() == prompt.strip() for message in shared)
    else:
        count = len(prompt)
        begins = prompt in (shared[:count], shared[-count:])
    if not begins:
        raise BrokenRow(
            "'chosen' and 'rejected' are conversations that do not begin with the row's own prompt"
        )


def _last(messages: Conversation, path: str) -> str:
    """Return the text of what follows the prompt, one message of the assistant."""
    if len(messages) != 1 or messages[0]["role"] != "assistant":
        roles = ", ".join(message["role"] for message in messages) or "nothing"
        raise BrokenRow(
            f"{path!r} must be one assistant message behind what both conversations begin with, "
            f"got {roles}: chosen and rejected share their prompt, and differ in the last message "
            "alone"
        )
    return messages[0]["content"]


def _with_system(prompt: Prompt, values: Values) -> Prompt:
    """Put the row's system text, if it has one, before its prompt, which then is a conversation."""
    path, value = find(values, *_SYSTEM)
    if path is None or _is_blank(value):
        return prompt
    system: Message = {"role": "system", "content": as_text(value, path)}
    messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
    if messages[0]["role"] != "system":
        return (system, *messages)
    if messages[0]["content"].strip() != system["content"].strip():
        raise BrokenRow(f"{path!r} is not the system message that its conversations begin with")
    return messages


def _ids(values: Values) -> Ids | None:
    """Read the row's token ids, None unless it has all three."""
    if any(values.get(name) is None for name in _IDS):
        return None
    prompt, chosen, rejected = (as_ids(values[name], name) for name in _IDS)
    return prompt, chosen, rejected


def _common(one: str | Conversation, other: str | Conversation) -> int:
    """Count the characters, or messages, that two texts or conversations begin with alike."""
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length
