r"""The embedded task in words: word problems of one to three steps, with worked answers.

    Nora has 12 shells. A neighbor hands her 5 more.        12 + 5 = 17
    Omar has 4 shells. How many more shells does Nora       17 - 4 = 13
    have now than Omar?                                     #### 13

`procedural:stories` has settings, written behind it: `procedural:stories:steps=1-3,numbers=50`.

    steps     how many a story has: 1, 2, 3, or a range of them
    numbers   the largest number in a story and in its working, 10 to 1000

A step adds, takes away, multiplies, divides, or compares with somebody else, in the words of a
template of story_texts.py. Numbers in a story are at least two and results at least one, so that
every plural is right. The split of a story is that of its combination of templates: train, dev and
test share neither a problem nor a combination. Everything is a pure function of (settings, seed,
index), as in arithmetic.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from g2d_jax.data import story_texts as texts
from g2d_jax.data.arithmetic import draws_for, first_distinct, random_integers
from g2d_jax.data.splits import Split, problem_id, split_of
from g2d_jax.records import Example, Problem

NAME = "procedural:stories"
_SETTING = re.compile(r"(?P<key>steps|numbers)=(?P<least>[0-9]{1,4})(?:-(?P<most>[0-9]))?")
_NUMBERS = range(10, 1001)
_STEPS = range(1, 4)

_MOST_PARTS = 5
_MOST_GROUPS = 9
_DRAWS = 64
"""More random integers than any story takes."""

_GOES_ON: dict[str, Sequence[str]] = {
    "gain": texts.GAINS,
    "loss": texts.LOSSES,
    "multiple": texts.MULTIPLES,
    "share": texts.SHARES,
}
"""The templates of steps after which a story may go on, by their kind."""

_ENDS: dict[str, Sequence[str]] = {
    **_GOES_ON,
    "more": texts.MORE,
    "fewer": texts.FEWER,
    "difference": texts.DIFFERENCES,
    "times as many": texts.TIMES_AS_MANY,
}
"""The templates of last steps, by their kind: comparisons too, which bring their question."""

_COMPUTE = {
    "+": int.__add__,
    "-": int.__sub__,
    "*": int.__mul__,
    "/": int.__floordiv__,
}
_SIGNS = {
    "gain": "+",
    "more": "+",
    "loss": "-",
    "fewer": "-",
    "difference": "-",
    "multiple": "*",
    "times as many": "*",
    "share": "/",
}

T = TypeVar("T")


@dataclass(frozen=True)
class Difficulty:
    """The difficulty of stories. steps: the fewest and the most; numbers: the largest that occurs."""

    steps: tuple[int, int] = (1, 2)
    numbers: int = 20


@dataclass(frozen=True)
class Story:
    """A word problem. templates: those of its sentences, in order; working: a line for each step,
    such as "12 + 5 = 17"."""

    text: str
    templates: tuple[str, ...]
    working: tuple[str, ...]
    answer: int

    @property
    def split(self) -> Split:
        """Return the split that this combination of templates belongs to."""
        return split_of(problem_id("\n".join(self.templates)))

    @property
    def solution(self) -> str:
        """Return the worked answer, which ends with `#### ` and the number."""
        return "\n".join([*self.working, f"#### {self.answer}"])


def difficulty(source: str) -> Difficulty:
    """Read the settings of a source: "procedural:stories", or with ":steps=1-3,numbers=50" behind.

    Raises ValueError for settings that there are not, and values out of bounds.
    """
    settings = source.removeprefix(NAME)
    values: dict[str, tuple[int, int]] = {}
    for text in settings[1:].split(",") if settings else ():
        found = _SETTING.fullmatch(text)
        if found is None or found["key"] in values:
            raise _refusal(source)
        least = int(found["least"])
        values[found["key"]] = least, int(found["most"] or least)
    steps = values.get("steps", Difficulty.steps)
    numbers, same = values.get("numbers", (Difficulty.numbers, Difficulty.numbers))
    ordered = steps[0] <= steps[1] and numbers == same
    if not ordered or not {*steps} <= {*_STEPS} or numbers not in _NUMBERS:
        raise _refusal(source)
    return Difficulty(steps, numbers)


def _refusal(source: str) -> ValueError:
    return ValueError(
        f"unknown settings of stories in {source!r}: write {NAME}:steps=1-2,numbers=20, with steps "
        f"from {_STEPS[0]} to {_STEPS[-1]}, one number or a range, and numbers from {_NUMBERS[0]} "
        f"to {_NUMBERS[-1]}"
    )


def problems(
    level: Difficulty, seed: int, count: int, split: Split | Literal[""] = ""
) -> list[Problem]:
    """Make the first `count` distinct problems of one split ("": of all three), in the order of the
    sequence `seed`.

    Raises ValueError when the sequence yields too few distinct problems.
    """
    drawn = (story(level, f"problem/{seed}/{index}") for index in range(draws_for(count)))
    return first_distinct((_problem(s) for s in drawn if split in ("", s.split)), count, split)


def _problem(told: Story) -> Problem:
    steps = len(told.working)
    return Problem(
        id=problem_id(told.text),
        prompt=told.text,
        answer=str(told.answer),
        source=NAME,
        subset="1 step" if steps == 1 else f"{steps} steps",
        solution=told.solution,
    )


def example(level: Difficulty, seed: int, index: int) -> Example:
    """Make demonstration number `index` of the endless sequence `seed`: a training problem with its
    worked answer."""
    attempt = 0
    told = story(level, f"example/{seed}/{index}/{attempt}")
    while told.split != "train":
        attempt += 1
        told = story(level, f"example/{seed}/{index}/{attempt}")
    return Example(problem_id(told.text), told.text, told.solution)


def story(level: Difficulty, name: str) -> Story:
    """Draw a story by a name alone."""
    draws = _Draws(f"stories/{name}")
    teller = _Teller(draws)
    left = draws.pick(range(level.steps[0], level.steps[1] + 1))
    if draws.pick(range(4)) == 0:
        groups = draws.pick(range(2, min(_MOST_GROUPS, level.numbers // 2) + 1))
        size = draws.pick(range(2, level.numbers // groups + 1))
        teller.tell(draws.pick(texts.GROUPS), k=groups, m=size)
        teller.work(groups, "*", size)
        left -= 1
    else:
        teller.value = draws.pick(range(2, level.numbers + 1))
        teller.tell(draws.pick(texts.OPENINGS), n=teller.value)
    asked = False
    while left:
        left -= 1
        kind, template = teller.next_step(_GOES_ON if left else _ENDS, level.numbers)
        operand = draws.pick(_operands(kind, teller.value, level.numbers))
        teller.tell(template, n=operand, k=operand)
        teller.work(teller.value, _SIGNS[kind], operand)
        asked = kind not in _GOES_ON
    if not asked:
        teller.tell(draws.pick(texts.QUESTIONS))
    return teller.story()


def _operands(kind: str, value: int, numbers: int) -> Sequence[int]:
    """List the numbers that a step of this kind can have: its result is whole, at least one and
    within `numbers`."""
    sign = _SIGNS[kind]
    if sign == "+":
        return range(2, numbers - value + 1)
    if sign == "-":
        return range(2, value)
    if sign == "*":
        return range(2, min(_MOST_PARTS, numbers // value) + 1)
    return [parts for parts in texts.PARTS if value % parts == 0 and value > parts]


class _Draws:
    """Choices by a name alone."""

    def __init__(self, name: str) -> None:
        self._integers = iter(random_integers(name, _DRAWS))

    def pick(self, options: Sequence[T]) -> T:
        """Return one of the options."""
        return options[next(self._integers) % len(options)]


class _Teller:
    """A story under way: its sentences, its working, and the number that it has come to."""

    def __init__(self, draws: _Draws) -> None:
        self._draws = draws
        self._pronoun = draws.pick(("he", "she"))
        self._name = draws.pick(texts.NAMES[self._pronoun])
        self._thing = draws.pick(texts.THINGS)
        self._templates: list[str] = []
        self._sentences: list[str] = []
        self._friends: list[str] = []
        self._working: list[str] = []
        self.value = 0

    def next_step(self, templates: Mapping[str, Sequence[str]], numbers: int) -> tuple[str, str]:
        """Draw (kind, template) of a step that is possible now and not in the story yet."""
        possible: list[tuple[str, str]] = []
        for kind, of_kind in templates.items():
            if _operands(kind, self.value, numbers):
                possible += [(kind, text) for text in of_kind if text not in self._templates]
        return self._draws.pick(possible)

    def tell(self, template: str, n: int = 0, k: int = 0, m: int = 0) -> None:
        """Add the sentence of a template, with a friend who is not in the story yet."""
        draws = self._draws
        other = "she" if self._pronoun == "he" else "he"
        friend = draws.pick([name for name in texts.NAMES[other] if name not in self._friends])
        bag = draws.pick([*texts.BAGS])
        sentence = template.format(
            **texts.PRONOUNS[self._pronoun],
            friend_him=texts.PRONOUNS[other]["him"],
            Name=self._name,
            Friend=friend,
            thing=self._thing,
            things=f"{self._thing}s",
            bag=bag,
            bags=texts.BAGS[bag],
            day=draws.pick(texts.DAYS),
            place=draws.pick(texts.PLACES),
            shop=draws.pick(texts.SHOPS),
            times="twice" if k == 2 else f"{k} times",
            part=texts.PARTS.get(k, ""),
            n=n,
            k=k,
            m=m,
        )
        self._templates.append(template)
        self._sentences.append(sentence)
        self._friends.append(friend)

    def work(self, first: int, sign: str, second: int) -> None:
        """Add a line to the working; its result is what the story has come to."""
        self.value = _COMPUTE[sign](first, second)
        self._working.append(f"{first} {sign} {second} = {self.value}")

    def story(self) -> Story:
        """Return what has been told."""
        text = " ".join(self._sentences)
        return Story(text, tuple(self._templates), tuple(self._working), self.value)
