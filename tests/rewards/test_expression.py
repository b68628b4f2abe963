"""Answers whose numbers are far apart are told without a worker; what is close, or not plain
arithmetic, is not."""

from __future__ import annotations

import math

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from g2d_jax.records import Verdict
from g2d_jax.rewards.expression import far_apart, values
from g2d_jax.rewards.grade import grade
from g2d_jax.rewards.normalise import clean
from g2d_jax.rewards.verify import quick_verdict

VALUES = [
    (r"3\frac{1}{2}", [3.5]),
    ("(" * 40 + "1" + ")" * 40, [1]),
    (r"\frac{14}{3}", [14 / 3]),
    (r"-2\sqrt{5}", [-2 * math.sqrt(5)]),
    (r"\sqrt[3]{8} \cdot 10^{2}", [200]),
    (r"(2, -\frac{1}{2}]", [2, -0.5]),
    (r"\begin{pmatrix} -1 & 0 \\ 1/2 & 3 \end{pmatrix}", [-1, 0, 0.5, 3]),
    (r"x = 90^\circ", [90]),
    (r"x \in [-2,7]", [-2, 7]),
    (r"\{6+9i, -i^{2}\}", [6 + 9j, 1]),
    (r"2(3+4)(1-2)", [-14]),
]
UNREAD = ["1/2x", r"50\%", "12,102", r"\sin x", "x<3", "52_8", "cents", "a:b", "2+", "x=y=2", "1 2", "", "9^{9999}",
          r"\frac{1}{0}", "1+" * 200 + "1", r"\sqrt", "3!", "|x|", "y = 2x = 3", "9^{9^{9}}", "ab.c", "f(x)(2,3)",
          r"2\sqrt[3]{-27}", "lambda: 0", "__import__(0)",
          r"2\begin{pmatrix}3\\4\end{pmatrix}", r"\begin{vmatrix}3&4\\5&6\end{vmatrix}",
          r"\begin{pmatrix}3\\4\end{pmatrix}+t\begin{pmatrix}3\\4\end{pmatrix}"]  # fmt: skip
EQUAL = [
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"),
    ("2(x+1)", "2x+2"),
    ("x^2 - 1", "(x-1)(x+1)"),
    (r"\pi", "3.14"),
    ("-1", "i^2"),
    (r"x \in [-2,7]", "[-2,7]"),
    ("1000", r"10^{3}"),
    ("x_1 + x_2", "x_2 + x_1"),
]
FAR = [
    ("17", "15x - 80"),
    ("(2,4)", "120"),
    ("120", "(2,4)"),
    ("x^2+1", "x^3+1"),
    (r"\begin{pmatrix} -1 \\ 0 \end{pmatrix}", "540"),
    ("1,-2", r"11\sqrt2"),
    (r"\text{Evelyn}", "64"),
    ("64", r"\text{Evelyn}"),
    (r"\text{(E)}", "76"),
    (r"18+2\pi \text{ cm}", r"9+2\pi \text{ cm}"),
]


@pytest.mark.parametrize(("text", "expected"), VALUES)
def test_the_numbers_of_an_answer(text: str, expected: list[complex]) -> None:
    assert values(clean(text)) == pytest.approx(expected)


@pytest.mark.parametrize("text", UNREAD)
def test_what_is_not_plain_arithmetic_is_not_read(text: str) -> None:
    assert values(text) == [] and not far_apart(text, "5") and not far_apart("5", text)


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_one_value_in_two_notations_is_never_far_apart(gold: str, answer: str) -> None:
    assert quick_verdict(gold, answer) is not False and quick_verdict(answer, gold) is not False
    assert values(clean(gold)) and values(clean(answer))


@pytest.mark.parametrize(("gold", "answer"), FAR)
def test_what_is_far_apart_is_wrong_by_computer_algebra_too(
    monkeypatch, gold: str, answer: str
) -> None:
    assert quick_verdict(gold, answer) is False
    monkeypatch.setattr("g2d_jax.rewards.expression.far_apart", lambda *_: False)
    assert grade(gold, answer) is Verdict.INCORRECT


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        ("-3", r"\sqrt[3]{-27}", Verdict.CORRECT),
        (r"-\sqrt[3]{5}", r"\sqrt[3]{-5}", Verdict.CORRECT),
        (r"\sqrt[3]{5}", r"\sqrt[3]{-5}", Verdict.INCORRECT),
        ("3", r"\sqrt[3]{-27}", Verdict.INCORRECT),
    ],
)
def test_an_odd_root_of_a_negative_number_is_real(gold: str, answer: str, verdict: Verdict) -> None:
    assert grade(gold, answer) is verdict


@examples(60)
@given(st.text(alphabet=r"0123456789xyi+-*/^(){}[],.\ fracsqrtpm_=", max_size=40))
def test_hostile_text_is_read_or_not_and_never_far_from_itself(text: str) -> None:
    assert not far_apart(text, text)
