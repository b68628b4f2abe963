"""Linear weights as codes with scales, in arrays of Google's qwix (extra `quant`): the frozen base
of QLoRA.

    int8    a byte a number; one scale for each output (Dettmers et al. 2022, arXiv:2208.07339, section 2.1)
    nf4     half a byte; one scale for every TILE inputs of an output, 4.5 bits in all (Dettmers et al. 2023,
            arXiv:2305.14314, section 3: 4-bit NormalFloat; scales there are float32 of 64 numbers,
            quantised again)

A code's value times its scale is the weight. Scales span the same numbers on every mesh, and their
greatest magnitude does not depend on the order of devices: so neither do the codes.

The codes are qwix's own, but decoded here. `qwix.dequantize` of NF4 works on the flattened array:
XLA gathers a sharded one on every device, and on a TPU it needs five times the memory. Encoding has
that cost too, since every device encodes a whole layer, but only while loading.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from g2d_jax.models.table import Param
from g2d_jax.runtime import failures

CODES = {"int8": jnp.int8, "nf4": jnp.uint4}
"""Dtypes of the codes."""

SCALES = {"int8": jnp.float32, "nf4": jnp.bfloat16}
"""Dtypes of the scales."""

TILE = 32
"""Inputs that share a scale of NF4; if it does not divide the inputs, their greatest common divisor.
With 64 the scales of 3,584 inputs could not be split over 16 devices, and each would hold them
all."""


def check(kind: str) -> None:
    """Raise ValueError for an unknown kind in lora.quantise, ImportError if qwix is not
    installed."""
    if not kind:
        return
    if kind not in CODES:
        raise ValueError(f"lora.quantise must be {' or '.join(CODES)}, or empty, got {kind!r}")
    try:
        import qwix  # noqa: F401
    except ImportError as error:
        raise failures.missing_extra(
            f"lora.quantise is {kind!r}, which needs the package qwix", "quant"
        ) from error


def is_quantised(value: Any) -> TypeGuard[Any]:
    """Return whether the value is a quantised weight: a qwix.QArray, of arrays, shapes or
    shardings."""
    qwix = sys.modules.get("qwix")
    return qwix is not None and isinstance(value, qwix.QArray)


def scale_shape(row: Param) -> tuple[int, ...]:
    """Return the shape of one layer's scales: the weight's, with fewer inputs."""
    last = row.inputs - 1
    if row.quantised == "int8":
        return (1,) * row.inputs + row.shape[row.inputs :]
    tiles = row.shape[last] // math.gcd(row.shape[last], TILE)
    return (*row.shape[:last], tiles, *row.shape[last + 1 :])


def make_parameter(
    row: Param, make: Callable[[tuple[int, ...], Any], Any], dtype: Any = None
) -> Any:
    """Build a parameter, stacked by its row: make(shape, dtype), or a QArray of its codes and
    scales."""
    if not row.quantised:
        return make(row.full_shape, dtype)
    import qwix

    codes = make(row.full_shape, CODES[row.quantised])
    scales = make((*row.stacked, *scale_shape(row)), SCALES[row.quantised])
    return qwix.QArray(codes, scales, None, row.quantised)


def encode(row: Param, weight: jax.Array) -> Any:
    """Quantise a weight, [*shape] of the row or stacked [L, *shape], of any floating-point type.
    For tracing."""
    import qwix

    before = weight.ndim - len(row.shape)
    scales = (*weight.shape[:before], *scale_shape(row))
    tiles = [size // count for size, count in zip(weight.shape, scales, strict=True)]
    alone = [axis for axis, tile in enumerate(tiles) if tile == 1]
    shared = {axis: tile for axis, tile in enumerate(tiles) if tile > 1}
    return qwix.quantize(
        weight.astype(jnp.float32),
        row.quantised,
        channelwise_axes=alone,
        tiled_axes=shared,
        calibration_method="absmax",
        scale_dtype=SCALES[row.quantised],
    )


def decode(weight: Any, dtype: jnp.dtype) -> jax.Array:
    """Compute the weight of a QArray; code times scale in float32, then in dtype. For tracing."""
    codes, scales = weight.qvalue, weight.scale.astype(jnp.float32)
    values = codes.astype(jnp.float32) if weight.qtype == "int8" else jnp.asarray(_nf4())[codes]
    whole, tiled, spread = codes.shape, [], []
    for size, count in zip(whole, scales.shape, strict=True):
        split = 1 < count < size
        tiled += [count, size // count] if split else [size]
        spread += [count, 1] if split else [count]
    return (values.reshape(tiled) * scales.reshape(spread)).astype(dtype).reshape(whole)


@functools.cache
def _nf4() -> np.ndarray:
    """Return the sixteen values of NF4 by code, float32 [16], from qwix."""
    import qwix

    with jax.ensure_compile_time_eval():
        codes, ones = jnp.arange(16).astype(jnp.uint4), jnp.ones(1, jnp.float32)
        return np.asarray(qwix.dequantize(qwix.QArray(codes, ones, None, "nf4")))
