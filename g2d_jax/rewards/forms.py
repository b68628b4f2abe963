r"""The forms in which prompts ask for an answer: found in a prompt's text and worked examples, written for a trial.

"… Problem: 3 + 4\n3 + 4 = 7\n#### 7\n\nProblem: …"  ─► asked_for ─► the form "hash" ─► "#### 49"
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from g2d_jax.records import AnswerRule
from g2d_jax.rewards.extract import FORMS, RULES, final_answer


@dataclass(frozen=True)
class Form:
    """One form of an answer. mentioned: what a text has that asks for it or shows it. written: {} is the answer."""

    mentioned: re.Pattern[str]
    written: str

    def write(self, answer: str) -> str:
        """Write an answer in this form."""
        return self.written.format(answer)

    def is_read_by(self, rule: AnswerRule, answer: str = "49") -> bool:
        """Return whether a rule finds an answer that is written in this form."""
        return final_answer(self.write(answer), rule) == answer


ASKED: Sequence[Form] = (
    Form(re.compile(r"\\(?:boxed|fbox)"), FORMS["boxed"]),
    Form(re.compile(r"<answer>"), FORMS["tags"]),
    Form(re.compile(r"(?<!#)####(?!#)"), FORMS["hash"]),
    Form(re.compile(r"final answer(?:\*{0,2})(?: is\b|\s*:)", re.IGNORECASE), "The final answer is {}"),
    Form(re.compile(r"(?<!final )\banswer is\b", re.IGNORECASE), "The answer is {}"),
    # Not where the text ends with it: there the response begins.
    Form(re.compile(r"(?<!final )\banswer\*{0,2}:(?!\s*$)", re.IGNORECASE), FORMS["last_line"]),
)
"""All forms that are known, the most particular first."""


def asked_for(text: str) -> list[Form]:
    """List the forms that a prompt asks for or shows, the most particular first; of those in words the last alone.

    A label in words stands before a worked solution as often as before its answer ("Answer: 3 + 4 = 7 #### 7"): beside
    a form in signs it says nothing.
    """
    found = [form for form in ASKED if form.mentioned.search(text)]
    in_signs = [form for form in found if form in ASKED[:3]]
    if in_signs:
        return in_signs
    return sorted(found, key=lambda form: -_last_place(form, text))[:1]


def _last_place(form: Form, text: str) -> int:
    return max(match.start() for match in form.mentioned.finditer(text))


def readers(form: Form) -> list[AnswerRule]:
    """List the rules that read a form."""
    return [rule for rule in RULES if form.is_read_by(rule)]
