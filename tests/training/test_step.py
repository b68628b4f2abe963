"""The train step: packing, meshes and micro-batches change nothing but rounding; the state is
donated and float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from plain import assert_near, logits, noisy

from g2d_jax.config import OnlineDPO, Optimizer
from g2d_jax.data.packing import Group, Packed, Response, pack
from g2d_jax.models import decoder
from g2d_jax.models.config import ModelConfig
from g2d_jax.runtime import mesh as meshes
from g2d_jax.training import objectives
from g2d_jax.training.objectives import Compute, Objective, split
from g2d_jax.training.optimizer import make_optimizer
from g2d_jax.training.step import (
    TrainState,
    abstract_state,
    accumulate,
    make_fresh_state,
    make_scorer,
    make_train_step,
    put_batch,
    put_numbers,
)

CONFIG = ModelConfig("qwen2", 64, 32, 2, 4, 2, 8, 48, tie_word_embeddings=True)
ONE = meshes.make_mesh(devices=jax.devices()[:1])
TEMPERATURE, EPSILON, KL, BETA = 0.8, 0.2, 0.05, 0.1
RELATIVE = 1e-5


def fresh_state(model: decoder.Decoder, optimizer: Any, mesh: Any) -> TrainState:
    return make_fresh_state(CONFIG, optimizer, mesh)(model)


@pytest.fixture(scope="module")
def model() -> decoder.Decoder:
    return noisy(decoder.init(CONFIG, jax.random.key(0), std=0.2))


def make_groups(count: int = 24) -> list[Group]:
    """Pairs of responses of 1 to 7 tokens to prompts of 2 to 6, with everything the three losses
    need."""
    rng = np.random.default_rng(0)

    def response() -> Response:
        length = int(rng.integers(1, 8))
        token = {
            "weight": np.full(length, rng.uniform(0.005, 0.02)),
            "advantage": np.full(length, rng.normal()),
            "old_logprob": rng.normal(-4, 0.5, length),
            "ref_logprob": rng.normal(-4, 0.5, length),
        }
        return Response(
            rng.integers(0, 64, length),
            token,
            {"pair_weight": 1 / count, "reference": rng.normal(-9, 3)},
        )

    return [
        Group(rng.integers(0, 64, rng.integers(2, 7)), [response(), response()], keep_together=True)
        for _ in range(count)
    ]


def packed(microbatch_rows: int, multiple: int = 1, most_rows: int = 1) -> Packed:
    rows = {"microbatch_rows": microbatch_rows, "rows_multiple": multiple, "most_rows": most_rows}
    return pack(make_groups(), row_length=32, max_responses_per_row=4, **rows)


def make_step(
    objective: Objective, settings: Optimizer, mesh: Any, **how: Any
) -> tuple[Any, Any, dict[str, Any]]:
    """An optimiser for 10 updates, the train step, and the numbers that it takes."""
    structure, of_loss = split(objective)
    optimizer, of_optimizer = make_optimizer(settings, total_steps=10)
    numbers = put_numbers({"optimizer": of_optimizer, "loss": of_loss}, mesh)
    return optimizer, make_train_step(structure, optimizer, CONFIG, mesh, **how), numbers


def objective_of(name: str, compute: Compute) -> Objective:
    if name == "sft":
        return objectives.sft(compute)
    if name == "grpo":
        return objectives.grpo(
            compute, temperature=TEMPERATURE, epsilon=EPSILON, epsilon_high=None, beta=KL
        )
    inner = objectives.dpo(compute, OnlineDPO(beta=BETA))
    return lambda params, micro: inner(params, {**micro, "weight": micro["pair_weight"]})


def unpacked() -> dict[str, jax.Array]:
    """Every response with its own copy of the prompt, one sequence a row, [S, L]; pairs are rows 2i
    and 2i + 1."""
    sequences = [
        (group.prompt_ids, response) for group in make_groups() for response in group.responses
    ]
    width = max(len(prompt) + len(response.token_ids) for prompt, response in sequences)
    names = ("weight", "advantage", "old_logprob", "ref_logprob")
    arrays: dict[str, Any] = {name: np.zeros((len(sequences), width), np.float32) for name in names}
    arrays["tokens"] = np.zeros((len(sequences), width), np.int32)
    arrays["reference"] = np.array(
        [response.sequence["reference"] for _, response in sequences], np.float32
    )
    arrays["mask"] = np.zeros((len(sequences), width), np.float32)
    for row, (prompt, response) in enumerate(sequences):
        span = slice(len(prompt), len(prompt) + len(response.token_ids))
        arrays["tokens"][row, : span.stop] = np.concatenate([prompt, response.token_ids])
        arrays["mask"][row, span] = 1
        for name in names:
            arrays[name][row, span] = response.token[name]
    return {name: jnp.asarray(x) for name, x in arrays.items()}


def plain_loss(name: str, model: decoder.Decoder, a: dict[str, jax.Array]) -> jax.Array:
    """Each loss from its equation, on whole log-softmaxes of unpacked sequences."""
    scaled = logits(model, a["tokens"])[:, :-1] / (TEMPERATURE if name == "grpo" else 1.0)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(scaled), a["tokens"][:, 1:, None], axis=-1)[
        ..., 0
    ]
    logprobs = jnp.pad(chosen, ((0, 0), (1, 0))) * a["mask"]
    if name == "sft":
        return -jnp.sum(logprobs * a["weight"])
    if name == "grpo":
        ratio = jnp.exp(logprobs - a["old_logprob"])
        gain = jnp.minimum(
            ratio * a["advantage"], jnp.clip(ratio, 1 - EPSILON, 1 + EPSILON) * a["advantage"]
        )
        apart = a["ref_logprob"] - logprobs
        return jnp.sum(a["weight"] * (-gain + KL * (jnp.exp(apart) - apart - 1)))
    ratios = (logprobs.sum(1) - a["reference"]).reshape(-1, 2)
    return -jnp.mean(jax.nn.log_sigmoid(BETA * (ratios[:, 0] - ratios[:, 1])))


def gradient(
    name: str, model: decoder.Decoder, mesh: jax.sharding.Mesh, *batches: Packed
) -> list[tuple[decoder.Decoder, jax.Array]]:
    """Gradient and loss of each batch on a mesh, parameters laid out as in training."""
    placed = jax.device_put(model, decoder.shardings(CONFIG, mesh))
    run = jax.jit(partial(accumulate, objective_of(name, Compute(mesh))))
    return [jax.device_get(run(placed, *put_batch(batch, mesh))[:2]) for batch in batches]


@pytest.fixture(scope="module")
def expected(model) -> Callable[[str], tuple[jax.Array, decoder.Decoder]]:
    """Loss and gradient of a loss on one device, unpacked."""
    arrays = unpacked()

    @cache
    def of(name: str) -> tuple[jax.Array, decoder.Decoder]:
        return jax.device_get(jax.jit(jax.value_and_grad(partial(plain_loss, name)))(model, arrays))

    return of


@pytest.mark.quick
@pytest.mark.parametrize(("name", "microbatch_rows"), [("grpo", 2), ("dpo", 64)])
def test_packed_equals_unpacked(model, expected, name, microbatch_rows):
    batch = packed(microbatch_rows)
    assert (batch.count == 1) == (microbatch_rows == 64)
    ((grads, loss),) = gradient(name, model, ONE, batch)
    np.testing.assert_allclose(loss, expected(name)[0], rtol=RELATIVE)
    assert_near(grads, expected(name)[1], RELATIVE)


def in_micro_batches(batch: Packed, micro_batches: int) -> Packed:
    """The rows of one micro-batch dealt out to several of the same size; four in all, so that one
    program runs all."""
    rows = batch.arrays["tokens"].shape[1]
    mine = (np.arange(4)[:, None] == np.arange(rows)[None] % micro_batches)[:, :, None]
    arrays = {
        name: np.where(mine, x, np.array(-(name == "response_index"), x.dtype))
        for name, x in batch.arrays.items()
    }
    return Packed(arrays, micro_batches, batch.places, batch.used, batch.attended)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("dpo", (2, 2, 2)),
        pytest.param("grpo", (2, 2, 2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_gradient_does_not_depend_on_mesh_or_micro_batches(model, expected, name, shape):
    """In one micro-batch and in four, against one device without packing."""
    mesh = meshes.make_mesh(*shape)
    batch = packed(64, meshes.row_ways(mesh))
    assert (
        batch.count == 1
        and not (in_micro_batches(batch, 4).arrays["response_index"] < 0).all((1, 2)).any()
    )
    for grads, loss in gradient(
        name, model, mesh, in_micro_batches(batch, 1), in_micro_batches(batch, 4)
    ):
        np.testing.assert_allclose(loss, expected(name)[0], rtol=RELATIVE)
        assert_near(grads, expected(name)[1], RELATIVE)


@pytest.fixture(scope="module")
def trained(model) -> dict[str, Any]:
    """One clipped AdamW step in bfloat16 compute on (2, 2, 2), with what was there before."""
    mesh = meshes.make_mesh(2, 2, 2)
    objective = objectives.sft(Compute(mesh, dtype=jnp.bfloat16))
    optimizer, step, numbers = make_step(
        objective, Optimizer(learning_rate=0.01, weight_decay=0.1), mesh
    )
    state = fresh_state(jax.device_put(model, decoder.shardings(CONFIG, mesh)), optimizer, mesh)
    batch = (*put_batch(packed(2, meshes.row_ways(mesh)), mesh), numbers)
    before = jax.tree.leaves(state)
    shardings = [x.sharding for x in before]
    state, metrics = step(state, *batch)
    return {
        "before": before,
        "shardings": shardings,
        "state": state,
        "metrics": metrics,
        "step": step,
        "batch": batch,
    }


@pytest.mark.quick
def test_the_state_is_donated_and_stays_where_it_is_in_float32(trained, model):
    assert all(x.is_deleted() for x in trained["before"])
    after = jax.tree.leaves(trained["state"])
    for leaf, where in zip(after, trained["shardings"], strict=True):
        assert leaf.sharding.is_equivalent_to(where, leaf.ndim)
    optimizer, _ = make_optimizer(Optimizer(learning_rate=0.01, weight_decay=0.1), total_steps=10)
    described = jax.tree.leaves(abstract_state(CONFIG, optimizer, meshes.make_mesh(2, 2, 2)))
    assert [(x.shape, x.dtype) for x in described] == [(x.shape, x.dtype) for x in after]
    assert all(
        x.sharding.is_equivalent_to(d.sharding, x.ndim)
        for x, d in zip(after, described, strict=True)
    )
    assert {x.dtype for x in after if jnp.issubdtype(x.dtype, jnp.floating)} == {
        jnp.dtype(jnp.float32)
    }
    moved = jax.tree.map(
        lambda a, b: float(jnp.max(jnp.abs(a - b))), jax.device_get(trained["state"].params), model
    )
    # Adam's first step is the learning rate, 0.01
    assert all(0 < x < 0.02 for x in jax.tree.leaves(moved))


@pytest.mark.quick
def test_bfloat16_compute_is_near_float32(trained, expected):
    loss, grads = expected("sft")
    np.testing.assert_allclose(trained["metrics"]["loss"], loss, rtol=0.02)
    np.testing.assert_allclose(trained["metrics"]["grad_norm"], optax.tree.norm(grads), rtol=0.05)


@pytest.mark.quick
def test_steps_lower_the_loss_without_compiling_again(trained):
    # which is donated
    state, losses = (
        jax.tree.map(jnp.copy, trained["state"]),
        [float(trained["metrics"]["loss"])],
    )
    for _ in range(6):
        state, metrics = trained["step"](state, *trained["batch"])
        losses.append(float(metrics["loss"]))
    assert trained["step"]._cache_size() == 1
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.8 * losses[0]


NUMBERS = [
    (
        Optimizer(learning_rate=0.01, schedule="linear", warmup_steps=2, weight_decay=0.1),
        10,
        0.8,
        0.2,
        0.05,
    ),
    (
        Optimizer(
            learning_rate=0.003,
            schedule="linear",
            min_lr_ratio=0.1,
            weight_decay=0.3,
            eps=1e-4,
            max_grad_norm=0.01,
        ),
        *(5, 1.3, 0.1, 0.4),
    ),
]
"""Settings of optimiser and loss that differ in numbers alone: updates, temperature, epsilon,
beta."""


def test_other_numbers_compile_nothing_and_give_what_constants_give(model):
    """Of the second settings, whose program is that of the first."""
    steps, batch = set(), put_batch(packed(2), ONE)
    shared: Any = None
    for settings, total, temperature, epsilon, beta in NUMBERS:
        objective = objectives.grpo(
            Compute(ONE), temperature=temperature, epsilon=epsilon, beta=beta
        )
        structure, of_loss = split(objective)
        optimizer, of_optimizer = make_optimizer(settings, total_steps=total)
        numbers = put_numbers({"optimizer": of_optimizer, "loss": of_loss}, ONE)
        steps.add((structure, optimizer))
        state = fresh_state(model, optimizer, ONE)
        shared = shared or make_train_step(structure, optimizer, CONFIG, ONE)
        for _ in range(3):
            state, _ = shared(state, *batch, numbers)
    expected = constant_steps(model, objective, optimizer, of_optimizer, batch)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), state.params, expected)
    assert len(steps) == 1 and shared._cache_size() == 1


def constant_steps(
    model: decoder.Decoder, objective: Objective, optimizer: Any, numbers: Any, batch: Any
) -> Any:
    """The parameters after three steps of a program that has all numbers as constants."""

    @jax.jit
    def step(params: Any, opt_state: Any) -> tuple[Any, Any]:
        grads, _, _ = accumulate(objective, params, *batch)
        updates, opt_state = optimizer.update(grads, opt_state, params, numbers=numbers)
        return optax.apply_updates(params, updates), opt_state

    params, opt_state = model, optimizer.init(model)
    for _ in range(3):
        params, opt_state = step(params, opt_state)
    return params


def test_only_counted_micro_batches_are_run(model):
    """What lies beyond `count` may be anything."""
    batch, poisoned = packed(2, most_rows=16), packed(2, most_rows=16)
    empty = np.arange(batch.arrays["tokens"].shape[0]) >= batch.count
    assert empty.any()
    poisoned.arrays["weight"][empty] = np.nan
    (grads, loss), (again, same) = gradient("sft", model, ONE, batch, poisoned)
    assert loss == same and np.isfinite(loss)
    jax.tree.map(np.testing.assert_array_equal, grads, again)


@pytest.mark.quick
def test_the_scorer_on_a_mesh_equals_one_device(model):
    mesh = meshes.make_mesh(2, 2, 2)
    batch = packed(2, meshes.row_ways(mesh))
    placed = jax.device_put(model, decoder.shardings(CONFIG, mesh))
    on_mesh, on_one = make_scorer(Compute(mesh)), make_scorer(Compute(ONE))
    pairs, entropies = [], []
    for temperature in (0.8, 1.3):
        found = on_mesh(placed, *put_batch(batch, mesh), put_numbers(temperature, mesh))
        one = on_one(model, *put_batch(batch, ONE), put_numbers(temperature, ONE))
        pairs += zip(found, one, strict=True)
        entropies.append(float(one[1].sum()))
    assert on_mesh._cache_size() == on_one._cache_size() == 1
    assert entropies[1] > 1.01 * entropies[0]
    for found, one in pairs:
        responses = zip(batch.unpack(np.asarray(found)), batch.unpack(np.asarray(one)), strict=True)
        for ours, theirs in responses:
            for a, b in zip(ours, theirs, strict=True):
                np.testing.assert_allclose(a, b, atol=1e-5)


def poisoned(kind: str) -> Packed:
    """A batch whose loss is NaN, infinite, or finite with an infinite gradient."""
    batch = packed(2)
    at = np.argwhere(batch.arrays["weight"][: batch.count] != 0)[0]
    batch.arrays["weight"][tuple(at)] = {"NaN": np.nan, "infinite": np.inf, "gradient": 1e38}[kind]
    return batch


def test_an_update_that_is_not_finite_changes_nothing(model):
    """Nor does it when others come before and after: they are the same as without it, schedule
    included."""
    settings = Optimizer(learning_rate=0.01, schedule="linear", warmup_steps=2, weight_decay=0.1)
    optimizer, step, numbers = make_step(objectives.sft(Compute(ONE)), settings, ONE)
    good, *bad = (
        put_batch(b, ONE) for b in (packed(2), *map(poisoned, ("NaN", "infinite", "gradient")))
    )
    states, seen = [], []
    for batches in ([good, good], [bad[0], good, bad[1], bad[2], good]):
        state = fresh_state(model, optimizer, ONE)
        for batch in batches:
            before = jax.device_get(state)
            state, metrics = step(state, *batch, numbers)
            seen.append(
                [
                    np.isfinite(metrics["loss"]),
                    np.isfinite(metrics["grad_norm"]),
                    metrics["skipped"] == 1,
                ]
            )
            if batch is not good:
                jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), before)
        states.append(jax.device_get(state))
    jax.tree.map(np.testing.assert_array_equal, *states)
    fine, nothing = [True, True, False], [False, False, True]
    assert np.array_equal(seen, [fine, fine, nothing, fine, nothing, [True, False, True], fine])
