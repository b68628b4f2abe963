"""Dropout before adapters, as PEFT has it: y = x W + scale * (dropout(x) A) B, each adapter with a
mask of its own.

Every token's mask comes from its sequence's key, its position, the layer and the adapter: it is the
same in whatever row, on whatever device the token lies, and the same when a layer is computed again
for the backward pass.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

KEYS = "dropout"
"""The name of the array of keys in a batch."""

Dropout = Callable[[str, Array], Array]
"""(name of the linear layer, its input x [B, T, *in]) -> what its adapter reads, of x's shape and
dtype."""


def token_keys(keys: Array, positions: Array) -> Array:
    """Return typed keys [B, T]. keys: uint32 [B, T, 2], of each token's sequence; positions: int32
    [B, T]."""

    def token_key(data: Array, position: Array) -> Array:
        return jax.random.fold_in(jax.random.wrap_key_data(data, impl="threefry2x32"), position)

    return jax.vmap(jax.vmap(token_key))(keys, positions)


def of_layer(rate: float, keys: Array, layer: Array | int) -> Dropout:
    """Return the dropout of one layer. rate: share of the inputs that is set to 0; the others are
    divided by 1 - rate.

    keys: of `token_keys`. layer: its number, an int32 scalar.
    """
    own = jax.vmap(jax.vmap(lambda key: jax.random.fold_in(key, layer)))(keys)
    least = jnp.uint32(min(round(rate * 2**32), 2**32 - 1))  # of 32 random bits that keep a number

    def dropped(name: str, x: Array) -> Array:
        def draw(key: Array) -> Array:
            return jax.random.bits(jax.random.fold_in(key, zlib.crc32(name.encode())), x.shape[2:])

        return jnp.where(jax.vmap(jax.vmap(draw))(own) >= least, x / (1 - rate), 0)

    return dropped
