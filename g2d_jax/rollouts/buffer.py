"""The batches of an online stage: at each synchronisation all rollouts up to the next one are drawn, and kept.

    generate_window: prompts ─► rollouts of the present policy ─► rewards ─┬─► add_logprobs: of the reference ─┐
    next_batch: one batch a step ◄─ from memory, or read back from disk ◄──┴───────── written beside ◄─────────┘

A checkpoint waits for what is being written, and a stage that is killed reads back what it needs: it goes on with the
same rollouts. No second copy of the policy is kept between synchronisations.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from etils import epath
from safetensors.numpy import load, save

from g2d_jax.config import Online
from g2d_jax.data import curriculum
from g2d_jax.data.packing import Group
from g2d_jax.models.decoder import Decoder
from g2d_jax.rollouts import batches
from g2d_jax.rollouts.batches import Batch
from g2d_jax.rollouts.external import ExternalBatches
from g2d_jax.rollouts.generate import (
    Draws,
    Groups,
    Sampled,
    correct,
    count_rollouts,
    generate,
    on_disk,
    read_sampled,
    rewards,
)
from g2d_jax.rollouts.workload import Workload, workload_of
from g2d_jax.runtime import processes, storage
from g2d_jax.session.cost import Cost
from g2d_jax.session.extra_state import Cursor
from g2d_jax.session.policies import load_reference
from g2d_jax.session.problems import train_order
from g2d_jax.session.session import Session
from g2d_jax.session.trainer import Trainer
from g2d_jax.session.windows import SyncWindow

KEPT = 64  # batches of a window that stay in memory; of a longer window the others are read back
USAGE = ("calls", "prompts", "sampled_tokens", "sampling_seconds")  # figures of its call that a shard has


def trains_off_policy(stage: Online) -> bool:
    """Return whether a GRPO loss trains on rollouts of an earlier policy than its own.

    With sync_every=1 a batch is drawn, serves one update, and is gone: the policy is the one that sampled, and the old
    log-probabilities are its own, taken in the same forward pass. Else they are those of the policy at the
    synchronisation, about to take the first update on these rollouts; the trainer computes them there, since the
    sampler's differ by its arithmetic (as in TRL, which does the same where steps_per_generation or num_iterations ask
    for it; the paper has GRPO with sync_every=1 alone).
    """
    return bool((stage.loss == "grpo" or stage.grpo_coef) and stage.sync_every != 1)


def logprobs_temperature(stage: Online) -> float:
    """Return the temperature of other policies' log-probabilities: that of the loss."""
    return float(stage.sampling.temperature) if stage.loss == "grpo" else 1.0


def shard_path(folder: epath.Path, number: int, extra: int = 0) -> epath.Path:
    """Return the file of a batch's rollouts (counted from 0), of its first round or of an `extra` one."""
    return folder / "rollouts" / f"step-{number:06d}{f'-{extra}' if extra else ''}.parquet"


def shards(folder: epath.Path, number: int) -> list[epath.Path]:
    """List the shards of a batch that exist, its first round first. All processes make the call."""

    def rounds() -> int:
        return next(extra for extra in itertools.count() if not shard_path(folder, number, extra).exists())

    return [shard_path(folder, number, extra) for extra in range(processes.on_leader(rounds))]


def read_rounds(session: Session, folder: epath.Path, number: int) -> list[Sampled]:
    """Read all that was drawn for a batch, its first round first. Raises ValueError if it is not on disk."""
    session.writer.wait()
    rounds = [read_sampled(session, shard) for shard in shards(folder, number)]
    if not rounds:
        raise ValueError(f"{shard_path(folder, number)} is gone, and what sampled it too: start this stage anew")
    return rounds


def together(rounds: Sequence[Sampled]) -> tuple[Draws, Groups]:
    """Join the draws of several rounds, and their groups."""
    return [draw for part in rounds for draw in part.draws], [group for part in rounds for group in part.groups]


@dataclass(frozen=True)
class OtherLogprobs:
    """Log-probabilities of a batch's responses under other policies than the one that samples. Each is of all responses
    one after the other, float32 [tokens], None where the loss needs none. cost: of computing them, for `Cost.add`."""

    reference: np.ndarray | None = None
    trainer: np.ndarray | None = None
    cost: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainBatch:
    """One batch. draws, groups: all that was drawn; batch: the part to train on; new: not used before. costs: of its
    rounds, and of other policies' log-probabilities."""

    draws: Draws
    groups: Groups
    batch: Batch
    new: bool
    costs: Sequence[Mapping[str, float]]


