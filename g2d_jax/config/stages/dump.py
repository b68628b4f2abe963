"""The settings of rollouts from other tools, in collect and online stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field

from g2d_jax.config.section import Issue, OnError, Rollouts, Run, Section, error


class Dump(Section):
    """Rollouts from other tools, in place of sampled ones: see `data.dumps`.

    path: a file, a folder or a glob; "": responses are sampled. columns: our name -> the file's,
    {"reward": "accuracy_reward"}. on_error: "skip" ignores any number of broken rows.
    """

    path: Rollouts = ""
    columns: Mapping[str, str] = field(default_factory=dict)
    on_error: OnError = "raise"

    def issues(self, run: Run) -> Iterator[Issue]:
        """Yield settings of a dump without a path."""
        if not self.path and self != Dump():
            yield error("path", "is not set, but other settings of the dump are", "set it too")
