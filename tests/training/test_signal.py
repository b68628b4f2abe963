"""The gradient's mean and the batches' own lengths, against a loop of gradients; on any mesh; noise and none."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

from g2d_jax import mesh as meshes
from g2d_jax.config import OnlineDPO
from g2d_jax.data.packing import Group, Packed, Response, pack
from g2d_jax.models import decoder
from g2d_jax.models.config import ModelConfig
from g2d_jax.study.informativeness import gradient_signal
from g2d_jax.training import objectives
from g2d_jax.training.gradient_noise import alike, fresh_sums, gradient_norms, make_gradient_sums
from g2d_jax.training.objectives import Compute, Objective
from g2d_jax.training.step import accumulate, put_batch

CONFIG = ModelConfig("qwen2", 64, 32, 2, 4, 2, 8, 48, tie_word_embeddings=True)
ONE = meshes.make_mesh(devices=jax.devices()[:1])
BETA, BATCHES, PAIRS = 0.1, 4, 3
WIDTH = 32


@pytest.fixture(scope="module")
def model() -> decoder.Decoder:
    return decoder.init(CONFIG, jax.random.key(0), std=0.2)


def make_batches() -> list[list[Group]]:
    """Pairs to prompts of 2 to 6 tokens; the last batch is longer, so that it takes more rows."""
    rng = np.random.default_rng(0)

    def response(longest: int) -> Response:
        ids = rng.integers(0, 64, int(rng.integers(1, longest)))
        return Response(ids, {}, {"weight": 1 / PAIRS, "reference": rng.normal(-9, 3)})

    def group(longest: int) -> Group:
        return Group(
            rng.integers(0, 64, rng.integers(2, 7)), [response(longest), response(longest)], keep_together=True
        )

    return [[group(6 if m < BATCHES - 1 else 13) for _ in range(PAIRS)] for m in range(BATCHES)]


def packed(mesh: jax.sharding.Mesh, batches: list[list[Group]], microbatch_rows: int = 1) -> list[Packed]:
    ways = meshes.row_ways(mesh)
    rows = {"row_length": WIDTH, "microbatch_rows": microbatch_rows * ways, "rows_multiple": ways}
    return [pack(groups, **rows, max_responses_per_row=4) for groups in batches]


def objective(mesh: jax.sharding.Mesh) -> Objective:
    return objectives.dpo(Compute(mesh), OnlineDPO(beta=BETA))


def norms(model: decoder.Decoder, mesh: jax.sharding.Mesh, batches: list[list[Group]]) -> tuple[float, float]:
    placed = jax.device_put(model, decoder.shardings(CONFIG, mesh))
    return gradient_norms(objective(mesh), placed, packed(mesh, batches), mesh)


@pytest.fixture(scope="module")
def one_device(model) -> tuple[float, float]:
    return norms(model, ONE, make_batches())


def test_equals_a_loop_of_gradients(model, one_device):
    gradient = jax.jit(partial(accumulate, objective(ONE)))
    trees = [gradient(model, *put_batch(batch, ONE))[0] for batch in packed(ONE, make_batches())]
    gradients = np.array([np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]) for tree in trees], np.float64)
    expected = (np.sum(gradients.mean(0) ** 2), np.mean(np.sum(gradients**2, axis=1)))
    assert expected[0] < 0.9 * expected[1]  # the batches differ
    np.testing.assert_allclose(one_device, expected, rtol=1e-4)


@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 8, 1)], ids=str)
def test_eight_devices_equal_one(model, one_device, shape):
    np.testing.assert_allclose(norms(model, meshes.make_mesh(*shape), make_batches()), one_device, rtol=1e-5)


def test_identical_batches_have_no_noise(model):
    mean, own = norms(model, ONE, [make_batches()[0]] * BATCHES)
    found = gradient_signal(mean, own, BATCHES, PAIRS)
    assert found["noise"] <= 2e-3 * found["signal"]  # a square root of rounding
    assert found["signal"] == pytest.approx(own**0.5, rel=1e-5)


def test_opposite_batches_have_no_signal(model):
    """Chosen and rejected swapped at a policy that is its reference: minus the gradient, for the margin is 0."""
    batch = make_batches()[0]
    swapped = [Group(g.prompt_ids, g.responses[::-1], keep_together=True) for g in batch]

    def at_zero_margin(params, micro):
        sums = objectives.place_sums(objectives.response_logprobs(Compute(ONE), params, micro)[0], micro)
        return objective(ONE)(params, {**micro, "reference": jax.lax.stop_gradient(sums)})

    mean, own = gradient_norms(at_zero_margin, model, packed(ONE, [batch, swapped]), ONE)
    assert own > 0 and mean <= 1e-10 * own
    assert gradient_signal(mean, own, 2, PAIRS)["signal"] == 0.0


def test_batches_of_different_sizes_run_in_one_program(model):
    batches = packed(ONE, make_batches(), microbatch_rows=2)
    assert len({batch.arrays["tokens"].shape for batch in batches}) > 1
    same = alike(batches)
    (shape,) = {batch.arrays["tokens"].shape for batch in same}
    for before, after in zip(batches, same, strict=True):
        assert after.count == before.count and after.used == before.used
        n, r = before.arrays["tokens"].shape[:2]
        for name, array in after.arrays.items():
            np.testing.assert_array_equal(array[:n, :r], before.arrays[name])
            assert array.dtype == before.arrays[name].dtype and array.shape[:2] == shape[:2]
        assert (after.arrays["response_index"][n:] == -1).all() and (after.arrays["response_index"][:, r:] == -1).all()


def test_sums_lie_like_the_parameters_and_are_donated(model):
    mesh = meshes.make_mesh(2, 2, 2)
    placed = jax.device_put(model, decoder.shardings(CONFIG, mesh))
    blank = fresh_sums(CONFIG, mesh)
    add = partial(make_gradient_sums(objective(mesh), CONFIG, mesh), params=placed)
    (batch,) = packed(mesh, make_batches()[:1])
    arrays, count = put_batch(batch, mesh)
    sums = add(blank, arrays=arrays, count=count)
    assert all(x.is_deleted() for x in jax.tree.leaves(blank))
    assert not any(x.is_deleted() for x in jax.tree.leaves(placed))
    for total, parameter in zip(jax.tree.leaves(sums.gradient), jax.tree.leaves(placed), strict=True):
        assert total.dtype == np.float32 and total.sharding.is_equivalent_to(parameter.sharding, total.ndim)
