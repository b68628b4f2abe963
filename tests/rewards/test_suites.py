"""The whole verifier on answers in NuminaMath's manner (golds.jsonl) and on hostile ones
(hostile.jsonl).

A row of golds.jsonl is a reference answer with others that are equal to it ("same") and others that
are wrong ("other"); a row of hostile.jsonl a response that must not be paid for its gold.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from g2d_jax.records import Verdict
from g2d_jax.rewards.pool import VerifierPool

READABLE = 0.97
"""The share of the reference answers that must be read otherwise than as mere text."""


def rows(name: str) -> list[dict[str, Any]]:
    """The rows of a file beside this one."""
    return [
        json.loads(line) for line in Path(__file__).with_name(name).read_text("utf-8").splitlines()
    ]


pytestmark = pytest.mark.timeout(1200)  # a minute of CPU time for the larger of them
GOLDS, HOSTILE = rows("golds.jsonl"), rows("hostile.jsonl")


class Case(NamedTuple):
    """A response, and whether it is to be paid."""

    kind: str
    gold: str
    response: str
    paid: bool


def golds_cases() -> Iterator[Case]:
    """Every gold with itself, with its equals and with what is wrong for it."""
    for row in GOLDS:
        for paid, answers in ((True, [row["gold"], *row["same"]]), (False, row["other"])):
            for answer in answers:
                yield Case(
                    row["kind"], row["gold"], rf"So the answer is $\boxed{{{answer}}}$.", paid
                )


def hostile_cases() -> Iterator[Case]:
    """All of hostile.jsonl: none is to be paid."""
    for row in HOSTILE:
        yield Case(row["kind"], row["gold"], row["response"], False)


SUITES = {"golds": list(golds_cases()), "hostile": list(hostile_cases())}


def judged_otherwise(pool: VerifierPool, cases: list[Case]) -> list[tuple[Case, str]]:
    """The cases with another verdict than they should have, each with it."""
    scores = pool.score([case.gold for case in cases], [case.response for case in cases])
    return [
        (case, score.verdict.value)
        for case, score in zip(cases, scores, strict=True)
        if (score.verdict is Verdict.CORRECT) != case.paid
    ]


@pytest.mark.parametrize(
    ("suite", "step"),
    [
        *(("golds", 25), ("hostile", 4)),
        *(pytest.param(suite, 1, marks=pytest.mark.slow) for suite in ("golds", "hostile")),
    ],
)
def test_right_answers_are_paid_and_no_others(pool: VerifierPool, suite: str, step: int) -> None:
    assert judged_otherwise(pool, SUITES[suite][::step]) == []


@pytest.mark.slow
def test_nearly_all_golds_can_be_read_whatever_the_answer(pool: VerifierPool) -> None:
    golds = [row["gold"] for row in GOLDS]
    read = pool.read(golds)
    assert sum(map(bool, read.values())) >= READABLE * len(golds), [
        gold for gold in golds if not read[gold]
    ]
    readable = [case for case in SUITES["golds"] if read[case.gold]]
    scores = pool.score([case.gold for case in readable], [case.response for case in readable])
    unscorable = [
        case
        for case, score in zip(readable, scores, strict=True)
        if score.verdict is Verdict.UNSCORABLE
    ]
    assert unscorable == []


def test_suites_are_large_and_spread_over_kinds() -> None:
    assert len(GOLDS) >= 300 and len(HOSTILE) >= 150
    assert len({row["kind"] for row in GOLDS}) >= 30 and len({row["kind"] for row in HOSTILE}) >= 15
