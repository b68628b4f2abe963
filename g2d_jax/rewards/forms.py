r"""The forms of answers that prompts request: found in a prompt's text and worked examples, and
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

    mentioned: a pattern of texts that request or show it. written: {} is the answer. begun: the end
    of a text that has begun to write it, so that the response continues with the bare answer; None:
    never. in_signs: it has no label in words.
    """

    mentioned: re.Pattern[str]
    written: str
    begun: re.Pattern[str] | None = None
    in_signs: bool = False

    def is_requested_in(self, text: str) -> bool:
        """Return whether a prompt requests or shows this form, and does not end with its
        beginning."""
        is_begun = self.begun is not None and self.begun.search(text) is not None
        return self.mentioned.search(text) is not None and not is_begun

    def write(self, answer: str) -> str:
        """Return an answer in this form."""
        return self.written.format(answer)

    def is_read_by(self, rule: AnswerRule, answer: str = "49") -> bool:
        """Return whether a rule finds an answer in this form."""
        return final_answer(self.write(answer), rule) == answer


# The text after "the answer is" if that is a form instead of a remark ("check that the answer is
# right"): a number, a quotation mark, a formula or bracket, blanks to fill in, or a name in
# capitals or of one letter.
_VALUE = (
    r"[\s:*]*(?:[-+\u2212]?\.?\d|[$'\"`\u2018-\u201f\u00ab\[{<\\]|\([A-Z]\)|_{2,}|\.{3}|\u2026"
    r"|(?-i:(?!NOT\b)[A-Z][A-Z_]+|[b-zA-Z])(?!\w|['\u2019]\w))"
)
_END = r"[\s:*]*\Z"


def _words(mentioned: str, written: str, begun: str) -> Form:
    """Return a form with a label in words. mentioned, begun: patterns of the label, in a text and at
    its end."""
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
"""All known forms, the most specific first."""


def asked_for(text: str) -> list[Form]:
    """List the forms that a prompt requests or shows, the most specific first; of those in words
    the last alone.

    A label in words that ends the prompt is not a form to write, since the response continues after
    it. Next to a form in signs a label does not count, because it precedes worked solutions as
    often as answers ("Answer: 3 + 4 = 7 #### 7").
    """
    found = [form for form in ASKED if form.is_requested_in(text)]
    in_signs = [form for form in found if form.in_signs]
    if in_signs:
        return in_signs
    return sorted(found, key=lambda form: -_last_place(form, text))[:1]


def _last_place(form: Form, text: str) -> int:
    return max(match.start() for match in form.mentioned.finditer(text))


def readers(form: Form) -> list[AnswerRule]:
    """List the rules that read a form."""
    return [rule for rule in RULES if form.is_read_by(rule)]
