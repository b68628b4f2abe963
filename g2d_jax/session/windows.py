"""Sync windows: the updates between two synchronisations of an online stage's sampling policy, and
their batches."""

from __future__ import annotations

from dataclasses import dataclass

from g2d_jax.config import Online


@dataclass(frozen=True)
class SyncWindow:
    """The updates between two synchronisations, and their batches; both are counted from 0, over
    the whole stage.

    Each batch serves num_iterations updates: the window goes over its batches that many times.
    """

    first_update: int
    updates: int
    first_batch: int
    batches: int

    @property
    def batch_numbers(self) -> range:
        """The numbers of its batches."""
        return range(self.first_batch, self.first_batch + self.batches)

    def batch_of(self, step: int) -> int:
        """Return the number of the batch that serves update number `step`."""
        return self.first_batch + (step - self.first_update) % self.batches

    def is_new(self, step: int) -> bool:
        """Return whether update number `step` is the first on its batch."""
        return step - self.first_update < self.batches


def window_at(step: int, stage: Online) -> SyncWindow:
    """Return the window of update number `step` (from 0) of stage.steps."""
    every = stage.sync_every or max(stage.steps, 1)
    start = step - step % every
    updates = min(every, stage.steps - start)
    return SyncWindow(
        start, updates, start // stage.num_iterations, -(-updates // stage.num_iterations)
    )
