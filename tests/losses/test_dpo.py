"""DPO (equation 3 of arXiv 2506.21495), conservative DPO and IPO against hand numbers and a slow
reference."""

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

from g2d_jax.config import OnlineDPO
from g2d_jax.losses import dpo
from g2d_jax.losses.dpo import dpo_weights
from g2d_jax.losses.reduction import mean_metrics

ONE = jnp.ones(1)
LENGTHS: dict[str, Any] = {
    "chosen_lengths": jnp.array([6], jnp.int32),
    "rejected_lengths": jnp.array([2], jnp.int32),
}


# log-ratios +3 over 6 tokens and -1 over 2
PAIR = tuple(jnp.array([x]) for x in (-10.0, -21.0, -13.0, -20.0))


def dpo_loss(
    *arrays: Any, chosen_lengths: Any = None, rejected_lengths: Any = None, **settings: Any
) -> Any:
    """The loss of these fields of its settings."""
    lengths = {"chosen_lengths": chosen_lengths, "rejected_lengths": rejected_lengths}
    return dpo.dpo_loss(*arrays, OnlineDPO(**settings), **lengths)


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def test_policy_equal_to_reference_gives_log_2() -> None:
    logps = jnp.array([-10.0, -20.0]), jnp.array([-30.0, -5.0])
    loss, sums = dpo_loss(*logps, *logps, jnp.asarray(dpo_weights(2)))
    np.testing.assert_allclose(loss, math.log(2), rtol=1e-6)
    assert mean_metrics(sums, "pairs") == {
        "pairs": 2.0,
        "rewards/chosen": 0.0,
        "rewards/rejected": 0.0,
        "rewards/margins": 0.0,
        "rewards/accuracies": 0.5,  # a tie says no more than chance
        "logps/chosen": -15.0,
        "logps/rejected": -17.5,
    }


@pytest.mark.parametrize(
    ("reference", "moved", "expected"),
    [
        (-10.0, 0.0, 0.5),
        (-10.0, 2e-5, 0.5),  # within 1e-5 + 1e-6 of the four log-probabilities, 40 nats together
        (-10.0, -2e-5, 0.5),
        (-10.0, 1e-4, 1.0),
        (-10.0, -1e-4, 0.0),
        (-2000.0, 2.0**-10, 0.5),  # eight steps of float32 there
        (-2000.0, 0.02, 1.0),
        (0.0, 2e-5, 1.0),
    ],
)
def test_a_tie_up_to_rounding_counts_one_half(
    reference: float, moved: float, expected: float
) -> None:
    before, after = jnp.array([reference]), jnp.array([reference + moved], jnp.float32)
    for beta in (0.01, 0.1, 2.0):
        _, sums = dpo_loss(after, before, before, before, ONE, beta=beta)
        assert mean_metrics(sums, "pairs")["rewards/accuracies"] == expected


def test_equal_means_are_a_tie_without_a_reference() -> None:
    pair = jnp.array([-9.0]), jnp.array([-3.0])  # -1.5 a token each
    _, sums = dpo_loss(*pair, None, None, ONE, **LENGTHS, loss_type="simpo")
    assert mean_metrics(sums, "pairs")["rewards/accuracies"] == 0.5


