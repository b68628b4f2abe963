"""The settings of rollouts that other tools wrote, which stages of two kinds read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field

from g2d_jax.config.section import Issue, OnError, Rollouts, Run, Section, error


class Dump(Section):
    """Rollouts that other tools wrote, in place of sampled ones: see `data.dumps`.

    path: a file, a folder or a glob; "": responses are sampled. columns: from our names to the
    file's, {"reward": "accuracy_reward"}. on_error: "skip" leaves any number of broken rows out.
    """

    path: Rollouts = ""
    columns: Mapping[str, str] = field(default_factory=dict)
    on_error: OnError = "raise"

    def issues(self, run: Run) -> Iterator[Issue]:
        """Yield settings of a dump where none is read."""
        if not self.path and self != Dump():
            yield error("path", "is not set, and other settings of a dump are", "set it too")
