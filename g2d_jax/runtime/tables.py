"""Rollouts, preferences and columns of numbers as Parquet parts, which pandas, TRL and `datasets`
read directly.

A part is one file, written whole (see `storage.write_bytes`), with checksums of its pages. Arrays
and numbers are read back bit for bit. So is text, except for lone surrogates, which Parquet's UTF-8
cannot hold: see `safe_text`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from etils import epath

from g2d_jax.records import Preference, Prompt, Rollout, Score, ScoredRollout, Verdict
from g2d_jax.runtime.storage import PathLike, naming, read_bytes, read_json, write_bytes

_SURROGATE = re.compile("[\ud800-\udfff]")
_Row = TypeVar("_Row")


def _required(**columns: pa.DataType) -> list[pa.Field]:
    return [pa.field(name, kind, nullable=False) for name, kind in columns.items()]


_IDS = pa.list_(pa.int32())
_NATS = pa.list_(pa.float32())
_CHAT = pa.list_(pa.struct([pa.field("role", pa.string()), pa.field("content", pa.string())]))

ROLLOUTS = pa.schema(
    [
        *_required(problem_id=pa.string(), visit=pa.int32(), sample=pa.int32(), policy=pa.string()),
        *_required(
            prompt_ids=_IDS, token_ids=_IDS, text=pa.string(), logprobs=_NATS, entropies=_NATS
        ),
        pa.field("reward", pa.float64()),
        *_required(verdict=pa.string()),
        pa.field("answer", pa.string()),
        *_required(stop_reason=pa.string(), truncated=pa.bool_()),
        pa.field("parts", pa.map_(pa.string(), pa.float64())),
    ]
)
"""Columns of rollouts/*.parquet. reward is null if the verifier abstained; truncated: stop_reason
is "length"; parts: `Score.parts`."""


_ARRAYS: dict[str, Any] = {
    "prompt_ids": np.int32,
    "token_ids": np.int32,
    "logprobs": np.float32,
    "entropies": np.float32,
}
_OF_A_ROLLOUT = ("problem_id", "visit", "sample", *_ARRAYS, "stop_reason")


def _preferences(text: pa.DataType) -> pa.Schema:
    columns = _required(
        prompt=text, chosen=text, rejected=text, prompt_ids=_IDS, chosen_ids=_IDS, rejected_ids=_IDS
    )
    rewards = _required(chosen_reward=pa.float64(), rejected_reward=pa.float64())
    truncated = [pa.field(name, pa.bool_()) for name in _TRUNCATED]
    return pa.schema([*columns, *_required(problem_id=pa.string()), *rewards, *truncated])


# null or missing in files from other tools
_TRUNCATED = (
    "chosen_truncated",
    "rejected_truncated",
)
PREFERENCES = _preferences(pa.string())
"""Columns of preferences/*.parquet for string prompts."""
CHAT_PREFERENCES = _preferences(_CHAT)
"""The same for conversations as prompts: chosen and rejected are lists of one assistant message."""
_REQUIRED = set(PREFERENCES.names) - set(_TRUNCATED)


def safe_text(text: str) -> str:
    """Replace each lone surrogate, which UTF-8 cannot hold, by U+FFFD. NUL and all others stay."""
    return _SURROGATE.sub("\ufffd", text)


def write_rollouts(path: PathLike, rows: Sequence[ScoredRollout]) -> None:
    """Write one part, columns `ROLLOUTS`. Raises ValueError for an array of another dtype or rank;
    OSError."""
    _write(path, _rollout_columns(rows), ROLLOUTS)


def _rollout_columns(rows: Sequence[ScoredRollout]) -> dict[str, Any]:
    rollouts = [row.rollout for row in rows]
    return _columns(rollouts, _OF_A_ROLLOUT, _ARRAYS) | {
        "policy": [safe_text(row.policy) for row in rows],
        "text": [safe_text(row.text) for row in rows],
        "reward": [row.score.reward for row in rows],
        "verdict": [row.score.verdict.value for row in rows],
        "answer": [row.score.answer and safe_text(row.score.answer) for row in rows],
        "truncated": [rollout.stop_reason == "length" for rollout in rollouts],
        "parts": [list(row.score.parts.items()) for row in rows],
    }


def _columns(
    records: Sequence[Any], names: Iterable[str], arrays: Mapping[str, type[np.generic]]
) -> dict[str, Any]:
    """Return columns of records by field name. arrays: types of the array fields."""
    columns: dict[str, Any] = {}
    for name in names:
        columns[name] = list(map(attrgetter(name), records))
        if name in arrays:
            columns[name] = _ragged(name, columns[name], arrays[name])
    return columns


def read_rollouts(path: PathLike) -> list[ScoredRollout]:
    """Read the rows of a part, or of all parts of a folder in the order of their names.

    Raises FileNotFoundError if there is no part, ValueError naming the file if one is damaged or
    has other columns.
    """
    return _read_parts(path, _rollout, ROLLOUTS)


def _rollout(row: Mapping[str, Any]) -> ScoredRollout:
    if row["stop_reason"] not in ("stop", "length"):
        raise ValueError(f"stop_reason must be 'stop' or 'length', got {row['stop_reason']!r:.100}")
    rollout = Rollout(**{name: row[name] for name in _OF_A_ROLLOUT})
    parts = dict(row["parts"] or ())
    score = Score(row["reward"], Verdict(row["verdict"]), row["answer"], parts)
    return ScoredRollout(rollout, row["text"], score, row["policy"])


def write_preferences(path: PathLike, rows: Sequence[Preference]) -> None:
    """Write one part, columns `PREFERENCES`, or `CHAT_PREFERENCES` for conversations.

    Raises ValueError if the rows mix both, for a message with fields other than role and content,
    and for an array of another dtype or rank; OSError.
    """
    ids = dict.fromkeys(("prompt_ids", "chosen_ids", "rejected_ids"), np.int32)
    columns = _columns(rows, PREFERENCES.names, ids)
    chat = [not isinstance(prompt, str) for prompt in columns["prompt"]]
    if any(chat) and not all(chat):
        counts = f"{sum(chat)} of {len(chat)} prompts are conversations"
        raise ValueError(
            f"{os.fspath(path)}: {counts}; a part has either strings or conversations: write two "
            "parts"
        )
    for name in ("chosen", "rejected"):
        columns[name] = list(map(safe_text, columns[name]))
        if any(chat):
            columns[name] = [[{"role": "assistant", "content": text}] for text in columns[name]]
    columns["prompt"] = list(map(_messages, columns["prompt"]))
    _write(path, columns, CHAT_PREFERENCES if any(chat) else PREFERENCES)


def _messages(prompt: Prompt) -> str | list[dict[str, str]]:
    if isinstance(prompt, str):
        return safe_text(prompt)
    return list(map(_message, prompt))


def read_preferences(path: PathLike) -> list[Preference]:
    """Read the rows of a part, or of all parts of a folder in the order of their names; raises like
    `read_rollouts`.

    Raises ValueError too for a folder whose index, _manifest.json, lists other parts: its writing
    was interrupted.
    """
    index = epath.Path(path) / "_manifest.json"
    if index.exists() and "parts" in (listed := read_json(index)):
        names = sorted(part.name for part in epath.Path(path).glob("*.parquet"))
        if names != sorted(listed["parts"]):
            wanted = ", ".join(listed["parts"])
            raise ValueError(
                f"{path} holds {', '.join(names) or 'no part'}, but its index lists {wanted}"
            )
    return _read_parts(path, _preference, PREFERENCES, CHAT_PREFERENCES)


def has_preferences(path: PathLike) -> bool:
    """Return whether a file, or every part of a folder, is Parquet with all required columns of
    `PREFERENCES`.

    If so, `read_preferences` can read it. False for unreadable Parquet, and without parts.
    """
    source = epath.Path(path)
    with naming("list", source):
        parts = _parts(source)
    return bool(parts) and all(map(_REQUIRED.issubset, map(_names, parts)))


def _parts(source: epath.Path) -> list[epath.Path]:
    """List the parts of a folder in the order of their names; a file is its own part."""
    if source.is_dir():
        return sorted(source.glob("*.parquet"))
    return [source]


def _names(part: epath.Path) -> set[str]:
    """Return the names of a Parquet file's columns; none if it is unreadable."""
    try:
        with part.open("rb") as file:
            return set(pq.read_schema(file).names)
    except (pa.ArrowException, OSError):
        return set()


def _preference(row: dict[str, Any]) -> Preference:
    if isinstance(row["prompt"], str):
        return Preference(**row)
    if not row["prompt"]:
        raise ValueError("a prompt needs at least one message")
    prompt = tuple(map(_message, row["prompt"]))
    replies = {"chosen": _reply(row["chosen"]), "rejected": _reply(row["rejected"])}
    return Preference(**{**row, **replies, "prompt": prompt})


def _message(message: Mapping[str, Any]) -> dict[str, str]:
    match message:
        case {"role": str(role), "content": str(content)} if len(message) == 2:
            return {"role": safe_text(role), "content": safe_text(content)}
    raise ValueError(f"a chat message needs the text fields role and content, got {message!r:.200}")


def _reply(messages: Sequence[Mapping[str, Any]]) -> str:
    read = list(map(_message, messages))
    if len(read) != 1 or read[0]["role"] != "assistant":
        raise ValueError(f"a completion must be one assistant message, got {messages!r:.200}")
    return read[0]["content"]


def write_columns(path: PathLike, columns: Mapping[str, np.ndarray | list[str]]) -> None:
    """Write a table of named columns [N]: arrays of numbers or booleans, or lists of texts.

    Raises ValueError for unsupported values and for columns of different lengths; OSError.
    """
    arrays: dict[str, Any] = dict(columns)
    for name, values in columns.items():
        if isinstance(values, list):
            arrays[name] = pa.array(map(safe_text, values), pa.string())
    _write(path, arrays, None)


def _ragged(name: str, arrays: Sequence[np.ndarray], dtype: type[np.generic]) -> pa.Array:
    """Join arrays [T_i] into one Arrow list column. Arrow itself would cut floats to integers."""
    for array in arrays:
        if array.dtype != dtype or array.ndim != 1:
            raise ValueError(
                f"{name} must be one-dimensional {np.dtype(dtype)}, got {array.dtype} "
                f"{list(array.shape)}"
            )
    offsets = np.cumsum([0, *map(len, arrays)])
    return pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()), np.concatenate([np.empty(0, dtype), *arrays])
    )


def _rows(table: pa.Table) -> list[dict[str, Any]]:
    """Build a dict of every row. Arrays are copies, so that one kept row does not keep the part."""
    columns: list[list[Any]] = []
    for column in table.columns:
        if column.type in (_IDS, _NATS):
            columns.append([array.copy() for array in column.to_numpy()])
        else:
            columns.append(column.to_pylist())
    return [
        dict(zip(table.column_names, values, strict=True)) for values in zip(*columns, strict=True)
    ]


def _write(path: PathLike, columns: dict[str, Any], schema: pa.Schema | None) -> None:
    sink = pa.BufferOutputStream()
    try:
        pq.write_table(
            pa.table(columns, schema=schema), sink, compression="zstd", write_page_checksum=True
        )
    except (pa.ArrowException, OverflowError, UnicodeError) as error:
        raise ValueError(f"{os.fspath(path)}: cannot write these rows: {error}") from error
    write_bytes(path, sink.getvalue().to_pybytes())


def _read_parts(
    path: PathLike, parse: Callable[[dict[str, Any]], _Row], *schemas: pa.Schema
) -> list[_Row]:
    source = epath.Path(path)
    with naming("list", source):
        parts = _parts(source)
    if not parts:
        raise FileNotFoundError(f"{source} has no *.parquet file")
    rows: list[_Row] = []
    for part in parts:
        data = pa.BufferReader(read_bytes(part))
        try:
            table = pq.ParquetFile(data, page_checksum_verification=True).read()
            rows += map(parse, _rows(_conform(table, schemas)))
        except (
            pa.ArrowException,
            ValueError,
            OSError,
        ) as error:  # Arrow raises an OSError for some damage
            raise ValueError(f"{part} is damaged or from another program: {error}") from error
    return rows


def _conform(table: pa.Table, schemas: Sequence[pa.Schema]) -> pa.Table:
    """Give the table the columns and types of one of the schemas (all have the same names). Raises
    ValueError if it differs."""
    names = schemas[0].names
    if len(set(table.column_names)) < table.num_columns:
        raise ValueError(f"it has a column twice, of {', '.join(table.column_names)}")
    for name in _TRUNCATED:
        if name in names and name not in table.column_names:
            table = table.append_column(name, pa.nulls(len(table), pa.bool_()))
    if missing := [name for name in names if name not in table.column_names]:
        raise ValueError(f"it has no column {', '.join(missing)}")
    table = table.select(names)
    table.validate(full=True)
    nested = pa.types.is_nested(table.schema.field(0).type)  # of a prompt: a conversation
    table = table.cast(schemas[-1] if nested else schemas[0])
    for field in table.schema:  # Arrow itself checks for missing lists, not for missing items
        is_array = field.type in (_IDS, _NATS)
        if is_array and pc.list_flatten(table[field.name]).null_count:
            raise ValueError(f"column {field.name} has nulls")
    return table
