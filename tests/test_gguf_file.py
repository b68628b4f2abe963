"""GGUF files: numbers of every type that is read, and headers that lie, each named in a line."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from g2d_jax.runtime import gguf_file

gguf = pytest.importorskip("gguf")
import ggufs  # noqa: E402

RANDOM = np.random.default_rng(0)
NUMBERS = RANDOM.normal(size=(6, 64)).astype(np.float32)
STEPS = {"F32": 0, "F16": 1e-3, "BF16": 8e-3, "Q8_0": 2e-2, "Q5_0": 0.1, "Q5_1": 0.1}
STEPS |= {"Q4_0": 0.25, "Q4_1": 0.2}


@pytest.mark.parametrize("kind", STEPS)
def test_numbers_survive_a_round_trip(tmp_path: Path, kind: str) -> None:
    tensors = {
        "a": (NUMBERS, kind),
        "b": (NUMBERS[0], kind),
        "c": (NUMBERS.reshape(3, 2, 64), kind),
    }
    path = ggufs.write(tmp_path / "a.gguf", {"general.architecture": "llama"}, tensors)
    file = gguf_file.read(path)
    stored = gguf.GGMLQuantizationType[kind]
    for name, (array, _) in tensors.items():
        tensor = file.tensors[name]
        found = gguf_file.read_rows(path, tensor, 0, len(array))
        assert (tensor.kind, tensor.shape, found.dtype) == (kind, array.shape, np.float32)
        np.testing.assert_allclose(found, array, atol=STEPS[kind], rtol=STEPS[kind])
        exact = gguf.dequantize(gguf.quantize(array, stored), stored)
        np.testing.assert_array_equal(found, exact)
        np.testing.assert_array_equal(gguf_file.read_rows(path, tensor, 1, 3), exact[1:3])


def half(number: float) -> bytes:
    return struct.pack("<e", number)


def filled(length: int, **places: int) -> bytes:
    """Zeros with these bytes: at0=7."""
    data = bytearray(length)
    for name, value in places.items():
        data[int(name.removeprefix("at"))] = value
    return bytes(data)


# Blocks of 256 numbers, and some of those worked out by hand: scale x steps - minimum.
BLOCKS: dict[str, tuple[bytes, dict[int, float]]] = {
    "Q2_K": (
        filled(16, at0=0x23, at1=0x01, at2=0x12, at4=0x04, at6=0x05)
        + filled(64, at0=0b11_10_01_00)
        + half(1.0)
        + half(0.5),
        {0: 0 - 0.5 * 2, 16: 0.0, 32: 2 * 1 - 0.5, 33: -0.5, 64: 4 * 2, 96: 5 * 3, 128: 0.0},
    ),
    "Q3_K": (
        filled(32, at0=1) + filled(64, at0=3) + filled(12, at0=5, at8=2) + half(0.5),
        {0: 0.5 * (37 - 32) * 3, 1: 0.5 * 5 * -4, 16: 0.5 * -32 * -4, 32: 0.5 * -32 * -4},
    ),
    "Q4_K": (
        half(0.5)
        + half(0.25)
        + filled(12, at0=2 | 1 << 6, at1=1, at2=1, at3=1, at4=4 | 2 << 6, at8=0x53)
        + filled(128, at0=0x7A, at64=0x0F),
        {
            **{0: 0.5 * 2 * 10 - 0.25 * 4, 1: -1.0, 32: 0.5 * 1 * 7, 33: 0.0},
            **{128: 0.5 * 19 * 15 - 0.25 * 37, 129: -9.25, 160: 0.0},
        },
    ),
    "Q5_K": (
        half(0.5)
        + half(0.25)
        + filled(12, at0=2, at1=1, at4=4)
        + filled(32, at0=0b11)
        + filled(128, at0=0x7A),
        {0: 0.5 * 2 * (10 + 16) - 0.25 * 4, 1: -1.0, 32: 0.5 * (7 + 16), 33: 0.0},
    ),
    "Q6_K": (
        filled(128, at0=0x5A, at32=0x0C, at64=0x01)
        + filled(64, at0=0b10_01_11_00, at32=0x01)
        + filled(16, at0=3, at2=256 - 2, at4=1, at6=127, at8=1)
        + half(0.5),
        {
            **{0: 0.5 * 3 * (10 - 32), 1: 0.5 * 3 * -32, 32: 0.5 * -2 * (12 + 48 - 32)},
            **{64: 0.5 * (5 + 16 - 32), 96: 0.0, 97: 0.5 * 127 * -32},
            **{128: 0.5 * (1 + 16 - 32), 144: 0.0},
        },
    ),
}


@pytest.mark.parametrize("kind", BLOCKS)
def test_k_quants_are_those_worked_out_by_hand(tmp_path: Path, kind: str) -> None:
    block, expected = BLOCKS[kind]
    code = int(gguf.GGMLQuantizationType[kind])
    path = tmp_path / "a.gguf"
    path.write_bytes(assembled([], [place("a", (256, 2), code, 0)], block * 2))
    found = gguf_file.read_rows(path, gguf_file.read(path).tensors["a"], 0, 2)
    for row in found:
        assert {at: float(row[at]) for at in expected} == expected
    every = gguf_file.KINDS
    assert {*STEPS, *BLOCKS} == set(every) and len(every) == 13


# Headers


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def entry(name: str, code: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", code) + value


def place(name: str, dimensions: Sequence[int], code: int, offset: int) -> bytes:
    sizes = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return text(name) + sizes + struct.pack("<IQ", code, offset)


def assembled(
    entries: Sequence[bytes],
    tensors: Sequence[bytes],
    data: bytes = b"",
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    magic: bytes = b"GGUF",
) -> bytes:
    """A file. counts: of tensors and entries, as it says."""
    said = counts or (len(tensors), len(entries))
    head = magic + struct.pack("<IQQ", version, *said) + b"".join([*entries, *tensors])
    return head + bytes(-len(head) % 32) + data


F32 = place("a", (8,), 0, 0)
DATA = bytes(32)
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "does not begin with GGUF"),
    "magic": (assembled([], [], magic=b"GGML"), "does not begin with GGUF"),
    "version": (assembled([], [], version=1), "of version 1; versions 2 and 3"),
    "big-endian": (assembled([], [], version=3 << 24), "of another byte order"),
    "tensors": (assembled([], [F32], DATA, counts=(2**63, 0)), "declares 9223372036854775808 ten"),
    "few tensors": (assembled([], [F32], DATA, counts=(4, 0)), "declares 4 tensors in a file"),
    "entries": (assembled([], [], counts=(0, 2**40)), "declares 1099511627776 entries"),
    "no more": (
        assembled([], [], counts=(0, 1))[:24] + b"\x08" + bytes(15),
        "4 bytes from 40 on are in",
    ),
    "name": (assembled([struct.pack("<Q", 2**62) + b"a"], [], DATA), "4611686018427387904 bytes"),
    "not UTF-8": (assembled([entry("a", 8, text(b"\xff\xfe"))], []), "is not UTF-8"),
    "text": (assembled([entry("a", 8, struct.pack("<Q", 99))], [], DATA), "99 bytes from"),
    "type": (assembled([entry("a", 13, bytes(8))], []), "entry a is of type 13"),
    "bool": (assembled([entry("a", 7, b"\x02")], [], DATA), "entry a is neither true nor false"),
    "twice": (assembled([entry("a", 4, bytes(4))] * 2, []), "the entry a is there twice"),
    "list": (
        assembled([entry("a", 9, struct.pack("<IQ", 4, 2**60))], [], DATA),
        "declares 1152921504606846976 items of entry a",
    ),
    "long list": (
        assembled([entry("a", 9, struct.pack("<IQ", 12, 60))], [], DATA * 2),
        "480 bytes from",
    ),
    "texts": (
        assembled([entry("a", 9, struct.pack("<IQ", 8, 2**33))], [], DATA),
        "declares 8589934592 items",
    ),
    "lists": (assembled([entry("a", 9, struct.pack("<IQ", 9, 1))], [], DATA), "a list of lists"),
    "alignment": (
        assembled([entry("general.alignment", 4, struct.pack("<I", 0))], [F32], DATA),
        "general.alignment is 0",
    ),
    "alignment's type": (
        assembled([entry("general.alignment", 8, text("32"))], [F32], DATA),
        "general.alignment is '32'",
    ),
    "dimensions": (assembled([], [place("a", (1,) * 5, 0, 0)], DATA), "tensor a has 5 dimensions"),
    "many dimensions": (
        assembled([], [text("a") + struct.pack("<I", 2**32 - 1)], DATA * 2),
        "has 4294967295 dimensions",
    ),
    "no dimension": (assembled([], [place("a", (), 0, 0)], DATA), "tensor a has 0 dimensions"),
    "size 0": (assembled([], [place("a", (0, 4), 0, 0)], DATA), r"has the shape \[4, 0\]"),
    "part of a block": (assembled([], [place("a", (33,), 2, 0)], DATA), "of type Q4_0 has the sh"),
    "sizes": (
        assembled([], [place("a", (2**40, 2**40), 0, 0)], DATA),
        "tensor a ends at byte 48357032784585166988248",
    ),
    "kind": (assembled([], [place("a", (256,), 16, 0)], DATA), "of type IQ2_XXS; F32, F16"),
    "unknown kind": (assembled([], [place("a", (8,), 999, 0)], DATA), "of type 999; F32, F16"),
    "offset": (assembled([], [place("a", (8,), 0, 2**62)], DATA), "tensor a ends at byte"),
    "far offset": (assembled([], [place("a", (8,), 0, 2**64 - 32)], DATA), "tensor a ends at"),
    "crooked offset": (assembled([], [place("a", (4,), 0, 4)], DATA), "which is no multiple of 32"),
    "short": (assembled([], [F32], DATA[:-1]), "truncated or damaged: tensor a ends at byte"),
    "same name": (assembled([], [F32, F32], DATA), "the tensor a is there twice"),
    "overlap": (
        assembled([], [place("b", (16,), 0, 0), place("a", (8,), 0, 32)], DATA * 2),
        "the tensors b and a overlap",
    ),
    "parts": (
        assembled([entry("split.count", 2, struct.pack("<H", 3))], [F32], DATA),
        "one of several parts",
    ),
    "escape": (
        assembled([entry("\x1b[2J\n", 13, bytes(8))], []),
        "is of type 13",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_headers_that_lie_are_named(tmp_path: Path, name: str) -> None:
    content, message = HOSTILE[name]
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        gguf_file.read(path)
    assert str(error.value).startswith(f"{path} is not a readable GGUF file: ")
    assert len(str(error.value)) < 600


def test_the_whole_that_they_are_made_of_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    numbers = np.arange(8, dtype=np.float32)
    values = [
        entry("text", 8, text("é")),
        entry("int", 5, struct.pack("<i", -3)),
        entry("float", 12, struct.pack("<d", 0.1)),
        entry("bool", 7, b"\x01"),
        entry("list", 9, struct.pack("<IQ3H", 2, 3, 1, 2, 3)),
        entry("texts", 9, struct.pack("<IQ", 8, 2) + text("a") + text("")),
    ]
    path.write_bytes(assembled(values, [F32], numbers.tobytes(), version=2))
    file = gguf_file.read(path)
    assert file.metadata["list"].tolist() == [1, 2, 3]
    assert {key: value for key, value in file.metadata.items() if key != "list"} == {
        **{"text": "é", "int": -3, "float": 0.1, "bool": True},
        "texts": ["a", ""],
    }
    rows = gguf_file.read_rows(path, file.tensors["a"], 0, 8)
    np.testing.assert_array_equal(rows, numbers)


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    for number in (1, 2):
        path.write_bytes(assembled([entry("a", 4, struct.pack("<I", number))], []))
        os.utime(path, ns=(number, number))
        assert gguf_file.read(path).metadata == {"a": number}


def test_a_pointer_of_git_lfs_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ValueError, match="not the file itself but Git LFS's pointer"):
        gguf_file.read(path)
    with pytest.raises(FileNotFoundError, match=r"b\.gguf"):
        gguf_file.read(tmp_path / "b.gguf")


def test_without_the_library_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    path = tmp_path / "a.gguf"
    path.write_bytes(assembled([], []))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(
        ImportError, match=r"GGUF files need the package gguf, .*pip install '\.\[gguf\]'"
    ):
        gguf_file.read(path)


def test_which_paths_are_gguf_files(tmp_path: Path) -> None:
    (tmp_path / "folder.gguf").mkdir()
    found: dict[Any, bool] = {
        name: gguf_file.is_gguf(name)
        for name in ("a.gguf", "A.GGUF", "a/b-gguf", "x.safetensors", str(tmp_path / "folder.gguf"))
    }
    assert list(found.values()) == [True, True, False, False, False]
