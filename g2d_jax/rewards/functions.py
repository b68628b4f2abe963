"""Rewards as one kind of callable, from the verifier or from your own function.

Your function has TRL's signature and is named by import path, "package.module:function":

    def reward(prompts, completions, completion_ids, **columns) -> list[float | None]

Its module is installed, on PYTHONPATH, or a file next to the config ("my_rewards:exact" of
my_rewards.py); nothing else in that folder is imported.

Completions are strings, or [{"role": "assistant", "content": text}] if the prompt is a chat.
Columns are `answer`, `solution` and the other fields of the data, one list each. Every call
receives its own copies. None means that a completion cannot be scored.

verl's signature works too, one response a call; it returns a number, or a dict with one under
"score". `data_source` is the problem's subset:

    def compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float | dict
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from g2d_jax.config import places
from g2d_jax.records import MOST_REWARD, AnswerRule, Problem, Score, Verdict, is_reward
from g2d_jax.rewards.extract import final_answer
from g2d_jax.runtime import processes
from g2d_jax.runtime.terminal import counted

if TYPE_CHECKING:
    from g2d_jax.rewards.pool import Begun, VerifierPool

RewardFunction: TypeAlias = Callable[..., Sequence[float | None] | np.ndarray]
"""`f(prompts, completions, completion_ids, **columns)`, one number or None per completion."""

Scorer: TypeAlias = Callable[[Sequence[Problem], Sequence[str], Sequence[np.ndarray]], list[Score]]
"""`scorer(problems, texts, token_ids)`: one Score per response, in order. token_ids: [T] int32
each."""


_STOPPED = (KeyboardInterrupt, processes.Preempted)
"""The exceptions of your code that stop the run itself. All others are the code's failure, including
sys.exit, which would end the run as if it were done."""


class RewardFailed(ValueError):
    """A reward function raised, or returned an invalid reward; the message names its place and the
    exception."""


def load_reward(path: str, folder: str | None = None) -> RewardFunction:
    """Import a reward function by "package.module:function", or by "module:function" from the file
    module.py of folder.

    Raises ValueError with the remedy, also if the module is both in the folder and installed under
    the same name.
    """
    module_name, colon, name = path.partition(":")
    if not (colon and module_name and name):
        raise ValueError(
            f"reward {path!r} is not an import path: write it as 'package.module:function'"
        )
    file = None if folder is None else places.module_file(path, Path(folder))
    try:
        with _one_process():
            module = (
                _import_file(module_name, file) if file else importlib.import_module(module_name)
            )
    except ModuleNotFoundError as error:
        raise ValueError(
            f"reward {path!r}: cannot import {module_name!r} ({error}); install it, or name its "
            "folder: PYTHONPATH=FOLDER g2d … (g2d run, plan and sweep find a file next to the config "
            "by themselves; other commands run no code from a work directory, whose "
            "config.json has the folder as reward.folder)"
        ) from error
    except _STOPPED:
        raise
    except BaseException as error:
        raise ValueError(
            f"reward {path!r}: importing {module_name!r} failed{_origin(error)}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        candidates = [key for key, _ in inspect.getmembers(module, inspect.isfunction)]
        raise ValueError(
            f"reward {path!r}: {module_name!r} has no function {name!r}; it has "
            f"{', '.join(candidates) or 'none'}"
        )
    return function  # type: ignore[no-any-return]


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    """Run a block of user code. A process that the code forks ends if it also leaves the block,
    because it would continue as a second run."""
    own = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != own:
            processes.say(
                "a reward function forked, and the new process returned too: ending that process"
            )
            os._exit(1)


def _import_file(name: str, file: Path) -> ModuleType:
    """Import the module of a file whose folder need not be on the path."""
    there = importlib.util.find_spec(name)
    if there is not None:
        if there.origin is None or Path(there.origin).resolve() != file.resolve():
            raise ValueError(
                f"{file} has the name of another module, {there.origin or name}: give it another "
                "name"
            )
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    # as import does: classes look their module up
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _origin(error: BaseException) -> str:
    """Describe the error and its place in the called code: " at FILE, line N, in FUNCTION: KeyError:
    'label'"."""
    what = f"{type(error).__name__}: {_text(str, error)}"
    if isinstance(error, SystemExit):
        what = f"it exits ({what}), but must return or raise an exception"
    if isinstance(error, SyntaxError):
        return f" at {error.filename}, line {error.lineno}: {what}"
    place = ""
    file = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == __file__ or frame.filename.startswith("<frozen"):
            continue
        # The last place in the user's own file, not in a library that it calls.
        file = file or frame.filename
        if frame.filename == file:
            place = f" at {file}, line {frame.lineno}, in {frame.name}"
    return f"{place}: {what}"


