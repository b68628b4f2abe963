"""The order of records: a seeded global permutation, reshuffled every epoch, addressed by one
counter.

`Order` draws from one task's records, `Mixture` from several tasks' in fixed shares. Each is a pure
function of its arguments and the position. The next position is all that you need to resume, or to
divide the work over any number of processes or devices; there is no iterator state to save.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

Draw: TypeAlias = tuple[int, int]
"""The index of a record, and the visit: how often it was drawn earlier."""


@dataclass(frozen=True, slots=True)
class Order:
    """An endless sequence of draws from `count` records, a new permutation each epoch.

    count: 1 to 2^31. seed: any integer. The permutations are grain's
    (`MapDataset.shuffle(seed).repeat()`): no list of `count` entries is kept.
    """

    count: int
    seed: int

    def __getitem__(self, position: int) -> Draw:
        """Return (index, visit) at a position from 0: the record's index, and the epoch, which is
        how often it was drawn earlier.

        Raises ValueError without records.
        """
        if not self.count:
            raise ValueError("there are no records to draw from: is the dataset empty?")
        return _permutation(self.count, self.seed)(position), position // self.count


@dataclass(frozen=True)
class Mixture:
    """An endless sequence of draws from several tasks' records, each task in its share and its own
    permutations.

    counts: records of each task; indices run over all of them, the first task's first. weights: any
    scale, finite and not negative, one above 0; a task of weight 0 is never drawn and may be empty.
    seed: any integer. It alone orders the first task, so a mixture of one task is Order(counts[0],
    seed), and adding tasks does not change the first one's order.

    Positions are divided exactly: the first task has its share of them, evenly spread (a Sturmian
    word), the second its share of the rest, and so on. In any n consecutive positions a task of
    share w has n w, within 1 for two drawn tasks and within k - 1 for k (within 1 is impossible for
    most shares of three or more tasks).
    """

    counts: Sequence[int]
    weights: Sequence[float]
    seed: int

    @property
    def count(self) -> int:
        """Count the records of all tasks together."""
        return sum(self.counts)

    def __getitem__(self, position: int) -> Draw:
        """Return (index, visit) at a position from 0: the index among all tasks' records, and the
        epoch of the record's task."""
        for start, order, share in self._tasks:
            taken = _taken(position, share)
            if _taken(position + 1, share) > taken:
                index, visit = order[taken]
                return start + index, visit
            position -= taken
        raise AssertionError("the last task's share of the rest must be everything")

    @functools.cached_property
    def _tasks(self) -> list[tuple[int, Order, Fraction]]:
        """List the drawn tasks: (first index, order, share of what the previous tasks leave) of
        each."""
        # As written: 0.1 is exactly a tenth.
        weights = [Fraction(repr(float(weight))) for weight in self.weights]
        tasks = []
        for number, weight in enumerate(weights):
            if weight:
                seed = self.seed
                if number:  # tasks of equal size must not share an order
                    seed = _hashed(f"g2d_jax/mixture/{self.seed}/{number}", 8)
                order = Order(self.counts[number], seed)
                share = weight / sum(weights[number:])
                tasks.append((sum(self.counts[:number]), order, share))
        return tasks


def _taken(positions: int, share: Fraction) -> int:
    """Count a share's positions among the first `positions`: the nearest whole number, halves
    rounded up."""
    return (2 * positions * share.numerator + share.denominator) // (2 * share.denominator)


def draw(order: Order | Mixture, start: int, count: int) -> list[Draw]:
    """Return (index, visit) at positions start … start + count - 1. Process p of n slices its own
    part."""
    return [order[position] for position in range(start, start + count)]


@functools.lru_cache(maxsize=16)
def _permutation(count: int, seed: int) -> Callable[[int], int]:
    """Return the map position -> index, from grain; imported here because importing grain needs a
    second."""
    import grain

    # grain's epoch e of seed s is its epoch 0 of seed s + e; hashed seeds separate runs with
    # neighbouring seeds.
    dataset = (
        grain.MapDataset.range(count).shuffle(seed=_hashed(f"g2d_jax/order/{seed}", 4)).repeat()
    )
    return lambda position: int(dataset[position])


def _hashed(text: str, size: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=size).digest(), "little")
