"""A sync window: draw its prompts, and sample and score responses to them.

    draw ─► sample ─► score ─┬─► WindowBatches: a batch an update, from memory or from disk
      └─── a further round ◄─┘   with dynamic sampling, in place of prompts without a signal

A window is sampled completely at its synchronisation, since its updates then change the only copy
of the policy. (A server has another copy, and may begin a window earlier: rollouts/ahead.py.)
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
from etils import epath

from g2d_jax.config import Filter, Online
from g2d_jax.data import curriculum
from g2d_jax.data.curriculum import History
from g2d_jax.data.order import Draw, Mixture, Order
from g2d_jax.records import Problem
from g2d_jax.rollouts import batches as grouping
from g2d_jax.rollouts.batches import Batch
from g2d_jax.rollouts.generate import Policy, generate
from g2d_jax.rollouts.groups import Draws
from g2d_jax.rollouts.logprobs import OtherLogprobs, logprobs_file, read_logprobs, write_logprobs
from g2d_jax.rollouts.store import Sampled, concat_rounds, gone, on_disk, read_rounds, shard_path
from g2d_jax.rollouts.workload import Workload, workload_of
from g2d_jax.runtime import memory
from g2d_jax.session.extra_state import Cursor, ExtraState, PlannedWindow
from g2d_jax.session.problems import train_order
from g2d_jax.session.session import Session
from g2d_jax.session.windows import SyncWindow

MAX_BATCHES_IN_MEMORY = 64
"""Batches of a window that stay in memory with their log-probabilities; others are read back."""


@dataclass(frozen=True)
class Prompts:
    """A stage's training problems, the order in which it draws them, and the filter of those it
    skips."""

    train: Sequence[Problem]
    order: Order | Mixture
    filter: Filter
    seed: int

    @functools.cached_property
    def index_of(self) -> dict[str, int]:
        """The index of each problem by its ID."""
        return {problem.id: index for index, problem in enumerate(self.train)}

    @classmethod
    def of(cls, session: Session, name: str, stage: Online) -> Prompts:
        """Return the prompts of a stage."""
        train = session.problems.train
        order = train_order(session.config, train, f"online/{name}")
        return cls(train, order, stage.filter, session.config.seed)

    def draws(self, drawn: Iterable[Draw]) -> Draws:
        """Convert indices to problems, each with its visit."""
        return [(self.train[index], visit) for index, visit in drawn]


def draw(
    prompts: Prompts, cursor: Cursor, history: History, count: int
) -> tuple[list[Draw], Cursor]:
    """Draw the next `count` prompts, (index, visit) each; return them and the position after them.
    history: the prompts' rewards so far."""
    found = curriculum.draw(
        prompts.order, cursor.position, count, history, prompts.filter, prompts.seed
    )
    behind = Cursor(
        found.cursor,
        cursor.drawn + count,
        cursor.retired + found.skipped_retired,
        cursor.outside + found.skipped_outside,
    )
    return found.draws, behind


def share_out(
    folder: epath.Path, draws: Draws, missing: Mapping[int, int], extra: int = 0
) -> dict[int, tuple[Draws, epath.Path]]:
    """Distribute draws over batches by the number each is missing; return them with their shards.
    extra: the round, 0 for the first."""
    remaining = iter(draws)
    parts = {}
    for number, count in missing.items():
        if count:
            own = list(itertools.islice(remaining, count))
            parts[number] = own, shard_path(folder, number, extra)
    return parts


