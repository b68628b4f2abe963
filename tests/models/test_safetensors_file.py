"""Safetensors files: what we write others read, and the other way round; headers that cannot be
true are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from g2d_jax.models import safetensors_file

RNG = np.random.default_rng(0)
TENSORS = {
    "b": RNG.standard_normal((5, 7)).astype(np.float32),
    "a": RNG.standard_normal((2, 3, 4)).astype(np.float32),
    "none": np.zeros((0, 3), np.float32),
    "one": np.asarray(7.5, np.float32),
}
SHAPES = {name: array.shape for name, array in TENSORS.items()}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_safetensors_reads_what_we_write(dtype: Any, tmp_path: Path) -> None:
    asked = []

    def fetch(name: str) -> np.ndarray:
        asked.append(name)
        return TENSORS[name].astype(dtype)

    file = tmp_path / "x.safetensors"
    safetensors_file.write(file, SHAPES, np.dtype(dtype), fetch)
    assert asked == list(SHAPES)
    found = load_file(file)
    assert found.keys() == TENSORS.keys()
    for name, array in found.items():
        assert array.dtype == dtype
        np.testing.assert_array_equal(array, TENSORS[name].astype(dtype))
    with safe_open(file, "np") as tensors:
        assert tensors.metadata() == {"format": "pt"}
    assert int.from_bytes(file.read_bytes()[:8], "little") % 8 == 0  # tensors begin aligned


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_we_read_what_safetensors_writes(dtype: Any, tmp_path: Path) -> None:
    save_file(
        {name: np.asarray(array.astype(dtype)) for name, array in TENSORS.items()},
        tmp_path / "x",
        {"format": "pt"},
    )
    header = safetensors_file.read_header(tmp_path / "x")
    assert {name: stored.shape for name, stored in header.items()} == SHAPES
    for name, stored in header.items():
        np.testing.assert_array_equal(stored.rows(), TENSORS[name].astype(dtype))
    np.testing.assert_array_equal(header["b"].rows(1, 4), TENSORS["b"].astype(dtype)[1:4])
    np.testing.assert_array_equal(header["a"].rows(1), TENSORS["a"].astype(dtype)[1:])


def test_an_object_store_has_the_same_bytes(tmp_path: Path, bucket: Any) -> None:
    for folder in (tmp_path, bucket):
        safetensors_file.write(folder / "x", SHAPES, np.dtype(np.float32), TENSORS.__getitem__)
    assert (bucket / "x").read_bytes() == (tmp_path / "x").read_bytes()
    for name, stored in safetensors_file.read_header(bucket / "x").items():
        np.testing.assert_array_equal(stored.rows(), TENSORS[name])


def entry(shape: Any, *offsets: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"t": entry([2], 0, 8), "u": entry([2], 8, 16)}, None),
        (
            {"t": entry([2], 0, 8), "u": entry([3], 8, 20)},
            "truncated: tensor u extends beyond the end of the file",
        ),
        ({"t": entry([2], 0, 8)}, "the tensors need 8 bytes, but the file has 16 for them"),
        (
            {"t": entry([2], 0, 8), "u": entry([1], 12, 16)},
            "tensor u begins at byte 12 of the data, expected 8",
        ),
        (
            {"t": entry([4], 0, 16), "u": entry([2], 8, 16)},
            "tensor u begins at byte 8 of the data, expected 16",
        ),
        ({"t": entry([3], 0, 16)}, "tensor t: its entry in the header is"),
        ({"t": entry([2, 2], 0, 16, dtype="F16")}, "tensor t: its entry"),
        ({"t": entry([-4], 0, 16)}, "tensor t: its entry"),
        ({"t": entry([4.0], 0, 16)}, "tensor t: its entry"),
        ({"t": entry([True], 0, 4)}, "tensor t: its entry"),
        ({"t": entry([4], 0, 16, 16)}, "tensor t: its entry"),
        ({"t": entry([4], 16, 0)}, "tensor t: its entry"),
        ({"t": entry([4], 0, 16, dtype=None)}, "tensor t: its entry"),
        ({"t": 3}, "tensor t: its entry"),
        ([], "its header is not a JSON object"),
        (b"\xff\xff", "codec can't decode"),
        (b"{", "Expecting property name"),
    ],
)
def test_headers(header: Any, message: str | None, tmp_path: Path) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    if message is None:
        assert safetensors_file.read_header(tmp_path / "x").keys() == {"t", "u"}
        return
    with pytest.raises(ValueError, match=f"x is not a readable safetensors file: .*{message}"):
        safetensors_file.read_header(tmp_path / "x")


def test_a_header_longer_than_its_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes((2**40).to_bytes(8, "little") + b"{}")
    with pytest.raises(
        ValueError, match="declares a header of 1099511627776 bytes in a file of 10"
    ):
        safetensors_file.read_header(tmp_path / "x")
    (tmp_path / "x").write_bytes(b"1234567")
    with pytest.raises(ValueError, match="it has 7 bytes"):
        safetensors_file.read_header(tmp_path / "x")
