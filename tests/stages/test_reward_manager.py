"""Each response is scored by the reward of its problem's task."""

from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from worlds import only, run

from g2d_jax import config as settings
from g2d_jax.config import Reward, check
from g2d_jax.config.section import read
from g2d_jax.recipes.config_load import resolve
from g2d_jax.records import Problem
from g2d_jax.runtime.mesh import make_mesh
from g2d_jax.runtime.tables import read_preferences, read_rollouts
from g2d_jax.runtime.tracking import read_metrics
from g2d_jax.session.reward_manager import RewardManager, shares

IDS = np.zeros(1, np.int32)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def scorers(tmp_path: Path) -> Iterator[Callable[..., RewardManager]]:
    made: list[RewardManager] = []

    def make(**rewards: dict[str, object]) -> RewardManager:
        sections = {
            task: read(Reward, settings.reward(**changes), []) for task, changes in rewards.items()
        }
        mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
        made.append(RewardManager(sections, lambda: mesh))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_the_problem_carries_its_reward(scorers):
    score = scorers(
        main={},
        even={"function": "tiny:even"},
        long={"function": "tiny:longest", "verifiable": False, "correct_above": 0.5},
    )
    problems = [
        Problem("a", "1+1", "2"),
        Problem("b", "x", task="long"),
        Problem("c", "y", task="even"),
    ]
    found = score([*problems, problems[0]], ["\\boxed{2}", "abc", "abc", "\\boxed{3}"], [IDS] * 4)
    assert [one.reward for one in found] == [1.0, 3.0, 0.0, 0.0]
    assert [one.verdict.value for one in found] == ["correct", "scored", "incorrect", "incorrect"]


def fives(completions, **columns):
    """None for an empty text."""
    return [5.0 if text else None for text in completions]


def test_further_rewards_are_weighted_and_decide_nothing_about_right_and_wrong(scorers):
    further = {
        "functions": ("tiny:longest", "test_reward_manager:fives"),
        "weights": (0.5, -1),
    }
    texts = ["\\boxed{2}", "\\boxed{3}!", ""]
    problems = [Problem(name, "1+1", "2") for name in "abc"]
    found = scorers(main=further)(problems, texts, [IDS] * 3)
    assert [one.reward for one in found] == [1 + 4.5 - 5, 0 + 5.0 - 5, 0.0]
    assert [one.verdict.value for one in found] == ["correct", "incorrect", "no_answer"]
    assert found[0].parts == {
        "verify": 1.0,
        "tiny:longest": 9.0,
        "test_reward_manager:fives": 5.0,
    }
    assert found[2].parts["test_reward_manager:fives"] is None
    ranked = scorers(main={**further, "verifiable": False})(problems, texts, [IDS] * 3)
    assert {one.verdict.value for one in ranked} == {"scored"}
    assert [one.reward for one in ranked] == [one.reward for one in found]


def test_where_the_main_reward_is_none_so_is_the_sum(scorers):
    further = {"functions": ("tiny:longest",), "weights": (1.0,)}
    score = scorers(main={"function": "test_reward_manager:fives", **further})
    (none,) = score([Problem("a", "x")], [""], [IDS])
    assert none.reward is None and none.parts["tiny:longest"] == 0.0


@pytest.mark.parametrize(
    ("functions", "weights", "field"),
    [
        (("tiny:even",), (), "weights"),
        (("tiny:even", "tiny:even"), (1, 1), "functions"),
        (("verify",), (1,), "functions"),
        (("tiny:even",), (1e9,), "weights"),
        (("tiny:even",), ("1",), "weights"),
    ],
)
def test_weights_belong_to_functions(functions, weights, field):
    made = resolve("demo")
    made.reward.update(functions=functions, weights=weights)
    with pytest.raises(ValueError, match=rf"reward\.{field} "):
        check.checked(made)


def test_each_reward_is_logged_and_kept_in_the_rollouts(config, tmp_path, opened):
    only(config, "warmup").stages.warmup.steps = 1
    config.reward.update(functions=("tiny:longest",), weights=(0.25,))
    session = opened(config, tmp_path, None)
    run(session)
    rows = read_rollouts(session.folders["warmup"] / "rollouts")
    mains = [row.score.parts["tiny:even"] for row in rows]
    lengths = [row.score.parts["tiny:longest"] for row in rows]
    assert lengths == [float(len(row.text)) for row in rows]
    assert [row.score.reward for row in rows] == [
        main + 0.25 * length for main, length in zip(mains, lengths, strict=True)
    ]
    assert [row.score.verdict.value == "correct" for row in rows] == [main == 1 for main in mains]
    (logged,) = [r["metrics"] for r in read_metrics(tmp_path) if "reward" in r["metrics"]]
    assert logged["reward/tiny:even"] == pytest.approx(np.mean(mains))
    assert logged["reward/tiny:longest"] == pytest.approx(np.mean(lengths))


def test_responses_to_a_prompt_are_scored_by_one_process():
    problems = [Problem(name, name) for name in "aabbbacc"]
    assert shares(problems, 2) == [[0, 1, 5], [2, 3, 4, 6, 7]]
    assert shares(problems, 1) == [list(range(8))] and shares(problems[:2], 3) == [[0, 1], [], []]


def test_each_task_reads_answers_by_its_own_rule(scorers):
    score = scorers(
        main={}, lines={"answers": "last_line"}, even={"function": "tiny:even", "answers": "tags"}
    )
    text = "Answer: 2\n<answer>3</answer>"
    problems = [Problem(task, "1+1", "2", task=task) for task in ("main", "lines", "even")]
    pending = [score.submit(problem, text) for problem in problems]
    for found in (
        score(problems, [text] * 3, [IDS] * 3),
        score.score_local(problems, [text] * 3, [IDS] * 3, pending),
    ):
        assert [one.answer for one in found] == [None, "2", "3"]
        assert [one.verdict.value for one in found[:2]] == ["no_answer", "correct"]


def test_verifiers_start_early_where_answers_are_more_than_numbers(scorers):
    numbers = [Problem("a", "1+1", "2"), Problem("b", "1/2", r"\\frac{1}{2}")]
    for problems, started in ((numbers, 0), ([*numbers, Problem("c", "x", "x+1")], 1)):
        verifiers = scorers(main={"workers": 1})
        verifiers.start(problems)
        assert len(verifiers._pools) == started


def test_pairs_of_rewards_that_rank_are_the_best_against_the_worst(config, tmp_path, opened):
    """Rollouts, rewards and pairs of a stage; the reward is the length."""
    only(config, "collect").stages.collect.pairs_per_prompt = 1
    config.reward.update(function="tiny:longest", verifiable=False)
    session = opened(config, tmp_path, None)
    manifest = run(session)
    rows = read_rollouts(session.folders["collect"] / "rollouts")
    assert len(rows) == 32
    pairs = {
        pair.problem_id: pair
        for pair in read_preferences(session.folders["collect"] / "preferences")
    }
    for problem in {row.rollout.problem_id for row in rows}:
        rewards = [row.score.reward for row in rows if row.rollout.problem_id == problem]
        assert (problem in pairs) == (len(set(rewards)) > 1)
        if problem in pairs:
            assert (pairs[problem].chosen_reward, pairs[problem].rejected_reward) == (
                max(rewards),
                min(rewards),
            )
    assert manifest.counts["mixed"] + manifest.counts["all_equal"] == 8
