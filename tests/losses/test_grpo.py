"""GRPO: advantages, the five normalisers and the clipped loss, by hand numbers and slow references."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from g2d_jax.losses.grpo import group_advantages, grpo_loss, k3, token_weights
from g2d_jax.losses.reduction import mean_metrics

NAN = float("nan")


# --- advantages


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        # Mean of [1, 0] is 0.5; their unbiased standard deviation is sqrt(0.5).
        ("none", 0.5),
        ("group", 0.5 / (math.sqrt(0.5) + 1e-4)),
        ("batch", 0.5 / (math.sqrt(0.5) + 1e-4)),
    ],
)
def test_unscorable_is_not_wrong(scale: Any, expected: float) -> None:
    """Were NaN taken as 0, the mean would be 1/3."""
    advantages = group_advantages([[1.0, 0.0, NAN]], scale)
    np.testing.assert_allclose(advantages[0], np.array([expected, -expected, 0.0]), rtol=1e-6)


def test_batch_scale_by_hand() -> None:
    # All four scorable rewards [1, 0, 1, 1]: mean 3/4, variance 3 (1/4)^2 + (3/4)^2 over 3 = 1/4, deviation 1/2.
    advantages = group_advantages([[1.0, 0.0, NAN], [1.0, 1.0, NAN]], "batch")
    np.testing.assert_allclose(advantages, [[0.5 / 0.5001, -0.5 / 0.5001, 0.0], [0.0, 0.0, 0.0]], rtol=1e-6)


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_groups_without_signal_are_exactly_zero(scale: Any) -> None:
    # 0.1 three times has a mean that is not 0.1 in binary; one scorable response has no baseline; none has none.
    advantages = group_advantages([[0.1, 0.1, 0.1], [NAN, 1.0, NAN], [NAN, NAN, NAN]], scale)
    assert advantages.dtype == np.float32
    np.testing.assert_array_equal(advantages, np.zeros((3, 3)))
    np.testing.assert_array_equal(group_advantages([[1.0]], scale), [[0.0]])


rewards_strategy = st.lists(
    st.lists(st.one_of(st.just(NAN), st.floats(-2, 2, width=16)), min_size=4, max_size=4), min_size=1, max_size=4
)


@examples(40)
@given(rewards=rewards_strategy, seed=st.integers(0, 2**16))
def test_advantages_sum_to_zero_and_follow_permutations(rewards: list[list[float]], seed: int) -> None:
    array = np.array(rewards)
    advantages = group_advantages(array)
    np.testing.assert_allclose(advantages.sum(1), 0.0, atol=1e-5)
    assert (advantages[np.isnan(array)] == 0).all()
    np.testing.assert_allclose(group_advantages(array + 3.0), advantages, atol=1e-5)
    rng = np.random.default_rng(seed)
    order, prompts = rng.permutation(4), rng.permutation(len(array))
    for scale in ("none", "group", "batch"):
        moved = group_advantages(array[prompts][:, order], scale)  # type: ignore[arg-type]
        np.testing.assert_allclose(moved, group_advantages(array, scale)[prompts][:, order], atol=1e-4, rtol=1e-4)  # type: ignore[arg-type]


def test_wrong_rewards() -> None:
    with pytest.raises(ValueError, match="shape"):
        group_advantages([1.0, 0.0])
    with pytest.raises(ValueError, match="prompt 1, response 0 is infinite"):
        group_advantages([[1.0], [math.inf]])
    with pytest.raises(ValueError, match="unknown scale_rewards 'std'"):
        group_advantages([[1.0]], "std")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="scale_rewards_eps must be positive, got 0"):
        group_advantages([[1.0]], "group", 0.0)


# --- normalisers

LENGTHS = [2, 4, 1, 5]  # Two prompts with two responses each.


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        ("sum", [1 / 2] * 4),
        ("seq-mean-token-sum", [1 / 4] * 4),
        ("grpo", [1 / 8, 1 / 16, 1 / 4, 1 / 20]),
        ("dr_grpo", [1 / 40] * 4),
        ("dapo", [1 / 12] * 4),
        ("bnpo", [1 / 12] * 4),
    ],
)
def test_token_weights_literal(loss_type: Any, expected: list[float]) -> None:
    weights = token_weights(loss_type, LENGTHS, num_prompts=2, max_completion_length=10)
    assert weights.dtype == np.float32
    np.testing.assert_allclose(weights, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        ("sum", [1 / 2, 1 / 2, 1 / 2, 0]),
        ("seq-mean-token-sum", [1 / 4, 1 / 4, 1 / 4, 0]),
        ("grpo", [1 / 8, 1 / 16, 1 / 4, 0]),
        ("dr_grpo", [1 / 40, 1 / 40, 1 / 40, 0]),
        ("dapo", [1 / 7, 1 / 7, 1 / 7, 0]),
        ("bnpo", [1 / 7, 1 / 7, 1 / 7, 0]),
    ],
)
def test_masked_sequences(loss_type: Any, expected: list[float]) -> None:
    """A masked (say, truncated) sequence counts as a sequence, its tokens do not count as tokens."""
    mask = [True, True, True, False]
    weights = token_weights(loss_type, LENGTHS, num_prompts=2, max_completion_length=10, mask=mask)
    np.testing.assert_allclose(weights, expected, rtol=1e-6)


def trl_loss(loss_type: str, token_loss: np.ndarray, mask: np.ndarray, max_length: int) -> float:
    """TRL 1.16's reductions of a padded [S, T] batch, one device and one micro-batch, in plain Python."""
    masked = [[x for x, m in zip(row, keep, strict=True) if m] for row, keep in zip(token_loss, mask, strict=True)]
    everything, tokens = sum(sum(row) for row in masked), sum(len(row) for row in masked)
    if loss_type == "grpo":
        return sum(sum(row) / max(len(row), 1) for row in masked) / len(masked)
    if loss_type == "dr_grpo":
        return everything / (len(masked) * max_length)
    assert loss_type in ("dapo", "bnpo")
    return everything / max(tokens, 1)