def test_weights_over_pairs_and_over_prompts() -> None:
    assert dpo_weights(2).tolist() == [0.5, 0.5]
    assert dpo_weights(2, 8).tolist() == [0.125, 0.125]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 0.5130152523999526),  # -log sigmoid(0.4)
        ({"loss_type": "ipo"}, 16.0),  # gap 0.5 + 0.5 = 1, target 1 / (2 * 0.1) = 5
        # TRL: -logsigmoid(beta * delta of averages)
        (
            {"loss_type": "sigmoid_norm"},
            softplus(-0.1),
        ),
    ],
)
def test_literal_values(settings: dict[str, Any], expected: float) -> None:
    loss, sums = dpo_loss(*PAIR, ONE, **LENGTHS, **settings)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert mean_metrics(sums, "pairs") == pytest.approx(
        {
            "pairs": 1.0,
            "rewards/chosen": 0.3,
            "rewards/rejected": -0.1,
            "rewards/margins": 0.4,  # summed, whatever the loss, as in TRL
            "rewards/accuracies": 1.0,
            "logps/chosen": -10.0,
            "logps/rejected": -21.0,
        }
    )


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        # beta * sigmoid(-margin)
        (
            "sigmoid",
            [-0.1 / (1 + math.exp(0.4)), 0.1 / (1 + math.exp(0.4))],
        ),
        ("sigmoid_norm", [-0.1 / 6 / (1 + math.exp(0.1)), 0.1 / 2 / (1 + math.exp(0.1))]),
        ("ipo", [2 * -4 / 6, 2 * 4 / 2]),
    ],
)
def test_gradient_is_up_for_chosen_down_for_rejected_and_none_for_the_reference(
    loss_type: Any, expected: list[float]
) -> None:
    grads = jax.grad(
        lambda *pair: dpo_loss(*pair, ONE, loss_type=loss_type, **LENGTHS)[0], (0, 1, 2, 3)
    )(*PAIR)
    np.testing.assert_allclose(np.ravel(grads), [*expected, 0.0, 0.0], rtol=1e-5)


def test_simpo_is_that_of_trl() -> None:
    """Means of -10 / 6 and -3 / 2 a token, beta 2, gamma 0.5: TRL 1.16's values. There is no
    reference to pass."""
    settings = {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.5}

    def loss(chosen: jax.Array, rejected: jax.Array) -> Any:
        return dpo_loss(chosen, rejected, None, None, ONE, **LENGTHS, **settings)

    pair = jnp.array([-10.0]), jnp.array([-3.0])
    (value, sums), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(*pair)
    np.testing.assert_allclose(value, 1.1942181492675368, rtol=1e-6)
    expected = (-0.23235309465513576, 0.6970592839654073)
    np.testing.assert_allclose(np.ravel(grads), expected, rtol=1e-6)
    means = mean_metrics(sums, "pairs")
    assert [means[f"rewards/{side}"] for side in ("chosen", "rejected")] == pytest.approx(
        [-10 / 3, -3.0]
    )
    with pytest.raises(ValueError, match="'sigmoid' compares with a reference"):
        dpo_loss(*pair, None, None, ONE)


@pytest.mark.parametrize("loss_type", ["sigmoid", "sigmoid_norm", "ipo"])
def test_nll_of_the_chosen_response(loss_type: Any) -> None:
    """Once a pair, whatever the loss: 0.5 * 10 / 6, and -0.5 / 6 in the gradient of the chosen
    side."""
    tokens = 6

    def run(coef: float) -> tuple[Any, Any]:
        def loss(pc: jax.Array, pr: jax.Array) -> Any:
            return dpo_loss(
                pc, pr, *PAIR[2:], ONE / 4, loss_type=loss_type, nll_coef=coef, **LENGTHS
            )

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(*PAIR[:2])

    ((plain, plain_sums), plain_grads), ((loss, sums), grads) = run(0.0), run(0.5)
    np.testing.assert_allclose(loss - plain, 0.5 * 10.0 / tokens / 4, rtol=1e-5)
    np.testing.assert_allclose(grads[0] - plain_grads[0], [-0.5 / tokens / 4], rtol=1e-5)
    np.testing.assert_array_equal(grads[1], plain_grads[1])
    assert mean_metrics(sums, "pairs")["nll_loss"] == pytest.approx(10.0 / tokens)
    assert {name: float(x) for name, x in sums.items() if name != "nll_loss"} == plain_sums


