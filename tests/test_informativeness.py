"""Informativeness by hand, against brute force, and under changes that must not matter."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from g2d_jax.records import Rollout, Score, ScoredRollout, Verdict
from g2d_jax.study.informativeness import (
    auroc,
    expected_calibration_error,
    margin_summary,
    pair_summary,
    prompts,
    prompts_of_pairs,
    summary,
)

NAN = float("nan")
REWARDS = {
    Verdict.CORRECT: 1.0,
    Verdict.INCORRECT: 0.0,
    Verdict.NO_ANSWER: 0.0,
    Verdict.TIMEOUT: 0.0,
}


def response(
    verdict,
    logprobs,
    entropies,
    *,
    answer="2",
    sample=0,
    problem="aa",
    reward=NAN,
    stop_reason="stop",
):
    """reward NaN: the verifier's own for this verdict."""
    tokens = np.arange(len(logprobs), dtype=np.int32)
    nats = [np.array(values, np.float32) for values in (logprobs, entropies)]
    rollout = Rollout(problem, 0, sample, np.array([1], np.int32), tokens, *nats, stop_reason)
    value = REWARDS.get(verdict) if reward is not None and math.isnan(reward) else reward
    return ScoredRollout(rollout, "text", Score(value, verdict, answer), "warmup@20")


def example():
    """A mixed prompt with a timeout, and one that no answer of could be scored."""
    mixed = [
        response(Verdict.CORRECT, [-1.0, -1.0], [0.5, 1.5]),
        response(
            Verdict.INCORRECT, [-2.0, -2.0, -2.0, -2.0], [2.0] * 4, answer="3", stop_reason="length"
        ),
        response(Verdict.NO_ANSWER, [-4.0, -4.0], [1.0, 1.0], answer=None),
        response(Verdict.TIMEOUT, [0.0], [0.0], answer="3^{9^9}"),
    ]
    unscored = [
        response(Verdict.UNSCORABLE, [-0.5, -1.5], [3.0, 3.0], problem="bb") for _ in range(2)
    ]
    return [mixed, unscored]


def test_prompts_by_hand():
    got = prompts(example())
    assert got["problem_id"] == ["aa", "bb"] and got["policy"] == ["warmup@20"] * 2
    expected = {
        "visit": [0, 0],
        "samples": [4, 2],
        "scored": [4, 0],
        "pass_rate": [1 / 4, NAN],  # a timeout is wrong
        "reward_mean": [1 / 4, NAN],
        "reward_variance": [3 / 16, NAN],
        "mixed": [True, False],
        "entropy": [(2 + 8 + 2) / 9, 3],  # over tokens, the timeout's too
        "distinct_answers": [4, 1],  # 2, 3, 3^{9^9} and none
        "mean_length": [9 / 4, 2],
        "mean_length_correct": [2, NAN],
        "mean_length_incorrect": [7 / 3, NAN],
        "confidence": [(math.exp(-1) + math.exp(-2) + math.exp(-4) + 1) / 4, math.exp(-1)],
        "logprob_gap": [-2 - (-8 - 8 + 0) / 3, NAN],
    }
    assert set(got) == {*expected, "problem_id", "policy"}
    for name, values in expected.items():
        np.testing.assert_allclose(got[name], values, rtol=1e-12, err_msg=name)
    kinds = {name: got[name].dtype.kind for name in expected}
    assert {name for name, kind in kinds.items() if kind == "i"} == {
        "visit",
        "samples",
        "scored",
        "distinct_answers",
    }
    assert kinds["mixed"] == "b"


def test_summary_by_hand():
    got = summary(example())
    # the first of a right answer; four bins
    confidences = [
        math.exp(-1),
        math.exp(-2),
        math.exp(-4),
        1,
    ]
    expected = {
        "prompts": 2,
        "responses": 6,
        "scored": 4,
        "pass_rate": 1 / 4,
        "reward_variance": 3 / 16,
    }
    expected |= {
        "frac_mixed": 1 / 2,
        "entropy": (12 + 12) / 13,
        "distinct_answers": 5 / 2,
        "mean_length": 13 / 6,
    }
    expected |= {"mean_length_correct": 2, "mean_length_incorrect": 7 / 3, "frac_truncated": 1 / 6}
    expected |= {"confidence": (sum(confidences) / 4 + math.exp(-1)) / 2, "logprob_gap": 10 / 3}
    expected |= {"ece": (1 - confidences[0] + sum(confidences[1:])) / 4, "auroc": 2 / 3}
    assert got == pytest.approx(expected)


def test_a_scalar_reward_is_neither_right_nor_wrong():
    rows = [response(Verdict.SCORED, [-1.0], [1.0], reward=reward) for reward in (1.0, 3.0)]
    found = summary([rows])
    assert (found["scored"], found["reward_variance"], found["frac_mixed"]) == (2, 1, 1)
    assert all(
        math.isnan(found[name]) for name in ("pass_rate", "ece", "auroc", "mean_length_incorrect")
    )
    assert summary([[rows[0], rows[0]]])["frac_mixed"] == 0


