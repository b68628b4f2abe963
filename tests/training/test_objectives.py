"""Objectives on packed micro-batches: literal values, padding, and agreement with the scorer."""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain import assert_near

from g2d_jax import losses
from g2d_jax.config import OnlineDPO
from g2d_jax.data.packing import Group, Packed, Response, pack
from g2d_jax.models import decoder
from g2d_jax.models.config import ModelConfig
from g2d_jax.runtime import mesh as meshes
from g2d_jax.training import objectives
from g2d_jax.training.objectives import Compute, Loss, join, split
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
        Group(
            rng.integers(0, 64, prompt),
            [response(3, reference[0]), response(2, reference[1])],
            keep_together=True,
        )
        for prompt in (2, 4, 5)
    ]
    return pack(groups, row_length=24, microbatch_rows=2, max_responses_per_row=4)


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
    objective = objectives.dpo(COMPUTE, OnlineDPO())
    _, sums = jax.jit(objective)(model, pairwise(arrays))
    assert float(sums["pairs"]) == 3.0
    for name, side in (("logps/chosen", 0), ("logps/rejected", 1)):
        np.testing.assert_allclose(sums[name], sum(pair[side].sum() for pair in sides), rtol=1e-6)


def test_raft_is_the_likelihood_of_weighted_tokens(model, scored):
    _, sides = scored
    arrays = micro(packed_pairs())
    # of each pair the first response, three tokens, is right
    arrays["weight"] = jnp.where(arrays["response_index"] % 2 == 0, 1 / 9, 0.0)
    loss, sums = jax.jit(objectives.raft(COMPUTE))(model, arrays)
    np.testing.assert_allclose(loss, -np.mean([pair[0].mean() for pair in sides]), rtol=1e-6)
    assert float(sums["tokens"]) == 9.0


def test_ipo_divides_by_each_response_s_own_length(model, scored):
    """By hand from the scorer's sums, references -9 and -7, beta 0.5."""
    _, sides = scored
    gaps = [(chosen.sum() + 9.0) / 3 - (rejected.sum() + 7.0) / 2 for chosen, rejected in sides]
    objective = objectives.dpo(COMPUTE, OnlineDPO(beta=0.5, loss_type="ipo"))
    loss, _ = jax.jit(objective)(model, pairwise(micro(packed_pairs((-9.0, -7.0)))))
    np.testing.assert_allclose(loss, np.mean([(gap - 1.0) ** 2 for gap in gaps]), rtol=1e-5)


def test_grpo_on_policy_is_minus_the_advantages(model, scored):
    """Ratio 1: the loss is -sum(weight * advantage); scored at the objective's temperature, nothing
    is clipped."""
    packed = packed_pairs()
    old = np.asarray(score(model, *put_batch(packed, ONE), temperature=0.5)[0])
    arrays = {
        **micro(packed),
        "old_logprob": jnp.asarray(old[0]),
        "advantage": jnp.full(old[0].shape, 0.25),
    }
    objective = objectives.grpo(COMPUTE, temperature=0.5, epsilon=0.2, epsilon_high=None, beta=0.0)
    loss, sums = jax.jit(objective)(model, arrays)
    np.testing.assert_allclose(loss, -0.25 * 15, rtol=1e-5)
    assert float(sums["tokens"]) == 15.0
    arrays["sampler_logprob"] = arrays.pop("old_logprob") + 1.0
    # without old log-probabilities they are the policy's own
    own, sums = jax.jit(objective)(model, arrays)
    np.testing.assert_allclose(own, loss, rtol=1e-5)
    assert float(sums["ratio"]) == 15.0
    assert float(sums["sampling/sampling_logp_difference/mean"]) == pytest.approx(15.0, rel=1e-5)
    assert not np.allclose(old[0], scored[0][0], atol=0.1), "the temperature made no difference"


def test_values_on_prompt_and_padding_do_not_matter(model):
    arrays = micro(packed_pairs())
    old = jnp.where(arrays["response_index"] >= 0, -3.0, jnp.nan)
    poisoned = {
        **arrays,
        "old_logprob": old,
        "ref_logprob": old,
        "advantage": jnp.where(old < 0, 1.0, jnp.nan),
    }
    objective = objectives.grpo(COMPUTE, temperature=1.0, epsilon=0.2, epsilon_high=None, beta=0.1)
    (loss, _), grads = jax.jit(jax.value_and_grad(objective, has_aux=True))(model, poisoned)
    assert np.isfinite(loss) and all(np.isfinite(x).all() for x in jax.tree.leaves(grads))


def test_place_sums():
    sequence = jnp.array([[-1, 0, 0, 2, -1], [1, 1, 1, -1, 0]])
    values = jnp.array([[jnp.nan, 1.0, 2.0, 4.0, 8.0], [1.0, 1.0, 1.0, 9.0, 5.0]])
    found = objectives.sum_per_response(
        values, {"response_index": sequence, "weight": jnp.zeros((2, 4))}
    )
    assert found.tolist() == [[3.0, 0.0, 4.0, 0.0], [5.0, 3.0, 0.0, 0.0]]


