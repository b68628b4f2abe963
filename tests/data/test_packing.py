"""Packing: every response's tokens, positions and sources, whatever the lengths."""

from __future__ import annotations

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from g2d_jax.data.packing import Group, Packed, Response, computed_columns, pack
from g2d_jax.records import SEGMENT_STRIDE

LENGTH = 24


def make(prompts: list[tuple[int, list[int]]], keep_together: bool = False) -> list[Group]:
    """Groups of a prompt's and its responses' lengths; no token occurs twice, and the weight is its
    number."""
    counter = iter(range(1, 100_000))

    def ids(length: int) -> np.ndarray:
        return np.array([next(counter) for _ in range(length)], np.int32)

    def response(length: int) -> Response:
        tokens = ids(length)
        return Response(tokens, {"weight": tokens / 2, "same": 3.0}, {"score": float(tokens.sum())})

    return [
        Group(ids(prompt), [response(length) for length in lengths], keep_together)
        for prompt, lengths in prompts
    ]


GROUPS = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(1, 15), max_size=7)), max_size=9
).map(make)
PAIRS = st.lists(
    st.tuples(st.integers(1, 8), st.lists(st.integers(1, 8), min_size=2, max_size=2)), max_size=9
).map(lambda prompts: make(prompts, keep_together=True))


def check(groups: list[Group], packed: Packed, places: int) -> None:
    """Every promise of Packed, response by response."""
    arrays = {name: x.reshape(-1, x.shape[-1]) for name, x in packed.arrays.items()}
    seen = np.zeros_like(arrays["tokens"], bool)
    for group, where in zip(groups, packed.places, strict=True):
        size = len(group.prompt_ids)
        for response, (row, column, length) in zip(group.responses, where, strict=True):
            span = slice(column, column + length)
            sources = arrays["logit_index"][row, column : column + length]
            last = sources[0]
            prompt = slice(last - size + 1, last + 1)
            np.testing.assert_array_equal(arrays["tokens"][row, span], response.token_ids)
            np.testing.assert_array_equal(arrays["tokens"][row, prompt], group.prompt_ids)
            np.testing.assert_array_equal(arrays["positions"][row, prompt], range(size))
            np.testing.assert_array_equal(
                arrays["positions"][row, span], range(size, size + length)
            )
            np.testing.assert_array_equal(sources[1:], range(column, column + length - 1))
            segment = np.unique(arrays["segment_ids"][row, span])
            of_prompt = arrays["segment_ids"][row, prompt]
            assert segment.size == 1 and segment[0] % SEGMENT_STRIDE > 0
            np.testing.assert_array_equal(of_prompt, segment[0] // SEGMENT_STRIDE * SEGMENT_STRIDE)
            assert last < column and segment[0] >= SEGMENT_STRIDE
            np.testing.assert_array_equal(
                arrays["weight"][row, span], response.token_ids.astype(np.float32) / 2
            )
            np.testing.assert_array_equal(arrays["same"][row, span], 3.0)
            (place,) = np.unique(arrays["response_index"][row, span])
            assert 0 <= place < places and arrays["score"][row, place] == response.token_ids.sum()
            assert not seen[row, span].any()
            seen[row, span] = seen[row, prompt] = True
    for group, values in zip(groups, packed.unpack(packed.arrays["tokens"]), strict=True):
        for response, value in zip(group.responses, values, strict=True):
            np.testing.assert_array_equal(value, response.token_ids)
    outside = ~seen
    assert packed.used == seen.sum()
    # the token at position p reads p + 1
    assert packed.attended == (arrays["positions"][seen] + 1).sum()
    assert not arrays["tokens"][outside].any() and not arrays["segment_ids"][outside].any()
    assert (arrays["response_index"] >= 0).sum() == sum(
        len(r.token_ids) for g in groups for r in g.responses
    )


@examples(60)
@given(GROUPS, st.integers(1, 6), st.sampled_from([1, 2, 4]), st.sampled_from([2, 4, 16]))
def test_every_response_is_where_it_is_said_to_be(groups, microbatch_rows, multiple, places):
    packed = pack(
        groups,
        row_length=LENGTH,
        microbatch_rows=microbatch_rows,
        rows_multiple=multiple,
        max_responses_per_row=places,
    )
    if any(group.responses for group in groups):
        check(groups, packed, places)
    count, rows, length = packed.arrays["tokens"].shape
    assert rows % multiple == 0 and rows <= max(microbatch_rows, multiple) and length == LENGTH
    assert packed.count == count
    assert packed.count == 1 or packed.arrays["segment_ids"][packed.count - 1].any()


@examples(40)
@given(GROUPS, st.integers(1, 6), st.sampled_from([1, 2, 4]), st.integers(0, 20))
def test_batches_of_no_more_rows_have_one_shape(groups, microbatch_rows, multiple, more):
    """And their rows are those that a batch has by itself."""
    options = {
        "row_length": LENGTH,
        "microbatch_rows": microbatch_rows,
        "rows_multiple": multiple,
        "max_responses_per_row": 4,
    }
    alone = pack(groups, **options)
    most = more + sum(len(group.responses) for group in groups)
    roomy, empty = (pack(some, **options, most_rows=most) for some in (groups, []))
    assert roomy.arrays["tokens"].shape == empty.arrays["tokens"].shape and empty.count == 1
    for name, array in alone.arrays.items():
        filled, whole = (x.reshape(-1, x.shape[-1]) for x in (array, roomy.arrays[name]))
        used = max((place.row + 1 for places in alone.places for place in places), default=0)
        np.testing.assert_array_equal(whole[:used], filled[:used])
    count, rows, _ = roomy.arrays["tokens"].shape
    assert count * rows - most < rows + multiple * count and (roomy.count - 1) * rows < max(used, 1)
    assert not roomy.arrays["segment_ids"][roomy.count :].any()


@examples(40)
@given(PAIRS, st.sampled_from([2, 4, 16]))
def test_pairs_share_a_row_chosen_in_an_even_place(groups, places):
    packed = pack(groups, row_length=LENGTH, microbatch_rows=4, max_responses_per_row=places)
    sequence = packed.arrays["response_index"].reshape(-1, LENGTH)
    for chosen, rejected in packed.places:
        assert chosen.row == rejected.row
        place = sequence[chosen.row, chosen.column]
        assert place % 2 == 0 and sequence[rejected.row, rejected.column] == place + 1
    if groups:
        check(groups, packed, places)


def test_literal_row():
    groups = make([(3, [2, 1]), (2, [2])])
    packed = pack(groups, row_length=12, microbatch_rows=8, max_responses_per_row=4)
    assert packed.count == 1 and packed.used == 10
    rows = {name: x[0, 0].tolist() for name, x in packed.arrays.items()}
    assert rows["tokens"] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 0]
    assert rows["positions"] == [0, 1, 2, 3, 4, 3, 0, 1, 2, 3, 0, 0]
    assert rows["segment_ids"] == [1024, 1024, 1024, 1025, 1025, 1026, 2048, 2048, 2049, 2049, 0, 0]
    assert rows["logit_index"] == [0, 0, 0, 2, 3, 2, 0, 0, 7, 8, 0, 0]
    assert rows["response_index"] == [-1, -1, -1, 0, 0, 1, -1, -1, 2, 2, -1, -1]
    assert rows["weight"] == [0, 0, 0, 2, 2.5, 3, 0, 0, 4.5, 5, 0, 0]
    assert rows["score"] == [9, 6, 19, 0]
    floats = {name for name, x in packed.arrays.items() if x.dtype == np.float32}
    assert floats == {"weight", "same", "score"} and packed.arrays["tokens"].dtype == np.int32
    ids = np.array([5, 6])
    packed = pack(
        [Group(ids, [Response(ids, {"a": 1.0}), Response(ids)])], row_length=8, microbatch_rows=1
    )
    assert packed.arrays["a"][0, 0].tolist() == [0, 0, 1, 1, 0, 0, 0, 0]  # missing values are zero


