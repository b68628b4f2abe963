import re
from collections import Counter

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from sources import load_examples, load_problems

from g2d_jax.data import stories
from g2d_jax.data import story_texts as texts
from g2d_jax.data.splits import drop_overlap, names_of
from g2d_jax.rewards.extract import solution_answer

NAMES_OF_STORIES = st.integers(0, 2**40).map(lambda number: f"test/{number}")
LEVELS = st.builds(
    stories.Difficulty,
    st.sampled_from([(1, 1), (1, 2), (1, 3), (2, 2), (2, 3), (3, 3)]),
    st.sampled_from([10, 20, 50, 1000]),
)
WORDS = {"twice": 2, "half": 2, "third": 3, "quarter": 4, "fifth": 5}
OPENINGS = (*texts.OPENINGS, *texts.GROUPS)
STEPS = (*texts.GAINS, *texts.LOSSES, *texts.MULTIPLES, *texts.SHARES)
COMPARISONS = (*texts.MORE, *texts.FEWER, *texts.DIFFERENCES, *texts.TIMES_AS_MANY)
TEMPLATES = (*OPENINGS, *STEPS, *COMPARISONS, *texts.QUESTIONS)


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
def test_answers_are_right(level, name):
    story = stories.story(level, name)
    assert story.answer == worked_out(story)
    assert level.steps[0] <= len(story.working) <= level.steps[1]
    value = None
    for line in story.working:
        first, sign, second, equals, result = line.split(" ")
        assert equals == "="
        assert value in (None, first)
        products = {"+": int(first) + int(second), "-": int(first) - int(second)}
        products |= {"*": int(first) * int(second), "/": int(first) / int(second)}
        assert products[sign] == int(result)
        assert 2 <= int(second) <= level.numbers
        assert 1 <= int(result) <= level.numbers
        value = result
    assert value == str(story.answer)
    assert solution_answer(story.solution) == value
    assert story == stories.story(level, name)


@given(LEVELS, NAMES_OF_STORIES)
@examples(200)
def test_stories_read_as_english(level, name):
    story = stories.story(level, name)
    assert re.fullmatch(r"[A-Z][A-Za-z0-9 ',.?]*[.?]", story.text)
    for wrong in (r"  ", r" [.,?]", r"[.?] ?[a-z0-9]", r"\b([a-z]+) \1\b", r"\ba [aeiou]"):
        assert not re.search(wrong, story.text), story.text
    # Every thing that is counted is one of several.
    assert not re.search(r"\b[01]\b", story.text)
    assert len(set(story.templates)) == len(story.templates)


@given(LEVELS, NAMES_OF_STORIES)
@examples(200)
def test_pronouns_are_the_main_persons(level, name):
    """Everybody else has another pronoun, so that "he" is never one of two."""
    story = stories.story(level, name)
    words = re.findall(r"\w+", story.text)
    people = {pronoun: {*words} & {*names} for pronoun, names in texts.NAMES.items()}
    pronouns = {"he", "she"} & {word.lower() for word in words}
    assert len(pronouns) <= 1
    for pronoun in pronouns:
        assert len(people[pronoun]) == 1
    assert min(map(len, people.values())) <= 1


def test_templates_are_many_and_tell_all_that_they_are_given():
    kinds = {
        "openings": (texts.OPENINGS, {"n"}),
        "groups": (texts.GROUPS, {"k", "m"}),
        "gains": (texts.GAINS, {"n"}),
        "losses": (texts.LOSSES, {"n"}),
        "multiples": (texts.MULTIPLES, {"times"}),
        "shares": (texts.SHARES, {"k"}),
        "comparisons": (texts.MORE + texts.FEWER + texts.DIFFERENCES, {"n"}),
    }
    for name, (templates, slots) in kinds.items():
        assert len(templates) >= 12, name
        for template in templates:
            told = re.findall(r"\{(n|k|m|times|part)\}", template)
            assert Counter("k" if slot == "part" else slot for slot in told) == Counter(slots)
    assert len(set(TEMPLATES)) == len(TEMPLATES)
    for template in texts.OPENINGS + texts.GROUPS:
        assert "{he}" not in template.split("{Name}")[0], "no pronoun before its name"


def test_things_have_plain_plurals():
    assert len(texts.THINGS) == len(set(texts.THINGS)) >= 50
    for thing in texts.THINGS:
        assert not re.search(r"([sxzo]|ch|sh|[^aeiou]y|f|fe)$", thing), thing
    assert not {*texts.NAMES["he"]} & {*texts.NAMES["she"]}


