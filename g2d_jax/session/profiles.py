"""A window of a stage's updates under JAX's profiler, by logging.profile: "STAGE:START-STOP".

    WORKDIR/profiles/plugins/profile/STAGE-START-STOP/process-I.xplane.pb, .trace.json.gz

`tensorboard --logdir WORKDIR/profiles` shows them with the plugin xprof, every process as a host.
Sampling and scoring between the updates are in the window too. A run that is continued within a
window traces what is left of it.
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
"""Endings of a trace's files in JAX, behind the host's name."""


class Profiler:
    """The tracer of one stage's window, if it is that stage's. workdir: where profiles/ goes."""

    def __init__(self, window: Window | None, stage: str, workdir: epath.Path) -> None:
        self.window = window if window is not None and window.stage == stage else None
        self.folder = workdir / "profiles"
        self._traced: tempfile.TemporaryDirectory[str] | None = None

    def before(self, done: int, state: Any) -> str:
        """Start or end the trace. Call it before an update, and at the end, with the number of
        updates done and the state they lead to.

        Returns a message for the user: where the trace is, once it is written, else "".
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
        """End the trace if one is under way and write it; as `before`."""
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
            f"profile of {self.window}: {target}; to look at it: tensorboard --logdir "
            f"{self.folder} (plugin xprof)"
        )
