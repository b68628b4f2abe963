"""Rollouts from other tools, as rows of one form: JSONL, JSON or Parquet with these columns.

    prompt             text, or messages; or rendered_prompt: the text after the chat template; or prompt_ids
    completion         text, or one assistant message; or completion_ids
    reward, answer     the completion's reward (null: it could not be scored), also named score; the reference
                       answer
    logprobs           of the sampler, one for each of completion_ids
    finish_reason      "stop", or "length" if the limit cut the completion
    step               of the training run; else the number in the file's name (train_data_step12.jsonl)

Two kinds of files have columns of their own: this library's rollouts/*.parquet, and the tables that
TRL 1.16 writes with log_completions (step, prompt, completion, advantage, one column for each reward
function). Files are untrusted: a broken row is a ValueError that names file and line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from etils import epath

from g2d_jax.config.places import data_files
from g2d_jax.data.distinct import LoadReport
from g2d_jax.data.fields import (
    BrokenRow,
    Values,
    as_answer,
    as_prompt,
    as_reply,
    as_text,
    require_rendered,
)
from g2d_jax.data.rows import file_rows
from g2d_jax.data.splits import problem_id
from g2d_jax.records import LEAST_LOGPROB, MOST_REWARD, Prompt, is_logprob, is_reward

_NEEDED = (
    "a rollout needs prompt, rendered_prompt or prompt_ids, and completion or completion_ids. Map "
    "other names in `columns`; convert files of verl and NeMo-RL with "
    "examples/convert_rollouts.py of this library's repository"
)
_TRL = ("step", "prompt", "completion", "advantage")
_OWN = {
    "completion": "text",
    "completion_ids": "token_ids",
    "finish_reason": "stop_reason",
    "answer": "",  # its column answer holds the response's own answer
}


@dataclass(frozen=True, slots=True, eq=False)
class DumpRow:
    """One rollout as read from a file; None for missing values.

    where: file and line (row), counted from 1. step: of the training run that wrote it.
    has_reward: whether there is a column for the reward; then None is a response that could not be
    scored.
    """

    where: str
    step: int | None = None
    prompt: Prompt | None = None
    rendered_prompt: str | None = None
    completion: str | None = None
    prompt_ids: np.ndarray | None = None  # [P] int32
    completion_ids: np.ndarray | None = None  # [T] int32
    logprobs: np.ndarray | None = None  # [T] float32
    finish_reason: Literal["stop", "length"] | None = None
    reward: float | None = None
    has_reward: bool = False
    answer: str | None = None

    @property
    def prompt_key(self) -> str:
        """Return 16 hex digits, equal for rows of the same prompt: `problem_id` of its text, or of
        its ids as text."""
        ids = np.asarray(self.prompt_ids).tolist()
        return problem_id(self.prompt or self.rendered_prompt or str(ids))


def read_dump(
    paths: str | Sequence[str],
    columns: Mapping[str, str] | None = None,
    report: LoadReport | None = None,
) -> Iterator[DumpRow]:
    """Read the rows of a file, of a folder's files, or of those that match a glob; local, gs:// or
    s3://.

    columns: from our name of a field to the files', such as {"reward": "accuracy_reward"}. report:
    skips broken rows, and counts them. Raises ValueError for a field that rollouts lack. Without a
    report it also raises for the first row that lacks a column or has a broken value, naming file
    and line.
    """
    columns = columns or {}
    unknown = columns.keys() - _FIELDS.keys()
    if unknown:
        raise ValueError(
            f"columns has {min(unknown)!r}: a rollout's fields are {', '.join(_FIELDS)}"
        )
    for file in data_files(paths):
        numbers = re.findall(r"step[-_]?(\d+)", epath.Path(file).stem)
        step = int(numbers[-1]) if numbers else None
        for row in file_rows(file):
            convert = partial(_read, row.where, step, columns)
            dumped = row.read(convert) if report is None else report.read(row, convert)
            if dumped is not None:
                yield dumped


def by_step(rows: Iterable[DumpRow]) -> list[list[DumpRow]]:
    """Group rows of the same step and prompt, ordered by step, then by first row.

    Online stages train on them in this order. A row without a step has step 0.
    """
    together: dict[tuple[int, str], list[DumpRow]] = {}
    for row in sorted(rows, key=lambda row: row.step or 0):
        together.setdefault((row.step or 0, row.prompt_key), []).append(row)
    return list(together.values())


def _read(where: str, step: int | None, columns: Mapping[str, str], values: Values) -> DumpRow:
    """Read a row. step: from its file's name. Raises BrokenRow."""
    names = dict(columns)
    present = ", ".join(map(repr, values))
    for column in columns.values():
        if column not in values:
            raise BrokenRow(f"it has no column {column!r}; it has {present}"[:500])
    if values.keys() >= {"problem_id", "token_ids", "stop_reason", "text"}:
        names = _OWN | names
    elif values.keys() >= set(_TRL) and "completion_ids" not in values:
        if "reward" not in names:
            names["reward"] = _trl_reward(values)
        # Other columns hold logs of a reward function, under any name.
        values = {name: values[name] for name in (*_TRL, *names.values())}
    if "reward" not in names and "reward" not in values and "score" in values:
        names["reward"] = "score"
    if not values.keys() & {"prompt_ids", "rendered_prompt"}:
        require_rendered(values)
    found: dict[str, Any] = {"step": step}
    for field, read in _FIELDS.items():
        column = names.get(field, field)
        value = values.get(column)
        if value is not None:
            found[field] = read(value, column)
    row = DumpRow(where, has_reward=names.get("reward", "reward") in values, **found)
    has_prompt = found.keys() & {"prompt", "rendered_prompt", "prompt_ids"}
    if not has_prompt or not found.keys() & {"completion", "completion_ids"}:
        raise BrokenRow(f"{_NEEDED}. This row has {present or 'none'}"[:600])
    logprobs, ids = found.get("logprobs"), found.get("completion_ids", ())
    if logprobs is not None and len(logprobs) != len(ids):
        raise BrokenRow(f"it has {len(logprobs)} logprobs for {len(ids)} completion_ids")
    return row


