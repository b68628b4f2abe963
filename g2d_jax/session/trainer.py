"""The optimisation of a stage: updates, metrics, checkpoints, and resumption.

The host runs a step ahead of the devices: it launches update n, and then waits for the metrics of
update n - 1. An update whose loss or gradient is not finite is skipped and counted; too many in a
row stop the run.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from etils import epath
from safetensors.numpy import save

from g2d_jax.data.packing import Group, Packed
from g2d_jax.losses import mean_metrics
from g2d_jax.models import lora
from g2d_jax.models.decoder import Decoder
from g2d_jax.models.flops import train_flops
from g2d_jax.runtime import processes, storage
from g2d_jax.runtime.tracking import Progress
from g2d_jax.session import init_params
from g2d_jax.session.extra_state import ExtraState
from g2d_jax.session.policies import frozen_params, load_policy
from g2d_jax.session.profiles import Profiler
from g2d_jax.session.session import Session, StopRun, base_of
from g2d_jax.session.stage_result import Cost, Outcome
from g2d_jax.session.training_programs import Training
from g2d_jax.training.checkpoint import Checkpoints, DamagedCheckpoint
from g2d_jax.training.step import StepNumbers, TrainState, put_numbers

_MAX_SKIPPED = 5
"""Updates in a row that are not finite, at which a run stops: one may be the batch's fault, five
are the policy's."""


