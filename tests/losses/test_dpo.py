"""DPO (equation 3 of arXiv 2506.21495), conservative DPO and IPO against hand numbers and a slow reference."""

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

from g2d_jax.losses.dpo import dpo_loss, dpo_weights
from g2d_jax.losses.reduction import mean_metrics

ONE = jnp.ones(1)
LENGTHS: dict[str, Any] = {"chosen_lengths": jnp.array([6], jnp.int32), "rejected_lengths": jnp.array([2], jnp.int32)}


Arrays = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def pair(policy_chosen: float, policy_rejected: float, ref_chosen: float, ref_rejected: float) -> Arrays:
    return jnp.array([policy_chosen]), jnp.array([policy_rejected]), jnp.array([ref_chosen]), jnp.array([ref_rejected])


def test_policy_equal_to_reference_gives_log_2() -> None:
    logps = jnp.array([-10.0, -20.0]), jnp.array([-30.0, -5.0])
    loss, sums = dpo_loss(*logps, *logps, jnp.asarray(dpo_weights(2)))
    np.testing.assert_allclose(loss, math.log(2), rtol=1e-6)
    assert mean_metrics(sums, "pairs") == {
        "pairs": 2.0,
        "rewards/chosen": 0.0,
        "rewards/rejected": 0.0,
        "rewards/margins": 0.0,
        "rewards/accuracies": 0.0,  # A tie is not a win.
        "logps/chosen": -15.0,
        "logps/rejected": -17.5,
    }


def test_nll_does_not_drown_dpo_in_a_long_response() -> None:
    """500 tokens, policy = reference, both terms at the paper's scale: gradients on a chosen token -0.05 and -0.002."""

    def loss(token_logprobs: jax.Array) -> jax.Array:
        other = jnp.array([-700.0])
        lengths = {"chosen_lengths": jnp.array([500]), "rejected_lengths": jnp.array([500])}
        return dpo_loss(token_logprobs.sum(keepdims=True), other, other, other, ONE, nll_coef=1.0, **lengths)[0]

    np.testing.assert_allclose(jax.grad(loss)(jnp.full(500, -1.4)), np.full(500, -0.05 - 1 / 500), rtol=1e-5)


def test_weights_over_pairs_and_over_prompts() -> None:
    assert dpo_weights(2).tolist() == [0.5, 0.5]
    assert dpo_weights(2, 8).tolist() == [0.125, 0.125]


def test_literal_values() -> None:
    # Log-ratios +3 and -1, beta 0.1: margin 0.4, -log sigmoid(0.4) = log(1 + e^-0.4).
    loss, sums = dpo_loss(*pair(-10.0, -21.0, -13.0, -20.0), ONE)
    np.testing.assert_allclose(loss, 0.5130152523999526, rtol=1e-6)
    means = mean_metrics(sums, "pairs")
    assert means == pytest.approx(
        {
            "pairs": 1.0,
            "rewards/chosen": 0.3,
            "rewards/rejected": -0.1,
            "rewards/margins": 0.4,
            "rewards/accuracies": 1.0,
            "logps/chosen": -10.0,
            "logps/rejected": -21.0,
        }
    )


def test_swapping_a_pair_flips_the_margin() -> None:
    loss, sums = dpo_loss(*pair(-10.0, -21.0, -13.0, -20.0), ONE)
    swapped_loss, swapped = dpo_loss(*pair(-21.0, -10.0, -20.0, -13.0), ONE)
    assert float(swapped["rewards/margins"]) == -float(sums["rewards/margins"])
    assert float(swapped["rewards/accuracies"]) == 0.0
    np.testing.assert_allclose(swapped_loss - loss, 0.4, rtol=1e-5)  # log sigmoid(x) - log sigmoid(-x) = x


def test_label_smoothing() -> None:
    loss, _ = dpo_loss(*pair(-10.0, -21.0, -13.0, -20.0), ONE, label_smoothing=0.1)
    np.testing.assert_allclose(loss, 0.9 * 0.5130152523999526 + 0.1 * 0.9130152523999526, rtol=1e-6)
    # Its minimum lies where sigmoid(margin) = 0.9, at margin log 9: the gradient vanishes there.
    grad = jax.grad(lambda x: dpo_loss(x, *pair(0.0, 0.0, 0.0, 0.0)[1:], ONE, beta=1.0, label_smoothing=0.1)[0])
    np.testing.assert_allclose(grad(jnp.array([math.log(9.0)])), [0.0], atol=1e-6)


