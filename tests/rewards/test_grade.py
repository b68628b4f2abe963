"""The whole verifier on answer sets: our own (answers.jsonl), and the shared one where it is present."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from g2d_jax.records import Verdict
from g2d_jax.rewards.extract import solution_answer
from g2d_jax.rewards.pool import VerifierPool
from g2d_jax.rewards.verify import grade

SHARED = Path(__file__).resolve().parents[3] / "shared"

KNOWN_MISSES = {
    # math-verify reads a bare \log as the decimal logarithm. Only the problem says which one is meant.
    "natural_log",
}
SHARED_KNOWN_MISSES: set[str] = set()


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def wrong_cases(pool: VerifierPool, path: Path) -> set[str]:
    """Ids of the cases that are not judged as expected. A bomb must end as anything but correct."""
    cases = read_jsonl(path)
    scores = pool.score([case["gold"] for case in cases], [case["response"] for case in cases])
    return {
        case["id"]
        for case, score in zip(cases, scores, strict=True)
        if (score.verdict is Verdict.CORRECT) != case["expected"]
    }


def test_our_own_answers(pool: VerifierPool) -> None:
    path = Path(__file__).with_name("answers.jsonl")
    cases = read_jsonl(path)
    assert {case["category"] for case in cases} == {
        "equivalent", "wrong_similar", "extraction", "empty", "adversarial"
    }  # fmt: skip
    assert wrong_cases(pool, path) == KNOWN_MISSES


def table(title: str) -> list[list[str]]:
    """The cells of the table that follows a bold title in docs/grading.md, its head first, code marks taken off."""
    text = (Path(__file__).parents[2] / "docs" / "grading.md").read_text("utf-8")
    lines = text.partition(f"**{title}")[2].partition("\n|")[2].split("\n\n")[0].splitlines()
    rows = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]
    return rows[:1] + rows[2:]


PERCENT = table("Percent.")


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [(row[0], answer, cell) for row in PERCENT[1:] for answer, cell in zip(PERCENT[0][1:], row[1:], strict=True)],
)
def test_percent_as_the_documented_table_says(pool: VerifierPool, gold: str, answer: str, verdict: str) -> None:
    (score,) = pool.score([gold], [rf"\boxed{{{answer}}}"])
    assert score.verdict is {"right": Verdict.CORRECT, "wrong": Verdict.INCORRECT}[verdict]


APPROXIMATIONS = table("`a \\approx b`**")


@pytest.mark.parametrize(("gold", "answer", "verdict"), APPROXIMATIONS[1:])
def test_approximations_as_the_documented_table_says(pool: VerifierPool, gold: str, answer: str, verdict: str) -> None:
    (score,) = pool.score([gold], [rf"\boxed{{{answer}}}"])
    assert score.verdict == {"right": Verdict.CORRECT, "no answer": Verdict.NO_ANSWER}[verdict]


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
    ],
)
def test_an_approximation_is_no_second_guess(pool: VerifierPool, gold: str, answer: str, verdict: Verdict) -> None:
    assert pool.score([gold], [rf"\boxed{{{answer}}}"])[0].verdict is verdict


def test_many_approximations_are_refused_at_once() -> None:
    """One after the other they took 20 seconds, and then the recursion limit."""
    assert grade("9", r"x \approx " * 3000 + "9") is Verdict.NO_ANSWER


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
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
def test_values_of_different_names_keep_their_order(
    pool: VerifierPool, gold: str, answer: str, verdict: Verdict
) -> None:
    assert pool.score([gold], [rf"\boxed{{{answer}}}"])[0].verdict is verdict


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


if SHARED.is_dir():

    def test_shared_answers(pool: VerifierPool) -> None:
        assert wrong_cases(pool, SHARED / "verifier" / "answers.jsonl") == SHARED_KNOWN_MISSES

    def test_math500_against_its_own_solutions(pool: VerifierPool) -> None:
        rows = read_jsonl(SHARED / "data" / "math500.jsonl")
        scores = pool.score([row["answer"] for row in rows], [row["solution"] for row in rows])
        assert sum(score.verdict is Verdict.CORRECT for score in scores) >= 0.98 * len(rows)

    @pytest.mark.parametrize("name", ["gsm8k_train", "gsm8k_test"])
    def test_gsm8k_against_its_own_answers(pool: VerifierPool, name: str) -> None:
        rows = read_jsonl(SHARED / "data" / f"{name}.jsonl")
        golds = [solution_answer(row["answer"]) for row in rows]
        scores = pool.score(golds, [row["answer"] for row in rows])
        assert all(score.verdict is Verdict.CORRECT for score in scores)

    def test_answers_of_other_problems_are_wrong(pool: VerifierPool) -> None:
        rows = read_jsonl(SHARED / "data" / "math500.jsonl")[:60]
        shifted = [row["solution"] for row in rows[1:] + rows[:1]]
        scores = pool.score([row["answer"] for row in rows], shifted)
        wrong = [
            (row["answer"], score.answer)
            for row, score in zip(rows, scores, strict=True)
            if score.verdict is Verdict.CORRECT
        ]
        assert wrong == [("5", "x=5")]  # neighbours with the same answer
