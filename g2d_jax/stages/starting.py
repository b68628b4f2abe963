"""What a run starts from: a model, random or loaded, and fresh adapters beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict

from g2d_jax import keys, storage
from g2d_jax.canonical import to_dict
from g2d_jax.models import decoder, lora
from g2d_jax.models.config import LINEAR, Lora, ModelConfig
from g2d_jax.models.decoder import Decoder


def adapters(settings: ConfigDict) -> Lora | None:
    """The adapters that the section lora.* asks for. Raises ValueError for values out of range."""
    if not settings.rank and settings.dropout:
        raise ValueError("lora.dropout is of adapters, and lora.rank is 0: set lora.rank too, or leave dropout at 0")
    if not settings.rank:
        return None
    targets = tuple(LINEAR) if tuple(settings.targets) == ("all-linear",) else tuple(settings.targets)
    return Lora(settings.rank, settings.alpha, targets, settings.rslora, settings.dropout)


def base_dtype(config: ConfigDict) -> jnp.dtype:
    """Of the model's parameters. What is trained is float32; what stands beside adapters may be narrower."""
    return jnp.dtype(config.lora.base_dtype if config.lora.rank else "float32")


def random(config: ConfigDict, shape: ModelConfig, mesh: Mesh) -> Decoder:
    """Random parameters on the mesh, without adapters."""
    key, std, dtype = keys.key(config.seed, "init"), config.model.init_std, base_dtype(config)

    def make() -> Decoder:
        return decoder.cast(decoder.init(shape, key, std), dtype)

    return jax.jit(make, out_shardings=decoder.shardings(shape, mesh))()


def beside(rest: Decoder, shape: ModelConfig, mesh: Mesh, seed: int) -> Decoder:
    """A policy: fresh adapters, on the mesh, and the rest (`lora.frozen`)."""
    where, _ = lora.split(decoder.shardings(shape, mesh))
    key = keys.key(seed, "lora")
    return lora.join(jax.jit(lambda: lora.adapters(shape, key), out_shardings=where)(), rest)


def check_base(config: ConfigDict, policy: str, other: epath.Path) -> None:
    """Raise ValueError if another run's adapters, a policy "run:…" of that work directory, have another base."""

    def base(settings: Mapping[str, Any]) -> list[Any]:
        seed = None if settings["model"]["path"] else settings["seed"]  # random parameters
        adapters = {name: value for name, value in settings["lora"].items() if name != "dropout"}  # that is of training
        return [settings["model"], adapters, seed]

    theirs = storage.read_json(other / "config.json")["config"]
    if base(theirs) != base(to_dict(config)):
        raise ValueError(
            f"policy {policy!r}: its adapters are not beside this run's model: give this run the same model.* and "
            "lora.*, or export that policy and use hf:FOLDER"
        )
