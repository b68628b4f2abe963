"""Reward functions of the user's own: import paths, TRL's signature, and results that are not what they should be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from g2d_jax.records import Problem, Verdict
from g2d_jax.rewards.functions import RewardFunction, call_reward, function_scorer, load_reward, verifier_scorer
from g2d_jax.rewards.pool import VerifierPool

PLAIN = Problem(id="a", prompt="1+1?", answer="2", columns={"level": 3})
CHAT = Problem(
    id="b", prompt=({"role": "user", "content": "2+2?"},), answer="4", solution="four", columns={"hint": "h"}
)
IDS = [np.array([5, 6], np.int32), np.array([7], np.int32)]


def test_a_reward_is_called_as_trl_does() -> None:
    seen: dict[str, Any] = {}

    def reward(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float | None]:
        seen.update(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns)
        return [1, None]

    assert call_reward(reward, [PLAIN, CHAT], ["two", "four"], IDS) == [1.0, None]
    assert seen == {
        "prompts": ["1+1?", [{"role": "user", "content": "2+2?"}]],
        "completions": ["two", [{"role": "assistant", "content": "four"}]],
        "completion_ids": [[5, 6], [7]],
        "answer": ["2", "4"],
        "solution": [None, "four"],
        "level": [3, None],
        "hint": [None, "h"],
    }


def test_a_reward_may_name_only_what_it_needs() -> None:
    def reward(completions: list[str], answer: list[str]) -> np.ndarray:
        return np.array([float(gold in text) for text, gold in zip(completions, answer, strict=True)], np.float32)

    assert call_reward(reward, [PLAIN, PLAIN], ["it is 2", "3"], IDS) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0], "list of 2 numbers, one per completion, got 1 values"),
        (1.0, "got float"),
        ([1.0, float("nan")], "returned nan for completion 1"),
        ([float("inf"), 0.0], "returned inf for completion 0"),
        ([1.0, "0"], "returned '0' for completion 1"),
        ("ab", "must return a list"),
    ],
)
def test_bad_results_are_named(result: Any, message: str) -> None:
    def reward(**columns: Any) -> Any:
        return result

    with pytest.raises(ValueError, match=message):
        call_reward(reward, [PLAIN, PLAIN], ["a", "b"], IDS)


def test_an_async_reward_is_refused() -> None:
    async def reward(**columns: Any) -> Any:
        return [0.0, 0.0]

    with pytest.raises(ValueError, match="async"):
        call_reward(cast(RewardFunction, reward), [PLAIN, PLAIN], ["a", "b"], IDS)


def test_unequal_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="1, 2, 2"):
        call_reward(lambda **columns: [0.0, 0.0], [PLAIN], ["a", "b"], IDS)


def test_function_scorer_gives_verdicts_by_threshold() -> None:
    scorer = function_scorer(lambda completions, **columns: [0.5, 0.7], correct_above=0.5)
    scores = scorer([PLAIN, PLAIN], [r"\boxed{3}", "none"], IDS)
    assert [(s.reward, s.verdict, s.answer) for s in scores] == [
        (0.5, Verdict.INCORRECT, "3"),
        (0.7, Verdict.CORRECT, None),
    ]
    unknown = function_scorer(lambda completions, **columns: [None])([PLAIN], ["x"], IDS[:1])
    assert (unknown[0].reward, unknown[0].verdict) == (None, Verdict.UNSCORABLE)
    with pytest.raises(ValueError, match="finite"):
        function_scorer(lambda **columns: [], correct_above=float("nan"))


def test_verifier_scorer_uses_the_answers_of_the_problems(pool: VerifierPool) -> None:
    scores = verifier_scorer(pool)([PLAIN, CHAT], [r"\boxed{2}", r"\boxed{5}"], IDS)
    assert [score.verdict for score in scores] == [Verdict.CORRECT, Verdict.INCORRECT]


@pytest.fixture
def reward_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_rewards_for_test.py").write_text("import math\nLIMIT = 3\ndef length(completions): return [1.0]\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "my_rewards_for_test"


def test_load_reward(reward_module: str) -> None:
    function: Callable[..., Any] = load_reward(f"{reward_module}:length")
    assert function(["x"]) == [1.0]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("my_rewards_for_test", "package.module:function"),
        (":f", "package.module:function"),
        ("my_rewards_for_test:size", "it has length"),
        ("my_rewards_for_test:LIMIT", "no function 'LIMIT'"),
        ("no_such_module_anywhere:f", "PYTHONPATH"),
    ],
)
def test_load_reward_says_what_is_wrong(reward_module: str, path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_reward(path)
