r"""Write word problems of one to three steps, with worked answers, as JSONL files.

    python benchmarks/stories.py FOLDER            # --steps 1-3 --numbers 50 makes harder ones

    Nora has 12 shells. A neighbor hands her 5 more.        12 + 5 = 17
    Omar has 4 shells. How many more shells does Nora       17 - 4 = 13
    have now than Omar?                                     #### 13

    train.jsonl, dev.jsonl, test.jsonl    problem, answer, solution, subset ("2 steps")
    sft.jsonl                             prompt, completion: worked answers of other training problems

A step adds, takes away, multiplies, divides, or compares with somebody else, in the words of a
template of story_texts.py. Numbers in a story are at least two and results at least one, so that
every plural is right. The split of a story is that of its combination of templates: train, dev and
test share neither a problem nor a combination. Everything is a pure function of (difficulty, seed,
index).
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import story_texts as texts

from g2d_jax.data.arithmetic import random_integers
from g2d_jax.data.splits import Split, problem_id, split_of

SIZES: dict[Split, int] = {"test": 512, "dev": 256, "train": 4000}
"""The problems of each file."""
EXAMPLES = 1200
"""The rows of sft.jsonl."""

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
    """The difficulty of stories. steps: the fewest and the most, of 1 to 3. numbers: the largest
    number of a story and its working, 10 to 1000."""

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


def write(
    folder: Path, level: Difficulty, seed: int = 0, sizes: Mapping[Split, int] = SIZES
) -> None:
    """Write the files of a difficulty into a folder, train.jsonl last.

    seed: of the sequence that stories are taken from. sizes: split -> how many problems.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "sft.jsonl", (example(level, seed, index) for index in range(EXAMPLES)))
    for split, size in sizes.items():
        _write(folder / f"{split}.jsonl", itertools.islice(problems(level, seed, split), size))


def _write(file: Path, rows: Iterator[dict[str, str]]) -> None:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")


def problems(level: Difficulty, seed: int, split: Split) -> Iterator[dict[str, str]]:
    """Yield the distinct problems of a split without end, as rows of a file."""
    seen: set[str] = set()
    for index in itertools.count():
        found = story(level, f"problem/{seed}/{index}")
        identifier = problem_id(found.text)
        if found.split == split and identifier not in seen:
            seen.add(identifier)
            yield _row(found)


def _row(found: Story) -> dict[str, str]:
    steps = len(found.working)
    return {
        "problem": found.text,
        "answer": str(found.answer),
        "solution": found.solution,
        "subset": "1 step" if steps == 1 else f"{steps} steps",
    }


def example(level: Difficulty, seed: int, index: int) -> dict[str, str]:
    """Return row number `index` of the worked answers: a training problem with its solution."""
    for attempt in itertools.count():
        found = story(level, f"example/{seed}/{index}/{attempt}")
        if found.split == "train":
            break
    return {"prompt": found.text, "completion": found.solution}


def story(level: Difficulty, name: str) -> Story:
    """Make the story of a name."""
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
    """Random choices, which the name alone decides."""

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
        """Return the story so far."""
        text = " ".join(self._sentences)
        return Story(text, tuple(self._templates), tuple(self._working), self.value)


def _range(text: str) -> tuple[int, int]:
    least, _, most = text.partition("-")
    return int(least), int(most or least)


def main() -> None:
    """Write the files of the difficulty that the command line gives."""
    parser = argparse.ArgumentParser(description="Write word problems as JSONL files.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=_range, default=(1, 2), help="1 to 3, or a range (1-2)")
    parser.add_argument("--numbers", type=int, default=20, help="the largest, 10 to 1000 (20)")
    parser.add_argument("--seed", type=int, default=0, help="another sequence of stories (0)")
    given = parser.parse_args()
    least, most = given.steps
    if not 1 <= least <= most <= 3:
        parser.error("--steps is a number from 1 to 3, or a range such as 1-2")
    if not 10 <= given.numbers <= 1000:
        parser.error("--numbers is from 10 to 1000")
    write(given.folder, Difficulty(given.steps, given.numbers), given.seed)


if __name__ == "__main__":
    main()
