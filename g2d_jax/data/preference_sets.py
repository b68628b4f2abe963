"""Preference sets from other tools, row by row, in TRL's three shapes.

    explicit prompt   prompt, chosen, rejected: texts, or a conversation and one assistant message each
    implicit prompt   chosen and rejected alone: whole texts that begin with the prompt
    messages          chosen and rejected alone: whole conversations that begin with the prompt

Conversations next to a prompt text include that prompt, as in TRL. Sets are untrusted: a row of
another shape is a BrokenRow that names file and line; an empty or equal pair is a LeftOut.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from g2d_jax.config.places import data_files
from g2d_jax.data.fields import (
    BrokenRow,
    LeftOut,
    Values,
    as_messages,
    as_prompt,
    as_reply,
    as_text,
    is_empty,
    require_rendered,
    unpacked,
)
from g2d_jax.data.problems import open_rows
from g2d_jax.data.rows import Row, file_rows
from g2d_jax.records import Conversation, Prompt

HUB = "hub:"
_WORD = re.compile(r"\s*\S+|\s+")
EMPTY, EQUAL = "with an empty response", "with two equal responses"


def pair_rows(path: str) -> Iterator[Row]:
    """Read the rows of a .jsonl, .json or .parquet file, of a folder of them, of a glob, or of
    hub:owner/name.

    Raises ValueError for an unreadable source, ImportError naming the extra for a hub set without
    it.
    """
    if path.startswith(HUB):
        yield from open_rows(path)[1]
        return
    for file in data_files(path):
        yield from file_rows(file)


def to_pair(values: Values) -> tuple[Prompt, str, str]:
    """Read a row as prompt, chosen and rejected. Raises BrokenRow for a row of another shape,
    LeftOut for an empty or equal pair."""
    if "chosen_ids" in values:
        raise BrokenRow(
            "it has token ids, which need a Parquet file with all columns of a collect stage: "
            "remove the column chosen_ids to tokenise the texts"
        )
    require_rendered(values)
    chosen, rejected = _reply(values, "chosen"), _reply(values, "rejected")
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise BrokenRow("one of 'chosen' and 'rejected' is a text, the other a list of messages")
    if chosen == rejected:
        raise LeftOut(EQUAL)
    prompt = unpacked(values.get("prompt"), "prompt")
    if prompt is None or (isinstance(prompt, str) and not isinstance(chosen, str)):
        shared, chosen, rejected = _split(chosen, rejected)
        if not shared:
            raise BrokenRow("'chosen' and 'rejected' do not begin with the same prompt")
        if prompt is not None:
            turns = [turn["content"].strip() for turn in shared]
            if prompt.strip() not in turns:
                raise BrokenRow("'chosen' and 'rejected' do not begin with the row's own 'prompt'")
        prompt = shared
    pair = as_prompt(prompt, "prompt"), as_reply(chosen, "chosen"), as_reply(rejected, "rejected")
    if not all(map(str.strip, pair[1:])):
        raise LeftOut(EMPTY)
    if pair[1].strip() == pair[2].strip():
        raise LeftOut(EQUAL)
    return pair


def _reply(values: Values, name: str) -> str | Conversation:
    """Return a text, or messages. Raises LeftOut if it is null or empty."""
    if name not in values:
        present = ", ".join(map(repr, values))
        raise BrokenRow(
            f"no column {name!r}; a preference set has prompt, chosen and rejected, or chosen and "
            f"rejected that begin with the prompt. This row has {present:.300}"
        )
    value = unpacked(values[name], name)
    if is_empty(value):
        raise LeftOut(EMPTY)
    if isinstance(value, str):
        return as_text(value, name)
    return as_messages(value, name)


def _split(chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """Split two texts or conversations into their common beginning, in whole words or messages, and
    the rest of each."""
    one, other = chosen, rejected
    join: Any = tuple
    if isinstance(chosen, str):
        one, other = _WORD.findall(chosen), _WORD.findall(rejected)
        join = "".join
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return join(one[:length]), join(one[length:]), join(other[length:])
