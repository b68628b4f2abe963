"""The schedule: which prompt is prefilled where, and which sample decodes in which row. It has no
access to devices.

    requests ─► waiting ─► prompts of a shard (prefilled) ─► rows of that shard (decoded) ─► finished

Every process knows the requests and which rows stopped, so all compute the same schedule. Rows and
prompts belong to shards, one for each part of the mesh that rows are split over. A prompt is
prefilled in the shard where its samples decode, so it is never sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from g2d_jax.records import Request


@dataclass(slots=True)
class Sample:
    """One running sample. generated: its tokens so far."""

    request: Request
    number: int
    generated: int = 0

    @property
    def length(self) -> int:
        """The number of tokens of prompt and response so far."""
        return len(self.request.prompt_ids) + self.generated

    @property
    def remaining(self) -> int:
        """The most tokens that may follow."""
        return self.request.params.max_new_tokens - self.generated


@dataclass(slots=True)
class _Shard:
    """The rows and prompts of one shard. rows: the sample of each row, None for one at rest.
    pending: the samples that wait for a row, by prefilled prompt; order: the prompts with waiting
    samples, first come first served."""

    rows: list[Sample | None]
    pending: list[deque[Sample]]
    order: deque[int] = field(default_factory=deque)

    @property
    def load(self) -> int:
        """The number of samples that run or wait here."""
        return len(self.rows) - self.rows.count(None) + sum(map(len, self.pending))


class Schedule:
    """The samples of one call.

    shards: their number. rows, prompts: in each shard, how many decode together and are prefilled
    together. Rows and prompts are numbered over all shards, the first shard first.
    """

    def __init__(
        self, requests: Sequence[Request], *, shards: int, rows: int, prompts: int
    ) -> None:
        # most: samples of one prompt in one shard. A prompt with more is prefilled in several
        # shards, else one shard would finish after the others.
        samples = sum(request.num_samples for request in requests)
        most = -(-samples // shards)
        self._waiting: deque[tuple[Request, range]] = deque()
        # Prompts of similar length share a prefill.
        for request in sorted(requests, key=lambda request: -len(request.prompt_ids)):
            for first in range(0, request.num_samples, most):
                numbers = range(first, min(first + most, request.num_samples))
                self._waiting.append((request, numbers))
        self._shards = [
            _Shard([None] * rows, [deque() for _ in range(prompts)]) for _ in range(shards)
        ]

    @property
    def rows(self) -> list[Sample | None]:
        """The sample of each row, None for one at rest."""
        return [sample for shard in self._shards for sample in shard.rows]

    @property
    def is_drained(self) -> bool:
        """Whether every sample has begun, so that a row that ends stays at rest."""
        return not self._waiting and not any(shard.order for shard in self._shards)

    def prefill(self) -> dict[int, Request]:
        """Choose the prompts to prefill, by place; {} while no idle row needs one.

        Every free place gets one, starting in the shard with the least load.
        """
        idle = (shard for shard in self._shards if None in shard.rows and not shard.order)
        if not any(idle):
            return {}
        placed: dict[int, Request] = {}
        while self._waiting:
            free = [i for i, shard in enumerate(self._shards) if not all(shard.pending)]
            if not free:
                break
            chosen = min(free, key=lambda i: self._shards[i].load)
            shard, (request, numbers) = self._shards[chosen], self._waiting.popleft()
            place = next(i for i, samples in enumerate(shard.pending) if not samples)
            shard.pending[place].extend(Sample(request, number) for number in numbers)
            shard.order.append(place)
            placed[chosen * len(shard.pending) + place] = request
        return placed

    def insert(self) -> dict[int, tuple[int, Sample]]:
        """Assign rows at rest to waiting samples: row -> (place of its prompt, sample)."""
        inserted: dict[int, tuple[int, Sample]] = {}
        for number, shard in enumerate(self._shards):
            for row, sample in enumerate(shard.rows):
                if sample is None and shard.order:
                    place = shard.order[0]
                    shard.rows[row] = new = shard.pending[place].popleft()
                    if not shard.pending[place]:
                        shard.order.popleft()
                    index = number * len(shard.rows) + row
                    inserted[index] = number * len(shard.pending) + place, new
        return inserted

    def narrow(self, rows: int) -> list[int]:
        """Keep this many rows of a single shard, those with running samples first; return their
        previous numbers, in their new order.

        The schedule must be drained, with at most this many samples running.
        """
        (shard,) = self._shards
        order = sorted(range(len(shard.rows)), key=lambda row: shard.rows[row] is None)[:rows]
        shard.rows = [shard.rows[row] for row in order]
        return order

    def collect_finished(self, counts: Sequence[int], stopped: Sequence[bool]) -> list[int]:
        """Count each row's new tokens, free the rows whose samples are complete, and return their
        numbers."""
        finished = []
        for number, shard in enumerate(self._shards):
            for row, sample in enumerate(shard.rows):
                index = number * len(shard.rows) + row
                if sample is not None:
                    sample.generated += counts[index]
                    if stopped[index] or not sample.remaining:
                        shard.rows[row] = None
                        finished.append(index)
        return finished
