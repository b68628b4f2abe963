"""How many rows and ways memory allows, by numbers counted by hand."""

import pytest

from g2d_jax.models import shapes
from g2d_jax.models.decoder import count_params
from g2d_jax.models.flops import matmul_params
from g2d_jax.sampler.capacity import UNKNOWN, Split, best_ways, bytes_saved, kv_bytes

SEVEN = shapes.shape("Qwen/Qwen2.5-7B")
GIB = 2**30


def test_a_token_of_the_cache():
    assert kv_bytes(SEVEN, 2) == 57_344  # 28 layers, 4 key heads of 128, keys and values, bfloat16


def test_rows_fill_what_weights_and_training_leave():
    memory, beside, columns = 28 * GIB, 8 * GIB, 3072
    rows = Split(SEVEN, 2, 4, 8, columns).rows_that_fit(memory, beside)
    taken = beside + 2 * count_params(SEVEN) / 4 + rows * columns * 57_344 / 8
    assert rows % 16 == 0 and 0.9 * memory < taken <= 0.95 * memory
    assert Split(SEVEN, 2, 4, 8, columns).rows_that_fit(memory, 0) > rows
    assert Split(SEVEN, 2, 1, 8, columns).rows_that_fit(15 * GIB, beside) == 0
    assert Split(SEVEN, 2, 1, 1, columns).rows_that_fit(None, beside) == UNKNOWN


def test_codes_leave_room_for_rows():
    """A byte for each number of the seven matrices of 28 layers and four for each output, in place
    of two."""
    outputs = 3584 + 512 + 512 + 3584 + 18_944 + 18_944 + 3584
    numbers = 3584 * (3584 + 512 + 512 + 3584 + 3 * 18_944)
    coded = SEVEN.with_quantisation("int8")
    assert bytes_saved(SEVEN, 2) == 0 and bytes_saved(coded, 2) == 28 * (numbers - 4 * outputs)
    rows, more = (
        Split(shape, 2, 4, 8, 3072).rows_that_fit(28 * GIB, 0) for shape in (SEVEN, coded)
    )
    row = 3072 * 57_344 / 8  # bytes; rows come by sixteens
    assert (more - rows) * row == pytest.approx(bytes_saved(coded, 2) / 4, abs=15 * row)


@pytest.mark.parametrize(
    ("gib", "beside", "samples", "ways"),
    [
        (1000, 0, 100_000, 1),
        (88, 14, 16_384, 2),
        (88, 14, 5_120, 4),  # sync_every = 10: fewer rows, for which reading the weights is dearer
        (88, 14, 512, 8),
        (28, 12, 16_384, 4),
        (14, 6, 16_384, 8),
    ],
)
def test_weights_are_split_where_it_is_worth_the_sending(
    gib: int, beside: int, samples: int, ways: int
):
    assert best_ways(Split(SEVEN, 2, 1, 8, 3072), 2048, gib * GIB, beside * GIB, samples, 8) == ways


def test_few_samples_are_not_given_room_they_cannot_use():
    """With 8 rows the weights are all that is read: the more ways the better; a cache's room does
    not matter."""
    assert best_ways(Split(SEVEN, 2, 1, 8, 3072), 2048, 90 * GIB, 0, 8, 8) == 8
    assert 2 * matmul_params(SEVEN) > 100 * 8 * 1536 * 57_344 / 8
    assert best_ways(Split(SEVEN, 2, 1, 8, 3072), 2048, None, 0, 8, 8) == 1


@pytest.mark.parametrize(("samples", "rows"), [(250, 256), (512, 256), (5120, 800), (16_384, 1600)])
def test_a_call_has_as_many_rows_as_draw_it_soonest(samples: int, rows: int):
    """On a v5p-16, 8 devices, weights over two of them, memory for 3,200 rows of 3,072 columns:
    2,048 are responses.

    By hand: a step reads for 2.6 ms of weights, at 2,765 GB/s, and for 0.0040 a row. 5,120 samples
    with 3,200, 1,600, 800 and 400 rows take 2,355, 3,174, 4,813 and 8,090 steps, so 36, 28, 28 and
    34 s, without what is sent.
    """
    assert Split(SEVEN, 2, 2, 8, 3072).quickest_rows(2048, 3200, samples) == rows


@pytest.mark.parametrize(
    ("devices", "most", "ways"), [(16, 16, 16), (16, 8, 8), (64, 8, 8), (16, 4, 4), (8, 1, 1)]
)
def test_a_copy_of_the_weights_lies_within_a_host_or_slice(devices: int, most: int, ways: int):
    """With few samples by formula all devices would share one."""
    assert best_ways(Split(SEVEN, 2, 1, devices, 3072), 2048, 90 * GIB, 0, 8, most) == ways


def test_weights_that_fill_a_host_go_over_several():
    """14.2 GiB of weights on hosts of one device of 10 GiB; those of two leave room."""
    assert best_ways(Split(SEVEN, 2, 1, 4, 3072), 2048, 10 * GIB, 0, 8, 1) > 1
    assert best_ways(Split(SEVEN, 2, 1, 4, 3072), 2048, 10 * GIB, 0, 8, 2) == 2
