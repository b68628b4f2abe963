"""The whole verifier: on answers.jsonl, on the tables of docs/grading.md, and on what once went wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from g2d_jax.records import Verdict
from g2d_jax.rewards.pool import VerifierPool
from g2d_jax.rewards.verify import grade

CASES = [json.loads(line) for line in Path(__file__).with_name("answers.jsonl").read_text("utf-8").splitlines()]
KNOWN_MISSES = {"natural_log"}  # math-verify reads a bare \log as the decimal one; only the problem says which is meant


def test_answers_are_judged_as_people_would_and_bombs_never_correct(pool: VerifierPool) -> None:
    scores = pool.score([case["gold"] for case in CASES], [case["response"] for case in CASES])
    correct = [score.verdict is Verdict.CORRECT for score in scores]
    wrong = {case["id"] for case, is_correct in zip(CASES, correct, strict=True) if is_correct != case["expected"]}
    assert wrong == KNOWN_MISSES and len(CASES) > 170


def table(title: str) -> list[list[str]]:
    """The cells of the table that follows a bold title in docs/grading.md, its head first, code marks taken off."""
    text = (Path(__file__).parents[2] / "docs" / "grading.md").read_text("utf-8")
    lines = text.partition(f"**{title}")[2].partition("\n|")[2].split("\n\n")[0].splitlines()
    rows = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]
    return rows[:1] + rows[2:]


VERDICTS = {"right": Verdict.CORRECT, "wrong": Verdict.INCORRECT, "no answer": Verdict.NO_ANSWER}
PERCENT, APPROXIMATIONS = table("Percent."), table("`a \\approx b`**")[1:]
DOCUMENTED = [
    (row[0], answer, cell) for row in PERCENT[1:] for answer, cell in zip(PERCENT[0][1:], row[1:], strict=True)
]


@pytest.mark.parametrize(("gold", "answer", "verdict"), [*DOCUMENTED, *APPROXIMATIONS])
def test_verdicts_as_the_documented_tables_say(pool: VerifierPool, gold: str, answer: str, verdict: str) -> None:
    assert pool.score([gold], [rf"\boxed{{{answer}}}"])[0].verdict is VERDICTS[verdict]


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        (r"\sqrt{2}", r"\sqrt{2} \approx 1.42", Verdict.NO_ANSWER),
        (r"\frac{25}{3}", r"x = \frac{25}{3} \approx 8.33", Verdict.CORRECT),
        (r"33.3\%", r"\frac{1}{3} \approx 33.3\%", Verdict.CORRECT),
        ("12.6", r"12.6 \approx 13", Verdict.CORRECT),
        ("3.14", r"x \approx 3.14", Verdict.CORRECT),
        (r"\pi", r"\pi \approx 3.14", Verdict.CORRECT),
        ("2", r"1 \approx 2 \approx 3", Verdict.NO_ANSWER),
        (r"12\text{ cm}", r"12\text{ cm} \approx 12\text{ m}", Verdict.NO_ANSWER),
        ("12, 13", r"12, 13 \approx 14", Verdict.NO_ANSWER),
        ("2", r"AB \approx 2", Verdict.CORRECT),
        ("5.2", r"\text{Area} \approx 5.2", Verdict.CORRECT),
        ("0.15", r"P(X>3) \approx 0.15", Verdict.CORRECT),
        ("0.15", r"p = P(X=3) \approx 0.15", Verdict.CORRECT),
        ("5.2", r"AB_{12} = CD \approx 5.2", Verdict.CORRECT),
        ("13", r"12 = x \approx 13", Verdict.NO_ANSWER),
        ("13", r"x, \pi \approx 13", Verdict.NO_ANSWER),
        ("24", r"e^\pi \approx 24", Verdict.NO_ANSWER),
        ("1", r"\log(12) \approx 1.1", Verdict.NO_ANSWER),
        ("x=1, y=2", "2, 1", Verdict.INCORRECT),
        ("x=1, y=2", "(2, 1)", Verdict.INCORRECT),
        ("x=1, y=2", "1, 2", Verdict.CORRECT),
        ("x=1, y=2", "y=2 and x=1", Verdict.CORRECT),
        ("x=1, y=2", "x=2, y=1", Verdict.INCORRECT),
        ("x=1, y=2", "y=2, 1", Verdict.INCORRECT),
        ("2, 1", "x=1, y=2", Verdict.INCORRECT),
        ("(1, 2)", "x=1, y=2", Verdict.CORRECT),
        (r"x=1, y=\sqrt{8}", r"y=2\sqrt{2}, x=1", Verdict.CORRECT),
        (r"x=1, y=\sqrt{8}", r"2\sqrt{2}, 1", Verdict.INCORRECT),
        ("x=1, x=2", "2, 1", Verdict.CORRECT),
        ("1, 2", "x_1=2, x_2=1", Verdict.CORRECT),
        ("1, 1, 2", "2, 1", Verdict.CORRECT),
    ],
)
def test_approximations_are_no_second_guess_and_named_values_keep_their_order(
    pool: VerifierPool, gold: str, answer: str, verdict: Verdict
) -> None:
    assert pool.score([gold], [rf"\boxed{{{answer}}}"])[0].verdict is verdict


def test_many_approximations_are_refused_at_once() -> None:
    """One after the other they took 20 seconds, and then the recursion limit."""
    assert grade("9", r"x \approx " * 3000 + "9") is Verdict.NO_ANSWER


@pytest.mark.parametrize("shift", [0, 1])
def test_large_sets_take_n_log_n(shift: int) -> None:
    """Comparing each of 60 roots with each took ten seconds of CPU. One that is wrong must be found all the same."""
    squares = [n * n + 1 for n in range(60)]
    gold = ", ".join(rf"\sqrt{{{square}}}" for square in squares)
    given = ", ".join(rf"\frac{{{square}}}{{\sqrt{{{square + shift * (square == 2501)}}}}}" for square in squares[::-1])
    with VerifierPool(workers=1, cpu_seconds=5.0) as pool:
        (score,) = pool.score([rf"\{{{gold}\}}"], [rf"\boxed{{\{{{given}\}}}}"])
    assert score.verdict is (Verdict.INCORRECT if shift else Verdict.CORRECT)


def test_unscorable_is_not_wrong(pool: VerifierPool) -> None:
    scores = pool.score(["see the figure: ^^", None, "", "x^2+"], [r"\boxed{3}"] * 4)
    assert [score.verdict for score in scores] == [Verdict.UNSCORABLE] * 4
    assert [score.reward for score in scores] == [None] * 4