def test_ipo() -> None:
    # Log-ratios +3 over 6 tokens and -1 over 2: gap 0.5 + 0.5 = 1, target 1 / (2 * 0.1) = 5, squared 16.
    loss, sums = dpo_loss(*pair(-10.0, -21.0, -13.0, -20.0), ONE, loss_type="ipo", **LENGTHS)
    np.testing.assert_allclose(loss, 16.0, rtol=1e-6)
    np.testing.assert_allclose(sums["rewards/margins"], 0.4, rtol=1e-5)  # Rewards stay summed, as in TRL.


def test_length_normalised() -> None:
    # Log-ratios +3 over 6 tokens and -1 over 2: margin 0.1 * (0.5 + 0.5). TRL: -logsigmoid(beta * delta of averages).
    arguments = pair(-10.0, -21.0, -13.0, -20.0)
    loss, sums = dpo_loss(*arguments, ONE, loss_type="sigmoid_norm", **LENGTHS)
    np.testing.assert_allclose(loss, math.log1p(math.exp(-0.1)), rtol=1e-6)
    np.testing.assert_allclose(sums["rewards/margins"], 0.4, rtol=1e-5)  # Rewards stay summed, as in TRL.
    smooth, _ = dpo_loss(*arguments, ONE, loss_type="sigmoid_norm", label_smoothing=0.1, **LENGTHS)
    np.testing.assert_allclose(smooth, 0.9 * math.log1p(math.exp(-0.1)) + 0.1 * math.log1p(math.exp(0.1)), rtol=1e-6)
    grad = jax.grad(lambda x: dpo_loss(x, *arguments[1:], ONE, loss_type="sigmoid_norm", **LENGTHS)[0])(arguments[0])
    np.testing.assert_allclose(grad, [-0.1 / 6 / (1 + math.exp(0.1))], rtol=1e-5)


@pytest.mark.parametrize("loss_type", ["sigmoid", "sigmoid_norm", "ipo"])
@pytest.mark.parametrize("mean", [True, False])
def test_nll_of_the_chosen_response(loss_type: Any, mean: bool) -> None:
    """Once a pair, whatever the loss: 0.5 * 10 / 6, and -0.5 / 6 in the gradient of the chosen side; or the sum."""
    tokens, how = 6 if mean else 1, {} if mean else {"nll_length_normalization": False}
    arguments = pair(-10.0, -21.0, -13.0, -20.0)

    def run(coef: float) -> tuple[Any, Any]:
        def loss(pc: jax.Array, pr: jax.Array) -> Any:
            return dpo_loss(pc, pr, *arguments[2:], ONE / 4, loss_type=loss_type, nll_coef=coef, **LENGTHS, **how)

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(*arguments[:2])

    ((plain, plain_sums), plain_grads), ((loss, sums), grads) = run(0.0), run(0.5)
    np.testing.assert_allclose(loss - plain, 0.5 * 10.0 / tokens / 4, rtol=1e-5)
    np.testing.assert_allclose(grads[0] - plain_grads[0], [-0.5 / tokens / 4], rtol=1e-5)
    np.testing.assert_array_equal(grads[1], plain_grads[1])
    assert mean_metrics(sums, "pairs")["nll_loss"] == pytest.approx(10.0 / tokens)
    assert {name: float(x) for name, x in sums.items() if name != "nll_loss"} == plain_sums


def slow(rows: np.ndarray, weights: np.ndarray, beta: float, smoothing: float, lengths: np.ndarray | None) -> float:
    """One pair at a time, from the formulae."""
    total = 0.0
    for i, (pc, pr, rc, rr) in enumerate(rows):
        if lengths is None:
            x = beta * ((pc - rc) - (pr - rr))
            total += weights[i] * ((1 - smoothing) * math.log(1 + math.exp(-x)) + smoothing * math.log(1 + math.exp(x)))
        else:
            total += weights[i] * ((pc - rc) / lengths[i, 0] - (pr - rr) / lengths[i, 1] - 1 / (2 * beta)) ** 2
    return total


