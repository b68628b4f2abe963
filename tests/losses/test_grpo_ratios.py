"""GRPO's family: the ratio of a whole response (GSPO), truncated importance sampling, the overlong
penalty."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from g2d_jax.losses.grpo import grpo_loss
from g2d_jax.losses.reduction import add_sums, empty_sums, mean_metrics

IDS = np.array([-1, 0, 0, 0, 1, 1, -1, 2])


def gspo_slow(
    logp: np.ndarray, old: np.ndarray, advantages: np.ndarray, weights: np.ndarray
) -> float:
    """GSPO's objective, negated: mean over responses of -min(s A, clip(s) A), s = exp(mean
    log-ratio)."""
    total, epsilon = 0.0, 0.3
    for sequence in range(3):
        tokens = np.flatnonzero((sequence == IDS) & (weights != 0))
        if not tokens.size:
            continue
        s = math.exp((logp[tokens] - old[tokens]).sum() / len(tokens))
        advantage = advantages[tokens[0]]
        total -= min(s * advantage, min(max(s, 1 - epsilon), 1 + epsilon) * advantage) / 3
    return total


def gspo_inputs(
    seed: int, dropped: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """dropped: a token that does not count, though others of its response do; token 0 is
    padding."""
    rng = np.random.default_rng(seed)
    logp, old = -rng.exponential(size=8), -rng.exponential(size=8)
    counts = (IDS >= 0) & (np.arange(8) != dropped)
    lengths = np.bincount(IDS[counts], minlength=3)
    weights = np.where(counts, 1 / (3 * np.maximum(lengths, 1)[IDS]), 0.0)
    return logp, old, rng.normal(size=3)[IDS], weights


def f32(*arrays: np.ndarray) -> list[jax.Array]:
    return [jnp.asarray(x, jnp.float32) for x in arrays]


@pytest.mark.parametrize("dropped", [0, 1, 3, 7])
def test_sequence_ratio_value_and_gradient(dropped: int) -> None:
    """Values without weight, of padding, a token or all of response 2, are NaN."""
    logp, old, advantages, weights = gspo_inputs(dropped, dropped)
    w, ids = jnp.asarray(weights, jnp.float32), jnp.asarray(IDS, jnp.int32)
    policy, fixed, a = (jnp.where(w != 0, x, jnp.nan) for x in f32(logp, old, advantages))

    def loss(x: jax.Array) -> jax.Array:
        return grpo_loss(x, fixed, None, a, w, epsilon=0.3, sequence_ids=ids)[0]

    value, grad = jax.value_and_grad(loss)(policy)
    np.testing.assert_allclose(
        value, gspo_slow(logp, old, advantages, weights), rtol=1e-5, atol=1e-6
    )
    for i in range(8):
        step = 1e-6 * (np.arange(8) == i)
        around = [gspo_slow(logp + d, old, advantages, weights) for d in (step, -step)]
        np.testing.assert_allclose(grad[i], (around[0] - around[1]) / 2e-6, rtol=1e-3, atol=1e-6)


def test_sequence_ratio_literal() -> None:
    """Log-ratios log 4 and 0: s = 2 at both tokens, where the token level has 4 and 1."""
    old, advantages, weights = jnp.array([-2.0, -3.0]), jnp.full(2, -1.0), jnp.full(2, 0.5)
    policy = old + jnp.array([math.log(4), 0.0])
    ids = jnp.zeros(2, jnp.int32)
    loss, sums = grpo_loss(policy, old, None, advantages, weights, sequence_ids=ids)
    np.testing.assert_allclose(loss, 2.0, rtol=1e-6)
    assert mean_metrics(sums, "tokens")["ratio"] == pytest.approx(2.0)
    grad = jax.grad(lambda x: grpo_loss(x, old, None, advantages, weights, sequence_ids=ids)[0])(
        policy
    )
    # s * |A| / 2 each: every token takes the same step
    np.testing.assert_allclose(grad, [1.0, 1.0], rtol=1e-6)
    _, token = grpo_loss(policy, old, None, advantages, weights)
    assert mean_metrics(token, "tokens")["ratio"] == pytest.approx(2.5)


def test_importance_multiplies_the_policy_term_alone() -> None:
    """old / sampler's probability, truncated at 2: half the factors below are above it."""
    logp, old, advantages, weights = f32(*gspo_inputs(2))
    ref, factors = old - 0.5, np.linspace(0.5, 4.0, 8)
    sampler = old - jnp.log(jnp.asarray(factors, jnp.float32))
    cut = np.minimum(factors, 2.0).astype(np.float32)

    def run(cap: float, beta: float = 0.0) -> jax.Array:
        more = {"sampler_logprobs": sampler, "importance_cap": cap}
        return grpo_loss(logp, old, ref, advantages, weights, beta=beta, **more)[0]

    np.testing.assert_allclose(
        run(2.0, 0.1) - run(2.0), run(0.0, 0.1) - run(0.0), rtol=1e-4, atol=1e-6
    )
    scaled, _ = grpo_loss(logp, old, None, advantages * cut, weights)  # factors are positive
    np.testing.assert_allclose(run(2.0), scaled, rtol=1e-5)
    plain, _ = grpo_loss(logp, old, None, advantages, weights)
    np.testing.assert_array_equal(run(0.0), plain)  # without a cap the sampler's are but a metric
    for fixed in (1, 2):  # of old and sampler's, none takes a gradient
        grad = jax.grad(
            lambda *x: grpo_loss(
                x[0], x[1], None, advantages, weights, sampler_logprobs=x[2], importance_cap=2.0
            )[0],
            fixed,
        )(logp, old, sampler)
        np.testing.assert_array_equal(grad, np.zeros(8))