def test_what_is_not_defined_is_nan():
    assert {name: len(values) for name, values in prompts([]).items()} == dict.fromkeys(
        prompts(example()), 0
    )
    nothing = summary([])
    assert {name for name, value in nothing.items() if value == 0} == {
        "prompts",
        "responses",
        "scored",
    }
    assert sum(map(math.isnan, nothing.values())) == len(nothing) - 3
    right = summary([[response(Verdict.CORRECT, [-1.0], [1.0])]])
    assert (right["pass_rate"], right["reward_variance"], right["frac_mixed"]) == (1, 0, 0)
    assert all(
        math.isnan(right[name]) for name in ("auroc", "logprob_gap", "mean_length_incorrect")
    )


def test_rewards_that_are_not_numbers_and_responses_without_tokens():
    group = [
        response(Verdict.CORRECT, [-1.0], [1.0]),
        response(Verdict.CORRECT, [-1.0], [1.0], reward=None),
        response(Verdict.INCORRECT, [-1.0], [1.0], reward=-math.inf),
        response(Verdict.INCORRECT, [], []),
    ]
    got, total = prompts([group]), summary([group])
    assert (got["scored"][0], got["pass_rate"][0], got["reward_variance"][0]) == (2, 0.5, 0.25)
    assert got["confidence"][0] == pytest.approx(math.exp(-1))  # of those with tokens
    assert total["ece"] == pytest.approx(1 - math.exp(-1)) and math.isnan(total["auroc"])


def test_rewards_and_log_probs_at_their_edges():
    partial = prompts(
        [[response(Verdict.INCORRECT, [-1.0], [1.0], reward=reward) for reward in (0.1, 0.3)]]
    )
    assert partial["reward_variance"][0] == pytest.approx(0.01) and not partial["mixed"][0]
    # by rounding
    certain = [
        response(Verdict.CORRECT, [1e-7], [0.0]),
        response(Verdict.INCORRECT, [-1e-7], [0.0]),
    ]
    assert prompts([certain])["confidence"][0] == pytest.approx(1)
    assert summary([certain])["ece"] == pytest.approx(0.5)
    late = prompts(
        [[response(Verdict.CORRECT, [-1.0], [1.0]), response(Verdict.TIMEOUT, [-9.0], [1.0])]]
    )
    assert (late["pass_rate"][0], late["reward_mean"][0]) == (0.5, 0.5)  # a timeout is wrong,
    assert late["mixed"][0]  # and is rejected in a pair


@given(
    st.lists(st.sampled_from(Verdict), min_size=1, max_size=8), st.randoms(use_true_random=False)
)
def test_binary_variance_order_and_what_is_not_scored(verdicts, random):
    group = [
        response(verdict, [-i - 0.5], [0.5 * i], answer=str(i % 3))
        for i, verdict in enumerate(verdicts)
    ]
    got = prompts([group])
    rate = got["pass_rate"][0]
    assert got["reward_variance"][0] == pytest.approx(rate * (1 - rate), nan_ok=True)
    assert bool(got["mixed"][0]) == (
        Verdict.CORRECT in verdicts and bool({"incorrect", "no_answer", "timeout"} & set(verdicts))
    )
    assert math.isnan(got["logprob_gap"][0]) == (not got["reward_variance"][0] > 0)
    random.shuffle(group)
    for name, values in prompts([group]).items():
        assert values[0] == got[name][0] or values[0] == pytest.approx(got[name][0], nan_ok=True), (
            name
        )
    more = prompts([[*group, response(Verdict.UNSCORABLE, [-9.0], [1.0])]])
    for name in ("scored", "pass_rate", "reward_mean", "reward_variance", "mixed", "logprob_gap"):
        assert more[name][0] == pytest.approx(got[name][0], nan_ok=True)


def test_groups_of_several_prompts_or_policies_are_refused():
    one, other = example()
    for group in ([], [*one, *other], [one[0], dataclasses.replace(one[0], policy="warmup@40")]):
        with pytest.raises(ValueError, match="a group is what one policy answered to one draw"):
            prompts([group])


def test_expected_calibration_error_by_hand():
    # upper ends belong to their bin
    got = expected_calibration_error([0.3, 0.3, 0.9, 0.95, 0.9], [0, 1, 1, 0, 1])
    assert got == pytest.approx(2 / 5 * (0.5 - 0.3) + 2 / 5 * (1 - 0.9) + 1 / 5 * 0.95)
    # 0.3 and 0.4 are in bins of their own
    assert expected_calibration_error([0.3, 0.4], [1, 0]) == pytest.approx(0.55)
    assert expected_calibration_error([0.75] * 4, [1, 1, 1, 0]) == 0
    assert expected_calibration_error([1.0, 1.0], [False, False]) == 1
    assert math.isnan(expected_calibration_error([], []))


