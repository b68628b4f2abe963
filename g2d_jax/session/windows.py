"""Sync windows: the updates between two synchronisations of an online stage's sampling policy, and
their batches."""

from __future__ import annotations

from dataclasses import dataclass

from g2d_jax.config import Online


@dataclass(frozen=True)
class SyncWindow:
    """The updates between two synchronisations, `start` the first of them, and their batches,
    `first` the first.

    Each batch serves num_iterations updates: the window goes over its batches so many times.
    """

    start: int
    updates: int
    first: int
    batches: int

    @property
    def numbers(self) -> range:
        """The numbers of its batches."""
        return range(self.first, self.first + self.batches)

    def number(self, step: int) -> int:
        """Return the batch of update number `step`."""
        return self.first + (step - self.start) % self.batches

    def is_new(self, step: int) -> bool:
        """Return whether update number `step` is the first on its batch."""
        return step - self.start < self.batches


def window_at(step: int, stage: Online) -> SyncWindow:
    """Return the window of update number `step` (from 0) of stage.steps."""
    every = stage.sync_every or max(stage.steps, 1)
    start = step - step % every
    updates = min(every, stage.steps - start)
    return SyncWindow(
        start, updates, start // stage.num_iterations, -(-updates // stage.num_iterations)
    )
