"""Rollouts that other programs left behind, as rows of one kind: JSONL, JSON or Parquet, recognised
by their columns.

    written by                       columns (* it has token ids)
    any program                      prompt or prompt_ids, completion or completion_ids; where it has them, logprobs*,
                                     finish_reason, reward, answer, step
    this library, rollouts/          problem_id, prompt_ids*, token_ids*, logprobs*, stop_reason, reward
    TRL, log_completions             step, prompt, completion, advantage, one column for each reward function
    verl, rollout_data_dir           input, output, gts, score, step
    NeMo-RL, train_data_step*.jsonl  content, rewards, input_lengths, token_ids*, token_loss_mask, generation_logprobs*

Read from what TRL 1.16, verl 0.9 and NeMo-RL's grpo.py write. Where there is no column for the step
it is the number in the file's name. Dumps are untrusted: a broken row is a ValueError that names
file and line.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from etils import epath

from g2d_jax.config.places import data_files
from g2d_jax.data.fields import BrokenRow, Values, as_answer, as_messages, as_prompt, as_text
from g2d_jax.data.rows import file_rows
from g2d_jax.data.splits import problem_id
from g2d_jax.records import MOST_REWARD, Prompt, is_reward

MOST_LOGPROB = 1e-3  # what rounding may add to 0
_EXPECTED = (
    "a rollout has prompt or prompt_ids, completion or completion_ids, and reward or answer; "
    "TRL's has step, prompt, completion, advantage; verl's input, output, score, step; NeMo-RL's "
    "content, rewards, input_lengths"
)


@dataclass(frozen=True, slots=True, eq=False)
class DumpRow:
    """One rollout as a dump gives it; what the dump does not have is None.

    where: file and line (row), counted from 1. step: of the training run that wrote it.
    prompt: as the data set had it; rendered: it is the text after the chat template instead (verl
    and NeMo-RL).
    logprobs: of the sampler, one for each completion id. finish_reason: "length" if the limit cut
    the completion.
    has_reward: whether the dump gives a reward; if so, None is a response that could not be scored.
    answer: the reference answer, not the response's.
    """

    where: str
    step: int | None
    prompt: Prompt | None
    completion: str | None
    prompt_ids: np.ndarray | None  # [P] int32
    completion_ids: np.ndarray | None  # [T] int32
    logprobs: np.ndarray | None  # [T] float32
    finish_reason: Literal["stop", "length"] | None
    reward: float | None
    has_reward: bool
    answer: str | None
    rendered: bool = False

    @property
    def prompt_key(self) -> str:
        """Return 16 hex digits, equal for rows of the same prompt; `problem_id` where the dump has
        its text."""
        if self.prompt is not None:
            return problem_id(self.prompt)
        assert self.prompt_ids is not None  # a row has one of both
        return hashlib.blake2b(self.prompt_ids.tobytes(), digest_size=8).hexdigest()


def read_dump(paths: str | Sequence[str], reward: str | None = None) -> Iterator[DumpRow]:
    """Read the rows of a file, of a folder's files, or of those that match a glob; local, gs:// or
    s3://.

    reward: the column that holds the reward, where a dump has several (TRL's is one for each reward
    function). Raises ValueError naming file and line of the first row whose columns are of no
    format or whose values are broken.
    """
    for file in data_files(paths):
        numbers = re.findall(r"step[-_]?(\d+)", epath.Path(file).stem)
        step = int(numbers[-1]) if numbers else None
        for row in file_rows(file):
            yield row.read(partial(_read, row.where, step, reward))


class _Taken(Protocol):
    @property
    def step(self) -> int | None: ...
    @property
    def prompt_key(self) -> str: ...


R = TypeVar("R", bound=_Taken)
T = TypeVar("T")


def by_step(rows: Iterable[R]) -> list[list[R]]:
    """Return rows of the same step and prompt together, in the order of their steps, then of their
    first row.

    It is the order in which an online stage trains on a dump. A row without a step is of step 0.
    """
    together: dict[tuple[int, str], list[R]] = {}
    for row in rows:
        together.setdefault((row.step or 0, row.prompt_key), []).append(row)
    return [same for _, same in sorted(together.items(), key=lambda item: item[0][0])]


def _read(where: str, step: int | None, reward: str | None, values: Values) -> DumpRow:
    """Recognise a row's format by its columns and read it. step: of its file's name. Raises
    BrokenRow."""
    columns = values.keys()
    if columns >= {"problem_id", "token_ids", "stop_reason", "text"}:
        names = {
            "completion": "text",
            "completion_ids": "token_ids",
            "finish_reason": "stop_reason",
        }
        # Its answer is the response's, not the reference.
        own = {name: value for name, value in values.items() if name != "answer"}
        return _row(where, {**own, "step": step}, {**names, "reward": reward or "reward"})
    if columns >= {"content", "rewards", "input_lengths"}:
        rewards = "rewards"
        if "filtered_rewards" in values:  # these go with the rows
            rewards = "filtered_rewards"
        fields = _nemo_rl({name: _single(value) for name, value in values.items()})
        return _row(where, {**fields, "step": step}, {"reward": reward or rewards}, rendered=True)
    if columns >= {"input", "output", "score", "step"}:
        names = {"prompt": "input", "completion": "output", "reward": reward or "score"}
        answer = _verl_answer(values.get("gts"))
        return _row(where, {**values, "answer": answer}, names, rendered=True)
    if columns >= {"step", "prompt", "completion", "advantage"} and "completion_ids" not in columns:
        name = reward or _trl_reward(values)
        own = {key: values[key] for key in ("step", "prompt", "completion", name) if key in values}
        value = own.get(name)
        if isinstance(value, float) and math.isnan(value):  # not scored
            own[name] = None
        return _row(where, own, {"reward": name})
    if columns & {"prompt", "prompt_ids"} and columns & {"completion", "completion_ids"}:
        return _row(where, {"step": step, **values}, {"reward": reward or "reward"})
    raise BrokenRow(
        f"it has the fields {', '.join(map(repr, values)) or 'none'}; {_EXPECTED}"[:600]
    )


def _row(
    where: str, values: Values, names: Mapping[str, str], *, rendered: bool = False
) -> DumpRow:
    """Make a row of checked values. names: the dump's name of a field, where it is another. Raises
    BrokenRow."""

    def given(field: str, read: Callable[[Any, str], T]) -> T | None:
        path = names.get(field, field)
        value = values.get(path)
        return None if value is None else read(value, path)

    reward = names["reward"]
    if reward not in values and reward != "reward":
        has = ", ".join(map(repr, values))
        raise BrokenRow(f"it has no field {reward!r} with the reward; it has {has}"[:500])
    row = DumpRow(
        where=where,
        step=given("step", _step),
        prompt=given("prompt", as_prompt),
        completion=given("completion", _completion),
        prompt_ids=given("prompt_ids", as_ids),
        completion_ids=given("completion_ids", as_ids),
        logprobs=given("logprobs", _logprobs),
        finish_reason=given("finish_reason", _finish_reason),
        reward=given("reward", _reward),
        has_reward=reward in values,
        answer=given("answer", as_answer),
        rendered=rendered,
    )
    if row.prompt is None and row.prompt_ids is None:
        raise BrokenRow("its prompt is null, and it has no prompt_ids")
    if row.completion is None and row.completion_ids is None:
        raise BrokenRow("its completion is null, and it has no completion_ids")
    ids = () if row.completion_ids is None else row.completion_ids
    if row.logprobs is not None and len(row.logprobs) != len(ids):
        raise BrokenRow(
            f"it has {len(row.logprobs)} logprobs, but {len(ids) or 'none'} completion_ids: each "
            "id needs one"
        )
    return row


def _step(value: Any, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise BrokenRow(f"{path!r} must be a whole number, got {value!r:.100}")
    return value


def _finish_reason(value: Any, path: str) -> Any:
    if value not in ("stop", "length"):
        raise BrokenRow(f"{path!r} must be 'stop', 'length' or null, got {value!r:.100}")
    return value


def _completion(value: Any, path: str) -> str:
    """Read a text, which may be blank, or a conversation of one assistant message."""
    if isinstance(value, list | tuple):
        messages = as_messages(value, path)
        if len(messages) > 1 or messages[0]["role"] != "assistant":
            raise BrokenRow(
                f"{path!r} must be one assistant message, has {len(messages)} messages: of several "
                "turns or tool calls no response can be told apart"
            )
        value = messages[0]["content"]
    if isinstance(value, str) and not value.strip():
        return value
    return as_text(value, path)


def as_ids(value: Any, path: str) -> np.ndarray:
    """Read token ids, int32 [T], at least one. The vocabulary is the caller's to check."""
    ids = _array(value, path, "iu", "whole numbers")
    if not len(ids) or ids.min() < 0 or ids.max() >= 2**31:
        raise BrokenRow(f"{path!r} must hold token ids from 0 on, at least one")
    return ids.astype(np.int32)


