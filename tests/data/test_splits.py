import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from g2d_jax.data.splits import Shares, drop_overlap, problem_id, split_of
from g2d_jax.records import Problem

IDS = st.integers(0, 2**64 - 1).map(lambda n: f"{n:016x}")
SHARES = st.tuples(st.floats(0, 1), st.floats(0, 1)).map(
    lambda cut: Shares(min(cut), max(cut) - min(cut), 1 - max(cut))
)


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


@given(IDS, SHARES)
@examples(50)
def test_every_id_falls_into_a_split_that_has_a_share(identifier, shares):
    assert getattr(shares, split_of(identifier, shares)) > 0.0


def test_splits_follow_the_shares():
    ids = [problem_id(str(n)) for n in range(4000)]
    for split, share in (("train", 0.5), ("dev", 0.3), ("test", 0.2)):
        found = sum(split_of(i, Shares(0.5, 0.3, 0.2)) == split for i in ids) / 4000
        assert abs(found - share) < 0.03
    assert {split_of(i, Shares(1.0, 0.0, 0.0)) for i in ids} == {"train"}


@given(IDS)
@examples(50)
def test_a_larger_train_share_only_adds_to_train(identifier):
    if split_of(identifier, Shares(0.8, 0.1, 0.1)) == "train":
        assert split_of(identifier, Shares(0.9, 0.05, 0.05)) == "train"


@pytest.mark.parametrize("shares", [(0.8, 0.1, 0.2), (1.2, -0.1, -0.1), (float("nan"), 0.5, 0.5)])
def test_shares_must_sum_to_one(shares):
    with pytest.raises(ValueError, match="sum to 1"):
        Shares(*shares)


def test_drop_overlap():
    train = [Problem(id=i, prompt=i) for i in "abcb"]
    kept, dropped = drop_overlap(train, [Problem(id="b", prompt="b"), Problem(id="z", prompt="z")])
    assert [problem.id for problem in kept] == ["a", "c"] and dropped == 2
