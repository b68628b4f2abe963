r"""Find the final answer in a response. Model text is hostile: every search is linear in its length, none recurses.

What counts:
1. the last balanced, non-empty `\boxed{...}` or `\fbox{...}` (or the brace-less `\boxed 5`);
2. without one, whichever comes last of
   - "final answer is ..." followed by `$...$`, a number or a choice letter, or by a list of these ("69 or 84"), which
     is the answer as a whole; with another value in the rest of that sentence, or on the next line, there is none (the
     same value again, "18 dollars ($18)", and one that is part of the unit, "72 km in 2 hours", are no other),
   - GSM8K's `#### N` on a line of its own, where N is a number.
A number in prose is not an answer: a policy that is paid for it learns to list numbers.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence

from g2d_jax.rewards.lists import form
from g2d_jax.rewards.normalise import clean

# One token per match, so that `\{` and `\\` are never mistaken for a brace or for the start of a command.
_BRACE_TOKEN = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|(?P<open>\{)|(?P<close>\})|\\.", re.DOTALL)
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)[ \t]*([-+]?\d[\d,.]*(?<![,.])|[A-Za-z](?![A-Za-z]))")
_EMPTY_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{\s*\}")

_NUMBER = r"[-+\u2212]?\$?[-+\u2212]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d))(?:/\d+)?(?:\s?\\?%)?"
_FINAL_ANSWER = re.compile(r"final\s+answers?\*{0,2}(?:\s+(?:is|are)|\s*[:=])[\s:*=]{0,20}", re.IGNORECASE)
_BOLD_END = r"(?<=\S)\*\*(?:[.,;:!)]|\s*$|\s+[A-Za-z])"  # of "**42** eggs", and not of 2**10
_FINAL_WINDOW = 4096  # characters after "final answer is" that are looked at
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
_SENTENCE = re.compile(r"(?:[^.!?\n]|[.!?](?!\s|$))*")
_EXPLANATION = re.compile(
    r"\b(?:since|because|as|(?<!or )so|which|where|when|for|from|by|with|that|if|given|after|using)\b", re.I
)
_SIGN = r"(?:[-+\u2212\u00b1\u221a\u00d7\u2260*/<>]\s?)?"
_NUMBER_WORD = "zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve"
# "or" offers another value in "3 or x", "C or maybe D" and "5 or six", but not in "5 or so".
_OR = r"\bor\s+(?:(?!so\b)[a-z]+,?\s+){0,2}"
_OR_WORD = rf"{_OR}(?:(?!a\b)[A-Za-z]|{_NUMBER_WORD})\b"
_OTHER_VALUE = re.compile(rf"{_SIGN}(?:\$[^$^]|\\[(\[]|(?<![\w^{{.])\d)|(?<!\w)\([A-Z]\)|{_OR_WORD}")
_OTHER_CHOICE = re.compile(rf"(?<!\w)\([A-Z]\)|{_OR_WORD}|{_OR}[\d$\\]")
# Part of a unit: "72 km in 2 hours", "11 in base 2".
_MEASURE = re.compile(r"\b(?:in|at|per)\s+(?:base\s+)?\$?\d[\d.,]*(?<![.,])")
_NEXT_LINE = re.compile(r"[ \t]*\n\s*(?:[-*\u2022][ \t]+)?")
_LINE_END = re.compile(r"[ \t.,;]*(?:\n|$)")
_HASHES = re.compile(rf"^[ \t]*####[ \t]*({_NUMBER})[ \t]*\.?[ \t\r]*$", re.MULTILINE)


def answer_text(text: str) -> str | None:
    """Return the part of a response in which an answer counts: what follows the last `</think>`.

    Text without think tags counts whole. None when a `<think>` was opened and never closed: the response was cut before
    it answered. Where the template itself ends with `<think>`, hand in `"<think>" + text`.
    """
    after = text.rpartition("</think>")[2]
    return None if "<think>" in after else after


def final_answer(text: str) -> str | None:
    """Find the final answer of a response as written, stripped, None when it gives none, by the module's rules."""
    counted = answer_text(text)
    if counted is None:
        return None
    for rules in RULES:
        _, answer = max(rule(counted) for rule in rules)
        if answer:
            return answer
    return None


