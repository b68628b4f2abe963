"""RAFT by hand: the mean over right responses of the mean over their tokens, wrong ones apart."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from g2d_jax.losses.raft import raft_weights
from g2d_jax.losses.reduction import mean_metrics
from g2d_jax.losses.sft import sft_loss


def test_literal_values() -> None:
    # right responses of 1 and 2 tokens, a wrong one of 4: 1 / (2 * 1) and 1 / (2 * 2)
    weights = raft_weights([1, 2, 4], [True, True, False])
    np.testing.assert_array_equal(weights, np.array([0.5, 0.25, 0.0], np.float32))
    logprobs = jnp.log(jnp.array([[0.5, 1, 1, 1], [0.25, 0.5, 1, 1], [0.1, 0.1, 0.1, 0.1]]))
    lengths = jnp.array([1, 2, 4])[:, None]
    per_token = jnp.where(jnp.arange(4)[None] < lengths, weights[:, None], 0.0)
    (loss, sums), slope = jax.value_and_grad(sft_loss, has_aux=True)(logprobs, per_token)
    # (ln 2 + (ln 4 + ln 2) / 2) / 2
    np.testing.assert_allclose(loss, 1.25 * np.log(2), rtol=1e-6)
    np.testing.assert_array_equal(slope, -per_token)
    assert mean_metrics(sums, "tokens") == pytest.approx({"tokens": 3.0, "nll": 4 / 3 * np.log(2)})


@pytest.mark.parametrize("lengths", [[], [3], [0, 2]])
def test_nothing_kept_weighs_nothing(lengths: list[int]) -> None:
    weights = raft_weights(lengths, np.zeros(len(lengths), bool))
    assert weights.dtype == np.float32 and not weights.any()


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[S\], got \(2,\) and \(3,\)"):
        raft_weights([1, 2], [True, True, False])
