"""AdamW or Adafactor with a schedule, global-norm clipping and a decay mask; and where their state lies on a mesh."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from g2d_jax import mesh as meshes
from g2d_jax.canonical import check_choice
from g2d_jax.training.moments import scale_by_adam_bfloat16

Schedule = Literal["constant", "linear", "cosine"]
Kind = Literal["adamw", "adafactor"]
MomentDtype = Literal["float32", "bfloat16"]


def make_schedule(
    learning_rate: float, *, schedule: Schedule, warmup_steps: int, total_steps: int, min_lr_ratio: float = 0.0
) -> Callable[[int | jax.Array], Any]:
    """The learning rate of update number `step` (the first is 0): a float32 scalar, of NumPy for an int.

    An int is the host's question, which no device is asked: it would answer when it is through with the updates before.

    Warm-up rises by learning_rate / (warmup_steps + 1) an update and reaches the full rate at step warmup_steps, so
    that no update has rate 0. From there "linear" and "cosine" fall to min_lr_ratio * learning_rate at total_steps: the
    last update, number total_steps - 1, still moves.
    Raises ValueError for an unknown schedule, steps that leave no update after warm-up, or a min_lr_ratio outside
    [0, 1] or beside "constant", which does not fall.
    """
    check_choice("optimizer.schedule", schedule, get_args(Schedule))
    if not 0.0 <= min_lr_ratio <= 1.0 or (min_lr_ratio and schedule == "constant"):
        raise ValueError(
            f"optimizer.min_lr_ratio is what a linear or cosine schedule ends at, from 0 to 1 of learning_rate, got "
            f"{min_lr_ratio} with schedule={schedule!r}"
        )
    if warmup_steps < 0 or total_steps <= warmup_steps:
        raise ValueError(
            f"optimizer.warmup_steps ({warmup_steps}) must be at least 0 and less than the number of updates "
            f"({total_steps}): lower warmup_steps or train longer"
        )

    def rate(step: int | jax.Array) -> Any:
        xp: Any = np if isinstance(step, int) else jnp
        done = xp.asarray(step).astype(xp.float32)
        warm = xp.minimum(1.0, (done + 1.0) / (warmup_steps + 1.0))
        fraction = xp.clip((done - warmup_steps) / (total_steps - warmup_steps), 0.0, 1.0)
        decay = xp.ones_like(fraction)
        if schedule == "linear":
            decay = 1.0 - fraction
        elif schedule == "cosine":
            decay = 0.5 * (1.0 + xp.cos(math.pi * fraction))
        return learning_rate * warm * (min_lr_ratio + (1.0 - min_lr_ratio) * decay)

    return rate


@cache
def make_optimizer(
    learning_rate: float,
    *,
    kind: Kind = "adamw",
    moment_dtype: MomentDtype = "float32",
    schedule: Schedule = "constant",
    warmup_steps: int = 0,
    min_lr_ratio: float = 0.0,
    total_steps: int,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    max_grad_norm: float = 1.0,
) -> tuple[optax.GradientTransformation, Callable[[int | jax.Array], Any]]:
    """An optimiser and its schedule; the names are those of the config. The same settings give the same objects.

        g ← g * min(1, max_grad_norm / |g|)            |g|: L2 norm over all parameters; max_grad_norm <= 0: off
        p ← p - rate(t) * (u + weight_decay * p)       no decay on norms and biases

    kind: "adamw" (Loshchilov and Hutter 2019, algorithm 2) has u = m̂ / (√v̂ + eps), with m and v in moment_dtype (see
    moments.py for "bfloat16"). "adafactor" (Shazeer and Stern 2018, algorithm 4 without its relative step size, in the
    steps of optax) has u = g / √v with the decay 1 - t^-0.8, v of a matrix factored where both sides are at least 128,
    and u at most 1 in root mean square over each array, all layers together; b1, b2 and eps are AdamW's alone.
    total_steps: updates of the whole stage, not of what is left after a resume: the count lives in the state.
    State in float32 has the parameters' dtype: keep them so. Raises ValueError for what is unknown or out of range.
    """
    _check(learning_rate, b1, b2, eps, weight_decay)
    _check_kind(kind, moment_dtype)
    rate = make_schedule(
        learning_rate,
        schedule=schedule,
        warmup_steps=warmup_steps,
        total_steps=total_steps,
        min_lr_ratio=min_lr_ratio,
    )
    clip = optax.clip_by_global_norm(max_grad_norm) if max_grad_norm > 0 else optax.identity()
    decay = optax.add_decayed_weights(weight_decay, mask=decay_mask) if weight_decay else optax.identity()
    if kind == "adafactor":
        scaled = optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
    elif moment_dtype == "bfloat16":
        scaled = scale_by_adam_bfloat16(b1=b1, b2=b2, eps=eps)
    else:
        scaled = optax.scale_by_adam(b1=b1, b2=b2, eps=eps)
    return optax.chain(clip, _promoting(scaled), decay, optax.scale_by_learning_rate(rate)), rate


def state_bytes(kind: str, moment_dtype: str) -> int:
    """Count the bytes of state a trained parameter: AdamW's two moments; Adafactor's factors are too small to count."""
    return {"float32": 8, "bfloat16": 4}[moment_dtype] if kind == "adamw" else 0


def _check_kind(kind: str, moment_dtype: str) -> None:
    check_choice("optimizer.kind", kind, get_args(Kind))
    check_choice("optimizer.moment_dtype", moment_dtype, get_args(MomentDtype))
    if kind == "adafactor" and moment_dtype != "float32":
        raise ValueError(
            "optimizer.moment_dtype is of AdamW's moments, and Adafactor has none of that size: leave it at float32"
        )


def _check(learning_rate: float, b1: float, b2: float, eps: float, weight_decay: float) -> None:
    for name, value, lowest, below in (
        ("learning_rate", learning_rate, 0.0, math.inf),
        ("b1", b1, 0.0, 1.0),
        ("b2", b2, 0.0, 1.0),
        ("eps", eps, 0.0, math.inf),
        ("weight_decay", weight_decay, 0.0, math.inf),
    ):
        if not lowest <= value < below:
            raise ValueError(f"optimizer.{name} must be at least {lowest:g} and less than {below:g}, got {value}")


def _promoting(transform: optax.GradientTransformation) -> optax.GradientTransformation:
    """Optax raises a float to an int32 count, which jax_numpy_dtype_promotion="strict" (our tests) forbids."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        with jax.numpy_dtype_promotion("standard"):
            return transform.update(updates, state, params)

    return optax.GradientTransformation(transform.init, update)


