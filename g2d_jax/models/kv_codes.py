"""Keys and values of a cache as int8 codes, with a float32 scale for each key head and column:
`kv_cache_dtype="int8"`.

A code times its column's scale is the number; the greatest magnitude of a column is 127 codes. A
scale is of one token alone, so a token's codes are the same whatever is cached beside it. Products
read the codes themselves: scores are multiplied by the keys' scales, weights by the values'.

Shapes: B rows, K key/value heads, D head_dim, W columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

KEY_COLUMNS, VALUE_COLUMNS = -1, -2
"""The axes of the columns in keys [..., D, W] and values [..., W, D], counted from the end."""

GREATEST = 127


class Codes(NamedTuple):
    """Keys or values as codes. codes: int8, of their shape. scales: float32 [..., 1, W], of both
    with the columns last: a TPU pads what is one wide to 128."""

    codes: Array
    scales: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the numbers that the codes stand for."""
        return self.codes.shape

    @property
    def ndim(self) -> int:
        """The number of axes of the codes."""
        return self.codes.ndim


Kept = Array | Codes
"""Keys or values as a cache keeps them."""


def encode(x: Array, columns: int) -> Codes:
    """Make codes of keys or values of any floating-point type. columns: KEY_COLUMNS or
    VALUE_COLUMNS. A column that is not finite decodes to NaN."""
    dim = KEY_COLUMNS + VALUE_COLUMNS - columns
    wide = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(wide), axis=dim, keepdims=True) / GREATEST
    codes = jnp.round(wide / jnp.where(scales == 0, 1.0, scales)).astype(jnp.int8)
    return Codes(codes, jnp.moveaxis(scales, columns, KEY_COLUMNS))


def like(kept: Kept, x: Array, columns: int) -> Kept:
    """Write numbers in the form of what is kept: as codes, or in its dtype."""
    return encode(x, columns) if isinstance(kept, Codes) else x.astype(kept.dtype)


def numbers(kept: Kept, dtype: jnp.dtype) -> Array:
    """Return what a product reads, without scales: codes in its dtype, or the array itself."""
    return kept.codes.astype(dtype) if isinstance(kept, Codes) else kept


def scaled(x: Array, kept: Kept) -> Array:
    """Multiply x [B, K, N, W], a line a query, by the scales of keys or values, if they have
    any."""
    return x * kept.scales if isinstance(kept, Codes) else x


def arrays(keys: Kept, values: Kept) -> list[Array]:
    """List the arrays of keys and values as a kernel takes them: keys, values, and the scales of
    both where they are codes."""
    if isinstance(keys, Codes) and isinstance(values, Codes):
        return [keys.codes, values.codes, keys.scales, values.scales]
    assert not isinstance(keys, Codes) and not isinstance(values, Codes)
    return [keys, values]


def parts(kept: Kept, columns: int) -> list[tuple[Array, int]]:
    """List the arrays of keys or values, each with its axis of the columns."""
    if isinstance(kept, Codes):
        return [(kept.codes, columns), (kept.scales, KEY_COLUMNS)]
    return [(kept, columns)]


def map_parts(change: Callable[..., Array], columns: int, *kept: Kept) -> Kept:
    """Apply change(*arrays, axis) to each array that keys or values consist of. columns:
    KEY_COLUMNS or VALUE_COLUMNS; axis: that of the array's columns."""
    first = kept[0]
    if not isinstance(first, Codes):
        return change(*kept, axis=columns)
    codes = change(*(part.codes for part in kept), axis=columns)  # type: ignore[union-attr]
    scales = change(*(part.scales for part in kept), axis=KEY_COLUMNS)  # type: ignore[union-attr]
    return Codes(codes, scales)
