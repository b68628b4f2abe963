"""The settings of rollouts from other tools, in collect and online stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field

from g2d_jax.config.section import Issue, OnError, Rollouts, Run, Section, error


class Dump(Section):
    """Rollouts from other tools, in place of sampled ones (docs/rollouts.md)."""

    path: Rollouts = ""
    """A file, a folder or a glob. Empty: responses are sampled."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Our names of columns and the file's: `{"reward": "accuracy_reward"}`."""
    on_error: OnError = "raise"
    """Broken rows are left out and counted: `raise` allows 5 % of all rows, `skip` any share."""

    def issues(self, run: Run) -> Iterator[Issue]:
        """Yield settings of a dump without a path."""
        if not self.path and self != Dump():
            yield error("path", "is not set, but other settings of the dump are", "set it too")