def decay_mask(params: Any) -> Any:
    """The tree with True for every array that weight decay applies to: all but norms (`*norm`) and biases (`*bias`)."""
    return jax.tree_util.tree_map_with_path(lambda path, _: not _leaf_name(path).endswith(("norm", "bias")), params)


def _leaf_name(path: tuple[Any, ...]) -> str:
    """The parameter's own name: nnx.Param adds no key of ours, so the last named key that is not its "value"."""
    names = [str(getattr(key, "name", getattr(key, "key", ""))) for key in path]
    return next((name for name in reversed(names) if name not in ("", "value")), "")


def opt_state_shardings(
    optimizer: optax.GradientTransformation, params_abstract: Any, params_shardings: Any, mesh: Mesh
) -> Any:
    """The optimiser state's tree with a NamedSharding in place of every array.

    What has a parameter's shape lies like it, what has one dimension less, as Adafactor's factors, like the rest of it;
    counts and the like are on every device. params_abstract: the parameters' tree with arrays or ShapeDtypeStructs;
    params_shardings: the same tree with NamedShardings.
    """
    state = jax.eval_shape(optimizer.init, params_abstract)
    whole = jax.tree.structure(params_abstract)

    def is_whole(part: Any) -> bool:
        return bool(jax.tree.structure(part) == whole)  # type: ignore[operator]

    def place(part: Any) -> Any:
        if not is_whole(part):
            return meshes.replicated(mesh)
        return jax.tree.map(partial(_like_parameter, mesh), part, params_abstract, params_shardings)

    return jax.tree.map(place, state, is_leaf=is_whole)


def _like_parameter(mesh: Mesh, part: Any, parameter: Any, where: NamedSharding) -> NamedSharding:
    """Where an array of the state lies that belongs to a parameter."""
    if part.shape == parameter.shape:
        return where
    axes = [*where.spec, *(None,) * (len(parameter.shape) - len(where.spec))]
    for gone in range(len(axes)):
        if part.shape == parameter.shape[:gone] + parameter.shape[gone + 1 :]:
            return NamedSharding(mesh, PartitionSpec(*axes[:gone], *axes[gone + 1 :]))
    return meshes.replicated(mesh)
