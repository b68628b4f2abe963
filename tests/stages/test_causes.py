"""Why responses teach nothing: the symptom that a message gives, and its remedy."""

import dataclasses

import numpy as np
import pytest

from g2d_jax.config import Reward, Task
from g2d_jax.records import Problem, Rollout, Score, ScoredRollout, Verdict
from g2d_jax.stages.causes import cause_of

PROBLEM = Problem("0" * 16, "1 + 1 = ?", "2")


def response(
    verdict: Verdict, text: str, reward: float | None = 0.0, stop: str = "stop"
) -> ScoredRollout:
    nothing = np.zeros(0, np.int32)
    rollout = Rollout(PROBLEM.id, 0, 0, nothing, nothing, np.zeros(0), np.zeros(0), stop)
    return ScoredRollout(rollout, text, Score(reward, verdict))


@pytest.mark.parametrize(
    ("rule", "text", "symptom", "remedy"),
    [
        (
            "boxed",
            "The answer is 54.",
            "'The answer is 54.'",
            "answers='last_line', which reads 100%",
        ),
        ("tags", "so 7\n#### 7", "finds no answer in 75%", "answers='boxed', which reads"),
        (
            "last_line",
            r"thus \boxed{3}",
            "answers='last_line' finds",
            "answers='boxed', which reads",
        ),
        ("boxed", "I do not know", "such as 'I do not know'", r"ask for \boxed{x} in the prompt"),
        ("hash", "", "such as ''", "ask for #### x"),
    ],
)
def test_responses_without_an_answer(rule: str, text: str, symptom: str, remedy: str) -> None:
    rows = [response(Verdict.NO_ANSWER, text)] * 3 + [response(Verdict.CORRECT, "2", 1.0)]
    cause = cause_of(
        [PROBLEM] * 2, [rows[:2], rows[2:]], {"main": Task(reward=Reward(answers=rule))}
    )
    assert symptom in cause.symptom and cause.remedy.count(remedy) == 1


@pytest.mark.parametrize(
    ("row", "symptom", "remedy"),
    [
        (response(Verdict.CORRECT, "2", 1.0), "100% of the responses are correct", "harder"),
        (response(Verdict.INCORRECT, "3"), "are incorrect, such as '3'", "easier problems"),
        (response(Verdict.TIMEOUT, "3"), "took too long", "reward.cpu_seconds"),
        (response(Verdict.UNSCORABLE, "3", None), "could not be scored", "reference answers"),
        (response(Verdict.SCORED, "3", 0.3), "the reward ranks", "more num_generations"),
        (response(Verdict.NO_ANSWER, "let us", 0.0, "length"), "cut at max_new_tokens", "larger"),
        (response(Verdict.INCORRECT, "let 1", 0.0, "length"), "cut at max_new_tokens", "larger"),
    ],
)
def test_every_verdict_has_its_symptom_and_remedy(
    row: ScoredRollout, symptom: str, remedy: str
) -> None:
    cause = cause_of([PROBLEM], [[row, row]], {"main": Task()})
    assert symptom in cause.symptom and remedy in cause.remedy


def test_verdicts_without_a_majority() -> None:
    rows = [response(Verdict.CORRECT, "2", 1.0), response(Verdict.INCORRECT, "3")]
    assert cause_of([PROBLEM], [rows], {"main": Task()}).remedy == "more num_generations"


def test_partial_rewards_name_what_counts_as_correct() -> None:
    """Also those that are all negative; equal ones do not."""
    for low, high in ((-0.9, -0.1), (0.1, 0.42)):
        rows = [response(Verdict.INCORRECT, "3", low), response(Verdict.INCORRECT, "4", high)]
        cause = cause_of([PROBLEM], [rows], {"main": Task()})
        assert (
            f"from {low:g} to {high:g}, and correct is above reward.correct_above=0.5"
            in cause.symptom
        )
    assert "correct_above" not in cause_of([PROBLEM], [rows[:1]], {"main": Task()}).symptom


def test_each_task_is_read_by_its_own_rule() -> None:
    other = dataclasses.replace(PROBLEM, task="b")
    tasks = {"main": Task(), "b": Task(reward=Reward(answers="tags"))}
    groups = [[response(Verdict.CORRECT, "2", 1.0), response(Verdict.INCORRECT, "3")]]
    groups.append([response(Verdict.NO_ANSWER, "It is 7")] * 3)
    cause = cause_of([PROBLEM, other], groups, tasks)
    assert (
        "tasks.b.reward.answers='tags' finds no answer in 100% of the responses of the task b"
        in cause.symptom
    )
    assert "<answer>x</answer>" in cause.remedy


def test_a_thought_that_is_never_closed() -> None:
    rows = [response(Verdict.NO_ANSWER, "<think> let me see")]
    cause = cause_of([PROBLEM], [rows], {"main": Task()})
    assert "<think> is never closed" in cause.symptom and "enable_thinking" in cause.remedy


def test_a_files_responses_have_no_settings_of_sampling() -> None:
    rows = [response(Verdict.INCORRECT, "3")]
    assert "other rollouts" in cause_of([PROBLEM], [rows], {"main": Task()}, sampled=False).remedy
