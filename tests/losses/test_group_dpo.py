"""GroupDPO (equation 4 of arXiv 2506.21495) against DPO in a loop over pairs."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from g2d_jax.config import OnlineDPO
from g2d_jax.losses.dpo import dpo_loss
from g2d_jax.losses.group_dpo import group_dpo_loss, group_dpo_weights
from g2d_jax.losses.reduction import mean_metrics

SIDES = np.array([[1, -1, 1, -1, -1, 1, 0, 0], [-1, -1, 1, 1, 1, 0, 0, 0]])
# row 1's prompt 1 has no rejected response
GROUPS = np.array([[0, 0, 1, 1, 0, 1, 1, 0], [0, 0, 0, 1, 0, 0, 0, 0]])
PLACES = jnp.asarray(SIDES), jnp.asarray(GROUPS)
PROMPTS = ((0, 0), (0, 1), (1, 0), (1, 1))


def count(sign: int) -> np.ndarray:
    return np.array(
        [((SIDES[row] == sign) & (GROUPS[row] == group)).sum() for row, group in PROMPTS]
    )


def inputs(seed: int = 0) -> tuple[jax.Array, ...]:
    """policy, reference, lengths and weights, which are read of chosen places alone."""
    rng = np.random.default_rng(seed)
    policy, reference = -rng.uniform(1, 30, (2, *SIDES.shape))
    lengths = rng.integers(1, 9, SIDES.shape)
    weights = np.full(SIDES.shape, np.nan)
    for (row, group), weight in zip(PROMPTS, group_dpo_weights(count(1), count(-1)), strict=True):
        weights[row, (GROUPS[row] == group) & (SIDES[row] == 1)] = weight
    return tuple(jnp.asarray(x, jnp.float32) for x in (policy, reference, lengths, weights))


def floats(sums: dict[str, jax.Array]) -> dict[str, float]:
    return {name: float(x) for name, x in sums.items()}


def explicit(
    policy: jax.Array, reference: jax.Array, lengths: jax.Array, weights: jax.Array, **settings: Any
) -> Any:
    """Every pair by itself through dpo_loss, added up."""
    total, sums = jnp.zeros(()), []
    for row in range(SIDES.shape[0]):
        for i in np.flatnonzero(SIDES[row] == 1):
            for j in np.flatnonzero((SIDES[row] == -1) & (GROUPS[row] == GROUPS[row, i])):
                pc, pr, rc, rr, left, right = (
                    x[row, k][None] for x in (policy, reference, lengths) for k in (i, j)
                )
                weight = weights[row, i][None]
                sizes = {"chosen_lengths": left, "rejected_lengths": right}
                loss, more = dpo_loss(pc, pr, rc, rr, weight, OnlineDPO(**settings), **sizes)
                total = total + loss
                sums.append(more)
    return total, {name: sum(float(one[name]) for one in sums) for name in sums[0]}


def test_weights_literal() -> None:
    # Two prompts have pairs: 2 and 4 of them.
    weights = group_dpo_weights([1, 2, 3, 0], [2, 2, 0, 4])
    assert weights.dtype == np.float32
    np.testing.assert_allclose(weights, [1 / 4, 1 / 8, 0.0, 0.0])
    np.testing.assert_allclose(
        group_dpo_weights([1, 2, 3, 0], [2, 2, 0, 4], 4), [1 / 8, 1 / 16, 0.0, 0.0]
    )
    np.testing.assert_array_equal(group_dpo_weights([0, 1], [1, 0]), [0.0, 0.0])
    with pytest.raises(ValueError, match="counts must be"):
        group_dpo_weights([1], [1, 2])


SETTINGS: list[dict[str, Any]] = [
    {},
    {"nll_coef": 0.7},
    {"loss_type": "sigmoid_norm", "nll_coef": 0.7},
    {"loss_type": "ipo"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_equals_a_loop_over_pairs(settings: dict[str, Any]) -> None:
    policy, reference, lengths, weights = inputs()

    def fast(x: jax.Array, reference: jax.Array) -> Any:
        return group_dpo_loss(
            x, reference, *PLACES, weights, OnlineDPO(beta=0.3, **settings), lengths=lengths
        )

    # where a place takes no part
    poisoned = (jnp.where(PLACES[0] != 0, x, jnp.nan) for x in (policy, reference))
    (loss, sums), grad = jax.value_and_grad(fast, has_aux=True)(*poisoned)
    (slow, slow_sums), slow_grad = jax.value_and_grad(explicit, has_aux=True)(
        policy, reference, lengths, weights, beta=0.3, **settings
    )
    np.testing.assert_allclose(loss, slow, rtol=1e-5)
    np.testing.assert_allclose(grad, slow_grad, rtol=1e-4, atol=1e-6)
    assert float(sums["pairs"]) == (count(1) * count(-1)).sum() == 8
    assert floats(sums) == pytest.approx(slow_sums, rel=1e-5)


def test_literal_value() -> None:
    """One correct (log-ratio 3) against two incorrect ones (-1 and 3), beta 0.1: margins 0.4 and 0,
    mean of two."""
    policy, reference = jnp.array([[-10.0, -21.0, -7.0]]), jnp.array([[-13.0, -20.0, -10.0]])
    weights = jnp.full((1, 3), group_dpo_weights([1], [2])[0])
    loss, sums = group_dpo_loss(
        policy, reference, jnp.array([[1, -1, -1]]), jnp.zeros((1, 3)), weights, OnlineDPO()
    )
    np.testing.assert_allclose(loss, (0.5130152523999526 + math.log(2)) / 2, rtol=1e-6)
    means = mean_metrics(sums, "pairs")
    assert (means["pairs"], means["rewards/margins"]) == (2.0, pytest.approx(0.2))


def test_wrong_arguments() -> None:
    ones = jnp.ones((1, 2))
    with pytest.raises(ValueError, match=r"must be \[rows, places\]"):
        group_dpo_loss(*[jnp.ones(2)] * 5, OnlineDPO())
    with pytest.raises(ValueError, match="one shape"):
        group_dpo_loss(ones, ones, ones, ones, jnp.ones((1, 3)), OnlineDPO())
    with pytest.raises(ValueError, match="pass chosen_lengths"):
        group_dpo_loss(ones, ones, ones, ones, ones, OnlineDPO(loss_type="sigmoid_norm"))