def test_simpo_reads_no_reference(model, scored):
    _, sides = scored
    gaps = np.array([chosen.mean() - rejected.mean() for chosen, rejected in sides])
    arrays = pairwise(micro(packed_pairs()))
    del arrays["reference"]
    loss, _ = jax.jit(objectives.dpo(COMPUTE, OnlineDPO(loss_type="simpo", beta=2.0)))(
        model, arrays
    )
    np.testing.assert_allclose(loss, np.mean(np.log1p(np.exp(0.5 - 2.0 * gaps))), rtol=1e-5)


# --- GRPO's family, GroupDPO, the combination, entropy


SIDES = ((1.0, -1.0, -1.0), (-1.0, 1.0), (1.0, 1.0))  # of three prompts; the last has no pair
WEIGHT = 1 / 4  # of a token in GRPO's loss: whatever, the same for all


def response_groups() -> list[Group]:
    """Three prompts with responses of 1 to 4 tokens, every key that the objectives below read, one
    pair weight each."""
    rng = np.random.default_rng(1)
    pair_weight = losses.group_dpo_weights([1, 1, 2], [2, 1, 0])

    def response(prompt: int, side: float) -> Response:
        length = int(rng.integers(1, 5))
        token = {
            "weight": WEIGHT,
            "advantage": rng.normal(),
            "old_logprob": rng.normal(-4, 0.3, length),
            "ref_logprob": rng.normal(-4, 0.3, length),
            "sampler_logprob": rng.normal(-4, 0.3, length),
            "entropy_weight": 1 / 16,
        }
        sequence = {
            "side": side,
            "prompt": prompt,
            "pair_weight": pair_weight[prompt],
            "reference": rng.normal(-9, 3),
        }
        return Response(rng.integers(0, 64, length), token, sequence)

    return [
        Group(
            rng.integers(0, 64, 3 + prompt),
            [response(prompt, side) for side in sides],
            keep_together=True,
        )
        for prompt, sides in enumerate(SIDES)
    ]


def in_rows(row_length: int) -> dict[str, jax.Array]:
    """All prompts in one row of 40 columns, or apart in rows of 24."""
    return micro(
        pack(response_groups(), row_length=row_length, microbatch_rows=4, max_responses_per_row=8)
    )


GROUP = OnlineDPO(beta=0.3)
GRPO = {"temperature": 1.0, "epsilon": 0.2, "epsilon_high": None, "beta": 0.1}


def run(objective, model, arrays):
    (loss, sums), grads = jax.jit(jax.value_and_grad(objective, has_aux=True))(model, arrays)
    return float(loss), {name: float(x) for name, x in sums.items()}, grads


def test_group_dpo_is_the_mean_over_pairs_then_prompts(model):
    groups = response_groups()
    packed = pack(groups, row_length=24, microbatch_rows=4, max_responses_per_row=8)
    logprobs = packed.unpack(np.asarray(score(model, *put_batch(packed, ONE))[0]))
    per_prompt = []
    for prompt, sides in enumerate(SIDES[:2]):
        ratios = [
            float(logps.sum()) - response.sequence["reference"]
            for logps, response in zip(logprobs[prompt], groups[prompt].responses, strict=True)
        ]
        chosen, rejected = (
            [r for r, side in zip(ratios, sides, strict=True) if side == s] for s in (1, -1)
        )
        margins = [0.3 * (left - right) for left in chosen for right in rejected]
        per_prompt.append(np.mean([math.log1p(math.exp(-margin)) for margin in margins]))
    unread = (
        "entropy_weight",
        "sampler_logprob",
        "advantage",
        "old_logprob",
        "ref_logprob",
        "weight",
    )
    # of the parts with coefficient 0
    arrays = {name: x for name, x in in_rows(24).items() if name not in unread}
    loss, sums = jax.jit(objectives.group_dpo(COMPUTE, GROUP))(model, arrays)
    assert float(loss) == pytest.approx(np.mean(per_prompt), rel=1e-5)
    assert sums["pairs"] == 3.0 and "tokens" not in sums


def everything(compute: Compute = COMPUTE, nll_coef: float = 0.5, **changes):
    coefficients = {"entropy_coef": 0.2, "grpo_coef": 0.7, "kl_beta": 0.1, "importance_cap": 1.2}
    settings = {"importance_sampling_level": "sequence"} | coefficients | changes
    return objectives.group_dpo(compute, dataclasses.replace(GROUP, nll_coef=nll_coef), **settings)