@examples(15)
@given(
    seed=st.integers(0, 2**16),
    loss_type=st.sampled_from(["grpo", "dr_grpo", "dapo", "bnpo"]),
    lengths=st.lists(st.integers(1, 7), min_size=4, max_size=4),
    masked=st.booleans(),
)
def test_reductions_are_those_of_trl(seed: int, loss_type: Any, lengths: list[int], masked: bool) -> None:
    rng = np.random.default_rng(seed)
    size = len(lengths)
    keep = rng.random(size) < 0.7 if masked else np.ones(size, bool)
    mask = (np.arange(7)[None] < np.array(lengths)[:, None]) & keep[:, None]
    logprobs, old, ref = (-rng.exponential(size=(size, 7)) for _ in range(3))
    advantages = np.repeat(rng.normal(size=(size, 1)), 7, axis=1)
    ratio = np.exp(logprobs - old)
    token_loss = -np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.28) * advantages)
    token_loss += 0.04 * (np.exp(ref - logprobs) - (ref - logprobs) - 1)
    per_sequence = token_weights(
        loss_type,
        lengths,
        num_prompts=1,
        max_completion_length=7,
        mask=keep,
    )
    arrays = [jnp.asarray(x, jnp.float32) for x in (logprobs, old, ref, advantages, per_sequence[:, None] * mask)]
    loss, _ = grpo_loss(*arrays, epsilon=0.2, epsilon_high=0.28, beta=0.04)
    np.testing.assert_allclose(loss, trl_loss(loss_type, token_loss, mask, 7), rtol=1e-4, atol=1e-5)


