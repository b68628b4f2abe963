"""Reward functions of the user's own: import paths, TRL's signature, and results that are not what
they should be."""

from __future__ import annotations

import copy
import subprocess
import sys
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from g2d_jax.recipes.config_load import resolve
from g2d_jax.records import Problem, Verdict
from g2d_jax.rewards.functions import (
    RewardFailed,
    VerifierScorer,
    call_reward,
    function_scorer,
    load_reward,
)
from g2d_jax.rewards.pool import VerifierPool
from g2d_jax.runtime import processes

PLAIN = Problem(id="a", prompt="1+1?", answer="2", columns={"level": 3})
CHAT = Problem(
    id="b",
    prompt=({"role": "user", "content": "2+2?"},),
    answer="4",
    solution="four",
    columns={"hint": "h"},
)
IDS = [np.array([5, 6], np.int32), np.array([7], np.int32)]


def test_a_reward_is_called_as_trl_does() -> None:
    seen: dict[str, Any] = {}

    def reward(
        prompts: Any, completions: Any, completion_ids: Any, **columns: Any
    ) -> list[float | None]:
        seen.update(
            prompts=prompts, completions=completions, completion_ids=completion_ids, **columns
        )
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
        return np.array(
            [float(gold in text) for text, gold in zip(completions, answer, strict=True)],
            np.float32,
        )

    assert call_reward(reward, [PLAIN, PLAIN], ["it is 2", "3"], IDS) == [1.0, 0.0]


@pytest.mark.parametrize(
    "value",
    [["2", "4"], {"stdin": ["1"], "stdout": ["2"]}, [{"cases": [1, 2]}, "3"]],
    ids=str,
)
def test_every_call_gets_copies_of_its_own(value: Any) -> None:
    """Also each of several responses to one problem, and the calls that look for what fails."""
    problem = Problem(id="a", prompt="1+1?", columns={"tests": value})
    kept = copy.deepcopy(value)

    def emptying(completions: list[str], tests: list[Any], **columns: Any) -> list[float]:
        seen.extend(copy.deepcopy(tests))
        for test in tests:
            for part in test.values() if isinstance(test, dict) else test:
                if isinstance(part, list):
                    part.clear()
            test.clear()
        return [0.0 for _ in completions]

    for _ in range(2):
        seen: list[Any] = []
        call_reward(emptying, [problem] * 2, ["x"] * 2, IDS)
        assert seen == [kept, kept]
    assert problem.columns == {"tests": kept}

    def failing(completions: list[str], tests: list[Any], **columns: Any) -> list[float]:
        emptying(completions, tests)
        return [1 / completions.count("x")] * len(completions)

    with pytest.raises(RewardFailed, match=r"it does so for problem a .* response 'y'"):
        call_reward(failing, [problem], ["y"], IDS[:1])
    assert problem.columns == {"tests": kept}


def of_verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
    right = float(solution_str == ground_truth and data_source == "sums")
    extra_info["tries"].append(1)
    return {"score": right + len(extra_info["tries"]), "acc": right}


def plain_of_verl(solution_str: str, ground_truth: str, **others: Any) -> float:
    assert others.keys() == {"data_source", "extra_info"}
    return float(solution_str == ground_truth)


def test_a_reward_with_the_signature_of_verl_is_called_for_each_response() -> None:
    problem = Problem(
        id="a", prompt="1+1?", answer="2", subset="sums", columns={"extra_info": {"tries": []}}
    )
    assert call_reward(of_verl, [problem] * 2, ["2", "3"], IDS) == [2.0, 1.0]
    assert call_reward(plain_of_verl, [problem] * 2, ["2", "3"], IDS) == [1.0, 0.0]
    no_score = Problem(id="b", prompt="1+1?")
    with pytest.raises(RewardFailed, match=r"TypeError: .* it does so for problem b"):
        call_reward(of_verl, [no_score], ["2"], IDS[:1])