def _trl_reward(values: Values) -> str:
    """Return the only reward column of a TRL table: its other columns are logged texts."""
    numeric = []
    for name, value in values.items():
        if name not in _TRL and not isinstance(value, str | list | dict):
            numeric.append(name)
    if len(numeric) != 1:
        listed = ", ".join(map(repr, numeric)) or "none"
        raise BrokenRow(
            f"a completions table of TRL needs one column of rewards, this has {listed}: name the "
            'right one (dump.columns={"reward": …} in the settings, --columns reward=… on the '
            "command line)"
        )
    return numeric[0]


def _step(value: Any, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise BrokenRow(f"{path!r} must be a whole number, got {value!r:.100}")
    return value


def _finish_reason(value: Any, path: str) -> Any:
    if value not in ("stop", "length"):
        raise BrokenRow(f"{path!r} must be 'stop', 'length' or null, got {value!r:.100}")
    return value


def _ids(value: Any, path: str) -> np.ndarray:
    """Read token ids, int32 [T], at least one. The caller checks them against the vocabulary."""
    ids = _array(value, path, "iu", "token ids, whole numbers from 0 on")
    if ids.min() < 0 or ids.max() >= 2**31:
        raise BrokenRow(f"{path!r} has numbers that are not token ids: below 0, or too large")
    return ids.astype(np.int32)


def _logprobs(value: Any, path: str) -> np.ndarray | None:
    """Read log-probabilities, float32 [T]; None if all are NaN, as this library writes unknown
    ones."""
    logprobs = _array(value, path, "iuf", "numbers").astype(np.float32)
    if np.isnan(logprobs).all():
        return None
    if not is_logprob(logprobs).all():
        raise BrokenRow(f"{path!r} must be from {LEAST_LOGPROB:g} to 0: are they negated?")
    return logprobs


def _array(value: Any, path: str, kinds: str, of: str) -> np.ndarray:
    """Read a list of numbers, at least one. kinds: of their dtype, as NumPy names it."""
    array = np.zeros(0)
    try:
        if isinstance(value, list):
            array = np.asarray(value)
    except (ValueError, OverflowError):  # lists of different lengths, numbers beyond 64 bits
        pass
    if array.ndim != 1 or not len(array) or array.dtype.kind not in kinds:
        raise BrokenRow(f"{path!r} must be a list of {of}, at least one")
    return array


def _reward(value: Any, path: str) -> float | None:
    """Read a reward; None for NaN, which data frames write instead of null."""
    if isinstance(value, float) and math.isnan(value):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise BrokenRow(f"its {path} {value!r:.100} is not a number or null") from error
    if not is_reward(number):
        raise BrokenRow(f"its {path} {value!r:.100} is not finite, or beyond {MOST_REWARD:g}")
    return number


_FIELDS: dict[str, Callable[[Any, str], Any]] = {
    "prompt": as_prompt,
    "rendered_prompt": as_text,
    "prompt_ids": _ids,
    "completion": as_reply,
    "completion_ids": _ids,
    "logprobs": _logprobs,
    "finish_reason": _finish_reason,
    "reward": _reward,
    "answer": as_answer,
    "step": _step,
}
"""The fields of a rollout, and the reader of each."""