def test_auroc_by_hand():
    assert auroc([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1]) == 0.75
    assert auroc([1, 2, 3], [False, False, True]) == 1
    assert auroc([1, 2, 3], [1, 0, 0]) == 0
    assert auroc([5, 5, 5], [1, 0, 1]) == 0.5
    assert auroc([-math.inf, -1.0], [0, 1]) == 1
    assert math.isnan(auroc([1, 2], [1, 1])) and math.isnan(auroc([], []))


scores = st.lists(st.tuples(st.integers(-5, 5), st.booleans()), min_size=2, max_size=30).filter(
    lambda pairs: len({label for _, label in pairs}) == 2
)


@given(scores)
def test_auroc_against_all_pairs(pairs):
    score, label = (np.array(column) for column in zip(*pairs, strict=True))
    difference = score[label][:, None] - score[~label][None, :]
    assert auroc(score, label) == np.mean((difference > 0) + 0.5 * (difference == 0))


def test_pair_summary_by_hand():
    # gaps 2, 0, -3
    got = pair_summary([-2.0, -4.0, -6.0], [-4.0, -4.0, -3.0], [2, 4, 3], [4, 2, 3])
    expected = {
        "pairs": 3,
        "gap_mean": -1 / 3,
        "gap_std": math.sqrt(13 / 3 - 1 / 9),
        "gap_p10": -2.4,
        "gap_p50": 0,
    }
    expected |= {"gap_p90": 1.6, "gap_per_token": (0 + 1 - 1) / 3, "frac_ranked": 1 / 3}
    assert got == pytest.approx({**expected, "chosen_length": 3, "rejected_length": 3}, abs=1e-15)
    nothing = pair_summary([], [], [], [])
    assert nothing.pop("pairs") == 0 and all(map(math.isnan, nothing.values()))
    broken = pair_summary([NAN, 1.0], [0.0, 0.0], [1, 1], [1, 1])
    assert (
        math.isnan(broken["gap_mean"])
        and math.isnan(broken["gap_p50"])
        and math.isnan(broken["frac_ranked"])
    )


def test_prompts_of_pairs_by_hand():
    table = {
        "pass_rate": [0.5, 0.25, NAN],
        "reward_variance": [0.25, 0.1875, NAN],
        "entropy": [0.1, 0.4, 9.0],
    }
    table["distinct_answers"] = [2, 5, 1]
    expected = {"prompts": 2, "pass_rate": 0.3125, "reward_variance": 0.203125, "entropy": 0.325}
    assert prompts_of_pairs({**table, "pairs": [1, 3, 0]}) == pytest.approx(
        {**expected, "distinct_answers": 4.25}
    )
    assert math.isnan(prompts_of_pairs({**table, "pairs": [0, 0, 0]})["entropy"])


def test_margin_summary_by_hand():
    ref = np.array([[-10.0, -10.0], [-20.0, -5.0]])
    got = margin_summary(0.5, ref, ref + np.array([[2.0, -2.0], [-4.0, -2.0]]))
    rewards = {"chosen": (1.0, -2.0), "rejected": (-1.0, -1.0), "margin": (2.0, -1.0)}
    for name, (first, second) in rewards.items():
        assert got[f"{name}_mean"] == (first + second) / 2
        assert got[f"{name}_std"] == abs(first - second) / 2
        assert got[f"{name}_p10"] == pytest.approx(min(first, second) + 0.1 * abs(first - second))
        assert got[f"{name}_p50"] == (first + second) / 2
        assert got[f"{name}_p90"] == pytest.approx(max(first, second) - 0.1 * abs(first - second))
    assert (got["pairs"], got["accuracy"]) == (2, 0.5)
    assert got["loss"] == pytest.approx((math.log1p(math.exp(-2)) + math.log1p(math.exp(1))) / 2)


def test_ties_count_one_half():
    ref = np.full((4, 2), -50.0)
    moved = np.array([[1.0, 0.0], [0.0, 1.0], [1e-5, 0.0], [0.0, 1e-5]])
    assert margin_summary(0.1, ref, ref + moved)["accuracy"] == 0.5
    assert margin_summary(0.1, ref[[0, 2]], (ref + moved)[[0, 2]])["accuracy"] == 0.75


@given(
    hnp.arrays(np.float64, st.tuples(st.integers(1, 6), st.just(2)), elements=st.floats(-1e4, 0))
)
def test_a_policy_that_is_its_reference_has_no_margins(ref):
    got = margin_summary(0.1, ref, ref)
    assert (got.pop("pairs"), got.pop("loss")) == (len(ref), pytest.approx(math.log(2), rel=1e-15))
    assert got.pop("accuracy") == 0.5
    assert set(got.values()) == {0.0}
    nothing = margin_summary(0.1, ref[:0], ref[:0])
    assert nothing.pop("pairs") == 0 and all(map(math.isnan, nothing.values()))
    assert margin_summary(1.0, [[0.0, 0.0]], [[-1e4, 0.0]])["loss"] == 1e4  # no overflow
