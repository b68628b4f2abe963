"""Model folders with hostile config.json, safetensors files and indexes: loaded as declared, or
refused by name.

Nothing may be allocated for what a header or a config only declares.
"""

import json
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from fuzz.hostile import DEEP, ODD, VALUES, accepted, as_json, changed, damaged, tries, write_folder
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from g2d_jax.models import hf
from g2d_jax.models.hf_config import config_from_hf
from g2d_jax.models.hf_folder import find_weights, read_headers
from g2d_jax.models.table import expected_shapes

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("bounded_memory")]

NAME = "model-to-load"
CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 11,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 12,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "layer_types": ["full_attention", "full_attention"],
}
SHAPES = expected_shapes(config_from_hf(CONFIG))
TENSORS = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
WHOLE = save(TENSORS)
LENGTH = int.from_bytes(WHOLE[:8], "little")
HEADER: dict[str, Any] = json.loads(WHOLE[8 : 8 + LENGTH])
DATA = WHOLE[8 + LENGTH :]


def load(folder: Path, files: dict[str, bytes]) -> bool:
    """Whether these files make a model."""
    place = write_folder(folder / NAME, files)
    if accepted(lambda: find_weights(place, hf.read_config(place)), NAME) is None:
        return False
    model = accepted(lambda: hf.load(place), NAME)
    return model is not None and all(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))


def weights(header: Any, data: bytes = DATA, length: int | None = None) -> dict[str, bytes]:
    text = header if isinstance(header, bytes) else as_json(header)
    prefix = (len(text) if length is None else length).to_bytes(8, "little")
    return {"config.json": as_json(CONFIG), "model.safetensors": prefix + text + data}


def test_the_good_one_loads(folder: Path) -> None:
    assert load(folder, weights(HEADER))


@given(
    damaged(WHOLE[: 8 + LENGTH]).map(lambda head: head + DATA)
    | damaged(WHOLE)
    | st.sampled_from(ODD)
)
@tries(100)
def test_damaged_files(folder: Path, data: bytes) -> None:
    load(folder, {"config.json": as_json(CONFIG), "model.safetensors": data})


@given(changed(HEADER) | VALUES)
@tries(100)
def test_headers_of_any_content(folder: Path, header: Any) -> None:
    load(folder, weights(header))


@given(
    st.sampled_from(sorted(TENSORS)),
    st.sampled_from(["F32", "F16", "BF16", "F64", "I8", "BOOL", "F8_E4M3", "U64", "F4", "c64", ""]),
    st.lists(st.sampled_from([0, 1, -1, 8, 11, 2**31, 2**62, 2**63, 2**64, 10**30]), max_size=3),
    st.tuples(
        *2 * [st.sampled_from([0, 4, 32, 352, len(DATA), len(DATA) + 1, 2**40, 2**63, 2**64, -1])]
    ),
)
@tries(100)
def test_declared_dtypes_shapes_and_places(
    folder: Path, name: str, dtype: str, shape: list[int], offsets: tuple[int, int]
) -> None:
    changes: list[dict[str, Any]] = [
        {"dtype": dtype},
        {"shape": shape},
        {"data_offsets": list(offsets)},
    ]
    changes.append({**changes[0], **changes[1], **changes[2]})
    for change in changes:
        header = {**HEADER, name: {**HEADER[name], **change}}
        assert load(folder, weights(header)) == (header == HEADER)


@pytest.mark.parametrize(
    "length", [0, 1, LENGTH - 1, LENGTH + 1, len(WHOLE), 10**8, 2**40, 2**63, 2**64 - 1]
)
def test_wrong_header_length(folder: Path, length: int) -> None:
    assert not load(folder, weights(HEADER, length=length))


def test_a_header_that_fills_a_sparse_file_is_not_read(folder: Path) -> None:
    """The file says that its header is 3 GiB long, and is that long."""
    load(folder, weights(HEADER, length=3 * 2**30))
    with (folder / NAME / "model.safetensors").open("r+b") as file:
        file.truncate(4 * 2**30)
    assert accepted(lambda: read_headers(folder / NAME), NAME) is None


