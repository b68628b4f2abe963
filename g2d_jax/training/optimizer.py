"""AdamW or Adafactor with a schedule, global-norm clipping and a decay mask; and the sharding of
their state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from g2d_jax.config import Optimizer
from g2d_jax.runtime import mesh as meshes
from g2d_jax.training.moments import scale_by_adam_bfloat16

OptimizerNumbers = Mapping[str, Any]
"""The numbers of an optimiser that are arguments of its programs: float32 scalars by setting
name."""

_OTHERS = ("eps", "max_grad_norm", "weight_decay")  # in addition to the schedule's


def make_schedule(settings: Optimizer, total_steps: int) -> Callable[[int | jax.Array], Any]:
    """Return the learning rate of update number `step` (the first is 0): a float32 scalar, of NumPy
    for an int.

    An int is computed on the host: a device would answer only after the queued updates.

    Warm-up rises by learning_rate / (warmup_steps + 1) per update and reaches the full rate at step
    warmup_steps, so that no update has rate 0. From there "linear" and "cosine" fall to
    min_lr_ratio * learning_rate at total_steps: the last update, number total_steps - 1, still
    changes the parameters. Raises ValueError if no update follows warm-up.
    """
    return partial(_rate, settings.schedule, _schedule_numbers(settings, total_steps))


def _schedule_numbers(settings: Optimizer, total_steps: int) -> dict[str, np.float32]:
    """Return the numbers of a schedule. Raises ValueError if no update follows warm-up."""
    if total_steps <= settings.warmup_steps:
        raise ValueError(
            f"optimizer.warmup_steps ({settings.warmup_steps}) must be less than the number of "
            f"updates ({total_steps}): lower warmup_steps or train longer"
        )
    names = ("learning_rate", "warmup_steps", "min_lr_ratio")
    numbers = {name: np.float32(getattr(settings, name)) for name in names}
    return numbers | {"total_steps": np.float32(total_steps)}


def _rate(schedule: str, numbers: OptimizerNumbers, step: int | jax.Array) -> Any:
    """Compute the learning rate of an update: see `make_schedule`."""
    xp: Any = np if isinstance(step, int) else jnp
    warmup_steps, low = numbers["warmup_steps"], numbers["min_lr_ratio"]
    done = xp.asarray(step).astype(xp.float32)
    warm = xp.minimum(1.0, (done + 1.0) / (warmup_steps + 1.0))
    fraction = xp.clip((done - warmup_steps) / (numbers["total_steps"] - warmup_steps), 0.0, 1.0)
    decay = xp.ones_like(fraction)
    if schedule == "linear":
        decay = 1.0 - fraction
    elif schedule == "cosine":
        decay = 0.5 * (1.0 + xp.cos(math.pi * fraction))
    return numbers["learning_rate"] * warm * (low + (1.0 - low) * decay)


def make_optimizer(
    settings: Optimizer, total_steps: int
) -> tuple[optax.GradientTransformationExtraArgs, dict[str, np.float32]]:
    """Return an optimiser, and the numbers for its update(grads, state, params, numbers=numbers).

        g ← g * min(1, max_grad_norm / |g|)            |g|: L2 norm over all parameters; max_grad_norm <= 0: off
        p ← p - rate(t) * (u + weight_decay * p)       no decay on norms and biases

    kind: "adamw" (Loshchilov and Hutter 2019, algorithm 2) has u = m̂ / (√v̂ + eps), with m and v
    in moment_dtype (see moments.py for "bfloat16"). "adafactor" (Shazeer and Stern 2018, algorithm
    4 without its relative step size, in the steps of optax) has u = g / √v with the decay 1 -
    t^-0.8. v of a matrix is factored if both sides are at least 128. The root mean square of u over
    each array, all layers together, is at most 1. b2 and eps are AdamW's alone.
    total_steps: updates of the whole stage, not those left after a resume: the state holds the
    count, which determines the rate. State in float32 has the parameters' dtype: keep them so.
    numbers: of `make_schedule`, eps, max_grad_norm and weight_decay, as float32. Settings that
    differ in these alone return the same optimiser, and so share compiled programs. Switching
    clipping or decay off changes the program. Raises as `make_schedule`.
    """
    numbers = _schedule_numbers(settings, total_steps)
    numbers |= {name: np.float32(getattr(settings, name)) for name in _OTHERS}
    # b2 stays a constant of the program: in float32, 1 - b2 has a relative error of 1e-5 for the
    # usual 0.999.
    structure = (settings.kind, settings.moment_dtype, settings.b2, settings.schedule)
    return _optimizer(*structure, settings.max_grad_norm > 0, settings.weight_decay != 0), numbers


@cache
def _optimizer(
    kind: str, moment_dtype: str, b2: float, schedule: str, clips: bool, decays: bool
) -> optax.GradientTransformationExtraArgs:
    """Return the optimiser of `make_optimizer` without its numbers."""

    def chain(numbers: OptimizerNumbers) -> optax.GradientTransformation:
        clip = decay = optax.identity()
        if clips:
            clip = optax.clip_by_global_norm(numbers["max_grad_norm"])
        if decays:
            decay = optax.add_decayed_weights(numbers["weight_decay"], mask=decay_mask)
        if kind == "adafactor":
            scaled = optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
        else:
            adam = scale_by_adam_bfloat16 if moment_dtype == "bfloat16" else optax.scale_by_adam
            scaled = adam(b1=0.9, b2=b2, eps=numbers["eps"])
        rate = partial(_rate, schedule, numbers)
        return optax.chain(clip, _promoting(scaled), decay, optax.scale_by_learning_rate(rate))

    def init(params: Any) -> Any:
        # The state holds no number, so its tree matches that of constants when a checkpoint is
        # restored.
        return chain(dict.fromkeys(_OTHERS, 0.0)).init(params)

    def update(
        updates: Any, state: Any, params: Any = None, *, numbers: OptimizerNumbers
    ) -> tuple[Any, Any]:
        return chain(numbers).update(updates, state, params)

    return optax.GradientTransformationExtraArgs(init, update)


def state_bytes(kind: str, moment_dtype: str) -> int:
    """Return the bytes of state per trained parameter: AdamW's two moments; Adafactor's factors are
    too small to count."""
    if kind != "adamw":
        return 0
    return {"float32": 8, "bfloat16": 4}[moment_dtype]


def _promoting(transform: optax.GradientTransformation) -> optax.GradientTransformation:
    """Let a transform promote dtypes. Optax raises a float to an int32 count, which
    jax_numpy_dtype_promotion="strict" (our tests) forbids."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        with jax.numpy_dtype_promotion("standard"):
            return transform.update(updates, state, params)

    return optax.GradientTransformation(transform.init, update)


