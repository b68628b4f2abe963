"""SFT loss and the weighted reductions that all losses share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from g2d_jax.losses.reduction import active_sum, mean_metrics, weighted_sum
from g2d_jax.losses.sft import sft_loss, sft_weights


def test_literal_values() -> None:
    # Two sequences with completions of 1 and 3 tokens: mean over 4 tokens, not over sequences.
    per_sequence = sft_weights([1, 3])
    np.testing.assert_array_equal(per_sequence, np.array([0.25, 0.25], np.float32))
    logprobs = jnp.log(jnp.array([[0.5, 0.9, 0.1], [0.25, 0.5, 1.0]]))
    weights = jnp.array([[0.25, 0.0, 0.0], [0.25, 0.25, 0.25]])
    loss, sums = sft_loss(logprobs, weights)
    np.testing.assert_allclose(loss, np.log(2), rtol=1e-6)  # (ln 2 + ln 4 + ln 2 + 0) / 4
    assert mean_metrics(sums, "tokens") == pytest.approx({"tokens": 4.0, "nll": np.log(2)})


@examples(20)
@given(seed=st.integers(0, 2**16), cut=st.sampled_from([0, 13]))
def test_any_order_and_any_split_into_micro_batches(seed: int, cut: int) -> None:
    rng = np.random.default_rng(seed)
    logprobs = -rng.exponential(size=24).astype(np.float32)
    weights = np.where(rng.random(24) < 0.3, 0, rng.random(24) / 24).astype(np.float32)
    order = rng.permutation(24)
    loss, sums = sft_loss(jnp.asarray(logprobs), jnp.asarray(weights))
    parts = [sft_loss(jnp.asarray(logprobs[i]), jnp.asarray(weights[i])) for i in (order[:cut], order[cut:])]
    np.testing.assert_allclose(parts[0][0] + parts[1][0], loss, rtol=1e-5, atol=1e-6)
    for name in sums:
        np.testing.assert_allclose(parts[0][1][name] + parts[1][1][name], sums[name], rtol=1e-5)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_padding_cannot_poison(poison: float) -> None:
    weights = jnp.array([0.5, 0.0, 0.5])
    value, grad = jax.value_and_grad(lambda y: sft_loss(y, weights)[0])(jnp.array([-1.0, poison, -3.0]))
    assert float(value) == 2.0
    np.testing.assert_array_equal(grad, np.array([-0.5, 0.0, -0.5], np.float32))
    assert float(weighted_sum(jnp.array([1.0, poison]), jnp.array([2.0, 0.0]))) == 2.0
    assert float(active_sum(jnp.array([1.0, poison]), jnp.array([2.0, 0.0]))) == 1.0


def test_a_nan_that_counts_is_not_hidden() -> None:
    loss, _ = sft_loss(jnp.array([-1.0, jnp.nan]), jnp.array([0.5, 0.5]))
    assert np.isnan(loss)


def test_bfloat16_is_summed_in_float32() -> None:
    loss, sums = sft_loss(jnp.full((4096,), -1.0, jnp.bfloat16), jnp.full((4096,), 1 / 4096, jnp.float32))
    assert loss.dtype == jnp.float32 and float(loss) == 1.0 and float(sums["nll"]) == 4096.0


def test_nothing_to_train_on() -> None:
    loss, sums = sft_loss(jnp.array([jnp.nan]), jnp.array([0.0]))
    assert float(loss) == 0.0
    means = mean_metrics(sums, "tokens")
    assert means["tokens"] == 0.0 and np.isnan(means["nll"])


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"logprobs \(2,\), weights \(3,\)"):
        sft_loss(jnp.zeros(2), jnp.zeros(3))
