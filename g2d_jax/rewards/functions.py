"""Rewards as one kind of callable, from the verifier or from a function of the user's own.

A user's function has TRL's signature and is named by import path, "package.module:function":

    def reward(prompts, completions, completion_ids, **columns) -> list[float | None]

Its module is installed, on PYTHONPATH, or a file beside the config ("my_rewards:exact" of my_rewards.py), of which
nothing else is imported.

Completions are strings, or [{"role": "assistant", "content": text}] where the prompt is a chat. Columns are `answer`,
`solution` and the other fields of the data, one list each. None means: this one cannot be scored.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import numbers
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from g2d_jax.records import Problem, Score, Verdict
from g2d_jax.resolve import beside
from g2d_jax.rewards.extract import final_answer
from g2d_jax.rewards.pool import Begun, VerifierPool

RewardFunction: TypeAlias = Callable[..., Sequence[float | None] | np.ndarray]
"""`f(prompts, completions, completion_ids, **columns)`, one number or None per completion."""

Scorer: TypeAlias = Callable[[Sequence[Problem], Sequence[str], Sequence[np.ndarray]], list[Score]]
"""`scorer(problems, texts, token_ids)`: one Score per response, in order. token_ids: [T] int32 each."""

_RESERVED = frozenset({"prompt", "prompts", "completion", "completions", "completion_ids"})


class RewardFailed(ValueError):
    """A reward function raised, or gave what is no reward; the message names its place and the exception."""


def load_reward(path: str, folder: str | None = None) -> RewardFunction:
    """Import a reward function by "package.module:function", or by "module:function" from the file module.py of folder.

    Raises ValueError with what to do, also where the module is both in the folder and another one that is installed.
    """
    module_name, colon, name = path.partition(":")
    if not (colon and module_name and name):
        raise ValueError(f"reward {path!r} is not an import path: write it as 'package.module:function'")
    file = None if folder is None else beside(path, Path(folder))
    try:
        module = importlib.import_module(module_name) if file is None else _import_file(module_name, file)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"reward {path!r}: cannot import {module_name!r} ({error}); install it, or put the folder it lies in on "
            "PYTHONPATH; of a file beside the config g2d run, plan and sweep know where it is"
        ) from error
    except (Exception, SystemExit) as error:
        raise ValueError(f"reward {path!r}: importing {module_name!r} failed{_origin(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        candidates = [key for key, value in vars(module).items() if inspect.isfunction(value) and key[0] != "_"]
        raise ValueError(
            f"reward {path!r}: {module_name!r} has no function {name!r}; it has {', '.join(candidates) or 'none'}"
        )
    return function  # type: ignore[no-any-return]


def _import_file(name: str, file: Path) -> ModuleType:
    """The module of a file whose folder need not be on the path."""
    there = importlib.util.find_spec(name)
    if there is not None:
        if there.origin is None or Path(there.origin).resolve() != file.resolve():
            raise ValueError(f"{file} has the name of another module, {there.origin or name}: give it another name")
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)  # as import does: classes look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _origin(error: BaseException) -> str:
    """Where the code raised that this file called, and what: " at FILE, line N, in FUNCTION: KeyError: 'label'"."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    frames = [frame for frame in frames if not frame.filename.startswith("<frozen")]  # of the import system
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        return f" at {error.filename}, line {error.lineno}: {what}"
    own = [frame for frame in frames if frame.filename == frames[0].filename]  # not of a library that it calls
    return f" at {own[-1].filename}, line {own[-1].lineno}, in {own[-1].name}: {what}" if own else f": {what}"


