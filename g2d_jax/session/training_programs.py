"""The programs of training and scoring, for stages to run and for plans to list with their work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from jax.sharding import Mesh
from jax.stages import Wrapped

from g2d_jax.config import TrainingStage
from g2d_jax.data.packing import Group, Packed
from g2d_jax.losses.logprobs import logits_kept
from g2d_jax.models import lora
from g2d_jax.models.config import ModelConfig
from g2d_jax.models.decoder import Decoder
from g2d_jax.models.flops import forward_flops, read_params, train_flops
from g2d_jax.runtime import mesh as meshes
from g2d_jax.runtime.mesh import device_bytes
from g2d_jax.runtime.program import Program, Work
from g2d_jax.session.policies import policy_shapes, reference_cast
from g2d_jax.session.row_shapes import RowShape, pack_rows
from g2d_jax.session.session import Session
from g2d_jax.session.stage_result import Cost
from g2d_jax.session.training_memory import saved_per_token
from g2d_jax.training.objectives import Objective, split
from g2d_jax.training.optimizer import make_optimizer, make_schedule
from g2d_jax.training.step import (
    StepNumbers,
    TrainState,
    abstract_batch,
    abstract_numbers,
    abstract_state,
    make_fresh_state,
    make_scorer,
    make_train_step,
)


@dataclass(frozen=True)
class Training:
    """The compiled form of a stage's training: a `Trainer` runs these programs, a plan compiles
    them.

    objective: the configured loss, which a user's own replaces. total: updates to do. per: the
    divisor of the objective's metric sums, "tokens" or "pairs". rows: the shape of all batches. For
    plans: fullest: builds the largest batch. share: of its tokens in a mean batch. resident: arrays
    on the devices besides the policy and its state.
    """

    session: Session
    name: str
    stage: TrainingStage
    objective: Objective
    _: KW_ONLY
    total: int
    per: str
    rows: RowShape
    fullest: Callable[[], Sequence[Group]] = list
    share: float = 1.0
    resident: tuple[Any, ...] = ()

    @property
    def updates(self) -> int:
        """The updates of the schedule: at least one, even if a stage does none."""
        return self.total or self.stage.optimizer.warmup_steps + 1

    @cached_property
    def rate(self) -> Callable[[int], Any]:
        """The learning rate by update number, for the host."""
        return make_schedule(self.stage.optimizer, total_steps=self.updates)

    @cached_property
    def optimizer(self) -> tuple[Any, dict[str, Any]]:
        """The optimiser and its hyperparameters."""
        return make_optimizer(self.stage.optimizer, total_steps=self.updates)

    @cached_property
    def state(self) -> TrainState:
        """The shapes of the train state."""
        return abstract_state(*self._settings)

    @property
    def _settings(self) -> tuple[ModelConfig, Any, Mesh, bool]:
        session = self.session
        offload = session.config.compute.offload_optimizer
        return session.model_config, self.optimizer[0], session.mesh, offload

    @cached_property
    def frozen(self) -> Decoder | None:
        """The shapes of the policy's frozen parameters."""
        _, rest = lora.partition(policy_shapes(self.session))
        return rest

    @property
    def policy(self) -> Decoder:
        """The shapes of the whole policy: `state` and `frozen`."""
        return lora.combine(self.state.params, self.frozen)

    @property
    def begin(self) -> Program:
        """The program that creates the first train state of a policy."""
        run = self.session.programs.get_or_make(make_fresh_state, *self._settings)
        trained, _ = lora.partition(policy_shapes(self.session))
        return Program("fresh state", run, (trained,))

    @cached_property
    def _step(self) -> tuple[Wrapped, StepNumbers]:
        session = self.session
        default = self.objective, session.programs
        objective, programs = session.losses.get(self.name, default)
        structure, numbers = split(objective)
        model, optimizer, mesh, offload = self._settings
        step = programs.get_or_make(make_train_step, structure, optimizer, model, mesh, offload)
        return step, {"optimizer": self.optimizer[1], "loss": numbers}

    @property
    def numbers(self) -> StepNumbers:
        """The hyperparameters that the train step accepts."""
        return self._step[1]

    def step(self, packed: Packed) -> Program:
        """Return the train step for batches of this shape."""
        run, numbers = self._step
        mesh = self.session.mesh
        batch = abstract_batch(packed, mesh)
        inputs = self.state, *batch, abstract_numbers(numbers, mesh), self.frozen
        return Program("train step", run, inputs, trips=packed.count)

    def pack(self, groups: Sequence[Group]) -> Packed:
        """Pack the batch of an update."""
        return pack_rows(self.session, groups, self.rows)

    def programs(self) -> Iterator[Program]:
        """Yield the programs of the first state, and of the step on the fullest batch, with their
        work."""
        state = device_bytes(self.state)
        yield replace(self.begin, work=Work(1, temporary=state), resident=(self.frozen,))
        if not self.total:
            return
        session, packed = self.session, self.pack(self.fullest())
        calls = self.total * self.share
        remat = 1.0 if session.compute.remat in ("none", "dots") else 4 / 3
        flops = train_flops(session.model_config, packed.used, packed.attended)
        gradients = device_bytes(self.state.params)  # accumulated, and of the current micro-batch
        work = Work(
            calls,
            remat * flops / session.mesh.size,
            2 * state + packed.count * 3 * _weights(session),
            2 * gradients + activation_bytes(session, packed),
            trained=packed.used * calls,
        )
        yield replace(self.step(packed), work=work, resident=self.resident)


