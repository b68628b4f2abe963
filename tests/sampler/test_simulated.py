"""The simulated schedule, by numbers counted by hand."""

import numpy as np
import pytest

from g2d_jax.sampler.simulated import by_longest, chunks, decoded, lengths, over_layers


def live(earlier, _):
    return earlier + 1


def test_lengths_have_their_mean_and_are_cut():
    drawn = lengths(4096, 600, 2048)
    assert drawn.mean() == pytest.approx(600, abs=0.1)
    assert drawn.min() >= 16 and drawn.max() == 2048
    assert (drawn == lengths(4096, 600, 2048)).all()
    assert lengths(100, 8, 8).mean() == 8


def test_rows_are_given_to_the_next_samples_between_chunks():
    """Three samples of 3, 5 and 2 tokens in two rows, chunks of two steps; prompts of 10, 20 and
    30."""
    steps = [*chunks(np.array([10, 20, 30]), np.array([3, 5, 2]), rows=2, chunk=2)]
    expected = [[[10, 20], [11, 21]], [[12, 22], [-1, 23]], [[30, 24], [31, -1]]]
    assert [step.tolist() for step in steps] == expected


def test_a_call_by_its_averages():
    """Rows of 11, 12, 13, none, 31 and 32 columns, and of 21 to 25 and none."""
    prompts_alike = decoded(10, np.array([3, 5, 2]), 2, 2, 64, live)
    columns = [11, 12, 13, 0, 11, 12, 11, 12, 13, 14, 15, 0]
    assert prompts_alike == (6, pytest.approx(np.mean(columns)), pytest.approx(np.mean(columns)))


@pytest.mark.parametrize(("samples", "steps", "share"), [(8, 40, 1.0), (9, 60, 0.75), (12, 60, 1)])
def test_responses_that_are_all_as_long_come_in_waves(samples, steps, share):
    """Of 20 tokens in four rows, after prompts of 10: 20.5 columns on average."""
    call = decoded(10, np.full(samples, 20), 4, 16, 64, live)
    assert call == (steps, pytest.approx(20.5 * share), pytest.approx(20.5 * share))


def test_without_a_kernel_all_rows_read_what_the_longest_needs():
    earlier = np.array([[9, 300], [-1, 301]], np.int32)
    columns = by_longest(earlier, np.array([[300], [301]]), 1024)
    assert columns.tolist() == [[512, 512], [512, 512]]


def test_layers_with_a_window_read_no_more_than_it():
    earlier = np.array([[9, 99, -1]], np.int32)
    assert over_layers(live, ())(earlier, None).tolist() == [[10, 100, 0]]
    read = over_layers(live, (32, 32, 32, 1 << 30))(earlier, None)
    assert read.tolist() == [[10, (3 * 32 + 100) / 4, 0]]