def _named(function: RewardFunction) -> str:
    """The function's name and place, for messages."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    place = f" ({code.co_filename}, line {code.co_firstlineno})" if code else ""
    return f"{getattr(function, '__qualname__', repr(function))}{place}"


def call_reward(
    function: RewardFunction, problems: Sequence[Problem], texts: Sequence[str], token_ids: Sequence[np.ndarray]
) -> list[float | None]:
    """Call a reward function as TRL does and check what it returns.

    Columns that the function does not name are left out when it takes no `**columns`. Raises RewardFailed when it
    raises, naming the place and the first response that it raises for by itself, and for a result of the wrong length
    or type, or one that is not finite.
    """
    if not len(problems) == len(texts) == len(token_ids):
        raise ValueError(
            f"rewards need as many problems as responses, got {len(problems)}, {len(texts)}, {len(token_ids)}"
        )
    arguments: dict[str, list[Any]] = {
        "prompts": [_plain_prompt(problem) for problem in problems],
        "completions": [_completion(problem, text) for problem, text in zip(problems, texts, strict=True)],
        "completion_ids": [np.asarray(ids).tolist() for ids in token_ids],
        **_columns(problems),
    }
    arguments = _accepted(function, arguments)
    try:
        result = function(**arguments)
    except Exception as error:
        place = _culprit(function, arguments, len(texts))
        of = "" if place is None else f"; it does so for {_shown(problems[place])}, response {texts[place]!r:.200}"
        raise RewardFailed(f"reward {_named(function)} failed{_origin(error)}{of}") from error
    return _checked(_named(function), result, len(texts))


def _culprit(function: RewardFunction, arguments: Mapping[str, list[Any]], count: int) -> int | None:
    """A response that the function raises for by itself, None if it does for several together only.

    By halves, so that no response is scored more than once at each length.
    """

    def raises(low: int, high: int) -> bool:
        try:
            function(**{name: values[low:high] for name, values in arguments.items()})
        except Exception:
            return True
        return False

    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if raises(low, middle) else (middle, high)
    return low if count and raises(low, high) else None


def _shown(problem: Problem) -> str:
    return f"problem {problem.id} ({problem.prompt!r:.80})"


@dataclass(frozen=True)
class VerifierScorer:
    """Scores against `Problem.answer` with math-verify, also response after response."""

    pool: VerifierPool

    def __call__(
        self, problems: Sequence[Problem], texts: Sequence[str], token_ids: Sequence[np.ndarray]
    ) -> list[Score]:
        """Score responses, in order."""
        return self.pool.score([problem.answer for problem in problems], texts)

    def begin(self, problem: Problem, text: str) -> Begun:
        """Begin to score a response; `VerifierPool.finish` gives the score."""
        return self.pool.begin(problem.answer, text)


def function_scorer(function: RewardFunction, correct_above: float | None = 0.5) -> Scorer:
    """Score with a user's function.

    The reward is what the function returns; a reward above `correct_above` counts as CORRECT (for accuracy and pairs),
    any other as INCORRECT, and None is UNSCORABLE. With correct_above None every reward is SCORED.
    """
    if correct_above is not None and not math.isfinite(correct_above):
        raise ValueError(f"correct_above must be a finite number, got {correct_above}")

    def scorer(problems: Sequence[Problem], texts: Sequence[str], token_ids: Sequence[np.ndarray]) -> list[Score]:
        rewards = call_reward(function, problems, texts, token_ids)
        return [
            Score(reward=reward, verdict=_verdict(reward, correct_above), answer=final_answer(text))
            for reward, text in zip(rewards, texts, strict=True)
        ]

    return scorer


def _verdict(reward: float | None, correct_above: float | None) -> Verdict:
    if reward is None:
        return Verdict.UNSCORABLE
    if correct_above is None:
        return Verdict.SCORED
    return Verdict.CORRECT if reward > correct_above else Verdict.INCORRECT


def _plain_prompt(problem: Problem) -> str | list[dict[str, str]]:
    if isinstance(problem.prompt, str):
        return problem.prompt
    return [dict(message) for message in problem.prompt]


def _completion(problem: Problem, text: str) -> str | list[dict[str, str]]:
    return text if isinstance(problem.prompt, str) else [{"role": "assistant", "content": text}]


def _columns(problems: Sequence[Problem]) -> dict[str, list[Any]]:
    """One list per field of the data; None where a problem lacks it."""
    names = sorted({name for problem in problems for name in problem.columns} - _RESERVED)
    columns: dict[str, list[Any]] = {name: [problem.columns.get(name) for problem in problems] for name in names}
    return columns | {
        "answer": [problem.answer for problem in problems],
        "solution": [problem.solution for problem in problems],
    }


def _accepted(function: RewardFunction, arguments: dict[str, list[Any]]) -> dict[str, list[Any]]:
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def _checked(name: str, result: Any, expected: int) -> list[float | None]:
    if inspect.iscoroutine(result):
        result.close()
        raise RewardFailed(f"reward {name} is an async function; make it a plain one that returns a list")
    if not isinstance(result, Sequence | np.ndarray) or isinstance(result, str) or len(result) != expected:
        size = f"{len(result)} values" if hasattr(result, "__len__") else type(result).__name__
        raise RewardFailed(f"reward {name} must return a list of {expected} numbers, one per completion, got {size}")
    return [_number(name, index, value) for index, value in enumerate(result)]


def _number(name: str, index: int, value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, numbers.Real | np.bool_) or not math.isfinite(value):
        raise RewardFailed(
            f"reward {name} returned {value!r} for completion {index}; "
            "return a finite number, or None for one that cannot be scored"
        )
    return float(value)
