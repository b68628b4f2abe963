"""Objectives on packed micro-batches: literal values, padding, and agreement with the scorer."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from g2d_jax import mesh as meshes
from g2d_jax.data.packing import Group, Packed, Response, pack
from g2d_jax.models import decoder
from g2d_jax.models.config import ModelConfig
from g2d_jax.training import objectives
from g2d_jax.training.objectives import Compute
from g2d_jax.training.step import make_scorer, put_batch

CONFIG = ModelConfig("llama", 64, 32, 2, 4, 2, 8, 48)
ONE = meshes.make_mesh(devices=jax.devices()[:1])
COMPUTE = Compute(ONE)
score = make_scorer(COMPUTE)


@pytest.fixture(scope="module")
def model() -> decoder.Decoder:
    return decoder.init(CONFIG, jax.random.key(0), std=0.2)


def packed_pairs(reference: tuple[float, float] = (0.0, 0.0)) -> Packed:
    """Three pairs in rows of 24 columns; chosen responses have 3 tokens, rejected ones 2."""
    rng = np.random.default_rng(0)

    def response(length: int, ref: float) -> Response:
        ids = rng.integers(0, 64, length)
        return Response(ids, {"weight": 1.0}, {"pair_weight": 1 / 3, "reference": ref})

    groups = [
        Group(rng.integers(0, 64, prompt), [response(3, reference[0]), response(2, reference[1])], whole=True)
        for prompt in (2, 4, 5)
    ]
    return pack(groups, row_length=24, microbatch_rows=2, places=4)


def micro(packed: Packed) -> dict[str, jax.Array]:
    """The only micro-batch."""
    assert packed.count == 1
    return {name: jnp.asarray(x[0]) for name, x in packed.arrays.items()}


def pairwise(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {**arrays, "weight": arrays["pair_weight"]}


@pytest.fixture(scope="module")
def scored(model) -> tuple[np.ndarray, list[list[np.ndarray]]]:
    """The scorer's log-probabilities, packed and one array a response."""
    packed = packed_pairs()
    logprobs = np.asarray(score(model, *put_batch(packed, ONE))[0])
    return logprobs, packed.unpack(logprobs)


def test_the_scorer_and_the_objectives_agree(model, scored):
    _, sides = scored
    arrays = micro(packed_pairs())
    loss, sums = jax.jit(objectives.sft(COMPUTE))(model, arrays)
    total = sum(float(side.sum()) for pair in sides for side in pair)
    np.testing.assert_allclose(loss, -total, rtol=1e-6)
    assert (float(sums["tokens"]), float(sums["nll"])) == (15.0, pytest.approx(-total, rel=1e-6))
    objective = objectives.dpo(COMPUTE, beta=0.1, label_smoothing=0.0, loss_type="sigmoid")
    _, sums = jax.jit(objective)(model, pairwise(arrays))
    assert float(sums["pairs"]) == 3.0
    for name, side in (("logps/chosen", 0), ("logps/rejected", 1)):
        np.testing.assert_allclose(sums[name], sum(pair[side].sum() for pair in sides), rtol=1e-6)


def test_dpo_literal(model, scored):
    """Equation 3 by hand from the scorer's sums, references -9 and -7, beta 0.5."""
    _, sides = scored
    margins = [0.5 * ((chosen.sum() + 9.0) - (rejected.sum() + 7.0)) for chosen, rejected in sides]
    objective = objectives.dpo(COMPUTE, beta=0.5, label_smoothing=0.0, loss_type="sigmoid")
    loss, sums = jax.jit(objective)(model, pairwise(micro(packed_pairs((-9.0, -7.0)))))
    np.testing.assert_allclose(loss, np.mean([math.log1p(math.exp(-margin)) for margin in margins]), rtol=1e-5)
    np.testing.assert_allclose(sums["rewards/margins"], sum(margins), rtol=1e-5)


def test_ipo_divides_by_each_response_s_own_length(model, scored):
    _, sides = scored
    gaps = [(chosen.sum() + 9.0) / 3 - (rejected.sum() + 7.0) / 2 for chosen, rejected in sides]
    objective = objectives.dpo(COMPUTE, beta=0.5, label_smoothing=0.0, loss_type="ipo")
    loss, _ = jax.jit(objective)(model, pairwise(micro(packed_pairs((-9.0, -7.0)))))
    np.testing.assert_allclose(loss, np.mean([(gap - 1.0) ** 2 for gap in gaps]), rtol=1e-5)


def test_grpo_on_policy_is_minus_the_advantages(model, scored):
    """Ratio 1: the loss is -sum(weight * advantage); scored at the objective's temperature, nothing is clipped."""
    packed = packed_pairs()
    old = np.asarray(score(model, *put_batch(packed, ONE), temperature=0.5)[0])
    arrays = {**micro(packed), "old_logprob": jnp.asarray(old[0]), "advantage": jnp.full(old[0].shape, 0.25)}
    objective = objectives.grpo(COMPUTE, temperature=0.5, epsilon=0.2, epsilon_high=None, beta=0.0)
    loss, sums = jax.jit(objective)(model, arrays)
    np.testing.assert_allclose(loss, -0.25 * 15, rtol=1e-5)
    assert float(sums["tokens"]) == 15.0
    assert not np.allclose(old[0], scored[0][0], atol=0.1), "the temperature made no difference"


def test_grpo_kl_is_zero_where_the_policy_is_the_reference(model):
    packed = packed_pairs()
    old = score(model, *put_batch(packed, ONE))[0][0]
    arrays = {**micro(packed), "old_logprob": old, "advantage": jnp.zeros_like(old)}
    objective = jax.jit(objectives.grpo(COMPUTE, temperature=1.0, epsilon=0.2, epsilon_high=0.3, beta=0.5))
    same, _ = objective(model, {**arrays, "ref_logprob": old})
    np.testing.assert_allclose(same, 0.0, atol=1e-6)
    apart, _ = objective(model, {**arrays, "ref_logprob": old + math.log(2)})  # k3 = 2 - 1 - log 2 a token
    np.testing.assert_allclose(apart, 0.5 * 15 * (1 - math.log(2)), rtol=1e-5)


def test_values_on_prompt_and_padding_do_not_matter(model):
    arrays = micro(packed_pairs())
    old = jnp.where(arrays["sequence"] >= 0, -3.0, jnp.nan)
    poisoned = {**arrays, "old_logprob": old, "ref_logprob": old, "advantage": jnp.where(old < 0, 1.0, jnp.nan)}
    objective = objectives.grpo(COMPUTE, temperature=1.0, epsilon=0.2, epsilon_high=None, beta=0.1)
    (loss, _), grads = jax.jit(jax.value_and_grad(objective, has_aux=True))(model, poisoned)
    assert np.isfinite(loss) and all(np.isfinite(x).all() for x in jax.tree.leaves(grads))


def test_place_sums():
    sequence = jnp.array([[-1, 0, 0, 2, -1], [1, 1, 1, -1, 0]])
    values = jnp.array([[jnp.nan, 1.0, 2.0, 4.0, 8.0], [1.0, 1.0, 1.0, 9.0, 5.0]])
    found = objectives.place_sums(values, {"sequence": sequence, "weight": jnp.zeros((2, 4))})
    assert found.tolist() == [[3.0, 0.0, 4.0, 0.0], [5.0, 3.0, 0.0, 0.0]]
