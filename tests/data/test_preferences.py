"""The pair rule."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from g2d_jax.data.preferences import random_pairs, to_preference
from g2d_jax.records import Rollout, Score, ScoredRollout, Verdict

NAN = float("nan")
REWARDS = st.lists(st.sampled_from([0.0, 1.0, NAN]), max_size=9).map(np.array)


def pairs(rewards, limit=100, problem="p", visit=0, seed=0):
    return random_pairs(seed, problem, visit, np.asarray(rewards, float), limit)


def test_literal():
    """Frozen: the draw is part of what a recorded data set means."""
    assert pairs([1, 0, NAN, 1, 0, 0], limit=4) == [(3, 5), (0, 1), (3, 4), (0, 5)]


@given(REWARDS, st.integers(0, 25), st.integers(0, 5))
def test_every_pair_is_a_correct_with_an_incorrect_and_occurs_once(rewards, limit, visit):
    right, wrong = np.flatnonzero(rewards == 1), np.flatnonzero(rewards == 0)
    found = pairs(rewards, limit, visit=visit)
    assert len(set(found)) == len(found) == min(limit, len(right) * len(wrong))
    assert {c for c, _ in found} <= set(right) and {r for _, r in found} <= set(wrong)
    if limit >= 25:
        assert set(found) == {(int(c), int(r)) for c in right for r in wrong}


@given(REWARDS, st.integers(0, 25))
def test_every_response_of_a_side_is_used_once_before_any_is_used_twice(rewards, limit):
    found = pairs(rewards, limit)
    for side, members in ((0, np.flatnonzero(rewards == 1)), (1, np.flatnonzero(rewards == 0))):
        used = [sum(pair[side] == member for pair in found) for member in members]
        assert not used or max(used) - min(used) <= 1


@pytest.mark.parametrize("rewards", [[], [1], [1, 1, 1], [0, 0], [NAN, NAN], [1, NAN], [NAN, 0, 0, NAN]])
def test_no_pairs_without_both_kinds(rewards):
    assert pairs(rewards) == []


def test_limit_zero():
    assert pairs([1, 0], limit=0) == []


def test_drawn_by_seed_problem_and_visit_alone():
    rewards = [1, 0, 1, 0, 1, 0, 1, 0]
    first = pairs(rewards, 4)
    pairs([0, 1], problem="another")
    assert pairs(rewards, 4) == first
    others = [pairs(rewards, 4, problem="q"), pairs(rewards, 4, visit=1), pairs(rewards, 4, seed=1)]
    assert all(other != first for other in others)


def test_a_smaller_limit_takes_the_first_pairs():
    rewards = [1, 0, 1, 0, 0]
    assert pairs(rewards, 2) == pairs(rewards, 6)[:2]


def test_every_pair_is_equally_likely():
    counts = {}
    for visit in range(1200):
        (pair,) = pairs([1, 0, 1, 0, 0], 1, visit=visit)
        counts[pair] = counts.get(pair, 0) + 1
    assert len(counts) == 6
    assert max(abs(count - 200) for count in counts.values()) < 5 * np.sqrt(200 * 5 / 6)


def test_the_record():
    def scored(sample, text, ids, reward):
        rollout = Rollout(
            "p", 3, sample, np.array([1, 2]), np.array(ids), np.zeros(len(ids)), np.zeros(len(ids)), "stop"
        )
        return ScoredRollout(rollout, text, Score(reward, Verdict.CORRECT if reward else Verdict.INCORRECT))

    group = [scored(0, "bad", [5], 0.0), scored(1, "good", [6, 7], 1.0)]
    record = to_preference(({"role": "user", "content": "?"},), group, (1, 0))
    assert (record.problem_id, record.prompt) == ("p", ({"role": "user", "content": "?"},))
    assert (record.chosen, record.rejected, record.chosen_reward, record.rejected_reward) == ("good", "bad", 1.0, 0.0)
    assert record.prompt_ids.tolist() == [1, 2]
    assert (record.chosen_ids.tolist(), record.rejected_ids.tolist()) == ([6, 7], [5])
