"""GroupDPO (equation 4 of arXiv 2506.21495) against DPO, a loop over pairs and other packings."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from g2d_jax.losses.dpo import dpo_loss, dpo_weights
from g2d_jax.losses.group import group_dpo_loss, group_dpo_weights, pair_weights
from g2d_jax.losses.reduction import mean_metrics

SIDES = np.array([[1, -1, 1, -1, -1, 1, 0, 0], [-1, -1, 1, 1, 1, 0, 0, 0]])
GROUPS = np.array([[0, 0, 1, 1, 0, 1, 1, 0], [0, 0, 0, 1, 0, 0, 0, 0]])  # row 1's prompt 1 has no rejected response
PLACES = jnp.asarray(SIDES), jnp.asarray(GROUPS)
PROMPTS = ((0, 0), (0, 1), (1, 0), (1, 1))


def count(sign: int) -> np.ndarray:
    return np.array([((SIDES[row] == sign) & (GROUPS[row] == group)).sum() for row, group in PROMPTS])


def weights_of(per_prompt: np.ndarray) -> np.ndarray:
    weights = np.zeros(SIDES.shape)
    for (row, group), weight in zip(PROMPTS, per_prompt, strict=True):
        weights[row, (GROUPS[row] == group) & (SIDES[row] != 0)] = weight
    return weights


def inputs(seed: int = 0) -> tuple[jax.Array, ...]:
    """policy, reference, lengths and weights."""
    rng = np.random.default_rng(seed)
    policy, reference = -rng.uniform(1, 30, (2, *SIDES.shape))
    lengths = rng.integers(1, 9, SIDES.shape)
    weights = weights_of(group_dpo_weights(count(1), count(-1)))
    return tuple(jnp.asarray(x, jnp.float32) for x in (policy, reference, lengths, weights))


def floats(sums: dict[str, jax.Array]) -> dict[str, float]:
    return {name: float(x) for name, x in sums.items()}


def explicit(policy: jax.Array, reference: jax.Array, lengths: jax.Array, weights: jax.Array, **settings: Any) -> Any:
    """Every pair by itself through dpo_loss, added up."""
    total, sums = jnp.zeros(()), []
    for row in range(SIDES.shape[0]):
        for i in np.flatnonzero(SIDES[row] == 1):
            for j in np.flatnonzero((SIDES[row] == -1) & (GROUPS[row] == GROUPS[row, i])):
                pc, pr, rc, rr, left, right = (x[row, k][None] for x in (policy, reference, lengths) for k in (i, j))
                weight = weights[row, i][None]
                loss, more = dpo_loss(pc, pr, rc, rr, weight, chosen_lengths=left, rejected_lengths=right, **settings)
                total = total + loss
                sums.append(more)
    return total, {name: sum(float(one[name]) for one in sums) for name in sums[0]}


def test_weights_literal() -> None:
    weights = group_dpo_weights([1, 2, 3, 0], [2, 2, 0, 4])  # Two prompts have pairs: 2 and 4 of them.
    assert weights.dtype == np.float32
    np.testing.assert_allclose(weights, [1 / 4, 1 / 8, 0.0, 0.0])
    np.testing.assert_allclose(group_dpo_weights([1, 2, 3, 0], [2, 2, 0, 4], 4), [1 / 8, 1 / 16, 0.0, 0.0])
    np.testing.assert_array_equal(group_dpo_weights([0, 1], [1, 0]), [0.0, 0.0])
    with pytest.raises(ValueError, match="counts must be"):
        group_dpo_weights([1], [1, 2])


def test_pairs_literal() -> None:
    pairs = pair_weights(jnp.array([[1, -1, 0, -1, 1]]), jnp.array([[0.0, 0.0, 0.0, 1.0, 1.0]]), jnp.full((1, 5), 0.5))
    expected = np.zeros((1, 5, 5))
    expected[0, 0, 1] = expected[0, 4, 3] = 0.5
    np.testing.assert_array_equal(pairs, expected)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.2, "nll_coef": 0.7},
    {"loss_type": "sigmoid_norm", "nll_coef": 0.7},
    {"loss_type": "ipo"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_equals_a_loop_over_pairs(settings: dict[str, Any]) -> None:
    policy, reference, lengths, weights = inputs()

    def fast(x: jax.Array) -> Any:
        return group_dpo_loss(x, reference, PLACES[0], PLACES[1], weights, beta=0.3, lengths=lengths, **settings)

    (loss, sums), grad = jax.value_and_grad(fast, has_aux=True)(policy)
    (slow, slow_sums), slow_grad = jax.value_and_grad(explicit, has_aux=True)(
        policy, reference, lengths, weights, beta=0.3, **settings
    )
    np.testing.assert_allclose(loss, slow, rtol=1e-5)
    np.testing.assert_allclose(grad, slow_grad, rtol=1e-4, atol=1e-6)
    assert float(sums["pairs"]) == (count(1) * count(-1)).sum() == 8
    assert floats(sums) == pytest.approx(slow_sums, rel=1e-5)


def test_literal_value() -> None:
    """One correct (log-ratio 3) against two incorrect ones (-1 and 3), beta 0.1: margins 0.4 and 0, mean of two."""
    policy, reference = jnp.array([[-10.0, -21.0, -7.0]]), jnp.array([[-13.0, -20.0, -10.0]])
    weights = jnp.full((1, 3), group_dpo_weights([1], [2])[0])
    loss, sums = group_dpo_loss(policy, reference, jnp.array([[1, -1, -1]]), jnp.zeros((1, 3)), weights)
    np.testing.assert_allclose(loss, (0.5130152523999526 + math.log(2)) / 2, rtol=1e-6)
    means = mean_metrics(sums, "pairs")
    assert (means["pairs"], means["rewards/margins"]) == (2.0, pytest.approx(0.2))


def test_one_pair_a_prompt_is_dpo() -> None:
    rng = np.random.default_rng(1)
    policy, reference = (jnp.asarray(-rng.uniform(1, 30, (2, 6)), jnp.float32) for _ in range(2))
    sides, groups = jnp.tile(jnp.array([1, -1]), (2, 3)), jnp.tile(jnp.array([0, 0, 1, 1, 2, 2]), (2, 1))
    weights = jnp.full((2, 6), group_dpo_weights([1] * 6, [1] * 6)[0])

    def plain(x: jax.Array) -> Any:
        chosen, rejected, ref_chosen, ref_rejected = (y[:, i::2] for y in (x, reference) for i in range(2))
        return dpo_loss(chosen, rejected, ref_chosen, ref_rejected, jnp.asarray(dpo_weights(6)).reshape(2, 3))

    (loss, sums), grad = jax.value_and_grad(
        lambda x: group_dpo_loss(x, reference, sides, groups, weights), has_aux=True
    )(policy)
    (expected, expected_sums), expected_grad = jax.value_and_grad(plain, has_aux=True)(policy)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(grad, expected_grad, rtol=1e-6)
    assert floats(sums) == pytest.approx(floats(expected_sums), rel=1e-6)


def test_policy_equal_to_reference_gives_log_2() -> None:
    policy, _, _, weights = inputs()
    loss, _ = group_dpo_loss(policy, policy, PLACES[0], PLACES[1], weights)
    np.testing.assert_allclose(loss, math.log(2), rtol=1e-6)


def test_swapping_the_sides_flips_the_margins() -> None:
    policy, reference, _, weights = inputs()
    _, sums = group_dpo_loss(policy, reference, PLACES[0], PLACES[1], weights)
    _, swapped = group_dpo_loss(policy, reference, -PLACES[0], PLACES[1], weights)
    np.testing.assert_allclose(swapped["rewards/margins"], -sums["rewards/margins"], rtol=1e-5)
    assert float(swapped["rewards/accuracies"] + sums["rewards/accuracies"]) == float(sums["pairs"])


def test_nll_is_a_mean_over_chosen_responses_then_prompts() -> None:
    policy, reference, lengths, weights = inputs()
    plain, _ = group_dpo_loss(policy, reference, PLACES[0], PLACES[1], weights)
    loss, sums = group_dpo_loss(policy, reference, PLACES[0], PLACES[1], weights, nll_coef=2.0, lengths=lengths)
    paired = [(row, group) for (row, group), n in zip(PROMPTS, count(1) * count(-1), strict=True) if n]
    of_token = -np.asarray(policy) / np.maximum(lengths, 1)
    nll = [of_token[row, (SIDES[row] == 1) & (GROUPS[row] == group)].mean() for row, group in paired]
    assert len(nll) == 3
    np.testing.assert_allclose(loss - plain, 2.0 * np.mean(nll), rtol=1e-5)
    assert "nll_loss" in sums


def test_any_order_and_any_neighbours() -> None:
    """Prompts one a row, in shuffled places and among padding: the same loss, sums and gradient of each response."""
    policy, reference, _, weights = inputs()
    rng = np.random.default_rng(5)
    rows = [np.flatnonzero((GROUPS[row] == group) & (SIDES[row] != 0)) for row, group in PROMPTS]
    targets = [rng.permutation(8)[: len(places)] for places in rows]
    sides, fresh = np.zeros((4, 8)), [np.full((4, 8), np.nan) for _ in range(2)]
    weight = np.zeros((4, 8))
    for new, ((row, _), places, target) in enumerate(zip(PROMPTS, rows, targets, strict=True)):
        sides[new, target], weight[new, target] = SIDES[row, places], weights[row, places]
        for array, source in zip(fresh, (policy, reference), strict=True):
            array[new, target] = source[row, places]
    run = jax.value_and_grad(group_dpo_loss, has_aux=True)
    (loss, sums), grad = run(policy, reference, PLACES[0], PLACES[1], weights)
    (again, more), moved = run(*(jnp.asarray(x, jnp.float32) for x in (*fresh, sides, np.full((4, 8), 7.0), weight)))
    np.testing.assert_allclose(again, loss, rtol=1e-6)
    assert floats(more) == pytest.approx(floats(sums), rel=1e-5)
    for new, ((row, _), places, target) in enumerate(zip(PROMPTS, rows, targets, strict=True)):
        np.testing.assert_allclose(moved[new, target], grad[row, places], rtol=1e-5, atol=1e-7)
    assert np.isfinite(moved).all()


def test_wrong_arguments() -> None:
    ones = jnp.ones((1, 2))
    with pytest.raises(ValueError, match=r"must be \[rows, places\]"):
        group_dpo_loss(*[jnp.ones(2)] * 5)
    with pytest.raises(ValueError, match="one shape"):
        group_dpo_loss(ones, ones, ones, ones, jnp.ones((1, 3)))
    with pytest.raises(ValueError, match="pass chosen_lengths"):
        group_dpo_loss(ones, ones, ones, ones, ones, loss_type="sigmoid_norm")