async def coroutine(**columns: Any) -> Any:
    return [0.0, 0.0]


class Silent(float):
    """A number that cannot be shown."""

    def __repr__(self) -> str:
        sys.exit(0)


class Lying(list[float]):
    """A list of another length than it says."""

    def __len__(self) -> int:
        return 2


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def test_an_exception_that_cannot_be_shown_is_named() -> None:
    def reward(**columns: Any) -> list[float]:
        raise Unspeakable

    with pytest.raises(
        RewardFailed,
        match=r"reward .*reward .* failed at .*, in reward: Unspeakable: <Unspeakable>",
    ):
        call_reward(reward, [PLAIN, PLAIN], ["a", "b"], IDS)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda **_: [1.0], "list of 2 numbers, one per completion, got 1 value"),
        (lambda **_: 1.0, "got float"),
        (
            lambda **_: [1.0, float("nan")],
            r"returned nan for completion 1, of problem a \('1\+1\?'\); return a finite",
        ),
        (lambda **_: [float("inf"), 0.0], "returned inf for completion 0, of problem a"),
        (
            lambda **_: [0.0, -np.inf],
            r"returned (np\.float64\()?-inf\)? for completion 1, of problem a",
        ),
        (
            lambda **_: [1e308, 1e308],
            r"returned 1e\+308 for completion 0, of problem a .* at most 1e\+12",
        ),
        (
            lambda **_: np.array([0.0, -1.7e38], np.float32),
            r"returned .*-1.7e\+38.* for completion 1",
        ),
        (lambda **_: [10**400, 0.0], "returned 1000.* for completion 0"),
        (lambda **_: [Fraction(10**400, 3), 0.0], "returned Fraction.* for completion 0"),
        (lambda **_: [np.zeros(2), 0.0], r"returned array\(\[0\., 0\.\]\) for completion 0"),
        (
            lambda **_: [10**5000, 0.0],
            "returned <int> for completion 0, of problem a .* at most 1e",
        ),
        (lambda **_: [0.0, Silent("nan")], "returned <Silent> for completion 1, of problem a"),
        (
            lambda **_: [Decimal(10) ** 20, 0.0],
            r"returned Decimal\(.*\) for completion 0, of problem a .* at most 1e",
        ),
        (
            lambda **_: [1j, 0.0],
            "returned 1j for completion 0, .* of type complex: return a number",
        ),
        (lambda **_: [np.array(1j), 0.0], "for completion 0, .* of type ndarray: return a number"),
        (lambda **_: [{"score": 1}, 0.0], "for completion 0, .* of type dict: return a number"),
        (lambda **_: {0: 1.0, 1: 0.0}, "got dict"),
        (lambda **_: np.array(1.0), "got ndarray whose values cannot be read"),
        (lambda **_: Lying([1.0]), "got 1 value"),
        (lambda **_: b"\x00\x01", "got bytes"),
        (lambda **_: [1.0, "0"], "returned '0' for completion 1"),
        (lambda **_: "ab", "must return a list"),
        (coroutine, "async"),
    ],
)
def test_bad_results_are_named(reward: Any, message: str) -> None:
    with pytest.raises(RewardFailed, match=message):
        call_reward(reward, [PLAIN, PLAIN], ["a", "b"], IDS)


def test_rewards_of_any_kind_of_number_within_the_limit_are_taken() -> None:
    values = [
        np.True_,
        Fraction(1, 4),
        np.float32(-2.5),
        10**12,
        None,
        -1e12,
        Decimal("0.5"),
        np.array(0.5, np.float16),
    ]
    rewards = call_reward(lambda **_: values, [PLAIN] * 8, ["a"] * 8, IDS[:1] * 8)
    assert rewards == [1.0, 0.25, -2.5, 1e12, None, -1e12, 0.5, 0.5]
    assert np.isfinite(np.square(np.array([1e12] * 4096, np.float32)).sum())