def test_wrong_weights() -> None:
    with pytest.raises(ValueError, match="unknown GRPO loss_type 'ppo'; choose one of sum, seq-mean-token-sum, grpo, "):
        token_weights("ppo", [1], num_prompts=1, max_completion_length=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_prompts 0"):
        token_weights("sum", [1], num_prompts=0, max_completion_length=1)
    with pytest.raises(ValueError, match="lengths and mask"):
        token_weights("sum", [1, 2], num_prompts=1, max_completion_length=1, mask=[True])


# --- the loss


def test_equation_1_by_hand() -> None:
    """Two prompts, two responses each; every probability is old * ratio and the numbers are summed by hand."""
    ratios = jnp.array([[1.0, 1.1], [0.5, 1.0], [1.5, 0.9], [1.3, 0.7]])
    old = jnp.log(jnp.full((4, 2), 0.25))
    advantages = jnp.repeat(jnp.array([[0.5], [-0.5], [0.5], [-0.5]]), 2, axis=1)
    per_sequence = token_weights("sum", [2, 2, 2, 1], num_prompts=2, max_completion_length=2)
    weights = jnp.asarray(per_sequence)[:, None] * jnp.array([[1, 1], [1, 1], [1, 1], [1, 0.0]])
    loss, sums = grpo_loss(old + jnp.log(ratios), old, None, advantages, weights)
    # -A * ratio after clipping:  -0.5 * (1 + 1.1)  + 0.5 * (0.8 + 1)  - 0.5 * (1.2 + 0.9)  + 0.5 * 1.3, halved.
    np.testing.assert_allclose(loss, (-1.05 + 0.9 - 1.05 + 0.65) / 2, rtol=1e-5)
    assert mean_metrics(sums, "tokens") == pytest.approx(
        {
            "tokens": 7.0,
            "clip_ratio/low_mean": 1 / 7,  # 0.5 with A < 0
            "clip_ratio/high_mean": 1 / 7,  # 1.5 with A > 0; 1.3 with A < 0 is not clipped
            "clip_ratio/region_mean": 2 / 7,
            "ratio": (1.0 + 1.1 + 0.5 + 1.0 + 1.5 + 0.9 + 1.3) / 7,
        },
        rel=1e-5,
    )


def test_k3_by_hand() -> None:
    # policy 1/2, reference 1/4: r = 1/2, k3 = 1/2 - 1 + log 2. Equal: 0.
    values = k3(jnp.log(jnp.array([0.5, 0.3])), jnp.log(jnp.array([0.25, 0.3])))
    np.testing.assert_allclose(values, [math.log(2) - 0.5, 0.0], atol=1e-7)
    grad = jax.grad(lambda x: k3(x, jnp.log(0.25)))(jnp.log(0.5))
    np.testing.assert_allclose(grad, 0.5, rtol=1e-6)  # 1 - r


def test_kl_term() -> None:
    policy, ref = jnp.log(jnp.array([0.5])), jnp.log(jnp.array([0.25]))
    loss, sums = grpo_loss(policy, None, ref, jnp.zeros(1), jnp.ones(1), beta=0.1)
    np.testing.assert_allclose(loss, 0.1 * (math.log(2) - 0.5), rtol=1e-5)
    np.testing.assert_allclose(sums["kl"], math.log(2) - 0.5, rtol=1e-5)
    watched, sums = grpo_loss(policy, None, ref, jnp.zeros(1), jnp.ones(1), beta=0.0)
    assert float(watched) == 0.0 and float(sums["kl"]) > 0  # Beta 0 with a reference: measured, not trained on.


@pytest.mark.parametrize("old_given", [True, False])
@pytest.mark.parametrize("epsilon", [0.2, 0.0])
def test_on_policy_gradient_is_the_policy_gradient(old_given: bool, epsilon: float) -> None:
    rng = np.random.default_rng(0)
    logprobs, advantages, weights = (jnp.asarray(rng.normal(size=(3, 5)), jnp.float32) for _ in range(3))
    old = logprobs if old_given else None
    grad = jax.grad(lambda x: grpo_loss(x, old, None, advantages, weights, epsilon=epsilon)[0])(logprobs)
    np.testing.assert_allclose(grad, -advantages * weights, rtol=1e-6)


def test_only_the_policy_takes_a_gradient() -> None:
    arrays = [jnp.log(jnp.array([x])) for x in (0.5, 0.45, 0.4)]
    grads = jax.grad(lambda p, o, r, a: grpo_loss(p, o, r, a, jnp.ones(1), beta=0.1)[0], (0, 1, 2, 3))(
        *arrays, jnp.ones(1)
    )
    assert float(grads[0][0]) != 0 and all(float(grad[0]) == 0 for grad in grads[1:])


def slow_token(logp: float, old: float, ref: float, advantage: float, low: float, high: float, beta: float) -> float:
    ratio = math.exp(logp - old)
    kl = math.exp(ref - logp) - (ref - logp) - 1
    return -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage) + beta * kl


@examples(15)
@given(seed=st.integers(0, 2**16), cut=st.sampled_from([0, 13]))
def test_slow_reference_any_order_any_split(seed: int, cut: int) -> None:
    rng = np.random.default_rng(seed)
    logp, old, ref = (-rng.exponential(size=20) for _ in range(3))
    advantage = rng.normal(size=20)
    weight = np.where(rng.random(20) < 0.2, 0.0, rng.random(20) / 20)
    columns = (logp, old, ref, advantage, weight)

    def run(index: np.ndarray) -> tuple[jax.Array, dict[str, jax.Array]]:
        arrays = [jnp.asarray(x[index], jnp.float32) for x in columns]
        return grpo_loss(*arrays, epsilon=0.1, epsilon_high=0.3, beta=0.05)

    loss, sums = run(np.arange(20))
    terms = [slow_token(*row[:4], 0.1, 0.3, 0.05) * row[4] for row in zip(*columns, strict=True)]
    np.testing.assert_allclose(loss, sum(terms), rtol=1e-4, atol=1e-5)
    order = rng.permutation(20)
    (loss_a, sums_a), (loss_b, sums_b) = run(order[:cut]), run(order[cut:])
    np.testing.assert_allclose(loss_a + loss_b, loss, rtol=1e-4, atol=1e-5)
    for name in sums:
        np.testing.assert_allclose(sums_a[name] + sums_b[name], sums[name], rtol=1e-4, atol=1e-5)


