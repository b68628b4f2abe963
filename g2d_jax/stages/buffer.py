"""The batches of an online stage: at each synchronisation all rollouts up to the next one are drawn, and kept.

    synchronise:  prompts ─► rollouts of the policy as it is now ─► rewards ─► log-probs of the reference      in memory
    take:         one batch a step                                             └─► on disk, written beside ─┘

A checkpoint waits for what is being written, and a stage that is killed reads back what it needs: it goes on with the
same rollouts. No second copy of the policy is kept between synchronisations.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from etils import epath
from safetensors.numpy import load, save

from g2d_jax import processes, storage
from g2d_jax.config import Online
from g2d_jax.data import curriculum
from g2d_jax.data.packing import Group
from g2d_jax.models.decoder import Decoder
from g2d_jax.stages import batches
from g2d_jax.stages.batches import Batch
from g2d_jax.stages.cost import Cost
from g2d_jax.stages.policies import load_reference
from g2d_jax.stages.problems import train_order
from g2d_jax.stages.programs.sampling import Asked
from g2d_jax.stages.rollouts import (
    Draws,
    Generation,
    Groups,
    Sampled,
    correct,
    count_rollouts,
    generate,
    on_disk,
    prompts_at_once,
    read_sampled,
    rewards,
)
from g2d_jax.stages.runtime import Runtime
from g2d_jax.stages.trainer import Trainer

KEPT = 64  # batches of an interval that stay in memory; of a longer one the others are read back
GENERATION = ("calls", "prompts", "sampled_tokens", "sampling_seconds")  # what a shard tells of its call


@dataclass(frozen=True)
class SyncWindow:
    """The updates between two synchronisations, `start` the first of them, and their batches, `first` the first.

    Each batch serves num_iterations updates: the interval goes over its batches so many times.
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
        """The batch of update number `step`."""
        return self.first + (step - self.start) % self.batches

    def is_new(self, step: int) -> bool:
        """Whether update number `step` is the first on its batch."""
        return step - self.start < self.batches


