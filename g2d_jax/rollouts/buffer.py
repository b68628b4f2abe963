"""The batches of an online stage: at each synchronisation all rollouts up to the next one are
sampled, and stored.

    generate_window: prompts ─► rollouts of the present policy ─► rewards ─┬─► add_logprobs: under the reference,
                                                                           │   and under the policy that sampled ─┐
    next_batch: one batch a step ◄─ from memory, or read back from disk ◄──┴────── written in the background ◄────┘

A window is sampled whole, for no second copy of the policy is kept: the updates inside it change
the only one. (A server has one, and may begin a window earlier: rollouts/ahead.py.) A checkpoint
waits for what is being written, and a stage that is killed reads back what it needs, so that it
goes on with the same rollouts.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from etils import epath
from safetensors.numpy import load, save

from g2d_jax.config import Online
from g2d_jax.data import curriculum
from g2d_jax.data.packing import Group
from g2d_jax.models.decoder import Decoder
from g2d_jax.rollouts import batches
from g2d_jax.rollouts.ahead import Ahead, samples_ahead, staleness
from g2d_jax.rollouts.batches import Batch
from g2d_jax.rollouts.external import ExternalBatches
from g2d_jax.rollouts.generate import (
    Draws,
    Groups,
    Sampled,
    concat_rounds,
    correct,
    count_rollouts,
    generate,
    on_disk,
    read_sampled,
    rewards,
    rows_of,
)
from g2d_jax.rollouts.workload import Workload, workload_of
from g2d_jax.runtime import memory, processes, storage
from g2d_jax.session.extra_state import Cursor, PlannedWindow
from g2d_jax.session.policies import load_reference
from g2d_jax.session.problems import train_order
from g2d_jax.session.row_shapes import RowShape
from g2d_jax.session.session import Session
from g2d_jax.session.stage_result import Cost
from g2d_jax.session.trainer import Trainer
from g2d_jax.session.training_programs import Scorer
from g2d_jax.session.windows import SyncWindow

MAX_BATCHES_IN_MEMORY = 64
"""Batches of a window that stay in memory, with their log-probabilities; others are read back."""
FIXED, PRESENT = "fixed", "present"
"""The policies whose log-probabilities a loss may need: that which the stage began with, and that
which sampled."""
USAGE = ("calls", "prompts", "sampled_tokens", "sampling_seconds", "serving_seconds")
"""A shard's share in the figures of its call of the sampler. sampling_seconds: in which the trainer
waited for it; serving_seconds: in which a server drew, which may be others."""


def trains_off_policy(stage: Online) -> bool:
    """Return whether a GRPO loss trains on rollouts of an earlier policy than its own.

    With sync_every=1 a batch serves one update, and the policy is the one that sampled: the old
    log-probabilities are its own, taken in the same forward pass. Else they are those of the policy
    at the synchronisation. The trainer computes them there, since the sampler's differ by its
    arithmetic (TRL does the same where steps_per_generation or num_iterations ask for it; the paper
    has GRPO with sync_every=1 alone).
    """
    return stage.has_ratio and stage.sync_every != 1


def scored_under(stage: Online) -> dict[str, str]:
    """Return the log-probabilities that a stage's loss needs besides those of the policy it trains,
    each with the policy that gives them, `FIXED` or `PRESENT`.

    "reference": of the policy that the loss compares with. "trainer": of the policy that sampled,
    as the trainer computes them and not the sampler. Files of log-probabilities have these names.
    """
    needed = {}
    if stage.compares:
        needed["reference"] = FIXED if stage.has_fixed_reference else PRESENT
    if trains_off_policy(stage):
        needed["trainer"] = PRESENT
    return needed


def logprob_scorer_of(session: Session, stage: Online, rows: RowShape) -> Scorer:
    """Return what computes the log-probabilities of a stage's batches under other policies: at the
    temperature of its loss. DPO compares the distributions of the models themselves, and so does GroupDPO."""
    temperature = float(stage.sampling.temperature) if stage.loss == "grpo" else 1.0
    return Scorer(session, rows, temperature)


def shard_path(folder: epath.Path, number: int, extra: int = 0) -> epath.Path:
    """Return the file of a batch's rollouts (counted from 0), of its first round or of an `extra`
    one."""
    suffix = f"-{extra}" if extra else ""
    return folder / "rollouts" / f"step-{number:06d}{suffix}.parquet"


def shards(folder: epath.Path, number: int) -> list[epath.Path]:
    """List the shards of a batch that exist, its first round first. All processes make the call."""

    def rounds() -> int:
        count = 0
        while shard_path(folder, number, count).exists():
            count += 1
        return count

    return [shard_path(folder, number, extra) for extra in range(processes.on_leader(rounds))]


def read_rounds(session: Session, folder: epath.Path, number: int) -> list[Sampled]:
    """Read all rounds of a batch, its first one first. Raises ValueError if there is none on
    disk."""
    session.writer.wait()
    rounds = [read_sampled(session, shard) for shard in shards(folder, number)]
    if not rounds:
        raise _gone(shard_path(folder, number))
    return rounds


def _gone(file: object) -> ValueError:
    """Make the error for a file of which no policy is left to make it again."""
    return ValueError(
        f"{file} is gone, and this stage cannot make it again: put it back, or delete the folder of "
        "the stage to start it anew"
    )


@dataclass(frozen=True)
class OtherLogprobs:
    """The log-probabilities of a batch's responses under other policies than the one that is
    trained.

    reference, trainer: of all responses one after the other, float32 [tokens], None where the loss
    needs none.
    cost: of computing them, for `Cost.add`.
    """

    reference: np.ndarray | None = None
    trainer: np.ndarray | None = None
    cost: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainBatch:
    """The batch of an update.

    draws, groups: all that was sampled for it, with its scores. batch: the part to train on, whose
    own groups (packing.Group) have the loss's weights in place of scores. new: not used before.
    costs: of its rounds, and of other policies' log-probabilities.
    """

    draws: Draws
    groups: Groups
    batch: Batch
    new: bool
    costs: Sequence[Mapping[str, float]]


class RolloutBuffer:
    """The batches of an online stage's sync window, sampled ahead of their updates.

    `require_files` and `resume` before the first update; `generate_window`, `sample_ahead` and `add_logprobs` at the
    window's first update, in this order; then `next_batch` once an update, and `record_if_new` with
    what it gave. A stage that goes on within a window calls `next_batch` alone, which finds the
    batches on disk. What a resumed stage has to know, positions in the order of prompts and counts,
    is in the Trainer's extra state. Close it at the end.
    """

    def __init__(
        self, trainer: Trainer, stage: Online, external: ExternalBatches | None = None
    ) -> None:
        self.trainer = trainer
        self.stage = stage
        self.external = external
        self.session = trainer.session
        self.name = trainer.name
        self.state = trainer.extra_state
        self.folder = self.session.folders[self.name]
        train = self.session.problems.train
        self.order = train_order(self.session.config, train, f"online/{self.name}")
        self.index_of = {problem.id: index for index, problem in enumerate(train)}
        # Both of the window's first MAX_BATCHES_IN_MEMORY batches, if this start saw it begin.
        self.rounds: dict[int, list[Sampled]] = {}
        self.logprobs: dict[int, OtherLogprobs] = {}
        self.reference: Decoder | None = None
        self.logprob_scorer = logprob_scorer_of(self.session, stage, trainer.training.rows)
        # None where each window is sampled when it begins.
        self.ahead: Ahead | None = None
        if samples_ahead(self.session, stage):
            self.ahead = Ahead(trainer, stage)
        self._window_began = 0.0
        self._sampling_seconds = 0.0  # of that window, in this start
        self._serving_began = 0.0  # the server's seconds by then

    def close(self) -> None:
        """End what is sampled ahead."""
        if self.ahead is not None:
            self.ahead.close()

    def require_files(self) -> None:
        """Raise ValueError for rollouts that an earlier start trained on, and that are gone."""

        def first_gone() -> str:
            there = {file.name for file in (self.folder / "rollouts").glob("*.parquet")}
            for number, rounds in enumerate(self.state.rounds):
                for extra in range(rounds):
                    file = shard_path(self.folder, number, extra)
                    if file.name not in there:
                        return str(file)
            return ""

        file = processes.on_leader(first_gone)
        if file:
            raise _gone(file)

    def resume(self) -> None:
        """Have a server draw again what it drew ahead when an earlier start ended."""
        if self.ahead is None:
            return
        pending = self.ahead.pending()
        if pending is not None:
            window, plan = pending
            self.ahead.ask_again(plan, self._planned_parts(window, plan), self.workload)

    @cached_property
    def workload(self) -> Workload:
        """The stage's sampling."""
        return workload_of(self.session, self.name, self.stage)

    def generate_window(self, window: SyncWindow) -> dict[str, float]:
        """Sample and score a window's batches with the present policy, or take them from a dump;
        return metrics."""
        self.rounds.clear()
        self.logprobs.clear()
        if self.external is not None:  # its windows are of one batch, as the config sees to
            self.rounds[window.first_batch] = [
                self.external.batch(window.first_batch, shard_path(self.folder, window.first_batch))
            ]
            return {}
        share = self._begin_window()
        stage, state = self.stage, self.state
        # A stage that was stopped in this window chooses the same prompts again, from where it
        # stood before the window.
        if state.window != window.first_update:
            state.window = window.first_update
            state.before = state.after
        # The prompts of its first round, where a server began it ahead.
        plan: PlannedWindow | None = None
        if self.ahead is not None:
            plan = self.ahead.planned(window)
        cursor = replace(plan.after if plan else state.before)
        costs: list[Mapping[str, float]] = []
        missing = dict.fromkeys(window.batch_numbers, stage.prompts_per_step)
        # With dynamic sampling further rounds draw prompts in place of those without a signal.
        for extra in range(1 + stage.filter.dynamic_sampling):
            if extra:
                missing = {number: self._lacking(number, extra) for number in window.batch_numbers}
            if not any(missing.values()):
                break
            if plan is None or extra:
                draws = self._choose(cursor, sum(missing.values()))
                parts = self._parts(draws, missing, extra)
            else:
                parts = self._planned_parts(window, plan)
            sampled_at = window.first_update
            if self.ahead is not None and plan is not None:
                self.ahead.hold_for(plan, parts)  # which may take another policy for it
                sampled_at = plan.step
            policy = f"{self.name}@{sampled_at}"
            # One call of the sampler; a call that an earlier start ended is read back whole.
            sampled = generate(
                self.session,
                partial(self._make_sampler_params, plan),
                list(parts.values()),
                self.workload,
                policy=policy,
            )
            for number, batch in zip(parts, sampled, strict=True):
                costs.append(batch.cost)
                self._keep(window, number, batch)
        state.after = cursor
        # What the sampler had on CPUs is free, and the C library would keep it beside the updates'.
        if jax.default_backend() == "cpu":
            memory.give_back()
        return {
            **self._sampling_metrics(costs),
            **self._curriculum_metrics(cursor),
            **share,
        }

    def sample_ahead(self, window: SyncWindow) -> None:
        """Have a server begin the next window with the policy of this one's first update, if it
        samples ahead."""
        if self.ahead is None:
            return
        following = self.ahead.following(window)
        if following is None:
            return
        plan = self.ahead.planned(following)
        if plan is None:  # else an earlier start, that ended at this update, drew the prompts
            cursor = replace(self.state.after)
            count = following.batches * self.stage.prompts_per_step
            draws = self._choose(cursor, count)
            indices = [(self.index_of[problem.id], visit) for problem, visit in draws]
            plan = PlannedWindow(following.first_update, window.first_update, indices, cursor)
            self.ahead.plan(window, plan)
        self.ahead.hold_present()
        self.ahead.ask(self._planned_parts(following, plan), self.workload)

    def add_logprobs(self, window: SyncWindow) -> None:
        """Add the log-probabilities of other policies to all batches of a window, where the loss
        needs any."""
        # Now, for all batches: the next update takes the policy that sampled away, and nothing
        # keeps a copy.
        for number in window.batch_numbers:
            processes.check_stop_together()
            self._compute_logprobs(window, number)
        # A fixed reference stays from window to window, since reading it again takes long; behind
        # the last window its memory is free for the updates.
        if window.first_update + window.updates == self.stage.steps:
            self.reference = None

    def next_batch(self, window: SyncWindow) -> TrainBatch:
        """Return the batch of the next update, which is in the window."""
        number = window.batch_of(self.trainer.step)
        rounds = self._rounds(number)
        others = self._other_logprobs(number)
        draws, groups = concat_rounds(rounds)
        batch = self._batch(draws, groups)
        filled = batches.fill(self.stage, batch.groups, others.reference, others.trainer)
        costs = [*(sampled.cost for sampled in rounds), others.cost]
        return TrainBatch(
            draws, groups, replace(batch, groups=filled), window.is_new(self.trainer.step), costs
        )

    def record_if_new(self, train_batch: TrainBatch) -> None:
        """Add the cost and the counts of a batch that was not used before to the stage's, and its
        rewards to the history by which a curriculum chooses the next prompts."""
        if not train_batch.new:
            return
        cost, state = self.trainer.cost, self.state
        state.rounds.append(len(train_batch.costs) - 1)
        for part in train_batch.costs:
            cost.add(part)
        state.usage = _usage([state.usage, *train_batch.costs])
        if self.external is None:  # the tokens of a dump cost this run nothing
            count_rollouts(self.session, cost, train_batch.groups)
        counts = {"prompts": len(train_batch.groups)}
        if self.stage.is_preference_loss:
            metrics = train_batch.batch.metrics
            counts |= {
                "pairs": int(metrics["pairs/prompts"]),
                "skipped": int(metrics["pairs/skipped"]),
            }
        state.counts = {name: state.counts.get(name, 0) + number for name, number in counts.items()}
        if self.stage.filter.targets:
            outcomes = zip(
                train_batch.draws,
                rewards(train_batch.groups),
                correct(train_batch.groups),
                strict=True,
            )
            for (problem, _), values, verdicts in outcomes:
                state.history.update(self.index_of[problem.id], values, verdicts)

    def summary(self) -> dict[str, int]:
        """Return counts for the manifest: of rollouts and prompts, and of the prompts' use."""
        names = ["prompts"]
        if self.stage.is_preference_loss:
            names += ["pairs", "skipped"]
        counts = {**dict.fromkeys(names, 0), **self.state.counts}
        if self.stage.filter.targets:
            counts["left_out"] = self.state.after.skipped
        rollouts = counts["prompts"] * self.stage.num_generations
        return {"rollouts": rollouts, **counts, "train_problems": len(self.index_of)}

    def usage(self) -> dict[str, float]:
        """Return figures of the sampling for the manifest."""
        spent = _usage([self.state.usage])
        seconds = spent["sampling_seconds"]
        usage = {
            "calls": round(spent["calls"]),
            "prompts_per_call": _quotient(spent["prompts"], spent["calls"]),
            "tokens_per_second": _quotient(spent["sampled_tokens"], spent[self._drawing]),
            "share": _quotient(seconds, self.trainer.cost.seconds),
        }
        if self.session.sampling.server is not None:
            busy = _quotient(spent["serving_seconds"], self.trainer.cost.seconds)
            usage["server_idle"] = max(1 - busy, 0.0)
            usage["ahead"] = int(self.ahead is not None)
        return usage

    def staleness(self, train_batch: TrainBatch) -> dict[str, float]:
        """Return the metric of how old a batch is at this update, where that may be more than 0."""
        if self.external is not None or self.stage.sync_every == 1:
            return {}
        policies = [row.policy for row in rows_of(train_batch.groups)]
        return {"staleness": staleness(self.trainer.step, policies)}

    # Generation

    def _begin_window(self) -> dict[str, float]:
        """Return sampling's share of the time of the window before, which ends here, if this start
        saw it begin."""
        now = time.perf_counter()
        server, serving = self.session.sampling.server, 0.0
        if server is not None:
            serving = max(processes.gather(server.busy.seconds()))
        share = {}
        if self._window_began:
            passed = now - self._window_began
            share["generation/share"] = self._sampling_seconds / passed
            if server is not None:
                idle = 1 - (serving - self._serving_began) / passed
                share["generation/server_idle"] = max(idle, 0.0)
        self._window_began = now
        self._sampling_seconds = 0.0
        self._serving_began = serving
        return share

    @property
    def _drawing(self) -> str:
        """The figure of `USAGE` that has the seconds in which responses were drawn."""
        if self.session.sampling.server is None:
            return "sampling_seconds"
        return "serving_seconds"

    def _sampling_metrics(self, costs: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Return metrics of the sampling of batches with these costs."""
        spent = _usage(costs)
        rate = spent["sampled_tokens"] / max(spent[self._drawing], 1e-9)
        return {
            "generation/prompts": spent["prompts"] / max(spent["calls"], 1e-9),
            "generation/tokens_per_second": rate,
        }

    def _curriculum_metrics(self, cursor: Cursor) -> dict[str, float]:
        """Return metrics of the choice of prompts, where a stage chooses any."""
        stage, history = self.stage, self.state.history
        if not stage.filter.targets:
            return {}
        return {
            "curriculum/retired": history.share_retired(
                stage.filter.drop_solved, len(self.index_of)
            ),
            "curriculum/skipped": float(cursor.skipped),
            "curriculum/saved": cursor.skipped / (cursor.drawn + cursor.skipped),
        }

    def _choose(self, cursor: Cursor, count: int) -> Draws:
        """Choose the next `count` prompts; move the cursor on."""
        stage, seed = self.stage, self.session.config.seed
        drawn = curriculum.draw(
            self.order,
            cursor.position,
            count,
            self.state.history,
            stage.filter,
            seed,
        )
        cursor.position = drawn.cursor
        cursor.drawn += count
        cursor.retired += drawn.skipped_retired
        cursor.outside += drawn.skipped_outside
        train = self.session.problems.train
        return [(train[index], visit) for index, visit in drawn.draws]

    def _parts(
        self, draws: Draws, missing: Mapping[int, int], extra: int
    ) -> dict[int, tuple[Draws, epath.Path]]:
        """Share draws out among batches, as many as each is missing, with the shard of each."""
        remaining = iter(draws)
        parts = {}
        for number, count in missing.items():
            if count:
                own = list(itertools.islice(remaining, count))
                parts[number] = own, shard_path(self.folder, number, extra)
        return parts

    def _planned_parts(
        self, window: SyncWindow, plan: PlannedWindow
    ) -> dict[int, tuple[Draws, epath.Path]]:
        """Share the draws of a plan out among the batches of its window."""
        train = self.session.problems.train
        draws = [(train[index], visit) for index, visit in plan.draws]
        return self._parts(
            draws, dict.fromkeys(window.batch_numbers, self.stage.prompts_per_step), 0
        )

    def _keep(self, window: SyncWindow, number: int, batch: Sampled) -> None:
        """Keep what a round sampled for a batch, and count the time of sampling it."""
        if not batch.from_disk:
            self._sampling_seconds += batch.cost.get("sampling_seconds", 0.0)
        if _stays_in_memory(window, number):
            self.rounds.setdefault(number, []).append(batch)

    def _make_sampler_params(self, plan: PlannedWindow | None) -> Any:
        """Make the policy that samples ready for the engine, when the update under way is done: the
        present one, or that of a window which was begun ahead."""
        policy = self.trainer.finished_policy()
        if self.ahead is None:
            with self.session.track_cost(self.trainer.cost):
                return self.session.sampling.engine.to_sampler_params(policy)
        if plan is None:
            return self.ahead.hold_present()
        return self.ahead.hold(plan)

    def _rounds(self, number: int) -> list[Sampled]:
        """Return all that was sampled for a batch of this window."""
        return self.rounds.get(number) or read_rounds(self.session, self.folder, number)

    def _lacking(self, number: int, rounds: int) -> int:
        """Count the prompts with a signal that a batch lacks after its first rounds; more may be on
        disk."""
        signal = self._batch(*concat_rounds(self._rounds(number)[:rounds])).has_signal
        return max(self.stage.prompts_per_step - int(signal.sum()), 0)

    def _batch(self, draws: Draws, groups: Groups) -> Batch:
        return batches.make(
            self.session.config.seed, self.stage, draws, groups, self.session.config.verifiable
        )

    # Log-probabilities of other policies

    def _compute_logprobs(self, window: SyncWindow, number: int) -> None:
        """Compute a batch's log-probabilities under the policies that the loss needs, unless they
        are on disk."""
        needed = scored_under(self.stage)
        file = self._logprobs_file(number)
        if not needed or on_disk(self.session, [file]):
            return  # `next_batch` reads the file when its turn comes
        policies: dict[str, Decoder] = {}
        if FIXED in needed.values():
            if self.reference is None:
                self.reference = load_reference(self.session, self.stage.policy)
            policies[FIXED] = self.reference
        policies[PRESENT] = self.trainer.policy
        logprobs: dict[str, np.ndarray] = {}
        cost = Cost()
        with self.session.track_cost(cost):
            groups = self._batch(*concat_rounds(self._rounds(number))).groups
            for policy, params in policies.items():
                names = [name for name, under in needed.items() if under == policy]
                if names:
                    scored = self._logprobs_under(params, groups, cost)
                    logprobs |= dict.fromkeys(names, scored)
        part = cost.part()
        if _stays_in_memory(window, number):
            self.logprobs[number] = OtherLogprobs(**logprobs, cost=part)
        data = save(logprobs, {"cost": json.dumps(part)})
        self.session.writer.submit(lambda: storage.write_bytes(file, data))

    def _logprobs_under(self, params: Decoder, groups: Sequence[Group], cost: Cost) -> np.ndarray:
        """Compute log-probabilities of all responses, one after the other, float32 [tokens]."""
        logprobs = self.logprob_scorer(params, groups, cost)
        return np.concatenate(list(itertools.chain.from_iterable(logprobs)))

    def _other_logprobs(self, number: int) -> OtherLogprobs:
        """Return the log-probabilities of a batch under other policies, where the loss needs
        any."""
        if not scored_under(self.stage):
            return OtherLogprobs()
        if number in self.logprobs:
            return self.logprobs[number]
        file = self._logprobs_file(number)
        if not on_disk(self.session, [file]):
            raise _gone(file)
        data = storage.read_bytes(file)
        # safetensors.numpy gives no metadata: a file begins with the header's size, then JSON.
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return OtherLogprobs(**load(data), cost=json.loads(header["__metadata__"]["cost"]))

    def _logprobs_file(self, number: int) -> epath.Path:
        return self.folder / "logprobs" / f"step-{number:06d}.safetensors"


def _stays_in_memory(window: SyncWindow, number: int) -> bool:
    """Return whether a batch stays in memory until its updates: those far back in a long window are
    read from disk when their turn comes."""
    return number < window.first_batch + MAX_BATCHES_IN_MEMORY


def _usage(costs: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add up the figures of `USAGE`."""
    total = dict.fromkeys(USAGE, 0.0)
    for cost in costs:
        for name in USAGE:
            total[name] += cost.get(name, 0.0)
    return total


def _quotient(amount: float, of: float) -> float:
    return amount / of if of else 0.0
