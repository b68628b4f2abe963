"""Weights from and to Hugging Face folders, tensor by tensor, by the architecture's table
(table.py).

    model = load(resolve("Qwen/Qwen2.5-0.5B"), mesh=mesh)
    save(model, "exported", dtype="bfloat16", eos_ids=[151645])
    save_adapters(policy, "adapters", base="Qwen/Qwen2.5-0.5B")    in PEFT's format: PeftModel.from_pretrained

The host holds one tensor of the file at once, both for loading and for saving; the devices convert
it to our layout (transpose, reshape, cast). Folders may be on an object store.
`benchmarks/loading.py` measures both.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from huggingface_hub import StateDictSplit, split_state_dict_into_shards_factory
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from g2d_jax.models import decoder, lora, quantise, safetensors_file
from g2d_jax.models.config import Lora, ModelConfig
from g2d_jax.models.decoder import Decoder
from g2d_jax.models.hf_config import config_from_hf, config_to_hf, one_or_list
from g2d_jax.models.hf_folder import (
    ADAPTERS,
    CONFIG,
    GENERATION,
    INDEX,
    find_weights,
    has_images,
    read_config,
    read_sampling,
    resolve,
)
from g2d_jax.models.safetensors_file import Stored
from g2d_jax.models.table import PEFT, Param, Place, expected_shapes, fused, tensors
from g2d_jax.runtime import mesh as meshes
from g2d_jax.runtime import processes, storage

__all__ = [
    "config_from_hf",
    "config_to_hf",
    "greatest_rank",
    "has_images",
    "load",
    "read_config",
    "read_sampling",
    "resolve",
    "save",
    "save_adapters",
    "stored_dtype",
]

FINISHED = {CONFIG: "a model", ADAPTERS: "adapters"}
"""The files that are written last, and the content of a folder that has one."""

_OUR_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_COMPARE_ROWS = 16_384


def load(
    folder: storage.PathLike,
    *,
    mesh: Mesh | None = None,
    dtype: jnp.dtype = jnp.float32,  # type: ignore[assignment]
    config: ModelConfig | None = None,
) -> Decoder:
    """Load a model folder, local or on an object store (see resolve), as a stacked Decoder with
    parameters in dtype.

    With a mesh decoder.shardings places every array; without one all are on the default device.
    Several processes must call it together: each reads its share of the rows of every tensor, one
    range of the file, and the devices exchange the rest; see `_reading`. All headers are checked
    before any tensor is read or allocated: a missing, unexpected, misshapen or truncated tensor
    raises ValueError by name. config: replaces config.json. With adapters in it, the frozen part is
    loaded, as from `lora.frozen`. For codes, a parameter is encoded as soon as it is on the
    devices, so that at most one is there unencoded.
    """
    if config is None:
        config = read_config(folder)
    headers = find_weights(epath.Path(folder), config.base)
    if config.tie_word_embeddings and "lm_head.weight" in headers:
        _check_tied(headers)
    return load_decoder(config, headers, mesh=mesh, dtype=dtype)


def load_decoder(
    config: ModelConfig,
    headers: Mapping[str, Stored],
    *,
    mesh: Mesh | None = None,
    dtype: jnp.dtype = jnp.float32,  # type: ignore[assignment]
) -> Decoder:
    """Read the Decoder of config from tensors whose headers have been checked; mesh and dtype as in
    `load`."""
    placements = None if mesh is None else decoder.shardings(config, mesh)

    def read(name: str, row: Param) -> Any:
        if row.adapter:
            return None
        target = None if placements is None else decoder.parameter(placements, name)
        own = jnp.dtype(jnp.float32 if row.exact else dtype)
        return load_parameter(row, headers, target, own)

    return decoder.build(config, read)


def load_parameter(row: Param, headers: Mapping[str, Stored], target: Any, dtype: jnp.dtype) -> Any:
    """Read a parameter in our layout. A stack [L, …] is allocated once on the devices and filled in
    place: the host never holds more than a layer.

    target: a sharding, or a QArray of them for a quantised parameter, with the dtypes of its codes
    and scales.
    """
    staged = _stored_sharding(row, target)
    make_zeros, fill = _programs(dataclasses.replace(row, hf_name=""), dtype, target, staged)
    array = make_zeros() if row.layers else None
    for place, layer in enumerate(row.layers or (0,)):
        array = fill(array, _read(_stored(row, headers, layer), staged), place)
        jax.block_until_ready(array)  # or the host would read ahead and queue up layers
    return array


@functools.cache  # jit compiles per function object: parameters of one shape share theirs
def _programs(
    row: Param, dtype: jnp.dtype, target: Any, staged: NamedSharding | None
) -> tuple[Callable[[], Any], Callable[[Any, Array, int], Any]]:
    """Return two jitted programs: one allocates an empty stack; one writes a stored layer into a
    (donated) stack, or converts a parameter outside the layers."""

    def fill(stack: Any, theirs: Array, place: int) -> Any:
        if staged is not None:
            # The processes' parts are exchanged in the stored dtype; each device then converts its
            # own part.
            theirs = jax.lax.with_sharding_constraint(theirs, staged)
        weight = (jnp.moveaxis(theirs, -1, -2) if row.inputs else theirs).reshape(row.shape)
        value = quantise.encode(row, weight) if row.quantised else weight.astype(dtype)
        if not row.layers:
            return value
        return jax.tree.map(
            lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, place, 0), stack, value
        )

    zeros = jax.jit(lambda: quantise.make_parameter(row, jnp.zeros, dtype), out_shardings=target)
    return zeros, jax.jit(fill, donate_argnums=0, out_shardings=target)


@dataclasses.dataclass(frozen=True)
class _Stack:
    """The tensors of a layer's experts as one tensor, each of them a row of it."""

    experts: tuple[Stored, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.experts), *self.experts[0].shape

    def rows(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Read experts [start, stop), all by default."""
        return np.stack([expert.rows() for expert in self.experts[start:stop]])


def _stored(row: Param, headers: Mapping[str, Stored], layer: int) -> Stored | _Stack:
    """Return the stored tensor of a layer's parameter."""
    if not row.experts:
        return headers[row.hf_name.format(layer=layer)]
    names = (row.hf_name.format(layer=layer, expert=expert) for expert in range(row.experts))
    return _Stack(tuple(headers[name] for name in names))


def _read(stored: Stored | _Stack, staged: NamedSharding | None) -> Array:
    """Read a tensor in its stored layout and dtype, each device receiving its part."""
    if staged is None:
        return jnp.asarray(stored.rows())

    # Devices that hold parts of the same rows share one read.
    rows = functools.cache(stored.rows)

    def piece(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        start, stop, _ = index[0].indices(stored.shape[0])
        return rows(start, stop)[(slice(None), *index[1:])]

    return jax.make_array_from_callback(stored.shape, _reading(stored.shape, staged), piece)


def _reading(shape: tuple[int, ...], staged: NamedSharding) -> NamedSharding:
    """Return the sharding in which a stored tensor is read.

    One process reads all of it once and gives every device its part. Of several, each reads the
    rows of its devices, the same number for each: together they read the file once, in ranges
    without gaps, for any sharding and replication. If the rows do not divide evenly, a process
    reads all rows of which its devices hold parts.
    """
    mesh = staged.mesh
    assert isinstance(mesh, Mesh)  # of devices, not an abstract one
    if meshes.processes(mesh) == 1 or shape[0] % mesh.size:
        return staged
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def _stored_sharding(row: Param, target: Any) -> NamedSharding | None:
    """Convert the sharding of a parameter to the stored layout of one layer, which folds head_dim
    into the axis before it. target: as in `load_parameter`."""
    if target is None:
        return None
    ours: NamedSharding = target.qvalue if row.quantised else target
    spec = (*ours.spec, *(None,) * len(row.axes))[len(row.stacked) :]
    parts = [part for axis, part in zip(row.axes, spec, strict=False) if axis != "head_dim"]
    if row.inputs:
        parts = parts[:-2] + parts[:-3:-1]
    return NamedSharding(ours.mesh, PartitionSpec(*parts))


def _check_tied(headers: Mapping[str, Stored]) -> None:
    """Raise ValueError if a tied model's lm_head.weight differs from the embedding: it would
    silently be dropped.

    The leader compares them.
    """
    embed, head = headers["model.embed_tokens.weight"], headers["lm_head.weight"]

    def same() -> bool:
        edges = [*range(0, embed.shape[0], _COMPARE_ROWS), embed.shape[0]]
        parts = itertools.pairwise(edges)
        return all(np.array_equal(embed.rows(*part), head.rows(*part)) for part in parts)

    if not processes.on_leader(same):
        raise ValueError(
            f"{head.file}: config.json sets tie_word_embeddings, but lm_head.weight differs from "
            "model.embed_tokens.weight; set tie_word_embeddings to false to use it"
        )


def save(
    model: Decoder,
    folder: storage.PathLike,
    *,
    dtype: str = "float32",
    max_shard_bytes: float = 5e9,
    eos_ids: Sequence[int] = (),
    bos_id: int | None = None,
    pad_id: int | None = None,
    generation_entries: Mapping[str, Any] | None = None,
) -> epath.Path:
    """Write a model folder for transformers and `load`: safetensors, generation_config.json,
    config.json.

    model: stacked; adapters are merged into it by `lora.merged`, one layer at once, when that layer
    is written.
    dtype: "float32" or "bfloat16"; `exact` rows stay float32. Files beyond max_shard_bytes are
    split, with an index. generation_entries are added to generation_config.json. config.json is
    written last: a folder without it is an unfinished export, so write tokenizer and model card
    before this call. Every process must call it; the first one writes. Raises ValueError when the
    folder already holds a finished model or adapters; Preempted between two files of a watched
    process.
    """
    place, stored = epath.Path(folder), stored_dtype(dtype)
    config = config_to_hf(
        model.config.base, eos_ids=eos_ids, bos_id=bos_id, pad_id=pad_id, dtype=stored.name
    )
    ids = {"eos_token_id": one_or_list(eos_ids), "bos_token_id": bos_id, "pad_token_id": pad_id}
    processes.on_leader(lambda: _clear(place))
    shapes, fetch = expected_shapes(model.config.base), fetcher(model, stored)
    split = plan_shards(shapes, stored.itemsize, max_shard_bytes)
    float32 = {name for name, (_, row, _) in tensors(model.config.base).items() if row.exact}
    for file, names in split.filename_to_tensors.items():
        processes.check_stop_together()
        own = {name: shapes[name] for name in names}
        safetensors_file.write(place / file, own, stored, fetch, float32)
    if jax.process_index() == 0:
        if split.is_sharded:
            storage.write_json(
                place / INDEX, {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            )
        generation = {name: value for name, value in ids.items() if value is not None}
        storage.write_json(place / GENERATION, {**generation, **(generation_entries or {})})
        storage.write_json(place / CONFIG, config)
    return place


def save_adapters(
    policy: Decoder,
    folder: storage.PathLike,
    *,
    base: str | None,
    revision: str | None = None,
    dtype: str = "float32",
) -> epath.Path:
    """Write a policy's adapters alone, in the format of Hugging Face's PEFT. base: their base
    model, a hub id or a folder; PEFT loads it by that name, and none if it is None. revision: of a
    hub id.

    adapter_config.json is written last. Every process must call it; the first one writes. Raises
    ValueError for a policy without adapters, and for a folder that already holds some, or a model.
    """
    place, low_rank = epath.Path(folder), policy.config.lora
    if low_rank is None:
        raise ValueError(
            "the policy has no adapters: all its parameters were trained, export it as a model"
        )
    processes.on_leader(lambda: _clear(place))
    stored = stored_dtype(dtype)
    shapes, fetch = _peft_adapters(policy, stored)
    safetensors_file.write(place / "adapter_model.safetensors", shapes, stored, fetch)
    if jax.process_index() == 0:
        adapter_config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "revision": revision,
            "r": low_rank.rank,
            "lora_alpha": low_rank.alpha,
            "target_modules": low_rank.targets,
            **_fused_targets(policy.config, low_rank),
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }
        storage.write_json(place / ADAPTERS, adapter_config)
    return place


def _peft_adapters(
    policy: Decoder, dtype: jnp.dtype
) -> tuple[dict[str, tuple[int, ...]], Callable[[str], np.ndarray]]:
    """Return the shapes of the adapters' tensors, by the names in PEFT's files, and their fetcher.

    Adapters of linear layers that Hugging Face stores as one become one, whose rank is the sum of
    theirs: the A's are stacked, and each B has its own rows and columns.
    """
    table, fetch = tensors(policy.config), fetcher(policy, dtype)
    shapes = {name: row.stored_shape for name, (_, row, _) in table.items() if row.adapter}
    sources: dict[str, list[str]] = {}
    starts: dict[str, int] = {}
    for whole, parts in fused(policy.config).items():
        a, b = (f"{PEFT}{whole.removesuffix('weight')}lora_{side}.weight" for side in "AB")
        outputs = 0
        for part in parts:
            own_a, own_b = (f"{PEFT}{part.removesuffix('weight')}lora_{x}.weight" for x in "AB")
            starts[own_b] = outputs
            outputs += table[part][1].stored_shape[0]
            if own_a in shapes:
                sources.setdefault(a, []).append(own_a)
                sources.setdefault(b, []).append(own_b)
        if a in sources:
            stacked = [shapes.pop(name) for name in sources[a]]
            rank = sum(rows for rows, _ in stacked)
            shapes |= {a: (rank, stacked[0][1]), b: (outputs, rank)}
            for name in sources[b]:
                shapes.pop(name)

    def fetch_fused(name: str) -> np.ndarray:
        if name not in sources:
            return fetch(name)
        if "lora_A" in name:
            return np.concatenate([fetch(source) for source in sources[name]])
        blocks, column = np.zeros(shapes[name], dtype), 0
        for source in sources[name]:
            block = fetch(source)
            rows = slice(starts[source], starts[source] + block.shape[0])
            blocks[rows, column : column + block.shape[1]] = block
            column += block.shape[1]
        return blocks

    return shapes, fetch_fused


def _fused_targets(config: ModelConfig, low_rank: Lora) -> dict[str, Any]:
    """Return the entries of adapter_config.json for adapters of linear layers that Hugging Face
    stores as one: their ranks are added, and alpha keeps the scale."""
    if not config.traits.fused:
        return {}
    targets, ranks, alphas = list(low_rank.targets), {}, {}
    for whole, parts in config.traits.fused.items():
        name, adapted = whole.rpartition(".")[2], [part for part in parts if part in targets]
        if adapted:
            targets = [target for target in targets if target not in adapted] + [name]
            ranks[name] = low_rank.rank * len(adapted)
            joint = dataclasses.replace(low_rank, rank=ranks[name])
            alphas[name] = low_rank.alpha * low_rank.scale / joint.scale
    return {"target_modules": targets, "rank_pattern": ranks, "alpha_pattern": alphas}


def stored_dtype(name: Any) -> jnp.dtype:
    """Return the dtype for saved weights. Raises ValueError for any but float32 and bfloat16."""
    try:
        stored = jnp.dtype(name)
    except TypeError:
        stored = None
    if stored is None or stored.name not in ("float32", "bfloat16"):
        raise ValueError(f"weights can be saved as float32 or bfloat16, not {name}")
    return stored


def greatest_rank(config: ModelConfig) -> int:
    """Return the greatest rank among the adapters that `save_adapters` writes."""
    assert config.lora
    ranks = _fused_targets(config, config.lora).get("rank_pattern", {})
    return max([config.lora.rank, *ranks.values()])


def _clear(folder: epath.Path) -> None:
    """Create the folder and delete files that would make a half-written export look complete or mix
    two exports."""
    for name, what in FINISHED.items():
        if (folder / name).exists():
            raise ValueError(f"{folder} already holds {what}; choose another folder")
    with storage.naming("write", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if _OUR_FILES.fullmatch(path.name):
                path.unlink()


def plan_shards(
    shapes: Mapping[str, tuple[int, ...]], itemsize: int, max_bytes: float
) -> StateDictSplit:
    """Distribute tensors of these stored shapes over files of at most max_bytes, except that one
    tensor may be larger.

    itemsize: bytes of a number.
    """
    return split_state_dict_into_shards_factory(
        dict(shapes),
        get_storage_size=lambda shape: math.prod(shape) * itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=int(max_bytes),
    )


def fetcher(model: Decoder, dtype: jnp.dtype) -> Callable[[str], np.ndarray]:
    """Return a function from Hugging Face's name to the host array in the stored layout. Every
    process calls it: with several, every device holds a whole tensor while it is fetched.

    A layer with adapters is merged with them, a quantised one decoded, and layers that Hugging Face
    stores as one are concatenated.
    """
    table, wholes = tensors(model.config), fused(model.config)

    def fetch(hf_name: str) -> np.ndarray:
        if hf_name in wholes:
            return np.concatenate([fetch(part) for part in wholes[hf_name]])
        name, row, place = table[hf_name]
        value = _parameter(model, name, place).astype(jnp.float32 if row.exact else dtype)
        stored = row.stored_shape
        array = value.reshape(stored[::-1]).T if row.inputs else value.reshape(stored)
        if not array.is_fully_addressable:
            array = multihost_utils.process_allgather(array, tiled=True)
        return np.ascontiguousarray(array)

    return fetch


def _parameter(model: Decoder, name: str, place: Place) -> Array:
    """Return one parameter in our layout, or its entry at a place of the stack of layers, or of
    experts."""
    value, adapter = lora.weight_and_adapter(model, name)
    if adapter or quantise.is_quantised(value):
        assert model.config.lora is not None
        return _merged_layer(value, adapter, place, model.config.lora.scale)  # type: ignore[no-any-return]
    if place is None:
        return value
    return value[place]  # type: ignore[no-any-return]


@functools.partial(jax.jit, static_argnames="scale")
def _merged_layer(stack: Any, adapter: tuple[Array, ...], place: int, scale: float) -> Array:
    """Apply `lora.merged` to one layer of a parameter, so that only it is decoded or multiplied."""
    value, own_adapter = jax.tree.map(
        lambda array: jax.lax.dynamic_slice_in_dim(array, place, 1), (stack, adapter)
    )
    return lora.merged(value, own_adapter, scale)[0]