class RolloutBuffer:
    """The buffer of rollouts that gives a Trainer its batches."""

    def __init__(self, trainer: Trainer, stage: Online, external: ExternalBatches | None = None) -> None:
        self.external = external
        self.session, self.name, self.stage, self.trainer = trainer.session, trainer.name, stage, trainer
        self.state, self.folder = trainer.extra_state, self.session.folders[self.name]
        self.reference: Decoder | None = None  # a fixed one, while it is in use
        train = self.session.problems["train"]
        self.order = train_order(self.session.config, train, stage.stream or f"online/{self.name}")
        self.index_of = {problem.id: index for index, problem in enumerate(train)}
        self.rounds: dict[int, list[Sampled]] = {}  # rounds drawn by this process, of the window's first batches
        self.others: dict[int, OtherLogprobs] = {}
        self._mark = self._sampling = 0.0

    def fixed_reference(self) -> Decoder:
        """Load the policy that the stage began with."""
        return load_reference(self.session, self.stage.policy) if self.reference is None else self.reference

    @cached_property
    def workload(self) -> Workload:
        """The stage's sampling."""
        return workload_of(self.session, self.name, self.stage)

    def generate_window(self, window: SyncWindow) -> dict[str, float]:
        """Sample and score a window's batches with the present policy, or take them from a dump; return metrics."""
        now = time.perf_counter()
        share = {"generation/share": self._sampling / (now - self._mark)} if self._mark else {}  # of the window before
        self.rounds.clear()
        self.others.clear()
        if self.external is not None:  # its windows are of one batch: `Online.check`
            self.rounds[window.first] = [self.external.batch(window.first, shard_path(self.folder, window.first))]
            return {}
        metrics = self._draw(window)
        spent = _usage(sampled.cost for number in window.numbers for sampled in self._rounds(number))
        self._mark, self._sampling = now, spent["sampling_seconds"]
        return {
            **metrics,
            **share,
            "generation/prompts": spent["prompts"] / max(spent["calls"], 1e-9),
            "generation/tokens_per_second": spent["sampled_tokens"] / max(self._sampling, 1e-9),
        }

    def add_logprobs(self, window: SyncWindow) -> None:
        """Add the log-probabilities of other policies to all batches of a window, where the loss needs any."""
        for number in window.numbers:
            processes.check_stop_together()
            self._score(number)
        if window.start + window.updates == self.stage.steps:
            self.reference = None  # it is not needed any more

    def next_batch(self, window: SyncWindow) -> TrainBatch:
        """Return the batch of the next update, which is in the window."""
        number = window.number(self.trainer.step)
        rounds, others = self._rounds(number), self._others(number)
        draws, groups = together(rounds)
        batch = self._batch(draws, groups)
        filled = batches.fill(self.stage, batch.groups, others.reference, others.trainer)
        costs = [*(sampled.cost for sampled in rounds), others.cost]
        return TrainBatch(draws, groups, replace(batch, groups=filled), window.is_new(self.trainer.step), costs)

    def record_cost(self, train_batch: TrainBatch) -> None:
        """Add the cost of a new batch to the stage's, and its groups' rewards to the history."""
        cost, state = self.trainer.cost, self.state
        if not train_batch.new:
            return
        for part in train_batch.costs:
            cost.add(part)
        state.usage = _usage([state.usage, *train_batch.costs])
        if self.external is None:
            count_rollouts(self.session, cost, train_batch.groups)
        metrics = train_batch.batch.metrics
        counts = {"prompts": len(train_batch.groups)}
        if self.stage.loss != "grpo":
            counts |= {"pairs": int(metrics["pairs/prompts"]), "skipped": int(metrics["pairs/skipped"])}
        state.counts = {name: state.counts.get(name, 0) + number for name, number in counts.items()}
        if self.stage.targeted:
            outcomes = zip(train_batch.draws, rewards(train_batch.groups), correct(train_batch.groups), strict=True)
            for (problem, _), values, verdicts in outcomes:
                state.history.update(self.index_of[problem.id], values, verdicts, self.trainer.step)

    def summary(self) -> dict[str, int]:
        """Return counts for the manifest: prompts drawn, and their use."""
        names = ("prompts",) if self.stage.loss == "grpo" else ("prompts", "pairs", "skipped")
        counts = {**dict.fromkeys(names, 0), **self.state.counts}
        left_out = {"left_out": self.state.after.skipped} if self.stage.targeted else {}
        rollouts = counts["prompts"] * self.stage.num_generations
        return {"rollouts": rollouts, **counts, **left_out, "train_problems": len(self.index_of)}

    def usage(self) -> dict[str, float]:
        """Return figures of the sampling for the manifest."""
        spent, total = _usage([self.state.usage]), self.trainer.cost.seconds
        seconds = spent["sampling_seconds"]
        return {
            "calls": round(spent["calls"]),
            "prompts_per_call": spent["prompts"] / spent["calls"] if spent["calls"] else 0.0,
            "tokens_per_second": spent["sampled_tokens"] / seconds if seconds else 0.0,
            "share": seconds / total if total else 0.0,
        }

    # Generation

    def _draw(self, window: SyncWindow) -> dict[str, float]:
        """Choose and sample the prompts of a window; with dynamic sampling, more in place of those without a signal."""
        stage, state = self.stage, self.state
        if state.window != window.start:  # else the stage was stopped in this window: draw the same again
            state.window, state.before = window.start, state.after
        cursor = replace(state.before)
        counts = dict.fromkeys(window.numbers, stage.prompts_per_step)
        for extra in range(1 + stage.dynamic_sampling):
            draws = self._choose(cursor, window.start, sum(counts.values()))
            self._sample(draws, counts, extra, f"{self.name}@{window.start}")
            if extra < stage.dynamic_sampling:
                counts = {number: self._lacking(number, 1 + extra) for number in window.numbers}
            if not sum(counts.values()):
                break
        state.after = cursor
        if not stage.targeted:
            return {}
        return {
            "curriculum/retired": state.history.share_retired(window.start, stage.drop_solved, len(self.index_of)),
            "curriculum/skipped": float(cursor.skipped),
            "curriculum/saved": cursor.skipped / (cursor.drawn + cursor.skipped),
        }

    def _choose(self, cursor: Cursor, step: int, count: int) -> Draws:
        """Choose the next `count` prompts; move the cursor on."""
        stage, seed = self.stage, self.session.config.seed
        drawn = curriculum.draw(
            self.order, cursor.position, count, self.state.history, step, stage.drop_solved, stage.difficulty, seed
        )
        cursor.position = drawn.cursor
        cursor.drawn += count
        cursor.retired += drawn.skipped_retired
        cursor.outside += drawn.skipped_outside
        train = self.session.problems["train"]
        return [(train[index], visit) for index, visit in drawn.draws]

    def _sample(self, draws: Draws, counts: dict[int, int], extra: int, policy: str) -> None:
        """Sample each batch's draws with the present policy; read back those that are on disk."""
        numbers, remaining = [number for number, count in counts.items() if count], iter(draws)
        parts = [
            (list(itertools.islice(remaining, counts[number])), shard_path(self.folder, number, extra))
            for number in numbers
        ]
        sampled = generate(self.session, self._sampler_params, parts, self.workload, policy=policy)
        for number, drawn in zip(numbers, sampled, strict=True):
            if number < min(counts) + KEPT:
                self.rounds.setdefault(number, []).append(drawn)

    def _sampler_params(self) -> Any:
        return self.session.sampler_params(self.trainer.finished_policy(), self.stage.sampling_weights)

    def _rounds(self, number: int) -> list[Sampled]:
        """Return all that was drawn for a batch of this window."""
        return self.rounds.get(number) or read_rounds(self.session, self.folder, number)

    def _lacking(self, number: int, rounds: int) -> int:
        """Count the prompts with a signal that a batch lacks after its first rounds, whatever else is on disk."""
        signal = self._batch(*together(self._rounds(number)[:rounds])).has_advantage
        return max(self.stage.prompts_per_step - int(signal.sum()), 0)

    def _batch(self, draws: Draws, groups: Groups) -> Batch:
        return batches.make(self.session.config.seed, self.stage, draws, groups, self.session.verifiable)

    # Log-probabilities of other policies

    def _score(self, number: int) -> None:
        """Compute a batch's log-probabilities under the reference and the present policy, unless they are on disk."""
        stage, file = self.stage, self._file(number)
        policies = self._wanted()
        if not policies or on_disk(self.session, [file]):
            return
        if "reference" in policies and not stage.reference_sync:
            self.reference = self.fixed_reference()
        logprobs: dict[str, np.ndarray] = {}
        with self.session.track_cost(took := Cost()):
            groups = self._batch(*together(self._rounds(number))).groups
            if self.reference is not None:
                logprobs["reference"] = self._under(self.reference, groups, took)
            if "trainer" in policies or stage.reference_sync:
                now = self._under(self.trainer.policy, groups, took)
                logprobs |= {which: now for which in policies if which not in logprobs}
        cost = took.part()
        self.others[number] = OtherLogprobs(**logprobs, cost=cost)
        data = save(logprobs, {"cost": json.dumps(cost)})
        self.session.writer.submit(lambda: storage.write_bytes(file, data))

    def _under(self, params: Decoder, groups: Sequence[Group], cost: Cost) -> np.ndarray:
        """Compute log-probabilities of all responses, one after the other, float32 [tokens]."""
        packed = self.trainer.pack(groups)
        unpacked = packed.unpack(self.session.score_logprobs(params, packed, cost, logprobs_temperature(self.stage)))
        return np.concatenate([values for group in unpacked for values in group])

    def _wanted(self) -> list[str]:
        """List the policies whose log-probabilities the loss needs beside those of the policy it trains."""
        needs = {"reference": self.stage.compares, "trainer": trains_off_policy(self.stage)}
        return [which for which, needed in needs.items() if needed]

    def _others(self, number: int) -> OtherLogprobs:
        """Return the log-probabilities of a batch under other policies, where the loss needs any."""
        if not self._wanted():
            return OtherLogprobs()
        if number not in self.others:
            file = self._file(number)
            if not on_disk(self.session, [file]):
                raise ValueError(f"{file} is gone, and what computed it too: start this stage anew")
            data = storage.read_bytes(file)
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])  # safetensors: its size, then JSON
            self.others[number] = OtherLogprobs(**load(data), cost=json.loads(header["__metadata__"]["cost"]))
        return self.others[number]

    def _file(self, number: int) -> epath.Path:
        return self.folder / "logprobs" / f"step-{number:06d}.safetensors"


def _usage(costs: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add up the figures of `USAGE`."""
    listed = list(costs)
    return {name: sum(float(cost.get(name, 0.0)) for cost in listed) for name in USAGE}
