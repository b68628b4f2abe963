"""The pair rule, and the choice among pairs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from g2d_jax.data.preferences import best_worst, pairs_of, random_pairs, select_pairs, to_preference
from g2d_jax.records import Rollout, Score, ScoredRollout, Verdict

NAN = float("nan")
SELECTS = st.sampled_from(["all", "random", "uncertain", "confident"])
PROMPTS = st.dictionaries(  # (problem, visit) -> (uncertainty, offered)
    st.tuples(st.text("pq", max_size=2), st.integers(0, 2)),
    st.tuples(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), st.integers(0, 4)),
    max_size=8,
).map(lambda found: [(*name, *values) for name, values in found.items()])
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
    for side, members in ((0, right), (1, wrong)):  # each is used once before any is used twice
        used = [sum(pair[side] == member for pair in found) for member in members]
        assert not used or not found or max(used) - min(used) <= 1


def test_drawn_by_seed_problem_and_visit_alone():
    rewards = [1, 0, 1, 0, 1, 0, 1, 0]
    first = pairs(rewards, 4)
    pairs([0, 1], problem="another")
    assert pairs(rewards, 4) == first
    others = [pairs(rewards, 4, problem="q"), pairs(rewards, 4, visit=1), pairs(rewards, 4, seed=1)]
    assert all(other != first for other in others) and pairs(rewards, 2) == first[:2]


def test_every_pair_is_equally_likely():
    counts = {}
    for visit in range(1200):
        (pair,) = pairs([1, 0, 1, 0, 0], 1, visit=visit)
        counts[pair] = counts.get(pair, 0) + 1
    assert len(counts) == 6
    assert max(abs(count - 200) for count in counts.values()) < 5 * np.sqrt(200 * 5 / 6)


def kept(prompts, select, most, seed=0):
    """{(problem, visit): indices kept}, without prompts of which none is. prompts: (problem, visit,
    score, offered)."""
    found = select_pairs(
        seed, [prompt[:3] for prompt in prompts], [prompt[3] for prompt in prompts], select, most
    )
    return {prompt[:2]: indices for prompt, indices in zip(prompts, found, strict=True) if indices}


FOUR = [("a", 0, 0.5, 2), ("b", 0, 2.0, 3), ("c", 0, 0.1, 1), ("a", 1, 1.0, 4)]


@pytest.mark.parametrize(
    ("select", "most", "expected"),
    [
        ("uncertain", None, [[0, 1], [0, 1, 2], [0], [0, 1, 2, 3]]),
        ("uncertain", 0, [[], [], [], []]),
        ("uncertain", 2, [[], [0, 1], [], []]),
        ("uncertain", 5, [[], [0, 1, 2], [], [0, 1]]),
        ("confident", 2, [[0], [], [0], []]),
        ("confident", 4, [[0, 1], [], [0], [0]]),
        ("random", 4, [[], [0, 2], [0], [2]]),
        ("all", 4, [[], [0, 2], [0], [2]]),
    ],
)
def test_selection_literal(select, most, expected):
    """Frozen, as the pair rule is."""
    assert select_pairs(0, [prompt[:3] for prompt in FOUR], [2, 3, 1, 4], select, most) == expected


def test_equally_uncertain_prompts_come_in_a_random_order_that_the_seed_names():
    prompts = [(name, 0, 1.0, 2) for name in "abcdefgh"]
    firsts = [next(iter(kept(prompts, "uncertain", 2, seed))) for seed in range(20)]
    assert len(set(firsts)) > 3
    assert all(
        kept(prompts, "uncertain", 2, seed) == {first: [0, 1]} for seed, first in enumerate(firsts)
    )
    assert all(
        kept(prompts, "confident", 2, seed) == {first: [0, 1]} for seed, first in enumerate(firsts)
    )


@given(
    PROMPTS,
    SELECTS,
    st.tuples(st.integers(0, 12), st.integers(0, 12)),
    st.randoms(use_true_random=False),
)
def test_as_many_pairs_as_asked_for_by_rank_whatever_the_order(prompts, select, limits, random):
    shuffled = random.sample(prompts, len(prompts))
    fewer, more = kept(prompts, select, min(limits)), kept(shuffled, select, max(limits))
    assert all(set(indices) <= set(more.get(name, ())) for name, indices in fewer.items())
    offered = {prompt[:2]: prompt[3] for prompt in prompts}
    assert sum(map(len, more.values())) == min(max(limits), sum(offered.values()))
    for name, indices in more.items():
        assert indices == sorted(set(indices)) and indices[0] >= 0 and indices[-1] < offered[name]
    sign = {"uncertain": 1, "confident": -1}.get(select, 0)
    taken = [sign * score for *name, score, _ in prompts if tuple(name) in more]
    left = [
        sign * score for *name, score, count in prompts if len(more.get(tuple(name), ())) < count
    ]
    assert not taken or not left or min(taken) >= max(left)


def test_every_pair_is_equally_likely_to_be_kept():
    counts = dict.fromkeys(range(10), 0)
    for seed in range(1000):
        found = select_pairs(seed, [prompt[:3] for prompt in FOUR], [2, 3, 1, 4], "random", 4)
        for pair in [
            start + index for start, some in zip((0, 2, 5, 6), found, strict=True) for index in some
        ]:
            counts[pair] += 1
    assert sum(counts.values()) == 4000
    assert max(abs(count - 400) for count in counts.values()) < 5 * np.sqrt(1000 * 0.4 * 0.6)


def test_what_cannot_be_selected():
    with pytest.raises(
        ValueError, match="problem a has no uncertainty to choose by: select all or random"
    ):
        select_pairs(0, [("a", 0, NAN)], [1], "uncertain", 1)
    assert select_pairs(0, [("a", 0, NAN)], [1], "random", 1) == [[0]]
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        select_pairs(0, [("a", 0, 0.0)], [1], "all", -1)


def test_the_record():
    group = scored((0.0, "incorrect", "bad"), (1.0, "correct", "good"))
    record = to_preference(({"role": "user", "content": "?"},), group, (1, 0))
    assert (record.problem_id, record.prompt) == ("p", ({"role": "user", "content": "?"},))
    assert (record.chosen, record.rejected, record.chosen_reward, record.rejected_reward) == (
        "good",
        "bad",
        1.0,
        0.0,
    )
    assert [
        ids.tolist() for ids in (record.prompt_ids, record.chosen_ids, record.rejected_ids)
    ] == [[0], [1], [0]]
    assert (record.chosen_truncated, record.rejected_truncated) == (False, True)


def test_best_against_worst_literal() -> None:
    rewards = np.array([0.5, np.nan, 2.0, -1.0, 2.0, 0.5])
    assert best_worst(rewards, 1) == [(2, 3)]  # of equal ones the first
    assert best_worst(rewards, 9) == [(2, 3), (4, 0)]
    assert best_worst(np.array([1.0, 1.0, np.nan]), 3) == []
    assert best_worst(np.array([np.nan, 3.0]), 1) == []


@given(
    st.lists(st.one_of(st.just(NAN), st.integers(-3, 3).map(float)), max_size=9), st.integers(1, 5)
)
def test_best_against_worst_uses_no_response_twice(values: list[float], limit: int) -> None:
    rewards = np.array(values)
    pairs = best_worst(rewards, limit)
    used = [i for pair in pairs for i in pair]
    assert len(pairs) <= limit and len(set(used)) == len(used)
    assert all(rewards[chosen] > rewards[rejected] for chosen, rejected in pairs)
    known = rewards[~np.isnan(rewards)]
    assert bool(pairs) == (len(set(known)) > 1)
    if pairs:
        assert (rewards[pairs[0][0]], rewards[pairs[0][1]]) == (known.max(), known.min())


def test_the_pair_rule_goes_by_what_the_reward_knows() -> None:
    group = scored((0.2, "scored", "a"), (0.9, "scored", "b"), (None, "unscorable", "c"))
    assert pairs_of(0, "p", 0, group, 4, verifiable=False) == [(1, 0)]
    assert pairs_of(0, "p", 0, group, 4, verifiable=True) == []


@pytest.mark.parametrize("verifiable", [True, False])
def test_a_timeout_is_rejected_like_a_wrong_answer_and_never_chosen(verifiable: bool) -> None:
    late = (0.0, "timeout", "late")
    right = (1.0, "correct", "right")
    wrong = (0.0, "incorrect", "wrong")
    assert pairs_of(0, "p", 0, scored(late, right), 4, verifiable=verifiable) == [(1, 0)]
    assert pairs_of(0, "p", 0, scored(late, wrong), 4, verifiable=verifiable) == []
    lost = (None, "unscorable", "lost")  # its worker was ended by the machine
    assert pairs_of(0, "p", 0, scored(lost, right), 4, verifiable=verifiable) == []


@pytest.mark.parametrize("verifiable", [True, False])
def test_responses_of_equal_text_make_one_pair(verifiable: bool) -> None:
    """Their tokens differ: one text in several tokenisations."""
    right, wrong = (1.0, "correct", "right"), (0.0, "incorrect", "wrong")
    assert (
        len(pairs_of(0, "p", 0, scored(*[right] * 4, *[wrong] * 4), 4, verifiable=verifiable)) == 1
    )
    other = (0.0, "incorrect", "other")
    group = scored(right, wrong, right, other, wrong)
    texts = [
        (group[i].text, group[j].text) for i, j in pairs_of(0, "p", 0, group, 4, verifiable=True)
    ]
    assert sorted(texts) == [("right", "other"), ("right", "wrong")]


def test_what_is_called_right_and_wrong_is_in_no_pair() -> None:
    disputed = (1.0, "correct", "same"), (0.0, "incorrect", "same")
    assert pairs_of(0, "p", 0, scored(*disputed), 4, verifiable=True) == []
    assert pairs_of(0, "p", 0, scored(*disputed), 4, verifiable=False) == []
    group = scored(*disputed, (0.0, "incorrect", "a"), (1.0, "correct", "b"))
    assert pairs_of(0, "p", 0, group, 4, verifiable=True) == [(3, 2)]


def test_a_frequent_response_is_chosen_as_often_as_it_was_drawn() -> None:
    group = scored(
        *[(1.0, "correct", "often")] * 3, (1.0, "correct", "seldom"), (0.0, "incorrect", "wrong")
    )
    firsts = [
        group[pairs_of(0, "p", visit, group, 1, verifiable=True)[0][0]].text for visit in range(400)
    ]
    assert abs(firsts.count("often") - 300) < 5 * np.sqrt(400 * 3 / 16)


def scored(*rows: tuple[float | None, str, str]) -> list[ScoredRollout]:
    """Responses of (reward, verdict, text), each with token ids of its own; wrong ones are cut."""
    nats, ids = np.zeros(1, np.float32), np.zeros(1, np.int32)
    return [
        ScoredRollout(
            Rollout("p", 0, sample, ids, ids + sample, nats, nats, "stop" if reward else "length"),
            text,
            Score(reward, Verdict(verdict)),
        )
        for sample, (reward, verdict, text) in enumerate(rows)
    ]
