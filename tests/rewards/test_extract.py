"""The final answer of a response: what counts, what does not, and hostile text."""

from __future__ import annotations

import itertools
import math
import time
from typing import get_args

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from g2d_jax.records import AnswerRule
from g2d_jax.rewards.extract import (
    answer_text,
    final_answer,
    in_form,
    last_number_is,
    solution_answer,
)

RULES = get_args(AnswerRule)


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
        ("The final answer is 42. No, 43.", None),
        ("The final answer is 42? No, 43.", None),
        ("The final answer is 42! Rather six.", None),
        ("The final answer is 42.\n43", None),
        ("The final answer is 42 eggs.\n\n**43**", None),
        ("The final answer is 42.\nNo, it is 43.", None),
        ("The final answer is 42. Here 42 is even.", "42"),
        ("The final answer is 42.\nNo doubt.", "42"),
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
        (r"The final answer is \$18.", r"\$18"),
        (r"**Final Answer:** \$1,800.50", r"\$1,800.50"),
        ("final answer: \u00a318", "\u00a318"),
        ("The final answer is -\u20ac0.5 or \u20ac2", "-\u20ac0.5 or \u20ac2"),
        (r"The final answer is \$18 dollars ($18)", r"\$18"),
        (r"The final answer is 18 dollars (\$18)", "18"),
        (r"The final answer is 18 dollars (\$19)", None),
        (r"The final answer is \$18 or maybe \$19.", None),
        ("The final answer is 18 (\u00a319).", None),
        ("The final answer is \\$18\n\\$19", None),
        ("The final answer is \\$18\n$18.00", r"\$18"),
        (r"The final answer is \$", None),
        (r"The final answer is \$x.", None),
        (r"#### \$18", r"\$18"),
        ("#### \u20b918,000", "\u20b918,000"),
        (r"#### \$18 or \$19", None),
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
    ("text", "expected"),
    [
        (r"\boxed{1} and \boxed{2}", "1, 2"),
        (r"$x=\boxed{1}$ or $x=\boxed{2}$", "1, 2"),
        (r"\($y_1 = \boxed{a} \) and \( y_2 = \boxed{b} \)", "y_1 = a, y_2 = b"),
        (r"$f(x) = \boxed{2x}$, \quad $g(x) = \boxed{3}$", "f(x) = 2x, g(x) = 3"),
        (r"$AB=\boxed{3}$ and $BC=\boxed{3}$", "AB = 3, BC = 3"),
        (r"\angle A = \boxed{30}, \angle B = \boxed{60}", r"\angle A = 30, \angle B = 60"),
        ("- x = \\boxed{1}\n- y = \\boxed{2}", "x = 1, y = 2"),
        (r"\begin{aligned} x &= \boxed{1} \\ y &= \boxed{2} \end{aligned}", "x = 1, y = 2"),
        (r"x=\boxed{1}, y=\boxed{2}; x=\boxed{2}, y=\boxed{1}", "x = 1, y = 2, x = 2, y = 1"),
        (r"x=\boxed{1}, \boxed{2}", "1, 2"),  # the second has no name
        (r"2x = \boxed{1}, y = \boxed{2}", "1, 2"),
        ("so it is $\\boxed{3}$\n\n\n \t\n$$\\boxed{4}$$", "3, 4"),  # blank lines alone
        ("$\\boxed{5}$\n\n$\\boxed{5}$", "5"),
        (r"x=\boxed{5}; x=\boxed{5}", "5"),
        (r"\boxed{1}, \boxed{2}, \boxed{1}", "1, 2"),
        (r"\boxed{1}\boxed{2}", "1, 2"),
        (r"**\boxed{A}** **and** **\boxed{C}**", "A, C"),
        (r"\boxed{(1,2)} \text{ or } \boxed{(2,1)}", "(1,2), (2,1)"),
        (r"\fbox{1} AND \boxed{2}", "1, 2"),
        (r"\boxed 1, \boxed 2", "1, 2"),
        (r"\\boxed{1} \\quad \\text{and} \\quad \\boxed{2}", "1, 2"),
        # Words, signs and relations keep boxes apart.
        (r"\boxed{1} and then \boxed{2}", "2"),
        (r"\boxed{1} or not \boxed{2}", "2"),
        (r"\boxed{1} and, or better: \boxed{2}", "2"),
        (r"\boxed{1} android \boxed{2}", "2"),
        (r"\boxed{1} \text{and so} \boxed{2}", "2"),
        (r"\boxed{1} \quadrant \boxed{2}", "2"),
        (r"\boxed{1} = \boxed{2}", "2"),
        (r"\boxed{1} + \boxed{2} = \boxed{3}", "3"),
        (r"\boxed{2} \cdot \boxed{3}", "3"),
        (r"\boxed{1}, 7, \boxed{2}", "2"),
        (r"\boxed{1}, 2x = \boxed{2}", "2"),
        (r"\boxed{1}, the total = \boxed{2}", "2"),
        (r"\boxed{1} and \boxed{2}, no: \boxed{3} and \boxed{4}", "3, 4"),
        (r"\boxed{1} and \boxed{2} and then \boxed{3}", "3"),
        # Empty boxes are none, and nested ones are part of what they are in.
        (r"\boxed{} \boxed{5}", "5"),
        (r"\boxed{}, \boxed{ }", None),
        (r"\boxed{1} \boxed{} \boxed{2}", "1, 2"),
        (r"\boxed{1} and \boxed{2}, so \boxed{} and \boxed{}", "1, 2"),
        (r"\boxed{\boxed{1} and \boxed{2}}", r"\boxed{1} and \boxed{2}"),
        (r"\boxed{1, \boxed{2}} and \boxed{3}", r"1, \boxed{2}, 3"),
        (r"\boxed{ \boxed{1} and \boxed{2}", "1, 2"),  # the outer one is not closed
    ],
)
def test_boxes_with_nothing_between_them_are_one_answer(text: str, expected: str | None) -> None:
    assert final_answer(text) == expected


