"""A quantised base: its codes by hand and on every mesh, and that the policy computes with what
they stand for."""

from __future__ import annotations

import dataclasses
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import plain
import pytest

from g2d_jax.models import decoder, hf, lora, quantise
from g2d_jax.models.config import LINEAR, Lora, ModelConfig
from g2d_jax.models.hf_folder import WEIGHTS
from g2d_jax.models.table import Param, block_params
from g2d_jax.runtime import mesh as meshes

# A width that is no multiple of the tile, and head_dim times heads that is one.
BASE = ModelConfig("qwen2", 64, 96, 2, 4, 2, 16, 128, tie_word_embeddings=True)
KINDS = ("int8", "nf4")
TOKENS = np.arange(16).reshape(2, 8) % 64


def needs_qwix() -> None:
    pytest.importorskip("qwix", reason="qwix is not installed: the extra quant")


def of(kind: Any, base: ModelConfig = BASE) -> ModelConfig:
    return dataclasses.replace(base, lora=Lora(3, 6.0, ("q_proj", "down_proj")), quantise=kind)


@pytest.fixture(scope="module")
def base() -> decoder.Decoder:
    return jax.jit(lambda: decoder.init(BASE, jax.random.key(0), std=0.2))()


@pytest.fixture(scope="module", params=KINDS)
def policy(request: pytest.FixtureRequest, base: decoder.Decoder) -> decoder.Decoder:
    """Adapters whose B is not zero beside codes."""
    needs_qwix()
    config = of(request.param)
    made = jax.tree.map(lambda x: x + 0.05, lora.adapters(config, jax.random.key(1)))
    return lora.combine(made, jax.jit(lambda base: lora.frozen(base, config))(base))


def explicit(policy: decoder.Decoder) -> decoder.Decoder:
    """The same policy with weights in place of codes, as qwix itself computes them."""
    import qwix

    def make(name: str, _: Param) -> Any:
        value = decoder.parameter(policy, name)
        return qwix.dequantize(value.astype(jnp.float32)) if quantise.is_quantised(value) else value

    return decoder.build(policy.config.without_codes, make)


@partial(jax.jit, static_argnames="remat")
def logits(model: decoder.Decoder, remat: decoder.Remat = "none") -> jax.Array:
    return plain.logits(model, TOKENS, remat=remat)


def test_codes_by_hand() -> None:
    needs_qwix()
    row = Param((4, 2), ("embed", "mlp"), "normal", "", inputs=1)
    weight = jnp.array([[1.0, 2.0], [0.25, 0.0], [0.0, -1.4], [-0.5, 0.5]])
    int8 = quantise.encode(dataclasses.replace(row, quantised="int8"), weight)
    # The scale is the greatest magnitude over 127.5, the edge of the last code's interval.
    np.testing.assert_allclose(int8.scale, [[1 / 127.5, 2 / 127.5]], rtol=1e-6)
    np.testing.assert_array_equal(int8.qvalue, [[127, 127], [32, 0], [0, -89], [-64, 32]])
    found = quantise.decode(int8, jnp.dtype(jnp.float32))
    np.testing.assert_allclose(found[:, 0], np.array([127, 32, 0, -64]) / 127.5, rtol=1e-6)
    nf4 = quantise.encode(dataclasses.replace(row, quantised="nf4"), weight)
    np.testing.assert_array_equal(nf4.scale, [[1.0, 2.0]])
    np.testing.assert_array_equal(
        nf4.qvalue.astype(jnp.int32), [[15, 15], [10, 7], [7, 1], [2, 10]]
    )
    found = quantise.decode(nf4, jnp.dtype(jnp.float32))
    np.testing.assert_allclose(found[:, 1], [2.0, 0.0, 2 * -0.6961928, 2 * 0.2461123], rtol=1e-6)


def test_where_scales_lie() -> None:
    rows = {kind: block_params(of(kind)) for kind in KINDS}
    shapes = {
        kind: {name: quantise.scale_shape(rows[kind][name]) for name in LINEAR.values()}
        for kind in KINDS
    }
    assert [shapes["int8"][name] for name in ("q", "k", "o", "down")] == [
        (1, 4, 16),
        (1, 2, 16),
        (1, 1, 96),
        (1, 96),
    ]
    assert [shapes["nf4"][name] for name in ("q", "k", "o", "down")] == [
        (3, 4, 16),
        (3, 2, 16),
        (4, 1, 96),
        (4, 96),
    ]
    assert not any(row.quantised for row in block_params(of("")).values())
    assert {name for name, row in rows["nf4"].items() if row.quantised} == set(LINEAR.values())