EXITS = {
    "sys.exit()": "",
    "sys.exit(0)": "0",
    "sys.exit('bye')": "bye",
    "raise SystemExit": "",
    "raise asyncio.CancelledError": None,
    "raise type('Own', (BaseException,), {})('mine')": None,
}


@pytest.mark.parametrize("statement", EXITS)
def test_a_reward_that_exits_is_named_with_its_line_and_the_response(
    tmp_path: Path, statement: str
) -> None:
    name = f"my_exit_{abs(hash(statement))}"
    lines = [
        "import asyncio, os, sys",
        "def exact(completions):",
        "    for text in completions:",
        "        leave(text)",
    ]
    lines += [
        "    return [1.0 for _ in completions]",
        "def leave(text):",
        f"    if text == 'x': {statement}",
    ]
    (tmp_path / f"{name}.py").write_text("\n".join(lines))
    problems = [Problem(id=str(i), prompt=f"{i}+1?") for i in range(3)]
    with pytest.raises(RewardFailed) as failed:
        call_reward(
            load_reward(f"{name}:exact", str(tmp_path)), problems, ["a", "x", "b"], IDS[:1] * 3
        )
    assert f"failed at {tmp_path / name}.py, line 7, in leave: " in str(failed.value)
    assert "it does so for problem 1 ('1+1?'), response 'x'" in str(failed.value)
    if EXITS[statement] is not None:
        assert f"it exits (SystemExit: {EXITS[statement]})" in str(failed.value)


@pytest.mark.parametrize("error", [KeyboardInterrupt, processes.Preempted])
def test_what_stops_the_run_is_no_failure_of_the_reward(error: type[BaseException]) -> None:
    def reward(**columns: Any) -> list[float]:
        raise error

    with pytest.raises(error):
        call_reward(reward, [PLAIN], ["a"], IDS[:1])


def test_a_reward_file_that_exits_when_it_is_imported_is_named(tmp_path: Path) -> None:
    (tmp_path / "my_exiting.py").write_text(
        "import sys\nsys.exit(0)\ndef exact(completions): return []\n"
    )
    with pytest.raises(
        ValueError, match=r"my_exiting.py, line 2, in <module>: it exits \(SystemExit: 0\)"
    ):
        load_reward("my_exiting:exact", str(tmp_path))


FORKS = {
    "when it is called": "def f(completions):\n    os.fork()\n    return [1.0]",
    "and the new process fails": "def f(completions):\n    if not os.fork(): 1 / 0\n    return [1.0]",
    "with verl's signature": "def f(solution_str, ground_truth):\n    os.fork()\n    return 1.0",
    "when it is imported": "os.fork()\ndef f(completions): return [1.0]",
}


