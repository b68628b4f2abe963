"""Checkpoints of a stage through Orbax: FOLDER/STEP/, written in the background, each complete or
absent.

    FOLDER/STEP/NAME/     one folder a named tree: params, opt_state; an array is called by its path
    FOLDER/STEP/host/     JSON: counters, data position, statistics; and a checksum of every array's values

The files do not depend on the mesh, the number of devices or the Python classes of the trees. They
contain no pickle.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers

from g2d_jax.runtime import failures, storage
from g2d_jax.runtime import mesh as meshes
from g2d_jax.training.optimizer import leaf_name

T = TypeVar("T")
Tree = TypeVar("Tree")

Checksums = Mapping[str, Mapping[str, int]]
"""By tree and array."""

HOST = "host"

_FILES_GONE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class _Changed(ValueError):
    """Content that differs from the saved one; the message names it."""


class DamagedCheckpoint(ValueError):
    """A finished checkpoint whose files are missing, cut off or changed. reason: the fault, without
    the remedy."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Checkpoints(AbstractContextManager["Checkpoints"]):
    """The checkpoints of one stage, by step. Reading never writes: another stage may read a folder
    still in use.

    keep: how many of the newest stay; pinned: steps that always stay. Old ones are deleted when a
    newer one is complete. All processes make the same calls.
    """

    def __init__(
        self, folder: storage.PathLike, *, keep: int = 2, pinned: Collection[int] = ()
    ) -> None:
        """Prepare without touching a file."""
        self.folder = epath.Path(folder)
        policies = [
            checkpoint_managers.LatestN(keep),
            checkpoint_managers.CustomSteps(frozenset(pinned)),
        ]
        self._options = ocp.CheckpointManagerOptions(
            preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
            cleanup_tmp_directories=True,  # left by a killed run
        )
        # The first save creates the manager, which creates and cleans the folder: reading must not.
        self._manager: ocp.CheckpointManager | None = None

    def save(self, step: int, state: Mapping[str, Any], host: Mapping[str, Any]) -> None:
        """Begin to write a checkpoint; return when the arrays are copied, so that you may donate
        them, or, on a CPU, when all is written.

        state: name -> tree of arrays. host: anything `storage.plain` accepts; it returns as JSON
        types, floats exactly. Waits for the previous save. Raises ValueError if the step exists
        already, and the error of the previous save (OSError for a full disk).
        """
        trees = {name: flatten(tree) for name, tree in state.items()}
        # Checksums in the host's JSON identify the arrays, so that `Checkpoints.checksums` compares
        # without reading them. The JSON carries a fingerprint of itself.
        record = {
            "content": storage.plain(host, spell=False),
            "checksums": {name: checksums(tree) for name, tree in trees.items()},
        }
        items: dict[str, Any] = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
        items[HOST] = ocp.args.JsonSave(record | {"fingerprint": storage.fingerprint(record)})
        with self._naming_full_disks():
            if self._manager is None:
                # A copy of the state is in memory until it is written. A CPU needs that memory for
                # the next step: for a model of 135M parameters 1.6 of 6.5 GB.
                in_background = jax.default_backend() != "cpu"
                options = replace(self._options, enable_async_checkpointing=in_background)
                self._manager = ocp.CheckpointManager(self.folder, options=options)
            # force: Orbax silently skips a step that is not above the newest one.
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    def steps(self) -> list[int]:
        """List the steps of all complete checkpoints on disk, ascending, without a running
        save."""
        if not self.folder.exists():
            return []
        return sorted(ocp.utils.checkpoint_steps(self.folder))

    def latest(self) -> int | None:
        """Return the newest complete checkpoint's step, or None."""
        return max(self.steps(), default=None)

    def wait(self) -> None:
        """Wait for the running save, if any. Raises its error."""
        with self._naming_full_disks():
            if self._manager is not None:
                self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait, and end the background threads. Raises the last save's error."""
        manager = self._manager
        self._manager = None
        with self._naming_full_disks():
            if manager is not None:
                manager.close()

    @contextmanager
    def _naming_full_disks(self) -> Iterator[None]:
        """Turn any error of Orbax and Tensorstore from a full disk, or another limit for files, into
        an OSError that names the folder."""
        try:
            yield
        except Exception as error:
            number = failures.limit_of_files(error)
            if not number:
                raise
            raise OSError(number, os.strerror(number), os.fspath(self.folder)) from error

    def __exit__(self, *error: object) -> None:
        """Close."""
        self.close()

    def restore(self, step: int, like: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read the trees named in `like`, and the host's JSON. Other trees are not read.

        like: name -> tree. Each leaf is an array, or a jax.ShapeDtypeStruct with a sharding (see
        `mesh.placed`); the mesh may differ from the one that saved. The result has the same tree
        types. Raises FileNotFoundError for a missing step; ValueError when names, shapes or dtypes
        differ from `like`; DamagedCheckpoint when files are missing, cut off or changed; OSError
        when they cannot be read now.
        """
        if step not in self.steps():
            raise FileNotFoundError(
                f"no checkpoint of step {step} in {self.folder}; it has {self.steps()}"
            )
        wanted = {name: flatten(tree) for name, tree in like.items()}
        folder = self.folder / str(step)
        record = self._reading(folder, lambda: _read_host(folder))
        self._compare(folder, wanted, record["checksums"])
        values = self._reading(folder, lambda: _read(folder, wanted, record["checksums"]))
        trees = {
            name: jax.tree.unflatten(jax.tree.structure(like[name]), values[name].values())
            for name in like
        }
        return trees, record["content"]

    def restore_params(self, step: int, like: Tree) -> Tree:
        """Read the tree "params" alone, without the optimiser's, for the next stage. See
        `restore`."""
        return self.restore(step, {"params": like})[0]["params"]

    def checksums(self, step: int) -> dict[str, int]:
        """Return the saved checksum of every array of "params", by name. For one process; reads no
        array."""
        folder = self.folder / str(step)
        record = self._reading(folder, lambda: _read_host(folder), alone=True)
        return dict(record["checksums"]["params"])

    def find_damage(self, step: int, part: int = 0, parts: int = 1) -> str:
        """Check a checkpoint's files; return the reason for `damaged`, or "". For a process alone,
        without any device.

        Arrays are read whole, one by one, into host memory: this process's share of `parts`. Raises
        OSError when files cannot be read now.
        """
        folder = self.folder / str(step)
        try:
            self._reading(folder, lambda: _check_arrays(folder, part, parts), alone=True)
        except DamagedCheckpoint as error:
            return error.reason
        return ""

    def damaged(self, step: int, reason: str) -> DamagedCheckpoint:
        """Return the error for a damaged checkpoint, with the remedy."""
        folder = self.folder / str(step)
        older = [other for other in self.steps() if other < step]
        then = "start the stage again"
        if older:
            then = f"continue from step {older[-1]}"
        manifest = self.folder.parent / storage.MANIFEST
        also = ""
        if manifest.exists():  # a stage with a manifest is not run again
            also = f", and {manifest}"
        return DamagedCheckpoint(
            f"checkpoint {folder} is damaged: {reason}. Delete that folder{also} to {then}.", reason
        )

    def set_aside(self, step: int) -> str:
        """Move a damaged checkpoint next to the folder, to damaged/step-N; return its new path. For
        one process.

        Nothing is deleted, since the reader may be at fault. Raises OSError, and ValueError on an
        object store, where a move copies every file: there you decide.
        """
        folder = self.folder / str(step)
        if not storage.is_local(folder):
            raise ValueError(
                f"checkpoint {folder} is damaged, and this program deletes nothing on an object "
                "store: to use an older one, delete that folder and start again"
            )
        aside = self.folder.parent / "damaged"
        target = aside / f"step-{step:06d}"
        again = 0
        while target.exists():  # an earlier checkpoint of this step was damaged too
            again += 1
            target = aside / f"step-{step:06d}-{again}"
        with storage.naming("move", folder):
            aside.mkdir(parents=True, exist_ok=True)
            folder.rename(target)
        return str(target)

    def _reading(self, folder: epath.Path, read: Callable[[], T], *, alone: bool = False) -> T:
        """Return the result of `read` on a step in this folder. alone: without other processes; a
        second try would confuse them.

        Raises DamagedCheckpoint, from the error, if a file is missing, or if reading fails twice
        though every file is readable. Raises OSError if a file cannot be read now, MemoryError, and
        the devices' errors.
        """
        # Orbax and Tensorstore raise any error both for a file that is cut off and for one that
        # cannot be read at that moment. `_read_files` separates the two: it raises OSError for the
        # second. Since a readable file may still have had a passing fault, a checkpoint counts as
        # damaged only when a second try fails too. Several processes read together, so they have
        # no second try.
        is_last = jax.process_count() > 1 and not alone
        while True:
            try:
                return read()
            except _FILES_GONE as error:
                raise self._as_damaged(folder, error) from error
            except (OSError, MemoryError):
                raise
            except Exception as error:
                # Errors of the devices do not concern the file. Not isinstance: a damaged file may
                # raise a subclass of RuntimeError.
                if type(error) in (RuntimeError, jax.errors.JaxRuntimeError):
                    raise
                _read_files(folder)
                if is_last:
                    raise self._as_damaged(folder, error) from error
            is_last = True

    def _as_damaged(self, folder: epath.Path, error: Exception) -> DamagedCheckpoint:
        """Return the error for a step's damaged folder. The libraries' error stays its cause: it
        describes their readers."""
        reason = "a file in it is cut off or changed"
        if isinstance(error, (_Changed, *_FILES_GONE)):
            reason = f"{str(error).splitlines()[0]:.300}"
        return self.damaged(int(folder.name), reason)

    def _compare(
        self, folder: epath.Path, wanted: Mapping[str, Mapping[str, Any]], saved: Checksums
    ) -> None:
        """Raise ValueError for the first array that is not saved as wanted. saved: its
        checksums."""
        for name, arrays in wanted.items():
            if name not in saved:
                raise ValueError(f"checkpoint {folder} has no {name!r}")
            listed = self._reading(folder, lambda name=name: _listed(folder / name, saved[name]))  # type: ignore[misc]
            for key in sorted({*arrays, *listed}):
                _compare_array(folder, f"{name}.{key}", listed.get(key), arrays.get(key))


def _read_files(folder: epath.Path) -> None:
    """Read every file of a folder. Raises OSError where one cannot be read now."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            _read_files(path)
            continue
        with storage.naming("read", path), path.open("rb") as file:
            while file.read(1 << 24):
                pass


def _listed(folder: epath.Path, saved: Mapping[str, int]) -> dict[str, Any]:
    """Read shape and dtype of a tree's saved arrays by name. Raises any error."""
    tree: dict[str, Any] = ocp.StandardCheckpointHandler().metadata(folder).tree
    if tree.keys() != saved.keys():
        raise _Changed(f"{folder.name} does not list the arrays that were saved")
    return tree


def _check_arrays(folder: epath.Path, part: int, parts: int) -> None:
    """Compare one share's arrays with their checksums, reading each alone. Raises any error."""
    saved = _read_host(folder)["checksums"]
    keys = []
    for name in sorted(saved):
        keys += [(name, key) for key in sorted(saved[name])]
    for name, key in keys[part::parts]:
        if host_checksum(_read_alone(folder / name, key)) != saved[name][key]:
            raise _Changed(f"{name}.{key} does not match its saved checksum")


def _read_host(folder: epath.Path) -> dict[str, Any]:
    """Read the host's JSON "content" and the "checksums" of the arrays by tree and name, checked.
    Raises any error."""
    restored = ocp.JsonCheckpointHandler().restore(folder / HOST)
    record = {key: restored[key] for key in ("content", "checksums")}
    if storage.fingerprint(record) != restored["fingerprint"]:
        raise _Changed(f"{HOST} does not match its saved fingerprint")
    return record


def _read(
    folder: epath.Path, wanted: Mapping[str, Mapping[str, Any]], saved: Checksums
) -> dict[str, dict[str, Any]]:
    """Read arrays by tree and name, checked against the checksums in `saved`. Raises any error."""
    items: dict[str, Any] = {
        name: ocp.args.StandardRestore(arrays) for name, arrays in wanted.items()
    }
    if not items:
        return {}
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        restored = reader.restore(folder, args=ocp.args.Composite(**items))
    values = {}
    for name, arrays in wanted.items():
        values[name] = {key: restored[name][key] for key in arrays}
        for key, number in checksums(values[name]).items():
            if number != saved[name][key]:
                raise _Changed(f"{name}.{key} does not match its saved checksum")
    return values


def _read_alone(folder: epath.Path, key: str) -> np.ndarray:
    """Read one array of a tree, whole, without the other processes. Raises any error."""
    # A manager would create and clean the folder. The key counts, not the 0.
    how = {key: ocp.RestoreArgs(restore_type=np.ndarray)}
    args = ocp.args.PyTreeRestore(item={key: 0}, restore_args=how, partial_restore=True)
    array: np.ndarray = ocp.PyTreeCheckpointHandler().restore(folder, args=args)[key]
    return array


def _compare_array(folder: epath.Path, name: str, saved: Any, wanted: Any) -> None:
    if saved is None or wanted is None:
        where = f"is in {folder} but not in the model"
        if saved is None:
            where = f"is in the model but not in {folder}"
        raise ValueError(
            f"{name} {where}: that checkpoint was saved with another model or optimizer"
        )
    if tuple(saved.shape) != tuple(wanted.shape) or saved.dtype != wanted.dtype:
        raise ValueError(
            f"{name} is {saved.dtype}{list(saved.shape)} in checkpoint {folder}, but the model has "
            f"{wanted.dtype}{list(wanted.shape)}: it was saved with another configuration"
        )


def flatten(tree: Any) -> dict[str, Any]:
    """Map leaves by name, in the tree's order."""
    return {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def checksums(arrays: Mapping[str, jax.Array]) -> dict[str, int]:
    """Compute a 32-bit checksum of all bits of every array, equal on every mesh. Waits for the
    arrays.

    sum of bits_i * (2 i + 1) mod 2**32 over the elements i: integer sums do not depend on their
    order, and the weight is odd, so every change of one element changes the sum.
    """
    numbers = {}
    for key, array in arrays.items():
        # One program at once: simulated CPU devices may deadlock with two in flight.
        jax.block_until_ready(array)
        numbers[key] = int(_checksum(meshes.fetched(array)))
    return numbers


def host_checksum(array: np.ndarray) -> int:
    """Return the checksum, as by `checksums`, of one array in host memory."""
    bits = np.ascontiguousarray(array).reshape(-1).view(f"uint{8 * array.dtype.itemsize}")
    total = 0
    for first in range(0, bits.size, 1 << 22):  # in pieces: the array leaves little memory free
        part = bits[first : first + (1 << 22)].astype(np.uint32)
        weights = 2 * np.arange(first, first + part.size).astype(np.uint32) + np.uint32(1)
        total += int(np.sum(part * weights, dtype=np.uint32))
    return total % (1 << 32)


@jax.jit  # compiled once for every shape: parameters and both of Adam's moments share it
def _checksum(array: jax.Array) -> jax.Array:
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}").astype(jnp.uint32)
    index = jnp.zeros(array.shape, jnp.uint32)
    for axis, size in enumerate(array.shape):
        index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis)
    return jnp.sum(bits * (2 * index + 1), dtype=jnp.uint32)