def test_what_codes_stand_for_is_what_qwix_says(
    policy: decoder.Decoder, base: decoder.Decoder
) -> None:
    import qwix

    most = {"int8": 0.012, "nf4": 0.1}[policy.config.quantise]
    for name in LINEAR.values():
        held = getattr(policy.blocks, name).get_value()
        assert (
            quantise.is_quantised(held)
            and held.qvalue.dtype == quantise.CODES[policy.config.quantise]
        )
        found = np.asarray(quantise.decode(held, jnp.dtype(jnp.float32)))
        np.testing.assert_array_equal(
            found, qwix.dequantize(held.astype(jnp.float32)), err_msg=name
        )
        weight = np.asarray(getattr(base.blocks, name)[...])
        assert 0 < np.linalg.norm(found - weight) < most * np.linalg.norm(weight), name
    np.testing.assert_array_equal(policy.blocks.q_bias[...], base.blocks.q_bias[...])
    np.testing.assert_array_equal(policy.embed[...], base.embed[...])
    assert decoder.count_params(policy.config.base) == decoder.count_params(BASE)


@pytest.mark.parametrize("policy", ["nf4"], indirect=True)
def test_logits_and_gradients_are_those_of_explicit_weights(policy: decoder.Decoder) -> None:
    """And what the weights stand for is kept for the backward pass with no remat policy."""
    other = explicit(policy)

    def gradient(policy: decoder.Decoder, remat: decoder.Remat) -> Any:
        trained, rest = lora.partition(policy)

        def loss(trained: decoder.Decoder) -> tuple[jax.Array, jax.Array]:
            found = logits(lora.combine(trained, rest), remat)
            return jnp.sum(jnp.sin(found)), found

        return jax.grad(loss, has_aux=True), trained

    program, trained = gradient(other, "none")
    expected, theirs = jax.jit(program)(trained)
    for remat in ("none", "attention"):
        program, trained = gradient(policy, remat)
        text = str(jax.make_jaxpr(program)(trained))
        assert "[2,96,128]" in text and "f32[2,96,128]" not in text
        if remat == "none":
            found, ours = jax.jit(program)(trained)
            np.testing.assert_allclose(ours, theirs, atol=2e-5)
            for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5 * np.abs(y).max())


@pytest.mark.parametrize("policy", ["nf4"], indirect=True)
def test_merged_computes_the_same(policy: decoder.Decoder, tmp_path: Path) -> None:
    merged = jax.jit(plain.merge)(policy)
    assert merged.config == BASE
    assert not any(
        quantise.is_quantised(getattr(merged.blocks, name).get_value()) for name in LINEAR.values()
    )
    np.testing.assert_allclose(logits(merged), logits(policy), atol=2e-5)
    wide = jnp.dtype(jnp.float32)
    decoded, view = (
        jax.jit(partial(how, dtype=wide))(policy)
        for how in (lora.to_sampler_params, lora.to_unstacked_sampler_params)
    )
    jax.tree.map(np.testing.assert_array_equal, jax.jit(decoder.unstack)(decoded), view)
    np.testing.assert_allclose(logits(view), logits(policy), atol=2e-5)
    whole, by_layer = hf.save(merged, tmp_path / "whole"), hf.save(policy, tmp_path / "by-layer")
    assert (by_layer / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS[-1:])
def test_a_folder_gives_the_same_codes_on_every_mesh(
    base: decoder.Decoder, kind: str, tmp_path: Path
) -> None:
    """On four devices one has 48 of the 96 inputs, no whole number of tiles."""
    needs_qwix()
    folder = hf.save(base, tmp_path / "model", dtype="bfloat16")
    one, four = (
        meshes.make_mesh(1, *sizes, devices=jax.devices()[: sizes[0] ** 2])
        for sizes in ((1, 1), (2, 2))
    )
    load = partial(hf.load, folder, dtype=jnp.dtype(jnp.bfloat16), config=of(kind))
    alone, spread = (load(mesh=mesh) for mesh in (one, four))
    where = decoder.shardings(of(kind), four)
    for name in LINEAR.values():
        ours, theirs, at = (getattr(x.blocks, name).get_value() for x in (spread, alone, where))
        assert ours.qvalue.sharding.is_equivalent_to(at.qvalue, ours.ndim)
        np.testing.assert_array_equal(
            ours.qvalue.astype(jnp.int32), theirs.qvalue.astype(jnp.int32)
        )
        np.testing.assert_array_equal(ours.scale, theirs.scale)
    assert (
        spread.embed[...].dtype == jnp.bfloat16
        and spread.blocks.attn_norm[...].dtype == jnp.bfloat16
    )


def test_wrong_settings_and_a_missing_package_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match=r"lora\.quantise must be int8 or nf4, or empty, got 'int4'"
    ):
        quantise.check("int4")
    monkeypatch.setitem(sys.modules, "qwix", None)
    with pytest.raises(
        ImportError, match=r"lora\.quantise is 'int8', .* pip install '\.\[quant\]'"
    ):
        quantise.check("int8")
