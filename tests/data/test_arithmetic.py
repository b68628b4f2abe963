import re
from collections import Counter

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from g2d_jax.data import arithmetic
from g2d_jax.data.splits import split_of

SEEDS = st.integers(0, 2**40)
INDICES = st.integers(0, 10**9)


def worked_out(prompt: str) -> int:
    """The chain's value, read from its text by another route."""
    start, *steps = re.findall(r"[-+*]?\d+", prompt)
    value = int(start)
    for step in steps:
        operand = int(step[1:])
        value = {"+": value + operand, "-": value - operand, "*": value * operand}[step[0]]
        assert 0 <= value <= 99
        assert 2 <= operand <= (5 if step[0] == "*" else 9)
    return value


@given(SEEDS, INDICES)
@examples(100)
def test_problems_are_right_and_short(seed, index):
    problem = arithmetic.problem(seed, index)
    assert re.fullmatch(r"[1-9]\d?([-+*]\d){2,5}=\?", problem.prompt)
    assert int(problem.answer) == worked_out(problem.prompt)
    assert problem.solution.endswith(f"\\boxed{{{problem.answer}}}")
    assert problem.subset == f"{(len(re.findall(r'[-+*]', problem.prompt)))} operations"
    assert len(problem.prompt) <= 14
    assert problem == arithmetic.problem(seed, index)


@given(SEEDS, INDICES)
@examples(100)
def test_demonstrations_are_right_and_from_the_train_split(seed, index):
    example = arithmetic.example(seed, index)
    assert split_of(example.id) == "train"
    *steps, boxed = example.completion.split(";")
    assert boxed == f"\\boxed{{{worked_out(example.prompt)}}}"
    for step in steps:
        chain, _, result = step.partition("=")
        assert worked_out(chain) == int(result)


def test_the_sequence_is_fixed():
    """Another machine, Python or library version must give the same problems."""
    assert [arithmetic.problem(0, index).prompt for index in range(3)] == [
        "81-9-4-7-6+6=?",
        "97+2-2+2=?",
        "50+9+4+6-2-5=?",
    ]
    assert arithmetic.problem(0, 0).id == "086709d76d4b6e4e"
    assert arithmetic.example(0, 0).completion == "17*2-7=27;27+7=34;\\boxed{34}"


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("direct", r"\boxed{18}"),
        ("fused", r"8-4+2=6;6*3=18;\boxed{18}"),
        ("steps", r"8-4=4;4+2=6;6*3=18;\boxed{18}"),
    ],
)
def test_styles(style, text):
    assert arithmetic.demonstration(8, [("-", 4), ("+", 2), ("*", 3)], style) == text


def test_shares_of_styles_and_lengths():
    examples = [arithmetic.example(1, index) for index in range(4000)]
    direct = sum(";" not in example.completion for example in examples) / 4000
    steps = (
        sum(example.completion.count(";") == len(re.findall(r"[-+*]", example.prompt)) for example in examples) / 4000
    )
    assert abs(direct - 0.45) < 0.03
    assert abs(steps - 0.35) < 0.03
    lengths = Counter(len(re.findall(r"[-+*]", example.prompt)) for example in examples)
    assert sorted(lengths) == [2, 3, 4, 5] and min(lengths.values()) > 850


def test_splits_are_disjoint_and_distinct_whatever_the_seed():
    parts = {split: arithmetic.problems(seed, 300, split) for seed, split in enumerate(("train", "dev", "test"))}
    ids = [problem.id for problems in parts.values() for problem in problems]
    assert len(set(ids)) == 900
    assert all(split_of(problem.id) == split for split, problems in parts.items() for problem in problems)


def test_fewer_problems_are_a_prefix_of_more():
    assert arithmetic.problems(3, 20, "test") == arithmetic.problems(3, 50, "test")[:20]
    assert len({split_of(problem.id) for problem in arithmetic.problems(3, 50)}) == 3


def test_bad_requests():
    with pytest.raises(ValueError, match="unknown split 'valid'"):
        arithmetic.problems(0, 1, "valid")
    with pytest.raises(ValueError, match="negative"):
        arithmetic.problems(0, -1, "test")


def test_tokenizer():
    tokenizer = arithmetic.tokenizer()
    assert len(tokenizer) == len(arithmetic.VOCABULARY) == 22
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, None)
    assert tokenizer("57+3=60;\\boxed{60}")["input_ids"] == [7, 9, 12, 5, 15, 8, 2, 16, 20, 8, 2, 21]
    longest = max((arithmetic.problem(0, i).solution for i in range(500)), key=len)
    assert len(tokenizer(longest)["input_ids"]) + 1 <= 48


@given(st.lists(st.sampled_from(arithmetic.VOCABULARY[2:])).map("".join))
@examples(50)
def test_tokenizer_round_trip(text):
    tokenizer = _TOKENIZER
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


_TOKENIZER = arithmetic.tokenizer()