SEPARATORS = [" and ", " or ", ", ", "; ", "$ $", "\n", "\n\n", r" \quad ", r" \text{and} ", r"\), \(", r"\] \[",
              ", and ", r"\qquad\text{ or }\qquad", r" \\ ", "$,\n\n$$"]  # fmt: skip


@examples(200)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["1", "-2", r"\frac{1}{2}", "x+1", r"\{3\}"]),
            st.sampled_from(SEPARATORS),
        )
    ),
    st.integers(0, 6),
    st.sampled_from(["hence", "No,", "1.", "+", "="]),
)
def test_any_separators_join_and_any_word_parts(
    boxes: list[tuple[str, str]], cut: int, word: str
) -> None:
    first, last = boxes[:cut], boxes[cut:]
    sides = [
        "".join(rf"\boxed{{{value}}}{separator}" for value, separator in side)
        for side in (first, last)
    ]
    counted = [value for value, _ in last or first]
    assert final_answer(f"so {sides[0]} {word} {sides[1]}.") == (
        ", ".join(dict.fromkeys(counted)) or None
    )


MATRIX = r"\begin{pmatrix}1 & 2 \\ 3 & 4\end{pmatrix}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\\boxed{5}", "5"),
        (r"\\boxed{\\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\\boxed{\frac{1}{2}}", r"\frac{1}{2}"),  # the box alone
        (r"\\boxed{\\{1, 2\\}}", r"\{1, 2\}"),
        (r"\\\boxed{\frac{1}{2}}", r"\frac{1}{2}"),  # a line break before a box
        (r"\\boxed{" + MATRIX.replace("\\", r"\\") + "}", MATRIX),
        (r"\\boxed{" + MATRIX + "}", MATRIX),
        (r"\boxed{" + MATRIX + "}", MATRIX),
        (r"\boxed{5\\}", "5"),
        (r"\boxed{5 \\ }", "5"),
        (r"\boxed{" + MATRIX + r"\\}", MATRIX),
        (r"\boxed{\\}", None),
        (r"\boxed{x\}}", r"x\}"),
        ("oxed{5}", "5"),
        ("so $oxed{5}$ or $oxed{6}$", "5, 6"),
        ("\boxed{5}", "5"),
        ("boxed{5}", None),
        ("foxed{5}", None),
        (r"\unboxed{5}", None),
        (r"\oxed{5}", None),
        ("an oxed cart {5}", None),
    ],
)
def test_boxes_that_something_escaped(text: str, expected: str | None) -> None:
    assert final_answer(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Answer: 5", "5"),
        ("5 + 3 = 8. The answer is 8.", "8"),
        ("**Answer:** 5", "5"),
        ("**Answer**: $\\frac12$.", "$\\frac12$"),
        ("**Final Answer: $5$**\n", "$5$"),
        ("> ### Final answer: **5**.  ", "5"),
        ("Hence, the correct answer is therefore (B).", "(B)"),
        ("So the answer to this problem is x^2 + 1", "x^2 + 1"),
        ("the answers are 1, 2 and 3.", "1, 2 and 3"),
        ("Answer: Paris", "Paris"),
        ("Answer: no solution", "no solution"),
        ("Answer: x < -1 or x > 1", "x < -1 or x > 1"),
        ("Answer: 5 or 6", "5 or 6"),
        ("Answer: C. 12", "C. 12"),
        ("The answer is C. I hope it is correct.", "C"),
        ("Answer: Dr. Smith", "Dr. Smith"),
        ("Answer: 0.333...", "0.333..."),
        ("Answer: $5! + 1$.", "$5! + 1$"),
        ("Final Answer: The final answer is $-3$. I hope it is correct.", "$-3$"),
        ("The answer is 5, since 2 + 3 = 5.", "5"),
        ("Answer: 5\nCheck: 2 + 3 = 5", "5"),
        ("Answer: 5\n\n5.0", "5"),
        ("Answer: 4\nWait.\nAnswer: 5", "5"),
        ("Answer: 4, so \\boxed{5}", "5"),
        ("\\boxed{4}\nAnswer: 5", "4"),
        ("$\\boxed{4}$ or $\\boxed{5}$", "4, 5"),
        ("<think>Answer: 4</think>Answer: 5", "5"),
        # Any mark before the cue, any colon after it.
        ("\u2705 Answer: 73", "73"),
        ("\U0001f449 **Answer:** 73", "73"),
        ("\u2192 Answer: 73", "73"),
        ("\u2022 Answer: 73", "73"),
        ("`Answer: 73`", "73"),
        ('"Answer: 73"', "73"),
        ("\u201cThe answer is 73.\u201d", "73"),
        ("\u2014 Answer: 73", "73"),
        ("\U0001f3af The answer is 73.", "73"),
        ("\u2714\ufe0f Final answer\uff1a 73", "73"),
        ("(Answer: $f(3)$)", "$f(3)$"),
        ("__Answer:__ 73", "73"),
        ("\u2705 Answer\n73", "73"),
        ("2 Answer: 73", None),
        # Another value, or a second thought.
        ("Answer: 5 or six", None),
        ("Answer: 5\nNo, 6", None),
        ("Answer: 5 or more", None),
        ("Answer: 5 or maybe 6", None),
        ("Answer: perhaps 5", None),
        ("Answer: 5. Wait, 6", None),
        ("Answer: 5. Or is it six?", None),
        ("Answer: B. No, C.", None),
        ("Answer: 5. It could also be $x$.", None),
        ("Answer: 5\n6", None),
        ("Answer: 5\nor 6", None),
        ("Answer: 5,\n6", None),
        ("Answer:\n5", "5"),
        # No such line.
        ("Answer:", None),
        ("Answer: 5\nAnswer: ", None),
        ("Answer: **", None),
        ("my answers vary: 5", None),
        ("an answer is 5", None),
        ("The answering machine is 5", None),
        ("#### 5", None),
        ("5", None),
        ("<answer>5</answer>", None),
        ("<think>Answer: 5", None),
        ("Answer: " + "5" * 10_001, None),  # not a part of it
    ],
)
def test_answers_on_the_last_line(text: str, expected: str | None) -> None:
    assert final_answer(text, "last_line") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2 + 3 = 5\n#### 5", "5"),
        ("so #### x + 1 \nmore", "x + 1"),
        ("#### two apples", "two apples"),
        ("#### 1\n#### 2", "2"),
        ("#### 5\n####", None),
        ("####\n5", None),
        ("##### 5", None),
        (r"#### \boxed{}", None),
        (r"\boxed{5}", None),
        ("Answer: 5", None),
        ("<think>#### 5</think>", None),
    ],
)
def test_answers_after_hashes(text: str, expected: str | None) -> None:
    assert final_answer(text, "hash") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer> 5\n</answer>", "5"),
        ("<think>so <answer>4</answer></think><answer>5</answer>", "5"),
        ("<answer>4</answer><answer>5</answer>", "5"),
        (r"<answer>\boxed{5}</answer>", "5"),
        (r"<answer>$$\boxed{\frac12}.$$</answer>", r"\frac12"),
        (r"<answer>2 + 3 gives \boxed{5} apples</answer>", "5"),
        (r"<answer>\boxed{1} and \boxed{2}</answer>", "1, 2"),
        (r"<answer>\boxed{5} or 6</answer>", r"\boxed{5} or 6"),
        (r"<answer>6 or $\boxed{5}$</answer>", r"6 or $\boxed{5}$"),
        ("<answer>two\nlines</answer>", "two\nlines"),
        ("<answer>5", None),
        ("5</answer>", None),
        ("<answer>5</answer> <answer>", None),
        ("<answer>5</answer> <answer> </answer>", None),
        ("</answer>5<answer>", None),
        ("<answer></answer>", None),
        (r"<answer>\boxed{}</answer>", None),
        ("<Answer>5</Answer>", None),
        ("<answer>5</think></answer>", None),
        ("<think><answer>5</answer></think>", None),
        (r"\boxed{5}", None),
        ("Answer: 5", None),
    ],
)
def test_answers_in_tags(text: str, expected: str | None) -> None:
    assert final_answer(text, "tags") == expected