class WindowBatches:
    """The batches of a window by number, with their log-probabilities under other policies.

    The first `MAX_BATCHES_IN_MEMORY` stay in memory. Others are read from disk, and so are all of a
    window in whose middle a stage resumes.
    """

    def __init__(self, session: Session, folder: epath.Path, window: SyncWindow) -> None:
        self.window = window
        self._session, self._folder = session, folder
        self._rounds: dict[int, list[Sampled]] = {}
        self._logprobs: dict[int, OtherLogprobs] = {}

    def add(self, number: int, sampled: Sampled) -> None:
        """Add a round of a batch. Its shard has it too."""
        if self._stays(number):
            self._rounds.setdefault(number, []).append(sampled)

    def rounds(self, number: int) -> list[Sampled]:
        """Return all rounds of a batch, in order. Raises ValueError if none is left."""
        if number in self._rounds:
            return self._rounds[number]
        problems = self._session.problems.train_by_id
        return read_rounds(self._folder, number, problems, self._session.writer)

    def has_logprobs(self, number: int) -> bool:
        """Return whether a batch's log-probabilities are on disk. All processes make the call."""
        file = logprobs_file(self._folder, number)
        return self.window.updates > 1 and on_disk(self._session.writer, [file])

    def add_logprobs(self, number: int, logprobs: OtherLogprobs) -> None:
        """Add a batch's log-probabilities."""
        if self._stays(number):
            self._logprobs[number] = logprobs
        # A stage that resumes inside a window lacks the policies to compute them again.
        if self.window.updates > 1:
            file = logprobs_file(self._folder, number)
            self._session.writer.submit(partial(write_logprobs, file, logprobs))

    def logprobs(self, number: int) -> OtherLogprobs:
        """Return a batch's log-probabilities. Raises ValueError if they are gone."""
        if number in self._logprobs:
            return self._logprobs[number]
        if not self.has_logprobs(number):
            raise gone(logprobs_file(self._folder, number))
        return read_logprobs(logprobs_file(self._folder, number))

    def _stays(self, number: int) -> bool:
        return number < self.window.first_batch + MAX_BATCHES_IN_MEMORY


@dataclass(frozen=True)
class StageSampling:
    """The prompts and workload of an online stage's sampling."""

    stage: Online
    folder: epath.Path
    prompts: Prompts
    workload: Workload

    @classmethod
    def of(cls, session: Session, name: str, stage: Online) -> StageSampling:
        """Return the sampling of a stage."""
        prompts = Prompts.of(session, name, stage)
        return cls(stage, session.folders[name], prompts, workload_of(session, name, stage))


def sample_window(
    sampling: StageSampling,
    batches: WindowBatches,
    state: ExtraState,
    policy: Callable[[], Policy],
    plan: PlannedWindow | None,
) -> tuple[Cursor, list[Mapping[str, float]]]:
    """Sample and score all batches of a window, or read them back; return the position after its
    prompts, and the cost of each round of a batch.

    policy: returns the policy, called only to sample. plan: of a window that a server began ahead,
    with its first prompts.
    """
    stage, prompts, session = sampling.stage, sampling.prompts, sampling.workload.session
    cursor = plan.after if plan else state.cursor
    costs: list[Mapping[str, float]] = []
    missing = dict.fromkeys(batches.window.batch_numbers, stage.prompts_per_step)
    # Dynamic sampling replaces prompts without a signal in further rounds.
    for extra in range(1 + stage.filter.dynamic_sampling):
        if not any(missing.values()):
            break
        if plan and not extra:
            drawn = plan.draws
        else:
            drawn, cursor = draw(prompts, cursor, state.history, sum(missing.values()))
        parts = share_out(sampling.folder, prompts.draws(drawn), missing, extra)
        # A call that an earlier start completed is read back whole.
        rounds = generate(session, policy, list(parts.values()), sampling.workload)
        for number, sampled in zip(parts, rounds, strict=True):
            batches.add(number, sampled)
            costs.append(sampled.cost)
            if extra < stage.filter.dynamic_sampling:
                signal = group(session, stage, [sampled]).has_signal
                missing[number] -= int(signal.sum())
    # On CPUs the C library would keep the sampler's free memory during the updates.
    if jax.default_backend() == "cpu":
        memory.give_back()
    return cursor, costs


def group(session: Session, stage: Online, rounds: Sequence[Sampled]) -> Batch:
    """Build an update's batch from all its rounds."""
    draws, groups = concat_rounds(rounds)
    config = session.config
    return grouping.make(config.seed, stage, draws, groups, config.verifiable)
