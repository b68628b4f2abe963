"""Low-rank adapters: a Decoder whose config has `lora` holds them in its blocks, as NAME_a and
NAME_b in addition to NAME.

    policy = combine(adapters(config, key), frozen(base, config))     B is zero: it computes the same as the base
    trained, rest = partition(policy)    only `trained` has gradients, moments and checkpoints
    combine(trained, rest)               the policy again; all policies of a run share one frozen tree
    to_sampler_params(policy, dtype)     the policy for the sampler: adapters separate, as in training, since
                                         bfloat16 is too coarse for W + scale A B while B is small
    merged(value, adapter, scale)        W + scale A B of a parameter, which exports compute one layer at once

Without `lora` all parameters are trained: partition returns the model and None.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from g2d_jax.models import quantise
from g2d_jax.models.config import ModelConfig
from g2d_jax.models.decoder import Block, Decoder, build, cast, fresh, parameter, unstack
from g2d_jax.models.table import Param, block_params, outer_params, places


def adapters(config: ModelConfig, key: Array) -> Decoder:
    """Return fresh adapters, float32, A random and B zero; None for the rest. Each array's key
    comes from its name."""
    return build(config, lambda name, row: fresh(name, row, key, 0.0) if row.adapter else None)


def frozen(base: Decoder, config: ModelConfig) -> Decoder:
    """Return the frozen part of a policy with adapters: the base's own arrays, None for adapters.

    With `quantise` in the config its linear layers are quantised, one after another; the base's
    stay unchanged.
    """

    def make(name: str, row: Param) -> Any:
        if row.adapter:
            return None
        value = parameter(base, name)
        if row.quantised:
            return quantise.encode(row, value)
        return value

    return build(config, make)


def partition(model: Decoder) -> tuple[Decoder, Decoder | None]:
    """Partition the tree into (trained, rest), each with None for the other's leaves. Leaves may be
    shapes or shardings."""
    if not model.config.lora:
        return model, None

    def part(adapters: bool) -> Decoder:
        return build(
            model.config,
            lambda name, row: parameter(model, name) if row.adapter == adapters else None,
        )

    return part(True), part(False)


def combine(trained: Decoder, rest: Decoder | None) -> Decoder:
    """Combine the two trees from `partition`."""
    if rest is None:
        return trained
    return build(
        trained.config, lambda name, row: parameter(trained if row.adapter else rest, name)
    )


@partial(jax.jit, static_argnames="dtype")
def to_sampler_params(model: Decoder, dtype: jnp.dtype) -> Decoder:
    """Cast a policy to dtype, with its codes decoded."""
    config = model.config.without_codes
    return build(config, lambda name, row: _converted(row, parameter(model, name), dtype))


def to_unstacked_sampler_params(model: Decoder, dtype: jnp.dtype) -> Decoder:
    """Convert as `to_sampler_params` does, with one Block a layer. For tracing under jit.

    Codes are decoded layer by layer, so that at most one layer exists in float32 in addition to the
    result.
    """
    config = model.config.without_codes
    if not model.config.quantise:
        return unstack(cast(model, dtype))
    rows = block_params(config)
    stacks = {name: parameter(model, name) for name in rows}
    layers: list[dict[str, Array]] = []
    for number in range(model.config.num_hidden_layers):
        layer = {
            name: jax.tree.map(lambda x, place=place: x[place : place + 1], stacks[name])
            for name, place in places(rows, number).items()
        }
        if layers:
            # XLA would decode all layers at once: each layer waits for the previous one.
            layer, layers[-1] = jax.lax.optimization_barrier((layer, layers[-1]))
        converted = {name: _converted(rows[name], value, dtype) for name, value in layer.items()}
        layers.append(
            {name: jax.tree.map(lambda x: x[0], value) for name, value in converted.items()}
        )
    outer = {name: parameter(model, name).astype(dtype) for name in outer_params(config)}
    return Decoder(config, outer, nnx.List(list(map(Block, layers))))


def _converted(row: Param, value: Any, dtype: jnp.dtype) -> Any:
    """Cast a parameter to dtype, decoded if it has codes."""
    if quantise.is_quantised(value):
        return quantise.decode(value, dtype)
    return value if row.exact else value.astype(dtype)


def weight_and_adapter(model: Decoder, name: str) -> tuple[Any, tuple[Array, ...]]:
    """Return a parameter, W or its codes; and its adapter, A and B, or () if it has none. For all
    layers."""
    sides = "ab" if model.config.adapted(name) else ""
    return parameter(model, name), tuple(parameter(model, f"{name}_{side}") for side in sides)


def merged(value: Any, adapter: tuple[Array, ...], scale: float) -> Array:
    """Compute W + scale * A B, float32, of the layers of a parameter: [L, *in, *out], [L, *in,
    rank], [L, rank, *out].

    value: W, or its codes. adapter: A and B; () for a parameter without one, which is returned
    unchanged, but decoded.
    """
    if quantise.is_quantised(value):
        value = quantise.decode(value, jnp.dtype(jnp.float32))
    if not adapter:
        return value  # type: ignore[no-any-return]
    layers, rank = value.shape[0], adapter[0].shape[-1]
    a, b = (array.astype(jnp.float32) for array in adapter)
    product = jnp.einsum("lir,lro->lio", a.reshape(layers, -1, rank), b.reshape(layers, rank, -1))
    return value.astype(jnp.float32) + scale * product.reshape(value.shape)  # type: ignore[no-any-return]
