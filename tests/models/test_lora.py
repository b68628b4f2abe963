"""Adapters: what they compute, what PEFT and transformers make of them, and that nothing else is
trained."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import plain
import pytest
from plain import merge, noisy

from g2d_jax.models import decoder, hf, lora
from g2d_jax.models.config import LINEAR, Lora, ModelConfig
from g2d_jax.runtime import mesh as meshes

BASE = ModelConfig("qwen3", 64, 32, 2, 4, 2, 8, 48, tie_word_embeddings=True)
SOME = ("q_proj", "o_proj", "down_proj")


def policy(base: decoder.Decoder, adapters: Lora) -> decoder.Decoder:
    """Adapters whose B is not zero, beside a base."""
    config = dataclasses.replace(base.config, lora=adapters)
    return lora.combine(noisy(lora.adapters(config, jax.random.key(1))), lora.frozen(base, config))


logits = jax.jit(plain.logits)


@pytest.fixture(scope="module")
def base() -> decoder.Decoder:
    return decoder.init(BASE, jax.random.key(0), std=0.2)


TOKENS = np.arange(24).reshape(2, 12) % 64


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"rank": 2, "alpha": 1.0, "targets": ("q",)},
            "has 'q', which is not a linear layer of this model; choose from .*down_proj$",
        ),
        ({"rank": 2, "alpha": 1.0, "targets": ()}, "at least one layer"),
        ({"rank": 2, "alpha": 1.0, "targets": ("q_proj", "q_proj")}, "none twice"),
    ],
)
def test_wrong_settings(values: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(BASE, lora=Lora(**values))


def test_fresh_adapters_change_nothing(base: decoder.Decoder) -> None:
    config = dataclasses.replace(BASE, lora=Lora(3, 6.0))
    fresh = lora.combine(lora.adapters(config, jax.random.key(1)), lora.frozen(base, config))
    np.testing.assert_array_equal(logits(fresh, TOKENS), logits(base, TOKENS))
    a, b = fresh.blocks.gate_a[...], fresh.blocks.gate_b[...]
    assert a.shape == (2, 32, 3) and b.shape == (2, 3, 48) and not np.any(b)
    assert np.abs(a).max() <= 32**-0.5 and a.std() == pytest.approx(32**-0.5 / 3**0.5, rel=0.2)
    assert fresh.blocks.o_a.shape == (2, 4, 8, 3) and fresh.blocks.k_b.shape == (2, 3, 2, 8)


def test_merged_computes_the_same(base: decoder.Decoder) -> None:
    made = policy(base, Lora(2, 5.0, SOME))
    merged = jax.jit(merge)(made)
    assert merged.config == BASE
    q, a, b = (np.asarray(getattr(made.blocks, name)[...])[0] for name in ("q", "q_a", "q_b"))
    np.testing.assert_allclose(
        np.asarray(merged.blocks.q[...])[0],
        q + 5.0 / 2 * np.einsum("ir,rhd->ihd", a, b),
        atol=1e-6,
    )
    found = np.asarray(logits(made, TOKENS))
    np.testing.assert_allclose(logits(merged, TOKENS), found, atol=2e-5)
    assert np.abs(found - np.asarray(logits(base, TOKENS))).max() > 0.1
    untouched = {"q", "k", "v", "o", "gate", "up", "down"} - {
        LINEAR[name] for name in made.config.lora.targets
    }
    for name in (*untouched, "attn_norm", "q_norm"):
        np.testing.assert_array_equal(
            getattr(merged.blocks, name)[...], getattr(base.blocks, name)[...]
        )


def test_an_export_that_merges_layer_by_layer_has_the_bits_of_the_whole(
    base: decoder.Decoder, tmp_path: Path
) -> None:
    """From a bfloat16 base on a mesh, as LoRA runs have it; and nothing but a model's tensors are
    in the files."""
    made = policy(decoder.cast(base, jnp.bfloat16), Lora(3, 5.0, SOME))
    mesh = meshes.make_mesh(fsdp=2, tensor=2, data=-1)
    made = jax.device_put(made, decoder.shardings(made.config, mesh))
    size = {"dtype": "bfloat16", "max_shard_bytes": 20_000}
    hf.save(made, tmp_path / "merging", **size)
    hf.save(jax.jit(merge)(made), tmp_path / "whole", **size)
    files = {path.name: path.read_bytes() for path in (tmp_path / "merging").iterdir()}
    assert len(files) > 4 and files == {
        path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()
    }


def test_what_is_trained_is_the_adapters_alone(base: decoder.Decoder) -> None:
    made = policy(base, Lora(3, 6.0, SOME))
    trained, rest = lora.partition(made)
    # q: 32 -> 4*8, o: 4*8 -> 32, down: 48 -> 32, of two layers
    count = 2 * 3 * (32 + 32 + 32 + 32 + 48 + 32)
    assert (
        sum(x.size for x in jax.tree.leaves(trained)) == decoder.count_trained(made.config) == count
    )
    assert rest is not None
    assert sum(x.size for x in jax.tree.leaves(rest)) == decoder.count_params(BASE)
    jax.tree.map(np.testing.assert_array_equal, lora.combine(trained, rest), made)
    assert lora.partition(base) == (base, None) and lora.combine(base, None) is base


@pytest.mark.slow
def test_bfloat16_keeps_the_effect_of_small_adapters() -> None:
    """In training and as the sampler reads it, log-probabilities move by what they do in float32,
    beside noise.

    Slope of the one on the other; a base that the smallest adapters are merged into has lost nearly
    all of it.
    """
    size, config = 1e-5, ModelConfig("qwen3", 128, 128, 2, 4, 2, 32, 256)
    shape, narrow = dataclasses.replace(config, lora=Lora(8, 32.0)), jnp.dtype(jnp.bfloat16)
    base = decoder.cast(decoder.init(config, jax.random.key(0), std=0.05), narrow)
    tokens = jax.random.randint(jax.random.key(3), (128, 64), 0, 128)
    fresh = lora.adapters(shape, jax.random.key(1))

    def beside(base: decoder.Decoder, size: float) -> decoder.Decoder:
        signs = jax.random.key(2)
        moved = jax.tree.map(
            lambda x: x if np.any(x) else size * jax.random.rademacher(signs, x.shape, x.dtype),
            fresh,
        )
        return lora.combine(moved, lora.frozen(base, shape))

    @partial(jax.jit, static_argnames=("dtype", "made"))
    def logprobs(model: decoder.Decoder, dtype: jnp.dtype, made: Any) -> jax.Array:
        return jax.nn.log_softmax(plain.logits(made(model), tokens, dtype=dtype))

    def effect(base: decoder.Decoder, dtype: jnp.dtype, made: Any) -> np.ndarray:
        return np.ravel(
            logprobs(beside(base, size), dtype, made) - logprobs(beside(base, 0.0), dtype, made)
        )

    trained = partial(jax.tree.map, lambda x: x)
    expected = effect(decoder.cast(base, jnp.float32), jnp.dtype(jnp.float32), trained)

    def slope(made: Any) -> float:
        return float(effect(base, narrow, made) @ expected / (expected @ expected))

    assert slope(trained) == pytest.approx(1.0, abs=0.1)
    assert slope(partial(lora.to_unstacked_sampler_params, dtype=narrow)) == pytest.approx(
        1.0, abs=0.1
    )
    assert slope(lambda model: decoder.cast(merge(model), narrow)) < 0.2


def test_gradients_are_those_of_the_merged_layer(base: decoder.Decoder) -> None:
    """With W' = W + s A B: dA = s dW' B^T and dB = s A^T dW'."""
    made = policy(base, Lora(3, 6.0))
    trained, rest = lora.partition(made)

    def loss(model: decoder.Decoder) -> jax.Array:
        return jnp.sum(jnp.sin(logits(model, TOKENS)))

    found = jax.jit(jax.grad(lambda p: loss(lora.combine(p, rest))))(trained)
    full = jax.jit(jax.grad(loss))(jax.jit(merge)(made))
    for name in LINEAR.values():
        a, b = (np.asarray(getattr(made.blocks, f"{name}_{side}")[...]) for side in "ab")
        a, b = a.reshape(2, -1, 3), b.reshape(2, 3, -1)
        outer = np.asarray(getattr(full.blocks, name)[...]).reshape(2, a.shape[1], b.shape[2])
        expected = {
            "a": 2.0 * outer @ b.transpose(0, 2, 1),
            "b": 2.0 * a.transpose(0, 2, 1) @ outer,
        }
        for side, value in expected.items():
            ours = np.asarray(getattr(found.blocks, f"{name}_{side}")[...]).reshape(value.shape)
            np.testing.assert_allclose(
                ours, value, rtol=2e-3, atol=2e-3 * np.abs(value).max(), err_msg=name
            )


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # PEFT asks transformers
@pytest.mark.parametrize(
    ("family", "adapters"),
    [
        ("qwen3", Lora(3, 6.0)),
        pytest.param("gemma3", Lora(2, 5.0, SOME), marks=pytest.mark.slow),
        *(
            pytest.param(family, Lora(3, 6.0), marks=pytest.mark.slow)
            for family in ("phi3", "qwen3_5", "qwen3_moe")
        ),
    ],
)
def test_peft_and_transformers_read_them(
    family: str, adapters: Lora, references: dict, tmp_path: Path
) -> None:
    """Adapters alone beside the base by PEFT, and merged by transformers: the logits that we
    compute."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    peft_package = pytest.importorskip("peft")
    source = references[family]
    mesh = meshes.make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])
    base = hf.load(source.folder, mesh=mesh)
    made = policy(base, adapters)
    made = jax.device_put(made, decoder.shardings(made.config, mesh))
    ours = np.asarray(logits(made, source.tokens))
    assert np.abs(ours - source.logits).max() > 0.1

    hf.save_adapters(made, tmp_path / "adapters", base=str(source.folder))
    hf.save(made, tmp_path / "merged")
    of = transformers.AutoModelForCausalLM.from_pretrained
    beside = peft_package.PeftModel.from_pretrained(
        of(source.folder, attn_implementation="eager"), tmp_path / "adapters"
    )
    assert beside.peft_config["default"].lora_dropout == 0.0
    for model in (beside, of(tmp_path / "merged", attn_implementation="eager")):
        with torch.no_grad():
            theirs = model.eval()(torch.tensor(source.tokens)).logits.numpy()
        np.testing.assert_allclose(theirs, ours, atol=2e-3)


def test_what_cannot_be_written(base: decoder.Decoder, tmp_path: Path) -> None:
    made = policy(base, Lora(2, 4.0))
    with pytest.raises(ValueError, match="the policy has no adapters"):
        hf.save_adapters(base, tmp_path / "adapters", base="somewhere")
    hf.save_adapters(made, tmp_path / "adapters", base="somewhere", revision="abc123")
    written = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert (written["base_model_name_or_path"], written["revision"]) == ("somewhere", "abc123")
    with pytest.raises(ValueError, match="already holds adapters"):
        hf.save_adapters(made, tmp_path / "adapters", base="somewhere")
