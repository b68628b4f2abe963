"""The final answer of a response: what counts, what does not, and hostile text."""

from __future__ import annotations

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from g2d_jax.rewards.extract import answer_text, final_answer, solution_answer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so 5", "so 5"),
        ("<think>a</think>b", "b"),
        ("a</think>b</think>c", "c"),
        ("<think>never closed", None),
        ("<think>a</think>b<think>c", None),
        ("", ""),
    ],
)
def test_only_what_follows_the_thinking_counts(text: str, expected: str | None) -> None:
    assert answer_text(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{3} then \boxed{\frac{1}{\sqrt{2}}}.", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{1, \boxed{2}}", r"1, \boxed{2}"),
        (r"\boxed  {7}", "7"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{5} and \boxed{", "5"),
        (r"{ stray \boxed{5}", "5"),
        (r"} stray \boxed{5}", "5"),
        (r"\boxed{5} in \boxed{}", "5"),
        (r"$\boxed 12$.", "12"),
        (r"\boxed{unclosed", None),
        (r"\unboxed 3", None),
        ("The final answer is 42.", "42"),
        ("The final answer is $x^2$. I hope it is correct.", "x^2"),
        (r"Final Answer: \(\frac12\)", r"\frac12"),
        ("final answer is 1,234.5!", "1,234.5"),
        ("the final answer is -3/4, since", "-3/4"),
        ("final answer is (C).", "(C)"),
        ("final answer is 6 * 7 = 42", None),
        ("The final answer is: **42** eggs", "42"),
        ("The final answer is **69 or 84**.", "69 or 84"),
        ("The final answer is **42** or 43", None),
        ("The final answer is 2**10", None),
        ("The final answer is 2** 10", None),
        ("the answer is 42", None),
        ("16 apples", None),
        ("sum\n#### 1,080", "1,080"),
        ("#### 3. Conclusion", None),
        ("#### 12\n#### 13\n", "13"),
        ("The final answer: 15 pints\n#### 120", "120"),
        ("#### 120\nThe final answer is 15", "15"),
        (r"final answer is $\boxed{}$", None),
        ("", None),
        ("The final answer is 69 or 84.", "69 or 84"),
        ("The final answer is (C), (D)", "(C), (D)"),
        ("The final answers are 1, 2, and 3.", "1, 2, and 3"),
        (r"The final answer is \(69\); \(84\).", r"\(69\); \(84\)"),
        ("The final answer is:\n$69$\nor\n$84$", "$69$\nor\n$84$"),
        ("The final answer is:\n$69$\n$84$", None),
        ("The final answer is 69\n69", "69"),
        ("The final answer is 69, or maybe 84", None),
        ("The final answer is $69$ (or $84$)", None),
        ("The final answer is 3 apples or 4 apples", None),
        ("The final answer is 1, 2, ..., 10", None),
        ("The final answer is 42 cm^2.", "42"),
        ("The final answer is 42, since 40 + 2 = 42.", "42"),
        ("The final answer is 42\nCheck: 40 + 2 = 42", "42"),
        ("The final answer is (A) 12.", "(A)"),
        ("The final answer is 18 dollars ($18).", "18"),
        ("The final answer is 18 dollars ($19).", None),
        ("The final answer is 18 dollars (-18).", None),
        ("The final answer is 18 dollars, \u00b118", None),
        ("The final answer is 72 km in 2 hours", "72"),
        ("The final answer is 50 apples at $5 each", "50"),
        ("The final answer is 11 in base 2.", "11"),
        ("The final answer is 3 in the first case, or 4 in the second", None),
        ("The final answer is 5 or so", "5"),
        ("The final answer is 5 eggs or so, or 6", None),
        ("The final answer is 5 or six", None),
        ("The final answer is C or maybe D", None),
        ("The final answer is (C) 18 or maybe 19", None),
        ("The final answer is 69\n69.0", "69"),
        (r"so $\boxed 5$ or 6", "5"),
        (r"so \boxed 5 or 6", None),
    ],
)
def test_final_answers(text: str, expected: str | None) -> None:
    assert final_answer(text) == expected


@pytest.mark.parametrize(
    ("solution", "expected"),
    [
        ("He has 2+2=4.\n#### 1,080", "1,080"),
        (r"Thus $x=\boxed{\frac{2}{3}}$, not \boxed{}.", r"\frac{2}{3}"),
        (r"Thus $\boxed 9$.", "9"),
        ("no answer here", None),
    ],
)
def test_solution_answer_reads_both_data_sets(solution: str, expected: str | None) -> None:
    assert solution_answer(solution) == expected


UNITS = ["\\boxed{", "{", "}", "\\", "$", "#### ", "\n#### 1,", "final answer is ", "final answer is 1, ", "<think>",
         " ", "\\boxed  ", "1", "{}"]  # fmt: skip


@pytest.mark.parametrize("unit", UNITS)
def test_a_megabyte_of_hostile_text_is_no_obstacle(unit: str) -> None:
    assert final_answer(unit * (1_000_000 // len(unit)) + r" \boxed{5}") == (None if unit == "<think>" else "5")


def test_nesting_deeper_than_any_recursion_limit() -> None:
    depth = 200_000
    inner = "{" * depth + "5" + "}" * depth
    assert final_answer(r"\boxed{" + inner + "}") == inner


@examples(200)
@given(st.text(alphabet=r"\{}$#boxedfinal answers1. ", max_size=200))
def test_any_text_has_an_answer_or_none(text: str) -> None:
    answer = final_answer(text)
    assert answer is None or (answer and answer == answer.strip() and answer in text)
