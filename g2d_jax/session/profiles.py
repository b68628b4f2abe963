"""JAX's profile of a window of a stage's updates, logging.profile: "STAGE:START-STOP".

    WORKDIR/profiles/plugins/profile/STAGE-START-STOP/process-I.xplane.pb, .trace.json.gz

`tensorboard --logdir WORKDIR/profiles` shows them with the plugin xprof, every process as a host.
The window includes sampling and scoring between the updates. A run that resumes within a window
traces the rest of it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import jax
from etils import epath

from g2d_jax.config import Window
from g2d_jax.runtime import processes, storage

KINDS = (".xplane.pb", ".trace.json.gz")
"""Endings of JAX's trace files, after the host's name."""


class Profiler:
    """The tracer of a window, if it is of this stage. workdir: the folder of profiles/."""

    def __init__(self, window: Window | None, stage: str, workdir: epath.Path) -> None:
        self.window = window if window is not None and window.stage == stage else None
        self.folder = workdir / "profiles"
        self._traced: tempfile.TemporaryDirectory[str] | None = None

    def before(self, done: int, state: Any) -> str:
        """Start or end the trace. Call it before each update, and at the end. done: number of
        updates so far; state: their result.

        Returns a message with the trace's path once it is written, else "".
        """
        if self.window is None:
            return ""
        if self._traced is None and self.window.first - 1 <= done < self.window.last:
            jax.block_until_ready(state)
            # JAX's profiler writes local files only
            self._traced = tempfile.TemporaryDirectory(prefix="g2d-profile-")
            jax.profiler.start_trace(self._traced.name)
        elif self._traced is not None and done >= self.window.last:
            jax.block_until_ready(state)
            return self.close()
        return ""

    def close(self) -> str:
        """End and write a running trace; return as `before`."""
        if self._traced is None or self.window is None:
            return ""
        jax.profiler.stop_trace()
        target = self.folder / "plugins" / "profile" / str(self.window)
        for kind in KINDS:
            for file in Path(self._traced.name).rglob(f"*{kind}"):
                storage.write_bytes(
                    target / f"process-{processes.index()}{kind}", file.read_bytes()
                )
        self._traced.cleanup()
        self._traced = None
        return (
            f"profile of {self.window}: {target}; to view it: tensorboard --logdir "
            f"{self.folder} (plugin xprof)"
        )
