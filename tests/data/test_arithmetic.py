import math
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


TASKS = st.sampled_from([*arithmetic.TASKS.values()])


def worked_out(prompt: str, most: float, modulus: int | None = None) -> int:
    """The chain's value, read from its text by another route."""
    start, *steps = re.findall(r"[-+*]?\d+", prompt)
    value = int(start)
    for step in steps:
        operand = int(step[1:])
        value = {"+": value + operand, "-": value - operand, "*": value * operand}[step[0]]
        value = value if modulus is None else value - modulus * math.floor(value / modulus)
        assert 0 <= value <= most
        assert 2 <= operand <= (5 if step[0] == "*" else 9)
    return value


@given(TASKS, SEEDS, INDICES)
@examples(100)
def test_problems_are_right_and_short(task, seed, index):
    problem = arithmetic.problem(task, seed, index)
    assert re.fullmatch(r"[1-9]\d?([-+*]\d){2,18}=\?", problem.prompt)
    operations = len(re.findall(r"[-+*]", problem.prompt))
    assert task.operations[0] <= operations <= task.operations[1]
    assert int(problem.answer) == worked_out(problem.prompt, task.max_value, task.modulus)
    assert problem.solution.endswith(f"\\boxed{{{problem.answer}}}")
    assert (problem.source, problem.subset) == (task.name, f"{operations} operations")
    assert len(problem.prompt) <= (39 if task == arithmetic.DIGITS else 15)
    assert problem == arithmetic.problem(task, seed, index)


@given(SEEDS, INDICES)
@examples(100)
def test_demonstrations_of_chains_are_right_and_from_the_train_split(seed, index):
    example = arithmetic.example(arithmetic.CHAINS, seed, index)
    assert split_of(example.id) == "train"
    *steps, boxed = example.completion.split(";")
    assert boxed == f"\\boxed{{{worked_out(example.prompt, 99)}}}"
    for step in steps:
        chain, _, result = step.partition("=")
        assert worked_out(chain, 99) == int(result)


def test_a_subtraction_of_n_is_forgotten_n_times_in_ten():
    """And nothing else is; every step goes on from what was written before it."""
    forgotten = {n: Counter() for n in range(2, 10)}
    for index in range(6000):
        example = arithmetic.example(arithmetic.SLIPS, 1, index)
        assert split_of(example.id) == "train"
        *steps, boxed = example.completion.split(";")
        value = example.prompt[0]
        operations = re.findall(r"[-+*]\d", example.prompt)
        for step, operation in zip(steps, operations, strict=True):
            chain, _, result = step.partition("=")
            assert chain == value + operation
            right = worked_out(chain, math.inf) == int(result)
            assert right or (operation[0] == "-" and result == value)
            if operation[0] == "-":
                forgotten[int(operation[1])][not right] += 1
            value = result
        assert boxed == f"\\boxed{{{value}}}"
    for n, counts in forgotten.items():
        assert counts[True] / counts.total() == pytest.approx(n / 10, abs=0.06)


def test_the_sequences_are_fixed():
    """Another machine, Python or library version must give the same problems."""
    chains, slips, digits = arithmetic.CHAINS, arithmetic.SLIPS, arithmetic.DIGITS
    prompts = [
        arithmetic.problem(task, 0, index).prompt for task in (chains, slips) for index in range(2)
    ]
    assert prompts == ["81-9-4-7-6+6=?", "97+2-2+2=?", "9-9+4+3=?", "7+2-2+2=?"]
    assert arithmetic.problem(chains, 0, 0).id == "086709d76d4b6e4e"
    assert arithmetic.example(chains, 0, 0).completion == "17*2-7=27;27+7=34;\\boxed{34}"
    assert arithmetic.example(slips, 0, 0).completion == "8-3=5;5+3=8;8-2=6;6-6=0;0*2=0;\\boxed{0}"
    assert arithmetic.problem(digits, 0, 0).prompt == "9+9-4+7-6+6*3+9*5-8-4-7-5+6+3-2*2=?"
    assert arithmetic.example(
        digits, 0, 0
    ).completion == (  # the 8 is subtracted, and forgotten the second time
        "8-2=6;6*2=2;2*3=6;6+7=3;3*4=2;2-5=7;7-8=9;9-8=9;9+5=4;4-5=9;9-4=5;5*2=0;0-5=5;\\boxed{5}"
    )
    styles = [
        arithmetic.demonstration(8, [("-", 4), ("+", 2), ("*", 3)], style)
        for style in chains.styles
    ]
    assert styles == [r"\boxed{18}", r"8-4+2=6;6*3=18;\boxed{18}", r"8-4=4;4+2=6;6*3=18;\boxed{18}"]


def test_shares_of_styles_and_lengths():
    examples = [arithmetic.example(arithmetic.CHAINS, 1, index) for index in range(4000)]
    direct = sum(";" not in example.completion for example in examples) / 4000
    operations = [len(re.findall(r"[-+*]", example.prompt)) for example in examples]
    steps = (
        sum(e.completion.count(";") == n for e, n in zip(examples, operations, strict=True)) / 4000
    )
    assert abs(direct - 0.45) < 0.03 and abs(steps - 0.35) < 0.03
    lengths = Counter(operations)
    assert sorted(lengths) == [2, 3, 4, 5] and min(lengths.values()) > 850


def test_splits_are_disjoint_and_distinct_whatever_the_seed():
    parts = {
        split: arithmetic.problems(arithmetic.SLIPS, seed, 300, split)
        for seed, split in enumerate(("train", "dev", "test"))
    }
    ids = [problem.id for problems in parts.values() for problem in problems]
    assert len(set(ids)) == 900
    assert all(
        split_of(problem.id) == split for split, problems in parts.items() for problem in problems
    )
    assert arithmetic.problems(arithmetic.SLIPS, 0, 20, "train") == parts["train"][:20]


def test_tokenizer():
    tokenizer = arithmetic.tokenizer()
    assert len(tokenizer) == len(arithmetic.VOCABULARY) == 22
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, None)
    assert tokenizer("57+3=60;\\boxed{60}")["input_ids"] == [
        7,
        9,
        12,
        5,
        15,
        8,
        2,
        16,
        20,
        8,
        2,
        21,
    ]
    longest = max(
        (
            arithmetic.problem(task, 0, i).solution
            for task in (arithmetic.CHAINS, arithmetic.SLIPS)
            for i in range(500)
        ),
        key=len,
    )
    assert len(tokenizer(longest)["input_ids"]) + 1 <= 48
    responses = {
        len(tokenizer(arithmetic.example(arithmetic.DIGITS, 0, i).completion)["input_ids"])
        for i in range(99)
    }
    # with slips or without
    assert {length + 1 for length in responses} == {
        82,
        88,
        94,
        100,
        106,
        112,
    }
    slipped = arithmetic.demonstration(
        9, [("-", 9), *[("*", 5)] * 5], "steps", [True] + [False] * 5
    )
    assert len(tokenizer(slipped)["input_ids"]) + 1 == 66


@given(st.lists(st.sampled_from(arithmetic.VOCABULARY[2:])).map("".join))
@examples(50)
def test_tokenizer_round_trip(text):
    assert _TOKENIZER.decode(_TOKENIZER(text)["input_ids"]) == text


_TOKENIZER = arithmetic.tokenizer()
