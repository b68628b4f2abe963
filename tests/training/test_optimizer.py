"""The optimiser against numbers worked out by hand, and its state on a mesh."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from etils import epath

from g2d_jax.config import Optimizer
from g2d_jax.models import decoder, table
from g2d_jax.models.config import ModelConfig
from g2d_jax.runtime import mesh as meshes
from g2d_jax.training.checkpoint import Checkpoints
from g2d_jax.training.moments import stochastic_round
from g2d_jax.training.optimizer import (
    abstract_opt_state,
    decay_mask,
    leaf_name,
    make_optimizer,
    make_schedule,
)

QWEN2 = ModelConfig("qwen2", 32, 16, 2, 4, 2, 4, 24, tie_word_embeddings=True)
QWEN3 = ModelConfig("qwen3", 32, 16, 2, 4, 2, 4, 24)


@pytest.mark.parametrize(
    ("schedule", "low", "half", "last"),
    [
        ("constant", 0.0, 0.8, 0.8),
        ("linear", 0.0, 0.4, 0.08),
        ("cosine", 0.0, 0.4, 0.4 * (1 + math.cos(0.9 * math.pi))),
        ("linear", 0.2, 0.48, 0.224),
        ("cosine", 0.2, 0.48, 0.16 + 0.32 * (1 + math.cos(0.9 * math.pi))),
    ],
)
def test_schedule_values(schedule: Any, low: float, half: float, last: float):
    # 0: 0.8 * 1/4; 2: 0.8 * 3/4; 3: warm-up ends; 8: half of the way from 3 to 13; 12: the last
    # update; 13: the end
    settings = Optimizer(learning_rate=0.8, schedule=schedule, warmup_steps=3, min_lr_ratio=low)
    rate, steps = make_schedule(settings, total_steps=13), [0, 2, 3, 8, 12, 13, 20]
    expected = [0.2, 0.6, 0.8, half, last, *[0.8 if schedule == "constant" else 0.8 * low] * 2]
    values = [rate(step) for step in steps]
    assert {type(value) for value in values} == {np.float32}  # the host asks no device for the rate
    np.testing.assert_allclose(values, expected, atol=1e-7)
    compiled = jax.jit(jax.vmap(rate))(jnp.array(steps))
    assert compiled.dtype == jnp.float32
    np.testing.assert_allclose(compiled, expected, atol=1e-7)
    without = make_schedule(
        Optimizer(learning_rate=0.8, schedule=schedule, min_lr_ratio=low), total_steps=4
    )
    assert without(0) == pytest.approx(0.8)  # the first update moves without warm-up
    optimizer, numbers = make_optimizer(settings, total_steps=13)
    np.testing.assert_allclose(
        np.asarray(rates_used(optimizer, numbers, 21))[steps], expected, rtol=1e-4, atol=1e-7
    )
    shorter = Optimizer(
        learning_rate=0.4, schedule=schedule, min_lr_ratio=low, eps=1e-7, max_grad_norm=2.0
    )
    other, numbers = make_optimizer(shorter, total_steps=5)
    assert other is optimizer
    found = rates_used(other, numbers, 5)
    np.testing.assert_allclose(
        found, [make_schedule(shorter, 5)(step) for step in range(5)], rtol=1e-4
    )


@partial(jax.jit, static_argnums=(0, 2))
def rates_used(optimizer: Any, numbers: Any, updates: int) -> jax.Array:
    """The rates of updates in a program that takes the numbers: of a constant gradient Adam's
    update is its rate."""
    params = {"w": jnp.array(3.0)}

    def move(state: Any, _: None) -> tuple[Any, jax.Array]:
        moved, state = optimizer.update({"w": jnp.array(0.1)}, state, params, numbers=numbers)
        return state, -moved["w"]

    return jax.lax.scan(move, optimizer.init(params), None, length=updates)[1]


@pytest.mark.parametrize(
    "settings", [{}, {"weight_decay": 0.1}, {"max_grad_norm": 0.0}, {"kind": "adafactor"}], ids=str
)
def test_the_state_is_that_of_optax_with_constants(settings: dict):
    """Its tree, by whose names checkpoints are restored: they were made before numbers were
    arguments."""
    optimizer, _ = make_optimizer(Optimizer(learning_rate=0.1, **settings), total_steps=10)
    scaled = optax.scale_by_adam()
    if "kind" in settings:
        scaled = optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
    decay = (
        optax.add_decayed_weights(0.1, mask=decay_mask)
        if "weight_decay" in settings
        else optax.identity()
    )
    rate = optax.scale_by_learning_rate(lambda count: 0.1)
    constant = optax.chain(optax.clip_by_global_norm(1.0), scaled, decay, rate)
    params = {"w": jnp.zeros(3), "w_bias": jnp.zeros(2)}
    found, expected = optimizer.init(params), constant.init(params)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    names = [leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(found)]
    if not settings:
        assert names == ["1.count", "1.mu.w", "1.mu.w_bias", "1.nu.w", "1.nu.w_bias", "3.count"]


def test_updates_follow_the_schedule():
    settings = Optimizer(learning_rate=0.5, schedule="cosine", min_lr_ratio=0.2)
    optimizer, numbers = make_optimizer(settings, total_steps=4)
    rate = make_schedule(settings, total_steps=4)
    params = {"w": jnp.array([3.0])}
    state = optimizer.init(params)
    for step in range(5):  # of a constant gradient Adam's update is its rate
        updates, state = optimizer.update({"w": jnp.array([0.1])}, state, params, numbers=numbers)
        np.testing.assert_allclose(updates["w"], -rate(step), rtol=1e-4)


@pytest.mark.parametrize("eps", [1e-8, 1e-4])
def test_two_steps_of_adamw_by_hand(eps: float):
    rate, b1, b2, decay = 0.1, 0.9, 0.999, 0.01
    optimizer, numbers = make_optimizer(
        Optimizer(
            learning_rate=rate,
            b2=b2,
            eps=eps,
            weight_decay=decay,
            max_grad_norm=0.0,
            schedule="constant",
        ),
        total_steps=10,
    )
    params = {"w": jnp.array([2.0, -1.0]), "w_bias": jnp.array([0.5])}
    state = optimizer.init(params)
    expected = {"w": np.array([2.0, -1.0]), "w_bias": np.array([0.5])}
    m, v = {k: 0.0 for k in params}, {k: 0.0 for k in params}
    for t, grads in enumerate(
        [{"w": [3e-4, -2.0], "w_bias": [1.0]}, {"w": [-1e-4, 1.0], "w_bias": [0.5]}], 1
    ):
        updates, state = optimizer.update(
            jax.tree.map(jnp.asarray, grads, is_leaf=lambda x: isinstance(x, list)),
            state,
            params,
            numbers=numbers,
        )
        params = optax.apply_updates(params, updates)
        for key in expected:
            g = np.array(grads[key])
            m[key], v[key] = b1 * m[key] + (1 - b1) * g, b2 * v[key] + (1 - b2) * g * g
            step = (m[key] / (1 - b1**t)) / (np.sqrt(v[key] / (1 - b2**t)) + eps)
            expected[key] = expected[key] - rate * (
                step + (decay * expected[key] if key == "w" else 0.0)
            )
    for key in expected:
        np.testing.assert_allclose(params[key], expected[key], rtol=1e-5)


@pytest.mark.parametrize(
    ("limit", "first_moment"), [(1.0, [0.06, 0.08]), (10.0, [0.3, 0.4]), (0.0, [0.3, 0.4])]
)
def test_clipping_by_the_norm_over_all_parameters(limit: float, first_moment: list[float]):
    optimizer, numbers = make_optimizer(
        Optimizer(learning_rate=0.1, max_grad_norm=limit), total_steps=10
    )
    params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    grads = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
    _, state = optimizer.update(grads, optimizer.init(params), params, numbers=numbers)
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
            assert [jax.tree.leaves(getattr(tree, name)) for tree in trees] == [[expected]] * len(
                trees
            ), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"warmup_steps": 10}, r"warmup_steps \(10\) .* less than the number of updates \(10\)"),
        ({"b2": 1.0}, "b2 must be at least 0 and less than 1, got 1.0"),
        ({"eps": math.nan}, "eps must be at least 0 .* got nan"),
    ],
)
def test_wrong_settings_are_named(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        make_optimizer(Optimizer(**({"learning_rate": 0.1} | changes)), total_steps=10)


def test_rounding_at_random_is_right_in_the_mean():
    # neighbours of 1 are 1/128 apart above it
    x = np.float32([1.0, 1 + 1 / 512, 1 + 1 / 1024, -3.001, 0.0, 1e-30])
    keys = jax.random.split(jax.random.key(0), 4096)
    found = np.asarray(
        jax.vmap(lambda key: stochastic_round(jnp.asarray(x), key))(keys), np.float32
    )
    assert found.dtype == np.float32 and {*np.unique(found[:, 1])} == {1.0, 1 + 1 / 128}
    assert (found[:, [0, 4]] == x[[0, 4]]).all()  # these are bfloat16 numbers
    np.testing.assert_allclose(found.mean(axis=0), x, rtol=5e-4)


def moments_after(steps: int, grads: tuple[float, float], dtype: str) -> dict[str, np.ndarray]:
    """The moments after gradients of one size, then of another, of 1024 parameters each."""
    settings = Optimizer(learning_rate=0.0, max_grad_norm=0.0, moment_dtype=dtype)  # type: ignore[arg-type]
    optimizer, numbers = make_optimizer(settings, total_steps=10)
    params = {"w": jnp.zeros(1024)}

    def body(step: jax.Array, state: tuple) -> tuple:
        size = jnp.where(step < steps // 2, grads[0], grads[1])
        return optimizer.update({"w": jnp.full(1024, size)}, state, params, numbers=numbers)[1]

    state = jax.jit(lambda: jax.lax.fori_loop(0, steps, body, optimizer.init(params)))()
    found = {name: optax.tree_utils.tree_get(state, name)["w"] for name in ("mu", "nu")}
    assert {x.dtype for x in found.values()} == {jnp.dtype(dtype)}
    return {name: np.asarray(x, np.float32) for name, x in found.items()}


def test_moments_in_bfloat16_do_not_stand_still():
    """The second one falls when gradients do, which rounding to the nearest would never let it."""
    exact, found = (moments_after(800, (1.0, 0.1), dtype) for dtype in ("float32", "bfloat16"))
    assert exact["nu"][0] < 0.3
    np.testing.assert_allclose(found["nu"].mean(), exact["nu"].mean(), rtol=0.01)
    # half a step of rounding, ten times
    np.testing.assert_allclose(found["mu"], exact["mu"], rtol=0.025)


def test_the_first_update_with_bfloat16_moments_is_that_of_float32():
    """An update is made before the moments are rounded."""
    model, updates = {"a": jnp.ones((8, 16)), "b": jnp.ones(16)}, []
    grads = jax.tree.map(lambda x: jax.random.normal(jax.random.key(1), x.shape), model)
    for dtype in ("float32", "bfloat16"):
        settings = Optimizer(learning_rate=0.1, moment_dtype=dtype)  # type: ignore[arg-type]
        optimizer, numbers = make_optimizer(settings, total_steps=10)
        updates.append(
            jax.jit(optimizer.update)(grads, optimizer.init(model), model, numbers=numbers)[0]
        )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *updates)


def test_adafactor_by_hand():
    """u = g / √v with v the outer product of row and column means over their mean, then at most 1
    in RMS."""
    optimizer, numbers = make_optimizer(
        Optimizer(learning_rate=0.5, kind="adafactor", max_grad_norm=0.0, weight_decay=0.1),
        total_steps=10,
    )
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(2, 128, 160)), jnp.float32), "w_bias": jnp.ones(3)}
    grads = {
        "w": jnp.asarray(rng.normal(size=(2, 128, 160)), jnp.float32),
        "w_bias": jnp.array([1.0, -2.0, 4.0]),
    }
    updates, _ = jax.jit(optimizer.update)(grads, optimizer.init(params), params, numbers=numbers)
    g = np.asarray(grads["w"], np.float64)
    rows, columns = (g * g).mean(axis=2, keepdims=True), (g * g).mean(axis=1, keepdims=True)
    u = g / np.sqrt(rows * columns / rows.mean(axis=1, keepdims=True))
    u /= max(1.0, np.sqrt((u * u).mean()))
    np.testing.assert_allclose(
        updates["w"], -0.5 * (u + 0.1 * np.asarray(params["w"])), rtol=1e-4, atol=1e-5
    )
    # not factored, not decayed
    np.testing.assert_allclose(updates["w_bias"], [-0.5, 0.5, -0.5], rtol=1e-5)


def test_the_state_lies_on_the_mesh_like_the_parameters_and_in_checkpoints(tmp_path):
    wide = ModelConfig("qwen2", 256, 128, 2, 2, 2, 64, 256, tie_word_embeddings=False)
    mesh = meshes.make_mesh(1, 4, 2)
    section = Optimizer(kind="adafactor", learning_rate=0.1, weight_decay=0.5, schedule="cosine")
    optimizer, numbers = make_optimizer(section, total_steps=10)
    where = decoder.shardings(wide, mesh)
    tree = jax.tree.map(
        lambda x: x.sharding, abstract_opt_state(optimizer, decoder.abstract_on(wide, mesh), mesh)
    )
    model = jax.jit(lambda: decoder.init(wide, jax.random.key(0)), out_shardings=where)()
    state = jax.jit(optimizer.init, out_shardings=tree)(model)
    updates, state = jax.jit(optimizer.update, out_shardings=(where, tree))(
        model, state, model, numbers=numbers
    )
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(updates))
    with Checkpoints(epath.Path(tmp_path)) as checkpoints:
        checkpoints.save(1, {"opt_state": state}, {})
        checkpoints.wait()
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
        )
        restored = checkpoints.restore(1, {"opt_state": like})[0]["opt_state"]
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    assert [x.sharding for x in jax.tree.leaves(restored)] == [
        x.sharding for x in jax.tree.leaves(state)
    ]
    counts = [x for x in jax.tree.leaves(state) if x.ndim == 0]
    assert len(counts) == 2 and all(x.sharding.is_fully_replicated for x in counts)
    moments = [optax.tree_utils.tree_get(state, name) for name in ("v_row", "v_col")]
    # [layers 2, embed 128 over fsdp, mlp 256 over tensor]
    of_gate = [moment.blocks.gate[...] for moment in moments]
    assert [x.shape for x in of_gate] == [(2, 128), (2, 256)]
    assert [tuple(x.sharding.spec) for x in of_gate] == [(None, "fsdp"), (None, "tensor")]
    of_norm = optax.tree_utils.tree_get(state, "v").final_norm[...]
    assert of_norm.shape == (128,) and moments[0].final_norm[...].shape == (1,)
