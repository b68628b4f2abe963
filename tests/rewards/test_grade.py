"""The whole verifier on answer sets: our own (answers.jsonl), and the shared one where it is present."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from g2d_jax.records import Verdict
from g2d_jax.rewards.extract import solution_answer
from g2d_jax.rewards.pool import VerifierPool

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
