"""The whole verifier: on answers.jsonl, on the table of docs/grading.md, and on what once went
wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from g2d_jax.records import Verdict
from g2d_jax.rewards.grade import grade
from g2d_jax.rewards.pool import VerifierPool

CASES = [
    json.loads(line)
    for line in Path(__file__).with_name("answers.jsonl").read_text("utf-8").splitlines()
]
# math-verify reads a bare \log as the decimal one; only the problem says which is meant
KNOWN_MISSES = {"natural_log"}


def test_answers_are_judged_as_people_would_and_bombs_never_correct(pool: VerifierPool) -> None:
    scores = pool.score([case["gold"] for case in CASES], [case["response"] for case in CASES])
    correct = [score.verdict is Verdict.CORRECT for score in scores]
    wrong = {
        case["id"]
        for case, is_correct in zip(CASES, correct, strict=True)
        if is_correct != case["expected"]
    }
    assert wrong == KNOWN_MISSES and len(CASES) > 200
    refused = [
        score.verdict
        for case, score in zip(CASES, scores, strict=True)
        if case["note"] == "no answer"
    ]
    assert set(refused) == {Verdict.NO_ANSWER}


def forms() -> list[list[str]]:
    """The rows of the table of forms in docs/grading.md, code marks taken off: gold, right, wrong."""
    text = (Path(__file__).parents[2] / "docs" / "grading.md").read_text("utf-8")
    lines = text.partition("**Forms.")[2].partition("\n|")[2].split("\n\n")[0].splitlines()
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize(("gold", "right", "wrong"), forms())
def test_forms_are_graded_as_the_page_says(
    pool: VerifierPool, gold: str, right: str, wrong: str
) -> None:
    scores = pool.score([gold] * 2, [rf"\boxed{{{right}}}", rf"\boxed{{{wrong}}}"])
    assert [score.verdict for score in scores] == [Verdict.CORRECT, Verdict.INCORRECT]


def test_many_approximations_are_refused_at_once() -> None:
    """One after the other they took 20 seconds, and then the recursion limit."""
    assert grade("9", r"x \approx " * 3000 + "9") is Verdict.NO_ANSWER


def test_unscorable_is_not_wrong(pool: VerifierPool) -> None:
    scores = pool.score(["see the figure: ^^", None, "", "x^2+"], [r"\boxed{3}"] * 4)
    assert [score.verdict for score in scores] == [Verdict.UNSCORABLE] * 4
    assert [score.reward for score in scores] == [None] * 4


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"(\pi+\log_2 0.5, \sqrt{1})", r"(\pi-1, 1)"),
        (r"(3, \log_2 0.5 + \log_3 9)", "(3, 1)"),
        (r"(\cos 60^\circ + \log_2 0.5, 2)", r"\left(-\frac{1}{2}, 2\right)"),
    ],
)
def test_a_gold_is_read_in_the_spelling_in_which_it_is_compared(
    pool: VerifierPool, gold: str, answer: str
) -> None:
    """math-verify cannot read `\\log_2 0.5` in a tuple; with `\\frac{5}{10}` it can."""
    (score,) = pool.score([gold], [rf"\boxed{{{answer}}}"])
    assert score.verdict is Verdict.CORRECT


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        (r"\ln 9/(\cos 36^{\circ})^{2}", r"\frac{\ln 9}{\cos^2\frac{\pi}{5}}", Verdict.CORRECT),
        (r"\frac{\sin^2 x}{x+1}", r"\sin^2 x/\left(x+1\right)", Verdict.CORRECT),
        (r"\ln\left(\frac{x}{x+1}\right)", r"\ln x/(x+1)", Verdict.INCORRECT),
        (r"\cos\frac{2\pi}{n+1}", r"\cos 2\pi /(n+1)", Verdict.CORRECT),
    ],
)
def test_what_stands_behind_a_slash_is_outside_of_a_function_but_below_pi(
    pool: VerifierPool, gold: str, answer: str, verdict: Verdict
) -> None:
    (score,) = pool.score([gold], [rf"\boxed{{{answer}}}"])
    assert score.verdict is verdict
