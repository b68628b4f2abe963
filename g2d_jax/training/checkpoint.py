"""Checkpoints of a stage through Orbax: FOLDER/STEP/, written in the background, each one whole or not there at all.

    FOLDER/STEP/NAME/     one folder a named tree: params, opt_state, reference …; an array is called by its path
    FOLDER/STEP/host/     JSON: counters, data position, statistics; and a checksum of every array's values

The files do not depend on the mesh, on the number of devices or on the Python classes of the trees. There is no pickle.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import TracebackType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers

from g2d_jax import storage

Tree = TypeVar("Tree")

HOST = "host"


class DamagedCheckpoint(ValueError):
    """A finished checkpoint whose files are missing, cut off or changed."""


class Checkpoints:
    """The checkpoints of one stage, by step. Reading never writes: another stage may read a folder still in use.

    keep: how many of the newest stay; pinned: steps that stay for ever. Old ones go when a newer one is complete.
    With several processes all of them make the same calls.
    """

    def __init__(self, folder: storage.PathLike, *, keep: int = 2, pinned: Collection[int] = ()) -> None:
        """Touches no file. Raises ValueError for keep < 1."""
        if keep < 1:
            raise ValueError(f"checkpoint.keep must be at least 1, got {keep}")
        self.folder = epath.Path(folder)
        self._keep, self._pinned = keep, frozenset(pinned)
        self._manager: ocp.CheckpointManager | None = None  # made by the first save: it creates and cleans the folder

    def save(self, step: int, state: Mapping[str, Any], host: Mapping[str, Any]) -> None:
        """Begin to write a checkpoint; returns when the arrays are copied, so that the caller may donate them.

        state: name -> tree of arrays. host: anything `storage.plain` takes; it comes back in JSON's types, floats
        exactly. Waits for the save before this one. Raises ValueError if the step is there already, and whatever
        made the save before this one fail (OSError for a full disk).
        """
        if wrong := [name for name in state if name == HOST or not name.isidentifier()]:
            raise ValueError(
                f"a tree in a checkpoint cannot be called {wrong[0]!r}: use an identifier other than {HOST!r}"
            )
        trees = {name: flatten(tree) for name, tree in state.items()}
        record = {
            "content": storage.plain(host, spell=False),
            "checksums": {name: checksums(tree) for name, tree in trees.items()},
        }
        items: dict[str, Any] = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
        items[HOST] = ocp.args.JsonSave({**record, "fingerprint": storage.fingerprint(record)})
        self._open().save(step, args=ocp.args.Composite(**items), force=True)

    def _open(self) -> ocp.CheckpointManager:
        if self._manager is None:
            policies = [checkpoint_managers.LatestN(self._keep), checkpoint_managers.CustomSteps(self._pinned)]
            options = ocp.CheckpointManagerOptions(
                preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
                cleanup_tmp_directories=True,  # what a killed run left half written
            )
            self._manager = ocp.CheckpointManager(self.folder, options=options)
        return self._manager

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints on disk, ascending; a save still under way is not among them."""
        if not self.folder.exists():
            return []
        return sorted(ocp.utils.checkpoint_steps(self.folder))

    def latest(self) -> int | None:
        """The newest complete checkpoint's step, or None."""
        return max(self.steps(), default=None)

    def wait(self) -> None:
        """Return when the save under way, if any, is complete. Raises what made it fail."""
        if self._manager is not None:
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait, and end the background threads. Raises what made the last save fail."""
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.close()

    def __enter__(self) -> Checkpoints:
        """Itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """`close`."""
        self.close()

    def restore(self, step: int, like: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The trees named in `like`, and the host's JSON. Trees that are not named are not read.

        like: name -> tree with a jax.ShapeDtypeStruct that has a sharding (see `placed`), or an array, for every
        array; the mesh may differ from the one that saved. The result has the same tree types.
        Raises FileNotFoundError for a step that is not there; ValueError when names, shapes or dtypes differ from
        `like`; DamagedCheckpoint when files are cut off or changed.
        """
        folder = self.folder / str(step)
        if step not in self.steps():
            raise FileNotFoundError(f"no checkpoint of step {step} in {self.folder}; there are {self.steps()}")
        wanted = {name: flatten(tree) for name, tree in like.items()}
        self._compare(folder, wanted)
        with _Reading(self, step):
            values, host = _read(folder, wanted)
        trees = {name: jax.tree.unflatten(jax.tree.structure(like[name]), values[name].values()) for name in like}
        return trees, host

    def restore_params(self, step: int, like: Tree) -> Tree:
        """The tree "params" alone, for the next stage; neither optimiser nor reference are read. See `restore`."""
        return self.restore(step, {"params": like})[0]["params"]

    def _compare(self, folder: epath.Path, wanted: Mapping[str, Mapping[str, Any]]) -> None:
        """Raise ValueError for the first array that is not saved as wanted."""
        for name, arrays in wanted.items():
            if not (folder / name).exists():
                raise ValueError(f"checkpoint {folder} has no {name!r}")
            with _Reading(self, int(folder.name)):
                saved = ocp.StandardCheckpointHandler().metadata(folder / name).tree
            for key in sorted({*arrays, *saved}):
                _compare_array(folder, f"{name}.{key}", saved.get(key), arrays.get(key))


class _Reading:
    """Turn any error of reading a checkpoint into one that names it; Orbax raises bare Exception, KeyError and more."""

    def __init__(self, checkpoints: Checkpoints, step: int) -> None:
        self._checkpoints, self._step = checkpoints, step

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not isinstance(error, Exception) or isinstance(error, jax.errors.JaxRuntimeError | PermissionError):
            return
        older = [step for step in self._checkpoints.steps() if step < self._step]
        advice = f"continue from step {older[-1]}" if older else "start the stage again"
        folder = self._checkpoints.folder / str(self._step)
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise DamagedCheckpoint(
            f"checkpoint {folder} is damaged: {reason:.300}. Delete that folder to {advice}."
        ) from error


def _read(folder: epath.Path, wanted: dict[str, dict[str, Any]]) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Arrays by tree and name, and the host's JSON, checked. Raises anything."""
    items: dict[str, Any] = {name: ocp.args.StandardRestore(arrays) for name, arrays in wanted.items()}
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        restored = reader.restore(folder, args=ocp.args.Composite(**items, **{HOST: ocp.args.JsonRestore()}))
    record = {key: restored[HOST][key] for key in ("content", "checksums")}
    if storage.fingerprint(record) != restored[HOST]["fingerprint"]:
        raise ValueError(f"{HOST} does not have the fingerprint it was saved with")
    values = {name: {key: restored[name][key] for key in arrays} for name, arrays in wanted.items()}
    for name, arrays in values.items():
        for key, number in checksums(arrays).items():
            if number != record["checksums"][name][key]:
                raise ValueError(f"{name}.{key} does not have the checksum it was saved with")
    return values, record["content"]


def _compare_array(folder: epath.Path, name: str, saved: Any, wanted: Any) -> None:
    if saved is None or wanted is None:
        where = f"is in the model but not in {folder}" if saved is None else f"is in {folder} but not in the model"
        raise ValueError(f"{name} {where}: that checkpoint was saved with another model or optimizer")
    if getattr(wanted, "sharding", None) is None:
        raise ValueError(f"cannot restore {name}: `like` does not say where it goes; use placed(shapes, shardings)")
    if tuple(saved.shape) != tuple(wanted.shape) or saved.dtype != wanted.dtype:
        raise ValueError(
            f"{name} is {saved.dtype}{list(saved.shape)} in checkpoint {folder}, but the model has "
            f"{wanted.dtype}{list(wanted.shape)}: it was saved with another configuration"
        )


def placed(abstract: Tree, shardings: Any) -> Tree:
    """The tree of shapes with shardings put in, as `restore` takes it."""
    return jax.tree.map(lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), abstract, shardings)


def flatten(tree: Any) -> dict[str, Any]:
    """Leaves by path, in the tree's order: a Decoder's `blocks.q`, Adam's `1.mu.blocks.q`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value"): leaf for path, leaf in leaves
    }


def checksums(arrays: Mapping[str, jax.Array]) -> dict[str, int]:
    """A 32-bit number from all bits of every array, equal on every mesh. Waits for the arrays.

    sum of bits_i * (2 i + 1) mod 2**32 over the elements i: integer sums do not depend on their order, and the weight
    is odd, so that a change of one element is always seen.
    """
    numbers = {}
    for key, array in arrays.items():
        jax.block_until_ready(array)  # one program at a time: simulated CPU devices may deadlock with two in flight
        numbers[key] = int(_checksum(array))
    return numbers


@jax.jit  # compiled once for every shape: parameters and both of Adam's moments share it
def _checksum(array: jax.Array) -> jax.Array:
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}").astype(jnp.uint32)
    index = jnp.zeros(array.shape, jnp.uint32)
    for axis, size in enumerate(array.shape):
        index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis)
    return jnp.sum(bits * (2 * index + 1), dtype=jnp.uint32)
