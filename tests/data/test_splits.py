import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from g2d_jax.data.splits import drop_overlap, met, names_of, problem_id, split_of
from g2d_jax.records import Problem


def test_ids_are_fixed():
    """Splits and stored rollouts depend on these."""
    assert problem_id("What is 1+1?") == "6d52aa994781ec59"
    assert problem_id("") == "e4a6a0577479b2b4"


def test_ids_ignore_layout_and_unicode_form_alone():
    assert problem_id("caf\u00e9\r\n  x ") == problem_id("cafe\u0301 x")
    assert problem_id("x") != problem_id("X")
    assert problem_id("1 1") != problem_id("11")


def test_ids_of_conversations():
    user = {"role": "user", "content": "x"}
    assert problem_id((user,)) == problem_id("x")
    assert problem_id(({"role": "system", "content": "s"}, user)) != problem_id("x")
    one = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, user)
    other = ({"role": "user", "content": "a b"}, {"role": "assistant", "content": ""}, user)
    assert problem_id(one) != problem_id(other)


@given(st.text())
@examples(50)
def test_every_text_has_an_id(text):
    assert len(problem_id(text)) == 16 and int(problem_id(text), 16) >= 0
    assert problem_id(f" {text}\n") == problem_id(text)


def test_splits_are_eight_one_and_one_in_ten():
    ids = [problem_id(str(n)) for n in range(4000)]
    for split, share in (("train", 0.8), ("dev", 0.1), ("test", 0.1)):
        assert abs(sum(split_of(i) == split for i in ids) / 4000 - share) < 0.03
    ends = {
        "0" * 16: "train",
        "cccccccccccc0000": "train",
        "cccccccccccd0000": "dev",
        "f" * 16: "test",
    }
    assert {identifier: split_of(identifier) for identifier in ends} == ends


def user(text):
    return {"role": "user", "content": text}


SYSTEM = {"role": "system", "content": "You are helpful."}
REPLY = {"role": "assistant", "content": "2"}


def test_drop_overlap():
    train = [Problem(id=i, prompt=i) for i in "abcb"]
    names = names_of([Problem(id="b", prompt="b"), Problem(id="z", prompt="z")])
    kept, dropped = drop_overlap(train, names)
    assert [problem.id for problem in kept] == ["a", "c"] and dropped == 2


@pytest.mark.parametrize("held_out", ["1+1?", (SYSTEM, user("1+1?"))])
@pytest.mark.parametrize(
    "prompt",
    [
        "1+1?",
        "Solve: 1+1?",
        (user("1+1?"),),
        (SYSTEM, user("1+1?")),
        (SYSTEM, user("Solve: 1+1?")),
        (user("1+1?"), REPLY, user("Why?")),
    ],
    ids=str,
)
def test_a_held_out_problem_is_met_whatever_stands_around_it(held_out, prompt):
    def conversation(prompt):
        return (user(f"Solve: {prompt}"),) if isinstance(prompt, str) else prompt

    problem = Problem(id=problem_id(held_out), prompt=held_out)
    names = names_of([problem], conversation)
    found = met(problem_id(prompt), prompt, names)
    is_behind_template = "Solve" in str(prompt)
    if is_behind_template and not isinstance(held_out, str):
        assert found is None  # the template is of bare statements
    else:
        assert found == problem.id


ALIKE = [
    ("7 + 7 = ?", "7+7=?"),
    ("What is 1+1?", "what is 1 + 1"),
    ("WHAT IS\n1+1 ?!", "What is 1+1."),
    ("1  2 + 3", "1 2+3"),
    ("1+1\u662f\u591a\u5c11\uff1f", "1+1\u662f\u591a\u5c11"),
]


@pytest.mark.parametrize("pair", ALIKE, ids=str)
@pytest.mark.parametrize("as_messages", [False, True])
def test_prompts_alike_but_for_spaces_case_and_final_punctuation_are_one_leak(pair, as_messages):
    prompts = [(SYSTEM, user(text)) if as_messages else text for text in pair]
    for held_out, trained in (prompts, prompts[::-1]):
        names = names_of([Problem(id=problem_id(held_out), prompt=held_out)])
        records = [Problem(id=problem_id(prompt), prompt=prompt) for prompt in (trained, "8+8=?")]
        kept, dropped = drop_overlap(records, names)
        assert [record.prompt for record in kept] == ["8+8=?"] and dropped == 1


OTHER = [
    *[("7+7=?", "7-7=?"), ("7+7", "77"), ("?", "!"), ("(1)", "1")],
    *[("1 2+3", "12+3"), ("Sort 3 12", "Sort 31 2"), ("log_2\n 8", "log_28")],
]


@pytest.mark.parametrize("pair", OTHER)
def test_other_signs_make_other_problems(pair):
    held_out, trained = pair
    names = names_of([Problem(id=problem_id(held_out), prompt=held_out)])
    assert met(problem_id(trained), trained, names) is None


def test_prompts_with_system_messages_are_one_problem_as_a_whole():
    """Where the system message has the task, what the user says may be the same in all."""
    ask = user("Solve the task above.")
    held_out = ({"role": "system", "content": "1+1?"}, ask)
    names = names_of([Problem(id=problem_id(held_out), prompt=held_out)])
    other = ({"role": "system", "content": "1+2?"}, ask)
    assert met(problem_id(other), other, names) is None
    assert met(problem_id(held_out), held_out, names) == problem_id(held_out)


def test_words_of_a_held_out_conversation_of_several_turns_are_no_problem_alone():
    held_out = (user("1+1?"), REPLY, user("Why?"))
    names = names_of([Problem(id=problem_id(held_out), prompt=held_out)])
    assert met(problem_id("Why?"), "Why?", names) is None
    assert met(problem_id(held_out), held_out, names) == problem_id(held_out)
