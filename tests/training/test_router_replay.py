"""Router replay: tokens are trained in the experts that the sampler sent them to, weighted by the
trainer's own router."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matrix import slow
from plain import MIXTURE, assert_near, noisy

from g2d_jax import mesh as meshes
from g2d_jax.data.packing import Group, Packed, Response, pack
from g2d_jax.models import decoder, experts
from g2d_jax.records import EXPERTS, Request, Rollout, SamplingParams
from g2d_jax.sampler.engine import Sampler
from g2d_jax.training import objectives
from g2d_jax.training.objectives import Compute
from g2d_jax.training.step import make_scorer, put_batch

ONE = meshes.make_mesh(devices=jax.devices()[:1])
SCORE = make_scorer(Compute(ONE))
PARAMS = SamplingParams(6, stop_ids=tuple(range(0, 61, 7)))
REQUESTS = [
    Request(f"problem{length}", np.arange(1, length + 1, dtype=np.int32), PARAMS, samples)
    for length, samples in ((4, 3), (9, 2), (2, 1))
]


@pytest.fixture(scope="module")
def model() -> decoder.Decoder:
    """Random, with routers in pairs that are nearly equal: a token's three experts are a pair, and
    one of another pair."""
    return with_router(noisy(decoder.init(MIXTURE, jax.random.key(0), std=0.15)), 1e-4)


def with_router(model: decoder.Decoder, lead: float) -> decoder.Decoder:
    """The model with logits of the first of each pair so much larger, as a share."""
    found = jax.tree.map(lambda x: x, model)
    router = model.blocks.router[...]
    router = jnp.repeat(router[..., ::2], 2, axis=-1)
    found.blocks.router.set_value(router.at[..., ::2].multiply(1 + lead))
    return found


def sampled(
    model: decoder.Decoder, mesh: jax.sharding.Mesh = ONE, **settings: Any
) -> list[Rollout]:
    sampler = Sampler(MIXTURE, mesh, seed=3, max_num_seqs=4, chunk=4, prefill_rows=2, **settings)
    lengths = [len(request.prompt_ids) for request in REQUESTS]
    shapes = sampler.shapes(3, 6, [PARAMS], lengths, router_replay=True)
    found = sampler.generate(sampler.to_sampler_params(model), REQUESTS, "test", shapes)
    return sorted(found, key=lambda rollout: (rollout.problem_id, rollout.sample))


@pytest.fixture(scope="module")
def rollouts(model) -> list[Rollout]:
    return sampled(model)


def grouped(rollouts: list[Rollout], *, replayed: bool = True, apart: bool = False) -> list[Group]:
    """Groups of prompts with their responses, or of each response by itself."""
    own: dict[Any, list[Rollout]] = {}
    for number, rollout in enumerate(rollouts):
        own.setdefault(number if apart else rollout.problem_id, []).append(rollout)

    def respond(rollout: Rollout) -> Response:
        token = {"weight": 0.1, "advantage": float(rollout.sample) - 0.7}
        return Response(rollout.token_ids, token, {}, rollout.experts if replayed else None)

    return [
        Group(
            group[0].prompt_ids,
            list(map(respond, group)),
            experts=group[0].prompt_experts if replayed else None,
        )
        for group in own.values()
    ]


def packed(rollouts: list[Rollout], ways: int = 1, **settings: bool) -> Packed:
    groups = grouped(rollouts, **settings)
    return pack(groups, row_length=48, microbatch_rows=6 * ways, rows_multiple=ways, most_rows=6)


def scored(model: decoder.Decoder, batch: Packed, mesh: jax.sharding.Mesh = ONE) -> np.ndarray:
    """The log-probabilities of all responses, one after the other."""
    score = SCORE if mesh is ONE else make_scorer(Compute(mesh))
    found = batch.unpack(np.asarray(score(model, *put_batch(batch, mesh))[0]))
    return np.concatenate([response for group in found for response in group])


@pytest.mark.slow
def test_the_sampler_hands_out_the_experts_that_its_trainer_chooses(model, rollouts):
    """In float32, of prompts and of responses, in every layer; packed beside their tokens."""
    arrays = packed(rollouts).arrays
    micro = {name: jnp.asarray(array[0]) for name, array in arrays.items()}
    places = micro["tokens"], micro["positions"], micro["segment_ids"]
    _, kept = decoder.forward(model, *places, keep_kv=True, keep_experts=True)
    assert kept is not None and kept.experts is not None
    used = arrays["segment_ids"][0] > 0
    assert used.sum() == 15 + sum(rollout.length for rollout in rollouts)
    assert arrays[EXPERTS].dtype == kept.experts.dtype == np.uint8
    assert arrays[EXPERTS].shape[-1] == 2 * 3
    chosen = np.sort(np.asarray(kept.experts)[used].reshape(-1, 2, 3))
    np.testing.assert_array_equal(np.sort(arrays[EXPERTS][0][used].reshape(-1, 2, 3)), chosen)
    assert not np.array_equal(chosen[:, 0], chosen[:, 1])
    assert all(len(np.unique(layer)) > 5 for layer in chosen.swapaxes(0, 1))


@pytest.mark.parametrize(
    ("norm_topk_prob", "expected"), [(True, [1 / 3, 2 / 3]), (False, [1 / 15, 2 / 15])]
)
def test_replayed_experts_are_weighted_by_the_trainers_router(norm_topk_prob, expected):
    """Logits log(1, 2, 4, 8), by which it would choose the last two; with none of them near the
    largest shares are still those among themselves."""
    c = dataclasses.replace(
        MIXTURE, num_experts=4, num_experts_per_tok=2, norm_topk_prob=norm_topk_prob
    )
    router = jnp.log(jnp.array([[1.0, 2.0, 4.0, 8.0]]))
    x, replayed = jnp.ones((1, 1, 1)), jnp.array([[[0, 1]]])
    assert experts.choose(c, router, x).experts.tolist() == [[[3, 2]]]
    routes = experts.choose(c, router, x, replayed)
    assert routes.experts.tolist() == [[[0, 1]]]
    np.testing.assert_allclose(routes.weights[0, 0], expected, rtol=1e-5)
    if norm_topk_prob:
        far = experts.choose(c, jnp.array([[-800.0, -801.0, 0.0, 0.0]]), x, replayed)
        np.testing.assert_allclose(far.weights[0, 0], [0.731059, 0.268941], rtol=1e-5)


@pytest.mark.slow
def test_a_layer_applies_replayed_experts_with_its_own_router(model):
    """By hand, of other experts than it chooses; the router has a gradient by their shares."""
    block = jax.tree.map(lambda stack: stack[1], model.blocks)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(1, 5, 24)), jnp.float32)
    replayed = np.argsort(rng.normal(size=(1, 5, 8)))[..., :3]
    router, mixture = block.router[...], experts.on_devices(None)

    def apply(router: jax.Array, replayed: Any = None) -> tuple[jax.Array, jax.Array]:
        return decoder.mixture_of_experts(MIXTURE, block, x, router, mixture, replayed)

    found, chosen = apply(router, jnp.asarray(replayed))
    np.testing.assert_array_equal(chosen, replayed)
    assert not np.array_equal(apply(router)[1], replayed)
    y = np.asarray(decoder.norm(MIXTURE, block, "mlp_norm", x))
    gate, up, down = (
        np.asarray(getattr(block, f"expert_{n}")[...]) for n in ("gate", "up", "down")
    )
    expected = np.array(x)
    for place in range(5):
        own = replayed[0, place]
        shares = np.exp(y[0, place] @ np.asarray(router)[:, own])
        for expert, share in zip(own, shares / shares.sum(), strict=True):
            first, second = y[0, place] @ gate[expert], y[0, place] @ up[expert]
            mixed = first / (1 + np.exp(-first)) * second
            expected[0, place] += share * (mixed @ down[expert])
    np.testing.assert_allclose(found, expected, atol=1e-5)
    slopes = jax.grad(lambda router: apply(router, jnp.asarray(replayed))[0].sum())(router)
    assert np.abs(slopes).max() > 1e-3


@pytest.mark.slow
def test_log_probabilities_are_the_samplers_where_rounding_chooses_others(model, rollouts):
    """The lead of one of two experts, 1e-4, is the other's: bfloat16 rounds away 40 times as
    much."""
    other = with_router(model, -1e-4)
    own = np.concatenate([rollout.logprobs for rollout in rollouts])
    np.testing.assert_allclose(scored(model, packed(rollouts)), own, atol=1e-4)
    np.testing.assert_allclose(scored(other, packed(rollouts)), own, atol=3e-4)
    assert np.abs(scored(other, packed(rollouts, replayed=False)) - own).max() > 0.01


@pytest.mark.parametrize("remat", slow("none", "full", "attention", "dots"))
def test_gradients_are_those_of_responses_in_rows_of_their_own(model, rollouts, remat):
    """A shared prompt has its experts once; of a router that would choose others."""
    other = noisy(model, 0.05)
    objective = objectives.grpo(Compute(ONE, remat=remat), temperature=1.0, beta=0.0)
    run = jax.jit(jax.value_and_grad(lambda params, micro: objective(params, micro)[0]))
    found = {}
    for apart in (False, True):
        batch = packed(rollouts, apart=apart)
        micro = {name: jnp.asarray(array[0]) for name, array in batch.arrays.items()}
        assert batch.count == 1 and len(micro["tokens"]) == 6
        found[apart] = run(other, micro)
    np.testing.assert_allclose(found[False][0], found[True][0], rtol=1e-5)
    assert_near(found[False][1], found[True][1], 1e-5)


def test_experts_lie_beside_their_tokens():
    """Two rows: a prompt that is repeated has its experts again; padding has those of number 0."""
    prompt, experts_of = np.array([7, 8], np.int32), partial(np.full, dtype=np.uint16)
    responses = [
        Response(np.array([number], np.int32), {}, {}, experts_of((1, 3), number))
        for number in (1, 2, 300)
    ]
    group = Group(prompt, responses, experts=experts_of((2, 3), 9))
    arrays = pack([group], row_length=5, microbatch_rows=2, max_responses_per_row=2).arrays
    assert arrays["tokens"].tolist() == [[[7, 8, 1, 2, 0], [7, 8, 300, 0, 0]]]
    assert arrays[EXPERTS].dtype == np.uint16 and arrays[EXPERTS].shape == (1, 2, 5, 3)
    assert arrays[EXPERTS][..., 2].tolist() == [[[9, 9, 1, 2, 0], [9, 9, 300, 0, 0]]]
    bare = dataclasses.replace(group, experts=None)
    assert EXPERTS not in pack([bare], row_length=5, microbatch_rows=2).arrays
    with pytest.raises(ValueError, match="1 of 2 prompts have experts to replay"):
        pack([group, bare], row_length=5, microbatch_rows=2)


@pytest.mark.slow
@pytest.mark.parametrize("ways", [2, 4])
def test_eight_devices_hand_out_and_replay_what_one_does(model, rollouts, ways):
    """Rows on four or two parts, experts on two of tensor's; with four ways widths on two too."""
    mesh = meshes.make_mesh(1, 4, 2)
    sampling = meshes.sampling(mesh, ways, MIXTURE.num_key_value_heads)
    spread = jax.device_put(model, decoder.shardings(MIXTURE, sampling))
    found = sampled(spread, sampling)
    for rollout, other in zip(found, rollouts, strict=True):
        np.testing.assert_array_equal(rollout.token_ids, other.token_ids)
        for name in ("experts", "prompt_experts"):
            own, theirs = (getattr(r, name).reshape(-1, 2, 3) for r in (rollout, other))
            np.testing.assert_array_equal(np.sort(own), np.sort(theirs))
    trained = jax.device_put(with_router(model, -1e-4), decoder.shardings(MIXTURE, mesh))
    logprobs = np.concatenate([rollout.logprobs for rollout in rollouts])
    np.testing.assert_allclose(scored(trained, packed(found, 4), mesh), logprobs, atol=3e-4)
