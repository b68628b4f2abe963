"""Damaged GGUF files: a model and a tokenizer, or an error that names the file."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzz.hostile import accepted, damaged, tries
from hypothesis import given
from hypothesis import strategies as st

from g2d_jax import contents
from g2d_jax.data.tokenizer import load_tokenizer
from g2d_jax.models import hf
from g2d_jax.models.hf_config import config_from_hf
from g2d_jax.models.table import expected_shapes

gguf = pytest.importorskip("gguf")
import ggufs  # noqa: E402

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("bounded_memory"),
    pytest.mark.filterwarnings("ignore"),  # of transformers, about what it is given
]

NAME = "model-to-load.gguf"
CONFIG: dict[str, Any] = {
    **{"model_type": "llama", "vocab_size": 6, "hidden_size": 32, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32},
    **{"max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": True},
    **{"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
}
TOKENS = {
    "tokens": ["<unk>", "<s>", "</s>", "a", "b", "ab"],
    "scores": [0.0, 0.0, 0.0, -1.0, -2.0, -3.0],
    "token_type": [2, 3, 3, 1, 1, 1],
    **{"model": "llama", "pre": "default"},
    **{"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0},
}


def make_whole(folder: Path) -> bytes:
    names = gguf.get_tensor_name_map(ggufs.ARCHITECTURES["llama"], 1)
    tensors = {}
    for name, shape in expected_shapes(config_from_hf(CONFIG)).items():
        kind = "Q8_0" if len(shape) > 1 else "F32"
        tensors[names.get_name(name, (".weight",))] = (np.ones(shape, np.float32), kind)
    tokenizer = {f"tokenizer.ggml.{name}": value for name, value in TOKENS.items()}
    path = folder / NAME
    ggufs.write(path, {**ggufs.entries(CONFIG), **tokenizer}, tensors)
    return path.read_bytes()


@pytest.fixture(scope="module")
def whole(folder: Path) -> bytes:
    return make_whole(folder)


def load(path: Path) -> bool:
    """Whether a file makes a model and a tokenizer."""
    loaded = accepted(lambda: hf.load(path), path.name) is not None
    told = accepted(lambda: contents.weights(path), path.name) is not None
    tokenizer = accepted(lambda: load_tokenizer(path), path.name)
    assert told or not loaded
    if tokenizer is not None:
        tokenizer.backend.encode("ab ba")
    return loaded and tokenizer is not None


def test_the_whole_file_is_read(folder: Path, whole: bytes) -> None:
    (folder / NAME).write_bytes(whole)
    assert load(folder / NAME)


@pytest.mark.slow
@tries(300)
@given(data=st.data())
def test_damaged_files(folder: Path, whole: bytes, data: st.DataObject) -> None:
    path = folder / NAME
    path.unlink(missing_ok=True)
    path.write_bytes(data.draw(damaged(whole)))
    load(path)


@tries(40)
@given(at=st.integers(0, 3000), number=st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]))
def test_lying_numbers(folder: Path, whole: bytes, at: int, number: int) -> None:
    changed = bytearray(whole)
    at = min(at, len(whole) - 8)
    changed[at : at + 8] = struct.pack("<Q", number)
    path = folder / NAME
    path.unlink(missing_ok=True)
    path.write_bytes(changed)
    load(path)


@tries(30)
@given(share=st.floats(0, 1, exclude_max=True))
def test_truncated_files_are_refused(folder: Path, whole: bytes, share: float) -> None:
    path = folder / NAME
    path.unlink(missing_ok=True)
    path.write_bytes(whole[: int(len(whole) * share)])
    assert not load(path)