@pytest.mark.parametrize(
    "end", ["Infinity", "-Infinity", "NaN", "1e400", '"9"', "null", "[]", "9" * 400]
)
def test_a_cut_file_whose_offsets_are_no_numbers(folder: Path, end: str) -> None:
    text = (
        as_json(HEADER)
        .decode()
        .replace(f", {HEADER['model.norm.weight']['data_offsets'][1]}]", f", {end}]")
    )
    assert not load(folder, weights(text.encode(), DATA[:-4]))


@pytest.mark.parametrize("line", range(len(DEEP)))
def test_deep_nesting(folder: Path, line: int) -> None:
    assert not load(folder, weights(DEEP[line]))
    assert not load(folder, {**weights(HEADER), "config.json": DEEP[line]})


# config.json


@given(changed(CONFIG))
@tries(150)
def test_configs_of_any_types(folder: Path, config: Any) -> None:
    load(folder, {**weights(HEADER), "config.json": as_json(config)})


@given(damaged(as_json(CONFIG)) | st.sampled_from(ODD))
@tries(60)
def test_damaged_configs(folder: Path, data: bytes) -> None:
    load(folder, {**weights(HEADER), "config.json": data})


HUGE = [2**31, 2**63, 10**30, 10**400, math.inf, math.nan, -1, 0, 1.5, "8", True]


@pytest.mark.parametrize("value", HUGE, ids=lambda value: f"{value!r:.12}")
def test_sizes_that_are_only_declared(folder: Path, value: Any) -> None:
    numbers = [name for name, old in CONFIG.items() if isinstance(old, int | float)]
    for name in numbers:
        free = name in ("max_position_embeddings", "rms_norm_eps", "rope_theta")
        free = free or (name, value) == ("tie_word_embeddings", True)
        loaded = load(folder, {**weights(HEADER), "config.json": as_json({**CONFIG, name: value})})
        assert not loaded or free, name
    for name, old in CONFIG["rope_scaling"].items():
        if isinstance(old, int | float):
            rope = {**CONFIG["rope_scaling"], name: value}
            load(
                folder,
                {**weights(HEADER), "config.json": as_json({**CONFIG, "rope_scaling": rope})},
            )


# The index of several files

HALVES = [dict(list(TENSORS.items())[:8]), dict(list(TENSORS.items())[8:])]
INDEX = {
    "metadata": {"total_size": 1},
    "weight_map": {name: f"{i}.safetensors" for i, half in enumerate(HALVES) for name in half},
}
FILES = {
    "config.json": as_json(CONFIG),
    **{f"{i}.safetensors": save(half) for i, half in enumerate(HALVES)},
}


@given(
    changed(INDEX).map(as_json)
    | damaged(as_json(INDEX))
    | st.sampled_from(ODD)
    | VALUES.map(as_json)
)
@tries(100)
def test_indexes_of_any_content(folder: Path, index: bytes) -> None:
    load(folder, {**FILES, "model.safetensors.index.json": index})


@pytest.mark.parametrize(
    "file",
    ["../config.json", "/etc/passwd", ".", "..", "", "config.json", "a\0b", "x" * 5000, "\ud800"],
)
def test_an_index_that_points_elsewhere(folder: Path, file: str) -> None:
    index = {"weight_map": {**INDEX["weight_map"], "model.norm.weight": file}}  # type: ignore[dict-item]
    assert not load(folder, {**FILES, "model.safetensors.index.json": as_json(index)})


@pytest.mark.parametrize(
    "name",
    ["~nobody-of-this-name/model", "~", "a\0b", "x" * 5000, "org/na me", "", "\ud800/x", "../.."],
)
def test_names_of_models(name: str) -> None:
    accepted(lambda: hf.read_config(hf.resolve(name)), "")