def _logprobs(value: Any, path: str) -> np.ndarray | None:
    """Read log-probabilities, float32 [T]; None where they are not known: all NaN in rollouts of
    this library."""
    logprobs = _array(value, path, "iuf", "numbers").astype(np.float32)
    if np.isnan(logprobs).all():
        return None
    if not np.isfinite(logprobs).all():
        raise BrokenRow(f"{path!r} has values that are not finite")
    if (logprobs > MOST_LOGPROB).any():
        raise BrokenRow(
            f"{path!r} has values above 0, which no log-probability is: are they negated?"
        )
    return logprobs


def _array(value: Any, path: str, kinds: str, of: str) -> np.ndarray:
    array = np.zeros(0, int)
    try:
        if value:
            array = np.asarray(value)
    # lists of different lengths, numbers beyond 64 bits
    except (ValueError, OverflowError):
        value = None
    if not isinstance(value, list) or array.ndim != 1 or array.dtype.kind not in kinds:
        raise BrokenRow(f"{path!r} must be a list of {of}")
    return array


def _reward(value: Any, path: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise BrokenRow(f"its {path} {value!r:.100} is not a number or null") from error
    if not is_reward(number):
        raise BrokenRow(f"its {path} {value!r:.100} is not finite, or beyond {MOST_REWARD:g}")
    return number


def _trl_reward(values: Values) -> str:
    """Find the one column of a reward function among TRL's; its other columns are texts that a
    function logged."""
    taken = ("step", "prompt", "completion", "advantage")
    numeric = []
    for name, value in values.items():
        if name not in taken and not isinstance(value, str | list | dict):
            numeric.append(name)
    if len(numeric) != 1:
        listed = ", ".join(map(repr, numeric)) or "none"
        raise BrokenRow(
            "a completions table of TRL with one column of rewards is read as it is, this has "
            f"{listed}: name the column that says how good a response is (reward_column in the "
            "settings, --reward on the command line)"
        )
    return numeric[0]


def _verl_answer(value: Any) -> Any:
    """Return verl's gts where it is an answer or a list of answers, None where it is whatever a
    reward needs."""
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, bool) or not isinstance(item, str | int | float) for item in items):
        return None
    return value


