"""Rollouts, preferences and columns of figures as Parquet parts, which pandas, TRL and `datasets` read as they are.

A part is one file, written whole (see `storage.write_bytes`), its pages check-summed. Arrays and numbers come back bit
for bit. Text comes back as it was, but for lone surrogates, which Parquet's UTF-8 cannot hold: see `safe_text`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from etils import epath

from g2d_jax.records import Preference, Prompt, Rollout, Score, ScoredRollout, Verdict
from g2d_jax.storage import PathLike, naming, read_bytes, read_json, write_bytes

_SURROGATE = re.compile("[\ud800-\udfff]")
_Row = TypeVar("_Row")
_Parsed = TypeVar("_Parsed")


def _required(**columns: pa.DataType) -> list[pa.Field]:
    return [pa.field(name, kind, nullable=False) for name, kind in columns.items()]


_IDS = pa.list_(pa.int32())
_NATS = pa.list_(pa.float32())
_CHAT = pa.list_(pa.struct([pa.field("role", pa.string()), pa.field("content", pa.string())]))

ROLLOUTS = pa.schema(
    [
        *_required(problem_id=pa.string(), visit=pa.int32(), sample=pa.int32(), policy=pa.string()),
        *_required(prompt_ids=_IDS, token_ids=_IDS, text=pa.string(), logprobs=_NATS, entropies=_NATS),
        pa.field("reward", pa.float64()),
        *_required(verdict=pa.string()),
        pa.field("answer", pa.string()),
        *_required(stop_reason=pa.string(), truncated=pa.bool_()),
    ]
)
"""Columns of rollouts/*.parquet. reward is null where the verifier abstained; truncated: stop_reason is "length"."""


_ARRAYS: dict[str, Any] = {
    "prompt_ids": np.int32,
    "token_ids": np.int32,
    "logprobs": np.float32,
    "entropies": np.float32,
}
_OF_A_ROLLOUT = ("problem_id", "visit", "sample", *_ARRAYS, "stop_reason")


def _preferences(text: pa.DataType) -> pa.Schema:
    columns = _required(prompt=text, chosen=text, rejected=text, prompt_ids=_IDS, chosen_ids=_IDS, rejected_ids=_IDS)
    rewards = _required(chosen_reward=pa.float64(), rejected_reward=pa.float64())
    truncated = [pa.field(name, pa.bool_()) for name in _TRUNCATED]
    return pa.schema([*columns, *_required(problem_id=pa.string()), *rewards, *truncated])


_TRUNCATED = ("chosen_truncated", "rejected_truncated")  # null, or no such column, in what was made elsewhere
PREFERENCES = _preferences(pa.string())
"""Columns of preferences/*.parquet where prompts are strings."""
CHAT_PREFERENCES = _preferences(_CHAT)
"""The same where prompts are conversations: chosen and rejected are lists of one assistant message."""


def safe_text(text: str) -> str:
    """The text with each lone surrogate, which UTF-8 cannot hold, replaced by U+FFFD. All else stays, NUL included."""
    return _SURROGATE.sub("\ufffd", text)


def write_rollouts(path: PathLike, rows: Sequence[ScoredRollout]) -> None:
    """Write one part, columns `ROLLOUTS`. Raises ValueError for an array of another dtype or rank; OSError."""
    rollouts = [row.rollout for row in rows]
    columns: dict[str, Any] = {name: [getattr(rollout, name) for rollout in rollouts] for name in _OF_A_ROLLOUT}
    columns |= {name: _ragged(name, columns[name], kind) for name, kind in _ARRAYS.items()}
    columns |= {
        "policy": [safe_text(row.policy) for row in rows],
        "text": [safe_text(row.text) for row in rows],
        "reward": [row.score.reward for row in rows],
        "verdict": [row.score.verdict.value for row in rows],
        "answer": [None if row.score.answer is None else safe_text(row.score.answer) for row in rows],
        "truncated": [rollout.stop_reason == "length" for rollout in rollouts],
    }
    _write(path, columns, ROLLOUTS)


def read_rollouts(path: PathLike) -> list[ScoredRollout]:
    """The rows of a part, or of all parts of a folder in the order of their names.

    Raises FileNotFoundError if there is no part, ValueError naming the file if one is damaged or has other columns.
    """
    return _read_parts(path, lambda table: [_rollout(row) for row in _rows(table)], ROLLOUTS)


def _rollout(row: Mapping[str, Any]) -> ScoredRollout:
    if row["stop_reason"] not in ("stop", "length"):
        raise ValueError(f"stop_reason must be 'stop' or 'length', got {row['stop_reason']!r:.100}")
    rollout = Rollout(**{name: row[name] for name in _OF_A_ROLLOUT})
    score = Score(row["reward"], Verdict(row["verdict"]), row["answer"])
    return ScoredRollout(rollout, row["text"], score, row["policy"])


def write_preferences(path: PathLike, rows: Sequence[Preference]) -> None:
    """Write one part, columns `PREFERENCES`, or `CHAT_PREFERENCES` where the prompts are conversations.

    Raises ValueError if the rows mix both, for a message with other fields than role and content, and for an array of
    another dtype or rank; OSError.
    """
    chat = [not isinstance(row.prompt, str) for row in rows]
    if any(chat) and not all(chat):
        counts = f"{sum(chat)} of {len(chat)} prompts are conversations"
        raise ValueError(f"{os.fspath(path)}: {counts}; a part has either strings or conversations: write two parts")
    columns = {name: [getattr(row, name) for row in rows] for name in PREFERENCES.names}
    columns |= {
        "prompt": [_prompt(row.prompt) for row in rows],
        "chosen": [_completion(row.chosen, chat=is_chat) for row, is_chat in zip(rows, chat, strict=True)],
        "rejected": [_completion(row.rejected, chat=is_chat) for row, is_chat in zip(rows, chat, strict=True)],
        **{name: _ragged(name, columns[name], np.int32) for name in ("prompt_ids", "chosen_ids", "rejected_ids")},
    }
    _write(path, columns, CHAT_PREFERENCES if any(chat) else PREFERENCES)


def read_preferences(path: PathLike) -> list[Preference]:
    """The rows of a part, or of all parts of a folder in the order of their names; raises as `read_rollouts`.

    Raises ValueError too for a folder whose index, _manifest.json, lists other parts: its writing was interrupted.
    """
    index = epath.Path(path) / "_manifest.json"
    if index.exists() and "parts" in (listed := read_json(index)):
        found = sorted(part.name for part in epath.Path(path).glob("*.parquet"))
        if found != sorted(listed["parts"]):
            wanted = ", ".join(listed["parts"])
            raise ValueError(f"{path} holds {', '.join(found) or 'no part'}, but its index lists {wanted}")
    return _read_parts(path, lambda table: [_preference(row) for row in _rows(table)], PREFERENCES, CHAT_PREFERENCES)


def _preference(row: dict[str, Any]) -> Preference:
    if isinstance(row["prompt"], str):
        return Preference(**row)
    if not row["prompt"]:
        raise ValueError("a prompt has at least one message")
    prompt = tuple(_message(message) for message in row["prompt"])
    return Preference(**{**row, "prompt": prompt, "chosen": _reply(row["chosen"]), "rejected": _reply(row["rejected"])})


def _prompt(prompt: Prompt) -> str | list[dict[str, str]]:
    return safe_text(prompt) if isinstance(prompt, str) else [_message(message) for message in prompt]


def _message(message: Mapping[str, Any]) -> dict[str, str]:
    fields = message if isinstance(message, Mapping) else {}
    if set(fields) != {"role", "content"} or not all(isinstance(text, str) for text in fields.values()):
        raise ValueError(f"a chat message has the text fields role and content, got {message!r:.200}")
    return {"role": safe_text(message["role"]), "content": safe_text(message["content"])}


def _completion(text: str, *, chat: bool) -> str | list[dict[str, str]]:
    return [{"role": "assistant", "content": safe_text(text)}] if chat else safe_text(text)


def _reply(messages: Sequence[Mapping[str, Any]]) -> str:
    read = [_message(message) for message in messages]
    if len(read) != 1 or read[0]["role"] != "assistant":
        raise ValueError(f"a completion is one assistant message, got {messages!r:.200}")
    return read[0]["content"]


def write_columns(path: PathLike, columns: Mapping[str, np.ndarray | Sequence[Any]]) -> None:
    """Write a table of named columns [N]: numbers or booleans, or texts with None for no text.

    Raises ValueError naming the column for anything else and for columns of different lengths; OSError.
    """
    _write(path, {name: _column(f"{os.fspath(path)}: column {name}", values) for name, values in columns.items()}, None)


def read_columns(path: PathLike, names: Sequence[str] | None = None) -> dict[str, np.ndarray | list[str | None]]:
    """The columns of one file, in order: numbers and booleans as arrays of the dtype written, texts as lists.

    names: which ones, None for all. Raises FileNotFoundError, and ValueError naming the file if it is damaged, lacks a
    column or has columns of another kind.
    """
    return _read(epath.Path(path), _columns, names)


def _column(name: str, values: np.ndarray | Sequence[Any]) -> pa.Array:
    try:
        numbers = isinstance(values, np.ndarray) and values.dtype.kind not in "OU"
        array = pa.array(values if numbers else [safe_text(v) if isinstance(v, str) else v for v in values])
    except (pa.ArrowException, OverflowError) as error:
        raise ValueError(f"{name} must have one axis and hold numbers, booleans or texts: {error}") from error
    if pa.types.is_null(array.type):  # of an empty list, or of None only
        array = array.cast(pa.string())
    _check_kind(name, array)
    return array


def _columns(table: pa.Table) -> dict[str, np.ndarray | list[str | None]]:
    table.validate(full=True)
    columns: dict[str, np.ndarray | list[str | None]] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        _check_kind(f"column {name}", column)
        columns[name] = column.to_pylist() if pa.types.is_string(column.type) else np.array(column.to_numpy())
    return columns


def _check_kind(name: str, column: pa.Array | pa.ChunkedArray) -> None:
    kind = column.type
    number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    if not number and not pa.types.is_string(kind):
        raise ValueError(f"{name} must hold numbers, booleans or texts, got {kind}")
    if number and column.null_count:
        raise ValueError(f"{name} has no value in {column.null_count} rows: only texts may be None; NaN is a number")


def _ragged(name: str, arrays: Sequence[np.ndarray], dtype: type[np.generic]) -> pa.Array:
    """Arrays [T_i] as one Arrow list column, without a Python object per number."""
    for array in arrays:
        if array.dtype != dtype or array.ndim != 1:
            raise ValueError(f"{name} must be one-dimensional {np.dtype(dtype)}, got {array.dtype} {list(array.shape)}")
    offsets = np.cumsum([0, *(len(array) for array in arrays)])
    flat = np.concatenate([np.empty(0, dtype), *arrays])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(flat))


def _arrays(column: pa.ChunkedArray) -> Iterable[np.ndarray]:
    """The arrays [T_i] of a list column; raises ArrowInvalid for nulls among the numbers."""
    for chunk in column.chunks:
        flat = chunk.flatten().to_numpy(zero_copy_only=True)
        ends = np.cumsum(chunk.value_lengths().to_numpy())
        for end, start in zip(ends, ends - np.diff(ends, prepend=0), strict=True):
            yield flat[start:end].copy()  # its own, so that one kept row does not keep the part


def _rows(table: pa.Table) -> list[dict[str, Any]]:
    columns = [
        list(_arrays(column)) if field.type in (_IDS, _NATS) else column.to_pylist()
        for field, column in zip(table.schema, table.columns, strict=True)
    ]
    return [dict(zip(table.column_names, values, strict=True)) for values in zip(*columns, strict=True)]


def _write(path: PathLike, columns: Mapping[str, Any], schema: pa.Schema | None) -> None:
    sink = pa.BufferOutputStream()
    try:
        pq.write_table(pa.table(dict(columns), schema=schema), sink, compression="zstd", write_page_checksum=True)
    except (pa.ArrowException, OverflowError, UnicodeError) as error:
        raise ValueError(f"{os.fspath(path)}: cannot write these rows: {error}") from error
    write_bytes(path, sink.getvalue().to_pybytes())


def _read_parts(path: PathLike, parse: Callable[[pa.Table], list[_Row]], *schemas: pa.Schema) -> list[_Row]:
    source = epath.Path(path)
    with naming("list", source):
        names = [part.name for part in source.iterdir()] if source.is_dir() else None
    parts = [source] if names is None else [source / name for name in sorted(names) if name.endswith(".parquet")]
    if not parts:
        raise FileNotFoundError(f"no *.parquet in {source}")
    return [row for part in parts for row in _read(part, lambda table: parse(_conform(table, schemas)))]


def _read(path: epath.Path, parse: Callable[[pa.Table], _Parsed], names: Sequence[str] | None = None) -> _Parsed:
    data = read_bytes(path)
    try:
        with pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True) as file:
            found = file.schema_arrow.names
            if twice := sorted({name for name in found if found.count(name) > 1}):
                raise ValueError(f"it has column {', '.join(twice)} twice")
            if missing := [name for name in names or () if name not in found]:
                raise ValueError(f"it has no column {', '.join(missing)}")
            return parse(file.read(None if names is None else list(names)))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged or not a part written here: {error}") from error


def _conform(table: pa.Table, schemas: Sequence[pa.Schema]) -> pa.Table:
    """The table with the columns and types of one of the schemas (all have the same names); raises if it differs."""
    names = schemas[0].names
    for name in _TRUNCATED:
        if name in names and name not in table.column_names:
            table = table.append_column(name, pa.nulls(len(table), pa.bool_()))
    if missing := [name for name in names if name not in table.column_names]:
        raise ValueError(f"it has no column {', '.join(missing)}")
    table = table.select(names)
    table.validate(full=True)
    nested = pa.types.is_nested(table.schema.field(0).type)  # of a prompt: a conversation
    schema = next((one for one in schemas if pa.types.is_nested(one.field(0).type) == nested), schemas[0])
    for field in schema:
        if not field.nullable and table[field.name].null_count:
            raise ValueError(f"column {field.name} has nulls")
    return table.cast(schema)
