"""The initial parameters of a run: a random or loaded model, and fresh adapters for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from etils import epath
from jax.sharding import Mesh

from g2d_jax.config import Config, Model
from g2d_jax.config import Lora as Adapters
from g2d_jax.config.io import differences, identity
from g2d_jax.config.policy_name import INIT, OF_MODEL, OF_RUN, PolicyName
from g2d_jax.models import decoder, hf, lora, quantise
from g2d_jax.models.config import Lora, ModelConfig
from g2d_jax.models.decoder import Decoder
from g2d_jax.models.hf_folder import find_weights
from g2d_jax.models.table import Param
from g2d_jax.runtime import keys, storage
from g2d_jax.session.workdir import read_inputs, read_settings, stage_folders


def adapters(settings: Adapters) -> dict[str, Any]:
    """Return ModelConfig fields for the section lora.*: adapters, and codes of the frozen
    parameters.

    Raises ValueError for values out of range, and ImportError if the quantisation package is
    missing.
    """
    if not settings.rank:
        return {}
    quantise.check(settings.quantise)
    low_rank = Lora(settings.rank, settings.alpha, tuple(settings.targets))
    return {"lora": low_rank, "quantise": settings.quantise}


def shape(settings: Model, vocab_size: int, adapters: Mapping[str, Any]) -> ModelConfig:
    """Return the shape that the section model.* describes, for random parameters, with `adapters`.
    Raises ValueError naming its field."""
    sizes = settings.to_dict()
    for name in ("path", "revision"):
        del sizes[name]
    sizes["head_dim"] = settings.hidden_size // settings.num_attention_heads
    try:
        return ModelConfig(**sizes, vocab_size=vocab_size, tie_word_embeddings=True, **adapters)
    except ValueError as error:
        prefix = "" if str(error).startswith("lora.") else "model."
        raise ValueError(f"{prefix}{error}") from error


def base_dtype(config: Config) -> jnp.dtype:
    """Return the dtype of the model's parameters. Trained ones are float32; with adapters the
    frozen ones may be narrower, and quantised ones have another type."""
    return jnp.dtype(config.lora.base_dtype if config.lora.rank else "float32")


def rest_bytes(config: Config, shape: ModelConfig) -> int:
    """Count the bytes of all frozen parameters over all devices."""
    _, rest = lora.partition(decoder.abstract(shape, base_dtype(config)))
    return sum(x.size * jax.dtypes.itemsize_bits(x.dtype) // 8 for x in jax.tree.leaves(rest))


def float32_params(config: Config, shape: ModelConfig) -> int:
    """Count the float32 parameters: all, or with a narrower base the trained ones."""
    if base_dtype(config) == "float32":
        return decoder.count_params(shape)
    return decoder.count_trained(shape)


def base(
    config: Config, folder: storage.PathLike | None, shape: ModelConfig, mesh: Mesh
) -> Decoder:
    """Load a model on the mesh from a folder, or create a random one; with adapters only its frozen
    part (`lora.frozen`)."""
    if folder is None:
        return random(config, shape, mesh)
    return hf.load(folder, mesh=mesh, dtype=base_dtype(config), config=shape)


def random(config: Config, shape: ModelConfig, mesh: Mesh) -> Decoder:
    """Draw random parameters on the mesh; with adapters only the frozen part."""
    key, dtype = keys.key(config.seed, "init"), base_dtype(config)
    if not shape.quantise:
        draw = jax.jit(
            _parameters, static_argnums=(1, 2), out_shardings=decoder.shardings(shape.base, mesh)
        )
        model = draw(key, shape.base, dtype)
        return lora.frozen(model, shape) if shape.lora else model
    where = decoder.shardings(shape, mesh)

    def make(name: str, row: Param) -> Any:  # one program each: one is unquantised at once
        if row.adapter:
            return None
        draw = jax.jit(
            _parameter, static_argnums=(1, 2, 3), out_shardings=decoder.parameter(where, name)
        )
        return draw(key, name, row, dtype)

    return decoder.build(shape, make)


# Module-level functions, so that loading a policy again compiles nothing.


def _parameters(key: jax.Array, shape: ModelConfig, dtype: jnp.dtype) -> Decoder:
    return decoder.cast(decoder.init(shape, key), dtype)


def _parameter(key: jax.Array, name: str, row: Param, dtype: jnp.dtype) -> Any:
    weight = decoder.fresh(name, row, key)
    weight = weight if row.exact else weight.astype(dtype)
    return quantise.encode(row, weight) if row.quantised else weight


def add_lora(frozen: Decoder, shape: ModelConfig, mesh: Mesh, seed: int) -> Decoder:
    """Add fresh adapters, on the mesh, to the frozen part of a policy (`lora.frozen`)."""
    where, _ = lora.partition(decoder.shardings(shape, mesh))
    draw = jax.jit(lora.adapters, static_argnums=0, out_shardings=where)
    return lora.combine(draw(shape, keys.key(seed, "lora")), frozen)


def model_of(policy: str, shape: ModelConfig) -> epath.Path:
    """Return the folder of a policy "hf:PATH". Raises ValueError for a model of another shape, and
    for weights whose headers show that they cannot be loaded."""
    folder, ours = hf.resolve(PolicyName.parse(policy).place), shape.base
    theirs = hf.read_config(folder)
    differing: list[str] = []
    for field in fields(ours):
        own, other = getattr(ours, field.name), getattr(theirs, field.name)
        # the context length of a model does not change its computation
        if own != other and field.name != "max_position_embeddings":
            differing.append(f"{field.name} {other!r:.200} (the run's: {own!r:.200})")
    if differing:
        raise ValueError(
            f"policy {policy!r} has another shape than this run's model: {', '.join(differing)}"
        )
    find_weights(folder, theirs)
    return folder


BASE = "base.json"  # in the folder of a stage that trains: its `Base`


class Base(NamedTuple):
    """The model that a policy was trained from, and that its adapters need. policy: "init" or
    "hf:PATH"; "hf:" alone (without adapters) for random parameters of another run. content: digest
    of the model's folder when training began, "" if unknown."""

    policy: str
    content: str = ""


