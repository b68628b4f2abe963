from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from g2d_jax.data.splits import drop_overlap, problem_id, split_of
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


def test_drop_overlap():
    train = [Problem(id=i, prompt=i) for i in "abcb"]
    kept, dropped = drop_overlap(train, [Problem(id="b", prompt="b"), Problem(id="z", prompt="z")])
    assert [problem.id for problem in kept] == ["a", "c"] and dropped == 2
