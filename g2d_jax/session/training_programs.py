"""The programs of training and scoring: run by the stages, and listed with abstract inputs and their
work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jax.sharding import Mesh

from g2d_jax import mesh as meshes
from g2d_jax.config import TrainingStage
from g2d_jax.data.packing import Group, Packed
from g2d_jax.losses.logprobs import logits_kept
from g2d_jax.models import decoder, lora
from g2d_jax.models.config import ModelConfig
from g2d_jax.models.decoder import Decoder
from g2d_jax.models.flops import forward_flops, read_params, train_flops
from g2d_jax.runtime.program_cache import Jitted, Programs
from g2d_jax.session import init_params
from g2d_jax.session.policies import reference_cast, reference_dtype
from g2d_jax.session.program import Program, Work, device_bytes, fixed
from g2d_jax.session.row_shapes import RowShape, pack_rows
from g2d_jax.session.session import Session
from g2d_jax.session.training_memory import saved_per_token
from g2d_jax.stage_result import Cost
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
    put_batch,
    put_numbers,
)


@dataclass(frozen=True)
class Training:
    """A stage's training as it is compiled: a `Trainer` runs these programs, a plan compiles them.

    objective: the configured loss; a user's own takes its place. total: updates to do. per: the
    divisor of the objective's metric sums, "tokens" or "pairs". rows: the shape of all batches.
    """

    session: Session
    name: str
    stage: TrainingStage
    objective: Objective
    _: KW_ONLY
    total: int
    per: str
    rows: RowShape

    @property
    def updates(self) -> int:
        """The updates that the schedule is made for: at least one, also where a stage does none."""
        return self.total or self.stage.optimizer.warmup_steps + 1

    @cached_property
    def rate(self) -> Callable[[int], Any]:
        """The learning rate of an update, to be read on the host."""
        return make_schedule(self.stage.optimizer, total_steps=self.updates)

    @cached_property
    def optimizer(self) -> tuple[Any, dict[str, Any]]:
        """The optimiser, and its numbers."""
        return make_optimizer(self.stage.optimizer, total_steps=self.updates)

    @cached_property
    def state(self) -> TrainState:
        """The shapes of the state in which the policy is trained."""
        return abstract_state(*self._settings)

    @property
    def _settings(self) -> tuple[ModelConfig, Any, Mesh, bool]:
        session = self.session
        offload = session.config.compute.offload_optimizer
        return session.model_config, self.optimizer[0], session.mesh, offload

    @property
    def begin(self) -> Jitted:
        """The program that makes the first state of what is trained of a policy."""
        return self.session.programs.get_or_make(make_fresh_state, *self._settings)

    @cached_property
    def step(self) -> tuple[Jitted, StepNumbers]:
        """The train step, and the numbers that it takes."""
        session, objective, programs = self.session, self.objective, self.session.programs
        own = session.objectives.get(self.name)
        # A user's own loss may look like another, so it has programs of its own.
        if own is not None:
            if self.name not in session.losses:
                session.losses[self.name] = own(session.compute), Programs()
            objective, programs = session.losses[self.name]
        structure, numbers = split(objective)
        model, optimizer, mesh, offload = self._settings
        step = programs.get_or_make(make_train_step, structure, optimizer, model, mesh, offload)
        return step, {"optimizer": self.optimizer[1], "loss": numbers}

    def pack(self, groups: Sequence[Group]) -> Packed:
        """Pack the batch of an update."""
        return pack_rows(self.session, groups, self.rows)

    def programs(
        self, groups: Sequence[Group], calls: float, resident: tuple[Any, ...] = ()
    ) -> Iterator[Program]:
        """Yield the first state, and the train step, called `calls` times on such a batch."""
        session, name = self.session, self.name
        config, _, mesh, _ = self._settings
        params, state, packed = policy_shapes(session), self.state, self.pack(groups)
        trained, rest = lora.partition(params)
        held, changed = (device_bytes(params), device_bytes(state)), device_bytes(trained)
        once = Work(1, 0.0, 2 * changed + held[1], {"parameters": held[0], "state": held[1]})
        frozen = () if rest is None else (rest,)
        yield Program(name, "fresh state", self.begin, fixed(trained), once, resident=frozen)
        remat = 1.0 if session.compute.remat in ("none", "dots") else 4 / 3
        flops = remat * train_flops(config, packed.used, packed.attended) / mesh.size
        moved = 2 * held[1] + packed.count * 3 * _weights(session)
        parts = {"parameters": held[0], "optimiser": held[1] - changed, "gradients": changed}
        parts["activations"] = activation_bytes(session, packed)
        step, numbers = self.step
        work = Work(calls, flops, moved, parts, trained=packed.used * calls)
        arguments = fixed(
            state, *abstract_batch(packed, mesh), abstract_numbers(numbers, mesh), rest
        )
        trips = min(packed.arrays["tokens"].shape[0], packed.count)
        yield Program(name, "train step", step, arguments, work, {}, trips, resident)


@dataclass(frozen=True)
class Scorer:
    """The log-probabilities of responses under policies. rows: of all batches. temperature: of the
    distribution."""

    session: Session
    rows: RowShape
    temperature: float = 1.0

    @property
    def run(self) -> Jitted:
        """The program that computes them."""
        return self.session.programs.get_or_make(make_scorer, self.session.compute)

    def pack(self, groups: Sequence[Group]) -> Packed:
        """Pack groups into these rows."""
        return pack_rows(self.session, groups, self.rows)

    def __call__(
        self, params: Decoder, groups: Sequence[Group], cost: Cost
    ) -> list[list[np.ndarray]]:
        """Compute them under a policy, float32 [T] for every response of every group; what that
        takes is added to the cost."""
        session, packed = self.session, self.pack(groups)
        cost.scored += packed.used
        cost.flops += forward_flops(session.model_config, packed.used, packed.attended)
        with session.clock.doing("logprobs"):
            temperature = put_numbers(self.temperature, session.mesh)
            logprobs, _ = self.run(params, *put_batch(packed, session.mesh), temperature)
            session.clock.settle()
            return packed.unpack(np.asarray(logprobs))

    def program(
        self,
        name: str,
        groups: Sequence[Group],
        calls: float,
        resident: tuple[Any, ...] = (),
        *,
        reference: bool = False,
    ) -> Program:
        """Return the program of a stage for a batch of these groups, under a policy or a fixed
        reference."""
        session, packed = self.session, self.pack(groups)
        params, kind = policy_shapes(session), "log-probs"
        if reference:
            params, kind = reference_shapes(session), "reference log-probs"
        flops = forward_flops(session.model_config, packed.used, packed.attended)
        moved, parts = packed.count * _weights(session), {"parameters": device_bytes(params)}
        scored = packed.used * calls
        work = Work(calls, flops / session.mesh.size, moved, parts, scored=scored)
        number = abstract_numbers(1.0, session.mesh)
        arguments = fixed(params, *abstract_batch(packed, session.mesh), number)
        return Program(name, kind, self.run, arguments, work, {}, packed.count, resident)


def reference_programs(session: Session, name: str, resident: tuple[Any, ...]) -> Iterator[Program]:
    """Yield the program that makes a reference from a policy of another dtype. resident: arrays
    beside both."""
    cast = reference_cast(session)
    if cast is not None:
        params = policy_shapes(session)
        work = Work(1, 0.0, 2 * device_bytes(params), {"parameters": device_bytes(params)})
        yield Program(name, "reference", cast, fixed(params), work, resident=resident)


def policy_shapes(session: Session) -> Any:
    """Return a policy's parameters as shapes, adapters included."""
    return decoder.abstract_on(
        session.model_config, session.mesh, init_params.base_dtype(session.config)
    )


