r"""The final answer of a response. Model text is untrusted: every search is linear in its length,
and nothing recurses.

A named rule (`AnswerRule`) finds the answer; a response that does not follow it has no answer.

"boxed":
1. the last balanced, non-empty `\boxed{...}` or `\fbox{...}` (or the brace-less `\boxed 5`), or a
   list of those that ends with it and has nothing between them: boxes.py;
2. without one, the last of
   - "final answer is ..." followed by `$...$`, a number or a choice letter, or by a list of these
     ("69 or 84"), which is the whole answer. There is none if the rest of that line, or the next
     one, has another value or a second thought. The same value again ("18 dollars ($18)") and a
     value within the unit ("72 km in 2 hours") do not count as another,
   - GSM8K's `#### N` on a line of its own, where N is a number.
"last_line":
1. the box or boxes, as in "boxed";
2. without one, the rest of the sentence that begins with "Answer:", "The answer is" or the like,
   the last of these; if nothing follows on that line (`### Answer`), the next line that is not
   empty. There is none if the rest of the line has another value or a second thought, or the next
   line another value.
"hash": the text after the last `####` on its line.
"tags": the text in the last `<answer>...</answer>`, or the box in it.

A number in prose is not an answer: a policy that is rewarded for it learns to list numbers.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import TypeAlias

from g2d_jax.records import AnswerRule
from g2d_jax.rewards import boxes
from g2d_jax.rewards.lists import form
from g2d_jax.rewards.normalise import clean
from g2d_jax.rewards.quantity import NUMBER_WORDS

_EMPTY_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{\s*\}")

_CURRENCY = r"(?:\\?\$|[\u00a3\u20ac\u00a5\u20b9])"  # also of pounds, euros, yen, rupees
_NUMBER = (
    rf"[-+\u2212]?{_CURRENCY}?[-+\u2212]?(?:\d{{1,3}}(?:,\d{{3}})+|\d+)?"
    r"(?:\.\d+|(?<=\d))(?:/\d+)?(?:\s?\\?%)?"
)
_PLAIN_NUMBER = re.compile(r"(?:(?<![\w)])-)?[0-9][0-9,]*(?:\.[0-9]+)?")
_FINAL_ANSWER = re.compile(
    r"final\s+answers?\*{0,2}(?:\s+(?:is|are)|\s*[:=])[\s:*=]{0,20}", re.IGNORECASE
)
_BOLD_END = r"(?<=\S)\*\*(?:[.,;:!)]|\s*$|\s+[A-Za-z])"  # of "**42** eggs", but not of 2**10
_FINAL_WINDOW = 4096  # characters searched after "final answer is"
_FINAL_VALUE = re.compile(
    r"\$\$(?P<display>[^$]+)\$\$"
    r"|\$(?P<dollar>(?:[^$\\]|\\.)+)\$"
    r"|\\\((?P<paren>.+?)\\\)"
    r"|\\\[(?P<bracket>.+?)\\\]"
    rf"|(?P<number>{_NUMBER})(?!\w|\.\d|\s*(?!{_BOLD_END})[\^*/=+\\(\u00d7\u2212-])"
    r"|(?P<letter>\([A-Z]\)|[A-Z](?=[.,;)*]|\s*$|\s+(?:and|or)\b))",
    re.DOTALL,
)
_SEPARATOR = re.compile(r"\s*(?:[,;&]\s*(?:(?:and|or)\b)?|(?:and|or)\b)\s*")
_SENTENCE_BREAK = re.compile(r"[.!?](?=\s|$)")
_EXPLANATION = re.compile(
    r"\b(?:since|because|as|(?<!or "
    r")so|which|where|when|for|from|by|with|that|if|given|after|using)\b",
    re.I,
)
_SIGN = r"(?:[-+\u2212\u00b1\u221a\u00d7\u2260*/<>]\s?)?"
_NUMBER_WORD = NUMBER_WORDS.replace(" ", "|")
# "or" offers another value in "3 or x", "C or maybe D" and "5 or six", but not in "5 or so".
_OR = r"\bor\s+(?:(?!so\b)[a-z]+,?\s+){0,2}"
_OR_WORD = rf"{_OR}(?:(?!a\b)[A-Za-z]|{_NUMBER_WORD})\b"
_OTHER_VALUE = re.compile(
    rf"{_SIGN}(?:\$[^$^]|\\[(\[]|(?<![\w^{{.])\d)|(?<!\w)\([A-Z]\)|{_OR_WORD}"
)
_OTHER_CHOICE = re.compile(rf"(?<!\w)\([A-Z]\)|{_OR_WORD}|{_OR}[\d$\\]")
# Part of a unit: "72 km in 2 hours", "11 in base 2".
_MEASURE = re.compile(r"\b(?:in|at|per)\s+(?:base\s+)?\$?\d[\d.,]*(?<![.,])")
_NEXT_LINE = re.compile(r"[^\n]*\n\s*(?:[-*\u2022][ \t]+)?\**")
_LINE_END = re.compile(r"[ \t.,;*]*(?:\n|$)")
_NUMBER_LINE = re.compile(rf"^[ \t]*####[ \t]*({_NUMBER})[ \t]*\.?[ \t\r]*$", re.MULTILINE)
_HASHES = re.compile(r"(?<!#)####(?!#)(.*)")
_MARKS = r"(?:[^\w\n]|_){0,20}"
_COLON = r":=\uff1a\ufe55\u2236"
_ANSWER_CUE = re.compile(
    rf"(?:^|(?<=[.!?:;,]\s)){_MARKS}"
    r"(?:(?:so|thus|hence|therefore|then|finally|and|in conclusion)\b,?[ \t]{1,4}){0,2}"
    r"(?:(?:the|my|our)[ \t]{1,4})?(?:(?:final|correct)[ \t]{1,4})?answers?"
    r"(?:[ \t]{1,4}to[ \t]{1,4}(?:the|this)[ \t]{1,4}(?:problem|question))?"
    rf"(?:\*{{0,2}}[ \t]{{1,4}}(?:is|are)\b|\*{{0,2}}[ \t]{{0,4}}[{_COLON}])[ \t*_{_COLON}]{{0,20}}"
    r"(?:(?:therefore|thus|simply|just)[ \t]{1,4})?"
    rf"|^{_MARKS}(?:(?:the|my|our)[ \t]{{1,4}})?(?:(?:final|correct)[ \t]{{1,4}})?answers?{_MARKS}$",
    re.IGNORECASE | re.MULTILINE,
)
_BLANK = re.compile(rf"[ \t\r*_{_COLON}]*\n\s*")
_LINE_WINDOW = 10_000  # characters of a line that may be an answer
# Not the period of "Dr." and "p.m.", nor one of several.
_SENTENCE_END = re.compile(r"(?<!\.)(?<!\b[DMS]r)(?<!\bM[sr]s)(?<!\bSt)(?<!\b[ap]\.m)[.?](?=\s)")
_REASON = re.compile(r",?\s(?:since|because)\b|,\s(?:which|as)\b", re.IGNORECASE)
_AROUND = ' \t\r*`"\u201c\u201d\u00ab\u00bb'
_LETTER = re.compile(r"[A-J]")
_VALUE = re.compile(r"[\d$\\]")
# Another answer in words, in addition to a value: "5 or six", "5 or more", "maybe 5".
_HEDGED = re.compile(
    r"(?<![{\\])\bor\s+[A-Za-z]{2}|\b(?:maybe|perhaps|possibly|probably|either)\b", re.IGNORECASE
)
_DOUBT = (
    r"\b(?:or|but|wait|no|not|maybe|perhaps|possibly|actually|alternatively|instead|otherwise|sorry"
    r"|rather|unless)\b"
)
_DOUBTED = re.compile(rf"{_DOUBT}[^\n]*?[\d$\\]", re.IGNORECASE)
_SECOND_THOUGHT = re.compile(
    rf"{_DOUBT}|\b(?:{_NUMBER_WORD})\b"
    r"|(?-i:(?<![\w'])[B-HJ-Z](?![\w']))",
    re.IGNORECASE,
)
_OR_BEFORE = re.compile(r"\bor\W*$", re.IGNORECASE)


Found: TypeAlias = tuple[int, str]
"""The position of an answer in a text, and the answer; (-1, "") for none."""
_NOTHING = (-1, "")


def answer_text(text: str) -> str | None:
    """Return the part of a response in which an answer counts: the text after the last `</think>`.

    Text without think tags counts whole. None for a `<think>` that was never closed: the response
    was cut before its answer. If the template itself ends with `<think>`, pass `"<think>" + text`.
    """
    after = text.rpartition("</think>")[2]
    if "<think>" in after:
        return None
    return after


def final_answer(text: str, rule: AnswerRule = "boxed") -> str | None:
    """Find the final answer of a response by a rule, stripped; None if it has none.

    It is verbatim, except that boxes lose any second escaping and several of them become one list.
    """
    counted = answer_text(text)
    if counted is None:
        return None
    for row in RULES[rule]:
        _, answer = max(find(counted) for find in row)
        if answer:
            return answer
    return None


def in_form(answer: str, rule: AnswerRule) -> str:
    """Format an answer as a response that follows a rule."""
    return FORMS[rule].format(answer)


def last_number_is(gold: str, text: str) -> float:
    """Return 1 if the last number of a text is the reference answer, else 0; NaN if that is not an
    integer.

    It shows skill without the required form. It is not a reward: see the module's docstring.
    """
    wanted = form(clean(gold))
    if not isinstance(wanted, Fraction) or wanted.denominator > 1:
        return math.nan
    numbers = _PLAIN_NUMBER.findall(text.replace("\u2212", "-"))
    return float(bool(numbers) and form(numbers[-1].replace(",", "")) == wanted)


def solution_answer(solution: str) -> str | None:
    r"""Find the reference answer in a worked solution: GSM8K's last `#### N` line, otherwise MATH's
    last `\boxed{...}`.

    For data loading. Here the whole rest of the `####` line counts, since the text comes from a
    dataset, not from a model. Boxes are read as in a response, several also as one list.
    """
    _, mark, tail = solution.rpartition("####")
    if mark:
        return tail.split("\n", 1)[0].strip() or None
    return _last_box(solution)[1] or _last_bare_box(solution)[1] or None


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    matches = deque(pattern.finditer(text), maxlen=1)
    return matches[0] if matches else None


def _last_box(text: str) -> Found:
    """Find the last balanced box that is not empty nor inside another balanced one, with the boxes
    joined to it."""
    start, _, answer = boxes.answer_of(text, boxes.braced(text))
    return start, answer


def _last_bare_box(text: str) -> Found:
    r"""Find the last `\boxed 5`, with those joined to it, unless it continues as a list of values."""
    bare = boxes.bare(text)
    # A 0 replaces the box's value: the text after it is read as the rest of a list.
    if not bare or len(_listed("0" + text[bare[-1].end : bare[-1].end + _FINAL_WINDOW])) > 1:
        return _NOTHING
    start, _, answer = boxes.answer_of(text, bare)
    return start, answer


def _last_final_answer(text: str) -> Found:
    """Find the answer after the last "final answer is", unless the sentence or the next line has
    another value."""
    last = _last(_FINAL_ANSWER, text)
    if last is None:
        return _NOTHING
    tail = text[last.end() : last.end() + _FINAL_WINDOW]
    values = _listed(tail)
    if not values or _ambiguous(tail[values[-1].end() :], values):
        return _NOTHING
    answer = _content(values[0])
    if len(values) > 1:
        answer = tail[: values[-1].end()]
    return last.start(), _without_empty_boxes(answer)


def _last_answer_line(text: str) -> Found:
    """Find the answer after the last "Answer:" or "The answer is", on its line or the next nonempty
    one. There is none if another value or a second thought follows."""
    cue = _last(_ANSWER_CUE, text)
    if cue is None:
        return _NOTHING
    blank = _BLANK.match(text, cue.end())
    begin = blank.end() if blank else cue.end()
    line = text[begin : begin + _LINE_WINDOW + 1].split("\n", 1)[0]
    if len(line) > _LINE_WINDOW:
        return _NOTHING
    sentence, *rest = _SENTENCE_END.split(line, maxsplit=1)
    after = "".join(rest)
    has_more = _OTHER_VALUE.search(after) is not None
    if has_more and _LETTER.fullmatch(sentence.strip(" *")):  # the period of "C. 12" ends nothing
        sentence = line
        has_more = False
    if has_more or _SECOND_THOUGHT.search(after):
        return _NOTHING
    found = _without_marks(_REASON.split(sentence, maxsplit=1)[0])
    if not found or (_VALUE.search(found) and _HEDGED.search(found)):
        return _NOTHING
    end = begin + len(line)
    below = text[end : end + _FINAL_WINDOW]
    separator = _SEPARATOR.match(below)
    is_list = separator and _FINAL_VALUE.match(below, separator.end())
    if is_list or _continues(below, {_form(found)}):
        return _NOTHING
    return cue.start(), found


def _without_marks(text: str) -> str:
    """Strip Markdown, quotation marks and the punctuation that ends a sentence, but not the dots of
    `0.333...`."""
    text = text.strip(_AROUND).rstrip(",;")
    if text.endswith(".."):
        return text
    text = text.removesuffix(".").rstrip(_AROUND)
    return text.removesuffix(")" * (text.count(")") > text.count("(")))


def _on_line(pattern: re.Pattern[str], text: str) -> Found:
    """Find the group of the last match of a pattern."""
    last = _last(pattern, text)
    if last is None:
        return _NOTHING
    return last.start(), _without_empty_boxes(last[1])


def _without_empty_boxes(answer: str) -> str:
    return _EMPTY_BOX.sub("", answer).strip()


def _in_tags(text: str) -> Found:
    """Find the content of the last tag if it is closed, or of a box in it that is its only
    value."""
    start = text.rfind("<answer>")
    inside, closing, _ = text[start + len("<answer>") :].partition("</answer>")
    if start < 0 or not closing:
        return _NOTHING
    box = boxes.answer_of(inside, boxes.braced(inside))
    after = inside[box.end :]
    is_hedged = _OR_BEFORE.search(inside, max(box.start - 20, 0), max(box.start, 0))
    is_alone = not (is_hedged or _OTHER_VALUE.search(after) or _SECOND_THOUGHT.search(after))
    if box.answer and is_alone:
        return start, box.answer
    return start, _without_empty_boxes(inside)


_BOXED = ((_last_box,), (_last_bare_box,))
RULES: Mapping[AnswerRule, Sequence[Sequence[Callable[[str], Found]]]] = {
    "boxed": (*_BOXED, (_last_final_answer, partial(_on_line, _NUMBER_LINE))),
    "last_line": (*_BOXED, (_last_answer_line,)),
    "hash": ((partial(_on_line, _HASHES),),),
    "tags": ((_in_tags,),),
}
"""By rule, the ways to find an answer by precedence. Within a row the last answer wins."""
FORMS: Mapping[AnswerRule, str] = {
    "boxed": "\\boxed{{{}}}",
    "last_line": "Answer: {}",
    "hash": "#### {}",
    "tags": "<answer>{}</answer>",
}
"""The form of an answer by rule."""


def _listed(tail: str) -> list[re.Match[str]]:
    """Match the values at the start of a text, separated by commas, semicolons, "and" or "or"."""
    values = []
    value = _FINAL_VALUE.match(tail)
    while value:
        values.append(value)
        separator = _SEPARATOR.match(tail, value.end())
        value = separator and _FINAL_VALUE.match(tail, separator.end())
    return values


def _content(value: re.Match[str]) -> str:
    return value.group(value.lastgroup or 0)


def _form(value: str) -> Fraction | str:
    """Return the form in which a value is compared, without its currency."""
    return form(re.sub(_CURRENCY, "", clean(value)))


def _ambiguous(rest: str, values: Sequence[re.Match[str]]) -> bool:
    """Return whether another value follows: in the sentence before an explanation, in the rest of
    the line, or on the next one.

    The same value again, as in "18 dollars ($18)", does not count.
    """
    forms = set(map(_form, map(_content, values)))
    sentence, *others = _SENTENCE_BREAK.split(rest.partition("\n")[0], maxsplit=1)
    text = _MEASURE.sub(" ", _EXPLANATION.split(sentence, maxsplit=1)[0])
    pattern = _OTHER_CHOICE if values[-1]["letter"] else _OTHER_VALUE  # "(A) 12" is one answer
    after = "".join(others)
    if _has_other(pattern, text, forms) or _has_other(_OTHER_VALUE, after, forms):
        return True
    return _SECOND_THOUGHT.search(after) is not None or _continues(rest, forms)


def _has_other(pattern: re.Pattern[str], text: str, forms: Collection[Fraction | str]) -> bool:
    """Return whether a text has a value with another form."""
    other = pattern.search(text)
    while other is not None:
        value = _FINAL_VALUE.match(text, other.start())
        if value is None or _form(_content(value)) not in forms:
            return True
        other = pattern.search(text, value.end())
    return False


def _continues(rest: str, forms: Collection[Fraction | str]) -> bool:
    """Return whether the next line is another value alone, or a doubt with a value. forms: of the
    values that do not count as another."""
    line = _NEXT_LINE.match(rest)
    if line is None:
        return False
    value = _FINAL_VALUE.match(rest, line.end())
    if value is None or not _LINE_END.match(rest, value.end()):
        return _DOUBTED.match(rest, line.end()) is not None
    return _form(_content(value)) not in forms
