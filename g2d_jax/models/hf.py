"""Weights from and to Hugging Face folders, tensor by tensor, by the architecture's table (table.py).

    model = load(resolve("Qwen/Qwen2.5-0.5B"), mesh=mesh)
    save(model, "exported", dtype="bfloat16", eos_ids=[151645])

The host holds one tensor of the file at a time when loading and one shard when saving; conversion to our layout
(transpose, reshape, cast) runs on the devices.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors import safe_open
from safetensors.numpy import save_file

from g2d_jax.models import decoder
from g2d_jax.models.config import ModelConfig
from g2d_jax.models.decoder import Decoder
from g2d_jax.models.hf_config import config_from_hf, config_to_hf, one_or_list
from g2d_jax.models.hf_folder import CONFIG, INDEX, WEIGHTS, Stored, find_weights, read_config, resolve
from g2d_jax.models.table import Param, block_params, outer_params

__all__ = ["config_from_hf", "config_to_hf", "load", "read_config", "resolve", "save"]

_OUR_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_COMPARE_ROWS = 16_384


def load(folder: str | Path, *, mesh: Mesh | None = None, dtype: jnp.dtype = jnp.float32) -> Decoder:  # type: ignore[assignment]
    """Load a local model folder (see resolve) as a stacked Decoder with parameters in dtype.

    With a mesh every array is placed by decoder.shardings and each process reads only the slices that its devices
    hold; without one everything lies on the default device. All headers are checked before anything is read: a
    missing, unexpected, misshapen or truncated tensor raises ValueError by name.
    """
    folder = Path(folder)
    config = read_config(folder)
    found = find_weights(folder, config)
    if config.tie_word_embeddings and "lm_head.weight" in found:
        _check_tied(found)
    return load_decoder(config, found, mesh=mesh, dtype=dtype)


def load_decoder(
    config: ModelConfig,
    found: Mapping[str, Stored],
    *,
    mesh: Mesh | None = None,
    dtype: jnp.dtype = jnp.float32,  # type: ignore[assignment]
) -> Decoder:
    """The Decoder of config read from tensors whose headers have been checked; mesh and dtype as in `load`."""
    wanted = None if mesh is None else decoder.shardings(config, mesh)

    def make(name: str, row: Param, stacked: bool) -> jax.Array:
        target = None if wanted is None else getattr(wanted.blocks if stacked else wanted, name).get_value()
        if stacked:
            names = [row.hf.format(layer=layer) for layer in range(config.num_hidden_layers)]
            return _load_stack(row, names, found, target, jnp.dtype(dtype))
        return load_array(row, found, target, jnp.dtype(dtype))

    return decoder.build(config, make)


def load_array(row: Param, found: Mapping[str, Stored], target: NamedSharding | None, dtype: jnp.dtype) -> jax.Array:
    """One parameter that is not in a layer, in our layout and dtype, placed by target."""
    return _converter(row.shape, row.flat, jnp.dtype(dtype), target)(_read(row, row.hf, found, target))


def _load_stack(
    row: Param, names: Sequence[str], found: Mapping[str, Stored], target: NamedSharding | None, dtype: jnp.dtype
) -> jax.Array:
    """[L, …]: allocated once on the devices and filled in place, so that the host never holds more than a layer."""
    make_zeros, fill = _stack_programs(len(names), row.shape, row.flat, dtype, target)
    layer_target = target and NamedSharding(target.mesh, PartitionSpec(*target.spec[1:]))
    stack = make_zeros()
    for layer, name in enumerate(names):
        stack = fill(stack, _read(row, name, found, layer_target), layer)
        stack.block_until_ready()  # or the host would read ahead and queue up layers
    return stack


@functools.cache  # jit compiles once for each function object: parameters of one shape share theirs
def _stack_programs(
    layers: int, shape: tuple[int, ...], flat: tuple[int, ...] | None, dtype: jnp.dtype, target: NamedSharding | None
) -> tuple[Callable[[], jax.Array], Callable[[jax.Array, jax.Array, int], jax.Array]]:
    """Jitted: make an empty stack; write one stored layer into a (donated) stack."""

    def fill(stack: jax.Array, theirs: jax.Array, layer: int) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(stack, _ours(shape, flat, dtype, theirs), layer, 0)

    make_zeros = jax.jit(lambda: jnp.zeros((layers, *shape), dtype), out_shardings=target)
    return make_zeros, jax.jit(fill, donate_argnums=0, out_shardings=target)


@functools.cache
def _converter(
    shape: tuple[int, ...], flat: tuple[int, ...] | None, dtype: jnp.dtype, target: NamedSharding | None
) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(functools.partial(_ours, shape, flat, dtype), out_shardings=target)


def _ours(shape: tuple[int, ...], flat: tuple[int, ...] | None, dtype: jnp.dtype, theirs: jax.Array) -> jax.Array:
    """A stored tensor in our layout."""
    return (theirs if flat is None else theirs.T).reshape(shape).astype(dtype)


def _theirs(row: Param, ours: jax.Array) -> jax.Array:
    """One layer's parameter in the stored layout."""
    return ours if row.flat is None else ours.reshape(row.flat).T


