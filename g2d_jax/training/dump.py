"""All that one update saw, so that it can be computed again elsewhere: a folder that `replay.py` reads.

    batch.safetensors    the packed rows, and how many micro-batches of them count
    state/STEP/          parameters and optimiser state, a checkpoint
    dump.json            written last: stage, step, metrics, config, model, mesh, versions, a digest of the batch

Without dump.json a folder is no dump: what was half written is never read. There is no pickle.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from safetensors import SafetensorError
from safetensors.numpy import load, save

from g2d_jax import __version__, processes, storage
from g2d_jax.data.packing import Packed
from g2d_jax.models.decoder import Decoder
from g2d_jax.training.checkpoint import Checkpoints
from g2d_jax.training.step import TrainState
from g2d_jax.workdir import packages

RECORD, BATCH, STATE = "dump.json", "batch.safetensors", "state"
_COUNT = "count"  # in the batch's file: no array of packed rows is called so


@dataclass(frozen=True, slots=True, eq=False)
class Dump:
    """record: what `write_dump` was given, and "versions". arrays: those of a Packed, [N, R, …]; count: its own."""

    folder: epath.Path
    record: dict[str, Any]
    arrays: dict[str, np.ndarray]
    count: int

    def params(self, like: Decoder) -> Decoder:
        """The parameters, laid out as `like` says (see `Checkpoints.restore`). Raises DamagedCheckpoint."""
        stored = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, _stored(x.dtype), sharding=x.sharding), like)
        found = Checkpoints(self.folder / STATE).restore_params(int(self.record["step"]), stored)
        return jax.tree.map(lambda x, wanted: x.astype(wanted.dtype), found, like)


def write_dump(folder: epath.Path, state: TrainState, packed: Packed, record: Mapping[str, Any]) -> None:
    """Write the update number record["step"]; an older dump in the folder is replaced.

    state: as the update saw it. packed: its batch. record: in JSON's types. Raises OSError. With several processes all
    call it.
    """
    processes.once(lambda: _clear(folder))
    params = jax.tree.map(lambda x: x.astype(_stored(x.dtype)), state.params)
    with Checkpoints(folder / STATE) as checkpoints:
        checkpoints.save(int(record["step"]), {"params": params, "opt_state": state.opt_state}, {})
    processes.once(lambda: _write_rest(folder, packed, record))


def _stored(dtype: jnp.dtype) -> jnp.dtype:
    """What parameters of a type are saved as: codes of four bits each in a byte, since Orbax saves no smaller ones."""
    return jnp.dtype(jnp.uint8) if dtype == jnp.uint4 else dtype


def _clear(folder: epath.Path) -> None:
    if folder.exists():
        with storage.naming("clear", folder):
            (folder / RECORD).unlink(missing_ok=True)  # first: from here on it is no dump
            folder.rmtree()


def _write_rest(folder: epath.Path, packed: Packed, record: Mapping[str, Any]) -> None:
    data = save({**packed.arrays, _COUNT: np.asarray(packed.count, np.int32)})
    storage.write_bytes(folder / BATCH, data)
    storage.write_json(folder / RECORD, {**record, "versions": versions(), "batch": _digest(data)})


def versions() -> dict[str, str]:
    """Of this package, of Python and of what computes."""
    return {"g2d_jax": __version__, "python": platform.python_version(), **packages()}


def read_dump(folder: storage.PathLike) -> Dump:
    """A whole dump; parameters are read by `Dump.params`.

    Raises ValueError for a folder that is none, or whose files were changed.
    """
    place = epath.Path(folder)
    if not (place / RECORD).exists():
        raise ValueError(f"{place} holds no dump (no {RECORD}): give a folder STAGE/dump-NNNNNN of a work directory")
    record = storage.read_json(place / RECORD)
    data = storage.read_bytes(place / BATCH)
    if not isinstance(record, dict) or record.get("batch") != _digest(data):
        raise ValueError(f"{place}: {BATCH} is not the one that {RECORD} was written with: the dump is damaged")
    try:
        arrays = load(data)
    except SafetensorError as error:
        raise ValueError(f"{place / BATCH} is damaged: {error}") from error
    return Dump(place, record, arrays, int(arrays.pop(_COUNT)))


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
