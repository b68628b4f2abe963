"""GRPO: advantages, the normalisers and the clipped loss, by hand numbers and slow references."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
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


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_unscorable_is_not_wrong(scale: Any) -> None:
    """Were NaN taken as 0, the mean would be 1/3. The unbiased standard deviation of [1, 0] is
    sqrt(0.5)."""
    advantage = 0.5 / (1.0 if scale == "none" else math.sqrt(0.5) + 1e-4)
    np.testing.assert_allclose(
        group_advantages([[1.0, 0.0, NAN]], scale), [[advantage, -advantage, 0.0]], rtol=1e-6
    )


def test_batch_scale_by_hand() -> None:
    # All four scorable rewards [1, 0, 1, 1]: mean 3/4, variance 3 (1/4)^2 + (3/4)^2 over 3 = 1/4,
    # deviation 1/2.
    advantages = group_advantages([[1.0, 0.0, NAN], [1.0, 1.0, NAN]], "batch")
    np.testing.assert_allclose(
        advantages, [[0.5 / 0.5001, -0.5 / 0.5001, 0.0], [0.0, 0.0, 0.0]], rtol=1e-6
    )


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_groups_without_signal_are_exactly_zero(scale: Any) -> None:
    # 0.1 three times has a mean that is not 0.1 in binary; one scorable response has no baseline;
    # none has none.
    advantages = group_advantages([[0.1, 0.1, 0.1], [NAN, 1.0, NAN], [NAN, NAN, NAN]], scale)
    assert advantages.dtype == np.float32
    np.testing.assert_array_equal(advantages, np.zeros((3, 3)))
    np.testing.assert_array_equal(group_advantages([[1.0]], scale), [[0.0]])


rewards_strategy = st.lists(
    st.lists(st.one_of(st.just(NAN), st.floats(-2, 2, width=16)), min_size=4, max_size=4),
    min_size=1,
    max_size=4,
)


@examples(40)
@given(rewards=rewards_strategy, seed=st.integers(0, 2**16))
def test_advantages_sum_to_zero_and_follow_permutations(
    rewards: list[list[float]], seed: int
) -> None:
    array = np.array(rewards)
    advantages = group_advantages(array)
    np.testing.assert_allclose(advantages.sum(1), 0.0, atol=1e-5)
    assert (advantages[np.isnan(array)] == 0).all()
    np.testing.assert_allclose(group_advantages(array + 3.0), advantages, atol=1e-5)
    rng = np.random.default_rng(seed)
    order, prompts = rng.permutation(4), rng.permutation(len(array))
    for scale in ("none", "group", "batch"):
        moved = group_advantages(array[prompts][:, order], scale)  # type: ignore[arg-type]
        np.testing.assert_allclose(
            moved, group_advantages(array, scale)[prompts][:, order], atol=1e-4, rtol=1e-4
        )  # type: ignore[arg-type]


# --- normalisers

LENGTHS = [2, 4, 1, 5]  # Two prompts with two responses each.


@pytest.mark.parametrize(
    ("loss_type", "expected", "masked"),
    [
        ("sum", [1 / 2] * 4, [1 / 2] * 3),
        ("seq-mean-token-sum", [1 / 4] * 4, [1 / 4] * 3),
        ("grpo", [1 / 8, 1 / 16, 1 / 4, 1 / 20], [1 / 8, 1 / 16, 1 / 4]),
        ("dr_grpo", [1 / 40] * 4, [1 / 40] * 3),
        ("dapo", [1 / 12] * 4, [1 / 7] * 3),
        ("bnpo", [1 / 12] * 4, [1 / 7] * 3),
    ],
)
def test_token_weights_literal(loss_type: Any, expected: list[float], masked: list[float]) -> None:
    """A masked (say, truncated) sequence counts as a sequence, its tokens do not count as
    tokens."""
    for mask, values in (
        (None, expected),
        ([True, True, True, False], [*masked, 0]),
        ([False] * 4, [0] * 4),
    ):
        weights = token_weights(
            loss_type, LENGTHS, num_prompts=2, max_completion_length=10, mask=mask
        )
        assert weights.dtype == np.float32
        np.testing.assert_allclose(weights, values, rtol=1e-6)


@examples(15)
@given(
    seed=st.integers(0, 2**16),
    loss_type=st.sampled_from(["grpo", "dr_grpo", "dapo", "bnpo"]),
    lengths=st.lists(st.integers(0, 7), min_size=4, max_size=4),
)
def test_reductions_are_those_of_trl(seed: int, loss_type: Any, lengths: list[int]) -> None:
    """TRL 1.16's reductions of a padded [S, T] batch, one device and one micro-batch. Of length 0
    are masked ones."""
    rows = [np.random.default_rng(seed + length).normal(size=length) for length in lengths]
    total, tokens = sum(row.sum() for row in rows), sum(lengths)
    expected = {
        "dr_grpo": total / (4 * 7),
        "grpo": sum(row.sum() / max(row.size, 1) for row in rows) / 4,
    }
    mask = np.array(lengths) > 0
    sizes = np.where(mask, lengths, 3)
    weights = token_weights(loss_type, sizes, num_prompts=1, max_completion_length=7, mask=mask)
    loss = sum(row.sum() * weight for row, weight in zip(rows, weights, strict=True))
    np.testing.assert_allclose(
        loss, expected.get(loss_type, total / max(tokens, 1)), rtol=1e-5, atol=1e-6
    )


# --- the loss


def test_equation_1_by_hand() -> None:
    """Two prompts, two responses each; every probability is old * ratio and the numbers are summed
    by hand."""
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
    policy, ref = jnp.log(jnp.array([0.5, 0.3])), jnp.log(jnp.array([0.25, 0.3]))
    np.testing.assert_allclose(k3(policy, ref), [math.log(2) - 0.5, 0.0], atol=1e-7)
    # 1 - r
    np.testing.assert_allclose(jax.grad(lambda x: k3(x, ref).sum())(policy), [0.5, 0.0], atol=1e-6)
    loss, sums = grpo_loss(policy, None, ref, jnp.zeros(2), jnp.ones(2), beta=0.1)
    np.testing.assert_allclose(
        [loss, sums["kl"]], [0.1 * (math.log(2) - 0.5), math.log(2) - 0.5], rtol=1e-5
    )
    watched, sums = grpo_loss(policy, None, ref, jnp.zeros(2), jnp.ones(2), beta=0.0)
    # Beta 0 with a reference: measured, not trained on.
    assert float(watched) == 0.0 and float(sums["kl"]) > 0


@pytest.mark.parametrize("old_given", [True, False])
@pytest.mark.parametrize("epsilon", [0.2, 0.0])
def test_on_policy_gradient_is_the_policy_gradient(old_given: bool, epsilon: float) -> None:
    rng = np.random.default_rng(0)
    logprobs, advantages, weights = (
        jnp.asarray(rng.normal(size=(3, 5)), jnp.float32) for _ in range(3)
    )
    old = logprobs if old_given else None
    grad = jax.grad(lambda x: grpo_loss(x, old, None, advantages, weights, epsilon=epsilon)[0])(
        logprobs
    )
    np.testing.assert_allclose(grad, -advantages * weights, rtol=1e-6)


def test_only_the_policy_takes_a_gradient() -> None:
    arrays = [jnp.log(jnp.array([x])) for x in (0.5, 0.45, 0.4)]
    grads = jax.grad(
        lambda p, o, r, a: grpo_loss(p, o, r, a, jnp.ones(1), beta=0.1)[0], (0, 1, 2, 3)
    )(*arrays, jnp.ones(1))
    assert float(grads[0][0]) != 0 and all(float(grad[0]) == 0 for grad in grads[1:])


def slow_token(
    logp: float, old: float, ref: float, advantage: float, low: float, high: float, beta: float
) -> float:
    ratio = math.exp(logp - old)
    kl = math.exp(ref - logp) - (ref - logp) - 1
    return -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage) + beta * kl


@examples(15)
@given(seed=st.integers(0, 2**16), cut=st.sampled_from([0, 13]))
def test_slow_reference_any_order_any_split(seed: int, cut: int) -> None:
    """Values, and gradients by finite differences."""
    rng = np.random.default_rng(seed)
    logp, old, ref = (-rng.exponential(size=20) for _ in range(3))
    advantage = rng.normal(size=20)
    weight = np.where(rng.random(20) < 0.2, 0.0, rng.random(20) / 20)

    def run(index: np.ndarray) -> tuple[tuple[jax.Array, dict[str, jax.Array]], jax.Array]:
        arrays = [jnp.asarray(x[index], jnp.float32) for x in (logp, old, ref, advantage, weight)]
        settings = {"epsilon": 0.1, "epsilon_high": 0.3, "beta": 0.05}
        return jax.value_and_grad(lambda x: grpo_loss(x, *arrays[1:], **settings), has_aux=True)(
            arrays[0]
        )

    def slow(step: float) -> np.ndarray:
        rows = zip(logp + step, old, ref, advantage, strict=True)
        return np.array([slow_token(*row, 0.1, 0.3, 0.05) for row in rows]) * weight

    (loss, sums), grad = run(np.arange(20))
    np.testing.assert_allclose(loss, slow(0.0).sum(), rtol=1e-4, atol=1e-5)
    # not where clipping begins
    smooth = np.abs(np.exp(logp - old)[:, None] - [0.9, 1.3]).min(1) > 1e-4
    np.testing.assert_allclose(
        grad[smooth], ((slow(1e-6) - slow(-1e-6)) / 2e-6)[smooth], rtol=1e-3, atol=1e-5
    )
    order = rng.permutation(20)
    ((loss_a, sums_a), _), ((loss_b, sums_b), _) = run(order[:cut]), run(order[cut:])
    np.testing.assert_allclose(loss_a + loss_b, loss, rtol=1e-4, atol=1e-5)
    for name in sums:
        np.testing.assert_allclose(sums_a[name] + sums_b[name], sums[name], rtol=1e-4, atol=1e-5)


def test_extreme_log_probabilities_stay_finite() -> None:
    """Every combination of very likely and very unlikely under the policy, the old one and the
    reference."""
    extremes = itertools.product(*[(-1e4, -1e-4)] * 3, (1.0, -1.0), (1.0,))
    policy, *others = jnp.array(list(extremes)).T
    value, grad = jax.value_and_grad(lambda x: grpo_loss(x, *others, beta=0.1)[0])(policy)
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


def weights_of(
    loss_type: Any = "sum", lengths: Any = (1,), num_prompts: int = 1, **changes: Any
) -> np.ndarray:
    return token_weights(
        loss_type, lengths, num_prompts=num_prompts, max_completion_length=1, **changes
    )


def loss_of(responses: int = 1, **changes: Any) -> Any:
    return grpo_loss(jnp.zeros(1), None, None, jnp.ones(responses), jnp.ones(1), **changes)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: group_advantages([1.0, 0.0]), "shape"),
        (lambda: group_advantages([[1.0], [math.inf]]), "prompt 1, response 0 is infinite"),
        (lambda: group_advantages([[1.0]], "std"), "unknown scale_rewards 'std'"),  # type: ignore[arg-type]
        (
            lambda: group_advantages([[1.0]], "group", 0.0),
            "scale_rewards_eps must be positive, got 0",
        ),
        (
            lambda: weights_of("ppo"),
            "unknown GRPO loss_type 'ppo'; choose one of sum, seq-mean-token-sum, grpo, ",
        ),
        (lambda: weights_of(num_prompts=0), "num_prompts 0"),
        (lambda: weights_of(lengths=[1, 2], mask=[True]), "lengths and mask"),
        (lambda: loss_of(beta=0.1), "needs ref_logprobs"),
        (lambda: loss_of(beta=-0.1), "beta must not be negative"),
        (lambda: loss_of(epsilon=-0.1), "must not be negative"),
        (lambda: loss_of(responses=2), r"advantages \(2,\)"),
        (lambda: loss_of(importance_cap=-1.0), "importance_cap must not be negative, got -1"),
        (lambda: loss_of(importance_cap=2.0), r"importance_cap 2\.0 needs sampler_logprobs"),
    ],
)
def test_wrong_arguments(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