def decay_mask(params: Any) -> Any:
    """Return a tree with True for arrays with weight decay: all but norms (`*norm`), biases
    (`*bias`) and the forgetting rates of recurrent layers (`decay`)."""

    def decays(path: Any, _: Any) -> bool:
        return not leaf_name(path).endswith(("norm", "bias", "decay"))

    return jax.tree_util.tree_map_with_path(decays, params)


def leaf_name(path: Any) -> str:
    """Name a leaf by its path in a tree: a Decoder's `blocks.q`, Adam's `1.mu.blocks.q`."""
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")


def abstract_opt_state(optimizer: optax.GradientTransformation, params: Any, mesh: Mesh) -> Any:
    """Return the optimiser state's tree with a ShapeDtypeStruct and its sharding in place of every
    array.

    An array of a parameter's shape is sharded like it. One with a dimension less, as Adafactor's
    factors, is sharded like the remaining dimensions; counts and the like are replicated. params:
    the parameters' tree of ShapeDtypeStructs with shardings.
    """

    def describe(x: Any, parameter: Any = None) -> Any:
        where = meshes.replicated(mesh)
        if parameter is not None:
            where = _like_parameter(x.shape, parameter)
        return x.update(sharding=where)

    state = jax.eval_shape(optimizer.init, params)
    return optax.tree_map_params(optimizer, describe, state, params, transform_non_params=describe)


def _like_parameter(shape: tuple[int, ...], parameter: Any) -> NamedSharding:
    """Return the sharding of an array of the state that belongs to a parameter."""
    where = parameter.sharding
    if shape == parameter.shape:
        return where
    axes = [*where.spec, *(None,) * (len(parameter.shape) - len(where.spec))]
    for gone in range(len(axes)):
        if shape == parameter.shape[:gone] + parameter.shape[gone + 1 :]:
            return NamedSharding(where.mesh, PartitionSpec(*axes[:gone], *axes[gone + 1 :]))
    return NamedSharding(where.mesh, PartitionSpec())
