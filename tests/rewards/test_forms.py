"""The forms that prompts ask for: found in instructions and worked examples, and read by the rules
that say so."""

import pytest

from g2d_jax.data.template import PROMPT_TEMPLATES
from g2d_jax.rewards.forms import ASKED, asked_for, readers

FEW_SHOT = "Problem: 3 + 4\nAnswer: 3 + 4 = 7\n#### 7\n\nProblem: {problem}\nAnswer:"

BOTH = ["boxed", "last_line"]

PROMPTS = [
    (PROMPT_TEMPLATES["paper"], ["\\boxed{49}"], ["boxed", "last_line"]),
    (PROMPT_TEMPLATES["plain"], [], []),
    (FEW_SHOT, ["#### 49"], ["boxed", "hash"]),
    ("{problem}\nEnd with a line of #### and the answer.", ["#### 49"], ["boxed", "hash"]),
    (
        "{problem}\nPut your final answer between <answer> and </answer>.",
        ["<answer>49</answer>"],
        ["tags"],
    ),
    ("{problem} Put it in \\fbox{}.", ["\\boxed{49}"], ["boxed", "last_line"]),
    (
        '{problem}\nThe last line should be "Answer: " and the answer.',
        ["Answer: 49"],
        ["last_line"],
    ),
    ("Q: 3 + 4\nA: The answer is 7.\n\nQ: {problem}\nA:", ["The answer is 49"], ["last_line"]),
    ("{problem} Say 'The final answer is x'.", ["The final answer is 49"], ["boxed", "last_line"]),
    ("{problem}\nAnswer:", [], []),  # the response begins there
    ("{problem}\n**Answer:** 3\nAnswer: ", [], []),
    ("**Answer:** 3\n{problem}", ["Answer: 49"], ["last_line"]),
    ("{problem}\n**Final answer:**", [], []),
    ("{problem}\nThe final answer is:\n", [], []),
    ("Q: 3 + 4\nThe answer is 7.\n\nQ: {problem}\nThe answer is", [], []),
    (
        "P: 3 + 4\nAnswer: It is 7. The final answer is 7.\nP: {problem}\nAnswer:",
        ["The final answer is 49"],
        BOTH,
    ),
    ("Final answer: 7\n\n{problem}", ["The final answer is 49"], BOTH),
    *[
        (f"{{problem}}\nWrite: the answer is{value}", ["The answer is 49"], ["last_line"])
        for value in (
            " x.",
            " N",
            " -7",
            " $7$",
            " [answer]",
            " {answer}",
            " <number>",
            "' and the number",
            ": 7",
        )
    ],
    *[
        (f"{{problem}}\n{remark}", [], [])
        for remark in (
            *(
                "Check that your answer is right.",
                "Make sure your answer is correct",
                "Your answer is graded by x",
            ),
            *(
                "Check that the answer is right.",
                "Say so if the final answer is not whole.",
                "The answer is a number",
            ),
            *(
                "Your final answer is graded by 2 people",
                "Know what the answer is.",
                "The answer is NOT shown",
            ),
        )
    ],
    ("# Heading\n##### Too many\n{problem}", [], []),
    (
        "<answer>7</answer> or \\boxed{7}: {problem}",
        ["\\boxed{49}", "<answer>49</answer>"],
        ["boxed", "last_line", "tags"],
    ),
]


@pytest.mark.parametrize(("prompt", "written", "rules"), PROMPTS)
def test_a_prompt_asks_for_what_it_shows(prompt, written, rules):
    forms = asked_for(prompt)
    assert [form.write("49") for form in forms] == written
    assert sorted({rule for form in forms for rule in readers(form)}) == sorted(rules)


def test_every_form_has_a_rule_that_reads_it():
    assert all(readers(form) for form in ASKED)