@pytest.mark.parametrize(("rule", "form"), [*itertools.product(RULES, RULES)])
@pytest.mark.parametrize("answer", ["5", r"\frac{1}{2}", "x < 1 or x > 2", r"\{1, 2\}"])
def test_an_answer_in_the_form_of_a_rule_is_read_by_it(
    rule: AnswerRule, form: AnswerRule, answer: str
) -> None:
    reads = {rule, "boxed" if rule == "last_line" else rule}
    text = "It is so.\n" + in_form(answer, form)
    if form in reads:
        assert final_answer(text, rule) == answer
    elif (rule, form, answer) != ("boxed", "hash", "5"):  # a number on a line of its own
        assert final_answer(text, rule) is None


@pytest.mark.parametrize(
    ("solution", "expected"),
    [
        ("He has 2+2=4.\n#### 1,080", "1,080"),
        (r"Thus $x=\boxed{\frac{2}{3}}$, not \boxed{}.", r"\frac{2}{3}"),
        (r"Thus $\boxed 9$.", "9"),
        (r"Hence $x = \boxed{2}$ or $x = \boxed{-2}$.", "2, -2"),
        ("no answer here", None),
    ],
)
def test_solution_answer_reads_both_data_sets(solution: str, expected: str | None) -> None:
    assert solution_answer(solution) == expected


