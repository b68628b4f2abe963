"""The programs of training and scoring, with abstract inputs and their work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from g2d_jax import mesh as meshes
from g2d_jax.config import Optimizer
from g2d_jax.data.packing import Packed
from g2d_jax.models import decoder, lora
from g2d_jax.models.flops import forward_flops, matmul_params, train_flops
from g2d_jax.runtime.program_cache import Jitted
from g2d_jax.session import init_params
from g2d_jax.session.policies import reference_dtype
from g2d_jax.session.program import Program, Work, device_bytes, fixed
from g2d_jax.session.session import Session
from g2d_jax.training.dropout import with_keys
from g2d_jax.training.objectives import Objective, split
from g2d_jax.training.optimizer import make_optimizer, make_schedule
from g2d_jax.training.step import (
    StepNumbers,
    TrainState,
    abstract_batch,
    abstract_numbers,
    abstract_state,
    make_cast,
    make_fresh_state,
    make_scorer,
    make_train_step,
)


def optimizer_of(settings: Optimizer, total: int) -> tuple[Any, dict[str, Any]]:
    """Make a stage's optimiser for so many updates, and its numbers."""
    return make_optimizer(settings, total_steps=_updates(settings, total))


def schedule_of(settings: Optimizer, total: int) -> Callable[[int], Any]:
    """Make a stage's learning rate for so many updates, to be read on the host."""
    return make_schedule(settings, total_steps=_updates(settings, total))


def _updates(settings: Optimizer, total: int) -> int:
    """Return the updates that a schedule is made for: at least one, also where a stage does
    none."""
    return total or settings.warmup_steps + 1


def train_step_of(
    session: Session, name: str, settings: Optimizer, total: int, objective: Objective
) -> tuple[Jitted, StepNumbers]:
    """Return a stage's train step, and the numbers that it takes. settings, total: see
    `optimizer_of`."""
    objective, programs = session.loss_of(name, objective)
    structure, of_loss = split(objective)
    optimizer, of_optimizer = optimizer_of(settings, total)
    offload = session.config.compute.offload_optimizer
    step = programs.get_or_make(
        make_train_step, structure, optimizer, session.model_config, session.mesh, offload
    )
    return step, {"optimizer": of_optimizer, "loss": of_loss}


def policy_shapes(session: Session) -> Any:
    """Return a policy's parameters as shapes, adapters included."""
    return decoder.abstract_on(
        session.model_config, session.mesh, init_params.base_dtype(session.config)
    )


def reference_shapes(session: Session) -> Any:
    """Return a fixed reference's parameters as shapes, adapters included: see
    `policies.load_reference`."""
    return decoder.abstract_on(session.model_config, session.mesh, reference_dtype(session))


def reference_programs(
    session: Session, name: str, resident: tuple[Any, ...], calls: float = 1
) -> Iterator[Program]:
    """Yield the program that makes a reference from a policy of another dtype. resident: arrays
    beside both."""
    params, dtype = policy_shapes(session), reference_dtype(session)
    if dtype != params.embed.dtype:
        cast = session.programs.get_or_make(make_cast, session.model_config, session.mesh, dtype)
        work = Work(calls, 0.0, 2 * device_bytes(params), {"parameters": device_bytes(params)})
        yield Program(name, "reference", cast, fixed(params), work, resident=resident)


def state_shapes(session: Session, settings: Optimizer, total: int) -> TrainState:
    """Return, as shapes, the state in which a policy is trained with an optimiser of these
    settings."""
    offload = session.config.compute.offload_optimizer
    (optimizer, _) = optimizer_of(settings, total)
    return abstract_state(session.model_config, optimizer, session.mesh, offload)


