import subprocess
import sys

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from g2d_jax.data.order import Mixture, Order, draw

COUNTS = st.sampled_from([1, 7, 60, 1000])  # grain takes longer for small ones
SEEDS = st.integers(-(2**70), 2**70)


@given(COUNTS, SEEDS)
@examples(10)
def test_every_epoch_is_a_permutation(count, seed):
    for epoch in (0, 1, 5):
        draws = draw(Order(count, seed), epoch * count, count)
        assert sorted(index for index, _ in draws) == list(range(count))
        assert {visit for _, visit in draws} == {epoch}


@given(COUNTS, SEEDS, st.lists(st.integers(0, 15), max_size=4), st.integers(1, 8))
@examples(10)
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
    assert [index for index, _ in draw(Order(8, 0), 0, 16)] == [
        3,
        0,
        4,
        2,
        7,
        5,
        6,
        1,
        3,
        7,
        4,
        0,
        2,
        1,
        5,
        6,
    ]


def test_epochs_and_neighbouring_seeds_differ():
    epochs = {
        (seed, epoch): draw(Order(50, seed), 50 * epoch, 50)
        for seed in range(3)
        for epoch in range(3)
    }
    assert len({tuple(index for index, _ in draws) for draws in epochs.values()}) == 9


def tasks(mixture, start, count):
    """The task of each of so many positions."""
    bounds = [sum(mixture.counts[: i + 1]) for i in range(len(mixture.counts))]
    return [sum(index >= bound for bound in bounds) for index, _ in draw(mixture, start, count)]


@pytest.mark.parametrize(
    ("weights", "schedule"),
    [
        ((1, 1), [0, 1, 0, 1, 0, 1, 0, 1, 0, 1]),
        ((0.1, 0.9), [1, 1, 1, 1, 0, 1, 1, 1, 1, 1]),
        ((2, 1), [0, 1, 0, 0, 1, 0, 0, 1, 0, 0]),
        ((0, 3), [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ((2, 0, 1), [0, 2, 0, 0, 2, 0, 0, 2, 0, 0]),
        ((5, 3, 2), [0, 1, 0, 2, 0, 1, 0, 2, 0, 1]),
    ],
)
def test_the_schedule_of_a_mixture_is_fixed(weights, schedule):
    assert tasks(Mixture([60] * len(weights), weights, 0), 0, 10) == schedule


@given(
    st.lists(st.sampled_from([0, 0.1, 1 / 3, 0.7, 1, 2, 12.5]), min_size=1, max_size=4).filter(any),
    st.integers(0, 10**7),
    st.integers(1, 40),
)
@examples(25)
def test_every_window_of_a_mixture_has_the_shares(weights, start, size):
    mixture, drawn = Mixture([60] * len(weights), weights, 5), sum(map(bool, weights))
    drawn_tasks = tasks(mixture, start, size)
    for number, weight in enumerate(weights):
        off = abs(drawn_tasks.count(number) - size * weight / sum(weights))
        assert off <= max(drawn - 1, 0) + 1e-6
        assert weight or number not in drawn_tasks


@given(COUNTS, SEEDS, st.integers(0, 10**6))
@examples(8)
def test_a_mixture_of_one_task_is_its_order(count, seed, start):
    assert draw(Mixture([count], [0.3], seed), start, 10) == draw(Order(count, seed), start, 10)
    assert draw(Mixture([count, 0], [2.0, 0.0], seed), start, 10) == draw(
        Order(count, seed), start, 10
    )


def test_every_task_of_a_mixture_runs_through_its_own_epochs():
    mixture = Mixture((6, 3), (2, 1), 4)
    assert (mixture.count, mixture.seed) == (9, 4)
    drawn = draw(mixture, 0, 36)
    first, second = (
        [(i, visit) for i, visit in drawn if (i >= 6) == late] for late in (False, True)
    )
    assert first == draw(Order(6, 4), 0, 24)  # as without the second task
    for epoch in range(4):
        assert sorted(second[3 * epoch : 3 * epoch + 3]) == [(6, epoch), (7, epoch), (8, epoch)]
    alike = draw(Mixture((50, 50), (1, 1), 4), 0, 100)
    assert [i for i, _ in alike[0::2]] != [i - 50 for i, _ in alike[1::2]]


def test_far_positions_of_a_mixture_cost_nothing():
    index, visit = Order(7_473, 1)[10**12]
    assert 0 <= index < 7_473 and visit == 10**12 // 7_473
    index, visit = Mixture((7_473, 100), (1, 1), 1)[10**12 + 1]
    assert 7_473 <= index < 7_573 and visit == 10**12 // 200


def test_an_order_of_nothing_cannot_be():
    with pytest.raises(ValueError, match="empty"):
        draw(Order(0, 0), 0, 1)


def test_importing_the_loader_does_not_import_grain():
    code = (
        "import sys, g2d_jax.data.order; sys.exit('grain' in sys.modules or 'jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