UNITS = ["\\boxed{", "{", "}", "\\", "$", "#### ", "\n#### 1,", "final answer is ", "final answer is 1, ", "<think>",
         " ", "\\boxed  ", "1", "{}", "oxed{", "x = ", "a_", "\\boxed{1} and ", "\\boxed{} ", "\\text{and ", "\n- ",
         "Answer: ", "\nAnswer: 1", "Answer: 1. ", "the ", ". ", "or ", "<answer>", "<answer>1</answer>", "#",
         "\\boxed 1, "]  # fmt: skip


@pytest.mark.parametrize("unit", UNITS)
def test_a_megabyte_of_hostile_text_is_no_obstacle(unit: str) -> None:
    """Also before, between and in what the rules look for; and what words part from a box does not
    touch it."""
    hostile = unit * (1_000_000 // len(unit))
    assert final_answer(hostile + r" so \boxed{5}") == (None if unit == "<think>" else "5")
    few = hostile[:50_000]
    began = time.process_time()
    for rule in RULES:
        for text in (
            rf"\boxed{{1}}{few}\boxed{{2}}",
            rf"\boxed{{{few}}}",
            f"Answer: {few}",
            f"<answer>{few}</answer>",
        ):
            final_answer(text, rule)
    assert time.process_time() - began < 5  # quadratic searches take minutes


def test_a_hundred_thousand_boxes() -> None:
    """Together, apart, and one in the other."""
    count = 100_000
    apart = "".join(rf"then \boxed{{{n}}} " for n in range(count))
    joined = " and ".join(rf"\boxed{{{n}}}" for n in range(count))
    named = ", ".join(rf"$x_{n} = \boxed{{{n}}}$" for n in range(count // 5))
    assert final_answer(apart) == str(count - 1)
    assert final_answer(joined) == ", ".join(map(str, range(count)))
    assert final_answer(named) == ", ".join(f"x_{n} = {n}" for n in range(count // 5))
    assert final_answer(r"\boxed{7}" + r"\boxed{} so " * count) == "7"
    nested = final_answer(r"\boxed{" * count + "5" + "}" * count)
    assert nested and nested.count("boxed") == count - 1
    assert final_answer(r"\boxed{" * count + r"\boxed{5} and \boxed{6}") == "5, 6"


def test_nesting_deeper_than_any_recursion_limit() -> None:
    depth = 200_000
    inner = "{" * depth + "5" + "}" * depth
    assert final_answer(r"\boxed{" + inner + "}") == inner


@examples(200)
@given(st.text(alphabet=r"\{}$#boxedfinal answers1.<>/:=,", max_size=200), st.sampled_from(RULES))
def test_any_text_has_an_answer_or_none(text: str, rule: AnswerRule) -> None:
    answer = final_answer(text, rule)
    assert answer is None or (answer and answer == answer.strip())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Answer:\n42", "42"),
        ("### Answer\n42", "42"),
        ("**Answer**\n\n$42$\n\nThis follows.", "$42$"),
        ("Answer: 4\n### Answer\n5", "5"),
        ("Answer:\n42\n43", None),
        ("### Answer\n\nwait, maybe 42", None),
        ("so we need an answer\n42", None),
        ("Answer:\n\n", None),
    ],
)
def test_a_label_alone_on_its_line_has_the_next_line_as_its_answer(
    text: str, expected: str | None
) -> None:
    assert final_answer(text, "last_line") == expected


@pytest.mark.parametrize(
    ("gold", "text", "expected"),
    [
        ("18", "8 + 10 = 18.", 1),
        ("18", "8 + 10 = 18\n#### 17", 0),
        ("1,234", "It costs $1234.", 1),
        ("3", "8 -5 = 3", 1),
        ("-3", "5 - 8 = -3", 1),
        ("3", "8-3", 1),
        ("-3", "5 - 8 = \u22123", 1),
        ("2.5", "2.5", None),
        ("18", "", 0),
        ("7", "7" * 100_000, 0),
        (r"\frac{1}{2}", "1/2", None),
        ("x + 1", "1", None),
        ("Paris", "1", None),
    ],
)
def test_the_last_number_is_compared_in_any_form(gold: str, text: str, expected: int | None):
    found = last_number_is(gold, text)
    assert found == expected or (expected is None and math.isnan(found))
