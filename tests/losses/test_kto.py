"""KTO against TRL 1.16's own numbers, in any split, with padding that must not matter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from g2d_jax.losses.kto import kto_loss, reference_point
from g2d_jax.losses.reduction import mean_metrics

POLICY, REFERENCE = jnp.array([-10.0, -21.0, -13.0]), jnp.array([-13.0, -20.0, -12.0])
DESIRABLE, KL, WEIGHTS = jnp.array([1.0, 0.0, 1.0]), jnp.full(3, 5 / 3), jnp.full(3, 1 / 3)


def test_reference_point_literal() -> None:
    """Log-ratios 3, 1 and 1 of responses to other prompts: 5 / 3; a negative mean is 0."""
    policy, reference = np.array([-30.0, -28.0, -40.0]), np.array([-33.0, -29.0, -41.0])
    assert reference_point(policy, reference) == pytest.approx(5 / 3)
    assert reference_point(reference, policy) == 0.0


def test_values_and_gradient_are_those_of_trl() -> None:
    def loss(policy: jax.Array, reference: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        return kto_loss(policy, reference, DESIRABLE, KL, WEIGHTS, undesirable_weight=1.5)

    (value, sums), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(POLICY, REFERENCE)
    np.testing.assert_allclose(value, 0.561192921550383, rtol=1e-6)
    gradient = [-0.00829640575992324, 0.012280385233701377, -0.008186923489134251]
    np.testing.assert_allclose(grads, [gradient, [0.0] * 3], rtol=1e-5)
    assert mean_metrics(sums, "responses") == pytest.approx(
        {
            "responses": 3.0,
            "kl": 5 / 3,
            "desirable": 2.0,
            "undesirable": 1.0,
            "rewards/chosen": 0.1,
            "rewards/rejected": -0.1,
            "logps/chosen": -11.5,
            "logps/rejected": -21.0,
        }
    )


def test_at_the_start_the_loss_is_half_the_mean_weight() -> None:
    loss, _ = kto_loss(POLICY, POLICY, DESIRABLE, KL * 0, WEIGHTS, desirable_weight=2.0, undesirable_weight=0.5)
    np.testing.assert_allclose(loss, 0.5 * (2.0 + 0.5 + 2.0) / 3, rtol=1e-6)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_padding_cannot_poison_and_parts_add_up(poison: float) -> None:
    arrays = [jnp.append(x, poison) for x in (POLICY, REFERENCE, DESIRABLE, KL)]
    weights = jnp.append(WEIGHTS, 0.0)
    whole, whole_sums = kto_loss(POLICY, REFERENCE, DESIRABLE, KL, WEIGHTS)
    parts = [kto_loss(*(x[cut] for x in (*arrays, weights))) for cut in (slice(1), slice(1, 4))]
    np.testing.assert_allclose(sum(loss for loss, _ in parts), whole, rtol=1e-6)
    for name, value in whole_sums.items():
        np.testing.assert_allclose(sum(sums[name] for _, sums in parts), value, rtol=1e-6, err_msg=name)
    grad = jax.grad(lambda x: kto_loss(x, *arrays[1:], weights)[0])(arrays[0])
    assert np.isfinite(grad).all() and grad[3] == 0