def test_gradient_by_finite_differences() -> None:
    rng = np.random.default_rng(3)
    logp, old, ref = (-rng.exponential(size=16) for _ in range(3))
    advantage = rng.normal(size=16)
    arrays = [jnp.asarray(x, jnp.float32) for x in (old, ref, advantage, np.ones(16))]
    grad = jax.grad(lambda x: grpo_loss(x, *arrays, beta=0.05)[0])(jnp.asarray(logp, jnp.float32))
    for i in range(16):
        around = [slow_token(logp[i] + d, old[i], ref[i], advantage[i], 0.2, 0.2, 0.05) for d in (1e-6, -1e-6)]
        np.testing.assert_allclose(grad[i], (around[0] - around[1]) / 2e-6, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("policy", [-1e4, -1e-4])
@pytest.mark.parametrize("old", [-1e4, -1e-4])
@pytest.mark.parametrize("ref", [-1e4, -1e-4])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_log_probabilities_stay_finite(policy: float, old: float, ref: float, advantage: float) -> None:
    def loss(x: jax.Array) -> jax.Array:
        others = [jnp.array([value]) for value in (old, ref, advantage, 1.0)]
        return grpo_loss(x, *others, beta=0.1)[0]

    value, grad = jax.value_and_grad(loss)(jnp.array([policy]))
    assert np.isfinite(value) and np.isfinite(grad).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_padding_cannot_poison(poison: float) -> None:
    bad = jnp.array([-1.0, poison])
    weights = jnp.array([1.0, 0.0])
    (loss, sums), grad = jax.value_and_grad(
        lambda x: grpo_loss(x, bad, bad, jnp.array([2.0, poison]), weights, beta=0.1), has_aux=True
    )(bad)
    assert float(loss) == -2.0
    np.testing.assert_array_equal(grad, np.array([-2.0, 0.0], np.float32))
    assert all(np.isfinite(value) for value in sums.values()) and float(sums["tokens"]) == 1.0


def test_an_unscorable_response_keeps_only_its_kl() -> None:
    advantages = group_advantages([[1.0, 0.0, NAN]])[0]
    grad = jax.grad(lambda x: grpo_loss(x, None, None, jnp.asarray(advantages), jnp.ones(3))[0])(jnp.full(3, -1.0))
    np.testing.assert_allclose(grad, [-0.5, 0.5, 0.0], rtol=1e-6)
    ref = jnp.full(3, -2.0)
    grad = jax.grad(lambda x: grpo_loss(x, None, ref, jnp.asarray(advantages), jnp.ones(3), beta=0.1)[0])
    np.testing.assert_allclose(grad(jnp.full(3, -1.0))[2], 0.1 * (1 - math.exp(-1)), rtol=1e-5)


def test_bfloat16_inputs_are_computed_in_float32() -> None:
    policy, old, ref, advantages = (jnp.array([x], jnp.bfloat16) for x in (-1.0, -1.25, -0.75, 2.0))
    loss, sums = grpo_loss(policy, old, ref, advantages, jnp.ones(1), epsilon=0.5, beta=0.1)
    expected = -2.0 * math.exp(0.25) + 0.1 * (math.exp(0.25) - 0.25 - 1)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert {loss.dtype, *(x.dtype for x in sums.values())} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"beta": 0.1}, "needs ref_logprobs"),
        ({"beta": -0.1}, "beta must not be negative"),
        ({"epsilon": -0.1}, "must not be negative"),
        ({"advantages": jnp.ones(2)}, r"advantages \(2,\)"),
    ],
)
def test_wrong_arguments(kwargs: dict[str, Any], message: str) -> None:
    arrays = {"logprobs": jnp.zeros(1), "old_logprobs": None, "ref_logprobs": None}
    arrays |= {"advantages": jnp.ones(1), "weights": jnp.ones(1)}
    with pytest.raises(ValueError, match=message):
        grpo_loss(**(arrays | kwargs))