@examples(15)
@given(
    seed=st.integers(0, 2**16),
    cut=st.sampled_from([0, 4]),
    ipo=st.booleans(),
)
def test_slow_reference_any_order_any_split(seed: int, cut: int, ipo: bool) -> None:
    """One pair at a time, from the formulae."""
    rng = np.random.default_rng(seed)
    rows, lengths = -rng.uniform(1, 30, (6, 4)), rng.integers(1, 9, (6, 2))
    weights = np.where(rng.random(6) < 0.2, 0.0, 1 / 6)

    def slow(pc: float, pr: float, rc: float, rr: float, chosen: int, rejected: int) -> float:
        if ipo:
            return ((pc - rc) / chosen - (pr - rr) / rejected - 1 / (2 * 0.3)) ** 2
        x = 0.3 * ((pc - rc) - (pr - rr))
        return softplus(-x)

    def run(index: np.ndarray) -> tuple[jax.Array, dict[str, jax.Array]]:
        arrays = (jnp.asarray(x, jnp.float32) for x in (*rows[index].T, weights[index]))
        sizes = {
            f"{side}_lengths": jnp.asarray(lengths[index, i])
            for i, side in enumerate(("chosen", "rejected"))
        }
        settings: Any = {"loss_type": "ipo"} if ipo else {}
        return dpo_loss(*arrays, beta=0.3, **settings, **sizes)

    loss, sums = run(np.arange(6))
    terms = [slow(*row, *sizes) for row, sizes in zip(rows, lengths, strict=True)]
    np.testing.assert_allclose(loss, np.dot(terms, weights), rtol=1e-4)
    order = rng.permutation(6)
    (loss_a, sums_a), (loss_b, sums_b) = run(order[:cut]), run(order[cut:])
    np.testing.assert_allclose(loss_a + loss_b, loss, rtol=1e-5, atol=1e-5)
    for name in sums:
        np.testing.assert_allclose(sums_a[name] + sums_b[name], sums[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("loss_type", ["sigmoid", "sigmoid_norm", "ipo"])
@pytest.mark.parametrize("gap", [1e4, -1e4])
def test_extreme_log_probabilities_stay_finite(loss_type: Any, gap: float) -> None:
    lengths: dict[str, Any] = {
        "chosen_lengths": jnp.array([9.0]),
        "rejected_lengths": jnp.array([9.0]),
    }

    def loss(x: jax.Array) -> jax.Array:
        return dpo_loss(x, *[jnp.array([-1e4])] * 3, ONE, loss_type=loss_type, **lengths)[0]

    value, grad = jax.value_and_grad(loss)(jnp.array([-1e4 + gap]))
    assert np.isfinite(value) and np.isfinite(grad).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_padding_pair_cannot_poison(poison: float) -> None:
    bad = jnp.array([-3.0, poison])
    weights = jnp.array([1.0, 0.0])
    both = jax.value_and_grad(
        lambda pc, pr: dpo_loss(pc, pr, bad, bad, weights), (0, 1), has_aux=True
    )
    (loss, sums), grads = both(bad, bad)
    np.testing.assert_allclose(loss, math.log(2), rtol=1e-6)
    assert all(np.isfinite(value) for value in sums.values()) and float(sums["pairs"]) == 1.0
    np.testing.assert_allclose(grads, [[-0.05, 0.0], [0.05, 0.0]], rtol=1e-6)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"loss_type": "ipo"}, "pass chosen_lengths"),
        (
            {"loss_type": "sigmoid_norm"},
            "'sigmoid_norm' averages log-probabilities: pass chosen_lengths",
        ),
        ({"nll_coef": 1.0}, "the NLL term is a mean over tokens: pass chosen_lengths"),
        ({"chosen_lengths": jnp.ones(2)}, "one shape"),
    ],
)
def test_wrong_arguments(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dpo_loss(ONE, ONE, ONE, ONE, ONE, **kwargs)


def test_a_loss_type_without_a_formula_is_not_taken_for_the_sigmoid() -> None:
    settings = OnlineDPO()
    object.__setattr__(settings, "loss_type", "new")
    with pytest.raises(AssertionError, match="new"):
        dpo.dpo_loss(ONE, ONE, ONE, ONE, ONE, settings)
