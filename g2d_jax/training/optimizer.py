"""AdamW with a learning-rate schedule, global-norm clipping and a decay mask; and where its state lies on a mesh."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from g2d_jax import mesh as meshes

Schedule = Literal["constant", "linear", "cosine"]


def make_schedule(
    learning_rate: float, *, schedule: Schedule, warmup_steps: int, total_steps: int
) -> Callable[[int | jax.Array], jax.Array]:
    """The learning rate of update number `step` (the first is 0), a float32 scalar.

    Warm-up rises by learning_rate / (warmup_steps + 1) an update and reaches the full rate at step warmup_steps, so
    that no update has rate 0. From there "linear" and "cosine" fall to 0 at total_steps: the last update, number
    total_steps - 1, still moves.
    Raises ValueError for an unknown schedule, or steps that leave no update after warm-up.
    """
    if schedule not in get_args(Schedule):
        raise ValueError(f"optimizer.schedule must be one of {', '.join(get_args(Schedule))}, got {schedule!r}")
    if warmup_steps < 0 or total_steps <= warmup_steps:
        raise ValueError(
            f"optimizer.warmup_steps ({warmup_steps}) must be at least 0 and less than the number of updates "
            f"({total_steps}): lower warmup_steps or train longer"
        )

    def rate(step: int | jax.Array) -> jax.Array:
        done = jnp.asarray(step).astype(jnp.float32)
        warm = jnp.minimum(1.0, (done + 1.0) / (warmup_steps + 1.0))
        fraction = jnp.clip((done - warmup_steps) / (total_steps - warmup_steps), 0.0, 1.0)
        decay = jnp.ones_like(fraction)
        if schedule == "linear":
            decay = 1.0 - fraction
        elif schedule == "cosine":
            decay = 0.5 * (1.0 + jnp.cos(math.pi * fraction))
        return learning_rate * warm * decay

    return rate


def make_optimizer(
    learning_rate: float,
    *,
    schedule: Schedule = "constant",
    warmup_steps: int = 0,
    total_steps: int,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    max_grad_norm: float = 1.0,
) -> tuple[optax.GradientTransformation, Callable[[int | jax.Array], jax.Array]]:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) and its schedule; the names are those of the config.

        g ← g * min(1, max_grad_norm / |g|)            |g|: L2 norm over all parameters; max_grad_norm <= 0: off
        p ← p - rate(t) * (m̂ / (√v̂ + eps) + weight_decay * p)      no decay on norms and biases

    total_steps: updates of the whole stage, not of what is left after a resume: the count lives in the state.
    Moments have the parameters' dtype: keep both float32. Raises ValueError for numbers out of range.
    """
    _check(learning_rate, b1, b2, eps, weight_decay)
    rate = make_schedule(learning_rate, schedule=schedule, warmup_steps=warmup_steps, total_steps=total_steps)
    clip = optax.clip_by_global_norm(max_grad_norm) if max_grad_norm > 0 else optax.identity()
    decay = optax.add_decayed_weights(weight_decay, mask=decay_mask) if weight_decay else optax.identity()
    adam = _promoting(optax.scale_by_adam(b1=b1, b2=b2, eps=eps))
    return optax.chain(clip, adam, decay, optax.scale_by_learning_rate(rate)), rate


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

    Moments lie like their parameters; counts are on every device. params_abstract: the parameters' tree with arrays
    or ShapeDtypeStructs; params_shardings: the same tree with NamedShardings.
    """
    state = jax.eval_shape(optimizer.init, params_abstract)

    def like_parameter(_: Any, where: NamedSharding) -> NamedSharding:
        return where

    return optax.tree_utils.tree_map_params(
        optimizer,
        like_parameter,
        state,
        params_shardings,
        transform_non_params=lambda _: meshes.replicated(mesh),
    )