@pytest.mark.parametrize("when", FORKS)
def test_a_process_that_a_reward_forks_does_not_go_on_as_the_run(
    tmp_path: Path, one_device: dict[str, str], when: str
) -> None:
    (tmp_path / "my_fork.py").write_text(f"import os\n{FORKS[when]}")
    code = (
        "import os, sys; from g2d_jax.records import Problem; from g2d_jax.rewards import functions\n"
        "function = functions.load_reward('my_fork:f', sys.argv[1])\n"
        "print(functions.call_reward(function, [Problem('a', '1+1?')], ['2'], [[5]]))\n"
        "print(os.waitstatus_to_exitcode(os.wait()[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path],
        env=one_device,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (0, "[1.0]\n1\n"), done.stderr
    assert "a reward function forked" in done.stderr


def test_scorers_give_verdicts_by_threshold_or_by_the_answers_of_the_problems(
    pool: VerifierPool,
) -> None:
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
    scores = VerifierScorer(pool)([PLAIN, CHAT], [r"\boxed{2}", r"\boxed{5}"], IDS)
    assert [score.verdict for score in scores] == [Verdict.CORRECT, Verdict.INCORRECT]


BROKEN = """import math

def exact(completions, label):
    return [check(text, gold) for text, gold in zip(completions, label)]

def check(text, gold):
    return float(text == gold["value"])
"""


def test_a_reward_that_raises_is_named_with_its_line_and_the_response(tmp_path: Path) -> None:
    (tmp_path / "my_broken_rewards.py").write_text(BROKEN)
    exact = load_reward("my_broken_rewards:exact", str(tmp_path))
    problems = [
        Problem(id=str(i), prompt=f"{i}+1?", columns={"label": {"value": "x"}}) for i in range(5)
    ]
    problems[3] = Problem(id="3", prompt="3+1?", columns={"label": {}})
    with pytest.raises(RewardFailed) as failed:
        call_reward(exact, problems, ["x"] * 5, IDS[:1] * 5)
    place = f"{tmp_path / 'my_broken_rewards.py'}, line 7, in check: KeyError: 'value'"
    assert str(failed.value) == (
        f"reward exact ({tmp_path / 'my_broken_rewards.py'}, line 3) failed at {place}; "
        "it does so for problem 3 ('3+1?'), response 'x'"
    )
    with pytest.raises(
        RewardFailed, match=r"test_functions.py, line \d+\) failed: TypeError: .* 'gold'"
    ):
        call_reward(lambda gold: [1.0], [PLAIN], ["x"], IDS[:1])
    with pytest.raises(
        RewardFailed, match=r"in (together|<listcomp>): ZeroDivisionError: [a-z ]+$"
    ):
        call_reward(together, [PLAIN, PLAIN], ["x", "y"], IDS)


def together(completions: list[str], **columns: Any) -> list[float]:
    return [1.0 / (2 - len(completions)) for _ in completions]


def test_a_file_beside_the_config_is_imported_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "my_config.py").write_text(
        "from g2d_jax import config as settings\n"
        "def get_config(arg=''):\n    config = settings.base()\n"
        "    config.reward.function = 'my_rewards_beside:exact'\n    return config\n"
    )
    (tmp_path / "my_rewards_beside.py").write_text(
        "def exact(completions):\n    return [1.0 for _ in completions]\n"
    )
    (tmp_path / "json.py").write_text("raise SystemExit('run')\n")
    (tmp_path / "my_helpers.py").write_text("")
    before = list(sys.path)
    config = resolve(str(tmp_path / "my_config.py"))
    assert config.reward.folder == str(tmp_path)
    assert load_reward(config.reward.function, config.reward.folder)(completions=["x"]) == [1.0]
    assert sys.path == before and "my_helpers" not in sys.modules
    with pytest.raises(ValueError, match=r"json.py has the name of another module"):
        load_reward("json:exact", str(tmp_path))
    (tmp_path / "my_wrong.py").write_text("def exact(:\n")
    with pytest.raises(
        ValueError, match=r"importing 'my_wrong' failed at .*my_wrong.py, line 1: SyntaxError"
    ):
        load_reward("my_wrong:exact", str(tmp_path))
    (tmp_path / "my_wrong.py").write_text("LIMIT = 3\nLIMITS[0]\n")
    with pytest.raises(ValueError, match=r"my_wrong.py, line 2, in <module>: NameError"):
        load_reward("my_wrong:exact", str(tmp_path))
    with pytest.raises(ValueError, match=r"cannot import 'my_rewards_elsewhere'"):
        load_reward("my_rewards_elsewhere:exact", str(tmp_path))


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
def test_a_reward_that_cannot_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, message: str
) -> None:
    (tmp_path / "my_rewards_for_test.py").write_text(
        "import math\nLIMIT = 3\ndef length(completions): return [1.0]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert load_reward("my_rewards_for_test:length")(completions=["x"]) == [1.0]
    with pytest.raises(ValueError, match=message):
        load_reward(path)