def training_programs(
    session: Session,
    name: str,
    settings: Optimizer,
    total: int,
    objective: Objective,
    packed: Packed,
    calls: float,
    *,
    resident: tuple[Any, ...] = (),
) -> Iterator[Program]:
    """Yield the first state, and the train step, `calls` batches like `packed`. settings, total:
    see `optimizer_of`."""
    config, mesh = session.model_config, session.mesh
    optimizer, _ = optimizer_of(settings, total)
    params, state = policy_shapes(session), state_shapes(session, settings, total)
    trained, rest = lora.partition(params)
    held, changed = (device_bytes(params), device_bytes(state)), device_bytes(trained)
    once = Work(1, 0.0, 2 * changed + held[1], {"parameters": held[0], "state": held[1]})
    frozen = () if rest is None else (rest,)
    offload = session.config.compute.offload_optimizer
    fresh = session.programs.get_or_make(make_fresh_state, config, optimizer, mesh, offload)
    yield Program(name, "fresh state", fresh, fixed(trained), once, resident=frozen)
    remat = 1.0 if session.config.compute.remat == "none" else 4 / 3
    count = packed.arrays["tokens"].shape[0]
    flops = remat * train_flops(config, packed.used, packed.attended) / mesh.size
    weights = session.dtype.itemsize * matmul_params(config) / mesh.shape["tensor"]
    moved = 2 * held[1] + packed.count * 3 * weights
    parts = {"parameters": held[0], "optimiser": held[1] - changed, "gradients": changed}
    parts["activations"] = activation_bytes(session, packed)
    step, numbers = train_step_of(session, name, settings, total, objective)
    work = Work(calls, flops, moved, parts, trained=packed.used * calls)
    inputs = abstract_batch(with_keys(packed, config, session.config.seed, name, 0), mesh)
    arguments = fixed(state, *inputs, abstract_numbers(numbers, mesh), rest)
    yield Program(name, "train step", step, arguments, work, {}, min(count, packed.count), resident)


def logprobs(
    session: Session,
    name: str,
    packed: Packed,
    calls: float,
    resident: tuple[Any, ...],
    *,
    reference: bool = False,
) -> Program:
    """Return the program of a packed batch's log-probabilities under a policy, or a fixed
    reference."""
    params = (reference_shapes if reference else policy_shapes)(session)
    flops = forward_flops(session.model_config, packed.used, packed.attended) / session.mesh.size
    weights = (
        session.dtype.itemsize * matmul_params(session.model_config) / session.mesh.shape["tensor"]
    )
    parts = {"parameters": device_bytes(params)}
    work = Work(calls, flops, packed.count * weights, parts, scored=packed.used * calls)
    inputs = abstract_batch(packed, session.mesh)
    program = session.programs.get_or_make(make_scorer, session.compute)
    kind = "reference log-probs" if reference else "log-probs"
    arguments = fixed(params, *inputs, abstract_numbers(1.0, session.mesh))
    return Program(name, kind, program, arguments, work, {}, packed.count, resident)


def activation_bytes(session: Session, packed: Packed) -> int:
    """Count what a micro-batch's layers save for the backward pass on one device, by formula: see
    `saved_per_token`."""
    _, rows, length = packed.arrays["tokens"].shape
    tokens = rows * length // meshes.row_ways(session.mesh)
    saved = saved_per_token(
        session.model_config, session.config.compute.remat, session.mesh.shape["tensor"]
    )
    return int(tokens * saved * session.dtype.itemsize)


def saved_per_token(config: Any, remat: str, tensor: int = 1) -> float:
    """Count numbers that all layers save for each token: their input; "attention" its output too;
    "none" all factors.

    Without remat: both norms' results, queries, keys and values before and after rotation,
    attention's output, and three arrays of the feed-forward width.
    """
    e, heads, kv = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    width = heads * config.head_dim / tensor
    key_width = kv * config.head_dim / tensor
    m = config.intermediate_size
    each = {
        "full": e,
        "attention": e + width,
        "none": 4 * e + 3 * width + 3 * key_width + 3 * m / tensor,
    }[remat]
    return config.num_hidden_layers * each