@dataclass
class Trainer:
    """The optimisation side of one stage.

    pinned: steps whose checkpoints stay. frozen_params: the policy's untrained parameters. step:
    updates done, skipped ones included. cost: so far. numbers: the train step's, on the devices.
    """

    training: Training
    pinned: set[int]
    state: TrainState
    frozen_params: Decoder | None
    step: int
    cost: Cost
    extra_state: ExtraState
    checkpoints: Checkpoints
    numbers: StepNumbers
    bar: Progress
    profiler: Profiler
    _pending: tuple[int, dict[str, jax.Array], dict[str, float]] | None = None
    # of the last update whose metrics were fetched
    _last_metrics: dict[str, float] = field(default_factory=dict)
    _done_at: float = field(default_factory=time.perf_counter)  # of the last update
    _clock_then: dict[str, float] = field(default_factory=dict)  # the session's clock at that time

    def __post_init__(self) -> None:
        self.session: Session = self.training.session
        self.name: str = self.training.name
        self.total: int = self.training.total
        self._clock_then = self.session.clock.read()

    def meet_before_update(self) -> bool:
        """Synchronise with the other processes, and start or end a profile; return whether an
        update remains. Raises Preempted on a request to stop."""
        processes.note_progress(f"{self.name}, step {self.step}")
        processes.check_stop_together()
        message = self.profiler.before(self.step, self.state)
        if message:
            self.session.tracker.say(message)
        return self.step < self.total

    def update(self, groups: Sequence[Group], metrics: dict[str, float]) -> None:
        """Do one optimiser step on packed groups; log the previous step, whose metrics are ready.

        Raises StopRun at the fifth update in a row whose loss or gradient is not finite.
        """
        clock = self.session.clock
        with clock.doing("training"):
            packed = self.training.pack(groups)
            batch = packed.arrays, packed.count
            step = self.training.step(packed)
            self.state, sums = step(self.state, *batch, self.numbers, self.frozen_params)
            clock.launched("training", list(sums.values()))
            self.cost.trained += packed.used
            self.cost.flops += train_flops(self.session.model_config, packed.used, packed.attended)
            self.flush()
        extra = {
            "learning_rate": float(
                self.training.rate(self.step - self.extra_state.skipped_updates)
            ),
            "num_tokens": float(self.cost.generated + self.cost.prefilled + self.cost.trained),
        }
        self.step += 1
        self._pending = (self.step, sums, {**metrics, **extra})
        # A checkpoint has the whole cost of its step, and the batch that `_give_up` writes is that
        # of the last update.
        if self._due() or self.extra_state.skipped_in_row + 1 >= _MAX_SKIPPED:
            self.flush()
        if self.extra_state.skipped_in_row >= _MAX_SKIPPED:
            self._give_up(packed)

    @property
    def policy(self) -> Decoder:
        """The policy as it is now; the next update donates its trained parameters."""
        return lora.combine(self.state.params, self.frozen_params)

    def finished_policy(self) -> Decoder:
        """Wait for the running update, log it, and return the policy."""
        # Otherwise the wait would count as sampling, and sampling as part of the update.
        with self.session.track_cost(self.cost), self.session.clock.doing("training"):
            jax.block_until_ready(self.state.params)
            self.flush()
        return self.policy

    def flush(self) -> None:
        """Wait for the last update, fetch and log its metrics; count it if it was skipped."""
        if self._pending is None:
            return
        step, sums, metrics = self._pending
        with self.session.clock.doing("training"):
            values = {name: float(value) for name, value in jax.device_get(sums).items()}
        self._pending = None
        metrics |= self._time_spent()
        loss, norm = values.pop("loss"), values.pop("grad_norm")
        if self.extra_state.count_update(bool(values.pop("skipped"))):
            self.session.tracker.say(
                f"{self.name}: update {step} is skipped because it is not finite "
                f"({format_loss(loss, norm)}). Parameters do not change; {_MAX_SKIPPED} in a row "
                "stop the run"
            )
        metrics |= {"loss": loss, "grad_norm": norm, **mean_metrics(values, self.training.per)}
        metrics["skipped_updates"] = float(self.extra_state.skipped_updates)
        self._last_metrics = metrics
        self.session.tracker.log(self.name, step, metrics)
        self.bar.update(step, metrics)

    def _time_spent(self) -> dict[str, float]:
        """Return the seconds since the last update, or since the stage began to train, and their
        shares.

        Call it when an update is done, not when it is launched: the devices run later than the
        host.
        """
        now = time.perf_counter()
        seconds = now - self._done_at
        spent = self.session.clock.since(self._clock_then)
        self._done_at = now
        self._clock_then = self.session.clock.read()
        in_all = Cost(seconds=seconds - spent["checkpointing_seconds"])
        in_all.add(spent)
        return {
            "step_time": seconds,
            **in_all.goodput,
        }

    def _give_up(self, packed: Packed) -> None:
        """Write the batch of the last update with its metrics, and stop the run."""
        metrics = self._last_metrics
        folder = self.session.folders[self.name] / f"nonfinite-{self.step:06d}"
        record = {"stage": self.name, "step": self.step, "metrics": metrics}
        try:
            processes.on_leader(lambda: write_batch(folder, packed, record))
            where = f"Its batch and its metrics are in {folder}"
        except OSError as error:
            where = f"Its batch could not be written: {error}"
        raise StopRun(
            f"{self.name}: {self.extra_state.skipped_in_row} updates in a row were not finite, the "
            f"last of them number {self.step} "
            f"({format_loss(metrics['loss'], metrics['grad_norm'])}). {where}. Likely causes: a "
            "learning rate that is too high, rewards or reference log-probabilities that are not "
            "finite, or a model that bfloat16 is too coarse for"
        )

    def checkpoint_if_due(self) -> None:
        """Save after every checkpoint.every steps, at pinned steps and at the end.

        Call it outside `track_cost`: the cost then includes the whole step, and its seconds no
        writing.
        """
        if self._due():
            self.save()

    def _due(self) -> bool:
        return self.step % self.session.config.checkpoint.every == 0 or self.step in {
            *self.pinned,
            self.total,
        }

    def save(self) -> None:
        """Write one atomic checkpoint: parameters, optimiser, counters, cost so far."""
        self.flush()
        self.session.tracker.flush()
        if self.step in self.pinned:
            self.extra_state.costs[str(self.step)] = replace(self.cost)
        self.session.writer.wait()  # a checkpoint means that all earlier files are on disk
        host = {"cost": dataclasses.asdict(self.cost), "extra_state": self.extra_state.to_json()}
        with self._writing():
            self.checkpoints.save(
                self.step, {"params": self.state.params, "opt_state": self.state.opt_state}, host
            )

    def save_and_pin(self) -> None:
        """Save the state permanently, unless it is saved already, and wait. Call it before
        stopping."""
        self.pinned.add(self.step)
        self.save_if_new()

    def save_if_new(self) -> None:
        """Save the state unless it is saved already, and wait."""
        with self._writing():
            self.checkpoints.wait()
        if self.step not in processes.on_leader(self.checkpoints.steps):
            self.save()

    def finish(self, counts: Mapping[str, int]) -> Outcome:
        """Log the last update and wait for its checkpoint, so that the cost is complete; return the
        outcome.

        counts: of the stage's own. The outcome includes later warnings.
        """
        self.flush()
        with self._writing():
            self.checkpoints.wait()
        state = self.extra_state
        skipped = {"skipped_updates": state.skipped_updates} if state.skipped_updates else {}
        return Outcome(cost=self.cost, counts={**counts, **skipped}, warnings=state.warnings)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Count the time of a block as checkpointing, which the next checkpoint stores."""
        before = self.session.clock.read()
        with self.session.clock.doing("checkpointing"):
            yield
        self.cost.checkpointing_seconds += self.session.clock.since(before)["checkpointing_seconds"]


@contextmanager
def open_trainer(training: Training) -> Iterator[Trainer]:
    """Yield a Trainer for one stage, resumed where it stopped.

    Parameters come from this stage's newest undamaged checkpoint, else from its starting policy.
    """
    session, name, stage, total = training.session, training.name, training.stage, training.total
    folder: epath.Path = session.folders[name] / "checkpoints"
    pins = {total, *stage.kept_steps()}
    shapes = {"params": training.state.params, "opt_state": training.state.opt_state}
    resumed = restore_newest(Checkpoints(folder), shapes, name, session.tracker.say)
    if resumed is None:
        step = 0
        cost, extra_state = Cost(), ExtraState()
        state = _first_state(training)
        base = base_of(session, stage.policy)
    else:
        step, trees, host = resumed
        state = TrainState(trees["params"], trees["opt_state"])
        cost, extra_state = Cost(**host["cost"]), ExtraState.from_json(host["extra_state"])
        if step in pins:  # it may not have been pinned when it was saved
            extra_state.costs.setdefault(str(step), replace(cost))
        pins |= set(map(int, extra_state.costs))  # pinned steps stay: other stages may read them
        session.tracker.say(f"{name}: continuing after step {step} of {total}")
        base = base_of(session, name)
    # Before the first checkpoint: adapters are useless without the name of their model.
    processes.on_leader(lambda: storage.write_json(folder.parent / init_params.BASE, base))
    processes.check_stop_together()  # there is nothing to save yet
    with (
        Checkpoints(folder, keep=session.config.checkpoint.keep, pinned=pins) as checkpoints,
        session.tracker.progress(name, total, step) as bar,
        closing(Profiler(session.config.logging.window, name, session.workdir)) as profiler,
    ):
        trainer = Trainer(
            training=training,
            pinned=pins,
            state=state,
            frozen_params=frozen_params(session, base.policy),
            step=step,
            cost=cost,
            extra_state=extra_state,
            checkpoints=checkpoints,
            numbers=put_numbers(training.numbers, session.mesh),
            bar=bar,
            profiler=profiler,
        )
        if resumed is None and 0 in pins:
            trainer.save()
        try:
            yield trainer
        except processes.Preempted:
            trainer.save_if_new()
            session.tracker.say(
                f"{name}: stopped on request; saved at step {trainer.step} of {total}"
            )
            raise
        trainer.flush()
        checkpoints.wait()


def _first_state(training: Training) -> TrainState:
    """Return the state of a copy of the policy that the stage starts from.

    A separate function, so that its memory is free while the stage trains.
    """
    trained, _ = lora.partition(load_policy(training.session, training.stage.policy))
    processes.check_stop_together()  # both may need a compilation
    return training.begin(trained)


def restore_newest(
    checkpoints: Checkpoints, like: Mapping[str, Any], name: str, say: Callable[[str], None]
) -> tuple[int, dict[str, Any], dict[str, Any]] | None:
    """Restore step, trees and the host's JSON of the newest undamaged checkpoint; None if there is
    none.

    Damaged ones are moved aside, each with a message. like: as in `Checkpoints.restore`. Other
    errors are raised: another model's shapes (ValueError), a failing file system (OSError). Several
    processes call it together, and agree on damage before any of them restores.
    """
    aside = ""
    while (step := processes.on_leader(checkpoints.latest)) is not None:
        reason = _find_damage(checkpoints, step)
        if not reason:
            try:
                return step, *checkpoints.restore(step, like)
            except DamagedCheckpoint as error:
                if processes.count() > 1:  # the others are inside `restore`
                    raise
                reason = error.reason
        if aside:  # a fault of the file system damages only one
            raise DamagedCheckpoint(
                f"{name}: the checkpoint of step {step} cannot be read either "
                f"({checkpoints.damaged(step, reason)}). Two unreadable ones in a row "
                "suggest another version of Orbax or a failing file system, not damage; the newer "
                f"one is in {aside}",
                reason,
            )
        aside = processes.on_leader(lambda step=step: checkpoints.set_aside(step))  # type: ignore[misc]
        before = processes.on_leader(checkpoints.latest)
        then = "from the start of the stage"
        if before is not None:
            then = f"from step {before}, the previous checkpoint"
        say(
            f"WARNING: {name}: the checkpoint of step {step} is damaged and is not used: {reason}. It "
            f"was moved to {aside}. Continuing {then}; later steps are repeated. Check for a "
            "failing disk, or a file changed by hand"
        )
    return None


def _find_damage(checkpoints: Checkpoints, step: int) -> str:
    """Return the damage of a checkpoint, "" for none: each of several processes checks its share of
    the arrays.

    A single process finds damage by restoring.
    """
    if processes.count() == 1:
        return ""
    # Each reads alone: if one stopped inside `restore`, the others would wait.
    with processes.barrier():
        mine = checkpoints.find_damage(step, processes.index(), processes.count())
    return next(filter(None, processes.gather(mine)), "")


def write_batch(folder: epath.Path, packed: Packed, record: Mapping[str, Any]) -> None:
    """Write the batch of an update that was not finite, for inspection.

    batch.safetensors has the packed rows in use, [N, R, …]; record.json the record, and the number
    of values in each array that are not finite (all 0: the fault is in the policy or the loss).
    Raises OSError.
    """
    arrays = {}
    wrong = {}
    for name, array in packed.arrays.items():
        arrays[name] = np.ascontiguousarray(array[: packed.count])
        if array.dtype.kind == "f":
            wrong[name] = int((~np.isfinite(arrays[name])).sum())
    storage.write_bytes(folder / "batch.safetensors", save(arrays))
    storage.write_json(folder / "record.json", {**record, "nonfinite_values": wrong})


def format_loss(loss: float, grad_norm: float) -> str:
    """Format the two numbers that decide whether an update is done, for a message."""
    return f"loss {_number(loss)}, gradient norm {_number(grad_norm)}"


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "infinite" if math.isinf(value) else f"{value:.4g}"
