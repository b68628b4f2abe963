import json
import math

import numpy as np
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from g2d_jax.config import Filter
from g2d_jax.data import curriculum
from g2d_jax.data.curriculum import History
from g2d_jax.data.order import Mixture, Order
from g2d_jax.data.order import draw as plain

NAN = math.nan
ORDER = Order(8, 0)  # 3 0 4 2 7 5 6 1, then 3 7 4 0 2 1 5 6


def history_of(*groups):
    """Of (index, rewards)."""
    history = History()
    for index, rewards in groups:
        update(history, index, rewards)
    return history


def update(history, index, rewards):
    """A group whose rewards are those of a verifier."""
    values = np.array(rewards, float)
    history.update(index, values, values)


def draw(*arguments, drop_solved=0, window=(0.0, 1.0), seed=0):
    low, high = window
    chosen_by = Filter(drop_solved=drop_solved, min_pass_rate=low, max_pass_rate=high)
    return curriculum.draw(*arguments, chosen_by, seed)


def indices(drawn):
    return [index for index, _ in drawn.draws]


def test_a_group_with_one_reward_counts_up_and_any_other_starts_anew():
    history = History()
    states = []
    for rewards in ([0, 0], [0, NAN, 0], [1, 1], [1, 0], [0, 0], [NAN, 0], [NAN, NAN], [0, 0]):
        update(history, 5, rewards)
        seen = history.seen[5]
        states.append((seen.groups, seen.pass_rate, seen.same, seen.times))
    assert states == [
        (1, 0.0, 0.0, 1),
        (2, 0.0, 0.0, 2),
        (3, 0.5, 1.0, 1),
        (4, 0.5, None, 0),
        (5, 0.25, 0.0, 1),
        (6, 0.125, 0.0, 1),  # one scored response cannot differ
        (7, 0.125, 0.0, 1),
        (8, 0.0625, 0.0, 2),
    ]


def test_prompts_retire_until_a_group_differs():
    history = history_of((0, [0, 0]), (4, [1, 1]), (4, [1, 1]), (0, [1, 1]))
    drawn = draw(ORDER, 0, 3, history, drop_solved=2)
    # 0 got two different ones
    assert (indices(drawn), drawn.cursor, drawn.skipped_retired) == (
        [3, 0, 2],
        4,
        1,
    )
    assert indices(draw(ORDER, 0, 3, history, drop_solved=3)) == [3, 0, 4]
    update(history, 4, [1, 0])
    assert indices(draw(ORDER, 0, 3, history, drop_solved=2)) == [3, 0, 4]


def test_share_retired_is_of_all_records():
    history = history_of((0, [0, 0]), (0, [0, 0]), (4, [1, 1]), (5, [1, 0]))
    assert [history.share_retired(Filter(drop_solved=after), 8) for after in range(4)] == [
        0,
        0.25,
        0.125,
        0,
    ]


def test_prompts_outside_the_window():
    history = history_of((3, [0, 0]), (0, [1, 0]), (4, [1, 1]), (2, [1, 1, 1, 0]))
    drawn = draw(ORDER, 0, 4, history, window=(0.25, 0.75))
    assert (indices(drawn), drawn.cursor, drawn.skipped_outside) == ([0, 2, 7, 5], 6, 2)
    assert indices(draw(ORDER, 0, 4, history, window=(0.25, 1.0))) == [0, 4, 2, 7]
    scalar = history_of((3, [-5, -3]), (0, [7, 8]))  # the whole window bounds no scalar reward
    assert indices(draw(ORDER, 0, 2, scalar)) == [3, 0]
    scalar.update(4, np.array([4.0, 7.0]), np.array([NAN, NAN]))
    assert scalar.seen[4].pass_rate is None


def test_prompts_outside_are_drawn_at_the_rate_asked_for_and_by_visit():
    order = Order(1000, 1)
    history = history_of(*((index, [0, 0]) for index in range(0, 1000, 2)))
    drawn = draw(order, 0, 400, history, window=(0.1, 0.9), seed=3)
    easy = [index for index, _ in drawn.draws if index % 2 == 0]
    assert abs(len(easy) / (len(easy) + drawn.skipped_outside) - 0.1) < 0.04
    again = draw(order, 0, 500, history, window=(0.1, 0.9), seed=3)
    assert again.draws[:400] == drawn.draws  # the choice does not depend on how many are asked for
    later = draw(order, 1000, 400, history, window=(0.1, 0.9), seed=3)
    assert {index for index, _ in later.draws if index % 2 == 0} != set(easy)


def test_skipped_prompts_make_up_for_missing_ones():
    groups = [
        (3, [1, 1]),
        (4, [1, 1]),
        (0, [1, 1, 0, 1, 1]),
        (2, [0, 0]),
        (7, [0, 0]),
        (6, [1, 1, 1, 1, 0]),
    ]
    options = {"drop_solved": 1, "window": (0.0, 0.7), "seed": 1}
    drawn = draw(ORDER, 0, 6, history_of(*groups), **options)
    assert (indices(drawn), drawn.cursor) == ([5, 1, 0, 6, 3, 4], 8)
    assert (drawn.skipped_retired, drawn.skipped_outside) == (2, 0)
    drawn = draw(ORDER, 0, 3, history_of(*groups), **options)
    assert (indices(drawn), drawn.skipped_retired, drawn.skipped_outside) == ([5, 1, 0], 4, 1)
    every = history_of(*((index, [0, 0]) for index in range(8)))
    for options in ({"drop_solved": 1}, {}):
        assert draw(ORDER, 3, 20, every, **options).draws == plain(ORDER, 3, 20)


OPTIONS = st.fixed_dictionaries(
    {
        "drop_solved": st.integers(0, 2),
        "window": st.sampled_from([(0.0, 1.0), (0.2, 0.8), (0.5, 0.5)]),
        "seed": st.integers(0, 3),
    }
)
ORDERS = st.sampled_from([Order(1, 0), ORDER, Order(60, 2), Mixture((8, 60), (1, 3), 0)])


def reward(index, step, member):
    """What a response gets: prompts of every kind, some of which change."""
    return float(
        (index % 4 >= 2 and member % 2) or (index % 4 == 1) or (index % 4 == 3 and step > 4)
    )


def run(order, history, cursor, steps, wanted, options):
    """(index, visit) of every step of a stage, and the cursor after it."""
    draws = []
    for step in steps:
        drawn = draw(order, cursor, wanted, history, **options)
        assert (
            drawn.cursor - cursor
            == len(drawn.draws) + drawn.skipped_retired + drawn.skipped_outside
        )
        cursor = drawn.cursor
        draws.append(drawn.draws)
        for index, _ in drawn.draws:
            update(history, index, [reward(index, step, member) for member in range(3)])
    return draws, cursor


@given(ORDERS, OPTIONS, st.integers(0, 9), st.integers(0, 8))
@examples(40)
def test_a_stage_draws_what_it_wants_never_twice_and_goes_on_alike(order, options, wanted, stop):
    history = History()
    first, cursor = run(order, history, 0, range(stop), wanted, options)
    saved = json.loads(json.dumps(history.state(), allow_nan=False))
    rest, end = run(order, history, cursor, range(stop, 8), wanted, options)
    resumed = run(order, History.from_state(saved), cursor, range(stop, 8), wanted, options)
    assert resumed == (rest, end)
    everything = [pair for step in first + rest for pair in step]
    assert len(everything) == len(set(everything)) == 8 * wanted
