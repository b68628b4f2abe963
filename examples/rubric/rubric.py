"""Rewards from the rubric of an environment of the library verifiers, versions 0.1.10 to 0.3.

An environment's rubric is a list of functions with weights; some are async, or ask a judge.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

# One event loop for all calls, since a judge's client keeps its connections. It has a thread of its
# own, since a notebook's thread has a loop already.
LOOP = asyncio.Runner()
THREAD = ThreadPoolExecutor(1)


@cache
def rubric() -> Any:
    """Load the rubric of the environment; return one of your own here instead, if you like."""
    import verifiers

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    loaded = verifiers.load_environment(os.environ["ENVIRONMENT"]).rubric
    for number, handler in handlers.items():
        signal.signal(number, handler)  # an environment's own end a run without saving it
    return loaded


def scored(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
    """Return for each response the weighted sum of the rubric's functions.

    Raises AssertionError for a rubric with functions that compare the responses of a group.
    """
    states = []
    for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        row = {name: values[index] for name, values in columns.items()}
        row = {name: value for name, value in row.items() if value is not None}
        messages = {"prompt": _chat("user", prompt), "completion": _chat("assistant", completion)}
        states.append({**row, **messages, "input": row, "trajectory": []})
    THREAD.submit(LOOP.run, _score(rubric(), states)).result()
    return [state["reward"] for state in states]


def _chat(role: str, text: Any) -> Any:
    return [{"role": role, "content": text}] if isinstance(text, str) else text


async def _score(rubric: Any, states: list[dict[str, Any]]) -> None:
    await asyncio.gather(*map(rubric.score_rollout, states))