def test_metrics_of_the_sampler_by_hand() -> None:
    """TRL's names; means, and extremes over micro-batches that are added up. The first update has
    ratio 1 anyway."""
    old, sampler = np.log([0.5, 0.2, 0.9, 0.7]), np.log([0.25, 0.4, 0.1, 0.7])
    ratio, active = np.array([2.0, 0.5, 3.0]), np.array([1.0, 1.0, 1.0, 0.0])

    def sums(part: slice, cap: float = 3.0) -> dict[str, jax.Array]:
        a, b, w = f32(old[part], sampler[part], active[part])
        return grpo_loss(
            a, None, None, jnp.ones_like(w), w, sampler_logprobs=b, importance_cap=cap
        )[1]

    apart = np.abs(old - sampler)[:3]
    expected = {
        "ratio": 1.0,
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
    named = {f"{name}|tokens": value for name, value in both.items() if name != "tokens"} | {
        "tokens": both["tokens"]
    }
    assert mean_metrics(named | {"pairs": jnp.ones(())}, "pairs") == pytest.approx(
        means | {"pairs": 1.0}
    )
    uncapped = mean_metrics(sums(slice(None), 0.0), "tokens")[
        "sampling/importance_sampling_ratio/max"
    ]
    assert uncapped == pytest.approx(9.0, rel=1e-5)
    nothing = mean_metrics(parts[3], "tokens")
    assert all(math.isnan(nothing[name]) for name in expected)


def test_cispo_is_that_of_trl() -> None:
    """Ratios 1, e^2, e^-0.4 and e^2, at most 5, which TRL 1.16 calls epsilon_high: its loss,
    gradient and metric."""
    policy, old = jnp.array([-1.0, -2.0, -0.5, -3.0]), jnp.array([-1.0, -4.0, -0.1, -5.0])
    advantages, weights = jnp.array([0.5, 0.5, -1.0, -1.0]), jnp.full(4, 0.25)

    def loss(x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        return grpo_loss(x, old, None, advantages, weights, epsilon_high=4.0, cispo=True)

    (value, sums), grad = jax.value_and_grad(loss, has_aux=True)(policy)
    np.testing.assert_allclose(value, -2.458790005754455, rtol=1e-6)
    # A token beyond the bound keeps the gradient of its log-probability, 5 times; GRPO's would be 0
    # at the second.
    np.testing.assert_allclose(grad, [-0.125, -0.625, 0.16758001150890983, 1.25], rtol=1e-6)
    means = mean_metrics(sums, "tokens")
    assert (means["clip_ratio/low_mean"], means["clip_ratio/high_mean"]) == (0.0, 0.25)


@pytest.mark.parametrize("cispo", [False, True])
def test_what_the_ratios_settings_change_in_the_gradient_of_a_first_update(cispo: bool) -> None:
    """Nothing at a ratio of 1, but for one ratio a response beside weights of importance, which are
    of tokens."""
    logp, sampler, advantages, weights = gspo_inputs(0)
    policy, drawn, a, w = f32(logp, sampler, advantages, weights)
    ids = jnp.asarray(IDS, jnp.int32)

    def gradient(cap: float = 0.0, **settings: object) -> np.ndarray:
        def loss(x: jax.Array) -> jax.Array:
            weighs = {"sampler_logprobs": drawn, "importance_cap": cap}
            return grpo_loss(x, None, None, a, w, **weighs, **settings)[0]

        return np.asarray(jax.grad(loss)(policy))

    for cap in (0.0, 2.0):
        plain = gradient(cap)
        clipped = gradient(cap, epsilon=0.0, epsilon_high=4.0, cispo=cispo)
        np.testing.assert_allclose(clipped, plain, rtol=1e-6)
        apart = np.abs(gradient(cap, sequence_ids=ids, cispo=cispo) - plain).max()
        assert apart > 1e-2 if cap and not cispo else apart < 1e-6