def call_reward(
    function: RewardFunction,
    problems: Sequence[Problem],
    texts: Sequence[str],
    token_ids: Sequence[np.ndarray],
) -> list[float | None]:
    """Call a reward function as TRL does and check its result.

    Columns that the function does not name are left out unless it has `**columns`. Raises
    RewardFailed if it raises or exits, naming the place and the first response that causes this by
    itself. Also raises it, naming the problem, for a result of the wrong length or type, or one that
    is not finite or beyond MOST_REWARD.
    """
    place = ""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code:
        place = f" ({code.co_filename}, line {code.co_firstlineno})"
    name = f"reward {getattr(function, '__qualname__', type(function).__name__)}{place}"
    try:
        with _one_process():
            result = _call(function, problems, texts, token_ids)
    except _STOPPED:
        raise
    except BaseException as error:
        of = _first_failing(function, problems, texts, token_ids)
        raise RewardFailed(f"{name} failed{_origin(error)}{of}") from error
    return _as_rewards(name, result, problems)


def _call(
    function: RewardFunction,
    problems: Sequence[Problem],
    texts: Sequence[str],
    token_ids: Sequence[np.ndarray],
) -> Any:
    """Call a function by its signature, as TRL or as verl does."""
    parameters = inspect.signature(function).parameters
    if not parameters.keys() >= {"solution_str", "ground_truth"}:
        return function(**_arguments(parameters, problems, texts, token_ids))
    results = []
    for problem, text in zip(problems, texts, strict=True):
        arguments = {
            "data_source": problem.subset,
            "solution_str": text,
            "ground_truth": problem.answer,
            "extra_info": copy.deepcopy(problem.columns.get("extra_info")),
        }
        result: Any = function(**_taken(parameters, arguments))
        if isinstance(result, Mapping):
            result = result.get("score")
        results.append(result)
    return results


