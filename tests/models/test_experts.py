"""Mixtures of experts: two ways to multiply groups, devices that have some of the experts each,
routes in float32, and what is refused."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain import MIXTURE, assert_near, logits, noisy

from g2d_jax.models import decoder, experts, lora
from g2d_jax.models.config import Lora, ModelConfig
from g2d_jax.models.experts import Routes, Stacks
from g2d_jax.runtime import mesh as meshes


def plain_mixture(x: Any, routes: Routes, stacks: Stacks, first: int = 0) -> jax.Array:
    """Every token with each of its experts that are there, one after the other."""
    found = np.zeros(x.shape)
    for place in np.ndindex(routes.experts.shape):
        expert = int(routes.experts[place]) - first
        if 0 <= expert < len(stacks.gate):
            gate, up, down = (np.asarray(stack[expert]) for stack in stacks)
            token = np.asarray(x[place[:2]])
            mixed = np.asarray(jax.nn.silu(token @ gate)) * (token @ up)
            found[place[:2]] += float(routes.weights[place]) * (mixed @ down)
    return jnp.asarray(found)


def example(tokens: int, count: int = 5, per_token: int = 2) -> tuple[jax.Array, Routes, Stacks]:
    """Tokens of 6 numbers that mostly go to the first experts, and never to the fourth."""
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(2, tokens // 2, count)) + np.array([3.0, 1, 0, -99, 0])[:count]
    chosen = np.argsort(-scores)[..., :per_token]
    weights = jnp.asarray(rng.uniform(0.2, 1, chosen.shape), jnp.float32)
    sizes = (count, 6, 4), (count, 6, 4), (count, 4, 6)
    stacks = Stacks(*(jnp.asarray(rng.normal(0, 0.5, size), jnp.float32) for size in sizes))
    x = jnp.asarray(rng.normal(size=(2, tokens // 2, 6)), jnp.float32)
    return x, Routes(jnp.asarray(chosen, jnp.int32), weights), stacks


def test_all_ways_add_up_each_tokens_experts() -> None:
    """On a device that has three of the five; more tokens of an expert than a block has."""
    first, count = 1, 3
    x, routes, stacks = example(60)
    own = Stacks(*(stack[first : first + count] for stack in stacks))
    expected = plain_mixture(x, routes, own, first)
    assert np.abs(expected).max() > 1

    def loss(platform: str, x: Any, weights: Any, stacks: Any) -> Any:
        found = experts.mix(
            x, Routes(routes.experts, weights), stacks, first=first, platform=platform
        )
        return jnp.sum(jnp.sin(found)), found

    gradients = {}
    for platform in ("cpu", "gpu", "tpu"):
        run = jax.jit(jax.grad(partial(loss, platform), argnums=(0, 1, 2), has_aux=True))
        gradients[platform], found = run(x, routes.weights, own)
        np.testing.assert_allclose(found, expected, atol=1e-4)
    for platform in ("gpu", "tpu"):
        jax.tree.map(
            partial(np.testing.assert_allclose, atol=1e-4), gradients[platform], gradients["cpu"]
        )
    assert not np.any(gradients["cpu"][2].gate[3 - first])  # no token went there


def test_bfloat16_is_near_float32() -> None:
    x, routes, stacks = example(20)
    expected = plain_mixture(x, routes, stacks, 0)
    narrow = jax.tree.map(lambda array: array.astype(jnp.bfloat16), (x, stacks))
    found = experts.mix(narrow[0], routes, narrow[1], platform="cpu")
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float32), expected, atol=0.1)


def test_blocks_multiply_as_ragged_dot_does() -> None:
    sizes = (0, 40, 0, 3)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(64, 5)), jnp.float32)
    stack = jnp.asarray(rng.normal(size=(4, 5, 3)), jnp.float32)
    groups, used = jnp.array(sizes, jnp.int32), sum(sizes)

    def loss(product: Any, x: Any, stack: Any) -> Any:
        found = product(x, stack, groups)
        return jnp.sum(jnp.sin(found[:used])), found

    run = jax.jit(jax.grad(loss, argnums=(1, 2), has_aux=True), static_argnums=0)
    found = run(partial(experts.by_blocks, "gpu"), x, stack)
    expected = run(jax.lax.ragged_dot, x, stack)
    assert not np.any(found[1][used:])
    jax.tree.map(
        partial(np.testing.assert_allclose, atol=1e-5),
        (found[0], found[1][:used]),
        (expected[0], expected[1][:used]),
    )


@pytest.mark.slow
def test_the_kernel_of_tpus_gives_the_gradient_of_the_matrices() -> None:
    """Interpreted, NaN lying in rows behind the last group of the one operand; those of the other
    are 0 there."""
    sizes, rng = (200, 0, 31, 1), np.random.default_rng(0)
    x, gradient = (jnp.asarray(rng.normal(size=(256, size)), jnp.float32) for size in (32, 24))
    used = sum(sizes)
    found = experts.kernel_gradient(
        x.at[used:].set(np.nan), jnp.array(sizes, jnp.int32), gradient, 128, interpret=True
    )
    ends = np.cumsum(sizes)
    for group, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        own = slice(end - size, end)
        np.testing.assert_allclose(found[group], x[own].T @ gradient[own], atol=1e-4)


@pytest.mark.slow
def test_devices_that_share_experts_compute_the_same() -> None:
    """Forward and gradients, of rows of which each has a loss of its own."""
    mesh = meshes.make_mesh(2, 2, 2)
    model = noisy(decoder.init(MIXTURE, jax.random.key(0), std=0.2))
    tokens = np.random.default_rng(0).integers(0, 61, (4, 12))

    def loss(model: decoder.Decoder, where: Any) -> Any:
        found = logits(model, tokens, mesh=where, remat="full")
        return jnp.sum(jnp.sin(found)), found

    run = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
    expected, found = run(model, None)
    gradients, split = run(jax.device_put(model, decoder.shardings(MIXTURE, mesh)), mesh)
    np.testing.assert_allclose(split, found, atol=1e-4)
    assert_near(gradients, expected, 1e-4)
    placed = decoder.shardings(MIXTURE, mesh).blocks.expert_gate.get_value()
    assert placed.shard_shape((2, 8, 24, 12)) == (2, 4, 12, 12)


def test_routes_are_those_of_float32() -> None:
    """Of two experts that bfloat16 cannot tell apart the better one is chosen, also by a policy
    that is cast for sampling."""
    c = dataclasses.replace(MIXTURE, num_experts_per_tok=1)
    model = decoder.init(c, jax.random.key(0))
    router = jnp.ones((2, 24, 8)).at[:, :, 5].add(1e-4)
    model.blocks.router.set_value(router)
    for made in (
        lora.to_sampler_params(model, jnp.dtype(jnp.bfloat16)),
        decoder.cast(model, jnp.dtype(jnp.bfloat16)),
    ):
        kept = made.blocks.router[...]
        assert kept.dtype == jnp.float32 and made.blocks.q[...].dtype == jnp.bfloat16
        routes = experts.choose(c, kept[0], jnp.ones((1, 3, 24), jnp.bfloat16))
        np.testing.assert_array_equal(routes.experts, np.full((1, 3, 1), 5))
        np.testing.assert_array_equal(routes.weights, np.ones((1, 3, 1)))
    shapes = decoder.abstract(c, jnp.dtype(jnp.bfloat16))
    assert decoder.parameter(shapes, "router").dtype == jnp.float32


def test_weights_are_shares_of_all_experts_unless_they_are_normalised() -> None:
    router = jax.random.normal(jax.random.key(0), (24, 8))
    x = jax.random.normal(jax.random.key(1), (1, 5, 24))
    shares = np.sort(np.asarray(jax.nn.softmax(x[0] @ router)))[:, :-4:-1]
    plain = dataclasses.replace(MIXTURE, norm_topk_prob=False)
    np.testing.assert_allclose(experts.choose(plain, router, x).weights[0], shares, atol=1e-5)
    normalised = shares / shares.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(experts.choose(MIXTURE, router, x).weights[0], normalised, atol=1e-5)


def test_adapters_stand_beside_attention() -> None:
    config = dataclasses.replace(MIXTURE, lora=Lora(2, 4.0))
    assert config.lora is not None
    assert config.lora.targets == ("q_proj", "k_proj", "v_proj", "o_proj")
    with pytest.raises(
        ValueError,
        match="'up_proj', which is not a linear layer of this model; experts have no adapters",
    ):
        dataclasses.replace(MIXTURE, lora=Lora(2, 4.0, ("q_proj", "up_proj")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantise": "int8"}, "weights of experts cannot be quantised"),
        ({"num_experts": 2, "num_experts_per_tok": 3}, r"\(3\) is more than num_experts \(2\)"),
        ({"num_experts": -1}, "num_experts must be at least 1, got -1"),
        ({"family": "qwen3"}, "num_experts: the family qwen3 does not have this field"),
    ],
)
def test_wrong_settings(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(MIXTURE, **change)


def test_from_scratch_there_are_eight_experts_and_two_for_each_token() -> None:
    made = ModelConfig("qwen3_moe", 64, 32, 2, 4, 2, 8, 48)
    assert (made.num_experts, made.num_experts_per_tok, made.moe_intermediate_size) == (8, 2, 48)
