import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from g2d_jax.data.loader import Order, draw

COUNTS = st.sampled_from([1, 7, 60, 1000])  # grain takes longer for small ones
SEEDS = st.integers(-(2**70), 2**70)


@given(COUNTS, SEEDS)
@settings(max_examples=10, deadline=None)
def test_every_epoch_is_a_permutation(count, seed):
    for epoch in (0, 1, 5):
        draws = draw(Order(count, seed), epoch * count, count)
        assert sorted(index for index, _ in draws) == list(range(count))
        assert {visit for _, visit in draws} == {epoch}


@given(COUNTS, SEEDS, st.lists(st.integers(0, 15), max_size=4), st.integers(1, 8))
@settings(max_examples=10, deadline=None)
def test_any_division_of_the_work_draws_the_same(count, seed, chunks, processes):
    order = Order(count, seed)
    whole = draw(order, 0, sum(chunks))
    start, pieces = 0, []
    for size in chunks:
        pieces += draw(Order(count, seed), start, size)
        start += size
    assert pieces == whole
    shared = [draw(order, 0, sum(chunks))[process::processes] for process in range(processes)]
    assert sorted(item for part in shared for item in part) == sorted(whole)


def test_the_order_is_fixed():
    """A resumed run must continue the order it began, with whatever version it is resumed."""
    assert [index for index, _ in draw(Order(8, 0), 0, 16)] == [3, 0, 4, 2, 7, 5, 6, 1, 3, 7, 4, 0, 2, 1, 5, 6]


def test_epochs_and_neighbouring_seeds_differ():
    epochs = [
        tuple(index for index, _ in draw(Order(50, seed), 50 * epoch, 50)) for seed in range(3) for epoch in range(3)
    ]
    assert len(set(epochs)) == 9


def test_far_positions_cost_nothing():
    index, visit = Order(7_473, 1)[10**12]
    assert 0 <= index < 7_473 and visit == 10**12 // 7_473


def test_bad_requests():
    with pytest.raises(ValueError, match="empty"):
        Order(0, 0)
    with pytest.raises(ValueError, match="from 0"):
        Order(3, 0)[-1]


def test_importing_the_loader_does_not_import_grain():
    code = "import sys, g2d_jax.data.loader; sys.exit('grain' in sys.modules or 'jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
