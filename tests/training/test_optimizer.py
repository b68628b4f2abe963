"""The optimiser against numbers worked out by hand, and its state on a mesh."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from g2d_jax import mesh as meshes
from g2d_jax.models import decoder, table
from g2d_jax.models.config import ModelConfig
from g2d_jax.training.optimizer import decay_mask, make_optimizer, make_schedule, opt_state_shardings

QWEN2 = ModelConfig("qwen2", 32, 16, 2, 4, 2, 4, 24, tie_word_embeddings=True, qkv_bias=True)
QWEN3 = ModelConfig("qwen3", 32, 16, 2, 4, 2, 4, 24, qk_norm=True)


def rates(schedule: str, warmup: int, total: int, steps: tuple[int, ...]) -> list[float]:
    rate = make_schedule(0.8, schedule=schedule, warmup_steps=warmup, total_steps=total)  # type: ignore[arg-type]
    return [float(rate(step)) for step in steps]


def test_schedule_values():
    # 0: 0.8 * 1/4; 2: 0.8 * 3/4; 3: warm-up ends; 8: half of the way from 3 to 13; 12: the last update; 13: the end
    steps = (0, 2, 3, 8, 12, 13, 20)
    assert rates("constant", 3, 13, steps) == pytest.approx([0.2, 0.6, 0.8, 0.8, 0.8, 0.8, 0.8])
    assert rates("linear", 3, 13, steps) == pytest.approx([0.2, 0.6, 0.8, 0.4, 0.08, 0.0, 0.0], abs=1e-7)
    last = 0.4 * (1 + math.cos(0.9 * math.pi))
    assert rates("cosine", 3, 13, steps) == pytest.approx([0.2, 0.6, 0.8, 0.4, last, 0.0, 0.0], abs=1e-7)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_first_update_moves_without_warm_up(schedule: str):
    assert rates(schedule, 0, 4, (0,)) == pytest.approx([0.8])


def test_schedule_is_jittable_and_float32():
    rate = make_schedule(1e-3, schedule="cosine", warmup_steps=0, total_steps=10)
    value = jax.jit(rate)(jnp.int32(5))
    assert value.dtype == jnp.float32 and float(value) == pytest.approx(5e-4)


@pytest.mark.parametrize("eps", [1e-8, 1e-4])
def test_two_steps_of_adamw_by_hand(eps: float):
    rate, b1, b2, decay = 0.1, 0.9, 0.999, 0.01
    optimizer, _ = make_optimizer(
        rate, total_steps=10, b1=b1, b2=b2, eps=eps, weight_decay=decay, max_grad_norm=0.0, schedule="constant"
    )
    params = {"w": jnp.array([2.0, -1.0]), "w_bias": jnp.array([0.5])}
    state = optimizer.init(params)
    expected = {"w": np.array([2.0, -1.0]), "w_bias": np.array([0.5])}
    m, v = {k: 0.0 for k in params}, {k: 0.0 for k in params}
    for t, grads in enumerate([{"w": [3e-4, -2.0], "w_bias": [1.0]}, {"w": [-1e-4, 1.0], "w_bias": [0.5]}], 1):
        updates, state = optimizer.update(
            jax.tree.map(jnp.asarray, grads, is_leaf=lambda x: isinstance(x, list)), state, params
        )
        params = optax.apply_updates(params, updates)
        for key in expected:
            g = np.array(grads[key])
            m[key], v[key] = b1 * m[key] + (1 - b1) * g, b2 * v[key] + (1 - b2) * g * g
            step = (m[key] / (1 - b1**t)) / (np.sqrt(v[key] / (1 - b2**t)) + eps)
            expected[key] = expected[key] - rate * (step + (decay * expected[key] if key == "w" else 0.0))
    for key in expected:
        np.testing.assert_allclose(params[key], expected[key], rtol=1e-5)


def test_first_step_with_the_papers_eps():
    # m̂ = g, √v̂ = |g|: the first update is rate * g / (|g| + eps), here 0.1 * 3e-4 / 4e-4
    optimizer, _ = make_optimizer(0.1, total_steps=10, eps=1e-4, max_grad_norm=0.0)
    params = {"w": jnp.array([0.0])}
    updates, _ = optimizer.update({"w": jnp.array([3e-4])}, optimizer.init(params), params)
    assert float(updates["w"][0]) == pytest.approx(-0.075, rel=1e-4)


@pytest.mark.parametrize(("limit", "first_moment"), [(1.0, [0.06, 0.08]), (10.0, [0.3, 0.4]), (0.0, [0.3, 0.4])])
def test_clipping_by_the_norm_over_all_parameters(limit: float, first_moment: list[float]):
    optimizer, _ = make_optimizer(0.1, total_steps=10, max_grad_norm=limit)
    params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    _, state = optimizer.update({"a": jnp.array([3.0]), "b": jnp.array([4.0])}, optimizer.init(params), params)
    mu = optax.tree_utils.tree_get(state, "mu")  # 0.1 * clipped gradient; the norm is 5
    assert [float(mu["a"][0]), float(mu["b"][0])] == pytest.approx(first_moment)


@pytest.mark.parametrize("config", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
@pytest.mark.parametrize("stacked", [True, False])
def test_decay_mask_agrees_with_the_parameter_table(config: ModelConfig, stacked: bool):
    model = decoder.init(config, jax.random.key(0))
    mask = decay_mask(model if stacked else decoder.unstack(model))
    for rows, trees in (
        (table.outer_params(config), [mask]),
        (table.block_params(config), [mask.blocks] if stacked else list(mask.blocks)),
    ):
        for name, row in rows.items():
            expected = row.axes != ("norm",) and not name.endswith("_bias")
            assert [jax.tree.leaves(getattr(tree, name)) for tree in trees] == [[expected]] * len(trees), name


def test_weight_decay_moves_a_decoder_but_not_its_norms():
    optimizer, _ = make_optimizer(0.1, total_steps=10, weight_decay=0.5)
    model = decoder.init(QWEN2, jax.random.key(0))
    updates, _ = jax.jit(optimizer.update)(jax.tree.map(jnp.zeros_like, model), optimizer.init(model), model)
    np.testing.assert_allclose(updates.blocks.q[...], -0.05 * model.blocks.q[...], rtol=1e-6)
    assert not np.any(updates.blocks.attn_norm[...]) and not np.any(updates.final_norm[...])


def test_the_state_lies_on_the_mesh_like_the_parameters():
    mesh = meshes.make_mesh()
    optimizer, _ = make_optimizer(0.1, total_steps=10, weight_decay=0.5, schedule="cosine")
    where = decoder.shardings(QWEN2, mesh)
    tree = opt_state_shardings(optimizer, decoder.abstract(QWEN2), where, mesh)
    model = jax.device_put(decoder.init(QWEN2, jax.random.key(0)), where)
    state = jax.jit(optimizer.init, out_shardings=tree)(model)
    assert jax.tree.structure(tree) == jax.tree.structure(optimizer.init(model))
    for moment in ("mu", "nu"):
        found = jax.tree.map(lambda x: x.sharding, optax.tree_utils.tree_get(state, moment))
        assert jax.tree.leaves(found) == jax.tree.leaves(where)
    counts = [x for x in jax.tree.leaves(state) if x.ndim == 0]
    assert len(counts) == 2 and all(x.sharding.is_fully_replicated for x in counts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "step"}, "optimizer.schedule must be one of constant, linear, cosine, got 'step'"),
        ({"warmup_steps": 10}, r"warmup_steps \(10\) .* less than the number of updates \(10\)"),
        ({"b2": 1.0}, "optimizer.b2 must be at least 0 and less than 1, got 1.0"),
        ({"eps": math.nan}, "optimizer.eps"),
    ],
)
def test_wrong_settings_are_named(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        make_optimizer(0.1, **({"total_steps": 10} | changes))