def _single(value: Any) -> Any:
    """Return the value of a NeMo-RL column, which is a list of one: rows are batches of one
    there."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _nemo_rl(values: dict[str, Any]) -> dict[str, Any]:
    """Split a row of NeMo-RL in prompt and completion: its ids by token_loss_mask, 1 on the tokens
    that were sampled.

    Ids and masks are padded to the batch; input_lengths is the length of prompt and completion
    together.
    """
    content = values["content"]
    fields = dict(values)
    if isinstance(content, list):  # a text for each message
        if len(content) != 2:
            raise BrokenRow(
                f"'content' must be a prompt and a completion, has {len(content)} messages: "
                "several turns"
            )
        fields |= {"prompt": content[0], "completion": content[1]}
    else:
        fields["completion"] = content
    if "token_ids" in values:
        length = values["input_lengths"]
        columns = list(map(values.get, ("token_ids", "token_loss_mask", "generation_logprobs")))
        if not isinstance(length, int) or not all(
            isinstance(c, list) and len(c) >= length > 0 for c in columns
        ):
            raise BrokenRow(
                "token_ids, token_loss_mask and generation_logprobs must be lists of "
                "input_lengths or more"
            )
        ids, mask, logprobs = (column[:length] for column in columns if column is not None)
        first = next((i for i, sampled in enumerate(mask) if sampled), length)
        if not all(mask[first:]):
            raise BrokenRow(
                "token_loss_mask marks more than one stretch: several turns are not read"
            )
        fields |= {
            "prompt_ids": ids[:first],
            "completion_ids": ids[first:],
            "logprobs": logprobs[first:],
        }
    return fields
