"""Damaged GGUF files: a model and a tokenizer, or an error that names the file."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from fuzz.hostile import accepted, damaged, tries
from hypothesis import given
from hypothesis import strategies as st

from g2d_jax import contents
from g2d_jax.data.tokenizer import load_tokenizer
from g2d_jax.models import hf

pytest.importorskip("gguf")
import ggufs

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("bounded_memory"),
    pytest.mark.filterwarnings("ignore"),  # of transformers, about what it is given
]

NAME = "model-to-load.gguf"


@pytest.fixture(scope="module")
def whole(folder: Path) -> bytes:
    return ggufs.write_tiny(folder / NAME).read_bytes()


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