@pytest.mark.parametrize("settings", ["", ":steps=1,numbers=10", ":steps=3,numbers=100"])
def test_splits_share_no_problem_and_no_combination_of_templates(settings):
    """Whatever their seeds, for all of a run's problems and examples."""
    level = stories.difficulty(f"{stories.NAME}{settings}")
    drawn = [stories.story(level, f"{kind}/{i}") for kind in "abc" for i in range(2000)]
    texts_of: dict[str, set[str]] = {"train": set(), "dev": set(), "test": set()}
    combinations: dict[str, set[tuple[str, ...]]] = {"train": set(), "dev": set(), "test": set()}
    for story in drawn:
        texts_of[story.split].add(story.text)
        combinations[story.split].add(story.templates)
    for kind in (texts_of, combinations):
        assert not kind["train"] & (kind["dev"] | kind["test"])
        assert not kind["dev"] & kind["test"]
    total = sum(map(len, combinations.values()))
    shares = {split: len(found) / total for split, found in combinations.items()}
    assert shares == pytest.approx({"train": 0.8, "dev": 0.1, "test": 0.1}, abs=0.03)


def test_all_of_a_run_is_disjoint():
    """Train, dev, test and the worked examples of the config smollm2, by id and by combination."""
    level = stories.Difficulty()
    sizes = {"train": 4000, "dev": 128, "test": 512}
    parts = {split: stories.problems(level, 0, size, split) for split, size in sizes.items()}
    examples = [stories.example(level, 0, index) for index in range(1200)]
    ids = {split: {problem.id for problem in problems} for split, problems in parts.items()}
    assert {split: len(found) for split, found in ids.items()} == sizes
    assert len(set().union(*ids.values())) == sum(sizes.values())
    assert drop_overlap(examples, names_of([*parts["dev"], *parts["test"]])) == (examples, 0)


def test_a_text_has_one_combination():
    """The first sentence of a template tells which it is, whatever its slots are filled with. What
    could be told in two ways might be in two splits."""
    firsts = [re.sub(r"\{\w+\}", "_", template).split(". ")[0] for template in TEMPLATES]
    assert not [text for text, count in Counter(firsts).items() if count > 1]


def test_the_sequence_is_fixed():
    """Another machine, Python or library version must give the same stories."""
    level = stories.Difficulty((1, 3), 50)
    problem = stories.problems(level, 0, 3, "test")[-1]
    assert problem.prompt == (
        "Simon owns 39 keys. Then he gives away all but a third of his keys. In the end, how many "
        "keys does Simon have?"
    )
    assert problem.solution == "39 / 3 = 13\n#### 13"
    assert (problem.answer, problem.subset) == ("13", "1 step")
    assert (problem.source, problem.id) == ("procedural:stories", "248c331522f61aca")
    example = stories.example(level, 0, 0)
    assert (example.id, example.completion) == ("a5d7eb64f850027d", "34 - 4 = 30\n#### 30")


def test_sources():
    source = "procedural:stories:numbers=30,steps=2-3"
    problems, report = load_problems(source, split="dev", limit=20, seed=3)
    assert (len(problems), report.kept) == (20, 20)
    assert {problem.subset for problem in problems} == {"2 steps", "3 steps"}
    level = stories.Difficulty((2, 3), 30)
    assert problems == stories.problems(level, 3, 20, "dev")
    loaded, _ = load_examples(source, limit=4, seed=3)
    assert loaded == [stories.example(level, 3, index) for index in range(4)]
    assert load_problems("procedural:stories", limit=9)[0] == stories.problems(
        stories.Difficulty(), 0, 9
    )
    assert stories.difficulty("procedural:stories:steps=3") == stories.Difficulty(
        (3, 3), stories.Difficulty.numbers
    )


@pytest.mark.parametrize(
    "settings",
    [
        ":",
        ":steps",
        ":steps=0",
        ":steps=4",
        ":steps=3-1",
        ":steps=1-",
        ":steps=1-4",
        ":steps=1,steps=2",
        ":steps=1,",
        ":steps=one",
        ":steps=²",
        ":numbers=9",
        ":numbers=1001",
        ":numbers=99999",
        ":numbers=20-3",
        ":size=3",
        ":steps=1:numbers=20",
        "::",
    ],
)
def test_wrong_settings_are_refused_with_the_right_ones(settings):
    source = f"procedural:stories{settings}"
    with pytest.raises(ValueError, match=r"write procedural:stories:steps=1-2,numbers=20.* 1 to 3"):
        load_problems(source, limit=4)