@pytest.mark.slow
def test_neighbours_in_a_row_and_devices_change_nothing(model):
    mesh = meshes.make_mesh(2, 2, 2)
    spread = pack(
        response_groups(),
        row_length=40,
        microbatch_rows=4,
        rows_multiple=meshes.row_ways(mesh),
        max_responses_per_row=8,
    )
    together = {name: x[0] for name, x in put_batch(spread, mesh)[0].items()}
    placed = jax.device_put(model, decoder.shardings(CONFIG, mesh))
    loss, sums, grads = run(everything(Compute(mesh)), placed, together)
    expected, expected_sums, expected_grads = run(everything(), model, in_rows(24))
    assert loss == pytest.approx(expected, rel=1e-5) and sums == pytest.approx(
        expected_sums, rel=1e-4
    )
    assert_near(jax.device_get(grads), jax.device_get(expected_grads), 1e-4)


def test_the_combination_is_its_parts(model):
    """GroupDPO + 0.7 GRPO; metrics are those of the parts, each by its own count."""
    arrays = in_rows(40)
    level = {"importance_sampling_level": "sequence", "importance_cap": 1.2}
    both = run(everything(nll_coef=0.0, entropy_coef=0.0), model, arrays)
    group = run(objectives.group_dpo(COMPUTE, GROUP), model, arrays)
    policy = run(objectives.grpo(COMPUTE, **GRPO, **level), model, arrays)
    assert both[0] == pytest.approx(group[0] + 0.7 * policy[0], rel=1e-5)
    assert_near(both[2], jax.tree.map(lambda x, y: x + 0.7 * y, group[2], policy[2]), 1e-4)
    found = losses.mean_metrics(both[1], "pairs")
    parts = losses.mean_metrics(group[1], "pairs") | losses.mean_metrics(policy[1], "tokens")
    assert found == pytest.approx(parts, rel=1e-5)
    assert {"kl", "sampling/importance_sampling_ratio/max", "tokens", "pairs"} < set(found)


def test_what_a_number_takes_out_is_no_argument():
    """A coefficient of 0 leaves its term out of the program; a loss without numbers is a constant,
    whatever it is."""
    bare = objectives.grpo(COMPUTE, temperature=1.0, beta=0.0)
    assert bare.numbers == {"temperature": 1.0, "epsilon": 0.2, "epsilon_high": 0.2}
    assert split(objectives.group_dpo(COMPUTE, OnlineDPO(), kl_beta=0.1))[1] == {
        "beta": 0.1,
        "simpo_gamma": 0.5,
    }
    for own in (
        lambda params, micro: None,
        objectives.sft(COMPUTE),
        Loss(lambda params, micro, numbers: None, {}),
    ):
        assert split(own) == (own, {}) and join(*split(own)) is own
    with pytest.raises(ValueError, match=r"epsilon_high must not be negative, got -0\.1"):
        objectives.grpo(COMPUTE, temperature=1.0, beta=0.0, epsilon_high=-0.1)
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        objectives.grpo(COMPUTE, temperature=0.0, beta=0.0)


def refused(call, **numbers):
    with pytest.raises(ValueError) as error:
        call(**numbers)
    return str(error.value).partition(" ")[0]


def test_a_number_that_is_refused_is_called_as_the_caller_calls_it():
    """GRPO's beta is kl_beta among the numbers of both objectives."""
    grpo = partial(objectives.grpo, COMPUTE, **{"temperature": 1.0, "beta": 0.0})
    group = partial(objectives.group_dpo, COMPUTE, GROUP, grpo_coef=1.0)
    shared = ("entropy_coef", "epsilon", "importance_cap")
    for name in ("beta", *shared):
        assert refused(grpo, **{name: -1.0}) == name
    for name in ("kl_beta", *shared):
        assert refused(group, **{name: -1.0}) == name


def test_every_setting_of_dpo_but_its_numbers_decides_the_program():
    """A field that comes later does too, of whatever type; the normaliser is in the weights."""

    class Later(OnlineDPO):
        variant: str = "a"

    given = {"loss_type": "sigmoid_norm", "variant": "b"}
    numbers = {"beta": 0.7, "simpo_gamma": 0.9, "nll_coef": 0.3}
    structure, found = objectives._split_dpo(Later(**given, **numbers, normalizer="prompts"))
    assert structure == Later(**given) and found == numbers


def test_entropy_is_added(model):
    """What the coefficient adds is -0.5 times the scorer's mean entropy."""
    arrays = in_rows(24)

    def made(coef: float):
        return objectives.grpo(COMPUTE, **(GRPO | {"temperature": 0.5}), entropy_coef=coef)

    packed = pack(response_groups(), row_length=24, microbatch_rows=4, max_responses_per_row=8)
    entropies = score(model, *put_batch(packed, ONE), temperature=0.5)[1][0]
    entropy = float(jnp.sum(jnp.where(arrays["response_index"] >= 0, entropies, 0.0)) / 16)
    plain, _ = jax.jit(made(0.0))(model, arrays)
    loss, sums = jax.jit(made(0.5))(model, arrays)
    assert float(loss - plain) == pytest.approx(-0.5 * entropy, rel=1e-4)
    assert float(sums["policy_entropy|entropy_tokens"]) == pytest.approx(16 * entropy, rel=1e-5)
    assert sums["entropy_tokens"] == float(jnp.sum(arrays["response_index"] >= 0))
