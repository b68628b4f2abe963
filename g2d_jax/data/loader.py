"""Which record comes next: a seeded global permutation, reshuffled every epoch, addressed by one counter.

The order is a pure function of (count, seed, position). To continue after a stop, or to divide the work over any number
of processes or devices, it is enough to know the next position; there is no iterator state to save.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Order:
    """An endless sequence of draws from `count` records in which every epoch is another permutation.

    count: at least 1. seed: any integer. Raises ValueError for count below 1 or above
    2^31. The permutations are grain's (`MapDataset.shuffle(seed).repeat()`): no list of `count` entries is kept.
    """

    count: int
    seed: int

    def __post_init__(self) -> None:
        if not 1 <= self.count <= 2**31:
            raise ValueError(f"an order needs 1 to 2^31 records, got {self.count}: is the data set empty?")

    def __getitem__(self, position: int) -> tuple[int, int]:
        """(index, visit) at a position from 0: the record's index and how often it was drawn before, the epoch.

        Raises ValueError for a negative position.
        """
        if position < 0:
            raise ValueError(f"positions count from 0, got {position}")
        visit = position // self.count
        return _permutation(self.count, self.seed)(position) % self.count, visit


def draw(order: Order, start: int, count: int) -> list[tuple[int, int]]:
    """(index, visit) at positions start … start + count - 1. Process p of n takes its part of them by slicing."""
    return [order[position] for position in range(start, start + count)]


@functools.lru_cache(maxsize=16)
def _permutation(count: int, seed: int) -> Callable[[int], int]:
    """position -> index, from grain; imported here because grain takes a second to import."""
    import grain

    # grain's epoch e of seed s is its epoch 0 of seed s + e; hashed seeds keep runs with neighbouring seeds apart.
    hashed = int.from_bytes(hashlib.blake2b(f"g2d_jax/order/{seed}".encode(), digest_size=4).digest(), "little")
    dataset = grain.MapDataset.range(count).shuffle(seed=hashed).repeat()
    return lambda position: int(dataset[position])
