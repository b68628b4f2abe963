"""Names to randomness: frozen values, and no two lists of names with one key."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from g2d_jax.runtime import keys

NAMES = st.lists(st.one_of(st.text(max_size=6), st.integers()), max_size=4).map(tuple)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ((0, "init"), [873591846, 2505168187]),
        ((7, "warmup", "0123456789abcdef", 0, 0), [3684715053, 180323581]),
        ((7, "warmup", "0123456789abcdef", 0, 1), [4063634501, 1764758895]),
        ((7, "é", "a", "b"), [2976828208, 2914239603]),
        ((7, "é", "a\x1fsb"), [157262084, 3900559178]),
        ((-1, "x", 2**70), [3094695596, 2939054325]),
    ],
)
def test_frozen_values(names, expected):
    """A change here changes every run that was ever recorded."""
    data = keys.key_data(*names)
    assert data.dtype == np.uint32 and data.tolist() == expected


def test_frozen_host_generator():
    assert keys.rng(0, "order", 3).integers(0, 1000, 5).tolist() == [506, 403, 483, 733, 652]


@given(NAMES, NAMES)
@example(("a\x1fsb",), ("a", "b"))
@example(("1",), (1,))
@example(("ab",), ("a", "b"))
@example(("1:i1",), ("", 1))
@example(("s1:a",), ("a",))
@example((), ("",))
def test_different_names_give_different_keys(first, second):
    same = [(type(name), name) for name in first] == [(type(name), name) for name in second]
    assert np.array_equal(keys.key_data(0, "p", *first), keys.key_data(0, "p", *second)) == same


def test_seed_purpose_and_names_do_not_run_into_one_another():
    lists = [
        (1, "a", "b"),
        (1, "ab"),
        (1, "", "ab"),
        (11, "a", "b"),
        (1, "b", "a"),
        (1, "a", "b", ""),
    ]
    assert len({tuple(keys.key_data(*names).tolist()) for names in lists}) == len(lists)


def test_integers_of_any_type_count_by_value():
    for kind in (np.int32, np.int64, np.uint32, np.uint8):
        np.testing.assert_array_equal(keys.key_data(0, "p", kind(5)), keys.key_data(0, "p", 5))


def test_text_that_is_not_valid_utf8_has_a_key():
    assert not np.array_equal(keys.key_data(0, "p", "\udc80"), keys.key_data(0, "p", "\udc81"))


def test_key_is_the_typed_form_of_key_data():
    np.testing.assert_array_equal(
        jax.random.key_data(keys.key(0, "init")), keys.key_data(0, "init")
    )