def window_at(step: int, stage: Online) -> SyncWindow:
    """The interval of update number `step` (from 0) of stage.steps."""
    every = stage.sync_every or max(stage.steps, 1)
    start = step - step % every
    updates = min(every, stage.steps - start)
    return SyncWindow(start, updates, start // stage.num_iterations, -(-updates // stage.num_iterations))


def asked_of(runtime: Runtime, stage: Online, response: int | None = None) -> Asked:
    """What the stage asks the sampler for; a call draws as many batches of an interval as compute.generation_batch_size
    allows. response: mean tokens of a response, None: the most."""
    together = max(prompts_at_once(runtime, stage.num_generations) // stage.prompts_per_step, 1)
    together = min(together, window_at(0, stage).batches)
    batches, params = stage.steps / stage.num_iterations, runtime.sampling_params(stage.sampling)
    at_once, weights = together * stage.prompts_per_step, stage.sampling_weights
    shapes = runtime.sampling_shapes(stage, at_once, stage.num_generations, params, weights=weights)
    prompts = batches * stage.prompts_per_step
    return Asked(prompts, batches / together, stage.num_generations, shapes, params.max_new_tokens, response, weights)


def trains_off_policy(stage: Online) -> bool:
    """Whether a GRPO loss trains on rollouts of an earlier policy than its own.

    With sync_every=1 a batch is drawn, serves one update, and is gone: the policy is the one that sampled, and the old
    log-probabilities are its own, taken in the same forward pass. Else they are those of the policy at the
    synchronisation, about to take the first update on these rollouts; the trainer computes them there, since the
    sampler's differ by its arithmetic (as in TRL, which does the same where steps_per_generation or num_iterations ask
    for it; the paper has GRPO with sync_every=1 alone).
    """
    return bool((stage.loss == "grpo" or stage.grpo_coef) and stage.sync_every != 1)


def logprobs_temperature(stage: Online) -> float:
    """At which temperature other policies' log-probabilities are taken: that of the loss."""
    return float(stage.sampling.temperature) if stage.loss == "grpo" else 1.0


def shard_path(folder: epath.Path, number: int, extra: int = 0) -> epath.Path:
    """Where the rollouts of a batch lie (counted from 0): of its first round, and of those that refilled it."""
    return folder / "rollouts" / f"step-{number:06d}{f'-{extra}' if extra else ''}.parquet"


def shards(folder: epath.Path, number: int) -> list[epath.Path]:
    """The shards of a batch that are there, its first round first. All processes make the call."""

    def rounds() -> int:
        return next(extra for extra in itertools.count() if not shard_path(folder, number, extra).exists())

    return [shard_path(folder, number, extra) for extra in range(processes.once(rounds))]


def read_rounds(runtime: Runtime, folder: epath.Path, number: int) -> list[Sampled]:
    """All that was drawn for a batch, its first round first. Raises ValueError if it is not on disk."""
    runtime.writer.wait()
    rounds = [read_sampled(runtime, shard) for shard in shards(folder, number)]
    if not rounds:
        raise ValueError(f"{shard_path(folder, number)} is gone, and what sampled it too: start this stage anew")
    return rounds


def together(rounds: Sequence[Sampled]) -> tuple[Draws, Groups]:
    """What several rounds drew, and its groups."""
    return [draw for one in rounds for draw in one.draws], [group for one in rounds for group in one.groups]


@dataclass(frozen=True)
class OtherLogprobs:
    """What other policies than the one that samples make of a batch: log-probabilities of all its responses, one after
    the other, float32 [tokens], None where the loss needs none; and what they took, for `Cost.add`."""

    reference: np.ndarray | None = None
    trainer: np.ndarray | None = None
    cost: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainBatch:
    """One batch. number: its own; draws, groups: all that was drawn; batch: what is trained on; new: not before.

    costs: what its rounds, and other policies' log-probabilities, took.
    """

    number: int
    draws: Draws
    groups: Groups
    batch: Batch
    new: bool
    costs: Sequence[Mapping[str, float]]


class RolloutBuffer:
    """Batches for a Trainer."""

    def __init__(self, runtime: Runtime, name: str, stage: Online, trainer: Trainer) -> None:
        self.runtime, self.name, self.stage, self.trainer = runtime, name, stage, trainer
        self.reference: Decoder | None = None  # a fixed one, while it is in use
        self.folder = runtime.folders[name]
        self.purpose = stage.stream or f"online/{name}"
        self.order = train_order(runtime.config, runtime.problems["train"], self.purpose)
        self.places = {problem.id: place for place, problem in enumerate(runtime.problems["train"])}
        self.rounds: dict[int, list[Sampled]] = {}  # of the interval's first batches: what was drawn here
        self.others: dict[int, OtherLogprobs] = {}
        self.history = curriculum.History.from_state(trainer.extra_state.get("history", {}))
        self._mark = self._sampling = 0.0
        if self.targeted:
            trainer.live_state = lambda: {"history": self.history.state()}

    def fixed_reference(self) -> Decoder:
        """The policy that the stage began with."""
        return load_reference(self.runtime, self.stage.policy) if self.reference is None else self.reference

    @property
    def targeted(self) -> bool:
        """Whether what was seen decides what is drawn."""
        window = self.stage.difficulty
        return bool(self.stage.drop_solved.after or window.min_pass_rate != 0 or window.max_pass_rate != 1)

    def generate_window(self) -> dict[str, float]:
        """At the first update of an interval, see to it that all it trains on is on disk; metrics of generating it."""
        interval = window_at(self.trainer.step, self.stage)
        if self.trainer.step != interval.start:
            return {}
        now = time.perf_counter()
        share = {"generation/share": self._sampling / (now - self._mark)} if self._mark else {}
        self.rounds.clear()
        self.others.clear()
        metrics = self._draw(interval)
        for number in interval.numbers:
            processes.check_stop_together()
            self._score(number)
        if interval.start + interval.updates == self.stage.steps:
            self.reference = None  # it was needed for the last time
        spent = self._generation(interval.numbers)
        self._mark, self._sampling = now, spent["sampling_seconds"]
        return {
            **metrics,
            **share,  # of the interval before this one, on the clock
            "generation/prompts": spent["prompts"] / max(spent["calls"], 1e-9),
            "generation/tokens_per_second": spent["sampled_tokens"] / max(self._sampling, 1e-9),
        }

    def next_batch(self) -> TrainBatch:
        """The batch of the next update."""
        step, stage = self.trainer.step, self.stage
        interval = window_at(step, stage)
        number = interval.number(step)
        rounds, others = self._rounds(number), self._others(number)
        draws, groups = together(rounds)
        batch = self._batch(draws, groups)
        filled = batches.fill(stage, batch.groups, others.reference, others.trainer)
        costs = [*(sampled.cost for sampled in rounds), others.cost]
        return TrainBatch(number, draws, groups, replace(batch, groups=filled), interval.is_new(step), costs)

    def record_cost(self, train_batch: TrainBatch) -> None:
        """Add what a new batch once took to the tally, and what its groups got to the history."""
        trainer = self.trainer
        if not train_batch.new:
            return
        total = trainer.extra_state.setdefault("generation", dict.fromkeys(GENERATION, 0.0))
        for cost in train_batch.costs:
            trainer.tally.add(cost)
            total |= {name: total[name] + cost.get(name, 0.0) for name in GENERATION}
        count_rollouts(self.runtime, trainer.tally, train_batch.groups)
        metrics = train_batch.batch.metrics
        found = {"prompts": len(train_batch.groups), "pairs": metrics.get("pairs/prompts", 0)}
        found |= {"skipped": metrics.get("pairs/skipped", 0)}
        before = trainer.extra_state.get("counts", {})
        trainer.extra_state["counts"] = {name: before.get(name, 0) + int(number) for name, number in found.items()}
        if self.targeted:
            for (problem, _), values, known in zip(
                train_batch.draws, rewards(train_batch.groups), correct(train_batch.groups), strict=True
            ):
                self.history.update(self.places[problem.id], values, known, trainer.step)

    def summary(self) -> dict[str, int]:
        """For the manifest: prompts drawn, and what became of them."""
        extra_state, stage = self.trainer.extra_state, self.stage
        found = dict(extra_state.get("counts", {"prompts": 0, "pairs": 0, "skipped": 0}))
        if stage.loss == "grpo":
            del found["pairs"], found["skipped"]
        if self.targeted:
            at = extra_state.get("drawn", {}).get("after", {})
            found["left_out"] = at.get("retired", 0) + at.get("outside", 0)
        return {"rollouts": found["prompts"] * stage.num_generations, **found, "train_problems": len(self.places)}

    def generation(self) -> dict[str, float]:
        """For the manifest: how the rollouts came about."""
        spent = self.trainer.extra_state.get("generation", dict.fromkeys(GENERATION, 0.0))
        seconds, total = spent["sampling_seconds"], self.trainer.tally.seconds
        return {
            "calls": round(spent["calls"]),
            "prompts_per_call": spent["prompts"] / spent["calls"] if spent["calls"] else 0.0,
            "tokens_per_second": spent["sampled_tokens"] / seconds if seconds else 0.0,
            "share": seconds / total if total else 0.0,
        }

    # Making

    def _draw(self, interval: SyncWindow) -> dict[str, float]:
        """Choose and sample the prompts of an interval; with refill, more in place of those without a signal."""
        stage, extra_state = self.stage, self.trainer.extra_state
        drawn = extra_state.get("drawn", {"step": -1, "after": {"cursor": 0, "retired": 0, "outside": 0, "drawn": 0}})
        if drawn["step"] != interval.start:  # else the stage was stopped in this interval: draw the same again
            drawn = {"step": interval.start, "before": drawn["after"]}
        at = dict(drawn["before"])
        wanted = dict.fromkeys(interval.numbers, stage.prompts_per_step)
        for extra in range(1 + stage.dynamic_sampling):
            found = self._choose(at, interval.start, sum(wanted.values()))
            self._sample(found, wanted, extra, f"{self.name}@{interval.start}")
            if extra < stage.dynamic_sampling:
                wanted = {number: self._lacking(number, 1 + extra) for number in interval.numbers}
            if not sum(wanted.values()):
                break
        extra_state["drawn"] = {**drawn, "after": at}
        if not self.targeted:
            return {}
        seen = at["drawn"] + at["retired"] + at["outside"]
        return {
            "curriculum/retired": self.history.share_retired(interval.start, stage.drop_solved, len(self.places)),
            "curriculum/skipped": float(at["retired"] + at["outside"]),
            "curriculum/saved": (at["retired"] + at["outside"]) / seen,
        }

    def _choose(self, at: dict[str, int], step: int, wanted: int) -> Draws:
        """The next `wanted` prompts; moves `at` on."""
        window = self.stage.difficulty
        found = curriculum.draw(
            self.order,
            at["cursor"],
            wanted,
            self.history,
            step,
            retire_after=self.stage.drop_solved.after,
            revisit=self.stage.drop_solved.revisit,
            window=(window.min_pass_rate, window.max_pass_rate),
            outside=window.outside,
            seed=self.runtime.config.seed,
        )
        at["cursor"] = found.cursor
        at["drawn"] += wanted
        at["retired"] += found.skipped_retired
        at["outside"] += found.skipped_outside
        train = self.runtime.problems["train"]
        return [(train[index], visit) for index, visit in found.draws]

    def _sample(self, found: Draws, wanted: dict[int, int], extra: int, policy: str) -> None:
        """Sample what was chosen for each batch with the policy as it is; nothing where that is on disk."""
        first, parts = 0, []
        for number, count in wanted.items():
            if count:
                parts.append((found[first : first + count], shard_path(self.folder, number, extra)))
            first += count
        runtime, stage = self.runtime, self.stage
        there = on_disk(runtime, [shard for _, shard in parts])
        view = None if there else runtime.view(self.trainer.settled(), stage.sampling_weights)
        params, shapes = runtime.sampling_params(stage.sampling), asked_of(runtime, stage).shapes
        generation = Generation(params, stage.num_generations, shapes, self.purpose)
        sampled = generate(runtime, view, parts, generation, policy=policy)
        for number, drawn in zip((number for number, count in wanted.items() if count), sampled, strict=True):
            if number < min(wanted) + KEPT:
                self.rounds.setdefault(number, []).append(drawn)

    def _rounds(self, number: int) -> list[Sampled]:
        """All that was drawn for a batch of this interval."""
        return self.rounds.get(number) or read_rounds(self.runtime, self.folder, number)

    def _lacking(self, number: int, rounds: int) -> int:
        """How many prompts with a signal a batch lacks after its first rounds, whatever else is on disk by now."""
        signal = self._batch(*together(self._rounds(number)[:rounds])).has_advantage
        return max(self.stage.prompts_per_step - int(signal.sum()), 0)

    def _batch(self, draws: Draws, groups: Groups) -> Batch:
        return batches.make(self.runtime.config.seed, self.stage, draws, groups, self.runtime.scalar)

    # Log-probabilities of other policies

    def _score(self, number: int) -> None:
        """See to it that what the reference, and the policy as it is, make of a batch is there."""
        stage, file = self.stage, self._file(number)
        wanted = self._wanted()
        if not wanted or on_disk(self.runtime, [file]):
            return
        if "reference" in wanted and not stage.reference_sync:
            self.reference = self.fixed_reference()
        logprobs: dict[str, np.ndarray] = {}
        with self.runtime.track_cost(took := Cost()):
            groups = self._batch(*together(self._rounds(number))).groups
            if self.reference is not None:
                logprobs["reference"] = self._under(self.reference, groups, took)
            if "trainer" in wanted or stage.reference_sync:
                now = self._under(self.trainer.policy, groups, took)
                logprobs |= {which: now for which in wanted if which not in logprobs}
        cost = took.parts(1.0)
        self.others[number] = OtherLogprobs(**logprobs, cost=cost)
        data = save(logprobs, {"cost": json.dumps(cost)})
        self.runtime.writer.submit(lambda: storage.write_bytes(file, data))

    def _under(self, params: Decoder, groups: Sequence[Group], tally: Cost) -> np.ndarray:
        """Log-probabilities of all responses, one after the other, float32 [tokens]."""
        packed = self.trainer.pack(groups)
        found = packed.unpack(self.runtime.score_logprobs(params, packed, tally, logprobs_temperature(self.stage)))
        return np.concatenate([values for group in found for values in group])

    def _wanted(self) -> list[str]:
        """Whose log-probabilities the loss needs beside those of the policy it trains."""
        needs = {"reference": self.stage.compares, "trainer": trains_off_policy(self.stage)}
        return [which for which, needed in needs.items() if needed]

    def _others(self, number: int) -> OtherLogprobs:
        """What other policies make of a batch, where the loss needs any."""
        if not self._wanted():
            return OtherLogprobs()
        if number not in self.others:
            file = self._file(number)
            if not on_disk(self.runtime, [file]):
                raise ValueError(f"{file} is gone, and what computed it too: start this stage anew")
            data = storage.read_bytes(file)
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])  # safetensors: its size, then JSON
            self.others[number] = OtherLogprobs(**load(data), cost=json.loads(header["__metadata__"]["cost"]))
        return self.others[number]

    def _file(self, number: int) -> epath.Path:
        return self.folder / "logprobs" / f"step-{number:06d}.safetensors"

    def _generation(self, numbers: range) -> dict[str, float]:
        costs = [sampled.cost for number in numbers for sampled in self._rounds(number)]
        return {name: sum(float(cost.get(name, 0.0)) for cost in costs) for name in GENERATION}