def base_of(
    config: Config, policy: str, folders: Mapping[str, epath.Path], inputs: Mapping[str, str]
) -> Base:
    """Return the model that a policy was trained from.

    folders: stage -> its folder; a stage that began from another run's policy stores its base
    there. inputs: setting -> content digest. Raises ValueError for a missing policy of another run
    ("run:WORKDIR#STAGE"), or one whose adapters do not fit this run's settings.
    """
    setting = "policy"
    for _ in range(len(config.stages) + 1):
        name = PolicyName.parse(policy)
        if name.origin == OF_RUN:
            return _base_elsewhere(config, name, inputs)
        if name.origin == OF_MODEL:
            return Base(policy, inputs.get(setting, ""))
        if name.stage not in config.stages:
            return Base(INIT, inputs.get("model.path", ""))
        (policy,) = config.stages[name.stage].policies_read()
        setting = f"stages.{name.stage}.policy"
        folder = folders.get(name.stage)
        is_theirs = PolicyName.parse(policy).origin == OF_RUN
        if is_theirs and folder is not None and (folder / BASE).exists():
            return Base(*storage.read_json(folder / BASE))
    raise ValueError(f"policy {policy!r} is made from itself: the stages form a cycle")


def _base_elsewhere(config: Config, name: PolicyName, inputs: Mapping[str, str]) -> Base:
    """Return the model that another run's policy was trained from."""
    other = epath.Path(name.place)
    if not (other / "config.json").exists():
        raise ValueError(
            f"policy {str(name)!r}: {other} no longer holds a run, so the model it was trained "
            "from is unknown: restore that folder"
        )
    theirs, read = Config.of(read_settings(other)), read_inputs(other)
    base = base_of(theirs, name.stage, stage_folders(other), read)
    differing = differences(_decides_base(theirs, base, read), _decides_base(config, base, inputs))
    if config.lora.rank and differing:
        raise ValueError(
            f"policy {str(name)!r}: its adapters belong to another model than this run's: "
            f"{'; '.join(differing)}. Give this run the same settings, or export that policy and "
            "use hf:FOLDER"
        )
    if base.policy != INIT or config.lora.rank or theirs.model.path == config.model.path:
        return base
    return Base(f"{OF_MODEL}{theirs.model.path}", base.content)


def _decides_base(config: Config, base: Base, inputs: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings that adapters and their base depend on."""
    settings = identity(config, inputs)
    names = ["lora"]
    if base.policy == INIT:
        names += ["model"] if config.model.path else ["model", "seed"]  # random parameters
    return {name: settings[name] for name in names}
