"""Reward models: scores equal to transformers' on both layouts, and folders that are none refused
by name."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from g2d_jax.models import decoder, flops, reward_model
from g2d_jax.models.reward_model import ReadOut
from g2d_jax.runtime import mesh as meshes

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCAB, PAD = 131, 7
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.15,
}  # fmt: skip


def roughen(model: Any) -> Any:
    """Norms start as ones and biases as zeros: make them tell."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def save_classifier(folder: Path, family: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        **{**SIZES, "num_labels": 1, "pad_token_id": PAD, **changes}
    )
    model = roughen(
        getattr(transformers, f"{family}ForSequenceClassification")._from_config(config)
    )
    model.save_pretrained(folder)
    return model


def ragged() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(8, VOCAB, length).astype(np.int32) for length in (1, 30, 17, 9)]


def padded(sequences: list[np.ndarray], fill: int) -> np.ndarray:
    tokens = np.full((len(sequences), max(map(len, sequences))), fill, np.int32)
    for row, ids in enumerate(sequences):
        tokens[row, : len(ids)] = ids
    return tokens


def ours(folder: Path, sequences: list[np.ndarray]) -> np.ndarray:
    model = reward_model.load(folder)
    parts = [model.read_out.scored_part(model.read_out.complete(ids)) for ids in sequences]
    lengths = jnp.asarray([len(part) for part in parts], jnp.int32)
    read = partial(reward_model.read_scores, mesh=meshes.make_mesh(devices=jax.devices()[:1]))
    return np.asarray(jax.jit(read)(model, padded(parts, 3), lengths))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Qwen2", {"tie_word_embeddings": True}),
        ("Llama", {"pad_token_id": 20}),
    ],
)
def test_scores_equal_transformers(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    model = save_classifier(tmp_path, family, **changes)
    pad = model.config.pad_token_id
    # padding is passed over wherever it is
    sequences = [
        *ragged(),
        np.asarray([9, 11, pad, 12, pad], np.int32),
    ]
    tokens = padded(sequences, pad)
    mask = torch.tensor(
        np.arange(tokens.shape[1])[None] < np.asarray([len(s) for s in sequences])[:, None]
    ).long()
    with torch.no_grad():
        wanted = model(torch.tensor(tokens).long(), attention_mask=mask).logits[:, 0].numpy()
    assert np.ptp(wanted) > 0.1
    np.testing.assert_allclose(ours(tmp_path, sequences), wanted, atol=1e-4, rtol=0)


def test_read_out() -> None:
    ids = np.asarray([5, 9, 5, 9, 9], np.int32)
    assert ReadOut().scored_part(ids).tolist() == [5, 9, 5, 9, 9]
    assert ReadOut(pad_id=9).scored_part(ids).tolist() == [5, 9, 5]
    assert ReadOut(cls_id=5).scored_part(ids).tolist() == [5, 9, 5]
    assert ReadOut(cls_id=6).scored_part(ids).tolist() == []
    assert ReadOut(cls_id=6).complete(ids).tolist() == [5, 9, 5, 9, 9, 6]
    assert ReadOut().complete(ids).tolist() == ids.tolist()


def test_load_onto_a_mesh_in_bfloat16_keeps_the_head_in_float32(tmp_path: Path) -> None:
    save_classifier(tmp_path, "Llama")
    mesh = meshes.make_mesh(fsdp=-1)
    model = reward_model.load(tmp_path, mesh=mesh, dtype=jnp.bfloat16)
    stored = load_file(tmp_path / "model.safetensors")
    assert model.head.dtype == jnp.float32 and model.head.sharding.is_fully_replicated
    np.testing.assert_array_equal(model.head, stored["score.weight"][0])
    assert model.trunk.embed[...].dtype == jnp.bfloat16
    assert (
        model.trunk.blocks.q[...].sharding
        == decoder.shardings(model.config, mesh).blocks.q.get_value()
    )
    assert not hasattr(model.trunk, "head")


def change_tensors(folder: Path, changes: dict[str, np.ndarray | None]) -> None:
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    save_file(
        {name: x for name, x in tensors.items() if x is not None}, folder / "model.safetensors"
    )


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({"score.bias": zeros(1)}, {}, r"not part of the architecture: score\.bias"),
        ({"score.weight": zeros(2, 48)}, {}, r"score\.weight in .*: \[2, 48\], expected \[1, 48\]"),
        ({}, {"id2label": {"0": "bad", "1": "good"}}, r"num_labels is 2"),
        (
            {},
            {"architectures": ["LlamaForOtherThings"]},
            r"LlamaForOtherThings.* may read score\.weight elsewhere",
        ),
        ({}, {"pad_token_id": "x"}, r"pad_token_id must be a token id"),
        ({"score.weight": None}, {}, r"has neither score\.weight nor v_head\.weight"),
        ({"v_head.weight": zeros(1, 48)}, {}, r"has both score\.weight and v_head\.weight"),
        (
            {"v_head.weight": zeros(1, 48), "score.weight": None},
            {},
            r"CLS token 128003 .* vocab_size 131",
        ),
        ({"model.norm.weight": None}, {}, r"missing: model\.norm\.weight"),
    ],
)
def test_what_is_no_scalar_head_is_named(
    tmp_path: Path, tensors: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    save_classifier(tmp_path, "Llama")
    change_tensors(tmp_path, tensors)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, **config}))
    with pytest.raises(ValueError, match=message):
        reward_model.load(tmp_path)


def test_a_language_models_head_is_not_read(tmp_path: Path) -> None:
    save_classifier(tmp_path, "Llama")
    before = reward_model.load(tmp_path)
    change_tensors(tmp_path, {"lm_head.weight": np.ones((VOCAB, 48), np.float32)})
    again = reward_model.load(tmp_path)
    jax.tree.map(
        np.testing.assert_array_equal, (again.trunk, again.head), (before.trunk, before.head)
    )


def test_flops_leave_out_the_output_matrix(tmp_path: Path) -> None:
    save_classifier(tmp_path, "Llama")
    config = reward_model.load(tmp_path).config
    layer = 48 * 48 * 2 + 48 * 24 * 2 + 3 * 48 * 80 + 2 * 48
    # 3 + 2 tokens, which read 1 + 2 + 3 and 1 + 2 positions; 2 layers, attention 48 wide; 2 scores
    wanted = 2 * (2 * layer + 48) * 5 + 4 * 2 * 48 * 9 + 2 * 48 * 2
    assert reward_model.score_flops(config, [3, 2]) == wanted
    assert flops.forward_flops(config, 5, 9) - wanted == 2 * VOCAB * 48 * 5 - 2 * 48 * 2