def _read(row: Param, name: str, found: Mapping[str, Stored], target: NamedSharding | None) -> jax.Array:
    """A tensor in its stored layout and dtype, each device given its slice of the file."""
    shape = found[name].shape
    with safe_open(found[name].file, "np", backend="pread") as tensors:
        if target is None:
            return jnp.asarray(tensors.get_tensor(name))
        view = tensors.get_slice(name)

        @functools.cache  # devices that hold the same slice share one read
        def read(*bounds: tuple[int, int]) -> np.ndarray:
            return view[tuple(slice(start, stop) for start, stop in bounds)]

        def piece(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            return read(*((s.indices(size)[0], s.indices(size)[1]) for s, size in zip(index, shape, strict=True)))

        return jax.make_array_from_callback(shape, _stored_sharding(row, target), piece)


def _stored_sharding(row: Param, target: NamedSharding) -> NamedSharding:
    """The sharding of our array carried over to the stored layout, where head_dim is folded into the axis before it."""
    spec = (*target.spec, *(None,) * (len(row.axes) - len(target.spec)))
    parts = [part for axis, part in zip(row.axes, spec, strict=True) if axis != "head_dim"]
    return NamedSharding(target.mesh, PartitionSpec(*(parts if row.flat is None else parts[::-1])))


def _check_tied(found: Mapping[str, Stored]) -> None:
    """A tied model's file may repeat the embedding as lm_head.weight; another head would silently be dropped."""
    pair = [found["model.embed_tokens.weight"], found["lm_head.weight"]]
    with safe_open(pair[0].file, "np", backend="pread") as one, safe_open(pair[1].file, "np", backend="pread") as two:
        embed, head = one.get_slice("model.embed_tokens.weight"), two.get_slice("lm_head.weight")
        for start in range(0, pair[0].shape[0], _COMPARE_ROWS):
            rows = slice(start, min(start + _COMPARE_ROWS, pair[0].shape[0]))
            if not np.array_equal(embed[rows], head[rows]):
                raise ValueError(
                    f"{pair[1].file}: config.json says tie_word_embeddings, but lm_head.weight differs from "
                    "model.embed_tokens.weight; set tie_word_embeddings to false to use it"
                )


def save(
    model: Decoder,
    folder: str | Path,
    *,
    dtype: str = "float32",
    max_shard_bytes: float = 5e9,
    eos_ids: Sequence[int] = (),
    bos_id: int | None = None,
    pad_id: int | None = None,
    config_entries: Mapping[str, Any] | None = None,
    generation_entries: Mapping[str, Any] | None = None,
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a model folder that transformers and `load` read: safetensors, generation_config.json, config.json.

    model: stacked or unstacked, adapters merged (`lora.merge`). dtype: "float32" or "bfloat16". Files beyond
    max_shard_bytes are split, with an index. config_entries and generation_entries are added to the two JSON files,
    metadata to the safetensors headers. config.json is written last: a folder without it is an unfinished export. Write
    tokenizer and model card before calling this. Every process must call it; the first one writes. Raises ValueError
    when the folder already holds a finished model and overwrite is not set, when an entry contradicts the architecture,
    and for a model with adapters.
    """
    folder, names = Path(folder), jnp.dtype(dtype).name
    if names not in ("float32", "bfloat16"):
        raise ValueError(f"weights are saved as float32 or bfloat16, not {names}")
    if model.config.lora is not None:
        raise ValueError("the model has adapters: merge them, or write them alone (models/peft.py)")
    config = config_to_hf(model.config, eos_ids=eos_ids, bos_id=bos_id, pad_id=pad_id, dtype=names)
    for name, value in (config_entries or {}).items():
        if config.setdefault(name, value) != value:
            raise ValueError(f"config entry {name} = {value!r} contradicts the model's own {config[name]!r}")
    generation = {"eos_token_id": one_or_list(eos_ids), "bos_token_id": bos_id, "pad_token_id": pad_id}
    writer = jax.process_index() == 0
    if writer:
        _clear(folder, overwrite)
    _save_shards(model, folder, names, max_shard_bytes, {"format": "pt", **(metadata or {})}, writer)
    if writer:
        generation = {name: value for name, value in generation.items() if value is not None}
        write_json(folder / "generation_config.json", {**generation, **(generation_entries or {})})
        write_json(folder / CONFIG, config)
    return folder


def _clear(folder: Path, overwrite: bool) -> None:
    """Make the folder and take away what would make a half-written export look complete or mix two exports."""
    if (folder / CONFIG).exists() and not overwrite:
        raise ValueError(f"{folder} already holds a model; choose another folder, or set overwrite to replace it")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).unlink(missing_ok=True)
    for path in folder.iterdir():
        if _OUR_FILES.fullmatch(path.name):
            path.unlink()


def _save_shards(
    model: Decoder, folder: Path, dtype: str, max_bytes: float, metadata: Mapping[str, str], writer: bool
) -> None:
    shards = _plan_shards(model.config, jnp.dtype(dtype).itemsize, max_bytes)
    fetch = fetcher(model, jnp.dtype(dtype))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys(names, file)
        arrays = {}
        for name in names:  # every process takes part in fetching a sharded array, one keeps it
            array = fetch(name)
            if writer:
                arrays[name] = array
        if writer:
            save_file(arrays, folder / file, dict(metadata))
            (folder / file).chmod(folder.stat().st_mode & 0o666)  # safetensors makes files only the owner may read
    if writer and len(shards) > 1:
        total = decoder.count_params(model.config) * jnp.dtype(dtype).itemsize
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def tensors(config: ModelConfig) -> dict[str, tuple[str, Param, int | None]]:
    """Hugging Face's name -> (our name, row, layer), in file order."""
    found: dict[str, tuple[str, Param, int | None]] = {
        row.hf: (name, row, None) for name, row in outer_params(config).items()
    }
    rows = block_params(config).items()
    for layer in range(config.num_hidden_layers):
        found |= {row.hf.format(layer=layer): (name, row, layer) for name, row in rows}
    return found


def _plan_shards(config: ModelConfig, itemsize: int, max_bytes: float) -> list[list[str]]:
    """Names by shard, in order, each shard at most max_bytes unless a single tensor is larger."""
    shards: list[list[str]] = [[]]
    room = max_bytes
    for hf_name, (_, row, _) in tensors(config).items():
        size = int(np.prod(row.shape)) * itemsize
        if shards[-1] and size > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(hf_name)
        room -= size
    return shards


def fetcher(model: Decoder, dtype: jnp.dtype) -> Callable[[str], np.ndarray]:
    """A function from Hugging Face's name to the host array in the stored layout. Every process calls it."""
    table = tensors(model.config)

    def fetch(hf_name: str) -> np.ndarray:
        name, row, layer = table[hf_name]
        if layer is None:
            value = getattr(model, name)[...]
        elif isinstance(model.blocks, nnx.List):
            value = getattr(model.blocks[layer], name)[...]
        else:
            value = getattr(model.blocks, name)[layer]
        array = _theirs(row, value.astype(dtype))
        if not array.is_fully_addressable:
            array = multihost_utils.process_allgather(array, tiled=True)
        return np.ascontiguousarray(array)

    return fetch


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Written beside and renamed, so that the file is whole or absent."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(part, path)