def solution_answer(solution: str) -> str | None:
    r"""Find the reference answer in a worked solution: GSM8K's last `#### N` line, otherwise MATH's last `\boxed{...}`.

    For data loading. Here the rest of the `####` line is taken as it stands, since the text is a data set's and not a
    model's.
    """
    _, mark, tail = solution.rpartition("####")
    if mark:
        return tail.split("\n", 1)[0].strip() or None
    return _last_box(solution)[1] or _last_bare_box(solution)[1] or None


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    matches = deque(pattern.finditer(text), maxlen=1)
    return matches[0] if matches else None


def _last_box(text: str) -> tuple[int, str]:
    """Find the last balanced box that is not empty nor inside another balanced one."""
    if "\\boxed" not in text and "\\fbox" not in text:
        return _NOTHING
    open_braces: list[tuple[int, bool]] = []  # (where its content starts, whether it opens a box)
    boxes: list[tuple[int, str]] = []
    for token in _BRACE_TOKEN.finditer(text):
        if token["box"] or token["open"]:
            open_braces.append((token.end(), token["box"] is not None))
        elif token["close"] and open_braces:
            start, is_box = open_braces.pop()
            if is_box:
                while boxes and boxes[-1][0] > start:  # boxes inside this one
                    boxes.pop()
                boxes.append((start, text[start : token.start()].strip()))
    return next((box for box in reversed(boxes) if box[1]), _NOTHING)


def _last_bare_box(text: str) -> tuple[int, str]:
    r"""Find the last `\boxed 5`, unless it goes on as a list of values."""
    bare = _last(_BARE_BOX, text)
    if bare is None or len(_listed("0" + text[bare.end() : bare.end() + _FINAL_WINDOW])) > 1:
        return _NOTHING
    return bare.start(), bare[1]


def _last_final_answer(text: str) -> tuple[int, str]:
    """Find what the last "final answer is" is followed by, unless the sentence or the next line gives another value."""
    last = _last(_FINAL_ANSWER, text)
    if last is None:
        return _NOTHING
    tail = text[last.end() : last.end() + _FINAL_WINDOW]
    values = _listed(tail)
    if not values or _ambiguous(tail[values[-1].end() :], values):
        return _NOTHING
    answer = tail[: values[-1].end()] if len(values) > 1 else _content(values[0])
    return last.start(), _EMPTY_BOX.sub("", answer).strip()


def _last_hashes(text: str) -> tuple[int, str]:
    last = _last(_HASHES, text)
    return (last.start(), last[1].strip()) if last else _NOTHING


_NOTHING = (-1, "")
RULES: tuple[tuple[Callable[[str], tuple[int, str]], ...], ...] = (
    (_last_box,),
    (_last_bare_box,),
    (_last_final_answer, _last_hashes),
)
"""Rules by precedence: (where an answer stands, answer) of a text, (-1, "") for none. In a row the last answer wins."""


def _listed(tail: str) -> list[re.Match[str]]:
    """Match the values that a text begins with, separated by commas, semicolons, "and" or "or"."""
    values, value = [], _FINAL_VALUE.match(tail)
    while value is not None:
        values.append(value)
        separator = _SEPARATOR.match(tail, value.end())
        value = None if separator is None else _FINAL_VALUE.match(tail, separator.end())
    return values


def _content(value: re.Match[str]) -> str:
    return value.group(value.lastgroup or 0)


def _ambiguous(rest: str, values: Sequence[re.Match[str]]) -> bool:
    """Tell whether another value follows in the sentence, before it explains anything, or on the next line.

    The same value once more, as in "18 dollars ($18)", is no other.
    """
    forms = {form(clean(content)) for content in map(_content, values)}
    sentence = _SENTENCE.match(rest)
    said = _MEASURE.sub(" ", _EXPLANATION.split(sentence[0] if sentence else "", maxsplit=1)[0])
    pattern = _OTHER_CHOICE if values[-1]["letter"] else _OTHER_VALUE  # "(A) 12" is one answer
    other = pattern.search(said)
    while other is not None:
        value = _FINAL_VALUE.match(said, other.start())
        if value is None or form(clean(_content(value))) not in forms:
            return True
        other = pattern.search(said, value.end())
    line = _NEXT_LINE.match(rest)
    value = _FINAL_VALUE.match(rest, line.end()) if line else None
    if value is None or not _LINE_END.match(rest, value.end()):
        return False
    return form(clean(_content(value))) not in forms
