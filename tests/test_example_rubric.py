"""The example of an environment's rubric, as the library calls it.

Where verifiers is installed the rubric is its own, else one that does the same here.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from g2d_jax.records import Problem
from g2d_jax.rewards.functions import RewardFailed, call_reward, load_reward

FOLDER = str(Path(__file__).parents[1] / "examples" / "rubric")


class OwnRubric:
    def __init__(self, funcs: list[Callable[..., Any]], weights: list[float]) -> None:
        self.weighted = list(zip(funcs, weights, strict=True))

    async def score_rollout(self, state: dict[str, Any]) -> None:
        """Write the weighted sum of the functions into a rollout's state."""
        known = {**state["input"], **state, "state": state}
        state["reward"] = 0.0
        for function, weight in self.weighted:
            names = inspect.signature(function).parameters
            assert "completions" not in names, "no group-level reward functions"
            value = function(**{name: known[name] for name in names})
            state["reward"] += weight * (await value if inspect.isawaitable(value) else value)


Rubric: Any = OwnRubric
with suppress(ImportError):
    from verifiers import Rubric


@pytest.fixture
def module() -> ModuleType:
    """The example's module, loaded as a run loads it."""
    load_reward("rubric:scored", FOLDER)
    return sys.modules["rubric"]


def exact(completion: Any, answer: str) -> float:
    return float(completion[-1]["content"] == answer)


async def short(completion: Any, state: dict[str, Any], level: int) -> float:
    await asyncio.sleep(0)
    assert state["completion"] == completion
    return level / len(completion[-1]["content"])


def asks(prompt: Any) -> float:
    return float(prompt[-1] == {"role": "user", "content": "2+3=?"})


def rewards(module: ModuleType, problem: Problem, *texts: str) -> list[float | None]:
    ids = [np.zeros(1, np.int32)] * len(texts)
    return call_reward(module.scored, [problem] * len(texts), texts, ids)


@pytest.mark.parametrize("prompt", ["2+3=?", ({"role": "user", "content": "2+3=?"},)])
def test_the_weighted_sum_is_the_reward(
    module: ModuleType, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Rubric([exact, short, asks], weights=[1.0, 0.5, 10.0])
    monkeypatch.setattr(module, "rubric", lambda: own)
    problem = Problem("a", prompt, "5", columns={"level": 2})
    for _ in range(2):  # the second call is on the same event loop
        assert rewards(module, problem, "5", "four") == [12.0, 10.25]


def test_a_rubric_that_compares_responses_is_refused(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def best(completions: Any) -> list[float]:
        return [0.0] * len(completions)

    monkeypatch.setattr(module, "rubric", lambda: Rubric([best], weights=[1.0]))
    with pytest.raises(RewardFailed, match="no group-level reward functions"):
        rewards(module, Problem("a", "2+3=?", "5"), "5")
