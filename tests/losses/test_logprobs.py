"""Chunked log-probabilities: equal to the full softmax, in values and gradients, without its
memory."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from g2d_jax.losses.logprobs import (
    chunk_of,
    sequence_means,
    sequence_sums,
    sharded_token_logprobs,
    sum_scattered,
    token_logprobs,
    transform_logits,
)
from g2d_jax.runtime.mesh import make_mesh, rows_sharding, sharding

N, D, V = 37, 16, 53


def inputs(
    n: int = N, d: int = D, v: int = V, seed: int = 0
) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    hidden, head = rng.normal(size=(n, d)), rng.normal(size=(d, v)) * 0.5
    return (
        jnp.asarray(hidden, jnp.float32),
        jnp.asarray(head, jnp.float32),
        jnp.asarray(rng.integers(0, v, n), jnp.int32),
    )


def full_softmax(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, temperature: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """The whole [N, V] at once."""
    logp = jax.nn.log_softmax((hidden @ head).astype(jnp.float32) / temperature)
    return jnp.take_along_axis(logp, targets[:, None], axis=1)[:, 0], -jnp.sum(
        jnp.exp(logp) * logp, axis=1
    )


def mixed(results: Any, mix: jax.Array) -> jax.Array:
    """One number that depends on every log-probability and entropy."""
    return jnp.sum(results[0].reshape(-1) * mix[0]) + jnp.sum(results[1].reshape(-1) * mix[1])


def values_and_grads(function: Any, hidden: jax.Array, head: jax.Array) -> list[jax.Array]:
    """A function's log-probabilities and entropies, and gradients in its arguments of a number that
    depends on all."""
    mix = jnp.asarray(np.random.default_rng(1).normal(size=(2, len(hidden))), jnp.float32)

    def total(hidden: jax.Array, head: jax.Array) -> Any:
        results = function(hidden, head)
        return mixed(results, mix), results

    grads, values = jax.jit(jax.grad(total, (0, 1), has_aux=True))(hidden, head)
    return [*values, *grads]


def test_literal_values() -> None:
    # One-hot hidden states pick rows of the head: probabilities (1/4, 3/4) and (1/2, 1/2).
    hidden = jnp.eye(2)
    head = jnp.log(jnp.array([[1.0, 3.0], [5.0, 5.0]]))
    targets = jnp.array([1, 0], jnp.int32)
    logprobs, entropies = token_logprobs(hidden, head, targets)
    np.testing.assert_allclose(logprobs, np.log([0.75, 0.5]), atol=1e-6)
    np.testing.assert_allclose(entropies, [0.5623351446, np.log(2)], atol=1e-6)
    # squares the odds: 1:3 becomes 1:9
    logprobs, _ = token_logprobs(hidden, head, targets, temperature=0.5)
    np.testing.assert_allclose(logprobs, np.log([0.9, 0.5]), atol=1e-6)


@pytest.mark.parametrize(("n", "chunk", "temperature"), [(20, 19, 1.0), (N, 1024, 0.6)])
def test_equals_full_softmax(n: int, chunk: int, temperature: float) -> None:
    """In values and gradients; half of the tokens count. The others are 0 and have no
    gradient."""
    hidden, head, targets = inputs(n)
    counted = jnp.asarray(np.random.default_rng(2).random(n) < 0.5)

    def chunked(hidden: jax.Array, head: jax.Array) -> Any:
        return token_logprobs(hidden, head, targets, counted, temperature=temperature, chunk=chunk)

    def full(hidden: jax.Array, head: jax.Array) -> Any:
        return [
            jnp.where(counted, x, 0.0) for x in full_softmax(hidden, head, targets, temperature)
        ]

    results = values_and_grads(chunked, hidden, head)
    for got, want in zip(results, values_and_grads(full, hidden, head), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)
    assert not np.asarray(results[2])[~np.asarray(counted)].any()


def largest_shapes(jaxpr: Any) -> list[tuple[int, ...]]:
    """Shapes of every value in a jaxpr, those of inner loops and calls included."""
    shapes: list[tuple[int, ...]] = []
    for equation in jaxpr.eqns:
        shapes += [variable.aval.shape for variable in equation.outvars]
        for parameter in jax.tree.leaves(
            equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                shapes += largest_shapes(inner)
    return shapes


def test_never_holds_all_logits() -> None:
    n, d, v, chunk = 256, 8, 512, 32
    hidden, head, targets = inputs(n, d, v)

    def chunked(hidden: jax.Array, head: jax.Array) -> Any:
        return values_and_grads(
            lambda h, w: token_logprobs(h, w, targets, chunk=chunk), hidden, head
        )

    def full(hidden: jax.Array, head: jax.Array) -> Any:
        return values_and_grads(lambda h, w: full_softmax(h, w, targets), hidden, head)

    shapes = largest_shapes(jax.make_jaxpr(chunked)(hidden, head).jaxpr)
    assert (chunk, v) in shapes  # The walk does see inside the loops.
    assert max(int(np.prod(shape)) for shape in shapes) == chunk * v

    def temporaries(function: Any) -> int:
        analysis = jax.jit(function).lower(hidden, head).compile().memory_analysis()
        assert analysis is not None
        return int(analysis.temp_size_in_bytes)

    assert (n, v) in largest_shapes(jax.make_jaxpr(full)(hidden, head).jaxpr)
    assert temporaries(chunked) < n * v * 4 <= temporaries(full)


def test_the_head_is_multiplied_by_tokens_that_count_only() -> None:
    """Of 64 chunks those without a token that counts are not looked at: hidden states that are NaN
    do no harm there, though 0 * NaN is NaN."""
    hidden, head, targets = inputs(64, 4, 7)
    counted = jnp.arange(64) % 8 == 3
    broken = jnp.where(counted[:, None], hidden, jnp.nan)

    def grads(hidden: jax.Array) -> Any:
        total = lambda *a: token_logprobs(*a, targets, counted, chunk=1)[0].sum()  # noqa: E731
        return jax.grad(total, (0, 1))(hidden, head)

    run = jax.jit(grads)
    for one, other in zip(run(broken), run(hidden), strict=True):
        np.testing.assert_array_equal(one, other)


def test_without_entropy() -> None:
    hidden, head, targets = inputs()
    logprobs, entropies = token_logprobs(hidden, head, targets, with_entropy=False)
    assert entropies is None
    np.testing.assert_array_equal(logprobs, token_logprobs(hidden, head, targets)[0])

    def reductions(with_entropy: bool) -> int:
        function = lambda h, w: token_logprobs(h, w, targets, with_entropy=with_entropy)  # noqa: E731
        return str(jax.make_jaxpr(function)(hidden, head)).count("= reduce_sum")

    assert reductions(False) < reductions(True)


def test_bfloat16_inputs() -> None:
    """Only the inputs are rounded: results are float32 and those of a float32 softmax over the same
    inputs."""
    hidden, head, targets = inputs(300, 64, 200)
    hidden, head = hidden.astype(jnp.bfloat16), head.astype(jnp.bfloat16)
    exact = full_softmax(hidden.astype(jnp.float32), head.astype(jnp.float32), targets)
    results = token_logprobs(hidden, head, targets, chunk=16)
    for got, want in zip(results, exact, strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, want, atol=2e-5)


def test_bfloat16_head_gradient_is_summed_in_float32() -> None:
    hidden, head, targets = inputs(512, 8, 16)
    half = hidden.astype(jnp.bfloat16), head.astype(jnp.bfloat16)
    wide = [x.astype(jnp.float32) for x in half]
    exact = jax.jit(jax.grad(lambda w: full_softmax(wide[0], w, targets)[0].sum()))(wide[1])
    grad = jax.jit(jax.grad(lambda w: token_logprobs(half[0], w, targets, chunk=1)[0].sum()))(
        half[1]
    )
    assert grad.dtype == jnp.bfloat16
    # Rounding the result costs 2^-9 of each entry; 512 sums in bfloat16 would be off by tens of
    # percent.
    scale = float(jnp.abs(exact).max())
    assert float(jnp.abs(grad.astype(jnp.float32) - exact).max()) < 2**-8 * scale

    master = jax.jit(jax.grad(lambda w: token_logprobs(half[0], w, targets, chunk=64)[0].sum()))(
        head
    )
    assert master.dtype == jnp.float32
    np.testing.assert_allclose(master, exact, atol=2**-8 * scale)


def test_extreme_logits_stay_finite() -> None:
    head = jnp.array([[3e4, -3e4, 0.0]])

    def loss(hidden: jax.Array) -> jax.Array:
        logprobs, entropies = token_logprobs(hidden, head, jnp.array([1, 0, 2], jnp.int32))
        return jnp.sum(logprobs) + jnp.sum(entropies)

    value, grad = jax.jit(jax.value_and_grad(loss))(jnp.array([[1.0], [1.0], [-1.0]]))
    assert float(value) == -6e4 - 3e4
    assert bool(jnp.isfinite(grad).all())


def test_a_target_outside_the_vocabulary_is_nan_but_harmless_when_unused() -> None:
    hidden, head, _ = inputs(3)
    targets = jnp.array([-1, 0, V], jnp.int32)
    logprobs, entropies = token_logprobs(hidden, head, targets)
    assert np.isnan(logprobs).tolist() == [True, False, True]
    assert np.isfinite(entropies).all()
    used = jnp.array([False, True, False])
    grad = jax.grad(lambda h: jnp.sum(jnp.where(used, token_logprobs(h, head, targets)[0], 0.0)))(
        hidden
    )
    assert np.isfinite(grad).all() and np.abs(grad[1]).max() > 0


def test_one_transform_for_sampler_and_trainer() -> None:
    logits = jnp.array([[2.0, -1.0]], jnp.bfloat16)
    np.testing.assert_array_equal(
        transform_logits(logits, 0.5), np.array([[4.0, -2.0]], np.float32)
    )
    per_row = transform_logits(jnp.array([[1.0, 2.0], [1.0, 2.0]]), jnp.array([[1.0], [2.0]]))
    np.testing.assert_array_equal(per_row, np.array([[1.0, 2.0], [0.5, 1.0]], np.float32))
    with pytest.raises(ValueError, match="temperature must be positive"):
        transform_logits(logits, 0.0)


def test_a_chunk_has_1024_tokens_but_of_a_large_vocabulary_fewer() -> None:
    assert [chunk_of(words, "tpu") for words in (32_000, 131_072, 131_073, 152_064, 10**9)] == [
        1024,
        1024,
        768,
        768,
        256,
    ]
    assert chunk_of(152_064, "cpu") == 256


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": jnp.zeros((2, 3, 4))}, r"expected hidden \[N, D\]"),
        ({"targets": jnp.zeros((5,), jnp.int32)}, r"expected hidden \[\.\.\., D\]"),
        ({"head": jnp.zeros((3, 4))}, r"expected hidden \[\.\.\., D\]"),
        ({"chunk": 0}, "chunk >= 1"),
        ({"temperature": 0.0}, "temperature must be positive"),
        (
            {"hidden": jnp.zeros((0, D)), "targets": jnp.zeros((0,), jnp.int32)},
            "at least one token",
        ),
    ],
)
def test_wrong_arguments(change: dict[str, Any], message: str) -> None:
    hidden, head, targets = inputs()
    with pytest.raises(ValueError, match=message):
        token_logprobs(**({"hidden": hidden, "head": head, "targets": targets} | change))


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 (simulated) devices")
@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 2, 2)])
def test_sharded_equals_one_device(shape: tuple[int, int, int]) -> None:
    mesh = make_mesh(*shape, devices=jax.devices()[:8])
    hidden, head, targets = inputs(8 * 12, 16, 48)
    rows, target_rows = hidden.reshape(8, 12, 16), targets.reshape(8, 12)
    mix = jnp.asarray(np.random.default_rng(1).normal(size=(2, 8 * 12)), jnp.float32)
    counted = jnp.asarray(np.random.default_rng(2).random((8, 12)) < 0.8)

    def loss(hidden: jax.Array, head: jax.Array) -> jax.Array:
        return mixed(
            sharded_token_logprobs(hidden, head, target_rows, counted, mesh=mesh, chunk=5), mix
        )

    def expected_loss(hidden: jax.Array, head: jax.Array) -> jax.Array:
        return mixed(full_softmax(hidden, head, targets), jnp.where(counted.reshape(-1), mix, 0.0))

    placed = (
        jax.device_put(rows, rows_sharding(mesh, rows.shape)),
        jax.device_put(head, sharding(mesh, ("embed", "vocab"), head.shape)),
    )
    compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*placed).compile()
    value, grads = compiled(*placed)
    expected, expected_grads = jax.jit(jax.value_and_grad(expected_loss, (0, 1)))(hidden, head)
    np.testing.assert_allclose(value, expected, rtol=1e-4)
    for got, want in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(got.reshape(want.shape), want, atol=1e-5, rtol=1e-5)

    # The head is gathered and its gradient reduced once, not per chunk: no collective inside a
    # loop.
    computation = ""
    for line in str(compiled.as_text()).splitlines():
        computation = line if line and not line.startswith(" ") else computation
        if re.search(
            r"= \S+ (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)", line
        ):
            assert computation.startswith("ENTRY"), line


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_logits_that_are_kept_give_what_they_give_when_computed_again(
    dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = make_mesh(devices=jax.devices()[:1])
    hidden, head, targets = inputs(40)
    counted = jnp.asarray(np.random.default_rng(2).random((2, 20)) < 0.6)
    rows = hidden.astype(dtype).reshape(2, 20, D)

    def gradients(most: int) -> tuple[list[jax.Array], str]:
        monkeypatch.setattr("g2d_jax.losses.logprobs.LOGITS", most)

        def results(hidden: jax.Array, head: jax.Array) -> Any:
            settings: dict[str, Any] = {"mesh": mesh, "chunk": 7, "temperature": 0.7}
            return sharded_token_logprobs(hidden, head, targets.reshape(2, 20), counted, **settings)

        mix = jnp.asarray(np.random.default_rng(1).normal(size=(2, 40)), jnp.float32)
        run = jax.jit(jax.grad(lambda *x: mixed(results(*x), mix), (0, 1)))
        return list(run(rows, head)), run.lower(rows, head).as_text()

    kept, with_logits = gradients(40 * V)
    computed, without = gradients(40 * V - 1)
    tolerance = 1e-5 if dtype == jnp.float32 else 2**-7  # of what is rounded to the type
    for one, two in zip(kept, computed, strict=True):
        wide = one.astype(jnp.float32), two.astype(jnp.float32)
        np.testing.assert_allclose(*wide, atol=tolerance, rtol=tolerance)
    # Of chunks of 7 tokens, the 6 that may be needed are kept.
    assert f"tensor<6x7x{V}xf32>" in with_logits
    assert f"tensor<6x7x{V}xf32>" not in without


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 (simulated) devices")
def test_sharded_without_entropy_and_with_rows_that_do_not_divide() -> None:
    mesh = make_mesh(2, 1, 1, devices=jax.devices()[:2])
    hidden, head, targets = inputs(3 * 5)
    logprobs, entropies = sharded_token_logprobs(
        hidden.reshape(3, 5, D),
        head,
        targets.reshape(3, 5),
        jnp.ones((3, 5), bool),
        mesh=mesh,
        with_entropy=False,
    )
    assert entropies is None
    np.testing.assert_allclose(
        logprobs.reshape(-1), full_softmax(hidden, head, targets)[0], atol=1e-5
    )


def test_sequence_sums() -> None:
    values = jnp.array([[jnp.nan, -1.0, -2.0], [-4.0, -8.0, jnp.inf]])
    ids = jnp.array([[-1, 1, 1], [0, 3, -1]], jnp.int32)
    np.testing.assert_array_equal(
        sequence_sums(values, ids, 4), np.array([-4, -3, 0, -8], np.float32)
    )
    grad = jax.grad(lambda v: jnp.sum(sequence_sums(v, ids, 4) * jnp.arange(1.0, 5.0)))(values)
    np.testing.assert_array_equal(grad, [[0, 2, 2], [1, 4, 0]])
    with pytest.raises(ValueError, match="one shape"):
        sequence_sums(values, ids[0], 4)


def test_sequence_means() -> None:
    values = jnp.array([[jnp.nan, 1.0, 4.0], [2.0, 6.0, jnp.nan]])
    ids = jnp.array([[-1, 0, 2], [2, 2, -1]])
    assert sequence_means(values, ids).tolist() == [[0.0, 1.0, 4.0], [4.0, 4.0, 0.0]]
    grad = jax.grad(lambda x: jnp.sum(sequence_means(x, ids) * jnp.arange(6.0).reshape(2, 3)))(
        values
    )
    assert grad.tolist() == [[0.0, 1.0, 3.0], [3.0, 3.0, 0.0]]  # (2 + 3 + 4) / 3


@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.parametrize("blocks", [1, 4, 5])
def test_the_sum_over_devices_is_the_same_in_blocks(dimension: int, blocks: int) -> None:
    mesh = make_mesh(4, 1, 1, devices=jax.devices()[:4])
    matrices = np.arange(4 * 8 * 20.0).reshape(4, 8, 20) ** 2

    def local(matrix: jax.Array) -> jax.Array:
        return sum_scattered(matrix[0], "data", dimension, blocks)

    out = P("data") if dimension == 0 else P(None, "data")
    summed = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=out, check_vma=False)
    )(matrices)
    np.testing.assert_array_equal(summed, matrices.sum(axis=0))
