r"""The forms in which prompts ask for an answer: found in a prompt's text and worked examples,
written for a trial.

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
    """One form of an answer.

    mentioned: what a text has that asks for it or shows it. written: {} is the answer. begun: how a
    text ends that has begun to write it, so that the response goes on with the bare answer; None:
    never. in_signs: no label in words.
    """

    mentioned: re.Pattern[str]
    written: str
    begun: re.Pattern[str] | None = None
    in_signs: bool = False

    def is_asked_in(self, text: str) -> bool:
        """Return whether a prompt asks for this form or shows it, and does not end with its
        beginning."""
        is_begun = self.begun is not None and self.begun.search(text) is not None
        return self.mentioned.search(text) is not None and not is_begun

    def write(self, answer: str) -> str:
        """Write an answer in this form."""
        return self.written.format(answer)

    def is_read_by(self, rule: AnswerRule, answer: str = "49") -> bool:
        """Return whether a rule finds an answer that is written in this form."""
        return final_answer(self.write(answer), rule) == answer


# What follows "the answer is" where that is a form, and no remark ("check that the answer is
# right"): a number, a quotation mark, a formula or bracket, blanks to fill in, or a name in
# capitals or of one letter.
_VALUE = (
    r"[\s:*]*(?:[-+\u2212]?\.?\d|[$'\"`\u2018-\u201f\u00ab\[{<\\]|\([A-Z]\)|_{2,}|\.{3}|\u2026"
    r"|(?-i:(?!NOT\b)[A-Z][A-Z_]+|[b-zA-Z])(?!\w|['\u2019]\w))"
)
_END = r"[\s:*]*\Z"


def _words(mentioned: str, written: str, begun: str) -> Form:
    """Return a form with a label in words. mentioned, begun: patterns, of the label and, at a
    text's end, of it too."""
    return Form(
        re.compile(mentioned, re.IGNORECASE), written, re.compile(begun + _END, re.IGNORECASE)
    )


ASKED: Sequence[Form] = (
    Form(re.compile(r"\\(?:boxed|fbox)"), FORMS["boxed"], in_signs=True),
    Form(re.compile(r"<answer>"), FORMS["tags"], in_signs=True),
    Form(re.compile(r"(?<!#)####(?!#)"), FORMS["hash"], in_signs=True),
    _words(
        rf"\bthe final answer\*{{0,2}} is\b{_VALUE}|\bfinal answer\*{{0,2}}\s*:",
        "The final answer is {}",
        r"\bfinal answer\*{0,2}(?: is\b|\s*:)",
    ),
    _words(
        rf"\bthe answer\*{{0,2}} is\b{_VALUE}",
        "The answer is {}",
        r"(?<!final )\banswer\*{0,2} is\b",
    ),
    _words(r"(?<!final )\banswer\*{0,2}:", FORMS["last_line"], r"(?<!final )\banswer\*{0,2}:"),
)
"""All forms that are known, the most particular first."""


def asked_for(text: str) -> list[Form]:
    """List the forms that a prompt asks for or shows, the most particular first; of those in words
    the last alone.

    A label in words that ends the prompt is no form to write, for the response goes on behind it.
    One stands before a worked solution as often as before its answer ("Answer: 3 + 4 = 7 #### 7"):
    beside a form in signs it says nothing.
    """
    found = [form for form in ASKED if form.is_asked_in(text)]
    in_signs = [form for form in found if form.in_signs]
    if in_signs:
        return in_signs
    return sorted(found, key=lambda form: -_last_place(form, text))[:1]


def _last_place(form: Form, text: str) -> int:
    return max(match.start() for match in form.mentioned.finditer(text))


def readers(form: Form) -> list[AnswerRule]:
    """List the rules that read a form."""
    return [rule for rule in RULES if form.is_read_by(rule)]
