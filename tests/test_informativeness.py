"""Informativeness by hand, against brute force, and under changes that must not matter."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from g2d_jax.records import Rollout, Score, ScoredRollout, Verdict
from g2d_jax.study.informativeness import (
    expected_calibration_error,
    margin_summary,
    pair_summary,
    prompts,
    prompts_of_pairs,
    responses,
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
    got = prompts(responses(example()))
    expected = {
        "visit": [0, 0],
        "scored": [4, 0],
        "pass_rate": [1 / 4, NAN],  # a timeout is wrong
        "reward_mean": [1 / 4, NAN],
        "reward_variance": [3 / 16, NAN],
        "mixed": [True, False],
        "entropy": [(2 + 8 + 2) / 9, 3],  # over tokens, the timeout's too
        "distinct_answers": [4, 1],  # 2, 3, 3^{9^9} and none
        "confidence": [(math.exp(-1) + math.exp(-2) + math.exp(-4) + 1) / 4, math.exp(-1)],
    }
    assert set(got) == {*expected, "problem_id"} and got["problem_id"].tolist() == ["aa", "bb"]
    for name, values in expected.items():
        np.testing.assert_allclose(got[name], values, rtol=1e-12, err_msg=name)


def test_summary_by_hand():
    # the first of a right answer; four bins
    confidences = [math.exp(-1), math.exp(-2), math.exp(-4), 1]
    expected = {
        "prompts": 2,
        "responses": 6,
        "scored": 4,
        "pass_rate": 1 / 4,
        "reward_variance": 3 / 16,
        "frac_mixed": 1 / 2,
        "entropy": (12 + 12) / 13,
        "distinct_answers": 5 / 2,
        "mean_length": 13 / 6,
        "frac_truncated": 1 / 6,
        "confidence": (sum(confidences) / 4 + math.exp(-1)) / 2,
        "ece": (1 - confidences[0] + sum(confidences[1:])) / 4,
    }
    assert summary(responses(example())) == pytest.approx(expected)


def test_a_scalar_reward_is_neither_right_nor_wrong():
    rows = [response(Verdict.SCORED, [-1.0], [1.0], reward=reward) for reward in (1.0, 3.0)]
    found = summary(responses([rows]))
    assert (found["scored"], found["reward_variance"], found["frac_mixed"]) == (2, 1, 1)
    assert math.isnan(found["pass_rate"]) and math.isnan(found["ece"])
    assert summary(responses([[rows[0], rows[0]]]))["frac_mixed"] == 0


def test_what_is_not_defined_is_nan():
    assert len(prompts(responses([]))) == 0
    nothing = summary(responses([]))
    counts = [nothing.pop(name) for name in ("prompts", "responses", "scored")]
    assert counts == [0, 0, 0] and all(map(math.isnan, nothing.values()))
    right = summary(responses([[response(Verdict.CORRECT, [-1.0], [1.0])]]))
    assert (right["pass_rate"], right["reward_variance"], right["frac_mixed"]) == (1, 0, 0)
    without_nats = summary(responses([[response(Verdict.CORRECT, [NAN], [NAN])]]))
    assert all(math.isnan(without_nats[name]) for name in ("entropy", "confidence", "ece"))


def test_responses_without_rewards_or_tokens():
    group = [
        response(Verdict.CORRECT, [-1.0], [1.0]),
        response(Verdict.CORRECT, [-1.0], [1.0], reward=None),
        response(Verdict.INCORRECT, [], []),
    ]
    rows = responses([group])
    got = prompts(rows).loc[0]
    assert (got["scored"], got["pass_rate"], got["reward_variance"]) == (2, 0.5, 0.25)
    assert got["confidence"] == pytest.approx(math.exp(-1))  # of those with tokens
    assert summary(rows)["ece"] == pytest.approx(1 - math.exp(-1))


def test_rewards_and_log_probs_at_their_edges():
    wrong = [response(Verdict.INCORRECT, [-1.0], [1.0], reward=reward) for reward in (0.1, 0.3)]
    # by rounding
    certain = [
        response(Verdict.CORRECT, [1e-7], [0.0]),
        response(Verdict.INCORRECT, [-1e-7], [0.0]),
    ]
    late = [response(Verdict.CORRECT, [-1.0], [1.0]), response(Verdict.TIMEOUT, [-9.0], [1.0])]
    got = prompts(responses([wrong, certain, late]))
    # a timeout is wrong, and is rejected in a pair
    assert got["mixed"].tolist() == [False, True, True]
    assert got["reward_variance"][0] == pytest.approx(0.01)
    assert got["confidence"][1] == pytest.approx(1)
    assert (got["pass_rate"][2], got["reward_mean"][2]) == (0.5, 0.5)
    assert summary(responses([certain]))["ece"] == pytest.approx(0.5)


@given(
    st.lists(st.sampled_from(Verdict), min_size=1, max_size=8), st.randoms(use_true_random=False)
)
def test_binary_variance_order_and_what_is_not_scored(verdicts, random):
    group = [
        response(verdict, [-i - 0.5], [0.5 * i], answer=str(i % 3))
        for i, verdict in enumerate(verdicts)
    ]
    shuffled = random.sample(group, len(group))
    more = [*group, response(Verdict.UNSCORABLE, [-9.0], [1.0])]
    got, other, larger = prompts(responses([group, shuffled, more])).to_dict("records")
    rate = got["pass_rate"]
    assert got["reward_variance"] == pytest.approx(rate * (1 - rate), nan_ok=True)
    wrong = {"incorrect", "no_answer", "timeout"} & set(verdicts)
    assert got["mixed"] == (Verdict.CORRECT in verdicts and bool(wrong))
    assert other == pytest.approx(got, nan_ok=True)
    for name in ("scored", "pass_rate", "reward_mean", "reward_variance", "mixed"):
        assert larger[name] == pytest.approx(got[name], nan_ok=True)


def test_expected_calibration_error_by_hand():
    # upper ends belong to their bin
    got = expected_calibration_error([0.3, 0.3, 0.9, 0.95, 0.9], [0, 1, 1, 0, 1])
    assert got == pytest.approx(2 / 5 * (0.5 - 0.3) + 2 / 5 * (1 - 0.9) + 1 / 5 * 0.95)
    # 0.3 and 0.4 are in bins of their own
    assert expected_calibration_error([0.3, 0.4], [1, 0]) == pytest.approx(0.55)
    assert expected_calibration_error([0.75] * 4, [1, 1, 1, 0]) == 0
    assert expected_calibration_error([1.0, 1.0], [False, False]) == 1
    assert math.isnan(expected_calibration_error([], []))


def test_pair_summary_by_hand():
    # gaps 2, 0, -3
    got = pair_summary([-2.0, -4.0, -6.0], [-4.0, -4.0, -3.0], [2, 4, 3], [4, 2, 3])
    expected = {"pairs": 3, "gap_mean": -1 / 3, "gap_p10": -2.4}
    expected |= {"gap_per_token": (0 + 1 - 1) / 3, "frac_ranked": 1 / 3}
    assert got == pytest.approx({**expected, "chosen_length": 3, "rejected_length": 3}, abs=1e-15)
    nothing = pair_summary([], [], [], [])
    assert nothing.pop("pairs") == 0 and all(map(math.isnan, nothing.values()))
    broken = pair_summary([NAN, 1.0], [0.0, 0.0], [1, 1], [1, 1])
    assert (
        math.isnan(broken["gap_mean"])
        and math.isnan(broken["gap_p10"])
        and math.isnan(broken["frac_ranked"])
    )


def test_prompts_of_pairs_by_hand():
    table = pd.DataFrame(
        {
            "pass_rate": [0.5, 0.25, NAN],
            "reward_variance": [0.25, 0.1875, NAN],
            "entropy": [0.1, 0.4, 9.0],
            "distinct_answers": [2, 5, 1],
        }
    )
    expected = {"prompts": 2, "pass_rate": 0.3125, "reward_variance": 0.203125, "entropy": 0.325}
    expected["distinct_answers"] = 4.25
    assert prompts_of_pairs(table, [1, 3, 0]) == pytest.approx(expected)
    assert math.isnan(prompts_of_pairs(table, [0, 0, 0])["entropy"])


def test_margin_summary_by_hand():
    ref = np.array([[-10.0, -10.0], [-20.0, -5.0]])
    got = margin_summary(0.5, ref, ref + np.array([[2.0, -2.0], [-4.0, -2.0]]))
    # rewards 1, -2 and -1, -1; margins 2, -1
    loss = (math.log1p(math.exp(-2)) + math.log1p(math.exp(1))) / 2
    means = {"chosen_mean": -0.5, "rejected_mean": -1.0, "margin_mean": 0.5}
    assert got == pytest.approx({"pairs": 2, **means, "accuracy": 0.5, "loss": loss})


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
