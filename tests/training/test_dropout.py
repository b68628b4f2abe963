"""Dropout of a batch: keys by the place in the update's data, so that rows, micro-batches, devices
and remat change nothing but rounding."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest
from matrix import slow
from plain import assert_near

from g2d_jax import keys
from g2d_jax import mesh as meshes
from g2d_jax.data.packing import Group, Packed, Response, pack
from g2d_jax.models import decoder, lora
from g2d_jax.models.config import Lora, ModelConfig
from g2d_jax.training import objectives
from g2d_jax.training.dropout import KEYS, with_keys
from g2d_jax.training.objectives import Compute
from g2d_jax.training.step import accumulate, put_batch

ADAPTERS = Lora(2, 4.0, ("q_proj", "o_proj", "down_proj"), dropout=0.3)
CONFIG = ModelConfig("qwen2", 64, 32, 2, 4, 2, 8, 48, tie_word_embeddings=True, lora=ADAPTERS)
PLAIN = dataclasses.replace(CONFIG, lora=dataclasses.replace(ADAPTERS, dropout=0.0))
ONE = meshes.make_mesh(devices=jax.devices()[:1])
FOUR = jax.devices()[:4]


def groups() -> list[Group]:
    rng = np.random.default_rng(0)
    return [
        Group(
            rng.integers(0, 64, rng.integers(2, 6)),
            [
                Response(
                    rng.integers(0, 64, rng.integers(1, 8)), {"weight": rng.uniform(0.01, 0.02)}
                )
                for _ in range(5)
            ],
        )
        for _ in range(8)
    ]


def batch(
    row_length: int = 32, microbatch_rows: int = 4, multiple: int = 1, step: int = 3
) -> Packed:
    made = pack(
        groups(), row_length=row_length, microbatch_rows=microbatch_rows, rows_multiple=multiple
    )
    return with_keys(made, CONFIG, 0, "sft", step)


@jax.jit
def policy() -> decoder.Decoder:
    trained = jax.tree.map(lambda x: x + 0.1, lora.adapters(CONFIG, jax.random.key(1)))
    return lora.combine(
        trained, lora.frozen(decoder.init(CONFIG.base, jax.random.key(0), std=0.2), CONFIG)
    )


def gradient(
    packed: Packed, mesh: jax.sharding.Mesh = ONE, remat: decoder.Remat = "none"
) -> tuple[decoder.Decoder, float]:
    trained, rest = lora.partition(jax.device_put(policy(), decoder.shardings(CONFIG, mesh)))
    run = jax.jit(partial(accumulate, objectives.sft(Compute(mesh, remat=remat))))
    grads, loss, _ = jax.device_get(run(trained, *put_batch(packed, mesh), rest))
    return grads, float(loss)


@pytest.fixture(scope="module")
def expected() -> tuple[decoder.Decoder, float]:
    return gradient(batch())


@pytest.mark.parametrize(
    ("settings", "mesh", "remat"),
    [
        *slow(
            ({"row_length": 16, "microbatch_rows": 2}, {}, "full"),
            ({"multiple": 4}, {"fsdp": 4}, "attention"),
        ),
        ({"multiple": 2}, {"data": 2, "fsdp": 1, "tensor": 2}, "none"),
    ],
    ids=["short rows", "fsdp", "data and tensor"],
)
def test_nothing_but_rounding_changes(
    expected: tuple[decoder.Decoder, float], settings: dict, mesh: dict, remat: decoder.Remat
) -> None:
    """Of short rows some repeat a prompt."""
    packed = batch(**settings)
    if settings.get("row_length") == 16:
        assert packed.used > batch().used
    grads, loss = gradient(packed, meshes.make_mesh(**mesh, devices=FOUR) if mesh else ONE, remat)
    assert loss == pytest.approx(expected[1], rel=1e-5)
    assert_near(grads, expected[0], 2e-5)


def test_keys_are_named_by_the_place_in_the_data() -> None:
    bare = pack(groups(), row_length=32, microbatch_rows=4)
    assert (
        with_keys(bare, PLAIN, 0, "sft", 3) is bare
        and with_keys(bare, PLAIN.base, 0, "sft", 3) is bare
    )
    packed = batch(row_length=16)
    found = packed.arrays[KEYS]
    assert found.dtype == np.uint32 and found.shape == (*packed.arrays["tokens"].shape, 2)
    rows = found.reshape(-1, 16, 2)
    columns = {
        (p.row, c)
        for places in packed.places
        for p in places
        for c in range(p.column, p.column + p.length)
    }
    for group, places in enumerate(packed.places):
        for number, place in enumerate(places):
            at = rows[place.row, place.column : place.column + place.length]
            assert (at == keys.key_data(0, "dropout", "sft", 3, group, number)).all()
    prompts = {keys.key_data(0, "dropout", "sft", 3, group, -1).tobytes() for group in range(8)}
    rest = {
        rows[row, c].tobytes() for row, c in np.ndindex(rows.shape[:2]) if (row, c) not in columns
    }
    assert rest == {*prompts, bytes(8)}  # 0 at padding
    assert not (batch(row_length=16, step=4).arrays[KEYS] == found)[found != 0].any()
