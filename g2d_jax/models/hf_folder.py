"""A Hugging Face model folder: located or downloaded, its config read, its weight files checked by
their headers.

A folder is local, or on an object store (gs://, s3://), where it stays: only the required files are
fetched. Weights are read from safetensors only, never from pickles (pytorch_model.bin), and no code
of the folder is run.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etils import epath

from g2d_jax.config import places
from g2d_jax.models import hf_config
from g2d_jax.models.config import ModelConfig
from g2d_jax.models.hf_config import config_from_hf
from g2d_jax.models.safetensors_file import DTYPES, Stored, read_header
from g2d_jax.models.table import expected_shapes, fused, tensors
from g2d_jax.runtime import storage

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
GENERATION = "generation_config.json"
ADAPTERS = "adapter_config.json"

_DOWNLOAD = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.md"]
# Subfolders hold copies in other formats. consolidated*.safetensors repeats the weights, as in
# Mistral's repositories.
_NOT_DOWNLOADED = ["*/*", "consolidated*.safetensors"]
# Derived from the config, written by old transformers.
_HARMLESS = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
_LANGUAGE_MODEL = re.compile(r"^(language_model\.(?=model\.|lm_head\.)|model\.language_model\.)")
_IMAGES = re.compile(r"^((model\.)?(vision_tower|multi_modal_projector)|model\.visual)\.")
# Additional layers that predict further tokens; transformers leaves them out too.
_FURTHER_TOKENS = re.compile(r"^mtp\.")
_NAMED = 5
# Without repetition_penalty, which changes greedy answers too: no result of a run used one.
_SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p")


def resolve(path_or_id: storage.PathLike, *, revision: str | None = None) -> epath.Path:
    """Return the folder of a model, downloaded if it is a hub id ("org/name"). An existing local
    folder, or a folder on an object store, is used as it is. A name in the form of a path
    (`places.is_path`) is never requested from the hub.

    Only JSON, safetensors and tokenizer files of the repository's top folder are fetched, into
    Hugging Face's cache. Raises ValueError if it is neither a folder nor a readable hub repository;
    ImportError if an object store's driver is absent. `read_config` checks that a folder on an
    object store exists.
    """
    text = os.fspath(path_or_id)
    if not storage.is_local(text):
        storage.check_driver(text)
        return epath.Path(text)
    kind = "path"
    if isinstance(path_or_id, str):
        kind = "model"
    try:
        name = places.decided(text, kind, places.here())
    except ValueError as error:
        raise ValueError(f"model {error}") from error
    if os.path.isabs(name):
        if not os.path.isdir(name):
            raise ValueError(f"model: there is no folder {places.shown(name)}")
        return epath.Path(name)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise ValueError(
            f"model {name!r} is neither an existing folder nor a hub id of the form org/name"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        downloaded = snapshot_download(
            name, revision=revision, allow_patterns=_DOWNLOAD, ignore_patterns=_NOT_DOWNLOADED
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"model {name!r} is not a local folder and could not be downloaded: "
            f"{storage.hub_reason(error)}"
        ) from error
    return epath.Path(downloaded)


def read_config(folder: storage.PathLike) -> ModelConfig:
    """Read a model folder's ModelConfig. Raises ValueError (see config_from_hf), also without a
    config.json."""
    raw = read_raw_config(folder)
    try:
        return config_from_hf(raw)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def has_images(folder: storage.PathLike) -> bool:
    """Return whether a folder holds a model with images, of which only the language model is trained
    and exported. Raises ValueError as `read_raw_config`."""
    return hf_config.has_images(read_raw_config(folder))


def read_raw_config(folder: storage.PathLike) -> dict[str, Any]:
    """Read a model folder's config.json. Raises ValueError naming the folder or file."""
    path = epath.Path(folder) / CONFIG
    # Also in addition to a model: transformers loads both.
    _refuse_adapters(epath.Path(folder))
    if not _is_file(path):
        raise ValueError(
            f"{folder} has no {CONFIG}: not a Hugging Face model folder, or an unfinished export"
        )
    return read_json(path)


def _refuse_adapters(folder: epath.Path) -> None:
    """Raise ValueError for a PEFT folder, which has adapters, alone or with a model."""
    file = folder / ADAPTERS
    if not _is_file(file):
        return
    base = read_json(file).get("base_model_name_or_path")
    raise ValueError(
        f"{folder} has adapters for {base!r:.200}, but a whole model without any is "
        "needed. "
        "Merge them with PEFT: "
        "AutoPeftModelForCausalLM.from_pretrained(folder).merge_and_unload().save_pretrained(new_folder)"
    )