@pytest.mark.parametrize(("row_length", "multiple"), [(448, 1), (512, 4), (640, 1)])
def test_pairs_of_varying_length_fill_micro_batches(row_length, multiple):
    """64 pairs behind prompts of 64 tokens, responses of 16 to 128."""
    rng = np.random.default_rng(0)
    groups = make(
        [(64, [int(n) for n in rng.integers(16, 129, 2)]) for _ in range(64)], keep_together=True
    )
    for rows, most_rows in ((16_384 // row_length, 1), (max(512 // row_length, 1), 64)):
        packed = pack(
            groups,
            row_length=row_length,
            microbatch_rows=rows,
            rows_multiple=multiple,
            most_rows=most_rows,
        )
        assert packed.used / (packed.count * packed.arrays["tokens"][0].size) > 0.9


@pytest.mark.parametrize("row_length", [64, 100, 130])
def test_computed_columns_are_those_that_pack_fills(row_length):
    rng = np.random.default_rng(0)
    groups = make(
        [(int(rng.integers(1, 20)), [int(n) for n in rng.integers(1, 40, 4)]) for _ in range(30)]
    )
    how = {
        "row_length": row_length,
        "microbatch_rows": 6,
        "rows_multiple": 4,
        "max_responses_per_row": 6,
        "most_rows": 60,
    }
    packed = pack(groups, **how)
    assert computed_columns(groups, **how) == packed.count * packed.arrays["tokens"][0].size


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            make([(10, [15])]),
            "prompt of 10 and a response of 15 tokens do not fit a row of 24: lower the",
        ),
        (
            make([(10, [8, 8])], keep_together=True),
            "prompt of 10 tokens and its 2 responses must share a row of 24 tokens",
        ),
        (make([(1, [1, 1, 1])], keep_together=True), "2 responses: make rows longer"),
        (make([(0, [3])]), "prompt has no tokens"),
    ],
)
def test_errors(groups, message):
    with pytest.raises(ValueError, match=message):
        pack(groups, row_length=LENGTH, microbatch_rows=4, max_responses_per_row=2)


def test_a_row_is_filled_to_its_last_column():
    assert pack(make([(4, [8]), (5, [7])]), row_length=24, microbatch_rows=1).count == 1


def test_responses_beyond_the_segments_of_a_prompt_are_not_taken_for_the_next_one():
    """Where they need not share a row the prompt is repeated; where they have to it is refused."""
    slots = 2 * SEGMENT_STRIDE
    for count in (SEGMENT_STRIDE - 1, SEGMENT_STRIDE):
        prompts = [(2, [1] * count), (2, [1])]
        groups = make(prompts)
        packed = pack(groups, row_length=4096, microbatch_rows=1, max_responses_per_row=slots)
        check(groups, packed, slots)

    whole = make([(2, [1] * (SEGMENT_STRIDE - 1)), (2, [1])], keep_together=True)
    packed = pack(whole, row_length=4096, microbatch_rows=1, max_responses_per_row=slots)
    check(whole, packed, slots)
    beyond = make([(2, [1] * SEGMENT_STRIDE)], keep_together=True)
    with pytest.raises(ValueError, match="at most 1023 responses of a prompt: lower num_generat"):
        pack(beyond, row_length=4096, microbatch_rows=1, max_responses_per_row=slots)