def _taken(
    parameters: Mapping[str, inspect.Parameter], arguments: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments that a function names, or all if it has `**columns`."""
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def _arguments(
    parameters: Mapping[str, inspect.Parameter],
    problems: Sequence[Problem],
    texts: Sequence[str],
    token_ids: Sequence[np.ndarray],
) -> dict[str, list[Any]]:
    """Collect TRL's arguments of a reward: a list each, also of the data's columns (None if a
    problem lacks one).

    Each response has a copy of its problem's columns, so that changes by a function reach no other
    response and no later call.
    """
    names = set().union(*(problem.columns for problem in problems)) - {"prompt", "completion"}
    arguments: dict[str, list[Any]] = {}
    for name in sorted(names):
        arguments[name] = [copy.deepcopy(problem.columns.get(name)) for problem in problems]
    for name in ("answer", "solution"):
        arguments[name] = list(map(attrgetter(name), problems))
    arguments["prompts"] = []
    arguments["completions"] = []
    for problem, text in zip(problems, texts, strict=True):
        prompt: Any = problem.prompt
        completion: Any = text
        if not isinstance(prompt, str):
            prompt = list(map(dict, prompt))
            completion = [{"role": "assistant", "content": text}]
        arguments["prompts"].append(prompt)
        arguments["completions"].append(completion)
    arguments["completion_ids"] = [np.asarray(ids).tolist() for ids in token_ids]
    return _taken(parameters, arguments)


def _first_failing(
    function: RewardFunction,
    problems: Sequence[Problem],
    texts: Sequence[str],
    token_ids: Sequence[np.ndarray],
) -> str:
    """Describe the first response that the function raises for by itself, "" for none."""
    for problem, text, ids in zip(problems, texts, token_ids, strict=True):
        try:
            with _one_process():
                _call(function, [problem], [text], [ids])
        except _STOPPED:
            raise
        except BaseException:
            return (
                f"; it does so for problem {problem.id} ({problem.prompt!r:.80}), response "
                f"{text!r:.200}"
            )
    return ""


@dataclass(frozen=True)
class VerifierScorer:
    """Scores against `Problem.answer` with math-verify, also one response after another.

    rule: how answers are found, as in `final_answer`.
    """

    pool: VerifierPool
    rule: AnswerRule = "boxed"

    def __call__(
        self, problems: Sequence[Problem], texts: Sequence[str], token_ids: Sequence[np.ndarray]
    ) -> list[Score]:
        """Score responses, in order."""
        return self.pool.score([problem.answer for problem in problems], texts, self.rule)

    def begin(self, problem: Problem, text: str) -> Begun:
        """Begin to score a response; `VerifierPool.finish` returns the score."""
        return self.pool.begin(problem.answer, text, self.rule)


def verdict_of(reward: float | None, correct_above: float | None) -> Verdict:
    """Return the verdict for a reward. correct_above: None if rewards only rank."""
    if reward is None:
        return Verdict.UNSCORABLE
    if correct_above is None:
        return Verdict.SCORED
    return Verdict.CORRECT if reward > correct_above else Verdict.INCORRECT


def function_scorer(
    function: RewardFunction, correct_above: float | None = 0.5, rule: AnswerRule = "boxed"
) -> Scorer:
    """Return a scorer that uses your function.

    The reward is the function's result; a reward above `correct_above` counts as CORRECT (for
    accuracy and pairs), any other as INCORRECT, and None is UNSCORABLE. With correct_above None
    every reward is SCORED.
    rule: of `final_answer`, for the answers stored with the rewards.
    """
    if correct_above is not None and not math.isfinite(correct_above):
        raise ValueError(f"correct_above must be a finite number, got {correct_above}")

    def scorer(
        problems: Sequence[Problem], texts: Sequence[str], token_ids: Sequence[np.ndarray]
    ) -> list[Score]:
        rewards = call_reward(function, problems, texts, token_ids)
        return [
            Score(
                reward=reward,
                verdict=verdict_of(reward, correct_above),
                answer=final_answer(text, rule),
            )
            for reward, text in zip(rewards, texts, strict=True)
        ]

    return scorer


def _as_rewards(name: str, result: Any, problems: Sequence[Problem]) -> list[float | None]:
    """Return the rewards of the problems' responses. Raises RewardFailed for an invalid result."""
    if inspect.iscoroutine(result):
        result.close()
        raise RewardFailed(f"{name} is an async function; make it a plain one that returns a list")
    kind = type(result).__name__
    wanted = (
        f"{name} must return a list of {counted(len(problems), 'number')}, one per completion, got"
    )
    if not isinstance(result, Sequence | np.ndarray) or isinstance(result, str | bytes):
        raise RewardFailed(f"{wanted} {kind}")
    try:
        values = list(result)
    except Exception as error:
        raise RewardFailed(
            f"{wanted} {kind} whose values cannot be read{_origin(error)}"
        ) from error
    if len(values) != len(problems):
        raise RewardFailed(f"{wanted} {counted(len(values), 'value')}")
    rewards: list[float | None] = []
    for index, (value, problem) in enumerate(zip(values, problems, strict=True)):
        number = None if value is None else _number(value)
        if value is None or (number is not None and is_reward(number)):
            rewards.append(number)
            continue
        wrong = f", of type {type(value).__name__}: return a number"
        if number is not None:
            wrong = f"; return a finite number of at most {MOST_REWARD:g} in size"
        raise RewardFailed(
            f"{name} returned {_text(repr, value):.80} for completion {index}, of problem "
            f"{problem.id} ({problem.prompt!r:.80}){wrong}, or None for one that cannot be scored"
        )
    return rewards


def _text(show: Callable[[Any], str], value: Any) -> str:
    """Return str or repr of a user's object, or its type if that fails, as for a number of 5,000
    digits."""
    try:
        return show(value)
    except _STOPPED:
        raise
    except BaseException:
        return f"<{type(value).__name__}>"


def _number(value: Any) -> float | None:
    """Return the float of a number, or of an array without dimensions; None for other objects.

    NaN replaces a number that no float can hold.
    """
    if isinstance(value, str) or not hasattr(type(value), "__float__"):
        return None
    # float would drop an imaginary part or a unit
    kind = getattr(getattr(value, "dtype", None), "kind", None)
    if getattr(value, "shape", ()) != () or kind in ("c", "m", "M"):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.nan
    except (TypeError, ValueError):
        return None