def reference_shapes(session: Session) -> Any:
    """Return a fixed reference's parameters as shapes, adapters included: see
    `policies.load_reference`."""
    return decoder.abstract_on(session.model_config, session.mesh, reference_dtype(session))


def mean_prompt(session: Session) -> float:
    """Return the tokens of a mean prompt, for the work to be done; without problems the most."""
    if session.mean_prompt is not None:
        return session.mean_prompt
    lengths = session.problems.prompt_lengths or (session.config.data.max_prompt_length,)
    return float(np.mean(lengths))


def _weights(session: Session) -> float:
    """Count the bytes of the matrices that one pass over a micro-batch reads on a device."""
    itemsize = session.compute.dtype.itemsize
    return itemsize * read_params(session.model_config) / session.mesh.shape["tensor"]


def activation_bytes(session: Session, packed: Packed) -> int:
    """Count what a micro-batch saves for the backward pass on one device, by formula: its layers,
    see `saved_per_token`, and on a CPU logits."""
    _, rows, length = packed.arrays["tokens"].shape
    tokens = rows * length // meshes.row_ways(session.mesh)
    saved = saved_per_token(
        session.model_config, session.compute.remat, session.mesh.shape["tensor"]
    )
    logits = logits_kept(session.mesh, tokens, session.model_config.vocab_size)
    return int(tokens * saved * session.compute.dtype.itemsize) + 4 * logits