@dataclass(frozen=True)
class Scorer:
    """A scorer of responses' log-probabilities under policies. rows: of all batches. temperature:
    of the distribution.

    For plans: policy: the shapes of one. is_reference: whether it is a fixed reference. fullest:
    builds the largest batch. calls: on such a batch. resident: other arrays on the devices.
    """

    session: Session
    rows: RowShape
    temperature: float = 1.0
    _: KW_ONLY
    policy: Decoder | None = None
    is_reference: bool = False
    fullest: Callable[[], Sequence[Group]] = list
    calls: float = 0.0
    resident: tuple[Any, ...] = ()

    def program(self, params: Decoder, packed: Packed) -> Program:
        """Return the program that computes the log-probabilities. params: arrays or shapes."""
        mesh = self.session.mesh
        run = self.session.programs.get_or_make(make_scorer, self.session.compute)
        inputs = params, *abstract_batch(packed, mesh), abstract_numbers(self.temperature, mesh)
        return Program("log-probs", run, inputs, trips=packed.count)

    def __call__(
        self, params: Decoder, groups: Sequence[Group], cost: Cost
    ) -> list[list[np.ndarray]]:
        """Compute log-probabilities under a policy, float32 [T] for each response of each group,
        and add their cost."""
        session, packed = self.session, pack_rows(self.session, groups, self.rows)
        cost.scored += packed.used
        cost.flops += forward_flops(session.model_config, packed.used, packed.attended)
        with session.clock.doing("logprobs"):
            run = self.program(params, packed)
            logprobs, _ = run(params, packed.arrays, packed.count, self.temperature)
            session.clock.settle()
            return packed.unpack(np.asarray(logprobs))

    def programs(self) -> Iterator[Program]:
        """Yield the program for the fullest batch, with its work. If the reference's dtype differs
        from the policy's, first yield the program that casts it."""
        if self.policy is None or not self.calls:
            return
        session, name, copy = self.session, "log-probs", device_bytes(self.policy)
        if self.is_reference:
            name = "reference log-probs"
            cast = reference_cast(session)
            if cast is not None:
                yield replace(cast, work=Work(1, temporary=copy), resident=self.resident)
        packed = pack_rows(session, self.fullest(), self.rows)
        flops = forward_flops(session.model_config, packed.used, packed.attended)
        work = Work(
            self.calls,
            flops / session.mesh.size,
            packed.count * _weights(session),
            copy,  # in the type of activations
            scored=packed.used * self.calls,
        )
        program = self.program(self.policy, packed)
        yield replace(program, name=name, work=work, resident=self.resident)


def _weights(session: Session) -> float:
    """Count the bytes of the matrices that a pass over a micro-batch reads on a device."""
    itemsize = session.compute.dtype.itemsize
    return itemsize * read_params(session.model_config) / session.mesh.shape["tensor"]


def activation_bytes(session: Session, packed: Packed) -> int:
    """Estimate the bytes that a micro-batch saves for the backward pass on one device: those of its
    layers (`saved_per_token`) and, on a CPU, logits."""
    _, rows, length = packed.arrays["tokens"].shape
    tokens = rows * length // meshes.row_ways(session.mesh)
    saved = saved_per_token(
        session.model_config, session.compute.remat, session.mesh.shape["tensor"]
    )
    logits = logits_kept(session.mesh, tokens, session.model_config.vocab_size)
    return int(tokens * saved * session.compute.dtype.itemsize) + 4 * logits
