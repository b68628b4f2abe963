"""Checkpoints on S3: on the local disk first, then uploaded, and a marker object last. By hand: Orbax writes to no S3.

    s3://…/STEP/…                    what Orbax wrote
    s3://…/STEP/commit_success.txt   written last, deleted first; a step without it is none. Orbax's own name on gs

The local copy needs the room of one checkpoint in the folder for temporary files (TMPDIR).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from tempfile import TemporaryDirectory
from typing import Any

import fsspec
import jax
import orbax.checkpoint as ocp
from etils import epath

from g2d_jax.runtime import storage

MARKER = "commit_success.txt"


def is_staged(folder: storage.PathLike) -> bool:
    """Return whether checkpoints in this folder go by way of the local disk."""
    return os.fspath(folder).startswith("s3://")


def check_processes(folder: storage.PathLike) -> None:
    """Raise ValueError if several processes are to write checkpoints in a folder where only one can."""
    if is_staged(folder) and jax.process_count() > 1:
        raise ValueError(
            f"{os.fspath(folder)}: several processes cannot write checkpoints to S3, Orbax has no driver for it: "
            "choose a --workdir on Google Cloud Storage (gs://) or on a file system that all processes share"
        )


class Staged:
    """The checkpoints of one folder on S3, by step. keep, pinned: as in `Checkpoints`. For one thread."""

    def __init__(self, folder: epath.Path, keep: int, pinned: Collection[int]) -> None:
        self._folder, self._keep, self._pinned = folder, keep, frozenset(pinned)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="g2d-upload")
        self._upload: Future[None] | None = None

    def steps(self) -> list[int]:
        """List the steps that are complete, ascending."""
        return sorted(step for step in self._begun() if (self._folder / str(step) / MARKER).exists())

    def _begun(self) -> list[int]:
        """List the steps that have any files."""
        try:
            with storage.naming("list", self._folder):
                return [int(path.name) for path in self._folder.iterdir() if path.name.isdecimal()]
        except FileNotFoundError:
            return []

    def save(self, step: int, args: ocp.args.Composite) -> None:
        """Write to the local disk, and begin to upload. Waits for the upload before this one.

        Raises ValueError if the step is there already, or for several processes; and what made the last upload fail.
        """
        check_processes(self._folder)
        self.wait()
        if step in self.steps():
            raise ValueError(f"there is a checkpoint of step {step} in {self._folder} already")
        with ExitStack() as stack:
            local = stack.enter_context(TemporaryDirectory(prefix="g2d-checkpoint-"))
            with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as writer:
                writer.save(epath.Path(local) / str(step), args=args)
            self._upload = self._thread.submit(self._send, step, local, stack.pop_all())

    def _send(self, step: int, local: str, stack: ExitStack) -> None:
        with stack, storage.naming("write", self._folder / str(step)):
            for left in sorted(set(self._begun()) - set(self.steps())):  # half uploaded by a run that was killed
                self._delete(left)
            files, target = _files(), os.fspath(self._folder / str(step))
            files.put(f"{local}/{step}/", f"{target}/", recursive=True)
            files.pipe_file(f"{target}/{MARKER}", b"")
            for old in self.steps()[: -self._keep]:
                if old not in self._pinned:
                    self._delete(old)

    def _delete(self, step: int) -> None:
        folder = os.fspath(self._folder / str(step))
        with suppress(FileNotFoundError):
            _files().rm_file(f"{folder}/{MARKER}")
        with suppress(FileNotFoundError):
            _files().rm(folder, recursive=True)

    def wait(self) -> None:
        """Return when the upload under way, if any, is complete. Raises what made it fail."""
        upload, self._upload = self._upload, None
        if upload is not None:
            upload.result()

    def close(self) -> None:
        """Wait, and end the thread. Raises as `wait` does."""
        self._thread.shutdown()
        self.wait()

    @contextmanager
    def fetched(self, step: int, names: Collection[str] | None) -> Iterator[epath.Path]:
        """Make a local copy of a step, or of these items and the files beside them, for the length of the block."""
        remote, files = os.fspath(self._folder / str(step)), _files()
        with TemporaryDirectory(prefix="g2d-checkpoint-") as local:
            with storage.naming("read", remote):
                for entry in files.ls(remote, detail=True):
                    name = entry["name"].rpartition("/")[2]
                    if entry["type"] != "directory" or names is None or name in names:
                        files.get(entry["name"], f"{local}/{step}/{name}", recursive=True)
            yield epath.Path(local) / str(step)


def _files() -> Any:
    return fsspec.filesystem("s3", use_listings_cache=False)