@examples(15)
@given(
    seed=st.integers(0, 2**16), cut=st.sampled_from([0, 4]), ipo=st.booleans(), smoothing=st.sampled_from([0.0, 0.2])
)
def test_slow_reference_any_order_any_split(seed: int, cut: int, ipo: bool, smoothing: float) -> None:
    rng = np.random.default_rng(seed)
    rows = -rng.uniform(1, 30, (6, 4))
    weights = np.where(rng.random(6) < 0.2, 0.0, 1 / 6)
    lengths = rng.integers(1, 9, (6, 2))
    smoothing = 0.0 if ipo else smoothing

    def run(index: np.ndarray) -> tuple[jax.Array, dict[str, jax.Array]]:
        pc, pr, rc, rr = (jnp.asarray(rows[index, i], jnp.float32) for i in range(4))
        kwargs: dict[str, Any] = {"label_smoothing": smoothing}
        if ipo:
            kwargs = {
                "loss_type": "ipo",
                "chosen_lengths": jnp.asarray(lengths[index, 0], jnp.int32),
                "rejected_lengths": jnp.asarray(lengths[index, 1], jnp.int32),
            }
        return dpo_loss(pc, pr, rc, rr, jnp.asarray(weights[index], jnp.float32), beta=0.3, **kwargs)

    loss, sums = run(np.arange(6))
    np.testing.assert_allclose(loss, slow(rows, weights, 0.3, smoothing, lengths if ipo else None), rtol=1e-4)
    order = rng.permutation(6)
    (loss_a, sums_a), (loss_b, sums_b) = run(order[:cut]), run(order[cut:])
    np.testing.assert_allclose(loss_a + loss_b, loss, rtol=1e-5, atol=1e-5)
    for name in sums:
        np.testing.assert_allclose(sums_a[name] + sums_b[name], sums[name], rtol=1e-4, atol=1e-4)


def test_gradient_of_equation_3() -> None:
    """beta * sigmoid(-margin), up for chosen and down for rejected; none for the reference."""
    arguments = pair(-10.0, -21.0, -13.0, -20.0)
    grads = jax.grad(lambda pc, pr, rc, rr: dpo_loss(pc, pr, rc, rr, ONE)[0], (0, 1, 2, 3))(*arguments)
    expected = 0.1 / (1 + math.exp(0.4))
    np.testing.assert_allclose(np.ravel(grads), [-expected, expected, 0.0, 0.0], rtol=1e-5)


@pytest.mark.parametrize("loss_type", ["sigmoid", "sigmoid_norm", "ipo"])
@pytest.mark.parametrize("gap", [1e4, -1e4])
def test_extreme_log_probabilities_stay_finite(loss_type: Any, gap: float) -> None:
    lengths: dict[str, Any] = {"chosen_lengths": jnp.array([9.0]), "rejected_lengths": jnp.array([9.0])}

    def loss(x: jax.Array) -> jax.Array:
        return dpo_loss(x, *pair(0.0, -1e4, -1e4, -1e4)[1:], ONE, loss_type=loss_type, **lengths)[0]

    value, grad = jax.value_and_grad(loss)(jnp.array([-1e4 + gap]))
    assert np.isfinite(value) and np.isfinite(grad).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_padding_pair_cannot_poison(poison: float) -> None:
    bad = jnp.array([-3.0, poison])
    weights = jnp.array([1.0, 0.0])
    both = jax.value_and_grad(lambda pc, pr: dpo_loss(pc, pr, bad, bad, weights), (0, 1), has_aux=True)
    (loss, sums), grads = both(bad, bad)
    np.testing.assert_allclose(loss, math.log(2), rtol=1e-6)
    assert all(np.isfinite(value) for value in sums.values()) and float(sums["pairs"]) == 1.0
    np.testing.assert_allclose(grads, [[-0.05, 0.0], [0.05, 0.0]], rtol=1e-6)


def test_bfloat16_inputs_are_computed_in_float32() -> None:
    pc, pr, rc, rr = (x.astype(jnp.bfloat16) for x in pair(-10.0, -21.0, -13.0, -20.0))
    loss, sums = dpo_loss(pc, pr, rc, rr, ONE)
    np.testing.assert_allclose(loss, 0.5130152523999526, rtol=1e-6)
    assert {loss.dtype, *(x.dtype for x in sums.values())} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"loss_type": "hinge"}, "unknown DPO loss_type 'hinge'"),
        ({"beta": 0.0}, "beta must be positive"),
        ({"label_smoothing": 0.5}, "label_smoothing must be in"),
        ({"loss_type": "ipo"}, "pass chosen_lengths"),
        ({"loss_type": "sigmoid_norm"}, "'sigmoid_norm' averages log-probabilities: pass chosen_lengths"),
        ({"nll_coef": -1.0}, "nll_coef must not be negative"),
        ({"nll_coef": 1.0}, "the NLL term is a mean over tokens: pass chosen_lengths"),
        ({"loss_type": "ipo", "label_smoothing": 0.1}, "belongs to loss_type 'sigmoid'"),
        ({"chosen_lengths": jnp.ones(2)}, "one shape"),
    ],
)
def test_wrong_arguments(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dpo_loss(ONE, ONE, ONE, ONE, ONE, **kwargs)
