"""Word problems of benchmarks/stories.py."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from sources import load_examples, load_problems

from g2d_jax.data.splits import problem_id
from g2d_jax.rewards.extract import solution_answer

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import stories
import story_texts as texts

NAMES_OF_STORIES = st.integers(0, 2**40).map(lambda number: f"test/{number}")
LEVELS = st.builds(
    stories.Difficulty,
    st.sampled_from([(1, 1), (1, 2), (1, 3), (2, 2), (2, 3), (3, 3)]),
    st.sampled_from([10, 20, 50, 1000]),
)
WORDS = {"twice": 2, "half": 2, "third": 3, "quarter": 4, "fifth": 5}


def worked_out(story: stories.Story) -> int:
    """Answer a story by what its templates mean and the numbers in its text, in their order."""
    found = re.findall(rf"\d+|\b(?:{'|'.join(WORDS)})\b", story.text)
    numbers = [WORDS[word] if word in WORDS else int(word) for word in found]
    value = numbers.pop(0)
    for template in story.templates:
        if template in (*texts.OPENINGS, *texts.QUESTIONS):
            continue
        operand = numbers.pop(0)
        if template in (*texts.GAINS, *texts.MORE):
            value = value + operand
        elif template in (*texts.LOSSES, *texts.FEWER, *texts.DIFFERENCES):
            value = value - operand
        elif template in texts.SHARES:
            assert value % operand == 0
            value = value // operand
        else:
            assert template in (*texts.GROUPS, *texts.MULTIPLES, *texts.TIMES_AS_MANY)
            value = value * operand
    assert not numbers
    return value


@given(LEVELS, NAMES_OF_STORIES)
@examples(200)
def test_answers_of_stories_are_right(level: stories.Difficulty, name: str) -> None:
    story = stories.story(level, name)
    assert story.answer == worked_out(story)
    assert level.steps[0] <= len(story.working) <= level.steps[1]
    assert solution_answer(story.solution) == str(story.answer)
    assert re.fullmatch(r"[A-Z][A-Za-z0-9 ',.?]*[.?]", story.text)
    for line in story.working:
        first, sign, second, _, result = line.split(" ")
        results = {"+": int(first) + int(second), "-": int(first) - int(second)}
        results |= {"*": int(first) * int(second), "/": int(first) / int(second)}
        assert results[sign] == int(result) <= level.numbers


FIRST = {
    "test": {
        "problem": "Mark has 3 pencils. In the afternoon, he gets 15 more pencils. After lunch, he "
        "discovers 2 more pencils under the bed. How many pencils belong to Mark at the end?",
        "answer": "20",
        "solution": "3 + 15 = 18\n18 + 2 = 20\n#### 20",
        "subset": "2 steps",
    },
    "sft": {
        "prompt": "Daniel comes to the station with 5 bolts. He loses 3 of them. Work out how many "
        "bolts Daniel has at the end.",
        "completion": "5 - 3 = 2\n#### 2",
    },
}
DIGESTS = {
    "train": "ae5344de67c237e09113dd7e95bb7f2b03416e3e029f46d78e72d2dcbe1bce9b",
    "dev": "3553b0e6bdc97d52b7461b1595a65134562767f0d7677c2a8b68c41a85331a7a",
    "test": "cfec9771edc015c94e852f05aa881c7272a8ce5774b32e9e155857c7fe31c6ad",
    "sft": "0f6b64193f195a3ec0d0e080a7c792c32bc90fede1016d8784208b456466912e",
}
"""Of files with the rows that the library's embedded task `procedural:stories` gave."""


def test_the_files_are_those_that_the_evidence_was_measured_with(tmp_path: Path) -> None:
    stories.write(tmp_path, stories.Difficulty())
    rows = {}
    for name in ("train", "dev", "test", "sft"):
        lines = (tmp_path / f"{name}.jsonl").read_text("utf-8").splitlines()
        rows[name] = [json.loads(line) for line in lines]
    assert {name: len(found) for name, found in rows.items()} == {
        **{"train": 4000, "dev": 256, "test": 512, "sft": 1200}
    }
    assert {name: rows[name][0] for name in FIRST} == FIRST
    for name, digest in DIGESTS.items():
        assert hashlib.sha256((tmp_path / f"{name}.jsonl").read_bytes()).hexdigest() == digest
    ids = {row["problem"] for name in ("train", "dev", "test") for row in rows[name]}
    assert len(ids) == 4768
    held_out = {row["problem"] for name in ("dev", "test") for row in rows[name]}
    assert not held_out & {row["prompt"] for row in rows["sft"]}


def test_the_library_reads_them(tmp_path: Path) -> None:
    stories.write(tmp_path, stories.Difficulty((1, 3), 50), sizes={"test": 3, "train": 1})
    problems, report = load_problems(tmp_path / "test.jsonl")
    assert (report.rows, report.kept) == (3, 3)
    last = problems[-1]
    assert last.prompt == (
        "Simon owns 39 keys. Then he gives away all but a third of his keys. In the end, how many "
        "keys does Simon have?"
    )
    assert (last.solution, last.answer, last.subset) == ("39 / 3 = 13\n#### 13", "13", "1 step")
    assert last.id == problem_id(last.prompt) == "248c331522f61aca"
    assert last.columns == {}
    worked, _ = load_examples(tmp_path / "sft.jsonl", limit=1)
    assert (worked[0].id, worked[0].completion) == ("a5d7eb64f850027d", "34 - 4 = 30\n#### 30")


def test_splits_share_no_combination_of_templates() -> None:
    combinations: dict[str, set[tuple[str, ...]]] = {"train": set(), "dev": set(), "test": set()}
    for number in range(6000):
        story = stories.story(stories.Difficulty(), f"any/{number}")
        combinations[story.split].add(story.templates)
    total = sum(map(len, combinations.values()))
    shares = {split: len(found) / total for split, found in combinations.items()}
    assert shares == pytest.approx({"train": 0.8, "dev": 0.1, "test": 0.1}, abs=0.03)
    # Two combinations cannot give one text: the first sentence of a template tells which it is.
    kinds = (texts.OPENINGS, texts.GROUPS, texts.QUESTIONS, *stories._ENDS.values())
    templates = [template for kind in kinds for template in kind]
    firsts = {re.sub(r"\{\w+\}", "_", template).split(". ")[0] for template in templates}
    assert len(firsts) == len(templates)