def read_sampling(folder: storage.PathLike) -> dict[str, bool | int | float]:
    """Read the sampling settings of a folder's generation_config.json: temperature, top_p and the
    like, without repetition_penalty; {} without the file.

    They are the defaults of transformers and vLLM. Only numbers and booleans under known names are
    read. Raises ValueError naming the file if it is damaged.
    """
    path = epath.Path(folder) / GENERATION
    if not _is_file(path):
        return {}
    raw = read_json(path)
    return {name: raw[name] for name in _SAMPLING if isinstance(raw.get(name), bool | int | float)}


def _is_file(path: epath.Path) -> bool:
    """Return whether the path is a file. Raises OSError naming the path when an object store does
    not respond."""
    with storage.naming("read", path):
        return bool(path.is_file())


def read_json(path: epath.Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises ValueError naming the file."""
    data = storage.read_bytes(path)
    storage.refuse_pointer(path, data)
    try:
        content = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must contain a JSON object")
    return content


def find_weights(folder: epath.Path, config: ModelConfig) -> dict[str, Stored]:
    """Read every tensor's header in the folder, by name, checked by `architecture_headers`."""
    return architecture_headers(folder, read_headers(folder), config)


def read_headers(folder: epath.Path) -> dict[str, Stored]:
    """Map each tensor's name to its header, unchecked. Raises ValueError naming a missing or
    unreadable file."""
    if _is_file(folder / WEIGHTS):
        return read_header(folder / WEIGHTS)
    if _is_file(folder / INDEX):
        return _indexed_headers(folder)
    with storage.naming("list", folder):
        pickled = any(path.suffix in (".bin", ".pth") for path in folder.iterdir())
    if pickled:
        raise ValueError(
            f"{folder} has only pickled weights (.bin, .pth), which are not read because loading "
            "a pickle runs code; convert it once, where you trust it, with transformers: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    raise ValueError(f"{folder} has neither {WEIGHTS} nor {INDEX}")


def architecture_headers(
    folder: epath.Path,
    headers: Mapping[str, Stored],
    config: ModelConfig,
    extra: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, Stored]:
    """Return the tensors of `headers` that belong to the architecture, checked against it by name,
    shape and dtype; tensors of several linear layers are split into these.

    extra: names and stored shapes of tensors required in addition to the decoder's, such as a reward
    model's head. Raises ValueError naming the tensor (and file) that is missing, unexpected,
    misshapen, truncated or of a dtype other than float32, float16 and bfloat16. Only two kinds of
    additional tensors are accepted: rotary inverse frequencies, and a tied model's lm_head.weight,
    which the caller compares with the embedding.
    """
    headers = language_model(headers)
    if config.traits.recurrent:
        headers = {name: x for name, x in headers.items() if not _FURTHER_TOKENS.match(name)}
    # Checked before the names of a billion layers, or experts, are generated.
    layers, experts = config.num_hidden_layers, config.num_experts
    if layers * max(experts, 1) > len(headers):
        of_experts = f" of {experts} experts" if experts else ""
        raise ValueError(
            f"{folder}: {CONFIG} has {layers} layers{of_experts}, but the files have {len(headers)} "
            "tensors"
        )
    expected = expected_shapes(config) | dict(extra or {})
    headers = _as_expected(headers, expected, config)
    allowed = dict(expected)
    if config.tie_word_embeddings:
        allowed["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    headers = {name: stored for name, stored in headers.items() if not _HARMLESS.search(name)}
    missing = [name for name in expected if name not in headers]
    if missing:
        _refuse_wrapped(folder, headers)
    _refuse(folder, "missing", missing)
    _refuse(
        folder, "not part of the architecture", [name for name in headers if name not in allowed]
    )
    misshapen, unknown = [], []
    for name, stored in headers.items():
        if stored.shape != allowed[name]:
            file = epath.Path(stored.file).name
            shapes = f"{list(stored.shape)}, expected {list(allowed[name])}"
            misshapen.append(f"{name} in {file}: {shapes}")
        if stored.dtype not in DTYPES:
            unknown.append(f"{name}: {stored.dtype}")
    _refuse(folder, "of another shape than in config.json", misshapen)
    read = f"only {', '.join(DTYPES)} can be read, not quantised weights"
    _refuse(folder, f"of an unsupported dtype ({read})", unknown)
    return _split(headers, config)


def _as_expected(
    headers: dict[str, Stored], expected: Mapping[str, tuple[int, ...]], config: ModelConfig
) -> dict[str, Stored]:
    """Return the tensors by the names of a whole model: a body's names lack "model.", and a tied
    model may be saved with its head instead of the embedding."""
    named = {}
    for name, stored in headers.items():
        whole = f"model.{name}"
        is_body = name not in expected and whole in expected and whole not in headers
        named[whole if is_body else name] = stored
    if config.tie_word_embeddings and "lm_head.weight" in named:
        named.setdefault("model.embed_tokens.weight", named["lm_head.weight"])
    return named


def language_model(headers: Mapping[str, Stored]) -> dict[str, Stored]:
    """Return the language model's tensors of a model with images, under the names of a language
    model alone; for other models all tensors.

    The names are language_model.model.* or model.language_model.*, depending on the version of
    transformers.
    """
    if not any(_LANGUAGE_MODEL.match(name) for name in headers):
        return dict(headers)
    found = {}
    for name, stored in headers.items():
        if _IMAGES.match(name):
            continue
        own = _LANGUAGE_MODEL.sub(_without_wrapper, name)
        if own in found:
            raise ValueError(f"the files have two tensors for {own}, one of them {name}")
        found[own] = stored
    return found


def _without_wrapper(prefix: re.Match[str]) -> str:
    """Return the replacement for the beginning of a name."""
    return "model." if prefix[0].startswith("model.") else ""


def _split(headers: Mapping[str, Stored], config: ModelConfig) -> dict[str, Stored]:
    """Return the tensors, with fused ones replaced by their linear layers."""
    table, found = tensors(config), dict(headers)
    for whole, parts in fused(config).items():
        stored, start = found.pop(whole), 0
        for part in parts:
            stop = start + table[part][1].stored_shape[0]
            found[part] = stored.part(start, stop)
            start = stop
    return found


def _refuse(folder: epath.Path, what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        raise ValueError(f"{folder}: tensors {what}: {'; '.join(names[:_NAMED])}{more}")


_WRAPPED = {
    "_orig_mod.": (
        "a model wrapped by torch.compile: save the original one, compiled_model._orig_mod"
    ),
    "base_model.model.": "a model with PEFT's adapters in it: save the result of merge_and_unload()",
    "module.": (
        "a model wrapped by DataParallel or DeepSpeed: save the original one, wrapper.module"
    ),
}
"""The beginnings of tensor names saved from a wrapper, and the wrapper of each."""


def _refuse_wrapped(folder: epath.Path, headers: Mapping[str, Stored]) -> None:
    """Raise ValueError for tensors named after a wrapper of the model, which must be saved without
    it."""
    for prefix, origin in _WRAPPED.items():
        wrapped = [name for name in headers if name.startswith(prefix) or f".{prefix}" in name]
        if wrapped:
            raise ValueError(
                f"{folder}: tensor {wrapped[0]:.200} and {len(wrapped) - 1} more are named after "
                f"{origin} (save_pretrained), or remove {prefix!r} from the names"
            )


def _indexed_headers(folder: epath.Path) -> dict[str, Stored]:
    """Read the headers of the shards that the index names; every listed tensor must be in its
    shard."""
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, Mapping) or not all(
        isinstance(file, str) and Path(file).name == file for file in weight_map.values()
    ):
        raise ValueError(
            f"{folder / INDEX}: weight_map must map tensor names to file names in the same folder"
        )
    headers: dict[str, Stored] = {}
    for file in sorted(set(weight_map.values())):
        promised = [name for name, shard_file in weight_map.items() if shard_file == file]
        if not _is_file(folder / file):
            raise ValueError(f"{folder}: file {file} is missing; {INDEX} lists {promised[0]} in it")
        shard = read_header(folder / file)
        _refuse(
            folder,
            "missing",
            [f"{name} (by {INDEX} in {file})" for name in promised if name not in shard],
        )
        for name in shard.keys() & headers.keys():
            raise ValueError(
                f"tensor {name} is in both {headers[name].file} and {shard[name].file}"
            )
        headers |= shard
    return headers
