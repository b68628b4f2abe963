"""SFT loss, the entropy term, and the weighted reductions and means that all losses share."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from g2d_jax.losses.entropy import entropy_loss
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


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_padding_cannot_poison(poison: float) -> None:
    weights = jnp.array([0.5, 0.0, 0.5])
    value, grad = jax.value_and_grad(lambda y: sft_loss(y, weights)[0])(
        jnp.array([-1.0, poison, -3.0])
    )
    assert float(value) == 2.0
    np.testing.assert_array_equal(grad, np.array([-0.5, 0.0, -0.5], np.float32))
    assert float(weighted_sum(jnp.array([1.0, poison]), jnp.array([2.0, 0.0]))) == 2.0
    assert float(active_sum(jnp.array([1.0, poison]), jnp.array([2.0, 0.0]))) == 1.0


def test_a_nan_that_counts_is_not_hidden() -> None:
    loss, _ = sft_loss(jnp.array([-1.0, jnp.nan]), jnp.array([0.5, 0.5]))
    assert np.isnan(loss)


def test_bfloat16_is_summed_in_float32() -> None:
    loss, sums = sft_loss(
        jnp.full((4096,), -1.0, jnp.bfloat16), jnp.full((4096,), 1 / 4096, jnp.float32)
    )
    assert loss.dtype == jnp.float32 and float(loss) == 1.0 and float(sums["nll"]) == 4096.0


def test_nothing_to_train_on() -> None:
    loss, sums = sft_loss(jnp.array([jnp.nan]), jnp.array([0.0]))
    assert float(loss) == 0.0
    means = mean_metrics(sums, "tokens")
    assert means["tokens"] == 0.0 and np.isnan(means["nll"])


def test_entropy_literal() -> None:
    entropies, weights = jnp.array([1.0, 3.0, jnp.nan, 0.5]), jnp.array([0.25, 0.25, 0.0, 0.25])
    (loss, sums), grad = jax.value_and_grad(lambda x: entropy_loss(x, weights, 0.1), has_aux=True)(
        entropies
    )
    np.testing.assert_allclose(loss, -0.1 * 4.5 / 4, rtol=1e-6)
    # a step along it raises the entropy
    np.testing.assert_allclose(grad, -0.1 * weights, rtol=1e-6)
    means = mean_metrics({**sums, "pairs": jnp.array(1.0)}, "pairs")
    assert means == {"policy_entropy": 1.5, "entropy_tokens": 3.0, "pairs": 1.0}


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match=r"logprobs \(2,\), weights \(3,\)"):
        sft_loss(jnp.zeros(2), jnp.zeros(3))
    with pytest.raises(ValueError, match="one shape"):
        entropy_loss(jnp.ones(1), jnp.ones(2), 0.1)
    with pytest.raises(ValueError, match="must not be negative"):
        entropy_loss(jnp.ones(1), jnp.ones(1), -0.1)


def test_a_sum_with_a_count_of_its_own() -> None:
    sums = {
        "pairs": 2.0,
        "rewards/margins": 3.0,
        "tokens": 8.0,
        "kl|tokens": 2.0,
        "x|words": 1.0,
        "words": 5.0,
    }
    expected = {
        "pairs": 2.0,
        "rewards/margins": 1.5,
        "tokens": 8.0,
        "kl": 0.25,
        "x": 0.2,
        "words": 5.0,
    }
    assert mean_metrics(sums, "pairs") == expected


def test_nothing_to_measure_is_nan() -> None:
    means = mean_metrics(
        {"pairs": 0.0, "logps/chosen": 0.0, "tokens": 4.0, "kl|tokens": 2.0}, "pairs"
    )
    assert math.isnan(means.pop("logps/chosen"))
    assert means == {"pairs": 0.0, "tokens": 4.0, "kl": 0.5}


def test_wrong_sums() -> None:
    with pytest.raises(KeyError, match="pairs"):
        mean_metrics({"tokens": 1.0}, "pairs")
    with pytest.raises(KeyError, match="words"):
        mean_metrics({"tokens": 1.0, "x|words": 1.0}, "tokens")
    with pytest.raises(ValueError, match="two sums are called 'kl'"):
        mean_metrics({"tokens": 1.0, "kl": 1.0, "kl|tokens": 1.0}, "tokens")
