"""Choices by formula: over how many devices the sampler's weights are split, and how many rows decode together.

Reading the weights is shared by all rows of a decode step, so tokens a second grow with the rows, until memory is full.
Bytes are of one device unless said otherwise. Rows are split over devices, and where weights are split over `ways` of
them so are a row's key heads and its attention: a row takes the same of all devices together, whatever the ways.
"""

from __future__ import annotations

import math

from g2d_jax.models import quantise
from g2d_jax.models.config import ModelConfig
from g2d_jax.models.decoder import count_params
from g2d_jax.models.flops import matmul_params
from g2d_jax.models.table import block_params

UNKNOWN = 256
"""Rows where a platform reports no memory, as on CPUs."""

SPARE = 0.06
"""Share of the memory left for the workspace of decode and prefill beside weights and cache."""

LINK = 5.0
"""Bytes read from memory while one is sent: 4.1 on v5e and v6e, 4.6 on v5p, 7.4 on an H100 (plan/topologies.py)."""

MEAN = 0.25
"""Share of max_new_tokens that a mean response takes, assumed because rows are chosen before any response exists."""

ENOUGH = 0.9
"""Share of the best rate by formula that suffices: fewer ways wait less for each other, which it does not count."""


def kv_bytes(config: ModelConfig, itemsize: int) -> int:
    """Count the bytes of keys and values of one token in all layers."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * itemsize


def bytes_saved(config: ModelConfig, itemsize: int) -> int:
    """Count the bytes that int8 codes and their scales save of the weights that they stand for; 0 without codes."""
    rows = [row for row in block_params(config).values() if row.quantised]
    layer = sum((itemsize - 1) * math.prod(row.shape) - 4 * math.prod(quantise.scale_shape(row)) for row in rows)
    return config.num_hidden_layers * layer


def rows_that_fit(
    config: ModelConfig, itemsize: int, ways: int, devices: int, columns: int, memory: int | None, beside: int
) -> int:
    """Choose the most rows of `columns` tokens that decode together, over all devices; 0 where none fits.

    config: with the kind of codes that the weights are stored as. memory: bytes that a device's programs may use, None
    where that is not known; beside: bytes of these that other data takes meanwhile.
    """
    if memory is None:
        return UNKNOWN
    weights = (itemsize * count_params(config) - bytes_saved(config, itemsize)) / ways
    free = (1 - SPARE) * memory - beside - weights
    rows = int(max(free, 0) * devices / (columns * kv_bytes(config, itemsize)))
    parts = devices // ways * 8  # eight rows of each part at least are computed as quickly as one
    return rows // parts * parts if rows >= parts else rows


def best_ways(
    config: ModelConfig,
    itemsize: int,
    devices: int,
    columns: int,
    longest: int,
    memory: int | None,
    beside: int,
    samples: int,
) -> int:
    """Choose over how many devices weights are split: the least power of two that draws a call about as soon as any.

    longest, samples: see `quickest_rows`. Others as in `rows_that_fit`.
    """
    if memory is None:
        return 1
    ways = [2**power for power in range(devices.bit_length()) if devices % 2**power == 0]

    def rate(ways: int) -> float:
        settings = config, itemsize, ways, devices, columns
        rows = quickest_rows(*settings, longest, rows_that_fit(*settings, memory, beside), samples)
        return 1 / _call(*settings, longest, rows, samples) if rows else 0.0

    rates = {ways: rate(ways) for ways in ways}
    return next(ways for ways, rate in rates.items() if rate >= ENOUGH * max(rates.values()))


def quickest_rows(
    config: ModelConfig, itemsize: int, ways: int, devices: int, columns: int, longest: int, most: int, samples: int
) -> int:
    """Choose how many rows, at most `most`, draw a call's samples soonest: that, or a half of it again and again.

    Few rows read the weights often; many wait long for the longest response, when nearly all of them are done. longest:
    tokens of a response at most, of which a mean one is taken to have the share MEAN.
    """
    parts = devices // ways * 8
    most = min(most, -(-samples // parts) * parts)
    rows = [halved // parts * parts for power in range(most.bit_length()) if (halved := most >> power) >= parts]
    settings = config, itemsize, ways, devices, columns, longest
    return min(rows, key=lambda rows: _call(*settings, rows, samples), default=most)


def _call(
    config: ModelConfig, itemsize: int, ways: int, devices: int, columns: int, longest: int, rows: int, samples: int
) -> float:
    """Count the bytes that a device reads for a call's samples, and those that it sends as so many more."""
    weights = (itemsize * matmul_params(config) - bytes_saved(config, itemsize)) / ways
    read = weights + rows * columns / 2 * kv_bytes(config, itemsize) / devices
    hidden = rows * ways / devices * config.hidden_size * itemsize
    sent = 2 * config.num_hidden_layers * hidden * 2 * (ways - 1) / ways  # two all-reduces a layer
    steps = max(samples / rows - 1, 0) * MEAN * longest + longest
    return steps * (read + LINK * sent)
