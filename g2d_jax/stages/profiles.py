"""A window of a stage's updates under JAX's profiler, by logging.profile: "STAGE:START-STOP".

    WORKDIR/profiles/plugins/profile/STAGE-START-STOP/process-I.xplane.pb, .trace.json.gz

`tensorboard --logdir WORKDIR/profiles` shows them with the plugin xprof, every process as a host. Sampling and scoring
between the updates are in the window too. A run that is continued within a window traces what is left of it.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from etils import epath
from ml_collections import ConfigDict

from g2d_jax import processes, storage
from g2d_jax.accounting import TRAINING

KINDS = (".xplane.pb", ".trace.json.gz")
"""What JAX names a trace's files, behind the host's name."""


@dataclass(frozen=True)
class Window:
    """Updates `first` to `last` of a stage, numbered from 1 as in its metrics."""

    stage: str
    first: int
    last: int

    def __str__(self) -> str:
        """Its name as a folder."""
        return f"{self.stage}-{self.first}-{self.last}"


def parse(text: str) -> Window:
    """The window that STAGE:START-STOP names. Raises ValueError for anything else."""
    found = re.fullmatch(r"([A-Za-z0-9_-]+):([0-9]{1,9})-([0-9]{1,9})", text)
    if not found or not 1 <= int(found[2]) <= int(found[3]):
        raise ValueError(
            f"logging.profile is {text!r}: write STAGE:START-STOP with the numbers of the first and the last update to "
            "trace, as in warmup:3-5; the first update of a stage is 1"
        )
    return Window(found[1], int(found[2]), int(found[3]))


def check(text: str | None, stages: ConfigDict) -> None:
    """Raise ValueError for a window that cannot come, before any work."""
    if text is None:
        return
    window = parse(text)
    training = [name for name, stage in stages.items() if stage.kind in TRAINING]
    if window.stage not in training:
        raise ValueError(f"logging.profile is {text!r}: the stages with updates are {', '.join(training) or 'none'}")
    steps = stages[window.stage].get("steps")  # those of an offline stage are known when its pairs are
    if steps is not None and window.last > steps:
        raise ValueError(f"logging.profile is {text!r}, but {window.stage} has {steps} updates")


class Profiler:
    """Traces one stage's window, if it has one. text: logging.profile. workdir: where profiles/ goes."""

    def __init__(self, text: str | None, stage: str, workdir: epath.Path) -> None:
        window = None if text is None else parse(text)
        self.window = window if window is not None and window.stage == stage else None
        self.folder = workdir / "profiles"
        self._traced: tempfile.TemporaryDirectory[str] | None = None

    def before(self, done: int, state: Any) -> str:
        """Call it before an update, and at the end, with the number of updates done and the state they lead to.

        Returns what to tell the user: where the trace is, once it is written, else "".
        """
        if self.window is None:
            return ""
        if self._traced is None and self.window.first - 1 <= done < self.window.last:
            jax.block_until_ready(state)
            self._traced = tempfile.TemporaryDirectory(prefix="g2d-profile-")  # JAX's profiler writes local files only
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
                storage.write_bytes(target / f"process-{processes.index()}{kind}", file.read_bytes())
        self._traced.cleanup()
        self._traced = None
        return f"profile of {self.window}: {target}; to look at it: tensorboard --logdir {self.folder} (plugin xprof)"
