"""GRPO's family: the ratio of a whole response (GSPO), truncated importance sampling, the overlong penalty."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from g2d_jax.losses.grpo import grpo_loss, overlong_penalty
from g2d_jax.losses.reduction import add_sums, empty_sums, mean_metrics

IDS = np.array([-1, 0, 0, 0, 1, 1, -1, 2])


def gspo_slow(logp: np.ndarray, old: np.ndarray, advantages: np.ndarray, epsilon: float) -> float:
    """GSPO's objective, negated: mean over responses of -min(s A, clip(s) A), s = exp(mean log-ratio)."""
    total = 0.0
    for sequence in range(3):
        tokens = np.flatnonzero(np.equal(IDS, sequence))
        s = math.exp((logp[tokens] - old[tokens]).sum() / len(tokens))
        advantage = advantages[tokens[0]]
        total -= min(s * advantage, min(max(s, 1 - epsilon), 1 + epsilon) * advantage) / 3
    return total


def gspo_inputs(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    logp, old = -rng.exponential(size=8), -rng.exponential(size=8)
    lengths = np.array([3, 2, 1])
    weights = np.where(IDS >= 0, 1 / (3 * lengths[IDS]), 0.0)
    return logp, old, rng.normal(size=3)[IDS], weights


def f32(*arrays: np.ndarray) -> list[jax.Array]:
    return [jnp.asarray(x, jnp.float32) for x in arrays]


@pytest.mark.parametrize("seed", range(4))
def test_sequence_ratio_value_and_gradient(seed: int) -> None:
    logp, old, advantages, weights = gspo_inputs(seed)
    policy, fixed, a, w = f32(logp, old, advantages, weights)
    ids = jnp.asarray(IDS, jnp.int32)

    def loss(x: jax.Array) -> jax.Array:
        return grpo_loss(x, fixed, None, a, w, epsilon=0.3, sequence_ids=ids)[0]

    value, grad = jax.value_and_grad(loss)(policy)
    np.testing.assert_allclose(value, gspo_slow(logp, old, advantages, 0.3), rtol=1e-5, atol=1e-6)
    for i in range(8):
        step = 1e-6 * (np.arange(8) == i)
        around = [gspo_slow(logp + d, old, advantages, 0.3) for d in (step, -step)]
        np.testing.assert_allclose(grad[i], (around[0] - around[1]) / 2e-6, rtol=1e-3, atol=1e-6)


def test_sequence_ratio_literal() -> None:
    """Log-ratios log 4 and 0: s = 2 at both tokens, where the token level has 4 and 1."""
    old, advantages, weights = jnp.array([-2.0, -3.0]), jnp.full(2, -1.0), jnp.full(2, 0.5)
    policy = old + jnp.array([math.log(4), 0.0])
    ids = jnp.zeros(2, jnp.int32)
    loss, sums = grpo_loss(policy, old, None, advantages, weights, sequence_ids=ids)
    np.testing.assert_allclose(loss, 2.0, rtol=1e-6)
    assert mean_metrics(sums, "tokens")["ratio"] == pytest.approx(2.0)
    grad = jax.grad(lambda x: grpo_loss(x, old, None, advantages, weights, sequence_ids=ids)[0])(policy)
    np.testing.assert_allclose(grad, [1.0, 1.0], rtol=1e-6)  # s * |A| / 2 each: every token takes the same step
    _, token = grpo_loss(policy, old, None, advantages, weights)
    assert mean_metrics(token, "tokens")["ratio"] == pytest.approx(2.5)


def test_one_token_responses_are_the_token_level() -> None:
    logp, old, advantages, weights = f32(*gspo_inputs(0))
    ids = jnp.arange(8)[::-1]
    whole = jax.value_and_grad(lambda x: grpo_loss(x, old, None, advantages, weights, sequence_ids=ids)[0])(logp)
    token = jax.value_and_grad(lambda x: grpo_loss(x, old, None, advantages, weights)[0])(logp)
    for a, b in zip(whole, token, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_sequence_ratio_of_padding_and_of_a_masked_response() -> None:
    """A masked response (weight 0) with any values changes neither the loss nor the gradient."""
    logp, old, advantages, weights = f32(*gspo_inputs(1))
    ids, masked = jnp.asarray(IDS, jnp.int32), jnp.asarray(IDS == 1)
    poisoned = [jnp.where(masked | (ids < 0), jnp.nan, x) for x in (logp, old, advantages)]
    kept = jnp.where(masked, 0.0, weights)

    def run(x: jax.Array, *rest: jax.Array) -> jax.Array:
        return grpo_loss(x, rest[0], None, rest[1], kept, sequence_ids=ids)[0]

    for a, b in zip(jax.value_and_grad(run)(logp, old, advantages), jax.value_and_grad(run)(*poisoned), strict=True):
        np.testing.assert_array_equal(a, b)


def test_importance_multiplies_the_policy_term_alone() -> None:
    """old / sampler's probability, truncated at 2: half the factors below are above it."""
    logp, old, advantages, weights = f32(*gspo_inputs(2))
    ref, factors = old - 0.5, np.linspace(0.5, 4.0, 8)
    sampler, cut = old - jnp.log(jnp.asarray(factors, jnp.float32)), np.minimum(factors, 2.0).astype(np.float32)

    def run(cap: float, beta: float = 0.0) -> jax.Array:
        more = {"sampler_logprobs": sampler, "importance_cap": cap}
        return grpo_loss(logp, old, ref, advantages, weights, beta=beta, **more)[0]

    np.testing.assert_allclose(run(2.0, 0.1) - run(2.0), run(0.0, 0.1) - run(0.0), rtol=1e-4, atol=1e-6)
    scaled, _ = grpo_loss(logp, old, None, advantages * cut, weights)  # factors are positive
    np.testing.assert_allclose(run(2.0), scaled, rtol=1e-5)
    plain, _ = grpo_loss(logp, old, None, advantages, weights)
    np.testing.assert_array_equal(run(0.0), plain)  # without a cap the sampler's are but a metric
    for fixed in (1, 2):  # of old and sampler's, none takes a gradient
        grad = jax.grad(
            lambda *x: grpo_loss(x[0], x[1], None, advantages, weights, sampler_logprobs=x[2], importance_cap=2.0)[0],
            fixed,
        )(logp, old, sampler)
        np.testing.assert_array_equal(grad, np.zeros(8))


def test_metrics_of_the_sampler_by_hand() -> None:
    """TRL's names; means, and extremes over micro-batches that are added up."""
    old, sampler = np.log([0.5, 0.2, 0.9, 0.7]), np.log([0.25, 0.4, 0.1, 0.7])
    ratio, active = np.array([2.0, 0.5, 3.0]), np.array([1.0, 1.0, 1.0, 0.0])

    def sums(part: slice, cap: float = 3.0) -> dict[str, jax.Array]:
        a, b, w = f32(old[part], sampler[part], active[part])
        return grpo_loss(a, a, None, jnp.ones_like(w), w, sampler_logprobs=b, importance_cap=cap)[1]

    apart = np.abs(old - sampler)[:3]
    expected = {
        "sampling/sampling_logp_difference/mean": apart.mean(),
        "sampling/sampling_logp_difference/max": apart.max(),
        "sampling/importance_sampling_ratio/mean": ratio.mean(),
        "sampling/importance_sampling_ratio/min": 0.5,
        "sampling/importance_sampling_ratio/max": 3.0,
        "rollout_corr/kl": np.log([0.25 / 0.5, 0.4 / 0.2, 0.1 / 0.9]).mean(),
    }
    parts = [sums(slice(i, i + 1)) for i in range(4)]  # the last is padding alone
    both = functools.reduce(add_sums, parts, empty_sums(parts[0]))
    for found in (sums(slice(None)), both):
        means = mean_metrics(found, "tokens")
        assert {name: means[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    named = {f"{name}|tokens": value for name, value in both.items() if name != "tokens"} | {"tokens": both["tokens"]}
    assert mean_metrics(named | {"pairs": jnp.ones(())}, "pairs") == pytest.approx(means | {"pairs": 1.0})
    uncapped = mean_metrics(sums(slice(None), 0.0), "tokens")["sampling/importance_sampling_ratio/max"]
    assert uncapped == pytest.approx(9.0, rel=1e-5)
    nothing = mean_metrics(parts[3], "tokens")
    assert all(math.isnan(nothing[name]) for name in expected)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_first_update_has_ratio_1_whatever_the_sampler_said(level: str) -> None:
    logp, _, advantages, weights = f32(*gspo_inputs(3))
    ids = jnp.asarray(IDS, jnp.int32) if level == "sequence" else None
    sampler = jnp.where(weights != 0, logp + 0.5, jnp.nan)  # 40 % more likely than the trainer finds: outside 1 +- 0.2
    run = jax.value_and_grad(
        lambda x: grpo_loss(x, None, None, advantages, weights, sampler_logprobs=sampler, sequence_ids=ids),
        has_aux=True,
    )
    (loss, sums), grad = run(logp)
    means = mean_metrics(sums, "tokens")
    assert means["ratio"] == 1.0 and means["clip_ratio/region_mean"] == 0.0
    assert means["sampling/sampling_logp_difference/mean"] == pytest.approx(0.5, rel=1e-5)
    np.testing.assert_allclose(loss, -jnp.sum(advantages * weights), rtol=1e-5)
    if level == "token":
        np.testing.assert_allclose(grad, -advantages * weights, rtol=1e-6)


def test_wrong_importance_weights() -> None:
    logp, old, advantages, weights = f32(*gspo_inputs(0))
    with pytest.raises(ValueError, match="importance_cap must not be negative, got -1"):
        grpo_loss(logp, old, None, advantages, weights, sampler_logprobs=old, importance_cap=-1.0)
    with pytest.raises(ValueError, match=r"importance_cap 2\.0 needs sampler_logprobs"):
        grpo_loss(logp, old, None, advantages, weights, importance_cap=2.0)


def test_overlong_penalty_literal() -> None:
    """DAPO's own numbers: 20,480 tokens at most, of which the last 4,096 are the buffer."""
    penalty = overlong_penalty([0, 16384, 17408, 18432, 20480, 20481], 20480, 4096)
    assert penalty.dtype == np.float32
    assert penalty.tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert not np.signbit(penalty[:2]).any()
    assert overlong_penalty([[1], [2]], 2, 1).tolist() == [[0.0], [-1.0]]
    for buffer in (0, 11):
        with pytest.raises(ValueError, match="overlong buffer must be in"):
            overlong_penalty([1], 10, buffer)
